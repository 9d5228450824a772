"""Splits by Murcko scaffolds: molecules with the same rings and linkers are in the same split."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

import xxhash

from pipeline.command_line import install_extra
from pipeline.errors import ConfigError
from pipeline.readers.entry import NOT_KNOWN, UnusableEntry
from pipeline.units import printable_text

SPLITS = (*["train"] * 8, "val", "test")


def refuse_without_rdkit() -> None:
    """Raise where RDKit, which reads molecules, is not installed."""
    if find_spec("rdkit") is None:
        what = "splits by Murcko scaffold need RDKit, which is not installed"
        raise ConfigError(what, where="data.options.murcko", remedy=install_extra("molecules"))


@lru_cache(4096)
def scaffold_split(molecule: str) -> str:
    """Return train, val or test by the scaffold of a SMILES or InChI: 80, 10 and 10% of scaffolds.

    Molecules without a ring are in train; one that is not known is in no split.
    """
    from rdkit import Chem, rdBase
    from rdkit.Chem.Scaffolds import MurckoScaffold

    if (text := molecule.strip()).lower() in NOT_KNOWN:
        return ""
    with rdBase.BlockLogs():
        read = Chem.MolFromInchi if text.startswith("InChI=") else Chem.MolFromSmiles
        found = read(text)
    if found is None:
        raise UnusableEntry(f"neither SMILES nor InChI: {printable_text(text[:80])!r}")
    scaffold = MurckoScaffold.MurckoScaffoldSmiles(mol=found)  # type: ignore[no-untyped-call]
    return SPLITS[xxhash.xxh3_64_intdigest(scaffold.encode()) % len(SPLITS)] if scaffold else SPLITS[0]
