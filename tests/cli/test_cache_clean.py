"""`pipeline cache stat` and `pipeline cache clean` as people type them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.store.cache_folder import CacheFolder
from pipeline.store.maintenance.damage_report import ReportWriter, Summary
from tests.testkit.command import Command
from tests.upkeep.cached import ITEMS, Copy, write_manifest
from tests.upkeep.cached import copy as copy

CLEAN = ("cache", "clean", "--older-than", "0")
FEWER = ("--set", "graph.neighbours=3")


@pytest.mark.nightly
def test_clean_says_first_what_it_would_do_and_does_it_with_yes(pipeline: Command, copy: Copy) -> None:
    looked = pipeline(*CLEAN, *FEWER)
    assert looked.code == 0, looked.err
    assert len(copy.keys_of("graph")) == ITEMS
    (again,) = [line.partition("to apply: ")[2] for line in looked.out.splitlines() if "to apply: " in line]
    done = pipeline(*again.split()[1:])
    assert done.code == 0, done.err
    assert "freed" in done.err
    assert copy.keys_of("graph") == set()
    assert "Nothing to clean" in pipeline(*CLEAN, *FEWER).out


@pytest.mark.nightly
def test_stat_advises_a_repair_until_it_was_done_and_again_after_the_next_damage(pipeline: Command, copy: Copy) -> None:
    def stat() -> Any:
        return json.loads(pipeline("cache", "stat", "--json").out)["last_validation"]

    for kind in ("graph", "scan"):
        (shard, *_) = sorted((copy.folder / f"cache/{kind}/shards").iterdir())
        shard.chmod(0o600)
        shard.write_bytes(shard.read_bytes()[:-100])
        assert pipeline("cache", "validate", "--full").code == 4
        assert (stat()["repaired"], "pipeline cache repair --list" in stat()["remedy"]) == (None, True)
        assert pipeline("cache", "repair", "--yes", "--set", "cache.visibility_s=0").code == 0
        told = stat()
        assert (told["remedy"], told["findings"] > 0, told["repaired"] > told["begun"]) == ("", True, True)
    assert pipeline(*CLEAN, "--yes").code == 0  # which keeps what stat goes by
    assert stat()["remedy"] == ""


@pytest.mark.nightly
def test_clean_says_one_json_document(pipeline: Command, copy: Copy) -> None:
    told = json.loads(pipeline(*CLEAN, *FEWER, "--json").out)
    assert {one["kind"]: one["items"] for one in told["dead"]} == {"graph": ITEMS, "recipes": 1}
    assert "removed" not in told
    done = json.loads(pipeline(*CLEAN, *FEWER, "--json", "--yes").out)
    assert done["removed"]["bytes"] == done["bytes"] == told["bytes"]
    assert copy.keys_of("graph") == set()


@pytest.mark.nightly
def test_clean_refuses_what_it_must_not_touch(pipeline: Command, copy: Copy, tmp_path: Path) -> None:
    def refuses(*words: str, said: str = "next: ") -> bool:
        done = pipeline("cache", "clean", *words)
        return done.code == 2 and said in done.err and "next: " in done.err

    for words in (
        "--all --yes --set cache.root=/",
        "--all --yes --older-than soon",
        "--all --yes --older-than 0d",
        "--keep-recipes --all",
        "--all --yes --set cache.root=pipeline.yaml",
    ):
        assert refuses(*words.split()), words
    elsewhere = tmp_path / "elsewhere"
    shutil.move(copy.folder / "cache" / "graph", elsewhere)
    (copy.folder / "cache" / "graph").symlink_to(elsewhere)
    assert refuses("--all", "--yes", said=str(elsewhere))
    (copy.folder / "cache" / "graph").unlink()
    shutil.move(elsewhere, copy.folder / "cache" / "graph")
    (copy.folder / "cache" / "pipeline-cache.json").unlink()
    (copy.folder / "cache" / "pipeline-cache.json").write_text('{"format": 99}')
    assert refuses("--all", "--yes", said="newer")
    assert len(list((copy.folder / "cache" / "graph" / "shards").iterdir())) > 0


@pytest.fixture
def imported(pipeline: Command, copy: Copy) -> None:
    """Import what the command imports late: the interpreter may lie where only root can read."""
    assert pipeline(*CLEAN, *FEWER).code == 0, copy


@pytest.fixture
def foreign(imported: None, unprivileged: Path) -> Path:
    """Return a folder with a configuration and a cache of one record, as somebody who is not root sees it."""
    with CacheFolder(unprivileged / "cache").kind("graph").writer() as writer:
        writer.put(b"sixteen bytes...", {})
    (unprivileged / "pipeline.yaml").write_text("data: {source: glob, path: data}\n")
    return unprivileged


@pytest.mark.nightly
def test_clean_refuses_a_cache_that_belongs_to_others(pipeline: Command, foreign: Path) -> None:
    for place, mode, said in (
        ("graph/shards", 0o555, "no permission to remove"),
        ("graph/shards", 0o000, "cannot be read"),
        (".", 0o000, "cannot be read"),
    ):
        (folder := foreign / "cache" / place).chmod(mode)
        done = pipeline("cache", "clean", "--all", "--yes", "--config", str(foreign / "pipeline.yaml"))
        folder.chmod(0o755)
        assert (done.code, said in done.err, "next: ls -ld" in done.err) == (2, True, True), (place, done.err)
        assert len(list(CacheFolder(foreign / "cache").kind("graph").keys())) == 1


@pytest.mark.nightly
def test_stat_says_what_is_there_what_is_missing_and_who_uses_it(pipeline: Command, copy: Copy) -> None:
    done = pipeline("cache", "stat")
    assert (done.code, "pipeline submit" in done.out) == (0, True), done.err
    copy.finishes("graph")
    assert f"used by {copy.file}" in pipeline("cache", "stat").out
    shutil.rmtree(copy.folder / "cache" / "graph" / "shards")
    told = json.loads(pipeline("cache", "stat", "--json").out)
    assert {one["kind"]: one["missing"] for one in told["missing"]} == {"scan": 0, "graph": ITEMS}
    write_manifest(copy.folder / "items.csv", [0])
    assert "has changed since" in pipeline("cache", "stat").out


@pytest.mark.nightly
def test_stat_says_what_was_found_put_aside_and_cannot_be_read(pipeline: Command, copy: Copy) -> None:
    cache = copy.cache
    ReportWriter(cache.disk, cache.root / "_reports").publish(Summary(how="full", begun=1.0, findings=3, lost=2))
    (cache.root / "graph" / "quarantine").mkdir()
    (cache.root / "graph" / "quarantine" / "x.safetensors").write_bytes(b"12345")
    told = json.loads(pipeline("cache", "stat", "--json").out)
    assert (told["last_validation"]["lost"], told["quarantine"]["bytes"]) == (2, 5)
    before = pipeline("cache", "stat", "-v").out
    (cache.root / "graph" / "index.bin").unlink()
    shutil.rmtree(cache.root / "recipes")
    after = pipeline("cache", "stat", "-v").out
    rows = [line for line in after.splitlines() if "unreadable recipes" in line]
    assert ["graph", str(ITEMS)] in [row.split()[:2] for row in rows]
    assert ("index none" in before, "index none" in after) == (False, True)
