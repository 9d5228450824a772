"""After damage and a repair, all that can be proven is served, and the rest is listed; whatever interrupts it."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.format.shard import TRAILER_BYTES
from pipeline.store.maintenance.checking import check
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
from pipeline.store.maintenance.shard_plans import SHARD_GONE, plan_repair, repair
from pipeline.store.shard_index import IndexState
from tests.store.content import is_right, key_of
from tests.store.maintenance.damage import (
    BadSectorDisk,
    RefusingDisk,
    fill,
    flip,
    listed,
    of_later_version,
    overwrite,
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
    return [one for kind in cache.kinds() for checked in check(cache.kind(kind)) for one in checked.findings]


def quarantined(store):
    return sorted(store.disk.list_folder(store.layout.quarantine))


def test_a_whole_cache_is_left_as_it_is(cache, store, shards):
    before = {path: path.stat().st_mtime_ns for path in cache.root.rglob("*")}
    assert list(plan_repair(cache)) == []
    repaired = repair(cache)
    assert (repaired.quarantined, repaired.indexes, repaired.missing) == (0, 0, None)
    assert {path: path.stat().st_mtime_ns for path in cache.root.rglob("*")} == before


def test_planning_changes_nothing_and_says_what_repairing_does(cache, store, shards):
    flip(store.layout.shard(shards[0]), record_place(store, shards[0], 1)[0])
    before = {path: path.stat().st_mtime_ns for path in cache.root.rglob("*")}
    planned = [plan.to_json() for plan in plan_repair(cache)]
    assert {path: path.stat().st_mtime_ns for path in cache.root.rglob("*")} == before
    done = []
    repair(cache, done=done.append)
    assert [one.to_json() for one in done] == planned
    assert [(one.shard, one.kept, len(one.lost)) for one in done] == [(shards[0], 5, 1), ("", 0, 0)]


def test_intact_records_of_a_damaged_shard_are_carried_over_and_the_shard_is_put_aside(cache, store, shards):
    damaged = store.layout.shard(shards[0])
    flip(damaged, record_place(store, shards[0], 1)[0])
    content = damaged.read_bytes()
    repaired = repair(cache)
    assert served(cache.root) == {*ALL} - {1}
    assert lost(repaired) == {key_of(1).hex()}
    assert quarantined(store) == [shards[0]]
    assert (store.layout.quarantine / shards[0]).read_bytes() == content
    assert CacheFolder(cache.root).kind("scan").stat().index is IndexState.CURRENT
    assert wrong(CacheFolder(cache.root)) == []
    before = listed(store)
    for report in (None, read_report(repaired.missing)):  # there is nothing left to do
        again = repair(CacheFolder(cache.root), report)
        assert (again.quarantined, again.indexes, again.missing) == (0, 0, None)
    assert listed(store) == before


def test_damage_around_records_costs_none_of_them(cache, store, shards):
    flip(store.layout.shard(shards[1]), 30)  # a header
    repaired = repair(cache)
    assert (repaired.salvaged, repaired.lost, repaired.missing) == (6, 0, None)
    overwrite(store.layout.index, store.layout.index.read_bytes()[:10])
    done = []
    repaired = repair(CacheFolder(cache.root), done=done.append)
    assert [one.shard for one in done] == [""]
    assert (repaired.quarantined, repaired.indexes) == (0, 1)
    assert CacheFolder(cache.root).kind("scan").stat().index is IndexState.CURRENT
    assert served(cache.root) == {*ALL}
    assert wrong(CacheFolder(cache.root)) == []


@pytest.mark.parametrize("cut", [1, TRAILER_BYTES, 400])
def test_a_shard_without_its_table_is_salvaged_by_the_index(cache, store, shards, cut):
    path = store.layout.shard(shards[1])
    truth = Truth(store)
    overwrite(path, path.read_bytes()[:-cut])
    changed = {key.hex() for _, key in truth.changed()}
    repaired = repair(cache)
    assert lost(repaired) == changed
    assert repaired.salvaged == 6 - len(changed)
    assert wrong(CacheFolder(cache.root)) == []


def test_a_shard_that_nobody_knows_is_put_aside_and_said_so(cache, store):
    first, second = fill(store, range(3), range(3, 6))
    flip(store.layout.shard(first), store.layout.shard(first).stat().st_size - 1)
    (mend, _) = plan_repair(cache)
    assert (mend.shard, mend.unknown, mend.kept, mend.lost) == (first, True, 0, ())
    repaired = repair(cache)
    assert (repaired.unknown, repaired.lost) == (1, 0)
    assert [(one.fault, one.shard, one.key) for one in read_report(repaired.missing).findings()] == [
        (Fault.TABLE, first, "")
    ]
    assert listed(store) == [second]
    assert served(cache.root) == {3, 4, 5}


def test_an_index_of_shards_that_are_gone_forgets_them_and_lists_what_was_lost(cache, store, shards):
    store.layout.shard(shards[2]).unlink()
    done = []
    repaired = repair(cache, done=done.append)
    assert [one.why for one in done if one.shard] == [SHARD_GONE]
    assert lost(repaired) == {key_of(number).hex() for number in range(12, 16)}  # 0 is in another shard
    assert wrong(CacheFolder(cache.root)) == []


def test_copies_that_are_damaged_in_one_shard_each_save_each_other(cache, store):
    one, other = fill(store, range(4), range(4))
    flip(store.layout.shard(one), record_place(store, one, 0)[0])
    flip(store.layout.shard(other), record_place(store, other, 3)[0])
    repaired = repair(cache)
    assert repaired.missing is None
    assert served(cache.root) == {0, 1, 2, 3}


def test_what_no_repair_can_mend_stays(unprivileged):
    cache = CacheFolder(unprivileged / "cache")
    store = cache.kind("scan")
    newer, forbidden, _ = (store.layout.shard(name) for name in fill(store, range(3), range(3, 6), range(6, 9)))
    foreign = store.layout.shards / "model.safetensors"
    overwrite(newer, of_later_version(newer))
    foreign.write_bytes(b"mine")
    forbidden.chmod(0)
    done = []
    assert repair(CacheFolder(unprivileged / "cache"), done=done.append).stay == 3
    assert {one.shard: one.stays for one in done} == {
        newer.name: NEWER,
        forbidden.name: FORBIDDEN,
        foreign.name: FOREIGN,
    }
    assert len(listed(store)) == 4
    assert foreign.read_bytes() == b"mine"


def test_records_beside_a_bad_sector_are_saved(cache, store, shards):
    start, end = record_place(store, shards[0], 3)
    repaired = repair(CacheFolder(cache.root, BadSectorDisk(shards[0], start + 10, end - 10)))
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
    repaired = repair(cache, report)
    assert quarantined(store) == [shards[0]]
    assert lost(repaired) == {key_of(1).hex()}
    assert [one.shard for one in wrong(CacheFolder(cache.root))] == [shards[1]]


def test_records_that_mean_nothing_are_lost_with_all_their_copies(cache, store):
    one, other = fill(store, [1, 2], [1, 3])
    meaningless = [
        DamageFinding("scan", Fault.MEANING, "NaN", name, key_of(1).hex(), lost=True) for name in (one, other)
    ]
    elsewhere = DamageFinding("../../etc", Fault.RECORD, "", "passwd", "00", lost=True)  # a kind that is not there
    repaired = repair(cache, damage_list(cache, elsewhere, *meaningless))
    assert lost(repaired) == {key_of(1).hex()}
    assert served(cache.root) == {2, 3}


def test_a_repair_keeps_in_the_index_what_that_alone_knows_of_a_shard_that_it_leaves_alone(cache, store, shards):
    path = store.layout.shard(shards[1])
    flip(path, path.stat().st_size - 1)
    flip(store.layout.shard(shards[0]), record_place(store, shards[0], 1)[0])
    first = repair(CacheFolder(cache.root, RefusingDisk(shards[1], errno.EIO)))
    assert (first.stay, first.quarantined) == (1, 1)
    again = repair(CacheFolder(cache.root))
    assert (again.salvaged, again.unknown, again.missing) == (6, 0, None)
    assert served(cache.root) == {*ALL} - {1}


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
        repaired = repair(CacheFolder(root / "cache"))
        now = served(root / "cache")
        assert {key_of(number) for number in now} == {key for _, key, is_right in copies if is_right}
        assert before <= now
        nobody_knows = {""} if None in told.values() else set()
        assert (
            lost(repaired)
            == {key.hex() for _, key, is_right in copies if not is_right and key not in found} | nobody_knows
        )
        assert wrong(CacheFolder(root / "cache")) == []
        assert repair(CacheFolder(root / "cache")).quarantined == 0
        assert Disk().list_folder(store.layout.partials) == []
    finally:
        shutil.rmtree(root)
