"""What backward needs waits in the host's memory, and comes back when its turn comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

SMALLEST_BYTES = 1 << 16  # below, a copy costs more than the memory is worth


class Carrier(Protocol):
    """Brings tensors to the host and back."""

    def away(self, tensor: Tensor) -> Tensor:
        """Return a copy in the host's memory."""

    def back(self, kept: Tensor, device: torch.device) -> Tensor:
        """Return a copy on the device."""


class Pinned:
    """Copies to memory that a GPU reads by itself."""

    def away(self, tensor: Tensor) -> Tensor:
        """Return a copy in the host's memory."""
        kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)  # in the same order: channels last
        return kept.copy_(tensor)

    def back(self, kept: Tensor, device: torch.device) -> Tensor:
        """Return a copy on the device."""
        return kept.to(device, non_blocking=True, copy=True)


def offloaded(model: nn.Module, carrier: Carrier) -> torch.autograd.graph.saved_tensors_hooks:
    """Return a context whose forward keeps nothing large on the device but parameters, which are there anyway."""
    own = {_place(one) for one in model.parameters()}

    def away(tensor: Tensor) -> Any:
        if tensor.nbytes < SMALLEST_BYTES or _place(tensor) in own:
            return tensor.detach()  # as it is, an output would hold the graph that holds it: never released
        return carrier.away(tensor), tensor.device

    def back(kept: Any) -> Tensor:
        return kept if isinstance(kept, torch.Tensor) else carrier.back(*kept)

    return torch.autograd.graph.saved_tensors_hooks(away, back)


def _place(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from other memory, of fake ones too."""
    place: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - fake storages have no data pointer
    return place
