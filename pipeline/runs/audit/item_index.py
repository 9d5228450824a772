"""Which records are of which item of the current data set, whatever the records themselves say."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.keys import TAG_BYTES, recipe_tag
from pipeline.records import Item
from pipeline.runs.dataset import worklist
from pipeline.stages.scan import Seen, glance, look_up_items
from pipeline.store.key_lists import KeyedLines, in_chunks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.project.project import Project
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.store.format.record import Record
    from pipeline.store.store import Store

# What one may stumble over in a record that is nothing like what it should be.
ODD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
_SAMPLE_BITS = 64


class ItemIndex:
    """The items of a data set, by the keys of what is made of them."""

    def __init__(self) -> None:
        self.inventories = KeyedLines()  # key of a graph → key of its inventory
        self.items = KeyedLines()  # key of an inventory → its item
        self.paths = KeyedLines()  # key of a file as it stands → its path; of the sample only

    def read(self, project: Project, sample: float) -> None:
        """Look up every item that a source names."""
        for chunk in in_chunks(worklist.list_items(project), worklist.LOOKED_UP_AT_ONCE):
            items = [entry for entry in chunk if isinstance(entry, Item)]
            for item, seen in zip(items, _look_up_each(items, project), strict=True):
                if seen.key is not None:
                    self.inventories.add(project.graphs.recipe.key(seen.key), seen.key.hex())
                    self.items.add(seen.key, worklist.item_line(item))
            marks = (
                ((glance(path, project.recipe), path) for item in items for path in project.recipe.paths(item))
                if sample
                else ()
            )
            for mark, path in marks:
                if isinstance(mark, bytes) and in_sample(mark, sample):
                    self.paths.add(mark, path)


def in_sample(key: bytes, sample: float) -> bool:
    """Tell whether a key is in a sample; a larger sample holds every smaller one."""
    return int.from_bytes(key[-_SAMPLE_BITS // 8 :], "big") < sample * float(1 << _SAMPLE_BITS)


def _look_up_each(items: Sequence[Item], project: Project) -> list[Seen]:
    """Return what is known of each item: nothing of one whose own records are malformed."""
    try:
        return look_up_items(items, project.recipe, project.shelves)
    except ODD:
        if len(items) == 1:
            return [Seen()]
    middle = len(items) // 2
    return _look_up_each(items[:middle], project) + _look_up_each(items[middle:], project)


VOTERS = 8  # embeddings that are asked


class EmbeddingWidths:
    """Finds the width of a checkpoint's embeddings by vote of the records, once."""

    def __init__(self, cache: CacheFolder) -> None:
        self._cache = cache
        self._known: dict[str, int | None] = {}

    def of(self, digest: str) -> int | None:
        """Return the width of the embeddings of a checkpoint; None where no record tells it."""
        if digest not in self._known:
            recorded = Counter(self._recorded(digest))
            votes = recorded + Counter(self._sampled(digest))
            best = max(votes.values(), default=0)
            candidates = [*recorded, *votes]  # of equal votes, what was recorded wins
            self._known[digest] = next((width for width in candidates if votes[width] == best), None)
        return self._known[digest]

    def wrong(self, weights: Record) -> Iterator[str]:
        """Yield why the width in a checkpoint's record cannot be right."""
        width = self.of(weights.meta["digest"])
        if width != weights.meta["dim"]:
            yield f"dim is {weights.meta['dim']}; its embeddings have {width} numbers a residue"

    def _recorded(self, digest: str) -> Iterator[int]:
        """Yield the widths in the records of this checkpoint."""
        store = self._cache.kind("weights")
        for record in _readable(store, store.keys()):
            if record.meta.get("digest") == digest and isinstance(record.meta.get("dim"), int):
                yield record.meta["dim"]

    def _sampled(self, digest: str) -> Iterator[int]:
        """Yield the widths of a few embeddings that were made with these weights."""
        store = self._cache.kind("embed")
        recipes = [stat.recipe for stat in self._cache.recipes("embed") if stat.recipe.get("weights") == digest]
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
