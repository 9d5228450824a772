"""The lists of a scanned data set as CSV: its usable items, residues that are no nodes, what leaks between splits."""

from __future__ import annotations

import csv
import json
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np

from pipeline.files import replacing
from pipeline.journal.run_folder import writing_run
from pipeline.records import Role
from pipeline.runs.dataset import worklist
from pipeline.runs.workflow.census import SIZES, item_sizes

if TYPE_CHECKING:
    from _csv import Writer
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray
    from typing_extensions import Self

    from pipeline.journal.run_folder import RunFolder
    from pipeline.records import Inventory, Item
    from pipeline.runs.dataset.item_splits import LeakingItems
    from pipeline.runs.workflow.census import CensusTally
    from pipeline.training.items.item_table import ItemTable

ROLES = (Role.RECEPTOR, Role.LIGAND, Role.WHOLE)
PLACED, KEYS = ("id", "split", "cluster"), ("scan_key", "graph_key")
ITEM_COLUMNS = (*PLACED, *(role.value for role in ROLES), *SIZES, "left_out", *KEYS, "origin")
RESIDUE_COLUMNS = ("id", "partner", "chain", "residue", "number", "has")
LEAK_COLUMNS = ("leak", "group", "split", "id", "origin")


@contextmanager
def csv_list(path: Path, columns: Sequence[str]) -> Iterator[Writer]:
    """Yield a writer of rows below a header; the file appears whole or not at all."""
    with writing_run(path), replacing(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        yield writer


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
            self._residues.writerows([item.id, name, *residue] for residue in partner.left_out)
        self._items.writerow(
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
    with csv_list(folder.inventory, ("id", "split", *table.sizes, "key", "place")) as rows:
        for number in range(len(table)):
            sizes = (size_N[number] for size_N in table.sizes.values())
            place = json.dumps(table.place(number))
            rows.writerow((table.ids[number], splits[table.split_N[number]], *sizes, table.key(number).hex(), place))


def write_leaks(folder: RunFolder, tally: CensusTally) -> None:
    """List every item of which an id, a sequence or a cluster is in several splits; a group shares one."""
    marks = [(leak, *_by_item(leaking)) for leak, leaking in tally.leaking().items()]
    leaking_M = np.unique(np.concatenate([ordinal_M for _, ordinal_M, _ in marks] or [np.empty(0, np.uint32)]))
    with csv_list(folder.leaks, LEAK_COLUMNS) as rows:
        for ordinal, entry in worklist.items_at(folder.items, leaking_M.tolist()):
            for leak, ordinal_M, group_M in marks:
                here = slice(*np.searchsorted(ordinal_M, [ordinal, ordinal + 1]).tolist())
                rows.writerows((leak, group + 1, entry.split, entry.id, entry.origin) for group in group_M[here])


def _by_item(leaking: LeakingItems) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the ordinals of leaking items, sorted, and the group of each."""
    order = np.argsort(leaking.ordinal_M, kind="stable")
    return leaking.ordinal_M[order], leaking.group_M[order]
