"""`pinder`: an index with the column id (`A--B`), and folders of `A-R.pdb` and `B-L.pdb`, as PINDER lays them out.

Files are looked for in data.structures_dir (or the index's folder) and in its subfolders pdbs and test_set_pdbs.
With data.state unbound the columns apo_R_pdb and apo_L_pdb name the structures, and labels come from the bound ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.records import Part, Reason, Role
from pipeline.structures.atoms import Unusable
from pipeline.structures.sources.build import Files, build_items
from pipeline.structures.sources.folder import StructureFolder, split_suffix
from pipeline.structures.sources.ids import checked_id, id_problem, shown
from pipeline.structures.sources.table import Columns, Row, read_rows

if TYPE_CHECKING:
    from collections.abc import Generator

    from pipeline.records import Item, Rejection
    from pipeline.structures.sources.spec import SourceSpec

APO = {Role.RECEPTOR: "apo_R_pdb", Role.LIGAND: "apo_L_pdb"}
SUBFOLDERS = ("pdbs", "test_set_pdbs")


def pinder_items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield the pairs of an index."""
    unbound = spec.state == "unbound"
    columns = Columns(
        required=("id", *APO.values()) if unbound else ("id",),
        labels=spec.labels,
        optional=("split", "cluster"),
        aliases={"cluster_id": "cluster"},
    )
    folder = StructureFolder(spec.structures_dir or spec.path.parent, SUBFOLDERS)

    def files_of(name: str, row: Row) -> Files:
        bound = _bound(folder, name)
        return Files(tuple(_apo(folder, role, row) for role in APO), bound) if unbound else Files(bound)

    return build_items(read_rows(spec.path, columns), columns, lambda row: row["id"], files_of)


def _bound(folder: StructureFolder, name: str) -> tuple[Part, ...]:
    receptor, dashes, ligand = name.partition("--")
    if not (receptor and dashes and ligand):
        raise Unusable(Reason.BAD_ID, "the id is not of the form RECEPTOR--LIGAND")
    return (
        _part(folder, Role.RECEPTOR, checked_id(f"{receptor}-R")),
        _part(folder, Role.LIGAND, checked_id(f"{ligand}-L")),
    )


def _apo(folder: StructureFolder, role: Role, row: Row) -> Part:
    name = row[APO[role]]
    if not name:
        raise Unusable(Reason.MISSING_FILE, f"the index names no unbound {role.value}")
    stem, _suffix = split_suffix(name)
    if problem := id_problem(stem):
        raise Unusable(Reason.BAD_ROW, f"the file name {shown(name)!r} {problem}")
    return _part(folder, role, stem)


def _part(folder: StructureFolder, role: Role, stem: str) -> Part:
    path = folder.find(stem)
    if path is None:
        where = f"{folder.path} or its {', '.join(SUBFOLDERS)}"
        raise Unusable(Reason.MISSING_FILE, f"no {shown(stem)}.pdb in {where}")
    return Part(role, path)
