"""What the index of a kind says of its shards, to be compared with what they say themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipeline.store.format.shard import TABLE_ROW
from pipeline.store.shard_index import ROW, Index, IndexDamaged

if TYPE_CHECKING:
    from collections.abc import Collection

    import numpy.typing as npt

    from pipeline.store.format.cache_layout import KindLayout
    from pipeline.store.format.disk import Disk
    from pipeline.store.format.shard import ShardTable
    from pipeline.store.shard_index import Rows

_FIELDS = len(TABLE_ROW.names or ()) + 1  # a digest counts as two numbers
_PRIMES = np.array([0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
                    0xD6E8FEB86659FD93], np.uint64)  # fmt: skip


@dataclass(slots=True)
class _Indexed:
    """What the index says of one shard."""

    size_bytes: int
    records: int = 0
    sum: int = 0  # of a number for each row, whatever their order


@dataclass(slots=True)
class IndexView:
    """The index, as far as it can be read; a few numbers a shard, however many records."""

    fault: str = ""
    shards: dict[str, _Indexed] = field(default_factory=dict)
    bytes: int = 0

    @classmethod
    def read(cls, disk: Disk, layout: KindLayout) -> IndexView:
        """Read all of it."""
        view = cls()
        try:
            view.bytes = disk.size_of(layout.index)
            index = Index(disk, layout.index)
            view.shards = {name: _Indexed(int(size)) for name, size in zip(index.names, index.sizes, strict=True)}
            known = list(view.shards.values())
            for rows in index.pieces():
                counts, sums = _sums(rows, len(known))
                for one, count, total in zip(known, counts.tolist(), sums.tolist(), strict=True):
                    one.records += count
                    one.sum = (one.sum + total) % (1 << 64)
        except FileNotFoundError:
            pass
        except IndexDamaged as error:
            return cls(str(error), bytes=view.bytes)
        except OSError as error:
            return cls(error.strerror or str(error), bytes=view.bytes)
        return view

    def contradicts(self, table: ShardTable) -> str:
        """Say where a shard's own table says something else; a shard that the index does not know yet is no fault."""
        indexed = self.shards.get(table.name)
        if indexed is None:
            return ""
        if indexed.size_bytes != table.size_bytes:
            return f"it is said to have {indexed.size_bytes} bytes, and has {table.size_bytes}"
        if indexed.records != len(table.rows):
            return f"it is said to hold {indexed.records} records, and holds {len(table.rows)}"
        if indexed.sum != int(_numbers(table.rows).sum(dtype=np.uint64)):
            return "the index says other places or digests than its table"
        return ""


def index_rows(disk: Disk, layout: KindLayout, shards: Collection[str]) -> dict[str, Rows]:
    """Return what the index says that shards hold, in file order: second tables, of those that it names."""
    try:
        index = Index(disk, layout.index) if shards else None
        numbers = {number: name for number, name in enumerate(index.names if index else ()) if name in shards}
        asked = np.array(list(numbers), "<u4")
        pieces = (piece[np.isin(piece["shard"], asked)] for piece in (index.pieces() if index and numbers else ()))
        rows = np.concatenate([np.zeros(0, ROW), *pieces])
    except (IndexDamaged, OSError):
        return {}
    rows = rows[np.lexsort((rows["offset"], rows["shard"]))]
    edges = rows["shard"].searchsorted(asked, "left"), rows["shard"].searchsorted(asked, "right")
    tables = rows[list(TABLE_ROW.names or ())].astype(TABLE_ROW)
    return {name: tables[start:end] for name, start, end in zip(numbers.values(), *edges, strict=True)}


def _sums(rows: Rows, shards: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    """Return how many rows are of each shard, and the sums of their numbers."""
    numbers = _numbers(rows)
    sums = np.zeros(shards, np.uint64)
    if len(rows) and int(rows["shard"].max()) >= shards:
        raise IndexDamaged("the index names a shard that it does not have")
    np.add.at(sums, rows["shard"], numbers)
    return np.bincount(rows["shard"], minlength=shards), sums


def _numbers(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    """Return a number for each row that any other row is unlikely to have."""
    columns = np.ascontiguousarray(rows[list(TABLE_ROW.names or ())].astype(TABLE_ROW)).view(np.uint64)
    mixed = columns.reshape(-1, _FIELDS) * _PRIMES
    mixed ^= mixed >> np.uint64(29)
    mixed *= _PRIMES[::-1]
    numbers: npt.NDArray[np.uint64] = mixed.sum(axis=1, dtype=np.uint64)
    return numbers
