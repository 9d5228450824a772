"""A rank's part of steps whose loss compares all their items, over all ranks: two passes, and a word between them.

    embed      each rank its micro-batches, without a trace; alone, and again in smaller ones where memory ends
    exchange   every rank has all embeddings
    contrast   each takes the loss of them all, and keeps the gradients of its own rows; the first rank counts the rest
    back       each rank its micro-batches, as they were embedded

Where memory ends on the way back, the step begins again on all ranks, cut as was learned: so it is, bit for bit, the
step that it would have been with these cuts from the beginning. A single micro-batch of a single rank needs one pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import DataError, PlanInfeasible
from pipeline.memory.runtime.out_of_memory import free_caches, out_of_memory_error
from pipeline.memory.runtime.recovery import Oom, StepSnapshot, forget_failed_backward
from pipeline.training.random_state import as_drawn
from pipeline.training.step.contrastive import joined_rows
from pipeline.training.step.local_step import Local, Stepper
from pipeline.training.step.micro_batches import HOST, SKIP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.contrastive import CachedGradients, ContrastiveStep
    from pipeline.training.step.micro_batches import Piece, RankShare


@dataclass(slots=True)
class _Embedded:
    """A piece that was embedded: which items of which micro-batch, and on which rung."""

    micro: int
    start: int
    stop: int
    rung: int
    ids: tuple[str, ...]
    rows: dict[str, Tensor] | None  # None: they were handed on


class ContrastiveStepper(Stepper):
    """Runs a rank's part of steps; between their passes all ranks say what they have embedded."""

    is_joint = True
    step: ContrastiveStep

    def __init__(self, *words: Any, ranks: Ranks, **named: Any) -> None:
        """Take the ranks, beside what any stepper takes."""
        super().__init__(*words, **named)
        self.ranks = ranks
        self._of: tuple[int, int] | None = None  # the step that was learned of: its epoch and number
        self._too_much = math.inf  # what a piece of it costs that did not fit

    def weights(self, share: RankShare) -> dict[str, float]:  # noqa: ARG002 - it is any stepper's
        """Return nothing: weights are told with the loss of all items."""
        return {}

    def learn_terms(self, names: int) -> None:
        """Learn nothing: a step is the same however many terms there are."""

    def rehearse(self, share: RankShare) -> None:
        """Run a share with the step's other items made up; no other rank takes part."""
        super().run(share, None)

    def run(self, share: RankShare, weights: Mapping[str, float] | None) -> Local:  # noqa: ARG002 - see `weights`
        """Run this rank's share; gradients are in the parameters afterwards, unless it is to be run again."""
        self._begin_step(share)
        self._snapshot = StepSnapshot(
            self.step.model, device=self.step.device, scaler=self.step.scaler, before=self._snapshot
        )
        local = Local()
        whole = self._whole(share)
        if whole is not None:
            local.again = not self._through([whole], self._at_once, share, local)
        else:
            self._two_passes(share, local)
        for cost in local.costs:
            self.governor.ran(cost)
        local.terms = self.step.totals if self.ranks.rank == 0 else {}
        return local

    def _begin_step(self, share: RankShare) -> None:
        """Forget what was learned of another step."""
        of = share.origin.epoch, share.origin.step
        if of != self._of:
            self._of, self._too_much = of, math.inf

    # Cuts

    def _ready(self, piece: Piece) -> list[Piece]:
        parts = [part for one in super()._ready(piece) for part in self._small(one)]
        return [replace(one, rung=self._known_rung(one)) if len(one) == 1 else one for one in parts]

    def _small(self, piece: Piece) -> list[Piece]:
        """Return a piece cut until no part costs as much as one that did not fit."""
        if len(piece) < 2 or self.cost(piece) < self._too_much:
            return [piece]
        return [part for half in piece.halves() for part in self._small(half)]

    def _whole(self, share: RankShare) -> Piece | None:
        """Return the one piece that is the whole step, if it is."""
        if self.ranks.world > 1 or share.origin.of > 1:
            return None
        pieces = [one for piece in share for one in self._ready(piece)]
        return pieces[0] if len(pieces) == 1 and not pieces[0].is_on_host else None

    def _through(
        self, pieces: Iterable[Piece], run: Callable[[Piece, Local], None], share: RankShare, local: Local
    ) -> bool:
        """Run pieces in order; say whether memory sufficed, else what did not fit is learned."""
        for piece in pieces:
            error = out_of_memory_error(partial(self._remedied, run=run, local=local), piece)
            if error is not None:
                self._learn(piece, error, share, local)
                return False
        return True

    def _remedied(self, piece: Piece, *, run: Callable[[Piece, Local], None], local: Local) -> None:
        self._begin(piece)
        with self.step.remedied(piece.rung):
            run(piece, local)

    def _learn(self, piece: Piece, error: str, share: RankShare, local: Local) -> None:
        """See to it that the same does not happen again."""
        oom = Oom((), local.ooms, error, is_single=len(piece) == 1)
        local.ooms += 1
        self._heard(piece, oom)
        if not oom.is_single:
            self._too_much = min(self._too_much, self.cost(piece))
        elif piece.rung < len(self.ladder) and self._allowed(self.ladder[piece.rung]):
            self.governor.climbed(self.cost(piece), self.ladder[piece.rung])
        elif self.too_large == SKIP:
            share.leave_out(piece.ids)
        else:
            raise self._too_large(piece)

    # Passes

    def _at_once(self, piece: Piece, local: Local) -> None:
        """Run all items of a step in one pass."""
        self.step.accumulate_alone(piece.collated(self.step.task))
        self._count(piece, local)

    def _two_passes(self, share: RankShare, local: Local) -> None:
        done = self._embed_all(share, local)
        assert self._snapshot is not None
        self._snapshot.restore()  # the second pass draws the same numbers, and statistics move once
        cached, start = self._exchanged(done)
        if cached is None:
            return
        places = self._places(done, start)
        back = partial(self._back, rows=cached.rows, places=places)
        local.again = not self._through(self._as_embedded(share, done), back, share, local)
        if not local.again:
            cached.finish()

    def _embed_all(self, share: RankShare, local: Local) -> list[_Embedded]:
        """Embed all pieces; where memory ends, all of them again, in smaller ones."""
        done: list[_Embedded] = []

        def embed(piece: Piece, _: Local) -> None:
            rows = self.step.embed(piece.collated(self.step.task), len(piece), on_host=piece.is_on_host)
            done.append(_Embedded(piece.batch.origin.index, piece.start, piece.stop, piece.rung, piece.ids, rows))

        while not self._through((one for piece in share for one in self._ready(piece)), embed, share, local):
            done.clear()
            self.go_back()
        return done

    def _exchanged(self, done: list[_Embedded]) -> tuple[CachedGradients | None, int]:
        """Return the gradients of all embeddings and where this rank's begin; None: no rank has any."""
        items = sum(one.stop - one.start for one in done)
        parts = [one.rows for one in done if one.rows is not None]
        for one in done:
            one.rows = None
        rows, start = gathered(self.ranks, joined_rows(parts), items, self.step.device)
        with as_drawn(self.step.device):
            return (self._contrasted(rows) if rows else None), start

    def _contrasted(self, rows: dict[str, Tensor]) -> CachedGradients:
        """Take the loss of all items: no smaller parts would help it, but free caches may, and the host's memory."""
        found: list[CachedGradients] = []
        items = len(next(iter(rows.values())))

        def take(on_host: bool) -> None:  # noqa: FBT001 - one of two ways
            counts = self.ranks.rank == 0
            found.append(self.step.contrast(dict(rows), counts=counts, on_host=on_host))

        for on_host in (False, False, True) if self._on_card and self.too_large == HOST else (False, False):
            said = out_of_memory_error(take, on_host)
            if said is None:
                return found[0]
            forget_failed_backward()
            free_caches(self.step.device)
        what = f"the loss of all {items:,} items of a step does not fit in memory, though each of them does: {said}"
        raise PlanInfeasible(what, where="train.effective_batch", remedy="a smaller effective batch, or a larger card")

    def _places(self, done: list[_Embedded], start: int) -> dict[tuple[int, int], int]:
        """Return the first row of each piece."""
        places: dict[tuple[int, int], int] = {}
        for one in done:
            places[one.micro, one.start] = start
            start += one.stop - one.start
        return places

    def _as_embedded(self, share: RankShare, done: list[_Embedded]) -> Iterator[Piece]:
        """Yield a share's pieces as they were embedded; a batch that was read again must have the same items."""
        left = list(done)
        for piece in share:
            while left and left[0].micro == piece.batch.origin.index and piece.start <= left[0].start < piece.stop:
                one = left.pop(0)
                again = replace(piece, start=one.start, stop=one.stop, rung=one.rung)
                _refuse_changed(one, again.ids)
                yield again
        for one in left:
            _refuse_changed(one, ())

    def _back(
        self, piece: Piece, local: Local, *, rows: Mapping[str, Tensor], places: Mapping[tuple[int, int], int]
    ) -> None:
        """Run a piece with a trace, and back."""
        first = places[piece.batch.origin.index, piece.start]
        own = {name: one[first : first + len(piece)] for name, one in rows.items()}
        self.step.go_back(piece.collated(self.step.task), own, on_host=piece.is_on_host)
        self._count(piece, local)

    def _is_finite(self, piece: Piece) -> bool:
        """Say whether what an item is embedded to is finite: its loss, alone, would say nothing."""
        found: list[bool] = []

        def look(one: Piece) -> None:
            with self.step.evaluating():
                rows = self.step.embed(one.collated(self.step.task))
            found.extend(bool(torch.isfinite(row).all()) for row in rows.values())

        out_of_memory_error(look, piece)
        return all(found)


def _refuse_changed(one: _Embedded, ids: tuple[str, ...]) -> None:
    """Raise where what was embedded and what goes back are other items."""
    if one.ids != ids:
        name = next((name for name in one.ids if name not in ids), one.ids[0])
        what = f"{name} was read at the start of the step, and could not be read again at its end"
        remedy = "see whether its files have changed, or the disk fails; then   pipeline resume"
        raise DataError(what, where=name, remedy=remedy)


# What ranks tell each other


def gathered(ranks: Ranks, own: dict[str, Tensor], items: int, device: str) -> tuple[dict[str, Tensor], int]:
    """Return the rows of all ranks, in their order, and where this rank's begin."""
    if ranks.world == 1:
        return own, 0
    like = {name: [list(one.shape[1:]), str(one.dtype).removeprefix("torch.")] for name, one in own.items()}
    told = ranks.exchange({"items": items, "like": like})
    likes = {rank: one["like"] for rank, one in enumerate(told) if one["items"]}
    shapes = {rank: {name: shape for name, (shape, _) in one.items()} for rank, one in likes.items()}
    for rank, one in shapes.items():
        if one != (first := next(iter(shapes.values()))):
            what = f"embed() returned {first} on rank {next(iter(shapes))} and {one} on rank {rank}"
            raise DataError(what, where="train.task", remedy="return tensors of the same shapes but for their rows")
    start, total = sum(one["items"] for one in told[: ranks.rank]), sum(one["items"] for one in told)
    wholes: dict[str, Tensor] = {}
    kinds = {name: _widest(one[name][1] for one in likes.values()) for name in next(iter(shapes.values()), {})}
    for name, kind in kinds.items():
        dtype = torch.uint8 if kind == torch.bool else kind
        wholes[name] = torch.zeros(total, *next(iter(shapes.values()))[name], dtype=dtype, device=device)
        if name in own:
            wholes[name][start : start + items] = own.pop(name).to(dtype)
    ranks.add_up(list(wholes.values()))  # each row is one rank's: with nothing added it stays what it is
    return {name: one.bool() if kinds[name] == torch.bool else one for name, one in wholes.items()}, start


def _widest(kinds: Iterable[str]) -> torch.dtype:
    """Return what holds the numbers of all ranks: what one embeds on its processor is in full precision."""
    found: list[torch.dtype] = [getattr(torch, kind) for kind in kinds]
    return reduce(torch.promote_types, found)
