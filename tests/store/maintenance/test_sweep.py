"""Mark and sweep: what is needed stays whole through anything, what is not gives its space back."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import CacheUnusable, PipelineError, RecordMissing
from pipeline.keys import recipe_tag, tagged_key
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import key_pairs
from pipeline.store.key_lists import sorted_pairs
from pipeline.store.maintenance.leftovers import Left, find_leftovers, refuse_links
from pipeline.store.maintenance.scrub import WHOLE, full, quick
from pipeline.store.maintenance.sweep import Fate, Live, mark, sweep
from pipeline.store.snapshot import are_among
from tests.store.content import is_right, is_undamaged, key_of, put
from tests.store.faulty_disks import FailingDisk, InterruptingDisk, KillingDisk

ROOT = Path(__file__).parents[3]
LATER = 1e12  # a time at which everything is old
HOUR_S = 3600


def live_of(numbers):
    return Live(pairs=sorted_pairs(b"".join(map(key_of, numbers))))


def write_shards(store, shards):
    """Write a shard for each group of numbers; some are in the index, some came later."""
    for at, numbers in enumerate(shards):
        with store.writer() as writer:
            put(writer, *numbers)
        if at == len(shards) // 2:
            store.write_index()


def clean(store, live, before=LATER):
    return list(sweep(store, mark(store, live, before), live))


def files_of(store):
    return sorted(path.name for path in store.layout.shards.iterdir())


def is_whole(root, numbers):
    store = CacheFolder(root).kind("scan")
    keys = [key_of(number) for number in numbers]
    return store.missing(keys) == [] and all(is_right(store.get(key), key) for key in keys)


PAIRS = st.tuples(st.integers(0, 3), st.integers(0, 3))
SHARDS = st.lists(st.lists(st.integers(0, 25), min_size=1, max_size=8), min_size=1, max_size=6)


@pytest.mark.nightly
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
        before = {name: set(store_keys(store, name)) for name in files_of(store)}
        list(sweep(store, marked, live_of(live)))
        again = CacheFolder(root).kind("scan")
        assert is_whole(root, there & live)
        kept = {key_of(number) for number in there & live} | {key for name in sparse for key in before[name]}
        assert set(again.keys()) == kept
        assert set(again.keys()) == set(CacheFolder(root).kind("scan").keys())
        assert is_undamaged(again)
        assert list((root / "scan/tmp").iterdir()) == []


def store_keys(store, shard):
    from pipeline.store.format.shard import read_table, row_keys

    return row_keys(read_table(store.disk, store.layout.shard(shard)).rows)


@given(st.lists(PAIRS, max_size=30), st.sets(PAIRS))
def test_keys_are_found_among_others_also_where_their_first_halves_are_equal(asked, known):
    pairs = np.array(sorted(known), np.uint64).reshape(-1, 2)
    hi, lo = np.array(asked, np.uint64).reshape(-1, 2).T
    assert are_among(hi, lo, pairs[:, 0], pairs[:, 1]).tolist() == [one in known for one in asked]


@given(st.lists(st.binary(min_size=16, max_size=16)))
def test_pairs_are_sorted_as_keys_are_and_each_is_there_once(keys):
    wanted = key_pairs(sorted(set(keys))) if keys else np.zeros((0, 2), np.uint64)
    assert np.array_equal(sorted_pairs(b"".join(keys)), wanted)


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
    list(sweep(store, marked, live))
    assert set(store.keys()) == set(keys["many"])


def test_a_shard_of_which_little_is_dead_is_left_as_it_is(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("scan")
    write_shards(store, [range(20)])
    before = files_of(store)
    marked = mark(store, live_of(range(1, 20)), LATER)
    assert [one.fate for one in marked.shards] == [Fate.SPARSE]
    assert marked.freed_bytes == 0
    assert list(sweep(store, marked, live_of(range(1, 20)))) == []
    assert files_of(store) == before


class Aged(Disk):
    """A disk on which files were written at chosen times."""

    def __init__(self, modified):
        self.modified = modified

    def times_of(self, path):
        return (self.modified, self.modified)


@pytest.mark.parametrize(("modified", "fate"), [(0.0, Fate.YOUNG), (LATER, Fate.YOUNG)])
def test_a_shard_is_as_young_as_the_later_of_its_name_and_its_file_say(tmp_path, modified, fate):
    """A clock that lags behind, on either side, must not make a shard seem old that somebody has just written."""
    store = CacheFolder(tmp_path / "cache", Aged(modified)).kind("scan")
    write_shards(store, [[1, 2]])
    marked = mark(store, Live(), time.time() - HOUR_S)
    assert [one.fate for one in marked.shards] == [fate]
    assert marked.freed_bytes == 0
    assert list(sweep(store, marked, Live())) == []
    assert is_whole(tmp_path / "cache", [1, 2])


def test_a_shard_that_is_old_by_both_goes(tmp_path):
    store = CacheFolder(tmp_path / "cache", Aged(0.0)).kind("scan")
    write_shards(store, [[1, 2]])
    (path,) = store.layout.shards.iterdir()
    path.rename(path.with_name("20200101T000000Z" + path.name[16:]))
    store.refresh()
    assert [one.fate for one in mark(store, Live(), time.time() - HOUR_S).shards] == [Fate.GOES]


def test_what_became_needed_since_it_was_marked_stays(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("scan")
    write_shards(store, [[1, 2], [3]])
    marked = mark(store, live_of([]), LATER)
    gone = list(sweep(store, marked, live_of([1])))
    assert [bool(one.stays) for one in gone].count(True) == 1
    assert is_whole(tmp_path / "cache", [1])


def test_what_was_not_removed_when_a_check_fails_is_kept_and_what_was_is_told(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("scan")
    write_shards(store, [[1], [2], [3]])
    live, checked, told = live_of([]), [], []

    def check():
        checked.append(1)
        if len(checked) == 2:
            raise ValueError("somebody comes")

    with pytest.raises(ValueError, match="somebody comes"):
        told.extend(sweep(store, mark(store, live, LATER), live, check=check))
    assert len(files_of(store)) == 2
    assert finds_no_damage(tmp_path / "cache")
    told = []
    sweeping = sweep(store, mark(store, live, LATER), live, check=check)
    assert sum(1 for _ in sweeping) == 2


def finds_no_damage(root):
    """Say whether validations of both kinds that look now find nothing."""
    store = CacheFolder(root).kind("scan")
    return not any(one.findings for look in (quick, full) for one in look(store, WHOLE))


class Watched(Disk):
    """A disk on which a cache is validated whenever a shard has just gone."""

    def __init__(self, root):
        self.root, self.seen = root, []

    def unlink(self, path):
        super().unlink(path)
        if path.parent.name == "shards":
            self.seen.append(finds_no_damage(self.root))


def test_a_validation_that_looks_at_any_time_during_a_sweep_finds_nothing(tmp_path):
    root = tmp_path / "cache"
    write_shards(CacheFolder(root).kind("scan"), SHARDS_KILLED)
    sweep_all(root, disk := Watched(root))
    assert disk.seen == [True] * len(SHARDS_KILLED)
    assert finds_no_damage(root)


def test_a_sweep_that_is_interrupted_at_any_step_leaves_no_damage(tmp_path):
    write_shards(CacheFolder(tmp_path / "before").kind("scan"), SHARDS_KILLED)
    sweep_all(shutil.copytree(tmp_path / "before", tmp_path / "counted"), disk := KillingDisk())
    for step in range(1, disk.steps + 1):
        root = shutil.copytree(tmp_path / "before", tmp_path / f"{step}")
        with pytest.raises(KeyboardInterrupt):
            sweep_all(root, InterruptingDisk(step))
        assert finds_no_damage(root), step


def test_other_hosts_have_time_to_see_what_goes_before_it_goes(tmp_path):
    store = CacheFolder(tmp_path / "cache", disk := Waiting()).kind("scan")
    write_shards(store, [[1, 2], [3], range(4, 10)])
    live = live_of([4])
    list(sweep(store, mark(store, live, LATER), live, settle_s=7))
    assert disk.steps == [7, "gone", "gone", 7, "gone"]


class Waiting(Disk):
    """A disk that takes down when it waits, and when shards go."""

    def __init__(self):
        self.steps = []

    def wait(self, seconds):
        self.steps.append(seconds)

    def unlink(self, path):
        super().unlink(path)
        self.steps += ["gone"] * (path.parent.name == "shards")


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
    assert len(list(sweep(CacheFolder(tmp_path / "cache", Full(doomed)).kind("scan"), marked, live))) == 1
    assert is_whole(tmp_path / "cache", [3])
    assert finds_no_damage(tmp_path / "cache")


def damaged(store, name, at):
    path = store.layout.shard(name)
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.unlink()
    path.write_bytes(content)


def test_a_shard_with_a_damaged_table_is_left_to_repair(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("scan")
    write_shards(store, [[1, 2], [3, 4]])
    store.write_index()
    name = files_of(store)[0]
    damaged(store, name, -1)
    store = CacheFolder(tmp_path / "cache").kind("scan")
    live = live_of([99])
    gone = clean(store, live)
    assert {one.shard for one in gone if one.stays} == {name}
    assert files_of(store) == [name]
    store.rebuild_index()
    assert [shard for shard, _ in mark(store, live, LATER).damaged] == [name]


def test_a_shard_whose_live_record_is_damaged_is_left_to_repair(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("scan")
    write_shards(store, [range(6)])
    live = live_of([0, 5])
    place = store.locate([key_of(0)])[0][0]
    damaged(store, place.shard, place.offset)
    gone = clean(CacheFolder(tmp_path / "cache").kind("scan"), live)
    assert "damaged" in gone[0].stays
    assert place.shard in files_of(store)
    assert is_whole(tmp_path / "cache", [5])


def test_where_nothing_stays_a_damaged_shard_goes_too(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("scan")
    write_shards(store, [[1, 2]])
    damaged(store, files_of(store)[0], -1)
    store = CacheFolder(tmp_path / "cache").kind("scan")
    clean(store, Live())
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
    found = {path.name for path in find_leftovers(cache).foreign}
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
    found = find_leftovers(cache)
    assert {(one.what, one.path.name, one.bytes) for one in found.leftovers} == {
        (Left.TEMPORARY, name.replace(".safetensors", ".partial"), 5),
        (Left.QUARANTINE, name, 5),
    }
    assert [path.name for path in found.foreign] == ["editor.partial"]


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
    with pytest.raises(CacheUnusable, match="symbolic link") as caught:
        refuse_links(cache)
    assert str(path) in caught.value.where


WRITING, READING = ("open_new", "write_at", "fsync", "link", "rename", "fsync_folder"), ("open_read", "read_at")
SHARDS_KILLED, LIVE_KILLED = [range(6), range(6, 12), [12, 13], [14]], [0, 7, 13]


def sweep_all(root, disk):
    store = CacheFolder(root, disk).kind("scan")
    live = live_of(LIVE_KILLED)
    list(sweep(store, mark(store, live, LATER), live))


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["before", "halfway", "after"])
def test_a_crash_at_any_step_of_a_sweep_costs_nothing_that_is_live(tmp_path, moment):
    write_shards(CacheFolder(tmp_path / "before").kind("scan"), SHARDS_KILLED)
    disk = KillingDisk()
    sweep_all(shutil.copytree(tmp_path / "before", tmp_path / "counted"), disk)
    killed = 0
    for step in range(1, disk.steps + 1):
        root = shutil.copytree(tmp_path / "before", tmp_path / f"{step}")
        child = os.fork()
        if child == 0:
            sweep_all(root, KillingDisk(step, moment))
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        killed += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert is_whole(root, LIVE_KILLED), step
        sweep_all(root, None)  # who comes after finishes it
        assert is_whole(root, LIVE_KILLED), step
        assert set(CacheFolder(root).kind("scan").keys()) == {key_of(number) for number in LIVE_KILLED}
    assert killed >= (3 if moment == "halfway" else disk.steps - 1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("step", [*WRITING, *READING])
def test_a_disk_that_fails_during_a_sweep_costs_nothing_that_is_live(tmp_path, step, number):
    failed = 0
    for after in (0, 1, 4):
        root = tmp_path / f"{after}" / "cache"
        write_shards(CacheFolder(root).kind("scan"), SHARDS_KILLED)
        try:
            sweep_all(root, FailingDisk(step, number, after))
        except PipelineError:
            failed += 1
        assert is_whole(root, LIVE_KILLED), after
    assert failed or step in READING


READER = """
import sys; from pathlib import Path
from tests.store.content import is_right, key_of; from pipeline.store.cache_folder import CacheFolder
store = CacheFolder(Path(sys.argv[1])).kind("scan"); keys = [key_of(n) for n in map(int, sys.argv[2].split(","))]
places = store.locate(keys)
print("located", flush=True); rounds = 0
stop = Path(sys.argv[3])
while not stop.exists() or rounds < 2:
    assert all(is_right(store.get_at(key, place), key) for key, place in zip(keys, places))
    rounds += 1
print(rounds, flush=True)
"""


def test_a_reader_that_knows_where_records_were_goes_on_through_a_sweep(tmp_path):
    root, stop, live = tmp_path / "cache", tmp_path / "stop", [0, 7, 9, 13]
    write_shards(CacheFolder(root).kind("scan"), SHARDS_KILLED)
    words = [sys.executable, "-c", READER, str(root), ",".join(map(str, live)), str(stop)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "located\n"
        store = CacheFolder(root).kind("scan")
        clean(store, live_of(live))
        stop.touch()
        assert int(reader.stdout.readline()) >= 2
    assert reader.returncode == 0
    assert len(list(store.keys())) == len(live)


def test_a_reader_whose_shard_was_swept_away_is_told_that_the_record_is_gone(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("scan")
    write_shards(store, [[1]])
    reader = CacheFolder(tmp_path / "cache").kind("scan")
    places = reader.locate([key_of(1)])[0]
    clean(store, Live())
    with pytest.raises(RecordMissing):
        reader.get_at(key_of(1), places)


def test_writers_go_on_beside_a_sweep(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("scan")
    write_shards(store, [range(6)])
    with CacheFolder(tmp_path / "cache").kind("scan").writer() as writer:
        put(writer, 20, 21)
        marked = mark(store, live_of([]), time.time() - HOUR_S)
        list(sweep(store, marked, live_of([])))
        keys = writer.flush()
    assert len(keys) == 2
    assert is_whole(tmp_path / "cache", [*range(6), 20, 21])


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
    assert {one.shard: one.bytes for one in sweep(counted, marked, live)} == said
