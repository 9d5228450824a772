"""One exact optimizer step: micro-batches of any sizes have the gradient of the one batch that they make together.

A term of the loss is a sum and a weight; its value over a step is the sum of its sums over the sum of its weights. So
the weights must be known before a micro-batch runs backward, or divided out afterwards:

- one term: gradients are of its sum over a guess of its weight; the guess is corrected in place at the end;
- several terms and one micro-batch: its own weights are the step's;
- several terms and micro-batches: the task tells the weights (`weights`), else a forward without gradients does.

The planner traces this very code: `watch` is told where each part begins, and what is whose.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from pipeline.errors import ConfigError
from pipeline.protocol import ParameterGroups, Weights
from pipeline.training.offload import Pinned, offloaded
from pipeline.training.recompute import recomputed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from pipeline.protocol import Batch, Task
    from pipeline.training.offload import Carrier

    Terms = Mapping[str, tuple[Tensor, Tensor | float]]

SEE = "what a task must have: pipeline/protocol.py"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """What decides what a step computes, and by which way."""

    optimizer: str = "adamw"  # adamw, adam or sgd
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    momentum: float = 0.9  # of sgd
    way: str = "foreach"  # of the optimizer: foreach, fused or loop
    clip: float | None = None  # norm of all gradients at most
    ema: float | None = None  # decay of the moving averages of the parameters
    frozen: tuple[str, ...] = ()  # parameters whose names begin so are not trained
    precision: str = "fp32"  # or autocast to bf16 or fp16
    checkpointing: bool = False  # repeated blocks run again in backward
    offload: bool = False  # what backward needs waits in the host's memory


class Watch(Protocol):
    """Somebody who is told of a step's parts."""

    def phase(self, name: str) -> None:
        """Hear that a part begins: inputs, forward, backward, scale, clip, optimizer, ema, release; or none, idle."""

    def terms(self, terms: Mapping[str, Tensor]) -> None:
        """Hear the sums of a micro-batch's terms, before backward."""


class Unwatched:
    """Nobody."""

    def phase(self, name: str) -> None:
        """Take no notice."""

    def terms(self, terms: Mapping[str, Tensor]) -> None:
        """Take no notice."""


class Step:
    """A model, its optimizer and its moving averages; `run` makes a step."""

    def __init__(
        self,
        task: Task,
        settings: Settings,
        *,
        device: str = "cpu",
        model: nn.Module | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Build the model, unless it is given, and everything that stands between two steps but gradients."""
        self.task, self.settings, self.device, self.watch = task, settings, device, watch or Unwatched()
        made = task.model() if model is None else model
        if not isinstance(made, torch.nn.Module):
            what = f"model() must return a torch.nn.Module, got {type(made).__name__}"
            raise ConfigError(what, where="train.task", remedy=SEE)
        self.model = made.to(device)
        freeze(self.model, settings.frozen)
        if settings.checkpointing:
            self.blocks = recomputed(self.model)
        if not any(one.requires_grad for one in self.model.parameters()):
            raise ConfigError("the model has no parameter that is trained", where="train.frozen", remedy="freeze fewer")
        self.optimizer = optimizer_of(task, self.model, settings)
        self.trained = _only_trained(self.model, self.optimizer)
        self.scaler = torch.amp.GradScaler(device, enabled=settings.precision == "fp16" and device != "cpu")
        self.averages = [one.detach().clone() for one in self.trained] if settings.ema is not None else []
        self.carrier: Carrier = Pinned()
        self._guess: Tensor | float = 0.0  # what gradients were divided by, as the weight is not known yet
        self._totals: dict[str, Any] = {}
        self._is_one_term: bool | None = None  # not known before the loss was called

    def run(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Make a step of some micro-batches; return the value of each term."""
        weights = self.weights(batches)
        try:
            for batch in batches:
                self.accumulate(batch, weights)
            return self.update(weights)
        except BaseException:
            self.release()  # what failed midway leaves nothing to the next step
            raise

    def weights(self, batches: Sequence[Batch]) -> Mapping[str, Any] | None:
        """Return the weights of a step's terms, where they must be known before."""
        if isinstance(self.task, Weights):
            return _summed(self.task.weights(batch) for batch in batches)
        if len(batches) <= 1 or self._is_one_term is True:
            return None
        with self._aside():
            told = self._forward(self._moved(batches[0]))
            self._is_one_term = len(told) == 1
            if self._is_one_term:
                return None
            rest = (self._forward(self._moved(batch)) for batch in batches[1:])
            return _summed({name: weight for name, (_, weight) in terms.items()} for terms in (told, *rest))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Run the model without a trace: no gradients, no statistics, no random numbers used up."""
        with self._evaluating(), torch.random.fork_rng([] if self.device == "cpu" else None):
            yield

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Let the model be as where it is used; afterwards every module is as it was."""
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True

    def accumulate(self, batch: Batch, weights: Mapping[str, Any] | None = None) -> None:
        """Add the gradients of a micro-batch."""
        self.watch.phase("inputs")
        batch = self._moved(batch)
        self.watch.phase("forward")
        with self._saved():
            terms = self._forward(batch)
            self.watch.terms({name: total for name, (total, _) in terms.items()})
            loss = self._loss(terms, weights)
        del batch
        self.watch.phase("backward")
        torch.autograd.backward(self.scaler.scale(loss))
        for name, (total, weight) in terms.items():
            kept = self._totals.get(name, (0.0, 0.0))
            self._totals[name] = (kept[0] + total.detach(), kept[1] + weight)

    def _loss(self, terms: Terms, weights: Mapping[str, Any] | None) -> Tensor:
        """Return what to go back from: every term over its weight, or over what is corrected later."""
        if weights is not None:
            return _sum(_over(total, weights[name]) for name, (total, _) in terms.items())
        if len(terms) > 1:
            if self._is_one_term or len(self._totals) == 1:
                what = f"loss() returned {', '.join(terms)} after micro-batches with one term: give the task weights()"
                raise ConfigError(what, where="train.task", remedy="weights(batch) tells each term's weight beforehand")
            return _sum(_over(total, weight) for total, weight in terms.values())
        ((total, weight),) = terms.values()
        if not self._totals:
            self._guess = weight.detach().clamp(min=1.0) if isinstance(weight, torch.Tensor) else max(weight, 1.0)
        return total / self._guess

    def update(self, weights: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Let the optimizer take the gradients; return the value of each term."""
        values = {name: _over(total, weight) for name, (total, weight) in self._totals.items()}
        if weights is None and len(self._totals) == 1:
            ((_, weight),) = self._totals.values()
            self._scale(_over(self._guess, weight))
        if self.settings.clip is not None:
            self.watch.phase("clip")
            self.scaler.unscale_(self.optimizer)
            foreach = self.settings.way != "loop"
            torch.nn.utils.clip_grad_norm_(self.trained, self.settings.clip, foreach=foreach)
        self.watch.phase("optimizer")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.averages:
            self.watch.phase("ema")
            self._average()
        self.release()
        return values

    def release(self) -> None:
        """Drop all gradients, and what is known of the step so far."""
        self.watch.phase("release")
        self.optimizer.zero_grad(set_to_none=True)
        self._guess, self._totals = 0.0, {}
        self.watch.phase("idle")

    def evaluate(self, batch: Batch) -> Terms:
        """Return each term's sum and weight, without gradients, as the model does where it is used."""
        self.watch.phase("inputs")
        batch = self._moved(batch)
        self.watch.phase("evaluate")
        with self._evaluating():
            terms = self._forward(batch)
        self.watch.phase("idle")
        return terms

    def owned(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield every tensor that may stay from one micro-batch to the next: what it is for, whose it is, itself."""
        for name, parameter in self.model.named_parameters():
            yield "parameters", name, parameter
            if parameter.grad is not None:
                yield "gradients", name, parameter.grad
            for what, state in self.optimizer.state.get(parameter, {}).items():
                if isinstance(state, torch.Tensor):
                    yield "optimizer", f"{name} {what}", state
        for name, buffer in self.model.named_buffers():
            yield "buffers", name, buffer
        for place, average in enumerate(self.averages):
            yield "ema", str(place), average

    def _forward(self, batch: Batch) -> Terms:
        kind = torch.device(self.device).type
        precision = DTYPES.get(self.settings.precision)
        with torch.autocast(kind, precision) if precision else nullcontext():
            terms = self.task.loss(self.model, batch)
        for name, term in _items_of(terms):
            _check_term(name, term)
        return terms

    def _moved(self, batch: Batch) -> Batch:
        """Return a batch on the device."""
        if hasattr(batch, "to"):
            return batch.to(self.device)
        return tree_map_only(torch.Tensor, lambda one: one.to(self.device, non_blocking=True), batch)

    def _saved(self) -> AbstractContextManager[Any]:
        """Return where what backward needs is kept."""
        if not self.settings.offload:
            return nullcontext()
        return offloaded(self.model, self.carrier)

    def _scale(self, factor: Tensor | float) -> None:
        """Correct the gradients for what they were divided by."""
        self.watch.phase("scale")
        gradients = [one.grad for one in self.trained if one.grad is not None]
        if gradients and not (isinstance(factor, float) and factor == 1.0):
            torch._foreach_mul_(gradients, factor)

    def _average(self) -> None:
        decay = self.settings.ema
        assert decay is not None
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, list(self.trained), 1 - decay)


def _items_of(terms: Any) -> list[tuple[Any, Any]]:
    if not isinstance(terms, Mapping) or not terms:
        got = "a tensor" if isinstance(terms, torch.Tensor) else type(terms).__name__ if terms else "nothing"
        what = f"loss() must return {{term: (sum, weight)}} with at least one term, got {got}"
        raise ConfigError(what, where="train.task", remedy=SEE)
    return list(terms.items())


def _check_term(name: Any, term: Any) -> None:
    """Refuse what is no sum and weight: said at once, it spares a riddle later."""
    if not isinstance(term, tuple | list) or len(term) != 2:
        wrong = f"{type(term).__name__}" + (f" of {len(term)}" if isinstance(term, tuple | list) else "")
        raise ConfigError(f"loss(): {name!r} must be (sum, weight), got {wrong}", where="train.task", remedy=SEE)
    total, weight = term
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        got = f"shape {list(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
        what = f"loss(): the sum of {name!r} must be a tensor with one number, got {got}"
        raise ConfigError(what, where="train.task", remedy=SEE)
    if torch.is_grad_enabled() and not total.requires_grad:
        what = f"loss(): the sum of {name!r} does not depend on any parameter: nothing would be learned from it"
        raise ConfigError(what, where="train.task", remedy="leave the term out, or do not detach it")
    if not isinstance(weight, torch.Tensor | float | int) or (isinstance(weight, torch.Tensor) and weight.numel() != 1):
        what = f"loss(): the weight of {name!r} must be one number, got {type(weight).__name__}"
        raise ConfigError(what, where="train.task", remedy=SEE)


def _over(total: Any, weight: Tensor | float) -> Any:
    """Return a quotient; nothing over nothing is nothing: a term that no item of a step has."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight == 0, torch.zeros_like(weight), total / weight.where(weight != 0, 1))
    return total / weight if weight else total * 0.0


def _only_trained(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer has; others need no gradients, which nobody would ever drop."""
    trained = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    known = {id(one) for one in trained}
    for one in model.parameters():
        if id(one) not in known:
            one.requires_grad = False
    return trained


def freeze(model: nn.Module, frozen: Sequence[str]) -> None:
    """Train no parameter whose name begins with one of some texts, each of which must be the beginning of a name."""
    names = [name for name, _ in model.named_parameters()]
    for beginning in frozen:
        if not any(name.startswith(beginning) for name in names):
            what = f"no parameter's name begins with {beginning!r}; there is {names[0] if names else 'none'}"
            raise ConfigError(what, where="train.frozen")
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(frozen)):
            parameter.requires_grad = False


def optimizer_of(task: Task, model: nn.Module, settings: Settings) -> Optimizer:
    """Return the optimizer of the parameters that are trained."""
    groups: Any = [one for one in model.parameters() if one.requires_grad]
    if isinstance(task, ParameterGroups):
        try:
            groups = list(task.parameter_groups(model))
        except TypeError as error:
            raise ConfigError("parameter_groups() must return a list", where="train.task", remedy=SEE) from error
        if not groups:
            raise ConfigError("parameter_groups() returned no parameter", where="train.task", remedy=SEE)
    way = {"foreach": settings.way == "foreach", "fused": settings.way == "fused"}
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, rate, settings.momentum, weight_decay=decay, **way)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, rate, weight_decay=decay, foreach=way["foreach"], fused=way["fused"])


def _summed(many: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums by name."""
    sums: dict[str, Any] = {}
    for one in many:
        for name, value in one.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _sum(values: Iterable[Tensor]) -> Tensor:
    first, *others = values
    for one in others:
        first = first + one
    return first
