"""Divides items into splits that share nothing, and finds what existing splits share.

Pure functions of numbers. Shapes: N items, L links (an item has a chain, which others may have, too), C components,
S splits, B strata of size.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import combinations, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

STRATA = (0.25, 0.5, 0.75)  # between which quantiles of their sizes items count as alike
MOST_PAIRS = 1 << 12  # of chains of two partners, that are compared of an item


def text_digest(text: str, seed: int = 0) -> int:
    """Return 64 bits that stand for a text."""
    return xxhash.xxh3_64_intdigest(text.encode(), seed)


@dataclass(frozen=True, slots=True)
class ChainLinks:
    """Links of items through shared things, such as chains: the item, its partner, and a 64-bit digest."""

    items: array[int] = field(default_factory=lambda: array("I"))
    partners: array[int] = field(default_factory=lambda: array("B"))
    tokens: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, item: int, partner: int, token: int) -> None:
        """Add what a partner of an item has."""
        self.items.append(item)
        self.partners.append(partner)
        self.tokens.append(token)

    @property
    def item_L(self) -> NDArray[np.int64]:
        return np.array(self.items, np.int64)

    @property
    def token_L(self) -> NDArray[np.uint64]:
        return np.array(self.tokens, np.uint64)

    def of_both(self) -> ChainLinks:
        """Return links of pairs: a thing of an item's first partner with a thing of its second, in either order."""
        pairs = ChainLinks()
        for item, first, second in self._sides():
            if len(first) * len(second) <= MOST_PAIRS:
                for one, other in {(min(one, other), max(one, other)) for one in first for other in second}:
                    pairs.add(
                        item, 0, xxhash.xxh3_64_intdigest(one.to_bytes(8, "little") + other.to_bytes(8, "little"))
                    )
        return pairs

    def _sides(self) -> Iterator[tuple[int, set[int], set[int]]]:
        """Yield each item, what its first partner has, and what others have; links stand in the order of items."""
        links = zip(self.items, self.partners, self.tokens, strict=True)
        for item, of_item in groupby(links, key=itemgetter(0)):
            sides: tuple[set[int], set[int]] = (set(), set())
            for _, partner, token in of_item:
                sides[min(partner, 1)].add(token)
            yield item, *sides


def find_components(items: int, links: Sequence[ChainLinks]) -> NDArray[np.int64]:
    """Return for each item the lowest item of its connected component."""
    label_N = np.arange(items)
    levels = [(each.item_L, np.unique(each.token_L, return_inverse=True)[1]) for each in links if each.items]
    while True:
        before_N = label_N.copy()
        for item_L, group_L in levels:
            least = np.full(int(group_L.max()) + 1, items)
            np.minimum.at(least, group_L, label_N[item_L])
            np.minimum.at(label_N, label_N[item_L], least[group_L])  # the roots, so that whole trees are joined
        while (label_N[label_N] != label_N).any():
            label_N = label_N[label_N]
        if (label_N == before_N).all():
            return label_N


def strata_of(size_N: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the stratum of each item: items of one are about equally large."""
    edges = np.quantile(size_N, STRATA) if len(size_N) else np.zeros(len(STRATA))
    return np.searchsorted(edges, size_N).astype(np.int64)


def whole_numbers(total: int, fractions: Sequence[float]) -> list[int]:
    """Return how many of a total each fraction is, in whole numbers that add up to it."""
    exact = [total * fraction for fraction in fractions]
    counts = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda split: (counts[split] - exact[split], split))
    for split in by_rest[: total - sum(counts)]:
        counts[split] += 1
    return counts


def distribute(
    component_N: NDArray[np.int64], size_N: NDArray[np.int64], draw_N: NDArray[np.uint64], fractions: Sequence[float]
) -> NDArray[np.int64]:
    """Return the split of each item; a component is in one, and each split has about its share of every stratum.

    The largest components come first; equally large ones in the order of their items' random draws, so that nothing
    depends on the order of the items.
    """
    known_C, component_N = np.unique(component_N, return_inverse=True)
    stratum_N, strata, components = strata_of(size_N), len(STRATA) + 1, len(known_C)
    count_CB = np.bincount(component_N * strata + stratum_N, minlength=components * strata).reshape(components, strata)
    first_C = np.full(components, np.iinfo(np.uint64).max, np.uint64)
    np.minimum.at(first_C, component_N, draw_N)
    shares = _Shares(count_CB.sum(0).tolist(), fractions)
    split_C = np.empty(components, np.int64)
    for component in np.lexsort((first_C, -count_CB.sum(1))):
        split_C[component] = shares.take(count_CB[component].tolist())
    return split_C[component_N]


class _Shares:
    """The items that each split still lacks, while components are assigned."""

    def __init__(self, strata: Sequence[int], fractions: Sequence[float]) -> None:
        self.wanted = [[max(1e-9, fraction * count) for count in strata] for fraction in fractions]
        self.lacking = [list(row) for row in self.wanted]
        self.missing = whole_numbers(sum(strata), fractions)

    def take(self, counts: Sequence[int]) -> int:
        """Assign a component, given by its items in each stratum, to a split, and return the split.

        Among the splits with room, take the one whose strata come nearest to their targets. If none has room, take the
        one that lacks the largest share of its items, so that no split stays empty.
        """
        total = sum(counts)
        roomy = [split for split, missing in enumerate(self.missing) if missing >= total]
        if roomy:
            best = min(roomy, key=lambda split: self._excess(split, counts))
        else:
            best = max(range(len(self.missing)), key=self._lack)
        self.missing[best] -= total
        for stratum, count in enumerate(counts):
            self.lacking[best][stratum] -= count
        return best

    def _lack(self, split: int) -> tuple[float, float]:
        wanted = sum(self.wanted[split])
        return self.missing[split] / wanted, wanted

    def _excess(self, split: int, counts: Sequence[int]) -> float:
        """Return the growth of a split's squared relative distance from its target."""
        wanted, lacking = self.wanted[split], self.lacking[split]
        return sum(count * (count - 2 * lacking[stratum]) / wanted[stratum] for stratum, count in enumerate(counts))


@dataclass(frozen=True, slots=True)
class SharedBySplits:
    """What two splits share at one level, and how many items of each have something of it."""

    level: str
    partners: str  # one, both; or item, for things of the whole item
    splits: tuple[str, str]
    groups: int
    items: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "level": self.level,
            "partners": self.partners,
            "groups": self.groups,
            "splits": dict(zip(self.splits, self.items, strict=True)),
        }


def shared_by_splits(
    level: str, partners: str, links: ChainLinks, split_N: NDArray[np.int64], names: Sequence[str]
) -> Iterator[SharedBySplits]:
    """Yield what every two splits share, if anything; items whose split has no name are in none."""
    item_L, token_L = links.item_L, links.token_L
    split_L = split_N[item_L]
    tokens = {split: np.unique(token_L[split_L == split]) for split, name in enumerate(names) if name}
    for pair in combinations(tokens, 2):
        common = np.intersect1d(tokens[pair[0]], tokens[pair[1]], assume_unique=True)
        if len(common):
            is_common_L = np.isin(token_L, common)
            first, second = (len(np.unique(item_L[is_common_L & (split_L == split)])) for split in pair)
            yield SharedBySplits(level, partners, (names[pair[0]], names[pair[1]]), len(common), (first, second))


@dataclass(frozen=True, slots=True)
class LeakingItems:
    """Every item that has something which is in several splits, sorted by what that is; M of them."""

    group_M: NDArray[np.int64]
    split_M: NDArray[Any]
    ordinal_M: NDArray[Any]

    @classmethod
    def joined(cls, parts: Iterable[LeakingItems]) -> LeakingItems:
        """Return the items of several parts, which have nothing in common."""
        groups, columns = 0, []
        for part in parts:
            columns.append((part.group_M + groups, part.split_M, part.ordinal_M))
            groups += int(part.group_M.max(initial=-1)) + 1
        return cls(*map(np.concatenate, zip(*columns, strict=True)))


def find_leaking(digest_K: NDArray[np.uint64], split_K: NDArray[Any], ordinal_K: NDArray[Any]) -> LeakingItems:
    """Return the items that share something with another split.

    Most digests occur once; they are left out before the sort.
    """
    in_order = np.sort(digest_K)
    repeated = np.unique(in_order[1:][in_order[1:] == in_order[:-1]])
    kept = np.flatnonzero(np.isin(digest_K, repeated))
    group_K = repeated.searchsorted(digest_K[kept])
    lowest, highest = np.full(len(repeated), np.iinfo(np.int64).max), np.zeros(len(repeated), np.int64)
    np.minimum.at(lowest, group_K, split_K[kept])
    np.maximum.at(highest, group_K, split_K[kept])
    leaks_K = (lowest < highest)[group_K]
    kept = kept[leaks_K]
    group_M = np.unique(group_K[leaks_K], return_inverse=True)[1]
    order = np.argsort(group_M, kind="stable")
    return LeakingItems(group_M[order], split_K[kept][order], ordinal_K[kept][order])
