"""The inputs of the planner (data, how it is cut into micro-batches, allowed settings, cards) and its answer, the plan.

Shapes: N items, M micro-batches of an epoch, S names of sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.command_line import Command
from pipeline.errors import ConfigError, DataError
from pipeline.memory.footprint import Margin, MemoryChoice, MemoryPart, Provenance
from pipeline.memory.hardware.gpus import Device
from pipeline.protocol import ITEMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from pipeline.memory.footprint import Floats, Integers

    Table = Mapping[str, Integers]  # one value an item, by the size's name
    # Cuts epochs into micro-batches as training will, by sizes, costs, a budget in bytes, and ranks: of summed costs,
    # or of items times the largest cost where they are padded.
    Cutter: TypeAlias = Callable[["DataSizes", Integers, int, int], "Micros"]


@dataclass(frozen=True, eq=False)
class Micros:
    """The micro-batches of all ranks in an epoch, or in several."""

    names: tuple[str, ...]  # of the sizes; `items` is among them
    sizes_MS: Integers  # sums where items are concatenated; the number of items and the largest sizes where padded
    step_M: Integers
    rank_M: Integers
    epochs: float = 1.0  # below 1: only a part of an epoch was cut

    @property
    def items_M(self) -> Integers:
        return self.sizes_MS[:, self.names.index(ITEMS)]

    @property
    def share_M(self) -> Integers:
        """Return a number for each micro-batch's rank and step: those of one rank in one step have the same."""
        return np.asarray(self.step_M * (int(self.rank_M.max(initial=0)) + 1) + self.rank_M)

    def per_share(self) -> Integers:
        """Return the number of micro-batches of each rank in each step."""
        return np.asarray(np.unique(self.share_M, return_counts=True)[1])

    @property
    def accumulate(self) -> bool:
        """Tell whether any rank has several micro-batches in a step."""
        return bool(self.per_share().max() > 1)


@dataclass(frozen=True, eq=False)
class DataSizes:
    """The sizes of all items and how they become micro-batches."""

    sizes: Table
    cut: Cutter
    padded: bool = False
    ids: Any = None  # names of items, for messages; `take(numbers)` returns those of some
    padding: float | None = None  # padded/real of a micro-batch that `cut` makes, at most; None: the caller knows
    looser: Mapping[float | None, Cutter] = field(default_factory=dict)  # cuts that pad more, by the most that they do
    draws: Any = None  # how an epoch draws from the items; `take(numbers)` returns those of some

    @property
    def distinct(self) -> int:
        """The number of items, where those that an epoch draws several times have several rows."""
        return self.items if self.draws is None else int((self.draws.copy_N == 0).sum())

    def called(self, item: int) -> str:
        return f"item {item:,}" if self.ids is None else self.ids[item]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @property
    def items(self) -> int:
        return len(next(iter(self.sizes.values()))) if self.sizes else 0

    @property
    def sizes_NS(self) -> Integers:
        columns = [np.asarray(values_N, np.int64) for values_N in self.sizes.values()]
        return np.stack(columns, axis=1) if columns else np.zeros((0, 0), np.int64)

    def only(self, keep_N: NDArray[np.bool_]) -> DataSizes:
        kept_N = np.flatnonzero(keep_N)
        ids, draws = (rows if rows is None else rows.take(kept_N) for rows in (self.ids, self.draws))
        sizes = {name: values_N[kept_N] for name, values_N in self.sizes.items()}
        return replace(self, sizes=sizes, ids=ids, draws=draws)

    def cropped(self, limits: Mapping[str, int]) -> DataSizes:
        """Return the items with larger sizes cut down to the limits."""
        return replace(self, sizes={name: np.minimum(values_N, limits[name]) for name, values_N in self.sizes.items()})


class Oversize(StrEnum):
    """What to do with items that fit under no plan."""

    ERROR = "error"
    SKIP = "skip"
    CROP = "crop"


@dataclass(frozen=True)
class PlanRequest:
    """The training to plan for; a setting that is None is left to the planner."""

    batch: int  # items in a step, over all ranks
    ranks: int = 1
    epochs: int = 1
    precisions: tuple[str, ...] = ("fp32",)  # allowed ones, the preferred first
    blocks: int = 0  # that the model repeats
    checkpointing: int | None = None  # the number of checkpointed blocks
    offload: bool | None = None
    shards: int | None = 1
    micro_batch: int | None = None  # items in a micro-batch
    oversize: Oversize = Oversize.ERROR
    ratios: tuple[float, ...] = ()  # measured/predicted of past runs of this model on such a card
    measured: MemoryChoice | None = None  # what these runs had chosen; None: they hold for every choice
    compiled: bool = False
    seed: int = 0

    def check(self, data: DataSizes) -> None:
        """Raise for requests that no plan could satisfy."""
        if self.batch < self.ranks:
            raise ConfigError(
                f"an effective batch of {self.batch} items is too small for {self.ranks} ranks: each needs one",
                remedy=f"set the batch to at least {self.ranks}, or use at most {self.batch} GPUs",
            )
        if data.items == 0:
            remedy = Command.of("status", then="   (lists rejections)")
            raise DataError("the data set has no items to plan for", remedy=remedy)


REDUCED_BYTES = 64 << 20  # ranks add up their gradients in pieces of it, packed in one buffer


@dataclass(frozen=True)
class CardSpec:
    """The properties of a device that a plan depends on."""

    name: str
    memory_bytes: int  # of all processes together; for people
    budget_bytes: int  # what torch may reserve: less context, communicators and what the system keeps
    flops_per_s: Mapping[str, float]  # by precision, at best; a precision that is not in it cannot be used
    bytes_per_s: float  # of its memory
    launch_s: float = 7e-6  # between two kernels of eager torch
    caching: bool = True  # memory is held by the caching allocator; else live bytes are all there is
    notes: tuple[str, ...] = ()
    workspace_bytes: int = 0  # of the memory that torch may reserve, for cuBLAS; not in `budget_bytes`
    process_bytes: int = 0  # what each process takes outside torch

    @classmethod
    def of(cls, device: Device, ranks: int, *, fraction: float | None = None, share: int = 1) -> CardSpec:
        """Return the card for a known GPU; its budget leaves room for cuBLAS and, with several ranks, the reduction.

        `fraction` is the share of the card's memory that a process may use. Of `share` trainings on it, each gets an
        equal part.
        """
        rates = {"fp32": device.fp32_flops}
        rates |= {"bf16": device.half_flops} if device.has_bf16 else {}
        rates |= {"fp16": device.half_flops} if device.has_fp16 else {}
        allowed_bytes = device.budget_bytes(ranks) if fraction is None else int(fraction * device.usable_bytes)
        withheld_bytes = device.workspace_bytes + (REDUCED_BYTES if ranks > 1 else 0)
        held_bytes = part_of_card(min(device.budget_bytes(ranks), allowed_bytes), device.process_bytes, share)
        budget_bytes = max(0, held_bytes - withheld_bytes)
        made = cls(device.name, device.usable_bytes, budget_bytes, rates, device.bandwidth, notes=device.notes)
        return replace(made, workspace_bytes=withheld_bytes, process_bytes=device.process_bytes)


def part_of_card(held_bytes: int, process_bytes: int, share: int) -> int:
    """Return what torch may hold in each of `share` processes, of what it may hold in one that is alone on a card."""
    return (held_bytes + process_bytes) // share - process_bytes


def weakest(cards: Sequence[CardSpec]) -> CardSpec:
    """Return the weakest in every respect of all cards that a job may land on, as if they were one."""
    precisions = [name for name in cards[0].flops_per_s if all(name in card.flops_per_s for card in cards)]
    return CardSpec(
        name=", ".join(card.name for card in cards),
        memory_bytes=min(card.memory_bytes for card in cards),
        budget_bytes=min(card.budget_bytes for card in cards),
        flops_per_s={name: min(card.flops_per_s[name] for card in cards) for name in precisions},
        bytes_per_s=min(card.bytes_per_s for card in cards),
        launch_s=max(card.launch_s for card in cards),
        caching=any(card.caching for card in cards),
        notes=tuple(note for card in cards for note in card.notes),
        workspace_bytes=max(card.workspace_bytes for card in cards),
        process_bytes=max(card.process_bytes for card in cards),
    )


AT_ONCE = 1 << 15  # items whose numbers are reckoned together
MOST_COST = 1 << 52  # the sampler adds costs in float64
ITEM = "item"  # the term that is the same for every item; others name sizes, such as `nodes` or `nodes*edges`


@dataclass(frozen=True)
class CostModel:
    """Predicts bytes: `base`, and a weight for each term of the sizes."""

    weights: Mapping[str, float]
    base: float = 0.0

    def cost(self, sizes: Mapping[str, Integers], most: int = MOST_COST) -> Integers:
        """Return each item's cost as a whole number of bytes from 1 to `most`, without the base."""
        terms = self.weights.items()
        return by_page(sizes, lambda page: np.ceil(sum(product_of(one, page) * w for one, w in terms)).clip(1, most))


def by_page(sizes: Mapping[str, Integers], reckon: Callable[[Mapping[str, Integers]], Floats]) -> Integers:
    """Return a whole number for each item, some items at a time: all at once would take several times the memory."""
    number_N = np.empty(len(next(iter(sizes.values()), ())), np.int64)
    for at in range(0, len(number_N), AT_ONCE):
        number_N[at : at + AT_ONCE] = reckon({name: size_N[at : at + AT_ONCE] for name, size_N in sizes.items()})
    return number_N


def product_of(term: str, sizes: Mapping[str, Integers]) -> Floats:
    """Return the value of a term for each item."""
    factors = () if term == ITEM else term.split("*")
    return np.asarray(np.prod([np.ones(len(next(iter(sizes.values())))), *(sizes[one] for one in factors)], axis=0))


@dataclass(frozen=True, slots=True)
class Figure:
    """A number and where it comes from."""

    value: int | float
    origin: Provenance


class RemedyVerdict(StrEnum):
    """The result of trying a remedy."""

    CHOSEN = "chosen"
    NOT_NEEDED = "not needed"  # an earlier one fits
    TOO_LARGE = "does not fit"
    UNSUPPORTED = "not supported by every GPU"
    FAILS = "ends in an error"


class MicroBatchLimit(StrEnum):
    """Why micro-batches are not larger."""

    WHOLE_SHARE = "one micro-batch holds a rank's whole share of a step"
    FULL = "a larger budget would not fit"
    PINNED = "the settings fix the number of items"
    PADDING = "item sizes differ too much for fewer padded micro-batches"


@dataclass(frozen=True, slots=True)
class RemedyTrial:
    """A remedy and the result of trying it."""

    remedy: str
    choice: MemoryChoice
    verdict: RemedyVerdict
    why: str
    total: Figure | None = None  # bytes, with its margin
    epoch_s: Figure | None = None


@dataclass(frozen=True, slots=True)
class OversizeItem:
    """An item that does not fit, even alone."""

    item: int
    id: str  # as people know it
    sizes: Mapping[str, int]
    total: Figure  # what it takes alone, with the margin
    budget_bytes: int
    remedy: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Micro-batches that take at most what one of these sizes takes."""

    sizes: Mapping[str, int]
    live: Figure


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes that the allocator reserves for a plan, with the allocator settings that reserve least."""

    bytes: int
    settings: str = ""  # of torch's allocator; empty: leave it unset
    origin: Provenance = Provenance.SIMULATED
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cuts:
    """The micro-batches of an epoch."""

    items_median: float
    items_most: int
    steps_mean: float  # micro-batches of a rank in a step
    steps_most: int
    limit: MicroBatchLimit

    @classmethod
    def of(cls, micros: Micros, limit: MicroBatchLimit) -> Cuts:
        """Summarize the micro-batches of an epoch."""
        items_M, steps = micros.items_M, micros.per_share()
        return cls(float(np.median(items_M)), int(items_M.max()), float(steps.mean()), int(steps.max()), limit)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How to train so that everything fits."""

    request: PlanRequest
    cards: tuple[str, ...]
    limit_bytes: int  # what torch may reserve of the smallest card
    choice: MemoryChoice
    remedies: tuple[str, ...]  # in addition to smaller micro-batches, in words
    cost_model: CostModel
    budget_bytes: int  # of a micro-batch: the sum of its items' costs, or their number times the largest
    padding: float | None  # padded/real of a micro-batch, at most; None: items are concatenated
    cuts: Cuts
    live: Figure
    reserved: Figure
    total: Figure  # with the margin; what must be below the limit
    margin: Margin
    probability: Figure  # that the whole data set fits
    allocator: Reserved
    parts: tuple[MemoryPart, ...]  # at the live peak
    buckets: tuple[Bucket, ...]
    step_s: Figure
    epoch_s: Figure
    host_bytes: int  # that are offloaded
    trials: tuple[RemedyTrial, ...]
    notes: tuple[str, ...]
    oversize: tuple[OversizeItem, ...] = ()
    crop: Mapping[str, int] = field(default_factory=dict)  # the largest size of an item; empty: nothing is cropped

    @property
    def worst(self) -> Bucket:
        return max(self.buckets, key=lambda bucket: bucket.live.value)

    @property
    def gpu_hours(self) -> Figure:
        request = self.request
        return Figure(self.epoch_s.value * request.epochs * request.ranks / 3600, self.epoch_s.origin)

    def cost(self, sizes: Mapping[str, Integers]) -> Integers:
        """Return the cost of items by their sizes; none is above the budget."""
        return self.cost_model.cost(sizes, self.budget_bytes)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A micro-batch size and an accumulation count, their memory, and the cards on which they fit."""

    items: int
    accumulation: int
    live: Figure
    reserved: Figure
    total: Figure
    fits: Mapping[str, bool]  # by card


@dataclass(frozen=True, slots=True)
class Offer:
    """A number of GPUs that could be requested."""

    name: str
    ranks: int
    cards: tuple[CardSpec, ...]


@dataclass(frozen=True, slots=True)
class PlannedOffer:
    """An offer with its plan, or with the reason why there is none."""

    offer: Offer
    plan: MemoryPlan | None
    why: str = ""

    @property
    def gpu_hours(self) -> Figure | None:
        return self.plan.gpu_hours if self.plan else None

    @property
    def hours(self) -> Figure | None:
        """Return the wall-clock hours of a run."""
        if self.plan is None:
            return None
        return Figure(self.plan.gpu_hours.value / self.offer.ranks, Provenance.ASSUMED)
