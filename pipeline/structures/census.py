"""What a scanned data set is: how much was accepted, why the rest was not, how large it is, and whether splits leak.

Memory: a few numbers per item, never the items.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from pipeline.records import Reason, Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.records import Inventory, Item, Rejection

EXAMPLES = 3
LEAKING = ("id", "sequence", "cluster")
SIZES = ("atoms", "residues", "n_rec", "n_lig", "pairs")


@dataclass(frozen=True, slots=True)
class Leak:
    """Something that stands in two splits."""

    what: str  # one of LEAKING
    splits: tuple[str, ...]
    items: tuple[int, ...]  # ordinals of the first few items


@dataclass(frozen=True, slots=True)
class Census:
    """The numbers of a scanned data set."""

    items: int  # those that are known: accepted and rejected
    accepted: int
    rejected: Mapping[str, int]  # reason → how many
    examples: Mapping[str, str]  # reason → one item and what was wrong with it
    splits: Mapping[str, int]
    sizes: Mapping[str, Mapping[str, float]]  # size → median, p95, max
    chains: Mapping[str, int]  # kind → how many
    sequences: int  # distinct ones
    longest: int
    undone: int = 0  # items that the store does not know
    first_undone: str = ""
    leaks: tuple[Leak, ...] = ()

    @property
    def rejected_fraction(self) -> float:
        """The share of the items that was left out."""
        return sum(self.rejected.values()) / self.items if self.items else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self) | {"rejected_fraction": self.rejected_fraction}


@dataclass(slots=True)
class Tally:
    """Counts items as they pass."""

    items: int = 0
    undone: int = 0
    first_undone: str = ""
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    splits: Counter[str] = field(default_factory=Counter)
    chains: Counter[str] = field(default_factory=Counter)
    longest: int = 0
    sizes: dict[str, array[int]] = field(default_factory=lambda: {name: array("q") for name in SIZES})
    sequences: array[int] = field(default_factory=lambda: array("Q"))
    marks: dict[str, tuple[array[int], array[int], array[int]]] = field(
        default_factory=lambda: {what: (array("Q"), array("H"), array("Q")) for what in LEAKING}
    )

    def reject(self, rejection: Rejection) -> None:
        """Count an item that was left out; one that was left out because its id stood before may still be a leak."""
        if rejection.reason is Reason.DUPLICATE_ID:
            self._mark("id", rejection.id, self._split(rejection.split))
        self.items += 1
        self.rejected[rejection.reason.value] += 1
        self.examples.setdefault(rejection.reason.value, f"{rejection.id}: {rejection.detail}")

    def miss(self, item: Item) -> None:
        """Count an item that the store does not know."""
        self.undone += 1
        self.first_undone = self.first_undone or item.id

    def accept(self, item: Item, inventory: Inventory) -> None:
        """Count an item that can be used."""
        split = self._split(item.split)
        self.splits[item.split] += 1
        self._mark("id", item.id, split)
        for partner in inventory.partners:
            joined = "\n".join(chain.sequence for chain in partner.chains)
            self._mark("sequence", joined, split)
            for chain in partner.chains:
                self.chains[chain.kind.value] += 1
                self.sequences.append(xxhash.xxh3_64_intdigest(chain.sequence.encode()))
                self.longest = max(self.longest, len(chain.sequence))
        if item.cluster:
            self._mark("cluster", item.cluster, split)
        for name, size in _sizes(inventory).items():
            self.sizes[name].append(size)
        self.items += 1

    def census(self) -> Census:
        """Return the numbers."""
        return Census(
            items=self.items,
            accepted=self.items - self.rejected.total(),
            rejected=dict(self.rejected.most_common()),
            examples=self.examples,
            splits={name: count for name, count in self.splits.items() if name and count},
            sizes={name: _spread(np.frombuffer(sizes, dtype=np.int64)) for name, sizes in self.sizes.items() if sizes},
            chains=dict(self.chains.most_common()),
            sequences=len(np.unique(np.frombuffer(self.sequences, dtype=np.uint64))),
            longest=self.longest,
            undone=self.undone,
            first_undone=self.first_undone,
            leaks=tuple(leak for what in self.marks for leak in self._leaks(what)),
        )

    def _split(self, name: str) -> int:
        """Return the ordinal of a split."""
        self.splits.setdefault(name, 0)
        return list(self.splits).index(name)

    def _mark(self, what: str, value: str, split: int) -> None:
        """Note that this item, of that split, has this sequence or cluster."""
        digests, splits, ordinals = self.marks[what]
        digests.append(xxhash.xxh3_64_intdigest(value.encode()))
        splits.append(split)
        ordinals.append(self.items)

    def _leaks(self, what: str) -> list[Leak]:
        """Return what stands in several splits; items without a split take no part."""
        names = list(self.splits)
        digests, splits, ordinals = (np.frombuffer(column, dtype=column.typecode) for column in self.marks[what])
        named = np.flatnonzero(np.array([bool(name) for name in names], dtype=bool)[splits]) if names else splits
        order = named[np.lexsort((ordinals[named], digests[named]))]
        groups = np.split(order, np.flatnonzero(np.diff(digests[order])) + 1) if len(order) else []
        return [
            Leak(what, tuple(names[one] for one in np.unique(splits[group])), _first_of_each(splits, ordinals, group))
            for group in groups
            if (splits[group] != splits[group[0]]).any()
        ]


def _first_of_each(splits: Any, ordinals: Any, group: Any) -> tuple[int, ...]:
    """Return the first item of each split that shares something."""
    _, first = np.unique(splits[group], return_index=True)
    return tuple(int(ordinals[group[index]]) for index in first[:EXAMPLES])


def _sizes(inventory: Inventory) -> dict[str, int]:
    """Return the sizes of an item that drive memory later."""
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
