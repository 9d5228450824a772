"""A phase of a training: epochs on the same items under the same plan, and the rehearsal of its worst micro-batch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.device.accelerator import free_caches, out_of_memory_error
from pipeline.errors import PlanInfeasible
from pipeline.memory.runtime.recovery import StepSnapshot
from pipeline.training.items.loader import PROCESSES
from pipeline.training.sampling import MicroBatch
from pipeline.training.step.exact_step import Piece, RankShare
from pipeline.training.step_clock import READ

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.memory.runtime.meters import HostMeter
    from pipeline.protocol import Task
    from pipeline.training.items.batch import TaskBatch
    from pipeline.training.items.loader import Loader
    from pipeline.training.prepared import PhasePlan
    from pipeline.training.sampling import BatchOrigin
    from pipeline.training.step.exact_step import ExactStep
    from pipeline.training.step.step import Step
    from pipeline.training.step_clock import StepClock


FELL_BEHIND, FELL_BEHIND_S = 0.1, 10.0  # share of an epoch, and seconds, of waiting for reader threads
ROOM_TO_FORK = 0.7  # share of the host's memory that may be in use when processes are forked


@dataclass(frozen=True, eq=False)
class Phase:
    """Epochs that train on the same items under the same plan."""

    plan: PhasePlan
    loader: Loader
    cost_N: NDArray[Any]
    first_epoch: int
    task: Task  # its loss

    @property
    def epochs(self) -> range:
        return range(self.first_epoch, self.first_epoch + self.plan.epochs)

    @property
    def steps(self) -> int:
        return self.loader.sampler.steps

    def at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the sampler's state at a step of an epoch."""
        return {**self.loader.sampler.state_dict(), "epoch": epoch, "step": step}

    def set_budget(self, budget: int) -> None:
        """Make the sampler cut micro-batches to a budget, if it uses one."""
        sampler = self.loader.sampler
        if sampler.settings.budget:
            sampler.adjust({**sampler.settings.budget, "cost": budget})

    def switch_readers(self, seconds: Mapping[str, float], host: HostMeter | None) -> bool:
        """Switch to reader processes if threads fell behind and there is memory and a core; return whether it did."""
        fell_behind = seconds.get(READ, 0.0) > max(FELL_BEHIND_S, FELL_BEHIND * sum(seconds.values()))
        has_room = host is None or host.read().share < ROOM_TO_FORK
        if self.loader.readers == PROCESSES or not fell_behind or not has_room or len(os.sched_getaffinity(0)) < 2:
            return False
        self.loader.readers = PROCESSES
        return True

    def shares(self, step: Step, epoch: int, first: int, leave_out: Collection[str]) -> Iterator[RankShare]:
        """Yield this rank's share of each step of an epoch, from its step `first` on."""
        if first >= self.steps:
            return
        self.loader.load_state_dict(self.at(epoch, first))
        batches, fetch = step.clock.each(READ, self.loader.read()), partial(self._fetch, step.clock)
        hold = max(0, self.loader.slots - 2)  # one is in use while the next is read
        ahead = step.ahead if self.plan.ahead_bytes else None
        named: dict[str, Any] = {"hold": hold, "left_out": leave_out, "ahead": ahead, "at_hand": self.loader.at_hand}
        while not (share := RankShare(batches, fetch, **named)).is_over:
            yield share

    def _fetch(self, clock: StepClock, numbers: Sequence[int], origin: BatchOrigin) -> TaskBatch:
        """Read a micro-batch again, in pieces that fit, without items that are left out."""
        with clock.within(READ):
            return self.loader.fetch(numbers, origin, ahead=True)


def rehearse(stepper: ExactStep, phase: Phase, *, say: Callable[[str], None], leave_out: Collection[str] = ()) -> int:
    """Run this rank's worst micro-batch, restore everything, and return the budget that is safe by this measurement."""
    step, governor, meter = stepper.step, stepper.governor, stepper.meter
    snapshot = StepSnapshot(step.model, device=step.device, scaler=step.scaler)
    make_state(step)
    worst = worst_of(phase, padded=governor.padded)
    if worst is None:
        if not step.is_spread:
            return governor.budget
        no_items = np.zeros(0, np.int64)  # this rank takes part in the passes of those that have some
        worst = MicroBatch(phase.loader.sampler.epoch, 0, 0, 1, no_items)
    if meter is not None:
        meter.reset_peak()
    fetch = partial(phase.loader.fetch, origin=worst, ahead=True)
    batch = fetch(worst.items.tolist())
    stepper.rehearse(RankShare(iter([batch]), lambda numbers, _: fetch(numbers), hold=1, left_out=leave_out))
    memory = meter.read() if meter is not None else None
    cost = stepper.cost(Piece(batch, 0, len(batch))) if len(batch) else 0
    step.release()
    snapshot.rewind()
    want = governor.after_step()
    if want.why:
        say(f"largest micro-batch: {want.why}")
    if not cost or memory is None or memory.peak_allocated_bytes is None:  # allocated bytes are not counted here
        return want.budget
    budget, ratio = governor.measured(memory, phase.plan.base_bytes + cost)
    if abs(ratio - 1) > governor.margin:
        say(f"the largest micro-batch took {ratio:.2f} of its estimate; the new budget is {budget:,}")
    return min(want.budget, budget)


def make_state(step: Step) -> None:
    """Allocate the optimizer's state before it is needed; raise if there is no room for it."""
    for _ in range(2):  # once more, after freeing caches
        if out_of_memory_error(step.make_state) is None:
            return
        step.optimizer.state.clear()  # it may be half made
        step.release()
        free_caches(step.device)
    problem = "the state of the optimizer does not fit in memory"
    raise PlanInfeasible(problem, where="training", remedy="pipeline plan train   (or use a larger GPU)")


def worst_of(phase: Phase, *, padded: bool) -> MicroBatch | None:
    """Return this rank's costliest micro-batch of the coming epoch, by looking at every step; None without items."""
    sampler = phase.loader.sampler
    worst, most = None, 0
    for step in range(sampler.steps):
        for micro in sampler.micros(sampler.epoch, step):
            cost_K = phase.cost_N[micro.items]
            cost = int(len(cost_K) * cost_K.max(initial=0) if padded else cost_K.sum())
            if cost > most:
                worst, most = micro, cost
    return worst
