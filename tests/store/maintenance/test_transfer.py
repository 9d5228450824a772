"""A cache that is moved: nothing damaged leaves, nothing damaged or foreign arrives, and both can be begun again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess

import pytest

from pipeline.errors import CacheDamaged, CacheFull, CacheUnusable, ConfigError, PipelineError
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import EXPORT, MANIFEST
from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import read_table
from pipeline.store.maintenance import exported
from pipeline.store.maintenance.rewrite import compact_shards, plan_compaction
from pipeline.store.maintenance.transfer import export_cache, take_in
from pipeline.store.snapshot import IndexState
from tests.store.content import is_right, key_of, put
from tests.store.faulty_disks import FailingDisk, os_error

NUMBERS = range(40)


@pytest.fixture
def cache(tmp_path):
    """A cache of two kinds, in several shards."""
    cache = CacheFolder(tmp_path / "cache")
    with cache.kind("scan").writer(shard_bytes=3000) as writer:
        put(writer, *NUMBERS)
    with cache.kind("graph").writer() as writer:
        put(writer, *NUMBERS)
    return cache


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "export"


@pytest.fixture
def other(tmp_path):
    return CacheFolder(tmp_path / "other")


def shards(root, kind="*"):
    return sorted(root.glob(f"{kind}/shards/*"))


def flip(path, place=-1):
    """Change a byte, by default of the first record."""
    place = read_table(Disk(), path).data_start + 1 if place < 0 else place
    content = bytearray(path.read_bytes())
    content[place] ^= 8
    path.unlink()
    path.write_bytes(content)


def rewrite(path, content):
    path.unlink()
    path.write_text(content)


def holds_all(cache):
    return all(
        is_right(record, key_of(number))
        for kind in ("scan", "graph")
        for number, record in zip(NUMBERS, CacheFolder(cache.root).kind(kind).read(map(key_of, NUMBERS)), strict=True)
    )


def test_what_is_exported_is_imported_whole(cache, folder, other):
    out = export_cache(cache, folder)
    assert (out.copied, out.there, out.refused) == (len(shards(cache.root)), 0, [])
    assert out.bytes == sum(path.stat().st_size for path in shards(folder))
    into = take_in(other, folder)
    assert (into.copied, into.there, into.refused, into.kinds) == (out.copied, 0, [], out.kinds)
    assert holds_all(other)
    assert [path.read_bytes() for path in shards(other.root)] == [path.read_bytes() for path in shards(cache.root)]
    assert CacheFolder(other.root).kind("scan").stat().index is IndexState.CURRENT
    assert not list(other.root.rglob("*.partial"))
    assert not list(folder.rglob("*.partial"))


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_the_manifest_is_one_that_sha256sum_checks(cache, folder):
    export_cache(cache, folder)
    command = ["sha256sum", "--check", "--strict", "--quiet", MANIFEST]
    assert subprocess.run(command, cwd=folder, check=False).returncode == 0
    flip(shards(folder)[0])
    found = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert found.returncode == 1
    assert shards(folder)[0].name in found.stdout


def test_an_export_says_what_is_in_it_and_is_a_cache_itself(cache, folder, tmp_path):
    export_cache(cache, folder)
    told = json.loads((folder / EXPORT).read_text())
    assert (told["export"], told["format"]) == (1, 1)
    paths = shards(folder, "scan")
    assert told["kinds"]["scan"] == {"shards": len(paths), "bytes": sum(path.stat().st_size for path in paths)}
    over = CacheFolder.over(tmp_path / "mine", [folder])
    assert over.left_out == ()
    assert over.kind("scan").missing([key_of(3)]) == []


def test_some_kinds_can_be_exported_and_others_later(cache, folder, other):
    assert export_cache(cache, folder, ["graph"]).kinds == {"graph": 1}
    assert shards(folder, "scan") == []
    again = export_cache(cache, folder, ["scan"])
    assert again.there == 0
    assert take_in(other, folder).refused == []
    assert holds_all(other)
    with pytest.raises(ConfigError, match=r"no records of kind 'grahp'; there are graph, scan"):
        export_cache(cache, folder, ["grahp"])


def test_again_only_what_is_missing_or_damaged_is_copied(cache, folder, other):
    export_cache(cache, folder)
    lost, bad, *others = shards(folder)
    lost.unlink()
    flip(bad)
    kept = {path: path.stat().st_ino for path in others}
    again = export_cache(cache, folder)
    assert (again.copied, again.there) == (2, len(kept))
    assert {path: path.stat().st_ino for path in kept} == kept
    assert take_in(other, folder).refused == []
    (last, *_), before = shards(other.root), len(shards(other.root))
    last.unlink()
    again = take_in(other, folder)
    assert (again.copied, again.there) == (1, before - 1)
    assert holds_all(other)


@pytest.mark.parametrize("step", ["write_at", "fsync", "link", "rename", "open_new"])
def test_an_export_that_was_broken_off_anywhere_is_finished_by_the_next(cache, folder, other, step):
    after = 0
    while True:
        disk = FailingDisk(step, errno.EIO, after)
        try:
            export_cache(CacheFolder(cache.root, disk), folder)
        except PipelineError:
            assert not (folder / MANIFEST).exists()
            with pytest.raises(PipelineError):
                take_in(other, folder)
            assert shards(other.root) == []
            after += 1
        else:
            break
    assert after > 1
    assert take_in(other, folder).refused == []
    assert holds_all(other)


@pytest.mark.parametrize("step", ["write_at", "fsync", "link"])
def test_an_import_that_was_broken_off_anywhere_is_finished_by_the_next(cache, folder, other, step):
    export_cache(cache, folder)
    after = 0
    while True:
        try:
            take_in(CacheFolder(other.root, FailingDisk(step, errno.EIO, after)), folder)
        except PipelineError:
            store = CacheFolder(other.root).kind("scan")
            there = [key for key in map(key_of, NUMBERS) if key in store]
            assert all(is_right(store.get(key), key) for key in there)
            after += 1
        else:
            break
    assert after > 1
    assert holds_all(other)


def test_what_a_killed_export_left_unfinished_is_swept(cache, folder):
    export_cache(cache, folder)
    (folder / "scan/tmp/20200101T000000Z-gone-1-0123456789abcdef.partial").write_text("half")
    (folder / "20200101T000000Z-gone-1-0123456789abcdef.partial").write_text("half")
    (folder / "scan/tmp/mine.partial").write_text("not of an export")
    export_cache(cache, folder)
    assert [path.name for path in folder.rglob("*.partial")] == ["mine.partial"]


def test_a_damaged_shard_is_named_and_not_exported(cache, folder, other):
    bad = shards(cache.root, "scan")[1]
    flip(bad)
    moved = export_cache(cache, folder)
    (refused,) = moved.refused
    assert refused.file == f"scan/shards/{bad.name}"
    assert "1 of its" in refused.what
    assert bad.name not in (folder / MANIFEST).read_text()
    assert bad.name not in [path.name for path in shards(folder)]
    assert moved.copied == len(shards(cache.root)) - 1
    assert take_in(other, folder).refused == []


@pytest.mark.parametrize("where", [3, -200, -20])
def test_a_shard_damaged_around_its_records_is_not_exported_either(cache, folder, where):
    bad = shards(cache.root, "graph")[0]
    flip(bad, bad.stat().st_size + where if where < 0 else where)
    assert [one.file for one in export_cache(cache, folder).refused] == [f"graph/shards/{bad.name}"]


def test_a_copy_in_the_export_outlives_the_damage_of_its_source(cache, folder, other):
    export_cache(cache, folder)
    flip(shards(cache.root)[0])
    assert export_cache(cache, folder).refused == []
    assert take_in(other, folder).refused == []
    assert holds_all(other)


def test_an_export_after_a_compaction_holds_each_record_once(cache, folder, other):
    export_cache(cache, folder)
    store = CacheFolder(cache.root).kind("scan")
    compact_shards([(store, plan_compaction(store))], settle_s=0)
    moved = export_cache(cache, folder)
    assert (moved.refused, moved.dropped > 1) == ([], True)
    assert [path.name for path in shards(folder)] == [path.name for path in shards(cache.root)]
    assert take_in(other, folder).refused == []
    assert holds_all(other)


def test_what_the_cache_has_no_longer_is_verified_and_stays(cache, folder, other):
    export_cache(cache, folder)
    shards(cache.root, "scan")[0].unlink()
    moved = export_cache(cache, folder)
    assert (moved.refused, moved.dropped, moved.copied) == ([], 0, 0)
    assert take_in(other, folder).refused == []
    assert holds_all(other)


def test_what_the_cache_has_no_longer_and_is_damaged_is_named_and_not_in_the_manifest(cache, folder, other):
    export_cache(cache, folder)
    bad = shards(folder, "scan")[0]
    shards(cache.root, "scan")[0].unlink()
    flip(bad)
    (refused,) = export_cache(cache, folder).refused
    assert refused.file == f"scan/shards/{bad.name}"
    assert "the cache has it no longer" in refused.what
    assert bad.exists()
    assert take_in(other, folder).refused == []
    assert bad.name not in [path.name for path in shards(other.root)]


def test_a_manifest_of_any_size_is_not_read(cache, folder, other, monkeypatch):
    export_cache(cache, folder)
    monkeypatch.setattr(exported, "MANIFEST_BYTES", (folder / MANIFEST).stat().st_size - 1)
    with pytest.raises(CacheDamaged, match="too large"):
        take_in(other, folder)


def test_nothing_is_exported_through_a_link_that_leads_elsewhere(cache, folder, tmp_path):
    export_cache(cache, folder)
    (folder / "scan").rename(tmp_path / "elsewhere")
    (folder / "scan").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheUnusable, match="leads out of the cache"):
        export_cache(cache, folder)


def damage(folder):
    flip(shards(folder)[0])
    return "records are damaged"


def cut(folder):
    path = shards(folder)[0]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-3])
    return "end is damaged"


def lose(folder):
    shards(folder)[0].unlink()
    return "not there"


def swap(folder):
    """Put another shard that is whole in its place."""
    one, other = shards(folder, "scan")[:2]
    content = other.read_bytes()
    one.unlink()
    one.write_bytes(content)
    return "not those of the manifest"


def link_out(folder):
    path = shards(folder)[0]
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")
    return "no plain file"


def pipe(folder):
    path = shards(folder)[0]
    path.unlink()
    os.mkfifo(path)
    return "no plain file"


@pytest.mark.parametrize("harm", [damage, cut, lose, swap, link_out, pipe])
def test_a_file_that_did_not_arrive_whole_is_named_and_the_rest_is_imported(cache, folder, other, harm):
    export_cache(cache, folder)
    names = [path.name for path in shards(folder)]
    why = harm(folder)
    moved = take_in(other, folder)
    (refused,) = moved.refused
    assert refused.file.endswith(names[0] if harm is not swap else shards(folder, "scan")[0].name)
    assert why in refused.what
    assert moved.copied == len(names) - 1
    assert len(shards(other.root)) == len(names) - 1
    assert refused.file.rpartition("/")[2] not in [path.name for path in shards(other.root)]


def test_a_folder_that_is_a_link_leads_nowhere(cache, folder, other):
    export_cache(cache, folder)
    (folder / "scan").rename(folder.parent / "moved")
    (folder / "scan").symlink_to(folder.parent / "moved")
    moved = take_in(other, folder)
    assert {one.what for one in moved.refused} == {"it is no plain file, or behind a symbolic link"}
    assert moved.kinds == {"graph": 1}


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "scan/shards/../../x.safetensors",
        "../shards/x.safetensors",
        "scan/shards/.x.safetensors",
        "scan/shards/a/b.safetensors",
        "scan/index.bin",
        "Scan/shards/x.safetensors",
        "scan/shards/x.safetensors ",
        "scan/shards/x\0.safetensors",
        "scan/shards/x\u2028.safetensors",
        "",
    ],
)
def test_a_manifest_that_names_anything_else_is_refused_before_anything_is_read(cache, folder, other, name):
    export_cache(cache, folder)
    rewrite(folder / MANIFEST, (folder / MANIFEST).read_text() + "0" * 64 + f"  {name}\n")
    with pytest.raises(CacheDamaged, match=r"line \d+ names no file of an export"):
        take_in(other, folder)
    assert not other.root.exists()


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_manifest_that_was_cut_is_not_taken_for_a_smaller_export(cache, folder, other, keep):
    export_cache(cache, folder)
    text = (folder / MANIFEST).read_text()
    rewrite(folder / MANIFEST, text[: int(keep * len(text))])
    with pytest.raises(CacheDamaged):
        take_in(other, folder)
    rewrite(folder / MANIFEST, "".join(text.splitlines(keepends=True)[1:]))
    with pytest.raises(CacheDamaged, match="not finished, or was not copied whole"):
        take_in(other, folder)
    assert not other.root.exists()


def test_an_export_without_its_manifest_is_not_finished(cache, folder, other):
    export_cache(cache, folder)
    (folder / MANIFEST).unlink()
    with pytest.raises(CacheDamaged, match="not finished: it has no manifest"):
        take_in(other, folder)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", CacheDamaged),
        ("[]", CacheDamaged),
        ("{}", CacheDamaged),
        ('{"export": 1, "format": 1, "kinds": {"scan": 4}}', CacheDamaged),
        ("[" * 10_000, CacheDamaged),
        ('{"export": Infinity, "format": 1, "kinds": {}}', CacheDamaged),
        ('{"export": 2, "format": 1, "kinds": {}}', CacheUnusable),
        ('{"export": 1, "format": 2, "kinds": {}}', CacheUnusable),
    ],
)
def test_an_export_that_says_nothing_or_is_newer_is_refused(cache, folder, other, text, error):
    export_cache(cache, folder)
    rewrite(folder / EXPORT, text)
    with pytest.raises(error) as caught:
        take_in(other, folder)
    assert type(caught.value) is error
    assert caught.value.remedy


def test_a_folder_that_is_no_export_is_refused(cache, tmp_path, other):
    for name in (tmp_path / "nothing", cache.root, tmp_path):
        with pytest.raises(ConfigError, match="no export of a cache"):
            take_in(other, name)


def test_nothing_that_is_there_is_overwritten(cache, folder, other):
    export_cache(cache, folder)
    take_in(other, folder)
    one, two = shards(other.root, "scan")[:2]
    content = one.read_bytes()
    two.unlink()
    two.write_bytes(content)  # whole, of that name, and not the same
    flip(shards(other.root, "graph")[0])
    before = [path.read_bytes() for path in shards(other.root)]
    moved = take_in(other, folder)
    assert sorted(one.what.partition(" (")[0] for one in moved.refused) == [
        "the cache has another file of this name, which stays",
        "the cache has it, damaged",
    ]
    assert [path.read_bytes() for path in shards(other.root)] == before


def test_two_imports_at_once_are_one(cache, folder, other):
    """The other one publishes each file just before this one does."""
    export_cache(cache, folder)

    class Slower(Disk):
        def link(self, source, target):
            if not target.exists() and target.suffix == ".safetensors":
                shutil.copy(source, target)
            super().link(source, target)

    moved = take_in(CacheFolder(other.root, Slower()), folder)
    assert (moved.copied, moved.refused) == (0, [])
    assert moved.there == len(shards(folder))
    assert holds_all(other)


@pytest.mark.parametrize("place", ["cache/export", "cache", "."])
def test_an_export_neither_lies_in_its_cache_nor_around_it(cache, tmp_path, place):
    with pytest.raises(ConfigError, match="cannot lie in its cache"):
        export_cache(cache, tmp_path / place)


def test_a_folder_in_use_is_no_place_for_an_export(cache, tmp_path, other):
    with other.kind("scan").writer() as writer:
        put(writer, 1)
    with pytest.raises(ConfigError, match="not empty, and no export"):
        export_cache(cache, other.root)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.tex").write_text("x")
    with pytest.raises(CacheUnusable, match="not empty, and no export"):
        export_cache(cache, tmp_path / "thesis")
    with pytest.raises(ConfigError, match="the cache is empty"):
        export_cache(CacheFolder(tmp_path / "nothing"), tmp_path / "export")


def test_too_little_room_is_said_before_anything_is_copied(cache, folder, other):
    export_cache(cache, folder)

    class Small(Disk):
        def free_bytes(self, path):
            return 10

    for move, target in (
        (lambda: export_cache(CacheFolder(cache.root, Small()), folder.parent / "second"), folder.parent / "second"),
        (lambda: take_in(CacheFolder(other.root, Small()), folder), other.root),
    ):
        with pytest.raises(CacheFull, match="are to be copied, and"):
            move()
        assert not target.exists()
    assert export_cache(CacheFolder(cache.root, Small()), folder).copied == 0  # nothing is to be copied


def test_links_are_made_if_asked_and_refused_where_there_are_none(cache, folder, tmp_path):
    assert export_cache(cache, folder, link=True).refused == []
    assert all(one.samefile(two) for one, two in zip(shards(cache.root), shards(folder), strict=True))
    assert (folder / MANIFEST).exists()

    class Elsewhere(Disk):
        def link(self, source, target):
            if target.suffix == ".safetensors":
                raise os_error(errno.EXDEV)
            super().link(source, target)

    with pytest.raises(ConfigError, match="cannot be linked here") as caught:
        export_cache(CacheFolder(cache.root, Elsewhere()), tmp_path / "second", link=True)
    assert "--link" in caught.value.remedy


def test_a_damaged_shard_is_not_linked(cache, folder):
    flip(shards(cache.root, "graph")[0])
    assert len(export_cache(cache, folder, link=True).refused) == 1
    assert shards(folder, "graph") == []


def test_progress_is_told_in_bytes(cache, folder, other):
    for move in (lambda tell: export_cache(cache, folder, tell=tell), lambda tell: take_in(other, folder, tell=tell)):
        told = []
        move(lambda now, total: told.append((now, total)))  # noqa: B023 - it is called at once
        assert told == sorted(told)
        assert told[-1][0] == told[-1][1] == sum(path.stat().st_size for path in shards(cache.root))


def test_a_file_that_a_manifest_cannot_name_is_named_and_the_rest_can_be_imported(cache, folder, other):
    path = shards(cache.root, "graph")[0]
    path.rename(path.with_name("my file.safetensors"))
    moved = export_cache(cache, folder)
    assert [one.file for one in moved.refused] == ["graph/shards/my file.safetensors"]
    assert "rename it" in moved.refused[0].what
    assert take_in(other, folder).refused == []
