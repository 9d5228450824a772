"""Gradients of a loss that compares all items of a step, in two passes over micro-batches that fit.

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

from pipeline.device.accelerator import RngState, after_freeing_caches, free_caches, out_of_memory_error
from pipeline.device.kinds import CPU
from pipeline.errors import DataError, PlanInfeasible
from pipeline.memory.runtime.recovery import StepSnapshot, forget_failed_backward
from pipeline.protocol import Contrastive
from pipeline.training.items.batch import refuse_changed
from pipeline.training.step.exact_step import ExactStep
from pipeline.training.step.optimizers import checked_terms, refused, shown, whole_loss
from pipeline.training.step.step import HOST, ON_HOST, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence, Sized

    from torch import Tensor, nn

    from pipeline.protocol import Batch, Task
    from pipeline.training.ranks import Ranks
    from pipeline.training.step.exact_step import Piece, RankShare, Weighed
    from pipeline.training.step.optimizers import StepSettings, Terms

    Rows = Mapping[str, Tensor]  # a row for each item

Result = TypeVar("Result")
SEE = "embed() is described by: python -m pydoc pipeline.protocol.Contrastive"


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

    def settle(self, totals: Mapping[str, tuple[Any, Any]]) -> None:
        """Do nothing: the weights were known before backward."""

    def _terms(self, model: nn.Module, batch: Batch) -> Terms:
        return self._task.contrast(model, embedded(self._task, model, batch))

    @property
    def _task(self) -> Contrastive:
        return cast("Contrastive", self.task)

    # First pass

    def embed(self, batch: Batch, items: int | None = None) -> dict[str, Tensor]:
        """Embed a micro-batch without gradients: the first pass; `items` checks the number of rows."""
        self.watch.phase("inputs")
        batch = self.moved(batch)
        self.watch.phase("embed")
        with torch.no_grad(), self.cast():
            rows = embedded(self._task, self.model, batch, items)
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
        """Run the loss of all rows, which cannot be cut; if it does not fit, on the CPU where that is allowed."""
        results: list[Result] = []

        def attempt(rung: int) -> None:
            with RngState.preserved(self.device), self.remedied(rung):
                results.append(run())

        error: str | None = ""
        for rung in (0, 0, ON_HOST) if may_leave and self.device != CPU else (0, 0):
            if (error := out_of_memory_error(attempt, rung)) is None:
                return results[0]
            self.drop_ahead()
            forget_failed_backward()
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
        """Embed a micro-batch with gradients and run backward from the gradients of its rows: the second pass.

        `gradients` may have more rows; they are taken in the rows' dtype.
        """
        rows = self._traced(batch)
        self.watch.phase("backward")
        ends = [name for name in gradients if rows[name].requires_grad]
        if ends:  # else only what the loss itself has is trained
            own = [gradients[name][: len(rows[name])].to(rows[name].device, rows[name].dtype) for name in ends]
            torch.autograd.backward([rows.pop(name) for name in ends], own)

    def _traced(self, batch: Batch) -> dict[str, Tensor]:
        self.watch.phase("inputs")
        batch = self.moved(batch)
        self.watch.phase("forward")
        with self.saved(), self.cast():
            return embedded(self._task, self.model, batch)

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

    def accumulate_all(self, batches: Sequence[Batch], weights: Mapping[str, Any] | None) -> None:  # noqa: ARG002
        """Add the gradients of all items of a step."""
        if len(batches) == 1:
            self._back_from_loss(self._traced(batches[0]))
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
            self.accumulate_all([batch], None)
            return
        if self.row_of and self.gradients:
            self.watch.phase("contrast")
            self.go_back(batch, {name: row.new_zeros(whole, *row.shape[1:]) for name, row in self.row_of.items()})
            return
        rows = self.embed(batch)
        items = len(next(iter(rows.values())))
        self.row_of = {name: row.new_empty(0, *row.shape[1:]) for name, row in rows.items() if _leaf(row).requires_grad}
        if items >= whole:
            del rows
            self.accumulate_all([batch], None)
            return
        others = {name: row[:1].expand(whole - items, *row.shape[1:]).clone() for name, row in rows.items()}
        parts = [rows, others]
        del rows, others
        cached = self.contrast(joined_rows(parts))
        self.go_back(batch, cached.rows)
        cached.finish(self.model)


def embedded(task: Contrastive, model: nn.Module, batch: Batch, items: int | None = None) -> dict[str, Tensor]:
    """Embed a batch; raise unless every tensor has a row for each item, or as many as the others."""
    rows = task.embed(model, batch)
    tensors = list(rows.values()) if isinstance(rows, Mapping) else []
    if not tensors or not all(isinstance(row, torch.Tensor) and row.dim() for row in tensors):
        raise refused(f"embed() must return tensors with a row for each item, by name; got {shown(rows)}", SEE)
    counts = {len(row) for row in tensors} | ({items} if items is not None else set())
    if len(counts) > 1:
        of = "" if items is None else f" for {items} items"
        raise refused(f"embed() must return a row for each item, got {shown(rows)}{of}", SEE)
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


# A step of all ranks


class ExactContrastiveStep(ExactStep):
    """Makes contrastive steps together with all ranks, which exchange their embeddings between the two passes.

    A single micro-batch of a single rank needs one pass.
    """

    is_joint = True
    step: ContrastiveStep

    def _run_share(self, share: RankShare, weights: Weighed) -> bool:  # noqa: ARG002 - they come later
        share.is_last_pass = False
        whole = self._whole(share)
        if whole is not None:
            return self.run_pieces(share, lambda batch: self.step.accumulate_all([batch], None), [whole])
        ids: list[tuple[str, ...]] = []  # of each piece
        parts: list[dict[str, Tensor]] = []

        def embed(piece: Piece) -> None:
            parts.append(self._within(piece, partial(self.step.embed, items=len(piece))))
            ids.append(piece.ids)

        fits = self._all_fit(self._ready(share), embed, share)
        if not all(reply["fits"] for reply in self._exchange({"fits": fits})):
            return False
        assert self._snapshot is not None
        self._snapshot.restore()  # the second pass draws the same numbers, and statistics move once
        sizes = list(map(len, ids))
        cached, start = self._contrasted(parts, sum(sizes))
        if cached is None:  # no rank has an item
            return True
        rows = split_rows(cached.rows, sizes, start)

        def back(piece: Piece) -> None:  # cut as it was embedded, since nothing failed in between
            refuse_changed(ids.pop(0), piece.ids)
            self._within(piece, lambda batch: self.step.go_back(batch, next(rows)))
            self._count(piece)

        share.is_last_pass = True
        fits = self._all_fit(self._ready(share), back, share)
        if fits:
            cached.finish(self.step.model)
        return fits

    def _whole(self, share: RankShare) -> Piece | None:
        """Return the single piece that holds the whole step, and runs on the device; None: there are several."""
        if self.ranks.world > 1 or share.origin.of > 1:
            return None
        pieces = list(self._ready(share))
        return pieces[0] if len(pieces) == 1 and pieces[0].rung < ON_HOST else None

    def _contrasted(self, parts: list[dict[str, Tensor]], items: int) -> tuple[CachedGradients | None, int]:
        """Return the gradients of all ranks' embeddings, None where no rank has any, and this rank's first row."""
        own = after_freeing_caches(partial(joined_rows, parts), self.step.device)
        rows, start = gathered(self.ranks, own, items, self.step.device)
        if not rows:
            return None, start
        run = partial(self.step.contrast, counts=self.ranks.rank == 0)
        return self.step.where_it_fits(lambda: run(dict(rows)), rows, may_leave=self.too_large == HOST), start

    def is_finite(self, piece: Piece) -> bool:
        """Say whether an item's embedding is finite: its loss alone, without other items, would say nothing."""
        with self.step.evaluating():
            rows = self.step.embed(piece.collated())
        return all(bool(torch.isfinite(row).all()) for row in rows.values())


def gathered(ranks: Ranks, own: dict[str, Tensor], items: int, device: str) -> tuple[dict[str, Tensor], int]:
    """Return the rows of all ranks, in their order, and the index of this rank's first; `own` is emptied.

    Between the exchange and the all-reduce no rank may fail alone: after an out-of-memory caches are freed and the call
    is repeated.
    """
    if ranks.world == 1:
        return own, 0
    like = {name: [list(row.shape[1:]), str(row.dtype).removeprefix("torch.")] for name, row in own.items()}
    replies = ranks.exchange({"items": items, "like": like})
    counts, likes = [reply["items"] for reply in replies], [reply["like"] for reply in replies if reply["items"]]
    start = sum(counts[: ranks.rank])
    shapes = [{name: shape for name, (shape, _) in like.items()} for like in likes]
    if any(other != shapes[0] for other in shapes):
        problem = f"embed() returned tensors of different shapes on several ranks: {shapes}"
        remedy = "return tensors with the same shapes except for the first dimension"
        raise DataError(problem, where="train.task", remedy=remedy)

    def placed(name: str, dtype: torch.dtype) -> Tensor:
        """Return this rank's rows in their place, and zeros for those of others."""
        whole = torch.zeros(sum(counts), *shapes[0][name], dtype=dtype, device=device)
        if name in own:
            whole[start : start + items] = own[name].to(dtype)
        return whole

    wholes: dict[str, Tensor] = {}
    for name in shapes[0] if shapes else ():
        # A rank that embeds on its CPU has full precision
        kind = reduce(torch.promote_types, (getattr(torch, like[name][1]) for like in likes))
        is_bool = kind == torch.bool
        wholes[name] = after_freeing_caches(partial(placed, name, torch.uint8 if is_bool else kind), device)
        own.pop(name, None)
        # Each row is nonzero on one rank only; packing them would take as much memory again
        ranks.add_up([wholes[name]])
        if is_bool:
            wholes[name] = after_freeing_caches(wholes[name].bool, device)
    return wholes, start
