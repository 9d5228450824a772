"""Which kernel scaled dot-product attention takes on a CUDA card, and fake tensors that are allocated as it does.

The choice follows torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, the padding of heads and masks
attention.cpp beside it. Outputs, log-sum-exps and what is saved for backward are those of torch's own shape functions;
what the kernels allocate within themselves is in `kernel_workspace`.

Taken for granted: a torch with all kernels built and a cuDNN newer than 9.15, as wheels for CUDA 13 have; no nested
tensors; no Flash Attention 3. Pointers are taken to be as aligned as their offsets.

Shapes: B items, H heads, Q queries, K keys, D head dimension.
"""

from __future__ import annotations

from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.backends import cuda

from pipeline.memory.tracing.fake_mode import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Capability = tuple[int, int]

_SWITCHES: Any = cuda  # which kernels are allowed; torch gives them no types

_HALVES = (torch.float16, torch.bfloat16)
_OLDEST_FLASH, _OLDEST_EFFICIENT, _NEWEST = (8, 0), (5, 0), (12, 1)
_LARGEST_FLASH_HEAD = 256
_LARGEST_CUDNN_HEAD = 128  # 256 on Hopper with a cuDNN newer than 9.22, which no wheel has yet
_LARGEST_CUDNN_COUNT = 65535
_NO_MASK_BACK = False  # what was dropped is not asked for
_MASK_ALIGNMENT = _HEAD_ALIGNMENT = 8


class Backend(StrEnum):
    """A kernel that computes attention."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"


class AttentionCall(NamedTuple):
    """The arguments of `scaled_dot_product_attention`, without the scale."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    gqa: bool = False

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key, self.value

    @property
    def trains(self) -> bool:
        """Tell whether a gradient is wanted."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.inputs)


def attention_backend(attention: AttentionCall, capability: Capability) -> Backend:
    """Return the kernel that a card of this compute capability takes."""
    usable = {Backend.CUDNN: _cudnn_can, Backend.FLASH: _flash_can, Backend.EFFICIENT: _efficient_can}
    if capability[0] not in (9, 10) or capability[1] not in (0, 3):  # check_prefer_cudnn_attention
        usable.pop(Backend.CUDNN)
    if not _is_plain(attention):
        return Backend.MATH
    return next((name for name, can in usable.items() if can(attention, capability)), Backend.MATH)


def _is_plain(attention: AttentionCall) -> bool:
    """Tell whether any fused kernel may run: four dimensions, one type, sizes that agree and are not 0."""
    query, key, value = attention.inputs
    if any(tensor.dim() != 4 or tensor.dtype != query.dtype or tensor.stride(-1) != 1 for tensor in attention.inputs):
        return False
    if not (query.shape[0] == key.shape[0] == value.shape[0]) or 0 in (query.shape[2], key.shape[2]):
        return False
    heads, of_key, of_value = query.shape[1], key.shape[1], value.shape[1]
    if attention.gqa:
        return of_key == of_value and heads % of_key == 0
    return heads == of_key == of_value


def _flash_can(attention: AttentionCall, capability: Capability) -> bool:
    query, key, value = attention.inputs
    head = query.shape[-1]
    if attention.mask is not None or query.dtype not in _HALVES or not _SWITCHES.flash_sdp_enabled():
        return False
    if not head == key.shape[-1] == value.shape[-1] <= _LARGEST_FLASH_HEAD:
        return False
    if attention.causal and query.shape[-2] != key.shape[-2]:
        return False
    small = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)  # cards with little shared memory
    if (
        small
        and any(tensor.requires_grad for tensor in attention.inputs)
        and not (head <= 192 or (not attention.dropout and head > 224))
    ):
        return False
    return _OLDEST_FLASH <= capability <= _NEWEST


def _efficient_can(attention: AttentionCall, capability: Capability) -> bool:
    query, key, value = attention.inputs
    types = (torch.float16, torch.float32) + ((torch.bfloat16,) if capability >= (8, 0) else ())
    if query.dtype not in types or not _SWITCHES.mem_efficient_sdp_enabled():
        return False
    aligned = _gemm_alignment(query.dtype, capability)
    if query.shape[-1] != key.shape[-1] or query.shape[-1] % aligned or value.shape[-1] % aligned:
        return False
    if capability >= (8, 0) and any(tensor.storage_offset() % aligned for tensor in attention.inputs):
        return False
    return _OLDEST_EFFICIENT <= capability <= _NEWEST


def _gemm_alignment(dtype: torch.dtype, capability: Capability) -> int:
    """Return what the head dimension must be a multiple of (torch's `minimum_gemm_alignment`)."""
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and dtype in _HALVES)
    least = 4 if capability >= (8, 0) else 1
    return max(least, 16 // dtype.itemsize) if tensor_cores else least


def _cudnn_can(attention: AttentionCall, capability: Capability) -> bool:  # noqa: ARG001 - asked like the others
    query, key, value = attention.inputs
    deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if query.dtype not in _HALVES or not _SWITCHES.cudnn_sdp_enabled():
        return False
    if attention.dropout * 16 != int(attention.dropout * 16) or max(query.shape[:2]) > _LARGEST_CUDNN_COUNT:
        return False
    heads = (query.shape[-1], value.shape[-1])
    if max(heads) > _LARGEST_CUDNN_HEAD and heads != (192, 128):
        return False
    if any(head % _HEAD_ALIGNMENT for head in heads) or key.shape[-2] == 1:
        return False
    return not (attention.dropout and query.shape[-2] == 1)


@contextmanager
def cuda_attention(capability: Capability) -> Iterator[None]:
    """Let attention on fake tensors allocate as on such a card, forward and backward; real tensors are left alone."""

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        return _attend(AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa), scale, capability)

    with replaced({"scaled_dot_product_attention": attend}, "CompositeImplicitAutograd"):
        yield


def _attend(attention: AttentionCall, scale: float | None, capability: Capability) -> torch.Tensor:
    """Run the kernel that the card would take; on real tensors, the one that the CPU would."""
    query, key, value, mask, dropout, causal, _ = attention
    chosen = attention_backend(attention, capability) if isinstance(query, FakeTensor) else None
    additive = _additive(mask, query.dtype)
    if chosen is None and _on_cpu(attention, scale):
        return _first(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout, causal, attn_mask=additive, scale=scale
            )
        )
    return _KERNELS[chosen or Backend.MATH](attention._replace(mask=additive), scale)


def _on_cpu(attention: AttentionCall, scale: float | None) -> bool:
    """Tell whether torch itself would take the CPU's flash kernel."""
    query, key, value, mask, dropout, causal, gqa = attention
    choice = torch._fused_sdp_choice(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=gqa
    )
    return bool(choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a boolean mask as numbers to add to the scores (torch's `convert_boolean_attn_mask`)."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask.logical_not(), float("-inf"), torch.zeros((), dtype=dtype, device=mask.device))


def _flash(attention: AttentionCall, scale: float | None) -> torch.Tensor:
    head = attention.query.shape[-1]
    padded = [_padded(tensor, _HEAD_ALIGNMENT) for tensor in attention.inputs]
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        *padded,
        attention.dropout,
        attention.causal,
        _NO_MASK_BACK,
        scale=scale or head**-0.5,
    )
    return _first(out)[..., :head]


def _efficient(attention: AttentionCall, scale: float | None) -> torch.Tensor:
    query, key, value = attention.inputs
    return _first(
        torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, _mask_for(attention), attention.trains, attention.dropout, attention.causal, scale=scale
        )
    )


def _cudnn(attention: AttentionCall, scale: float | None) -> torch.Tensor:
    query, key, value, mask, dropout, causal, _ = attention
    return _first(
        torch.ops.aten._scaled_dot_product_cudnn_attention(
            query,
            key,
            value,
            mask,
            attention.trains,
            dropout,
            causal,
            _NO_MASK_BACK,
            scale=scale,
        )
    )


def _math(attention: AttentionCall, scale: float | None) -> torch.Tensor:
    query, key, value, mask, dropout, causal, gqa = attention
    return _first(
        torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=gqa
        )
    )


_KERNELS: dict[Backend, Callable[[AttentionCall, float | None], torch.Tensor]] = {
    Backend.FLASH: _flash,
    Backend.EFFICIENT: _efficient,
    Backend.CUDNN: _cudnn,
    Backend.MATH: _math,
}


def _mask_for(attention: AttentionCall) -> torch.Tensor | None:
    """Return the mask as the memory-efficient kernel wants it, copied where its rows are not aligned."""
    mask = attention.mask
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, _MASK_ALIGNMENT - width % _MASK_ALIGNMENT))[..., :width]
    return mask.expand(*attention.query.shape[:3], attention.key.shape[2])


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    short = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, short)) if short else tensor


def _first(outputs: Any) -> torch.Tensor:
    first: torch.Tensor = outputs[0]
    return first
