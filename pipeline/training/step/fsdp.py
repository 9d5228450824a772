"""A model too large for a single device: parameters, gradients and optimizer state sharded over the ranks (FSDP2).

A block's parameters are gathered before it computes, and its gradients are reduced after it, by all ranks together,
within every forward and backward. So all must make the same number of passes (`collectives.joint_turns`): a rank that
has no micro-batch left runs the cheapest item of the step along with the others, with its loss times zero.

In half precision parameters are gathered and computed with in it, and gradients are added up in full precision. Nothing
else is cast between blocks: autocast chooses the precision of each operation, as in a model of one device.
"""

from __future__ import annotations

import math
import socket
from collections import Counter
from contextlib import nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import _disable_current_modes

from pipeline.device.batch_transfer import map_tensors
from pipeline.device.kinds import CPU
from pipeline.device.out_of_memory import free_caches
from pipeline.errors import ConfigError
from pipeline.protocol import Weights
from pipeline.training.step.checkpointing import repeated
from pipeline.training.step.collectives import NOT_SHARDED, WHERE, Gather, Passes, ReduceScatter, joint_turns
from pipeline.training.step.exact_step import ExactStep
from pipeline.training.step.micro_batches import HOST, RUNGS
from pipeline.training.step.optimizers import freeze_parameters
from pipeline.training.step.step import DTYPES, Step, checked_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from pipeline.protocol import Batch, Task
    from pipeline.training.items.batch import TaskBatch
    from pipeline.training.ranks import Ranks
    from pipeline.training.step.collectives import PassOutcome
    from pipeline.training.step.micro_batches import Piece, RankShare
    from pipeline.training.step.optimizers import StepSettings
    from pipeline.training.step.step import StepWatch

Result = TypeVar("Result")
TINY = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, or all of it where it is not sharded."""
    return cast("Tensor", getattr(tensor, "_local_tensor", tensor))


# Sharding a model


def built(
    make: Callable[[], nn.Module], ranks: Ranks, device: str, precision: str = "fp32"
) -> tuple[nn.Module, SpreadModel]:
    """Build a model in the host's memory and shard it, one rank of a host after the other.

    So each starts from the weights that a single process would draw, and a host holds one whole model at most.
    """
    hosts = [str(reply["host"]) for reply in ranks.exchange({"host": socket.gethostname()})]
    turns = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    mesh = mesh_of(ranks, device)
    result: tuple[nn.Module, SpreadModel] | None = None
    for turn in range(max(turns) + 1):
        if turns[ranks.rank] == turn:
            model = make()
            result = model, shard(model, ranks, device, mesh=mesh, precision=precision)
        ranks.exchange({})
    assert result is not None
    return result


def mesh_of(ranks: Ranks, device: str) -> DeviceMesh:
    """Return a one-dimensional device mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    with _disable_current_modes():  # it reads the ranks' numbers, which a trace would make fake
        return init_device_mesh(torch.device(device).type, (ranks.world,))


def shard(
    model: nn.Module, ranks: Ranks, device: str, *, mesh: DeviceMesh | None = None, precision: str = "fp32"
) -> SpreadModel:
    """Shard a model over all ranks: each repeated block by itself, and everything else together."""
    _refuse_unspreadable(model)
    mesh = mesh_of(ranks, device) if mesh is None else mesh
    policy = _policy(model, precision)
    if policy.param_dtype is not None:
        _keep_precise(model)
    parts: list[nn.Module] = [*_separable(model), model]
    for part in parts:
        part.register_forward_hook(_own_memory)
        # Kept unsharded after forward, the outermost would miss what is written into its shards between two passes.
        fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    model.to(device)
    return SpreadModel(model, cast("list[FSDPModule]", parts), ranks)


def _policy(model: nn.Module, precision: str) -> MixedPrecisionPolicy:
    """Return how parameters are gathered; those of a model that is not in single precision stay as they are."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if precision not in DTYPES or kinds != {torch.float32}:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(DTYPES[precision], torch.float32, cast_forward_inputs=False)


_CAST_BY_AUTOCAST = (nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)
_LOOKED_UP = (nn.Embedding, nn.EmbeddingBag)


def _keep_precise(model: nn.Module) -> None:
    """Let what autocast computes in single precision be so with gathered parameters, too: norms, vectors, lookups."""
    for module in model.modules():
        if isinstance(module, _LOOKED_UP):
            module.register_forward_hook(lambda _module, _arguments, rows: rows.float())
        elif module._parameters and not isinstance(module, _CAST_BY_AUTOCAST):  # noqa: SLF001 - without its children's
            module.forward = _with_precise_vectors(module)


def _with_precise_vectors(module: nn.Module) -> Callable[..., Any]:
    """Return a module's forward with its own vectors (all parameters, of a norm) in single precision meanwhile."""
    forward, own = module.forward, cast("dict[str, Any]", module._parameters)  # noqa: SLF001
    is_norm = isinstance(module, nn.LayerNorm)

    @wraps(forward)
    def run(*arguments: Any, **named: Any) -> Any:
        halves = {
            name: parameter
            for name, parameter in own.items()
            if parameter is not None and parameter.dtype in DTYPES.values() and (is_norm or parameter.dim() < 2)
        }
        own.update((name, parameter.float()) for name, parameter in halves.items())
        try:
            return forward(*arguments, **named)
        finally:
            own.update(halves)

    return run


def _own_memory(_: nn.Module, __: Any, output: Any) -> Any:
    """Copy the views that a module returns: written to in place, they would hide its backward from FSDP."""

    def own(tensor: Tensor) -> Tensor:
        return tensor.clone() if tensor.requires_grad and tensor._is_view() else tensor  # noqa: SLF001 - no public way

    return map_tensors(own, output)


def _separable(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks that share no parameter with anything else."""
    blocks = list(repeated(model).values())
    users = Counter(id(parameter) for block in blocks for parameter in block.parameters())
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            users.update(map(id, module.parameters(recurse=False)))
    return [block for block in blocks if all(users[id(parameter)] == 1 for parameter in block.parameters())]


def _refuse_unspreadable(model: nn.Module) -> None:
    """Raise where a parameter cannot be sharded, or not together with the others."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            problem = f"the parameter {name} is a scalar, which cannot be sharded"
            raise ConfigError(problem, where=WHERE, remedy=f"give it the shape (1,)   or {NOT_SHARDED}")
    kinds = {parameter.dtype: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if len(kinds) > 1:
        shown = " and ".join(f"{str(kind).removeprefix('torch.')} ({name})" for kind, name in kinds.items())
        problem = f"the trained parameters have several dtypes: {shown}"
        raise ConfigError(problem, where=WHERE, remedy=f"use one dtype   or {NOT_SHARDED}")


class SpreadModel:
    """A model that is sharded over ranks."""

    def __init__(self, model: nn.Module, parts: list[FSDPModule], ranks: Ranks) -> None:
        self.model, self.ranks, self._parts = model, ranks, parts
        self.passes = Passes(ranks)
        self._used: set[int] = set()
        self._known: set[int] = set()
        for part in parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo supports nothing else
            part.set_custom_all_gather(cast("Any", Gather(self.passes, ranks)))
            part.set_custom_reduce_scatter(cast("Any", ReduceScatter(self.passes, ranks)))
            cast("nn.Module", part).register_forward_pre_hook(self._listen)
        # Ranks may use different parameters, where a term has no items on one of them.
        parts[-1].set_reduce_scatter_unused_params(True)

    def reset(self) -> None:
        """Return to shards after a pass that was given up: no block is gathered, and no gradient is kept of it."""
        states = [cast("Any", part)._get_fsdp_state() for part in self._parts]  # noqa: SLF001 - no public way
        if states[-1]._is_root is None:  # noqa: SLF001 - no pass has reached the model yet
            return
        self._parts[-1].reset_iter_state()
        for state in states:
            for group in state._fsdp_param_groups:  # noqa: SLF001
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None  # noqa: SLF001

    def begin_step(self) -> None:
        """Forget which parameters had gradients."""
        self._used.clear()

    def drop_unused(self, trained: Sequence[nn.Parameter]) -> None:
        """Drop the gradients of parameters that no rank used: with zeros an optimizer would still move them."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.model.parameters())}
        replies = self.ranks.exchange({"used": sorted(self._used)})
        used = {number for reply in replies for number in reply["used"]}
        for parameter in trained:
            if numbers[id(parameter)] not in used:
                parameter.grad = None

    def _listen(self, module: nn.Module, _: Any) -> None:
        """Register, once a block's parameters are first gathered, a hook on each that notes when it gets a gradient."""
        if not torch.is_grad_enabled() or id(module) in self._known:
            return
        self._known.add(id(module))
        numbers = {name: number for number, (name, _) in enumerate(self.model.named_parameters())}
        prefix = next(name for name, candidate in self.model.named_modules() if candidate is module)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not hasattr(parameter, "_local_tensor"):
                number = numbers[f"{prefix}.{name}" if prefix else name]
                cast("Any", parameter).register_post_accumulate_grad_hook(
                    lambda _, number=number: self._used.add(number)
                )


# One step


class ShardedStep(Step):
    """A step of a sharded model: after every backward gradients are sums over all ranks."""

    is_spread = True

    def __init__(
        self,
        task: Task,
        settings: StepSettings,
        ranks: Ranks,
        *,
        device: str = CPU,
        watch: StepWatch | None = None,
        scaled: bool | None = None,
        make: Callable[[], nn.Module] | None = None,
    ) -> None:
        """Build the model and shard it; `make` builds it in place of the task, say with other weights."""

        def frozen() -> nn.Module:
            model = checked_model((make or task.model)())
            freeze_parameters(model, settings.frozen)
            return model

        self.ranks = ranks
        model, self.spread = built(frozen, ranks, device, settings.precision)
        self.divisor = 1.0
        super().__init__(task, settings, device=device, model=model, watch=watch, scaled=scaled)

    def joint_pass(self, run: Callable[[], Result]) -> PassOutcome[Result]:
        """Make a pass together with all ranks; where it was given up, the model is as it was before."""
        outcome = self.spread.passes.run(run)
        if outcome.is_given_up:
            self.spread.reset()
            free_caches(self.device)
        return outcome

    def accompany(self, batch: Batch) -> None:
        """Run another rank's micro-batch with a loss of zero, so that all ranks make as many passes."""
        terms = self.terms_of(self.moved(batch))
        first, *others = (total * 0.0 for total, _ in terms.values())
        torch.autograd.backward(self.scaler.scale(sum(others, first)))

    def cast(self) -> AbstractContextManager[Any]:
        """Return a context in which the model runs in the precision of the settings, without copies of weights."""
        precision = DTYPES.get(self.settings.precision)
        device = torch.device(self.device).type
        return torch.autocast(device, precision, cache_enabled=False) if precision else nullcontext()

    def norm(self) -> Tensor:
        """Return the norm of all gradients over all ranks, which must all call it."""
        squared = super().norm().to(self.device, torch.float64).square().reshape(1)
        self.ranks.add_up([squared])
        return squared.sqrt()[0]

    def clip(self) -> Tensor:
        """Clip the gradients to the norm of the settings; return the norm that they had."""
        assert self.settings.clip is not None
        self.watch.phase("clip")
        norm = self.norm()
        if gradients := self.gradients:
            factor = (self.settings.clip / (norm + TINY)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        return norm

    def owned(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield this rank's shard of every tensor."""
        for kind, owner, tensor in super().owned():
            yield kind, owner, local(tensor)

    @property
    def gradients(self) -> list[Tensor]:
        return [local(gradient) for gradient in super().gradients]

    def _average(self) -> None:
        decay = self.settings.ema
        assert decay is not None
        with torch.no_grad():
            torch._foreach_lerp_(list(map(local, self.averages)), list(map(local, self.trained)), 1 - decay)

    def _swap(self) -> None:
        """Exchange contents, not tensors: FSDP gathers from its own memory."""
        for average, parameter in zip(self.averages, self.trained, strict=bool(self.averages)):
            average_shard, parameter_shard = local(average), local(parameter.detach())
            kept = average_shard.clone()
            average_shard.copy_(parameter_shard)
            parameter_shard.copy_(kept)


class ExactShardedStep(ExactStep):
    """Makes steps of a sharded model, pass by pass together with all ranks."""

    step: ShardedStep

    def _remedies(self) -> tuple[str, ...]:
        return RUNGS[: RUNGS.index(HOST)]  # no rank has all parameters, to run an item on its CPU

    def _run(self, share: RankShare, weights: Mapping[str, float] | None) -> bool:
        self.step.spread.begin_step()
        fits = super()._run(share, weights)
        if fits:
            self.step.spread.drop_unused(self.step.trained)
        return fits

    def _all_fit(self, pieces: Iterable[Piece], run: Callable[[Piece], object], share: RankShare) -> bool:
        """Run this rank's pieces, and others' items while they have more passes to make; return whether all fit."""
        if isinstance(self.step.task, Weights) and not share.is_last_pass:
            return super()._all_fit(pieces, run, share)  # weighed without the model
        for turn in joint_turns(pieces, self.ranks, self._fetch(share), self.cost):
            self.step.divisor = power_of_two(turn.items)
            piece = turn.piece if turn.counts else next(self._ready([turn.piece]))
            outcome = self.step.joint_pass(partial(run if turn.counts else partial(self._accompany, share), piece))
            if outcome.error:
                self._learn(piece, outcome.error, share, is_own=turn.counts)
            if outcome.is_given_up:
                return False
        return True

    def _accompany(self, share: RankShare, piece: Piece) -> None:
        """Run another rank's item along, in the pass that runs or in the one that weighs."""
        with self.step.remedied(piece.rung):
            (self.step.accompany if share.is_last_pass else self.step.aside)(piece.collated(self.step))

    def not_finite(self, share: RankShare) -> list[str]:
        """Return the ids of this rank's items whose own loss is not finite; all ranks must call it."""
        ids: list[str] = []
        singles = (single for piece in share for single in piece.singles())
        for turn in joint_turns(singles, self.ranks, self._fetch(share), self.cost):
            outcome = self.step.joint_pass(partial(self._values, turn.piece))
            if outcome.result is None:  # an item that does not fit counts as finite
                turn.instead = [turn.piece] if turn.counts and not outcome.error else []
            elif turn.counts and not all(map(math.isfinite, outcome.result)):
                ids += turn.piece.ids
        return ids

    def _values(self, piece: Piece) -> list[float]:
        return [float(total) for total, _ in self.step.evaluate(piece.collated(self.step)).values()]

    def _fetch(self, share: RankShare) -> Callable[[int], TaskBatch]:
        return lambda number: share.fetch((number,), share.origin)


def power_of_two(number: int) -> float:
    """Round up to a power of two: dividing by it changes no digit of a float."""
    return float(1 << max(0, number - 1).bit_length())
