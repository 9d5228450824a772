"""`pipeline submit --stage graph` as people type it: what it builds, what it does not build again, how it says no."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.load import read_config
from pipeline.graphs.item_graph import decode_graph
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.project.project import Project
from pipeline.records import EventKind
from pipeline.runs.workflow import graph_stage
from pipeline.store.cache_folder import CacheFolder
from pipeline.structures.synthetic import complex_pdb
from pipeline.training.items.item_table import ItemTable
from tests.testkit.command import Command
from tests.testkit.project import settle

SUBMIT = ("submit", "--stage", "graph", "--executor", "local", "--follow")
CONFIG = "data: {source: glob, path: data}\n"
RESIDUES = 30


@pytest.fixture
def make_complexes(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes `n` complexes whose partners touch, and a configuration."""

    def make(n: int = 3, settings: str = "") -> Path:
        (tmp_path / "data").mkdir(exist_ok=True)
        for number in range(n):
            path = tmp_path / "data" / f"c{number}.pdb"
            if not path.exists():
                path.write_bytes(complex_pdb(number, RESIDUES, RESIDUES + number))
        settle(tmp_path / "data")
        (tmp_path / "pipeline.yaml").write_text(CONFIG + settings)
        return tmp_path

    return make


def newest(folder: Path) -> RunFolder:
    return runs_in(folder / "runs")[-1]


def started(folder: Path, stage: str) -> int:
    """Count the tasks of a stage that the newest run started."""
    found = (event for event in LedgerReader(newest(folder)).fresh() if event.kind is EventKind.TASK_STARTED)
    return sum(event.data["stage"] == stage for event in found)


def judged(folder: Path) -> dict[str, Any]:
    """Return what the newest run says of its graphs."""
    ended = [event for event in LedgerReader(newest(folder)).fresh() if event.kind is EventKind.STAGE_ENDED]
    return dict(next(event.data["census"] for event in ended if event.data["stage"] == "graph"))


def graphs(folder: Path) -> dict[bytes, Any]:
    store = CacheFolder(folder / "cache").kind("graph")
    return {record.key: decode_graph(record.arrays, record.meta) for record in store.read(store.keys())}


@pytest.mark.nightly
def test_in_one_run_with_the_scan_each_structure_is_read_once_for_both(
    pipeline: Command, make_complexes: Callable[..., Path]
) -> None:
    folder = make_complexes(4)
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    assert "scan: 4 items: 0 cached, 4 to do in 1 task" in done.err
    assert "graph: 4 graphs: 4 cached, 0 to do" in done.err
    assert started(folder, "graph") == 0
    found = graphs(folder)
    assert len(found) == 4
    assert (
        f"4 items: 4 accepted, 0 rejected (0.0%); {sum(one.sizes()['nodes'] for one in found.values()):,} nodes"
        in done.out
    )


@pytest.mark.nightly
def test_the_graph_stage_alone_builds_the_same_graphs(pipeline: Command, make_complexes: Callable[..., Path]) -> None:
    folder = make_complexes(3)
    assert pipeline(*SUBMIT).code == 0
    fused = graphs(folder)
    shutil.rmtree(folder / "cache" / "graph")
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    assert "graph: 3 graphs: 0 cached, 3 to do in 1 task" in done.err
    assert started(folder, "scan") == 0
    alone = graphs(folder)
    assert alone.keys() == fused.keys()
    for key, graph in alone.items():
        for mine, theirs in zip(graph.parts, fused[key].parts, strict=True):
            assert mine.nodes.keys() == theirs.nodes.keys()
            assert all(
                np.array_equal(mine.nodes[name], theirs.nodes[name], equal_nan=name in ("pos", "side"))
                for name in mine.nodes
            )
            assert all(np.array_equal(mine.edges[name], theirs.edges[name]) for name in mine.edges)


@pytest.mark.nightly
def test_a_second_submit_builds_nothing_and_a_new_structure_costs_one_graph(
    pipeline: Command, make_complexes: Callable[..., Path]
) -> None:
    make_complexes(3)
    assert pipeline(*SUBMIT).code == 0
    assert "graph: 3 graphs: 3 cached, 0 to do" in pipeline(*SUBMIT).err
    make_complexes(4)
    done = pipeline(*SUBMIT)
    assert "scan: 4 items: 3 cached, 1 to do" in done.err
    assert "graph: 4 graphs: 4 cached, 0 to do" in done.err


@pytest.mark.nightly
def test_which_partner_is_the_ligand_is_part_of_the_keys_unless_it_is_the_one_that_is_named(
    pipeline: Command, make_complexes: Callable[..., Path]
) -> None:
    folder = make_complexes(3)
    assert pipeline(*SUBMIT).code == 0
    named = graphs(folder)
    assert "scan: 3 items: 3 cached, 0 to do" in pipeline(*SUBMIT, "--set", "data.ligand=as_named").err
    done = pipeline(*SUBMIT, "--set", "data.ligand=smaller")
    assert "scan: 3 items: 0 cached, 3 to do" in done.err
    smaller = {key: graph for key, graph in graphs(folder).items() if key not in named}
    sizes = [sorted(tuple(part.size for part in graph.parts) for graph in made.values()) for made in (named, smaller)]
    assert sizes == [
        [(RESIDUES, RESIDUES), (RESIDUES, RESIDUES + 1), (RESIDUES, RESIDUES + 2)],
        [(RESIDUES, RESIDUES), (RESIDUES + 1, RESIDUES), (RESIDUES + 2, RESIDUES)],
    ]


def missing(folder: Path, *sets: str) -> int:
    """Return how many graphs would be built with these settings."""
    project = Project.open(read_config(folder / "pipeline.yaml", sets).config)
    return graph_stage.GraphStage().survey(project, None, at_once=1).counts["missing"]


@pytest.mark.nightly
def test_what_changes_a_graph_is_in_its_key_and_nothing_else_is(
    pipeline: Command, make_complexes: Callable[..., Path]
) -> None:
    folder = make_complexes(2)
    assert pipeline(*SUBMIT).code == 0
    for changed in (
        "neighbours=19",
        "radius=8.0",
        "cross_neighbours=3",
        "cross_radius=9.5",
        "contacts=6.0",
        "nodes=atom",
    ):
        assert missing(folder, f"graph.{changed}") == 2, changed
    for unchanged in ("graph.atom.hops=1", "cluster.graph.items_per_task=1", "embed.layer=1", "graph.atom.radius=4.0"):
        assert missing(folder, unchanged) == 0, unchanged
    old = graphs(folder)
    assert pipeline(*SUBMIT, "--set", "graph.neighbours=7").code == 0
    new = [graph for key, graph in graphs(folder).items() if key not in old]
    assert len(new) == 2
    assert all(np.bincount(part.edges["near"][1]).tolist() == [7] * part.size for graph in new for part in graph.parts)


@pytest.mark.nightly
def test_a_damaged_graph_is_built_anew(pipeline: Command, make_complexes: Callable[..., Path]) -> None:
    folder = make_complexes(2)
    assert pipeline(*SUBMIT).code == 0
    (shard,) = (folder / "cache" / "graph" / "shards").iterdir()
    whole = graphs(folder)
    place = CacheFolder(folder / "cache").kind("graph").locate([min(whole)])[0][0]
    shard.chmod(0o600)
    with shard.open("r+b") as file:
        file.seek(place.offset + 5)
        file.write(b"\xff\xfe")
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    assert "graph: 2 graphs: 1 cached, 1 to do" in done.err
    assert graphs(folder).keys() == whole.keys()


@pytest.mark.nightly
def test_a_complex_whose_partners_do_not_touch_is_rejected_with_the_distance(
    pipeline: Command, make_complexes: Callable[..., Path]
) -> None:
    folder = make_complexes(2)
    lines = (folder / "data" / "c0.pdb").read_text().splitlines()
    apart = [
        f"{line[:30]}{float(line[30:38]) + 500:8.3f}{line[38:]}"
        if line[21:22] == "B" and line.startswith("ATOM")
        else line
        for line in lines
    ]
    (folder / "data" / "c0.pdb").write_text("\n".join(apart) + "\n")
    settle(folder / "data")
    done = pipeline(*SUBMIT, "--set", "data.max_rejected_fraction=0.5")
    assert done.code == 0, done.err
    (rejected,) = map(json.loads, newest(folder).rejected.read_text().splitlines())
    assert (rejected["id"], rejected["reason"]) == ("c0", "no_contacts")
    assert "graph.contacts" in rejected["detail"]
    assert "no_contacts" in done.out
    again = pipeline(*SUBMIT, "--set", "data.max_rejected_fraction=0.5")
    assert "graph: 2 graphs: 2 cached, 0 to do" in again.err  # that there is none is remembered as well
    assert pipeline(*SUBMIT, "--set", "graph.contacts=null").code == 0


def test_too_many_rejections_stop_the_run_with_the_reasons(
    pipeline: Command, make_complexes: Callable[..., Path]
) -> None:
    make_complexes(3)
    done = pipeline(*SUBMIT, "--set", "graph.contacts=0.5")
    assert done.code == 3
    assert "3 of 3 items cannot be used" in done.err
    assert "no_contacts" in done.out


@pytest.mark.nightly
def test_tasks_are_cut_by_cost(pipeline: Command, make_complexes: Callable[..., Path]) -> None:
    folder = make_complexes(5)
    assert pipeline("submit", "--stage", "scan", "--executor", "local", "--follow").code == 0
    done = pipeline(*SUBMIT, "--set", "cluster.graph.items_per_task=2")
    assert done.code == 0, done.err
    assert "graph: 5 graphs: 0 cached, 5 to do in 3 tasks" in done.err
    assert len(graphs(folder)) == 5


def test_the_cost_of_an_item_decides_where_tasks_are_cut(make_complexes: Callable[..., Path]) -> None:
    project = Project.open(read_config(make_complexes(1) / "pipeline.yaml", []).config)
    from array import array

    costs = np.array([1, 1, 1, 1, 96, 50, 50]) * graph_stage.ATOMS_PER_S * 600 // 100
    shards = graph_stage._cut(project, array("Q", range(8)), costs, at_once=1)
    assert [(shard.start, shard.end) for shard in shards] == [(0, 5), (5, 7)]


def test_the_run_leaves_a_table_of_what_can_be_trained_on(
    pipeline: Command, make_complexes: Callable[..., Path]
) -> None:
    folder = make_complexes(3)
    assert pipeline(*SUBMIT).code == 0
    table = ItemTable.read(CacheFolder(folder / "cache").kind("sets"), bytes.fromhex(judged(folder)["table"]))
    assert [table.ids[number] for number in range(len(table))] == ["c0", "c1", "c2"]
    assert table.sizes["nodes"].tolist() == [2 * RESIDUES + number for number in range(3)]
    assert table.sizes["pairs"].tolist() == [RESIDUES * (RESIDUES + number) for number in range(3)]


def test_graphs_that_are_not_kept_are_promised(pipeline: Command, make_complexes: Callable[..., Path]) -> None:
    folder = make_complexes(3)
    done = pipeline(*SUBMIT, "--set", "graph.cache=false")
    assert done.code == 0, done.err
    assert "graph: 3 graphs: built when they are read (graph.cache: false)" in done.err
    assert not (folder / "cache" / "graph").exists()
    assert judged(folder)["totals"]["nodes"] == 2 * 3 * RESIDUES + 3
    table = ItemTable.read(CacheFolder(folder / "cache").kind("sets"), bytes.fromhex(judged(folder)["table"]))
    assert table.sizes["nodes"].tolist() == [2 * RESIDUES + number for number in range(3)]


def test_sequences_have_no_graphs_and_are_told_so(tmp_path: Path, pipeline: Command) -> None:
    (tmp_path / "data.fasta").write_text(">a\nMKV\n")
    (tmp_path / "pipeline.yaml").write_text("data: {source: fasta, path: data.fasta}\n")
    done = pipeline(*SUBMIT)
    assert done.code == 2
    assert "sequences have no structures to make graphs of" in done.err
    assert "next: pipeline submit --stage embed" in done.err


def test_cross_edges_of_unbound_partners_are_refused(pipeline: Command, make_complexes: Callable[..., Path]) -> None:
    make_complexes(1)
    done = pipeline(*SUBMIT, "--set", "data.state=unbound", "--set", "graph.cross_radius=8.0")
    assert done.code == 2
    assert "cross edges join partners that stand together" in done.err


@pytest.mark.nightly
def test_cache_stat_counts_the_graphs_of_each_recipe(pipeline: Command, make_complexes: Callable[..., Path]) -> None:
    make_complexes(3)
    assert pipeline(*SUBMIT).code == 0
    assert pipeline(*SUBMIT, "--set", "graph.neighbours=7", "--set", "data.limit=2").code == 0
    shown = pipeline("cache", "stat").out
    assert "per item" in shown
    assert [line.split()[:2] for line in shown.splitlines() if "neighbours" in line] == [["graph", "3"], ["graph", "2"]]
    assert "neighbours 7" in shown
    kinds = {kind["kind"]: kind for kind in json.loads(pipeline("cache", "stat", "--json").out)["kinds"]}
    assert [one["records"] for one in kinds["graph"]["recipes"]] == [3, 2]
    assert kinds["graph"]["recipes"][1]["recipe"]["neighbours"] == 7


def test_another_label_is_another_table_and_no_other_graph(
    pipeline: Command, make_complexes: Callable[..., Path]
) -> None:
    folder = make_complexes()
    (folder / "pipeline.yaml").write_text("data: {path: data/m.csv, labels: [affinity]}\n")

    def tables(*affinities: str) -> list[Any]:
        rows = "".join(f"c{number},c{number}.pdb,{one}\n" for number, one in enumerate(affinities))
        (folder / "data/m.csv").write_text("id,path,affinity\n" + rows)
        outcome = pipeline(*SUBMIT)
        assert outcome.code == 0, outcome.err
        key = bytes.fromhex(newest(folder).table.read_text())
        return [key, ItemTable.read(CacheFolder(folder / "cache").kind("sets"), key)]

    (before, first), (after, second) = tables("-9.5", "NA", "7"), tables("-9.5", "NA", "8")
    np.testing.assert_array_equal(first.labels["affinity"], np.array([-9.5, np.nan, 7], np.float32))
    np.testing.assert_array_equal(second.labels["affinity"], np.array([-9.5, np.nan, 8], np.float32))
    assert before != after
    assert (first.key_N16 == second.key_N16).all()
