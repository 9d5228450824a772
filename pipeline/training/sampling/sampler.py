"""Which items a training step uses, and how ranks and micro-batches share them.

A step holds exactly `batch` items, whatever the ranks and the memory (`epoch_order`). A rank's share of a step and its
micro-batches follow from the step's items alone. So a run that is resumed on other ranks, or whose budget was halved
after an OOM, makes the same steps; only the cuts change.

Sizes are named, one value an item. A product of sizes is written `receptor*ligand`: what it costs in memory is the
largest receptor times the largest ligand, which may be in different items.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.command_line import Command
from pipeline.errors import ConfigError, DataError, PlanInfeasible
from pipeline.keys import content_digest
from pipeline.training.sampling.epoch_order import (
    ORDER_VERSION,
    EpochOrder,
    MicroBatchLimits,
    SamplerSettings,
    ShareSizes,
    cut_micro_batches,
    deal_to_ranks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    Integers = NDArray[np.int64]
    Sizes = Mapping[str, NDArray[np.int64]]

SHOWN = 3  # so many oversize items are named in an error


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Some items of a rank's share of a step; empty if the rank has no share."""

    epoch: int
    step: int
    index: int
    of: int  # micro-batches of this rank in this step, at least one
    items: Integers

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.of


class Sampler:
    """Yields the micro-batches of one rank; every rank computes its own from the same sizes and settings.

    A loop goes over one epoch, from its start or from where a loaded state says. Once its last micro-batch has been
    yielded, the next loop goes over the next epoch.
    """

    def __init__(
        self,
        sizes: Sizes,
        settings: SamplerSettings,
        *,
        rank: int = 0,
        ranks: int = 1,
        data: str = "",
        place: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """Take the sizes of all items; `data` identifies the items, in words or as a digest.

        `place` returns rank and ranks as each loop begins, where another program starts the ranks.
        """
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not one of {ranks}")
        check_sizes(sizes, settings)
        check_budget(sizes, settings)
        self.settings = settings
        self.rank, self.ranks = rank, ranks
        self.epoch = 0
        self.moves = 0  # calls of set_epoch and load_state_dict
        self._sizes, self._data, self._place = sizes, data, place
        self._order = EpochOrder([sizes[name] for name in settings.by], settings)
        self._first = 0  # the step at which a loop over the epoch begins
        self._next = (0, 0)  # the epoch and the step that follow what was yielded

    @property
    def steps(self) -> int:
        return self._order.steps

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches of the epoch: one that is empty for a step in which it has no items."""
        if self._place:
            self.rank, self.ranks = self._place()
            self._check_likeness()
        epoch = self.epoch
        self._next = (epoch, self._first)
        for step in range(self._first, self.steps):
            for micro in self.micros(epoch, step):
                if micro.is_last:
                    self._advance(epoch, step)
                yield micro

    def _advance(self, epoch: int, step: int) -> None:
        """Note that a step was yielded; after the last one comes the next epoch."""
        self._next = (epoch, step + 1) if step + 1 < self.steps else (epoch + 1, 0)
        if self._next[0] != epoch:
            self.epoch, self._first = self._next

    def _check_likeness(self) -> None:
        """Refuse steps in which ranks may have different numbers of batches: loops other than ours would hang."""
        settings, where = self.settings, f"{self.ranks} ranks"
        if self.ranks == 1:
            return
        if settings.budget or settings.micro_batch or settings.padding is not None:
            what = "ranks may need different numbers of micro-batches, and would wait for each other"
            remedy = "SamplerSettings(batch=…, padding=None), no budget or micro_batch"
            raise ConfigError(what, where=where, remedy=remedy)
        rest = 0 if settings.drop_last else len(self._sizes[settings.by[0]]) % settings.batch
        if (least := rest or settings.batch) < self.ranks:
            what = f"a step of {least} items leaves some ranks without items"
            remedy = "SamplerSettings(drop_last=True, …), and at least one item for each rank"
            raise ConfigError(what, where=where, remedy=remedy)

    def step_items(self, epoch: int, step: int) -> Integers:
        """Return the items of a step over all ranks."""
        if epoch < 0 or not 0 <= step < self.steps:
            raise ValueError(f"epoch {epoch} has no step {step}: it has {self.steps:,} steps")
        return self._order.items(epoch, step)

    def shares(self, epoch: int, step: int) -> list[list[Integers]]:
        """Return, for each rank, the items of each of its micro-batches of a step; a rank may have none."""
        return [self._cut(items_K) for items_K in self._dealt(epoch, step)]

    def micros(self, epoch: int, step: int) -> list[MicroBatch]:
        """Return this rank's micro-batches of a step, at least one, under the present budget."""
        parts = self._cut(self._dealt(epoch, step)[self.rank]) or [np.zeros(0, np.int64)]
        return [MicroBatch(epoch, step, index, len(parts), part) for index, part in enumerate(parts)]

    def count(self, epoch: int) -> int:
        """Return how many micro-batches this rank has in an epoch; all its steps are cut for that.

        There is no `len`, because `list` would ask for it and pay for every step twice.
        """
        return sum(len(self.micros(epoch, step)) for step in range(self.steps))

    def _dealt(self, epoch: int, step: int) -> list[Integers]:
        """Return each rank's items of a step."""
        items_E = self.step_items(epoch, step)
        wanted = factors_of(self.settings.cost, self._sizes) if self.settings.cost else self.settings.by
        costs_E = sizes_of_items(self._sizes, wanted, items_E).prod(axis=0)
        return [items_E[places] for places in deal_to_ranks(costs_E, self.ranks)]

    def _cut(self, items_K: Integers) -> list[Integers]:
        """Split a share's items into micro-batches."""
        if len(items_K) == 0:
            return []
        settings, sizes = self.settings, self._sizes
        budgets = {factors_of(name, sizes): float(budget) for name, budget in settings.budget.items()}
        share = ShareSizes(
            sizes_of_items(sizes, settings.padded or settings.by, items_K),
            tuple(sizes_of_items(sizes, factors, items_K) for factors in budgets),
        )
        limits = MicroBatchLimits(tuple(budgets.values()), settings.micro_batch, settings.padding)
        return [items_K[places] for places in cut_micro_batches(share, limits)]

    def adjust(self, budget: Mapping[str, int]) -> None:
        """Change the budget of micro-batches from the next step on, or when one is cut again; steps stay the same."""
        settings = replace(self.settings, budget=budget)
        check_sizes(self._sizes, settings)
        check_budget(self._sizes, settings)
        self.settings = settings

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; if it is the present one, keep the position of a loaded state."""
        if epoch < 0:
            raise ValueError(f"epoch {epoch} does not exist")
        self.moves += 1
        if epoch != self.epoch:
            self._go(epoch, 0)

    def state_dict(self, after: MicroBatch | None = None) -> dict[str, Any]:
        """Return, as JSON data, where to continue: after what was yielded, or `after` a micro-batch of it.

        A loader that reads ahead passes the last one that was used. A step that was not used to its end starts again.
        """
        epoch, step = self._next
        if after is not None:
            epoch, step = after.epoch, after.step + after.is_last
        if step == self.steps:
            epoch, step = epoch + 1, 0
        return {"epoch": epoch, "step": step, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position in a state of the same order of items; ranks and budgets may have changed."""
        changed = [
            f"{name} {state.get(name, 'nothing')!r} then, {value!r} now"
            for name, value in self._identity.items()
            if state.get(name) != value
        ]
        if changed:
            raise ConfigError(
                f"the sampler's state belongs to a different order of items: {'; '.join(changed)}",
                remedy="undo the change, or start a new run from the checkpoint's weights",
            )
        self.step_items(state["epoch"], state["step"])  # raises if there is no such step
        self.moves += 1
        self._go(state["epoch"], state["step"])

    def _go(self, epoch: int, step: int) -> None:
        self.epoch, self._first = epoch, step
        self._next = (epoch, step)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """All that determines the order, as JSON data: settings, sizes, and the version of the algorithm."""
        settings = self.settings
        digests = [content_digest(np.ascontiguousarray(self._sizes[name], np.int64).data) for name in settings.by]
        return {
            "version": ORDER_VERSION,
            "data": self._data,
            "items": len(self._sizes[settings.by[0]]),
            "sizes": content_digest(b"".join(digests)).hex(),
            "by": list(settings.by),
            **{name: getattr(settings, name) for name in ("batch", "brick", "window", "seed", "shuffle", "drop_last")},
        }


def factors_of(name: str, sizes: Sizes) -> tuple[str, ...]:
    """Return the sizes whose product a name stands for."""
    return (name,) if name in sizes else tuple(name.split("*"))


def sizes_of_items(sizes: Sizes, names: Sequence[str], items_K: Integers | list[int]) -> NDArray[np.float64]:
    """Return some sizes of some items [names, K]."""
    return np.array([sizes[name][items_K] for name in names], np.float64)


def product(sizes: Sizes, name: str) -> NDArray[np.float64]:
    """Return a size, or a product of sizes, of every item."""
    first, *others = factors_of(name, sizes)
    values_N = sizes[first].astype(np.float64)
    for factor in others:
        values_N *= sizes[factor]
    return values_N


def check_sizes(sizes: Sizes, settings: SamplerSettings) -> None:
    """Refuse sizes that are missing or not one whole number per item, and too few items."""
    named = (*settings.budget, *([settings.cost] if settings.cost else []))
    names = (*settings.by, *settings.padded, *(factor for name in named for factor in factors_of(name, sizes)))
    missing = [name for name in names if name not in sizes]
    if missing:
        raise ValueError(f"no size is named {missing[0]!r}; available: {', '.join(sorted(sizes)) or 'none'}")
    items = len(sizes[settings.by[0]])
    for name in names:
        values_N = sizes[name]
        if values_N.shape != (items,) or values_N.dtype.kind not in "iu":
            raise ValueError(
                f"{name!r} is {values_N.dtype}{list(values_N.shape)}; one whole number for {items:,} items"
            )
        if items and values_N.min() < 0:
            raise ValueError(f"item {int(values_N.argmin()):,} has a {name!r} of {int(values_N.min()):,}")
    if items < (settings.batch if settings.drop_last else 1):
        least = f"; drop_last needs at least one step of {settings.batch}" if items else ""
        raise DataError(
            f"{items} items to draw from{least}",
            remedy=Command.of("status", then="   (lists rejections and reasons)"),
        )


def oversize(sizes: Sizes, budget: Mapping[str, int]) -> Integers:
    """Return the items that exceed a budget on their own."""
    over = [np.flatnonzero(product(sizes, name) > most) for name, most in budget.items()]
    return np.unique(np.concatenate(over)) if over else np.zeros(0, np.int64)


def check_budget(sizes: Sizes, settings: SamplerSettings) -> None:
    """Refuse a budget that some items exceed on their own, and say by how much."""
    over = oversize(sizes, settings.budget)
    if len(over) == 0:
        return
    texts = []
    for item in over[:SHOWN].tolist():
        of = {name: int(sizes_of_items(sizes, factors_of(name, sizes), [item]).prod()) for name in settings.budget}
        beyond = [f"{size:,} {name}" for name, size in of.items() if size > settings.budget[name]]
        texts.append(f"item {item:,} has {' and '.join(beyond)}")
    limits = ", ".join(f"{most:,} {name}" for name, most in settings.budget.items())
    raise PlanInfeasible(
        f"{len(over):,} of {len(sizes[settings.by[0]]):,} items alone exceed the budget of a micro-batch ({limits}): "
        f"{'; '.join(texts)}{'; …' if len(over) > SHOWN else ''}",
        remedy="raise the budget, or skip these items (pipeline.training.sampling.sampler.oversize lists them)",
    )
