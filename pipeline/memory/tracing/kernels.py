"""Imitates a GPU's kernels: which one computes attention, and the memory that kernels allocate internally.

No tensor shows that memory, so traces add it from tables. Sources: torch 2.13, under aten/src/ATen/native unless named
otherwise, at each rule; operators without a rule cost nothing. A rule must change what some step takes: those for
losses, norms, sorting and linear algebra changed no peak of any model family of the tests by 0.5%. Small real steps
measure the CPU's kernels (`estimating/traced`); its own tables have only the two whose memory grows otherwise than the
rest of a step.

The choice follows sdp_utils.cpp in transformers/cuda; the padding of heads and masks attention.cpp in the same folder.
Outputs, log-sum-exps and tensors saved for backward are those of torch's own shape functions. Assumed: a torch with all
kernels built and a cuDNN newer than 9.15, as wheels for CUDA 13 have; no nested tensors; no Flash Attention 3; pointers
as aligned as their offsets.

Shapes: B items, H heads, Q queries, K keys, D head dimension.
"""

from __future__ import annotations

from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.backends import cuda

from pipeline.memory.tracing.fake_mode import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

Operator: TypeAlias = Any  # torch._ops.OpOverload, which has no types
Capability: TypeAlias = tuple[int, int]

_BROADCAST: Any = torch.broadcast_shapes  # torch gives these no types
_SWITCHES: Any = cuda  # which kernels are allowed
_ATEN: Any = torch.ops.aten

FLOAT, INDEX = 4, 8
_LONGEST_ROW = 128  # cuda/mem_eff_attention: wider heads are accumulated in memory

_HALVES = (torch.float16, torch.bfloat16)
_OLDEST_FLASH, _OLDEST_EFFICIENT, _NEWEST = (8, 0), (5, 0), (12, 1)
_LARGEST_FLASH_HEAD = 256
_LARGEST_CUDNN_HEAD = 128  # 256 on Hopper with a cuDNN newer than 9.22, which no wheel has yet
_LARGEST_CUDNN_COUNT = 65535
_NO_MASK_BACK = False  # the mask of dropped numbers is not needed
_MASK_ALIGNMENT = _HEAD_ALIGNMENT = 8


# ---- which kernel computes attention ----


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


# ---- the memory inside kernels ----


class Call(NamedTuple):
    """A call of an operator with its result."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any

    def argument(self, place: int, name: str, default: Any) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


Rule: TypeAlias = "Callable[[Call], int]"


def operator_name(op: Operator) -> str:
    """Return an operator's name, whatever its overload."""
    return str(op._schema.name).removeprefix("aten::")


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _copied(*places: int) -> Rule:
    """Return the rule of kernels that copy these arguments where they are not contiguous, as expanded gradients are."""
    return lambda call: sum(call.args[place].nbytes for place in places if not call.args[place].is_contiguous())


def _three_linear(call: Call) -> int:
    """Linear.cpp, `_trilinear`: for each output of nn.Bilinear, two products of pairs."""
    tensors, expanded, summed = call.args[:3], call.args[3:6], call.args[6]
    unrolled = call.argument(7, "unroll_dim", 1)
    shapes = []
    for tensor, dims in zip(tensors, expanded, strict=True):
        shape = list(tensor.shape)
        for dim in sorted(dims):
            shape.insert(dim, 1)
        shapes.append([1 if dim == unrolled else size for dim, size in enumerate(shape)])
    early = [dim for dim in summed if dim in expanded[2]]  # summed before the third is multiplied
    pair, whole = _BROADCAST(*shapes[:2]), _BROADCAST(*shapes)
    first = prod(size for dim, size in enumerate(pair) if dim not in early)
    second = prod(size for dim, size in enumerate(whole) if dim not in summed)
    return int((first + second) * tensors[0].element_size())


def _copied_heads(tensor: Tensor) -> int:
    """Return the bytes of the copy that is made if the heads are not contiguous."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.nbytes


def _flash_backward(call: Call) -> int:
    """transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: softmax_d, dq_accum, and keys' gradients for every head."""
    grad, query, key, _, out = call.args[:5]
    items, heads, queries, head = query.shape
    rounded = _rounded_up(head, 32 if head <= _LONGEST_ROW else 64)
    sums = items * heads * _rounded_up(queries, 128) * (1 + rounded) * FLOAT
    expanded = 2 * items * heads * key.shape[2] * head * query.element_size() if key.shape[1] != heads else 0
    return int(sums + expanded) + _copied_heads(grad) + _copied_heads(out)


def _efficient_forward(call: Call) -> int:
    """transformers/cuda/mem_eff_attention/kernel_forward.h: wide heads in half precision are accumulated in fp32."""
    query, value = call.args[0], call.args[2]
    wide = query.element_size() == 2 and value.shape[-1] > _LONGEST_ROW
    return int(query.shape[0] * query.shape[1] * query.shape[2] * value.shape[-1] * FLOAT) if wide else 0


def _efficient_backward(call: Call) -> int:
    """transformers/cuda/attention_backward.cu and mem_eff_attention/kernel_backward.h: `delta`, then a workspace."""
    grad, query, key, value = call.args[:4]
    items, heads, queries, head = query.shape
    widest, half = max(head, value.shape[-1]), query.element_size() == 2
    rows = 128 if widest > 64 else 64
    columns = 128 if half and 64 < widest <= 128 else 64
    tiles = ceil(queries / rows) * ceil(head / columns) * (rows * columns + 4)
    if half and widest > _LONGEST_ROW:  # gradients of keys and values are accumulated in memory too
        splits = max(1, min(ceil(key.shape[2] / columns), 200 // (items * heads)))
        tiles += splits * columns * (_rounded_up(head, rows) + _rounded_up(value.shape[-1], rows))
    delta = items * heads * queries * FLOAT
    product = 0 if half else items * heads * queries * value.shape[-1] * FLOAT + delta
    return int(delta + max(product, items * heads * _rounded_up(tiles, 4) * FLOAT)) + _copied_heads(grad)


def _put(call: Call) -> int:
    """cuda/Indexing.cu, index_put_with_sort_kernel: places, their order before and after, and cub's buffers."""
    indices = [index for index in call.args[1] if index is not None]
    if not call.argument(3, "accumulate", False) or not indices:  # noqa: FBT003
        return 0
    return 6 * INDEX * int(prod(_BROADCAST(*(index.shape for index in indices))))


def _convolution_reserve(call: Call) -> int:
    """Return a reserve: cuDNN's workspace is known only on the card; input and output in another layout are assumed."""
    tensors = call.args[0], call.result if isinstance(call.result, torch.Tensor) else call.args[1]
    return sum(int(tensor.nbytes) for tensor in tensors)


def _recurrent_kept(call: Call) -> int:
    """Return the memory that cuDNN keeps of an LSTM layer for backward, assumed: gates, cells, their tanh, outputs."""
    steps, items = call.args[0].shape[:2]
    width, is_training = call.args[10], call.args[15]
    return int(steps * items * width * 7 * call.args[0].element_size()) if is_training else 0


def _recurrent_scratch(call: Call) -> int:
    """Return cuDNN's workspace for an LSTM layer, assumed: the gates of all steps, and the weights once more."""
    steps, items = call.args[0].shape[:2]
    weights = sum(int(arg.nbytes) for arg in call.args[1:5])
    return int(steps * items * call.args[1].shape[0] * call.args[0].element_size()) + weights


def _onednn_row(width: int) -> int:
    """Return the length of a row as oneDNN lays it out (rnn_utils.cpp, `get_good_ld`)."""
    padded = _rounded_up(width, 16)  # numbers of a cache line
    return padded if padded % 256 else padded + 16  # else rows would fall together in the cache


def _onednn_recurrent_kept(call: Call) -> int:
    """OneDNN's rnn_utils.cpp: an LSTM layer keeps gates, outputs, states and their gradients for backward, in pages."""
    steps, items, inputs = call.args[0].shape
    width, is_training = call.args[10], call.args[15]
    between = 2 * (steps + 1) * items  # states before and after each step, of the layer and below it
    parts = [steps * items * _onednn_row(4 * width), steps * items * _onednn_row(width)]
    parts += [between * _onednn_row(max(inputs, width))] * 3 + [between * width] * 2
    return sum(_rounded_up(FLOAT * part, 4096) for part in parts) if is_training else 0


_SCRATCH: dict[str, Rule] = {
    **dict.fromkeys(("_softmax", "_log_softmax"), _copied(0)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _copied(0, 1)),
    "_trilinear": _three_linear,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _flash_backward,  # about: only the GPU knows cuDNN's workspace
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _put),
    **dict.fromkeys(("convolution", "convolution_backward"), _convolution_reserve),
    **dict.fromkeys(("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), _recurrent_scratch),
}
_KEPT: dict[str, Rule] = {"mkldnn_rnn_layer": _recurrent_kept}
_SCRATCH_ON_CPU: dict[str, Rule] = {"_trilinear": _three_linear}
_KEPT_ON_CPU: dict[str, Rule] = {"mkldnn_rnn_layer": _onednn_recurrent_kept}


def _charged(rules: dict[str, Rule], op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that a table has for a call; no rule knows nested tensors."""
    rule = rules.get(operator_name(op))
    if rule is None or any(getattr(value, "is_nested", False) for value in (*args, result)):
        return 0
    return max(0, int(rule(Call(args, kwargs, result))))


def _hidden(rules: dict[str, Rule], op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    size = _charged(rules, op, args, kwargs, result)
    last = result[-1] if isinstance(result, (list, tuple)) else result
    return max(0, size - int(last.untyped_storage().nbytes())) if size else 0


# The peak bytes of an operator's kernel beyond its results.
scratch_bytes, scratch_bytes_cpu = partial(_charged, _SCRATCH), partial(_charged, _SCRATCH_ON_CPU)
# By how many bytes the storage of the last result is larger than here.
hidden_bytes, hidden_bytes_cpu = partial(_hidden, _KEPT), partial(_hidden, _KEPT_ON_CPU)
