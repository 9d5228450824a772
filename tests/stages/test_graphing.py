"""`pipeline submit graph` as people type it: what it builds, what it does not build again, how it says no."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.load import read_config
from pipeline.graphs.item_graph import decode_graph
from pipeline.journal.ledger import LedgerReader
from pipeline.project.project import Project
from pipeline.records import EventKind
from pipeline.stages import graph as graph_stage
from pipeline.store.cache_folder import CacheFolder
from pipeline.structures.synthetic import complex_pdb
from pipeline.training.items.item_table import ItemTable
from tests.testkit import project as kit
from tests.testkit.command import Command
from tests.testkit.project import DATA, settle, to_do, write_config

SUBMIT = ("submit", "--stage", "graph", "--executor", "local", "--follow")
RESIDUES = 30


def write(folder: Path, items: int = 3) -> Path:
    """Write complexes whose ligands grow, and a configuration."""
    (folder / "data").mkdir(exist_ok=True)
    for number in range(items):
        if not (path := folder / "data" / f"c{number}.pdb").exists():
            path.write_bytes(complex_pdb(number, RESIDUES, RESIDUES + number))
    settle(folder / "data")
    write_config(folder, **DATA)
    return folder


def judged(folder: Path) -> dict[str, Any]:
    """Return what the newest run says of its graphs."""
    ended = [event for event in LedgerReader(kit.Project(folder).run).fresh() if event.kind is EventKind.STAGE_ENDED]
    return dict(next(event.data["census"] for event in ended if event.data["stage"] == "graph"))


def graphs(folder: Path) -> dict[bytes, Any]:
    store = CacheFolder(folder / "cache").kind("graph")
    return {record.key: decode_graph(record.arrays, record.meta) for record in store.read(store.keys())}


@pytest.mark.nightly
def test_in_one_run_with_the_scan_each_structure_is_read_once_for_both(pipeline: Command, tmp_path: Path) -> None:
    folder = write(tmp_path, 4)
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    assert to_do() == {"scan": (0, 4), "graph": (4, 0)}
    assert len(graphs(folder)) == 4
    write(tmp_path, 5)
    assert pipeline(*SUBMIT).code == 0
    assert to_do() == {"scan": (4, 1), "graph": (5, 0)}


@pytest.mark.nightly
def test_the_graph_stage_alone_builds_the_same_graphs(pipeline: Command, tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    assert pipeline(*SUBMIT).code == 0
    fused = graphs(folder)
    shutil.rmtree(folder / "cache" / "graph")
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    assert to_do() == {"scan": (3, 0), "graph": (0, 3)}
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
def test_which_partner_is_the_ligand_is_part_of_the_keys_unless_it_is_the_one_that_is_named(
    pipeline: Command, tmp_path: Path
) -> None:
    folder = write(tmp_path, 3)
    assert pipeline(*SUBMIT).code == 0
    named = graphs(folder)
    assert pipeline(*SUBMIT, "--set", "data.ligand=as_named").code == 0
    assert to_do()["scan"] == (3, 0)
    assert pipeline(*SUBMIT, "--set", "data.ligand=smaller").code == 0
    assert to_do()["scan"] == (0, 3)
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
def test_what_changes_a_graph_is_in_its_key_and_nothing_else_is(pipeline: Command, tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
    assert pipeline(*SUBMIT).code == 0
    recipe = ("neighbours=19", "radius=8.0", "cross_neighbours=3", "cross_radius=9.5", "contacts=6.0", "nodes=atom")
    for changed in recipe:
        assert missing(folder, f"graph.{changed}") == 2, changed
    for unchanged in ("graph.atom.hops=1", "cluster.graph.items_per_task=1", "embed.layer=1", "graph.atom.radius=4.0"):
        assert missing(folder, unchanged) == 0, unchanged
    old = graphs(folder)
    assert pipeline(*SUBMIT, "--set", "graph.neighbours=7").code == 0
    new = [graph for key, graph in graphs(folder).items() if key not in old]
    assert len(new) == 2
    assert all(np.bincount(part.edges["near"][1]).tolist() == [7] * part.size for graph in new for part in graph.parts)


@pytest.mark.nightly
def test_a_damaged_graph_is_built_anew(pipeline: Command, tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
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
    assert to_do()["graph"] == (1, 1)
    assert graphs(folder).keys() == whole.keys()


@pytest.mark.nightly
def test_a_complex_whose_partners_do_not_touch_is_rejected_with_the_distance(pipeline: Command, tmp_path: Path) -> None:
    folder = write(tmp_path, 2)
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
    (rejected,) = map(json.loads, kit.Project(folder).run.rejected.read_text().splitlines())
    assert (rejected["id"], rejected["reason"]) == ("c0", "no_contacts")
    assert "graph.contacts" in rejected["detail"]
    assert pipeline(*SUBMIT, "--set", "data.max_rejected_fraction=0.5").code == 0
    assert to_do()["graph"] == (2, 0)  # that there is none is remembered as well
    assert pipeline(*SUBMIT, "--set", "graph.contacts=null").code == 0


def test_too_many_rejections_stop_the_run_with_the_reasons(pipeline: Command, tmp_path: Path) -> None:
    write(tmp_path, 3)
    done = pipeline(*SUBMIT, "--set", "graph.contacts=0.5")
    assert done.code == 3
    assert "no_contacts" in done.out


def test_the_run_leaves_a_table_of_what_can_be_trained_on(pipeline: Command, tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    assert pipeline(*SUBMIT).code == 0
    table = ItemTable.read(CacheFolder(folder / "cache").kind("sets"), bytes.fromhex(judged(folder)["table"]))
    assert [table.ids[number] for number in range(len(table))] == ["c0", "c1", "c2"]
    assert table.sizes["nodes"].tolist() == [2 * RESIDUES + number for number in range(3)]
    assert table.sizes["pairs"].tolist() == [RESIDUES * (RESIDUES + number) for number in range(3)]


def test_graphs_that_are_not_kept_are_promised(pipeline: Command, tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    done = pipeline(*SUBMIT, "--set", "graph.cache=false")
    assert done.code == 0, done.err
    assert not (folder / "cache" / "graph").exists()
    assert judged(folder)["totals"]["nodes"] == 2 * 3 * RESIDUES + 3
    table = ItemTable.read(CacheFolder(folder / "cache").kind("sets"), bytes.fromhex(judged(folder)["table"]))
    assert table.sizes["nodes"].tolist() == [2 * RESIDUES + number for number in range(3)]


def test_another_label_is_another_table_and_no_other_graph(pipeline: Command, tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    write_config(folder, data={"path": "data/m.csv", "labels": ["affinity"]})

    def tables(*affinities: str) -> list[Any]:
        rows = "".join(f"c{number},c{number}.pdb,{one}\n" for number, one in enumerate(affinities))
        (folder / "data/m.csv").write_text("id,path,affinity\n" + rows)
        outcome = pipeline(*SUBMIT)
        assert outcome.code == 0, outcome.err
        key = bytes.fromhex(kit.Project(folder).run.table.read_text())
        return [key, ItemTable.read(CacheFolder(folder / "cache").kind("sets"), key)]

    (before, first), (after, second) = tables("-9.5", "NA", "7"), tables("-9.5", "NA", "8")
    np.testing.assert_array_equal(first.labels["affinity"], np.array([-9.5, np.nan, 7], np.float32))
    np.testing.assert_array_equal(second.labels["affinity"], np.array([-9.5, np.nan, 8], np.float32))
    assert before != after
    assert (first.key_N16 == second.key_N16).all()
