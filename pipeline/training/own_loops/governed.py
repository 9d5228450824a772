"""Your own training loop without out-of-memory errors: a step splits items that do not fit; gradients stay the same.

    from pipeline.api import Governed

    governed = Governed(model, optimizer)
    for items in loader:  # a list of items: the effective batch
        loss = governed.step(items, loss_of)

`loss_of(items)` runs the model on some of the items and returns the loss's sum over them and its weight: how many
items, or residues, it is of. It moves them to the device itself. Splitting changes what a model computes over a batch
as a whole: batch normalisation, and losses that compare the items of a batch.

With several processes (torchrun, srun, Lightning or Accelerate), each rank passes its own items, or none, and all ranks
make the same number of steps. The loss is the sum over all ranks' items divided by their weight;
DistributedDataParallel computes the same where all ranks have the same weight. All ranks start from the parameters of
rank 0. A DDP wrapper's own all-reduce is switched off, because a rank may run out of memory in any backward. If a rank
cannot continue, all ranks raise its reason.

The step is the one of `step.exact_step`, with one loss term and no remedies for a single item.
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pipeline.device.accelerator import collectives, is_card
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError, JobFailed, PlanInfeasible
from pipeline.memory.runtime.meters import CardMeter, Maintenance, MaintenanceSettings
from pipeline.memory.runtime.recovery import UNPLANNED, Governor
from pipeline.records import RankPlace
from pipeline.training.items.batch import TaskBatch
from pipeline.training.ranks import RankLost, Ranks
from pipeline.training.ranks.process_group import end_after_gloo, exchange_json, join_process_group, reduce_in_pieces
from pipeline.training.ranks.rank_monitor import HangLimits
from pipeline.training.sampling import BatchOrigin
from pipeline.training.step.exact_step import ExactStep, RankShare
from pipeline.training.step.optimizers import StepSettings, shown
from pipeline.training.step.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from pipeline.training.ranks import Message
    from pipeline.training.step.exact_step import Piece

    LossOf: TypeAlias = Callable[[list[Any]], tuple[Tensor, Tensor | float]]

WHERE = "Governed"
RESTART = "load the last checkpoint, and train with fewer parameters, another optimizer or a larger GPU"
READ = "read the output of all ranks: the first failure has the reason"
PLAIN = (
    "pass the plain model on every rank, without FullyShardedDataParallel(…) or fully_shard(…)"
    "   or train it by pipeline submit train --set train.sharding=true"
)
SHARED_OUT = {"FullyShardedDataParallel", "FSDPModule"}  # by name: to import them takes long
BACKOFF = 0.75  # without a plan, all that is known is that half of the piece fitted
DAY_S = 86_400.0  # a user's loop may take long between two steps: a rank counts as lost only when its process dies
LOSS = "loss"


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

        `cost` returns an item's cost in any additive unit; `budget` is the cost that may run at once, if known.
        `too_large` decides about an item that does not fit alone. `clip` limits the gradient norm; `backward` replaces
        torch's. `events` lists what happened; `on_event` is called with each event.
        """
        self._wrappers = ddp_wrappers(model)
        self._step = step = _OwnStep(model, optimizer, clip)
        step.backward = backward
        step.scaler = step.scaler if scaler is None else scaler
        self.ranks: Ranks = ranks_of(step.device)
        if self.ranks.world > 1:
            broadcast_parameters(model, self.ranks)
        meter = None if step.device == CPU else CardMeter(step.device)
        upkeep = Maintenance(MaintenanceSettings(), step.device)
        self._exact = _OwnExactStep(
            step, self.ranks, (), upkeep, too_large=too_large, meter=meter, failed=self._out_of_memory
        )
        self.governor = Governor(planned=UNPLANNED if budget is None else budget, backoff=BACKOFF)
        self._exact.governor = self.governor
        self.events: list[GovernedEvent] = []
        self.on_event: Callable[[GovernedEvent], None] | None = None
        self.steps = 0
        self._cost = cost

    def step(self, items: Sequence[Any], loss_of: LossOf) -> Tensor:
        """Make an optimizer step of all items, in as many parts as fit; return the loss, of all ranks."""
        self.ranks.progress(f"step {self.steps}")
        for wrapper in self._wrappers:
            wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False
            wrapper.static_graph = False  # else the first backward would exchange gradients despite these two
        try:
            loss = self._made(items, loss_of)
        except Exception as error:
            if not isinstance(error, RankLost) and self.ranks.world > 1:
                reason = str(error).partition("\n")[0] or type(error).__name__
                with suppress(RankLost):  # the other ranks are gone already
                    self.ranks.exchange({"failed": reason})
            raise
        self.steps += 1
        return loss

    def _made(self, items: Sequence[Any], loss_of: LossOf) -> Tensor:
        exact, step = self._exact, self._step
        step.begin(loss_of)
        exact.cost_N = [self._cost(item) for item in items]
        batch = self._batch(items, range(len(items)))
        share = RankShare(iter([batch]), lambda _numbers, _origin: batch)
        exact.start()
        report = exact.accumulate(share)
        for name in share.skipped:
            self._report("skipped", exact.cost_N[batch.ids.index(name)], f"{name} does not fit alone")
        if report.totals:
            exact.combine(report)
            exact.update(step.apply)
        if exact.lost:
            raise JobFailed(f"{exact.lost}; parameters may be half updated", where=WHERE, remedy=RESTART)
        exact.between_steps()
        if exact.meter is not None:
            exact.meter.reset_peak()
        least = report.least
        if self.governor.adopt(least.budget):
            rank = report.ranks.index(least)
            self._report(
                "budget", self.governor.budget, f"{'' if rank == self.ranks.rank else f'rank {rank}: '}{least.why}"
            )
        total, weight = report.totals.get(LOSS, (0.0, 0.0))
        dtype = torch.promote_types(torch.float32, next(step.model.parameters()).dtype)
        return torch.tensor(total / weight if weight else 0.0, dtype=dtype, device=step.device)

    def _batch(self, items: Sequence[Any], numbers: Sequence[int]) -> TaskBatch:
        """Return some items of a step as a batch, of which parts can be taken."""
        return TaskBatch(
            tuple(numbers),
            tuple(f"item {number}" for number in numbers),
            BatchOrigin(0, self.steps, 0, 1),
            [items[number] for number in numbers],
            read_again=lambda some, _: self._batch(items, some),
        )

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "learned": self.governor.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.governor.load(state["learned"])
        self.steps = int(state["steps"])

    def _out_of_memory(self, piece: Piece, error: str) -> None:
        first, last = piece.numbers[0], piece.numbers[-1]
        self._report("out of memory", self._exact.cost(piece), f"items {first} to {last}: {error}")

    def _report(self, what: Literal["out of memory", "skipped", "budget"], cost: int, detail: str) -> None:
        event = GovernedEvent(self.steps, what, cost, detail)
        self.events.append(event)
        if self.on_event is not None:
            self.on_event(event)


class _OwnStep(Step):
    """A step of a model, an optimizer and a loss of one term that are the loop's own."""

    loss_of: LossOf

    def __init__(self, model: nn.Module, optimizer: Optimizer, clip: float | None) -> None:
        none: Any = None  # there is no task
        super().__init__(none, StepSettings(clip=clip), device=str(next(model.parameters()).device), model=model)
        self.optimizer = optimizer
        self.learn_terms(1)

    def begin(self, loss_of: LossOf) -> None:
        """Drop the last step's gradients, and begin a step with a loss."""
        self.release()
        self.loss_of = loss_of
        parameters = (parameter for group in self.optimizer.param_groups for parameter in group["params"])
        self.trained = [parameter for parameter in parameters if parameter.requires_grad]

    def moved(self, batch: list[Any]) -> list[Any]:
        return batch  # `loss_of` does it

    def _terms(self, _: nn.Module, batch: list[Any]) -> dict[str, Any]:
        term = self.loss_of(batch)
        if not isinstance(term, tuple | list) or len(term) != 2:
            problem = f"loss_of() must return (sum, weight): a tensor with one number, and a number; got {shown(term)}"
            raise ConfigError(problem, where=WHERE, remedy="return losses.sum(), len(losses)")
        return {LOSS: term}


class _OwnExactStep(ExactStep):
    """Makes a loop's steps together with ranks that no monitor watches."""

    def _remedies(self) -> tuple[str, ...]:
        return ()

    def _refusal(self, piece: Piece, error: str) -> PlanInfeasible:
        remedy = "crop it, compute its activations again (torch.utils.checkpoint), or set too_large='skip'"
        return PlanInfeasible(f"{piece.ids[0]} of the step does not fit alone: {error}", where=WHERE, remedy=remedy)

    def _exchange(self, message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        replies = super()._exchange(message)
        for rank, reply in enumerate(replies):
            if "failed" in reply:
                problem = f"rank {rank} of {self.ranks.world} cannot continue: {reply['failed']}"
                raise RankLost(problem, where=WHERE, remedy=READ)
        return replies


# The ranks


class ForeignRanks(Ranks):
    """`Ranks` over a process group that the user's program started, and will end."""

    def __init__(self, device: str) -> None:
        """Use torch's process group; where it has no gloo, all ranks start a gloo group for messages."""
        end_after_gloo()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        has_gloo = f"{CPU}:{dist.Backend.GLOO}" in dist.get_backend_config()
        self._gloo = dist.group.WORLD if has_gloo else dist.new_group(backend=dist.Backend.GLOO)
        self._group = dist.group.WORLD if is_card(device) else self._gloo

    def exchange(self, message: Message) -> list[Message]:
        gather = partial(dist.all_gather, group=self._gloo)
        return exchange_json(message, self.world, lambda all_B, own_B: _unless_lost(partial(gather, all_B, own_B)))

    def add_up(self, tensors: Sequence[Tensor], buffer: Tensor | None = None) -> None:
        reduce_in_pieces(tensors, lambda flat: _unless_lost(partial(dist.all_reduce, flat, group=self._group)), buffer)


def _unless_lost(call: Callable[[], Any]) -> Any:
    """Make a collective call; raise RankLost where another rank is gone."""
    try:
        return call()
    except RuntimeError as error:  # torch has no type for it
        problem = f"another rank ended or never started: {str(error).partition(chr(10))[0]}"
        raise RankLost(problem, where=WHERE, remedy=READ) from error


def ranks_of(device: str) -> Ranks:
    """Return the ranks of this process: those of torch's process group, or those that torchrun or srun started."""
    if not dist.is_available():
        return Ranks()
    if dist.is_initialized():
        return ForeignRanks(device) if dist.get_world_size() > 1 else Ranks()
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        dist.init_process_group(collectives(device), device_id=torch.device(device) if is_card(device) else None)
        atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
        return ForeignRanks(device)
    place = RankPlace.by_slurm(os.environ)
    if place is None:
        return Ranks()
    group = join_process_group(place, Path.cwd(), device=device, limits=HangLimits(hang_s=DAY_S, slow_s=DAY_S))
    atexit.register(group.close)
    return group


def ddp_wrappers(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the DDP wrappers in a model; refuse FSDP."""
    for module in model.modules():
        kind = SHARED_OUT & {of.__name__ for of in type(module).__mro__}
        if kind:
            problem = f"{kind.pop()} gathers parameters within every pass: an OOM on one rank would hang the rest"
            raise ConfigError(problem, where=WHERE, remedy=PLAIN)
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def broadcast_parameters(model: nn.Module, ranks: Ranks) -> None:
    """Copy the parameters and buffers of the first rank to all others, bit for bit."""
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules()):
        problem = "SyncBatchNorm exchanges statistics within every pass: an OOM on one rank would hang the rest"
        raise ConfigError(problem, where=WHERE, remedy="leave out convert_sync_batchnorm(…), or use GroupNorm")
    tensors = [*model.parameters(), *model.buffers()]
    shapes = [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors]
    for rank, reply in enumerate(ranks.exchange({"shapes": shapes})):
        if reply["shapes"] != shapes:
            problem = f"the model has different parameters on rank {rank} than on rank {ranks.rank}"
            raise ConfigError(problem, where=WHERE, remedy="build the same model on every rank")
    for tensor in tensors:
        whole = tensor.detach().contiguous()
        dist.broadcast(whole, 0)
        tensor.detach().copy_(whole)
