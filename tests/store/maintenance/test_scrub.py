"""Damage anywhere is found, with the right record named, and nothing else is."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pipeline.errors import CacheUnusable, ConfigError
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from pipeline.store.format.record import encode_record
from pipeline.store.format.shard import TRAILER_BYTES, read_table, row_keys
from pipeline.store.maintenance.checking import Subset, check
from pipeline.store.maintenance.damage_report import Fault
from tests.store.content import arrays_of, key_of
from tests.store.maintenance.damage import (
    BadSectorDisk,
    CountingDisk,
    MeddlingDisk,
    RefusingDisk,
    another,
    fill,
    flip,
    listed,
    no_record,
    of_later_version,
    of_megabytes,
    overwrite,
    published,
    record_place,
)

LOOKS = {"quick": partial(check, quick=True), "full": check, "meaning": partial(check, judge=lambda _: None)}
every_look = pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)


def found(checks):
    """Return what is wrong as (fault, shard, key)."""
    return [(one.fault, one.shard, one.key) for checked in checks for one in checked.findings]


def whole(checks):
    return {(checked.shard, key) for checked in checks for key in checked.whole}


def told(checks):
    """Return what is whole, or at least in a table."""
    return whole(checks) | {(checked.shard, key) for checked in checks for key in checked.listed}


class Truth:
    """What every shard held when it was whole; after damage, which of its records have changed."""

    def __init__(self, store):
        self.store = store
        self.content = {name: self.path(name).read_bytes() for name in listed(store)}
        self.rows = {name: read_table(Disk(), self.path(name)).rows for name in self.content}
        self.start = {name: read_table(Disk(), self.path(name)).data_start for name in self.content}

    def path(self, name):
        return self.store.layout.shard(name)

    def records(self):
        for name, rows in self.rows.items():
            spans = zip(rows["offset"].tolist(), (rows["offset"] + rows["length"]).tolist(), strict=True)
            yield from ((name, key, *span) for key, span in zip(row_keys(rows), spans, strict=True))

    def changed(self):
        now = {name: self.path(name).read_bytes() for name in self.content}
        return {
            (name, key)
            for name, key, start, end in self.records()
            if now[name][start:end] != self.content[name][start:end]
        }

    def touched(self):
        return {name for name, content in self.content.items() if self.path(name).read_bytes() != content}

    def structural(self):
        """Return the shards of which something else than records has changed."""
        touched = set()
        for name in self.touched():
            was, now = self.content[name], self.path(name).read_bytes()
            data = slice(self.start[name], int((self.rows[name]["offset"] + self.rows[name]["length"])[-1]))
            if len(was) != len(now) or was[: data.start] != now[: data.start] or was[data.stop :] != now[data.stop :]:
                touched.add(name)
        return touched

    def posing(self):
        """Return the shards that have the end of another, and so are whole, or damaged, as that one."""
        ends = {name: content[-TRAILER_BYTES:] for name, content in self.content.items()}
        now = {name: self.path(name).read_bytes()[-TRAILER_BYTES:] for name in ends}
        return [name for name in now if any(now[name] == end for other, end in ends.items() if other != name)]

    def table_of(self, name):
        """Return the shard whose table a file ends with, be it another's; None where it ends with none."""
        now = self.path(name).read_bytes()
        for other, content in self.content.items():
            start = int((self.rows[other]["offset"] + self.rows[other]["length"])[-1])
            if len(now) == len(content) and now[start:] == content[start:]:
                return other
        return None

    def told(self, indexed):
        """Return of each file whose records it is said to hold: by its table, else by an index; None: nobody knows."""
        return {name: self.table_of(name) or (name if indexed else None) for name in self.content}

    def copies(self, told):
        """Yield each record that a file is said to hold: the file, the key, and whether its bytes are right."""
        now = {name: self.path(name).read_bytes() for name in told}
        for name, other in told.items():
            for of, key, start, end in self.records():
                if of == other:
                    yield name, key, now[name][start:end] == self.content[other][start:end]

    def ends(self):
        """Return the shards whose own table cannot be read."""
        return {name for name in self.content if self.table_of(name) != name}


BLOWS = st.tuples(
    st.sampled_from(["flip", "cut", "zero", "swap", "grow", "exchange"]),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 20)),
    st.sampled_from([1, 64, 500, 1 << 20]),
)


def strike(paths, blow):
    """Do one thing to one or two of the files."""
    how, (first, second), (place, at), length = blow
    path, other = paths[first], paths[second if how == "exchange" else first]
    content = bytearray(path.read_bytes())
    place %= len(content) or 1
    if how == "flip" and content:
        content[place] ^= 1 << at % 8
    elif how == "cut":
        del content[place:]
    elif how == "zero":
        content[place : place + length] = bytes(len(content[place : place + length]))
    elif how == "grow":
        content += bytes(length)
    elif content:
        theirs = content if other == path else bytearray(other.read_bytes())
        at %= len(theirs) or 1
        apart = abs(place - at) if other == path else length
        mine, yours = (slice(start, start + min(length, apart)) for start in (place, at))
        content[mine], theirs[yours] = theirs[yours], content[mine]
        overwrite(other, bytes(theirs))
    overwrite(path, bytes(content))


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(BLOWS, max_size=3), st.booleans())
def test_any_damage_anywhere_is_found_and_the_right_records_are_named(blows, indexed):
    root = Path(tempfile.mkdtemp())
    try:
        store = CacheFolder(root / "cache").kind("scan")
        names = fill(store, range(6), range(6, 12), [0, *range(12, 16)])
        if indexed:
            store.write_index()
        truth = Truth(store)
        for blow in blows:
            strike([store.layout.shard(name) for name in names], blow)
        assume(not truth.posing())
        for look in (check, LOOKS["meaning"]):
            checks = list(look(CacheFolder(root / "cache").kind("scan")))
            wrong = found(checks)
            named = {(shard, bytes.fromhex(key)) for _, shard, key in wrong if key}
            dumb = set() if indexed else truth.ends()  # nobody can say what these held
            assert named == {one for one in truth.changed() if one[0] not in dumb}
            assert whole(checks) == {one[:2] for one in truth.records() if one[0] not in dumb} - named
            assert {shard for _, shard, _ in wrong} == truth.touched()
            assert {shard for fault, shard, _ in wrong if fault is Fault.TABLE} == truth.ends()
        assert {shard for _, shard, _ in found(check(store, quick=True))} == truth.structural()
    finally:
        shutil.rmtree(root)


def test_a_record_is_lost_only_if_no_other_shard_has_it_whole(store, shards):
    for number in (0, 1):
        flip(store.layout.shard(shards[0]), record_place(store, shards[0], number)[0])
    lost = {one.key: one.lost for checked in check(store) for one in checked.findings}
    assert lost == {key_of(0).hex(): False, key_of(1).hex(): True}
    assert store.missing([key_of(1)]) == []  # it has not looked since another process made it again
    fill(CacheFolder(store.layout.folder.parent).kind("scan"), [1])
    assert not any(one.lost for checked in check(store) for one in checked.findings)


def test_quick_reads_each_shard_twice_at_most_and_full_reads_every_byte_once(cache, shards, store):
    disk = CountingDisk()
    checks = list(check(CacheFolder(cache.root, disk).kind("scan")))
    assert found(checks) == []
    assert {disk.reads[name] for name in shards} == {3}  # its table, its header, and all of its records at once
    assert sum(checked.judged for checked in checks) == 17
    flip(store.layout.shard(shards[0]), store.layout.shard(shards[0]).stat().st_size - 1)
    flip(store.layout.shard(shards[1]), 100)
    disk = CountingDisk()
    checks = list(check(CacheFolder(cache.root, disk).kind("scan"), quick=True))
    assert {shard for _, shard, _ in found(checks)} == set(shards[:2])
    assert max(disk.reads[name] for name in shards) == 2


@every_look
def test_what_is_empty_or_only_behind_is_whole(cache, look):
    store = cache.kind("scan")
    assert [(checked.shard, checked.findings) for checked in look(store)] == [("", ())]
    store.layout.shards.mkdir(parents=True)
    assert found(look(store)) == []
    fill(store, [1])
    store.write_index()
    fill(store, [2])
    assert found(look(store)) == []


@every_look
def test_a_shard_of_a_later_version_is_named_as_such(store, shards, look):
    path = store.layout.shard(shards[0])
    of_another_end = path.read_bytes().replace(b'"pipeline_shard":"1"', b'"pipeline_shard":"2"')[:-TRAILER_BYTES]
    for content in (of_later_version(path), of_another_end):
        overwrite(path, content)
        assert found(look(store)) == [(Fault.NEWER, shards[0], "")]


@every_look
def test_a_shard_that_went_away_and_is_forgotten_is_no_damage(cache, store, shards, look):
    last = store.layout.shard(max(shards))

    def sweep():
        last.unlink()
        CacheFolder(cache.root).kind("scan").write_index()

    disk = MeddlingDisk("open_read", sweep, after=2)  # the marker and the index come first
    checks = list(look(CacheFolder(cache.root, disk).kind("scan")))
    assert found(checks) == []
    assert not last.exists()


@every_look
def test_a_shard_that_the_index_names_and_is_gone_is_missed(cache, store, shards, look):
    store.layout.shard(shards[2]).unlink()
    checks = list(look(cache.kind("scan")))
    lost = [(Fault.GONE, shards[2], key_of(number).hex()) for number in range(12, 16)]
    assert sorted(found(checks)) == sorted([*lost, (Fault.INDEX, shards[2], "")])
    assert all(one.lost == bool(one.key) for checked in checks for one in checked.findings)
    fill(store, range(12, 16))  # of whose records there are others now
    assert found(look(cache.kind("scan"))) == [(Fault.INDEX, shards[2], "")]


@every_look
def test_a_file_that_is_stale_for_a_moment_is_judged_again_and_one_that_stays_so_is_unreadable(cache, shards, look):
    checks = list(look(CacheFolder(cache.root, RefusingDisk(shards[1], errno.ESTALE, 1)).kind("scan")))
    assert found(checks) == []
    assert {shard for shard, _ in told(checks)} == set(shards)
    wrong = found(look(CacheFolder(cache.root, RefusingDisk(shards[1], errno.ESTALE)).kind("scan")))
    assert {(fault, shard) for fault, shard, _ in wrong} == {(Fault.UNREADABLE, shards[1])}


@every_look
def test_what_may_not_be_read_is_unreadable_with_all_that_the_index_says_it_holds(unprivileged, look):
    store = CacheFolder(unprivileged / "cache").kind("scan")
    first, _ = fill(store, range(3), range(3, 6))
    store.write_index()
    store.layout.shard(first).chmod(0)
    wrong = found(look(store))
    assert wrong[0] == (Fault.UNREADABLE, first, "")
    assert {key for _, _, key in wrong[1:]} == {key_of(number).hex() for number in range(3)}
    store.layout.shards.chmod(0)
    with pytest.raises(CacheUnusable):
        list(look(store))
    store.layout.shards.chmod(0o755)


@pytest.mark.parametrize("odd", [another, no_record, of_megabytes])
def test_bytes_that_are_as_they_were_written_but_no_record_of_their_key_are_damage(cache, store, odd):
    cache.prepare()
    store.disk.make_folder(store.layout.shards)
    good = [encode_record(key_of(number), arrays_of(key_of(number)), {}) for number in (1, 2)]
    name = published(store, good[0], odd(5), good[1])
    for look in (check, LOOKS["meaning"]):
        assert found(look(store)) == [(Fault.RECORD, name, key_of(5).hex())]


@every_look
def test_a_damaged_index_is_named(store, shards, look):
    for length in (1, 0):
        overwrite(store.layout.index, store.layout.index.read_bytes()[:length])
        assert found(look(store)) == [(Fault.INDEX, "", "")]


@every_look
def test_a_shard_published_meanwhile_is_not_judged(cache, store, shards, look):
    disk = MeddlingDisk("open_read", lambda: fill(CacheFolder(cache.root).kind("scan"), [50]), after=2)
    checks = list(look(CacheFolder(cache.root, disk).kind("scan")))
    assert found(checks) == []
    assert {shard for shard, _ in told(checks)} == set(shards)


def test_a_bad_sector_beside_flipped_bits_each_gets_its_name(cache, store, shards):
    start, end = record_place(store, shards[0], 3)
    flip(store.layout.shard(shards[0]), record_place(store, shards[0], 1)[0])
    flip(store.layout.shard(shards[0]), 20)
    disk = BadSectorDisk(shards[0], start + 10, end - 10)
    assert sorted(found(check(CacheFolder(cache.root, disk).kind("scan")))) == sorted(
        [
            (Fault.HEADER, shards[0], ""),
            (Fault.RECORD, shards[0], key_of(1).hex()),
            (Fault.UNREADABLE, shards[0], key_of(3).hex()),
        ]
    )


def test_shards_that_took_each_others_place_are_named_by_the_index(store, shards):
    one, other = (store.layout.shard(name) for name in shards[:2])
    content = one.read_bytes()
    overwrite(one, other.read_bytes())
    overwrite(other, content)
    assert {(fault, shard) for fault, shard, _ in found(check(store))} == {(Fault.INDEX, name) for name in shards[:2]}


def test_shards_can_be_asked_for_by_parts_which_are_the_whole_and_by_name(store, shards):
    fill(store, *([number] for number in range(100, 130)))
    for of in (1, 2, 7):
        parts = [list(check(store, Subset(part, of), with_index=part == 1)) for part in range(1, of + 1)]
        names = [checked.shard for part in parts for checked in part if checked.shard]
        assert sorted(names) == listed(store)
        assert sum(not checked.shard for part in parts for checked in part) == 1
    on = []  # each file is told of before it is read
    for checked in check(store, {*shards[1:]}, on=on.append):
        assert on[-1] == checked.shard
    assert on == [*sorted(shards[1:]), ""]


def test_what_is_no_part_is_refused():
    for text in ("", "1", "0/3", "4/3", "a/b", "1/2/3", "-1/2", "1/0"):
        with pytest.raises(ConfigError, match="--subset"):
            Subset.parse(text)


def test_memory_does_not_grow_with_the_cache(tmp_path):
    """A cache of more bytes than the limit, in shards each of which would fit; the index says a lot of records."""
    root = tmp_path / "cache"
    code = f"""
import resource, sys
import numpy as np
from pathlib import Path
from pipeline.store.maintenance.checking import check
from pipeline.store.cache_folder import CacheFolder
from tests.store.content import key_of
store = CacheFolder(Path({str(root)!r})).kind("scan")
if sys.argv[1] == "fill":
    noise = np.random.default_rng(0).integers(0, 255, 4 << 20, np.uint8)
    with store.writer(shard_bytes=64 << 20) as writer:
        for number in range(50):
            writer.put(key_of(number), {{"noise": noise}})
        for number in range(50, 60_000):
            writer.put(key_of(number), {{}})
    store.write_index()
else:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(checked.judged for checked in check(store)) == 60_000
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    run = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([*run, "fill"], check=True, env=environment)
    done = subprocess.run([*run, "scrub"], check=True, env=environment, capture_output=True, text=True)
    assert int(done.stdout) < 40_000  # KiB above what the interpreter and its modules take
