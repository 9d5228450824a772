"""A cache that is moved: nothing damaged leaves, nothing damaged or foreign arrives, and both can be begun again."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess

import pytest

from pipeline.errors import CacheDamaged, CacheFull, CacheUnusable, ConfigError
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import EXPORT, MANIFEST
from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import read_table
from pipeline.store.maintenance.shard_plans import apply, plan_compaction
from pipeline.store.maintenance.transfer import export_cache, take_in
from pipeline.store.shard_index import IndexState
from tests.store.content import is_right, key_of, put
from tests.store.faulty_disks import os_error
from tests.store.maintenance.damage import flip, overwrite

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


def harm(path, place=None):
    """Change a byte, by default of the first record."""
    flip(path, read_table(Disk(), path).data_start + 1 if place is None else place)


def holds_all(cache):
    return all(
        is_right(record, key_of(number))
        for kind in ("scan", "graph")
        for number, record in zip(NUMBERS, CacheFolder(cache.root).kind(kind).read(map(key_of, NUMBERS)), strict=True)
    )


def test_a_second_export_to_the_same_folder_is_refused_while_the_first_runs(cache, folder, other):
    refused = list[ConfigError]()

    def also(_now, _all):
        with pytest.raises(ConfigError) as error:
            export_cache(cache, folder)
        refused.append(error.value)

    assert export_cache(cache, folder, show=also).refused == []
    assert str(folder) in str(refused[0])
    assert take_in(other, folder).refused == []
    assert holds_all(other)


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
    about = json.loads((folder / EXPORT).read_text())
    paths = shards(folder, "scan")
    assert about["kinds"]["scan"] == {"shards": len(paths), "bytes": sum(path.stat().st_size for path in paths)}
    over = CacheFolder.over(other.root / "mine", [folder])  # an export is a cache itself
    assert over.kind("scan").missing([key_of(3)]) == []


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="sha256sum is not installed")
def test_the_manifest_is_one_that_sha256sum_checks(cache, folder):
    export_cache(cache, folder)
    command = ["sha256sum", "--check", "--strict", "--quiet", MANIFEST]
    assert subprocess.run(command, cwd=folder, check=False).returncode == 0
    harm(shards(folder)[0])
    found = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    assert found.returncode == 1
    assert shards(folder)[0].name in found.stdout


def test_some_kinds_can_be_exported_and_others_later(cache, folder, other):
    assert export_cache(cache, folder, ["graph"]).kinds == {"graph": 1}
    assert shards(folder, "scan") == []
    again = export_cache(cache, folder, ["scan"])
    assert again.there == 0
    assert take_in(other, folder).refused == []
    assert holds_all(other)
    with pytest.raises(ConfigError):
        export_cache(cache, folder, ["grahp"])


def test_again_only_what_is_missing_or_damaged_is_copied(cache, folder, other):
    export_cache(cache, folder)
    for place in ("scan/tmp", "."):  # what a killed export left unfinished is swept
        (folder / place / "20200101T000000Z-gone-1-0123456789abcdef.partial").write_text("half")
    (folder / "scan/tmp/mine.partial").write_text("not of an export")
    lost, bad, *others = shards(folder)
    lost.unlink()
    harm(bad)
    kept = {path: path.stat().st_ino for path in others}
    again = export_cache(cache, folder)
    assert (again.copied, again.there) == (2, len(kept))
    assert [path.name for path in folder.rglob("*.partial")] == ["mine.partial"]
    assert {path: path.stat().st_ino for path in kept} == kept
    assert take_in(other, folder).refused == []
    (last, *_), before = shards(other.root), len(shards(other.root))
    last.unlink()
    again = take_in(other, folder)
    assert (again.copied, again.there) == (1, before - 1)
    assert holds_all(other)


@pytest.mark.parametrize("link", [False, True])
def test_damaged_shards_are_named_and_not_exported(cache, folder, other, link):
    with cache.kind("scan").writer(shard_bytes=1) as writer:
        put(writer, *range(40, 44))
    bad = shards(cache.root, "scan")[-4:]
    for path, place in zip(bad, (None, 3, -200, -20), strict=True):  # a record, the header, the table, the end
        harm(path, place if place is None or place > 0 else path.stat().st_size + place)
    moved = export_cache(cache, folder, link=link)
    assert sorted(one.file for one in moved.refused) == [f"scan/shards/{path.name}" for path in bad]
    assert moved.copied == len(shards(cache.root)) - len(bad)
    assert not {path.name for path in bad} & {path.name for path in shards(folder)}
    assert take_in(other, folder).refused == []
    copies = shards(folder, "graph")[0], shards(cache.root, "graph")[0]
    for path in {path.stat().st_ino: path for path in copies}.values():  # no whole copy is left
        harm(path)
    assert f"graph/shards/{path.name}" in [one.file for one in export_cache(cache, folder, link=link).refused]
    assert path.name not in (folder / MANIFEST).read_text()


def test_a_copy_in_the_export_outlives_damage_and_loss_of_its_source(cache, folder, other):
    export_cache(cache, folder)
    harm(shards(cache.root)[0])
    shards(cache.root, "scan")[0].unlink()
    moved = export_cache(cache, folder)
    assert (moved.refused, moved.dropped, moved.copied) == ([], 0, 0)
    assert take_in(other, folder).refused == []
    assert holds_all(other)
    bad = shards(folder, "scan")[0]
    harm(bad)  # which no other copy can replace
    (refused,) = export_cache(cache, folder).refused
    assert refused.file == f"scan/shards/{bad.name}"
    assert bad.exists()
    again = CacheFolder(other.root.with_name("again"))
    assert take_in(again, folder).refused == []
    assert bad.name not in [path.name for path in shards(again.root)]


def test_an_export_after_a_compaction_holds_each_record_once(cache, folder, other):
    export_cache(cache, folder)
    store = CacheFolder(cache.root).kind("scan")
    list(apply(plan_compaction(store).small))
    moved = export_cache(cache, folder)
    assert (moved.refused, moved.dropped > 1) == ([], True)
    assert [path.name for path in shards(folder)] == [path.name for path in shards(cache.root)]
    assert take_in(other, folder).refused == []
    assert holds_all(other)


def _swap(path):
    """Put another shard that is whole in its place."""
    content = path.with_name(max(other.name for other in path.parent.iterdir())).read_bytes()
    path.unlink()
    path.write_bytes(content)


HARMS = {
    "damaged": harm,
    "cut": lambda path: overwrite(path, path.read_bytes()[:-3]),
    "gone": lambda path: path.unlink(),
    "another": _swap,
    "a link": lambda path: path.symlink_to(path.rename(path.parents[3] / "elsewhere")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "behind a link": lambda path: path.parents[1].symlink_to(path.parents[1].rename(path.parents[3] / "elsewhere")),
}


@pytest.mark.parametrize("damage", HARMS.values(), ids=HARMS)
def test_a_file_that_did_not_arrive_whole_is_named_and_the_rest_is_imported(cache, folder, other, damage):
    export_cache(cache, folder)
    bad, count = shards(folder, "scan")[0], len(shards(folder))
    damage(bad)
    moved = take_in(other, folder)
    assert f"scan/shards/{bad.name}" in [one.file for one in moved.refused]
    assert moved.copied == count - len(moved.refused) == len(shards(other.root))
    assert bad.name not in [path.name for path in shards(other.root)]
    if folder.joinpath("scan").is_symlink():
        assert moved.kinds == {"graph": 1}
        with pytest.raises(CacheUnusable):
            export_cache(cache, folder)


NAMES = (
    "../../etc/passwd", "/etc/passwd", "scan/shards/../../x.safetensors", "../shards/x.safetensors",
    "scan/shards/.x.safetensors", "scan/shards/a/b.safetensors", "scan/index.bin", "Scan/shards/x.safetensors",
    "scan/shards/x.safetensors ", "scan/shards/x\0.safetensors", "scan/shards/x\u2028.safetensors", "",
)  # fmt: skip
DESCRIPTIONS = {
    "{": CacheDamaged,
    "[]": CacheDamaged,
    "{}": CacheDamaged,
    '{"export": 1, "format": 1, "kinds": {"scan": 4}}': CacheDamaged,
    "[" * 10_000: CacheDamaged,
    '{"export": Infinity, "format": 1, "kinds": {}}': CacheDamaged,
    '{"export": 2, "format": 1, "kinds": {}}': CacheUnusable,
    '{"export": 1, "format": 2, "kinds": {}}': CacheUnusable,
}


def test_an_export_that_is_cut_newer_or_names_anything_else_is_refused_before_anything_is_read(cache, folder, other):
    export_cache(cache, folder)
    manifest, about = folder / MANIFEST, folder / EXPORT
    text, description = manifest.read_text(), about.read_text()
    cuts = (*(text[: int(keep * len(text))] for keep in (0, 0.5, 0.99)), "".join(text.splitlines(keepends=True)[1:]))
    cases = [
        *((manifest, text + "0" * 64 + f"  {name}\n", CacheDamaged) for name in NAMES),
        *((manifest, cut, CacheDamaged) for cut in cuts),
        *((about, *case) for case in DESCRIPTIONS.items()),
    ]
    for path, content, error in cases:
        overwrite(manifest, text.encode())
        overwrite(about, description.encode())
        overwrite(path, content.encode())
        with pytest.raises(error) as caught:
            take_in(other, folder)
        assert type(caught.value) is error, content
        assert caught.value.remedy
    overwrite(about, description.encode())
    manifest.unlink()
    with pytest.raises(CacheDamaged):
        take_in(other, folder)
    assert not other.root.exists()


def test_a_folder_that_is_no_export_or_no_place_for_one_is_refused(cache, tmp_path, other):
    for name in (tmp_path / "nothing", cache.root, tmp_path):
        with pytest.raises(ConfigError):
            take_in(other, name)
    for place in ("cache/export", "cache", "."):
        with pytest.raises(ConfigError):
            export_cache(cache, tmp_path / place)
    with other.kind("scan").writer() as writer:
        put(writer, 1)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/thesis.tex").write_text("x")
    for place in (other.root, tmp_path / "thesis"):
        with pytest.raises(ConfigError) as caught:
            export_cache(cache, place)
        assert caught.value.where == str(place)
    with pytest.raises(ConfigError):
        export_cache(CacheFolder(tmp_path / "nothing"), tmp_path / "export")


def test_nothing_that_is_there_is_overwritten(cache, folder, other):
    export_cache(cache, folder)
    take_in(other, folder)
    one, two = shards(other.root, "scan")[:2]
    content = one.read_bytes()
    two.unlink()
    two.write_bytes(content)  # whole, of that name, and not the same
    harm(shards(other.root, "graph")[0])
    before = [path.read_bytes() for path in shards(other.root)]
    moved = take_in(other, folder)
    assert len(moved.refused) == 2
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


def test_too_little_room_is_said_before_anything_is_copied(cache, folder, other):
    export_cache(cache, folder)

    class Small(Disk):
        def free_bytes(self, path):
            return 10

    for move, target in (
        (lambda: export_cache(CacheFolder(cache.root, Small()), folder.parent / "second"), folder.parent / "second"),
        (lambda: take_in(CacheFolder(other.root, Small()), folder), other.root),
    ):
        with pytest.raises(CacheFull):
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

    with pytest.raises(ConfigError) as caught:
        export_cache(CacheFolder(cache.root, Elsewhere()), tmp_path / "second", link=True)
    assert "--link" in caught.value.remedy
