"""How far a training has come, and the rehearsal of the worst micro-batch before its first step."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.device.out_of_memory import free_caches, out_of_memory_error
from pipeline.errors import DataError, PlanInfeasible
from pipeline.memory.runtime.recovery import StepSnapshot
from pipeline.training.checkpoints.keeper import SavedProgress
from pipeline.training.items.loader import PROCESSES
from pipeline.training.sampling.sampler import MicroBatch
from pipeline.training.step.micro_batches import Piece, RankShare
from pipeline.training.step_clock import READ

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.config.schema_train import ValidationSection
    from pipeline.memory.runtime.meters import HostMeter, Meter
    from pipeline.protocol import Task
    from pipeline.training.items.batch import BatchOrigin, TaskBatch
    from pipeline.training.items.loader import Loader
    from pipeline.training.prepared import Stretch
    from pipeline.training.step.global_step import StepReport
    from pipeline.training.step.local_step import Stepper
    from pipeline.training.step.step import Step
    from pipeline.training.step_clock import StepClock


FELL_BEHIND, FELL_BEHIND_S = 0.1, 10.0  # of an epoch, and seconds, were waited for what threads read
ROOM_TO_FORK = 0.7  # of the host's memory may be used when processes are forked


@dataclass(frozen=True, eq=False)
class RunningStretch:
    """A stretch of epochs with its loader and the cost of each of its items."""

    stretch: Stretch
    loader: Loader
    cost_N: NDArray[Any]
    first_epoch: int
    task: Task  # whose loss it is trained by

    @property
    def epochs(self) -> range:
        return range(self.first_epoch, self.first_epoch + self.stretch.epochs)

    @property
    def steps(self) -> int:
        return self.loader.sampler.steps

    def at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the sampler's state at a step of an epoch."""
        return {**self.loader.sampler.state_dict(), "epoch": epoch, "step": step}

    def cut_by(self, budget: int) -> None:
        """Have the sampler cut micro-batches to a budget, if it uses one."""
        sampler = self.loader.sampler
        if sampler.settings.budget:
            sampler.adjust({**sampler.settings.budget, "cost": budget})

    def hasten_readers(self, seconds: Mapping[str, float], host: HostMeter | None) -> bool:
        """Have processes read from now on, if threads fell behind and there is memory and a core; tell whether so."""
        waited_s = seconds.get(READ, 0.0)
        fell_behind = waited_s > max(FELL_BEHIND_S, FELL_BEHIND * sum(seconds.values()))
        has_room = host is None or host.read().share < ROOM_TO_FORK
        if self.loader.readers == PROCESSES or not fell_behind or not has_room or len(os.sched_getaffinity(0)) < 2:
            return False
        self.loader.readers = PROCESSES
        return True

    def shares(self, step: Step, *, hold: int, leave_out: Collection[str]) -> Iterator[RankShare]:
        """Yield this rank's share of each step, from where the loader is to the end of the epoch."""
        batches, fetch = step.clock.each(READ, self.loader.read()), partial(self._fetch, step.clock)
        ahead = step.ahead if self.stretch.ahead_bytes else None
        named: dict[str, Any] = {"hold": hold, "leave_out": leave_out, "ahead": ahead, "at_hand": self.loader.at_hand}
        while not (share := RankShare(batches, fetch, **named)).is_over:
            yield share

    def _fetch(self, clock: StepClock, numbers: Sequence[int], origin: BatchOrigin) -> TaskBatch:
        """Read a micro-batch again, as ahead of its turn: some of it may be left out, or not fit but in pieces."""
        with clock.within(READ):
            return self.loader.fetch_again(numbers, origin, ahead=True)


class TrainingProgress:
    """Counts steps and epochs, and tracks the best validation; stored in checkpoints."""

    def __init__(self, validation: ValidationSection, epochs: int) -> None:
        """Start at 0 of `epochs` epochs."""
        self.epochs = epochs
        self.done = 0  # steps
        self.epoch = 0
        self.next = 0  # the step of the epoch that comes
        self.best: float | None = None
        self.stale = 0  # validations without a better one
        self.validated = 0  # the step after which that was done last
        self.is_finished = False
        self.tally = EpochTotals(0)
        self.poisoned: set[int] = set()  # steps that are left out after a rollback
        self.damaged: set[str] = set()  # items that steps were made without, as their records were damaged
        self.killed: set[str] = set()  # the same, as the process died on them
        self._validation = validation

    @property
    def is_in_last_epoch(self) -> bool:
        return self.epoch + 1 == self.epochs

    def count(self, report: StepReport, took_s: float) -> None:
        """Count a step that was made."""
        self.done += 1
        self.next += 1
        self.tally.add(report, took_s)

    def leave_out_step(self) -> None:
        """Count a step that was skipped."""
        self.done += 1
        self.next += 1
        self.tally.left_out += 1

    def end_epoch(self) -> None:
        """Go on to the next epoch; training is finished after the last one, or when validations no longer improve."""
        self.is_finished = self.is_in_last_epoch or self.is_stale
        self.epoch += 1
        self.next = 0

    def is_due_within(self, steps: int) -> bool:
        """Tell whether a validation is due here, between two steps of an epoch of so many."""
        if not 0 < self.next < steps or self.validated == self.done:
            return False
        return self._validation.is_due_within(self.next, steps, self.done)

    def is_due_after(self) -> bool:
        """Tell whether a validation is due at the end of this epoch."""
        return self.is_in_last_epoch or self._validation.is_due_after(self.epoch + 1, self.done)

    def judge(self, figures: Mapping[str, float]) -> float | None:
        """Return the monitored figure of a validation, and count the validations since the best one."""
        settings = self._validation
        figure = figures.get(settings.monitor)
        if figures and figure is None:
            known = ", ".join(figures)
            what = f"the validation has no metric {settings.monitor!r}; available: {known}"
            raise DataError(
                what, where="train.validation.monitor", remedy="set train.validation.monitor to one of these"
            )
        if figure is None:
            return None
        if not math.isfinite(figure):
            self.stale += 1
            return None
        better = self.best is None or (figure < self.best if settings.lower_is_better else figure > self.best)
        self.best, self.stale = (figure, 0) if better else (self.best, self.stale + 1)
        return figure

    @property
    def is_stale(self) -> bool:
        """Whether validations have not become better for long enough to end."""
        patience = self._validation.patience
        return patience is not None and self.stale >= patience

    def refuse_nothing_learned(self) -> None:
        """Raise after an epoch in which every loss had weight 0: only the weight decay moved the model."""
        weights = [weight for _, weight in self.tally.terms.values()]
        if weights and not any(weights):
            what = f"nothing was learned in an epoch of {self.tally.items:,} items: every term of the loss has weight 0"
            remedy = "check that the items have labels, targets or peptides"
            raise DataError(what, where="train.task", remedy=remedy)

    def place(self, sampler: Mapping[str, Any]) -> SavedProgress:
        """Return the progress for a checkpoint."""
        return SavedProgress(
            epoch=self.epoch,
            done=self.done,
            sampler=sampler,
            best=self.best,
            stale=self.stale,
            monitor=self._validation.monitor,
            tally=asdict(self.tally),
            poisoned=sorted(self.poisoned),
            validated=self.validated,
            damaged=sorted(self.damaged),
            killed=sorted(self.killed),
        )

    def take_up(self, place: SavedProgress) -> None:
        """Restore the progress from a checkpoint."""
        self.epoch, self.done, self.next = place.epoch, place.done, int(place.sampler.get("step", 0))
        is_alike = place.monitor == self._validation.monitor  # of another figure it says nothing
        self.best, self.stale = (place.best, place.stale) if is_alike else (None, 0)
        self.poisoned, self.validated, self.damaged = set(place.poisoned), place.validated, set(place.damaged)
        self.killed |= set(place.killed)
        self.is_finished = self.epoch >= self.epochs or self.is_stale
        self.tally = EpochTotals(**place.tally) if place.tally else EpochTotals(self.epoch)


@dataclass(slots=True)
class EpochTotals:
    """The totals of an epoch so far, over all ranks."""

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
    seconds: dict[str, float] = field(default_factory=dict)  # of the first rank: of each phase, and of no step too
    terms: dict[str, list[float]] = field(default_factory=dict)  # sums and weights

    def add(self, report: StepReport, took_s: float) -> None:
        """Add a step."""
        items = report.sum_of("items")
        self.fewest = min(self.fewest, items) if self.steps else items
        self.most = max(self.most, items)
        self.steps += 1
        self.items += items
        for name in ("micros", "ooms", "rejected", "skipped", "cropped"):
            setattr(self, name, getattr(self, name) + report.sum_of(name))
        for rung, items in report.remedied.items():
            self.remedied[rung] = self.remedied.get(rung, 0) + items
        self.wall_s += took_s
        for name, (total, weight) in report.totals.items():
            kept = self.terms.get(name, [0.0, 0.0])
            self.terms[name] = [kept[0] + total, kept[1] + weight]

    @property
    def losses(self) -> dict[str, float | None]:
        """Each term's mean."""
        return {name: total / weight if weight else None for name, (total, weight) in self.terms.items()}


def rehearse(
    step: Step,
    stepper: Stepper,
    course: RunningStretch,
    meter: Meter | None,
    say: Callable[[str], None],
    *,
    leave_out: Collection[str] = (),
) -> int:
    """Run this rank's worst micro-batch, restore everything, and return the budget that it shows to be safe."""
    snapshot = StepSnapshot(step.model, device=step.device, scaler=step.scaler)
    make_state(step)
    worst = worst_of(course, padded=stepper.governor.padded)
    if worst is None:
        if not step.is_spread:
            return stepper.governor.budget
        no_items = np.zeros(0, np.int64)  # this rank takes part in the passes of those that have some
        worst = MicroBatch(course.loader.sampler.epoch, 0, 0, 1, no_items)
    if meter is not None:
        meter.reset_peak()
    fetch = partial(course.loader.fetch, micro=worst, ahead=True)
    batch = fetch(worst.items.tolist())
    stepper.rehearse(RankShare(iter([batch]), lambda numbers, _: fetch(numbers), hold=1, leave_out=leave_out))
    memory = meter.read() if meter is not None else None
    cost = stepper.cost(Piece(batch, 0, len(batch))) if len(batch) else 0
    step.release()
    snapshot.rewind()
    want = stepper.governor.after_step()
    wanted = want.budget
    if want.why:
        say(f"largest micro-batch: {want.why}")
    if not cost or memory is None or memory.peak_allocated_bytes is None:  # allocated bytes are not counted here
        return wanted
    verdict = stepper.governor.verified(memory, course.stretch.base_bytes + cost)
    if verdict.is_off or not verdict.fits:
        say(f"the largest micro-batch took {verdict.ratio:.2f} of its estimate; the new budget is {verdict.budget:,}")
    return min(wanted, verdict.budget)


def make_state(step: Step) -> None:
    """Allocate the optimizer's state before it is needed, or say that there is no room for it."""
    for _ in range(2):  # once more, without what is held for reuse
        if out_of_memory_error(step.make_state) is None:
            return
        step.optimizer.state.clear()  # there may be half of it
        step.release()
        free_caches(step.device)
    what = "the state of the optimizer does not fit in memory"
    raise PlanInfeasible(what, where="training", remedy="pipeline plan train   (or use a larger GPU)")


def worst_of(course: RunningStretch, *, padded: bool) -> MicroBatch | None:
    """Return this rank's costliest micro-batch of the coming epoch, every step of which is cut for that."""
    sampler = course.loader.sampler
    worst, most = None, 0
    for step in range(sampler.steps):
        for micro in sampler.micros(sampler.epoch, step):
            cost_K = course.cost_N[micro.items]
            cost = int(len(cost_K) * cost_K.max(initial=0) if padded else cost_K.sum())
            if cost > most:
                worst, most = micro, cost
    return worst
