"""The ranks of a loop that others have written: whoever started them, torchrun, srun, Lightning or Accelerate.

Their process group is used where there is one, and begun where there is none. A wrapper that adds up gradients in every
backward (DistributedDataParallel) is kept quiet: a rank may run out of memory in any of them.
"""

from __future__ import annotations

import atexit
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from pipeline.device.accelerator import collectives, is_card
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError
from pipeline.records import RankPlace
from pipeline.training.ranks import PIECE_BYTES, RankLost, Ranks
from pipeline.training.ranks.gradient_sums import reduce_in_pieces
from pipeline.training.ranks.process_group import end_after_gloo, exchange_json, join_process_group
from pipeline.training.ranks.rank_monitor import HangLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn

    from pipeline.training.ranks import Ranks, Said

DAY_S = 86_400.0  # what a loop of others does between two steps may take long: only a death counts as a loss
MODEL = "Governed"
SHARED_OUT = {"FullyShardedDataParallel", "FSDPModule"}  # by name: to import them takes long
PLAIN = (
    "pass the plain model on every rank, without FullyShardedDataParallel(…) or fully_shard(…)"
    "   or train it by pipeline submit train --set train.sharding=true"
)
READ = "read the output of all ranks: the first failure has the reason"


class ForeignRanks(Ranks):
    """`Ranks` over a process group that others have begun, and will end."""

    def __init__(self, device: str) -> None:
        """Use torch's process group; messages go over gloo, for which all ranks begin a group where there is none."""
        end_after_gloo()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        has_gloo = f"{CPU}:{dist.Backend.GLOO}" in dist.get_backend_config()
        self._words = dist.group.WORLD if has_gloo else dist.new_group(backend=dist.Backend.GLOO)
        self._sums = dist.group.WORLD if is_card(device) else self._words

    def exchange(self, message: Said) -> list[Said]:
        gather = partial(dist.all_gather, group=self._words)
        return exchange_json(message, self.world, lambda all_B, own_B: _unless_lost(partial(gather, all_B, own_B)))

    def add_up(self, tensors: Sequence[Tensor], piece_bytes: int = PIECE_BYTES, buffer: Tensor | None = None) -> None:
        reduce_in_pieces(tensors, self._sum, piece_bytes, buffer)

    def _sum(self, flat: Tensor) -> None:
        _unless_lost(partial(dist.all_reduce, flat, group=self._sums))


def _unless_lost(call: Callable[[], Any]) -> Any:
    """Make a collective call; raise RankLost where another rank is gone."""
    try:
        return call()
    except RuntimeError as error:  # torch has no type for it
        problem = f"another rank ended or never started: {str(error).partition(chr(10))[0]}"
        raise RankLost(problem, where=MODEL, remedy=READ) from error


def ranks_of(device: str) -> Ranks:
    """Return the ranks that this process is one of: in torch's process group, or as torchrun or srun started it."""
    if not dist.is_available():
        return Ranks()
    if dist.is_initialized():
        return ForeignRanks(device) if dist.get_world_size() > 1 else Ranks()
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        dist.init_process_group(collectives(device), device_id=torch.device(device) if is_card(device) else None)
        atexit.register(_leave)
        return ForeignRanks(device)
    place = RankPlace.by_slurm(os.environ)
    if place is None:
        return Ranks()
    group = join_process_group(place, Path.cwd(), device=device, limits=HangLimits(hang_s=DAY_S, slow_s=DAY_S))
    atexit.register(group.close)
    return group


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the wrappers in a model that add up gradients; refuse those that share out its parameters."""
    for module in model.modules():
        kind = SHARED_OUT & {of.__name__ for of in type(module).__mro__}
        if kind:
            problem = f"{kind.pop()} gathers parameters within every pass: an OOM on one rank would hang the rest"
            raise ConfigError(problem, where=MODEL, remedy=PLAIN)
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def keep_quiet(wrappers: Iterable[DistributedDataParallel]) -> None:
    """Let wrappers add up and exchange nothing in the passes to come."""
    for wrapper in wrappers:
        wrapper.require_backward_grad_sync = wrapper.require_forward_param_sync = False
        wrapper.static_graph = False  # it would begin the first backward's exchange all the same


def begin_alike(model: nn.Module, ranks: Ranks) -> None:
    """Copy the parameters and buffers of the first rank to all others, bit for bit."""
    if any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules()):
        problem = "SyncBatchNorm exchanges statistics within every pass: an OOM on one rank would hang the rest"
        raise ConfigError(problem, where=MODEL, remedy="leave out convert_sync_batchnorm(…), or use GroupNorm")
    tensors = [*model.parameters(), *model.buffers()]
    shapes = [[list(tensor.shape), str(tensor.dtype)] for tensor in tensors]
    for rank, said in enumerate(ranks.exchange({"shapes": shapes})):
        if said["shapes"] != shapes:
            problem = f"the model has different parameters on rank {rank} than on rank {ranks.rank}"
            raise ConfigError(problem, where=MODEL, remedy="build the same model on every rank")
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    if ranks.rank:  # bytes and zeros add up to the bytes
        for own in flat:
            own.zero_()
    ranks.add_up(flat)
    for tensor, whole in zip(tensors, flat, strict=True):
        if whole.data_ptr() != tensor.data_ptr():  # it was not contiguous
            tensor.detach().copy_(whole.view(tensor.dtype).view(tensor.shape))
