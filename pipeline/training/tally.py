"""What an epoch comes to, step by step; part of a checkpoint, so that an epoch's figures are of all of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.training.words import Heard


@dataclass(slots=True)
class Tally:
    """The sums of an epoch so far, over all ranks."""

    epoch: int
    steps: int = 0
    items: int = 0
    fewest: int = 0  # items of a step
    most: int = 0
    micros: int = 0
    ooms: int = 0
    rejected: int = 0
    skipped: int = 0  # items that fit nowhere
    cropped: int = 0
    remedied: dict[str, int] = field(default_factory=dict)  # items on each rung of the ladder
    left_out: int = 0  # steps
    wall_s: float = 0.0
    wait_s: float = 0.0  # of the first rank, for data
    waited_before_s: float = 0.0  # by the loader, before this epoch
    terms: dict[str, list[float]] = field(default_factory=dict)  # sums and weights

    def add(self, heard: Heard, took_s: float) -> None:
        """Count a step."""
        items = heard.sum_of("items")
        self.fewest = min(self.fewest, items) if self.steps else items
        self.most = max(self.most, items)
        self.steps += 1
        self.items += items
        for name in ("micros", "ooms", "rejected", "skipped", "cropped"):
            setattr(self, name, getattr(self, name) + heard.sum_of(name))
        for rung, items in heard.remedied.items():
            self.remedied[rung] = self.remedied.get(rung, 0) + items
        self.wall_s += took_s
        for name, (total, weight) in heard.totals.items():
            kept = self.terms.get(name, [0.0, 0.0])
            self.terms[name] = [kept[0] + total, kept[1] + weight]

    @property
    def losses(self) -> dict[str, float | None]:
        """Return each term's mean."""
        return {name: total / weight if weight else None for name, (total, weight) in self.terms.items()}

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tally:
        """Read what `to_json` wrote."""
        return cls(**data)
