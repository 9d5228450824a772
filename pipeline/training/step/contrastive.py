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
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from pipeline.errors import ConfigError
from pipeline.memory.runtime.recovery import StepSnapshot
from pipeline.training.checkpoints.training_state import rng_state, set_rng_state
from pipeline.training.step.checkpointing import twin
from pipeline.training.step.optimizers import checked_terms, whole_loss

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from pipeline.protocol import Batch, Contrastive
    from pipeline.training.step.step import Step

    Rows = Mapping[str, Tensor]  # a row for each item

WHERE = "train.task"
SEE = "what embed() returns: Contrastive in pipeline/protocol.py"


@dataclass
class CachedGradients:
    """What came of the loss of all items."""

    rows: dict[str, Tensor] = field(default_factory=dict)  # gradients of embeddings; of some there is none
    own: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)  # of the model itself, in the loss


# What is embedded


def embedded(task: Contrastive, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Embed a batch; what has no row for each item is refused."""
    told = task.embed(model, batch)
    if not isinstance(told, Mapping) or not told:
        got = "nothing" if told is None or isinstance(told, Mapping) else type(told).__name__
        raise ConfigError(f"embed() must return tensors by name, got {got}", where=WHERE, remedy=SEE)
    for name, one in told.items():
        if not isinstance(one, torch.Tensor) or one.dim() == 0:
            got = "a single number" if isinstance(one, torch.Tensor) else type(one).__name__
            what = f"embed(): {name!r} must be a tensor with a row for each item, got {got}"
            raise ConfigError(what, where=WHERE, remedy=SEE)
    _refuse_rows(told, len(next(iter(told.values()))), "as its first has")
    return dict(told)


def _refuse_rows(rows: Rows, items: int, why: str) -> None:
    for name, one in rows.items():
        if len(one) != items:
            what = f"embed(): {name!r} has {len(one)} rows, not {items}, {why}"
            raise ConfigError(what, where=WHERE, remedy=SEE)


def first_pass(step: Step, batch: Batch, items: int | None = None, *, on_host: bool = False) -> dict[str, Tensor]:
    """Embed a micro-batch of so many items without a trace."""
    task = cast("Contrastive", step.task)
    step.watch.phase("inputs")
    batch = step.moved(batch, on_host=on_host)
    step.watch.phase("embed")
    with torch.no_grad():
        if on_host:
            told = embedded(task, twin(step.model), batch)
        else:
            with step.cast():
                told = embedded(task, step.model, batch)
    if items is not None:
        _refuse_rows(told, items, "as many as there are items in the batch")
    return {name: one.detach().to(step.device, copy=True) for name, one in told.items()}  # a graph's memory is reused


def joined_rows(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the rows of some micro-batches together, and let go of them."""
    if len(parts) == 1:
        return parts.pop()
    names = list(parts[0]) if parts else []
    whole = {name: torch.cat([part[name] for part in parts]) for name in names}
    parts.clear()
    return whole


# Its loss


@contextmanager
def as_drawn(device: str) -> Iterator[None]:
    """Leave random numbers where they stand: what a loss draws, once or in vain, must not shift the second pass."""
    numbers = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(numbers, device)


def contrast(step: Step, rows: dict[str, Tensor], *, counts: bool = True, on_host: bool = False) -> CachedGradients:
    """Take the loss of all items, and its gradients, scaled as those of any loss; `rows` are let go of.

    The model's own gradients, and the terms, are one rank's to count (`counts`): all ranks find the same.
    """
    step.watch.phase("contrast")
    model = twin(step.model) if on_host else step.model
    leaves = {name: _leaf(one.cpu() if on_host else one) for name, one in rows.items()}
    rows.clear()
    terms = _terms(step, model, leaves, on_host=on_host)
    step.watch.terms({name: total for name, (total, _) in terms.items()})
    loss = whole_loss(terms)
    scaled = loss * step.scaler.get_scale() if on_host and step.scaler.is_enabled() else step.scaler.scale(loss)
    asked = {name: one for name, one in leaves.items() if one.requires_grad}
    own = [one for one in model.parameters() if one.requires_grad] if counts else []
    found = torch.autograd.grad(scaled, [*asked.values(), *own], allow_unused=True)
    if counts:
        step.add_terms(terms)
    cached = {name: one for name, one in zip(asked, found, strict=False) if one is not None}
    if not cached:
        what = "contrast() depends on no embedding: nothing would be learned from it"
        raise ConfigError(what, where=WHERE, remedy="do not detach what embed() returned")
    mine = [one for one in step.model.parameters() if one.requires_grad]
    gradients = zip(mine, found[len(asked) :], strict=counts)
    return CachedGradients(
        {name: one.to(step.device) for name, one in cached.items()},
        [(one, gradient.to(one.device)) for one, gradient in gradients if gradient is not None],
    )


def _terms(step: Step, model: nn.Module, rows: Rows, *, on_host: bool = False) -> Mapping[str, Any]:
    task = cast("Contrastive", step.task)
    if on_host:
        return checked_terms(task.contrast(model, rows))
    with step.cast():
        return checked_terms(task.contrast(model, rows))


def _leaf(rows: Tensor) -> Tensor:
    """Return rows as what gradients are asked for, if they are of numbers that have some."""
    return rows.detach().requires_grad_(rows.is_floating_point() or rows.is_complex())


def evaluated(step: Step, rows: Rows, *, on_host: bool = False) -> dict[str, tuple[float, float]]:
    """Return each term's sum and weight of all items, without gradients, as the model does where it is used."""
    with step.evaluating():
        model = twin(step.model).eval() if on_host else step.model
        terms = _terms(step, model, rows, on_host=on_host)
    return {name: (float(total), float(weight)) for name, (total, weight) in terms.items()}


# Back


def second_pass(step: Step, batch: Batch, rows: Rows) -> None:
    """Embed a micro-batch with a trace, and go back from the gradients of its rows."""
    told = _traced(step, batch)
    _refuse_others(told, rows)
    _back(told, rows)


def _traced(step: Step, batch: Batch) -> dict[str, Tensor]:
    step.watch.phase("inputs")
    batch = step.moved(batch)
    step.watch.phase("forward")
    with step.saved(), step.cast():
        told = embedded(cast("Contrastive", step.task), step.model, batch)
    step.watch.phase("backward")
    return told


def second_pass_on_host(step: Step, batch: Batch, rows: Rows) -> None:
    """Do so with a micro-batch that no card holds."""
    host = twin(step.model)
    told = embedded(cast("Contrastive", step.task), host, step.moved(batch, on_host=True))
    _refuse_others(told, rows)
    _back(told, {name: one.cpu() for name, one in rows.items()})
    step.take_gradients(host)


def _refuse_others(told: Rows, rows: Rows) -> None:
    for name, one in rows.items():
        if name not in told:
            what = f"embed() returned {', '.join(told)} of items of which it returned {name!r} before"
            raise ConfigError(what, where=WHERE, remedy=SEE)
        _refuse_rows({name: told[name]}, len(one), "as the same items had before")


def _back(told: dict[str, Tensor], rows: Rows) -> None:
    """Go back from rows' gradients, the first of those given; those of a loss in full precision fit half ones."""
    ends = [name for name in rows if told[name].requires_grad]
    if ends:  # else only what the loss itself has is trained
        gradients = [rows[name][: len(told[name])].to(told[name].dtype) for name in ends]
        torch.autograd.backward([told.pop(name) for name in ends], gradients)


def finish(cached: CachedGradients) -> None:
    """Add the model's own gradients in the loss, once all others are there: a pass that failed has not changed them."""
    for parameter, gradient in cached.own:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    cached.own.clear()


# A step, and part of one


def accumulate_at_once(step: Step, batch: Batch) -> None:
    """Add the gradients of all items of a step, in one pass."""
    step.watch.phase("inputs")
    batch = step.moved(batch)
    step.watch.phase("forward")
    with step.saved():
        with step.cast():
            rows = embedded(cast("Contrastive", step.task), step.model, batch)
        del batch
        _go_back(step, rows)


def _go_back(step: Step, rows: dict[str, Tensor]) -> None:
    """Go back from the loss of rows that have their trace."""
    terms = _terms(step, step.model, rows)
    rows.clear()
    step.watch.terms({name: total for name, (total, _) in terms.items()})
    loss = whole_loss(terms)
    step.watch.phase("backward")
    torch.autograd.backward(step.scaler.scale(loss))
    step.add_terms(terms)


def accumulate_all(step: Step, batches: Sequence[Batch]) -> None:
    """Add the gradients of all items of a step."""
    if len(batches) == 1:
        accumulate_at_once(step, batches[0])
        return
    snapshot = StepSnapshot.take(step.model, device=step.device, scaler=step.scaler)
    parts = [first_pass(step, batch) for batch in batches]
    sizes = [len(next(iter(part.values()))) for part in parts]
    snapshot.restore()
    with as_drawn(step.device):
        cached = contrast(step, joined_rows(parts))
    start = 0
    for batch, items in zip(batches, sizes, strict=True):
        second_pass(step, batch, {name: one[start : start + items] for name, one in cached.rows.items()})
        start += items
    finish(cached)


def accumulate_one(step: Step, batch: Batch) -> None:
    """Add gradients as one micro-batch of a whole step does, the other items made up: for what measures a step.

    The first of a step stands for its two passes and the loss between them, a later one for its second pass.
    """
    assert step.settings.batch is not None
    if step.row_of and any(one.grad is not None for one in step.trained):
        step.watch.phase("contrast")
        rows = {name: one.new_zeros(step.settings.batch, *one.shape[1:]) for name, one in step.row_of.items()}
        _back(_traced(step, batch), rows)
        return
    step.watch.phase("inputs")
    moved = step.moved(batch)
    step.watch.phase("forward")
    with step.saved(), step.cast():
        told = embedded(cast("Contrastive", step.task), step.model, moved)
    items = len(next(iter(told.values())))
    step.row_of = {name: one.detach().new_empty(0, *one.shape[1:]) for name, one in told.items() if one.requires_grad}
    if items >= step.settings.batch:
        with step.saved():
            _go_back(step, told)
        return
    del moved
    others = step.settings.batch - items
    parts = [{name: one.detach() for name, one in told.items()}]
    del told
    parts.append({name: one[:1].expand(others, *one.shape[1:]).clone() for name, one in parts[0].items()})
    cached = contrast(step, joined_rows(parts))
    if not (step.row_of or cached.own):
        what = "neither embed() nor contrast() depends on a parameter that is trained: nothing would be learned"
        raise ConfigError(what, where=WHERE, remedy="do not detach what they return, or freeze fewer parameters")
    _back(_traced(step, batch), cached.rows)
    finish(cached)
