"""Maintenance plans for all verbs: a plan states the fate of each shard, and `apply` carries it out.

Repairing, cleaning and compacting all copy chosen records to new shards and retire the old ones: never in place, and in
this order. The records are published; a repair publishes its list of lost records; the index is written without the old
shards; other hosts get time to see that; the old shards go. A crash at any moment loses nothing, and planning and
applying again finishes. Readers, writers and other maintenance may run at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.codec import plain
from pipeline.errors import CacheDamaged, CacheFull
from pipeline.store.format.cache_layout import REPORTS, SHARD_NAME, written_at
from pipeline.store.format.disk import remove, write_refused
from pipeline.store.format.shard import (
    ShardTable,
    column_keys,
    key_column,
    read_table,
    row_keys,
)
from pipeline.store.maintenance.checking import WHOLE, check
from pipeline.store.maintenance.damage_report import (
    ALL,
    REFUSED,
    REPAIR,
    UNREAD,
    Checked,
    DamageFinding,
    DamageReport,
    Fault,
    ReportWriter,
    Summary,
    refuse_of_another,
)
from pipeline.store.shard_index import (
    GONE,
    NO_KEYS,
    NO_ROWS,
    are_among,
    index_rows,
    indexed,
    shard_names,
)
from pipeline.store.store import DEFAULT_SHARD_BYTES, RecordPlace

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.store.cache_folder import CacheFolder
    from pipeline.store.format.disk import Disk
    from pipeline.store.shard_index import Integers, KeyColumn, Mask, Rows, StoreSnapshot
    from pipeline.store.store import Store, StoreWriter

# Room for what safetensors must say of each of thousands of small records; less than 1% of a shard that is full.
CARRIED_HEADER_BYTES = 2 << 20
BATCH_BYTES = 8 << 30  # of records are copied before the old shards are removed: this much room is needed meanwhile
WORTHWHILE = 1 / 3  # of a shard that must be dead before the rest is written again
ENOUGH_RECORDS = 200  # a shard with this many is not small, whatever its size
SHARD_GONE = "the shard was purged or deleted"
OUT_OF_DATE = "the index lists shards that are being removed"


class Fate(StrEnum):
    """What becomes of a shard, or of the index."""

    GOES = "goes"
    REWRITTEN = "rewritten"  # the kept records are copied, then it goes
    QUARANTINED = "quarantined"  # the kept records are copied, then it is moved aside
    YOUNG = "young"  # not before its grace period is over
    SPARSE = "sparse"  # too few records are dead to be worth it
    FOREIGN = "foreign"  # it is not named or made as we do
    LEFT = "left"  # `stays` says why
    GONE = "gone"  # it is not there any more
    INDEXED = "indexed"  # the index is written again


RETIRED = frozenset({Fate.GOES, Fate.REWRITTEN, Fate.QUARANTINED})
CLEANED = (Fate.GOES, Fate.REWRITTEN, Fate.YOUNG, Fate.SPARSE, Fate.FOREIGN)  # what cleaning decides


@dataclass(slots=True, eq=False)
class ShardPlan:
    """The planned fate of one shard, or of the index (whose name is empty); `apply` notes the actual one."""

    store: Store
    shard: str
    fate: Fate
    why: str = ""
    stays: str = ""  # why it is left alone
    keep: Callable[[KeyColumn], Mask] = lambda keys: np.ones(len(keys), bool)  # which of its records are needed
    kept: int = 0  # records, to be copied
    kept_bytes: int = 0
    dead: int = 0
    dead_bytes: int = 0
    size_bytes: int = 0
    lost: tuple[DamageFinding, ...] = ()  # records without an intact copy
    unknown: bool = False  # what it held is in no table
    twice: frozenset[bytes] = frozenset()  # keys that are in several small shards: one copy is kept
    odd: frozenset[str] = frozenset()  # shards that the index describes differently

    @property
    def path(self) -> Path:
        return self.store.layout.shard(self.shard)

    @property
    def freed_bytes(self) -> int:
        return {Fate.GOES: self.size_bytes, Fate.REWRITTEN: self.dead_bytes}.get(self.fate, 0)

    def to_json(self) -> dict[str, Any]:
        """Return the repair of a shard as JSON data."""
        return {
            "kind": self.store.kind, "shard": self.shard, "why": self.why, "salvaged": self.kept,
            "salvaged_bytes": self.kept_bytes, "lost": plain(self.lost),
            "unknown": self.unknown, "stays": self.stays, "gone": self.fate is Fate.GONE,
        }  # fmt: skip

    def leave(self, stays: str) -> None:
        """Leave it alone, unless another process has removed it."""
        self.fate, self.stays = Fate.LEFT, stays
        if not self.store.disk.exists(self.path):
            self.fate = Fate.GONE


def apply(
    plans: Iterable[ShardPlan],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    batch_bytes: float = BATCH_BYTES,
    settle_s: float = 0.0,
    waits: Callable[[], object] = lambda: None,
    check: Callable[[], object] = lambda: None,
    safe: Callable[[Sequence[ShardPlan]], object] = lambda _plans: None,
) -> Iterator[ShardPlan]:
    """Carry out plans, which come kind by kind, and yield each once it is done.

    No index names a shard any more when it goes; other hosts have `settle_s` to see that, and the new shards: once for
    a batch of `batch_bytes`; `waits` is called before. `safe` is called with a batch once its records are safe, and
    before anything goes; `check` before each removal. Both may raise.
    """
    batch, copied_bytes = list[ShardPlan](), 0
    for store, of_kind in groupby(plans, key=lambda plan: plan.store):
        held = set[bytes]()  # keys of `twice` that were copied
        with store.writer(shard_bytes=shard_bytes, header_bytes=CARRIED_HEADER_BYTES) as writer:
            for plan in of_kind:
                if plan.fate in RETIRED:
                    _carry(plan, writer, held)
                batch.append(plan)
                copied_bytes += plan.kept_bytes
                if copied_bytes >= batch_bytes:
                    writer.flush()
                    safe(batch)
                    yield from _retire(batch, settle_s, waits, check)
                    batch, copied_bytes = [], 0
    safe(batch)
    yield from _retire(batch, settle_s, waits, check)


def _carry(plan: ShardPlan, writer: StoreWriter, held: set[bytes]) -> None:
    """Copy the needed records of one shard, verified; note where it has to stay after all."""
    store, rows = plan.store, _rows_to_keep(plan)
    if rows is None or plan.fate is Fate.GOES:
        return
    planned, plan.kept, plan.kept_bytes, refused = plan.kept, 0, 0, list[bytes]()
    places = rows[["offset", "length", "digest"]].tolist()
    for key, (offset, length, digest) in zip(row_keys(rows), places, strict=True):
        if key in held:
            plan.dead += 1
            continue
        record = store.whole_at(key, RecordPlace(plan.shard, offset, length, digest, store.own_layer))
        if record is None:
            refused.append(key)
            continue
        writer.put(key, record.arrays, record.meta, bfloat16=record.bfloat16)
        plan.kept, plan.kept_bytes = plan.kept + 1, plan.kept_bytes + length
        if key in plan.twice:
            held.add(key)
    is_repair = plan.fate is Fate.QUARANTINED
    if refused or (is_repair and len(rows) < planned):
        plan.leave(UNREAD if is_repair else f"{len(refused)} of its records are damaged")
    if is_repair and plan.fate is Fate.GONE:
        went = (
            DamageFinding(store.kind, Fault.RECORD, SHARD_GONE, plan.shard, key.hex(), lost=True) for key in refused
        )
        plan.lost, plan.stays = (*plan.lost, *went), ""


def _rows_to_keep(plan: ShardPlan) -> Rows | None:
    """Return the needed rows of a shard, by its own table; None where it has to stay, which is noted."""
    if why := why_kept(plan.store.disk, plan.path):
        plan.leave(why)
        return None
    if plan.unknown:
        return NO_ROWS
    rows = _known_rows(plan.store, plan.shard, by_index=plan.fate is Fate.QUARANTINED)
    if isinstance(rows, str):
        plan.leave(rows)
        return None
    rows = rows[plan.keep(rows["key"])]
    if plan.fate is Fate.GOES and len(rows):
        plan.leave("is needed again")
    return rows


def _known_rows(store: Store, shard: str, *, by_index: bool = True) -> Rows | str:
    """Return the rows of a shard, by its own table, else perhaps by the index; or why there are none."""
    try:
        return read_table(store.disk, store.layout.shard(shard)).rows
    except (CacheDamaged, OSError) as error:
        why = error.what if isinstance(error, CacheDamaged) else error.strerror or str(error)
    return index_rows(store.disk, store.layout, {shard}).get(shard, why) if by_index else why


def _retire(
    batch: Sequence[ShardPlan], settle_s: float, waits: Callable[[], object], check: Callable[[], object]
) -> Iterator[ShardPlan]:
    """Remove shards for good, after no index names them any more and other hosts could see that."""
    changed = {plan.store: set[str]() for plan in batch if plan.fate in RETIRED or plan.fate is Fate.INDEXED}
    full: set[Store] = set()
    for store, going in changed.items():
        going.update(plan.shard for plan in batch if plan.store is store and plan.fate in RETIRED)
        try:
            for plan in batch:
                if plan.store is store and plan.odd:  # their own tables replace their rows
                    store.write_index(without=plan.odd)
            store.write_index(without=going)
        except CacheFull:  # the removals make room
            if not going:
                raise
            full.add(store)
    if any(changed.values()):
        if settle_s:
            waits()
        batch[0].store.disk.wait(settle_s)
    for plan in batch:
        if plan.fate in RETIRED:
            check()
            _quarantine(plan) if plan.fate is Fate.QUARANTINED else remove(plan.store.disk, plan.path)
        yield plan
    for store, going in changed.items():
        store.forget(going)
        if store in full or not going.isdisjoint(indexed(store.disk, store.layout)):  # another process wrote it since
            store.write_index()


def _quarantine(plan: ShardPlan) -> None:
    """Move a shard to the quarantine, durably; another repair may have done so."""
    disk, layout = plan.store.disk, plan.store.layout
    try:
        disk.make_folder(layout.quarantine)
        disk.rename(plan.path, layout.quarantine / plan.shard)
        disk.fsync_folder(layout.quarantine)
        disk.fsync_folder(layout.shards)
    except OSError as error:
        if error.errno not in GONE:
            raise write_refused(disk, plan.path, error) from error


def why_kept(disk: Disk, path: Path) -> str:
    """Return why this user may not remove a file: its owner, or an error; empty if this user may."""
    try:
        keeper = disk.keeper(path)
    except FileNotFoundError:  # gone already
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return f"it is {keeper}'s: only its owner may remove it" if keeper else ""


# Repairing: intact records of damaged shards are copied, even if another shard has them, which may be on its way out.


@dataclass(slots=True)
class Repaired:
    """The totals of a repair, or of its plan."""

    quarantined: int = 0  # shards
    salvaged: int = 0  # records
    salvaged_bytes: int = 0
    lost: int = 0  # records
    unknown: int = 0  # shards whose content is in no table
    stay: int = 0  # shards about which nothing is done
    indexes: int = 0  # that are made again
    missing: Path | None = None  # the list of the lost records

    def count(self, plan: ShardPlan) -> None:
        """Add one shard or index to the totals."""
        self.lost += len(plan.lost)
        self.unknown += plan.unknown
        self.salvaged += plan.kept
        self.salvaged_bytes += plan.kept_bytes
        self.stay += plan.fate is Fate.LEFT
        self.indexes += plan.fate is Fate.INDEXED
        self.quarantined += plan.fate is Fate.QUARANTINED


def plan_repair(
    cache: CacheFolder, report: DamageReport | None = None, *, seen: Callable[[Checked], object] = lambda _: None
) -> Iterator[ShardPlan]:
    """Judge all shards, or again those of a damage list; yield what to do about each damaged one, and the index.

    Shards that cannot be judged stay: of a later version, unreadable, or not written by a pipeline. Findings about a
    record's content are trusted, because they cannot be checked here.
    """
    damage: dict[str, list[DamageFinding]] = {}
    if report:
        refuse_of_another(report, cache.root)
        for finding in report.findings():
            damage.setdefault(finding.kind, []).append(finding)
    for kind in cache.kinds():
        if report is None or kind in damage:
            named = damage.get(kind, [])
            part = {finding.shard for finding in named} if report else WHOLE
            store = cache.kind(kind)
            wrong = {(one.shard, one.key): one for one in named if one.fault is Fault.MEANING and one.key and one.lost}
            yield from _repair_kind(store, part, wrong, seen)


def _repair_kind(
    store: Store,
    part: Container[str],
    wrong: Mapping[tuple[str, str], DamageFinding],
    seen: Callable[[Checked], object],
) -> Iterator[ShardPlan]:
    outdated, odd = "", frozenset[str]()
    for checked in check(store, part):
        seen(checked)
        meaningless = tuple(
            wrong[checked.shard, key.hex()] for key in checked.whole if (checked.shard, key.hex()) in wrong
        )
        if not checked.shard:
            outdated = next((finding.what for finding in checked.findings), outdated)
            odd = frozenset(finding.shard for finding in checked.findings if finding.shard)
        elif checked.findings or meaningless:
            plan = _repair_shard(store, checked, meaningless)
            outdated = outdated or (OUT_OF_DATE if plan.fate is not Fate.LEFT else "")
            yield plan
    if outdated:
        yield ShardPlan(store, "", Fate.INDEXED, outdated, odd=odd)


def _repair_shard(store: Store, checked: Checked, meaningless: tuple[DamageFinding, ...]) -> ShardPlan:
    """Decide what to do about a damaged shard."""
    faults = {finding.fault for finding in checked.findings}
    bad = checked.judged - len(checked.whole) + len(meaningless)
    forbidden = any(finding.forbidden for finding in checked.findings)
    records = [f"{bad:,} damaged {'record' if bad == 1 else 'records'}"] if bad and not forbidden else []
    about = {finding.fault: finding.what for finding in checked.findings if not finding.key}
    plan = ShardPlan(store, checked.shard, Fate.QUARANTINED, "; ".join((*about.values(), *records)))
    plan.lost = (*(finding for finding in checked.findings if finding.lost), *meaningless)
    if faults == {Fault.GONE}:
        plan.fate, plan.why = Fate.GONE, SHARD_GONE
        return plan
    stays = next(filter(None, (finding.stays for finding in checked.findings)), "")
    rows = _known_rows(store, checked.shard)
    if stays or (not checked.whole and Fault.UNREADABLE in faults):
        plan.fate, plan.stays = Fate.LEFT, stays or REFUSED
    elif isinstance(rows, str):
        plan.unknown = not checked.whole
        plan.fate, plan.stays = (Fate.QUARANTINED, "") if plan.unknown else (Fate.LEFT, UNREAD)
    else:
        kept = key_column(sorted({*checked.whole} - {bytes.fromhex(finding.key) for finding in meaningless}))
        plan.keep = partial(are_among, known=kept)
        rows = rows[plan.keep(rows["key"])]
        plan.kept, plan.kept_bytes = len(rows), int(rows["length"].sum())
    return plan


def repair(
    cache: CacheFolder,
    report: DamageReport | None = None,
    *,
    done: Callable[[ShardPlan], object] = lambda _: None,
    seen: Callable[[Checked], object] = lambda _: None,
    settle_s: float = 0.0,
    waits: Callable[[], object] = lambda: None,
) -> Repaired:
    """Repair damaged shards and indexes, and publish a list of the lost records.

    `done` is called for each shard once its intact records are safe, and the list is published.
    """
    repaired, begun, judged = Repaired(), time.time(), set[tuple[str, str]]()
    by = report.path.name if report else ALL

    def look(checked: Checked) -> None:
        judged.add((checked.kind, checked.shard))
        seen(checked)

    def safe(batch: Sequence[ShardPlan]) -> None:
        for plan in batch:  # only now: a record that one shard has lost may have been saved from another
            going = {other.shard for other in batch if other.store is plan.store and other.fate in RETIRED}
            keys = {finding: bytes.fromhex(finding.key) for finding in plan.lost}
            plan.lost = tuple(one for one, key in keys.items() if not plan.store.has_whole_elsewhere(key, going))
            repaired.count(plan)
        if repaired.lost or repaired.unknown:
            repaired.missing = _publish_missing(cache, by, begun, batch)
        for plan in batch:
            done(plan)

    planned = plan_repair(cache, report, seen=look)
    plans = list(apply(planned, batch_bytes=np.inf, settle_s=settle_s, waits=waits, safe=safe))
    staying = {(plan.store.kind, plan.shard) for plan in plans if plan.fate is Fate.LEFT}
    for store in map(cache.kind, cache.kinds()):
        for shard in store.doubted():
            if (store.kind, shard) in judged - staying:
                remove(store.disk, store.layout.doubted / shard)
    if repaired.missing is None and (repaired.quarantined or repaired.indexes):
        _publish_missing(cache, by, begun, ())  # by which a repair is known to have been done
    return repaired


def _publish_missing(cache: CacheFolder, by: str, begun: float, plans: Sequence[ShardPlan]) -> Path:
    """Publish the list of lost records, and of shards whose content is in no table."""
    summary = Summary(REPAIR, by, root=str(cache.root.resolve()), begun=begun, seconds=time.time() - begun)
    writer = ReportWriter(cache.disk, cache.root / REPORTS)
    try:
        for plan in plans:
            kind, lost = plan.store.kind, len(plan.lost)
            unknown = (DamageFinding(kind, Fault.TABLE, plan.why, plan.shard),) if plan.unknown else ()
            for finding in (*plan.lost, *unknown):
                writer.add(finding)
                summary.count(finding)
            summary.of_kind(kind, records=lost, whole=0, lost=lost)
            summary.shards += bool(plan.shard)
        return writer.publish(summary)
    finally:
        writer.discard()


# Compacting


@dataclass(slots=True)
class Compacted:
    """What there is to compact in a kind, and, once the plans were applied, the outcome."""

    store: Store
    shards: int  # before
    small: tuple[ShardPlan, ...]  # oldest first, so that records written together stay together
    twice: frozenset[bytes]  # keys that are in several small shards
    records: int  # in small shards
    size_bytes: int

    @property
    def kind(self) -> str:
        return self.store.kind

    @property
    def after(self) -> int:
        """How many shards there are now."""
        return len(shard_names(self.store.disk, self.store.layout))

    def of(self, fate: Fate) -> list[str]:
        """Return the names of small shards of a fate."""
        return [plan.shard for plan in self.small if plan.fate is fate]

    def to_json(self, *, did: bool) -> dict[str, Any]:
        """Return plain JSON data."""
        small = [
            {"shard": plan.shard, "records": plan.kept + plan.dead, "size_bytes": plan.size_bytes}
            for plan in self.small
        ]
        return {
            "kind": self.kind, "shards": self.shards, "records": self.records, "size_bytes": self.size_bytes,
            "small": small, "gone": len(self.of(Fate.REWRITTEN)) if did else 0, "after": self.after,
            "damaged": self.of(Fate.LEFT), "taken": self.of(Fate.GONE), "twice": len(self.twice),
        }  # fmt: skip


def plan_compaction(store: Store, *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> Compacted:
    """Return which shards of a kind to compact, from their own tables.

    A small shard fills less than half of a new one, by its records and by what its header says of them. So any two fit
    into one, and of the new ones only the last can be small again.
    """
    names = shard_names(store.disk, store.layout)
    tables = [table for name in names if (table := _small(store, name, shard_bytes))]
    tables = tables if len(tables) > 1 else []
    keys, counts = np.unique(np.concatenate([NO_KEYS, *(table.rows["key"] for table in tables)]), return_counts=True)
    twice = frozenset(column_keys(keys[counts > 1]))
    small = tuple(
        ShardPlan(store, table.name, Fate.REWRITTEN, kept=len(table.rows), size_bytes=table.size_bytes, twice=twice)
        for table in tables
    )
    records, size_bytes = sum(plan.kept for plan in small), sum(plan.size_bytes for plan in small)
    return Compacted(store, len(names), small, twice, records, size_bytes)


def _small(store: Store, name: str, shard_bytes: int) -> ShardTable | None:
    """Return the table of a shard if it is small; a damaged one is left to `repair`."""
    path = store.layout.shard(name)
    try:
        table = read_table(store.disk, path)
        enough = len(table.rows) >= ENOUGH_RECORDS or table.table_start - table.data_start >= shard_bytes // 2
        header_bytes = table.data_start  # with its padding, unless that is long
        if not enough and header_bytes >= CARRIED_HEADER_BYTES // 2:
            header_bytes = len(store.disk.read_start(path, table.data_start).rstrip())
    except (CacheDamaged, OSError):
        return None
    return None if enough or not len(table.rows) or header_bytes >= CARRIED_HEADER_BYTES // 2 else table


# Cleaning: `mark` goes by the index and reads no shard; `apply` trusts only the table of a shard itself.


@dataclass(frozen=True, slots=True)
class Live:
    """Which records of a kind are needed: all, or those whose keys begin with a tag or are listed."""

    everything: bool = False
    tags: frozenset[bytes] = frozenset()
    keys: KeyColumn = field(default_factory=lambda: NO_KEYS)  # sorted

    @property
    def nothing(self) -> bool:
        """Whether no record is needed, so that it does not matter what a damaged shard holds."""
        return not (self.everything or self.tags or len(self.keys))

    def holds(self, keys: KeyColumn) -> Mask:
        """Return a mask of the keys that are needed."""
        if self.everything:
            return np.ones(len(keys), bool)
        return np.isin(_tags_of(keys), _tag_numbers(self.tags)) | are_among(keys, self.keys)


@dataclass(frozen=True, slots=True)
class Marked:
    """The dead records of a kind, in numbers."""

    kind: str
    records: int
    total_bytes: int  # of records
    shards: tuple[ShardPlan, ...]  # those with dead records
    tags: Mapping[bytes, tuple[int, int]]  # of those asked for → dead records, their bytes
    left: Mapping[bytes, int]  # of those asked for → records that are not dead
    damaged: tuple[tuple[str, str], ...]  # shards that cannot be read, and why: `repair` sees to them

    def of(self, *fates: Fate) -> list[ShardPlan]:
        return [shard for shard in self.shards if shard.fate in fates]

    def dead(self, *fates: Fate) -> tuple[int, int]:
        """Return how many records are dead in shards of these fates, and their bytes."""
        shards = self.of(*fates)
        return sum(shard.dead for shard in shards), sum(shard.dead_bytes for shard in shards)

    @property
    def freed_bytes(self) -> int:
        return sum(shard.freed_bytes for shard in self.shards)


def mark(store: Store, live: Live, before: float, tags: Sequence[bytes] = ()) -> Marked:
    """Return the dead records of a kind and the fate of each shard, from the index and the tables of newer shards.

    Shards that were written after the time `before` are young. Dead records are counted apart for each of `tags`.
    """
    names, numbers = sorted(set(tags)), _tag_numbers(tags)

    def count(snapshot: StoreSnapshot) -> tuple[StoreSnapshot, Any, Any]:
        by_shard, by_tag = np.zeros((len(snapshot.names), 4), np.int64), np.zeros((len(numbers) + 1, 4), np.int64)
        for rows in snapshot.rows():
            dead, length = ~live.holds(rows["key"]), rows["length"].astype(np.int64)
            counts = np.stack([np.ones_like(length), length, dead, dead * length], axis=1)
            np.add.at(by_shard, rows["shard"], counts)
            tag = _tags_of(rows["key"])
            at = numbers.searchsorted(tag)
            np.add.at(by_tag, np.where(np.append(numbers, 0)[at] == tag, at, len(numbers)), counts)
        return snapshot, by_shard, by_tag

    snapshot, by_shard, by_tag = store.ask(count)
    shards = []
    for name, size_bytes, counts in zip(snapshot.names, snapshot.sizes.tolist(), by_shard.tolist(), strict=True):
        if counts[2]:
            shards.append(_marked(store, name, live, before, size_bytes, *counts))
    damaged = {name: why for name, why in snapshot.unreadable.items() if SHARD_NAME.fullmatch(name)}
    for name in sorted(damaged) if live.nothing else ():
        plan = _marked(store, name, live, before, 0, 0, 0, 0, 0)
        if plan.fate is not Fate.FOREIGN:
            plan.size_bytes = store.disk.size_of(plan.path)
            shards.append(plan)
            del damaged[name]
    of_tag = dict(zip(names, by_tag.tolist(), strict=False))
    return Marked(
        kind=store.kind,
        records=int(by_shard[:, 0].sum()),
        total_bytes=int(by_shard[:, 1].sum()),
        shards=tuple(shards),
        tags={tag: (dead, dead_bytes) for tag, (_, _, dead, dead_bytes) in of_tag.items()},
        left={tag: records - dead for tag, (records, _, dead, _) in of_tag.items()},
        damaged=tuple(sorted(damaged.items())),
    )


def _marked(
    store: Store, name: str, live: Live, before: float, size_bytes: int, records: int, bytes_: int, dead: int, gone: int
) -> ShardPlan:
    """Decide the fate of a shard with dead records."""
    path = store.layout.shard(name)
    try:
        if not (SHARD_NAME.fullmatch(name) and store.disk.is_plain_file(path)):
            fate = Fate.FOREIGN
        elif youngest(store.disk, path) > before:
            fate = Fate.YOUNG
        else:
            rest = Fate.REWRITTEN if gone >= WORTHWHILE * bytes_ else Fate.SPARSE
            fate = Fate.GOES if dead == records else rest
    except OSError:  # it went away meanwhile
        fate = Fate.FOREIGN
    plan = ShardPlan(store, name, fate, keep=live.holds, unknown=live.nothing, size_bytes=size_bytes)
    plan.dead, plan.dead_bytes, plan.kept, plan.kept_bytes = dead, gone, records - dead, bytes_ - gone
    return plan


def youngest(disk: Disk, path: Path, *, changed: bool = False) -> float:
    """Return when a file was written: the latest of its name's time and its mtime, as either clock may be wrong.

    With `changed` the ctime counts, too: when a file was renamed, such as into the quarantine.
    """
    named = written_at(path.name)
    modified, changed_at = disk.times_of(path)
    return max(modified, changed_at if changed else 0.0, named.timestamp() if named else 0.0)


def _tags_of(keys: KeyColumn) -> Integers:
    """Return how keys begin, as numbers."""
    return np.ascontiguousarray(keys).view(">u4")[:: keys.itemsize // 4]


def _tag_numbers(tags: Iterable[bytes]) -> Integers:
    return np.array(sorted({int.from_bytes(tag, "big") for tag in tags}), np.uint32)
