"""One exact optimizer step: micro-batches of any sizes give the gradient of the whole batch.

A term of the loss is a sum and a weight; its value over a step is the sum of its sums over the sum of its weights. So
the weights must be known before a micro-batch runs backward, or divided out afterwards:

- one term: backward runs from its sum over a guess of its weight; the guess is corrected in place at the end;
- several terms and one micro-batch: its own weights are the step's;
- several terms and micro-batches: the task returns the weights (`weights`), else a forward without gradients does.

A loss that compares all items of a step with each other needs two passes (`contrastive`).

The planner traces this very code: `watch` is called where each phase of a step begins.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pipeline.device.accelerator import RngState
from pipeline.device.batch_transfer import moved
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError
from pipeline.memory.footprint import EVERY_BLOCK
from pipeline.protocol import Weights
from pipeline.training.loss_terms import added, sums_by_name
from pipeline.training.step.checkpointing import Pinned, Recomputing, host_copy, offloaded
from pipeline.training.step.optimizers import (
    checked_terms,
    evaluated_terms,
    freeze_parameters,
    only_trained,
    optimizer_of,
    quotient,
    refused,
    whole_loss,
)
from pipeline.training.step_clock import StepClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from pipeline.device.batch_transfer import CopyAhead
    from pipeline.protocol import Batch, Task
    from pipeline.training.step.optimizers import StepSettings, Terms

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CHECKPOINTING, OFFLOAD, HOST, SKIP = "checkpointing", "offload", "cpu", "skip"
RUNGS = (CHECKPOINTING, OFFLOAD, HOST, SKIP)  # the ladder of remedies; a piece's `rung` counts those it has climbed
ON_HOST = RUNGS.index(HOST) + 1  # the rung that computes on the CPU
TINY = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or all of it where it is not sharded."""
    return getattr(tensor, "_local_tensor", tensor)


class StepWatch(Protocol):
    """An observer that a step calls as its phases begin."""

    def phase(self, name: str) -> None:
        """Note that a phase begins: inputs, forward, backward, evaluate, scale, clip, optimizer, ema, release or idle.

        A contrastive step also has the phases embed and contrast.
        """

    def terms(self, terms: Mapping[str, Tensor]) -> None:
        """Receive the sums of a micro-batch's loss terms, before backward."""


class Step:
    """A model, its optimizer and its moving averages; `run` makes a step."""

    is_spread = False  # the model is sharded over ranks, which then make all passes at the same time
    contrasts = False  # the loss compares all items of the step
    ahead: CopyAhead | None = None  # copies the batch that follows; None: each is copied when its turn comes
    _is_on_host = False  # a copy of the model runs on the CPU
    guess: Tensor | float | None = None  # a single term is divided by this while its weight is unknown
    backward: Callable[[Tensor], Any] = staticmethod(torch.autograd.backward)

    def __init__(
        self,
        task: Task,
        settings: StepSettings,
        *,
        device: str = CPU,
        model: nn.Module | None = None,
        watch: StepWatch | None = None,
        scaled: bool | None = None,
    ) -> None:
        """Build the model (unless it is passed), its optimizer, loss scaler and moving averages.

        `scaled`: whether fp16 losses are scaled; by default on a GPU only.
        """
        self.task, self.settings, self.device, self.clock = task, settings, device, StepClock()
        self.watch: StepWatch = watch or self.clock
        self.model = checked_model(task.model() if model is None else model).to(device)
        freeze_parameters(self.model, settings.frozen)
        self._recomputing = Recomputing(self.model)
        self._offloads = settings.offload
        self._recomputing.turn(settings.checkpointing)
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            raise ConfigError("the model has no trainable parameter", where="train.frozen", remedy="freeze fewer")
        self.optimizer = optimizer_of(task, self.model, settings)
        self.trained = only_trained(self.model, self.optimizer)
        scaled = device != CPU if scaled is None else scaled
        self.scaler = torch.amp.GradScaler(torch.device(device).type, enabled=settings.precision == "fp16" and scaled)
        self.scaler.scale(torch.zeros((), device=device))  # creates the scale now: a first step may have no item
        self.averages = [parameter.detach().clone() for parameter in self.trained] if settings.ema is not None else []
        self.carrier: Any = Pinned()  # carries offloaded tensors; a trace replaces it
        self._totals: dict[str, Any] = {}
        self._is_unscaled = False  # the gradients are no longer those of a scaled loss
        self._are_several: dict[int, bool] = {}  # whether a task's loss has several terms, once that is known

    def run(self, batches: Sequence[Batch]) -> dict[str, Tensor]:
        """Make one optimizer step from its micro-batches; return the value of each term."""
        weights = self.weights(batches)
        try:
            self.accumulate_all(batches, weights)
            return self.update(weights)
        except BaseException:
            self.release()  # a step that failed midway leaves no gradients to the next
            raise

    def weights(self, batches: Sequence[Batch]) -> Mapping[str, Any] | None:
        """Return the weights of a step's terms where backward needs them, else None."""
        if len(batches) < 2 or not self.needs_weights:
            return None
        weights = sums_by_name(map(self.weights_of, batches))
        self.learn_terms(len(weights))
        return weights if self.needs_weights else None

    def weights_of(self, batch: Batch) -> Mapping[str, Any]:
        """Return the weights of a batch's terms: from the task's `weights`, else by running the model."""
        if isinstance(self.task, Weights):
            return self.task.weights(batch)
        return {name: weight for name, (_, weight) in self.pure_terms(batch).items()}

    @property
    def needs_weights(self) -> bool:
        """Whether the weights must be known before backward: there are several terms, or their number is unknown."""
        return isinstance(self.task, Weights) or self._are_several.get(id(self.task), True)

    def learn_terms(self, names: int) -> None:
        """Remember whether the loss has several terms; `names`: how many over all ranks, 0 where no item ran."""
        if names:
            self._are_several[id(self.task)] = names > 1

    def accumulate_all(self, batches: Sequence[Batch], weights: Mapping[str, Any] | None) -> None:
        """Add the gradients of a step's micro-batches."""
        for batch in batches:
            self.accumulate(batch, weights)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put the model in eval mode without gradients; afterwards restore every module's own mode."""
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
            terms = self.terms_of(batch)
            self.watch.terms({name: total for name, (total, _) in terms.items()})
            loss = self._loss(terms, weights)
        del batch
        self.watch.phase("backward")
        self.backward(self.scaled(loss))
        self.add_terms(terms)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss times the scale of half precision, if there is one."""
        if self._is_on_host and self.scaler.is_enabled():
            return loss * self.scaler.get_scale()  # `scale` would not wait for the copy from the GPU
        return self.scaler.scale(loss)

    def add_terms(self, terms: Terms) -> None:
        """Add the terms of a micro-batch to the totals of the step."""
        own = {name: (total.detach().to(self.device), weight) for name, (total, weight) in terms.items()}
        self._totals = added(self._totals, own)

    def pure_terms(self, batch: Batch) -> Terms:
        """Return the terms of a micro-batch without side effects on gradients, batch statistics or random numbers."""
        with self.evaluating(), RngState.preserved(self.device):
            with self.saved():  # a loss through a derivative saves activations here, too
                terms = self.terms_of(self.moved(batch))
            return {name: (total.detach(), weight) for name, (total, weight) in terms.items()}

    def _loss(self, terms: Terms, weights: Mapping[str, Any] | None) -> Tensor:
        """Return the scalar for backward: each term over its weight, or over a guess that `settle` corrects."""
        if weights is not None:
            return whole_loss(terms, weights)
        if len(terms) > 1:
            return whole_loss(terms)
        ((total, weight),) = terms.values()
        if self.guess is None:
            self.guess = weight.detach().clamp(min=1.0) if isinstance(weight, torch.Tensor) else max(weight, 1.0)
        return total / (float(self.guess) if total.device.type != torch.device(self.device).type else self.guess)

    def update(self, weights: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Clip the gradients and step the optimizer; return the value of each term."""
        values = {name: quotient(total, weight) for name, (total, weight) in self._totals.items()}
        if weights is None:
            self.settle(self._totals)
        self.apply()
        return values

    @property
    def totals(self) -> dict[str, tuple[float, float]]:
        """Each term's sum and weight so far, as numbers; waits for the GPU."""
        return {name: (float(total), float(weight)) for name, (total, weight) in self._totals.items()}

    def settle(self, totals: Mapping[str, tuple[Any, Any]]) -> None:
        """Divide the gradients of a single term by its weight instead of what they were divided by."""
        guess = self.guess
        if guess is None:
            return
        if len(totals) > 1:
            problem = f"loss() returned {', '.join(totals)} after micro-batches with one term: define weights()"
            raise refused(problem, "weights(batch) returns each term's weight before the loss is computed")
        ((_, weight),) = totals.values()
        self.watch.phase("scale")
        is_number = isinstance(weight, float)  # the loop has waited for it; a number scales gradients of any precision
        if gradients := self.gradients:
            torch._foreach_mul_(gradients, quotient(float(guess), weight) if is_number else quotient(guess, weight))

    @property
    def gradients(self) -> list[Tensor]:
        return [local(parameter.grad) for parameter in self.trained if parameter.grad is not None]

    def norm(self) -> Tensor:
        """Return the norm of all gradients; may be called again."""
        self.watch.phase("clip")
        if not self._is_unscaled:
            self.scaler.unscale_(self.optimizer)
            self._is_unscaled = True
        return torch.nn.utils.get_total_norm(self.gradients, foreach=self.settings.way != "loop")

    def make_state(self) -> None:
        """Make the optimizer create its state now; parameters stay the same to the bit."""
        if self.optimizer.state:
            return
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter)
        groups = self.optimizer.param_groups
        kept = [(group["lr"], group["weight_decay"]) for group in groups]
        for group in groups:
            group["lr"] = group["weight_decay"] = 0.0
        self.optimizer.step()
        for group, (rate, decay) in zip(groups, kept, strict=True):
            group["lr"], group["weight_decay"] = rate, decay
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].zero_()  # it is not counted
        self.release()

    def apply(self, norm: Tensor | None = None) -> None:
        """Clip the gradients, of this norm if it is known, and step the optimizer; update the moving averages."""
        clip, gradients = self.settings.clip, self.gradients
        if clip is not None and gradients:
            factor = (clip / ((self.norm() if norm is None else norm) + TINY)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        del gradients
        self.watch.phase("optimizer")
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.averages and self.scaler.get_scale() >= scale:  # else the step was left out: not finite at this scale
            self.watch.phase("ema")
            assert self.settings.ema is not None
            averages, trained = [*map(local, self.averages)], [local(parameter.detach()) for parameter in self.trained]
            torch._foreach_lerp_(averages, trained, 1 - self.settings.ema)
        self.release()

    def release(self) -> None:
        """Drop all gradients and the totals of the step so far."""
        self.watch.phase("release")
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler.is_enabled():
            self.scaler._per_optimizer_states.pop(id(self.optimizer), None)  # noqa: SLF001 - else a second unscale_() is refused
        for name in ("grad_scale", "found_inf"):  # a fused optimizer would scale the next step's gradients by them
            vars(self.optimizer).pop(name, None)
        self.guess, self._totals, self._is_unscaled = None, {}, False
        self.watch.phase("idle")

    @contextmanager
    def remedied(self, rung: int) -> Iterator[None]:
        """Save memory for a while, beyond the settings: 1 by checkpointing, 2 also by offload, 3 on the CPU instead."""
        if rung >= ON_HOST:
            with self._on_host():
                yield
            return
        blocks, offloaded_before = self._recomputing.blocks, self._offloads
        self._recomputing.turn(EVERY_BLOCK if rung > RUNGS.index(CHECKPOINTING) else blocks)
        self._offloads = offloaded_before or rung > RUNGS.index(OFFLOAD)
        try:
            yield
        finally:
            self._recomputing.turn(blocks)
            self._offloads = offloaded_before

    @contextmanager
    def _on_host(self) -> Iterator[None]:
        """Run a copy of the model on the CPU in full precision, and add its gradients to the model's own."""
        own, self.model, self._is_on_host = self.model, host_copy(self.model), True
        try:
            yield
            self._take_gradients(own)
        finally:
            self.model, self._is_on_host = own, False

    def _take_gradients(self, own: nn.Module) -> None:
        for parameter, copied in zip(own.parameters(), self.model.parameters(), strict=True):
            if copied.grad is not None:
                gradient = copied.grad.to(parameter.device, parameter.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Exchange the parameters for their moving averages for a while, where there are any."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for average, parameter in zip(self.averages, self.trained, strict=bool(self.averages)):
            # Contents, not tensors: FSDP gathers from its own memory
            own, other = local(average), local(parameter.detach())
            kept = own.clone()
            own.copy_(other)
            other.copy_(kept)

    def evaluate(self, batch: Batch) -> Terms:
        """Return each term's sum and weight in eval mode, without gradients."""
        self.watch.phase("inputs")
        batch = self.moved(batch)
        self.watch.phase("evaluate")
        with self.evaluating():
            terms = self.terms_of(batch)
        self.watch.phase("idle")
        return terms

    def terms_of(self, batch: Batch) -> Terms:
        """Return each term's sum and weight of a batch on the device, in the precision of the settings."""
        with self.cast():
            return checked_terms(self._terms(self.model, batch))

    def owned(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (kind, owner's name, this rank's tensor) for every tensor that may live on between micro-batches."""
        for name, parameter in self.model.named_parameters():
            yield "parameters", name, local(parameter)
            if parameter.grad is not None:
                yield "gradients", name, local(parameter.grad)
            for key, state in self.optimizer.state.get(parameter, {}).items():
                if isinstance(state, torch.Tensor):
                    yield "optimizer", f"{name} {key}", local(state)
        for name, buffer in self.model.named_buffers():
            yield "buffers", name, buffer
        for place, average in enumerate(self.averages):
            yield "ema", str(place), local(average)

    def _terms(self, model: nn.Module, batch: Batch) -> Terms:
        return self.task.loss(model, batch) if torch.is_grad_enabled() else evaluated_terms(self.task, model, batch)

    def cast(self) -> AbstractContextManager[Any]:
        """Return a context in which the model runs in the precision of the settings."""
        precision = None if self._is_on_host else DTYPES.get(self.settings.precision)
        kind = torch.device(self.device).type
        # Without copies of gathered weights, which would wait for backward
        return torch.autocast(kind, precision, cache_enabled=not self.is_spread) if precision else nullcontext()

    def moved(self, batch: Batch) -> Batch:
        """Return a batch on the device where the model runs."""
        return moved(batch, self.place) if self._is_on_host or self.ahead is None else self.ahead.moved(batch)

    @property
    def place(self) -> str:
        """The device where the model runs now."""
        return CPU if self._is_on_host else self.device

    def drop_ahead(self) -> None:
        """Free the batch that was copied ahead: its memory is needed."""
        if self.ahead is not None:
            self.ahead.drop()

    def saved(self) -> AbstractContextManager[Any]:
        """Return a context for the forward: with offload, it keeps activations in the host's memory."""
        return offloaded(self.model, self.carrier) if self._offloads and not self._is_on_host else nullcontext()


def checked_model(model: Any) -> nn.Module:
    """Return the model that a task made; refuse anything but a module."""
    if not isinstance(model, torch.nn.Module):
        raise refused(f"model() must return a torch.nn.Module, got {type(model).__name__}")
    return model
