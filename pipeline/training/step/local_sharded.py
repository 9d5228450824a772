"""A rank's part of steps of a sharded model (FSDP), for which all ranks must make the same number of passes.

In every turn the ranks say whether they have a micro-batch left; a rank without one runs the cheapest item of the step
along with the others, with its loss times zero.

A rank that runs out of memory within a pass leaves the others waiting, so it ends the step on all of them. The job
resumes from its last checkpoint with smaller micro-batches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.device.out_of_memory import is_out_of_memory
from pipeline.errors import JobFailed
from pipeline.protocol import Weights
from pipeline.training.step.local_step import Stepper
from pipeline.training.step.micro_batches import CHECKPOINTING, OFFLOAD, Piece
from pipeline.training.step.optimizers import sums_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pipeline.protocol import Batch
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.fsdp import ShardedStep
    from pipeline.training.step.local_step import Local
    from pipeline.training.step.micro_batches import RankShare


@dataclass(frozen=True, slots=True)
class Turn:
    """A pass that all ranks make at the same time."""

    piece: Piece
    counts: bool  # else it is another rank's item, run along
    is_last: bool
    items: int  # of the first turn, over all ranks


def joint_turns(
    pieces: Iterable[Piece], ranks: Ranks, fetch: Callable[[int], Batch], cost: Callable[[Piece], int] = len
) -> Iterator[Turn]:
    """Yield this rank's pieces, then the cheapest item of any rank for as long as another rank has pieces.

    `fetch` returns a batch of one item by its number.
    """
    own = iter(pieces)
    piece = next(own, None)
    cheapest: tuple[int, int] | None = None
    items = 0
    while True:
        after = next(own, None)
        message = {"items": len(piece) if piece else 0, "more": after is not None, "cheapest": _cheapest(piece, cost)}
        replies = ranks.exchange(message)
        items = items or sum(reply["items"] for reply in replies)
        if items == 0:
            return
        offers = [(int(reply["cheapest"][0]), int(reply["cheapest"][1])) for reply in replies if reply["cheapest"]]
        cheapest = min([*offers, *([cheapest] if cheapest else [])])
        is_last = not any(reply["more"] for reply in replies)
        yield Turn(piece or Piece(fetch(cheapest[1]), 0, 1), piece is not None, is_last, items)
        if is_last:
            return
        piece = after


def _cheapest(piece: Piece | None, cost: Callable[[Piece], int]) -> tuple[int, int] | None:
    """Return the cost and the number of the cheapest item of a piece."""
    return min((cost(single), single.numbers[0]) for single in piece.singles()) if piece else None


class ShardedStepper(Stepper):
    """Runs a rank's part of steps of a sharded model, pass by pass together with all other ranks."""

    step: ShardedStep
    keeps_whole = False  # gradients stay unsharded until the last pass of a step: faster, where memory allows

    @property
    def ranks(self) -> Ranks:
        return self.step.ranks

    def weights(self, share: RankShare) -> dict[str, float]:
        """Return the weights of this rank's terms; where the model must run for that, all ranks run it."""
        if isinstance(self.step.task, Weights):
            return super().weights(share)
        weights: list[Mapping[str, Any]] = []
        for turn in self._turns(share):
            terms = self._together(turn.piece, lambda piece: self.step.aside(piece.collated(self.step.task)))
            if turn.counts:
                weights.append({name: weight for name, (_, weight) in terms.items()})
        return {name: float(value) for name, value in sums_by_name(weights).items()}

    def run(self, share: RankShare, weights: Mapping[str, float] | None) -> Local:
        """Run this rank's share forward and backward, and others' items while they have more passes to make."""
        step, local = self.step, self._begun()
        step.spread.begin_step()
        for turn in self._turns(share):
            step.agreed = power_of_two(turn.items)
            step.spread.reduces(now=turn.is_last or not self.keeps_whole)
            if turn.counts:
                self._together(turn.piece, lambda piece: self._run(piece, local=local, weights=weights))
            else:
                self._together(turn.piece, lambda piece: step.accompany(piece.collated(self.step.task)))
        step.spread.drop_unused(step.trained)
        return self._ended(local)

    def not_finite(self, share: RankShare) -> list[str]:
        """Return the ids of this rank's items whose own loss is not finite; all ranks must call it."""
        ids: list[str] = []
        singles = (single for piece in share for single in piece.singles())
        for turn in joint_turns(singles, self.ranks, self._fetch(share), self.cost):
            terms = self._together(turn.piece, lambda piece: self.step.evaluate(piece.collated(self.step.task)))
            if turn.counts and not all(math.isfinite(float(total)) for total, _ in terms.values()):
                ids += turn.piece.ids
        return ids

    def _turns(self, share: RankShare) -> Iterator[Turn]:
        pieces = (ready for piece in share for ready in self._ready(piece))
        return joint_turns(pieces, self.ranks, self._fetch(share), self.cost)

    def _fetch(self, share: RankShare) -> Callable[[int], Batch]:
        return lambda number: share._fetch((number,), share.origin)  # noqa: SLF001

    def _known_rung(self, piece: Piece) -> int:
        """Return the rung of a single item; over the budget, which an earlier failure cut, it climbs by how much."""
        over = self.cost(piece) / max(1, self.governor.budget)
        checkpointing, offload = (self.ladder.index(rung) + 1 for rung in (CHECKPOINTING, OFFLOAD))
        needed = 0 if over <= 1 else checkpointing if over <= 2 else offload
        return max(needed, min(super()._known_rung(piece), offload))

    def _together(self, piece: Piece, run: Callable[[Piece], Any]) -> Any:
        """Run a pass; an out-of-memory ends all ranks, which would wait for this one."""
        try:
            return run(piece)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            problem = f"memory ended within a pass of {len(piece)} items of a model that is spread over ranks"
            self.ranks.close(problem)
            raise JobFailed(
                f"{problem}: {str(error).partition(chr(10))[0]}",
                where="training",
                remedy="pipeline resume   (from the last checkpoint, with micro-batches of half the size)",
            ) from error


def power_of_two(number: int) -> float:
    """Round up to a power of two: dividing by it changes no digit of a float."""
    return float(1 << max(0, number - 1).bit_length())
