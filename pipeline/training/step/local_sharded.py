"""Ranks make the passes of a step at the same time, as a model that is spread over them needs it.

In every turn a rank says whether it has a micro-batch left; who has none runs the cheapest item of the step along with
the others, its loss times nothing.

A rank that runs out of memory within a pass leaves the others waiting: it ends the step on all of them. The job is
taken up from its last checkpoint with smaller micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import JobFailed
from pipeline.memory.runtime.out_of_memory import is_out_of_memory
from pipeline.memory.runtime.recovery import StepSnapshot
from pipeline.protocol import Weights
from pipeline.training.step.local_step import Local, Stepper
from pipeline.training.step.micro_batches import CHECKPOINTING, OFFLOAD, Piece
from pipeline.training.step.optimizers import sums_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pipeline.protocol import Batch
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.fsdp import ShardedStep
    from pipeline.training.step.micro_batches import RankShare


@dataclass(frozen=True, slots=True)
class Turn:
    """A pass that all ranks make at the same time."""

    piece: Piece  # of another rank where it does not count
    counts: bool
    is_last: bool
    items: int  # of the first turn, over all ranks


def joint_turns(
    pieces: Iterable[Piece], ranks: Ranks, fetch: Callable[[int], Batch], cost: Callable[[Piece], int] = len
) -> Iterator[Turn]:
    """Yield this rank's pieces, then others' for as long as any rank has pieces; one is looked ahead.

    `fetch` returns a batch of one item by its number.
    """
    rest = iter(pieces)
    piece = next(rest, None)
    cheapest: tuple[int, int] | None = None
    items = 0
    while True:
        after = next(rest, None)
        said = {"items": len(piece) if piece else 0, "more": after is not None, "cheapest": _cheapest(piece, cost)}
        told = ranks.exchange(said)
        items = items or sum(one["items"] for one in told)
        if items == 0:
            return
        offers = [(int(one["cheapest"][0]), int(one["cheapest"][1])) for one in told if one["cheapest"]]
        cheapest = min([*offers, *([cheapest] if cheapest else [])])
        is_last = not any(one["more"] for one in told)
        yield Turn(piece or _alone(fetch(cheapest[1])), piece is not None, is_last, items)
        if is_last:
            return
        piece = after


def _cheapest(piece: Piece | None, cost: Callable[[Piece], int]) -> tuple[int, int] | None:
    """Return the cost and the number of an item of a piece that costs least."""
    return min((cost(one), one.numbers[0]) for one in piece.singles()) if piece else None


def _alone(batch: Batch) -> Piece:
    return Piece(batch, 0, 1)


class ShardedStepper(Stepper):
    """Runs a rank's part of steps, at the same time as all other ranks do theirs."""

    step: ShardedStep
    keeps_whole = False  # gradients stay whole until the last pass of a step: quicker, where there is memory for it

    @property
    def ranks(self) -> Ranks:
        return self.step.ranks

    def weights(self, share: RankShare) -> dict[str, float]:
        """Return the weights of this rank's terms; where the model must run for that, all ranks run it."""
        if isinstance(self.step.task, Weights):
            return super().weights(share)
        found: list[Mapping[str, Any]] = []
        for turn in self._turns(share):
            told = self._together(turn.piece, lambda piece: self.step.aside(piece.collated(self.step.task)))
            if turn.counts:
                found.append({name: weight for name, (_, weight) in told.items()})
        return {name: float(value) for name, value in sums_by_name(found).items()}

    def run(self, share: RankShare, weights: Mapping[str, float] | None) -> Local:
        """Run this rank's share forward and backward, and others' items where they have more passes to make."""
        step, local = self.step, Local()
        self._snapshot = StepSnapshot(step.model, device=step.device, scaler=step.scaler, before=self._snapshot)
        step.spread.begin_step()
        for turn in self._turns(share):
            step.agreed = power_of_two(turn.items)
            step.spread.reduces(now=turn.is_last or not self.keeps_whole)
            if turn.counts:
                self._together(turn.piece, lambda piece: self._run(piece, local=local, weights=weights))
            else:
                self._together(turn.piece, lambda piece: step.accompany(piece.collated(self.step.task)))
        step.spread.drop_unused(step.trained)
        for cost in local.costs:
            self.governor.ran(cost)
        local.terms = step.totals
        return local

    def not_finite(self, share: RankShare) -> list[str]:
        """Return which items of this rank's share alone have a loss that is not finite; all ranks must look."""
        found: list[str] = []
        singles = (one for piece in share for one in piece.singles())
        for turn in joint_turns(singles, self.ranks, self._fetch(share), self.cost):
            terms = self._together(turn.piece, lambda piece: self.step.evaluate(piece.collated(self.step.task)))
            if turn.counts and not all(math.isfinite(float(total)) for total, _ in terms.values()):
                found += turn.piece.ids
        return found

    def _turns(self, share: RankShare) -> Iterator[Turn]:
        pieces = (one for piece in share for one in self._ready(piece))
        return joint_turns(pieces, self.ranks, self._fetch(share), self.cost)

    def _fetch(self, share: RankShare) -> Callable[[int], Batch]:
        return lambda number: share._fetch((number,), share.origin)  # noqa: SLF001

    def _known_rung(self, piece: Piece) -> int:
        """Return the rung of a single item: what is over the budget was cut too small for it by an earlier failure."""
        over = self.cost(piece) / max(1, self.governor.budget)
        checkpointing, offload = (self.ladder.index(rung) + 1 for rung in (CHECKPOINTING, OFFLOAD))
        needed = 0 if over <= 1 else checkpointing if over <= 2 else offload
        return max(needed, min(super()._known_rung(piece), offload))

    def _together(self, piece: Piece, run: Callable[[Piece], Any]) -> Any:
        """Run a pass; where memory ends, end all ranks: they wait for this one."""
        try:
            return run(piece)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            what = f"memory ended within a pass of {len(piece)} items of a model that is spread over ranks"
            self.ranks.close(what)
            raise JobFailed(
                f"{what}: {str(error).partition(chr(10))[0]}",
                where="training",
                remedy="pipeline resume   (from the last checkpoint, with micro-batches of half the size)",
            ) from error


def power_of_two(number: int) -> float:
    """Return the least power of two that is not smaller: to divide by it changes no digit."""
    return float(1 << max(0, number - 1).bit_length())
