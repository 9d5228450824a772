"""`cache.stage`: what training and evaluating read is first copied to the node's own disk; nothing depends on it."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import read_config
from pipeline.project.project import Project
from pipeline.records import RankPlace, TaskContext
from pipeline.runs.dataset.loading import table_of
from pipeline.runs.model import rank_setup as staging
from pipeline.runs.model.rank_setup import staged
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.training.ranks.rank_protocol import SingleRank
from tests.runs.workflow.trained import Trained, trained_project
from tests.testkit.command import Command

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared


@pytest.fixture
def trained(tmp_path_factory: pytest.TempPathFactory, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> Trained:
    return trained_project(tmp_path_factory, pipeline, monkeypatch)


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


def tell(rank: int = 0, world: int = 1) -> TaskContext:
    return TaskContext(lambda *_: None, place=RankPlace(rank, world, rank))


def put_on_node(project: Project, told: TaskContext | None = None) -> tuple[Project, list[str]]:
    """Stage all items of the data set; return the project as it is read then, and what was said."""
    said: list[str] = []
    table = table_of(project)
    return staged(project, lambda: [table.of_split("train"), table], SingleRank(), told or tell(), said.append), said


def figures_of(pipeline: Command) -> Any:
    run = json.loads(pipeline("status", "--json").out)
    return next(one for one in run["stages"] if one["name"] == "evaluate")["census"]["figures"]


@pytest.mark.nightly
def test_a_model_that_is_trained_and_evaluated_from_the_nodes_own_disk_is_the_same(
    pipeline: Command, trained: Trained, node: Path, tmp_path: Path
) -> None:
    sets = ("cache.stage=$NODE_SCRATCH", "cluster.evaluate.ranks=2", f"train.models={tmp_path / 'models'}")
    done = pipeline("submit", "--stage", "evaluate", "--follow", *(word for one in sets for word in ("--set", one)))
    assert done.code == 0, done.err
    assert figures_of(pipeline) == pytest.approx(trained.figures, rel=1e-6)
    newest = sorted(Path("runs").glob("*evaluate*"))[-1]
    log = "".join(path.read_text() for path in sorted((newest / "logs").glob("*")))
    for wanted in ({"graph": 4, "embed": 8}, {"graph": 5, "embed": 10}):  # of train and val; of test
        said = ", ".join(f"{count} of {kind}" for kind, count in wanted.items())
        (folder,) = [path for path in node.glob("pipeline-*") if f"staged in {path}: {said}; " in log]
        scratch = CacheFolder(folder)
        assert {kind: scratch.kind(kind).stat().records for kind in scratch.kinds()} == wanted
    assert log.count("staged in ") == 2  # the other rank says nothing
    events = "".join(path.read_text() for path in newest.rglob("*.jsonl"))
    assert '"staged_bytes"' in events
    assert '"staged_s"' in events


@pytest.mark.nightly
def test_what_is_staged_is_read_first_and_the_cache_for_the_rest(trained: Trained, node: Path) -> None:
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
def test_the_next_job_with_the_same_items_copies_nothing(trained: Trained, node: Path) -> None:
    put_on_node(opened())
    told = tell()
    _, said = put_on_node(opened(), told)
    assert "by an earlier job: nothing is to be copied" in said[0]
    assert "staged_bytes" not in told.report.figures
    assert len(list(node.glob("pipeline-*"))) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["cache.stage=$NOT_SET_ANYWHERE"], "the environment variable NOT_SET_ANYWHERE is not set"),
        (["cache.stage=/proc/nowhere"], "No such file or directory"),
        (["cache.stage=$NODE_SCRATCH", "graph.cache=false"], "graphs are not kept"),
    ],
)
def test_what_cannot_be_staged_is_said_once_and_read_from_the_cache(
    trained: Trained, node: Path, sets: list[str], why: str
) -> None:
    project = opened(*sets)
    table = table_of(opened())
    said: list[str] = []
    found = staged(project, lambda: [table], SingleRank(), tell(), said.append)
    assert found is project
    assert len(said) == 1
    assert said[0].startswith("not all is staged: ")
    assert why in said[0]


@pytest.mark.nightly
def test_without_room_nothing_is_staged(trained: Trained, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "free_bytes", lambda _disk, _path: 1000)
    project = opened()
    found, said = put_on_node(project)
    assert found is project
    assert "do not fit in" in said[0]


@pytest.mark.nightly
def test_graphs_are_staged_where_there_is_room_for_them_alone(
    trained: Trained, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Disk.free_bytes
    monkeypatch.setattr(Disk, "free_bytes", lambda disk, path: 0 if (path / "graph").exists() else free(disk, path))
    told = tell()
    found, said = put_on_node(opened(), told)
    assert "do not fit in" in said[0]
    assert [layer.kinds() for layer in found.cache.ahead] == [["graph"]]
    assert found.cache.ahead[0].own("graph").stat().records == 9
    assert told.report.figures["staged_bytes"] > 0
    monkeypatch.setattr(Disk, "free_bytes", free)
    assert "9 of graph, 18 of embed; " in put_on_node(opened())[1][0]


@pytest.mark.nightly
def test_when_time_is_up_the_rest_is_read_from_the_cache(
    trained: Trained, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "WITHIN_S", 0.0)
    found, said = put_on_node(opened())
    assert "; the rest is read from " in said[0]
    table = table_of(found)
    assert found.graphs.store.missing([table.key(number) for number in range(len(table))]) == []
    monkeypatch.undo()
    monkeypatch.setenv("NODE_SCRATCH", str(node))
    monkeypatch.chdir(trained.folder)
    assert "9 of graph" in put_on_node(opened())[1][0]


@pytest.mark.nightly
def test_a_job_that_is_told_to_end_does_not_go_on_copying(trained: Trained, node: Path) -> None:
    told = replace(tell(), ending=lambda: 15)
    assert "0 of graph" in put_on_node(opened(), told)[1][0]


@pytest.mark.nightly
def test_the_first_rank_of_a_node_copies_and_the_others_read_what_it_copied(trained: Trained, node: Path) -> None:
    """Two ranks of one node, and one of another node that has no such folder."""
    project, table = opened(), table_of(opened())
    together = Together(3)
    found: dict[int, Project] = {}
    said: dict[int, list[str]] = {0: [], 1: [], 2: []}

    def rank(number: int, local_rank: int, host: str, sets: list[str]) -> None:
        told = TaskContext(lambda *_: None, place=RankPlace(number, 3, local_rank, 2, host=host))
        own = opened(*sets)
        found[number] = staged(own, lambda: [table], together.as_rank(number), told, said[number].append)

    here = ["cache.stage=$NODE_SCRATCH"]
    places = [(0, 0, "one", here), (1, 1, "one", here), (2, 0, "two", ["cache.stage=$NOT_SET_ANYWHERE"])]
    threads = [threading.Thread(target=rank, args=place) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [[layer.root.parent for layer in found[number].cache.ahead] for number in range(3)] == [[node], [node], []]
    assert [len(said[number]) for number in range(3)] == [1, 0, 1]
    assert project.cache.ahead == ()


class Together:
    """Ranks that are threads, and say one thing each."""

    def __init__(self, world: int) -> None:
        self.said: list[Any] = [None] * world
        self.all = threading.Barrier(world, timeout=60)

    def as_rank(self, number: int) -> Any:
        together = self

        class Rank(SingleRank):
            rank, world = number, len(together.said)

            def exchange(self, said: Any) -> list[Any]:
                together.said[number] = said
                together.all.wait()
                return list(together.said)

        return Rank()
