"""`sabdab`: the summary table of the Structural Antibody Database, with a folder of its structures.

The antibody is the receptor (heavy chain, then light), the antigen the ligand. Ids are `pdb_H+L_antigens`, `pdb_H_…`
for a nanobody and `pdb_+L_…` for a light chain alone; `_m1` follows when the row is about model 1, the second one.
Cells that are empty or hold NA or None name nothing.

In a single-chain Fv both domains are one chain of the deposited file. The summary then names it twice, or names the
light half by the lower-case letter, as the renumbered files (folders chothia, imgt) do, which divide the chain.
So the part of a row A/a, or of a row A/A with a renumbered file, has the chains (A, a), of which a is optional.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.records import Part, Reason, Role
from pipeline.structures.atoms import Unusable
from pipeline.structures.sources.build import Files, build_items, model_number, split_chains
from pipeline.structures.sources.folder import StructureFolder
from pipeline.structures.sources.ids import checked_id
from pipeline.structures.sources.table import Columns, Row, read_rows

if TYPE_CHECKING:
    from collections.abc import Generator

    from pipeline.records import Item, Rejection
    from pipeline.structures.sources.spec import SourceSpec

COLUMNS = Columns(
    required=("pdb", "Hchain", "Lchain", "antigen_chain"),
    optional=("model", "split", "cluster"),
    aliases={"cluster_id": "cluster"},
)
NOTHING = frozenset({"", "na", "none", "nan"})
RENUMBERED = ("chothia", "imgt")
SUBFOLDERS = ("raw", *RENUMBERED)


def sabdab_items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield the antibody-antigen complexes of a summary table."""
    folder = StructureFolder(spec.structures_dir or spec.path.parent, SUBFOLDERS)
    # The database joins its fields with tabs and quotes nothing, though names hold quotes.
    columns = replace(COLUMNS, labels=spec.labels)
    rows = read_rows(spec.path, columns, quoted=".csv" in spec.path.suffixes)
    return build_items(rows, columns, _id_of, lambda _name, row: Files(_parts(folder, row)))


def _id_of(row: Row) -> str:
    """Return an id that only rows about the same chains of the same model share."""
    heavy, light = _named(row["Hchain"]), _named(row["Lchain"])
    antibody = f"{heavy}+{light}" if light and light != heavy else heavy
    model = _named(row["model"]) or "0"
    return f"{row['pdb']}_{antibody}_{'+'.join(_antigens(row))}" + (f"_m{model}" if model != "0" else "")


def _named(cell: str) -> str:
    """Return what a cell names, which may be nothing."""
    return "" if cell.lower() in NOTHING else cell


def _antigens(row: Row) -> tuple[str, ...]:
    return tuple(name for name in split_chains(row["antigen_chain"]) if _named(name))


def _parts(folder: StructureFolder, row: Row) -> tuple[Part, ...]:
    heavy, light, antigens = _named(row["Hchain"]), _named(row["Lchain"]), _antigens(row)
    if not antigens:
        raise Unusable(Reason.BAD_ROW, "no antigen")
    if not (heavy or light):
        raise Unusable(Reason.BAD_ROW, "no antibody chain")
    model = model_number(_named(row["model"]), first=0)
    path = _file(folder, row["pdb"])
    antibody = _antibody(heavy, light, renumbered=Path(path).parent.name.lower() in RENUMBERED)
    twin = tuple(name for name in antibody[1:] if name != heavy and name == heavy.lower())
    return (Part(Role.RECEPTOR, path, antibody, model, optional=twin), Part(Role.LIGAND, path, antigens, model))


def _antibody(heavy: str, light: str, *, renumbered: bool) -> tuple[str, ...]:
    """Return the antibody's chains; a single-chain Fv that was divided has a lower-case twin."""
    if heavy == light and renumbered:
        light = heavy.lower()
    return tuple(dict.fromkeys(chain for chain in (heavy, light) if chain))


def _file(folder: StructureFolder, pdb: str) -> str:
    checked_id(pdb)
    path = folder.find(pdb, pdb.lower(), pdb.upper(), f"pdb{pdb.lower()}")
    if path is None:
        raise Unusable(Reason.MISSING_FILE, f"no {pdb}.pdb, .cif, … in {folder.path} or its {', '.join(SUBFOLDERS)}")
    return path
