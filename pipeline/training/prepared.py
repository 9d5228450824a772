"""Decisions made before a training begins: its name, the plan of each phase, and the paths of its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.memory.planning.memory_plan import CostModel, by_page
from pipeline.training.sampling import SamplerSettings, narrow

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.memory.planning.memory_plan import MemoryPlan

    Integers = NDArray[np.int64]

COST = "cost"  # the size that limits micro-batches: bytes
LIKENESS = "likeness"  # the size that orders an epoch; it does not depend on a plan
UNIT = 1000  # of likeness: an item of mean sizes
MOST_SHRUNK = 16
PADDING = 1.03  # padded/real of a micro-batch, at most
BEST, LAST = "best", "last"  # of the checkpoints of a training, by its validations or its steps
LOOSER = (1.1, 1.2, 1.4, 2.0, 8.0)  # a plan may choose this: fewer micro-batches with more padding


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The plan of a phase: epochs on the same items."""

    name: str
    epochs: int
    budget_bytes: int  # of a micro-batch: the sum of its items' costs, or their number times the largest
    base_bytes: int  # besides
    live_bytes: int  # of the worst micro-batch
    reserved_bytes: int  # what the allocator is expected to hold then
    weights: Mapping[str, float]  # bytes that an item costs per unit of its sizes
    largest: Mapping[str, int] = field(default_factory=dict)  # larger items are left out,
    smallest: Mapping[str, int] = field(default_factory=dict)  # and smaller ones too
    padding: float = PADDING  # of micro-batches that are padded
    kept: int = 0  # micro-batches of a step that a rank keeps for its second pass
    ahead_bytes: int = 0  # of `reserved_bytes`, for inputs that are copied while a step runs; 0: none

    def cost(self, sizes: Mapping[str, Integers]) -> Integers:
        """Return each item's cost in bytes by its sizes; at most the budget, so that each item fits alone."""
        return CostModel(self.weights).cost(sizes, self.budget_bytes)

    def keeps(self, sizes: Mapping[str, Integers]) -> NDArray[np.bool_]:
        """Tell which items take part."""
        return in_bounds(sizes, self.largest, self.smallest)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that a training needs to know besides its configuration."""

    name: str  # of its folder
    recipe: Mapping[str, Any]  # everything that decides the outcome
    table: str  # the key of the table of the data set, in hex
    precision: str
    checkpointing: int  # the number of repeated blocks that are recomputed in backward
    offload: bool
    sharded: bool
    phases: tuple[PhasePlan, ...]
    limit_bytes: int  # the most that torch may take of a GPU, or a process of the machine
    margin: float  # by which the plan may be wrong
    ranks: int
    cpus: int  # of a rank
    mem_bytes: int  # of a node
    mem_why: str
    allocator: str  # settings of torch's, '' for its own
    heap_bytes: int = 0  # freed memory that the C library keeps in a rank without a GPU; 0: as by default
    remedies: tuple[str, ...] = ()
    crop: Mapping[str, int] = field(default_factory=dict)  # the largest size of an item; empty: none is cropped
    skipped: tuple[int, ...] = ()  # items of the split that no plan can hold
    notes: tuple[str, ...] = ()
    step_s: float = 0.0  # as planned
    workspace_bytes: int = 0  # of a GPU, that torch needs besides `limit_bytes`
    process_bytes: int = 0  # of a GPU, that each process takes outside torch

    @property
    def epochs(self) -> int:
        return sum(phase.epochs for phase in self.phases)

    @property
    def reserved_bytes(self) -> int:
        """The memory that a GPU must have at least."""
        return max(phase.reserved_bytes for phase in self.phases)

    @property
    def held_bytes(self) -> int:
        """The most that torch may hold of a GPU, with its workspaces."""
        return self.limit_bytes + self.workspace_bytes

    @property
    def taken_bytes(self) -> int:
        """The GPU memory that the process is expected to take, with the margin and the memory outside torch."""
        return ceil(self.reserved_bytes * (1 + self.margin)) + self.workspace_bytes + self.process_bytes

    def phase_of(self, epoch: int) -> int:
        """Return the index of the phase of an epoch, counted from 0; of later ones, the last."""
        ends = accumulate(phase.epochs for phase in self.phases)
        return next((index for index, end in enumerate(ends) if epoch < end), len(self.phases) - 1)


def in_bounds(
    sizes: Mapping[str, Integers], largest: Mapping[str, int], smallest: Mapping[str, int]
) -> NDArray[np.bool_]:
    """Tell which items are as large as allowed."""
    keep_N = np.ones(len(next(iter(sizes.values()))), np.bool_)
    for name, most in largest.items():
        keep_N &= sizes[name] <= most
    for name, least in smallest.items():
        keep_N &= sizes[name] >= least
    return keep_N


def likeness(sizes: Mapping[str, Integers]) -> Integers:
    """Return each item's relative size (its sizes over their means, averaged), by which items are put together.

    Plans and ranks may change while a model is trained; the order of its steps must not.
    """
    mean = {name: max(1e-9, float(np.mean(size_N))) for name, size_N in sizes.items()}
    return narrow(by_page(sizes, lambda page: np.rint(sum(page[a] / mean[a] for a in mean) / len(mean) * UNIT).clip(1)))


def sampler_settings(batch: int, budget_bytes: int, *, padding: float | None, **more: Any) -> SamplerSettings:
    """Return the sampler's settings, for planning and for training: items have a COST and a LIKENESS.

    `padding` is the most that a micro-batch is padded; None: its items are concatenated.
    """
    return SamplerSettings(
        batch, by=(LIKENESS,), cost=COST, budget={COST: budget_bytes}, padding=padding, padded=(COST,), **more
    )


def shrunk_budget(budget: int, times: int) -> int:
    """Halve a budget once for each time that the GPU ran out of memory."""
    return max(1, budget >> min(times, MOST_SHRUNK))


def phase_plan(name: str, epochs: int, plan: MemoryPlan, *, ahead_bytes: int = 0, **more: Any) -> PhasePlan:
    """Return a phase's plan; `more` are fields that do not follow from the memory plan."""
    return PhasePlan(
        name,
        epochs,
        budget_bytes=plan.budget_bytes,
        base_bytes=int(plan.cost_model.base),
        live_bytes=int(plan.live.value),
        reserved_bytes=int(plan.reserved.value) + ahead_bytes,
        weights=dict(plan.cost_model.weights),
        padding=plan.padding or PADDING,
        ahead_bytes=ahead_bytes,
        **more,
    )


@dataclass(frozen=True)
class RowShare:
    """The rows of one task among several that apply a model side by side."""

    first: int
    stop: int
    task: int
    tasks: int
    run: str  # notes of earlier runs do not count

    def of(self, rows_N: Integers) -> Integers:
        """Return those of some rows that are this task's."""
        return rows_N[(rows_N >= self.first) & (rows_N < self.stop)]


def cut_rows(done_N: Integers, rows: int, step: int, tasks: int) -> list[tuple[int, int]]:
    """Return ranges of rows with about as much left to do in each; `step` rows of an item stay together."""
    is_left = np.ones(rows, bool)
    is_left[done_N] = False
    left_I = np.add.reduceat(is_left.astype(np.int64), np.arange(0, rows, step))  # of each item
    tasks = max(1, min(tasks, int((left_I > 0).sum())))
    ends = np.searchsorted(np.cumsum(left_I), np.arange(1, tasks) * left_I.sum() / tasks) + 1
    edges = np.unique([0, *(ends * step).tolist(), rows])
    return list(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True))


class ModelFolder:
    """The paths of a training's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.prepared = path / "prepared.json"  # settings and plan, decided before training
        self.accepted_code = path / "accepted_code.json"  # digests of other code with which it may continue
        self.pruned = path / "pruned.json"  # why a sweep stopped it early, and after which epoch
        self.writers = path / "writers"  # the claim of the training process: run, host and start
        self.export = path / "model.json"  # of an exported model only: task, checkpoint and metrics
        self.settings = path / "settings.json"  # the configuration of the training
        self.checkpoints = path / "checkpoints"  # one folder per checkpoint
        self.bundles = path / "bundles"  # failed steps, for `pipeline replay`
        self.outputs = path / "outputs"  # temporary outputs of a validation
        self.evaluations = path / "evaluations"  # metrics, one file per split
