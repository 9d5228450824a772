"""Tables of complexes in the forms that people have, and the folders in which their structure files are found.

`manifest` is a CSV, TSV or JSON-lines table with a row for each complex. Its columns are id, path (or receptor_path and
ligand_path, or neither when data.structures_dir holds `<id>.pdb`, `.cif`, …), receptor_chains, ligand_chains, split,
cluster and model (the first is 1). Every other column is a label, kept as text; those in data.labels are numbers.
Relative paths start at data.structures_dir, or else at the manifest's folder. A missing file shows when it is read. The
coordinates of an AMBER topology (.prmtop, .parm7) are next to it under the same name (.inpcrd, .rst7, .crd); a small
molecule in its own file (.sdf, .mol, .mol2) has no chains.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.records import Part, Reason, Role
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing.structure_files import FORMATS
from pipeline.structures.sources.item_ids import SLASHES, checked_id, id_problem
from pipeline.structures.sources.source_rows import (
    Columns,
    SourceRow,
    build_items,
    cannot_open,
    clean_path,
    model_number,
    one_file_parts,
    read_rows,
    split_chains,
)
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from pipeline.records import Item, Rejection
    from pipeline.structures.sources.item_ids import SourceSpec
    from pipeline.structures.sources.source_rows import Files

NAMES_AT_ONCE = 1 << 16


class StructureFolder:
    """A folder with optional subfolders, in which files are found by their name without suffix."""

    def __init__(self, path: Path, subfolders: Sequence[str] = ()) -> None:
        self.path = path.absolute()
        self._root = str(self.path)
        self._subfolders = subfolders

    @cached_property
    def _endings(self) -> list[tuple[str, str]]:
        """Pairs of folder and suffix that occur, so that a look-up rarely tries more than one path."""
        inside = {entry.name for entry in listing(self.path) if entry.name in self._subfolders and entry.is_dir()}
        folders = [self.path, *(self.path / name for name in self._subfolders if name in inside)]
        return [(str(folder), suffix) for folder in folders for suffix in _suffixes(folder)]

    def join(self, path: str) -> str:
        return os.path.join(self._root, path)  # noqa: PTH118  # a Path costs ten times more, once per item

    def find(self, *stems: str) -> str | None:
        """Return the path of the first existing file with one of these stems; None if there is none."""
        if any(SLASHES.search(stem) or stem.startswith(".") for stem in stems):
            raise ValueError(f"{stems} were not checked before use as file names")
        for folder, suffix in self._endings:
            for stem in stems:
                path = os.path.join(folder, stem + suffix)  # noqa: PTH118  # a Path per try would cost more than the try
                if os.path.isfile(path):  # noqa: PTH113
                    return path
        return None

    def required(self, *stems: str) -> str:
        """Return what `find` finds; refuse the item where there is none."""
        if path := self.find(*stems):
            return path
        beneath = f" or its {', '.join(self._subfolders)}" if self._subfolders else ""
        raise UnusableInput(Reason.MISSING_FILE, f"no {printable_text(stems[0])}.pdb, .cif, … in {self.path}{beneath}")


def split_suffix(name: str) -> tuple[str, str]:
    """Divide a file name into its stem and its structure suffix, which is empty for other files."""
    stem, _dot, ending = name.removesuffix(".gz").rpartition(".")
    if f".{ending.lower()}" not in FORMATS or not stem:
        return name, ""
    return stem, name[len(stem) :]


def _suffixes(folder: Path) -> list[str]:
    """Return the structure suffixes that occur in a folder, in the order of preference."""
    suffixes = {split_suffix(entry.name)[1] for entry in listing(folder)} - {""}
    order = list(FORMATS)
    return sorted(suffixes, key=lambda suffix: (order.index(suffix.removesuffix(".gz").lower()), suffix))


def listing(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder; raise a ConfigError that says what to name instead."""
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        raise cannot_open(folder, error, "folder") from error


def walk(folder: Path, patterns: Sequence[str], above: str = "") -> Iterator[str]:
    """Yield files that match a pattern, relative to the folder; skip hidden ones and linked folders."""
    for entry in listing(folder / above):
        name = above + entry.name
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            if any(_may_hold(name, pattern) for pattern in patterns):
                yield from walk(folder, patterns, f"{name}/")
        elif any(_matches(name.split("/"), pattern.split("/")) for pattern in patterns):
            yield name


def _may_hold(folder: str, pattern: str) -> bool:
    return "**" in pattern or folder.count("/") < pattern.count("/")


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Match a path with a pattern, part by part; `**` stands for any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or (bool(parts) and _matches(parts[1:], pattern))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def sorted_names(names: Iterable[str]) -> Iterator[str]:
    """Yield the different names in order; they wait as bytes in one array, where strings would take five times more."""
    encoded = (os.fsencode(name) for name in names)
    chunks = []
    while chunk := list(islice(encoded, NAMES_AT_ONCE)):
        chunks.append(np.array(chunk))
    if chunks:
        yield from (os.fsdecode(bytes(name)) for name in np.unique(np.concatenate(chunks)))


PATHS = ("path", "receptor_path", "ligand_path")
OTHERS = ("receptor_chains", "ligand_chains", "split", "cluster", "model")


def manifest_items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield the complexes of a manifest."""
    columns = Columns(
        required=("id",),
        labels=spec.labels,
        unlabelled=spec.unlabelled,
        one_of=() if spec.structures_dir else PATHS,
        optional=(*PATHS, *OTHERS) if spec.structures_dir else OTHERS,
    )
    folder = StructureFolder(spec.structures_dir or spec.path.parent)

    def files_of(name: str, row: SourceRow) -> Files:
        return _manifest_parts(spec, name, row, folder), ()

    return build_items(read_rows(spec.path, columns), columns, lambda row: row["id"], files_of)


def _manifest_parts(spec: SourceSpec, name: str, row: SourceRow, folder: StructureFolder) -> tuple[Part, ...]:
    receptor = split_chains(row["receptor_chains"]) or spec.receptor_chains
    ligand = split_chains(row["ligand_chains"]) or spec.ligand_chains
    model = model_number(row["model"])
    path, *paths = (folder.join(clean_path(row[column])) if row[column] else "" for column in PATHS)
    if path and not any(paths):
        return one_file_parts(spec, path, receptor, ligand, model)
    if all(paths) and not path:
        return (Part(Role.RECEPTOR, paths[0], receptor, model), Part(Role.LIGAND, paths[1], ligand, model))
    if path or any(paths):
        raise UnusableInput(Reason.BAD_ROW, "give either path, or both receptor_path and ligand_path")
    if spec.structures_dir is None:
        raise UnusableInput(Reason.BAD_ROW, "no path")
    return one_file_parts(spec, folder.required(name), receptor, ligand, model)


PAIRS_COLUMNS = Columns(required=("path",), optional=("split", "cluster"), aliases={"id": "path"})
STEM = re.compile(r"(.+)_[rl]_[bu]")
ROLES = {Role.RECEPTOR: "r", Role.LIGAND: "l"}
PAIRS_SUBFOLDERS = ("structures",)
PICKLED = ".dill"  # as lists of DIPS name each pair, whose partners are files here
FOLDERS_AT_ONCE = 1024


def pair_items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield the pairs that the CSV lists, or that the folder holds."""
    folder_at = lru_cache(maxsize=FOLDERS_AT_ONCE)(partial(_pairs_folder, spec.path))

    def files_of(_name: str, row: SourceRow) -> Files:
        *above, stem = (checked_id(part) for part in row["path"].split("/"))
        folder, stem = folder_at("/".join(above)), stem.removesuffix(PICKLED)
        bound = _pairs_parts(folder, stem, "b")
        return (_pairs_parts(folder, stem, "u"), bound) if spec.state == "unbound" else (bound, ())

    rows = read_rows(spec.splits, PAIRS_COLUMNS) if spec.splits else _rows_of_folder(spec)
    return build_items(rows, PAIRS_COLUMNS, lambda row: row["path"].removesuffix(PICKLED).replace("/", "."), files_of)


def _pairs_folder(root: Path, below: str) -> StructureFolder:
    """Return the folder of pairs, or the one below it that a list names."""
    if not below:
        return StructureFolder(root, PAIRS_SUBFOLDERS)
    for place in (root / below, *(root / name / below for name in PAIRS_SUBFOLDERS)):
        if os.path.isdir(place):  # noqa: PTH112  # where it may not be seen, Path.is_dir fails
            return StructureFolder(place)
    raise UnusableInput(Reason.MISSING_FILE, f"no folder {below} in {root} or its {', '.join(PAIRS_SUBFOLDERS)}")


def _rows_of_folder(spec: SourceSpec) -> Iterator[SourceRow | Rejection]:
    for name in sorted_names(_pairs_in(spec.path, PAIRS_SUBFOLDERS)):
        yield SourceRow({"path": name}, f"{spec.path.name}/{printable_text(name)}")


def _pairs_in(folder: Path, subfolders: Sequence[str] = ()) -> Iterator[str]:
    """Yield the pair that each structure file is of."""
    for entry in listing(folder):
        stem, suffix = split_suffix(entry.name)
        if entry.name in subfolders and entry.is_dir():
            yield from _pairs_in(Path(entry.path))
        elif suffix and (match := STEM.fullmatch(stem)):
            yield match[1]


def _pairs_parts(folder: StructureFolder, name: str, state: str) -> tuple[Part, ...]:
    paths = {role: folder.find(f"{name}_{letter}_{state}") for role, letter in ROLES.items()}
    missing = [f"{name}_{ROLES[role]}_{state}.pdb" for role, path in paths.items() if path is None]
    if missing:
        raise UnusableInput(Reason.MISSING_FILE, f"no {' and no '.join(missing)} in {folder.path}")
    return tuple(Part(role, path) for role, path in paths.items() if path is not None)


APO = {Role.RECEPTOR: "apo_R_pdb", Role.LIGAND: "apo_L_pdb"}
PINDER_SUBFOLDERS = ("pdbs", "test_set_pdbs")


def pinder_items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield the pairs of an index."""
    unbound = spec.state == "unbound"
    columns = Columns(
        required=("id", *APO.values()) if unbound else ("id",),
        labels=spec.labels,
        unlabelled=spec.unlabelled,
        optional=("split", "cluster"),
    )
    folder = StructureFolder(spec.structures_dir or spec.path.parent, PINDER_SUBFOLDERS)

    def files_of(name: str, row: SourceRow) -> Files:
        bound = _bound(folder, name)
        return (tuple(_apo(folder, role, row) for role in APO), bound) if unbound else (bound, ())

    return build_items(read_rows(spec.path, columns), columns, lambda row: row["id"], files_of)


def _bound(folder: StructureFolder, name: str) -> tuple[Part, ...]:
    receptor, dashes, ligand = name.partition("--")
    if not (receptor and dashes and ligand):
        raise UnusableInput(Reason.BAD_ID, "the id is not of the form RECEPTOR--LIGAND")
    return (
        Part(Role.RECEPTOR, folder.required(checked_id(f"{receptor}-R"))),
        Part(Role.LIGAND, folder.required(checked_id(f"{ligand}-L"))),
    )


def _apo(folder: StructureFolder, role: Role, row: SourceRow) -> Part:
    name = row[APO[role]]
    if not name:
        raise UnusableInput(Reason.MISSING_FILE, f"the index has no unbound {role.value}")
    stem, _suffix = split_suffix(name)
    if problem := id_problem(stem):
        raise UnusableInput(Reason.BAD_ROW, f"the file name {printable_text(name)!r} {problem}")
    return Part(role, folder.required(stem))


SABDAB_COLUMNS = Columns(
    required=("pdb", "Hchain", "Lchain", "antigen_chain"),
    optional=("model", "split", "cluster"),
)
NOTHING = frozenset({"", "na", "none", "nan"})
RENUMBERED = ("chothia", "imgt")
SABDAB_SUBFOLDERS = ("raw", *RENUMBERED)


def sabdab_items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield the antibody-antigen complexes of a summary table."""
    folder = StructureFolder(spec.structures_dir or spec.path.parent, SABDAB_SUBFOLDERS)
    # The database joins its fields with tabs and quotes nothing, though names hold quotes.
    columns = replace(SABDAB_COLUMNS, labels=spec.labels, unlabelled=spec.unlabelled)
    rows = read_rows(spec.path, columns, quoted=".csv" in spec.path.suffixes)
    return build_items(rows, columns, _id_of, lambda _name, row: (_sabdab_parts(folder, row), ()))


def _id_of(row: SourceRow) -> str:
    """Return an id that only rows about the same chains of the same model share."""
    heavy, light = _named(row["Hchain"]), _named(row["Lchain"])
    antibody = f"{heavy}+{light}" if light and light != heavy else heavy
    model = _named(row["model"]) or "0"
    return f"{row['pdb']}_{antibody}_{'+'.join(_antigens(row))}" + (f"_m{model}" if model != "0" else "")


def _named(cell: str) -> str:
    """Return the text of a cell; empty for the table's words for nothing."""
    return "" if cell.lower() in NOTHING else cell


def _antigens(row: SourceRow) -> tuple[str, ...]:
    return tuple(name for name in split_chains(row["antigen_chain"]) if _named(name))


def _sabdab_parts(folder: StructureFolder, row: SourceRow) -> tuple[Part, ...]:
    heavy, light, antigens = _named(row["Hchain"]), _named(row["Lchain"]), _antigens(row)
    if not antigens:
        raise UnusableInput(Reason.BAD_ROW, "no antigen")
    if not (heavy or light):
        raise UnusableInput(Reason.BAD_ROW, "no antibody chain")
    model = model_number(_named(row["model"]), first=0)
    pdb = checked_id(row["pdb"])
    path = folder.required(pdb, pdb.lower(), pdb.upper(), f"pdb{pdb.lower()}")
    antibody = _antibody(heavy, light, renumbered=Path(path).parent.name.lower() in RENUMBERED)
    twin = tuple(name for name in antibody[1:] if name != heavy and name == heavy.lower())
    return (Part(Role.RECEPTOR, path, antibody, model, optional=twin), Part(Role.LIGAND, path, antigens, model))


def _antibody(heavy: str, light: str, *, renumbered: bool) -> tuple[str, ...]:
    """Return the antibody's chains; a single-chain Fv that was divided has a lower-case twin."""
    if heavy == light and renumbered:
        light = heavy.lower()
    return tuple(dict.fromkeys(chain for chain in (heavy, light) if chain))
