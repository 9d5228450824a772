"""`pairs`: a folder of `ID_r_b.pdb`, `ID_l_b.pdb`, `ID_r_u.pdb`, `ID_l_u.pdb` (DB5, AADaM), and perhaps a CSV of ids.

The CSV (data.splits) has the columns path, which holds the id, and split; without it every id of the folder is taken.
Files may also be .cif, .ent, … and gzipped.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pipeline.records import Part, Reason, Role
from pipeline.structures.atoms import Unusable
from pipeline.structures.sources.build import Files, build_items
from pipeline.structures.sources.folder import StructureFolder, in_order, listing, split_suffix
from pipeline.structures.sources.ids import shown
from pipeline.structures.sources.table import Columns, Row, read_rows

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from pipeline.records import Item, Rejection
    from pipeline.structures.sources.spec import SourceSpec

COLUMNS = Columns(required=("path",), optional=("split", "cluster"), aliases={"id": "path", "cluster_id": "cluster"})
STEM = re.compile(r"(.+)_[rl]_[bu]")
ROLES = {Role.RECEPTOR: "r", Role.LIGAND: "l"}


def pair_items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield the pairs that the CSV lists, or that the folder holds."""
    folder = StructureFolder(spec.path)

    def files_of(name: str, row: Row) -> Files:  # noqa: ARG001  # the id says it all
        bound = _parts(folder, name, "b")
        return Files(_parts(folder, name, "u"), bound) if spec.state == "unbound" else Files(bound)

    rows = read_rows(spec.splits, COLUMNS) if spec.splits else _rows_of_folder(spec)
    return build_items(rows, COLUMNS, lambda row: row["path"], files_of)


def _rows_of_folder(spec: SourceSpec) -> Iterator[Row | Rejection]:
    stems = (split_suffix(entry.name) for entry in listing(spec.path))
    matches = (STEM.fullmatch(stem) for stem, suffix in stems if suffix)
    for name in in_order(match[1] for match in matches if match):
        yield Row({"path": name}, f"{spec.path.name}/{shown(name)}")


def _parts(folder: StructureFolder, name: str, state: str) -> tuple[Part, ...]:
    paths = {role: folder.find(f"{name}_{letter}_{state}") for role, letter in ROLES.items()}
    missing = [f"{name}_{ROLES[role]}_{state}.pdb" for role, path in paths.items() if path is None]
    if missing:
        raise Unusable(Reason.MISSING_FILE, f"no {' and no '.join(missing)} in {folder.path}")
    return tuple(Part(role, path) for role, path in paths.items() if path is not None)
