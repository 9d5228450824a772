"""What the stages after the scan count when they judge a data set by what the store can serve."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from pipeline.store.key_lists import WantedKeys, recall, remember_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from pipeline.config.schema import Config
    from pipeline.project.project import Project
    from pipeline.records import Rejection
    from pipeline.store.cache_folder import CacheFolder
    from pipeline.store.store import Store


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


LOOK_AGAIN_S = 0.5


class Countable(Protocol):
    """What says how much is not there."""

    @property
    def undone(self) -> int:
        """How many items the store does not have everything of."""


Counted = TypeVar("Counted", bound=Countable)


def patiently(stores: Iterable[Store], look: Callable[[], Counted], patience_s: float) -> Counted:
    """Return what a look at the stores shows, once nothing is missing or patience is over."""
    deadline, stores = time.monotonic() + patience_s, tuple(stores)
    while True:
        for store in stores:
            store.refresh()
        seen = look()
        if not seen.undone or time.monotonic() > deadline:
            return seen
        time.sleep(LOOK_AGAIN_S)


KINDS = ("scan", "embed", "graph")


def keep(project: Project, kind: str, keys: bytearray) -> None:
    """Write down the keys of the records of a kind that the data set needs; that it cannot be is no failure."""
    remember_keys(project.cache.disk, project.cache.root, kind, _asked(project.config, kind), keys)


def known(cache: CacheFolder, config: Config, kind: str) -> WantedKeys | None:
    """Return what the data set of a configuration was last found to need of a kind; None where nobody has looked."""
    return recall(cache.disk, cache.root, kind, _asked(config, kind))


def _asked(config: Config, kind: str) -> dict[str, Any]:
    """Return what decides which records are needed, as the configuration says it."""
    asked: dict[str, Any] = {
        "data": config.data.model_dump(mode="json", exclude={"max_rejected_fraction", "on_leak"}),
        "structures": config.structures.model_dump(mode="json"),
    }
    if kind == "embed":
        asked["embed"] = config.embed.model_dump(mode="json", exclude={"batch"})
        asked["gpus"] = config.cluster.embed.gpus > 0
    if kind == "graph":
        asked["graph"] = config.graph.model_dump(mode="json")
    return asked
