"""The table that `data.splits` names: the split and the cluster of each id, for any source."""

from __future__ import annotations

from array import array
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from pipeline.command_line import Command
from pipeline.errors import DataError
from pipeline.records import Rejection
from pipeline.structures.sources.source_rows import Columns, read_rows
from pipeline.units import printable_text

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.records import Item

COLUMNS = Columns(required=("id", "split"), optional=("cluster",))


class GivenSplits:
    """The rows of the table by the digests of their ids; an id takes some 25 bytes and the name of its cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found = 0  # items of the source that the table names
        self._splits: dict[str, int] = {}
        self._split, self._clusters, self._end = array("I"), bytearray(), array("Q", [0])
        digests, lines, example = array("Q"), array("I"), ""
        for row in read_rows(path, COLUMNS):
            line = int(row.origin.rpartition(":")[2])
            if isinstance(row, Rejection):
                raise DataError(row.detail, where=f"{path}:{line}", remedy=f"sed -n {line}p {quote(str(path))}")
            digests.append(xxhash.xxh3_64_intdigest(row["id"].encode()))
            lines.append(line)
            self._split.append(self._splits.setdefault(row["split"], len(self._splits)))
            self._clusters += row["cluster"].encode()
            self._end.append(len(self._clusters))
            example = example or row["id"]
        self.example = printable_text(example)
        self._names = list(self._splits)
        digest_N = np.array(digests, np.uint64)
        self._order = np.argsort(digest_N, kind="stable")
        self._digests = digest_N[self._order]
        twice = np.flatnonzero(self._digests[1:] == self._digests[:-1])
        if len(twice):
            first, again = (lines[self._order[twice[0] + step]] for step in (0, 1))
            raise DataError(
                f"line {first} has the same id", where=f"{path}:{again}", remedy=f"sed -n {again}p {quote(str(path))}"
            )

    def of(self, item: Item) -> Item:
        """Return an item with its split and cluster; one that the table does not name is in no split."""
        digest = xxhash.xxh3_64_intdigest(item.id.encode())
        spot = int(np.searchsorted(self._digests, np.uint64(digest)))
        if spot == len(self._digests) or int(self._digests[spot]) != digest:
            return replace(item, split="", cluster="")
        self.found += 1
        row = int(self._order[spot])
        cluster = self._clusters[self._end[row] : self._end[row + 1]].decode()
        return replace(item, split=self._names[self._split[row]], cluster=cluster)

    def refuse_strangers(self, item: str) -> None:
        """Raise where the table names none of the items; `item` is the id of one."""
        if not self.found:
            what = f"it names none of the items: its ids look like {self.example!r}, those of the data like {item!r}"
            raise DataError(what, where=str(self.path), remedy=Command.of("data items"))
