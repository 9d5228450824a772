"""How many numbers a residue has by each checkpoint: what is remembered of it says so, and its embeddings do.

Where they contradict each other most votes win, lest one wrong record of a checkpoint condemn every embedding.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.keys import TAG_BYTES, recipe_tag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.store.cache import Cache
    from pipeline.store.record import Record
    from pipeline.store.store import Store

VOTERS = 8  # embeddings that are asked


class Widths:
    """Finds the width of a checkpoint's embeddings, once."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._known: dict[str, int | None] = {}

    def of(self, digest: str) -> int | None:
        """Return the width of what these weights make; None where nothing is known of them."""
        if digest not in self._known:
            told = Counter(self._told(digest))
            votes = told + Counter(self._seen(digest))
            best = max(votes.values(), default=0)
            first = [*told, *votes]  # of equal votes, what was told
            self._known[digest] = next((width for width in first if votes[width] == best), None)
        return self._known[digest]

    def wrong(self, weights: Record) -> Iterator[str]:
        """Yield why the width of a checkpoint cannot be what is remembered of it."""
        width = self.of(weights.meta["digest"])
        if width != weights.meta["dim"]:
            yield f"dim is {weights.meta['dim']}; its embeddings have {width} numbers a residue"

    def _told(self, digest: str) -> Iterator[int]:
        """Yield the widths in what is remembered of these weights."""
        store = self._cache.kind("weights")
        for record in _readable(store, store.keys()):
            if record.meta.get("digest") == digest and isinstance(record.meta.get("dim"), int):
                yield record.meta["dim"]

    def _seen(self, digest: str) -> Iterator[int]:
        """Yield the widths of a few embeddings that were made with these weights."""
        store = self._cache.kind("embed")
        recipes = [one.recipe for one in self._cache.recipes("embed") if one.recipe.get("weights") == digest]
        tags = {recipe_tag("embed", recipe) for recipe in recipes}
        keys = (key for key in store.keys() if key[:TAG_BYTES] in tags)  # noqa: SIM118 - a store is no mapping
        for record in _readable(store, islice(keys, VOTERS)):
            rows_LD = record.arrays.get("rows")
            if rows_LD is not None and rows_LD.ndim == 2 and record.meta.get("weights") == digest:
                yield rows_LD.shape[1]


def _readable(store: Store, keys: Iterator[bytes]) -> Iterator[Record]:
    """Yield the records that can be read."""
    for key in keys:
        try:
            yield store.get(key)
        except (CacheDamaged, RecordMissing):
            continue
