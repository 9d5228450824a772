"""What the stages after the scan count when they judge a data set by what the store can serve."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from pipeline.records import Rejection


@dataclass(slots=True)
class Judged:
    """How many items can be used, how many cannot and why, and how many have still to be done."""

    items: int = 0  # those that are known: accepted and rejected
    rejected: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    undone: int = 0  # items of which the store does not have everything
    first_undone: str = ""
    unnamed: int = 0  # further ones, which nobody asked for

    @property
    def accepted(self) -> int:
        """Count the items that can be used."""
        return self.items - sum(self.rejected.values())

    def reject(self, rejected: Rejection) -> None:
        """Count an item that was left out."""
        self.items += 1
        reason = rejected.reason.value
        self.rejected[reason] = self.rejected.get(reason, 0) + 1
        self.examples.setdefault(reason, f"{rejected.id}: {rejected.detail}")

    def miss(self, item: str, *, asked: bool = True) -> None:
        """Count an item that has still to be done."""
        if not asked:
            self.unnamed += 1
            return
        self.undone += 1
        self.first_undone = self.first_undone or item

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        fraction = 1 - self.accepted / self.items if self.items else 0.0
        return asdict(self) | {"accepted": self.accepted, "rejected_fraction": fraction}
