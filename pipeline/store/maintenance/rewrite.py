"""TODO."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from pipeline.store.format.record import BadRecord, EncodedRecord, laid_out
from pipeline.store.format.shard import row_keys
from pipeline.store.shard_index import indexed
from pipeline.store.snapshot import GONE
from pipeline.store.writer import DEFAULT_SHARD_BYTES, StoreWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from pipeline.store.format.disk import Disk
    from pipeline.store.shard_index import Rows
    from pipeline.store.store import Store

# Room for what safetensors must say of each of thousands of small records; less than 1% of a shard that is full.
CARRIED_HEADER_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class CarriedRows:
    """A shard, and those of its rows (of TABLE_ROW) whose records are to be carried over."""

    shard: str
    rows: Rows


@dataclass(frozen=True, slots=True)
class Carried:
    """A source whose records are safe in new shards, except for those that are refused."""

    shard: str
    records: int
    size_bytes: int
    refused: tuple[tuple[bytes, str], ...]  # key, and why its bytes cannot be believed


def carried(
    store: Store,
    sources: Iterable[CarriedRows],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    once: Collection[bytes] = (),
) -> Iterator[Carried]:
    """Copy records to new shards in the order given, one in memory at a time; yield each source once it may go.

    `sources` is asked for the next one only when the last has been read. Of the keys in `once` only the first whole
    copy is carried over. The new shards are known to `store` at once; `retired` lets the old ones go:

        for one in carried(store, (Source(name, read_table(store.disk, path).rows[mask]) for …)):
            if not one.refused: going.append(one.shard)
        retired(store, going, lambda shard: remove(store.disk, store.layout.shard(shard)), settle_s)
    """
    waiting: deque[tuple[int, Carried]] = deque()  # what was read, and how many records must be safe before it may go
    put = safe = 0
    held: set[bytes] = set()  # of `once`
    with store.writer(shard_bytes=shard_bytes, header_bytes=CARRIED_HEADER_BYTES) as writer:
        for source in sources:
            one, added = _carry(store, writer, source, once, held)
            put += added
            safe += len(writer.safe())
            waiting.append((put, one))
            while waiting and waiting[0][0] <= safe:
                yield waiting.popleft()[1]
        writer.flush()
    for _, one in waiting:
        yield one


class RetiringShards(NamedTuple):
    """Shards of one kind that are to go, and how."""

    store: Store
    shards: Sequence[str]
    remove: Callable[[str], None]  # called with the name of each


def retired(store: Store, shards: Sequence[str], remove: Callable[[str], None], settle_s: float) -> None:
    """Let shards of one kind go for good."""
    all_retired([RetiringShards(store, shards, remove)], settle_s)


def all_retired(kinds: Iterable[RetiringShards], settle_s: float, waits: Callable[[], object] = lambda: None) -> None:
    """Let shards go for good: no index names one that went, and no host looks for one whose records are elsewhere.

    The indexes name the new shards and no more the old ones; other hosts have `settle_s` to see it, once for all kinds;
    then each is removed. Until then a look-up finds the old ones by their own tables. `waits` is called first.
    """
    going = [one for one in kinds if one.shards]
    for one in going:
        one.store.write_index(without=one.shards)
    if going and settle_s:
        waits()
    for one in going[:1]:
        one.store.disk.wait(settle_s)
    for store, shards, remove in going:
        for shard in shards:
            remove(shard)
        store.forget(shards)
        if not set(shards).isdisjoint(indexed(store.disk, store.layout)):  # another process wrote it meanwhile
            store.write_index()


def verified(disk: Disk, fd: int, key: bytes, offset: int, length: int, digest: bytes) -> EncodedRecord:
    """Read a record of an open shard as it was written, or refuse it."""
    try:
        blob = disk.read_at(fd, length, offset)
    except OSError as error:
        raise BadRecord(error.strerror or str(error)) from error
    if xxhash.xxh3_128_digest(blob) != digest:
        raise BadRecord("the bytes are not those that were written")
    record = laid_out(blob)
    if record.key != key:
        raise BadRecord("another record is in its place")
    return record


def _carry(
    store: Store, writer: StoreWriter, source: CarriedRows, once: Collection[bytes], held: set[bytes]
) -> tuple[Carried, int]:
    """Put the records of one shard; return what became of them, and how many were put."""
    records = size_bytes = put = 0
    refused: list[tuple[bytes, str]] = []
    keys = row_keys(source.rows)
    try:
        fd = store.disk.open_read(store.layout.shard(source.shard))
    except OSError as error:
        why = "its shard is gone" if error.errno in GONE else error.strerror or str(error)
        return Carried(source.shard, 0, 0, tuple((key, why) for key in keys)), 0
    try:
        for key, place in zip(keys, source.rows[["offset", "length", "digest"]].tolist(), strict=True):
            if key in held:
                continue
            try:
                put += writer.take(verified(store.disk, fd, key, *place))
            except BadRecord as error:
                refused.append((key, str(error)))
            else:
                records, size_bytes = records + 1, size_bytes + place[1]
                if key in once:
                    held.add(key)
    finally:
        store.disk.close(fd)
    return Carried(source.shard, records, size_bytes, tuple(refused)), put
