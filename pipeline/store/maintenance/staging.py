"""A copy, on a node's own disk, of the records that a job will read many times.

It is an ordinary cache, in a folder that is named by its contents, so that the next job goes on with what a killed one
has left. It is looked up ahead of the shared cache: a record that it lacks, or has damaged, is read from there.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import STAGED
from pipeline.store.format.disk import publish_file
from pipeline.store.snapshot import IndexState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from pipeline.store.format.disk import Disk
    from pipeline.store.format.record import Record
    from pipeline.store.store import Store

    Keys = npt.NDArray[np.void]  # of 16 bytes each

BATCH = 32_768  # keys, of which all places are in memory
KEPT_FREE = 0.02  # of what is copied, for what shards have besides records
_MARKER_BYTES = 1 << 16


class Unfit(Exception):
    """Records cannot be staged in this folder; the message says why."""


def open_scratch(place: Path, name: str, disk: Disk) -> CacheFolder:
    """Open the cache of that name on a node's own disk; raise Unfit if it is in memory, or not private."""
    folder = place / f"pipeline-{name}"
    try:
        disk.make_private_folder(folder)
        if disk.in_memory(folder):
            raise Unfit(f"{place} is in memory and would count toward the job's memory")
        if not disk.is_private(folder):  # what others could write there would be read as ours
            raise Unfit(f"{folder} is accessible to other users")
    except OSError as error:
        raise Unfit(f"{folder}: {error.strerror or error}") from error
    return CacheFolder(folder, disk)


class CacheStaging:
    """Copies records to a node's own disk; stops when `goes_on`, called after each, says there is no time left."""

    def __init__(
        self, source: CacheFolder, scratch: CacheFolder, *, shard_bytes: int, goes_on: Callable[[], bool]
    ) -> None:
        self.source, self.scratch = source, scratch
        self.bytes = 0  # copied
        self.records: dict[str, int] = {}  # that are there, by kind
        self.is_whole = True  # whether all that was asked for is
        self._shard_bytes, self._goes_on = shard_bytes, goes_on

    def is_done(self) -> bool:
        """Say whether an earlier job has copied everything, and all of it is still there."""
        try:
            marker = json.loads(self.scratch.disk.read_start(self.scratch.root / STAGED, _MARKER_BYTES))
        except (OSError, ValueError, RecursionError):
            return False
        return bool(marker) and marker == self._stat()

    def take(self, kind: str, keys: Keys, header_bytes: int) -> Iterator[Record]:
        """Copy records, and yield each that can be read; raise Unfit at the start if they do not fit the disk."""
        own, both = self.scratch.own(kind), self.source.behind(self.scratch).kind(kind)
        before, self.is_whole = self.is_whole, False
        self._refuse_no_room(sum(size for batch in _batches(keys) for size in _absent(own, both, batch).values()))
        self.records[kind] = 0
        with own.writer(shard_bytes=self._shard_bytes, header_bytes=header_bytes) as writer:
            for batch in _batches(keys):
                absent = _absent(own, both, batch)
                for record in _readable(both, _in_file_order(both, batch)):
                    if not self._goes_on():
                        return
                    if record.key in absent:
                        writer.put(record.key, record.arrays, record.meta, bfloat16=record.bfloat16)
                        self.bytes += absent[record.key]
                    self.records[kind] += 1
                    yield record
        self.is_whole = before and self.records[kind] == len(keys)

    def finish(self) -> None:
        """Bring the indexes up to date; if everything was copied, write the marker that says so."""
        for kind in self.scratch.kinds():
            if (own := self.scratch.own(kind)).stat().index is not IndexState.CURRENT:
                own.write_index()
        if self.is_whole:
            publish_file(self.scratch.disk, self.scratch.root / STAGED, json.dumps(self._stat()).encode())

    def _stat(self) -> dict[str, Any]:
        """Return what is there, by kind: records and bytes."""
        stats = {kind: self.scratch.own(kind).stat() for kind in self.scratch.kinds()}
        return {kind: [stat.records, stat.bytes] for kind, stat in stats.items()}

    def _refuse_no_room(self, needed_bytes: int) -> None:
        free_bytes = self.scratch.disk.free_bytes(self.scratch.root)
        if needed_bytes * (1 + KEPT_FREE) > free_bytes:
            free = f"where {free_bytes / 1e6:,.1f} are free"
            raise Unfit(f"{needed_bytes / 1e6:,.1f} MB do not fit in {self.scratch.root}, {free}")


def _batches(keys: Keys) -> Iterator[list[bytes]]:
    for start in range(0, len(keys), BATCH):
        yield keys[start : start + BATCH].tolist()


def _absent(own: Store, both: Store, keys: Sequence[bytes]) -> dict[bytes, int]:
    """Return the sizes of the records that are still to be copied, by key."""
    absent = own.missing(keys)
    return {key: copies[0].length for key, copies in zip(absent, both.locate(absent), strict=True) if copies}


def _in_file_order(store: Store, keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys of records in the order in which they lie in files."""
    places = {key: copies[0] for key, copies in zip(keys, store.locate(keys), strict=True) if copies}
    return sorted(places, key=lambda key: (places[key].layer, places[key].shard, places[key].offset))


def _readable(store: Store, keys: Sequence[bytes]) -> Iterator[Record]:
    """Yield the intact records; the others raise their error later, when the job reads them."""
    at = 0
    while at < len(keys):
        try:
            for record in store.read(keys[at:]):
                at += 1
                yield record
        except (CacheDamaged, RecordMissing):
            at += 1
