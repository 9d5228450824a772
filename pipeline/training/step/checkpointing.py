"""Activation checkpointing and offloading for any model: its repeated blocks are recomputed in backward."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pipeline.device.accelerator import is_card
from pipeline.device.kinds import CPU
from pipeline.memory.hardware.host_memory import ALIGNMENT, CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class Recomputing:
    """Checkpoints some of a model's repeated blocks, the first ones.

    What these keep waits longest for backward. Without them, the last blocks would be recomputed while the activations
    of all others are still there: a higher peak for the same time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._is_wrapped = model, False
        self.blocks = 0

    def turn(self, blocks: int) -> None:
        """Set the number of checkpointed blocks; not during a forward."""
        if blocks and not self._is_wrapped:
            for place, block in enumerate(repeated(self._model).values()):
                block.forward = self._checkpointed(block, place)
            self._is_wrapped = True
        self.blocks = blocks

    def _checkpointed(self, block: nn.Module, place: int) -> Callable[..., Any]:
        forward = block.forward

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), OwnBuffers(block)

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if place >= self.blocks:
                return forward(*args, **kwargs)
            # A compiled graph takes no such contexts, and changes buffers once anyway
            apart: dict[str, Any] = {} if torch.compiler.is_compiling() else {"context_fn": contexts}
            return checkpoint(forward, *args, use_reentrant=False, **apart, **kwargs)

        run.runs_again = True  # type: ignore[attr-defined]  # a copy of the block must not run the block itself
        return run


class OwnBuffers(AbstractContextManager[None]):
    """Gives the norms of a block copies of their buffers: recomputing must not count a batch's statistics twice."""

    def __init__(self, block: nn.Module) -> None:
        self._norms = [module for module in block.modules() if getattr(module, "track_running_stats", False)]
        self._kept: list[dict[str, Tensor | None]] = []

    def __enter__(self) -> None:
        self._kept = [norm._buffers for norm in self._norms]  # noqa: SLF001 - assigned one by one, they would be checked
        for norm, buffers in zip(self._norms, self._kept, strict=True):
            norm._buffers = {name: None if own is None else own.clone() for name, own in buffers.items()}  # noqa: SLF001

    def __exit__(self, *_: object) -> None:
        for norm, buffers in zip(self._norms, self._kept, strict=True):
            norm._buffers = buffers  # noqa: SLF001


def host_copy(model: nn.Module) -> nn.Module:
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


SMALLEST_BYTES = 1 << 12  # small, else a batch of tensors just below it would keep more on the device than a larger


class Pinned:
    """Copies tensors to host memory, pinned for tensors of a card, and back."""

    def __init__(self) -> None:
        self._chunks = PinnedChunks()

    def away(self, tensor: Tensor) -> Any:
        """Return a copy in the host's memory: of a card's tensor, a tensor like it without data, and its bytes."""
        is_plain = tensor.layout is torch.strided and type(tensor) is torch.Tensor
        if not (is_card(tensor.device) and is_plain) or tensor.is_conj() or tensor.is_neg():
            return tensor.to(CPU, copy=True)
        like = torch.empty_like(tensor, device="meta")  # in the same order: channels last
        dense = tensor if tensor.stride() == like.stride() else torch.empty_like(tensor).copy_(tensor)
        pieces = self._chunks.pieces(tensor.nbytes)
        for part, piece in zip(_parts(dense, pieces), pieces, strict=True):
            piece.copy_(part)
        return like, pieces

    def back(self, kept: Any, device: torch.device) -> Tensor:
        """Return a copy on the device."""
        if isinstance(kept, torch.Tensor):
            return kept.to(device, copy=True)
        like, pieces = kept
        tensor = torch.empty_like(like, device=device)
        for part, piece in zip(_parts(tensor, pieces), pieces, strict=True):
            part.copy_(piece, non_blocking=True)
        return tensor


class PinnedChunks:
    """Pinned memory for short-lived tensors, in chunks of one size, which torch caches and reuses.

    A chunk is free once all tensors in it are gone, and copies from it to a card have ended.
    """

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = self._used = chunk_bytes
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def pieces(self, size_bytes: int) -> list[Tensor]:
        """Return memory of this size, in pieces that follow the last ones."""
        pieces = []
        while size_bytes:
            if self._used >= self._chunk_bytes:
                self._chunk, self._used = torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=True), 0
            pieces.append(self._chunk[self._used : self._used + size_bytes])
            size_bytes -= len(pieces[-1])
            self._used += -(-len(pieces[-1]) // ALIGNMENT) * ALIGNMENT
        return pieces


def _parts(tensor: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the bytes of a dense tensor as they lie in memory, in parts as large as some pieces."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return torch.split_with_sizes(flat, [len(piece) for piece in pieces])


def offloaded(model: nn.Module, carrier: Any) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context whose forward saves large activations to the host; parameters stay on the device anyway."""
    own = {_place(parameter) for parameter in model.parameters()}

    def away(tensor: Tensor) -> Any:
        if tensor.nbytes < SMALLEST_BYTES or _place(tensor) in own:
            return tensor.detach()  # else outputs and their graphs would be reference cycles
        return carrier.away(tensor), tensor.device

    def back(kept: Any) -> Tensor:
        tensor: Tensor = carrier.back(*kept) if isinstance(kept, tuple) else kept
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(away, back)


def _place(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage, for fake tensors too."""
    place: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - fake storages have no data pointer
    return place
