"""What is known of a kind's records at one moment: the index, and the tables of the shards that it does not name."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.command_line import quoted
from pipeline.errors import CacheDamaged, CacheUnusable
from pipeline.store.format.cache_layout import SHARD_SUFFIX, written_at
from pipeline.store.format.shard import TABLE_ROW, ShardTable, read_table
from pipeline.store.shard_index import (
    ROW,
    IndexDamaged,
    ShardIndex,
    in_pieces,
    joined_ranges,
    match,
    merged,
    sort_in_place,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from datetime import datetime

    import numpy.typing as npt

    from pipeline.store.format.cache_layout import KindLayout
    from pipeline.store.format.disk import Disk
    from pipeline.store.shard_index import Integers, Rows

GONE = {errno.ENOENT, errno.ESTALE}
WENT = "purged or deleted"
_UNCHECKED, _GOOD, _BAD, _GONE = 0, 1, 2, 3
_ONE_GOOD = np.ones(1, bool)


class IndexState(StrEnum):
    """How far the index can be used."""

    NONE = "none"
    DAMAGED = "damaged"
    BEHIND = "behind"  # shards were published since; they are read by their tables
    CURRENT = "current"


class StoreSnapshot:
    """Finds keys among the shards that existed when it was taken.

    A shard counts only while a file of its name and size exists, which is checked by a stat of each: attribute caches
    hide new files from a directory listing, and the index names files that were purged since.
    """

    def __init__(self, disk: Disk, layout: KindLayout, known: Mapping[str, ShardTable], *, believe_index: bool) -> None:
        self._disk, self._layout = disk, layout
        self.unreadable: dict[str, str] = {}
        self.index_state = IndexState.NONE if believe_index else IndexState.DAMAGED
        self._index = self._open_index() if believe_index else None
        names = self._index.names if self._index else []
        listed = set(shard_names(disk, layout))
        self.tables = self._read_tables((listed | known.keys()).difference(names), known)
        self._lay_out(names)
        self.outdated = False
        self._check(position for position, name in enumerate(self.names) if name not in listed)
        self.outdated = False  # whether a shard went away since: compacted, repaired or purged

    def find(self, keys: Integers) -> tuple[Integers, Rows]:
        """Return the positions of the keys that are there, once for each copy, and the rows that hold them."""
        matches = [self._index.find(keys)] if self._index else []
        if len(self._delta) or not matches:
            matches.append(match(self._delta, keys, self._delta_hi))
        asked, rows = matches[0] if len(matches) == 1 else map(np.concatenate, zip(*matches, strict=True))
        good = self._in_good_shards(rows)
        return asked[good], rows[good]

    def to_index(self, without: Collection[str] = ()) -> tuple[list[int], int, Iterator[Rows]]:
        """Return what a new index should hold: positions of its shards, number of rows, and the rows sorted by key.

        A shard that exists but is unreadable or of another length is included: it serves no record, but its index rows
        may be all that a repair can go by. The `shard` column counts among the returned positions.
        """
        self._check(range(len(self.names)))
        keep = (self._state != _GONE) & ~np.array([name in without for name in self.names], bool)
        kept: list[int] = np.flatnonzero(keep).tolist()
        if keep.all():
            return kept, sum(self.counts()), self._all_pieces()
        position = np.zeros(len(keep), np.uint32)
        position[kept] = np.arange(len(kept))
        count = sum(int(keep[rows["shard"]].sum()) for rows in self._all_pieces())
        return kept, count, (_renumbered(rows[keep[rows["shard"]]], position) for rows in self._all_pieces())

    def rows(self) -> Rows:
        """Return every row of every good shard, sorted by key."""
        all_good = len(self.good_shards()) == len(self.names)
        if all_good and self._index and not len(self._delta):
            return self._checked(self._index.rows())  # a million of them take their time in pieces
        return np.concatenate([np.zeros(0, ROW), *self.pieces_in_order()])

    def pieces(self) -> Iterator[Rows]:
        """Yield every row of every good shard, in pieces and unsorted."""
        for rows in chain(self._index.pieces() if self._index else (), [self._delta]):
            yield rows[self._in_good_shards(rows)]

    def pieces_in_order(self) -> Iterator[Rows]:
        """Yield what `rows` returns, in pieces."""
        for rows in self._all_pieces():
            yield rows[self._in_good_shards(rows)]

    def counts(self) -> tuple[int, int]:
        """Return how many rows the index has, and how many are only in tables."""
        return len(self._index) if self._index else 0, len(self._delta)

    def good_shards(self) -> list[int]:
        """Return the positions of the shards that are there."""
        self._check(range(len(self.names)))
        good: list[int] = np.flatnonzero(self._state == _GOOD).tolist()
        return good

    def _all_pieces(self) -> Iterator[Rows]:
        """Yield every known row, sorted by key, in pieces."""
        for rows in merged(self._index.pieces() if self._index else (), in_pieces(self._delta)):
            yield self._checked(rows)

    def _checked(self, rows: Rows) -> Rows:
        if int(rows["shard"].max(initial=0)) >= max(1, len(self.names)):
            raise IndexDamaged("the index refers to an unlisted shard")
        return rows

    def _open_index(self) -> ShardIndex | None:
        try:
            index = ShardIndex(self._disk, self._layout.index)
        except FileNotFoundError:
            return None
        except (IndexDamaged, OSError):
            self.index_state = IndexState.DAMAGED
            return None
        self.index_state = IndexState.CURRENT
        return index

    def _read_tables(self, names: Iterable[str], known: Mapping[str, ShardTable]) -> dict[str, ShardTable]:
        tables = {}
        for name in sorted(names):
            try:
                tables[name] = known[name] if name in known else read_table(self._disk, self._layout.shard(name))
            except CacheDamaged as error:
                self.unreadable[name] = error.what
            except OSError as error:
                self.unreadable[name] = error.strerror or str(error)
        return tables

    def _lay_out(self, indexed: list[str]) -> None:
        """Give numbers to the shards, those of the index first, and sort the rows that the index does not have."""
        if self._index and self.tables:
            self.index_state = IndexState.BEHIND
        self.names = [*indexed, *self.tables]
        sizes = np.array([table.size_bytes for table in self.tables.values()], np.uint64)
        self.sizes = np.concatenate([self._index.sizes, sizes]) if self._index else sizes
        self._state = np.full(len(self.names), _UNCHECKED, np.int8)
        self._delta = _delta_rows(self.tables.values(), len(indexed))
        self._delta_hi = np.ascontiguousarray(self._delta["hi"])  # or every look-up would copy it

    def _in_good_shards(self, rows: Rows) -> npt.NDArray[Any]:
        shards = rows["shard"]
        if len(shards) == 1 and shards[0] < len(self.names) and self._state[shards[0]] == _GOOD:
            return _ONE_GOOD  # a record is read in less than a millisecond, of which numpy would take its share
        if len(shards) and int(shards.max()) >= len(self.names):
            raise IndexDamaged("the index refers to an unlisted shard")
        if np.any(self._state[shards] == _UNCHECKED):
            self._check(np.unique(shards).tolist())
        good: npt.NDArray[Any] = self._state[shards] == _GOOD
        return good

    def _check(self, positions: Iterable[int]) -> None:
        """Check that these shards exist and have their recorded size."""
        for position in positions:
            if self._state[position] == _UNCHECKED:
                fault = self._fault(self.names[position], int(self.sizes[position]))
                self._state[position] = _GONE if fault == WENT else _BAD if fault else _GOOD
                if fault:
                    self.unreadable[self.names[position]] = fault
                    self.outdated = self.outdated or fault == WENT

    def _fault(self, name: str, size: int) -> str:
        try:
            size_now = self._disk.size_of(self._layout.shard(name))
        except OSError as error:
            return WENT if error.errno in GONE else error.strerror or str(error)
        return "" if size_now == size else f"has {size_now} bytes, expected {size} were written"


def shard_names(disk: Disk, layout: KindLayout) -> list[str]:
    """Return the names of the published shards that the folder shows."""
    try:
        return sorted(name for name in disk.list_folder(layout.shards) if name.endswith(SHARD_SUFFIX))
    except OSError as error:
        what = f"the cache cannot be read: {error.strerror or error}"
        raise CacheUnusable(what, where=str(layout.shards), remedy=f"ls -ld {quoted(layout.shards)}") from error


def _renumbered(rows: Rows, position: Integers) -> Rows:
    """Replace the shard numbers of rows in place, and return the rows."""
    rows["shard"] = position[rows["shard"]]
    return rows


def _delta_rows(tables: Collection[ShardTable], first_shard: int) -> Rows:
    rows, end = np.zeros(sum(len(table.rows) for table in tables), ROW), 0
    for shard, table in enumerate(tables, first_shard):
        part = rows[end : end + len(table.rows)]
        for name in TABLE_ROW.names or ():
            part[name] = table.rows[name]
        part["shard"] = shard
        end += len(part)
    return sort_in_place(rows)


@dataclass(frozen=True, slots=True)
class StoreStat:
    """What a store holds."""

    kind: str
    records: int
    bytes: int
    shards: int
    unreadable: tuple[tuple[str, str], ...]  # shard name and reason
    index: IndexState
    oldest: datetime | None
    newest: datetime | None


def first_of_key(rows: Rows, *, at_start: bool) -> npt.NDArray[np.bool_]:
    """Mark each sorted row whose key differs from the row before; the first counts where `at_start` says so."""
    first = np.full(len(rows), at_start)
    hi, lo = (np.ascontiguousarray(rows[name]) for name in ("hi", "lo"))
    first[1:] = (hi[1:] != hi[:-1]) | (lo[1:] != lo[:-1])
    return first


NO_KEYS = np.zeros((0, 2), np.uint64)


def are_among(hi: Integers, lo: Integers, known_hi: Integers, known_lo: Integers) -> npt.NDArray[np.bool_]:
    """Return a mask of the keys that are among the sorted known ones; a key is two numbers, in two columns."""
    if not len(known_hi):
        return np.zeros(len(hi), bool)
    left = known_hi.searchsorted(hi, "left")
    at = np.minimum(left, len(known_hi) - 1)
    alike = known_hi[at] == hi
    among: npt.NDArray[np.bool_] = alike & (known_lo[at] == lo)
    ambiguous = np.flatnonzero(alike & ~among)  # a million keys of one recipe share their first number now and then
    counts = known_hi.searchsorted(hi[ambiguous], "right") - left[ambiguous]
    asked, known_rows = ambiguous.repeat(counts), joined_ranges(left[ambiguous], counts)
    among[asked[known_lo[known_rows] == lo[asked]]] = True
    return among


@dataclass(frozen=True, slots=True)
class StoreTally:
    """What a store holds, also by tag, and which wanted keys it lacks."""

    stat: StoreStat
    tagged: Mapping[bytes, tuple[int, int]]  # how a key begins → records, bytes
    absent: Integers  # of the keys that were asked for


def count_records(kind: str, snapshot: StoreSnapshot, tags: Sequence[bytes], wanted: Integers) -> StoreTally:
    """Count distinct records, in all and by tag (how a key begins), and find which `wanted` keys are missing."""
    bounds = {tag: [np.uint64(int.from_bytes(tag.ljust(8, fill), "big")) for fill in (b"\0", b"\xff")] for tag in tags}
    tagged = dict.fromkeys(tags, (0, 0))
    is_there = np.zeros(len(wanted), bool)
    wanted_hi, wanted_lo = (np.ascontiguousarray(wanted[:, half]) for half in (0, 1))
    records, before = 0, None  # the last key of the piece before
    for rows in filter(len, snapshot.pieces_in_order()):
        hi, lo, length = (np.ascontiguousarray(rows[name]) for name in ("hi", "lo", "length"))
        once = first_of_key(rows, at_start=before != (hi[0], lo[0]))
        before = hi[-1], lo[-1]
        records += int(once.sum())
        for tag, (first, last) in bounds.items():
            mine = slice(hi.searchsorted(first), hi.searchsorted(last, "right"))
            count, size_bytes = tagged[tag]
            tagged[tag] = count + int(once[mine].sum()), size_bytes + int(length[mine][once[mine]].sum())
        asked = slice(wanted_hi.searchsorted(hi[0]), wanted_hi.searchsorted(hi[-1], "right"))
        is_there[asked] |= are_among(wanted_hi[asked], wanted_lo[asked], hi, lo)
    good = snapshot.good_shards()
    times = sorted(filter(None, (written_at(snapshot.names[shard]) for shard in good)))
    stat = StoreStat(
        kind=kind,
        records=records,
        bytes=int(snapshot.sizes[good].sum()),
        shards=len(good),
        unreadable=tuple(sorted(snapshot.unreadable.items())),
        index=snapshot.index_state,
        oldest=times[0] if times else None,
        newest=times[-1] if times else None,
    )
    return StoreTally(stat, tagged, wanted[~is_there])
