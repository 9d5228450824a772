"""Makes few shards of many small ones, so that a cache stays a few files however many jobs wrote it.

Records are verified and carried over byte for byte; the old shards go when the new ones are published and the index
names them. Who has located a record in one that went finds it again by looking once more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import CacheDamaged
from pipeline.keys import KEY_BYTES
from pipeline.store.format.disk import remove
from pipeline.store.format.shard import header_fault, read_table
from pipeline.store.maintenance.rewrite import CARRIED_HEADER_BYTES, CarriedRows, RetiringShards, all_retired, carried
from pipeline.store.snapshot import shard_names
from pipeline.store.writer import DEFAULT_SHARD_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pipeline.store.format.disk import Disk
    from pipeline.store.format.shard import ShardTable
    from pipeline.store.shard_index import Rows
    from pipeline.store.store import Store

ENOUGH_RECORDS = 200  # a shard of so many is not small, whatever its size
BATCH_BYTES = 16 << 30  # of old shards go at once: for so long they take twice the room
SETTLE_S = 5.0  # for other hosts to see the new index before old shards go


@dataclass(frozen=True, slots=True)
class Small:
    """A shard that is smaller than it need be."""

    shard: str
    records: int
    size_bytes: int


@dataclass(slots=True)
class Compacted:
    """What there is to compact in a kind, and what became of it."""

    kind: str
    shards: int = 0  # before
    records: int = 0  # in small shards
    size_bytes: int = 0
    small: tuple[Small, ...] = ()
    twice: frozenset[bytes] = frozenset()  # keys that are in several small shards
    gone: int = 0  # small shards that went
    after: int = 0  # shards
    damaged: list[str] = field(default_factory=list)  # small shards that were left alone
    taken: list[str] = field(default_factory=list)  # small shards that another process removed meanwhile


def plan_compaction(store: Store, *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> Compacted:
    """Return what there is to do, from the shards' own tables.

    A small shard fills less than half of a new one, by its records and by what its header says of them. So any two fit
    into one, and of the new ones only the last can be small again.
    """
    small: list[Small] = []
    pairs = [np.zeros((0, 2), np.uint64)]
    names = shard_names(store.disk, store.layout)
    for name in names:
        table = _small(store, name, shard_bytes)
        if table:
            small.append(Small(name, len(table.rows), table.size_bytes))
            pairs.append(np.stack([table.rows["hi"], table.rows["lo"]], axis=1))
    if len(small) == 1:
        small, pairs = [], pairs[:1]
    return Compacted(
        kind=store.kind,
        shards=len(names),
        records=sum(one.records for one in small),
        size_bytes=sum(one.size_bytes for one in small),
        small=tuple(small),
        twice=_twice(np.concatenate(pairs)),
        after=len(names),
    )


def compact_shards(
    store: Store,
    todo: Compacted,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    settle_s: float = SETTLE_S,
    done: Callable[[Small], None] = lambda _: None,
) -> Compacted:
    """Do what `plan` says of one kind; tell of each small shard when its records are safe in a new one."""
    compact_all([(store, todo)], shard_bytes=shard_bytes, settle_s=settle_s, done=done)
    return todo


def compact_all(
    kinds: Sequence[tuple[Store, Compacted]],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    settle_s: float = SETTLE_S,
    done: Callable[[Small], None] = lambda _: None,
    waits: Callable[[], object] = lambda: None,
) -> None:
    """Do what `plan` says of some kinds; tell of each small shard when its records are safe in a new one.

    Other hosts have `settle_s` to see the new indexes, once for all kinds, or for each batch; `waits` is called before.
    """
    going: list[tuple[Store, Compacted, list[str]]] = []
    size_bytes = 0
    for store, todo in kinds:
        small = {one.shard: one for one in todo.small}
        going.append((store, todo, []))
        for one in carried(store, _sources(store, todo), shard_bytes=shard_bytes, once=todo.twice):
            if one.refused:
                _left(store, todo, one.shard)
                continue
            done(small[one.shard])
            going[-1][2].append(one.shard)
            size_bytes += small[one.shard].size_bytes
            if size_bytes >= BATCH_BYTES:
                _retire(going, settle_s, waits)
                going, size_bytes = [(store, todo, [])], 0
    _retire(going, settle_s, waits)
    for store, todo in kinds:
        todo.after = len(shard_names(store.disk, store.layout))


def _sources(store: Store, todo: Compacted) -> Iterator[CarriedRows]:
    """Yield the small shards, oldest first: what was written together stays together."""
    for one in todo.small:
        path = store.layout.shard(one.shard)
        try:
            table = read_table(store.disk, path)
            fault = header_fault(store.disk, path, table)
        except (CacheDamaged, OSError) as error:
            fault = str(error)
        if fault:
            _left(store, todo, one.shard)
        else:
            yield CarriedRows(one.shard, table.rows)


def _left(store: Store, todo: Compacted, shard: str) -> None:
    """Write down that a shard is left alone: it is damaged, unless it went meanwhile."""
    there = store.disk.exists(store.layout.shard(shard))
    (todo.damaged if there else todo.taken).append(shard)


def _retire(kinds: Sequence[tuple[Store, Compacted, list[str]]], settle_s: float, waits: Callable[[], object]) -> None:
    """Remove shards once all hosts can know where their records are now."""
    all_retired([RetiringShards(store, shards, partial(_remove, store)) for store, _, shards in kinds], settle_s, waits)
    for _, todo, shards in kinds:
        todo.gone += len(shards)


def _remove(store: Store, shard: str) -> None:
    remove(store.disk, store.layout.shard(shard))


def _small(store: Store, name: str, shard_bytes: int) -> ShardTable | None:
    """Return what a shard holds, if it is small; what is wrong with one is a matter for `repair`."""
    path = store.layout.shard(name)
    try:
        table = read_table(store.disk, path)
        enough = len(table.rows) >= ENOUGH_RECORDS or table.table_start - table.data_start >= shard_bytes // 2
        if enough or not len(table.rows) or _header_bytes(store.disk, path, table) >= CARRIED_HEADER_BYTES // 2:
            return None
    except (CacheDamaged, OSError):
        return None
    return table


def _header_bytes(disk: Disk, path: Path, table: ShardTable) -> int:
    """Return how long a header is, without the room that it did not need; it is read only if there may be much."""
    if table.data_start < CARRIED_HEADER_BYTES // 2:
        return table.data_start
    fd = disk.open_read(path)
    try:
        return len(disk.read_at(fd, table.data_start, 0).rstrip())
    finally:
        disk.close(fd)


def _twice(pairs: Rows) -> frozenset[bytes]:
    """Return the keys that are there more than once."""
    in_order = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    again = (in_order[1:] == in_order[:-1]).all(axis=1)
    text = in_order[1:][again].astype(">u8").tobytes()
    return frozenset(text[start : start + KEY_BYTES] for start in range(0, len(text), KEY_BYTES))
