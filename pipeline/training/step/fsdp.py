"""A model too large for one device: parameters, gradients and optimizer state are sharded over the ranks (FSDP2).

A block's parameters are gathered before it computes, and its gradients are reduced after it, by all ranks together,
within every forward and backward. So all must make the same number of passes (`joint_turns`): a rank that has no
micro-batch left runs the cheapest item of the step along with the others, with its loss times zero.

In half precision parameters are gathered and computed with in it, and gradients are added up in full precision. Nothing
else is cast between blocks: autocast chooses the precision of each operation, as in a model of one device.

A rank whose memory ends between two collectives would leave the others waiting. So all ranks agree before every
collective: each reports which one it is about to begin, or that it has given up; where any has, all leave the pass.
Why no rank waits for ever, as long as all ranks begin the same passes:

1. In a pass a rank calls `agree` before each of its collectives and once at the end, also of a failed pass, and
   makes no other call that involves all ranks. So the first agreement of one rank meets the first of every other, the
   second the second, and so on, as long as none stops.
2. The outcome of an agreement is the same on all ranks: all are about to begin the same collective, all have come to
   the end, a rank has given up, or the model does not do the same on all ranks.
3. In the first case all begin that collective: its memory was allocated before, and nothing stands in between. In each
   of the others no rank agrees or begins anything further in this pass: they raise, and `Passes.run` returns.
4. So every rank leaves a pass after the same number of agreements and collectives, all of which are complete.

An agreement itself takes no memory of the device: it is two numbers in the host's memory, over gloo, and on a GPU only
the processes meet, not their streams. A collective that fails as it begins (NCCL may allocate there) ends the job, and
so does every error that is not out of memory: the rank monitor tells the other ranks.
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import _disable_current_modes

from pipeline.device.accelerator import free_caches, is_card, out_of_memory_error
from pipeline.device.batch_transfer import map_tensors
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError
from pipeline.memory.footprint import Unmeasurable
from pipeline.protocol import Weights
from pipeline.training.ranks import Ranks
from pipeline.training.step.checkpointing import repeated
from pipeline.training.step.exact_step import ExactStep, Piece
from pipeline.training.step.optimizers import freeze_parameters
from pipeline.training.step.step import DTYPES, HOST, RUNGS, Step, checked_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from pipeline.protocol import Batch, Task
    from pipeline.training.items.batch import TaskBatch
    from pipeline.training.ranks import Message
    from pipeline.training.step.exact_step import RankShare, Weighed
    from pipeline.training.step.optimizers import StepSettings
    from pipeline.training.step.step import StepWatch

Result = TypeVar("Result")

WHERE = "train.sharding"
NOT_SHARDED = "--set train.sharding=false"
END, GAVE_UP = 0, 1 << 62  # any other number is a collective by its kind and size


# Passes of all ranks


class ImaginedRanks(Ranks):
    """Rank 0 of imagined ranks, for tracing a step: makes no calls and never waits."""

    def __init__(self, world: int) -> None:
        self.world = world

    def exchange(self, message: Message) -> list[Message]:
        return super().exchange(message) * self.world


@contextmanager
def imagined(world: int) -> Iterator[ImaginedRanks]:
    """Enter a fake process group in which a model can be sharded; destroy it on exit."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        raise Unmeasurable("a sharded step cannot be traced within a process group")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield ImaginedRanks(world)
    finally:
        torch.distributed.destroy_process_group()


class PassGivenUp(Exception):
    """Another rank could not finish the pass, so this one leaves it; `Passes.run` catches it."""


class Passes:
    """Passes through a sharded model, which all ranks make together: to the end, or none does."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._numbers = np.zeros(2, np.int64)
        self._word = torch.from_numpy(self._numbers)  # made once: an agreement must not fail for want of memory
        self._is_given_up = False

    def run(self, make: Callable[[], Result]) -> tuple[list[Result], str]:
        """Make a pass; return its result, and why memory ended on this very rank, else "".

        Where memory ends on any rank, all leave the pass and have no result; what it left behind is to be dropped.
        """
        results: list[Result] = []
        error = out_of_memory_error(self._make, make, results)
        if not self._is_given_up:
            self._agreed(END if error is None else GAVE_UP)
        is_given_up, self._is_given_up = self._is_given_up, False
        return [] if is_given_up else results, error or ""

    def _make(self, make: Callable[[], Result], results: list[Result]) -> None:
        with suppress(PassGivenUp):  # the pass counts as given up even if the model swallowed this error
            results.append(make())

    def agree(self, collective: int) -> None:
        """Return where all ranks are about to begin the same collective; leave the pass where any has given up."""
        if self._is_given_up or not self._agreed(collective):
            raise PassGivenUp

    def _agreed(self, what: int) -> bool:
        """Say what this rank is about to do; return whether all do the same, false where any has given up."""
        self._numbers[:] = what, -what
        largest = torch.distributed.ReduceOp.MAX
        self._ranks.collective(lambda: torch.distributed.all_reduce(self._word, op=largest, async_op=True))
        most, least = int(self._numbers[0]), -int(self._numbers[1])
        self._is_given_up = most == GAVE_UP
        if most != least and not self._is_given_up:
            problem = "parameters cannot be gathered because ranks run different blocks"
            raise ConfigError(problem, where=WHERE, remedy=f"run every block for every batch   or {NOT_SHARDED}")
        return not self._is_given_up


@dataclass(slots=True)
class Turn:
    """A pass that all ranks make at the same time."""

    piece: Piece
    counts: bool  # else it is another rank's item, run along
    items: int  # of the first turn, over all ranks
    instead: list[Piece] | None = None  # once all gave up the pass: what this rank runs in place of its piece


def joint_turns(
    pieces: Iterable[Piece], ranks: Ranks, fetch: Callable[[int], TaskBatch], cost: Callable[[Piece], int] = len
) -> Iterator[Turn]:
    """Yield this rank's pieces, then the cheapest item of any rank for as long as another rank has pieces.

    `fetch` returns a batch of one item by its number. After a pass that was given up, set `instead` on every rank, or
    take no further turn on any.
    """
    own, waiting = iter(pieces), deque[Piece]()
    cheapest: tuple[int, int] | None = None
    items = 0
    while True:
        piece = waiting.popleft() if waiting else next(own, None)
        replies = ranks.exchange({"items": len(piece) if piece else 0, "cheapest": _cheapest(piece, cost)})
        if not any(reply["items"] for reply in replies):
            return
        items = items or sum(reply["items"] for reply in replies)
        offers = [(int(reply["cheapest"][0]), int(reply["cheapest"][1])) for reply in replies if reply["cheapest"]]
        cheapest = min([*offers, *([cheapest] if cheapest else [])])
        turn = Turn(piece or Piece(fetch(cheapest[1]), 0, 1), piece is not None, items)
        yield turn
        waiting.extend(turn.instead or [])


def _cheapest(piece: Piece | None, cost: Callable[[Piece], int]) -> tuple[int, int] | None:
    """Return the cost and the number of the cheapest item of a piece."""
    return min((cost(single), single.numbers[0]) for single in piece.singles()) if piece else None


class Gather:
    """Gathers the parameters of a block from all ranks, which all begin that or none."""

    def __init__(self, passes: Passes, ranks: Ranks) -> None:
        self._passes, self._ranks = passes, ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, **_: Any) -> None:
        self._passes.agree(2 * output_tensor.nbytes)
        gather = partial(torch.distributed.all_gather_single, output_tensor, input_tensor, group=group, async_op=True)
        self._ranks.collective(gather, in_stream=is_card(output_tensor.device))


class ReduceScatter(Gather):
    """Adds up the gradients of a block over all ranks, each of which keeps its own part."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any = None, **_: Any) -> None:
        self._passes.agree(2 * input_tensor.nbytes + 1)
        named = {"op": op, "group": group, "async_op": True}
        if is_card(output_tensor.device):
            reduce = partial(torch.distributed.reduce_scatter_single, output_tensor, input_tensor, **named)
            self._ranks.collective(reduce, in_stream=True)
        else:  # gloo's own does the same, and cannot be watched while waiting
            self._ranks.collective(partial(torch.distributed.all_reduce, input_tensor, **named))
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])


# Sharding a model


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
    scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
    kinds = {parameter.dtype: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    shown = " and ".join(f"{str(kind).removeprefix('torch.')} ({name})" for kind, name in kinds.items())
    if scalars or len(kinds) > 1:
        problem = (
            f"the parameter {scalars[0]} is a scalar" if scalars else f"the parameters have several dtypes, {shown}"
        )
        remedy = f"give scalars the shape (1,), and use one dtype   or {NOT_SHARDED}"
        raise ConfigError(f"{problem}: it cannot be sharded", where=WHERE, remedy=remedy)


class SpreadModel:
    """A model that is sharded over ranks."""

    def __init__(self, make: Callable[[], nn.Module], ranks: Ranks, device: str, precision: str = "fp32") -> None:
        """Build a model in the host's memory and shard it, one rank of a host after the other.

        So each starts from the weights that a single process would draw, and a host holds one whole model at most.
        """
        self.ranks, self.passes = ranks, Passes(ranks)
        self.used: set[int] = set()  # numbers of the parameters that had gradients in this step
        self._known: set[int] = set()
        hosts = [str(reply["host"]) for reply in ranks.exchange({"host": socket.gethostname()})]
        turns = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
        with _disable_current_modes():  # it reads the ranks' numbers, which a trace would make fake
            mesh = init_device_mesh(torch.device(device).type, (ranks.world,))
        for turn in range(max(turns) + 1):
            if turns[ranks.rank] == turn:
                self.model = make()
                self._parts = self._sharded(mesh, precision)
                self.model.to(device)
            ranks.exchange({})

    def _sharded(self, mesh: DeviceMesh, precision: str) -> list[FSDPModule]:
        """Shard each repeated block by itself, and everything else together."""
        _refuse_unspreadable(self.model)
        policy = _policy(self.model, precision)
        if policy.param_dtype is not None:
            _keep_precise(self.model)
        parts: list[Any] = [*_separable(self.model), self.model]
        for part in parts:
            part.register_forward_hook(_own_memory)
            # Kept unsharded after forward, the outermost would miss what is written into its shards between two passes.
            fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo supports nothing else
            part.set_custom_all_gather(Gather(self.passes, self.ranks))
            part.set_custom_reduce_scatter(ReduceScatter(self.passes, self.ranks))
            part.register_forward_pre_hook(self._note_gradients)
        # Ranks may use different parameters, where a term has no items on one of them.
        parts[-1].set_reduce_scatter_unused_params(True)
        return parts

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

    def drop_unused(self, trained: Sequence[nn.Parameter]) -> None:
        """Drop the gradients of parameters that no rank used: with zeros an optimizer would still move them."""
        numbers = {id(parameter): number for number, parameter in enumerate(self.model.parameters())}
        used = {number for reply in self.ranks.exchange({"used": sorted(self.used)}) for number in reply["used"]}
        for parameter in trained:
            if numbers[id(parameter)] not in used:
                parameter.grad = None

    def _note_gradients(self, module: nn.Module, _: Any) -> None:
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
                    lambda _, number=number: self.used.add(number)
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
        self.spread = SpreadModel(frozen, ranks, device, settings.precision)
        super().__init__(task, settings, device=device, model=self.spread.model, watch=watch, scaled=scaled)

    def joint_pass(self, run: Callable[[], Result]) -> tuple[list[Result], str]:
        """Make a pass together with all ranks; where it was given up, the model is as it was before."""
        results, error = self.spread.passes.run(run)
        if not results:
            self.spread.reset()
            free_caches(self.device)
        return results, error

    def accompany(self, batch: Batch) -> None:
        """Run another rank's micro-batch with a loss of zero, so that all ranks make as many passes."""
        terms = self.terms_of(self.moved(batch))
        first, *others = (total * 0.0 for total, _ in terms.values())
        torch.autograd.backward(self.scaler.scale(sum(others, first)))

    def norm(self) -> Tensor:
        """Return the norm of all gradients over all ranks, which must all call it."""
        squared = super().norm().to(self.device, torch.float64).square().reshape(1)
        self.ranks.add_up([squared])
        return squared.sqrt()[0]


class ExactShardedStep(ExactStep):
    """Makes steps of a sharded model, pass by pass together with all ranks."""

    step: ShardedStep

    def _remedies(self) -> tuple[str, ...]:
        return RUNGS[: RUNGS.index(HOST)]  # no rank has all parameters, to run an item on its CPU

    def _run_share(self, share: RankShare, weights: Weighed) -> bool:
        self.step.spread.used.clear()
        fits = super()._run_share(share, weights)
        if fits:
            self.step.spread.drop_unused(self.step.trained)
        return fits

    def _all_fit(self, pieces: Iterable[Piece], run: Callable[[Piece], object], share: RankShare) -> bool:
        """Run this rank's pieces, and others' items while they have more passes to make; return whether all fit."""
        if isinstance(self.step.task, Weights) and not share.is_last_pass:
            return super()._all_fit(pieces, run, share)  # weighed without the model
        for turn in joint_turns(pieces, self.ranks, self._fetch(share), self.cost):
            self.step.guess = float(1 << max(0, turn.items - 1).bit_length())  # to divide by it changes no digit
            piece = turn.piece if turn.counts else next(self._ready([turn.piece]))
            done, error = self.step.joint_pass(partial(run if turn.counts else partial(self._accompany, share), piece))
            if error:
                self._learn(piece, error, share, is_own=turn.counts)
            if not done:
                return False
        return True

    def _accompany(self, share: RankShare, piece: Piece) -> None:
        """Run another rank's item along, in the pass that runs or in the one that weighs."""
        with self.step.remedied(piece.rung):
            (self.step.accompany if share.is_last_pass else self.step.pure_terms)(piece.collated())

    def not_finite(self, share: RankShare) -> list[str]:
        """Return the ids of this rank's items whose own loss is not finite; all ranks must call it."""
        ids: list[str] = []
        singles = (single for piece in share for single in piece.singles())
        for turn in joint_turns(singles, self.ranks, self._fetch(share), self.cost):
            done, error = self.step.joint_pass(partial(self.is_finite, turn.piece))
            if not done:  # an item that does not fit counts as finite
                turn.instead = [turn.piece] if turn.counts and not error else []
            elif turn.counts and not done[0]:
                ids += turn.piece.ids
        return ids

    def _fetch(self, share: RankShare) -> Callable[[int], TaskBatch]:
        return lambda number: share.fetch((number,), share.origin)
