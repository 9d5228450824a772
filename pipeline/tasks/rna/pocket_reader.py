"""`RnaPockets`: RNA pockets from a folder of AMBER files, or of structures, as atoms and terms of a force field.

    data: {source: reader, reader: "pipeline.tasks.rna.pocket_reader:RnaPockets", path: pockets/}

A pocket is `PDBID_LIGAND_modelN_rna.prmtop` with the coordinates beside it (`.inpcrd`, `.rst7`, `.crd`), and its id
`PDBID_LIGAND_modelN`: of which complex and of which ligand it is stands in its name. All models of a complex are in one
split.

A PDB or mmCIF file tells nothing of a force field: its pocket has elements and bonds by name, and 0 for charges and
every parameter; lengths, angles and what is near are as the file has them. A network that learned from topologies does
not fit such pockets: it is trained with them, or they are given a topology (tleap).

    python -m pipeline.tasks.rna.pocket_reader statistics FOLDER STATISTICS.npz      for train.options.feature_norm
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gemmi
import numpy as np

from pipeline.errors import ConfigError, DataError, PipelineError
from pipeline.graphs.bonds import Atoms, all_bonds, bond_paths, is_hydrogen
from pipeline.readers.entry import (
    PACKED,
    SCAN_AGAIN,
    UnusableEntry,
    cannot_read,
    check_option,
    checked_path,
    entry_rejection,
    opened,
)
from pipeline.records import Entry
from pipeline.structures.atoms import UnusableInput, changes, name_word, no_links, one_conformer, sites_of
from pipeline.structures.parsing.amber import TOPOLOGIES, coordinate_candidates
from pipeline.structures.parsing.read_structure import PLAIN, parse_structure
from pipeline.tasks.rna.force_field import RNA, PocketArrays, near_pairs, read_pocket

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.records import Rejection

FORMS = {".pdb": "pdb", ".ent": "pdb", ".cif": "mmcif", ".mmcif": "mmcif"}
CONSTANTS = (2, 2, 3)  # of bonds, angles and dihedrals


def read_plain_pocket(data: bytes, form: str, more_residues: Collection[str] = ()) -> PocketArrays:
    """Return the RNA of a structure file; `more_residues` are names that are RNA, too."""
    atoms = _rna_atoms(data, form, more_residues)
    bonds_B2 = all_bonds(atoms)
    heavy_A = ~is_hydrogen(atoms.element_A)
    pos_N3 = atoms.pos_A3.astype(np.float32)
    entries = {}
    for kind, width, paths_PX in zip(
        ("bonds", "angles", "dihedrals"), CONSTANTS, bond_paths(bonds_B2, len(pos_N3), len(CONSTANTS)), strict=True
    ):
        own_PX = paths_PX[heavy_A[paths_PX].all(1)].astype(np.int32)
        entries[kind] = own_PX, np.zeros((len(own_PX), width), np.float32)
    near_E2, distance_E = near_pairs(pos_N3, bonds_B2.astype(np.int32))
    constants = np.zeros((len(near_E2), 3), np.float32)
    constants[:, 2] = distance_E
    return PocketArrays(_features(atoms), pos_N3, {**entries, "near": (near_E2, constants)})


def _rna_atoms(data: bytes, form: str, more_residues: Collection[str]) -> Atoms:
    """Return the atoms of RNA, one conformer of each residue."""
    try:
        table = parse_structure(data, form, PLAIN)
    except UnusableInput as error:
        raise UnusableEntry(error.detail) from error
    names = np.array([name_word(name) for name in sorted(RNA | set(more_residues))], np.uint64)
    sites = sites_of(table)
    chosen = sites.take(np.flatnonzero(np.isin(table.resname_A[sites.first_S], names)))
    if not len(chosen.first_S):
        raise UnusableEntry("no residue is RNA; list further names in data.options.residues")
    rows_A, residue_A, _ = one_conformer(table, chosen, chosen.rows(), "highest", None)
    first_R = np.flatnonzero(changes(residue_A))
    chain_A = table.chain_A[rows_A]
    pos_A3 = table.pos_A3[rows_A]
    if not np.isfinite(pos_A3).all():
        raise UnusableEntry("a coordinate is not finite")
    return Atoms(
        pos_A3=pos_A3,
        name_A=table.name_A[rows_A],
        element_A=table.element_A[rows_A],
        residue_A=np.cumsum(changes(residue_A)) - 1,
        resname_R=table.resname_A[rows_A][first_R],
        strand_R=np.unique(chain_A, return_inverse=True)[1][first_R],
        links=no_links(),
        file_has_bonds=False,
    )


def _features(atoms: Atoms) -> NDArray[np.float32]:
    """Return charge (0: unknown), atomic number and mass of each atom."""
    if (atoms.element_A == 0).any():
        raise UnusableEntry(f"atom {int(np.argmin(atoms.element_A)) + 1} of the RNA has no element")
    number_A = np.where(is_hydrogen(atoms.element_A), 1, atoms.element_A).astype(np.float64)
    weights = {int(number): gemmi.Element(int(number)).weight for number in np.unique(number_A)}
    mass_A = [weights[int(number)] for number in number_A]
    return np.stack([np.zeros(len(number_A)), number_A, mass_A], axis=1).astype(np.float32)


TOPOLOGY, ABSENT = "topology", "absent"
GROUPS = ("complex", "ligand", "model")
SPLITS = ("train", "val", "test")
TENTH = 10
MODEL, ENDS_RNA = re.compile(r"_model\d+$"), re.compile(r"_rna$")
LEAST_DEVIATION = 1e-8


def complex_of(name: str) -> str:
    """Return the complex of a pocket: 1abc_GTP of 1abc_GTP_model3."""
    return MODEL.sub("", name)


def ligand_of(name: str) -> str:
    """Return the ligand of a pocket: GTP of 1abc_GTP_model3; the whole id where it names none."""
    of_complex = complex_of(name)
    return of_complex.partition("_")[2] or of_complex


@dataclass(frozen=True)
class RnaPockets:
    """The pockets of a folder, and of those below it, by name.

    Arrays: `atoms.feature` (charge, atomic number, mass) and `atoms.pos` float32 [N, 3]; of `bonds`, `angles`,
    `dihedrals` and `near` (pairs) each `….atom` int32 and `….constant` float32. A place is the path below the folder.
    """

    path: Path
    force_field: str = TOPOLOGY  # absent: PDB and mmCIF files, without parameters
    splits: str = ""  # JSON of three lists of ids, an absolute path; else they are drawn, 8 : 1 : 1
    split_by: str = "complex"  # what is never divided between splits that are drawn: complex, ligand or model
    divided: str = "error"  # a complex that `splits` divides between two; allow: as they have it
    residues: tuple[str, ...] = ()  # names of residues that are RNA, besides those known
    _names: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, known in (("force_field", (TOPOLOGY, ABSENT)), ("split_by", GROUPS), ("divided", ("error", "allow"))):
            check_option(name, getattr(self, name), " or ".join(known), fits=getattr(self, name) in known)
        fits = not isinstance(self.residues, str) and all(type(name) is str for name in self.residues)
        check_option("residues", self.residues, "a list of names", fits=fits)
        fits = type(self.splits) is str and (not self.splits or Path(self.splits).is_absolute())
        check_option("splits", self.splits, "an absolute path", fits=fits)
        path = checked_path(Path(self.path))
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "residues", tuple(self.residues))
        object.__setattr__(self, "_names", self._found(path))

    def _found(self, path: Path) -> tuple[str, ...]:
        """Return the files of pockets below the folder, by name."""
        endings = TOPOLOGIES if self.force_field == TOPOLOGY else tuple(FORMS)
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        here = path if path.is_dir() else path.parent
        names = tuple(str(file.relative_to(here)) for file in files if _plain_name(file.name).endswith(endings))
        if names:
            return names
        others = {_plain_name(file.name) for file in files}
        if self.force_field == TOPOLOGY and any(name.endswith(tuple(FORMS)) for name in others):
            problem = "PDB or mmCIF files, but no AMBER topologies (.prmtop, .parm7), which have charges and parameters"
            remedy = "make them with tleap (RNA.OL3), or train without: --set data.options.force_field=absent"
        else:
            problem, remedy = f"no pockets: no file ends with {', '.join(endings)}", "set data.path to their folder"
        raise ConfigError(problem, where=str(path), remedy=remedy)

    @property
    def _folder(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    def files(self) -> tuple[Path, ...]:
        """Return the files in reading order, the coordinates behind their topology."""
        paths: list[Path] = []
        for name in self._names:
            path = self._folder / name
            paths += [path, *([found] if (found := _coordinates(path)) is not None else [])]
        return (*paths, *([Path(self.splits)] if self.splits else []))

    def entries(self) -> Iterator[Entry | Rejection]:
        """Yield every pocket as an entry, or its rejection."""
        split_of = self._splits()
        for name in self._names:
            path, id_ = self._folder / name, pocket_id(name)
            split = split_of.get(id_, "")
            try:
                yield Entry(id_, name, self._pocket(path).named(), split, name)
            except UnusableEntry as error:
                yield entry_rejection(id_, error, split, path, 0)

    def read(self, place: str) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of the pocket at a place."""
        try:
            return self._pocket(self._folder / place).named()
        except UnusableEntry as error:
            problem = f"no pocket at {place}: {error}"
            raise DataError(problem, where=str(self.path), remedy=SCAN_AGAIN) from error

    def _pocket(self, path: Path) -> PocketArrays:
        if self.force_field == ABSENT:
            form = FORMS[Path(_plain_name(path.name)).suffix]
            return read_plain_pocket(_content(path), form, self.residues)
        beside = _coordinates(path)
        if beside is None:
            raise UnusableEntry(f"missing coordinates: {Path(_plain_name(path.name)).stem}.inpcrd not found")
        return read_pocket(_content(path), _content(beside), self.residues)

    def _splits(self) -> dict[str, str]:
        """Return the split of each pocket."""
        ids = [pocket_id(name) for name in self._names]
        if self.splits:
            return _told_splits(Path(self.splits), allow_divided=self.divided == "allow")
        groups: dict[str, Callable[[str], str]] = {"complex": complex_of, "ligand": ligand_of, "model": str}
        group_of = groups[self.split_by]
        return drawn_splits({id_: group_of(id_) for id_ in ids})


def pocket_id(name: str) -> str:
    """Return the id of a pocket by the name of its file."""
    return "_".join(ENDS_RNA.sub("", Path(_plain_name(Path(name).name)).stem).split())


def drawn_splits(group_of: Mapping[str, str]) -> dict[str, str]:
    """Return the split of each id: a tenth of the groups, in an order that their names decide, is test, another val."""
    groups = sorted(set(group_of.values()), key=lambda group: sha256(group.encode()).digest())
    held_out = -(-len(groups) // TENTH) if len(groups) >= len(SPLITS) else 0
    split_of = {group: SPLITS[2 - place // held_out] for place, group in enumerate(groups[: 2 * held_out])}
    return {id_: split_of.get(group, SPLITS[0]) for id_, group in group_of.items()}


def _told_splits(path: Path, *, allow_divided: bool) -> dict[str, str]:
    """Return the splits that a JSON file tells; refuse one that divides a complex, unless that is allowed."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        lists = {str(split): [str(name) for name in names] for split, names in told.items()}
    except OSError as error:
        raise cannot_read(path, error) from error
    except (ValueError, AttributeError, TypeError) as error:
        problem, remedy = (
            f"not a JSON object of id lists: {error}",
            '{"train": ["1abc_GTP_model0"], "val": [], "test": []}',
        )
        raise DataError(problem, where=str(path), remedy=remedy) from error
    split_of: dict[str, str] = {}
    of_complex: dict[str, str] = {}
    for split, names in lists.items():
        for name in names:
            split_of.setdefault(name, split)
            before = of_complex.setdefault(complex_of(name), split)
            if before != split and not allow_divided:
                problem = f"models of {complex_of(name)} are in {before} and in {split}: test data would be trained on"
                remedy = "--set data.options.splits='' (to split by complex), or --set data.options.divided=allow"
                raise ConfigError(problem, where=str(path), remedy=remedy)
    return split_of


def _plain_name(name: str) -> str:
    """Return a file's name without the ending of what is packed, its last ending in small letters."""
    plain = Path(name[: -len(PACKED)] if name.lower().endswith(PACKED) else name)
    return plain.stem + plain.suffix.lower()


def _coordinates(topology: Path) -> Path | None:
    """Return the file of coordinates beside a topology."""
    return next((path for name in coordinate_candidates(str(topology)) if (path := Path(name)).is_file()), None)


def _content(path: Path) -> bytes:
    """Return the bytes of a file, unpacked."""
    try:
        with opened(path) as file:
            return file.read()
    except DataError as error:
        raise UnusableEntry(f"{path.name} {error.what}") from error
    except OSError as error:
        raise UnusableEntry(f"{path.name} cannot be read: {error.strerror or error}") from error


def feature_statistics(reader: RnaPockets) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return mean and deviation of charge, atomic number and mass over all atoms of all pockets that can be read."""
    features = [entry.arrays["atoms.feature"] for entry in reader.entries() if isinstance(entry, Entry)]
    if not features:
        raise DataError("no pocket can be read", where=str(reader.path), remedy="pipeline submit scan")
    feature_N3 = np.concatenate(features).astype(np.float64)
    mean_3, spread_3 = feature_N3.mean(0), feature_N3.std(0)
    return mean_3.astype(np.float32), np.where(spread_3 < LEAST_DEVIATION, 1, spread_3).astype(np.float32)


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser("python -m pipeline.tasks.rna.pocket_reader")
    parser.add_argument("what", choices=("statistics",))
    parser.add_argument("folder", type=Path, help="the pockets, as in data.path")
    parser.add_argument("path", type=Path, help="the .npz file to write, for train.options.feature_norm")
    arguments = parser.parse_args(words)
    try:
        mean_3, std_3 = feature_statistics(RnaPockets(arguments.folder))
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    np.savez(arguments.path, mean=mean_3, std=std_3)
    sys.stdout.write(f"{arguments.path}: mean {mean_3.tolist()}, std {std_3.tolist()}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
