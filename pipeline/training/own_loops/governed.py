"""A loop of your own, without out-of-memory errors: a step splits what does not fit, and has the same gradients.

    from pipeline.api import Governed

    governed = Governed(model, optimizer)
    for items in loader:  # a list of items: the effective batch
        loss = governed.step(items, loss_of)

`loss_of(items)` runs the model on some of the items and returns the loss's sum over them and its weight: how many
items, or residues, it is of. It moves them to the device itself. Splitting changes what a model computes over a batch
as a whole: batch normalisation, and losses that compare the items of a batch.

Over several processes (`foreign_ranks`) each hands over its own items, or none, and all make the same steps. A step is
that of the items of all ranks: its loss is the sum over all of them by their weight, which is what
DistributedDataParallel has where all ranks have the same weight. Gradients are summed once, after the last backward.
Where memory ends on a rank, all run the step again, that rank in smaller parts; at the end of a step all adopt the
least budget. All begin with the parameters of the first rank. Where a rank cannot continue, all ranks raise its reason.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

import torch

from pipeline.device.kinds import CPU
from pipeline.device.out_of_memory import free_caches, out_of_memory_error
from pipeline.errors import ConfigError, JobFailed, PlanInfeasible
from pipeline.memory.runtime.governor import UNPLANNED, Governor
from pipeline.memory.runtime.meters import CardMeter
from pipeline.memory.runtime.recovery import StepSnapshot, until_it_fits
from pipeline.training.own_loops.foreign_ranks import READ, begin_alike, keep_quiet, ranks_of, wrappers_of
from pipeline.training.ranks import RankLost
from pipeline.training.ranks.gradient_sums import GradientSums
from pipeline.training.step.optimizers import WeightedMean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from pipeline.training.ranks import Ranks, Said

    LossOf: TypeAlias = Callable[[list[Any]], tuple[Tensor, Tensor | float]]

RESTART = "load the last checkpoint, and train with fewer parameters, another optimizer or a larger GPU"
BACKOFF = 0.75  # without a plan, all that is known is that half of the piece did fit


@dataclass(frozen=True, slots=True)
class GovernedEvent:
    """An out-of-memory, a skipped item or a new budget."""

    step: int
    what: Literal["out of memory", "skipped", "budget"]
    cost: int  # of what did not fit, or the new budget
    detail: str = ""


class Governed:
    """Makes exact optimizer steps of any torch model and optimizer, in one process or together with other ranks."""

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
        `backward` stands in for that of torch. `events` keeps what happened; `on_event` is called with each.
        """
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.device = str(next(model.parameters()).device)
        self._wrappers = wrappers_of(model)
        self.ranks: Ranks = ranks_of(self.device)
        self._sums: GradientSums | None = None
        if self.ranks.world > 1:
            begin_alike(model, self.ranks)
        self.governor = Governor(budget=UNPLANNED if budget is None else budget, backoff=BACKOFF)
        self.events: list[GovernedEvent] = []
        self.on_event: Callable[[GovernedEvent], None] | None = None
        self.steps = 0
        self._cost, self._too_large, self._clip, self._backward = cost, too_large, clip, backward
        self._meter = None if self.device == CPU else CardMeter(self.device)
        self._snapshot: StepSnapshot | None = None
        self._left_out: set[int] = set()  # items of the step that do not fit alone
        self._mean = WeightedMean()

    def step(self, items: Sequence[Any], loss_of: LossOf) -> Tensor:
        """Make an optimizer step of all items, in as many parts as fit; return the loss, of all ranks."""
        self.ranks.progress(f"step {self.steps}")
        keep_quiet(self._wrappers)
        self._release()
        self._left_out.clear()
        self._snapshot = StepSnapshot(self.model, device=self.device, scaler=self.scaler, before=self._snapshot)
        shares = until_it_fits(
            lambda: self._exchange(lambda: self._attempt(items, loss_of)),
            fits=lambda shares: not any(share["again"] for share in shares),
            rewind=self._go_back,
        )
        loss: list[Tensor] = []
        self._adopt_least(self._exchange(lambda: self._update(shares, loss)))
        self.steps += 1
        return loss[0]

    def _attempt(self, items: Sequence[Any], loss_of: LossOf) -> Said:
        """Run this rank's items forward and backward, up to the first that do not fit; return its share of the step."""
        fits = self._run(items, loss_of)
        return {**(self._share() if fits else {}), "again": not fits}

    def _run(self, items: Sequence[Any], loss_of: LossOf) -> bool:
        places = [place for place in range(len(items)) if place not in self._left_out]
        costs = [self._cost(items[place]) for place in places]
        cuts = self.governor.cuts(costs)
        for cut in cuts:
            part = places[cut.start : cut.stop]
            error = out_of_memory_error(self._accumulate, [items[place] for place in part], loss_of)
            if error is not None:
                self._learn(part, costs[cut.start : cut.stop], error)
                return False
        for cut in cuts:
            self.governor.ran(sum(costs[cut.start : cut.stop]))
        return True

    def _learn(self, places: Sequence[int], costs: Sequence[int], error: str) -> None:
        """Run items that did not fit in smaller parts from now on; skip a single one, or raise."""
        self._report("out of memory", sum(costs), f"items {places[0]} to {places[-1]}: {error}")
        if self.governor.failed(costs):
            return
        if self._too_large == "error":
            raise PlanInfeasible(
                f"item {places[0]} of the step does not fit alone: {error}",
                where=f"step {self.steps}",
                remedy="crop it, compute its activations again (torch.utils.checkpoint), or set too_large='skip'",
            )
        self._report("skipped", costs[0], f"item {places[0]} does not fit alone")
        self._left_out.add(places[0])

    def _go_back(self) -> None:
        """Return to the start of the step."""
        assert self._snapshot is not None
        self._release()
        self._snapshot.rewind()

    # Ranks

    def _exchange(self, work: Callable[[], Said]) -> list[Said]:
        """Do this rank's own work and exchange what it returns; where it fails on one rank, all raise."""
        try:
            message = work()
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            with suppress(RankLost):  # they are gone already
                self.ranks.exchange({"failed": reason})
            raise
        if self.ranks.world == 1:  # without synchronising with a GPU
            return [message]
        replies = self.ranks.exchange(message)
        for rank, reply in enumerate(replies):
            if "failed" in reply:
                problem = f"rank {rank} of {self.ranks.world} cannot continue: {reply['failed']}"
                raise RankLost(problem, where=f"step {self.steps}", remedy=READ)
        return replies

    def _share(self) -> Said:
        """Return the weight of this rank's items, once there is memory for adding up their gradients."""
        if self.ranks.world == 1:
            return {}
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
        absent = [number for number, parameter in enumerate(trained) if parameter.grad is None]
        if self._sums is None or [*map(id, self._sums.parameters)] != [*map(id, trained)]:
            self._sums = GradientSums(cast("list[nn.Parameter]", trained), self.ranks, self.device)
        has_run = not self._mean.is_empty
        terms = {"total": float(self._mean.total), "weight": float(self._mean.weight)}
        return {**terms, "has_run": has_run, "absent": absent, "room": self._sums.reserve()}

    def _add_up(self, shares: Sequence[Said]) -> Tensor:
        """Make the gradients those of the items of all ranks; return the mean loss."""
        if self._sums is None:
            return self._mean.settle(self._parameters())
        total, weight = (math.fsum(share[name] for share in shares) for name in ("total", "weight"))
        self._mean.settle(self._sums.parameters, weight)
        self._sums.add_up(min(share["room"] for share in shares))
        for number in set.intersection(*(set(share["absent"]) for share in shares)):
            self._sums.parameters[number].grad = None  # on no rank was there any
        return torch.tensor(total / weight if weight else 0.0, device=self.device)

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

    def _update(self, shares: Sequence[Said], loss: list[Tensor]) -> Said:
        """Run the optimizer and drop the gradients; return the budget that this rank's governor wants."""
        has_run = not self._mean.is_empty if self._sums is None else any(share["has_run"] for share in shares)
        if has_run:
            error = out_of_memory_error(self._make_step, shares, loss)
            if error is not None:
                problem = f"out of memory in optimizer.step(); parameters may be half updated: {error}"
                raise JobFailed(problem, where=f"step {self.steps}", remedy=RESTART)
        else:  # every item was skipped
            loss.append(torch.zeros((), device=self.device))
        self._release()
        want = self.governor.after_step(None if self._meter is None else self._meter.read())
        if want.empty_cache:
            free_caches(self.device)
        if self._meter is not None:
            self._meter.reset_peak()
        return {"budget": want.budget, "why": want.why}

    def _make_step(self, shares: Sequence[Said], loss: list[Tensor]) -> None:
        loss.append(self._add_up(shares))
        if self._clip is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self._parameters(), self._clip)
        if self.scaler is None:
            self.optimizer.step()
            return
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _adopt_least(self, wants: Sequence[Said]) -> None:
        """Adopt the least budget of all ranks."""
        least = min(range(len(wants)), key=lambda rank: wants[rank]["budget"])
        if self.governor.adopt(wants[least]["budget"]):
            of = "" if least == self.ranks.rank else f"rank {least}: "
            self._report("budget", self.governor.budget, of + wants[least]["why"])

    def _release(self) -> None:
        """Drop the gradients, and begin a new mean."""
        self._mean = WeightedMean()
        for parameter in self._parameters():
            parameter.grad = None

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _report(self, what: Literal["out of memory", "skipped", "budget"], cost: int, detail: str) -> None:
        event = GovernedEvent(self.steps, what, cost, detail)
        self.events.append(event)
        if self.on_event is not None:
            self.on_event(event)


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
