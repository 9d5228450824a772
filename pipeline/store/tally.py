"""What a store holds, by recipe, and what of a list of keys it does not: one look at the index, no record is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pipeline.store.keysets import NO_KEYS, are_among
from pipeline.store.store import StoreStat, first_of_key, stat_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.store.index import Integers
    from pipeline.store.snapshot import Snapshot
    from pipeline.store.store import Store


@dataclass(frozen=True, slots=True)
class Tally:
    """What a store holds."""

    stat: StoreStat
    tagged: Mapping[bytes, tuple[int, int]]  # how a key begins → records, bytes
    absent: Integers  # of the keys that were asked for


def tally(store: Store, tags: Sequence[bytes] = (), wanted: Integers = NO_KEYS) -> Tally:
    """Count a store's records and those of each tag, and find which of some keys are not there."""
    return store.ask(lambda snapshot: _tally(store.kind, snapshot, tags, wanted))


def _tally(kind: str, snapshot: Snapshot, tags: Sequence[bytes], wanted: Integers) -> Tally:
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
            some, size_bytes = tagged[tag]
            tagged[tag] = some + int(once[mine].sum()), size_bytes + int(length[mine][once[mine]].sum())
        asked = slice(wanted_hi.searchsorted(hi[0]), wanted_hi.searchsorted(hi[-1], "right"))
        is_there[asked] |= are_among(wanted_hi[asked], wanted_lo[asked], hi, lo)
    return Tally(stat_of(kind, snapshot, records), tagged, wanted[~is_there])
