"""What ranks tell each other at the end of a step, and what follows from it: all of them decide the same."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.training.stepping import refuse_unequal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(slots=True)
class Words:
    """What a rank has done in a step, and wants."""

    terms: Mapping[str, Sequence[float]] = field(default_factory=dict)  # sums and weights
    items: int = 0
    micros: int = 0
    ooms: int = 0
    rejected: int = 0
    skipped: int = 0  # items that fit nowhere
    just_skipped: int = 0  # of these, since the step began for the last time
    cropped: int = 0
    remedied: Mapping[str, int] = field(default_factory=dict)  # items that ran on a rung of the ladder, by its name
    again: bool = False  # the step has come to no end on it
    absent: list[int] | None = None  # parameters without a gradient; None: all of them
    budget: int = 0  # that it wants from now on
    ending: int = 0  # the signal that told it to end
    is_due: bool = False  # a checkpoint, by the first rank's clock
    host_share: float = 0.0  # of its memory limit that the host has used
    is_written: bool = False  # its share of a checkpoint that is saved behind the training's back
    lost: str = ""  # its parameters are torn: memory ended within the optimizer

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)

    def carry(self, first: Words) -> None:
        """Add what was learned and counted before the step began again; what ran then has come to nothing."""
        self.budget = min(self.budget, first.budget)
        self.ooms += first.ooms
        self.cropped += first.cropped


@dataclass(frozen=True, slots=True)
class Heard:
    """The words of all ranks."""

    words: tuple[Words, ...]

    @classmethod
    def of(cls, said: Sequence[Mapping[str, Any]]) -> Heard:
        """Read what ranks said; terms of unequal names are refused."""
        words = tuple(Words(**one) for one in said)
        refuse_unequal([list(one.terms) for one in words])
        return cls(words)

    @property
    def names(self) -> list[str]:
        """Return the names of the terms."""
        return next((list(one.terms) for one in self.words if one.terms), [])

    def total(self, name: str) -> tuple[float, float]:
        """Return the sum and the weight of a term over all ranks."""
        found = [one.terms[name] for one in self.words if name in one.terms]
        return math.fsum(total for total, _ in found), math.fsum(weight for _, weight in found)

    @property
    def totals(self) -> dict[str, tuple[float, float]]:
        """Return the sums and weights of all terms."""
        return {name: self.total(name) for name in self.names}

    @property
    def not_finite(self) -> list[int]:
        """Return the ranks that have a sum which is not finite."""
        return [
            rank
            for rank, one in enumerate(self.words)
            if not all(math.isfinite(total) and math.isfinite(weight) for total, weight in one.terms.values())
        ]

    def with_gradient(self, parameters: int) -> list[int]:
        """Return which parameters have a gradient on any rank."""
        absent = [set(one.absent) for one in self.words if one.absent is not None]
        nowhere = set.intersection(*absent) if absent else set(range(parameters))
        return [number for number in range(parameters) if number not in nowhere]

    def sum_of(self, name: str) -> int:
        """Return the sum of a count over all ranks."""
        return sum(getattr(one, name) for one in self.words)

    @property
    def remedied(self) -> dict[str, int]:
        """Return how many items ran on each rung of the ladder."""
        names = sorted({name for one in self.words for name in one.remedied})
        return {name: sum(one.remedied.get(name, 0) for one in self.words) for name in names}

    @property
    def ending(self) -> int:
        """Return the signal that told any rank to end; 0: none."""
        return max(one.ending for one in self.words)

    @property
    def lost(self) -> str:
        """Return what any rank has lost, with its number."""
        return next((f"rank {rank}: {one.lost}" for rank, one in enumerate(self.words) if one.lost), "")

    @property
    def is_written(self) -> bool:
        """Say whether every rank has written its share of a checkpoint."""
        return all(one.is_written for one in self.words)

    @property
    def is_due(self) -> bool:
        """Say whether the first rank wants a checkpoint."""
        return self.words[0].is_due

    @property
    def budget(self) -> int:
        """Return the least budget that any rank wants."""
        return min(one.budget for one in self.words)

    @property
    def host_share(self) -> float:
        """Return the largest share of a host's memory limit that is used."""
        return max(one.host_share for one in self.words)
