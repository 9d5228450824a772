"""Training: epochs of exact steps, over all ranks, from wherever it was left to its end.

A step: each rank runs its share (`stepping`); all tell each other what came of it (`words`) and decide the same;
gradients are divided by the weight of the whole step, added up, clipped, and taken by the optimizer. Budgets change,
checkpoints are taken and signals are heeded only between steps.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import DataError, JobFailed
from pipeline.memory.governor import Governor
from pipeline.memory.meters import NEAR
from pipeline.memory.recovery import said_out_of_memory
from pipeline.training.rates import factor, set_rate
from pipeline.training.rehearse import make_state, rehearse
from pipeline.training.share import Share
from pipeline.training.tally import Tally
from pipeline.training.words import Heard, Words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from pipeline.config.schema import Train
    from pipeline.memory.meters import HostMeter, Meter
    from pipeline.training.batch import Batch, Origin
    from pipeline.training.evaluation import Evaluation
    from pipeline.training.keeping import Keeper, Place
    from pipeline.training.loader import Loader
    from pipeline.training.prepared import Stretch
    from pipeline.training.ranks import Ranks
    from pipeline.training.share import Piece
    from pipeline.training.step import Step
    from pipeline.training.stepping import Local, Stepper

WORTH_SAVING_S = 60.0  # of work, before a validation
ROLLBACKS = 3  # without a step in between that went well
LOSS = "loss"


@dataclass(frozen=True, eq=False)
class Course:
    """A stretch of epochs: its items come from a loader, and cost so much."""

    stretch: Stretch
    loader: Loader
    cost_N: NDArray[Any]
    first_epoch: int

    @property
    def epochs(self) -> range:
        """Return the numbers of its epochs."""
        return range(self.first_epoch, self.first_epoch + self.stretch.epochs)


class Watcher:
    """Who is told what happens; every method may be replaced by one that does something."""

    def begin(self, piece: Piece) -> None:
        """Hear that a piece of a micro-batch begins."""

    def oom(self, step: int, share: Share, piece: Piece, error: str) -> None:
        """Hear that a piece did not fit."""

    def poison(self, step: int, share: Share, what: str) -> None:
        """Hear that a step's loss or gradient is not finite."""

    def step(self, step: int, figures: Mapping[str, float | None]) -> None:
        """Hear the figures of a step."""

    def epoch(self, tally: Tally, step: int, figures: Mapping[str, float | None], rate: float) -> None:
        """Hear what an epoch came to."""

    def between(self, bucket: int) -> None:
        """Hear that a step of some kind has ended and its gradients are gone."""

    def taken_up(self, step: int) -> None:
        """Hear after which step training goes on."""

    def close(self) -> None:
        """Let go of what is open."""

    def watching(self) -> AbstractContextManager[Any]:
        """Return what surrounds a step."""
        from contextlib import nullcontext

        return nullcontext()

    def say(self, line: str) -> None:
        """Hear something for people."""


class Trainer:
    """Trains a model to its end; `run` yields after every step how many there were so far."""

    def __init__(
        self,
        train: Train,
        step: Step,
        stepper: Stepper,
        courses: list[Course],
        ranks: Ranks,
        keeper: Keeper,
        watcher: Watcher,
        *,
        validation: Evaluation | None = None,
        meter: Meter | None = None,
        host: HostMeter | None = None,
        ending: Callable[[], int] = lambda: 0,
        governor_of: Callable[[Course], Governor],
        leave_out: frozenset[str] = frozenset(),
    ) -> None:
        """Take everything ready: `ending` says by which signal it was told to end, 0 for none."""
        self.train, self.step, self.stepper, self.courses, self.ranks = train, step, stepper, courses, ranks
        self.keeper, self.watcher, self.validation, self.meter, self.host = keeper, watcher, validation, meter, host
        self.ended_by = 0  # a signal
        self.done = 0  # steps
        self.epoch = 0
        self.best: float | None = None
        self.stale = 0  # validations without a better one
        self.is_finished = False
        self.tally = Tally(0)
        self.poisoned: set[int] = set()  # steps that are left out after a rollback
        self._ending, self._governor_of, self._leave_out = ending, governor_of, leave_out
        self._next = 0  # the step of the epoch that comes
        self._entered: Course | None = None
        self._planned = 1  # the budget of its plan
        self._share: Share | None = None
        self._lost = ""
        self._empty_cache = False
        self._rollbacks = 0  # without getting further
        self._furthest = 0  # step to which training had come before the last of them
        self._saved_s = time.monotonic()
        self._since_s = time.monotonic()  # the last step ended
        self._cropped = 0  # items, as the loader counts them
        self._again = False  # the loader has to begin anew: budgets have changed, or there was a rollback

    @property
    def governor(self) -> Governor:
        """Return who knows the budget."""
        return self.stepper.governor

    @property
    def loaders(self) -> list[Loader]:
        """Return all loaders, that of the validation last."""
        found = [course.loader for course in self.courses]
        return [*found, *([self.validation.loader] if self.validation and self.validation.loader else [])]

    @property
    def steps(self) -> int:
        """Return how many steps there are in all."""
        return sum(course.loader.sampler.steps * course.stretch.epochs for course in self.courses)

    def run(self) -> Iterator[int]:
        """Train; go on where the newest checkpoint was taken."""
        self._take_up()
        yield self.done
        if not self.is_finished:
            self._verify(self._course())
        while not (self.is_finished or self.ended_by):
            yield from self._epoch(self._course())

    def _course(self) -> Course:
        return next(course for course in self.courses if self.epoch in course.epochs)

    # One epoch

    def _epoch(self, course: Course) -> Iterator[int]:
        """Go on with an epoch, to its end or to where the loader has to begin anew."""
        self._enter(course)
        self._again = False
        if not self._is_at_end(course):
            yield from self._steps(course)
        if not (self.ended_by or self._again or self._gone_back()):
            if self._saves_before_validation():
                self._save(None)
            self._end_epoch(course)

    def _saves_before_validation(self) -> bool:
        """Say whether so much was done since the last checkpoint that a long validation must not put it at risk."""
        is_due = self.validation is not None and time.monotonic() - self._saved_s > WORTH_SAVING_S
        return bool(self.ranks.exchange({"due": is_due})[0]["due"])

    def _is_at_end(self, course: Course) -> bool:
        return self._next >= course.loader.sampler.steps

    def _steps(self, course: Course) -> Iterator[int]:
        self._go_to(course, self._next)
        self._since_s = time.monotonic()
        for share in self._shares(course, iter(course.loader)):
            self._step(course, share)
            yield self.done
            if self.ended_by or self._again:
                course.loader.close()
                return

    def _go_to(self, course: Course, step: int) -> None:
        """Let the loader begin at a step of this epoch."""
        course.loader.load_state_dict({**course.loader.sampler.state_dict(), "epoch": self.epoch, "step": step})

    def _enter(self, course: Course) -> None:
        """Let budgets and costs be those of a stretch; what was learned of its share carries over."""
        if course is self._entered:
            return
        share = self.governor.budget / self._planned
        governor = self._governor_of(course)
        planned = governor.budget
        if share < 1:
            governor.adopt(int(planned * share))
        self._go_by(governor, planned, course)

    def _go_by(self, governor: Governor, planned: int, course: Course) -> None:
        self._entered, self._planned = course, planned
        self.stepper.governor, self.stepper.cost_N = governor, course.cost_N
        self._cropped = course.loader.stats.cropped
        self._adjust(course)

    def _adjust(self, course: Course) -> None:
        """Let the sampler cut by the present budget."""
        sampler = course.loader.sampler
        if sampler.settings.budget:
            sampler.adjust(budget={**sampler.settings.budget, "cost": self.governor.budget},
                           micro_batch=sampler.settings.micro_batch)  # fmt: skip

    def _shares(self, course: Course, batches: Iterator[Batch]) -> Iterator[Share]:
        from pipeline.training.sampler import Micro

        def fetch(numbers: Any, origin: Origin) -> Batch:
            items = torch.tensor(numbers, dtype=torch.int64).numpy()
            return course.loader.fetch(numbers, Micro(origin.epoch, origin.step, origin.index, origin.of, items))

        while True:
            share = Share(batches, fetch, hold=max(0, self.train.slots - 2), leave_out=self._leave_out)
            if share.is_over:
                return
            yield share

    def _end_epoch(self, course: Course) -> None:
        """Validate, tell, save."""
        self._refuse_nothing_learned()
        figures: dict[str, float] = {}
        is_last = self.epoch + 1 == self.courses[-1].epochs.stop
        if self.validation is not None and (is_last or (self.epoch + 1) % self.train.validation.every == 0):
            with self.ranks.patient("validation"), self.step.averaged():
                found = self.validation.figures()
            if isinstance(found, int):  # the signal that ended it
                self._save(None, wait=True)
                self.ended_by = found
                return
            figures = found
        self._count_waiting(course)
        self.watcher.epoch(self.tally, self.done, figures, self.step.optimizer.param_groups[0]["lr"])
        figure = self._judge(figures)
        self.epoch += 1
        self.is_finished = is_last or self._is_stale()
        self._next = 0
        if not self.is_finished:
            course = self._course()
            self._enter(course)
        self.tally = Tally(self.epoch, waited_before_s=course.loader.stats.wait_s)
        self._save(figure)

    def _refuse_nothing_learned(self) -> None:
        """Raise after an epoch of which no item had anything to learn from: only the weight decay moved the model."""
        weights = [weight for _, weight in self.tally.terms.values()]
        if weights and not any(weights):
            what = f"nothing was learned in an epoch of {self.tally.items:,} items: every term of the loss has weight 0"
            remedy = "see that the items have what is to be learned: labels, targets, peptides"
            raise DataError(what, where="train.task", remedy=remedy)

    def _count_waiting(self, course: Course) -> None:
        self.tally.wait_s = course.loader.stats.wait_s - self.tally.waited_before_s

    def _judge(self, figures: Mapping[str, float]) -> float | None:
        """Return the figure that is watched, and count how long none was better."""
        settings = self.train.validation
        figure = figures.get(settings.monitor)
        if figures and figure is None:
            known = ", ".join(figures)
            what = f"no figure of the validation is called {settings.monitor!r}; there are {known}"
            raise DataError(what, where="train.validation.monitor", remedy="name one of these")
        if figure is None:
            return None
        if not math.isfinite(figure):
            self.stale += 1
            return None
        better = self.best is None or (figure < self.best if settings.lower_is_better else figure > self.best)
        self.best, self.stale = (figure, 0) if better else (self.best, self.stale + 1)
        return figure

    def _is_stale(self) -> bool:
        patience = self.train.validation.patience
        return patience is not None and self.stale >= patience

    # One step

    def _step(self, course: Course, share: Share) -> None:
        """Make one step, or leave it out; then what is to be done between two."""
        self.ranks.progress(f"step {self.done + 1}")
        self._share = share  # the one before is let go of, with the slots that it holds
        if self.done + 1 in self.poisoned:
            share.drain()
            self._leave_out_step()
            self.watcher.say(f"step {self.done} is left out: it was not finite before")
            return
        rate = set_rate(self.step.optimizer, factor(self.train.schedule, self.done, self.steps))
        with self.watcher.watching():
            heard = self._accumulate(share)
            norm = None if heard.lost or heard.not_finite else self._taken(heard)
        if heard.lost:
            self._roll_back(heard.lost, self.done - 1, frugal=True)
            return
        if self.done > self._furthest:
            self._rollbacks = 0
        if norm is None:
            self._poison(share, heard)
        else:
            self._count(heard)
        if not self._again:
            self._between(course, heard, None if norm is None else {"learning_rate": rate, "gradient_norm": norm})

    def _count(self, heard: Heard) -> None:
        """Count a step that was made."""
        self.done += 1
        self._next += 1
        now_s = time.monotonic()
        self.tally.add(heard, now_s - self._since_s)

    def _leave_out_step(self) -> None:
        self.done += 1
        self._next += 1
        self.tally.left_out += 1

    def _accumulate(self, share: Share) -> Heard:
        """Run this rank's share; return what all ranks did."""
        weights, is_lost = self._weights(share)
        if is_lost:
            share.drain()
            words = Words(lost=self._lost)
        else:
            local = self.stepper.run(share, weights)
            words = self._words(share, local)
        heard = Heard.of(self.ranks.exchange(words.to_json()))
        self.stepper.learn_terms(len(heard.names))
        are_more = weights is None and len(heard.names) > 1  # terms than ever before: they were divided by a guess
        are_less = weights is not None and heard.sum_of("just_skipped")  # items than were weighed
        if (are_more or are_less or heard.sum_of("again")) and not heard.lost:
            self.stepper.go_back()
            again = self._accumulate(share)
            for first, second in zip(heard.words, again.words, strict=True):
                second.carry(first)
            return again
        if weights is None and len(heard.names) == 1:
            ((_, weight),) = heard.totals.values()
            self.step.settle(weight)
        return heard

    def _weights(self, share: Share) -> tuple[dict[str, float] | None, bool]:
        """Return the weights of the whole step, where they must be known beforehand, and whether it cannot be run."""
        if not self.stepper.needs_weights:
            return None, bool(self._lost)
        own = {} if self._lost else self.stepper.weights(share)
        said = self.ranks.exchange({"lost": bool(self._lost), "weights": own})
        told, is_lost = [one["weights"] for one in said], any(one["lost"] for one in said)
        names = list(dict.fromkeys(name for one in told for name in one))
        self.stepper.learn_terms(len(names))
        if not self.stepper.needs_weights:
            return None, is_lost
        return {name: math.fsum(one.get(name, 0.0) for one in told) for name in names}, is_lost

    def _words(self, share: Share, local: Local) -> Words:
        memory = self.meter.read() if self.meter else None
        want = self.governor.after_step(memory)
        self._empty_cache = want.empty_cache
        if want.why:
            self.watcher.say(f"step {self.done + 1}: {want.why}")
        minutes = (time.monotonic() - self._saved_s) / 60
        every = self.train.checkpoints.every
        return Words(
            terms=local.terms,
            items=local.items,
            micros=local.micros,
            ooms=local.ooms,
            rejected=share.rejected,
            skipped=len(share.skipped),
            just_skipped=len(local.skipped),
            cropped=self._newly_cropped(),
            remedied=local.remedied,
            again=local.again,
            absent=self._absent(),
            budget=want.budget,
            ending=self._ending(),
            is_due=minutes >= self.train.checkpoints.minutes or bool(every and (self.done + 1) % every == 0),
            host_share=self.host.read().share if self.host else 0.0,
            is_written=self.keeper.is_written,
        )

    def _newly_cropped(self) -> int:
        """Return how many items were cropped since the last call."""
        assert self._entered is not None
        before, self._cropped = self._cropped, self._entered.loader.stats.cropped
        return self._cropped - before

    def _absent(self) -> list[int] | None:
        absent = [number for number, one in enumerate(self.step.trained) if one.grad is None]
        return None if len(absent) == len(self.step.trained) else absent

    def _taken(self, heard: Heard) -> float | None:
        """Let the optimizer take the gradients of all ranks; return their norm; None where it is not finite."""
        if not heard.names:  # no rank has any item
            self.step.release()
            return 0.0
        self._add_up(heard)
        norm = float(self.step.clip() if self.step.settings.clip is not None else self.step.norm())
        if not math.isfinite(norm) and not self.step.retries_by_scale:
            return None
        if self.step.is_spread:  # where memory ends here, all ranks end
            self.step.apply()
            return norm
        lost = said_out_of_memory(lambda _: self.step.apply(), None)
        self._lost = "" if lost is None else f"memory ended within the optimizer: {lost}"
        return norm

    def _add_up(self, heard: Heard) -> None:
        """Give every rank the gradients of all."""
        if self.ranks.world == 1 or self.step.is_spread:  # then they are sums already
            return
        gradients: list[Tensor] = []
        for number in heard.with_gradient(len(self.step.trained)):
            parameter = self.step.trained[number]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self.ranks.add_up(gradients)

    # What goes wrong

    def oom(self, piece: Piece, error: str) -> None:
        """Hear that a piece did not fit."""
        if self._share is not None:
            self.watcher.oom(self.done + 1, self._share, piece, error)

    def _poison(self, share: Share, heard: Heard) -> None:
        """Deal with a step that is not finite, as configured."""
        self.stepper.go_back()
        everyone = self.step.is_spread or self.stepper.is_joint or not heard.not_finite
        mine = everyone or self.ranks.rank in heard.not_finite
        own = self.stepper.not_finite(share) if mine else []
        items = [item for one in self.ranks.exchange({"items": own}) for item in one["items"]]
        self.stepper.go_back()
        number, kind = self.done + 1, "loss" if heard.not_finite else "gradient"
        named = f"of {', '.join(items[:5])}" if items else "of no single item alone"
        what = f"the {kind} of step {number} is not finite ({named})"
        policy = self.train.nan
        if policy == "stop":
            self._save(None, wait=True)
        self.watcher.poison(number, share, what)
        if policy == "stop":
            remedy = f"pipeline replay RUN --step {number}   or   --set train.nan=skip"
            raise DataError(what, where=f"epoch {self.epoch}", remedy=remedy)
        if policy == "skip":
            self.watcher.say(f"{what}: left out")
            self._leave_out_step()
            return
        self.poisoned.add(number)
        self._roll_back(what, number)

    def _gone_back(self) -> bool:
        """Go back if any rank has lost its parameters in the step that was the last; say whether it was so."""
        told = self.ranks.exchange({"lost": self._lost})
        lost = next((f"rank {rank}: {one['lost']}" for rank, one in enumerate(told) if one["lost"]), "")
        if lost:
            self._roll_back(lost, self.done - 1, frugal=True)
        return bool(lost)

    def _roll_back(self, why: str, furthest: int, *, frugal: bool = False) -> None:
        """Go back to the newest checkpoint, with every rank; `frugal` lets the optimizer take less memory then.

        `furthest` is the step beyond which training must come before it counts as having gone on.
        """
        self._rollbacks += 1
        self._furthest = max(self._furthest, furthest)
        if self._rollbacks > ROLLBACKS:
            less = "a card with more memory, or --set train.way=loop"
            remedy = less if frugal else "a lower train.learning_rate, or --set train.nan=skip"
            raise JobFailed(f"{why}; going back to the last checkpoint did not help", where="training", remedy=remedy)
        self.watcher.say(f"{why}: back to the last checkpoint")
        self.stepper.go_back()  # gradients that nobody has taken are gone
        if frugal:
            for group in self.step.optimizer.param_groups:  # its way with the least memory of its own
                group["foreach"], group["fused"] = False, None
        poisoned = set(self.poisoned)
        self._lost = ""
        for course in self.courses:
            course.loader.close()
        self._take_up()
        make_state(self.step)  # at the beginning there is none
        self.poisoned |= poisoned
        self._again = True

    # Between steps

    def _between(self, course: Course, heard: Heard, figures: dict[str, float | None] | None) -> None:
        """Do what is done between steps; there are no figures of one that was left out."""
        if self.governor.adopt(heard.budget):
            self.watcher.say(f"step {self.done}: micro-batches cost {self.governor.budget:,} at most from now on")
            self._adjust(course)
            self._again = True  # what was read ahead is cut for another budget
        self.stepper.upkeep.after_step(empty_cache=self._empty_cache)
        self.watcher.between(max((one.micros for one in heard.words), default=0))
        if figures is not None and self.ranks.rank == 0 and self.done % self.train.log_every == 0:
            losses = {f"{LOSS}.{name}": _mean(total) for name, total in heard.totals.items()}
            self.watcher.step(self.done, {**losses, **figures, "items": float(heard.sum_of("items"))})
        if heard.is_written:
            self.keeper.hand_in()
        self.keeper.listen()
        self.ended_by = heard.ending
        is_full = heard.host_share >= NEAR  # left in order, and taken up with more
        ends = bool(heard.ending) or is_full
        if ends or (heard.is_due and not self._is_at_end(course)):  # an epoch ends with one anyway
            self._save(None, wait=ends)
        self._since_s = time.monotonic()
        if is_full and not heard.ending:
            what = f"the host's memory is used to {heard.host_share:.0%}: saved, to go on with more"
            raise JobFailed(what, where="training", remedy="pipeline resume") from MemoryError(what)

    # Where training stands

    def _place(self) -> Place:
        from pipeline.training.keeping import Place

        course = self.courses[-1] if self.is_finished else self._course()
        self._count_waiting(course)
        return Place(
            epoch=self.epoch,
            done=self.done,
            sampler={**course.loader.sampler.state_dict(), "epoch": self.epoch, "step": self._next},
            best=self.best,
            stale=self.stale,
            monitor=self.train.validation.monitor,
            finished=self.is_finished,
            tally=self.tally.to_json(),
            poisoned=sorted(self.poisoned),
        )

    def _own(self) -> dict[str, Any]:
        return {"governor": self.governor.state()}

    def _save(self, figure: float | None, *, wait: bool = False) -> None:
        """Save everything; a disk that is full is told of, and training goes on."""
        if any(one["lost"] for one in self.ranks.exchange({"lost": self._lost})):
            return  # the next step goes back
        with self.ranks.patient("saving"):
            saved = self.keeper.save(
                self._place(),
                self.step,
                self.done,
                own=self._own(),
                figure=figure,
                lower=self.train.validation.lower_is_better,
                wait=wait or self.is_finished,
            )
        self._saved_s = time.monotonic()
        if not saved and self.is_finished:
            what = "the trained model could not be saved"
            raise JobFailed(what, where=str(self.keeper.folder), remedy="make room, and submit again")

    def _take_up(self) -> None:
        """Go to where the newest checkpoint was taken, or to the beginning."""
        with self.ranks.patient("taking up"):
            found = self.keeper.take_up(self.step)
        place, own = found.place, found.own
        self.epoch, self.done = place.epoch, place.done
        is_alike = place.monitor == self.train.validation.monitor
        self.best, self.stale = (
            (place.best, place.stale) if is_alike else (None, 0)
        )  # of another figure it says nothing
        self._next = int(place.sampler.get("step", 0))
        self.poisoned = set(place.poisoned)
        self.is_finished = self.epoch >= self.courses[-1].epochs.stop or self._is_stale()
        self.watcher.taken_up(self.done)
        if self.is_finished:
            return
        course = self._course()
        governor = self._governor_of(course)
        planned = governor.budget
        if own.get("governor"):
            governor.load(own["governor"])
        governor.adopt(min(one["budget"] for one in self.ranks.exchange({"budget": governor.budget})))
        self._go_by(governor, planned, course)
        last = course.loader.sampler.steps - 1
        course.loader.load_state_dict(
            {
                **(place.sampler or course.loader.sampler.state_dict()),
                "epoch": self.epoch,
                "step": min(self._next, last),
            }
        )
        self.tally = Tally.from_json(place.tally) if place.tally else Tally(self.epoch)
        self.tally.waited_before_s = course.loader.stats.wait_s - self.tally.wait_s

    def _verify(self, course: Course) -> None:
        """Before the first step: make the optimizer's state, run the worst micro-batch, and compare with the plan."""
        learned = self.governor.learned
        with self.ranks.patient("the first run"):
            wanted = rehearse(self.step, self.stepper, course, self.meter, self.watcher.say, leave_out=self._leave_out)
        if self.done and wanted == self.governor.budget:  # what was learned before is what a run without a stop knows
            self.governor.learned = learned
        agreed = min(one["budget"] for one in self.ranks.exchange({"budget": wanted}))
        if self.governor.adopt(agreed):
            self._adjust(course)


def _mean(total: tuple[float, float]) -> float | None:
    return total[0] / total[1] if total[1] else None
