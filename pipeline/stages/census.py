"""The statistics of a scanned data set, and its lists as CSV: usable items, residues that are no nodes, leaking items.

Statistics are of items accepted, reasons for rejection, sizes, and leaks between splits.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipeline.command_line import Command
from pipeline.dataset import worklist
from pipeline.dataset.columns import count_distinct, parts_of, rows_of
from pipeline.dataset.item_splits import LeakingItems, find_leaking, text_digest
from pipeline.errors import DataError
from pipeline.files import csv_lines, csv_table
from pipeline.journal.run_folder import writing_run
from pipeline.records import Kind, Reason, Role
from pipeline.stages.stage import Judged, StageTally
from pipeline.structures.inventory import LOW_PLDDT, NO_PAE
from pipeline.structures.parsing.read_structure import BEHIND_END

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.dataset.worklist import KnownItem
    from pipeline.journal.run_folder import RunFolder
    from pipeline.records import Inventory, Item, Rejection
    from pipeline.training.items.item_table import ItemTable

EXAMPLES = 3
MOST_SPLITS = 1000
LEAKING = ("id", "sequence", "cluster")
MARK, PACKED_MARK = np.dtype([("digest", "<u8"), ("split", "<u2"), ("item", "<u4")]), struct.Struct("<QHI")
SIZES = {"atoms": "I", "residues": "I", "n_rec": "I", "n_lig": "I", "pairs": "Q"}  # and in how many bytes each


ROLES = (Role.RECEPTOR, Role.LIGAND, Role.WHOLE)
PLACED, KEYS = ("id", "split", "cluster"), ("scan_key", "graph_key")
ITEM_COLUMNS = (*PLACED, *(role.value for role in ROLES), *SIZES, "left_out", *KEYS, "origin")
RESIDUE_COLUMNS = ("id", "partner", "chain", "residue", "number", "has")
LEAK_COLUMNS = ("leak", "group", "split", "id", "origin")


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


@dataclass
class LeakMarks:
    """Digests of the ids, sequences and clusters of items, with the splits and ordinals of the items."""

    seen: int = 0  # items so far, those that are missing among them
    splits: dict[str, int] = field(default_factory=dict)  # split → number
    rows: dict[str, bytearray] = field(default_factory=lambda: {what: bytearray() for what in LEAKING})  # of MARK

    def add(self, what: str, value: str, split: str) -> None:
        """Note something of an item; items without a split cannot leak."""
        if split:
            self.rows[what] += PACKED_MARK.pack(text_digest(value), self._number(split), self.seen)

    def add_all(self, others: LeakMarks) -> None:
        """Add the marks of the items that follow."""
        number_of = np.array([self._number(name) for name in others.splits], np.uint16)
        for what, rows in others.rows.items():
            marks = np.frombuffer(rows, MARK).copy()
            marks["split"] = number_of[marks["split"]]
            marks["item"] += self.seen
            self.rows[what].extend(marks.tobytes())
        self.seen += others.seen

    def _number(self, split: str) -> int:
        number = self.splits.setdefault(split, len(self.splits))
        if number >= MOST_SPLITS:
            what = f"more than {MOST_SPLITS} different splits, such as {split!r}: is that column really the split?"
            raise DataError(what, remedy=Command.of("config show", then="   (see data.path)"))
        return number

    @cached_property
    def leaking(self) -> dict[str, LeakingItems]:
        """All items that leak, by what of them is in several splits; asked for once all are counted."""
        return {
            what: LeakingItems.joined(
                find_leaking(part["digest"], part["split"], part["item"]) for part in parts_of(rows, MARK)
            )
            for what, rows in self.rows.items()
        }


@dataclass
class CensusTally(StageTally):
    """Counts the items of a data set one by one, in its order."""

    LISTS: ClassVar[Mapping[str, Sequence[str]]] = {
        "rejected": (),
        "inventory": ITEM_COLUMNS,
        "residues_left_out": RESIDUE_COLUMNS,
    }

    residues_left_out: int = 0
    items_incomplete: int = 0
    items_read_on: int = 0
    residues_unsure: int = 0
    items_without_pae: int = 0
    splits: Counter[str] = field(default_factory=Counter)
    chains: Counter[str] = field(default_factory=Counter)
    longest: int = 0
    sizes: dict[str, array[int]] = field(default_factory=lambda: {name: array(SIZES[name]) for name in SIZES})
    sequences: array[int] = field(default_factory=lambda: array("Q"))
    marks: LeakMarks = field(default_factory=LeakMarks)

    def reject(self, rejected: Rejection) -> None:
        """Count a rejected item; one with a duplicate id may still be a leak."""
        if rejected.reason is Reason.DUPLICATE_ID:
            self.marks.add("id", rejected.id, rejected.split)
        super().reject(rejected)
        self.marks.seen += 1

    def accept(self, item: Item, inventory: Inventory) -> None:
        """Count an item that can be used."""
        self.splits[item.split] += 1
        self.marks.add("id", item.id, item.split)
        for partner in inventory.partners:
            polymers = [chain for chain in partner.chains if chain.kind is not Kind.OTHER]
            self.chains.update(chain.kind.value for chain in partner.chains)
            if polymers:
                self.marks.add("sequence", "\n".join(sorted(chain.sequence for chain in polymers)), item.split)
            for chain in polymers:
                self.sequences.append(text_digest(chain.sequence))
                self.longest = max(self.longest, len(chain.sequence))
        if item.cluster:
            self.marks.add("cluster", item.cluster, item.split)
        for name, size in item_sizes(inventory).items():
            self.sizes[name].append(size)
        left_out = sum(len(partner.left_out) for _, partner in inventory.sides())
        self.residues_left_out += left_out
        self.items_incomplete += left_out > 0
        self.items_read_on += any(BEHIND_END in partner.notes for _, partner in inventory.sides())
        self.residues_unsure += sum(partner.notes.get(LOW_PLDDT, 0) for _, partner in inventory.sides())
        self.items_without_pae += any(NO_PAE in partner.notes for partner in inventory.partners)
        self.items += 1
        self.marks.seen += 1

    def list_items(self, items: Iterable[tuple[KnownItem, Sequence[str]]]) -> None:
        """List usable items, the keys of their inventories and graphs, and their residues that are no nodes."""
        rows, residues = list[Any](), list[Any]()
        for known, keys in items:
            item, inventory = known.item, known.inventory
            assert inventory is not None
            chains = {partner.role: " ".join(chain.name for chain in partner.chains) for partner in inventory.partners}
            sizes, before = item_sizes(inventory), len(residues)
            for name, partner in inventory.sides():
                residues += ([item.id, name, *residue] for residue in partner.left_out)
            sides = [*(chains.get(role, "") for role in ROLES), *(sizes.get(name, "") for name in SIZES)]
            rows.append([item.id, item.split, item.cluster, *sides, len(residues) - before, *keys, item.origin])
        self.add_lines("inventory", csv_lines(rows))
        self.add_lines("residues_left_out", csv_lines(residues))

    def census(self, lists: str = "") -> Census:
        """Return the numbers, with the folder where the lists are."""
        return self.result(
            Census,
            splits={name: count for name, count in self.splits.items() if name},
            sizes={
                name: _spread(size_N)
                for name, sizes in self.sizes.items()
                if len(size_N := rows_of(sizes, SIZES[name]))
            },
            chains=dict(self.chains.most_common()),
            sequences=count_distinct(self.sequences),
            leaks=self._leaks(),
            lists=lists,
        )

    def _leaks(self) -> tuple[SplitLeak, ...]:
        """Return the first few ids, sequences and clusters that occur in several splits, with their totals."""
        names = list(self.marks.splits)
        return tuple(leak for what, found in self.marks.leaking.items() for leak in _first_leaks(what, names, found))


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


def list_table(folder: RunFolder, table: ItemTable) -> None:
    """List the items that a reader gave, with their sizes, the digest of what they hold, and their places."""
    splits = list(table.splits)
    columns = ("id", "split", *table.sizes, "key", "place")
    with writing_run(folder.inventory), csv_table(folder.inventory, columns) as add:
        for number in range(len(table)):
            sizes = (size_N[number] for size_N in table.sizes.values())
            place = json.dumps(table.place(number))
            add((table.ids[number], splits[table.split_N[number]], *sizes, table.key(number).hex(), place))


def write_leaks(folder: RunFolder, marks: LeakMarks) -> None:
    """List every item whose id, sequence or cluster is in several splits; the items of a group share one."""
    found = [(leak, *_by_item(leaking)) for leak, leaking in marks.leaking.items()]
    leaking_M = np.unique(np.concatenate([ordinal_M for _, ordinal_M, _ in found] or [np.empty(0, np.uint32)]))
    with writing_run(folder.leaks), csv_table(folder.leaks, LEAK_COLUMNS) as add:
        for ordinal, entry in worklist.items_at(folder.items, leaking_M.tolist()):
            for leak, ordinal_M, group_M in found:
                here = slice(*np.searchsorted(ordinal_M, [ordinal, ordinal + 1]).tolist())
                for group in group_M[here]:
                    add((leak, group + 1, entry.split, entry.id, entry.origin))


def _by_item(leaking: LeakingItems) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the ordinals of leaking items, sorted, and the group of each."""
    order = np.argsort(leaking.ordinal_M, kind="stable")
    return leaking.ordinal_M[order], leaking.group_M[order]
