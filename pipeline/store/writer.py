"""Writing records: shard after shard, each published whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from pipeline.store.format.record import EncodedRecord, encode_record
from pipeline.store.format.shard import DEFAULT_HEADER_BYTES, ShardTable, ShardWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from types import TracebackType

    from pipeline.store.format.cache_layout import KindLayout
    from pipeline.store.format.disk import Disk
    from pipeline.store.format.record import Array

DEFAULT_SHARD_BYTES = 256 * 1024 * 1024


class StoreWriter:
    """Takes records and publishes them in shards; a record is safe once `flush` has returned its key.

    Leaving the `with` block publishes too, also on an exception, so that finished work is kept. Any number of writers
    in any number of processes may write at once; each has files of its own.
    """

    def __init__(
        self,
        disk: Disk,
        layout: KindLayout,
        published: Callable[[ShardTable], None],
        *,
        shard_bytes: int = DEFAULT_SHARD_BYTES,
        header_bytes: int = DEFAULT_HEADER_BYTES,
    ) -> None:
        self._disk, self._layout, self._published = disk, layout, published
        self._shard_bytes, self._header_bytes = shard_bytes, header_bytes
        self._shard: ShardWriter | None = None
        self._acknowledged: list[bytes] = []

    def put(
        self,
        key: bytes,
        arrays: Mapping[str, Array],
        meta: Mapping[str, Any] | None = None,
        *,
        bfloat16: Collection[str] = (),
    ) -> None:
        """Add a record, not yet safe. A key that the open shard holds is the same record and not kept twice.

        `bfloat16` names the uint16 arrays whose bits are bfloat16, so that other readers see them as such.
        """
        self.take(encode_record(key, arrays, meta or {}, bfloat16))

    def take(self, record: EncodedRecord) -> bool:
        """Add an encoded record; return False if the open shard holds its key already."""
        shard = self._open_shard()
        if record.key in shard:
            return False
        if not shard.add(record, self._shard_bytes):
            self._publish(shard)
            self._open_shard().add(record, self._shard_bytes)
        return True

    def flush(self) -> list[bytes]:
        """Publish what was put, and return the keys that became safe since the last flush."""
        if self._shard and self._shard.open and self._shard.keys:
            self._publish(self._shard)
        return self.safe()

    def safe(self) -> list[bytes]:
        """Return the keys that became safe since the last call, without publishing."""
        safe, self._acknowledged = self._acknowledged, []
        return safe

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()
        if self._shard:
            self._shard.discard()

    def _open_shard(self) -> ShardWriter:
        if self._shard is None or not self._shard.open:
            self._shard = ShardWriter(self._disk, self._layout.partials, self._header_bytes)
        return self._shard

    def _publish(self, shard: ShardWriter) -> None:
        table = shard.publish(self._layout.shards)
        self._acknowledged += shard.keys
        self._published(table)
