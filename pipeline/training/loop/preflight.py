"""Before the first step: the optimizer's state is made and the worst micro-batch runs, so that what ends, ends now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import PlanInfeasible
from pipeline.memory.runtime.recovery import StepSnapshot, out_of_memory_error, rewind
from pipeline.training.sampling.sampler import MicroBatch
from pipeline.training.step.micro_batches import Piece, RankShare

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pipeline.memory.runtime.meters import Meter
    from pipeline.training.loop.progress import RunningStretch
    from pipeline.training.step.local_step import Stepper
    from pipeline.training.step.step import Step

LOOKED_AT = 4096  # steps of an epoch, among which the worst micro-batch is looked for


def rehearse(
    step: Step,
    stepper: Stepper,
    course: RunningStretch,
    meter: Meter | None,
    say: Callable[[str], None],
    *,
    leave_out: Collection[str] = (),
) -> int:
    """Run the worst micro-batch of this rank; leave everything as it was; return the budget that it speaks for."""
    snapshot = StepSnapshot.take(step.model, device=step.device, scaler=step.scaler)
    make_state(step)
    worst = worst_of(course)
    if worst is None:
        if not step.is_spread:
            return stepper.governor.budget
        nothing = np.zeros(0, np.int64)
        worst = MicroBatch(course.loader.sampler.epoch, 0, 0, 1, nothing)  # it makes the passes of those who have one
    if meter is not None:
        meter.reset_peak()
    batch = course.loader.fetch(worst.items.tolist(), worst)
    share = RankShare(
        iter([batch]), lambda numbers, _: course.loader.fetch(numbers, worst), hold=1, leave_out=leave_out
    )
    stepper.rehearse(share)
    memory = meter.read() if meter is not None else None
    cost = stepper.cost(Piece(batch, 0, len(batch))) if len(batch) else 0
    step.release()
    rewind(snapshot, step.model.parameters(), step.device)
    want = stepper.governor.after_step()
    wanted = want.budget
    if want.why:
        say(f"the worst micro-batch: {want.why}")
    if not cost or memory is None or memory.peak_allocated_bytes is None:  # nobody counts tensors here
        return wanted
    verdict = stepper.governor.verified(memory, course.stretch.base_bytes + cost)
    if verdict.is_off or not verdict.fits:
        say(f"the worst micro-batch took {verdict.ratio:.2f} of what was planned; the budget is {verdict.budget:,} now")
    return min(wanted, verdict.budget)


def make_state(step: Step) -> None:
    """Let the optimizer have its state before it is needed, or say that there is no room for it."""
    if out_of_memory_error(lambda _: step.make_state(), None) is not None:
        what = "the state of the optimizer does not fit in memory"
        raise PlanInfeasible(what, where="training", remedy="pipeline plan --stage train   (or a larger card)")


def worst_of(course: RunningStretch) -> MicroBatch | None:
    """Return the micro-batch that costs most, of this rank, in the epoch that comes."""
    sampler = course.loader.sampler
    worst, most = None, -1
    steps = np.unique(np.linspace(0, sampler.steps - 1, min(sampler.steps, LOOKED_AT)).astype(np.int64))
    for step in steps.tolist():
        for micro in sampler.micros(sampler.epoch, step):
            cost = int(course.cost_N[micro.items].sum()) if len(micro.items) else 0
            if cost > most and len(micro.items):
                worst, most = micro, cost
    return worst
