"""Looks for damage in the shards and the index of a kind, by their checksums.

`quick` reads the ends and headers of shards, and the index; `full` reads every byte once, from front to back; `meaning`
reads records one by one, and has the caller judge their content. None changes anything, and all may run beside writers:
a shard that appears meanwhile is not judged, one that was swept or repaired meanwhile is not missed. Shards that cannot
be judged without the index come last, after the index was read once for all of them.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from pipeline.errors import CacheDamaged, ConfigError
from pipeline.store.format.cache_layout import written_at
from pipeline.store.format.record import BadRecord
from pipeline.store.format.shard import (
    BAD_HEADER,
    TABLE_ROW,
    TAIL_BYTES,
    TRAILER_BYTES,
    ShardNewer,
    ShardTable,
    header_fault,
    read_record,
    read_table,
    read_through,
    row_keys,
)
from pipeline.store.maintenance.damage_report import FORBIDDEN, FOREIGN, Checked, DamageFinding, Fault
from pipeline.store.shard_index import IndexView, index_rows, indexed
from pipeline.store.snapshot import GONE, shard_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from pipeline.store.format.record import Record
    from pipeline.store.shard_index import Rows
    from pipeline.store.store import Store

    Judge = Callable[[Record], "Wrong | None"]
    Looked = tuple["Checked | None", ShardTable | None]  # nothing, of what is judged last
    Look = Callable[["_Known", str], Looked]

# So that the table of any shard comes with the first read; a table row takes 48 bytes, and a record's entries in the
# header more than twice that.
WHOLE_TAIL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Subset:
    """The n-th of t parts of all shards: a shard is always in the same one, whatever else comes and goes."""

    part: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Subset:
        """Read "2/8"."""
        part, slash, of = text.partition("/")
        if slash and part.isdecimal() and of.isdecimal() and 1 <= int(part) <= int(of):
            return cls(int(part), int(of))
        what = f"{text!r} is not a valid subset"
        raise ConfigError(what, where="--subset", remedy="n/t with 1 <= n <= t, such as --subset 1/8")

    def __contains__(self, shard: str) -> bool:
        return xxhash.xxh3_64_intdigest(shard.encode()) % self.of == self.part - 1

    def on(self, shard: str) -> None:
        """Do nothing: nobody follows which shard is being judged."""

    def __str__(self) -> str:
        return f"{self.part}/{self.of}"

    @property
    def with_index(self) -> bool:
        """Whether the index is judged with these shards: with the first part only."""
        return self.part == 1


@dataclass(frozen=True, slots=True)
class Named:
    """Some shards by their names, with the index or without."""

    names: frozenset[str]
    with_index: bool = False
    on: Callable[[str], object] = lambda _shard: None  # called with each before it is judged; empty: the index

    def __contains__(self, shard: str) -> bool:
        return shard in self.names


class Wrong(NamedTuple):
    """What is wrong with the content of an intact record."""

    what: str
    lost: bool = True  # whether the record must be made anew


WHOLE = Subset()


def quick(store: Store, subset: Subset | Named = WHOLE) -> Iterator[Checked]:
    """Judge the structure of every shard, in two reads each, and the index."""
    yield from _scrub(store, subset, _structure)


def full(store: Store, subset: Subset | Named = WHOLE) -> Iterator[Checked]:
    """Judge every byte of every shard, and the index."""
    yield from meaning(store, _intact, subset)


def meaning(store: Store, judge: Judge, subset: Subset | Named = WHOLE) -> Iterator[Checked]:
    """Judge every byte of every shard, the content of each record, and the index."""
    yield from _scrub(store, subset, partial(_every_record, judge))


def shard_rows(store: Store, shard: str) -> Rows | None:
    """Return the rows of a shard: from its own table, else from the index; None where neither can be read."""
    try:
        return read_table(store.disk, store.layout.shard(shard)).rows
    except (CacheDamaged, OSError):
        return index_rows(store.disk, store.layout, {shard}).get(shard)


def shards_of(store: Store) -> list[str]:
    """Return the names of all shards to judge: those in the folder, and those that the index names."""
    return sorted({*shard_names(store.disk, store.layout), *indexed(store.disk, store.layout)})


def _scrub(store: Store, subset: Subset | Named, look: Look) -> Iterator[Checked]:
    """Judge the shards of a subset, their rows in the index, and with the first subset the index itself."""
    known = _Known(store, IndexView.read(store.disk, store.layout))
    names = sorted(name for name in {*shard_names(store.disk, store.layout), *known.view.shards} if name in subset)
    odd: dict[str, ShardTable] = {}  # shards of which the index says something else; few, or it is of another cache
    for last in (False, True):
        if last:  # a sweep or a repair that took one of these has had time to say so in the index
            names = known.look_again()
        for name in names:
            subset.on(name)
            checked, table = look(known, name)
            if checked is None:
                known.later.append(name)
                continue
            yield checked
            if table is not None and known.view.contradicts(table):
                odd[name] = table
    if subset.with_index or odd or known.copied:
        subset.on("")
        yield _judged_index(known, odd)


def _structure(known: _Known, name: str) -> Looked:
    """Judge the header and the table of a shard, without its records."""
    kind, disk, path = known.store.kind, known.store.disk, known.store.layout.shard(name)
    indexed = known.view.shards.get(name)
    tail_bytes = max(TAIL_BYTES, _end_bytes(indexed.records)) if indexed else WHOLE_TAIL_BYTES
    try:
        table = read_table(disk, path, tail_bytes)
        fault = header_fault(disk, path, table)
    except CacheDamaged as error:
        return Checked(kind, name, tail_bytes, (), (_about(known, name, error),)), None
    except OSError as error:
        return _refused(known, name, error), None
    findings = (DamageFinding(kind, Fault.HEADER, fault, name),) if fault else ()
    end_bytes = max(min(tail_bytes, table.size_bytes), _end_bytes(len(table.rows)))
    listed = tuple(row_keys(table.rows))
    return Checked(kind, name, table.data_start + end_bytes, (), findings, listed=listed), table


def _end_bytes(records: int) -> int:
    return records * TABLE_ROW.itemsize + TRAILER_BYTES


def _every_record(judge: Judge, known: _Known, name: str) -> Looked:
    """Judge header, table and every record of a shard; where only bytes count, one by one those that a sweep doubts."""
    store = known.store
    path = store.layout.shard(name)
    try:
        table = read_table(store.disk, path)
        header, whole_N = _swept(store, path, table) if judge is _intact else (_header(store, path, table), None)
        doubted = table.rows if whole_N is None else table.rows[~whole_N]
        whole, findings = _judged_rows(judge, known, name, doubted)
    except CacheDamaged as error:
        return _by_index(judge, known, name, error), None
    except OSError as error:
        return _refused(known, name, error), None
    swept = () if whole_N is None else compress(row_keys(table.rows), whole_N)
    return Checked(store.kind, name, table.size_bytes, (*swept, *whole), header + findings), table


def _swept(store: Store, path: Path, table: ShardTable) -> tuple[tuple[DamageFinding, ...], NDArray[np.bool_] | None]:
    """Read a shard from front to back; judge its header, and say which records are whole: None where it cannot be read.

    Then it is of one place in it, perhaps.
    """
    try:
        header_is_whole, whole_N = read_through(store.disk, path, table)
    except OSError as error:
        if error.errno in GONE:
            raise
        return _header(store, path, table), None
    return () if header_is_whole else (DamageFinding(store.kind, Fault.HEADER, BAD_HEADER, path.name),), whole_N


def _header(store: Store, path: Path, table: ShardTable) -> tuple[DamageFinding, ...]:
    """Judge the header of a shard."""
    try:
        fault = header_fault(store.disk, path, table)
    except OSError as error:
        if error.errno in GONE:
            raise
        fault = f"the header cannot be read: {error.strerror or error}"
    return (DamageFinding(store.kind, Fault.HEADER, fault, path.name),) if fault else ()


def _by_index(judge: Judge, known: _Known, name: str, error: CacheDamaged) -> Checked | None:
    """Judge a shard whose own table is damaged by its rows in the index; None while those are not read."""
    about, kind = _about(known, name, error), known.store.kind
    if about.fault is Fault.NEWER:
        return Checked(kind, name, TAIL_BYTES, (), (about,))
    if known.tables is None:
        return None
    rows = known.tables.get(name)
    if rows is None:
        return Checked(kind, name, TAIL_BYTES, (), (about,))
    try:
        whole, findings = _judged_rows(judge, known, name, rows)
    except OSError as refusal:
        return _refused(known, name, refusal)
    return Checked(kind, name, TAIL_BYTES + int(rows["length"].sum()), whole, (about, *findings))


def _about(known: _Known, name: str, error: CacheDamaged) -> DamageFinding:
    if not isinstance(error, ShardNewer) and written_at(name) is None and name not in known.view.shards:
        return DamageFinding(known.store.kind, Fault.FOREIGN, FOREIGN, name)
    fault = Fault.NEWER if isinstance(error, ShardNewer) else Fault.TABLE
    return DamageFinding(known.store.kind, fault, error.what, name)


def _judged_rows(
    judge: Judge, known: _Known, name: str, rows: Rows
) -> tuple[tuple[bytes, ...], tuple[DamageFinding, ...]]:
    """Judge records one at a time; return the keys of the intact ones, and what is wrong with the others."""
    whole: list[bytes] = []
    findings: list[DamageFinding] = []
    store = known.store
    if not len(rows):
        return (), ()
    fd = store.disk.open_read(store.layout.shard(name))
    try:
        for key, place in zip(row_keys(rows), rows[["offset", "length", "digest"]].tolist(), strict=True):
            finding = _judged_record(judge, known, name, fd, key, *place)
            if finding is None:
                whole.append(key)
            else:
                findings.append(finding)
    finally:
        store.disk.close(fd)
    return tuple(whole), tuple(findings)


def _judged_record(judge: Judge, known: _Known, name: str, fd: int, key: bytes, *place: Any) -> DamageFinding | None:
    """Return what is wrong with a record's bytes or content; None where nothing is."""
    try:
        _, record = read_record(known.store.disk, fd, key, *place)
    except OSError as error:
        return known.damaged(name, key, Fault.UNREADABLE, error.strerror or str(error))
    except BadRecord as error:
        return known.damaged(name, key, Fault.RECORD, str(error))
    wrong = judge(record)
    return wrong and DamageFinding(known.store.kind, Fault.MEANING, wrong.what, name, key.hex(), wrong.lost)


def _intact(_: Record) -> Wrong | None:
    return None


@dataclass(slots=True)
class _Known:
    """What is shared while the shards of a store are judged: the index, and what is judged last."""

    store: Store
    view: IndexView
    tables: dict[str, Rows] | None = None  # what the index says that shards hold which are judged last; none: not yet
    later: list[str] = field(default_factory=list)  # what is to be judged last
    copied: dict[str, int] = field(default_factory=dict)  # shards that are gone → how many records others have, too
    fresh: bool = False  # whether the store has looked at what was written in the meantime

    def look_again(self) -> list[str]:
        """Read from the index the rows of all shards that are judged last, and return their names."""
        names, self.later = self.later, []
        self.tables = index_rows(self.store.disk, self.store.layout, frozenset(names))
        self.fresh = False
        return names

    def damaged(self, name: str, key: bytes, fault: Fault, what: str) -> DamageFinding:
        """Return the finding that a record is damaged, and whether it is lost."""
        if not self.fresh:
            self.store.refresh()
            self.fresh = True
        lost = not self.store.is_whole_beside(key, {name})
        return DamageFinding(self.store.kind, fault, what, name, key.hex(), lost)

    def all_damaged(self, name: str, fault: Fault, what: str) -> tuple[DamageFinding, ...]:
        """Return a finding for each record that the index says a shard holds."""
        rows = (self.tables or {}).get(name)
        return () if rows is None else tuple(self.damaged(name, key, fault, what) for key in row_keys(rows))


def _refused(known: _Known, name: str, error: OSError) -> Checked | None:
    """Judge a shard that cannot be read, or is not there; None on the first look, after which it is tried again."""
    if known.tables is None:
        return None
    if error.errno == errno.ENOENT:
        return _missed(known, name)
    kind, reason = known.store.kind, error.strerror or str(error)
    if error.errno in (errno.EACCES, errno.EPERM):
        return _forbidden(known, name)
    about = DamageFinding(kind, Fault.UNREADABLE, reason, name)
    return Checked(kind, name, 0, (), (about, *known.all_damaged(name, Fault.UNREADABLE, reason)))


def _forbidden(known: _Known, name: str) -> Checked:
    """Judge a shard that this user may not read: nothing of it is lost, for its owner may."""
    kind, rows = known.store.kind, (known.tables or {}).get(name)
    keys = row_keys(rows) if rows is not None else []
    known.store.refresh()
    copied = bool(keys) and all(known.store.is_whole_beside(key, {name}) for key in keys)
    what = f"{FORBIDDEN}; nothing is missing, since other files have its records" if copied else FORBIDDEN
    records = (DamageFinding(kind, Fault.UNREADABLE, FORBIDDEN, name, key.hex()) for key in keys)
    return Checked(kind, name, 0, (), (DamageFinding(kind, Fault.UNREADABLE, what, name), *records))


def _missed(known: _Known, name: str) -> Checked:
    """Judge a shard that is not there by the current index, which no longer names what was swept or repaired.

    Where other shards have its records, only the index is at fault, for naming the shard.
    """
    findings = known.all_damaged(name, Fault.GONE, "its shard was purged or deleted")
    lost = tuple(finding for finding in findings if finding.lost)
    if len(lost) < len(findings):
        known.copied[name] = len(findings) - len(lost)
    return Checked(known.store.kind, name, 0, (), lost)


def _judged_index(known: _Known, odd: Mapping[str, ShardTable]) -> Checked:
    """Judge the index; a fault counts only if it is still there, for another process may have replaced the index."""
    view, kind = known.view, known.store.kind
    if view.fault or odd:
        view = IndexView.read(known.store.disk, known.store.layout)
    findings = [DamageFinding(kind, Fault.INDEX, view.fault)] if view.fault else []
    contradictions = ((name, view.contradicts(table)) for name, table in odd.items())
    findings += [DamageFinding(kind, Fault.INDEX, why, name) for name, why in contradictions if why]
    findings += [
        DamageFinding(kind, Fault.INDEX, f" it lists a removed shard; other files have {copies} of its records", name)
        for name, copies in known.copied.items()
    ]
    return Checked(kind, "", view.bytes, (), tuple(findings))
