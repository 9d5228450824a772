"""One exact optimizer step of all ranks: however it is cut, and wherever memory ends, it has the gradient of one batch.

    weigh    each rank adds up the weights of its items' loss terms, and all exchange them; a single term needs none
    run      each rank runs its pieces forward and backward, up to the first that does not fit
    report   all ranks exchange what they did; where memory ended on any, all return to the start and run again
    update   gradients are summed over ranks, and the optimizer steps

Ranks communicate only between these phases. A rank whose piece did not fit cuts smaller pieces in the next attempt. A
single item that does not fit runs with the next remedy (`memory.runtime.recovery`): checkpointing, activations in the
host's memory, then the CPU; if none helps, the item is left out or the training ends, as configured.

Contrastive steps (`contrastive`) and sharded ones (`fsdp`) differ in how a rank weighs and runs its share. They also
communicate while it runs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.device.kinds import CPU
from pipeline.device.out_of_memory import after_freeing_caches, out_of_memory_error
from pipeline.errors import DataError, PlanInfeasible
from pipeline.memory.runtime.governor import UNPLANNED, Governor
from pipeline.memory.runtime.recovery import StepSnapshot, until_it_fits
from pipeline.protocol import Weights
from pipeline.training.ranks.gradient_sums import GradientSums
from pipeline.training.step.micro_batches import HOST, RUNGS, SKIP
from pipeline.training.step.optimizers import sums_by_name
from pipeline.training.step_clock import OBSERVE, OTHER, REDUCE, UPDATE, WEIGH, WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.memory.runtime.meters import Maintenance, Meter
    from pipeline.training.ranks import Ranks
    from pipeline.training.step.micro_batches import Piece, RankShare
    from pipeline.training.step.step import Step


@dataclass(slots=True)
class RankReport:
    """A rank's report of a step, exchanged before the update: what it did, and what it asks for."""

    terms: Mapping[str, Sequence[float]] = field(default_factory=dict)  # sums and weights
    items: int = 0
    micros: int = 0
    ooms: int = 0  # in all attempts
    rejected: int = 0
    skipped: int = 0  # items that fit nowhere
    cropped: int = 0
    remedied: dict[str, int] = field(default_factory=dict)  # items that ran on a rung of the ladder, by its name
    again: bool = False  # it could not finish: all ranks run the step again
    absent: list[int] | None = None  # parameters without a gradient; None: all of them
    budget: int = UNPLANNED  # the memory budget that it wants from now on
    ending: int = 0  # the signal that asked it to end; 0: none
    is_due: bool = False  # a checkpoint is due, by the first rank's clock
    host_share: float = 0.0  # used share of the host's memory limit
    is_written: bool = False  # its part of a checkpoint that is saved in the background
    lost: str = ""  # why its parameters are half updated: memory ended within the optimizer
    damaged: list[str] = field(default_factory=list)  # items that it leaves out from now on: their records are damaged
    room: int = 0  # how large pieces of gradients may be, for which it has memory

    def begin_attempt(self) -> None:
        """Forget what an earlier attempt of the step ran."""
        self.terms, self.items, self.micros, self.remedied, self.again = {}, 0, 0, {}, False

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (value for term in self.terms.values() for value in term)))


@dataclass(frozen=True, slots=True)
class StepReport:
    """The reports of all ranks, and the same conclusions from them on every rank."""

    ranks: tuple[RankReport, ...]
    totals: Mapping[str, tuple[float, float]]  # each term's sum and weight over all ranks
    runs_again: bool  # all ranks have to run the step again
    lost: str  # the first rank whose parameters are half updated, and why; empty: none
    not_finite: tuple[int, ...]  # ranks with a sum or weight that is not finite
    damaged: set[str]  # items that any rank leaves out from now on
    remedied: Mapping[str, int]  # items that ran on each rung of the ladder
    budget: int  # the least that a rank wants
    room: int  # the least
    ending: int  # the signal that asked any rank to end; 0: none
    is_due: bool  # a checkpoint is
    is_written: bool  # every rank's part of the last checkpoint
    host_share: float  # the largest

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]]) -> StepReport:
        """Read the ranks' messages; refuse terms of unequal names."""
        ranks = tuple(RankReport(**message) for message in messages)
        _refuse_unequal([list(report.terms) for report in ranks])
        with_items = [report.terms for report in ranks if report.terms]
        lost = _first_lost([report.lost for report in ranks])
        return cls(
            ranks,
            totals={name: _sums([terms[name] for terms in with_items]) for name in next(iter(with_items), ())},
            runs_again=any(report.again for report in ranks) and not lost,
            lost=lost,
            not_finite=tuple(rank for rank, report in enumerate(ranks) if not report.is_finite),
            damaged={item for report in ranks for item in report.damaged},
            remedied=sums_by_name(report.remedied for report in ranks),
            budget=min(report.budget for report in ranks),
            room=min(report.room for report in ranks),
            ending=max(report.ending for report in ranks),
            is_due=ranks[0].is_due,
            is_written=all(report.is_written for report in ranks),
            host_share=max(report.host_share for report in ranks),
        )

    @property
    def means(self) -> dict[str, float | None]:
        return {name: total / weight if weight else None for name, (total, weight) in self.totals.items()}

    def sum_of(self, name: str) -> int:
        """Return the sum of a count over all ranks."""
        return sum(getattr(report, name) for report in self.ranks)

    def without_gradient(self) -> set[int]:
        """Return the numbers of the parameters that have a gradient on no rank."""
        return set.intersection(*(set(report.absent) for report in self.ranks if report.absent is not None))


class ExactStep:
    """Makes steps together with all ranks; `lost` is set on a rank whose memory ended within the optimizer."""

    is_joint = False  # the loss compares the items of all ranks

    def __init__(
        self,
        step: Step,
        ranks: Ranks,
        cost_N: NDArray[Any],
        upkeep: Maintenance,
        *,
        too_large: str = HOST,
        meter: Meter | None = None,
        begin: Callable[[Piece], None] = lambda _: None,
        failed: Callable[[Piece, str], None] = lambda _piece, _error: None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Take a step, the ranks and each item's cost.

        `begin` is called before a piece runs, `failed` when it did not fit. `too_large` is what happens to an item that
        fits with no remedy on the GPU: cpu, skip or error.
        """
        self.step, self.ranks, self.cost_N, self.upkeep, self.too_large = step, ranks, cost_N, upkeep, too_large
        self.meter, self.say, self._begin, self._failed = meter, say, begin, failed
        self.complete: Callable[[RankReport], None] = lambda _: None  # fills in what the loop knows
        self.ladder = self._remedies()
        self.governor = Governor(budget=1, ladder=self.ladder)  # until a phase has its own
        self.lost = ""
        self.empty_cache = False  # whether the governor wants it after the step
        self._snapshot: StepSnapshot | None = None
        self._own = RankReport()
        self._why = ""  # the governor wants another budget
        self._has_weights = False  # terms were divided by their weights; else the only term still has to be
        self._ran: list[int] = []  # costs of the pieces of this attempt that ran on no rung
        self._sums: GradientSums | None = None  # None: gradients are sums already
        if ranks.world > 1 and not step.is_spread:
            self._sums = GradientSums(step.trained, ranks, step.device)
        self.rehearsed_terms = 0  # of the loss; 0: no item was tried out

    def _remedies(self) -> tuple[str, ...]:
        on_host = self.step.device != CPU and self.too_large == HOST
        return RUNGS[: RUNGS.index(SKIP) if on_host else RUNGS.index(HOST)]

    # A step

    def accumulate(self, share: RankShare, number: int) -> StepReport:
        """Run this rank's share forward and backward, again wherever memory ends; return the reports of all ranks."""
        self._start()
        report = until_it_fits(
            partial(self._attempt, share), fits=lambda report: not report.runs_again, rewind=self.go_back
        )
        if self._why:
            self.say(f"step {number}: {self._why}")
        return report

    def take(self, report: StepReport) -> float | None:
        """Step the optimizer with the gradients of all ranks; return their norm, None where it is not finite."""
        if not report.totals:  # no rank has any item
            self.step.release()
            return 0.0
        if not self._has_weights:
            ((_, weight),) = report.totals.values()
            with self.step.clock.within(UPDATE):
                self.step.settle(weight)
        self._add_up(report)
        with self.step.clock.within(UPDATE):
            return self._updated()

    def _start(self) -> None:
        """Save what an attempt goes back to."""
        step = self.step
        self._snapshot = StepSnapshot(step.model, device=step.device, scaler=step.scaler, before=self._snapshot)
        self._own, self._why = RankReport(lost=self.lost), ""

    def _attempt(self, share: RankShare) -> StepReport:
        own = self._own
        own.begin_attempt()
        self._ran.clear()
        weights, can_run = self._agreed_weights(share)
        if self.lost:
            share.drain()
        elif can_run and self._run(share, weights):
            self._finish(share)
            own.again = (
                not self.is_joint and weights is None and len(own.terms) > 1
            )  # than ever before: they were divided by a guess
        else:
            own.again = True
        report = StepReport.of(self._exchange(asdict(own)))
        self.step.learn_terms(len(report.totals))
        self._has_weights = self.is_joint or weights is not None
        return report

    def _agreed_weights(self, share: RankShare) -> tuple[dict[str, float] | None, bool]:
        """Return the weights of all ranks' terms, None where they are not needed, and whether this attempt can run."""
        needed = self.step.needs_weights
        if not (needed or self.is_joint or self.step.is_spread):  # the latter make all passes together, or none
            return None, not self.lost
        own: dict[str, float] | None = {}
        if needed and not self.lost:
            with self.step.clock.within(WEIGH):
                own = self._weigh(share)
        replies = self._exchange({"can_run": own is not None and not self.lost, "weights": own or {}})
        if not all(reply["can_run"] for reply in replies):
            return None, False
        weights = sums_by_name(reply["weights"] for reply in replies)
        if needed:
            self.step.learn_terms(len(weights))
        return weights if self.step.needs_weights else None, True

    def _finish(self, share: RankShare) -> None:
        """Complete the report of a share that ran."""
        own = self._own
        for cost in self._ran:
            self.governor.ran(cost)
        want = self.governor.after_step(self.meter.read() if self.meter else None)
        self.empty_cache, self._why = want.empty_cache, want.why or self._why
        absent = [number for number, parameter in enumerate(self.step.trained) if parameter.grad is None]
        own.absent = None if len(absent) == len(self.step.trained) else absent
        own.terms, own.budget = self._totals(), min(own.budget, want.budget)
        own.rejected, own.cropped, own.skipped = share.rejected, share.cropped, len(share.skipped)
        if self._sums is not None:
            own.room = self._sums.reserve()
        self.complete(own)

    def _totals(self) -> dict[str, tuple[float, float]]:
        return self.step.totals

    def _exchange(self, message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        with self.step.clock.within(WORDS):
            return self.ranks.exchange(message)

    # The share of this rank

    def _weigh(self, share: RankShare) -> dict[str, float] | None:
        """Return the weights of this rank's terms; None where memory ended."""
        assert self._snapshot is not None
        weights: list[Mapping[str, Any]] = []
        share.is_last_pass = False
        if not self._all_fit(self._ready(share), lambda piece: weights.append(self._weights_of(piece)), share):
            return None
        self._snapshot.restore()
        return {name: float(value) for name, value in sums_by_name(weights).items()}

    def _weights_of(self, piece: Piece) -> Mapping[str, Any]:
        if piece.weights is None:  # it is collated, or runs
            self._announce(piece)
        return weights_of(self.step, piece)

    def _run(self, share: RankShare, weights: Mapping[str, float] | None) -> bool:
        """Run this rank's pieces forward and backward; return whether all fit."""
        share.is_last_pass = True
        return self._all_fit(self._ready(share), partial(self._run_piece, weights=weights), share)

    def _all_fit(self, pieces: Iterable[Piece], run: Callable[[Piece], object], share: RankShare) -> bool:
        """Run pieces in order, up to the first that does not fit, which is learned from; return whether all fit."""
        for piece in pieces:
            error = out_of_memory_error(run, piece)
            if error is not None:
                self._learn(piece, error, share)
                return False
        return True

    def _run_piece(self, piece: Piece, weights: Mapping[str, float] | None) -> None:
        self._announce(piece)
        with self.step.clock.within(OTHER):
            accumulate_piece(self.step, piece, weights)
        self._count(piece)

    def _ready(self, share: Iterable[Piece]) -> Iterator[Piece]:
        """Yield pieces as they are known to fit."""
        for piece in share:
            for cut in self.governor.cuts(self._costs(piece)):
                yield replace(piece, start=piece.start + cut.start, stop=piece.start + cut.stop, rung=cut.rung)

    def _learn(self, piece: Piece, error: str, share: RankShare, *, is_own: bool = True) -> None:
        """Have the next attempt cut a piece that did not fit, run it with a remedy, or leave it out."""
        self._own.ooms += 1
        self._failed(piece, error)
        if self.governor.failed(self._costs(piece), piece.rung):
            return
        if self.too_large != SKIP or not is_own:
            sizes = f"{self.cost(piece) / 2**20:,.0f} MiB in addition to the model, as estimated"
            problem = f"{piece.ids[0]} does not fit in memory, even alone and with every remedy ({sizes})"
            remedy = "--set train.too_large=skip   or a larger GPU   or --set train.oversize=crop"
            raise PlanInfeasible(problem, where="training", remedy=remedy)
        share.leave_out(piece.ids)

    def _announce(self, piece: Piece) -> None:
        with self.step.clock.within(OBSERVE):
            self._begin(piece)

    def _count(self, piece: Piece) -> None:
        """Count a piece that ran."""
        self._own.items += len(piece)
        self._own.micros += 1
        if piece.rung:
            rung = self.ladder[piece.rung - 1]
            self._own.remedied[rung] = self._own.remedied.get(rung, 0) + len(piece)
        else:
            self._ran.append(self.cost(piece))
        self.upkeep.after_micro_batch()

    def _costs(self, piece: Piece) -> list[int]:
        return [int(self.cost_N[number]) for number in piece.numbers]

    def cost(self, piece: Piece) -> int:
        """Return the memory cost of a piece."""
        return self.governor.cost(self._costs(piece))

    def go_back(self) -> None:
        """Return to the start of the step: drop its gradients, rewind random numbers and statistics."""
        assert self._snapshot is not None
        self.step.release()
        self.step.drop_ahead()
        self._snapshot.rewind()

    # The update

    def _add_up(self, report: StepReport) -> None:
        """Sum the gradients over ranks, and drop those that no rank has."""
        if self._sums is None:
            return
        with self.step.clock.within(REDUCE):
            self._sums.add_up(report.room)
        for number in report.without_gradient():
            self.step.trained[number].grad = None

    def _updated(self) -> float | None:
        """Step the optimizer with gradients that are sums; return their norm, None where it is not finite."""
        step, clip = self.step, self.step.settings.clip
        if step.is_spread:  # all ranks compute it together
            norm_tensor = step.norm() if clip is None else step.clip()
        else:
            norm_tensor = after_freeing_caches(step.norm, step.device)
        norm = float(norm_tensor)
        if not math.isfinite(norm) and not step.retries_by_scale:
            return None
        error = None if clip is None or step.is_spread else out_of_memory_error(step.clip_to, norm_tensor)
        error = error or out_of_memory_error(step.apply)
        self.lost = "" if error is None else f"out of memory in optimizer.step(): {error}"
        return norm

    def lost_by(self) -> str:
        """Ask all ranks whether any lost its parameters in the last step; return which rank and why, else ""."""
        return _first_lost([reply["lost"] for reply in self._exchange({"lost": self.lost})])

    def emptied(self) -> None:
        """Start a new peak once the cache is emptied: else one moment counts until the epoch ends."""
        if self.empty_cache and self.meter:
            self.meter.reset_peak(keep=True)

    # Trials

    def rehearse(self, share: RankShare) -> None:
        """Try out a share before training begins; for sharded models, with all ranks."""
        self._start()
        until_it_fits(partial(self._rehearsed, share), fits=bool, rewind=self.go_back)
        self.rehearsed_terms = len(self.step.totals)

    def _rehearsed(self, share: RankShare) -> bool:
        self._ran.clear()
        weights = self._weigh(share) if self.step.needs_weights else None
        fits = (weights is not None or not self.step.needs_weights) and self._run(share, weights)
        for cost in self._ran if fits else ():
            self.governor.ran(cost)
        return fits

    def not_finite(self, share: RankShare) -> list[str]:
        """Return the ids of a share's items whose own loss is not finite."""
        singles = (single for piece in share for single in piece.singles())
        return [single.ids[0] for single in singles if not self._is_finite(single)]

    def _is_finite(self, piece: Piece) -> bool:
        """Say whether an item's loss is finite; true where it does not fit in memory."""
        losses: list[float] = []

        def evaluate(piece: Piece) -> None:
            losses.extend(float(total) for total, _ in self.step.evaluate(piece.collated(self.step)).values())

        out_of_memory_error(evaluate, piece)
        return all(map(math.isfinite, losses))


def weights_of(step: Step, piece: Piece) -> Mapping[str, Any]:
    """Return the weights of a piece's terms: from the task's `weights`, else by running the model."""
    if piece.weights is not None:
        return piece.weights
    batch = piece.collated(step)
    if isinstance(step.task, Weights):
        return step.task.weights(batch)
    with step.remedied(piece.rung):
        return {name: weight for name, (_, weight) in step.aside(batch).items()}


def accumulate_piece(
    step: Step, piece: Piece, weights: Mapping[str, float] | None, *, is_whole_step: bool = False
) -> None:
    """Run a piece forward and backward on its rung; `is_whole_step`: it holds all items of the step."""
    batch = piece.collated(step)
    with step.remedied(piece.rung):
        (step.accumulate_alone if is_whole_step else step.accumulate)(batch, weights)


def _sums(terms: Sequence[Sequence[float]]) -> tuple[float, float]:
    return math.fsum(total for total, _ in terms), math.fsum(weight for _, weight in terms)


def _first_lost(reasons: Sequence[str]) -> str:
    return next((f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason), "")


def _refuse_unequal(names: Sequence[Sequence[str]]) -> None:
    """Raise where ranks that had items had terms of different names; `names`: each rank's terms."""
    with_items = [(rank, rank_names) for rank, rank_names in enumerate(names) if rank_names]
    for rank, rank_names in with_items:
        first_rank, first_names = with_items[0]
        if set(rank_names) != set(first_names):
            problem = (
                f"loss() returned {', '.join(sorted(first_names))} on rank {first_rank}"
                f" and {', '.join(sorted(rank_names))} on rank {rank}"
            )
            remedy = "return every term for every batch; use (zero sum, 0) for a term that no item has"
            raise DataError(problem, where="train.task", remedy=remedy)
