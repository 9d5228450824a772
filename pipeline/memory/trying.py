"""One choice tried: the budget under which all fits, what the allocator holds, and the time it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from pipeline.memory.allocator import format_bytes
from pipeline.memory.budget import Found, Ground, Search
from pipeline.memory.footprint import Origin
from pipeline.memory.margins import Margin, compiled, least_sure, margin_of
from pipeline.memory.pace import Pace, epoch_s, pace_of, transfer_again_s, update_s
from pipeline.memory.plan import Figure, Reserved, Trial, Verdict
from pipeline.memory.reserving import live_only, sample
from pipeline.memory.screening import fit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pipeline.memory.footprint import Choice, Micro
    from pipeline.memory.questions import Questions
    from pipeline.memory.request import Cards, Data, Request
    from pipeline.memory.reserving import Reserve

    Floats = NDArray[np.float64]

_TURNS = 4  # times the budget is corrected for what the allocator holds beyond what is live
_FRAGMENTED = 1.02  # what is expected of it at first


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of a choice; without a budget it does not fit."""

    choice: Choice
    verdict: Verdict
    why: str
    margin: Margin
    alone: int = 0  # the live peak of the item that takes most alone; 0: nobody asked
    found: Found | None = None
    reserved: Reserved | None = None
    micros: tuple[Micro, ...] = ()  # of the buckets
    pace: Pace | None = None  # of an epoch of middling shares: an estimate
    cuts: int = 1  # of such a share
    step_s: float = 0.0
    epoch_s: float = 0.0

    @property
    def total(self) -> int:
        """Return what must be below the limit."""
        held = self.reserved.bytes if self.reserved else self.alone
        return int(np.ceil(held * self.margin.factor))

    def trial(self, remedy: str) -> Trial:
        """Return it for a report; the total of what did not fit is that of the largest item alone."""
        looked = self.reserved is not None or self.verdict is Verdict.TOO_LARGE
        total = Figure(self.total, self.margin.origin) if looked and self.total else None
        time = Figure(self.epoch_s, Origin.ASSUMED) if self.epoch_s else None
        return Trial(remedy, self.choice, self.verdict, self.why, total, time)


@dataclass(frozen=True, eq=False)
class Trying:
    """Tries choices on one data set."""

    questions: Questions
    data: Data
    request: Request
    cards: Cards
    reserve: Reserve

    @property
    def limit(self) -> int:
        """Return what torch may reserve of any card."""
        return self.cards.smallest.budget_bytes

    def margin(self, choice: Choice) -> Margin:
        """Return the margin for what was said of a choice so far."""
        standing = self.questions.standing(choice)
        origins = {standing.origin, *self.questions.origins(choice)}
        request = self.request
        ratios = request.ratios if request.measured in (None, choice) else ()
        margin = margin_of(least_sure(origins), ratios, caching=self.cards.caching)
        return compiled(margin) if request.compiled else margin

    @cached_property
    def ground(self) -> Ground:
        """Return what is known of the data."""
        return Ground(self.data, self.request)

    def estimate(self, choice: Choice) -> Outcome:
        """Ask two questions: what the largest item takes alone, and how long a share of middling items takes."""
        if not self.cards.supports(choice.precision):
            lacking = [card.name for card in self.cards.cards if choice.precision not in card.flops_per_s]
            why = f"{', '.join(lacking)} does not compute in {choice.precision}"
            return Outcome(choice, Verdict.UNSUPPORTED, why, margin_of(Origin.TRACED))
        standing, margin = self.questions.standing(choice), self.margin(choice)
        if standing.bytes * margin.factor > self.limit:
            why = f"what stands between two steps takes {format_bytes(standing.bytes)}, whatever the batch"
            return Outcome(choice, Verdict.TOO_LARGE, why, margin)
        item = self.ground.largest()
        alone = self._peak(choice, self.ground.alone(item))
        margin = self.margin(choice)
        if alone * margin.factor > self.limit:
            why = f"{self.data.called(item)} alone takes {format_bytes(alone)}"
            return Outcome(choice, Verdict.TOO_LARGE, why, margin, alone)
        pace, cuts = self._share_pace(choice, self.limit / margin.factor)
        steps = self.ground.whole.steps
        update = update_s(standing, choice, self.cards, self.request.ranks)
        why = f"about {cuts} micro-batches for a rank's share of a step"
        time_s = steps * (pace.total_s + update)
        return Outcome(choice, Verdict.SLOWER, why, margin, alone, pace=pace.times(steps), epoch_s=time_s, cuts=cuts)

    def _peak(self, choice: Choice, row: tuple[int, ...]) -> int:
        return self.questions.peak_bytes(choice, row, accumulate=True)

    def _share_pace(self, choice: Choice, limit: float) -> tuple[Pace, int]:
        """Return the time of a middling share, and into how many micro-batches it is cut."""
        row = self.ground.mean(self.ground.share)
        standing, micro = self.questions.standing(choice), self.questions.micro(choice, row)
        base = standing.bytes + max(micro.first.left_bytes, 0)
        cuts = ceil((self._peak(choice, row) - base) / max(limit - base, 1.0))
        if self.request.micro_batch is not None:
            cuts = ceil(self.ground.share / self.request.micro_batch)
        cuts = min(max(cuts, 1), self.ground.share)
        whole = pace_of(micro, standing, choice, self.cards)
        again = transfer_again_s(standing, choice, self.cards) * (cuts - 1)
        return Pace(whole.compute_s, whole.memory_s, whole.launch_s * cuts, whole.transfer_s + again), cuts

    def search(self, estimate: Outcome) -> Outcome:
        """Look for the best budget of a choice, and correct it until what the allocator holds fits too."""
        choice, alone = estimate.choice, estimate.alone
        margin, fragmented = self.margin(choice), _FRAGMENTED if self.cards.caching else 1.0
        search = Search(self.questions, self.ground, choice)
        found: Found | None = None
        for _ in range(_TURNS):
            found = search.find(int(self.limit / margin.factor / fragmented), found)
            if found is None:
                break
            margin = self.margin(choice)
            micros = tuple(self.questions.micro(choice, group.corner) for group in found.groups)
            reserved = self._reserved(choice, found, micros)
            outcome = Outcome(choice, Verdict.CHOSEN, found.filled.value, margin, alone, found, reserved, micros)
            if outcome.total <= self.limit:
                return self._timed(outcome)
            fragmented = max(reserved.bytes / found.live, fragmented) * 1.002
        why = "no micro-batch that the settings allow fits, with what the allocator holds beside"
        return Outcome(choice, Verdict.TOO_LARGE, why, margin, alone)

    def _reserved(self, choice: Choice, found: Found, micros: tuple[Micro, ...]) -> Reserved:
        if not self.cards.caching:
            return live_only(found.live)
        return self.reserve(self.questions.standing(choice), sample(found, micros, self.request.seed))

    def _timed(self, outcome: Outcome) -> Outcome:
        """Add the time: fitted to what was asked about, for all micro-batches that were cut."""
        found, choice = outcome.found, outcome.choice
        assert found is not None
        standing, rows = self.questions.standing(choice), self.questions.rows(choice)
        times = [pace_of(self.questions.micro(choice, row), standing, choice, self.cards).total_s for row in rows]
        time_M = fit(self.ground.terms, rows, times).predict(found.rows_MS)
        step, epoch = epoch_s(found.micros, time_M, update_s(standing, choice, self.cards, self.request.ranks))
        return replace(outcome, step_s=step, epoch_s=epoch)

    def least_s(self, best: Outcome, choice: Choice) -> float:
        """Return a time below which a choice cannot come, from what another takes; no question is asked."""
        assert best.pace is not None
        rates = self.cards.flops_per_s(best.choice.precision) / self.cards.flops_per_s(choice.precision)
        half = 0.5 if best.choice.precision == "fp32" and choice.precision != "fp32" else 1.0
        once = 0.7 if best.choice.checkpointing and not choice.checkpointing else 1.0  # forward is a third of all
        pace = best.pace
        beside = update_s(self.questions.standing(best.choice), choice, self.cards, self.request.ranks)
        return self.ground.whole.steps * beside + once * (
            pace.compute_s * rates + pace.memory_s * half + pace.launch_s / best.cuts
        )
