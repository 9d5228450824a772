"""A rank's part of steps whose loss compares all their items, over all ranks: two passes with an exchange between them.

    embed      each rank embeds its micro-batches without gradients; on out-of-memory, all again in smaller ones
    exchange   every rank receives all embeddings
    contrast   each computes the loss of them all and keeps the gradients of its own rows; rank 0 counts the rest
    back       each rank runs its micro-batches again, cut as they were embedded, and backward

After an out-of-memory on the way back, the step starts again on all ranks with smaller cuts: so it is, bit for bit, the
step that it would have been with these cuts from the beginning. A single micro-batch of a single rank needs one pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch

from pipeline.device.out_of_memory import after_freeing_caches, out_of_memory_error
from pipeline.errors import DataError
from pipeline.training.items.batch import refuse_changed
from pipeline.training.random_state import as_drawn
from pipeline.training.step.contrastive import joined_rows, split_rows
from pipeline.training.step.local_step import JointStepper, Local
from pipeline.training.step.micro_batches import HOST
from pipeline.training.step_clock import OTHER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor

    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.contrastive import CachedGradients, ContrastiveStep
    from pipeline.training.step.micro_batches import Piece, RankShare


@dataclass(slots=True)
class _Embedded:
    """A piece that was embedded: its slice of which micro-batch, on which rung."""

    micro: int
    start: int
    stop: int
    rung: int
    ids: tuple[str, ...]
    rows: dict[str, Tensor] | None  # None: already passed on


class ContrastiveStepper(JointStepper):
    """Runs a rank's part of contrastive steps; between the two passes all ranks exchange their embeddings."""

    is_joint = True
    step: ContrastiveStep

    def __init__(self, *arguments: Any, ranks: Ranks, **named: Any) -> None:
        """Take the ranks and the arguments of any `Stepper`."""
        super().__init__(*arguments, **named)
        self.ranks = ranks

    def weights(self, share: RankShare) -> dict[str, float]:  # noqa: ARG002 - it is any stepper's
        """Return nothing: weights come with the loss of all items."""
        return {}

    def learn_terms(self, names: int) -> None:
        """Do nothing: the step is the same however many terms there are."""

    def rehearse(self, share: RankShare) -> None:
        """Try out a share with the step's other items made up; no other rank takes part."""
        super().run(share, None)

    def run(self, share: RankShare, weights: Mapping[str, float] | None) -> Local:  # noqa: ARG002 - see `weights`
        """Run this rank's share; gradients are in the parameters afterwards, unless it must run again."""
        self._enter(share)
        local, share.is_last_pass = self._begun(), False
        whole = self._whole(share)
        if whole is not None:
            share.is_last_pass = True
            local.again = not self._through([whole], self._at_once, share, local)
        else:
            self._two_passes(share, local)
        self._ended(local)
        if self.ranks.rank:
            local.terms = {}  # those of the first rank are of all items
        return local

    # Cuts

    def _whole(self, share: RankShare) -> Piece | None:
        """Return the single piece that holds the whole step; None: there are several."""
        if self.ranks.world > 1 or share.origin.of > 1:
            return None
        pieces = [ready for piece in share for ready in self._ready(piece)]
        return pieces[0] if len(pieces) == 1 and not pieces[0].is_on_host else None

    def _through(
        self, pieces: Iterable[Piece], run: Callable[[Piece, Local], None], share: RankShare, local: Local
    ) -> bool:
        """Run pieces in order; return whether all fit. The first that does not is learned from and ends it."""
        for piece in pieces:
            error = out_of_memory_error(partial(self._remedied, run=run, local=local), piece)
            if error is not None:
                self._learn(piece, error, share, local)
                return False
        return True

    def _remedied(self, piece: Piece, *, run: Callable[[Piece, Local], None], local: Local) -> None:
        self._told(piece)
        with self.step.clock.within(OTHER), self.step.remedied(piece.rung):
            run(piece, local)

    # Passes

    def _at_once(self, piece: Piece, local: Local) -> None:
        """Run all items of a step in one pass."""
        self.step.accumulate_alone(piece.collated(self.step))
        self._count(piece, local)

    def _two_passes(self, share: RankShare, local: Local) -> None:
        embedded = self._embed_all(share, local)
        assert self._snapshot is not None
        self._snapshot.restore()  # the second pass draws the same numbers, and statistics move once
        cached, start = self._exchanged(embedded)
        if cached is None:
            return
        share.is_last_pass = True
        rows = split_rows(cached.rows, [piece.stop - piece.start for piece in embedded], start)

        def back(piece: Piece, local: Local) -> None:
            self.step.go_back(piece.collated(self.step), next(rows), on_host=piece.is_on_host)
            self._count(piece, local)

        local.again = not self._through(self._as_embedded(share, embedded), back, share, local)
        if not local.again:
            cached.finish()

    def _embed_all(self, share: RankShare, local: Local) -> list[_Embedded]:
        """Embed all pieces; after an out-of-memory, all of them again in smaller ones."""
        embedded: list[_Embedded] = []

        def embed(piece: Piece, _: Local) -> None:
            rows = self.step.embed(piece.collated(self.step), len(piece), on_host=piece.is_on_host)
            embedded.append(_Embedded(piece.batch.origin.index, piece.start, piece.stop, piece.rung, piece.ids, rows))

        while not self._through((ready for piece in share for ready in self._ready(piece)), embed, share, local):
            embedded.clear()
            self.go_back()
        return embedded

    def _exchanged(self, embedded: list[_Embedded]) -> tuple[CachedGradients | None, int]:
        """Return the gradients of all embeddings and the index of this rank's first row; None: no rank has any."""
        items = sum(piece.stop - piece.start for piece in embedded)
        parts = [piece.rows for piece in embedded if piece.rows is not None]
        for piece in embedded:
            piece.rows = None
        own = after_freeing_caches(partial(joined_rows, parts), self.step.device)
        rows, start = gathered(self.ranks, own, items, self.step.device)
        with as_drawn(self.step.device):
            return (self._contrasted(rows) if rows else None), start

    def _contrasted(self, rows: dict[str, Tensor]) -> CachedGradients:
        """Return the gradients of all items; only the first rank counts the model's own."""
        counts, may_leave = self.ranks.rank == 0, self.too_large == HOST
        return self.step.where_it_fits(
            lambda on_host: self.step.contrast(dict(rows), counts=counts, on_host=on_host), rows, may_leave=may_leave
        )

    def _as_embedded(self, share: RankShare, embedded: list[_Embedded]) -> Iterator[Piece]:
        """Yield a share's pieces as they were embedded; a batch that was read again must have the same items."""
        left = list(embedded)
        for piece in share:
            while left and left[0].micro == piece.batch.origin.index and piece.start <= left[0].start < piece.stop:
                before = left.pop(0)
                again = replace(piece, start=before.start, stop=before.stop, rung=before.rung)
                refuse_changed(before.ids, again.ids)
                yield again
        for before in left:
            refuse_changed(before.ids, ())

    def _is_finite(self, piece: Piece) -> bool:
        """Say whether an item's embedding is finite: its loss alone, without other items, would say nothing."""
        finite: list[bool] = []

        def embed(piece: Piece) -> None:
            with self.step.evaluating():
                rows = self.step.embed(piece.collated(self.step))
            finite.extend(bool(torch.isfinite(row).all()) for row in rows.values())

        out_of_memory_error(embed, piece)
        return all(finite)


# Between ranks


def gathered(ranks: Ranks, own: dict[str, Tensor], items: int, device: str) -> tuple[dict[str, Tensor], int]:
    """Return the rows of all ranks, in their order, and the index of this rank's first; `own` is emptied.

    Between the ranks' words and their sums nothing may fail on one of them alone: memory that ends is freed and asked
    for again, and sums are made where the rows are.
    """
    if ranks.world == 1:
        return own, 0
    like = {name: [list(row.shape[1:]), str(row.dtype).removeprefix("torch.")] for name, row in own.items()}
    replies = ranks.exchange({"items": items, "like": like})
    likes = {rank: reply["like"] for rank, reply in enumerate(replies) if reply["items"]}
    shapes = {rank: {name: shape for name, (shape, _) in like.items()} for rank, like in likes.items()}
    first_shapes = next(iter(shapes.values()), {})
    for rank, rank_shapes in shapes.items():
        if rank_shapes != first_shapes:
            problem = f"embed() returned {first_shapes} on rank {next(iter(shapes))} and {rank_shapes} on rank {rank}"
            raise DataError(
                problem, where="train.task", remedy="return tensors with the same shapes except for the first dimension"
            )
    counts = [reply["items"] for reply in replies]
    start = sum(counts[: ranks.rank])
    kinds = {name: _widest(like[name][1] for like in likes.values()) for name in first_shapes}

    def placed(name: str) -> Tensor:
        """Return this rank's rows in their place, and zeros for those of others."""
        dtype = torch.uint8 if kinds[name] == torch.bool else kinds[name]
        whole = torch.zeros(sum(counts), *first_shapes[name], dtype=dtype, device=device)
        if name in own:
            whole[start : start + items] = own[name].to(dtype)
        return whole

    wholes: dict[str, Tensor] = {}
    for name in kinds:
        wholes[name] = after_freeing_caches(partial(placed, name), device)
        own.pop(name, None)
    for name, whole in wholes.items():  # every row is of one rank and zero on the others: the sum gathers them
        ranks.add_up([whole])  # each alone: packed together they would take as much memory again
        if kinds[name] == torch.bool:
            wholes[name] = after_freeing_caches(whole.bool, device)
    return wholes, start


def _widest(kinds: Iterable[str]) -> torch.dtype:
    """Return the dtype that holds the numbers of all ranks: a rank that embeds on its CPU has full precision."""
    dtypes: list[torch.dtype] = [getattr(torch, kind) for kind in kinds]
    return reduce(torch.promote_types, dtypes)
