"""`pipeline plan train` before any graph is made: from the sizes of a scan, or from sizes that were typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.planning import prepare
from tests.conftest import ROOT
from tests.testkit.command import Command
from tests.testkit.once import Shelf
from tests.testkit.project import TRAIN, Project, copied, make_project

PLAN = ("plan", "--stage", "train", "--gpu", "a100-40gb")
SIZES = "nodes=300,edges=6000,pairs=20000"
ITEMS = 6
NONBONDED = '''
from pipeline.tasks.interface import Interface

class Nonbonded(Interface):
    """Its memory follows from edges between the partners, which a scan does not count."""
    def cost(self, item):
        return {**super().cost(item), "cross": item["cross"]}
'''


def make_unscanned(folder: Path) -> None:
    make_project(folder, ITEMS, growth=10, **{**TRAIN, "train__effective_batch": 4, "train__epochs": 3})
    (folder / "nonbonded.py").write_text(NONBONDED)


def make_scanned(folder: Path) -> None:
    make_unscanned(folder)
    Project(folder).finishes("scan")


@pytest.fixture
def unscanned(shelf: Shelf, tmp_path: Path) -> Project:
    """Return a project in which nothing was submitted; its folder is the current one."""
    return Project(copied(shelf, "unscanned", make_unscanned, tmp_path))


@pytest.fixture
def scanned(shelf: Shelf, tmp_path: Path) -> Project:
    """Return a project that was scanned and has no graphs; its folder is the current one."""
    return Project(copied(shelf, "scanned", make_scanned, tmp_path))


def planned(pipeline: Command, *options: str) -> dict[str, Any]:
    """Return the plan that a command prints."""
    done = pipeline(*PLAN, "--json", *options)
    assert done.code == 0, done.err
    (document,) = done.json()
    return dict(document)


def kept_plans() -> list[Path]:
    """Return the plans that are remembered in the current folder, among what else is of tasks."""
    return [path for path in Path.cwd().rglob(".plans/*.json") if "weights_digest" not in json.loads(path.read_text())]


@pytest.mark.nightly
def test_the_plan_of_a_scan_is_the_one_of_its_graphs_where_edges_are_those_of_nearest_neighbours(pipeline, scanned):
    early = planned(pipeline)
    assert early["items"] == ITEMS
    assert kept_plans() == []
    scanned.finishes("graph")
    late = planned(pipeline)
    assert (early["sizes_from"] != "", late["sizes_from"]) == (True, "")
    assert (early["item"], early["plans"]) == (late["item"], late["plans"])
    assert len(kept_plans()) == 1  # only the one of graphs
    # Typed sizes come before those of graphs, and leave the plan that was kept.
    (kept,) = kept_plans()
    text = kept.read_text()
    assert planned(pipeline, "--sizes", SIZES)["item"] != late["item"]
    assert kept.read_text() == text
    assert planned(pipeline) == late


@pytest.mark.nightly
def test_typed_sizes_are_enough_to_plan_and_pass_over_a_curriculum(pipeline, unscanned):
    assert planned(pipeline, "--sizes", SIZES)["items"] == 4  # one step
    curriculum = ("--set", "train.curriculum=[{epochs: 1, largest: {nodes: 80}}]")
    found = planned(pipeline, "--sizes", f"{SIZES},items=1000", *curriculum)
    assert (found["items"], list(found["plans"])) == (1000, ["all items"])
    assert found["item"] == {"nodes": 300, "edges": 6000, "pairs": 20000}
    larger = planned(pipeline, "--sizes", "nodes=3000,edges=60000,pairs=2000000")
    assert larger["plans"]["all items"]["live"]["value"] > found["plans"]["all items"]["live"]["value"]


@pytest.mark.nightly
def test_typed_sizes_asked_for_again_are_answered_at_once_and_others_are_planned(pipeline, unscanned, monkeypatch):
    first = pipeline(*PLAN, "--sizes", SIZES)
    with monkeypatch.context() as patched:
        patched.setattr("pipeline.memory.tracing.tracer.TraceSession", lambda *_: pytest.fail("traced again"))
        assert pipeline(*PLAN, "--sizes", SIZES).out == first.out
    plans = len(kept_plans())
    pipeline(*PLAN, "--sizes", f"{SIZES},items=7")
    monkeypatch.setattr(prepare, "torch_version", lambda: "2.99.0")
    pipeline(*PLAN, "--sizes", SIZES)  # another torch may take other memory
    assert len(kept_plans()) == plans + 2


@pytest.mark.nightly
def test_a_data_set_without_a_scan_or_without_its_files_can_be_planned_by_sizes(pipeline, unscanned):
    done = pipeline(*PLAN)
    assert (done.code, "pipeline submit scan" in done.err, "--sizes nodes=" in done.err) == (2, True, True)
    unscanned.sets(data__path="nowhere")
    done = pipeline(*PLAN)
    assert done.code in {2, 3}
    assert "--sizes nodes=" in done.err
    assert pipeline(*PLAN, "--sizes", SIZES).code == 0
    Path("one.fasta").write_text(">one\nMKV\n")  # sequences alone have no graphs to train on
    assert pipeline(*PLAN, "--set", "data={source: fasta, path: one.fasta}").code == 2


@pytest.mark.nightly
def test_a_reader_without_its_files_can_be_planned_by_sizes(pipeline, tmp_path):
    shutil.copy(ROOT / "configs" / "recipes" / "denovo_recursive.yaml", tmp_path / "pipeline.yaml")
    done = pipeline(*PLAN)
    assert done.code in {2, 3}
    assert "--sizes" in done.err
    found = planned(pipeline, "--sizes", "peaks=60,peptide=12")  # whose curriculum is about shorter ones
    assert found["item"] == {"peaks": 60, "residues": 12}  # as the task's cost() names them


@pytest.mark.nightly
def test_wrong_sizes_are_refused(pipeline, unscanned):
    for sizes, word in (
        ("nodes", "'nodes'"),
        ("nodes=many", "'nodes=many'"),
        ("nodes=-1", "'nodes=-1'"),
        ("items=0,nodes=3", "'items=0'"),
        (f"nodes={10**30}", "nodes"),
        ("nodes=3,nodes=4", "nodes"),
        ("items=10", "size"),
        ("nodes=300,edges=6000", "nodes=300,edges=6000,pairs="),
    ):
        done = pipeline(*PLAN, "--sizes", sizes)
        assert (done.code, word in done.err, "Traceback" in done.err) == (2, True, False), sizes
    assert pipeline("plan", "--stage", "scan", "--sizes", SIZES).code == 2


@pytest.mark.nightly
def test_a_size_that_no_scan_knows_is_named_with_what_would_know_it(pipeline, scanned):
    words = (*PLAN, "--set", "train.task=nonbonded:Nonbonded")
    done = pipeline(*words, "--set", "graph.cross_neighbours=5")
    assert (done.code, "cross" in done.err, "pipeline submit graph" in done.err) == (2, True, True)
    done = pipeline(*words)  # without such edges it is known that there are none
    assert done.code == 0, done.err
