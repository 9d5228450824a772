"""`pipeline cache validate --semantic`: what is whole and means nothing is found, and what is right never is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.load import read_config
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.keys import tagged_key
from pipeline.project.project import Project
from pipeline.runs.audit.meaning import Semantic, in_sample
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.key_lists import KeyedLines
from pipeline.store.maintenance.damage_report import Checked, DamageFinding, Fault, Summary, read_report
from pipeline.store.maintenance.scrub import Subset
from pipeline.store.maintenance.shard_repair import repair_cache
from pipeline.structures.synthetic import complex_pdb
from tests.testkit.command import Command
from tests.testkit.project import settle

CONFIG = "data: {source: glob, path: data}\ngraph: {neighbours: 6, cross_radius: 8.0}\nembed: {weights: esm2_tiny.pt}\n"
ITEMS = 4
PIPELINE = str(Path(sys.executable).with_name("pipeline"))
Change = Callable[[dict[str, Any], dict[str, Any]], None]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a project in which everything was made, and what its cache was then."""
    folder = tmp_path_factory.mktemp("filled")
    (folder / "data").mkdir()
    for number in range(ITEMS):
        (folder / "data" / f"c{number}.pdb").write_bytes(complex_pdb(number, 30, 25 + number))
    write_random_checkpoint(folder / "esm2_tiny.pt", layers=2, dim=16, heads=2)
    (folder / "pipeline.yaml").write_text(CONFIG)
    settle(folder / "data")
    settle(folder)
    for stage in ("graph", "embed"):
        command = (PIPELINE, "submit", "--stage", stage, "--executor", "local", "--follow")
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    backup = folder / "backup"
    shutil.copytree(folder / "cache", backup)
    return folder, backup


@pytest.fixture
def project(filled: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the project with its cache as it was made; paths and times of files are in keys, so it stays in place."""
    folder, backup = filled
    shutil.rmtree(folder / "cache")
    shutil.copytree(backup, folder / "cache")
    return folder


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
def test_what_the_stages_made_is_in_order_and_made_anew_is_the_same(project: Path) -> None:
    found = validated(project, 1.0)
    assert findings(found) == []
    told = notes(found)
    assert told["graphs made anew"] == told["inventories made anew"] == told["files read again"] == ITEMS
    assert told["embeddings computed again"] == 2 * ITEMS
    assert told["weights read again"] == 1
    assert told["graphs made anew that are not the same bit for bit"] == 0
    assert told["embeddings computed again that are not the same bit for bit"] == 0
    kinds = {checked.kind for checked in found if checked.whole}
    assert kinds == {"scan", "files", "graph", "sets", "embed", "weights", "parity", "recipes"}


@pytest.mark.nightly
def test_without_a_sample_nothing_is_made_anew(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("read_again", "read_file", "checkpoint_facts"):
        monkeypatch.delattr(f"pipeline.runs.audit.meaning.{name}")
    found = validated(project)
    assert findings(found) == []
    assert not notes(found)


WRONG: dict[str, tuple[str, Change, str]] = {
    "a graph": (
        "graph",
        lambda a, m: a["ligand.edge.near.neighbour"].__setitem__(0, 99),
        "ligand.edge.near.neighbour[0]",
    ),
    "an inventory": ("scan", lambda a, m: m["partners"][0]["chains"][0].update(nodes=31), "30 residues, 31 nodes"),
    "an embedding": ("embed", lambda a, m: a["rows"].__setitem__((1, 1), np.nan), "rows[1, 1] is not finite"),
    "a file": ("files", lambda a, m: m.update(content="?"), "content is '?', no digest"),
    "weights": ("weights", lambda a, m: m.update(dim=24, heads=3), "dim is 24; its embeddings have 16"),
    "parity": ("parity", lambda a, m: m.update(lowest=0.5), "lowest is 0.5"),
    "a table": ("sets", lambda a, m: a["size.nodes"].__setitem__(0, 7), "its key is that of another table"),
    "a recipe": ("recipes", lambda a, m: m["recipe"].update(version=7), "its key is that of another recipe"),
    "nothing like it": ("graph", lambda a, m: (a.clear(), m.clear()), "its format is None"),
    "a list for a text": ("embed", lambda a, m: m.update(text=["A"]), "it cannot be understood"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRONG)
def test_a_record_with_a_right_digest_and_a_wrong_content_is_found_alone(project: Path, name: str) -> None:
    kind, change, wanted = WRONG[name]
    key = rewrite(project, kind, change)
    (one,) = findings(validated(project))
    assert (one.kind, one.fault, one.key, one.lost) == (kind, Fault.MEANING, key.hex(), True)
    assert wanted in one.what
    assert one.shard


@pytest.mark.nightly
def test_a_sample_finds_a_coordinate_that_is_a_hundredth_of_an_angstrom_off(project: Path) -> None:
    key = rewrite(project, "graph", lambda a, m: a["receptor.node.pos"][3, 0].__iadd__(np.float32(0.01)))
    assert findings(validated(project)) == []  # N of a residue is not what edges go by
    (one,) = findings(validated(project, 1.0))
    assert (one.kind, one.key, one.lost) == ("graph", key.hex(), True)
    assert "receptor.node.pos[3, 0, 0]" in one.what


@pytest.mark.nightly
def test_a_sample_finds_an_embedding_that_another_encoder_made(project: Path) -> None:
    key = rewrite(project, "embed", lambda a, m: a["rows"].__imul__(np.float32(1.02)))
    assert findings(validated(project)) == []
    (one,) = findings(validated(project, 1.0))
    assert (one.kind, one.key) == ("embed", key.hex())
    assert "0.02 of their length" in one.what


@pytest.mark.nightly
def test_a_mark_that_another_encoder_made_is_found_put_aside_and_made_anew(
    project: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    shutil.rmtree(project / "cache" / "embed")
    with_marks = ("--set", "embed.cls=true")
    embed = ("submit", "--stage", "embed", "--executor", "local", "--follow", *with_marks)
    assert pipeline(*embed).code == 0
    found = validated(project, 1.0)  # the records say themselves that they have a mark
    assert findings(found) == []
    assert notes(found)["embeddings computed again"] == 2 * ITEMS
    assert notes(found)["embeddings computed again that are not the same bit for bit"] == 0
    before = {record.key: record.arrays["cls"] for record in _embeddings(project)}
    key = rewrite(project, "embed", lambda a, m: a["cls"].__imul__(np.float32(1.02)))
    assert findings(validated(project)) == []
    done = pipeline("cache", "validate", "--semantic", "--sample", "1", "--json", *with_marks)
    assert done.code == 4
    report = read_report(Path(json.loads(done.out)["list"]))
    (one,) = report.findings()
    assert one.key == key.hex()
    assert "the numbers of cls are 0.02 of their length" in one.what
    for verb in (("repair", "--yes"), ("regenerate",)):
        repaired = pipeline("cache", *verb, "--list", json.loads(done.out)["list"], *with_marks)
        assert repaired.code == 0, repaired.err
    after = {record.key: record.arrays["cls"] for record in _embeddings(project)}
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[other], before[other]) for other in after)


def _embeddings(project: Path) -> Iterator[Any]:
    store = CacheFolder(project / "cache").kind("embed")
    return store.read(list(store.keys()))


@pytest.mark.nightly
def test_a_sample_finds_weights_that_are_not_those_of_the_file(project: Path) -> None:
    rewrite(project, "weights", lambda a, m: m.update(digest="f" * 32))
    found = [one for one in findings(validated(project, 1.0)) if one.kind == "weights"]
    assert "digest is 'ffff" in found[0].what


@pytest.mark.nightly
def test_a_sample_finds_a_file_that_holds_something_else(project: Path) -> None:
    rewrite(project, "files", lambda a, m: m.update(bytes=m["bytes"] + 1))
    (one,) = findings(validated(project, 1.0))
    assert (one.kind, one.lost) == ("files", True)
    assert "is remembered" in one.what


def other_letters(_arrays: dict[str, Any], meta: dict[str, Any]) -> None:
    """Give an inventory a sequence that it could have."""
    chain = meta["partners"][0]["chains"][0]
    chain["sequence"] = chain["sequence"][::-1]


@pytest.mark.nightly
def test_where_a_graph_and_its_inventory_contradict_each_other_the_file_decides(project: Path) -> None:
    key = rewrite(project, "scan", other_letters)
    (one,) = findings(validated(project))
    assert (one.kind, one.key, one.lost) == ("scan", key.hex(), True)
    assert "made anew" in one.what


@pytest.mark.nightly
def test_an_inventory_that_graphs_contradict_is_told_of_once_and_counted_under_its_own_kind(project: Path) -> None:
    key = rewrite(project, "scan", other_letters)
    (graph,) = CacheFolder(project / "cache").kind("graph").read([graph_of(project, key)])
    with CacheFolder(project / "cache").kind("graph").writer() as writer:  # a second copy, in another shard
        writer.put(graph.key, graph.arrays, graph.meta)
    for sample in (0.0, 1.0):
        found = validated(project, sample)
        (one,) = findings(found)
        assert (one.kind, one.key) == ("scan", key.hex())
        assert CacheFolder(project / "cache").kind("scan").locate([key])[0][0].shard == one.shard
        tally = Summary("semantic")
        for checked in found:
            tally.take(checked)
        assert tally.kinds["scan"] == {"records": ITEMS, "whole": ITEMS - 1, "lost": 1}
        assert tally.kinds["graph"] == {"records": ITEMS + 1, "whole": ITEMS + 1, "lost": 0}
        assert tally.shards == sum(len(list(path.iterdir())) for path in (project / "cache").glob("*/shards"))


def graph_of(folder: Path, inventory: bytes) -> bytes:
    return opened(folder).graphs.recipe.key(inventory)


def add(folder: Path, kind: str, key: bytes, meta: dict[str, Any]) -> None:
    """Write one more record, of a right digest."""
    with CacheFolder(folder / "cache").kind(kind).writer() as writer:
        writer.put(key, {}, meta)


@pytest.mark.nightly
def test_a_recipe_that_says_nothing_is_found_alone_and_the_other_verbs_go_on(
    project: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    key = bytes(range(16))
    add(project, "recipes", key, {"nothing": 1})
    (one,) = findings(validated(project, 1.0))
    assert (one.kind, one.key, one.lost) == ("recipes", key.hex(), True)
    assert "it holds nothing, not kind and recipe" in one.what
    for words in (("cache", "stat"), ("cache", "clean")):
        assert pipeline(*words).code == 0


@pytest.mark.nightly
def test_a_recipe_of_another_version_is_left_out_and_costs_no_record(project: Path) -> None:
    scan, embed = ({"version": 0, "what": kind} for kind in ("scan", "embed"))
    store = CacheFolder(project / "cache").kind("scan")
    inventory = store.get(min(store.keys()))
    for kind, recipe in (("scan", scan), ("embed", embed)):
        CacheFolder(project / "cache").describe(kind, recipe)
        with CacheFolder(project / "cache").kind(kind).writer() as writer:
            writer.put(tagged_key(kind, recipe, 1), inventory.arrays, inventory.meta)
    found = validated(project)
    (one,) = findings(found)
    assert (one.kind, one.key) == ("embed", tagged_key("embed", embed, 1).hex())  # an inventory is no embedding
    told = "records of the kind scan judged without their recipe, which another version made"
    assert notes(found)[told] == 1


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["files", "scan"])
def test_a_record_that_says_nothing_costs_no_other_item_its_place_in_the_data_set(project: Path, kind: str) -> None:
    key = rewrite(project, kind, lambda a, m: (a.clear(), m.clear(), m.update(partners=7)))
    found = validated(project, 0.0)
    (one,) = findings(found)
    assert (one.kind, one.key, one.lost) == (kind, key.hex(), True)
    assert notes(found)["graphs that are not of this data set: judged by themselves"] == 1


@pytest.mark.nightly
def test_what_fails_while_records_are_compared_or_before_costs_no_record(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_given: object) -> Iterator[str]:
        raise KeyError("something")

    with monkeypatch.context() as patched:
        patched.setattr("pipeline.runs.audit.meaning.wrong_beside_inventory", stumble)
        found = findings(validated(project))
        assert {(one.kind, one.lost) for one in found} == {("graph", False)}
        assert all("it cannot be compared: KeyError" in one.what for one in found)
    monkeypatch.setattr(CacheFolder, "recipes", stumble)
    with pytest.raises(KeyError, match="something"):
        validated(project)


@pytest.mark.nightly
def test_where_the_file_cannot_say_a_contradiction_is_the_graphs(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite(project, "scan", other_letters)
    monkeypatch.setattr("pipeline.runs.audit.meaning.read_again", lambda *_: None)
    found = validated(project)
    (one,) = findings(found)
    assert (one.kind, one.lost) == ("graph", True)
    assert "its chains are not those of the inventory" in one.what
    assert notes(found)["not made anew: a source file is gone, or another now"] == 1


@pytest.mark.nightly
def test_records_of_another_data_set_are_judged_by_themselves(project: Path) -> None:
    found = validated(project, 0.0, None, "data.limit=1")
    assert findings(found) == []
    assert notes(found) == {"graphs that are not of this data set: judged by themselves": ITEMS - 1}


@pytest.mark.nightly
def test_embeddings_whose_weights_are_not_here_are_counted_and_not_computed(project: Path) -> None:
    found = validated(project, 1.0, None, "embed.weights=elsewhere.pt")
    assert findings(found) == []
    assert notes(found)["not computed again: embeddings whose weights are not here"] == 2 * ITEMS


@pytest.mark.nightly
def test_a_data_set_that_is_gone_leaves_records_to_be_judged_by_themselves(project: Path) -> None:
    found = validated(project, 1.0, None, "data.path=nowhere")
    assert findings(found) == []
    assert any("the data set cannot be listed" in what for what in notes(found)), notes(found)
    assert notes(found)["not made anew: records that are not of this data set"] == ITEMS


@pytest.mark.nightly
def test_parts_together_find_what_the_whole_finds_and_the_sample_is_the_same(project: Path) -> None:
    rewrite(project, "graph", lambda a, m: a["receptor.node.pos"][3, 0].__iadd__(np.float32(0.01)))
    whole = validated(project, 0.5)
    parts = [one for number in (1, 2, 3) for one in validated(project, 0.5, Subset(number, 3))]
    assert Counter(findings(parts)) == Counter(findings(whole))
    assert sorted(key for one in parts for key in one.whole) == sorted(key for one in whole for key in one.whole)
    assert notes(parts) == notes(whole)


@pytest.mark.nightly
def test_a_larger_sample_holds_every_smaller_one() -> None:
    keys = [np.random.default_rng(number).bytes(16) for number in range(2000)]
    small, large = ({key for key in keys if in_sample(key, share)} for share in (0.1, 0.3))
    assert small < large
    assert 120 < len(small) < 280
    assert not any(in_sample(key, 0.0) for key in keys)
    assert all(in_sample(key, 1.0) for key in [*keys, b"\xff" * 16])


@pytest.mark.nightly
def test_damage_is_found_as_by_a_full_validation(project: Path) -> None:
    store = CacheFolder(project / "cache").kind("graph")
    key = min(store.keys())
    place = store.locate([key])[0][0]
    path = store.layout.shard(place.shard)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(place.offset + 3)
        file.write(b"\xff\xfe")
    (one,) = findings(validated(project))
    assert (one.fault, one.key, one.lost) == (Fault.RECORD, key.hex(), True)


@pytest.mark.nightly
def test_texts_under_keys_come_back_whatever_bytes_the_keys_end_in() -> None:
    lines = KeyedLines()
    keys = [bytes([1] * 16), bytes([1] * 15 + [0]), bytes(16), bytes([0] * 15 + [1]), b"\xff" * 16]
    assert lines.get(keys[0]) is None
    for number, key in enumerate(keys):
        lines.add(key, f"text {number} é")
    assert [lines.get(key) for key in keys] == [f"text {number} é" for number in range(len(keys))]
    assert lines.get(bytes([2] * 16)) is None
    assert len(lines) == len(keys)


@pytest.mark.nightly
def test_repair_puts_aside_what_means_nothing_and_the_next_run_makes_it_anew(
    project: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    repair_cache(cache, report)
    store = CacheFolder(project / "cache").kind("graph")
    assert store.missing([key]) == [key]
    assert len(list(store.keys())) == ITEMS - 1
    assert findings(validated(project)) == []
    assert pipeline("submit", "--stage", "graph", "--executor", "local", "--follow").code == 0
    assert CacheFolder(project / "cache").kind("graph").missing([key]) == []
    assert pipeline("cache", "validate", "--semantic", "--sample", "1").code == 0


@pytest.mark.nightly
def test_what_only_a_second_parser_reads_otherwise_is_told_and_not_lost(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disagree(*_given: object) -> Iterator[str]:
        yield "chain A: ALA 7 is there to biotite, and not to us"

    monkeypatch.setattr("pipeline.runs.audit.meaning.disagreements", disagree)
    found = findings(validated(project, 1.0))
    assert len(found) == ITEMS
    assert {(one.kind, one.fault, one.lost) for one in found} == {("scan", Fault.MEANING, False)}


@pytest.mark.nightly
def test_a_sample_without_meaning_is_refused_with_what_to_type(
    project: Path, pipeline: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    done = pipeline("cache", "validate", "--full", "--sample", "0.1")
    assert done.code == 2
    assert "pipeline cache validate --semantic --sample 0.1" in done.err
    assert pipeline("cache", "validate", "--full", "--semantic").code == 2
