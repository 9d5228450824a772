"""The gradients of a loss that compares all items of a step, where no pass holds them all: two passes of micro-batches.

First every micro-batch is embedded without gradients. Then the loss of all embeddings is computed, with its gradients
for the embeddings and for the model's own parameters in it, such as a temperature. Then each micro-batch is embedded
again, with gradients, and goes backward from its rows of these (GradCache, arXiv:2101.06983). By the chain rule that is
the gradient of one batch of all items, as long as both passes draw the same random numbers: the caller rewinds these
between the passes, and batch statistics with them, so that those are updated once a step.

Shapes: B items of a step, over all ranks; … of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from pipeline.device.accelerator import RngState
from pipeline.device.kinds import CPU
from pipeline.device.out_of_memory import after_freeing_caches, free_caches, out_of_memory_error
from pipeline.errors import DataError, PlanInfeasible
from pipeline.memory.runtime.recovery import StepSnapshot, forget_failed_backward
from pipeline.protocol import Contrastive
from pipeline.training.items.batch import refuse_changed
from pipeline.training.step.exact_step import ExactStep
from pipeline.training.step.micro_batches import HOST, ON_HOST
from pipeline.training.step.optimizers import checked_terms, refused, whole_loss
from pipeline.training.step.step import Step
from pipeline.training.step_clock import OTHER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence, Sized

    from torch import Tensor, nn

    from pipeline.protocol import Batch, Task
    from pipeline.training.ranks import Ranks
    from pipeline.training.step.micro_batches import Piece, RankShare
    from pipeline.training.step.optimizers import StepSettings, Terms

    Rows = Mapping[str, Tensor]  # a row for each item

Result = TypeVar("Result")
SEE = "embed() is described by Contrastive in pipeline/protocol.py"


@dataclass
class CachedGradients:
    """The gradients of the loss of all items, kept for the second pass."""

    rows: dict[str, Tensor]  # of the embeddings that the loss depends on
    own: list[Tensor | None]  # of the model's trained parameters in the loss, in their order; empty: another rank's

    def finish(self, model: nn.Module) -> None:
        """Add the model's own gradients, after the second pass: one that failed must not have changed them."""
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        for parameter, gradient in zip(trained, self.own, strict=False):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self.own.clear()


def make_step(task: Task, settings: StepSettings, **options: Any) -> Step:
    """Return the step that a task needs: in two passes, where its loss compares all items."""
    return (ContrastiveStep if isinstance(task, Contrastive) else Step)(task, settings, **options)


class ContrastiveStep(Step):
    """A step whose loss compares all its items."""

    contrasts = True
    row_of: Mapping[str, Tensor] = {}  # embeddings with no rows: their shapes and dtypes

    @property
    def needs_weights(self) -> bool:
        return False  # they come with the loss of all items

    def weights(self, batches: Sequence[Batch]) -> None:
        """Return nothing: weights come with the loss of all items."""

    def settle(self, weight: Tensor | float) -> None:
        """Do nothing: the weight was known before backward."""

    def _loss(self, terms: Terms, weights: Mapping[str, Any] | None) -> Tensor:  # noqa: ARG002
        return whole_loss(terms)

    def _terms(self, model: nn.Module, batch: Batch) -> Terms:
        return self._task.contrast(model, self._embedded(model, batch))

    @property
    def _task(self) -> Contrastive:
        return cast("Contrastive", self.task)

    # First pass

    def _embedded(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return embedded(self._task, model, batch)

    def embed(self, batch: Batch, items: int | None = None) -> dict[str, Tensor]:
        """Embed a micro-batch without gradients: the first pass; `items` checks the number of rows."""
        self.watch.phase("inputs")
        batch = self.moved(batch)
        self.watch.phase("embed")
        with torch.no_grad(), self.cast():
            rows = self._embedded(self.model, batch)
        if items is not None:
            _refuse_rows(rows, items, "as many as there are items in the batch")
        # copied: the memory of a captured graph is reused
        return {name: row.detach().to(self.device, copy=True) for name, row in rows.items()}

    # Loss

    def contrast(self, rows: dict[str, Tensor], *, counts: bool = True) -> CachedGradients:
        """Return the gradients of the loss of all items, scaled as any loss is; `rows` is emptied.

        Only one rank counts the model's own gradients and the terms (`counts`): they are the same on all ranks.
        """
        self.watch.phase("contrast")
        leaves = {name: _leaf(row.to(self.place)) for name, row in rows.items()}
        rows.clear()
        terms = self._contrasted(leaves)
        self.watch.terms({name: total for name, (total, _) in terms.items()})
        inputs = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        own = [parameter for parameter in self.model.parameters() if parameter.requires_grad] if counts else []
        gradients = torch.autograd.grad(self.scaled(whole_loss(terms)), [*inputs.values(), *own], allow_unused=True)
        if counts:
            self.add_terms(terms)
        cached = {name: gradient for name, gradient in zip(inputs, gradients, strict=False) if gradient is not None}
        if not cached:
            problem = "contrast() depends on no embedding: nothing would be learned from it"
            raise refused(problem, "do not detach what embed() returned")
        return CachedGradients(
            {name: gradient.to(self.device) for name, gradient in cached.items()},
            [None if gradient is None else gradient.to(self.device) for gradient in gradients[len(inputs) :]],
        )

    def where_it_fits(self, run: Callable[[], Result], rows: Mapping[str, Sized], *, may_leave: bool) -> Result:
        """Return what `run` computes from the loss of all rows, which cannot be cut.

        The first out-of-memory frees caches, the second leaves the GPU for the CPU, if it may.
        """
        results: list[Result] = []

        def attempt(rung: int) -> None:
            with self.remedied(rung):
                results.append(run())

        for rung in (0, 0, ON_HOST) if may_leave and self.device != CPU else (0, 0):
            error = out_of_memory_error(attempt, rung)
            if error is None:
                return results[0]
            forget_failed_backward()
            self.drop_ahead()
            free_caches(self.device)
        items = len(next(iter(rows.values())))
        problem = f"the loss of all {items:,} items together does not fit in memory, though each of them does: {error}"
        remedy = "a smaller effective batch, or a larger GPU"
        raise PlanInfeasible(problem, where="train.effective_batch", remedy=remedy)

    def _contrasted(self, rows: Rows) -> Terms:
        with self.cast():
            return checked_terms(self._task.contrast(self.model, rows))

    def evaluate_rows(self, rows: Rows) -> dict[str, tuple[float, float]]:
        """Return each term's sum and weight over all items' embeddings, in eval mode."""
        with self.evaluating():
            terms = self._contrasted({name: row.to(self.place) for name, row in rows.items()})
        return {name: (float(total), float(weight)) for name, (total, weight) in terms.items()}

    # Second pass

    def go_back(self, batch: Batch, gradients: Rows) -> None:
        """Embed a micro-batch with gradients and run backward from the gradients of its rows: the second pass."""
        rows = self._traced(batch)
        _refuse_others(rows, gradients)
        self._back(rows, gradients)

    def _back(self, rows: dict[str, Tensor], gradients: Rows) -> None:
        """Run backward from the gradients of rows, as many as there are rows, in the rows' dtype."""
        self.watch.phase("backward")
        ends = [name for name in gradients if rows[name].requires_grad]
        if ends:  # else only what the loss itself has is trained
            cut = [gradients[name][: len(rows[name])].to(rows[name].device, rows[name].dtype) for name in ends]
            torch.autograd.backward([rows.pop(name) for name in ends], cut)

    def _traced(self, batch: Batch) -> dict[str, Tensor]:
        self.watch.phase("inputs")
        batch = self.moved(batch)
        self.watch.phase("forward")
        with self.saved(), self.cast():
            return self._embedded(self.model, batch)

    def _back_from_loss(self, rows: dict[str, Tensor]) -> None:
        """Compute the loss of rows that still have their graph, and run backward; `rows` is emptied."""
        with self.saved():
            terms = self._contrasted(rows)
            rows.clear()
            self.watch.terms({name: total for name, (total, _) in terms.items()})
            loss = whole_loss(terms)
        self.watch.phase("backward")
        torch.autograd.backward(self.scaled(loss))
        self.add_terms(terms)

    # Micro-batches

    def accumulate_alone(self, batch: Batch, weights: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        """Add the gradients of all items of a step in one pass, where they fit in one micro-batch."""
        self._back_from_loss(self._traced(batch))

    def accumulate_all(self, batches: Sequence[Batch], weights: Mapping[str, Any] | None) -> None:  # noqa: ARG002
        """Add the gradients of all items of a step."""
        if len(batches) == 1:
            self.accumulate_alone(batches[0])
            return
        snapshot = StepSnapshot(self.model, device=self.device, scaler=self.scaler)
        parts = [self.embed(batch) for batch in batches]
        sizes = [len(next(iter(part.values()))) for part in parts]
        snapshot.restore()
        with RngState.preserved(self.device):
            cached = self.contrast(joined_rows(parts))
        for batch, rows in zip(batches, split_rows(cached.rows, sizes), strict=True):
            self.go_back(batch, rows)
        cached.finish(self.model)

    def accumulate(self, batch: Batch, weights: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        """Run one micro-batch as in a whole step, with the other items made up: for measuring memory and time.

        The first one of a step runs both passes and the loss between them, a later one only its second pass.
        """
        whole = self.settings.batch
        if whole is None:
            self.accumulate_alone(batch)
            return
        if self.row_of and self.gradients:
            self.watch.phase("contrast")
            zeros = {name: row.new_zeros(whole, *row.shape[1:]) for name, row in self.row_of.items()}
            self._back(self._traced(batch), zeros)
            return
        rows = self._traced(batch)
        items = len(next(iter(rows.values())))
        self.row_of = {
            name: row.detach().new_empty(0, *row.shape[1:]) for name, row in rows.items() if row.requires_grad
        }
        if items >= whole:
            self._back_from_loss(rows)
            return
        parts = [{name: row.detach() for name, row in rows.items()}]
        del rows
        parts.append({name: row[:1].expand(whole - items, *row.shape[1:]).clone() for name, row in parts[0].items()})
        cached = self.contrast(joined_rows(parts))
        if not (self.row_of or any(gradient is not None for gradient in cached.own)):
            problem = "neither embed() nor contrast() depends on a parameter that is trained: nothing would be learned"
            raise refused(problem, "do not detach what they return, or freeze fewer parameters")
        self._back(self._traced(batch), cached.rows)
        cached.finish(self.model)


def embedded(task: Contrastive, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Embed a batch; raise unless every tensor has a row for each item."""
    rows = task.embed(model, batch)
    if not isinstance(rows, Mapping) or not rows:
        got = "nothing" if rows is None or isinstance(rows, Mapping) else type(rows).__name__
        raise refused(f"embed() must return tensors by name, got {got}", SEE)
    for name, row in rows.items():
        if not isinstance(row, torch.Tensor) or row.dim() == 0:
            got = "a single number" if isinstance(row, torch.Tensor) else type(row).__name__
            raise refused(f"embed(): {name!r} must be a tensor with a row for each item, got {got}", SEE)
    _refuse_rows(rows, len(next(iter(rows.values()))), "as its first tensor has")
    return dict(rows)


def joined_rows(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenate the rows of micro-batches; `parts` is emptied, so that their memory can be freed."""
    if len(parts) == 1:
        return parts.pop()
    names = list(parts[0]) if parts else []
    whole = {name: torch.cat([part[name] for part in parts]) for name in names}
    parts.clear()
    return whole


def split_rows(rows: Rows, sizes: Iterable[int], start: int = 0) -> Iterator[dict[str, Tensor]]:
    """Yield the rows of one micro-batch after the other, from a first row on."""
    for size in sizes:
        yield {name: row[start : start + size] for name, row in rows.items()}
        start += size


def _leaf(rows: Tensor) -> Tensor:
    """Return rows as a graph leaf; only floating-point and complex ones require gradients."""
    return rows.detach().requires_grad_(rows.is_floating_point() or rows.is_complex())


def _refuse_rows(rows: Rows, items: int, why: str) -> None:
    for name, row in rows.items():
        if len(row) != items:
            raise refused(f"embed(): {name!r} has {len(row)} rows, not {items}, {why}", SEE)


def _refuse_others(rows: Rows, gradients: Rows) -> None:
    for name, gradient in gradients.items():
        if name not in rows:
            problem = f"embed() returned {', '.join(rows)} for items for which it returned {name!r} before"
            raise refused(problem, SEE)
        _refuse_rows({name: rows[name]}, len(gradient), "as it had for the same items before")


# A step of all ranks


class ExactContrastiveStep(ExactStep):
    """Makes contrastive steps together with all ranks, which exchange their embeddings between the two passes.

    A single micro-batch of a single rank needs one pass.
    """

    is_joint = True
    step: ContrastiveStep

    def _totals(self) -> dict[str, tuple[float, float]]:
        return {} if self.ranks.rank else self.step.totals  # those of the first rank are of all items

    def _rehearsed(self, share: RankShare) -> bool:
        return super()._run(share, None)  # the step's other items are made up, and no other rank takes part

    def _run(self, share: RankShare, weights: Mapping[str, float] | None) -> bool:  # noqa: ARG002 - they come later
        share.is_last_pass = False
        whole = self._whole(share)
        if whole is not None:
            share.is_last_pass = True
            return self._all_fit([whole], partial(self._remedied, run=self._at_once), share)
        embedded: list[tuple[str, ...]] = []  # ids of each piece
        parts: list[dict[str, Tensor]] = []

        def embed(piece: Piece) -> None:
            parts.append(self.step.embed(piece.collated(self.step), len(piece)))
            embedded.append(piece.ids)

        fits = self._all_fit(self._ready(share), partial(self._remedied, run=embed), share)
        if not all(reply["fits"] for reply in self._exchange({"fits": fits})):
            return False
        assert self._snapshot is not None
        self._snapshot.restore()  # the second pass draws the same numbers, and statistics move once
        cached, start = self._contrasted(parts, sum(map(len, embedded)))
        if cached is None:  # no rank has an item
            return True
        share.is_last_pass = True
        rows = split_rows(cached.rows, list(map(len, embedded)), start)

        def back(piece: Piece) -> None:  # cut as it was embedded, since nothing failed in between
            refuse_changed(embedded.pop(0), piece.ids)
            self.step.go_back(piece.collated(self.step), next(rows))
            self._count(piece)

        fits = self._all_fit(self._ready(share), partial(self._remedied, run=back), share)
        if fits:
            cached.finish(self.step.model)
        return fits

    def _whole(self, share: RankShare) -> Piece | None:
        """Return the single piece that holds the whole step; None: there are several."""
        if self.ranks.world > 1 or share.origin.of > 1:
            return None
        pieces = list(self._ready(share))
        return pieces[0] if len(pieces) == 1 and not pieces[0].is_on_host else None

    def _remedied(self, piece: Piece, *, run: Callable[[Piece], None]) -> None:
        self._announce(piece)
        with self.step.clock.within(OTHER), self.step.remedied(piece.rung):
            run(piece)

    def _at_once(self, piece: Piece) -> None:
        self.step.accumulate_alone(piece.collated(self.step))
        self._count(piece)

    def _contrasted(self, parts: list[dict[str, Tensor]], items: int) -> tuple[CachedGradients | None, int]:
        """Return the gradients of all ranks' embeddings, None where no rank has any, and this rank's first row."""
        own = after_freeing_caches(partial(joined_rows, parts), self.step.device)
        rows, start = gathered(self.ranks, own, items, self.step.device)
        if not rows:
            return None, start
        counts, may_leave = self.ranks.rank == 0, self.too_large == HOST
        with RngState.preserved(self.step.device):
            cached = self.step.where_it_fits(
                lambda: self.step.contrast(dict(rows), counts=counts), rows, may_leave=may_leave
            )
        return cached, start

    def _is_finite(self, piece: Piece) -> bool:
        """Say whether an item's embedding is finite: its loss alone, without other items, would say nothing."""
        finite: list[bool] = []

        def embed(piece: Piece) -> None:
            with self.step.evaluating():
                rows = self.step.embed(piece.collated(self.step))
            finite.extend(bool(torch.isfinite(row).all()) for row in rows.values())

        out_of_memory_error(embed, piece)
        return all(finite)


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
