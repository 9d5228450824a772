"""What ranks tell each other at the end of a step, and what follows from it: all of them decide the same."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pipeline.memory.runtime.out_of_memory import out_of_memory_error
from pipeline.training.step.local_step import refuse_unequal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from pipeline.memory.runtime.meters import Meter
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.local_step import Local, Stepper
    from pipeline.training.step.micro_batches import RankShare
    from pipeline.training.step.step import Step


@dataclass(slots=True)
class RankReport:
    """A rank's report of a step, exchanged before the update: what it has done, and wants."""

    terms: Mapping[str, Sequence[float]] = field(default_factory=dict)  # sums and weights
    items: int = 0
    micros: int = 0
    ooms: int = 0
    rejected: int = 0
    skipped: int = 0  # items that fit nowhere
    just_skipped: int = 0  # of these, since the step began for the last time
    cropped: int = 0
    remedied: Mapping[str, int] = field(default_factory=dict)  # items that ran on a rung of the ladder, by its name
    again: bool = False  # the step has come to no end on it
    absent: list[int] | None = None  # parameters without a gradient; None: all of them
    budget: int = 0  # that it wants from now on
    ending: int = 0  # the signal that told it to end
    is_due: bool = False  # a checkpoint, by the first rank's clock
    host_share: float = 0.0  # of its memory limit that the host has used
    is_written: bool = False  # its share of a checkpoint that is saved behind the training's back
    lost: str = ""  # its parameters are torn: memory ended within the optimizer

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def carry(self, first: RankReport) -> None:
        """Add what was learned and counted before the step began again; what ran then has come to nothing."""
        self.budget = min(self.budget, first.budget)
        self.ooms += first.ooms
        self.cropped += first.cropped


@dataclass(frozen=True, slots=True)
class StepReport:
    """The reports of all ranks, from which each draws the same conclusions."""

    words: tuple[RankReport, ...]

    @classmethod
    def of(cls, said: Sequence[Mapping[str, Any]]) -> StepReport:
        """Read what ranks said; terms of unequal names are refused."""
        words = tuple(RankReport(**one) for one in said)
        refuse_unequal([list(one.terms) for one in words])
        return cls(words)

    @property
    def names(self) -> list[str]:
        return next((list(one.terms) for one in self.words if one.terms), [])

    def total(self, name: str) -> tuple[float, float]:
        """Return the sum and the weight of a term over all ranks."""
        found = [one.terms[name] for one in self.words if name in one.terms]
        return math.fsum(total for total, _ in found), math.fsum(weight for _, weight in found)

    @property
    def totals(self) -> dict[str, tuple[float, float]]:
        return {name: self.total(name) for name in self.names}

    @property
    def not_finite(self) -> list[int]:
        """Return the ranks that have a sum which is not finite."""
        return [
            rank
            for rank, one in enumerate(self.words)
            if not all(math.isfinite(total) and math.isfinite(weight) for total, weight in one.terms.values())
        ]

    def with_gradient(self, parameters: int) -> list[int]:
        """Return which parameters have a gradient on any rank."""
        absent = [set(one.absent) for one in self.words if one.absent is not None]
        nowhere = set.intersection(*absent) if absent else set(range(parameters))
        return [number for number in range(parameters) if number not in nowhere]

    def sum_of(self, name: str) -> int:
        """Return the sum of a count over all ranks."""
        return sum(getattr(one, name) for one in self.words)

    @property
    def remedied(self) -> dict[str, int]:
        """Return how many items ran on each rung of the ladder."""
        names = sorted({name for one in self.words for name in one.remedied})
        return {name: sum(one.remedied.get(name, 0) for one in self.words) for name in names}

    @property
    def ending(self) -> int:
        """Return the signal that told any rank to end; 0: none."""
        return max(one.ending for one in self.words)

    @property
    def lost(self) -> str:
        return next((f"rank {rank}: {one.lost}" for rank, one in enumerate(self.words) if one.lost), "")

    @property
    def is_written(self) -> bool:
        return all(one.is_written for one in self.words)

    @property
    def is_due(self) -> bool:
        return self.words[0].is_due

    @property
    def budget(self) -> int:
        return min(one.budget for one in self.words)

    @property
    def host_share(self) -> float:
        return max(one.host_share for one in self.words)


class WholeStep:
    """Makes steps with every rank; `lost` says, on the rank where it was so, that memory ended within the optimizer."""

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
        """Take what runs this rank's part; `complete` adds to its words what is not of the step itself."""
        self.step, self.stepper, self.ranks, self.meter = step, stepper, ranks, meter
        self.lost = ""
        self.empty_cache = False  # is wanted once the step has ended
        self._complete, self._say = complete, say

    def accumulate(self, share: RankShare, number: int) -> StepReport:
        """Run this rank's share; return what all ranks did."""
        weights, is_lost = self._weights(share)
        if is_lost:
            share.drain()
            words = RankReport(lost=self.lost)
        else:
            local = self.stepper.run(share, weights)
            words = self._words(share, local, number)
        heard = StepReport.of(self.ranks.exchange(words.to_json()))
        self.stepper.learn_terms(len(heard.names))
        are_more = weights is None and len(heard.names) > 1  # terms than ever before: they were divided by a guess
        are_less = weights is not None and heard.sum_of("just_skipped")  # items than were weighed
        if (are_more or are_less or heard.sum_of("again")) and not heard.lost:
            self.stepper.go_back()
            again = self.accumulate(share, number)
            for first, second in zip(heard.words, again.words, strict=True):
                second.carry(first)
            return again
        if weights is None and len(heard.names) == 1:
            ((_, weight),) = heard.totals.values()
            self.step.settle(weight)
        return heard

    def _weights(self, share: RankShare) -> tuple[dict[str, float] | None, bool]:
        """Return the weights of the whole step, where they must be known beforehand, and whether it cannot be run."""
        if not self.stepper.needs_weights:
            return None, bool(self.lost)
        own = {} if self.lost else self.stepper.weights(share)
        said = self.ranks.exchange({"lost": bool(self.lost), "weights": own})
        told, is_lost = [one["weights"] for one in said], any(one["lost"] for one in said)
        names = list(dict.fromkeys(name for one in told for name in one))
        self.stepper.learn_terms(len(names))
        if not self.stepper.needs_weights:
            return None, is_lost
        return {name: math.fsum(one.get(name, 0.0) for one in told) for name in names}, is_lost

    def _words(self, share: RankShare, local: Local, number: int) -> RankReport:
        memory = self.meter.read() if self.meter else None
        want = self.stepper.governor.after_step(memory)
        self.empty_cache = want.empty_cache
        if want.why:
            self._say(f"step {number}: {want.why}")
        words = RankReport(
            terms=local.terms,
            items=local.items,
            micros=local.micros,
            ooms=local.ooms,
            rejected=share.rejected,
            skipped=len(share.skipped),
            just_skipped=len(local.skipped),
            remedied=local.remedied,
            again=local.again,
            absent=self._absent(),
            budget=want.budget,
        )
        self._complete(words)
        return words

    def _absent(self) -> list[int] | None:
        absent = [number for number, one in enumerate(self.step.trained) if one.grad is None]
        return None if len(absent) == len(self.step.trained) else absent

    def take(self, heard: StepReport) -> float | None:
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
        lost = out_of_memory_error(self.step.apply)
        self.lost = "" if lost is None else f"memory ended within the optimizer: {lost}"
        return norm

    def _add_up(self, heard: StepReport) -> None:
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

    def lost_by(self) -> str:
        """Ask all ranks whether any has lost its parameters in the last step; return which, and how."""
        told = self.ranks.exchange({"lost": self.lost})
        return next((f"rank {rank}: {one['lost']}" for rank, one in enumerate(told) if one["lost"]), "")
