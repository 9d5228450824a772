"""Judges shards and the index of a store: finds damage and the records lost by it, and changes nothing."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import xxhash

from pipeline.errors import CacheDamaged, ConfigError
from pipeline.store.format.cache_layout import written_at
from pipeline.store.format.disk import reading
from pipeline.store.format.record import BadRecord, Record
from pipeline.store.format.shard import (
    TABLE_ROW,
    TAIL_BYTES,
    TRAILER_BYTES,
    ShardNewer,
    ShardTable,
    header_fault,
    read_table,
    row_keys,
    verified_record,
    whole_rows,
)
from pipeline.store.maintenance.damage_report import (
    FORBIDDEN,
    FOREIGN,
    Checked,
    DamageFinding,
    Fault,
)
from pipeline.store.shard_index import (
    GONE,
    NO_ROWS,
    IndexSummary,
    index_rows,
    indexed,
    shard_names,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping
    from pathlib import Path

    from pipeline.store.shard_index import Rows
    from pipeline.store.store import Store


class Wrong(NamedTuple):
    """What is wrong with the content of an intact record."""

    what: str
    lost: bool = True  # whether the record must be made again


Judge: TypeAlias = Callable[[Record], Wrong | None]


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

    def __contains__(self, shard: object) -> bool:
        return xxhash.xxh3_64_intdigest(str(shard).encode()) % self.of == self.part - 1

    def __str__(self) -> str:
        return f"{self.part}/{self.of}"


WHOLE = Subset()


def shards_of(store: Store) -> list[str]:
    """Return the names of all shards to judge: those in the folder, and those that the index names."""
    return sorted({*shard_names(store.disk, store.layout), *indexed(store.disk, store.layout)})


def check(
    store: Store,
    part: Container[str] = WHOLE,
    *,
    with_index: bool = True,
    quick: bool = False,
    judge: Judge | None = None,
    on: Callable[[str], object] = lambda _shard: None,
) -> Iterator[Checked]:
    """Judge some shards, and the index (`with_index`, or where something contradicts it); nothing is changed.

    Every byte is read once, or of each shard only header and table if it is to be `quick`; `judge` judges the content
    of intact records. A shard that appears meanwhile is not judged, one that was removed meanwhile is not missed.
    Shards that cannot be judged without the index come last, after the index was read once for all of them. `on` is
    called with each shard before it is judged, and with an empty name before the index is.
    """
    known = _Check(store, IndexSummary.read(store.disk, store.layout), quick, judge)
    names, later = [name for name in sorted({*shards_of(store), *known.index.shards}) if name in part], list[str]()
    for batch in (names, later):
        store.forget()
        if batch is later:
            known.rows = index_rows(store.disk, store.layout, later)
        for name in batch:
            on(name)
            if checked := known.judged(name):
                yield checked
            else:
                later.append(name)
    if with_index or known.odd or known.copied:
        on("")
        yield known.judged_index()


@dataclass(slots=True)
class _Check:
    """What is shared while the shards of a store are judged."""

    store: Store
    index: IndexSummary
    quick: bool
    judge: Judge | None
    rows: Mapping[str, Rows] | None = None  # of the shards that are judged last, by the index; None: not yet read
    odd: list[ShardTable] = field(default_factory=list)  # that the index describes differently
    copied: dict[str, int] = field(default_factory=dict)  # shards that are gone → how many records others have, too

    def judged(self, name: str) -> Checked | None:
        """Judge a shard; None where that needs the rows of the index."""
        disk, path = self.store.disk, self.store.layout.shard(name)
        _, records, _ = self.index.shards.get(name, (0, 0, 0))
        try:
            table = read_table(disk, path, max(TAIL_BYTES, records * TABLE_ROW.itemsize + TRAILER_BYTES))
            header = self._header(path, table)
            whole, findings = ((), ()) if self.quick else self._judged_rows(name, table.rows)
        except CacheDamaged as error:
            return self._by_index(name, error)
        except OSError as error:
            return self._unreadable(name, error)
        if self.index.contradicts(table):
            self.odd.append(table)
        around_bytes = table.size_bytes - (table.table_start - table.data_start)
        read_bytes = around_bytes if self.quick else table.size_bytes
        listed = tuple(row_keys(table.rows)) if self.quick else ()
        return Checked(self.store.kind, name, read_bytes, whole, header + findings, listed=listed)

    def judged_index(self) -> Checked:
        """Judge the index; a fault counts only if it is still there: another process may have replaced the index."""
        view, kind = self.index, self.store.kind
        if view.fault or self.odd:
            view = IndexSummary.read(self.store.disk, self.store.layout)
        findings = [DamageFinding(kind, Fault.INDEX, view.fault)] if view.fault else []
        other = "the index and the shard's table disagree"
        findings += [DamageFinding(kind, Fault.INDEX, other, odd.name) for odd in self.odd if view.contradicts(odd)]
        for name, copies in self.copied.items():
            what = f"it lists a removed shard; other files have {copies} of its records"
            findings.append(DamageFinding(kind, Fault.INDEX, what, name))
        return Checked(kind, "", view.bytes, (), tuple(findings))

    def _header(self, path: Path, table: ShardTable) -> tuple[DamageFinding, ...]:
        try:
            fault = header_fault(self.store.disk, path, table)
        except OSError as error:
            if error.errno in GONE:
                raise
            fault = f"the header cannot be read: {error.strerror or error}"
        return (DamageFinding(self.store.kind, Fault.HEADER, fault, path.name),) if fault else ()

    def _judged_rows(self, name: str, rows: Rows) -> tuple[tuple[bytes, ...], tuple[DamageFinding, ...]]:
        """Judge records; return the keys of the intact ones, and findings about the others."""
        disk = self.store.disk
        with reading(disk, self.store.layout.shard(name)) as fd:
            whole_N = np.zeros(len(rows), bool) if self.judge else whole_rows(disk, fd, rows)
            whole, findings = row_keys(rows[whole_N]), []
            doubted = rows[~whole_N]
            for key, place in zip(row_keys(doubted), doubted[["offset", "length", "digest"]].tolist(), strict=True):
                if finding := self._judged_record(name, fd, key, *place):
                    findings.append(finding)
                else:
                    whole.append(key)
        return tuple(whole), tuple(findings)

    def _judged_record(
        self, name: str, fd: int, key: bytes, offset: int, length: int, digest: bytes
    ) -> DamageFinding | None:
        try:
            record = verified_record(key, digest, self.store.disk.read_at(fd, length, offset))
        except OSError as error:
            return self._damaged(name, key, Fault.UNREADABLE, error.strerror or str(error))
        except BadRecord as error:
            return self._damaged(name, key, Fault.RECORD, str(error))
        wrong = self.judge(record) if self.judge else None
        return wrong and DamageFinding(self.store.kind, Fault.MEANING, wrong.what, name, key.hex(), wrong.lost)

    def _by_index(self, name: str, error: CacheDamaged) -> Checked | None:
        """Judge a shard whose own table is damaged by its rows in the index."""
        kind, what, fault = self.store.kind, error.what, Fault.NEWER if isinstance(error, ShardNewer) else Fault.TABLE
        if fault is Fault.TABLE and written_at(name) is None and name not in self.index.shards:
            what, fault = FOREIGN, Fault.FOREIGN
        about = DamageFinding(kind, fault, what, name)
        if self.quick or fault is not Fault.TABLE:
            return Checked(kind, name, TAIL_BYTES, (), (about,))
        if self.rows is None:
            return None
        rows = self.rows.get(name, NO_ROWS)
        try:
            whole, findings = self._judged_rows(name, rows)
        except OSError as refusal:
            return self._unreadable(name, refusal)
        return Checked(kind, name, TAIL_BYTES + int(rows["length"].sum()), whole, (about, *findings))

    def _unreadable(self, name: str, error: OSError) -> Checked | None:
        """Judge a shard that cannot be read, or is not there, by the index of now: it may have been removed since."""
        if self.rows is None:
            return None
        kind, keys = self.store.kind, row_keys(self.rows.get(name, NO_ROWS))
        if error.errno == errno.ENOENT:
            missed = [self._damaged(name, key, Fault.GONE, "its shard was purged or deleted") for key in keys]
            lost = tuple(finding for finding in missed if finding.lost)
            if len(lost) < len(missed):  # only the index is at fault, for naming the shard
                self.copied[name] = len(missed) - len(lost)
            return Checked(kind, name, 0, (), lost)
        if error.errno in (errno.EACCES, errno.EPERM):  # nothing is lost: its owner may be able to read it
            what = FORBIDDEN
            records = [DamageFinding(kind, Fault.UNREADABLE, what, name, key.hex()) for key in keys]
        else:
            what = error.strerror or str(error)
            records = [self._damaged(name, key, Fault.UNREADABLE, what) for key in keys]
        return Checked(kind, name, 0, (), (DamageFinding(kind, Fault.UNREADABLE, what, name), *records))

    def _damaged(self, name: str, key: bytes, fault: Fault, what: str) -> DamageFinding:
        lost = not self.store.has_whole_elsewhere(key, {name})
        return DamageFinding(self.store.kind, fault, what, name, key.hex(), lost)
