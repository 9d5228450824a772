"""Mark and sweep: what is needed stays whole through anything, what is not gives its space back."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import CacheUnusable
from pipeline.keys import recipe_tag, tagged_key
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import read_table, row_keys
from pipeline.store.maintenance.leftovers import Left, find_leftovers, refuse_links
from pipeline.store.maintenance.shard_plans import Fate, Live, apply, mark
from pipeline.store.users import sorted_keys
from tests.store.content import is_right, is_undamaged, key_of, put, rebuild_index
from tests.store.faulty_disks import FailingDisk
from tests.store.maintenance.damage import flip
from tests.store.maintenance.test_beside_others import finds_no_damage

LATER = 1e12  # a time at which everything is old
HOUR_S = 3600


def live_of(numbers):
    return Live(keys=sorted_keys(b"".join(map(key_of, numbers))))


def write_shards(store, shards):
    """Write a shard for each group of numbers; some are in the index, some came later."""
    for at, numbers in enumerate(shards):
        with store.writer() as writer:
            put(writer, *numbers)
        if at == len(shards) // 2:
            store.write_index()


def sweep(marked, **options):
    for fate in (Fate.GOES, Fate.REWRITTEN):
        yield from apply(marked.of(fate), **options)


def clean(store, live, before=LATER):
    return list(sweep(mark(store, live, before)))


def files_of(store):
    return sorted(path.name for path in store.layout.shards.iterdir())


def is_whole(root, numbers):
    store = CacheFolder(root).kind("scan")
    keys = [key_of(number) for number in numbers]
    return store.missing(keys) == [] and all(is_right(store.get(key), key) for key in keys)


SHARDS = st.lists(st.lists(st.integers(0, 25), min_size=1, max_size=8), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(SHARDS, st.sets(st.integers(0, 25)))
def test_a_sweep_leaves_what_is_live_and_of_the_dead_only_what_is_not_worth_a_rewrite(shards, live):
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "cache"
        store = CacheFolder(root).kind("scan")
        write_shards(store, shards)
        marked = mark(store, live_of(live), LATER)
        there = {number for numbers in shards for number in numbers}
        sparse = {name.shard for name in marked.of(Fate.SPARSE)}
        before = {
            name: set(row_keys(read_table(store.disk, store.layout.shard(name)).rows)) for name in files_of(store)
        }
        list(sweep(marked))
        again = CacheFolder(root).kind("scan")
        assert is_whole(root, there & live)
        kept = {key_of(number) for number in there & live} | {key for name in sparse for key in before[name]}
        assert set(again.keys()) == kept
        assert set(again.keys()) == set(CacheFolder(root).kind("scan").keys())
        assert is_undamaged(again)
        assert list((root / "scan/tmp").iterdir()) == []


def test_records_of_a_recipe_that_stays_are_known_by_their_tag(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("graph")
    few, many = {"neighbours": 5}, {"neighbours": 20}
    keys = {
        name: [tagged_key("graph", recipe, one) for one in range(4)] for name, recipe in (("few", few), ("many", many))
    }
    with store.writer() as writer:
        for key in (*keys["few"], *keys["many"]):
            writer.put(key, {"rows": np.zeros(10)})
    tags = [recipe_tag("graph", one) for one in (few, many)]
    live = Live(tags=frozenset(tags[1:]))
    marked = mark(store, live, LATER, tags)
    assert marked.tags[tags[0]][0] == 4
    assert marked.tags[tags[1]] == (0, 0)
    assert marked.left == {tags[0]: 0, tags[1]: 4}
    list(sweep(marked))
    assert set(store.keys()) == set(keys["many"])


class Aged(Disk):
    """A disk on which files were written at chosen times."""

    def __init__(self, modified):
        self.modified = modified

    def times_of(self, path):
        return (self.modified, self.modified)


def test_a_shard_is_as_young_as_the_later_of_its_name_and_its_file_say(tmp_path):
    """A clock that lags behind, on either side, must not make a shard that was just written seem old."""
    cache = tmp_path / "cache"
    write_shards(CacheFolder(cache).kind("scan"), [[1, 2]])
    for modified in (0.0, LATER):
        store = CacheFolder(cache, Aged(modified)).kind("scan")
        marked = mark(store, Live(), time.time() - HOUR_S)
        assert [one.fate for one in marked.shards] == [Fate.YOUNG]
        assert marked.freed_bytes == 0
        assert list(sweep(marked)) == []
        assert is_whole(cache, [1, 2])
    store = CacheFolder(cache, Aged(0.0)).kind("scan")
    (path,) = store.layout.shards.iterdir()
    path.rename(path.with_name("20200101T000000Z" + path.name[16:]))
    assert [one.fate for one in mark(store, Live(), time.time() - HOUR_S).shards] == [Fate.GOES]


def test_what_became_needed_since_it_was_marked_stays(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("scan")
    write_shards(store, [[1, 2], [3]])
    marked = mark(store, live_of([9]), LATER)
    for plan in marked.shards:
        plan.keep = live_of([1]).holds
    gone = list(sweep(marked))
    assert [bool(one.stays) for one in gone].count(True) == 1
    assert is_whole(tmp_path / "cache", [1])


def test_what_was_not_removed_when_a_check_fails_is_kept(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("scan")
    write_shards(store, [[1], [2], [3]])
    live, checked = live_of([]), []

    def check():
        checked.append(1)
        if len(checked) == 2:
            raise ValueError("somebody comes")

    with pytest.raises(ValueError, match="somebody comes"):
        list(sweep(mark(store, live, LATER), check=check))
    assert len(files_of(store)) == 2
    assert finds_no_damage(CacheFolder(tmp_path / "cache"))
    assert sum(1 for _ in sweep(mark(store, live, LATER), check=check)) == 2


class Full(Disk):
    """A disk that has no room as long as there is a certain shard."""

    def __init__(self, path):
        self.path = path

    def write_at(self, fd, data, offset):
        if self.path.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write_at(fd, data, offset)


def test_a_full_disk_can_be_cleaned(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("scan")
    write_shards(store, [[1, 2], [3]])
    live = live_of([3])
    marked = mark(store, live, LATER)
    (doomed,) = (store.layout.shard(one.shard) for one in marked.of(Fate.GOES))
    marked = mark(CacheFolder(tmp_path / "cache", Full(doomed)).kind("scan"), live, LATER)
    assert len(list(sweep(marked))) == 1
    assert is_whole(tmp_path / "cache", [3])
    assert finds_no_damage(CacheFolder(tmp_path / "cache"))


def test_what_is_damaged_is_left_to_repair_unless_nothing_stays(tmp_path):
    root = tmp_path / "cache"
    write_shards(CacheFolder(root).kind("scan"), [[1, 2], [3, 4], range(5, 11)])
    store = CacheFolder(root).kind("scan")
    store.write_index()
    name = store.locate([key_of(1)])[0][0].shard
    place = store.locate([key_of(5)])[0][0]
    flip(store.layout.shard(name), store.layout.shard(name).stat().st_size - 1)  # its table
    flip(store.layout.shard(place.shard), place.offset)  # a record that is live
    gone = clean(CacheFolder(root).kind("scan"), live_of([5, 10]))
    assert {one.shard for one in gone if one.stays} == {name, place.shard}
    assert {name, place.shard} < set(files_of(store))  # and one that holds what was whole
    assert is_whole(root, [10])
    store = CacheFolder(root).kind("scan")
    rebuild_index(store)
    assert [shard for shard, _ in mark(store, live_of([99]), LATER).damaged] == [name]
    clean(CacheFolder(root).kind("scan"), Live())
    assert files_of(store) == []


def test_what_we_did_not_write_is_not_touched(tmp_path):
    cache = CacheFolder(tmp_path / "cache")
    store = cache.kind("scan")
    write_shards(store, [[1, 2], [3]])
    shards = store.layout.shards
    (shards / "mine.safetensors").write_bytes(b"mine")
    (shards / files_of(store)[0].replace("2", "3", 1)).with_suffix(".bak").write_bytes(b"a copy")
    target = tmp_path / "elsewhere.safetensors"
    (path := shards / files_of(store)[0]).rename(target)
    path.symlink_to(target)
    (cache.root / "notes.txt").write_text("notes")
    clean(CacheFolder(cache.root).kind("scan"), Live())
    assert target.exists()
    assert path.is_symlink()
    found = {path.name for path in find_leftovers(cache)[1]}
    assert {"mine.safetensors", "notes.txt"} <= found
    assert {"mine.safetensors", path.name} <= set(files_of(store))


def test_leftovers_are_told_by_their_names_and_places(tmp_path):
    cache = CacheFolder(tmp_path / "cache")
    store = cache.kind("scan")
    write_shards(store, [[1]])
    name = files_of(store)[0]
    store.layout.quarantine.mkdir()
    for path in (
        store.layout.partials / name.replace(".safetensors", ".partial"),
        store.layout.partials / "editor.partial",
        store.layout.quarantine / name,
    ):
        path.write_bytes(b"12345")
    leftovers, foreign = find_leftovers(cache)
    assert {(one.what, one.path.name, one.bytes) for one in leftovers} == {
        (Left.TEMPORARY, name.replace(".safetensors", ".partial"), 5),
        (Left.QUARANTINE, name, 5),
    }
    assert [path.name for path in foreign] == ["editor.partial"]


@pytest.mark.parametrize("place", ["scan", "scan/shards", "scan/tmp", "scan/quarantine", "_reports", "_users"])
def test_a_link_in_the_place_of_a_folder_is_refused_by_name(tmp_path, place):
    cache = CacheFolder(tmp_path / "cache")
    write_shards(cache.kind("scan"), [[1]])
    path = cache.root / place
    target = tmp_path / "elsewhere"
    if path.exists():
        path.rename(target)
    else:
        target.mkdir()
    path.symlink_to(target)
    with pytest.raises(CacheUnusable) as caught:
        refuse_links(cache)
    assert str(path) in caught.value.where


def test_marking_reads_no_shard_and_swept_space_is_what_was_said(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("scan")
    write_shards(store, [range(6), range(6, 12)])
    store.write_index()
    disk = FailingDisk("", 0)
    counted = CacheFolder(tmp_path / "cache", disk).kind("scan")
    disk.taken.clear()
    live = live_of([0])
    marked = mark(counted, live, LATER)
    assert disk.taken["open_read"] == 1  # the index
    said = {one.shard: one.freed_bytes for one in marked.shards}
    assert {one.shard: one.freed_bytes for one in sweep(marked)} == said
