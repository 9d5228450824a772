"""A rank's own part of a step: forward and backward of its micro-batches, recovering from out-of-memory by itself.

After an out-of-memory the step starts again with the failed micro-batch halved (`memory.recovery`). A single item that
does not fit climbs a ladder: checkpointing, activations in the host's memory, then the CPU, or the item is left out, as
configured. What was learned is applied from the next step on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.device.kinds import CPU
from pipeline.device.out_of_memory import free_caches, out_of_memory_error
from pipeline.errors import DataError, PlanInfeasible
from pipeline.memory.runtime.recovery import Oom, StepSnapshot, replay_until_it_fits
from pipeline.protocol import Weights
from pipeline.training.random_state import as_drawn
from pipeline.training.step.micro_batches import HOST, RUNGS, SKIP
from pipeline.training.step.optimizers import sums_by_name
from pipeline.training.step_clock import OBSERVE, OTHER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.memory.runtime.governor import Governor
    from pipeline.memory.runtime.meters import Upkeep
    from pipeline.training.step.micro_batches import Piece, RankShare
    from pipeline.training.step.step import Step


@dataclass(slots=True)
class Local:
    """What a rank did in a step."""

    terms: dict[str, tuple[float, float]] = field(default_factory=dict)  # sums and weights
    items: int = 0
    micros: int = 0
    ooms: int = 0
    skipped: list[str] = field(default_factory=list)  # items that fit nowhere
    remedied: dict[str, int] = field(default_factory=dict)  # items that ran on a rung of the ladder, by its name
    again: bool = False  # it could not finish: all ranks start the step again, this one with smaller pieces


class Stepper:
    """Runs a rank's part of steps."""

    is_joint = False  # the loss compares the items of all ranks

    def __init__(
        self,
        step: Step,
        governor: Governor,
        cost_N: NDArray[Any],
        upkeep: Upkeep,
        *,
        too_large: str = HOST,
        begin: Callable[[Piece], None] = lambda _: None,
        failed: Callable[[Piece, Oom], None] = lambda _piece, _oom: None,
    ) -> None:
        """Take a step, the governor of its memory budget, and each item's cost.

        `begin` is called before a piece runs, `failed` when it did not fit. `too_large` says what happens to an item
        that fits on no GPU rung: cpu, skip or error.
        """
        self.step, self.governor, self.cost_N, self.upkeep, self.too_large = step, governor, cost_N, upkeep, too_large
        self._begin, self._failed = begin, failed
        self._snapshot: StepSnapshot | None = None
        self._ran: list[int] = []  # costs of the micro-batches of a step that ran on no rung
        self.rehearsed_terms = 0  # of the loss; 0: no item was tried out
        self._is_several: bool | None  # terms; None: unknown yet
        self.forget_terms()
        self.ladder = tuple(RUNGS[: RUNGS.index(SKIP)]) if self._on_card else RUNGS[:2]

    @property
    def _on_card(self) -> bool:
        return self.step.device != CPU

    @property
    def needs_weights(self) -> bool:
        """Whether the terms' weights must be known before a step: there are several terms, or nobody knows yet."""
        return self._is_several is not False

    def weights(self, share: RankShare) -> dict[str, float]:
        """Return the weights of this rank's terms, leaving the random number generators unchanged."""
        weights: list[Mapping[str, Any]] = []
        with as_drawn(self.step.device):
            for piece in share:
                self._in_parts(piece, lambda part: weights.append(self._weights_of(part)), share)
        return {name: float(value) for name, value in sums_by_name(weights).items()}

    def forget_terms(self) -> None:
        """Learn anew how many terms the loss has: another task is what says it."""
        self._is_several = True if isinstance(self.step.task, Weights) else None

    def learn_terms(self, names: int) -> None:
        """Remember whether the loss has several terms; `names`: how many over all ranks, 0 where no item ran."""
        if names:
            self._is_several = names > 1 or isinstance(self.step.task, Weights)

    def _weights_of(self, piece: Piece) -> Mapping[str, Any]:
        if piece.weights is None:  # it is collated, or runs
            self._told(piece)
        return weights_of(self.step, piece)

    def _in_parts(self, piece: Piece, run: Callable[[Piece], Any], share: RankShare) -> None:
        """Call `run` on a piece, halving what does not fit; `run` must leave nothing behind when it fails."""
        if out_of_memory_error(run, piece) is None:
            return
        self.step.drop_ahead()
        free_caches(self.step.device)
        if len(piece) > 1:
            for half in piece.halves():
                self._in_parts(half, run, share)
        elif self.too_large == HOST and self._on_card and piece.rung == 0:
            self._in_parts(replace(piece, rung=len(self.ladder)), run, share)
        elif self.too_large == SKIP:
            share.leave_out(piece.ids)
        else:
            raise self._too_large(piece)

    def run(self, share: RankShare, weights: Mapping[str, float] | None) -> Local:
        """Run this rank's share forward and backward; gradients are in the parameters afterwards, unless `again`."""
        local, climbed = self._begun(), list[tuple[int, str]]()
        share.is_last_pass = True

        def again() -> None:
            local.items = local.micros = 0
            local.remedied.clear()
            self.go_back()

        def note(piece: Piece, oom: Oom) -> None:
            local.ooms += 1
            self._heard(piece, oom)

        replay_until_it_fits(
            _Started(share, self._ready),
            partial(self._run, local=local, weights=weights),
            again=again,
            halve=lambda piece: piece.halves(),
            cannot=lambda piece, _: self._climb(piece, local, climbed),
            note=note,
            cost=self._height,
        )
        for piece_cost, rung in climbed:
            self.governor.climbed(piece_cost, rung)
        share.leave_out(local.skipped)
        return self._ended(local)

    def _begun(self) -> Local:
        """Save what a share that must run again goes back to, and return an empty report of it."""
        self._snapshot = StepSnapshot(
            self.step.model, device=self.step.device, scaler=self.step.scaler, before=self._snapshot
        )
        self._ran.clear()
        return Local()

    def _ended(self, local: Local) -> Local:
        """Tell the governor what ran, and complete the report."""
        for cost in self._ran:
            self.governor.ran(cost)
        local.terms = self.step.totals
        return local

    def rehearse(self, share: RankShare) -> None:
        """Try out a share before training begins."""
        local = self.run(share, self.weights(share) if self.needs_weights else None)
        self.rehearsed_terms = len(local.terms)

    def _told(self, piece: Piece) -> None:
        """Tell that a piece begins."""
        with self.step.clock.within(OBSERVE):
            self._begin(piece)

    def _heard(self, piece: Piece, oom: Oom) -> None:
        """Report a piece that did not fit to the governor."""
        if not oom.is_single:
            self.governor.out_of_memory(self.cost(piece))
        self._failed(piece, oom)

    def _ready(self, piece: Piece) -> list[Piece]:
        """Cut a micro-batch to the budget; a single item gets the rung that items of its cost needed before."""
        slices = self.governor.admit(self._costs(piece))
        parts = [replace(piece, start=piece.start + part.start, stop=piece.start + part.stop) for part in slices]
        return [replace(part, rung=self._known_rung(part)) if len(part) == 1 else part for part in parts]

    def _known_rung(self, piece: Piece) -> int:
        rung = self.governor.rung(self.cost(piece))
        return 0 if rung is None else self.ladder.index(rung) + 1 if rung in self.ladder else 0

    def _costs(self, piece: Piece) -> list[int]:
        return [int(self.cost_N[number]) for number in piece.numbers]

    def cost(self, piece: Piece) -> int:
        """Return the memory cost of a piece: with padding, its largest item's for each."""
        costs = self._costs(piece)
        return max(costs) * len(costs) if self.governor.padded else sum(costs)

    def _height(self, piece: Piece) -> float:
        """Return the cost above which later pieces are split beforehand; infinite for a piece already on a rung."""
        return math.inf if piece.rung else float(self.cost(piece))

    def _run(self, piece: Piece, *, local: Local, weights: Mapping[str, float] | None) -> None:
        """Run a piece forward and backward."""
        self._told(piece)
        with self.step.clock.within(OTHER):
            accumulate_piece(self.step, piece, weights)
        self._count(piece, local)

    def _count(self, piece: Piece, local: Local) -> None:
        """Add a piece that ran to the counts."""
        local.items += len(piece)
        local.micros += 1
        if piece.rung:
            rung = self.ladder[piece.rung - 1]
            local.remedied[rung] = local.remedied.get(rung, 0) + len(piece)
        else:
            self._ran.append(self.cost(piece))
        self.upkeep.after_micro_batch()

    def _climb(self, piece: Piece, local: Local, climbed: list[tuple[int, str]]) -> Callable[[Piece], Sequence[Piece]]:
        """Return what replaces a single item that did not fit: itself on the next rung, or nothing."""
        rung = self._next_rung(piece)
        if rung is None:
            local.skipped += piece.ids
            return lambda _: []
        climbed.append((self.cost(piece), rung))
        number = piece.rung + 1  # a closure over the piece would keep its batch in one of the loader's few slots
        return lambda failed: [replace(failed, rung=number)]

    def _next_rung(self, piece: Piece) -> str | None:
        """Return the rung for a single item that did not fit; None: it is left out."""
        rung = self.ladder[piece.rung] if piece.rung < len(self.ladder) else SKIP
        if rung != SKIP and (rung != HOST or self.too_large == HOST):
            return rung
        if self.too_large != SKIP:
            raise self._too_large(piece)
        return None

    def _too_large(self, piece: Piece) -> PlanInfeasible:
        sizes = f"{self.cost(piece) / 2**20:,.0f} MiB in addition to the model, as estimated"
        problem = f"{piece.ids[0]} does not fit in memory, even alone and with every remedy ({sizes})"
        remedy = "--set train.too_large=skip   or a larger GPU   or --set train.oversize=crop"
        return PlanInfeasible(problem, where="training", remedy=remedy)

    def go_back(self) -> None:
        """Return to the start of the step: drop its gradients, rewind random numbers and statistics."""
        assert self._snapshot is not None
        self._ran.clear()
        self.step.release()
        self.step.drop_ahead()
        self._snapshot.rewind()

    def not_finite(self, share: RankShare) -> list[str]:
        """Return the ids of a share's items whose own loss is not finite."""
        ids: list[str] = []
        for piece in share:
            for single in piece.singles():
                ids += [] if self._is_finite(single) else single.ids
        return ids

    def _is_finite(self, piece: Piece) -> bool:
        """Say whether an item's loss is finite; true where it does not fit in memory."""
        losses: list[float] = []

        def evaluate(piece: Piece) -> None:
            losses.extend(float(total) for total, _ in self.step.evaluate(piece.collated(self.step)).values())

        out_of_memory_error(evaluate, piece)
        return all(map(math.isfinite, losses))


class JointStepper(Stepper):
    """Runs a rank's part of steps that all ranks begin again together, in smaller pieces, where memory ended on one."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Take the arguments of any `Stepper`."""
        super().__init__(*arguments, **named)
        self._of: tuple[int, int] | None = None  # the step that `_too_much` is about: its epoch and number
        self._too_much = math.inf  # the least cost of a piece that did not fit

    def _enter(self, share: RankShare) -> None:
        """Forget what did not fit in another step."""
        of = share.origin.epoch, share.origin.step
        if of != self._of:
            self._of, self._too_much = of, math.inf

    def _ready(self, piece: Piece) -> list[Piece]:
        parts = [part for ready in super()._ready(piece) for part in self._small(ready)]
        return [replace(part, rung=self._known_rung(part)) if len(part) == 1 else part for part in parts]

    def _small(self, piece: Piece) -> list[Piece]:
        """Halve a piece until every part costs less than the cheapest that did not fit."""
        if len(piece) < 2 or self.cost(piece) < self._too_much:
            return [piece]
        return [part for half in piece.halves() for part in self._small(half)]

    def _learn(self, piece: Piece, error: str, share: RankShare, local: Local) -> None:
        """Make sure that the next attempt cuts, lifts or leaves out the piece that did not fit."""
        oom = Oom((), local.ooms, error, is_single=len(piece) == 1)
        local.ooms += 1
        self._heard(piece, oom)
        if not oom.is_single:
            self._too_much = min(self._too_much, self.cost(piece))
        elif rung := self._next_rung(piece):
            self.governor.climbed(self.cost(piece), rung)
        else:
            share.leave_out(piece.ids)


def weights_of(step: Step, piece: Piece) -> Mapping[str, Any]:
    """Return the weights of a piece's terms: from the task's `weights`, else by running the model."""
    if piece.weights is not None:
        return piece.weights
    batch = piece.collated(step)
    if isinstance(step.task, Weights):
        return step.task.weights(batch)
    return {name: weight for name, (_, weight) in step.aside(batch, on_host=bool(piece.rung)).items()}


def accumulate_piece(
    step: Step, piece: Piece, weights: Mapping[str, float] | None, *, is_whole_step: bool = False
) -> None:
    """Run a piece forward and backward on its rung; `is_whole_step`: it holds all items of the step."""
    batch = piece.collated(step)
    if piece.is_on_host:
        step.accumulate_on_host(batch, weights)
        return
    with step.remedied(piece.rung):
        (step.accumulate_alone if is_whole_step else step.accumulate)(batch, weights)


class _Started:
    """The ready pieces of a share; each iteration starts over."""

    def __init__(self, share: RankShare, ready: Callable[[Piece], list[Piece]]) -> None:
        self._share, self._ready = share, ready

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._share:
            yield from self._ready(piece)


def refuse_unequal(names: Sequence[Sequence[str]]) -> None:
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
