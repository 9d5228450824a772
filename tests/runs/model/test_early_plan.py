"""`pipeline plan --stage train` before any graph is made: from the sizes of a scan, or from sizes that were typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.runs.model import prepare
from tests.testkit.command import Command
from tests.testkit.project import Project, settle, write_complexes

PLAN = ("plan", "--stage", "train", "--gpu", "a100-40gb")
SIZES = "nodes=300,edges=6000,pairs=20000"
ITEMS = 6
CONFIG = """\
data: {source: glob, path: data}
train:
  task: "pipeline.tasks.interface:Interface"
  options: {embedding_dim: 32, width: 16, layers: 2, pair_width: 8}
  split: null
  effective_batch: 4
  epochs: 3
"""
NONBONDED = '''
from pipeline.tasks.interface import Interface

class Nonbonded(Interface):
    """Its memory follows from edges between the partners, which a scan does not count."""
    def cost(self, item):
        return {**super().cost(item), "cross": item["cross"]}
'''


def copied(project: Path, folder: Path, *stages: str) -> Path:
    """Return a copy of a project in which stages have run."""
    shutil.copytree(project, folder)
    settle(folder / "data")
    Project(folder).finishes(*stages)
    return folder


@pytest.fixture(scope="module")
def unscanned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project in which nothing was submitted."""
    folder = tmp_path_factory.mktemp("early")
    write_complexes(folder / "data", ITEMS, growth=10)
    (folder / "pipeline.yaml").write_text(CONFIG)
    (folder / "nonbonded.py").write_text(NONBONDED)
    return folder


@pytest.fixture(scope="module")
def scanned(unscanned: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project that was scanned and has no graphs, in which nothing is changed."""
    return copied(unscanned, tmp_path_factory.mktemp("scanned") / "project", "scan")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return what types commands."""
    return Command(monkeypatch, capsys)


def planned(typed: Command, *options: str) -> dict[str, Any]:
    """Return the plan that a command prints."""
    done = typed(*PLAN, "--json", *options)
    assert done.code == 0, done.err
    (document,) = json.loads(done.out)
    return document


def kept_plans() -> list[Path]:
    """Return the plans that are remembered in the current folder, among what else is of tasks."""
    return [path for path in Path.cwd().rglob(".plans/*.json") if "trains" not in json.loads(path.read_text())]


@pytest.mark.nightly
def test_a_scan_is_enough_to_plan_and_the_plan_says_that_its_sizes_are_the_scans(
    typed: Command, scanned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scanned)
    done = typed(*PLAN)
    assert done.code == 0, done.err
    assert f"sizes of the scan: {ITEMS} items" in done.out
    assert "fits: " in done.out
    assert kept_plans() == []


@pytest.mark.nightly
def test_the_plan_of_a_scan_is_the_one_of_its_graphs_where_edges_are_those_of_nearest_neighbours(
    typed: Command, unscanned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(unscanned, tmp_path / "project", "scan")
    monkeypatch.chdir(folder)
    early = planned(typed)
    Project(folder).finishes("graph")
    late = planned(typed)
    assert (early["sizes_from"] != "", late["sizes_from"]) == (True, "")
    assert early["item"] == late["item"]
    assert early["plans"] == late["plans"]
    assert len(kept_plans()) == 1  # only the one of graphs


@pytest.mark.nightly
def test_sizes_that_are_typed_are_enough_to_plan_without_any_data(
    typed: Command, unscanned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(unscanned)
    done = typed(*PLAN, "--sizes", SIZES)
    assert done.code == 0, done.err
    assert "sizes as typed: 300 nodes, 6,000 edges, 20,000 pairs" in done.out
    assert "4 items, " in done.out  # one step
    assert "items=N says how many there are" in done.out


@pytest.mark.nightly
def test_typed_sizes_asked_for_again_are_answered_at_once_and_others_are_planned(
    typed: Command, unscanned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copied(unscanned, tmp_path / "project"))
    first = typed(*PLAN, "--sizes", SIZES)
    again = typed(*PLAN, "--sizes", SIZES)
    assert ("the plan that was made before" in first.err, "the plan that was made before" in again.err) == (False, True)
    assert again.out == first.out
    other = typed(*PLAN, "--sizes", f"{SIZES},items=7")
    assert "the plan that was made before" not in other.err
    assert "7 items, " in other.out
    monkeypatch.setattr(prepare, "torch_version", lambda: "2.99.0")
    later = typed(*PLAN, "--sizes", SIZES)
    assert "the plan that was made before" not in later.err  # another torch may take other memory


@pytest.mark.nightly
def test_typed_sizes_say_how_many_items_there_are_and_pass_over_a_curriculum(
    typed: Command, unscanned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(unscanned)
    curriculum = ("--set", "train.curriculum=[{epochs: 1, largest: {nodes: 80}}]")
    found = planned(typed, "--sizes", f"{SIZES},items=1000", *curriculum)
    assert (found["items"], list(found["plans"])) == (1000, ["all items"])
    assert found["item"] == {"nodes": 300, "edges": 6000, "pairs": 20000}
    larger = planned(typed, "--sizes", "nodes=3000,edges=60000,pairs=2000000")
    assert larger["plans"]["all items"]["live"]["value"] > found["plans"]["all items"]["live"]["value"]


@pytest.mark.nightly
def test_typed_sizes_come_before_those_of_graphs_and_leave_the_plan_that_was_kept(
    typed: Command, unscanned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copied(unscanned, tmp_path / "project", "graph"))
    before = kept_plans()  # of the tests before
    known = planned(typed)
    (kept,) = set(kept_plans()).difference(before)
    text = kept.read_text()
    assert planned(typed, "--sizes", SIZES)["item"] != known["item"]
    assert (kept in kept_plans(), kept.read_text()) == (True, text)
    assert planned(typed) == known


@pytest.mark.nightly
def test_a_data_set_that_nobody_scanned_is_told_both_ways_to_plan(
    typed: Command, unscanned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(unscanned)
    done = typed(*PLAN)
    assert done.code == 2
    assert "pipeline submit --stage scan" in done.err
    assert "--sizes nodes=" in done.err


@pytest.mark.nightly
def test_a_project_without_its_data_can_be_planned_and_is_told_how(
    typed: Command, unscanned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(unscanned / "pipeline.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    done = typed(*PLAN)
    assert done.code in {2, 3}
    assert "--sizes nodes=" in done.err
    assert typed(*PLAN, "--sizes", SIZES).code == 0


@pytest.mark.nightly
def test_a_reader_without_its_files_can_be_planned_for_and_is_told_how(
    typed: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Path(__file__).parents[3] / "configs" / "recipes" / "denovo_recursive.yaml"
    shutil.copy(recipe, tmp_path / "pipeline.yaml")
    monkeypatch.chdir(tmp_path)
    done = typed(*PLAN)
    assert done.code in {2, 3}
    assert "--sizes NAME=NUMBER" in done.err
    assert "next: " in done.err
    done = typed(*PLAN, "--sizes", "peaks=60,peptide=12")  # whose curriculum is about shorter ones
    assert done.code == 0, done.err
    assert "sizes as typed: 60 peaks, 12 peptide" in done.out


@pytest.mark.nightly
def test_sequences_are_not_planned_for(
    typed: Command, unscanned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.fasta").write_text(">one\nMKV\n")
    shutil.copy(unscanned / "pipeline.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    done = typed(*PLAN, "--set", "data={source: fasta, path: one.fasta}")
    assert (done.code, "sequences alone have no graphs to train on" in done.err) == (2, True), done.err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--sizes", "nodes"), ("'nodes'", "nodes=300")),
        (("--sizes", "nodes=many"), ("'nodes=many'",)),
        (("--sizes", "nodes=-1"), ("'nodes=-1'",)),
        (("--sizes", "items=0,nodes=3"), ("'items=0'",)),
        (("--sizes", f"nodes={10**30}"), ("is no size",)),
        (("--sizes", "nodes=3,nodes=4"), ("nodes is told twice",)),
        (("--sizes", "items=10"), ("no size",)),
        (("--sizes", "nodes=300,edges=6000"), ("pairs", "cost()", "nodes=300,edges=6000,pairs=")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_sizes_that_are_no_sizes_or_not_all_that_a_task_asks_for_are_told(
    typed: Command, unscanned: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(unscanned)
    done = typed(*PLAN, *options)
    assert done.code == 2, done.out
    assert all(word in done.err for word in words), done.err
    assert "next: " in done.err
    assert "Traceback" not in done.err


@pytest.mark.nightly
def test_a_size_that_no_scan_knows_is_named_with_what_would_know_it(
    typed: Command, scanned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scanned)
    words = (*PLAN, "--set", "train.task=nonbonded:Nonbonded")
    done = typed(*words, "--set", "graph.cross_neighbours=5")
    assert done.code == 2
    assert "cost() asks for cross, which the scan does not tell" in done.err
    assert "pipeline submit --stage graph" in done.err
    done = typed(*words)  # without such edges it is known that there are none
    assert done.code == 0, done.err


@pytest.mark.nightly
def test_sizes_are_refused_for_other_stages(typed: Command, unscanned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(unscanned)
    done = typed("plan", "--stage", "scan", "--sizes", SIZES)
    assert done.code == 2
    assert "--sizes is about training" in done.err
    assert "pipeline plan --stage train" in done.err
