"""The memory of a scan is that of one item, however many there are."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from pipeline.records import Item, Part, Role
from pipeline.stages.census import CensusTally
from pipeline.store.cache_folder import CacheFolder
from pipeline.structures.inventory import ScanRecipe, examine_item
from pipeline.structures.scan_items import ScanShelves, scan_items
from tests.structures.pdb_text import chain

LINES = chain("A", *["ALA"] * 40) + chain("B", *["GLY"] * 40) + "END\n"
FEW, MANY = 50, 450
BYTES_AN_ITEM = 4000  # what a writer keeps of a record until its shard is full: far below the 26 kB of the file


def peak_bytes(folder: Path, items: int) -> int:
    """Return the peak of Python's allocations while so many items are scanned."""
    folder.mkdir()
    for number in range(items):
        (folder / f"{number}.pdb").write_text(LINES.replace("40    ", f"{number % 9000:4d}  ", 1))
    cache = CacheFolder(folder / "cache")
    shelves = ScanShelves(cache.kind("scan"), cache.kind("files"), 1 << 20)
    named = (Item(str(n), parts=(Part(Role.COMPLEX, str(folder / f"{n}.pdb")),)) for n in range(items))
    tracemalloc.start()
    assert all(reason is None for reason in scan_items(named, ScanRecipe(), shelves))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.nightly
def test_scanning_many_items_takes_the_memory_of_few(tmp_path: Path) -> None:
    few, many = peak_bytes(tmp_path / "few", FEW), peak_bytes(tmp_path / "many", MANY)
    assert many - few < BYTES_AN_ITEM * (MANY - FEW)


def test_a_census_takes_a_few_bytes_an_item(tmp_path: Path) -> None:
    item = Item("x", sequence="ACDEFGHIKLMNPQRSTVWY" * 10, split="train")
    inventory, _ = examine_item(item, {}, ScanRecipe())
    tally = CensusTally()
    tracemalloc.start()
    for _ in range(20_000):
        tally.accept(item, inventory)
    grown = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert grown < 200 * 20_000
