"""The gradients of a loss that compares all items of a step, where no pass holds them all: two passes, cut as wanted.

First every micro-batch is embedded without a trace. Then the loss of all embeddings is taken, and its gradients: of the
embeddings, and of the model's own parameters in it, such as a temperature. Then each micro-batch is embedded again,
with a trace, and goes back from its rows of these (GradCache, arXiv:2101.06983). By the chain rule that is the gradient
of one batch of all items, as long as both passes draw the same random numbers: who makes them rewinds these, and
statistics with them, so that those move once a step.

Shapes: B items of a step, over all ranks; … of an embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from pipeline.memory.runtime.recovery import StepSnapshot
from pipeline.protocol import Contrastive
from pipeline.training.random_state import as_drawn
from pipeline.training.step.checkpointing import twin
from pipeline.training.step.optimizers import checked_terms, refused, whole_loss
from pipeline.training.step.step import Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from pipeline.protocol import Batch, Task
    from pipeline.training.step.optimizers import StepSettings, Terms

    Rows = Mapping[str, Tensor]  # a row for each item

SEE = "what embed() returns: Contrastive in pipeline/protocol.py"


@dataclass
class CachedGradients:
    """What came of the loss of all items."""

    rows: dict[str, Tensor] = field(default_factory=dict)  # gradients of embeddings; of some there is none
    own: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)  # of the model itself, in the loss

    def finish(self) -> None:
        """Add the model's own gradients, once all others are there: a pass that failed has not changed them."""
        for parameter, gradient in self.own:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self.own.clear()


def make_step(task: Task, settings: StepSettings, **given: Any) -> Step:
    """Return the step that a task needs: in two passes, where its loss compares all items."""
    return (ContrastiveStep if isinstance(task, Contrastive) else Step)(task, settings, **given)


class ContrastiveStep(Step):
    """A step whose loss compares all its items."""

    contrasts = True
    row_of: Mapping[str, Tensor] = {}  # what embeddings were like, without a row

    def weights(self, batches: Sequence[Batch]) -> None:
        """Return nothing: they are told with the loss of all items."""

    def settle(self, weight: Tensor | float) -> None:
        """Do nothing: the weight was known."""

    def _loss(self, terms: Terms, weights: Mapping[str, Any] | None) -> Tensor:  # noqa: ARG002
        return whole_loss(terms)

    def _terms(self, model: nn.Module, batch: Batch) -> Terms:
        return self._task.contrast(model, self._embedded(model, batch))

    @property
    def _task(self) -> Contrastive:
        return cast("Contrastive", self.task)

    # What is embedded

    def _embedded(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return embedded(self._task, model, batch)

    def embed(self, batch: Batch, items: int | None = None, *, on_host: bool = False) -> dict[str, Tensor]:
        """Embed a micro-batch of so many items without a trace: the first pass."""
        self.watch.phase("inputs")
        batch = self.moved(batch, on_host=on_host)
        self.watch.phase("embed")
        with torch.no_grad(), self.cast():
            rows = self._embedded(twin(self.model) if on_host else self.model, batch)
        if items is not None:
            _refuse_rows(rows, items, "as many as there are items in the batch")
        return {
            name: row.detach().to(self.device, copy=True) for name, row in rows.items()
        }  # a graph's memory is reused

    # Its loss

    def contrast(self, rows: dict[str, Tensor], *, counts: bool = True, on_host: bool = False) -> CachedGradients:
        """Take the loss of all items, and its gradients, scaled as those of any loss; `rows` are let go of.

        The model's own gradients, and the terms, are one rank's to count (`counts`): all ranks find the same.
        """
        self.watch.phase("contrast")
        model = twin(self.model) if on_host else self.model
        leaves = {name: _leaf(row.cpu() if on_host else row) for name, row in rows.items()}
        rows.clear()
        terms = self._contrasted(model, leaves)
        self.watch.terms({name: total for name, (total, _) in terms.items()})
        loss = whole_loss(terms)
        scaled = loss * self.scaler.get_scale() if on_host and self.scaler.is_enabled() else self.scaler.scale(loss)
        asked = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        own = [parameter for parameter in model.parameters() if parameter.requires_grad] if counts else []
        gradients = torch.autograd.grad(scaled, [*asked.values(), *own], allow_unused=True)
        if counts:
            self.add_terms(terms)
        cached = {name: gradient for name, gradient in zip(asked, gradients, strict=False) if gradient is not None}
        if not cached:
            what = "contrast() depends on no embedding: nothing would be learned from it"
            raise refused(what, "do not detach what embed() returned")
        mine = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        pairs = zip(mine, gradients[len(asked) :], strict=counts)
        return CachedGradients(
            {name: gradient.to(self.device) for name, gradient in cached.items()},
            [(parameter, gradient.to(parameter.device)) for parameter, gradient in pairs if gradient is not None],
        )

    def _contrasted(self, model: nn.Module, rows: Rows) -> Terms:
        with self.cast():
            return checked_terms(self._task.contrast(model, rows))

    def evaluate_rows(self, rows: Rows, *, on_host: bool = False) -> dict[str, tuple[float, float]]:
        """Return each term's sum and weight of all items, without gradients, as the model does where it is used."""
        with self.evaluating():
            terms = self._contrasted(twin(self.model).eval() if on_host else self.model, rows)
        return {name: (float(total), float(weight)) for name, (total, weight) in terms.items()}

    # Back

    def go_back(self, batch: Batch, gradients: Rows, *, on_host: bool = False) -> None:
        """Embed a micro-batch with a trace, and go back from the gradients of its rows: the second pass."""
        if not on_host:
            rows = self._traced(batch)
            _refuse_others(rows, gradients)
            _back(rows, gradients)
            return
        host = twin(self.model)
        rows = self._embedded(host, self.moved(batch, on_host=True))
        _refuse_others(rows, gradients)
        _back(rows, {name: gradient.cpu() for name, gradient in gradients.items()})
        self.take_gradients(host)

    def _traced(self, batch: Batch) -> dict[str, Tensor]:
        self.watch.phase("inputs")
        batch = self.moved(batch)
        self.watch.phase("forward")
        with self.saved(), self.cast():
            rows = self._embedded(self.model, batch)
        self.watch.phase("backward")
        return rows

    def _back_from_loss(self, rows: dict[str, Tensor]) -> None:
        """Go back from the loss of rows that have their trace."""
        terms = self._contrasted(self.model, rows)
        rows.clear()
        self.watch.terms({name: total for name, (total, _) in terms.items()})
        loss = whole_loss(terms)
        self.watch.phase("backward")
        torch.autograd.backward(self.scaler.scale(loss))
        self.add_terms(terms)

    # Micro-batches

    def accumulate_alone(self, batch: Batch, weights: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        """Add the gradients of all items of a step in one pass: exact, and as quick as any step."""
        self.watch.phase("inputs")
        batch = self.moved(batch)
        self.watch.phase("forward")
        with self.saved():
            with self.cast():
                rows = self._embedded(self.model, batch)
            del batch
            self._back_from_loss(rows)

    def accumulate_all(self, batches: Sequence[Batch], weights: Mapping[str, Any] | None) -> None:  # noqa: ARG002
        """Add the gradients of all items of a step."""
        if len(batches) == 1:
            self.accumulate_alone(batches[0])
            return
        snapshot = StepSnapshot(self.model, device=self.device, scaler=self.scaler)
        parts = [self.embed(batch) for batch in batches]
        sizes = [len(next(iter(part.values()))) for part in parts]
        snapshot.restore()
        with as_drawn(self.device):
            cached = self.contrast(joined_rows(parts))
        split = {name: torch.split(gradient, sizes) for name, gradient in cached.rows.items()}
        for place, batch in enumerate(batches):
            self.go_back(batch, {name: pieces[place] for name, pieces in split.items()})
        cached.finish()

    def accumulate(self, batch: Batch, weights: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002
        """Add gradients as one micro-batch of a whole step does, the other items made up: for what measures a step.

        The first of a step stands for its two passes and the loss between them, a later one for its second pass.
        """
        whole = self.settings.batch
        if whole is None:
            self.accumulate_alone(batch)
            return
        if self.row_of and self.gradients:
            self.watch.phase("contrast")
            rows = {name: row.new_zeros(whole, *row.shape[1:]) for name, row in self.row_of.items()}
            _back(self._traced(batch), rows)
            return
        self.watch.phase("inputs")
        moved = self.moved(batch)
        self.watch.phase("forward")
        with self.saved(), self.cast():
            told = self._embedded(self.model, moved)
        items = len(next(iter(told.values())))
        self.row_of = {
            name: row.detach().new_empty(0, *row.shape[1:]) for name, row in told.items() if row.requires_grad
        }
        if items >= whole:
            with self.saved():
                self._back_from_loss(told)
            return
        del moved
        parts = [{name: row.detach() for name, row in told.items()}]
        del told
        parts.append({name: row[:1].expand(whole - items, *row.shape[1:]).clone() for name, row in parts[0].items()})
        cached = self.contrast(joined_rows(parts))
        if not (self.row_of or cached.own):
            what = "neither embed() nor contrast() depends on a parameter that is trained: nothing would be learned"
            raise refused(what, "do not detach what they return, or freeze fewer parameters")
        _back(self._traced(batch), cached.rows)
        cached.finish()


def embedded(task: Contrastive, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Embed a batch; what has no row for each item is refused."""
    rows = task.embed(model, batch)
    if not isinstance(rows, Mapping) or not rows:
        got = "nothing" if rows is None or isinstance(rows, Mapping) else type(rows).__name__
        raise refused(f"embed() must return tensors by name, got {got}", SEE)
    for name, row in rows.items():
        if not isinstance(row, torch.Tensor) or row.dim() == 0:
            got = "a single number" if isinstance(row, torch.Tensor) else type(row).__name__
            raise refused(f"embed(): {name!r} must be a tensor with a row for each item, got {got}", SEE)
    _refuse_rows(rows, len(next(iter(rows.values()))), "as its first has")
    return dict(rows)


def joined_rows(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the rows of some micro-batches together, and let go of them."""
    if len(parts) == 1:
        return parts.pop()
    names = list(parts[0]) if parts else []
    whole = {name: torch.cat([part[name] for part in parts]) for name in names}
    parts.clear()
    return whole


def _leaf(rows: Tensor) -> Tensor:
    """Return rows as what gradients are asked for, if they are of numbers that have some."""
    return rows.detach().requires_grad_(rows.is_floating_point() or rows.is_complex())


def _refuse_rows(rows: Rows, items: int, why: str) -> None:
    for name, row in rows.items():
        if len(row) != items:
            raise refused(f"embed(): {name!r} has {len(row)} rows, not {items}, {why}", SEE)


def _refuse_others(rows: Rows, gradients: Rows) -> None:
    for name, gradient in gradients.items():
        if name not in rows:
            what = f"embed() returned {', '.join(rows)} of items of which it returned {name!r} before"
            raise refused(what, SEE)
        _refuse_rows({name: rows[name]}, len(gradient), "as the same items had before")


def _back(rows: dict[str, Tensor], gradients: Rows) -> None:
    """Go back from rows' gradients, the first of those given; those of a loss in full precision fit half ones."""
    ends = [name for name in gradients if rows[name].requires_grad]
    if ends:  # else only what the loss itself has is trained
        cut = [gradients[name][: len(rows[name])].to(rows[name].dtype) for name in ends]
        torch.autograd.backward([rows.pop(name) for name in ends], cut)
