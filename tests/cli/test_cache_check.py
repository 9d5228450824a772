"""`pipeline cache validate`, `repair` and `compact`, as they are typed."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest

from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import MARKER
from pipeline.store.format.disk import Disk
from pipeline.store.maintenance.damage_report import Fault, last_report, read_report
from tests.store.content import key_of
from tests.store.maintenance.damage import fill, flip, listed, overwrite
from tests.testkit.command import Command

VALIDATE, REPAIR, COMPACT = (("cache", verb) for verb in ("validate", "repair", "compact"))


def configured(folder: Path) -> Path:
    """Write a configuration whose cache is beside it."""
    path = folder / "pipeline.yaml"
    path.write_text("data: {source: glob, path: structures}\ncache: {root: cache, visibility_s: 0}\n")
    return path


@pytest.fixture(autouse=True)
def config(tmp_path: Path) -> Path:
    """Have a configuration in the current folder."""
    return configured(tmp_path)


@pytest.fixture
def cache(tmp_path: Path) -> CacheFolder:
    """Return a cache of two kinds."""
    cache = CacheFolder(tmp_path / "cache")
    for kind in ("graph", "scan"):
        fill(cache.kind(kind), range(4), range(4, 8))
        cache.kind(kind).write_index()
    return cache


def harm(cache: CacheFolder, number: int = 1, kind: str = "graph") -> str:
    """Flip a bit of a record; return the shard."""
    store = cache.kind(kind)
    (place,) = store.locate([key_of(number)])[0]
    flip(store.layout.shard(place.shard), place.offset)
    return place.shard


def columns(text: str, kind: str) -> list[str]:
    """Return what the table says of a kind."""
    (line,) = [line for line in text.splitlines() if line.startswith(kind)]
    return re.split(r"\s{2,}", line.strip())


def test_a_whole_cache_is_said_to_be_so(pipeline: Command, cache: CacheFolder) -> None:
    for how in ((), ("--full",), ("--quick",)):
        done = pipeline(*VALIDATE, *how)
        assert (done.code, columns(done.out, "graph")[-1]) == (0, "-"), how
        report = last_report(cache.disk, cache.root)
        assert report is not None
        summary, quick = report.summary, how == ("--quick",)  # nobody says of what was not read that it is whole
        assert (summary.listed, summary.whole, summary.how) == ((16, 0, "quick") if quick else (0, 16, "full"))


def test_damage_is_named_listed_and_ends_with_4(pipeline: Command, cache: CacheFolder) -> None:
    shard = harm(cache)
    assert pipeline(*VALIDATE, "--json").code == 4
    done = pipeline(*VALIDATE)
    assert done.code == 4
    assert columns(done.out, "graph")[3:] == ["8", "7", "1", "1 record damaged"]
    assert columns(done.out, "scan")[-1] == "-"
    report = last_report(cache.disk, cache.root)
    assert report is not None
    (finding,) = report.findings()
    assert (finding.fault, finding.shard, finding.key, finding.lost) == (Fault.RECORD, shard, key_of(1).hex(), True)
    assert f"pipeline cache repair --list {report.path}" in done.err
    document = json.loads(pipeline(*VALIDATE, "--json").out)
    assert (document["records"], document["whole"], document["lost"], document["findings"]) == (16, 15, 1, 1)
    assert document["kinds"]["graph"]["faults"] == {"record": 1}
    assert read_report(Path(document["list"])).summary.findings == 1


def test_every_record_gets_one_verdict(pipeline: Command, cache: CacheFolder) -> None:
    shard = harm(cache)
    pipeline(*VALIDATE, "--verdicts", "v/verdicts.jsonl")
    verdicts = [json.loads(line) for line in Path("v/verdicts.jsonl").read_text().splitlines()]
    assert len({(one["kind"], one["key"]) for one in verdicts}) == len(verdicts) == 16
    (bad,) = [one for one in verdicts if one["verdict"] != "whole"]
    assert bad | {"what": ""} == {
        "kind": "graph", "shard": shard, "key": key_of(1).hex(), "verdict": "record", "what": "", "lost": True,
    }  # fmt: skip
    pipeline(*VALIDATE, "--quick", "--verdicts", "quick.jsonl")  # of what is not read it is only said that it is listed
    assert [json.loads(line)["verdict"] for line in Path("quick.jsonl").read_text().splitlines()] == ["listed"] * 16


def test_parts_add_up_to_the_whole_and_one_kind_alone_can_be_asked_for(pipeline: Command, cache: CacheFolder) -> None:
    harm(cache, kind="graph")
    parts = [json.loads(pipeline(*VALIDATE, "--json", "--subset", f"{part}/3").out) for part in (1, 2, 3)]
    assert (sum(part["records"] for part in parts), sum(part["lost"] for part in parts)) == (16, 1)
    assert [part["subset"] for part in parts] == ["1/3", "2/3", "3/3"]
    assert pipeline(*VALIDATE, "--kind", "scan").code == 0


def test_what_cannot_be_meant_is_refused_and_leaves_nothing(pipeline: Command, cache: CacheFolder) -> None:
    os.mkfifo("pipe")
    for words, said in [
        ("--quick --full", ""),
        ("--kind none", "none"),
        ("--subset 3/2", ""),
        ("--out pipe", "a device is not a regular file"),
        ("--verdicts cache/pipeline-cache.json/x", "cannot write"),
    ]:
        done = pipeline(*VALIDATE, *words.split())
        assert (done.code, said in done.err) == (2, True), (words, done.err)
        assert "--verdicts" in words or not (cache.root / "_reports").exists(), words
    assert Path("pipe").is_fifo()
    done = pipeline(*VALIDATE, "--verdicts", "/dev/full")
    assert (done.code, "No space left on device" in done.err) == (2, True)
    Path("list").write_text("hello")
    pipeline(*VALIDATE, "--out", "odd")
    overwrite(Path("odd"), Path("odd").read_bytes() + b'{"kind":"graph","fault":"gone","what":"","shard":["a"]}\n')
    for name in ("list", "nowhere", "odd"):
        assert pipeline(*REPAIR, "--list", name).code == 2, name


def test_the_list_goes_where_it_is_wanted(pipeline: Command, cache: CacheFolder) -> None:
    harm(cache)
    done = pipeline(*VALIDATE, "--out", "lists/mine.jsonl")
    assert "pipeline cache repair --list" in done.err
    assert "lists/mine.jsonl" in done.out
    assert read_report(Path("lists/mine.jsonl")).summary.lost == 1
    assert not (cache.root / "_reports").exists()


def test_a_cache_that_cannot_be_written_is_validated_and_it_is_said_that_no_list_is_left(
    pipeline: Command, unprivileged: Path
) -> None:
    root = unprivileged / "cache"
    cache = CacheFolder(root)
    fill(cache.kind("graph"), range(3))
    harm(cache)
    root.chmod(0o555)
    done = pipeline(*VALIDATE, "--config", str(configured(unprivileged)))
    root.chmod(0o755)
    assert done.code == 4
    assert "the damage list could not be written" in done.out


COMMANDS = (VALIDATE, REPAIR, COMPACT)


def test_no_cache_and_an_empty_one(pipeline: Command, tmp_path: Path) -> None:
    assert [pipeline(*command).code for command in COMMANDS] == [2, 2, 2]
    assert not Path("cache").exists()
    CacheFolder(tmp_path / "cache").prepare()
    assert [pipeline(*command).code for command in COMMANDS] == [0, 0, 0]
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    (tmp_path / "cache").symlink_to(tmp_path / "elsewhere")  # a cache that is itself behind a link is one
    assert pipeline(*VALIDATE).code == 0


def test_a_folder_that_is_no_cache_of_ours_is_refused(pipeline: Command, tmp_path: Path) -> None:
    Path("cache").mkdir()
    Path("cache/thesis.tex").write_text("mine")
    assert [pipeline(*command).code for command in COMMANDS] == [2, 2, 2]
    newer = CacheFolder(tmp_path / "newer")
    newer.prepare()
    overwrite(newer.root / MARKER, b'{"format": 99}')
    assert [pipeline(*command, "--set", "cache.root=newer").code for command in COMMANDS] == [2, 2, 2]


def test_a_cache_that_one_may_not_read_is_refused(pipeline: Command, unprivileged: Path) -> None:
    root, config = unprivileged / "cache", configured(unprivileged)
    fill(CacheFolder(root).kind("graph"), range(3))
    for locked in (root, root / "graph", root / "graph" / "shards"):
        for command in COMMANDS:
            locked.chmod(0)
            done = pipeline(*command, "--config", str(config))
            locked.chmod(0o755)
            assert (done.code, "Permission denied" in done.err) == (2, True), (locked, command)


def test_links_that_lead_out_are_refused_and_all_are_named(pipeline: Command, cache: CacheFolder) -> None:
    outside = Path("outside").absolute()
    outside.mkdir()
    for place in ("graph/shards/x.safetensors", "graph/index.bin", "graph/quarantine", "aside"):
        (cache.root / place).unlink(missing_ok=True)
        (cache.root / place).symlink_to(outside)
        for command in COMMANDS:
            done = pipeline(*command)
            assert (done.code, f"cache/{place}" in done.err, str(outside) in done.err) == (2, True, True), place
        if place != "aside":
            (cache.root / place).unlink()
    links = [cache.root / "graph/shards/b.safetensors", cache.root / "aside"]
    links[0].symlink_to(outside)
    done = pipeline(*VALIDATE)
    assert (done.code, [link for link in links if f"{link} " not in done.err]) == (2, [])
    assert list(outside.iterdir()) == []


def test_repairing_first_says_what_it_would_do(pipeline: Command, cache: CacheFolder) -> None:
    shard = harm(cache)
    before = sorted(path for path in cache.root.rglob("*"))
    done = pipeline(*REPAIR)
    assert done.code == 0
    assert sorted(path for path in cache.root.rglob("*")) == before
    assert re.split(r"\s{2,}", next(line for line in done.out.splitlines() if shard in line).strip()) == [
        "graph", shard, "1 damaged record", "3", "1", "quarantine",
    ]  # fmt: skip
    assert "to apply: pipeline cache repair --yes" in done.out


def test_validate_then_repair_then_validate_is_whole_again(pipeline: Command, cache: CacheFolder) -> None:
    shard = harm(cache)
    command = re.search(r"next: pipeline (.*)", pipeline(*VALIDATE).err)
    assert command is not None
    done = pipeline(*command[1].split(), "--yes")
    assert done.code == 0
    listed_at = re.search(r"damage list of the lost records: (\S+)", done.out)
    assert listed_at is not None
    assert [one.key for one in read_report(Path(listed_at[1])).findings()] == [key_of(1).hex()]
    assert f"next: pipeline cache regenerate --list {listed_at[1]}" in done.out
    assert [path.name for path in (cache.root / "graph" / "quarantine").iterdir()] == [shard]
    assert pipeline(*VALIDATE).code == 0
    assert "Nothing is damaged" in pipeline(*REPAIR, "--yes").out


def test_what_a_repair_does_can_be_read_by_programs(pipeline: Command, cache: CacheFolder) -> None:
    shard = harm(cache)
    planned = json.loads(pipeline(*REPAIR, "--json").out)
    done = json.loads(pipeline(*REPAIR, "--json", "--yes").out)
    assert (planned["done"], done["done"]) == (False, True)
    assert planned["files"] == done["files"]
    assert [(one["shard"], one["salvaged"], [lost["key"] for lost in one["lost"]]) for one in done["files"]] == [
        (shard, 3, [key_of(1).hex()]),
        ("", 0, []),
    ]
    assert Path(done["missing"]).exists()


def test_compacting_says_what_it_would_do_then_does_it(pipeline: Command, cache: CacheFolder) -> None:
    store = cache.kind("graph")
    fill(store, *([number] for number in range(20, 30)))
    before = listed(store)
    done = pipeline(*COMPACT)
    assert columns(done.out, "graph")[:4] == ["graph", "12", "12", "18"]
    assert "to apply: pipeline cache compact --yes" in done.out
    assert listed(store) == before
    done = pipeline(*COMPACT, "--yes")
    assert columns(done.out, "graph")[-1] == "1 file"
    assert "14 files merged into 2" in done.out
    assert len(listed(store)) == 1
    assert pipeline(*VALIDATE).code == 0
    assert json.loads(pipeline(*COMPACT, "--json").out)["kinds"][0]["small"] == []


def test_a_list_of_another_cache_is_refused_and_not_taken_for_a_whole_cache(
    pipeline: Command, cache: CacheFolder
) -> None:
    harm(cache)
    pipeline(*VALIDATE, "--out", "list.jsonl")
    cache.root.rename("moved")
    for verb in ("repair", "regenerate"):
        done = pipeline("cache", verb, "--list", "list.jsonl", "--set", "cache.root=moved")
        assert done.code == 2
        assert f"the cache {cache.root}, not to {Path('moved').absolute()}" in done.err
        assert "next: pipeline cache validate " in done.err
        assert "--set cache.root=moved" in done.err.partition("next:")[2]


def test_a_file_that_no_pipeline_wrote_is_named_until_it_is_gone(pipeline: Command, cache: CacheFolder) -> None:
    (path := cache.kind("graph").layout.shards / "foo.safetensors").write_bytes(b"mine")
    for command in (VALIDATE, REPAIR, (*REPAIR, "--yes")):
        done = pipeline(*command)
        assert (done.code, f"next: mv {path} elsewhere" in done.err) == (4, True)
    path.unlink()
    assert pipeline(*VALIDATE).code == 0


def test_a_list_that_cannot_be_written_where_it_is_wanted_is_not_blamed_on_the_cache(
    pipeline: Command, cache: CacheFolder, unprivileged: Path
) -> None:
    root = unprivileged / "cache"
    fill(CacheFolder(root).kind("graph"), range(3))
    config = str(configured(unprivileged))
    (unprivileged / "locked").mkdir(mode=0o555)
    done = pipeline(*VALIDATE, "--config", config, "--out", str(unprivileged / "locked/list.jsonl"))
    assert done.code == 2
    assert "the damage list cannot be written here: Permission denied" in done.err
    assert "cache.root" not in done.err
    assert "a folder is not a regular file" in pipeline(*VALIDATE, "--config", config, "--out", str(unprivileged)).err


def test_who_may_not_write_in_a_cache_asks_its_owner(pipeline: Command, unprivileged: Path) -> None:
    config = ("--config", str(configured(unprivileged)))
    cache = CacheFolder(unprivileged / "cache")
    fill(cache.kind("graph"), range(4), range(4, 8))
    for command in (COMPACT, REPAIR):
        folders = [cache.root, *(path for path in cache.root.rglob("*") if path.is_dir())]
        if command is REPAIR:
            harm(cache)
        for folder in folders:
            folder.chmod(0o555)
        done = pipeline(*command, "--yes", *config)
        for folder in folders:
            folder.chmod(0o755)
        assert done.code == 2
        assert f"ls -ld {cache.root}   (ask its owner" in done.err
        assert "cache.root=" not in done.err


@pytest.mark.parametrize("command", [COMPACT, REPAIR])
def test_where_a_disk_is_full_room_is_asked_for_and_no_submission(
    pipeline: Command, cache: CacheFolder, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    harm(cache)

    def full(_disk: Disk, _fd: int, _data: bytes | memoryview, _offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Disk, "write_at", full)
    done = pipeline(*command, "--yes")
    assert (done.code, "the disk is full" in done.err, "submit" in done.err) == (7, True, False)
    assert "next: free space there, then run the same command again" in done.err
