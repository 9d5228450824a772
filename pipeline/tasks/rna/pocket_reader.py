"""`RnaPockets`: RNA pockets from a folder of AMBER files, or of structures, as atoms and terms of a force field.

    data: {source: reader, reader: "pipeline.tasks.rna.pocket_reader:RnaPockets", path: pockets/}

A pocket is `PDBID_LIGAND_modelN_rna.prmtop` with the coordinates next to it (`.inpcrd`, `.rst7`, `.crd`), and its id
`PDBID_LIGAND_modelN`: the name says its complex and its ligand. All models of a complex are in one split.

Only RNA is read: ligands, ions, waters and proteins of a topology are left out, with all their terms, so that a pocket
does not reveal its ligand. Terms are scaled as RNA-3E-FFI has them. Bonds, angles and dihedrals are those without
hydrogen, as the topology lists them; every term of a dihedral is one of its own, impropers too. Pairs near each other
are all others within 4 Å that no bond joins, with hydrogen as well.

A PDB or mmCIF file has no force field: its pocket has elements and bonds by name, and 0 for charges and every
parameter; lengths, angles and near pairs are as the file has them. A network that learned from topologies does not fit
such pockets: train it with them, or give them a topology (tleap).

    python -m pipeline.tasks.rna.pocket_reader statistics FOLDER STATISTICS.npz      for train.options.feature_norm

Shapes: A atoms of a topology, R its residues, N atoms of RNA, E entries of one kind, P atoms of an entry, K parameters
of a kind.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gemmi
import numpy as np
from scipy.spatial import cKDTree

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
from pipeline.structures.parsing.amber import (
    NUCLEOTIDES,
    TOPOLOGIES,
    coordinate_candidates,
    first_atoms,
    read_lengths,
    read_lists,
    read_numbers,
    read_positions,
    read_words,
)
from pipeline.structures.parsing.read_structure import PLAIN, parse_structure

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.records import Rejection

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

CHARGE_UNIT = 18.2223  # of the charges in a topology, to one elementary charge
NEAR = 4.0  # Å
ONE_PLACE = 0.1  # Å: atoms no farther apart have the same position
DEGREES = 180 / math.pi
LENGTH, STIFFNESS, ANGLE, BEND, BARRIER, FOLD, PHASE = 2.0, 500.0, 180.0, 200.0, 20.0, 6.0, 6.28318
MODIFIED = ("PSU", "I", "M2G", "M7G", "OMC", "OMG", "5MU", "5MC", "1MA", "2MG", "6MA", "URA", "GUA", "ADE", "CYT")
RNA = frozenset({*(name for name, base in NUCLEOTIDES.items() if not base.startswith("D")), *"ACGU", *MODIFIED})
ELEMENTS = 118
ATOMS, TYPES, RESIDUES = 0, 1, 11  # of POINTERS
_BOND = (("BOND_EQUIL_VALUE", 1, LENGTH), ("BOND_FORCE_CONSTANT", 1, STIFFNESS))
# Of each kind its list, the atoms of an entry, and its parameters: name, factor, divisor.
TERMS: dict[str, tuple[str, int, tuple[tuple[str, float, float], ...]]] = {
    "bonds": ("BONDS_WITHOUT_HYDROGEN", 2, _BOND),
    "angles": (
        "ANGLES_WITHOUT_HYDROGEN", 3, (("ANGLE_EQUIL_VALUE", DEGREES, ANGLE), ("ANGLE_FORCE_CONSTANT", 1, BEND))
    ),
    "dihedrals": (
        "DIHEDRALS_WITHOUT_HYDROGEN", 4,
        (("DIHEDRAL_FORCE_CONSTANT", 1, BARRIER), ("DIHEDRAL_PERIODICITY", 1, FOLD),
         ("DIHEDRAL_PHASE", DEGREES, PHASE)),  # degrees, as published weights need them
    ),
    "hydrogens": ("BONDS_INC_HYDROGEN", 2, _BOND),  # no entries, but no near pairs either
}  # fmt: skip
# Numbers of POINTERS that lists are as long as, and times what.
LENGTHS = {
    **dict.fromkeys(("CHARGE", "ATOMIC_NUMBER", "MASS", "ATOM_TYPE_INDEX"), (ATOMS, 1)),
    "RESIDUE_POINTER": (RESIDUES, 1),
    **{
        name: (pointer, 1)
        for pointer, kind in ((15, "bonds"), (16, "angles"), (17, "dihedrals"))
        for name, _, _ in TERMS[kind][2]
    },
    **{
        TERMS[kind][0]: (pointer, TERMS[kind][1] + 1)
        for pointer, kind in ((12, "bonds"), (2, "hydrogens"), (13, "angles"), (14, "dihedrals"))
    },
}
KINDS = ("bonds", "angles", "dihedrals")


def _arrays(feature_N3: Any, pos_N3: Any, entries: Mapping[str, tuple[Any, Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of a pocket: features, positions, and of entries by kind atoms [E, P] and parameters [E, K].

    Near pairs, like bonds, are listed once, the lower atom first, and run both ways in the network.
    """
    found = {"atoms.feature": feature_N3, "atoms.pos": pos_N3}
    for kind, (atom_EP, constant_EK) in entries.items():
        found |= {f"{kind}.atom": atom_EP, f"{kind}.constant": constant_EK}
    return found


def read_pocket(topology: bytes, coordinates: bytes, more_residues: Collection[str] = ()) -> dict[str, NDArray[Any]]:
    """Return the arrays of the RNA of a topology at its coordinates; `more_residues` are names that are RNA, too."""
    try:
        sections = _sections(topology)
        kept_A = _is_rna(sections, more_residues)
        feature_A3 = _features(sections, kept_A)
        pos_A3 = read_positions(coordinates, len(kept_A))
    except UnusableInput as error:
        raise UnusableEntry(error.detail) from error
    pos_N3 = pos_A3[kept_A].astype(np.float32)
    if not np.isfinite(pos_N3).all():
        atom = int(np.flatnonzero(kept_A)[int(np.argmin(np.isfinite(pos_N3).all(1)))])
        raise UnusableEntry(f"the coordinates of atom {atom + 1} are not finite")
    number_A = np.where(kept_A, np.cumsum(kept_A) - 1, -1)
    entries = {kind: _term(sections, kind, number_A) for kind in KINDS}
    bonded_B2 = np.concatenate([entries["bonds"][0], _term(sections, "hydrogens", number_A)[0]])
    type_N = sections["ATOM_TYPE_INDEX"].astype(np.int64)[kept_A]
    near_E2, distance_E = near_pairs(pos_N3, bonded_B2)
    constants = np.column_stack([_coefficients(sections, type_N[near_E2]), distance_E]).astype(np.float32)
    return _arrays(feature_A3[kept_A].astype(np.float32), pos_N3, {**entries, "near": (near_E2, constants)})


# ---- the topology ----


def _sections(data: bytes) -> dict[str, Any]:
    """Return the lists of a topology that are needed: numbers, and the labels of residues."""
    lists = read_lists(data)
    pointers, lengths = read_lengths(lists, LENGTHS)
    lengths["NONBONDED_PARM_INDEX"] = int(pointers[TYPES]) ** 2
    lengths["LENNARD_JONES_ACOEF"] = lengths["LENNARD_JONES_BCOEF"] = int(pointers[TYPES] * (pointers[TYPES] + 1) // 2)
    sections: dict[str, Any] = {name: read_numbers(lists, name, length) for name, length in lengths.items()}
    sections["RESIDUE_LABEL"] = read_words(lists, "RESIDUE_LABEL", int(pointers[RESIDUES]))
    if not pointers[ATOMS] or not pointers[RESIDUES]:
        raise UnusableEntry("the topology has no atoms")
    return sections


def _is_rna(sections: Mapping[str, Any], more_residues: Collection[str]) -> NDArray[np.bool_]:
    """Return a mask of the atoms of RNA."""
    atoms = len(sections["CHARGE"])
    first_R = first_atoms(sections["RESIDUE_POINTER"], atoms)
    known, labels = RNA | set(more_residues), sections["RESIDUE_LABEL"]
    is_rna_R = np.array([label in known for label in labels])
    if len(labels) != len(first_R) or not is_rna_R.any():
        names = ", ".join(dict.fromkeys(labels)) or "none"
        raise UnusableEntry(f"no residue is RNA: {names[:80]}; list further names in data.options.residues")
    return np.repeat(is_rna_R, np.diff(first_R, append=atoms))


def _features(sections: Mapping[str, Any], kept_A: NDArray[np.bool_]) -> Floats:
    """Return charge, atomic number and mass of each atom."""
    number_A, mass_A = sections["ATOMIC_NUMBER"], sections["MASS"]
    wrong_A = kept_A & ~((number_A >= 1) & (number_A <= ELEMENTS) & (mass_A > 0))
    if wrong_A.any():
        atom = int(np.argmax(wrong_A))
        raise UnusableEntry(f"atom {atom + 1} has the atomic number {number_A[atom]:g} and the mass {mass_A[atom]:g}")
    return np.stack([sections["CHARGE"] / CHARGE_UNIT, number_A, mass_A], axis=1)


# ---- terms ----


def _term(sections: Mapping[str, Any], kind: str, number_A: Integers) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the entries of a kind between atoms of RNA, and their scaled parameters."""
    name, width, parameters = TERMS[kind]
    rows = sections[name].astype(np.int64).reshape(-1, width + 1)
    atom_EP, parameter_E = np.abs(rows[:, :-1]) // 3, rows[:, -1] - 1  # below 0: an improper, or no 1-4 pair
    _check_places(name, atom_EP, len(number_A), "atom")
    values = np.stack([sections[parameter] * factor / divisor for parameter, factor, divisor in parameters], axis=1)
    _check_places(name, parameter_E[:, None], len(values), "parameter")
    own_EP = number_A[atom_EP]
    is_kept_E = (own_EP >= 0).all(1)
    return own_EP[is_kept_E].astype(np.int32), values[parameter_E[is_kept_E]].astype(np.float32)


def _check_places(name: str, place_EX: Integers, most: int, what: str) -> None:
    wrong_E = ((place_EX < 0) | (place_EX >= most)).any(1)
    if wrong_E.any():
        entry = int(np.argmax(wrong_E))
        raise UnusableEntry(f"%FLAG {name}: entry {entry + 1} names {what} {int(place_EX[entry].max()) + 1} of {most}")


def _coefficients(sections: Mapping[str, Any], type_E2: Integers) -> Floats:
    """Return the logarithms of the Lennard-Jones coefficients of pairs of atom types [E, 2], both above by 1."""
    types = math.isqrt(len(sections["NONBONDED_PARM_INDEX"]))
    _check_places("ATOM_TYPE_INDEX", type_E2 - 1, types, "type")
    place_E = sections["NONBONDED_PARM_INDEX"].astype(np.int64)[(type_E2[:, 0] - 1) * types + type_E2[:, 1] - 1]
    _check_places("NONBONDED_PARM_INDEX", np.abs(place_E)[:, None] - 1, len(sections["LENNARD_JONES_ACOEF"]), "pair")
    both = np.stack([sections["LENNARD_JONES_ACOEF"], sections["LENNARD_JONES_BCOEF"]], axis=1)
    if (both < 0).any():
        raise UnusableEntry("a Lennard-Jones coefficient is below 0")
    coefficients: Floats = np.log1p(both[np.abs(place_E) - 1]) * (place_E > 0)[:, None]  # below 0: a 10-12 pair
    return coefficients


def near_pairs(
    pos_N3: NDArray[np.float32], bonded_B2: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Return pairs of atoms near each other that no bond joins, the lower atom first, and their distances."""
    pos = pos_N3.astype(np.float64)
    pairs_E2 = cKDTree(pos).query_pairs(NEAR, output_type="ndarray")
    keys, bonded = (np.sort(some, axis=1) @ np.array([len(pos), 1]) for some in (pairs_E2, bonded_B2))
    near_E2 = np.stack(np.divmod(np.setdiff1d(keys, bonded), len(pos)), axis=1)
    distance_E: Floats = np.linalg.norm(pos[near_E2[:, 0]] - pos[near_E2[:, 1]], axis=1)
    if (distance_E < ONE_PLACE).any():
        left, right = near_E2[int(np.argmin(distance_E))] + 1
        raise UnusableEntry(f"the atoms {left} and {right} of the RNA have the same position")
    return near_E2.astype(np.int32), distance_E


FORMS = {".pdb": "pdb", ".ent": "pdb", ".cif": "mmcif", ".mmcif": "mmcif"}


def read_plain_pocket(data: bytes, form: str, more_residues: Collection[str] = ()) -> dict[str, NDArray[Any]]:
    """Return the arrays of the RNA of a structure file; `more_residues` are names that are RNA, too."""
    atoms = _rna_atoms(data, form, more_residues)
    bonds_B2 = all_bonds(atoms)
    heavy_A = ~is_hydrogen(atoms.element_A)
    pos_N3 = atoms.pos_A3.astype(np.float32)
    entries = {}
    for kind, paths_PX in zip(KINDS, bond_paths(bonds_B2, len(pos_N3), len(KINDS)), strict=True):
        own_PX = paths_PX[heavy_A[paths_PX].all(1)].astype(np.int32)
        entries[kind] = own_PX, np.zeros((len(own_PX), len(TERMS[kind][2])), np.float32)
    near_E2, distance_E = near_pairs(pos_N3, bonds_B2.astype(np.int32))
    constants = np.zeros((len(near_E2), 3), np.float32)
    constants[:, 2] = distance_E
    return _arrays(_plain_features(atoms), pos_N3, {**entries, "near": (near_E2, constants)})


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


def _plain_features(atoms: Atoms) -> NDArray[np.float32]:
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
    split_by: str = "complex"  # the unit that drawn splits never divide: complex, ligand or model
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
                yield Entry(id_, name, self._pocket(path), split, name)
            except UnusableEntry as error:
                yield entry_rejection(id_, error, split, path, 0)

    def read(self, place: str) -> Mapping[str, NDArray[Any]]:
        try:
            return self._pocket(self._folder / place)
        except UnusableEntry as error:
            raise DataError(f"no pocket at {place}: {error}", where=str(self.path), remedy=SCAN_AGAIN) from error

    def _pocket(self, path: Path) -> dict[str, NDArray[Any]]:
        if self.force_field == ABSENT:
            return read_plain_pocket(_content(path), FORMS[Path(_plain_name(path.name)).suffix], self.residues)
        beside = _coordinates(path)
        if beside is None:
            raise UnusableEntry(f"missing coordinates: {Path(_plain_name(path.name)).stem}.inpcrd not found")
        return read_pocket(_content(path), _content(beside), self.residues)

    def _splits(self) -> dict[str, str]:
        if self.splits:
            return _given_splits(Path(self.splits), allow_divided=self.divided == "allow")
        groups: dict[str, Callable[[str], str]] = {"complex": complex_of, "ligand": ligand_of, "model": str}
        return drawn_splits({id_: groups[self.split_by](id_) for id_ in map(pocket_id, self._names)})


def pocket_id(name: str) -> str:
    """Return the id of a pocket by the name of its file."""
    return "_".join(ENDS_RNA.sub("", Path(_plain_name(Path(name).name)).stem).split())


def drawn_splits(group_of: Mapping[str, str]) -> dict[str, str]:
    """Return the split of each id: a tenth of the groups, in an order that their names decide, is test, another val."""
    groups = sorted(set(group_of.values()), key=lambda group: sha256(group.encode()).digest())
    held_out = -(-len(groups) // TENTH) if len(groups) >= len(SPLITS) else 0
    split_of = {group: SPLITS[2 - place // held_out] for place, group in enumerate(groups[: 2 * held_out])}
    return {id_: split_of.get(group, SPLITS[0]) for id_, group in group_of.items()}


def _given_splits(path: Path, *, allow_divided: bool) -> dict[str, str]:
    """Return the splits of a JSON file; refuse one that divides a complex, unless that is allowed."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        lists = {str(split): [str(name) for name in names] for split, names in content.items()}
    except OSError as error:
        raise cannot_read(path, error) from error
    except (ValueError, AttributeError, TypeError) as error:
        remedy = '{"train": ["1abc_GTP_model0"], "val": [], "test": []}'
        raise DataError(f"not a JSON object of id lists: {error}", where=str(path), remedy=remedy) from error
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
    """Return a file's name without a `.gz`, its last ending in small letters."""
    plain = Path(name[: -len(PACKED)] if name.lower().endswith(PACKED) else name)
    return plain.stem + plain.suffix.lower()


def _coordinates(topology: Path) -> Path | None:
    """Return the file of coordinates next to a topology."""
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
