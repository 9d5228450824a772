"""Repairs a damaged cache: intact records move to new shards, damaged shards to `quarantine/`.

Never in place, and in this order: the intact records of damaged shards are published anew; the list of lost records is
published; only then the index forgets the damaged shards and they are moved aside. A crash at any moment loses nothing,
not that list either, and repairing again finishes.

Shards that cannot be judged stay: of a later version, unreadable for the disk or its permissions, or not written by a
pipeline. A record is carried over even if another shard has it, too: that one may be on its way out as well.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pipeline.store.format.cache_layout import REPORTS
from pipeline.store.format.disk import remove, write_refused
from pipeline.store.format.shard import TABLE_ROW, row_keys
from pipeline.store.maintenance import scrub
from pipeline.store.maintenance.damage_report import (
    ALL,
    REFUSED,
    REPAIR,
    UNREAD,
    DamageFinding,
    Fault,
    ReportWriter,
    Summary,
    refuse_of_another,
)
from pipeline.store.maintenance.rewrite import CarriedRows, RetiringShards, carried, retire
from pipeline.store.snapshot import GONE

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator
    from pathlib import Path

    from pipeline.store.cache_folder import CacheFolder
    from pipeline.store.maintenance.damage_report import Checked, DamageReport
    from pipeline.store.maintenance.rewrite import Carried
    from pipeline.store.shard_index import Rows
    from pipeline.store.store import Store

    Seen = Callable[[Checked], None]

SHARD_GONE = "the shard was purged or deleted"
OUT_OF_DATE = "the index lists shards that are being removed"
_NO_ROWS = np.zeros(0, TABLE_ROW)


@dataclass(frozen=True, slots=True)
class Mend:
    """What a repair does about one shard, or about the index (whose name is empty)."""

    kind: str
    shard: str
    why: str
    salvaged: int = 0  # records that are carried over to a new shard
    salvaged_bytes: int = 0
    lost: tuple[DamageFinding, ...] = ()  # records of which no whole copy is left
    unknown: bool = False  # nobody knows what it held
    stays: str = ""  # why nothing is done about it
    gone: bool = False  # it is not there any more

    @property
    def goes(self) -> bool:
        return bool(self.shard) and not self.stays and not self.gone


@dataclass(slots=True)
class Repaired:
    """The totals of a repair, or of its plan."""

    quarantined: int = 0  # shards
    salvaged: int = 0  # records
    salvaged_bytes: int = 0
    lost: int = 0  # records
    unknown: int = 0  # shards of which nobody knows what they held
    stay: int = 0  # shards about which nothing is done
    indexes: int = 0  # that are made anew
    missing: Path | None = None  # the list of the lost records

    def count(self, mend: Mend) -> None:
        """Add one shard or index to the totals."""
        self.lost += len(mend.lost)
        self.unknown += mend.unknown
        self.salvaged += mend.salvaged
        self.salvaged_bytes += mend.salvaged_bytes
        if mend.stays:
            self.stay += 1
        elif not mend.shard:
            self.indexes += 1
        self.quarantined += mend.goes


@dataclass(slots=True)
class _NamedDamage:
    """What a damage list says about one kind."""

    shards: set[str] = field(default_factory=set)
    meaningless: dict[str, dict[bytes, DamageFinding]] = field(default_factory=dict)  # shard → key → what is wrong

    def add(self, finding: DamageFinding) -> None:
        """Add a finding; that a record's content is wrong is believed, as it cannot be checked here."""
        self.shards.add(finding.shard)
        if finding.fault is Fault.MEANING and finding.key and finding.lost:
            self.meaningless.setdefault(finding.shard, {})[bytes.fromhex(finding.key)] = finding


@dataclass(frozen=True, slots=True)
class _Todo:
    """A planned `Mend`, with the rows of the shard that are kept."""

    mend: Mend
    rows: Rows = field(default_factory=lambda: _NO_ROWS)
    odd: frozenset[str] = frozenset()  # shards of which the index says something else; the empty name is its own


def plan_repair(
    cache: CacheFolder, report: DamageReport | None = None, *, seen: Seen = lambda _: None
) -> Iterator[Mend]:
    """Yield what `repair_cache` would do; the shards of the damage list, or all shards, are judged anew for it."""
    for store, named in _kinds(cache, report):
        for todo in _todo(store, named, seen):
            yield todo.mend


def repair_cache(
    cache: CacheFolder,
    report: DamageReport | None = None,
    *,
    done: Callable[[Mend], None] = lambda _: None,
    seen: Seen = lambda _: None,
    settle_s: float = 0.0,
    waits: Callable[[], object] = lambda: None,
) -> Repaired:
    """Repair what is damaged, and leave a list of the records that are lost.

    `done` is called for each shard once its intact records are safe. Other hosts have `settle_s` to see the new index
    before shards are moved aside, once for all kinds; `waits` is called before that.
    """
    repaired, begun = Repaired(), time.time()
    missing, mendings = _Missing(cache, report.path.name if report else ALL), list[_Mending]()
    try:
        for store, named in _kinds(cache, report):
            mendings.append(_Mending(store, named.shards if named else None))
            for mend in mendings[-1].carry(_todo(store, named, seen)):
                repaired.count(mend)
                missing.add(mend)
                done(mend)
        repaired.missing = missing.publish(begun)
        retire([mending.finish() for mending in mendings], settle_s, waits)
        for mending in mendings:
            mending.forget_doubts()
        if repaired.quarantined or repaired.indexes:
            missing.note_repair(begun)
    finally:
        missing.discard()
    return repaired


def _kinds(cache: CacheFolder, report: DamageReport | None) -> Iterator[tuple[Store, _NamedDamage | None]]:
    """Yield the stores to look at, each with what the damage list says about it."""
    damage_by_kind: dict[str, _NamedDamage] = {}
    if report:
        refuse_of_another(report, cache.root)
    for finding in report.findings() if report else ():
        damage_by_kind.setdefault(finding.kind, _NamedDamage()).add(finding)
    for kind in cache.kinds():
        if report is None or kind in damage_by_kind:
            yield cache.kind(kind), damage_by_kind.get(kind)


def _todo(store: Store, named: _NamedDamage | None, seen: Seen) -> Iterator[_Todo]:
    """Judge shards anew; yield what to do about each damaged one, and then about the index."""
    subset = scrub.Named(frozenset(named.shards), with_index=True) if named else scrub.WHOLE
    outdated, odd = "", frozenset[str]()
    for checked in scrub.full(store, subset):
        seen(checked)
        meaningless = named.meaningless.get(checked.shard, {}) if named else {}
        meant_wrong = tuple(meaningless[key] for key in checked.whole if key in meaningless)
        if not checked.shard:
            outdated = next((finding.what for finding in checked.findings), outdated)
            odd = frozenset(finding.shard for finding in checked.findings)
        elif checked.findings or meant_wrong:
            todo = _decided(store, checked, meant_wrong)
            outdated = outdated or (OUT_OF_DATE if not todo.mend.stays else "")
            yield todo
    if outdated:
        yield _Todo(Mend(store.kind, "", outdated), odd=odd)


def _decided(store: Store, checked: Checked, meant_wrong: tuple[DamageFinding, ...]) -> _Todo:
    """Decide what to do about a damaged shard."""
    about = {finding.fault: finding.what for finding in checked.findings if not finding.key}
    bad = checked.judged - len(checked.whole) + len(meant_wrong)
    forbidden = any(finding.forbidden for finding in checked.findings)
    records = [f"{bad:,} damaged {'record' if bad == 1 else 'records'}"] if bad and not forbidden else []
    why = "; ".join((*about.values(), *records))
    lost = (*(finding for finding in checked.findings if finding.lost), *meant_wrong)
    mend = Mend(store.kind, checked.shard, why, lost=lost)
    if {finding.fault for finding in checked.findings} == {Fault.GONE}:
        return _Todo(replace(mend, why=SHARD_GONE, gone=True))
    rows = scrub.shard_rows(store, checked.shard)
    reason = next(filter(None, (finding.stays for finding in checked.findings)), "")
    unread = not checked.whole and any(finding.fault is Fault.UNREADABLE for finding in checked.findings)
    if reason := reason or (REFUSED if unread else ""):
        return _Todo(replace(mend, stays=reason))
    if rows is None:
        return _Todo(replace(mend, stays=UNREAD) if checked.whole else replace(mend, unknown=True))
    kept = set(checked.whole) - {bytes.fromhex(finding.key) for finding in meant_wrong}
    rows = rows[[key in kept for key in row_keys(rows)]]
    return _Todo(replace(mend, salvaged=len(rows), salvaged_bytes=int(rows["length"].sum())), rows)


class _Mending:
    """The repair of one kind: intact records are carried over first, damaged shards are moved aside last."""

    def __init__(self, store: Store, judged: Container[str] | None) -> None:
        self._store, self._judged = store, judged  # None: all shards
        self._mends: list[Mend] = []
        self._read: deque[int] = deque()  # which of these are being carried over
        self._going: dict[str, None] = {}  # in order
        self._staying = set[str]()
        self._index: _Todo | None = None

    def carry(self, todo: Iterator[_Todo]) -> Iterator[Mend]:
        """Carry over the kept records of each shard; then yield what was done about the shards and the index.

        Only then: a record that one shard has lost may have been saved from another.
        """
        for source in carried(self._store, self._sources(todo)):
            at = self._read.popleft()
            self._mends[at] = _with_refused(self._store, self._mends[at], source)
        self._going = dict.fromkeys(mend.shard for mend in self._mends if mend.goes)
        self._staying = {mend.shard for mend in self._mends if mend.stays}
        self._store.refresh()
        for mend in self._mends:
            yield replace(mend, lost=tuple(finding for finding in mend.lost if self._is_lost(finding)))
        self._mends = []

    def finish(self) -> RetiringShards:
        """Make the index anew if it is damaged or out of date, and return the shards to move aside.

        Where the index can be read, its rows of shards that stay are kept: nothing else may know them.
        """
        odd = self._index.odd if self._index else ()
        if "" in odd:
            self._store.rebuild_index()
        elif odd:  # their own tables replace their rows
            self._store.write_index(without=odd)
            self._store.write_index()
        elif self._index and not self._going:
            self._store.write_index()
        return RetiringShards(self._store, list(self._going), partial(_quarantine, self._store))

    def forget_doubts(self) -> None:
        """Remove the notes about shards that were judged: they are whole, or aside."""
        for shard in self._store.doubted() - self._staying:
            if self._judged is None or shard in self._judged:
                remove(self._store.disk, self._store.layout.doubted / shard)

    def _sources(self, todo: Iterator[_Todo]) -> Iterator[CarriedRows]:
        """Yield the shards that are moved aside; note what is done about the others, and the index."""
        for step in todo:
            self._mends.append(step.mend)
            if step.mend.goes:
                self._read.append(len(self._mends) - 1)
                yield CarriedRows(step.mend.shard, step.rows)
            elif not step.mend.shard:
                self._index = step

    def _is_lost(self, finding: DamageFinding) -> bool:
        return not self._store.is_whole_beside(bytes.fromhex(finding.key), self._going)


def _with_refused(store: Store, mend: Mend, source: Carried) -> Mend:
    """Note the records that could not be copied: the shard stays if it still exists, else they are lost."""
    mend = replace(mend, salvaged=source.records, salvaged_bytes=source.size_bytes)
    if source.refused and store.disk.exists(store.layout.shard(mend.shard)):
        return replace(mend, stays=UNREAD)
    refused = ((key.hex(), why) for key, why in source.refused)
    went = (DamageFinding(store.kind, Fault.RECORD, why, mend.shard, key, lost=True) for key, why in refused)
    return replace(mend, lost=(*mend.lost, *went))


def _quarantine(store: Store, shard: str) -> None:
    """Move a shard to the quarantine, durably; another repair may have done so."""
    disk, layout = store.disk, store.layout
    path = layout.shard(shard)
    try:
        disk.make_folder(layout.quarantine)
        disk.rename(path, layout.quarantine / shard)
        disk.fsync_folder(layout.quarantine)
        disk.fsync_folder(layout.shards)
    except OSError as error:
        if error.errno not in GONE:
            raise write_refused(disk, path, error) from error


class _Missing:
    """Writes the list of lost records; no file is begun while nothing is lost."""

    def __init__(self, cache: CacheFolder, by: str) -> None:
        self._cache = cache
        self._writer: ReportWriter | None = None
        self._summary = Summary(REPAIR, by, root=str(cache.root.resolve()))

    def add(self, mend: Mend) -> None:
        """List the records that a shard has lost, or the shard itself where nobody knows what it held."""
        nobody_knows = (DamageFinding(mend.kind, Fault.TABLE, mend.why, mend.shard),) if mend.unknown else ()
        for finding in (*mend.lost, *nobody_knows):
            if self._writer is None:
                self._writer = ReportWriter(self._cache.disk, self._cache.root / REPORTS)
            self._writer.add(finding)
            self._summary.count(finding)
        self._summary.of_kind(mend.kind, records=len(mend.lost), whole=0, lost=len(mend.lost))
        self._summary.shards += bool(mend.shard)

    def publish(self, begun: float) -> Path | None:
        """Finish the list and return where it is, if anything is lost."""
        self._summary.begun, self._summary.seconds = begun, time.time() - begun
        return self._writer.publish(self._summary) if self._writer else None

    def note_repair(self, begun: float) -> None:
        """Leave a list, be it an empty one, by which a repair is known to have been done."""
        if self._writer is None:
            self._writer = ReportWriter(self._cache.disk, self._cache.root / REPORTS)
            self.publish(begun)

    def discard(self) -> None:
        """Leave no unfinished list behind."""
        if self._writer:
            self._writer.discard()
