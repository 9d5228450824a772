"""Operators that are made of others, and of other others on CUDA: they save and allocate something else there.

CUDA's dropout keeps a byte a number for backward, the CPU's a number; a softmax from fp16 to fp32 makes no copy; a root
mean square norm is one kernel. Torch 2.13: Dropout.cpp, SoftMax.cpp, layer_norm.cpp under aten/src/ATen/native.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pipeline.memory.fakes.dispatch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@contextmanager
def cuda_composites() -> Iterator[None]:
    """Let such operators on fake tensors be made of what they are made of on CUDA; on real ones all is as before."""
    with replaced(_KERNELS, "CompositeImplicitAutograd"):
        yield


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: FBT001 - the operator's arguments
    if not train or p == 0 or not tensor.numel():
        return tensor
    if p == 1:
        return tensor * torch.zeros((), dtype=tensor.dtype)
    if isinstance(tensor, FakeTensor):
        dropped: torch.Tensor = torch.ops.aten.native_dropout(tensor, p, train)[0]
        return dropped
    return tensor * torch.empty_like(tensor).bernoulli_(1 - p).div_(1 - p)


def _softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _normalised(torch.ops.aten._softmax, tensor, dim, dtype)


def _log_softmax(tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return _normalised(torch.ops.aten._log_softmax, tensor, dim, dtype)


def _normalised(operator: Any, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
    at_once = isinstance(tensor, FakeTensor) and (tensor.dtype, dtype) == (torch.float16, torch.float32)
    converted = tensor if dtype is None or at_once else tensor.to(dtype)
    result: torch.Tensor = operator(converted, dim, at_once)
    return result


def _rms_norm(
    tensor: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    alike = weight is None or weight.dtype == tensor.dtype
    if isinstance(tensor, FakeTensor) and alike and not tensor.is_complex():
        result: torch.Tensor = _FUSED_NORM(tensor, weight, len(shape))
        return result
    composed: torch.Tensor = torch.ops.aten._fused_rms_norm(tensor, list(shape), weight, eps)[0]
    return composed


class _FusedNorm(torch.autograd.Function):
    """Allocates what `_fused_rms_norm` does on CUDA."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        """Make the result, and one number a row."""
        wide = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
        scale = tensor.new_empty(tensor.shape[:-dims], dtype=wide)
        ctx.save_for_backward(tensor, weight, scale)
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ARG004 - only sizes matter
        """Make the gradients."""
        tensor, weight, _ = ctx.saved_tensors
        return torch.empty_like(tensor), None if weight is None else torch.empty_like(weight), None


_FUSED_NORM: Any = _FusedNorm.apply  # torch gives it no types
_KERNELS: dict[str, Callable[..., Any]] = {
    "dropout": _dropout,
    "softmax.int": _softmax,
    "log_softmax.int": _log_softmax,
    "rms_norm": _rms_norm,
}
