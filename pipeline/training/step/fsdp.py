"""A model that fits no single device: parameters, gradients and optimizer state spread over the ranks (FSDP2).

A block's parameters come together before it computes, and its gradients are added up after it: both are done by all
ranks, within every forward and backward. So all must make the same number of passes: `sharded_stepping` sees to it.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils._pytree import tree_map_only

from pipeline.errors import ConfigError
from pipeline.training.step.checkpointing import repeated
from pipeline.training.step.optimizers import freeze_parameters
from pipeline.training.step.step import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from pipeline.protocol import Batch, Task
    from pipeline.training.ranks.rank_protocol import Ranks
    from pipeline.training.step.optimizers import StepSettings, Terms
    from pipeline.training.step.step import StepWatch

WHERE = "train.sharding"
TINY = 1e-6  # beside the norm, as in torch.nn.utils.clip_grad_norm_
NOT_SHARDED = "--set train.sharding=false"


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has: all of it, where it is not spread."""
    return cast("Tensor", getattr(tensor, "_local_tensor", tensor))


# Spreading a model


def built(make: Callable[[], nn.Module], ranks: Ranks, device: str) -> tuple[nn.Module, SpreadModel]:
    """Build a model in the host's memory and spread it, one rank of a host after the other.

    So each has what one process alone would draw, and a host never holds more than one whole model.
    """
    hosts = [str(one["host"]) for one in ranks.exchange({"host": socket.gethostname()})]
    turns = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    mesh = mesh_of(ranks, device)
    done: tuple[nn.Module, SpreadModel] | None = None
    for turn in range(max(turns) + 1):
        if turns[ranks.rank] == turn:
            model = make()
            done = model, shard(model, ranks, device, mesh=mesh)
        ranks.exchange({})
    assert done is not None
    return done


def mesh_of(ranks: Ranks, device: str) -> DeviceMesh:
    """Return all ranks as torch counts them."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(torch.device(device).type, (ranks.world,))


def shard(model: nn.Module, ranks: Ranks, device: str, *, mesh: DeviceMesh | None = None) -> SpreadModel:
    """Spread a model over all ranks: its repeated blocks each by itself, and what is left together."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        what = f"torch {torch.__version__} cannot spread models whose ranks use different parameters"
        raise ConfigError(what, where=WHERE, remedy=f"pip install -U torch   or {NOT_SHARDED}")
    _refuse_unspreadable(model)
    mesh = mesh_of(ranks, device) if mesh is None else mesh
    parts: list[nn.Module] = [*_separable(model), model]
    for part in parts:
        part.register_forward_hook(_own_memory)
        # Kept whole after forward, the outermost would miss what is written into its shards between two passes.
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    model.to(device)
    return SpreadModel(model, cast("list[FSDPModule]", parts), ranks)


def _own_memory(_: nn.Module, __: Any, output: Any) -> Any:
    """Return what a module returns, views copied: FSDP would miss its backward, were they written to in place."""

    def own(one: Tensor) -> Tensor:
        return one.clone() if one.requires_grad and one._is_view() else one  # noqa: SLF001 - torch has no other word

    return tree_map_only(torch.Tensor, own, output)


def _separable(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that share no parameter with anything else."""
    blocks = list(repeated(model).values())
    users: dict[int, int] = {}
    for block in blocks:
        for one in block.parameters():
            users[id(one)] = users.get(id(one), 0) + 1
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for one in module.parameters(recurse=False):
                users[id(one)] = users.get(id(one), 0) + 1
    return [block for block in blocks if all(users[id(one)] == 1 for one in block.parameters())]


def _refuse_unspreadable(model: nn.Module) -> None:
    """Raise where a parameter cannot be spread, or not with the others."""
    for name, one in model.named_parameters():
        if one.dim() == 0:
            what = f"the parameter {name} is a single number, which cannot be spread over ranks"
            raise ConfigError(what, where=WHERE, remedy=f"give it the shape (1,)   or {NOT_SHARDED}")
    kinds = {one.dtype: name for name, one in model.named_parameters() if one.requires_grad}
    if len(kinds) > 1:
        shown = " and ".join(f"{str(kind).removeprefix('torch.')} ({name})" for kind, name in kinds.items())
        what = f"the parameters that are trained are of several types: {shown}"
        raise ConfigError(what, where=WHERE, remedy=f"make them one type   or {NOT_SHARDED}")


class SpreadModel:
    """A model that is spread over ranks."""

    def __init__(self, model: nn.Module, parts: list[FSDPModule], ranks: Ranks) -> None:
        self.model, self.ranks, self._parts = model, ranks, parts
        self._used: set[int] = set()
        self._known: set[int] = set()
        for part in parts:
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows nothing else
            part.set_custom_all_gather(cast("Any", _Gather(ranks)))
            part.set_custom_reduce_scatter(cast("Any", _ReduceScatter(ranks)))
            cast("nn.Module", part).register_forward_pre_hook(self._listen)
        # Ranks may use different parameters, where a term has no items on one of them.
        parts[-1].set_reduce_scatter_unused_params(True)

    def reduces(self, *, now: bool) -> None:
        """Say whether the next backward adds gradients up over ranks, or keeps them whole until a later one does."""
        self._parts[-1].set_requires_gradient_sync(now)
        self._parts[-1].set_is_last_backward(now)

    def begin_step(self) -> None:
        """Forget which parameters had gradients."""
        self._used.clear()

    def drop_unused(self, trained: Sequence[nn.Parameter]) -> None:
        """Take the gradient from parameters for which no rank had any: zeros would let an optimizer move them."""
        names = {id(one): number for number, one in enumerate(self.model.parameters())}
        told = self.ranks.exchange({"used": sorted(self._used)})
        used = {number for one in told for number in one["used"]}
        for parameter in trained:
            if names[id(parameter)] not in used:
                parameter.grad = None

    def _listen(self, module: nn.Module, _: Any) -> None:
        """Note of each parameter when it gets a gradient; called when those of a block are whole."""
        if not torch.is_grad_enabled() or id(module) in self._known:
            return
        self._known.add(id(module))
        numbers = {name: number for number, (name, _) in enumerate(self.model.named_parameters())}
        prefix = next(name for name, one in self.model.named_modules() if one is module)
        for name, one in module.named_parameters():
            if one.requires_grad and not hasattr(one, "_local_tensor"):
                number = numbers[f"{prefix}.{name}" if prefix else name]
                cast("Any", one).register_post_accumulate_grad_hook(lambda _, number=number: self._used.add(number))


class _Comm:
    """What all ranks do together within a pass: whoever waits in it looks whether another is lost."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _together(self, begin: Callable[[], dist.Work], *, in_stream: bool) -> None:
        ranks = cast("Any", self._ranks)
        with ranks._waiting():  # noqa: SLF001
            ranks._await(begin, in_stream=in_stream)  # noqa: SLF001


class _Gather(_Comm):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - it is torch's
        gather = _named("all_gather_single", "all_gather_into_tensor")
        self._together(
            lambda: gather(output_tensor, input_tensor, group=group, async_op=True), in_stream=output_tensor.is_cuda
        )


class _ReduceScatter(_Comm):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002 - it is torch's
    ) -> None:
        if not output_tensor.is_cuda:  # gloo's own is made of the same, and cannot be waited for with an eye on others
            self._together(
                lambda: torch.distributed.all_reduce(input_tensor, op=op, group=group, async_op=True), in_stream=False
            )
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
            return
        reduce = _named("reduce_scatter_single", "reduce_scatter_tensor")
        self._together(lambda: reduce(output_tensor, input_tensor, op=op, group=group, async_op=True), in_stream=True)


def _named(*names: str) -> Callable[..., Any]:
    """Return what torch.distributed calls by the first of some names that it knows: later versions have new ones."""
    return cast("Callable[..., Any]", next(filter(None, (getattr(torch.distributed, name, None) for name in names))))


# One step


class ShardedStep(Step):
    """A step of a model that is spread over ranks: gradients are sums over all of them after every backward."""

    is_spread = True

    def __init__(
        self,
        task: Task,
        settings: StepSettings,
        ranks: Ranks,
        *,
        device: str = "cpu",
        watch: StepWatch | None = None,
        scaled: bool | None = None,
        begin: Callable[[nn.Module], None] = lambda _: None,
    ) -> None:
        """Build the model and spread it; `begin` gives it other weights before."""

        def make() -> nn.Module:
            model = task.model()
            begin(model)
            freeze_parameters(model, settings.frozen)
            return model

        self.ranks = ranks
        model, self.spread = built(make, ranks, device)
        self.agreed = 1.0  # what all ranks divide a single term by, until its weight is known
        super().__init__(task, settings, device=device, model=model, watch=watch, scaled=scaled)

    def accompany(self, batch: Batch) -> None:
        """Run a micro-batch of another rank, so that all ranks make as many passes: it adds nothing."""
        terms = self._forward(self.moved(batch))
        first, *others = (total * 0.0 for total, _ in terms.values())
        torch.autograd.backward(self.scaler.scale(sum(others, first)))

    def accumulate_on_host(self, batch: Batch, weights: Mapping[str, Any] | None = None) -> None:
        """Refuse: no rank has all parameters."""
        raise NotImplementedError("a model that is spread over ranks runs on none of them alone")

    def _loss(self, terms: Terms, weights: Mapping[str, Any] | None) -> Tensor:
        if weights is not None or len(terms) > 1:
            return super()._loss(terms, weights)
        ((total, _),) = terms.values()
        return total / self.agreed

    def settle(self, weight: Tensor | float) -> None:
        """Divide the gradients of a single term by its weight over all ranks."""
        self._guess = self.agreed
        super().settle(weight)

    def norm(self) -> Tensor:
        """Return the norm of all gradients, over all ranks; each calls it."""
        squared = super().norm().to(self.device, torch.float64).square().reshape(1)
        self.ranks.add_up([squared])
        return squared.sqrt()[0]

    def clip(self) -> Tensor:
        """Shorten the gradients to the norm that they may have at most; return the one that they had."""
        assert self.settings.clip is not None
        self.watch.phase("clip")
        norm = self.norm()
        if gradients := self.gradients:
            factor = (self.settings.clip / (norm + TINY)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
        return norm

    def owned(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield what of every tensor this rank has."""
        for what, whose, one in super().owned():
            yield what, whose, local(one)

    @property
    def gradients(self) -> list[Tensor]:
        return [local(gradient) for gradient in super().gradients]

    def _average(self) -> None:
        decay = self.settings.ema
        assert decay is not None
        with torch.no_grad():
            torch._foreach_lerp_([local(one) for one in self.averages], [local(one) for one in self.trained], 1 - decay)

    def _swap(self) -> None:
        """Exchange contents: what FSDP gathers from is memory of its own, which another tensor would not change."""
        for average, parameter in zip(self.averages, self.trained, strict=bool(self.averages)):
            one, other = local(average), local(parameter.detach())
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
