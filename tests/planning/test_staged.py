"""`cache.stage`: what training and evaluating read is first copied to the node's own disk; nothing depends on it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import read_config
from pipeline.dataset.loading import table_of
from pipeline.journal.run_folder import runs_in
from pipeline.planning import rank_setup as staging
from pipeline.planning.rank_setup import staged
from pipeline.project.project import Project
from pipeline.records import RankPlace, TaskContext
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.training.ranks import Ranks
from tests.testkit.command import Command

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the scratch folder of this node, as its environment names it."""
    if Disk().in_memory(tmp_path):
        pytest.skip("the tests' folder is memory, where nothing is staged")
    (tmp_path / "node").mkdir()
    monkeypatch.setenv("NODE_SCRATCH", str(tmp_path / "node"))
    return tmp_path / "node"


def opened(*sets: str) -> Project:
    """Open the project in the current folder."""
    return Project.open(
        read_config(Path("pipeline.yaml"), sets or ["cache.stage=$NODE_SCRATCH"]).config, remember=False
    )


def rank_context(rank: int = 0, world: int = 1) -> TaskContext:
    return TaskContext(lambda *_: None, place=RankPlace(rank, world, rank))


def put_on_node(project: Project, context: TaskContext | None = None) -> tuple[Project, list[str]]:
    """Stage all items of the data set; return the project as it is read then, and what was said."""
    said: list[str] = []
    table = table_of(project)
    return staged(
        project, lambda: [table.of_split("train"), table], Ranks(), context or rank_context(), said.append
    ), said


def figures_of(pipeline: Command) -> Any:
    run = json.loads(pipeline("status", "--json").out)
    return next(one for one in run["stages"] if one["name"] == "evaluate")["census"]["figures"]


@pytest.mark.nightly
def test_a_model_that_is_trained_and_evaluated_from_the_nodes_own_disk_is_the_same(pipeline, trained, node, tmp_path):
    sets = ("cache.stage=$NODE_SCRATCH", "cluster.evaluate.ranks=2", f"train.models={tmp_path / 'others'}")
    done = pipeline("submit", "--stage", "evaluate", "--follow", *(word for one in sets for word in ("--set", one)))
    assert done.code == 0, done.err
    assert figures_of(pipeline) == pytest.approx(trained.figures, rel=1e-6)
    newest = runs_in(Path("runs"))[-1].path
    log = "".join(path.read_text() for path in sorted((newest / "logs").glob("*")))
    for wanted in ({"graph": 4, "embed": 8}, {"graph": 5, "embed": 10}):  # of train and val; of test
        found = [CacheFolder(path) for path in node.glob("pipeline-*")]
        assert wanted in [{kind: one.kind(kind).stat().records for kind in one.kinds()} for one in found]
    assert log.count("staged in ") == 2  # the other rank says nothing
    events = "".join(path.read_text() for path in newest.rglob("*.jsonl"))
    assert '"staged_bytes"' in events
    assert '"staged_s"' in events


@pytest.mark.nightly
def test_what_is_staged_is_read_first_and_the_cache_for_the_rest(trained, node):
    project, said = put_on_node(opened())
    assert said[0].startswith(f"staged in {next(node.glob('pipeline-*'))}: 9 of graph, 18 of embed; ")
    assert (project.graphs.store.missing([]), len(said)) == ([], 1)
    table = table_of(project)
    keys = [table.key(number) for number in range(len(table))]
    assert {places[0].layer for places in project.graphs.store.locate(keys)} == {0}
    shutil.rmtree(node)
    again = opened()
    again = replace(again, cache=again.cache.behind(CacheFolder(node)))
    assert {places[0].layer for places in again.graphs.store.locate(keys)} == {1}


@pytest.mark.nightly
def test_the_next_job_with_the_same_items_copies_nothing(trained, node):
    put_on_node(opened())
    context = rank_context()
    put_on_node(opened(), context)
    assert "staged_bytes" not in context.report.figures
    assert len(list(node.glob("pipeline-*"))) == 1


@pytest.mark.nightly
def test_what_cannot_be_staged_is_said_once_and_read_from_the_cache(trained, node, monkeypatch):
    table = table_of(opened())

    def refused(*sets: str) -> str:
        project, said = opened(*sets), list[str]()
        assert staged(project, lambda: [table], Ranks(), rank_context(), said.append) is project
        (one,) = said
        return one

    assert "NOT_SET_ANYWHERE" in refused("cache.stage=$NOT_SET_ANYWHERE")
    assert "/proc/nowhere" in refused("cache.stage=/proc/nowhere")
    refused("cache.stage=$NODE_SCRATCH", "graph.cache=false")
    monkeypatch.setattr(Disk, "free_bytes", lambda _disk, _path: 1000)
    refused("cache.stage=$NODE_SCRATCH")


@pytest.mark.nightly
def test_graphs_are_staged_where_there_is_room_for_them_alone(trained, node, monkeypatch):
    free = Disk.free_bytes
    monkeypatch.setattr(Disk, "free_bytes", lambda disk, path: 0 if (path / "graph").exists() else free(disk, path))
    context = rank_context()
    found, _ = put_on_node(opened(), context)
    assert [layer.kinds() for layer in found.cache.ahead] == [["graph"]]
    assert found.cache.ahead[0].own("graph").stat().records == 9
    assert context.report.figures["staged_bytes"] > 0
    monkeypatch.setattr(Disk, "free_bytes", free)
    assert "9 of graph, 18 of embed; " in put_on_node(opened())[1][0]


@pytest.mark.nightly
def test_when_time_is_up_the_rest_is_read_from_the_cache(trained, node, monkeypatch):
    monkeypatch.setattr(staging, "WITHIN_S", 0.0)
    found, _ = put_on_node(opened())
    table = table_of(found)
    assert found.graphs.store.missing([table.key(number) for number in range(len(table))]) == []
    monkeypatch.undo()
    monkeypatch.setenv("NODE_SCRATCH", str(node))
    monkeypatch.chdir(trained.folder)
    assert "9 of graph" in put_on_node(opened())[1][0]


@pytest.mark.nightly
def test_a_job_that_is_told_to_end_does_not_go_on_copying(trained, node):
    context = replace(rank_context(), ending=lambda: 15)
    assert "0 of graph" in put_on_node(opened(), context)[1][0]
