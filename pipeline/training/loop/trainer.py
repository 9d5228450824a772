"""The training loop of all ranks: epochs, steps, validations and checkpoints, from any checkpoint to the end.

Start to read at `Trainer.run`. All ranks make the same decisions, from the reports that they exchange (`StepReport`).
Budgets change, checkpoints are saved and signals are obeyed only between steps. A step with a loss or gradient that is
not finite is skipped, or training returns to a checkpoint; so it does after an out-of-memory in the optimizer.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.command_line import Command
from pipeline.errors import DataError, JobFailed
from pipeline.memory.runtime.meters import NEAR
from pipeline.records import NOT_FINITE
from pipeline.training.loop.phase import make_state, rehearse
from pipeline.training.loss_terms import means
from pipeline.training.state import TrainingState
from pipeline.training.step.optimizers import factor, set_rate
from pipeline.training.step_clock import CHECKPOINT, NOT_OWN, OBSERVE, VALIDATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeline.config.schema_train import TrainSection
    from pipeline.memory.runtime.meters import HostMeter
    from pipeline.memory.runtime.recovery import Governor
    from pipeline.training.checkpoints.keeper import Keeper
    from pipeline.training.evaluating.evaluator import Evaluator
    from pipeline.training.items.item_source import DamagedItems
    from pipeline.training.items.loader import Loader
    from pipeline.training.loop.metrics_log import MedianStop
    from pipeline.training.loop.observer import TrainingObserver
    from pipeline.training.loop.phase import Phase
    from pipeline.training.ranks import Ranks
    from pipeline.training.ranks.rank_pace import RankPace
    from pipeline.training.step.exact_step import ExactStep, RankReport, RankShare, StepReport
    from pipeline.training.step.step import Step

WORTH_SAVING_S = 60.0  # with more unsaved work than this, a validation begins with a checkpoint
LOOK_EVERY_S = 1.0  # reads the host's memory this often: its files take much of a small step's time
ROLLBACKS = 3  # without a good step in between
LOSS = "loss"


@dataclass(eq=False)
class Trainer:
    """Trains a model to its end; `run` yields the number of steps so far after each step."""

    train: TrainSection
    step: Step
    stepper: ExactStep
    phases: list[Phase]
    ranks: Ranks
    keeper: Keeper
    observer: TrainingObserver
    governor_of: Callable[[Phase], Governor]  # with the budget of the plan
    validation: Evaluator | None = None
    host: HostMeter | None = None
    ending: Callable[[], int] = lambda: 0  # the signal that asked this process to end; 0: none
    leave_out: frozenset[str] = frozenset()
    damaged: DamagedItems | None = None  # records that loaders could not read
    prune: MedianStop | None = None  # may end the training early; the first rank decides
    pace: RankPace | None = None

    state: TrainingState = field(init=False)
    phase: Phase = field(init=False)  # whose budget and task the step has
    ended_by: int = field(default=0, init=False)  # a signal
    is_pruned: bool = field(default=False, init=False)
    _restarts: bool = field(default=False, init=False)  # the loader must: new budget, rollback or skipped items
    _rollbacks: int = field(default=0, init=False)  # without progress beyond `_furthest`
    _furthest: int = field(default=0, init=False)  # the step that training had reached before its rollbacks
    _saved_s: float = field(default_factory=time.monotonic, init=False)  # time of the last checkpoint
    _host_share: float = field(default=0.0, init=False)  # of the host's memory in use, as last read
    _looked_s: float = field(default=-math.inf, init=False)
    _step_began_s: float = field(default_factory=time.monotonic, init=False)
    _spent_s: float = field(default=0.0, init=False)  # own time of steps, at the last report

    def __post_init__(self) -> None:
        self.stepper.complete = self._complete
        self.state = TrainingState(killed=set(self.leave_out))

    def run(self) -> Iterator[int]:
        """Train, from the newest checkpoint if there is one."""
        self.observer.leaks.steps = self.steps
        self._resume()
        yield self.done
        if why_pruned := self._why_pruned():
            self.observer.say(f"pruned: {why_pruned}")
            return
        if not self.is_over:
            self._rehearse()
            self.step.clock.restart(self.state.totals.seconds)
        while not (self.is_over or self.ended_by):
            yield from self._epoch()

    @property
    def done(self) -> int:
        return self.state.done

    @property
    def steps(self) -> int:
        """The number of steps of the whole training."""
        return sum(phase.steps * phase.plan.epochs for phase in self.phases)

    @property
    def is_over(self) -> bool:
        return self.is_pruned or self.state.is_over(self.phases[-1].epochs.stop, self.train.validation)

    @property
    def governor(self) -> Governor:
        return self.stepper.governor

    @property
    def loaders(self) -> list[Loader]:
        """All loaders, the validation's last."""
        validation = [self.validation.loader] if self.validation and self.validation.loader else []
        return [phase.loader for phase in self.phases] + validation

    # Epochs

    def _epoch(self) -> Iterator[int]:
        """Train the rest of an epoch, or up to where the loader must restart."""
        phase = self._phase_of_epoch()
        self._enter(phase)
        self._restarts = False
        self._step_began_s = time.monotonic()
        for share in phase.shares(self.step, self.state.epoch, self.state.next, self.leave_out):
            if self._validated_within(phase):
                self._step(share)
                with self.step.clock.within(OBSERVE):
                    yield self.done
            if self._stops:
                phase.loader.close()
                break
        if not self._stops:
            self._end_epoch()

    @property
    def _stops(self) -> bool:
        """Whether the epoch does not continue with its next step."""
        return bool(self.ended_by) or self._restarts or self.is_over

    def _phase_of_epoch(self) -> Phase:
        """Return the phase of the present epoch; after the last epoch, the last phase."""
        return next((phase for phase in self.phases if self.state.epoch in phase.epochs), self.phases[-1])

    def _enter(self, phase: Phase) -> None:
        """Switch to a phase; scale what the last one learned about its budget to the new budget."""
        if phase is self.phase:
            return
        learned = self.governor.budget / self.governor_of(self.phase).budget
        governor = self.governor_of(phase)
        if learned < 1:
            governor.adopt(int(governor.budget * learned))
        self._switch(phase, governor)

    def _switch(self, phase: Phase, governor: Governor) -> None:
        self.phase, self.step.task = phase, phase.task
        self.stepper.governor, self.stepper.cost_N = governor, phase.cost_N
        phase.set_budget(governor.budget)

    def _end_epoch(self) -> None:
        """Validate where due, report, prepare the next epoch, and save."""
        state, validation = self.state, self.train.validation
        state.refuse_nothing_learned()
        is_last = state.epoch + 1 == self.phases[-1].epochs.stop
        is_due = is_last or validation.is_due_after(state.epoch + 1, self.done)
        metrics = self._validated() if self.validation is not None and is_due else {}
        if metrics is None:
            return
        value = state.judge(metrics, validation)
        self._report_epoch(metrics, self.step.clock.restart())
        if self.train.readers == "auto" and self.phase.switch_readers(state.totals.seconds, self.host):
            self.observer.say(
                "reading fell behind: switching to reader processes (to prevent: --set train.readers=threads)"
            )
        state.end_epoch()
        self._enter(self._phase_of_epoch())  # also at the end: with more patience, a later run continues there
        why_pruned = self._why_pruned() if metrics and not self.is_over else ""
        self._save(value, wait=bool(why_pruned))  # before it is pruned: a plain training may continue from here
        if why_pruned:
            self.observer.say(f"pruned: {why_pruned}")
            self.is_pruned = True

    def _report_epoch(self, metrics: dict[str, float], seconds: dict[str, float]) -> None:
        self.state.totals.seconds = seconds
        with self.step.clock.within(OBSERVE):
            self.observer.epoch(self.state.totals, self.done, metrics, self.step.optimizer.param_groups[0]["lr"])

    def _why_pruned(self) -> str:
        """Return why the sweep ends this training here, or ended it before; empty if it continues."""
        if self.prune is None:
            return ""
        why = self.prune.decide(self.state.epoch) if self.ranks.rank == 0 else ""
        return str(self.ranks.exchange({"why": why})[0]["why"])

    # Steps

    def _step(self, share: RankShare) -> None:
        """Make one step, or leave it out; then do the work between steps."""
        number = self.done + 1
        self.ranks.progress(f"step {number}")
        if number in self.state.poisoned:
            share.drain()
            self.state.leave_out_step()
            self.observer.say(f"step {number} is skipped: it was not finite before")
            return
        rate = set_rate(self.step.optimizer, factor(self.train.schedule, self.done, self.steps))
        with self.observer.watching(number, share, self.stepper.start()):
            report = self.stepper.accumulate(share)
            norm = None if report.damaged or report.not_finite else self.stepper.take(report)
        if report.damaged:
            self.stepper.go_back()
            self._skip_damaged(report.damaged)
            self._restarts = True
            return
        if self.stepper.lost:
            self._roll_back(self.stepper.lost, self.done, frugal=True)
            return
        if self.done > self._furthest:
            self._rollbacks = 0
        if norm is None:
            self._handle_not_finite(share, report)
        else:
            self.state.count(report, time.monotonic() - self._step_began_s)
        if not self._restarts:
            self._after_step(report, None if norm is None else {"learning_rate": rate, "gradient_norm": norm})

    def _complete(self, report: RankReport) -> None:
        """Add to this rank's report the facts for decisions between steps."""
        checkpoints = self.train.checkpoints
        now_s = time.monotonic()
        is_late = (now_s - self._saved_s) / 60 >= checkpoints.minutes
        if self.host and now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s, self._host_share = now_s, self.host.read().share
        report.ending = self.ending()
        report.is_due = is_late or bool(checkpoints.every and (self.done + 1) % checkpoints.every == 0)
        report.host_share = self._host_share
        spent_s = sum(spent_s for name, spent_s in self.step.clock.seconds().items() if name not in NOT_OWN)
        report.own_s, self._spent_s = spent_s - self._spent_s, spent_s
        report.is_written = self.keeper.is_written
        report.damaged += self.damaged.newly_skipped() if self.damaged else []

    def _after_step(self, report: StepReport, metrics: dict[str, float | None] | None) -> None:
        """Adopt budgets, log, save and obey signals; `metrics` is None after a step that was left out."""
        least = report.least
        if self.governor.adopt(least.budget):
            budget = f"micro-batches cost {self.governor.budget:,} at most from here"
            self.observer.say(f"step {self.done}: {budget} ({least.why})")
            self.phase.set_budget(self.governor.budget)
            self._restarts = True  # batches that were read ahead are cut for another budget
        with self.step.clock.within(OBSERVE):
            self.stepper.between_steps()
            self.observer.leaks.step()
            if self.pace is not None and self.pace.add([max(0.0, rank.own_s) for rank in report.ranks]):
                self.observer.slow_rank(self.pace.slowest)
            if metrics is not None and self.ranks.rank == 0 and self.done % self.train.log_every == 0:
                losses = {f"{LOSS}.{name}": mean for name, mean in means(report.totals).items()}
                self.observer.step(self.done, {**losses, **metrics, "items": float(report.of_all(sum, "items"))})
        with self.step.clock.within(CHECKPOINT):
            self.keeper.advance(all_written=report.of_all(all, "is_written"))
        self.ended_by, host_share = report.of_all(max, "ending"), report.of_all(max, "host_share")
        is_full = host_share >= NEAR
        if self.ended_by or is_full:
            self._save(None, wait=True)
        elif report.ranks[0].is_due and self.state.next < self.phase.steps:  # an epoch ends with a checkpoint anyway
            self._save(None)
        self._step_began_s = time.monotonic()
        if is_full and not self.ended_by:
            problem = f"{host_share:.0%} of the host's memory is used: saved a checkpoint to continue with more"
            raise JobFailed(problem, where="training", remedy="pipeline resume") from MemoryError(problem)

    # Validation

    def _validated_within(self, phase: Phase) -> bool:
        """Validate where that is due between two steps of an epoch; return whether the epoch continues."""
        state, validation = self.state, self.train.validation
        is_between = 0 < state.next < phase.steps and state.validated != self.done
        is_due = is_between and validation.is_due_within(state.next, phase.steps, self.done)
        if self.validation is None or not is_due:
            return True
        metrics = self._validated()
        if metrics is None:
            return False
        value = state.judge(metrics, validation)
        if self.is_over:  # it stays within this epoch, and continues here with more patience
            self._report_epoch(metrics, self.step.clock.seconds())
        else:
            self.observer.validated(self.done, metrics)
        self._save(value)
        self._step_began_s = time.monotonic()
        return not self.is_over

    def _validated(self) -> dict[str, float] | None:
        """Return the metrics of a validation; None if a signal ended it."""
        assert self.validation is not None
        self.step.drop_ahead()
        is_late = time.monotonic() - self._saved_s > WORTH_SAVING_S
        if self.ranks.exchange({"save": is_late})[0]["save"]:
            self._save(None)
        task = self.step.task
        self.step.task = self.phases[-1].task  # so that metrics of all phases compare
        with self.step.clock.within(VALIDATE, whole=True), self.ranks.patient("validation"), self.step.averaged():
            metrics = self.validation.figures()
        self.step.task = task
        if isinstance(metrics, int):  # the signal
            self._save(None, wait=True)
            self.ended_by = metrics
            return None
        skipped = self.damaged.newly_skipped() if self.damaged else []
        if lost := {item for reply in self.ranks.exchange({"damaged": skipped}) for item in reply["damaged"]}:
            self._skip_damaged(lost)
        self.state.validated = self.done
        return metrics

    # Checkpoints

    def _save(self, value: float | None, *, wait: bool = False) -> None:
        """Save a checkpoint, with its value of the monitored metric; if the disk is full, training continues."""
        self.state.order = self._phase_of_epoch().loader.sampler.state_dict()
        self.state.totals.seconds = self.step.clock.seconds()
        with self.step.clock.within(CHECKPOINT), self.ranks.patient("saving"):
            saved = self.keeper.save(
                self.state,
                self.step,
                own={"governor": self.governor.state()},
                metric=value,
                lower=self.train.validation.lower_is_better,
                wait=wait or self.is_over,
            )
        self._saved_s = time.monotonic()
        if not saved and self.is_over:
            why = self.keeper.unsaved[-1] if self.keeper.unsaved else None  # rank 0 knows
            problem = f"the trained model could not be saved{f': {why.what}' if why else ''}"
            remedy = f"{why.remedy}, and submit again" if why else "pipeline logs --failed"
            raise JobFailed(problem, where=str(self.keeper.folder), remedy=remedy) from why

    def _resume(self, *, of_all: bool = False) -> None:
        """Restore the newest checkpoint, with `of_all` the newest that all items made; else start at the beginning."""
        killed = self.state.killed
        with self.ranks.patient("resuming"):
            self.state, own = self.keeper.resume(self.step, of_all=of_all)
        state = self.state
        state.killed |= killed
        state.follow(self.train.validation.monitor)
        self.observer.resumed(self.done)
        if self.is_over:
            return
        phase = self._phase_of_epoch()
        governor = self.governor_of(phase)
        if own:
            governor.load(own["governor"])
        governor.adopt(min(report["budget"] for report in self.ranks.exchange({"budget": governor.budget})))
        self._switch(phase, governor)
        at = phase.at(state.epoch, min(state.next, phase.steps - 1))
        phase.loader.load_state_dict({**at, **state.order, "epoch": at["epoch"], "step": at["step"]})
        self.step.clock.restart(state.totals.seconds)

    def _rehearse(self) -> None:
        """Before the first step: allocate the optimizer's state, run the worst micro-batch, compare with the plan."""
        learned = self.governor.learned
        with self.ranks.patient("the first run"):
            wanted = rehearse(self.stepper, self.phase, say=self.observer.say, leave_out=self.leave_out)
        if self.done and wanted == self.governor.budget:  # so a resumed run knows the same as an uninterrupted one
            self.governor.learned = learned
        if self.governor.adopt(min(report["budget"] for report in self.ranks.exchange({"budget": wanted}))):
            self.phase.set_budget(self.governor.budget)

    # Failures

    def _handle_not_finite(self, share: RankShare, report: StepReport) -> None:
        """Handle a step that is not finite, as `train.nan` says."""
        number, kind = self.done + 1, "loss" if report.not_finite else "gradient"
        items = self._not_finite_items(share, report)
        named = f"of {', '.join(items[:5])}" if items else "no single item causes it"
        problem = f"the {kind} of step {number} {NOT_FINITE} ({named})"
        policy = self.train.nan
        if policy == "stop":
            self._save(None, wait=True)
        self.observer.poison(problem)
        if policy == "stop":
            remedy = Command.of(f"replay --step {number}", then="   or   --set train.nan=skip")
            raise DataError(problem, where=f"epoch {self.state.epoch}", remedy=remedy)
        if policy == "skip":
            self.observer.say(f"{problem}: skipped")
            self.state.leave_out_step()
            return
        self.state.poisoned.add(number)
        self._roll_back(problem, number)

    def _not_finite_items(self, share: RankShare, report: StepReport) -> list[str]:
        """Undo the step; return the items of all ranks that are not finite on their own."""
        self.stepper.go_back()
        is_shared = self.step.is_spread or self.stepper.is_joint or not report.not_finite
        takes_part = is_shared or self.ranks.rank in report.not_finite
        own = self.stepper.not_finite(share) if takes_part else []
        items = [item for reply in self.ranks.exchange({"items": own}) for item in reply["items"]]
        self.stepper.go_back()
        return items

    def _skip_damaged(self, items: set[str]) -> None:
        """Continue without items that cannot be read; raise if too many are lost by now.

        Before the error, the state from before the first skipped item is saved as the newest checkpoint.
        """
        assert self.damaged is not None
        too_many = self.damaged.too_many(items)
        if too_many is not None and self.state.damaged:
            self._resume(of_all=True)
        if too_many is not None or not self.state.damaged:
            self._save(None, wait=True)
        if too_many is not None:
            raise too_many
        self.state.damaged |= items

    def _roll_back(self, why: str, furthest: int, *, frugal: bool = False) -> None:
        """Return to the newest checkpoint, on all ranks; `frugal` makes the optimizer take less memory from then on.

        Training must come beyond the step `furthest` before this counts as overcome.
        """
        self._rollbacks += 1
        self._furthest = max(self._furthest, furthest)
        if self._rollbacks > ROLLBACKS:
            less = "a GPU with more memory, or --set train.way=loop"
            remedy = less if frugal else "a lower train.learning_rate, or --set train.nan=skip"
            raise JobFailed(f"{why}; returning to the last checkpoint did not help", where="training", remedy=remedy)
        self.observer.say(f"{why}: returning to the last checkpoint")
        self.stepper.go_back()  # drops gradients that were not applied
        if frugal:
            for group in self.step.optimizer.param_groups:  # the implementation that needs the least memory
                group["foreach"], group["fused"] = False, None
        before = self.state
        for phase in self.phases:
            phase.loader.close()
        self._resume()
        make_state(self.step)  # a checkpoint of step 0 has none
        self.state.poisoned |= before.poisoned
        self.state.damaged |= before.damaged  # loaders report each only once
        self._restarts = True
