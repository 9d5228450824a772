"""`manifest`: a CSV, TSV or JSON-lines table with a row for each complex.

Columns: id, path (or receptor_path and ligand_path, or neither when data.structures_dir holds `<id>.pdb`, `.cif`, …),
receptor_chains, ligand_chains, split, cluster, model (the first is 1); every other column is a label, kept as text;
those that data.labels names are numbers.
Relative paths start at data.structures_dir, or else at the manifest's folder; whether such a file is there shows when
it is read. A file is one of `read.FORMATS`: also a topology of AMBER (.prmtop, .parm7), whose coordinates are beside it
under the same name (.inpcrd, .rst7, .crd), and a small molecule of its own (.sdf, .mol, .mol2), which has no chains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.records import Part, Reason, Role
from pipeline.structures.atoms import Unusable
from pipeline.structures.sources.build import Files, build_items, clean_path, model_number, one_file_parts, split_chains
from pipeline.structures.sources.folder import StructureFolder
from pipeline.structures.sources.table import Columns, Row, read_rows

if TYPE_CHECKING:
    from collections.abc import Generator

    from pipeline.records import Item, Rejection
    from pipeline.structures.sources.spec import SourceSpec

PATHS = ("path", "receptor_path", "ligand_path")
OTHERS = ("receptor_chains", "ligand_chains", "split", "cluster", "model")
FOREIGN = {
    "complex_name": "id",
    "name": "id",
    "pdb": "id",
    "pdb_id": "id",
    "protein_path": "path",
    "file": "path",
    "filename": "path",
    "pdb_path": "path",
}


def manifest_items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield the complexes of a manifest."""
    columns = Columns(
        required=("id",),
        labels=spec.labels,
        one_of=() if spec.structures_dir else PATHS,
        optional=(*PATHS, *OTHERS) if spec.structures_dir else OTHERS,
        aliases={"cluster_id": "cluster"},
        foreign=FOREIGN,
    )
    folder = StructureFolder(spec.structures_dir or spec.path.parent)

    def files_of(name: str, row: Row) -> Files:
        return Files(_parts(spec, name, row, folder))

    return build_items(read_rows(spec.path, columns), columns, lambda row: row["id"], files_of)


def _parts(spec: SourceSpec, name: str, row: Row, folder: StructureFolder) -> tuple[Part, ...]:
    receptor = split_chains(row["receptor_chains"]) or spec.receptor_chains
    ligand = split_chains(row["ligand_chains"]) or spec.ligand_chains
    model = model_number(row["model"])
    one, *two = (folder.join(clean_path(row[column])) if row[column] else "" for column in PATHS)
    if one and not any(two):
        return one_file_parts(spec, one, receptor, ligand, model)
    if all(two) and not one:
        return (Part(Role.RECEPTOR, two[0], receptor, model), Part(Role.LIGAND, two[1], ligand, model))
    if one or any(two):
        raise Unusable(Reason.BAD_ROW, "give either path, or both receptor_path and ligand_path")
    return one_file_parts(spec, _found(spec, name, folder), receptor, ligand, model)


def _found(spec: SourceSpec, name: str, folder: StructureFolder) -> str:
    """Return the file that is named after its id."""
    if spec.structures_dir is None:
        raise Unusable(Reason.BAD_ROW, "no path")
    path = folder.find(name)
    if path is None:
        raise Unusable(Reason.MISSING_FILE, f"no {name}.pdb, .cif, … in {folder.path}")
    return path
