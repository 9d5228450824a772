"""One exact optimizer step of all ranks: however it is cut, it has the gradient of one batch, even after an OOM.

    weigh    all ranks exchange the summed weights of their items' loss terms; a single term needs none
    run      each rank runs its pieces forward and backward, up to the first that does not fit
    report   all ranks exchange reports; if any ran out of memory, all return to the start and run again
    update   gradients are summed over ranks, and the optimizer steps

Ranks communicate only between these phases. A rank whose piece did not fit cuts smaller pieces in the next attempt. A
single item that does not fit runs with the next remedy (`memory.runtime.recovery`): checkpointing, activations in the
host's memory, then the CPU; if none helps, the item is left out or the training ends, as configured.

Contrastive steps (`contrastive`) and sharded ones (`fsdp`) differ in how a rank weighs and runs its share. They also
communicate while it runs. Users' own loops (`own_loops`) make their steps here, too.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from pipeline.device.accelerator import after_freeing_caches, out_of_memory_error, unless_out_of_memory
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError, PlanInfeasible
from pipeline.memory.runtime.recovery import UNPLANNED, Governor, StepSnapshot
from pipeline.training.loss_terms import added, sums_by_name
from pipeline.training.ranks import PIECE_BYTES
from pipeline.training.step.step import HOST, RUNGS, SKIP
from pipeline.training.step_clock import EXCHANGE, OBSERVE, OTHER, READ, REDUCE, UPDATE, WEIGH

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.device.accelerator import RngState
    from pipeline.device.batch_transfer import CopyAhead
    from pipeline.memory.runtime.meters import Maintenance, Meter
    from pipeline.memory.runtime.recovery import Cut
    from pipeline.protocol import Batch
    from pipeline.training.items.batch import TaskBatch
    from pipeline.training.ranks import Ranks
    from pipeline.training.sampling import BatchOrigin
    from pipeline.training.step.step import Step

    Weighed = Mapping[str, float] | None  # by term; None: they are not needed


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a micro-batch, and how many memory remedies it needs beyond the settings."""

    batch: TaskBatch
    start: int
    stop: int
    rung: int = 0

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def ids(self) -> tuple[str, ...]:
        return self.batch.ids[self.start : self.stop]

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.batch.numbers[self.start : self.stop]

    def collated(self) -> Batch:
        """Return the task's batch of these items; of some of a micro-batch, they are read again."""
        return self.batch.part(self.start, self.stop)

    def part(self, cut: Cut) -> Piece:
        """Return some of its items."""
        return replace(self, start=self.start + cut.start, stop=self.start + cut.stop, rung=cut.rung)

    def singles(self) -> list[Piece]:
        """Split it into pieces of one item."""
        return [replace(self, start=place, stop=place + 1) for place in range(self.start, self.stop)]


@dataclass(eq=False)
class RankShare:
    """A rank's pieces of one step; each iteration starts over, and the first one reads from the loader.

    A step of two passes keeps the batches of the first pass for the second, which drops each after its turn. After an
    out-of-memory a step runs again, in pieces of its micro-batches, whose items are read again.
    """

    batches: Iterator[TaskBatch]
    fetch: Callable[[Sequence[int], BatchOrigin], TaskBatch]
    hold: int = 0  # batches that are kept for a second pass, at most
    left_out: Collection[str] = frozenset()  # items
    ahead: CopyAhead | None = None  # gets the batch after each micro-batch: one that is held,
    at_hand: Callable[[], TaskBatch | None] = lambda: None  # or the next one of the loader, if it is read already

    skipped: list[str] = field(default_factory=list, init=False)  # items that `leave_out` added
    cuts: list[tuple[tuple[str, ...], tuple[int, ...]]] = field(default_factory=list, init=False)  # ids and numbers
    is_last_pass: bool = field(default=False, init=False)  # batches are dropped once they were iterated
    rejected: int = field(default=0, init=False)
    cropped: int = field(default=0, init=False)
    _origins: list[BatchOrigin] = field(default_factory=list, init=False)
    _held: dict[int, TaskBatch] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Read the step's first batch, which says which step it is."""
        self.is_over = not self._read()  # there was no further step

    def leave_out(self, ids: Sequence[str]) -> None:
        """Leave out items that fit nowhere from now on."""
        self.left_out = {*self.left_out, *ids}
        self.skipped += ids

    @property
    def origin(self) -> BatchOrigin:
        return self._origins[0]

    def __iter__(self) -> Iterator[Piece]:
        """Yield a piece for each micro-batch that has items."""
        place = 0
        while (batch := self._batch(place)) is not None:
            if self.is_last_pass or len(self._held) > self.hold:
                self._held.pop(place, None)
            place += 1
            if self.ahead is not None:
                self.ahead.following = partial(self._following, place)
            yield from self._pieces(batch)
            del batch  # its slot is free for the next one

    def drain(self) -> None:
        """Read the rest of the step from the loader and drop it."""
        if self.ahead is not None:
            self.ahead.drop()
        self._held.clear()
        while self._read():
            self._held.clear()

    def _read(self) -> bool:
        """Read the next batch of the step from the loader; return False if there is none."""
        batch = None if self._is_whole else next(self.batches, None)
        if batch is None:
            return False
        self._held[len(self._origins)] = batch
        self.rejected += len(batch.rejected)
        self.cropped += batch.cropped
        self._origins.append(batch.origin)
        self.cuts.append((batch.ids, batch.numbers))
        return True

    @property
    def _is_whole(self) -> bool:
        """Whether all micro-batches of the step were read."""
        return bool(self._origins) and self._origins[-1].index + 1 == self._origins[-1].of

    def _batch(self, place: int) -> TaskBatch | None:
        """Return the batch at a place of the step: held, read, or read again; None after the last one."""
        if place == len(self._origins) and not self._read():
            return None
        held = self._held.get(place)  # compared with None: an empty batch is falsy
        return self.fetch(self.cuts[place][1], self._origins[place]) if held is None else held

    def _pieces(self, batch: TaskBatch) -> Iterator[Piece]:
        """Yield a batch as one piece, or as the runs between items that are left out."""
        start = 0
        for place, name in enumerate((*batch.ids, "")):
            if place == len(batch.ids) or name in self.left_out:
                if place > start:
                    yield Piece(batch, start, place)
                start = place + 1

    def _following(self, place: int) -> Batch | None:
        """Return the collated micro-batch at a place, after the last the first again; None if it is not ready."""
        if place < len(self._origins):
            batch = self._held.get(place)
        elif self._is_whole and not self.is_last_pass:
            batch = self._held.get(0)
        else:
            batch = self.at_hand()
        return batch.value if batch is not None and batch.is_made else None


@dataclass(slots=True)
class RankReport:
    """A rank's report of a step, exchanged before the update: what it did, and what it asks for."""

    terms: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # sums and weights
    items: int = 0
    micro_batches: int = 0
    ooms: int = 0  # in all attempts
    rejected: int = 0
    skipped_items: int = 0  # that fit nowhere
    cropped: int = 0
    remedied: dict[str, int] = field(default_factory=dict)  # items that ran on a rung of the ladder, by its name
    again: bool = False  # this rank could not finish: all ranks run the step again
    absent: list[int] | None = None  # parameters without a gradient; None: all of them, as where no item ran
    budget: int = UNPLANNED  # the memory budget that this rank wants from now on
    why: str = ""  # why it wants another budget
    ending: int = 0  # the signal that asked it to end; 0: none
    is_due: bool = False  # a checkpoint is due, by the first rank's clock
    host_share: float = 0.0  # share of the host's memory limit in use
    own_s: float = 0.0  # time since its last report, without waiting for other ranks
    is_written: bool = False  # its part of a checkpoint that is saved in the background
    damaged: list[str] = field(default_factory=list)  # items that it leaves out from now on: their records are damaged

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (value for term in self.terms.values() for value in term)))


class StepReport:
    """The reports of all ranks; conclusions from them are the same on every rank."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self.ranks = [RankReport(**message) for message in messages]
        self.totals: dict[str, tuple[float, float]] = added(*(report.terms for report in self.ranks))
        self.not_finite = [rank for rank, report in enumerate(self.ranks) if not report.is_finite]
        self.damaged = {item for report in self.ranks for item in report.damaged}

    def of_all(self, together: Callable[[Iterable[Any]], Any], name: str) -> Any:
        """Return the sum, the least, … of a field of all reports."""
        return together(getattr(report, name) for report in self.ranks)

    @property
    def least(self) -> RankReport:
        """The report of the rank that wants the least budget."""
        return min(self.ranks, key=lambda report: report.budget)


class ExactStep:
    """Makes steps together with all ranks."""

    is_joint = False  # the loss compares the items of all ranks

    def __init__(
        self,
        step: Step,
        ranks: Ranks,
        cost_N: NDArray[Any] | Sequence[int],
        upkeep: Maintenance,
        *,
        too_large: str = HOST,
        meter: Meter | None = None,
        begin: Callable[[Piece], None] = lambda _: None,
        failed: Callable[[Piece, str], None] = lambda _piece, _error: None,
    ) -> None:
        """Take a step, the ranks and each item's cost.

        `begin` is called before a piece runs, `failed` when it did not fit. `too_large` is what happens to an item that
        fits with no remedy on the GPU: cpu, skip or error.
        """
        self.step, self.ranks, self.cost_N, self.upkeep, self.too_large = step, ranks, cost_N, upkeep, too_large
        self.meter, self._begin, self._failed = meter, begin, failed
        self.complete: Callable[[RankReport], None] = lambda _: None  # fills in what the loop knows
        self.ladder = self._remedies()
        self.governor = Governor(planned=1, ladder=self.ladder)  # until a phase has its own
        self.lost = ""  # the rank whose memory ended within the optimizer, and why; empty: none in the last step
        self.empty_cache = False  # whether the governor wants it after the step
        self._snapshot: StepSnapshot | None = None
        self._own = RankReport()
        self._weights: Weighed = None  # that terms were divided by; None: the only term is divided later
        self._adds_up = ranks.world > 1 and not step.is_spread  # gradients of a sharded model are sums already
        size_bytes = min(PIECE_BYTES, sum(parameter.nbytes for parameter in step.trained)) if self._adds_up else 0
        self._buffer = torch.empty(size_bytes, dtype=torch.uint8, device=step.device)  # gradients are packed into it

    def _remedies(self) -> tuple[str, ...]:
        on_host = self.step.device != CPU and self.too_large == HOST
        return RUNGS[: RUNGS.index(SKIP) if on_host else RUNGS.index(HOST)]

    # A step

    def accumulate(self, share: RankShare) -> StepReport:
        """Run this rank's share until no rank runs out of memory; return the reports of all ranks."""
        while (report := self._attempt(share)) is None:
            self.go_back()
        return report

    def take(self, report: StepReport) -> float | None:
        """Step the optimizer with the gradients of all ranks; return their norm, None where it is not finite."""
        if not report.totals:  # no rank has any item
            self.step.release()
            return 0.0
        self.combine(report)
        step = self.step
        with step.clock.within(UPDATE):
            norm = step.norm() if step.is_spread else after_freeing_caches(step.norm, step.device)
            # The loss scale may be why they are not finite: the scaler then skips the step by itself
            if not math.isfinite(norm) and not (step.scaler.is_enabled() and step.scaler.get_scale() > 1):
                return None
            self.update(lambda: step.apply(norm))
        return float(norm)

    def start(self) -> RngState:
        """Begin a step: snapshot the state that attempts return to; return its random states."""
        step = self.step
        self._snapshot = StepSnapshot(step.model, device=step.device, scaler=step.scaler, before=self._snapshot)
        self._own, self.lost = RankReport(), ""
        return self._snapshot.rng

    def _attempt(self, share: RankShare) -> StepReport | None:
        """Run this rank's share, and exchange reports; return None where the step has to run again."""
        own = self._own
        own.terms, own.items, own.micro_batches, own.remedied = {}, 0, 0, {}
        self._weights, can_run = self._agreed_weights(share)
        own.again = not (can_run and self._run_share(share, self._weights))
        if not own.again:
            self._finish(share)
        report = StepReport(self._exchange(asdict(own)))
        several = len(report.totals) > 1
        is_guessed = several and self._weights is None and not self.is_joint  # more terms than known: weigh them first
        self.step.learn_terms(len(report.totals))
        return None if is_guessed or report.of_all(any, "again") else report

    def _agreed_weights(self, share: RankShare) -> tuple[Weighed, bool]:
        """Return the weights of all ranks' terms, None where they are not needed, and whether this attempt can run."""
        if not self.step.needs_weights:
            return None, True
        with self.step.clock.within(WEIGH):
            own = self._weigh(share)
        replies = [reply["weights"] for reply in self._exchange({"weights": own})]
        if None in replies:
            return None, False
        weights = sums_by_name(replies)
        self.step.learn_terms(len(weights))
        return weights if self.step.needs_weights else None, True

    def _finish(self, share: RankShare) -> None:
        """Complete the report of a share that ran."""
        own = self._own
        want = self.governor.after_step(self.meter.read() if self.meter else None)
        self.empty_cache, own.why, own.budget = want.empty_cache, want.why or own.why, min(own.budget, want.budget)
        absent = [number for number, parameter in enumerate(self.step.trained) if parameter.grad is None]
        own.absent = None if len(absent) == len(self.step.trained) else absent
        own.terms = self.step.totals
        own.rejected, own.cropped, own.skipped_items = share.rejected, share.cropped, len(share.skipped)
        if self._adds_up:
            self._make_gradients()
        self.complete(own)

    def _make_gradients(self) -> None:
        """Allocate missing gradients now: after the reports are exchanged, no rank may fail for lack of memory."""
        for parameter in self.step.trained:
            if parameter.grad is None:
                parameter.grad = after_freeing_caches(partial(torch.zeros_like, parameter), self.step.device)
            elif parameter.grad.is_sparse:
                problem = f"a gradient of shape {list(parameter.shape)} is sparse: ranks can sum only dense ones"
                raise ConfigError(problem, where="training", remedy="nn.Embedding(…, sparse=False)")

    def _exchange(self, message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        with self.step.clock.within(EXCHANGE):
            return self.ranks.exchange(message)

    # The share of this rank

    def _weigh(self, share: RankShare) -> dict[str, float] | None:
        """Return the weights of this rank's terms; None where memory ended."""
        assert self._snapshot is not None
        weights: list[Mapping[str, Any]] = []

        def weigh(piece: Piece) -> None:
            known = piece.batch.weights if len(piece) == len(piece.batch) else None
            weights.append(self._within(piece, self.step.weights_of, WEIGH) if known is None else known)

        share.is_last_pass = False
        if not self._all_fit(self._ready(share), weigh, share):
            return None
        self._snapshot.restore()
        return {name: float(value) for name, value in sums_by_name(weights).items()}

    def _run_share(self, share: RankShare, weights: Weighed) -> bool:
        """Run this rank's pieces forward and backward; return whether all fit."""
        return self.run_pieces(share, partial(self.step.accumulate, weights=weights))

    def run_pieces(self, share: RankShare, run: Callable[[Any], object], pieces: Iterable[Piece] | None = None) -> bool:
        """Run the batch of each piece for the last time in this attempt; return whether all fit."""

        def counted(piece: Piece) -> None:
            self._within(piece, run)
            self._count(piece)

        share.is_last_pass = True
        return self._all_fit(self._ready(share) if pieces is None else pieces, counted, share)

    def _all_fit(self, pieces: Iterable[Piece], run: Callable[[Piece], object], share: RankShare) -> bool:
        """Run pieces in order; at the first that does not fit, learn from it and stop. Return whether all fit."""
        for piece in pieces:
            error = out_of_memory_error(run, piece)
            if error is not None:
                self._learn(piece, error, share)
                return False
        return True

    def _within(self, piece: Piece, run: Callable[[Any], Any], activity: str = OTHER) -> Any:
        """Run something on a piece's batch, with its remedies."""
        step = self.step
        with step.clock.within(OBSERVE):
            self._begin(piece)
        with step.clock.within(activity):
            with step.clock.within(READ):
                batch = piece.collated()
            with step.remedied(piece.rung):
                return run(batch)

    def _ready(self, share: Iterable[Piece]) -> Iterator[Piece]:
        """Yield pieces, cut to what is known to fit."""
        for piece in share:
            yield from map(piece.part, self.governor.cuts(self._costs(piece)))

    def _learn(self, piece: Piece, error: str, share: RankShare, *, is_own: bool = True) -> None:
        """After a piece did not fit: let the next attempt cut it, run it with a remedy, or leave it out."""
        self._own.ooms += 1
        self._failed(piece, error)
        if self.governor.failed(self._costs(piece), piece.rung):
            return
        if self.too_large != SKIP or not is_own:
            raise self._refusal(piece, error)
        share.leave_out(piece.ids)

    def _refusal(self, piece: Piece, error: str) -> PlanInfeasible:  # noqa: ARG002 - own loops have no estimate
        sizes = f"{self.cost(piece) / 2**20:,.0f} MiB in addition to the model, as estimated"
        problem = f"{piece.ids[0]} does not fit in memory, even alone and with every remedy ({sizes})"
        remedy = "--set train.too_large=skip   or a larger GPU   or --set train.oversize=crop"
        return PlanInfeasible(problem, where="training", remedy=remedy)

    def _count(self, piece: Piece) -> None:
        """Count a piece that ran."""
        self._own.items += len(piece)
        self._own.micro_batches += 1
        if piece.rung:
            rung = self.ladder[piece.rung - 1]
            self._own.remedied[rung] = self._own.remedied.get(rung, 0) + len(piece)
        else:
            self.governor.ran(self.cost(piece))
        self.upkeep.after_micro_batch()

    def _costs(self, piece: Piece) -> list[int]:
        return [int(self.cost_N[number]) for number in piece.numbers]

    def cost(self, piece: Piece) -> int:
        return self.governor.cost(self._costs(piece))

    def go_back(self) -> None:
        """Return to the start of the step: drop its gradients, rewind random numbers and statistics."""
        assert self._snapshot is not None
        self.step.release()
        self.step.drop_ahead()
        self._snapshot.rewind()

    # The update

    def combine(self, report: StepReport) -> None:
        """Divide gradients by the weight of all items and sum them over ranks; unused parameters have none."""
        if self._weights is None:
            with self.step.clock.within(UPDATE):
                self.step.settle(report.totals)
        if not self._adds_up:
            return
        with self.step.clock.within(REDUCE):
            self.ranks.add_up(self.step.gradients, self._buffer)
        absent = (set(rank.absent) for rank in report.ranks if rank.absent is not None)
        for number in set.intersection(*absent):  # the parameters that have a gradient on no rank
            self.step.trained[number].grad = None

    def update(self, apply: Callable[[], object]) -> None:
        """Run the optimizer; if any rank runs out of memory in it, `lost` is set on all."""
        error = out_of_memory_error(apply)
        own = "" if error is None else f"rank {self.ranks.rank}: out of memory in optimizer.step(): {error}"
        self.lost = next((reply["lost"] for reply in self._exchange({"lost": own}) if reply["lost"]), "")

    def between_steps(self) -> None:
        """Do the upkeep; after emptying the cache, reset the peak, which would stay crowded until the epoch ends."""
        self.upkeep.after_step(empty_cache=self.empty_cache)
        if self.empty_cache and self.meter:
            self.meter.reset_peak(keep=True)

    # Trials

    def rehearse(self, share: RankShare) -> None:
        """Try out a share before training begins; for sharded models, with all ranks."""
        self.start()
        while not self.run_pieces(share, self.step.accumulate):
            self.go_back()

    def not_finite(self, share: RankShare) -> list[str]:
        """Return the ids of a share's items whose own loss is not finite; one that does not fit is not among them."""
        singles = (single for piece in share for single in piece.singles())
        return [single.ids[0] for single in singles if unless_out_of_memory(partial(self.is_finite, single)) is False]

    def is_finite(self, piece: Piece) -> bool:
        """Say whether an item's own loss is finite."""
        return all(math.isfinite(total) for total, _ in self.step.evaluate(piece.collated()).values())
