"""What the tests of residue graphs share: the real complexes, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.records import Item, Part, Role
from pipeline.structures.inventory import Complex, ScanRecipe, examine_item
from pipeline.structures.parsing.structure_files import File, read_file
from pipeline.structures.sources.data_source import items
from pipeline.structures.sources.item_ids import SourceSpec
from tests.graphs.complexes import LIMIT


def read_item(item: Item) -> Complex:
    """Return an item as it is read by default."""
    paths = {part.path for part in (*item.parts, *item.bound)}
    files = {path: File(read_file(Path(path), LIMIT), path) for path in paths}
    inventory, read = examine_item(item, files, ScanRecipe())
    assert read is not None, inventory
    return read


@pytest.fixture(scope="session")
def complexes(structures: Path) -> dict[str, Complex]:
    """Return every real complex by its name."""
    paths = sorted((structures / "complexes").glob("*.pdb"))
    return {path.stem: read_item(Item(path.stem, parts=(Part(Role.COMPLEX, str(path)),))) for path in paths}


def read_pairs(folder: Path, state: str) -> dict[str, Complex]:
    """Return every pair of a folder in a state."""
    found = items(SourceSpec("pairs", folder, state=state))
    return {item.id: read_item(item) for item in found if isinstance(item, Item)}


@pytest.fixture(scope="session")
def unbound(structures: Path) -> dict[str, Complex]:
    """Return every real pair of unbound structures, with the bound ones."""
    return read_pairs(structures / "pairs", "unbound")


@pytest.fixture(scope="session")
def bound(structures: Path) -> dict[str, Complex]:
    """Return every real pair of bound structures."""
    return read_pairs(structures / "pairs", "bound")
