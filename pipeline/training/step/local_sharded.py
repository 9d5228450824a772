"""A rank's part of steps of a sharded model (FSDP), for which all ranks must make the same number of passes.

In every turn the ranks say whether they have a micro-batch left; a rank without one runs the cheapest item of the step
along with the others, with its loss times zero.

Where memory ends within a pass on one rank, all leave it (`collectives` says why none waits for ever), drop what the
step has gathered so far, and begin it again: the rank with smaller micro-batches, or with the next remedy for an item
that did not fit alone. So it is, bit for bit, the step that it would have been with these cuts from the beginning.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.device.out_of_memory import free_caches
from pipeline.protocol import Weights
from pipeline.training.step.local_step import JointStepper, Local
from pipeline.training.step.micro_batches import CHECKPOINTING, HOST, OFFLOAD, Piece
from pipeline.training.step.optimizers import sums_by_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pipeline.training.items.batch import TaskBatch
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.collectives import PassOutcome
    from pipeline.training.step.fsdp import ShardedStep
    from pipeline.training.step.micro_batches import RankShare
    from pipeline.training.step.optimizers import Terms

Result = TypeVar("Result")


@dataclass(slots=True)
class Turn:
    """A pass that all ranks make at the same time."""

    piece: Piece
    counts: bool  # else it is another rank's item, run along
    is_last: bool
    items: int  # of the first turn, over all ranks
    instead: list[Piece] | None = None  # once the pass was given up by all: what this rank runs in place of its piece


def joint_turns(
    pieces: Iterable[Piece], ranks: Ranks, fetch: Callable[[int], TaskBatch], cost: Callable[[Piece], int] = len
) -> Iterator[Turn]:
    """Yield this rank's pieces, then the cheapest item of any rank for as long as another rank has pieces.

    `fetch` returns a batch of one item by its number. After a pass that was given up, set `instead` on every rank, or
    take no further turn on any.
    """
    own, waiting = iter(pieces), deque[Piece]()
    cheapest: tuple[int, int] | None = None
    items = 0

    def following() -> Piece | None:
        return waiting.popleft() if waiting else next(own, None)

    piece = following()
    while True:
        after = following()
        message = {"items": len(piece) if piece else 0, "more": after is not None, "cheapest": _cheapest(piece, cost)}
        replies = ranks.exchange(message)
        if not any(reply["items"] for reply in replies):
            return
        items = items or sum(reply["items"] for reply in replies)
        offers = [(int(reply["cheapest"][0]), int(reply["cheapest"][1])) for reply in replies if reply["cheapest"]]
        cheapest = min([*offers, *([cheapest] if cheapest else [])])
        is_last = not any(reply["more"] for reply in replies)
        turn = Turn(piece or Piece(fetch(cheapest[1]), 0, 1), piece is not None, is_last, items)
        yield turn
        if turn.instead is not None:
            waiting.extend([*turn.instead, *([after] if after is not None else [])])
            after = following()
        elif is_last:
            return
        piece = after


def joint_pass(step: ShardedStep, run: Callable[[], Result]) -> PassOutcome[Result]:
    """Make a pass together with all ranks; where it was given up, the model is as it was before."""
    outcome = step.spread.passes.run(run)
    if outcome.is_given_up:
        step.spread.reset()
        free_caches(step.device)
    return outcome


def _cheapest(piece: Piece | None, cost: Callable[[Piece], int]) -> tuple[int, int] | None:
    """Return the cost and the number of the cheapest item of a piece."""
    return min((cost(single), single.numbers[0]) for single in piece.singles()) if piece else None


class ShardedStepper(JointStepper):
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
        self._enter(share)
        while (weights := self._weights(share)) is None:
            pass  # in smaller pieces
        return {name: float(value) for name, value in sums_by_name(weights).items()}

    def _weights(self, share: RankShare) -> list[Mapping[str, Any]] | None:
        """Return the weights of this rank's pieces; None where memory ended on any rank."""
        weights: list[Mapping[str, Any]] = []
        for turn in self._turns(share):
            outcome = self._made(turn, partial(self._aside, is_own=turn.counts), share, Local())
            if outcome.result is None:
                return None
            if turn.counts:
                weights.append({name: weight for name, (_, weight) in outcome.result.items()})
        return weights

    def _aside(self, piece: Piece, *, is_own: bool) -> Terms:
        """Return the terms of a piece, without side effects."""
        if is_own:
            self._told(piece)
        return self.step.aside(piece.collated(self.step))

    def run(self, share: RankShare, weights: Mapping[str, float] | None) -> Local:
        """Run this rank's share forward and backward, and others' items while they have more passes to make."""
        self._enter(share)
        step, local = self.step, self._begun()
        step.spread.begin_step()
        share.is_last_pass = True
        own = partial(self._run, local=local, weights=weights)
        for turn in self._turns(share):
            step.agreed = power_of_two(turn.items)
            step.spread.reduces(now=turn.is_last or not self.keeps_whole)
            local.again = self._made(turn, own if turn.counts else self._accompany, share, local).is_given_up
            if local.again:
                break
        else:
            step.spread.drop_unused(step.trained)
        return self._ended(local)

    def rehearse(self, share: RankShare) -> None:
        """Try out a share before training begins, with all ranks, in pieces that fit on each."""
        while (local := self.run(share, self.weights(share) if self.needs_weights else None)).again:
            self.go_back()
        self.rehearsed_terms = len(local.terms)

    def not_finite(self, share: RankShare) -> list[str]:
        """Return the ids of this rank's items whose own loss is not finite; all ranks must call it."""
        ids: list[str] = []
        singles = (single for piece in share for single in piece.singles())
        for turn in joint_turns(singles, self.ranks, self._fetch(share), self.cost):
            outcome = joint_pass(self.step, partial(self._totals, turn.piece))
            if outcome.result is None:  # what does not fit counts as finite
                turn.instead = [turn.piece] if turn.counts and not outcome.error else []
            elif turn.counts and not all(map(math.isfinite, outcome.result)):
                ids += turn.piece.ids
        return ids

    def _totals(self, piece: Piece) -> list[float]:
        return [float(total) for total, _ in self.step.evaluate(piece.collated(self.step)).values()]

    def _turns(self, share: RankShare) -> Iterator[Turn]:
        pieces = (ready for piece in share for ready in self._ready(piece))
        return joint_turns(pieces, self.ranks, self._fetch(share), self.cost)

    def _fetch(self, share: RankShare) -> Callable[[int], TaskBatch]:
        return lambda number: share._fetch((number,), share.origin)  # noqa: SLF001

    def _known_rung(self, piece: Piece) -> int:
        """Return the rung of a single item; over the budget, which an earlier failure cut, it climbs by how much."""
        over = self.cost(piece) / max(1, self.governor.budget)
        checkpointing, offload = (self.ladder.index(rung) + 1 for rung in (CHECKPOINTING, OFFLOAD))
        needed = 0 if over <= 1 else checkpointing if over <= 2 else offload
        return max(needed, min(super()._known_rung(piece), offload))

    def _next_rung(self, piece: Piece) -> str | None:
        rung = super()._next_rung(piece)
        if rung == HOST:  # no rank has all parameters
            raise self._too_large(piece)
        return rung

    def _made(self, turn: Turn, run: Callable[[Piece], Result], share: RankShare, local: Local) -> PassOutcome[Result]:
        """Make a turn's pass with all ranks; where memory ended on this one, learn from it."""
        piece = turn.piece if turn.counts else replace(turn.piece, rung=self._known_rung(turn.piece))
        outcome = joint_pass(self.step, partial(run, piece))
        if outcome.error:
            if not turn.counts and self._next_rung(piece) is None:  # nobody can leave out another's item
                raise self._too_large(piece)
            self._learn(piece, outcome.error, share, local)
        return outcome

    def _accompany(self, piece: Piece) -> None:
        """Run another rank's item along."""
        with self.step.remedied(piece.rung):
            self.step.accompany(piece.collated(self.step))


def power_of_two(number: int) -> float:
    """Round up to a power of two: dividing by it changes no digit of a float."""
    return float(1 << max(0, number - 1).bit_length())
