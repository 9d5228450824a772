"""Stage scan for the items of a reader: what the reader yields in, the table of the usable ones out.

Memory is what the table takes and 12 bytes an id, whatever the items hold.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipeline.records import Entry, Reason, Rejection
from pipeline.structures.sources.item_ids import SeenIds, id_problem
from pipeline.training.items.item_source import (
    ArrayForms,
    array_sizes,
    arrays_digest,
    as_arrays,
)
from pipeline.training.items.item_table import TableBuilder
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pipeline.training.items.item_source import Array

ITEMS_READ = "items_read"  # a figure that tells how many so far


@dataclass(slots=True)
class EntriesTaken:
    """The table of the usable items read so far, and their counts."""

    table: TableBuilder = field(default_factory=TableBuilder)
    forms: ArrayForms = field(default_factory=ArrayForms)
    seen: SeenIds = field(default_factory=SeenIds)
    entries: int = 0  # so far, those that cannot be used among them
    splits: Counter[str] = field(default_factory=Counter)
    leaks: int = 0  # ids that are in two splits
    leak: str = ""  # the first of them

    def spreads(self) -> dict[str, dict[str, float]]:
        """Return median, 95th percentile and maximum of each size."""
        return {name: _spread(sizes) for name, sizes in self.table.sizes.items() if len(sizes)}

    def take(self, entry: Entry) -> Rejection | None:
        """Add an item to the table; return its rejection if it cannot be used."""
        problem = id_problem(entry.id, names_files=False) if isinstance(entry.id, str) else "is not a string"
        if not isinstance(entry.split, str):
            return _refused(entry._replace(split=""), Reason.BAD_ENTRY, f"its split is {entry.split!r}, not a string")
        if problem:
            return _refused(entry, Reason.BAD_ID, f"the id {problem}")
        arrays = as_arrays(entry.arrays)
        if wrong := _problem(entry) or self.forms.wrong(arrays):
            return _refused(entry, Reason.BAD_ENTRY, wrong)
        splits = self.table.splits
        first = self.seen.first_line(entry.id, splits.get(entry.split, len(splits)))
        if first is not None:
            return self._duplicate(entry, list(splits)[first])
        self._add(entry, arrays)
        return None

    def _add(self, entry: Entry, arrays: Mapping[str, Array]) -> None:
        sizes = array_sizes(arrays)
        self.forms.add(arrays)
        self.table.also(sizes)
        sizes = {**dict.fromkeys(self.table.sizes, 0), **sizes}
        self.table.add(entry.id, arrays_digest(arrays), entry.split, sizes, place=entry.place)
        self.splits[entry.split] += 1

    def _duplicate(self, entry: Entry, split: str) -> Rejection:
        """Reject an item whose id was used before; in another split, it counts as a leak."""
        if split and entry.split and split != entry.split:
            self.leaks += 1
            self.leak = (
                self.leak or f"the same id is in the splits {split} and {entry.split}: {printable_text(entry.id)}"
            )
        detail = f"an earlier item{f' of split {split!r}' if split else ''} already has this id"
        return _refused(entry, Reason.DUPLICATE_ID, detail)


def take_entries(
    entries: Iterable[Entry | Rejection], taken: EntriesTaken, limit: int | None = None
) -> Iterator[Rejection]:
    """Take the items of a reader, `limit` at most, and yield the rejections of those that cannot be used."""
    source = iter(entries)
    while len(taken.table) != limit and (entry := next(source, None)) is not None:
        if not isinstance(entry, Entry | Rejection):
            raise TypeError(f"entries() yields a {type(entry).__name__}, not records.Entry or records.Rejection")
        taken.entries += 1
        rejected = taken.take(entry) if isinstance(entry, Entry) else entry
        if rejected is not None:
            yield rejected


def _refused(entry: Entry, reason: Reason, detail: str) -> Rejection:
    return Rejection(printable_text(str(entry.id)), reason, detail, entry.origin, entry.split)


def _problem(entry: Entry) -> str:
    """Return why an item cannot be read again by its place; '' if it can."""
    if entry.place is None:
        return "it has no place to read it from again"
    try:
        json.dumps(entry.place)
    except (TypeError, ValueError) as error:
        return f"its place is not JSON data: {error}"
    return ""


def _spread(sizes: array[int]) -> dict[str, float]:
    size_N = np.frombuffer(sizes, sizes.typecode)
    median, p95 = np.percentile(size_N, [50, 95])
    return {"median": float(median), "p95": float(p95), "max": int(size_N.max())}
