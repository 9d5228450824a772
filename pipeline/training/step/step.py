"""One exact optimizer step: micro-batches of any sizes have the gradient of the one batch that they make together.

A term of the loss is a sum and a weight; its value over a step is the sum of its sums over the sum of its weights. So
the weights must be known before a micro-batch runs backward, or divided out afterwards:

- one term: gradients are of its sum over a guess of its weight; the guess is corrected in place at the end;
- several terms and one micro-batch: its own weights are the step's;
- several terms and micro-batches: the task tells the weights (`weights`), else a forward without gradients does.

A loss that compares all items of a step with each other goes another way: two passes (`contrastive`).

The planner traces this very code: `watch` is told where each part begins, and what is whose.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_map_only

from pipeline.errors import ConfigError
from pipeline.memory.runtime.recovery import guessed_weight, quotient
from pipeline.protocol import Contrastive, Weights
from pipeline.training.step.checkpointing import Pinned, Recomputing, offloaded, twin
from pipeline.training.step.optimizers import (
    checked_terms,
    freeze_parameters,
    only_trained,
    optimizer_of,
    refused,
    step_in_place,
    sums_by_name,
    whole_loss,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from pipeline.protocol import Batch, Task
    from pipeline.training.step.checkpointing import Carrier
    from pipeline.training.step.optimizers import StepSettings, Terms

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class StepWatch(Protocol):
    """Somebody who is told of a step's parts."""

    def phase(self, name: str) -> None:
        """Hear that a part begins: inputs, forward, backward, scale, clip, optimizer, ema, release; or none, idle.

        Where all items of a step are compared: embed and contrast, too.
        """

    def terms(self, terms: Mapping[str, Tensor]) -> None:
        """Hear the sums of a micro-batch's terms, before backward."""


class Unwatched:
    """Takes no notice."""

    def phase(self, name: str) -> None:
        pass

    def terms(self, terms: Mapping[str, Tensor]) -> None:
        pass


class Step:
    """A model, its optimizer and its moving averages; `run` makes a step."""

    is_spread = False  # over ranks, which then make all passes at the same time
    contrasts = False  # its loss compares all its items

    def __init__(
        self,
        task: Task,
        settings: StepSettings,
        *,
        device: str = "cpu",
        model: nn.Module | None = None,
        watch: StepWatch | None = None,
        scaled: bool | None = None,
    ) -> None:
        """Build the model, unless it is given, and everything that stands between two steps but gradients.

        Losses of half precision are scaled on a GPU; `scaled` says so for a CPU, where a trace must not.
        """
        assert isinstance(task, Contrastive) == self.contrasts, "make_step knows which step a task needs"
        self.task, self.settings, self.device, self.watch = task, settings, device, watch or Unwatched()
        made = task.model() if model is None else model
        if not isinstance(made, torch.nn.Module):
            raise refused(f"model() must return a torch.nn.Module, got {type(made).__name__}")
        self.model = made.to(device)
        freeze_parameters(self.model, settings.frozen)
        self._recomputing = Recomputing(self.model)
        self._offloads = settings.offload
        if settings.checkpointing:
            self._recomputing.turn(on=True)
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ConfigError("the model has no parameter that is trained", where="train.frozen", remedy="freeze fewer")
        self.optimizer = optimizer_of(task, self.model, settings)
        self.trained = only_trained(self.model, self.optimizer)
        scaled = device != "cpu" if scaled is None else scaled
        self.scaler = torch.amp.GradScaler(torch.device(device).type, enabled=settings.precision == "fp16" and scaled)
        self.scaler.scale(torch.zeros((), device=device))  # it has a scale from now on: a first step may have no item
        self.averages = [parameter.detach().clone() for parameter in self.trained] if settings.ema is not None else []
        self.carrier: Carrier = Pinned()
        self._guess: Tensor | float = 0.0  # what gradients were divided by, as the weight is not known yet
        self._totals: dict[str, Any] = {}
        self._is_one_term: bool | None = None  # not known before the loss was called

    def run(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Make a step of some micro-batches; return the value of each term."""
        weights = self.weights(batches)
        try:
            self.accumulate_all(batches, weights)
            return self.update(weights)
        except BaseException:
            self.release()  # what failed midway leaves nothing to the next step
            raise

    def weights(self, batches: Sequence[Batch]) -> Mapping[str, Any] | None:
        """Return the weights of a step's terms, where they must be known before."""
        if isinstance(self.task, Weights):
            return sums_by_name(self.task.weights(batch) for batch in batches)
        if len(batches) <= 1 or self._is_one_term is True:
            return None
        first = self.aside(batches[0])
        self._is_one_term = len(first) == 1
        if self._is_one_term:
            return None
        every = (first, *map(self.aside, batches[1:]))
        return sums_by_name({name: weight for name, (_, weight) in terms.items()} for terms in every)

    def accumulate_all(self, batches: Sequence[Batch], weights: Mapping[str, Any] | None) -> None:
        """Add the gradients of a step's micro-batches."""
        for batch in batches:
            self.accumulate(batch, weights)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
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
        batch = self.moved(batch)
        self.watch.phase("forward")
        with self.saved():
            terms = self._forward(batch)
            self.watch.terms({name: total for name, (total, _) in terms.items()})
            loss = self._loss(terms, weights)
        del batch
        self.watch.phase("backward")
        torch.autograd.backward(self.scaler.scale(loss))
        self.add_terms(terms)

    def accumulate_alone(self, batch: Batch, weights: Mapping[str, Any] | None = None) -> None:
        """Add the gradients of a micro-batch's own loss, as if it were a whole step."""
        self.accumulate(batch, weights)

    def add_terms(self, terms: Terms) -> None:
        """Count the terms of a micro-batch among those of the step."""
        for name, (total, weight) in terms.items():
            kept = self._totals.get(name, (0.0, 0.0))
            self._totals[name] = (kept[0] + total.detach().to(self.device), kept[1] + weight)

    def accumulate_on_host(self, batch: Batch, weights: Mapping[str, Any] | None = None) -> None:
        """Add the gradients of a micro-batch that no card holds: a copy of the model computes them on the processor."""
        host = twin(self.model)
        terms = self._terms(host, self.moved(batch, on_host=True))
        loss = self._loss(terms, weights)
        torch.autograd.backward(loss * self.scaler.get_scale() if self.scaler.is_enabled() else loss)
        self.take_gradients(host)
        self.add_terms(terms)

    def take_gradients(self, host: nn.Module) -> None:
        """Add the gradients of a copy of the model in the host's memory."""
        for own, other in zip(self.model.parameters(), host.parameters(), strict=True):
            if other.grad is not None:
                gradient = other.grad.to(own.device, own.dtype)
                own.grad = gradient if own.grad is None else own.grad.add_(gradient)

    def aside(self, batch: Batch, *, on_host: bool = False) -> Terms:
        """Return the terms of a micro-batch without a trace: no gradients, no statistics, no random numbers used up."""
        with self.evaluating(), torch.random.fork_rng([] if self.device == "cpu" else None):
            if on_host:
                return self._terms(twin(self.model).eval(), self.moved(batch, on_host=True))
            return self._forward(self.moved(batch))

    def _loss(self, terms: Terms, weights: Mapping[str, Any] | None) -> Tensor:
        """Return what to go back from: every term over its weight, or over what is corrected later."""
        if weights is not None:
            return whole_loss(terms, weights)
        if len(terms) > 1:
            if self._is_one_term or len(self._totals) == 1:
                what = f"loss() returned {', '.join(terms)} after micro-batches with one term: give the task weights()"
                raise refused(what, "weights(batch) tells each term's weight beforehand")
            return whole_loss(terms)
        ((total, weight),) = terms.values()
        if not self._totals:  # nobody else knows this guess: it is divided out again before ranks add up
            self._guess = guessed_weight(weight)
        return total / (float(self._guess) if total.device.type != torch.device(self.device).type else self._guess)

    def update(self, weights: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Let the optimizer take the gradients; return the value of each term."""
        values = {name: quotient(total, weight) for name, (total, weight) in self._totals.items()}
        if weights is None and len(self._totals) == 1:
            ((_, weight),) = self._totals.values()
            self.settle(weight)
        if self.settings.clip is not None:
            self.clip()
        self.apply()
        return values

    @property
    def totals(self) -> dict[str, tuple[float, float]]:
        """Each term's sum and weight so far, as numbers; a GPU is waited for."""
        return {name: (float(total), float(weight)) for name, (total, weight) in self._totals.items()}

    def settle(self, weight: Tensor | float) -> None:
        """Divide the gradients of a single term by its weight, in place of what was guessed."""
        known = isinstance(weight, float)  # a loop has waited for it anyway; a number scales gradients of any precision
        self._scale(float(quotient(float(self._guess), weight)) if known else quotient(self._guess, weight))

    @property
    def retries_by_scale(self) -> bool:
        """Whether a scale may be to blame for gradients that are not finite: such a step is left out by itself."""
        return self.scaler.is_enabled() and self.scaler.get_scale() > 1

    @property
    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.trained if parameter.grad is not None]

    def norm(self) -> Tensor:
        """Return the norm of all gradients."""
        self.scaler.unscale_(self.optimizer)
        return torch.nn.utils.get_total_norm(self.gradients, foreach=self.settings.way != "loop")

    def clip(self) -> Tensor:
        """Shorten the gradients to the norm that they may have at most; return the one that they had."""
        assert self.settings.clip is not None
        self.watch.phase("clip")
        self.scaler.unscale_(self.optimizer)
        foreach = self.settings.way != "loop"
        return torch.nn.utils.clip_grad_norm_(self.trained, self.settings.clip, foreach=foreach)

    def make_state(self) -> None:
        """Let the optimizer make its state now; nothing else changes, not a bit."""
        if self.optimizer.state:
            return
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
        step_in_place(self.optimizer)
        self.release()

    def apply(self) -> None:
        """Let the optimizer take the gradients as they are, and the averages follow."""
        self.watch.phase("optimizer")
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.averages and self.scaler.get_scale() >= scale:  # else the step was left out: not finite at this scale
            self.watch.phase("ema")
            self._average()
        self.release()

    def release(self) -> None:
        """Drop all gradients, and what is known of the step so far."""
        self.watch.phase("release")
        self.optimizer.zero_grad(set_to_none=True)
        self._guess, self._totals = 0.0, {}
        self.watch.phase("idle")

    @contextmanager
    def remedied(self, rung: int) -> Iterator[None]:
        """Take less memory and more time for a while, beyond the settings: compute blocks again, and then offload."""
        before = self._recomputing.on, self._offloads
        self._recomputing.turn(on=before[0] or rung >= 1)
        self._offloads = before[1] or rung >= 2
        try:
            yield
        finally:
            self._recomputing.turn(on=before[0])
            self._offloads = before[1]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the moving averages in the place of the parameters for a while, where there are any."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for average, parameter in zip(self.averages, self.trained, strict=bool(self.averages)):
            parameter.data, average.data = average.data, parameter.data

    def evaluate(self, batch: Batch) -> Terms:
        """Return each term's sum and weight, without gradients, as the model does where it is used."""
        self.watch.phase("inputs")
        batch = self.moved(batch)
        self.watch.phase("evaluate")
        with self.evaluating():
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
        with self.cast():
            return checked_terms(self._terms(self.model, batch))

    def _terms(self, model: nn.Module, batch: Batch) -> Terms:
        """Return the loss of a batch as the task has it."""
        return self.task.loss(model, batch)

    def cast(self) -> AbstractContextManager[Any]:
        """Return where the model runs in the precision of the settings."""
        precision = DTYPES.get(self.settings.precision)
        return torch.autocast(torch.device(self.device).type, precision) if precision else nullcontext()

    def moved(self, batch: Batch, *, on_host: bool = False) -> Batch:
        """Return a batch on the device, or in the host's memory."""
        if hasattr(batch, "to"):
            return batch.to("cpu" if on_host else self.device)
        if on_host:
            return tree_map_only(torch.Tensor, torch.Tensor.cpu, batch)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device, non_blocking=True), batch)

    def saved(self) -> AbstractContextManager[Any]:
        """Return where what backward needs is kept."""
        return offloaded(self.model, self.carrier) if self._offloads else nullcontext()

    def _scale(self, factor: Tensor | float) -> None:
        """Correct the gradients for what they were divided by."""
        self.watch.phase("scale")
        if (gradients := self.gradients) and not (isinstance(factor, float) and factor == 1.0):
            torch._foreach_mul_(gradients, factor)

    def _average(self) -> None:
        decay = self.settings.ema
        assert decay is not None
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, list(self.trained), 1 - decay)
