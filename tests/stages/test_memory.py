"""The memory of a scan is that of one item, and that of a supervisor hardly grows with the data set."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.dataset import columns
from pipeline.encoder.embedding_recipe import Variant
from pipeline.journal.run_folder import RunFolder
from pipeline.records import ChainSummary, Inventory, Item, Kind, Part, Partner, Role
from pipeline.stages.census import CensusTally, write_leaks
from pipeline.stages.embed import EmbedTally, Sequences
from pipeline.stages.graph import GraphTally, paged
from pipeline.stages.stage import add_blocks
from pipeline.store.cache_folder import CacheFolder
from pipeline.structures.inventory import ScanRecipe
from pipeline.structures.scan_items import ScanShelves, scan_items
from pipeline.training.items import item_table
from pipeline.training.items.item_table import TablePages
from tests.structures.pdb_text import chain

LINES = chain("A", *["ALA"] * 40) + chain("B", *["GLY"] * 40) + "END\n"
FEW, MANY = 50, 450
BYTES_AN_ITEM = 4000  # what a writer keeps of a record until its shard is full: far below the 26 kB of the file
BLOCK, COUNTED, COUNTED_MORE = 250, 1000, 9000
COUNTED_BYTES = 24  # of each item: two numbers and a half


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


def item(number: int) -> Item:
    return Item(f"c{number:07d}", split=("train", "val")[number % 2], cluster=f"k{number}")


def scanned(numbers: range) -> CensusTally:
    tally = CensusTally(keys={"scan": bytearray(16 * len(numbers)), "files": bytearray(16 * len(numbers))})
    for number in numbers:
        chains = [ChainSummary("A", Kind.PROTEIN, f"{name}{number}", 9, 9, 45) for name in "RL"]
        sides = (Partner(Role.RECEPTOR, "00", (chains[0],)), Partner(Role.LIGAND, "00", (chains[1],)))
        tally.accept(item(number), Inventory(partners=sides))
    return tally


def embedded(numbers: range) -> EmbedTally:
    tally, variant = EmbedTally(parts={"": Sequences()}, keys={"embed": bytearray(32 * len(numbers))}), Variant("fp32")
    for number in numbers:
        tally.items += 1
        for name in "RL":
            tally.parts[""].add(f"{name}{number}", variant if name == "R" else Variant("bf16"), variant)
    return tally


def graphed(numbers: range) -> GraphTally:
    tally = GraphTally(keys={"graph": bytearray(16 * len(numbers))})
    for number in numbers:
        sizes = dict.fromkeys(("nodes", "edges", "receptor", "ligand", "pairs", "cross", "residues", "contacts"), 9)
        tally.accept(item(number), number.to_bytes(16), sizes, (), kept=True)
    return tally


def take_census(folder: RunFolder, blocks: Iterator[CensusTally]) -> int:
    tally = add_blocks(CensusTally(keys={"scan": bytearray()}), folder, blocks, bool)
    write_leaks(folder, tally.marks)
    return tally.census().items


def count_embeddings(folder: RunFolder, blocks: Iterator[EmbedTally]) -> int:
    total = EmbedTally(parts={"": Sequences()}, keys={"embed": bytearray()})
    counted = add_blocks(total, folder, blocks, bool).embedded()
    assert counted.sequences == 2 * counted.items
    assert counted.residues > 0
    assert counted.others == {"in bf16": counted.items}
    return counted.items


def make_table(folder: RunFolder, blocks: Iterator[GraphTally]) -> int:
    pages = TablePages(CacheFolder(folder.path / "cache").kind("sets"))
    tally = add_blocks(GraphTally(keys={"graph": bytearray()}), folder, paged(blocks, pages), bool)
    pages.write()
    return tally.items


@pytest.mark.parametrize(
    ("count", "judge"), [(scanned, take_census), (embedded, count_embeddings), (graphed, make_table)]
)
def test_a_supervisor_judges_many_items_with_the_memory_of_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Callable[[range], Any], judge: Callable[..., int]
) -> None:
    monkeypatch.setattr(columns, "ROWS", BLOCK)  # in memory at once
    monkeypatch.setattr(item_table, "PAGE", BLOCK)

    def peak(items: int) -> int:
        (tmp_path / str(items)).mkdir()
        folder = RunFolder(tmp_path / str(items))
        folder.items.touch()
        blocks = (count(range(first, first + BLOCK)) for first in range(0, items, BLOCK))
        tracemalloc.start()
        try:
            assert judge(folder, blocks) == items
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(BLOCK)  # what is imported and opened once is not the items'
    assert peak(COUNTED_MORE) - peak(COUNTED) < COUNTED_BYTES * (COUNTED_MORE - COUNTED)
