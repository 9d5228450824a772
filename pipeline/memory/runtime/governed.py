"""A loop of your own, without out-of-memory errors: a step splits what does not fit, and has the same gradients.

    from pipeline.memory.runtime.governed import Governed

    governed = Governed(model, optimizer)
    for items in loader:  # a list of items: the effective batch
        loss = governed.step(items, loss_of)

`loss_of(items)` runs the model on some of the items and returns the loss's sum over them and its weight: how many
items, or residues, it is of. It moves them to the device itself. Splitting changes what a model computes over a batch
as a whole: batch normalisation, and losses that compare the items of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import torch

from pipeline.device.kinds import CPU
from pipeline.device.out_of_memory import free_caches, out_of_memory_error
from pipeline.errors import ConfigError, JobFailed, PlanInfeasible
from pipeline.memory.runtime.governor import UNPLANNED, Governor, halved
from pipeline.memory.runtime.meters import CardMeter
from pipeline.memory.runtime.recovery import Oom, StepSnapshot, WeightedMean, replay_until_it_fits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    LossOf: TypeAlias = Callable[[list[Any]], tuple[Tensor, Tensor | float]]

Item = TypeVar("Item")

BACKOFF = 0.75  # nobody has planned: all that is known of what fits is that half of it did


@dataclass(frozen=True, slots=True)
class GovernedEvent:
    """An out-of-memory, a skipped item or a new budget."""

    step: int
    what: Literal["out of memory", "skipped", "budget"]
    cost: int  # of what did not fit, or the new budget
    detail: str = ""


class Governed:
    """Makes exact optimizer steps of any torch model and optimizer, in a single process."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        cost: Callable[[Any], int] = lambda item: 1,  # noqa: ARG005
        budget: int | None = None,
        too_large: Literal["error", "skip"] = "error",
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        backward: Callable[[Tensor], Any] = torch.autograd.backward,
    ) -> None:
        """Wrap a model and its optimizer.

        `cost` says what an item costs, in any unit that adds up, and `budget` what may run at once, if that is known.
        `too_large` is what becomes of an item that does not fit alone, `clip` the norm of all gradients at most;
        `backward` stands in for that of torch. `events` keeps what happened; set `heard` to be called with each event.
        """
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            problem = (
                "DistributedDataParallel adds up gradients in every backward: an OOM on one rank would hang the rest"
            )
            raise ConfigError(problem, remedy="hand over its module, or train with pipeline submit --stage train")
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.device = str(next(model.parameters()).device)
        self.governor = Governor(budget=UNPLANNED if budget is None else budget, backoff=BACKOFF)
        self.events: list[GovernedEvent] = []
        self.heard: Callable[[GovernedEvent], None] | None = None
        self.steps = 0
        self._cost, self._too_large, self._clip, self._backward = cost, too_large, clip, backward
        self._meter = None if self.device == CPU else CardMeter(self.device)
        self._snapshot: StepSnapshot | None = None
        self._mean = WeightedMean()

    def step(self, items: Sequence[Any], loss_of: LossOf) -> Tensor:
        """Make an optimizer step of all items, in as many parts as fit; return the loss."""
        costs = [self._cost(item) for item in items]
        self._release()
        snapshot = self._snapshot = StepSnapshot(
            self.model, device=self.device, scaler=self.scaler, before=self._snapshot
        )

        def cost_of(part: range) -> int:
            return sum(costs[part.start : part.stop])

        def run(part: range) -> None:
            self._accumulate(items[part.start : part.stop], loss_of)
            self.governor.ran(cost_of(part))

        def again() -> None:
            self._release()
            snapshot.rewind()

        def note(part: range, oom: Oom) -> None:
            self.governor.out_of_memory(cost_of(part))
            self._tell("out of memory", cost_of(part), f"items {part.start} to {part.stop - 1}: {oom.error}")

        def halve(part: range) -> list[range]:
            return [part[piece] for piece in halved(costs[part.start : part.stop])]

        def cannot(part: range, oom: Oom) -> Callable[[range], Sequence[range]]:
            return self._alone(part.start, cost_of(part), oom)

        parts = [range(len(items))[piece] for piece in self.governor.admit(costs)]
        replay_until_it_fits(parts, run, again=again, halve=halve, cannot=cannot, note=note, cost=cost_of)
        loss = self._update()
        self._end()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "learned": self.governor.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.governor.load(state["learned"])
        self.steps = int(state["steps"])

    def _accumulate(self, items: Sequence[Any], loss_of: LossOf) -> None:
        total, weight = _checked(loss_of(list(items)))
        loss = self._mean.loss(total, weight)
        self._backward(loss if self.scaler is None else self.scaler.scale(loss))
        self._mean.add(total, weight)

    def _update(self) -> Tensor:
        """Scale the gradients by the weight of the whole step, and run the optimizer."""
        if self._mean.is_empty:  # every item was skipped
            return torch.zeros((), device=self.device)
        values: list[Tensor] = []
        error = out_of_memory_error(self._make_step, values)
        if error is not None:
            raise JobFailed(
                f"memory ended within the optimizer, whose parameters may be half updated now: {error}",
                where=f"step {self.steps}",
                remedy="load the last checkpoint, and train with fewer parameters, another optimizer, or a larger card",
            )
        return values[0]

    def _make_step(self, values: list[Tensor]) -> None:
        values.append(self._mean.settle(self._parameters()))
        if self._clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self._parameters(), self._clip)
        if self.scaler is None:
            self.optimizer.step()
            return
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _end(self) -> None:
        """Drop the gradients, and let the governor set the next budget."""
        self._release()
        want = self.governor.after_step(None if self._meter is None else self._meter.read())
        if want.empty_cache:
            free_caches(self.device)
        if self._meter is not None:
            self._meter.reset_peak()
        if self.governor.adopt(want.budget):
            self._tell("budget", self.governor.budget, want.why)
        self.steps += 1

    def _alone(self, place: int, cost: int, oom: Oom) -> Callable[[range], Sequence[range]]:
        """Skip an item that does not fit alone, or raise."""
        if self._too_large == "error":
            raise PlanInfeasible(
                f"item {place} of the step does not fit alone: {oom.error}",
                where=f"step {self.steps}",
                remedy="crop it, compute its activations again (torch.utils.checkpoint), or set too_large='skip'",
            )
        self._tell("skipped", cost, f"item {place} does not fit alone")
        return lambda part: []  # noqa: ARG005

    def _release(self) -> None:
        """Drop the gradients, and begin a new mean."""
        self._mean = WeightedMean()
        for parameter in self._parameters():
            parameter.grad = None

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _tell(self, what: Literal["out of memory", "skipped", "budget"], cost: int, detail: str) -> None:
        event = GovernedEvent(self.steps, what, cost, detail)
        self.events.append(event)
        if self.heard is not None:
            self.heard(event)


def _checked(returned: Any) -> tuple[Tensor, Tensor | float]:
    """Return the sum and weight that `loss_of` returned; raise if it returned anything else."""
    if isinstance(returned, tuple | list) and len(returned) == 2:
        total, weight = returned
        if isinstance(total, torch.Tensor) and total.numel() == 1 and isinstance(weight, torch.Tensor | float | int):
            return total, weight
    problem = f"loss_of() must return (sum, weight): a tensor with one number, and a number; got {_shape(returned)}"
    raise ConfigError(problem, remedy="return losses.sum(), len(losses)")


def _shape(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_shape, value))})"
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
