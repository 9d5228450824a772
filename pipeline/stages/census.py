"""The statistics of a scanned data set, and its lists as CSV: usable items, residues that are no nodes, leaking items.

Statistics are of items accepted, reasons for rejection, sizes, and leaks between splits. Memory: a few numbers per
item, never the items.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pipeline.command_line import Command
from pipeline.dataset import worklist
from pipeline.dataset.item_splits import find_leaking, text_digest
from pipeline.errors import DataError
from pipeline.files import csv_table
from pipeline.journal.run_folder import writing_run
from pipeline.records import Kind, Reason, Role
from pipeline.stages.stage import Judged
from pipeline.structures.inventory import LOW_PLDDT, NO_PAE
from pipeline.structures.parsing.pdb_lines import BEHIND_END

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from pipeline.dataset.item_splits import LeakingItems
    from pipeline.dataset.standing import Standing
    from pipeline.journal.run_folder import RunFolder
    from pipeline.records import Inventory, Item, Rejection
    from pipeline.training.items.item_table import ItemTable

EXAMPLES = 3
MOST_SPLITS = 1000
LEAKING = ("id", "sequence", "cluster")
SIZES = {"atoms": "I", "residues": "I", "n_rec": "I", "n_lig": "I", "pairs": "Q"}  # and in how many bytes each


@dataclass(frozen=True, slots=True)
class SplitLeak:
    """An id, sequence or cluster that occurs in two splits."""

    what: str  # one of LEAKING
    total: int  # how many of them leak
    splits: tuple[str, ...]
    items: tuple[int, ...]  # ordinals of the first few items


@dataclass(slots=True)
class Census(Judged):
    """The numbers of a scanned data set."""

    splits: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, dict[str, float]] = field(default_factory=dict)  # size → median, p95, max
    chains: dict[str, int] = field(default_factory=dict)  # kind → how many
    sequences: int = 0  # distinct ones
    longest: int = 0
    leaks: tuple[SplitLeak, ...] = ()
    residues_left_out: int = 0  # which are no nodes
    items_incomplete: int = 0  # that have such residues
    items_read_on: int = 0  # in whose files new chains stand behind END
    residues_unsure: int = 0  # below structures.min_plddt
    items_without_pae: int = 0  # where structures.pae asks for it
    lists: str = ""  # the folder of the files that list what is counted here

    @classmethod
    def standing(cls, known: Standing, lists: str = "") -> Self:
        """Return the census that an earlier run took, with the folder where the lists are now."""
        leaks = tuple(
            SplitLeak(leak["what"], leak["total"], tuple(leak["splits"]), tuple(leak["items"]))
            for leak in known.judged["leaks"]
        )
        judged = {part.name: known.judged[part.name] for part in fields(cls) if part.name in known.judged}
        return cls(**judged | {"leaks": leaks, "lists": lists})


@dataclass(slots=True)
class CensusTally(Judged):
    """Counts the items of a data set one by one, in its order."""

    seen: int = 0  # items so far, those that are missing among them
    residues_left_out: int = 0
    items_incomplete: int = 0
    items_read_on: int = 0
    residues_unsure: int = 0
    items_without_pae: int = 0
    splits: Counter[str] = field(default_factory=Counter)
    ordinals: dict[str, int] = field(default_factory=dict)  # split → number
    chains: Counter[str] = field(default_factory=Counter)
    longest: int = 0
    sizes: dict[str, array[int]] = field(default_factory=lambda: {name: array(SIZES[name]) for name in SIZES})
    sequences: array[int] = field(default_factory=lambda: array("Q"))
    marks: dict[str, tuple[array[int], array[int], array[int]]] = field(
        default_factory=lambda: {what: (array("Q"), array("H"), array("I")) for what in LEAKING}
    )

    def reject(self, rejected: Rejection) -> None:
        """Count a rejected item; one with a duplicate id may still be a leak."""
        if rejected.reason is Reason.DUPLICATE_ID:
            self._mark("id", rejected.id, self._split(rejected.split))
        Judged.reject(self, rejected)
        self.seen += 1

    def miss(self, item: str, *, required: bool = True) -> None:
        """Count an item that has still to be done."""
        Judged.miss(self, item, required=required)
        self.seen += 1

    def accept(self, item: Item, inventory: Inventory) -> None:
        """Count an item that can be used."""
        split = self._split(item.split)
        self.splits[item.split] += 1
        self._mark("id", item.id, split)
        for partner in inventory.partners:
            polymers = [chain for chain in partner.chains if chain.kind is not Kind.OTHER]
            self.chains.update(chain.kind.value for chain in partner.chains)
            if polymers:
                self._mark("sequence", "\n".join(sorted(chain.sequence for chain in polymers)), split)
            for chain in polymers:
                self.sequences.append(text_digest(chain.sequence))
                self.longest = max(self.longest, len(chain.sequence))
        if item.cluster:
            self._mark("cluster", item.cluster, split)
        for name, size in item_sizes(inventory).items():
            self.sizes[name].append(size)
        left_out = sum(len(partner.left_out) for _, partner in inventory.sides())
        self.residues_left_out += left_out
        self.items_incomplete += left_out > 0
        self.items_read_on += any(BEHIND_END in partner.notes for _, partner in inventory.sides())
        self.residues_unsure += sum(partner.notes.get(LOW_PLDDT, 0) for _, partner in inventory.sides())
        self.items_without_pae += any(NO_PAE in partner.notes for partner in inventory.partners)
        self.items += 1
        self.seen += 1

    def census(self, lists: str = "") -> Census:
        """Return the numbers, with the folder where the lists are."""
        counts = {part.name: getattr(self, part.name) for part in fields(Judged)}
        return Census(
            **counts,
            splits={name: count for name, count in self.splits.items() if name},
            sizes={name: _spread(_array(sizes)) for name, sizes in self.sizes.items() if sizes},
            chains=dict(self.chains.most_common()),
            sequences=_distinct(_array(self.sequences)),
            longest=self.longest,
            leaks=self._leaks(),
            residues_left_out=self.residues_left_out,
            items_incomplete=self.items_incomplete,
            items_read_on=self.items_read_on,
            residues_unsure=self.residues_unsure,
            items_without_pae=self.items_without_pae,
            lists=lists,
        )

    def _split(self, name: str) -> int:
        """Return the ordinal of a split."""
        ordinal = self.ordinals.setdefault(name, len(self.ordinals))
        if ordinal >= MOST_SPLITS:
            what = f"more than {MOST_SPLITS} different splits, such as {name!r}: is that column really the split?"
            raise DataError(what, remedy=Command.of("config show", then="   (see data.path)"))
        return ordinal

    def _mark(self, what: str, value: str, split: int) -> None:
        """Note the digest of an item's id, sequence or cluster with its split; items without a split cannot leak."""
        if list(self.ordinals)[split]:
            digests, splits, ordinals = self.marks[what]
            digests.append(text_digest(value))
            splits.append(split)
            ordinals.append(self.seen)

    def leaking(self) -> dict[str, LeakingItems]:
        """Return all items that leak, by what of them is in several splits."""
        return {what: find_leaking(*map(_array, self.marks[what])) for what in LEAKING}

    def _leaks(self) -> tuple[SplitLeak, ...]:
        """Return the first few ids, sequences and clusters that occur in several splits, with their totals."""
        names = list(self.ordinals)
        return tuple(leak for what, leaking in self.leaking().items() for leak in _first_leaks(what, names, leaking))


def _array(column: array[int]) -> Any:
    return np.frombuffer(column, dtype=column.typecode)


def _distinct(digests: Any) -> int:
    """Count different digests, with one copy of them in memory."""
    in_order = np.sort(digests)
    return len(in_order) and 1 + int(np.count_nonzero(in_order[1:] != in_order[:-1]))


def _first_leaks(what: str, names: list[str], leaking: LeakingItems) -> Iterator[SplitLeak]:
    """Yield the first few leaks of one kind, each with the first few of its items, one of each split."""
    total = int(leaking.group_M.max(initial=-1)) + 1
    for group in range(min(total, EXAMPLES)):
        rows = np.flatnonzero(leaking.group_M == group)
        split_numbers, first = np.unique(leaking.split_M[rows], return_index=True)
        items = tuple(leaking.ordinal_M[rows[first[:EXAMPLES]]].tolist())
        yield SplitLeak(what, total, tuple(names[split] for split in split_numbers[:EXAMPLES]), items)


def item_sizes(inventory: Inventory) -> dict[str, int]:
    """Return the sizes of an item that determine its memory in training."""
    nodes = {partner.role: partner.nodes for partner in inventory.partners}
    sizes = {
        "atoms": sum(partner.atoms for partner in inventory.partners),
        "residues": sum(partner.residues for partner in inventory.partners),
    }
    if Role.RECEPTOR in nodes and Role.LIGAND in nodes:
        n_rec, n_lig = nodes[Role.RECEPTOR], nodes[Role.LIGAND]
        sizes |= {"n_rec": n_rec, "n_lig": n_lig, "pairs": n_rec * n_lig}
    return sizes


def _spread(sizes: Any) -> dict[str, float]:
    """Return median, 95th percentile and maximum."""
    median, p95 = np.percentile(sizes, [50, 95])
    return {"median": float(median), "p95": float(p95), "max": int(sizes.max())}


ROLES = (Role.RECEPTOR, Role.LIGAND, Role.WHOLE)
PLACED, KEYS = ("id", "split", "cluster"), ("scan_key", "graph_key")
ITEM_COLUMNS = (*PLACED, *(role.value for role in ROLES), *SIZES, "left_out", *KEYS, "origin")
RESIDUE_COLUMNS = ("id", "partner", "chain", "residue", "number", "has")
LEAK_COLUMNS = ("leak", "group", "split", "id", "origin")


@contextmanager
def csv_list(path: Path, columns: Sequence[str]) -> Iterator[Callable[[Iterable[Any]], Any]]:
    """Yield what adds a row below a header; the file appears whole or not at all."""
    with writing_run(path), csv_table(path, columns) as add:
        yield add


class ItemLists:
    """Writes the usable items and the residues that are left out of them, item by item."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._files = folder, ExitStack()

    def __enter__(self) -> Self:
        self._items = self._files.enter_context(csv_list(self._folder.inventory, ITEM_COLUMNS))
        self._residues = self._files.enter_context(csv_list(self._folder.residues_left_out, RESIDUE_COLUMNS))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._files.__exit__(kind, error, at)

    def add(self, item: Item, inventory: Inventory, keys: Sequence[str]) -> None:
        """List an item, the keys of its inventory and its graph, and its residues that are no nodes."""
        chains = {partner.role: " ".join(chain.name for chain in partner.chains) for partner in inventory.partners}
        sizes, left_out = item_sizes(inventory), 0
        for name, partner in inventory.sides():
            left_out += len(partner.left_out)
            for residue in partner.left_out:
                self._residues([item.id, name, *residue])
        self._items(
            [
                *(item.id, item.split, item.cluster),
                *(chains.get(role, "") for role in ROLES),
                *(sizes.get(name, "") for name in SIZES),
                *(left_out, *keys, item.origin),
            ]
        )


def list_table(folder: RunFolder, table: ItemTable) -> None:
    """List the items that a reader gave, with their sizes, the digest of what they hold, and their places."""
    splits = list(table.splits)
    with csv_list(folder.inventory, ("id", "split", *table.sizes, "key", "place")) as add:
        for number in range(len(table)):
            sizes = (size_N[number] for size_N in table.sizes.values())
            place = json.dumps(table.place(number))
            add((table.ids[number], splits[table.split_N[number]], *sizes, table.key(number).hex(), place))


def write_leaks(folder: RunFolder, tally: CensusTally) -> None:
    """List every item of which an id, a sequence or a cluster is in several splits; a group shares one."""
    marks = [(leak, *_by_item(leaking)) for leak, leaking in tally.leaking().items()]
    leaking_M = np.unique(np.concatenate([ordinal_M for _, ordinal_M, _ in marks] or [np.empty(0, np.uint32)]))
    with csv_list(folder.leaks, LEAK_COLUMNS) as add:
        for ordinal, entry in worklist.items_at(folder.items, leaking_M.tolist()):
            for leak, ordinal_M, group_M in marks:
                here = slice(*np.searchsorted(ordinal_M, [ordinal, ordinal + 1]).tolist())
                for group in group_M[here]:
                    add((leak, group + 1, entry.split, entry.id, entry.origin))


def _by_item(leaking: LeakingItems) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the ordinals of leaking items, sorted, and the group of each."""
    order = np.argsort(leaking.ordinal_M, kind="stable")
    return leaking.ordinal_M[order], leaking.group_M[order]
