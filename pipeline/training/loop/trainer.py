"""Training: epochs of exact steps, over all ranks, from wherever it was left to its end.

A step is made by all ranks together (`whole_step`). Budgets change, checkpoints are taken and signals are heeded only
between steps; a step that is not finite, or that tore a rank's parameters, is left out or leads back to a checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.command_line import Command
from pipeline.errors import DataError, JobFailed
from pipeline.memory.runtime.meters import NEAR
from pipeline.records import NOT_FINITE
from pipeline.training.loop.progress import EpochTotals, TrainingProgress, make_state, rehearse
from pipeline.training.step.global_step import WholeStep
from pipeline.training.step.optimizers import factor, set_rate
from pipeline.training.step_clock import CHECKPOINT, OBSERVE, VALIDATE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pipeline.config.schema_train import TrainSection
    from pipeline.memory.runtime.governor import Governor
    from pipeline.memory.runtime.meters import HostMeter, Meter
    from pipeline.training.checkpoints.keeper import Keeper
    from pipeline.training.evaluating.evaluator import Evaluator
    from pipeline.training.items.item_source import DamagedItems
    from pipeline.training.items.loader import Loader
    from pipeline.training.loop.observer import TrainingObserver
    from pipeline.training.loop.progress import RunningStretch
    from pipeline.training.loop.pruning import MedianStop
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.global_step import RankReport, StepReport
    from pipeline.training.step.local_step import Stepper
    from pipeline.training.step.micro_batches import Piece, RankShare
    from pipeline.training.step.step import Step

WORTH_SAVING_S = 60.0  # of work, before a validation
ROLLBACKS = 3  # without a step in between that went well
LOSS = "loss"


@dataclass(eq=False)
class Trainer:
    """Trains a model to its end; `run` yields the number of steps so far after each step."""

    train: TrainSection
    step: Step
    stepper: Stepper
    courses: list[RunningStretch]
    ranks: Ranks
    keeper: Keeper
    watcher: TrainingObserver
    governor_of: Callable[[RunningStretch], Governor]
    validation: Evaluator | None = None
    meter: Meter | None = None
    host: HostMeter | None = None
    ending: Callable[[], int] = lambda: 0  # by which signal it was told to end; 0: by none
    leave_out: frozenset[str] = frozenset()
    damaged: DamagedItems | None = None  # what loaders could not read
    prune: MedianStop | None = None  # ends it early, of all ranks the first decides

    def __post_init__(self) -> None:
        self.standing = TrainingProgress(self.train.validation, self.courses[-1].epochs.stop)
        self.standing.killed |= self.leave_out
        self.whole = WholeStep(
            self.step, self.stepper, self.ranks, meter=self.meter, complete=self._complete, say=self.watcher.say
        )
        self.clock, self.ended_by = self.step.clock, 0  # by a signal
        self._entered: RunningStretch | None = None
        self._planned = 1  # the budget of its plan
        self._share: RankShare | None = None
        self._rollbacks = 0  # without getting further
        self._furthest = 0  # step to which training had come before the last of them
        self._saved_s = self._since_s = time.monotonic()  # the last checkpoint was taken; the last step ended
        self._cropped = 0  # items, as the loader counts them
        self._again = False  # the loader has to begin anew: budgets have changed, or there was a rollback
        self.watcher.expect(self.steps, lambda: [slot for loader in self.loaders for slot in loader.buffers])

    @property
    def done(self) -> int:
        return self.standing.done

    @property
    def governor(self) -> Governor:
        return self.stepper.governor

    @property
    def loaders(self) -> list[Loader]:
        """All loaders, the validation's last."""
        of_validation = self.validation.loader if self.validation else None
        return [course.loader for course in self.courses] + ([of_validation] if of_validation else [])

    @property
    def steps(self) -> int:
        """The steps of the whole training."""
        return sum(course.steps * course.stretch.epochs for course in self.courses)

    def run(self) -> Iterator[int]:
        """Train, from the newest checkpoint on if there is one."""
        self._take_up()
        yield self.done
        if self._was_pruned():
            return
        if not self.standing.is_finished:
            self._verify(self._course())
            self.clock.restart(self.standing.tally.seconds)
        while not (self.standing.is_finished or self.ended_by):
            yield from self._epoch(self._course())

    def _course(self) -> RunningStretch:
        return next(course for course in self.courses if self.standing.epoch in course.epochs)

    # One epoch

    def _epoch(self, course: RunningStretch) -> Iterator[int]:
        """Train an epoch to its end, or to where the loader has to begin anew."""
        self._enter(course)
        self._again = False
        if not self._is_at_end(course):
            yield from self._steps(course)
        if not (self.ended_by or self._again or self.standing.is_finished or self._gone_back()):
            self._end_epoch()

    def _is_at_end(self, course: RunningStretch) -> bool:
        return self.standing.next >= course.steps

    def _steps(self, course: RunningStretch) -> Iterator[int]:
        course.loader.load_state_dict(course.at(self.standing.epoch, self.standing.next))
        self._since_s = time.monotonic()
        hold = max(0, course.loader.slots - 2)  # one is used, the next is read
        for share in course.shares(self.step, hold=hold, leave_out=self.leave_out):
            if self._validated_within(course):
                self._step(course, share)
                with self.clock.within(OBSERVE):
                    yield self.done
            if self.ended_by or self._again or self.standing.is_finished:
                course.loader.close()
                return

    def _enter(self, course: RunningStretch) -> None:
        """Switch to a stretch's budget and costs; the share of the budget that was learned carries over."""
        if course is self._entered:
            return
        share = self.governor.budget / self._planned
        governor = self.governor_of(course)
        planned = governor.budget
        if share < 1:
            governor.adopt(int(planned * share))
        self._go_by(governor, planned, course)

    def _go_by(self, governor: Governor, planned: int, course: RunningStretch) -> None:
        if course.task is not self.step.task:
            self.step.turn_to(course.task)
            self.stepper.forget_terms()
        self._entered, self._planned = course, planned
        self.stepper.governor, self.stepper.cost_N = governor, course.cost_N
        self._cropped = course.loader.stats.cropped
        course.cut_by(governor.budget)

    def _end_epoch(self) -> None:
        """Validate, report and save."""
        self.standing.refuse_nothing_learned()
        is_due = self.validation is not None and self.standing.is_due_after()
        figures = self._validated() if is_due else {}
        if figures is not None:
            self._close_epoch(figures, self.standing.judge(figures))

    def _validated_within(self, course: RunningStretch) -> bool:
        """Validate where that is due between two steps of an epoch; tell whether the epoch goes on."""
        if self.validation is None or not self.standing.is_due_within(course.steps):
            return True
        figures = None if self._gone_back() else self._validated()
        if figures is None:
            return False
        figure = self.standing.judge(figures)
        if self.standing.is_stale:  # it stands within its epoch, where one with more patience goes on
            self._report_epoch(figures, self.clock.seconds())
            self.standing.is_finished = True
            self._save(figure)
            return False
        self.watcher.validated(self.done, figures)
        self._save(figure)
        self._since_s = time.monotonic()
        return True

    def _validated(self) -> dict[str, float] | None:
        """Return the figures of a validation; None where a signal ended it."""
        assert self.validation is not None
        self.step.drop_ahead()
        is_due = time.monotonic() - self._saved_s > WORTH_SAVING_S
        if self.ranks.exchange({"due": is_due})[0]["due"]:  # a long validation must not put so much at risk
            self._save(None)
        task = self.step.task
        self.step.turn_to(self.courses[-1].task)  # so that the figures of all stages compare
        with self.clock.whole(VALIDATE), self.ranks.patient("validation"), self.step.averaged():
            figures = self.validation.figures()
        self.step.turn_to(task)
        if isinstance(figures, int):  # the signal that ended it
            self._save(None, wait=True)
            self.ended_by = figures
            return None
        news = self.damaged.news() if self.damaged else []
        if lost := {item for reply in self.ranks.exchange({"damaged": news}) for item in reply["damaged"]}:
            self._lose(lost)
        self.standing.validated = self.done
        return figures

    def _report_epoch(self, figures: dict[str, float], seconds: dict[str, float]) -> None:
        """Report an epoch, or what there is of it."""
        self.standing.tally.seconds = seconds
        with self.clock.within(OBSERVE):
            self.watcher.epoch(self.standing.tally, self.done, figures, self.step.optimizer.param_groups[0]["lr"])

    def _close_epoch(self, figures: dict[str, float], figure: float | None) -> None:
        """Report an epoch, go on to the next, and save."""
        standing = self.standing
        self._report_epoch(figures, self.clock.restart())
        if self.train.readers == "auto" and self._course().hasten_readers(standing.tally.seconds, self.host):
            self.watcher.say(
                "reading fell behind: switching to reader processes (to prevent: --set train.readers=threads)"
            )
        standing.end_epoch()
        if standing.epoch < standing.epochs:
            self._enter(self._course())  # also where patience is at its end: with more of it training goes on there
        standing.tally = EpochTotals(standing.epoch)
        pruned = self._pruned() if figures and not standing.is_finished else ""
        self._save(figure, wait=bool(pruned))  # as at the end of any epoch: a plain training may go on from there
        if pruned:
            self.watcher.say(f"pruned: {pruned}")
            standing.is_finished = True

    def _was_pruned(self) -> bool:
        """Tell whether the sweep has ended this training before, as the first rank finds."""
        epochs = self.standing.epoch
        return self.prune is not None and self.ranks.exchange({"is": self.prune.stands(epochs)})[0]["is"]

    def _pruned(self) -> str:
        """Return why the sweep ends this training here, as the first rank finds; empty where it goes on."""
        if self.prune is None:
            return ""
        why: str = self.ranks.exchange({"prune": self.prune.decide() if self.ranks.rank == 0 else ""})[0]["prune"]
        return why

    # One step

    def _step(self, course: RunningStretch, share: RankShare) -> None:
        """Make one step, or skip it, and then what is due between two steps."""
        number = self.done + 1
        self.ranks.progress(f"step {number}")
        self._share = share  # the last step's share goes, with the slots that it holds
        if number in self.standing.poisoned:
            share.drain()
            self.standing.leave_out_step()
            self.watcher.say(f"step {number} is skipped: it was not finite before")
            return
        rate = set_rate(self.step.optimizer, factor(self.train.schedule, self.done, self.steps))
        with self.watcher.watching():
            report = self.whole.accumulate(share, number)
            is_taken = not (report.lost or report.damaged or report.not_finite)
            norm = self.whole.take(report) if is_taken else None
        if report.lost:
            self._roll_back(report.lost, self.done - 1, frugal=True)
        if report.damaged:
            self.stepper.go_back()
            self._lose(report.damaged)
            self._again = True  # without them
        if report.lost or report.damaged:
            return
        if self.done > self._furthest:
            self._rollbacks = 0
        if norm is None:
            self._poison(share, report)
        else:
            self.standing.count(report, time.monotonic() - self._since_s)
        if not self._again:
            self._between(course, report, None if norm is None else {"learning_rate": rate, "gradient_norm": norm})

    def _complete(self, report: RankReport) -> None:
        """Add to this rank's report of a step what the ranks decide between steps."""
        checkpoints = self.train.checkpoints
        is_late = (time.monotonic() - self._saved_s) / 60 >= checkpoints.minutes
        assert self._entered is not None
        before, self._cropped = self._cropped, self._entered.loader.stats.cropped
        report.cropped = self._cropped - before
        report.ending = self.ending()
        report.is_due = is_late or bool(checkpoints.every and (self.done + 1) % checkpoints.every == 0)
        report.host_share = self.host.read().share if self.host else 0.0
        report.is_written = self.keeper.is_written
        report.damaged = self.damaged.news() if self.damaged else []

    # What goes wrong

    def oom(self, piece: Piece, error: str) -> None:
        """Report a micro-batch that did not fit."""
        if self._share is not None:
            self.watcher.oom(self.done + 1, self._share, piece, error)

    def _poison(self, share: RankShare, report: StepReport) -> None:
        """Handle a step that is not finite, as `train.nan` says."""
        number, kind = self.done + 1, "loss" if report.not_finite else "gradient"
        items = self._culprits(share, report)
        named = f"of {', '.join(items[:5])}" if items else "no single item causes it"
        what = f"the {kind} of step {number} {NOT_FINITE} ({named})"
        policy = self.train.nan
        if policy == "stop":
            self._save(None, wait=True)
        self.watcher.poison(number, share, what)
        if policy == "stop":
            remedy = Command.of(f"replay --step {number}", then="   or   --set train.nan=skip")
            raise DataError(what, where=f"epoch {self.standing.epoch}", remedy=remedy)
        if policy == "skip":
            self.watcher.say(f"{what}: skipped")
            self.standing.leave_out_step()
            return
        self.standing.poisoned.add(number)
        self._roll_back(what, number)

    def _lose(self, items: set[str]) -> None:
        """Go on without items that cannot be read; raise where too many are lost by now.

        Then the newest checkpoint is the last that all items made: it is saved before the first step without some.
        """
        assert self.damaged is not None
        too_many = self.damaged.too_many(items)
        if too_many is not None and self.standing.damaged:
            self._take_up(of_all=True)
        if too_many is not None or not self.standing.damaged:
            self._save(None, wait=True)
        if too_many is not None:
            raise too_many
        self.standing.damaged |= items

    def _culprits(self, share: RankShare, report: StepReport) -> list[str]:
        """Undo the step; return the items of all ranks that are not finite on their own."""
        self.stepper.go_back()
        everyone = self.step.is_spread or self.stepper.is_joint or not report.not_finite
        mine = everyone or self.ranks.rank in report.not_finite
        own = self.stepper.not_finite(share) if mine else []
        items = [item for answer in self.ranks.exchange({"items": own}) for item in answer["items"]]
        self.stepper.go_back()
        return items

    def _gone_back(self) -> bool:
        """Roll back if any rank lost its parameters in the last step; tell whether one did."""
        if lost := self.whole.lost_by():
            self._roll_back(lost, self.done - 1, frugal=True)
        return bool(lost)

    def _roll_back(self, why: str, furthest: int, *, frugal: bool = False) -> None:
        """Return to the newest checkpoint, with every rank; `frugal` has the optimizer take less memory from then on.

        `furthest` is the step beyond which training must come before it counts as having gone on.
        """
        self._rollbacks += 1
        self._furthest = max(self._furthest, furthest)
        if self._rollbacks > ROLLBACKS:
            less = "a GPU with more memory, or --set train.way=loop"
            remedy = less if frugal else "a lower train.learning_rate, or --set train.nan=skip"
            raise JobFailed(f"{why}; returning to the last checkpoint did not help", where="training", remedy=remedy)
        self.watcher.say(f"{why}: returning to the last checkpoint")
        self.stepper.go_back()  # drops gradients that were not applied
        if frugal:
            for group in self.step.optimizer.param_groups:  # its way with the least memory of its own
                group["foreach"], group["fused"] = False, None
        poisoned, damaged = set(self.standing.poisoned), set(self.standing.damaged)
        self.whole.lost = ""
        for course in self.courses:
            course.loader.close()
        self._take_up()
        make_state(self.step)  # at the beginning there is none
        self.standing.poisoned |= poisoned
        self.standing.damaged |= damaged  # each is reported once
        self._again = True

    # Between steps

    def _between(self, course: RunningStretch, report: StepReport, figures: dict[str, float | None] | None) -> None:
        """Do what is due between steps; `figures` is None after a skipped step."""
        if self.governor.adopt(report.budget):
            self.watcher.say(f"step {self.done}: micro-batches cost {self.governor.budget:,} at most from here")
            course.cut_by(self.governor.budget)
            self._again = True  # batches that were read ahead are cut for another budget
        with self.clock.within(OBSERVE):
            self.stepper.upkeep.after_step(empty_cache=self.whole.empty_cache)
            self.whole.emptied()
            self.watcher.between(max((rank.micros for rank in report.words), default=0))
            if figures is not None and self.ranks.rank == 0 and self.done % self.train.log_every == 0:
                losses = {f"{LOSS}.{name}": mean for name, mean in report.means.items()}
                self.watcher.step(self.done, {**losses, **figures, "items": float(report.sum_of("items"))})
        with self.clock.within(CHECKPOINT):
            if report.is_written:
                self.keeper.hand_in()
            self.keeper.listen()
        self.ended_by = report.ending
        is_full = report.host_share >= NEAR  # left in order, and taken up with more
        ends = bool(report.ending) or is_full
        if ends or (report.is_due and not self._is_at_end(course)):  # an epoch ends with one anyway
            self._save(None, wait=ends)
        self._since_s = time.monotonic()
        if is_full and not report.ending:
            what = (
                f"the host's memory is used to {report.host_share:.0%}: saved a checkpoint to continue with more memory"
            )
            raise JobFailed(what, where="training", remedy="pipeline resume") from MemoryError(what)

    # Where training stands

    def _save(self, figure: float | None, *, wait: bool = False) -> None:
        """Save a checkpoint; if the disk is full, training goes on."""
        if self.whole.lost_by():
            return  # the next step goes back
        standing = self.standing
        course = self._course() if standing.epoch < standing.epochs else self.courses[-1]
        standing.tally.seconds = self.clock.seconds()
        with self.clock.within(CHECKPOINT), self.ranks.patient("saving"):
            saved = self.keeper.save(
                standing.place(course.at(standing.epoch, standing.next)),
                self.step,
                self.done,
                own={"governor": self.governor.state()},
                figure=figure,
                lower=self.train.validation.lower_is_better,
                wait=wait or standing.is_finished,
            )
        self._saved_s = time.monotonic()
        if not saved and standing.is_finished:
            why = self.keeper.unsaved[-1] if self.keeper.unsaved else None  # rank 0 knows
            what = f"the trained model could not be saved{f': {why.what}' if why else ''}"
            remedy = f"{why.remedy}, and submit again" if why else "pipeline logs --failed"
            raise JobFailed(what, where=str(self.keeper.folder), remedy=remedy) from why

    def _take_up(self, *, of_all: bool = False) -> None:
        """Restore the newest checkpoint, `of_all`: the newest that all items made, or start at the beginning."""
        with self.ranks.patient("taking up"):
            restored = self.keeper.take_up(self.step, of_all=of_all)
        standing, place, own = self.standing, restored.place, restored.own
        standing.take_up(place)
        self.watcher.taken_up(self.done)
        if standing.is_finished:
            return
        course = self._course()
        governor = self.governor_of(course)
        planned = governor.budget
        if own.get("governor"):
            governor.load(own["governor"])
        governor.adopt(min(report["budget"] for report in self.ranks.exchange({"budget": governor.budget})))
        self._go_by(governor, planned, course)
        first = min(standing.next, course.steps - 1)
        at = course.at(standing.epoch, first)
        course.loader.load_state_dict({**(place.sampler or at), "epoch": standing.epoch, "step": first})
        self.clock.restart(standing.tally.seconds)

    def _verify(self, course: RunningStretch) -> None:
        """Before the first step: allocate the optimizer's state, run the worst micro-batch, compare with the plan."""
        learned = self.governor.learned
        with self.ranks.patient("the first run"):
            wanted = rehearse(self.step, self.stepper, course, self.meter, self.watcher.say, leave_out=self.leave_out)
        if self.done and wanted == self.governor.budget:  # a resumed run knows what one without a stop would
            self.governor.learned = learned
        reports = self.ranks.exchange({"budget": wanted, "terms": self.stepper.rehearsed_terms})
        self.stepper.learn_terms(max(report["terms"] for report in reports))
        if self.governor.adopt(min(report["budget"] for report in reports)):
            course.cut_by(self.governor.budget)
