"""`pipeline cache validate --semantic`: what is whole and means nothing is found, and what is right never is."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.audit.item_index import KeyedLines
from pipeline.audit.meaning import Semantic, in_sample
from pipeline.config.load import read_config
from pipeline.project.project import Project
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.maintenance.checking import Subset
from pipeline.store.maintenance.damage_report import Checked, DamageFinding, Fault, read_report
from pipeline.store.maintenance.shard_plans import repair
from tests.testkit import project as kit
from tests.testkit.once import Shelf
from tests.testkit.project import EMBED, copied, make_project, write_weights

ITEMS = 4
Change = Callable[[dict[str, Any], dict[str, Any]], None]


def make(folder: Path) -> None:
    """Make everything of a project whose edges cross."""
    make_project(folder, ITEMS, **EMBED, graph__neighbours=6, graph__cross_radius=8.0)
    write_weights(folder)
    kit.Project(folder).finishes("graph", "embed")


@pytest.fixture
def project(shelf: Shelf, tmp_path: Path) -> Path:
    return copied(shelf, "cross-edges", make, tmp_path)


def opened(folder: Path, *sets: str) -> Project:
    return Project.open(read_config(folder / "pipeline.yaml", list(sets)).config, remember=False)


def validated(folder: Path, sample: float = 0.0, subset: Subset | None = None, *sets: str) -> list[Checked]:
    project = opened(folder, *sets)
    judge, part = Semantic(project, sample), subset or Subset()
    return [found for kind in project.cache.kinds() for found in judge.check(project.cache.kind(kind), part)]


def findings(found: list[Checked]) -> list[DamageFinding]:
    return [one for checked in found for one in checked.findings]


def notes(found: list[Checked]) -> Counter[str]:
    total: Counter[str] = Counter()
    for checked in found:
        total.update(checked.notes)
    return total


def rewrite(folder: Path, kind: str, change: Change, key: bytes | None = None) -> bytes:
    """Write a record anew with another content and a right digest, as a bug would; the old copies go."""
    store = CacheFolder(folder / "cache").kind(kind)
    records = list(store.read(store.keys()))
    chosen = next(one for one in records if key is None or one.key == key)
    (store.layout.index).unlink(missing_ok=True)
    shutil.rmtree(store.layout.shards)
    fresh = CacheFolder(folder / "cache").kind(kind)
    with fresh.writer() as writer:
        for record in records:
            arrays = {name: array.copy() for name, array in record.arrays.items()}
            meta = json.loads(json.dumps(record.meta))
            if record.key == chosen.key:
                change(arrays, meta)
            writer.put(record.key, arrays, meta, bfloat16=record.bfloat16)
    return chosen.key


@pytest.mark.nightly
def test_what_the_stages_made_is_in_order_and_made_anew_is_the_same(project):
    found = validated(project, 1.0)
    assert findings(found) == []
    told = notes(found)
    assert told["graphs rebuilt"] == told["inventories rebuilt"] == told["files read again"] == ITEMS
    assert told["embeddings recomputed"] == 2 * ITEMS
    assert told["weights read again"] == 1
    assert told["rebuilt graphs that differ in some bits"] == 0
    assert told["recomputed embeddings that differ in some bits"] == 0
    kinds = {checked.kind for checked in found if checked.whole}
    assert kinds == {"scan", "files", "graph", "sets", "embed", "weights", "parity", "recipes"}


WRONG: dict[str, tuple[str, Change, str]] = {
    "a graph": (
        "graph",
        lambda a, m: a["ligand.edge.near.neighbour"].__setitem__(0, 99),
        "ligand.edge.near.neighbour[0]",
    ),
    "an inventory": ("scan", lambda a, m: m["partners"][0]["chains"][0].update(nodes=99), "partners"),
    "an embedding": ("embed", lambda a, m: a["rows"].__setitem__((1, 1), np.nan), "rows"),
    "a file": ("files", lambda a, m: m.update(content="?"), "?"),
    "weights": ("weights", lambda a, m: m.update(dim=24, heads=5), "heads"),
    "a table": ("sets", lambda a, m: a["size.nodes"].__setitem__(0, 7), "sizes"),
    "nothing like it": ("graph", lambda a, m: (a.clear(), m.clear()), "cannot be understood"),
    "no graph": (
        "graph",
        lambda a, m: (a.clear(), m.clear(), m.update(reason="no_edges", detail="")),
        "it says no_edges; rebuilt, no rejection",
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRONG)
def test_a_record_with_a_right_digest_and_a_wrong_content_is_found_alone(project, name):
    kind, change, wanted = WRONG[name]
    key = rewrite(project, kind, change)
    (one,) = findings(validated(project, 1.0))
    assert (one.kind, one.fault, one.key, one.lost) == (kind, Fault.MEANING, key.hex(), True)
    assert wanted in one.what
    assert one.shard


@pytest.mark.nightly
def test_a_graph_that_no_task_can_use_is_found_without_a_sample(project):
    for name in ("a graph", "nothing like it"):
        kind, change, wanted = WRONG[name]
        key = rewrite(project, kind, change)
        (one,) = findings(validated(project))
        assert (one.kind, one.key, one.lost, wanted in one.what) == (kind, key.hex(), True, True)


@pytest.mark.nightly
def test_a_sample_finds_a_coordinate_that_is_a_hundredth_of_an_angstrom_off(project, pipeline, monkeypatch):
    key = rewrite(project, "graph", lambda a, m: a["receptor.node.pos"][3, 0].__iadd__(np.float32(0.01)))
    assert findings(validated(project)) == []  # N of a residue is not what edges go by
    (one,) = findings(validated(project, 1.0))
    assert (one.kind, one.key, one.lost) == ("graph", key.hex(), True)
    assert "receptor.node.pos[3, 0, 0]" in one.what
    monkeypatch.chdir(project)
    assert pipeline("cache", "validate", "--semantic", "--set", "cache.sample=1").code == 4
    assert pipeline("cache", "validate", "--semantic", "--set", "cache.sample=0").code == 0


@pytest.mark.nightly
def test_a_sample_finds_an_embedding_that_another_encoder_made(project):
    key = rewrite(project, "embed", lambda a, m: a["rows"].__imul__(np.float32(1.02)))
    assert findings(validated(project)) == []
    (one,) = findings(validated(project, 1.0))
    assert (one.kind, one.key) == ("embed", key.hex())


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "change"),
    [("files", lambda a, m: m.update(bytes=m["bytes"] + 1)), ("weights", lambda a, m: m.update(digest="f" * 32))],
    ids=["a file", "weights"],
)
def test_a_sample_finds_facts_that_are_not_those_of_the_file(project, kind, change):
    rewrite(project, kind, change)
    found = [one for one in findings(validated(project, 1.0)) if one.kind == kind]
    assert [one.lost for one in found] == [True]


def add(folder: Path, kind: str, key: bytes, meta: dict[str, Any]) -> None:
    """Write one more record, of a right digest."""
    with CacheFolder(folder / "cache").kind(kind).writer() as writer:
        writer.put(key, {}, meta)


@pytest.mark.nightly
def test_beside_a_recipe_that_says_nothing_all_verbs_go_on(project, pipeline, monkeypatch):
    monkeypatch.chdir(project)
    add(project, "recipes", bytes(range(16)), {"nothing": 1})
    assert findings(validated(project, 1.0)) == []
    for words in (("cache", "stat"), ("cache", "clean")):
        assert pipeline(*words).code == 0


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["files", "scan"])
def test_a_record_that_says_nothing_costs_no_other_item_its_place_in_the_data_set(project, kind):
    key = rewrite(project, kind, lambda a, m: (a.clear(), m.clear(), m.update(partners=7)))
    found = validated(project, 1.0)
    (one,) = findings(found)
    assert (one.kind, one.key, one.lost) == (kind, key.hex(), True)
    assert notes(found)["graphs rebuilt"] == ITEMS - 1


@pytest.mark.nightly
def test_what_cannot_be_compared_is_told_and_kept(project):
    key = rewrite(project, "embed", lambda a, m: m.pop("weights"))
    (one,) = findings(validated(project, 1.0))
    assert (one.kind, one.key, one.lost, "cannot be compared" in one.what) == ("embed", key.hex(), False, True)


@pytest.mark.nightly
def test_what_is_not_of_this_data_set_or_cannot_be_compared_is_counted_and_no_fault(project):
    for setting, sample, count in (
        ("data.limit=1", 1.0, ITEMS - 1),
        ("embed.weights=elsewhere.pt", 1.0, 2 * ITEMS),
        ("data.path=nowhere", 1.0, ITEMS),
    ):
        found = validated(project, sample, None, setting)
        assert findings(found) == [], setting
        assert count in notes(found).values(), setting


@pytest.mark.nightly
def test_parts_together_find_what_the_whole_finds_and_the_sample_is_the_same(project):
    rewrite(project, "graph", lambda a, m: a["receptor.node.pos"][3, 0].__iadd__(np.float32(0.01)))
    whole = validated(project, 0.5)
    parts = [one for number in (1, 2, 3) for one in validated(project, 0.5, Subset(number, 3))]
    assert Counter(findings(parts)) == Counter(findings(whole))
    assert sorted(key for one in parts for key in one.whole) == sorted(key for one in whole for key in one.whole)
    assert notes(parts) == notes(whole)


def test_a_larger_sample_holds_every_smaller_one():
    keys = [np.random.default_rng(number).bytes(16) for number in range(2000)]
    small, large = ({key for key in keys if in_sample(key, share)} for share in (0.1, 0.3))
    assert small < large
    assert 120 < len(small) < 280
    assert not any(in_sample(key, 0.0) for key in keys)
    assert all(in_sample(key, 1.0) for key in [*keys, b"\xff" * 16])


def test_texts_under_keys_come_back_whatever_bytes_the_keys_end_in():
    lines = KeyedLines()
    keys = [bytes([1] * 16), bytes([1] * 15 + [0]), bytes(16), bytes([0] * 15 + [1]), b"\xff" * 16]
    assert lines.get(keys[0]) is None
    for number, key in enumerate(keys):
        lines.add(key, f"text {number} é")
    assert [lines.get(key) for key in keys] == [f"text {number} é" for number in range(len(keys))]
    assert lines.get(bytes([2] * 16)) is None


@pytest.mark.nightly
def test_repair_puts_aside_what_means_nothing_and_the_next_run_makes_it_anew(project, pipeline, monkeypatch):
    monkeypatch.chdir(project)
    key = rewrite(project, "graph", lambda a, m: a["ligand.edge.near.neighbour"].__setitem__(0, 99))
    done = pipeline("cache", "validate", "--semantic", "--json")
    assert done.code == 4
    told = json.loads(done.out)
    assert told["how"] == "semantic"
    assert told["faults"] == {"meaning": 1}
    report = read_report(Path(told["list"]))
    assert [one.key for one in report.findings()] == [key.hex()]
    cache = CacheFolder(project / "cache")
    repair(cache, report)
    store = CacheFolder(project / "cache").kind("graph")
    assert store.missing([key]) == [key]
    assert len(list(store.keys())) == ITEMS - 1
    assert findings(validated(project)) == []
    assert pipeline("submit", "--stage", "graph", "--executor", "local", "--follow").code == 0
    assert CacheFolder(project / "cache").kind("graph").missing([key]) == []
    assert pipeline("cache", "validate", "--semantic", "--sample", "1").code == 0


@pytest.mark.nightly
def test_a_sample_without_meaning_is_refused(project, pipeline):
    for share in ("0.1", "0"):
        assert pipeline("cache", "validate", "--full", "--sample", share).code == 2
    assert pipeline("cache", "validate", "--full", "--semantic").code == 2
