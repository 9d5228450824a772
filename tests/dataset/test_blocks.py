"""A run that has nothing to do takes over what an earlier one found, and notices whatever has changed since."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import from_resolved
from pipeline.dataset import blocks
from pipeline.dataset.blocks import FOLDER, DataBlocks
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.project import project
from pipeline.records import ChainSummary, Inventory, Item, Kind, Partner, Reason, Rejection, Role
from pipeline.stages.census import CensusTally
from pipeline.stages.graph import GraphTally
from pipeline.stages.table import known_stage
from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import read_table
from pipeline.structures.parsing import structure_files
from pipeline.upkeep.prune_runs import foresee_pruning, prune
from tests.testkit.command import Command
from tests.testkit.once import Shelf
from tests.testkit.project import Project, settle, to_do
from tests.testkit.trained import SMALL, write_project

pytestmark = pytest.mark.timeout(600)

Submit = Callable[..., dict[str, tuple[int, int]]]
SPLITS = ["train", "train", "val", "val"]
LISTS = ("rejected", "inventory", "residues_left_out", "leaks")
STAGE_OF = {"scan": "scan", "files": "scan", "embed": "embed", "graph": "graph"}  # which makes records of a kind


def make(folder: Path) -> None:
    """Make a project in which everything is there, and one file is broken."""
    write_project(folder, {**SMALL, "data__max_rejected_fraction": 0.5, "cache__visibility_s": 0}, {}, SPLITS)
    with (folder / "data" / "manifest.csv").open("a") as file:
        file.write("c9,c9.pdb,A,B,train,9\n")
    (folder / "data/c9.pdb").write_text("this is no structure\n")
    settle(folder / "data")
    Project(folder).finishes("all")


@pytest.fixture
def submit(shelf: Shelf, tmp_path: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> Submit:
    """Return what submits every stage of a copy, which lacks nothing, and returns what each finds to do.

    Every item is a block of its own.
    """
    monkeypatch.setattr(blocks, "ITEMS", 1)
    shelf.copy("standing", make, tmp_path)
    settle(tmp_path / "data")

    def submitted(*words: str) -> dict[str, tuple[int, int]]:
        done = pipeline("submit", "--stage", "all", "--follow", *(word for text in words for word in ("--set", text)))
        assert done.code == 0, done.err
        return to_do()

    submitted()
    return submitted


def is_complete(found: dict[str, tuple[int, int]]) -> bool:
    return not any(missing for _, missing in found.values())


def newest() -> RunFolder:
    return runs_in(Path("runs"))[-1]


def told(pipeline: Command) -> list[dict[str, Any]]:
    """Return what the newest run says of its stages, without times and places."""
    stages = json.loads(pipeline("status", "--json").out)["stages"]
    own = ("lists", "at", "submitted_at", "ended_at", "began", "ended", "elapsed_s")
    return [
        {"name": row["name"], "census": {name: v for name, v in row["census"].items() if name not in own}}
        | {name: row[name] for name in ("items", "cached", "missing") if name in row}
        for row in stages
    ]


def lists() -> dict[str, bytes]:
    return {name: getattr(newest(), name).read_bytes() for name in LISTS}


def refuse_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every stage fail that looks items up."""

    def looked_up(*_arguments: object) -> None:
        raise AssertionError("it was looked up item by item")

    monkeypatch.setattr(DataBlocks, "know", looked_up)


def damage(kind: str) -> None:
    """Change a byte of one record of a kind in each shard: some hold files as they were before they were copied."""
    for path in Path("cache", kind, "shards").glob("*.safetensors"):
        place = int(read_table(Disk(), path).rows["offset"][0])
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(place)
            value = file.read(1)[0]
            file.seek(place)
            file.write(bytes([value ^ 0x10]))


@pytest.mark.nightly
def test_a_run_with_nothing_to_do_counts_nothing_and_says_the_same(
    submit: Submit, pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("runs", FOLDER).rename(f"forgotten-{newest().name}")
    counted = submit()
    said, listed = told(pipeline), lists()
    refuse_looking(monkeypatch)
    assert submit() == counted
    assert told(pipeline) == said
    assert lists() == listed


@pytest.mark.nightly
@pytest.mark.parametrize("kind", list(STAGE_OF))
def test_a_damaged_record_is_noticed_and_made_anew(submit: Submit, kind: str) -> None:
    damage(kind)
    assert submit()[STAGE_OF[kind]][1] > 0
    assert is_complete(submit())


@pytest.mark.nightly
def test_a_file_that_changed_is_scanned_again_and_no_other_block_is_looked_up(
    submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit()
    Path("data/c1.pdb").write_text(Path("data/c1.pdb").read_text().replace(" ALA ", " VAL "))
    settle(Path("data"))
    know, looked_up = DataBlocks.know, []
    monkeypatch.setattr(DataBlocks, "know", lambda *given: looked_up.append(given[1]) or know(*given))
    assert submit()["scan"] == (4, 1)
    assert set(looked_up) == {1}


@pytest.mark.nightly
def test_a_file_that_goes_is_rejected_and_counted_again_when_it_is_back(submit: Submit) -> None:
    Path("data/c0.pdb").rename("data/away")
    submit()
    assert "missing_file" in newest().rejected.read_text()
    Path("data/away").rename("data/c0.pdb")
    settle(Path("data"))
    submit()
    assert "missing_file" not in newest().rejected.read_text()


@pytest.mark.nightly
def test_an_item_that_is_added_is_done_and_one_that_is_removed_goes(submit: Submit) -> None:
    before = Path("data/manifest.csv").read_text()
    Path("data/manifest.csv").write_text(before + "c8,c0.pdb,B,A,train,8\n")
    assert submit()["scan"] == (5, 1)
    Path("data/manifest.csv").write_text(before)
    submit()
    assert "\nc8," not in newest().inventory.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("setting", "stage"),
    [("structures.altlocs=first", "scan"), ("graph.neighbours=7", "graph"), ("embed.storage=fp16", "embed")],
)
def test_settings_that_changed_are_followed(submit: Submit, setting: str, stage: str) -> None:
    assert submit(setting)[stage][1] > 0


def known_stages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the stages that look nothing up, in a process that has just begun."""
    opened, known = project.Project.open(from_resolved(newest().config.read_text())), []
    with monkeypatch.context() as patch:
        refuse_looking(patch)
        for name in ("scan", "embed", "graph"):
            with suppress(AssertionError):
                known_stage(name).survey(opened, None, 1)
                known.append(name)
    return known


@pytest.mark.nightly
def test_what_another_parser_has_read_does_not_stand(submit: Submit, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree("cache")  # while a shard of it is in doubt, no result stands
    submit()
    assert known_stages(monkeypatch) == ["scan", "embed", "graph"]
    structure_files.parser_of.cache_clear()
    with monkeypatch.context() as later:
        later.setattr(structure_files, "PARSER", "gemmi-99.9")
        assert known_stages(later) == []
    structure_files.parser_of.cache_clear()


@pytest.mark.nightly
@pytest.mark.parametrize("name", LISTS)
def test_a_list_that_was_written_into_is_made_anew(submit: Submit, name: str) -> None:
    listed = lists()
    with getattr(newest(), name).open("a") as file:  # as some editors do: it is the very file that is taken over
        file.write("a note of mine\n")
    assert is_complete(submit())
    assert lists() == listed


@pytest.mark.nightly
@pytest.mark.parametrize("lost", [5, 5000])
def test_what_is_torn_is_found_out_anew(submit: Submit, lost: int) -> None:
    files = [*Path("runs", FOLDER).glob("*/*")]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:-lost])
    assert is_complete(submit())
    assert "c9" in newest().rejected.read_text()


@pytest.mark.nightly
def test_results_outlive_the_runs_that_found_them_but_not_the_records(submit: Submit) -> None:
    submit()
    listed = lists()
    assert list(prune(foresee_pruning(Path("runs"), 1)))
    assert is_complete(submit())
    assert lists() == listed
    for path in Path("cache", "graph", "shards").glob("*.safetensors"):
        path.unlink()
    assert submit()["graph"][1] > 0
    assert is_complete(submit())


SEQUENCES = ("AAAA", "CC", "DDD", "AAAA", "EEEEEE")
IN_SPLITS = ("val", "", "train", "train", "val")


def census_of(numbers: range) -> CensusTally:
    """Count some items of which two in different splits share a sequence; every third cannot be used."""
    tally = CensusTally(keys={"scan": bytearray(number for number in numbers)})
    for number in numbers:
        sequence, split = SEQUENCES[number % 5], IN_SPLITS[number % 5]
        chains = (ChainSummary("A", Kind.PROTEIN, sequence, len(sequence), len(sequence), 5 * len(sequence)),)
        inventory = Inventory(partners=(Partner(Role.WHOLE, "", chains),))
        if number % 3 == 2:
            tally.reject(Rejection(f"i{number - 1}", Reason.DUPLICATE_ID, "twice", split=split))
        else:
            tally.accept(Item(f"i{number}", split=split, cluster=f"k{number % 4}"), inventory)
        tally.counts.update(items=1)
    return tally


def graphs_of(numbers: range) -> GraphTally:
    """Count some graphs that are not kept, so that their table has the items."""
    tally = GraphTally()
    for number in numbers:
        item = Item(f"i{number}", split=IN_SPLITS[number % 5], labels={"pKd": str(number)}, sequence="AC")
        sizes = {"nodes": 10 + number, "edges": 5 * number}
        tally.accept(item, bytes([number] * 16), sizes, ("pKd",), kept=False)
    return tally


@pytest.mark.parametrize("count_items", [census_of, graphs_of])
def test_what_was_counted_of_blocks_adds_up_to_what_is_counted_of_all(
    tmp_path: Path, count_items: Callable[[range], CensusTally | GraphTally]
) -> None:
    whole = count_items(range(30))
    found, total = blocks.FoundTallies(tmp_path, type(whole)), type(whole)()
    for start, end in ((0, 7), (7, 8), (8, 8), (8, 30)):
        found.put(bytes([start, end] * 8), count_items(range(start, end)))
        tally = found.get(bytes([start, end] * 8))
        assert tally == count_items(range(start, end))
        blocks.add_up(total, tally)
    total.lines, total.keys = whole.lines, whole.keys  # which are written block by block
    if isinstance(whole, GraphTally):
        total.rows = whole.rows  # as are these
    assert total == whole
    if isinstance(whole, CensusTally):
        assert whole.census().leaks
        assert total.census() == whole.census()
