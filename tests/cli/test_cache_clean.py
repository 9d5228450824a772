"""`pipeline cache stat` and `pipeline cache clean` as people type them."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from pipeline.store.cache_folder import CacheFolder
from pipeline.store.maintenance.damage_report import ReportWriter, Summary
from pipeline.store.maintenance.leftovers import User, register
from tests.runs.upkeep import cached
from tests.runs.upkeep.cached import ITEMS, Copy
from tests.testkit.command import Command

CLEAN = ("cache", "clean", "--older-than", "0")
FEWER = ("--set", "graph.neighbours=3")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cached.made(tmp_path_factory.getbasetemp())


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Copy:
    return Copy.of(made, tmp_path)


@pytest.mark.nightly
def test_clean_says_first_what_it_would_do_and_does_it_with_yes(pipeline: Command, copy: Copy) -> None:
    looked = pipeline(*CLEAN, *FEWER)
    assert looked.code == 0, looked.err
    assert "of a recipe that is not used" in looked.out
    assert "neighbours 20" in looked.out
    assert "nothing was done yet" in looked.out
    assert len(copy.keys("graph")) == ITEMS
    (again,) = [line.removeprefix("  next: ") for line in looked.out.splitlines() if line.startswith("  next: ")]
    done = pipeline(*again.split()[1:])
    assert done.code == 0, done.err
    assert "given back" in done.err
    assert copy.keys("graph") == set()
    assert "nothing to clean" in pipeline(*CLEAN, *FEWER).out


@pytest.mark.nightly
def test_clean_says_what_it_waits_for(pipeline: Command, copy: Copy) -> None:
    """Others use the cache: their hosts must see the new index before what it no longer names goes."""
    other = copy.folder / "other.yaml"
    other.write_text((copy.folder / "pipeline.yaml").read_text())
    user = User(str(other), str(copy.folder / "runs2"), frozenset({("scan", "00000000")}), time.time(), "somebody")
    assert register(copy.store.disk, copy.store.root, user)
    said = "waiting 0.25 s until other hosts see the new files"
    assert said not in pipeline(*CLEAN, *FEWER, "--set", "cache.visibility_s=0.25").err
    done = pipeline(*CLEAN, *FEWER, "--yes", "--set", "cache.visibility_s=0.25")
    assert done.code == 0, done.err
    assert done.err.index(said) < done.err.index("given back")


@pytest.mark.nightly
def test_stat_does_not_advise_a_repair_that_was_done(pipeline: Command, copy: Copy) -> None:
    (shard, *_) = sorted((copy.folder / "cache/graph/shards").iterdir())
    shard.chmod(0o600)
    shard.write_bytes(shard.read_bytes()[:-100])
    assert pipeline("cache", "validate", "--full").code == 4
    said = pipeline("cache", "stat").out
    assert "next: pipeline cache repair --list" in said
    assert json.loads(pipeline("cache", "stat", "--json").out)["last_validation"]["repaired"] is None
    assert pipeline("cache", "repair", "--yes", "--set", "cache.visibility_s=0").code == 0
    said = pipeline("cache", "stat").out
    assert "pipeline cache repair" not in said
    assert "repaired" in said
    told = json.loads(pipeline("cache", "stat", "--json").out)["last_validation"]
    assert (told["remedy"], told["findings"] > 0, told["repaired"] > told["begun"]) == ("", True, True)
    assert pipeline(*CLEAN, "--yes").code == 0  # which keeps what stat goes by
    assert "pipeline cache repair" not in pipeline("cache", "stat").out


@pytest.mark.nightly
def test_stat_advises_a_repair_of_what_was_found_after_the_last_one(pipeline: Command, copy: Copy) -> None:
    for kind in ("graph", "scan"):
        (shard, *_) = sorted((copy.folder / f"cache/{kind}/shards").iterdir())
        shard.chmod(0o600)
        shard.write_bytes(shard.read_bytes()[:-100])
        assert pipeline("cache", "validate", "--full").code == 4
        assert "next: pipeline cache repair --list" in pipeline("cache", "stat").out
        assert pipeline("cache", "repair", "--yes", "--set", "cache.visibility_s=0").code == 0


@pytest.mark.nightly
def test_clean_is_cautious_unless_told_otherwise(pipeline: Command, copy: Copy) -> None:
    done = pipeline("cache", "clean", "--yes", *FEWER)
    assert "younger than 1 day" in done.out
    assert "nothing can go now" in done.out.splitlines()[-1]
    assert len(copy.keys("graph")) == ITEMS


@pytest.mark.nightly
def test_clean_keeps_what_may_be_being_written_and_says_until_when(pipeline: Command, copy: Copy) -> None:
    with copy.store.kind("graph").writer() as writer:
        writer.put(b"sixteen letters.", {})
        done = pipeline(*CLEAN, "--yes")
        assert "temporary files of graph: 1 file" in done.out
        assert "younger than 1 day\n" in done.out
    assert b"sixteen letters." in copy.keys("graph")


@pytest.mark.nightly
def test_clean_says_one_json_document(pipeline: Command, copy: Copy) -> None:
    told = json.loads(pipeline(*CLEAN, *FEWER, "--json").out)
    assert {one["kind"]: one["items"] for one in told["dead"]} == {"graph": ITEMS, "recipes": 1}
    assert "removed" not in told
    done = json.loads(pipeline(*CLEAN, *FEWER, "--json", "--yes").out)
    assert done["removed"]["bytes"] == done["bytes"] == told["bytes"]
    assert copy.keys("graph") == set()


@pytest.mark.nightly
@pytest.mark.parametrize("is_there", [False, True], ids=["no folder", "an empty folder"])
def test_where_no_cache_is_yet_there_is_nothing_to_clean(pipeline: Command, copy: Copy, is_there: bool) -> None:
    root = copy.folder / "other"
    if is_there:
        root.mkdir()
    for yes in ((), ("--yes",), ("--yes", "--all")):
        done = pipeline("cache", "clean", *yes, "--set", "cache.root=other")
        assert (done.code, done.out.splitlines()) == (0, [f"cache {root}: no cache is there yet: nothing to clean"])
    told = pipeline("cache", "clean", "--json", "--set", "cache.root=other")
    assert (told.code, json.loads(told.out)["files"], json.loads(told.out)["bytes"]) == (0, 0, 0)
    assert root.is_dir() == is_there
    assert not is_there or not list(root.iterdir())


@pytest.mark.nightly
def test_clean_names_what_it_leaves_alone(pipeline: Command, copy: Copy) -> None:
    (copy.folder / "cache" / "thesis.tex").write_text("mine")
    (copy.folder / "cache" / "graph" / "shards" / "old.safetensors").write_text("mine")
    done = pipeline(*CLEAN, "--yes", *FEWER)
    assert "thesis.tex" in done.out
    assert "old.safetensors" in done.out
    assert (copy.folder / "cache" / "thesis.tex").exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--set", "cache.root=/"), "not a cache"),
        (("--older-than", "soon"), "no time"),
        (("--older-than", "0d"), "must be above zero"),
        (("--keep-recipes", "--all"), "either"),
        (("--set", "cache.root=pipeline.yaml"), "Not a directory"),
    ],
)
def test_clean_refuses_with_the_reason(pipeline: Command, copy: Copy, words: tuple[str, ...], said: str) -> None:
    done = (
        pipeline("cache", "clean", "--all", "--yes", *words)
        if "--all" not in words
        else pipeline("cache", "clean", *words)
    )
    assert done.code == 2
    assert said in done.err
    assert "next: " in done.err
    assert len(copy.keys("graph")) == ITEMS


@pytest.mark.nightly
def test_clean_refuses_a_cache_of_a_newer_version(pipeline: Command, copy: Copy) -> None:
    (copy.folder / "cache" / "pipeline-cache.json").unlink()
    (copy.folder / "cache" / "pipeline-cache.json").write_text('{"format": 99}')
    done = pipeline("cache", "clean", "--all", "--yes")
    assert (done.code, "newer pipeline" in done.err) == (2, True)
    assert any((copy.folder / "cache" / "graph" / "shards").iterdir())


@pytest.mark.nightly
def test_clean_refuses_a_link_that_leads_out(pipeline: Command, copy: Copy, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(copy.folder / "cache" / "graph", elsewhere)
    (copy.folder / "cache" / "graph").symlink_to(elsewhere)
    done = pipeline("cache", "clean", "--all", "--yes")
    assert (done.code, "symbolic link" in done.err, str(elsewhere) in done.err) == (2, True, True)
    assert any((elsewhere / "shards").iterdir())


@pytest.fixture
def imported(pipeline: Command, copy: Copy) -> None:
    """Import what the command imports late: the interpreter may lie where nobody but root can read."""
    assert pipeline(*CLEAN, *FEWER).code == 0, copy


@pytest.fixture
def foreign(imported: None, unprivileged: Path) -> Path:
    """Return a folder with a configuration and a cache of one record, as somebody who is not root sees it."""
    with CacheFolder(unprivileged / "cache").kind("graph").writer() as writer:
        writer.put(b"sixteen bytes...", {})
    (unprivileged / "pipeline.yaml").write_text("data: {source: glob, path: data}\n")
    return unprivileged


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("place", "mode", "said"),
    [
        ("graph/shards", 0o555, "may not remove"),
        ("graph/shards", 0o000, "cannot be read"),
        (".", 0o000, "cannot be read"),
    ],
)
def test_clean_refuses_a_cache_that_belongs_to_others(
    pipeline: Command, foreign: Path, place: str, mode: int, said: str
) -> None:
    (folder := foreign / "cache" / place).chmod(mode)
    done = pipeline("cache", "clean", "--all", "--yes", "--config", str(foreign / "pipeline.yaml"))
    folder.chmod(0o755)
    assert (done.code, said in done.err) == (2, True), done.err
    assert "next: ls -ld" in done.err
    assert len(list(CacheFolder(foreign / "cache").kind("graph").keys())) == 1


@pytest.mark.nightly
def test_stat_says_what_is_there_what_is_missing_and_who_uses_it(pipeline: Command, copy: Copy) -> None:
    done = pipeline("cache", "stat")
    assert done.code == 0, done.err
    assert "neighbours 20" in done.out
    assert "never validated" in done.out
    assert "what this data set needs is not known yet: pipeline submit --stage all" in done.out
    cached.submit(copy.folder, "graph")
    done = pipeline("cache", "stat")
    assert "embed: not known yet: pipeline submit --stage embed   (or --dry-run" in done.out
    assert "graph: not known" not in done.out
    assert f"graph: all {ITEMS} are there" in done.out
    assert f"used by {copy.file}" in done.out
    shutil.rmtree(copy.folder / "cache" / "graph" / "shards")
    told = json.loads(pipeline("cache", "stat", "--json").out)
    assert {one["kind"]: one["missing"] for one in told["missing"]} == {"scan": 0, "graph": ITEMS}
    assert f"{ITEMS} of {ITEMS} missing" in pipeline("cache", "stat").out


@pytest.mark.nightly
def test_stat_says_when_the_data_set_was_changed_since(pipeline: Command, copy: Copy) -> None:
    cached.submit(copy.folder, "scan")
    cached.write_manifest(copy.folder / "items.csv", [0])
    assert "it has changed since" in pipeline("cache", "stat").out


@pytest.mark.nightly
def test_stat_says_what_the_last_validation_found_and_what_was_put_aside(pipeline: Command, copy: Copy) -> None:
    cache = copy.store
    ReportWriter(cache.disk, cache.root / "_reports").publish(Summary(how="full", begun=1.0, findings=3, lost=2))
    (cache.root / "graph" / "quarantine").mkdir()
    (cache.root / "graph" / "quarantine" / "x.safetensors").write_bytes(b"12345")
    said = pipeline("cache", "stat").out
    assert "(full): 3 findings, 2 records lost" in said
    assert "  next: pipeline cache repair --list " in said
    assert "quarantine: 1 damaged file, 5 B" in said
    told = json.loads(pipeline("cache", "stat", "--json").out)
    assert told["last_validation"]["lost"] == 2
    assert told["quarantine"]["bytes"] == 5


@pytest.mark.nightly
def test_stat_of_an_empty_cache_says_so(pipeline: Command, copy: Copy) -> None:
    shutil.rmtree(copy.folder / "cache")
    done = pipeline("cache", "stat", "--set", "cache.shard_bytes=1MiB")
    assert done.code == 0
    again = "pipeline submit --stage all --set cache.shard_bytes=1MiB   (makes it)"
    assert done.out == f"cache {copy.folder / 'cache'}\nno cache is there yet: {again}\n"
    assert not (copy.folder / "cache").exists()


@pytest.mark.nightly
def test_stat_says_which_layers_are_left_out_and_why(pipeline: Command, copy: Copy) -> None:
    under = ("--set", "cache.under=[nowhere, cache]")
    said = pipeline("cache", "stat", *under).out
    assert f"left out of cache.under: {copy.folder / 'nowhere'}: there is no" in said
    assert f"left out of cache.under: {copy.folder / 'cache'}: a cache cannot be under itself" in said
    told = json.loads(pipeline("cache", "stat", *under, "--json").out)
    assert [one["path"] for one in told["left_out"]] == [str(copy.folder / name) for name in ("nowhere", "cache")]


@pytest.mark.nightly
def test_stat_counts_what_was_made_by_a_recipe_that_cannot_be_read(pipeline: Command, copy: Copy) -> None:
    assert "cannot be read" not in pipeline("cache", "stat").out
    shutil.rmtree(copy.folder / "cache" / "recipes")
    rows = [line for line in pipeline("cache", "stat").out.splitlines() if "recipes that cannot be read" in line]
    assert ["graph", str(ITEMS)] in [row.split()[:2] for row in rows]


@pytest.mark.nightly
def test_stat_says_that_an_index_that_is_not_there_is_harmless(pipeline: Command, copy: Copy) -> None:
    assert "index none" not in pipeline("cache", "stat").out
    (copy.folder / "cache" / "graph" / "index.bin").unlink()
    assert "index none: every file is read by its own table" in pipeline("cache", "stat").out
