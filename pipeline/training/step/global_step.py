"""The reports that ranks exchange at the end of a step, and the decisions that all of them draw from these."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.device.out_of_memory import after_freeing_caches, out_of_memory_error
from pipeline.training.ranks.gradient_sums import GradientSums
from pipeline.training.step.local_sharded import power_of_two
from pipeline.training.step.local_step import refuse_unequal
from pipeline.training.step_clock import REDUCE, UPDATE, WEIGH, WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeline.memory.runtime.meters import Meter
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.local_step import Local, Stepper
    from pipeline.training.step.micro_batches import RankShare
    from pipeline.training.step.step import Step


@dataclass(slots=True)
class RankReport:
    """A rank's report of a step, exchanged before the update: what it did, and what it asks for."""

    terms: Mapping[str, Sequence[float]] = field(default_factory=dict)  # sums and weights
    items: int = 0
    micros: int = 0
    ooms: int = 0
    rejected: int = 0
    skipped: int = 0  # items that fit nowhere
    just_skipped: int = 0  # of these, since the step last started
    cropped: int = 0
    remedied: Mapping[str, int] = field(default_factory=dict)  # items that ran on a rung of the ladder, by its name
    again: bool = False  # it could not finish the step
    absent: list[int] | None = None  # parameters without a gradient; None: all of them
    budget: int = 0  # the memory budget that it wants from now on
    ending: int = 0  # the signal that asked it to end; 0: none
    is_due: bool = False  # a checkpoint is due, by the first rank's clock
    host_share: float = 0.0  # used share of the host's memory limit
    is_written: bool = False  # its part of a checkpoint that is saved in the background
    lost: str = ""  # why its parameters are half updated: memory ended within the optimizer
    damaged: list[str] = field(default_factory=list)  # items that it leaves out from now on: their records are damaged
    room: int = 0  # how large pieces of gradients may be, for which it has memory

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def carry(self, first: RankReport) -> None:
        """Take over the budget and the counts of an attempt after which the step started again."""
        self.budget = min(self.budget, first.budget)
        self.ooms += first.ooms
        self.damaged = [*first.damaged, *self.damaged]


@dataclass(frozen=True, slots=True)
class StepReport:
    """The reports of all ranks; every rank draws the same conclusions from them."""

    words: tuple[RankReport, ...]

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]]) -> StepReport:
        """Read the ranks' messages; refuse terms of unequal names."""
        reports = tuple(RankReport(**message) for message in messages)
        refuse_unequal([list(report.terms) for report in reports])
        return cls(reports)

    @property
    def names(self) -> list[str]:
        return next((list(report.terms) for report in self.words if report.terms), [])

    def total(self, name: str) -> tuple[float, float]:
        """Return the sum and the weight of a term over all ranks."""
        terms = [report.terms[name] for report in self.words if name in report.terms]
        return math.fsum(total for total, _ in terms), math.fsum(weight for _, weight in terms)

    @property
    def totals(self) -> dict[str, tuple[float, float]]:
        return {name: self.total(name) for name in self.names}

    @property
    def means(self) -> dict[str, float | None]:
        return {name: total / weight if weight else None for name, (total, weight) in self.totals.items()}

    @property
    def not_finite(self) -> list[int]:
        """The ranks with a sum or weight that is not finite."""
        return [
            rank
            for rank, report in enumerate(self.words)
            if not all(math.isfinite(total) and math.isfinite(weight) for total, weight in report.terms.values())
        ]

    def with_gradient(self, parameters: int) -> list[int]:
        """Return the numbers of the parameters that have a gradient on any rank."""
        absent = [set(report.absent) for report in self.words if report.absent is not None]
        nowhere = set.intersection(*absent) if absent else set(range(parameters))
        return [number for number in range(parameters) if number not in nowhere]

    def sum_of(self, name: str) -> int:
        """Return the sum of a count over all ranks."""
        return sum(getattr(report, name) for report in self.words)

    @property
    def remedied(self) -> dict[str, int]:
        """How many items ran on each rung of the ladder."""
        names = sorted({name for report in self.words for name in report.remedied})
        return {name: sum(report.remedied.get(name, 0) for report in self.words) for name in names}

    @property
    def ending(self) -> int:
        """The signal that asked any rank to end; 0: none."""
        return max(report.ending for report in self.words)

    @property
    def lost(self) -> str:
        return next((f"rank {rank}: {report.lost}" for rank, report in enumerate(self.words) if report.lost), "")

    @property
    def damaged(self) -> set[str]:
        """The items that any rank leaves out from now on."""
        return {item for report in self.words for item in report.damaged}

    @property
    def is_written(self) -> bool:
        return all(report.is_written for report in self.words)

    @property
    def is_due(self) -> bool:
        return self.words[0].is_due

    @property
    def budget(self) -> int:
        return min(report.budget for report in self.words)

    @property
    def room(self) -> int:
        return min(report.room for report in self.words)

    @property
    def host_share(self) -> float:
        return max(report.host_share for report in self.words)


class WholeStep:
    """Makes steps together with all ranks; `lost` is set on a rank whose memory ended within the optimizer."""

    def __init__(
        self,
        step: Step,
        stepper: Stepper,
        ranks: Ranks,
        *,
        meter: Meter | None,
        complete: Callable[[RankReport], None],
        say: Callable[[str], None],
    ) -> None:
        """Take what runs this rank's part; `complete` fills in the report's fields that are not of the step itself."""
        self.step, self.stepper, self.ranks, self.meter = step, stepper, ranks, meter
        self.lost = ""
        self.empty_cache = False  # whether the governor wants it after the step
        self._complete, self._say = complete, say
        self._weight = 0.0  # of a single term in the last step, over all ranks
        self._unsettled: float | None = None  # the same of this step, until its gradients are divided by it
        self._sums: GradientSums | None = None  # None: gradients are sums already
        if ranks.world > 1 and not step.is_spread:
            self._sums = GradientSums(step.trained, ranks, step.device)

    def accumulate(self, share: RankShare, number: int) -> StepReport:
        """Run this rank's share; return the reports of all ranks."""
        weights, is_lost = self._weights(share)
        if self._sums is not None:  # a power of two changes no digit: the sum is the same whichever it is
            self.step.agreed = power_of_two(math.ceil(self._weight)) if math.isfinite(self._weight) else 1.0
        if is_lost:
            share.drain()
            own = RankReport(lost=self.lost)
        else:
            own = self._report(share, self.stepper.run(share, weights), number)
            if self._sums is not None and not own.again:
                own.room = self._sums.reserve()
        report = StepReport.of(self._exchange(own.to_json()))
        self.stepper.learn_terms(len(report.names))
        has_more_terms = weights is None and len(report.names) > 1  # than ever before: they were divided by a guess
        has_fewer_items = weights is not None and report.sum_of("just_skipped")  # than the weights are of
        must_repeat = has_more_terms or has_fewer_items or report.sum_of("again")
        if must_repeat and not report.lost:
            self.stepper.go_back()
            again = self.accumulate(share, number)
            for first, second in zip(report.words, again.words, strict=True):
                second.carry(first)
            return again
        if len(report.names) == 1:
            ((_, self._weight),) = report.totals.values()
        self._unsettled = self._weight if weights is None and len(report.names) == 1 else None
        return report

    def _exchange(self, message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        with self.step.clock.within(WORDS):
            return self.ranks.exchange(message)

    def _weights(self, share: RankShare) -> tuple[dict[str, float] | None, bool]:
        """Return the weights of the whole step, None where they are not needed, and whether any rank is lost."""
        if not self.stepper.needs_weights:
            return None, bool(self.lost_by() if self.step.is_spread else self.lost)  # spread, all make the same passes
        with self.step.clock.within(WEIGH):
            own = {} if self.lost else self.stepper.weights(share)
        replies = self._exchange({"lost": bool(self.lost), "weights": own})
        rank_weights, is_lost = [reply["weights"] for reply in replies], any(reply["lost"] for reply in replies)
        names = list(dict.fromkeys(name for weights in rank_weights for name in weights))
        whole = {name: math.fsum(weights.get(name, 0.0) for weights in rank_weights) for name in names}
        self.stepper.learn_terms(len(names))
        if not self.stepper.needs_weights:
            self._weight = sum(whole.values())
            return None, is_lost
        return whole, is_lost

    def _report(self, share: RankShare, local: Local, number: int) -> RankReport:
        memory = self.meter.read() if self.meter else None
        want = self.stepper.governor.after_step(memory)
        self.empty_cache = want.empty_cache
        if want.why:
            self._say(f"step {number}: {want.why}")
        report = RankReport(
            terms=local.terms,
            items=local.items,
            micros=local.micros,
            ooms=local.ooms,
            rejected=share.rejected,
            cropped=share.cropped,
            skipped=len(share.skipped),
            just_skipped=len(local.skipped),
            remedied=local.remedied,
            again=local.again,
            absent=self._absent(),
            budget=want.budget,
        )
        self._complete(report)
        return report

    def emptied(self) -> None:
        """Let the peaks begin anew once the cache is emptied: else one moment counts until the epoch ends."""
        if self.empty_cache and self.meter:
            self.meter.reset_peak(keep=True)

    def _absent(self) -> list[int] | None:
        absent = [number for number, parameter in enumerate(self.step.trained) if parameter.grad is None]
        return None if len(absent) == len(self.step.trained) else absent

    def take(self, heard: StepReport) -> float | None:
        """Step the optimizer with the gradients of all ranks; return their norm, None where it is not finite."""
        if not heard.names:  # no rank has any item
            self.step.release()
            return 0.0
        self._add_up(heard)
        with self.step.clock.within(UPDATE):
            return self._updated()

    def _updated(self) -> float | None:
        """Step the optimizer with gradients that are sums; return their norm, None where it is not finite."""
        if self._unsettled is not None:
            self.step.settle(self._unsettled)
        clip = self.step.settings.clip
        if self.step.is_spread:  # all ranks compute it together
            norm_tensor = self.step.norm() if clip is None else self.step.clip()
        else:
            norm_tensor = after_freeing_caches(self.step.norm, self.step.device)
        norm = float(norm_tensor)
        if not math.isfinite(norm) and not self.step.retries_by_scale:
            return None
        error = None if clip is None or self.step.is_spread else out_of_memory_error(self.step.clip_to, norm_tensor)
        error = error or out_of_memory_error(self.step.apply)
        self.lost = "" if error is None else f"out of memory in optimizer.step(): {error}"
        return norm

    def _add_up(self, heard: StepReport) -> None:
        """Add up the gradients over ranks, where that is still to be done, and drop those that no rank has."""
        if self._sums is None:
            return
        with self.step.clock.within(REDUCE):
            self._sums.add_up(heard.room)
        present = set(heard.with_gradient(len(self.step.trained)))
        for number, parameter in enumerate(self.step.trained):
            if number not in present:
                parameter.grad = None

    def lost_by(self) -> str:
        """Ask all ranks whether any lost its parameters in the last step; return which rank and why, else ""."""
        replies = self._exchange({"lost": self.lost})
        return next((f"rank {rank}: {reply['lost']}" for rank, reply in enumerate(replies) if reply["lost"]), "")
