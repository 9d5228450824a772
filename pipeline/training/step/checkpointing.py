"""Activation checkpointing and offloading for any model: its repeated blocks are recomputed in backward."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.device.accelerator import is_card
from pipeline.device.kinds import CPU
from pipeline.memory.runtime.pinned_tensors import PinnedChunks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class Recomputing:
    """Switches checkpointing of a model's repeated blocks on and off."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.blocks: list[str] | None = None  # names of the wrapped blocks; None until first enabled
        self.on = False

    def turn(self, *, on: bool) -> None:
        """Enable or disable checkpointing; not during a forward."""
        if on and self.blocks is None:
            blocks = repeated(self._model)
            for block in blocks.values():
                block.forward = self._again(block.forward)
            self.blocks = list(blocks)
        self.on = on

    def _again(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs) if self.on else forward(*args, **kwargs)

        run.runs_again = True  # type: ignore[attr-defined]  # a copy of the block must not run the block itself
        return run


def twin(model: nn.Module) -> nn.Module:
    """Return a copy of a model in the host's memory, made without a second copy on the GPU."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        copied = parameter.detach().to(CPU, copy=True)
        memo[id(parameter)] = nn.Parameter(copied, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to(CPU, copy=True)
    host = copy.deepcopy(model, memo)
    for module in host.modules():
        if getattr(module.__dict__.get("forward"), "runs_again", False):
            del module.forward
    return host


def repeated(model: nn.Module) -> dict[str, nn.Module]:
    """Return a model's repeated blocks by name: several children of one class in a list; outermost lists only."""
    blocks: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") for outer in blocks):
            continue
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            kinds = [type(child) for child in module]
            for name, child in module.named_children():
                if kinds.count(type(child)) > 1 and any(True for _ in child.parameters()):
                    blocks[f"{path}.{name}" if path else name] = child
    return blocks


SMALLEST_BYTES = 1 << 16  # below, a copy costs more than the memory is worth


class Carrier(Protocol):
    """Copies tensors to the host's memory and back."""

    def away(self, tensor: Tensor) -> Any:
        """Return a copy in the host's memory."""

    def back(self, kept: Any, device: torch.device) -> Tensor:
        """Return a copy on the device."""


@dataclass(frozen=True, slots=True)
class _Away:
    """A tensor whose values lie in pinned memory."""

    like: Tensor  # without data: it has the shape, the strides and the type
    pieces: Sequence[Tensor]  # bytes


class Pinned:
    """Copies to the host's memory, which is pinned for tensors of a card."""

    def __init__(self) -> None:
        self._chunks = PinnedChunks()

    def away(self, tensor: Tensor) -> Any:
        is_plain = tensor.layout is torch.strided and type(tensor) is torch.Tensor
        if not (is_card(tensor.device) and is_plain) or tensor.is_conj() or tensor.is_neg():
            return tensor.to(CPU, copy=True)
        like = torch.empty_like(tensor, device="meta")  # in the same order: channels last
        dense = tensor if tensor.stride() == like.stride() else torch.empty_like(tensor).copy_(tensor)
        pieces = self._chunks.pieces(tensor.nbytes)
        for part, piece in zip(_parts(dense, pieces), pieces, strict=True):
            piece.copy_(part)
        return _Away(like, pieces)

    def back(self, kept: Any, device: torch.device) -> Tensor:
        if isinstance(kept, torch.Tensor):
            return kept.to(device, copy=True)
        tensor = torch.empty_like(kept.like, device=device)
        for part, piece in zip(_parts(tensor, kept.pieces), kept.pieces, strict=True):
            part.copy_(piece, non_blocking=True)
        return tensor


def _parts(tensor: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the bytes of a dense tensor as they lie in memory, in parts as large as some pieces."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return torch.split_with_sizes(flat, [len(piece) for piece in pieces])


def offloaded(model: nn.Module, carrier: Carrier) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context whose forward saves large activations to the host; parameters stay on the device anyway."""
    own = {_place(parameter) for parameter in model.parameters()}

    def away(tensor: Tensor) -> Any:
        if tensor.nbytes < SMALLEST_BYTES or _place(tensor) in own:
            return tensor.detach()  # undetached, an output would hold the graph that holds it, and never be freed
        return carrier.away(tensor), tensor.device

    def back(kept: Any) -> Tensor:
        return carrier.back(*kept) if isinstance(kept, tuple) else kept

    return torch.autograd.graph.saved_tensors_hooks(away, back)


def _place(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage, for fake tensors too."""
    place: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - fake storages have no data pointer
    return place
