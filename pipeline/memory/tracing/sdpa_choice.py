"""Which kernel scaled dot-product attention takes on a GPU, and fake tensors that are allocated as it does.

The choice follows torch 2.13, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; the padding of heads and masks
attention.cpp in the same folder. Outputs, log-sum-exps and tensors saved for backward are those of torch's own shape
functions; `kernel_workspace` has what the kernels allocate internally.

Assumed: a torch with all kernels built and a cuDNN newer than 9.15, as wheels for CUDA 13 have; no nested tensors; no
Flash Attention 3; pointers as aligned as their offsets.

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
    from collections.abc import Iterator

Capability = tuple[int, int]

_SWITCHES: Any = cuda  # which kernels are allowed; torch gives them no types
_ATEN: Any = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)
_OLDEST_FLASH, _OLDEST_EFFICIENT, _NEWEST = (8, 0), (5, 0), (12, 1)
_LARGEST_FLASH_HEAD = 256
_LARGEST_CUDNN_HEAD = 128  # 256 on Hopper with a cuDNN newer than 9.22, which no wheel has yet
_LARGEST_CUDNN_COUNT = 65535
_NO_MASK_BACK = False  # the mask of dropped numbers is not needed
_MASK_ALIGNMENT = _HEAD_ALIGNMENT = 8


class Backend(StrEnum):
    """A kernel that computes attention."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    MATH = "math"
    CPU_FLASH = "cpu flash"  # of real tensors


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
    """Return the kernel that a GPU of this compute capability takes."""
    if not _is_plain(attention):
        return Backend.MATH
    usable = {Backend.CUDNN: _cudnn_can, Backend.FLASH: _flash_can, Backend.EFFICIENT: _efficient_can}
    return next((backend for backend, can in usable.items() if can(attention, capability)), Backend.MATH)


def _is_plain(attention: AttentionCall) -> bool:
    """Tell whether any fused kernel may run: four dimensions, one type, sizes that agree and are not 0."""
    query, key, value = attention.inputs
    if any(tensor.dim() != 4 or tensor.dtype != query.dtype or tensor.stride(-1) != 1 for tensor in attention.inputs):
        return False
    if not (query.shape[0] == key.shape[0] == value.shape[0]) or 0 in (query.shape[2], key.shape[2]):
        return False
    heads, of_key, of_value = query.shape[1], key.shape[1], value.shape[1]
    return of_key == of_value and (heads % of_key == 0 if attention.gqa else heads == of_key)


def _flash_can(attention: AttentionCall, capability: Capability) -> bool:
    query, key, value = attention.inputs
    head = query.shape[-1]
    if attention.mask is not None or query.dtype not in _HALVES or not _SWITCHES.flash_sdp_enabled():
        return False
    if not head == key.shape[-1] == value.shape[-1] <= _LARGEST_FLASH_HEAD:
        return False
    if attention.causal and query.shape[-2] != key.shape[-2]:
        return False
    has_little_shared_memory = (8, 6) <= capability <= (8, 9) or (12, 0) <= capability <= (12, 1)
    if has_little_shared_memory and any(tensor.requires_grad for tensor in attention.inputs):
        return head <= 192 or (not attention.dropout and head > 224)
    return _OLDEST_FLASH <= capability <= _NEWEST


def _efficient_can(attention: AttentionCall, capability: Capability) -> bool:
    query, key, value = attention.inputs
    ampere = capability >= (8, 0)
    types = (torch.float16, torch.float32, *((torch.bfloat16,) if ampere else ()))
    if query.dtype not in types or not _SWITCHES.mem_efficient_sdp_enabled():
        return False
    aligned = _gemm_alignment(query.dtype, capability)
    if query.shape[-1] != key.shape[-1] or query.shape[-1] % aligned or value.shape[-1] % aligned:
        return False
    if ampere and any(tensor.storage_offset() % aligned for tensor in attention.inputs):
        return False
    return _OLDEST_EFFICIENT <= capability <= _NEWEST


def _gemm_alignment(dtype: torch.dtype, capability: Capability) -> int:
    """Return a factor that the head dimension must have (torch's `minimum_gemm_alignment`)."""
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and dtype in _HALVES)
    least = 4 if capability >= (8, 0) else 1
    return max(least, 16 // dtype.itemsize) if tensor_cores else least


def _cudnn_can(attention: AttentionCall, capability: Capability) -> bool:
    query, key, value = attention.inputs
    if capability[0] not in (9, 10) or capability[1] not in (0, 3):  # check_prefer_cudnn_attention
        return False
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
    """Let attention on fake tensors allocate as on such a GPU, forward and backward; real tensors are left alone."""

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
    """Run the kernel that the GPU would take; on real tensors, the one that the CPU would."""
    query, key, value, mask, dropout, causal, gqa = attention
    chosen = Backend.MATH
    if isinstance(query, FakeTensor):
        chosen = attention_backend(attention, capability)
    elif _takes_flash_on_cpu(attention, scale):
        chosen = Backend.CPU_FLASH
    if mask is not None and mask.dtype == torch.bool:  # convert_boolean_attn_mask
        mask = torch.where(mask.logical_not(), float("-inf"), torch.zeros((), dtype=query.dtype, device=mask.device))
    head, trains = query.shape[-1], attention.trains
    out: torch.Tensor
    if chosen is Backend.CPU_FLASH:
        out, *_ = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout, causal, attn_mask=mask, scale=scale
        )
    elif chosen is Backend.FLASH:
        padded = [_padded(tensor, _HEAD_ALIGNMENT) for tensor in attention.inputs]
        scale = scale or head**-0.5
        out, *_ = _ATEN._scaled_dot_product_flash_attention(*padded, dropout, causal, _NO_MASK_BACK, scale=scale)
        out = out[..., :head]
    elif chosen is Backend.EFFICIENT:
        mask = _aligned(mask, (*query.shape[:3], key.shape[2]))
        out, *_ = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, mask, trains, dropout, causal, scale=scale
        )
    elif chosen is Backend.CUDNN:
        out, *_ = _ATEN._scaled_dot_product_cudnn_attention(
            query, key, value, mask, trains, dropout, causal, _NO_MASK_BACK, scale=scale
        )
    else:
        out, *_ = _ATEN._scaled_dot_product_attention_math(
            query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=gqa
        )
    return out


def _takes_flash_on_cpu(attention: AttentionCall, scale: float | None) -> bool:
    query, key, value, mask, dropout, causal, gqa = attention
    choice = torch._fused_sdp_choice(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=gqa
    )
    return bool(choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


def _aligned(mask: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return the mask as the memory-efficient kernel wants it, copied where its rows are not aligned."""
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
        width = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, _MASK_ALIGNMENT - width % _MASK_ALIGNMENT))[..., :width]
    return mask.expand(shape)


def _padded(tensor: torch.Tensor, multiple: int) -> torch.Tensor:
    short = -tensor.shape[-1] % multiple
    return torch.nn.functional.pad(tensor, (0, short)) if short else tensor
