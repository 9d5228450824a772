"""Copies records to new shards, byte for byte and verified; and compacts: makes few shards of many small ones."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.errors import CacheDamaged
from pipeline.keys import KEY_BYTES
from pipeline.store.format.disk import remove
from pipeline.store.format.record import BadRecord, laid_out
from pipeline.store.format.shard import header_fault, read_record, read_table, row_keys
from pipeline.store.shard_index import indexed
from pipeline.store.snapshot import GONE, shard_names
from pipeline.store.writer import DEFAULT_SHARD_BYTES, StoreWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from pipeline.store.format.disk import Disk
    from pipeline.store.format.shard import ShardTable
    from pipeline.store.shard_index import Rows
    from pipeline.store.store import Store

# Room for what safetensors must say of each of thousands of small records; less than 1% of a shard that is full.
CARRIED_HEADER_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class CarriedRows:
    """A shard, and its rows (of TABLE_ROW) whose records are to be copied."""

    shard: str
    rows: Rows


@dataclass(frozen=True, slots=True)
class Carried:
    """A shard whose records are safe in new shards, except for the refused ones."""

    shard: str
    records: int
    size_bytes: int
    refused: tuple[tuple[bytes, str], ...]  # key, and why the record could not be copied


def carried(
    store: Store,
    sources: Iterable[CarriedRows],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    once: Collection[bytes] = (),
) -> Iterator[Carried]:
    """Copy records to new shards in the order given, one in memory at a time; yield each source once it may be removed.

    `sources` is advanced only when the last one has been read. Of the keys in `once` only the first intact copy is
    copied. The new shards are known to `store` at once; `retire` removes the old ones:

        for source in carried(store, (CarriedRows(name, read_table(store.disk, path).rows[mask]) for …)):
            if not source.refused: going.append(source.shard)
        retire([RetiringShards(store, going, lambda shard: remove(store.disk, store.layout.shard(shard)))], settle_s)
    """
    waiting: deque[tuple[int, Carried]] = deque()  # what was read, and how many records must be safe before it may go
    put = safe = 0
    held: set[bytes] = set()  # of `once`
    with store.writer(shard_bytes=shard_bytes, header_bytes=CARRIED_HEADER_BYTES) as writer:
        for source in sources:
            result, added = _carry(store, writer, source, once, held)
            put += added
            safe += len(writer.safe())
            waiting.append((put, result))
            while waiting and waiting[0][0] <= safe:
                yield waiting.popleft()[1]
        writer.flush()
    yield from (source for _, source in waiting)


class RetiringShards(NamedTuple):
    """Shards of one kind that are to be removed, and how."""

    store: Store
    shards: Sequence[str]
    remove: Callable[[str], None]  # called with the name of each


def retire(kinds: Iterable[RetiringShards], settle_s: float, waits: Callable[[], object] = lambda: None) -> None:
    """Remove shards for good, after no index names them any more and other hosts could see that.

    The indexes are written without them; other hosts have `settle_s` to see it, once for all kinds; then each shard is
    removed. Until then a look-up finds it by its own table. `waits` is called before the wait.
    """
    going = [retiring for retiring in kinds if retiring.shards]
    for retiring in going:
        retiring.store.write_index(without=retiring.shards)
    if going:
        if settle_s:
            waits()
        going[0].store.disk.wait(settle_s)
    for store, shards, remove_shard in going:
        for shard in shards:
            remove_shard(shard)
        store.forget(shards)
        if not set(shards).isdisjoint(indexed(store.disk, store.layout)):  # another process wrote it meanwhile
            store.write_index()


def _carry(
    store: Store, writer: StoreWriter, source: CarriedRows, once: Collection[bytes], held: set[bytes]
) -> tuple[Carried, int]:
    """Put the records of one shard into the writer; return the outcome, and how many were put."""
    records = size_bytes = put = 0
    refused: list[tuple[bytes, str]] = []
    keys = row_keys(source.rows)
    try:
        fd = store.disk.open_read(store.layout.shard(source.shard))
    except OSError as error:
        why = "its shard was removed" if error.errno in GONE else error.strerror or str(error)
        return Carried(source.shard, 0, 0, tuple((key, why) for key in keys)), 0
    try:
        for key, place in zip(keys, source.rows[["offset", "length", "digest"]].tolist(), strict=True):
            if key in held:
                continue
            try:
                put += writer.take(laid_out(*read_record(store.disk, fd, key, *place)))
            except BadRecord as error:
                refused.append((key, str(error)))
            except OSError as error:
                refused.append((key, error.strerror or str(error)))
            else:
                records, size_bytes = records + 1, size_bytes + place[1]
                if key in once:
                    held.add(key)
    finally:
        store.disk.close(fd)
    return Carried(source.shard, records, size_bytes, tuple(refused)), put


ENOUGH_RECORDS = 200  # a shard of so many is not small, whatever its size
BATCH_BYTES = 16 << 30  # of old shards go at once: for so long they take twice the room
SETTLE_S = 5.0  # for other hosts to see the new index before old shards go


@dataclass(frozen=True, slots=True)
class Small:
    """A shard small enough to be compacted."""

    shard: str
    records: int
    size_bytes: int


@dataclass(slots=True)
class Compacted:
    """What there is to compact in a kind, and the outcome."""

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
    """Return which shards of a kind to compact, from their own tables.

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
        records=sum(shard.records for shard in small),
        size_bytes=sum(shard.size_bytes for shard in small),
        small=tuple(small),
        twice=_twice(np.concatenate(pairs)),
        after=len(names),
    )


def compact_shards(
    kinds: Sequence[tuple[Store, Compacted]],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    settle_s: float = SETTLE_S,
    waits: Callable[[], object] = lambda: None,
) -> None:
    """Compact as planned by `plan_compaction`; the outcome is noted in the plans.

    Other hosts have `settle_s` to see the new indexes, once for all kinds, or for each batch; `waits` is called before.
    """
    going: list[tuple[Store, Compacted, list[str]]] = []
    size_bytes = 0
    for store, todo in kinds:
        small = {shard.shard: shard for shard in todo.small}
        going.append((store, todo, []))
        for source in carried(store, _sources(store, todo), shard_bytes=shard_bytes, once=todo.twice):
            if source.refused:
                _left(store, todo, source.shard)
                continue
            going[-1][2].append(source.shard)
            size_bytes += small[source.shard].size_bytes
            if size_bytes >= BATCH_BYTES:
                _retire(going, settle_s, waits)
                going, size_bytes = [(store, todo, [])], 0
    _retire(going, settle_s, waits)
    for store, todo in kinds:
        todo.after = len(shard_names(store.disk, store.layout))


def _sources(store: Store, todo: Compacted) -> Iterator[CarriedRows]:
    """Yield the small shards, oldest first: what was written together stays together."""
    for shard in todo.small:
        path = store.layout.shard(shard.shard)
        try:
            table = read_table(store.disk, path)
            fault = header_fault(store.disk, path, table)
        except (CacheDamaged, OSError) as error:
            fault = str(error)
        if fault:
            _left(store, todo, shard.shard)
        else:
            yield CarriedRows(shard.shard, table.rows)


def _left(store: Store, todo: Compacted, shard: str) -> None:
    """Note that a shard is left alone: it is damaged, unless another process removed it."""
    there = store.disk.exists(store.layout.shard(shard))
    (todo.damaged if there else todo.taken).append(shard)


def _retire(kinds: Sequence[tuple[Store, Compacted, list[str]]], settle_s: float, waits: Callable[[], object]) -> None:
    """Remove shards once all hosts can find their records elsewhere, and count them."""
    retire([RetiringShards(store, shards, partial(_remove, store)) for store, _, shards in kinds], settle_s, waits)
    for _, todo, shards in kinds:
        todo.gone += len(shards)


def _remove(store: Store, shard: str) -> None:
    remove(store.disk, store.layout.shard(shard))


def _small(store: Store, name: str, shard_bytes: int) -> ShardTable | None:
    """Return the table of a shard if it is small; a damaged one is left to `repair`."""
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
    """Return the length of a header without its padding; it is read only if it is long."""
    if table.data_start < CARRIED_HEADER_BYTES // 2:
        return table.data_start
    return len(disk.read_start(path, table.data_start).rstrip())


def _twice(pairs: Rows) -> frozenset[bytes]:
    in_order = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    again = (in_order[1:] == in_order[:-1]).all(axis=1)
    text = in_order[1:][again].astype(">u8").tobytes()
    return frozenset(text[start : start + KEY_BYTES] for start in range(0, len(text), KEY_BYTES))
