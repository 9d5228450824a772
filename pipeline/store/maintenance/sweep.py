"""Mark and sweep: find the records of a kind that nobody needs, and free their space.

The caller says what is needed. `mark` goes by the index, in pieces, and reads no shard; `sweep` trusts only the table
of a shard itself. A shard with only dead records is removed; one with too many of them is rewritten without them, and
removed once the new one is published and indexed. So a crash at any moment costs no record that is needed.

A shard that is younger than a grace period stays as it is: a run that is still writing may need it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import CacheDamaged, CacheFull
from pipeline.store.format.cache_layout import SHARD_NAME, written_at
from pipeline.store.format.disk import remove
from pipeline.store.format.shard import read_table
from pipeline.store.maintenance.rewrite import CarriedRows, RetiringShards, carried, retire
from pipeline.store.snapshot import GONE, NO_KEYS, are_among

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from pipeline.store.format.disk import Disk
    from pipeline.store.shard_index import Integers, Rows
    from pipeline.store.snapshot import StoreSnapshot
    from pipeline.store.store import Store

WORTHWHILE = 1 / 3  # of a shard that must be dead before the rest is written anew
BATCH_BYTES = 8 << 30  # that are written anew before the old ones go: so much room is needed for a while
_TAG_BITS = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Live:
    """Which records of a kind are needed: all, or those whose keys begin with a tag or are listed."""

    everything: bool = False
    tags: frozenset[bytes] = frozenset()
    pairs: Integers = field(default_factory=lambda: NO_KEYS)  # sorted

    @property
    def nothing(self) -> bool:
        """Whether no record is needed, so that it does not matter what a damaged shard holds."""
        return not (self.everything or self.tags or len(self.pairs))

    def holds(self, hi: Integers, lo: Integers) -> npt.NDArray[np.bool_]:
        """Return a mask of the keys, given as two columns of numbers, that are needed."""
        if self.everything:
            return np.ones(len(hi), bool)
        tags = np.array([int.from_bytes(tag, "big") for tag in self.tags], np.uint64)
        stays: npt.NDArray[np.bool_] = np.isin(hi >> _TAG_BITS, tags)
        undecided = np.flatnonzero(~stays)
        stays[undecided] = are_among(hi[undecided], lo[undecided], self.pairs[:, 0], self.pairs[:, 1])
        return stays


class Fate(StrEnum):
    """What happens to a shard with dead records."""

    GOES = "goes"
    REWRITTEN = "rewritten"
    YOUNG = "young"  # not before its grace period is over
    SPARSE = "sparse"  # too few of them are dead to be worth it
    FOREIGN = "foreign"  # it is not named or made as we do


@dataclass(frozen=True, slots=True)
class DeadShard:
    """A shard with dead records, in numbers."""

    shard: str
    fate: Fate
    size_bytes: int
    records: int
    bytes: int  # of records
    dead: int
    dead_bytes: int

    @property
    def freed_bytes(self) -> int:
        return {Fate.GOES: self.size_bytes, Fate.REWRITTEN: self.dead_bytes}.get(self.fate, 0)


@dataclass(frozen=True, slots=True)
class Marked:
    """The dead records of a kind, in numbers."""

    kind: str
    records: int
    total_bytes: int  # of records
    shards: tuple[DeadShard, ...]  # those with dead records
    tags: Mapping[bytes, tuple[int, int]]  # of those asked for → dead records, their bytes
    left: Mapping[bytes, int]  # of those asked for → records that are not dead
    damaged: tuple[tuple[str, str], ...]  # shards that cannot be read, and why: `repair` sees to them

    def of(self, *fates: Fate) -> list[DeadShard]:
        return [shard for shard in self.shards if shard.fate in fates]

    def dead(self, *fates: Fate) -> tuple[int, int]:
        """Return how many records are dead in shards of these fates, and their bytes."""
        shards = self.of(*fates)
        return sum(shard.dead for shard in shards), sum(shard.dead_bytes for shard in shards)

    @property
    def freed_bytes(self) -> int:
        return sum(shard.freed_bytes for shard in self.shards)


@dataclass(slots=True)
class _Counts:
    """Records, bytes, dead records and dead bytes of each shard and of each tag."""

    shards: int
    tags: Integers  # as numbers, sorted
    by_shard: list[npt.NDArray[np.float64]] = field(init=False)  # records, bytes, dead, dead bytes
    by_tag: list[npt.NDArray[np.float64]] = field(init=False)

    def __post_init__(self) -> None:
        self.by_shard = [np.zeros(self.shards) for _ in range(4)]
        self.by_tag = [np.zeros(len(self.tags)) for _ in range(4)]

    def add(self, rows: Rows, live: Live) -> None:
        """Count a piece of the rows."""
        hi, lo = (np.ascontiguousarray(rows[name]) for name in ("hi", "lo"))
        dead = ~live.holds(hi, lo)
        length = rows["length"].astype(np.float64)  # exact up to 2**53
        weights = (None, length, dead, dead * length)
        for total, weight in zip(self.by_shard, weights, strict=True):
            total += np.bincount(rows["shard"], weight, minlength=self.shards)
        if len(self.tags):
            tag = hi >> _TAG_BITS
            at = np.minimum(self.tags.searchsorted(tag), len(self.tags) - 1)
            ours = self.tags[at] == tag
            for total, weight in zip(self.by_tag, weights, strict=True):
                total += np.bincount(at[ours], None if weight is None else weight[ours], minlength=len(self.tags))


def mark(store: Store, live: Live, before: float, tags: Sequence[bytes] = ()) -> Marked:
    """Return the dead records of a kind and the fate of each shard, from the index and the tables of newer shards.

    Shards that were written after the time `before` are young. Dead records are counted apart for each of `tags`.
    """
    numbers = np.array(sorted(int.from_bytes(tag, "big") for tag in {*tags}), np.uint64)

    def count(snapshot: StoreSnapshot) -> tuple[StoreSnapshot, _Counts]:
        counts = _Counts(len(snapshot.names), numbers)
        for rows in snapshot.pieces():
            counts.add(rows, live)
        return snapshot, counts

    snapshot, counts = store.ask(count)
    columns = (column.astype(np.int64).tolist() for column in counts.by_shard)
    shards = []
    for name, size, *numbers_of in zip(snapshot.names, snapshot.sizes.tolist(), *columns, strict=True):
        if numbers_of[2]:
            fate = _fate(store.disk, store.layout.shard(name), before, *numbers_of)
            shards.append(DeadShard(name, fate, size, *numbers_of))
    damaged = {name: why for name, why in snapshot.unreadable.items() if SHARD_NAME.fullmatch(name)}
    for name in sorted(damaged) if live.nothing else ():
        fate = _fate(store.disk, store.layout.shard(name), before, 0, 0, 0, 0)
        if fate is not Fate.FOREIGN:
            shards.append(DeadShard(name, fate, store.disk.size_of(store.layout.shard(name)), 0, 0, 0, 0))
            del damaged[name]
    names = [int(number).to_bytes(4, "big") for number in numbers]
    records, _, dead, dead_bytes = (column.astype(np.int64).tolist() for column in counts.by_tag)
    return Marked(
        kind=store.kind,
        records=int(counts.by_shard[0].sum()),
        total_bytes=int(counts.by_shard[1].sum()),
        shards=tuple(shards),
        tags=dict(zip(names, zip(dead, dead_bytes, strict=True), strict=True)),
        left={name: held - gone for name, held, gone in zip(names, records, dead, strict=True)},
        damaged=tuple(sorted(damaged.items())),
    )


def _fate(disk: Disk, path: Path, before: float, records: int, bytes_: int, dead: int, dead_bytes: int) -> Fate:
    """Return the fate of a shard with dead records."""
    try:
        if not (SHARD_NAME.fullmatch(path.name) and disk.is_plain_file(path)):
            return Fate.FOREIGN
        if youngest(disk, path) > before:
            return Fate.YOUNG
    except OSError:  # it went away meanwhile
        return Fate.FOREIGN
    if dead == records:
        return Fate.GOES
    return Fate.REWRITTEN if dead_bytes >= WORTHWHILE * bytes_ else Fate.SPARSE


def youngest(disk: Disk, path: Path, *, changed: bool = False) -> float:
    """Return when a file was written: the latest of its name's time and its mtime, as either clock may be wrong.

    With `changed` the ctime counts, too: when a file was renamed, such as into the quarantine.
    """
    named = written_at(path.name)
    modified, changed_at = disk.times_of(path)
    return max(modified, changed_at if changed else 0.0, named.timestamp() if named else 0.0)


@dataclass(frozen=True, slots=True)
class Swept:
    """A shard that was removed or rewritten, or that has to stay."""

    kind: str
    shard: str
    bytes: int  # that are given back
    stays: str = ""  # why


def sweep(
    store: Store,
    marked: Marked,
    live: Live,
    *,
    settle_s: float = 0.0,
    check: Callable[[], None] = lambda: None,
    waits: Callable[[], object] = lambda: None,
) -> Iterator[Swept]:
    """Free the space of dead records, and yield each shard's outcome; `check`, called before each removal, may raise.

    No index names a shard any more when it is removed; other hosts have `settle_s` to see that, and the new shards;
    `waits` is called before.
    """
    settle = partial(_retire, store, settle_s=settle_s, waits=waits)
    yield from _retired(store, _useless(store, marked.of(Fate.GOES), live), settle, check)
    for batch in _batches(marked.of(Fate.REWRITTEN)):
        yield from _retired(store, _rewritten(store, batch, live), settle, check)


def _retired(
    store: Store, outcomes: Sequence[Swept], retire_shards: Callable[..., None], check: Callable[[], None]
) -> Iterator[Swept]:
    """Remove shards; yield the outcomes, also of those removed before an error."""
    going = {shard.shard: shard for shard in outcomes if not shard.stays}
    gone: dict[str, Swept] = {}

    def remove_shard(shard: str) -> None:
        check()
        remove(store.disk, store.layout.shard(shard))
        gone[shard] = going[shard]

    yield from (shard for shard in outcomes if shard.stays)
    try:
        retire_shards(going, remove_shard)
    finally:
        yield from gone.values()


def _retire(
    store: Store,
    shards: Collection[str],
    remove_shard: Callable[[str], None],
    *,
    settle_s: float,
    waits: Callable[[], object],
) -> None:
    """Remove shards by `retire`; if the disk is too full for the new index, remove them first."""
    try:
        retire([RetiringShards(store, list(shards), remove_shard)], settle_s, waits)
    except CacheFull:
        store.disk.wait(settle_s)
        for shard in shards:
            remove_shard(shard)
        store.write_index()


def _useless(store: Store, shards: Sequence[DeadShard], live: Live) -> list[Swept]:
    """Check by their own tables that shards hold nothing needed; return which may go, and which have to stay."""
    outcomes = []
    for dead in shards:
        rows, why = (None, "") if live.nothing else _own_rows(store, dead.shard)
        why = why or why_kept(store.disk, store.layout.shard(dead.shard))
        if rows is not None and _holds(live, rows).any():
            why = "is needed again"
        outcomes.append(Swept(store.kind, dead.shard, 0 if why else dead.size_bytes, why))
    return outcomes


def _rewritten(store: Store, batch: Sequence[DeadShard], live: Live) -> list[Swept]:
    """Rewrite shards without their dead records; return which may go, and which have to stay."""
    stay: dict[str, str] = {}

    def sources() -> Iterator[CarriedRows]:
        for dead in batch:
            rows, why = _own_rows(store, dead.shard)
            why = why or why_kept(store.disk, store.layout.shard(dead.shard))
            if rows is None or why:
                stay[dead.shard] = why
            else:
                yield CarriedRows(dead.shard, rows[_holds(live, rows)])

    for source in carried(store, sources()):
        if source.refused:
            stay[source.shard] = f"{len(source.refused)} of its records are damaged"
    return [
        Swept(store.kind, dead.shard, 0 if dead.shard in stay else dead.dead_bytes, stay.get(dead.shard, ""))
        for dead in batch
    ]


def why_kept(disk: Disk, path: Path) -> str:
    """Say whose a file is that this user may not remove, or why that is not known; empty where it may."""
    try:
        keeper = disk.keeper(path)
    except FileNotFoundError:  # gone already
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return f"it is {keeper}'s: only its owner may remove it" if keeper else ""


def _own_rows(store: Store, shard: str) -> tuple[Rows | None, str]:
    """Return the rows of a shard's own table, or None and why it cannot be read."""
    try:
        return read_table(store.disk, store.layout.shard(shard)).rows, ""
    except CacheDamaged as error:
        return None, error.what
    except OSError as error:
        return None, "gone already" if error.errno in GONE else error.strerror or str(error)


def _holds(live: Live, rows: Rows) -> npt.NDArray[np.bool_]:
    return live.holds(np.ascontiguousarray(rows["hi"]), np.ascontiguousarray(rows["lo"]))


def _batches(shards: Sequence[DeadShard]) -> Iterator[list[DeadShard]]:
    """Yield shards in batches whose rewritten copies take at most BATCH_BYTES."""
    batch: list[DeadShard] = []
    for dead in shards:
        if batch and sum(other.bytes - other.dead_bytes for other in (*batch, dead)) > BATCH_BYTES:
            yield batch
            batch = []
        batch.append(dead)
    if batch:
        yield batch


def earlier_clock(disk: Disk, folder: Path) -> float:
    """Return the time, by the earlier of this host's clock and the file system's."""
    return min(time.time(), disk.time_in(folder))
