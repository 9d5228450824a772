"""What the planner decided, and every number that a report wants, with where it is from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.memory.footprint import Provenance

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.memory.footprint import Margin, MemoryChoice, MemoryPart


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and where it is from."""

    value: float
    origin: Provenance


class RemedyVerdict(str, Enum):
    """What came of trying a remedy."""

    CHOSEN = "chosen"
    SLOWER = "slower"  # by an estimate; whether all would fit was not looked at
    NOT_NEEDED = "not needed"  # could not be faster than what fits
    TOO_LARGE = "does not fit"
    UNSUPPORTED = "not supported by every card"


class Filled(str, Enum):
    """Why micro-batches are not larger."""

    WHOLE_SHARE = "a rank's whole share of a step is one micro-batch"
    FULL = "a larger budget would not fit"
    PINNED = "the settings say how many items"
    PADDING = "the items of a step differ too much to be padded together in fewer micro-batches"
    EVEN = "a larger budget would make no fewer micro-batches"


@dataclass(frozen=True, slots=True)
class RemedyTrial:
    """A remedy, and what came of it."""

    remedy: str
    choice: MemoryChoice
    verdict: RemedyVerdict
    why: str
    total: Figure | None = None  # bytes, with its margin
    epoch_s: Figure | None = None


@dataclass(frozen=True, slots=True)
class OversizeItem:
    """An item that cannot be trained on as it is."""

    item: int
    id: str  # as people know it
    sizes: Mapping[str, int]
    total: Figure  # what it takes alone, with the margin
    budget_bytes: int
    remedy: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Micro-batches whose memory one of these sizes answers for."""

    sizes: Mapping[str, int]
    live: Figure
    micros: int  # of the epoch that was cut; 0: of a possible one only


@dataclass(frozen=True, slots=True)
class Reserved:
    """What an allocator holds for a plan, and the settings that hold least."""

    bytes: int
    settings: str = ""  # for PYTORCH_CUDA_ALLOC_CONF; empty: leave it unset
    compared: tuple[tuple[str, int], ...] = ()  # settings and what they hold
    origin: Provenance = Provenance.SIMULATED
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How to train so that everything fits."""

    choice: MemoryChoice
    remedies: tuple[str, ...]  # what it does beside smaller micro-batches, in words
    cards: tuple[str, ...]
    limit_bytes: int  # what torch may reserve of the smallest card
    ranks: int
    batch: int
    padded: bool
    budget: Mapping[str, int]  # for the sampler
    cost_weights: Mapping[str, float]  # bytes an item costs per unit of its sizes
    base: Figure  # bytes beside the items' costs
    micro_batch: int | None  # as it was pinned
    items_median: float
    items_most: int
    accumulation_most: int
    accumulation_mean: float
    micros: int
    live: Figure
    reserved: Figure
    total: Figure  # with the margin; what must be below the limit
    used: float  # of the limit, by what is expected to be reserved
    filled: Filled
    every_order: bool  # it holds for the most one-sided micro-batches of any epoch, not only for the one that was cut
    parts: tuple[MemoryPart, ...]  # at the live peak
    margin: Margin
    probability: Figure  # that the whole data set fits
    allocator: Reserved
    step_s: Figure
    epoch_s: Figure
    gpu_hours: Figure
    host_bytes: int  # that are offloaded
    trials: tuple[RemedyTrial, ...]
    oversize: tuple[OversizeItem, ...]
    crop: Mapping[str, int]  # the largest size of an item; empty: nothing is cropped
    buckets: tuple[Bucket, ...]
    questions: int  # that the oracle was asked
    notes: tuple[str, ...]

    def cost(self, sizes: Mapping[str, Any]) -> Any:
        """Return the column `cost` of items by their sizes, which may be whole arrays; none is above the budget."""
        total = sum(weight * _term(term, sizes) for term, weight in self.cost_weights.items())
        return np.clip(np.ceil(total), 1, self.budget["cost"]).astype(np.int64)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = json_data(self)
        return data


def _term(term: str, sizes: Mapping[str, Any]) -> Any:
    factors = () if term == "item" else term.split("*")
    value: Any = np.ones_like(np.asarray(next(iter(sizes.values()))), dtype=np.float64)
    for factor in factors:
        value = value * np.asarray(sizes[factor], np.float64)
    return value


def json_data(value: Any) -> Any:
    """Return what JSON can say of a value; dataclasses and NumPy's numbers may be in it."""
    return json.loads(json.dumps(value, default=lambda one: one.item() if isinstance(one, np.generic) else asdict(one)))
