"""After damage and a repair, all that can be proven is served, and the rest is listed; whatever interrupts it."""

from __future__ import annotations

import errno
import shutil
import struct
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import xxhash
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.errors import CacheDamaged, PipelineError, RecordMissing
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import TRAILER_BYTES
from pipeline.store.maintenance import scrub
from pipeline.store.maintenance.damage_report import (
    FORBIDDEN,
    FOREIGN,
    NEWER,
    DamageFinding,
    Fault,
    ReportWriter,
    Summary,
    read_report,
)
from pipeline.store.maintenance.shard_repair import SHARD_GONE, plan_repair, repair_cache
from pipeline.store.shard_index import ShardIndex, indexed, write_index
from pipeline.store.snapshot import IndexState
from tests.store.content import is_right, key_of
from tests.store.faulty_disks import CHANGES, FailingDisk, InterruptingDisk
from tests.store.maintenance.damage import (
    BadSectorDisk,
    MeddlingDisk,
    another,
    fill,
    flip,
    listed,
    overwrite,
    published,
    record_place,
)
from tests.store.maintenance.test_scrub import BLOWS, Truth, strike

ALL = [*range(12), *range(12, 16)]


def served(root):
    """Return the numbers that a new process is served; what it is served must be right."""
    store = CacheFolder(root).kind("scan")
    numbers = set()
    for number in ALL:
        try:
            assert is_right(store.get(key_of(number)), key_of(number))
        except (CacheDamaged, RecordMissing):
            assert store.missing([key_of(number)])
        else:
            numbers.add(number)
    return numbers


def lost(repaired):
    return {one.key for one in read_report(repaired.missing).findings()} if repaired.missing else set()


def wrong(cache):
    return [one for kind in cache.kinds() for checked in scrub.full(cache.kind(kind)) for one in checked.findings]


def quarantined(store):
    return sorted(store.disk.list_folder(store.layout.quarantine))


def test_a_whole_cache_is_left_as_it_is(cache, store, shards):
    before = {path: path.stat().st_mtime_ns for path in cache.root.rglob("*")}
    assert list(plan_repair(cache)) == []
    repaired = repair_cache(cache)
    assert (repaired.quarantined, repaired.indexes, repaired.missing) == (0, 0, None)
    assert {path: path.stat().st_mtime_ns for path in cache.root.rglob("*")} == before


def test_planning_changes_nothing_and_says_what_repairing_does(cache, store, shards):
    flip(store.layout.shard(shards[0]), record_place(store, shards[0], 1)[0])
    before = {path: path.stat().st_mtime_ns for path in cache.root.rglob("*")}
    planned = list(plan_repair(cache))
    assert {path: path.stat().st_mtime_ns for path in cache.root.rglob("*")} == before
    done = []
    repair_cache(cache, done=done.append)
    assert done == planned
    assert [(one.shard, one.salvaged, len(one.lost)) for one in done] == [(shards[0], 5, 1), ("", 0, 0)]


def test_intact_records_of_a_damaged_shard_are_carried_over_and_the_shard_is_put_aside(cache, store, shards):
    damaged = store.layout.shard(shards[0])
    flip(damaged, record_place(store, shards[0], 1)[0])
    content = damaged.read_bytes()
    repaired = repair_cache(cache)
    assert served(cache.root) == {*ALL} - {1}
    assert lost(repaired) == {key_of(1).hex()}
    assert quarantined(store) == [shards[0]]
    assert (store.layout.quarantine / shards[0]).read_bytes() == content
    assert CacheFolder(cache.root).kind("scan").stat().index is IndexState.CURRENT
    assert wrong(CacheFolder(cache.root)) == []


def test_a_second_repair_finds_nothing_to_do(cache, store, shards):
    flip(store.layout.shard(shards[0]), record_place(store, shards[0], 1)[0])
    repair_cache(cache)
    before = listed(store)
    again = repair_cache(CacheFolder(cache.root))
    assert (again.quarantined, again.indexes, again.missing) == (0, 0, None)
    assert listed(store) == before


def test_a_damaged_header_costs_no_record(cache, store, shards):
    flip(store.layout.shard(shards[1]), 30)
    repaired = repair_cache(cache)
    assert (repaired.salvaged, repaired.lost, repaired.missing) == (6, 0, None)
    assert served(cache.root) == {*ALL}
    assert wrong(CacheFolder(cache.root)) == []


@pytest.mark.parametrize("cut", [1, TRAILER_BYTES, 400])
def test_a_shard_without_its_table_is_salvaged_by_the_index(cache, store, shards, cut):
    path = store.layout.shard(shards[1])
    truth = Truth(store)
    overwrite(path, path.read_bytes()[:-cut])
    changed = {key.hex() for _, key in truth.changed()}
    repaired = repair_cache(cache)
    assert lost(repaired) == changed
    assert repaired.salvaged == 6 - len(changed)
    assert wrong(CacheFolder(cache.root)) == []


def test_a_shard_that_nobody_knows_is_put_aside_and_said_so(cache, store):
    first, second = fill(store, range(3), range(3, 6))
    flip(store.layout.shard(first), store.layout.shard(first).stat().st_size - 1)
    (mend, _) = plan_repair(cache)
    assert (mend.shard, mend.unknown, mend.salvaged, mend.lost) == (first, True, 0, ())
    repaired = repair_cache(cache)
    assert (repaired.unknown, repaired.lost) == (1, 0)
    assert [(one.fault, one.shard, one.key) for one in read_report(repaired.missing).findings()] == [
        (Fault.TABLE, first, "")
    ]
    assert listed(store) == [second]
    assert served(cache.root) == {3, 4, 5}


@pytest.mark.parametrize("cut", [0, 10, -1])
def test_a_damaged_index_alone_is_made_anew(cache, store, shards, cut):
    overwrite(store.layout.index, store.layout.index.read_bytes()[:cut])
    done = []
    repaired = repair_cache(cache, done=done.append)
    assert [one.shard for one in done] == [""]
    assert (repaired.quarantined, repaired.indexes) == (0, 1)
    assert CacheFolder(cache.root).kind("scan").stat().index is IndexState.CURRENT


def test_an_index_of_shards_that_are_gone_forgets_them_and_lists_what_was_lost(cache, store, shards):
    store.layout.shard(shards[2]).unlink()
    done = []
    repaired = repair_cache(cache, done=done.append)
    assert [one.why for one in done if one.shard] == [SHARD_GONE]
    assert lost(repaired) == {key_of(number).hex() for number in range(12, 16)}  # 0 is in another shard
    assert wrong(CacheFolder(cache.root)) == []


def test_copies_that_are_damaged_in_one_shard_each_save_each_other(cache, store):
    one, other = fill(store, range(4), range(4))
    flip(store.layout.shard(one), record_place(store, one, 0)[0])
    flip(store.layout.shard(other), record_place(store, other, 3)[0])
    repaired = repair_cache(cache)
    assert repaired.missing is None
    assert served(cache.root) == {0, 1, 2, 3}


def test_a_record_whose_bytes_are_of_another_is_lost(cache, store):
    cache.prepare()
    store.disk.make_folder(store.layout.shards)
    published(store, another(5))
    assert lost(repair_cache(cache)) == {key_of(5).hex()}
    assert wrong(CacheFolder(cache.root)) == []


def test_a_shard_of_a_later_version_stays(cache, store, shards):
    path = store.layout.shard(shards[0])
    content = path.read_bytes()
    trailer = bytearray(content[-TRAILER_BYTES:-16])
    trailer[8:12] = struct.pack("<I", 99)
    overwrite(path, content[:-TRAILER_BYTES] + bytes(trailer) + xxhash.xxh3_128_digest(bytes(trailer)))
    done = []
    assert repair_cache(cache, done=done.append).stay == 1
    assert [one.stays for one in done] == [NEWER]
    assert shards[0] in listed(store)


def test_a_shard_that_may_not_be_read_stays(unprivileged):
    cache = CacheFolder(unprivileged / "cache")
    store = cache.kind("scan")
    first, _ = fill(store, range(3), range(3, 6))
    store.layout.shard(first).chmod(0)
    done = []
    repair_cache(CacheFolder(unprivileged / "cache"), done=done.append)
    assert [one.stays for one in done] == [FORBIDDEN]
    assert first in listed(store)


def test_a_file_that_no_pipeline_wrote_stays(cache, store, shards):
    (store.layout.shards / "model.safetensors").write_bytes(b"mine")
    done = []
    repair_cache(cache, done=done.append)
    assert [one.stays for one in done] == [FOREIGN]
    assert (store.layout.shards / "model.safetensors").read_bytes() == b"mine"


def test_records_beside_a_bad_sector_are_saved(cache, store, shards):
    start, end = record_place(store, shards[0], 3)
    repaired = repair_cache(CacheFolder(cache.root, BadSectorDisk(shards[0], start + 10, end - 10)))
    assert lost(repaired) == {key_of(3).hex()}
    assert served(cache.root) == {*ALL} - {3}


def damage_list(cache, *findings):
    writer = ReportWriter(cache.disk, cache.root / "_reports")
    summary = Summary("full")
    for one in findings:
        writer.add(one)
        summary.count(one)
    return read_report(writer.publish(summary))


def test_a_list_is_looked_at_again_and_nothing_else(cache, store, shards):
    for name, number in ((shards[0], 1), (shards[1], 7)):
        flip(store.layout.shard(name), record_place(store, name, number)[0])
    healthy = DamageFinding("scan", Fault.RECORD, "was wrong once", shards[2], key_of(12).hex(), lost=True)
    report = damage_list(cache, DamageFinding("scan", Fault.RECORD, "", shards[0], key_of(1).hex(), lost=True), healthy)
    repaired = repair_cache(cache, report)
    assert quarantined(store) == [shards[0]]
    assert lost(repaired) == {key_of(1).hex()}
    assert [one.shard for one in wrong(CacheFolder(cache.root))] == [shards[1]]


def test_records_that_mean_nothing_are_left_behind_and_listed(cache, store, shards):
    report = damage_list(cache, DamageFinding("scan", Fault.MEANING, "NaN", shards[1], key_of(8).hex(), lost=True))
    repaired = repair_cache(cache, report)
    assert lost(repaired) == {key_of(8).hex()}
    assert served(cache.root) == {*ALL} - {8}


def test_a_list_of_what_is_lost_can_be_repaired_by_and_asks_for_nothing(cache, store, shards):
    flip(store.layout.shard(shards[0]), record_place(store, shards[0], 1)[0])
    first = repair_cache(cache)
    again = repair_cache(CacheFolder(cache.root), read_report(first.missing))
    assert (again.quarantined, again.missing) == (0, None)


def test_a_list_of_a_kind_that_is_not_there_changes_nothing(cache, store, shards):
    report = damage_list(cache, DamageFinding("../../etc", Fault.RECORD, "", "passwd", "00", lost=True))
    assert repair_cache(cache, report).quarantined == 0


def strike_twice(store, shards):
    flip(store.layout.shard(shards[0]), record_place(store, shards[0], 1)[0])
    flip(store.layout.shard(shards[1]), 30)


@pytest.fixture
def steps(cache, store, shards, tmp_path):
    """Return how many steps a repair takes."""
    strike_twice(store, shards)
    shutil.copytree(cache.root, tmp_path / "counted")
    disk = InterruptingDisk()
    repair_cache(CacheFolder(tmp_path / "counted", disk))
    return disk.steps


@pytest.mark.nightly
def test_a_repair_that_ends_anywhere_loses_nothing_and_a_second_finishes(cache, store, shards, steps, tmp_path):
    assert steps > 20
    for step in range(1, steps + 1):
        for moment in ("before", "halfway"):  # after one step is before the next
            root = tmp_path / f"{step}-{moment}"
            shutil.copytree(cache.root, root)
            with suppress(KeyboardInterrupt):  # there is no half of most steps
                repair_cache(CacheFolder(root, InterruptingDisk(step, moment)))
            assert served(root) == {*ALL} - {1}
            repair_cache(CacheFolder(root))
            assert served(root) == {*ALL} - {1}
            assert wrong(CacheFolder(root)) == []
            shutil.rmtree(root)


@pytest.mark.nightly
def test_what_is_lost_is_listed_even_if_a_repair_ends_anywhere_between_kinds(cache, store, shards, tmp_path):
    other = cache.kind("graph")
    (name,) = fill(other, range(3))
    other.write_index()
    gone, flipped = key_of(7), key_of(2)
    store.layout.shard(shards[1]).unlink()
    flip(other.layout.shard(name), record_place(other, name, 2)[0])
    shutil.copytree(cache.root, tmp_path / "counted")
    disk = InterruptingDisk()
    repair_cache(CacheFolder(tmp_path / "counted", disk))
    for step in range(1, disk.steps + 1):
        root = tmp_path / f"{step}"
        shutil.copytree(cache.root, root)
        with suppress(KeyboardInterrupt):
            repair_cache(CacheFolder(root, InterruptingDisk(step, "before")))
        for kind in CacheFolder(root).kinds():
            there = CacheFolder(root).kind(kind)
            assert set(indexed(Disk(), there.layout)) - {shards[1]} <= set(listed(there))
        repair_cache(CacheFolder(root))
        reports = [read_report(path) for path in (root / "_reports").glob("*.jsonl")]
        listed_lost = {(one.kind, one.key) for report in reports for one in report.findings() if one.lost}
        assert {("scan", gone.hex()), ("graph", flipped.hex())} <= listed_lost
        shutil.rmtree(root)


class RefusingDisk(Disk):
    """A disk that refuses to open one file, for now."""

    def __init__(self, name):
        self.name = name

    def open_read(self, path):
        if path.name == self.name:
            raise OSError(errno.EIO, "Input/output error")
        return super().open_read(path)


def test_a_repair_keeps_in_the_index_what_that_alone_knows_of_a_shard_that_it_leaves_alone(cache, store, shards):
    path = store.layout.shard(shards[1])
    flip(path, path.stat().st_size - 1)
    flip(store.layout.shard(shards[0]), record_place(store, shards[0], 1)[0])
    first = repair_cache(CacheFolder(cache.root, RefusingDisk(shards[1])))
    assert (first.stay, first.quarantined) == (1, 1)
    again = repair_cache(CacheFolder(cache.root))
    assert (again.salvaged, again.unknown, again.missing) == (6, 0, None)
    assert served(cache.root) == {*ALL} - {1}


def test_an_index_keeps_the_second_table_of_a_shard_that_was_cut_and_serves_nothing_of_it(cache, store, shards):
    path = store.layout.shard(shards[1])
    overwrite(path, path.read_bytes()[:-1])
    fill(CacheFolder(cache.root).kind("scan"), [50])
    CacheFolder(cache.root).kind("scan").write_index()
    assert CacheFolder(cache.root).kind("scan").missing([key_of(7)]) == [key_of(7)]
    assert shards[1] in indexed(Disk(), store.layout)
    repaired = repair_cache(CacheFolder(cache.root))
    assert (repaired.salvaged, repaired.unknown, repaired.missing) == (6, 0, None)
    assert served(cache.root) == {*ALL}
    assert sorted(indexed(Disk(), store.layout)) == listed(store)  # names of one second sort by chance


def test_an_index_that_contradicts_a_shard_is_set_right(cache, store, shards):
    index = ShardIndex(Disk(), store.layout.index)
    rows = index.rows().copy()
    rows["digest"][0] = b"\x01" * 16
    write_index(Disk(), store.layout, index.names, index.sizes, [rows], len(rows))
    repaired = repair_cache(CacheFolder(cache.root))
    assert (repaired.indexes, repaired.quarantined) == (1, 0)
    assert served(cache.root) == {*ALL}
    assert wrong(CacheFolder(cache.root)) == []


def test_a_meaningless_record_is_not_saved_by_its_copy_in_a_shard_that_goes_too(cache, store):
    one, other = fill(store, [1, 2], [1, 3])
    findings = [DamageFinding("scan", Fault.MEANING, "NaN", name, key_of(1).hex(), lost=True) for name in (one, other)]
    repaired = repair_cache(cache, damage_list(cache, *findings))
    assert lost(repaired) == {key_of(1).hex()}
    assert served(cache.root) == {2, 3}


@pytest.mark.nightly
@pytest.mark.parametrize("step", [*CHANGES, "read_at", "open_read"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=errno.errorcode.get)
def test_a_disk_that_fails_costs_nothing_and_a_repair_afterwards_finishes(cache, store, shards, step, number, tmp_path):
    strike_twice(store, shards)
    for after in (0, 1, 2, 5):
        root = tmp_path / f"{after}"
        shutil.copytree(cache.root, root)
        with suppress(PipelineError):  # anything else is a bug
            repair_cache(CacheFolder(root, FailingDisk(step, number, after)))
        if step not in ("read_at", "open_read"):  # a disk that refuses to be read costs what it refuses
            assert served(root) == {*ALL} - {1}
        repair_cache(CacheFolder(root))
        assert wrong(CacheFolder(root)) == []


def test_two_repairs_at_once_lose_nothing(cache, store, shards):
    strike_twice(store, shards)
    threads = [threading.Thread(target=repair_cache, args=(CacheFolder(cache.root),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served(cache.root) == {*ALL} - {1}
    repair_cache(CacheFolder(cache.root))
    assert wrong(CacheFolder(cache.root)) == []


def test_a_shard_that_another_repair_took_in_the_middle_is_no_loss(cache, store, shards):
    strike_twice(store, shards)
    disk = MeddlingDisk("open_new", lambda: repair_cache(CacheFolder(cache.root)))
    repaired = repair_cache(CacheFolder(cache.root, disk))
    assert lost(repaired) <= {key_of(1).hex()}
    assert served(cache.root) == {*ALL} - {1}


def test_who_has_located_a_record_in_a_shard_that_was_put_aside_finds_it_again(cache, store, shards):
    reader = CacheFolder(cache.root).kind("scan")
    keys = [key_of(number) for number in range(6)]
    places = reader.locate(keys)
    flip(store.layout.shard(shards[0]), 30)
    repair_cache(cache)
    for key, copies in zip(keys, places, strict=True):
        assert is_right(reader.get_at(key, copies), key)
    assert reader.missing(keys) == []


def test_what_is_written_meanwhile_stays(cache, store, shards):
    strike_twice(store, shards)
    disk = MeddlingDisk("rename", lambda: fill(CacheFolder(cache.root).kind("scan"), [1, 50]))
    repair_cache(CacheFolder(cache.root, disk))
    assert served(cache.root) == {*ALL}
    assert CacheFolder(cache.root).kind("scan").has_whole(key_of(50))


WHOLLY = ("exchange", (0, 1), (0, 0), 1 << 20)  # two files are each other


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(BLOWS, max_size=4), st.booleans())
@example([WHOLLY], True)
@example([WHOLLY, ("cut", (1, 0), (0, 0), 1)], True)
@example([("exchange", (0, 1), (3500, 3500), 1 << 20)], True)
@example([("exchange", (0, 1), (3500, 3500), 1 << 20), ("cut", (1, 0), (4000, 0), 1)], False)
def test_after_any_damage_and_a_repair_all_is_served_that_was_not_touched_and_nothing_is_wrong(blows, indexed):
    root = Path(tempfile.mkdtemp())
    try:
        store = CacheFolder(root / "cache").kind("scan")
        names = fill(store, range(6), range(6, 12), [0, *range(12, 16)])
        if indexed:
            store.write_index()
        truth = Truth(store)
        for blow in blows:
            strike([store.layout.shard(name) for name in names], blow)
        told = truth.told(indexed)
        copies = list(truth.copies(told))
        # Of whole files under another's name an index says otherwise until it is made anew, after the list is written.
        late = {name for name in told if indexed and truth.path(name).read_bytes() == truth.content.get(told[name])}
        late -= {name for name, other in told.items() if name == other}
        found = {key for name, key, is_right in copies if is_right and name not in late}
        before = served(root / "cache")
        repaired = repair_cache(CacheFolder(root / "cache"))
        now = served(root / "cache")
        assert {key_of(number) for number in now} == {key for _, key, is_right in copies if is_right}
        assert before <= now
        nobody_knows = {""} if None in told.values() else set()
        assert (
            lost(repaired)
            == {key.hex() for _, key, is_right in copies if not is_right and key not in found} | nobody_knows
        )
        assert wrong(CacheFolder(root / "cache")) == []
        assert repair_cache(CacheFolder(root / "cache")).quarantined == 0
        assert Disk().list_folder(store.layout.partials) == []
    finally:
        shutil.rmtree(root)
