"""What the CPU's kernels allocate within themselves and give back, as `scratch` says of CUDA's.

Measured with torch.profiler on torch 2.13, x86 with AVX-512, and tested so.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from pipeline.memory.tracing.kernel_workspace import (
    FLOAT,
    INDEX,
    Call,
    copied_bytes,
    distances,
    group_sums,
    log_sum_exp,
    operator_name,
    reduced_loss,
    tensor_bytes,
    up,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pipeline.memory.tracing.kernel_workspace import Operator, Rule

_BLOCK = 16  # channels that oneDNN keeps together with AVX-512
_JIT_BYTES = 8216  # what a oneDNN convolution of channels_last takes beside its weights, measured


def scratch_bytes_cpu(op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return what the operator's CPU kernel takes beyond its results, at its peak."""
    rule = _CPU.get(operator_name(op))
    return max(0, rule(Call(args, kwargs, result))) if rule else 0


def _split(queries: int) -> int:
    """cpu/FlashAttentionKernel.cpp: how many queries a thread takes at once."""
    return min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)


def _flash_cpu(call: Call) -> int:
    """cpu/FlashAttentionKernel.cpp: each thread's scores, and its share of the result."""
    query, key = call.args[0], call.args[1]
    rows, columns = _split(query.shape[2]), min(512, key.shape[2])
    lower = rows * columns * query.element_size() if query.element_size() == 2 else 0
    a_thread = rows * (columns + 2 + query.shape[3]) * max(FLOAT, query.element_size()) + lower
    return int(torch.get_num_threads() * a_thread)


def _flash_backward_cpu(call: Call) -> int:
    """cpu/FlashAttentionKernel.cpp: each thread's scores and their gradients, and a copy of the result's gradient."""
    grad, query, key = call.args[:3]
    rows, columns = _split(query.shape[2]), min(512, key.shape[2])
    a_thread = rows * (2 * columns + 1) * max(FLOAT, query.element_size())
    return copied_bytes(grad) + int(torch.get_num_threads() * a_thread)


def _weight_sums_cpu(call: Call) -> int:
    """cpu/layer_norm_kernel.cpp: each thread's sums."""
    return int(2 * torch.get_num_threads() * prod(call.args[2]) * call.args[0].element_size())


def _batch_norm_backward_cpu(call: Call) -> int:
    """Normalization.cpp: the gradient once more."""
    return tensor_bytes(call.args[1])


def _sort_cpu(call: Call) -> int:
    """cpu/SortingKernel.cpp: one row's order."""
    return INDEX * int(call.args[0].shape[call.dim]) if call.args[0].dim() else 0


def _blocked(tensor: Tensor, *channels: int) -> int:
    """Return what a tensor takes in oneDNN's layout: its channels, these dimensions, come in blocks."""
    padded = [up(size, _BLOCK) if place in channels else size for place, size in enumerate(tensor.shape)]
    return int(prod(padded) * tensor.element_size())


def _is_product(weight: Tensor, stride: Sequence[int]) -> bool:
    """Tell whether a convolution is a matrix product, which needs no other layout."""
    return prod(weight.shape[2:]) == 1 and prod(stride) == 1


def _is_channels_last(image: Tensor, weight: Tensor) -> bool:
    """Tell whether a convolution is in oneDNN's own order already (`mkldnn_conv_use_channels_last`)."""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    order = orders.get(image.dim())
    pair = (image, weight)
    return order is not None and any(one.is_contiguous(memory_format=order) > one.is_contiguous() for one in pair)


def _copied(grad: Tensor, image: Tensor, weight: Tensor) -> int:
    """Return what the output's gradient takes once more where it is not in the input's order: Convolution.cpp."""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    order = orders[image.dim()] if _is_channels_last(image, weight) else torch.contiguous_format
    return 0 if grad.is_contiguous(memory_format=order) else tensor_bytes(grad)


def _columns(image: Tensor, weight: Tensor, out: Tensor) -> int:
    """Return what a convolution in double takes, which oneDNN does not know: ConvolutionMM2d.cpp, all windows."""
    windows = int(image.shape[0]) * prod(out.shape[2:])
    return int(windows * image.shape[1] * prod(weight.shape[2:]) * image.element_size())


def _promoted(call: Call) -> int:
    """TensorIterator.cpp: on a CPU, numbers of another type than the common one are converted first."""
    pair = [arg for arg in call.args[:2] if isinstance(arg, torch.Tensor)]
    common = torch.result_type(*call.args[:2])
    return sum(int(one.numel()) * common.itemsize for one in pair if one.dtype != common and one.dim())


def _safe_softmax(call: Call) -> int:
    """attention.cpp: which numbers are masked, and which rows wholly."""
    rows = int(call.result.numel() // max(1, call.result.shape[-1])) if call.result.dim() else 1
    return int(call.result.numel()) + rows


def _entering(image: Tensor) -> int:
    """Return what the input takes in oneDNN's layout: one of few channels is read as it is."""
    return tensor_bytes(image) if image.shape[1] >= _BLOCK else 0


def _convolution_cpu(call: Call) -> int:
    """oneDNN, measured: input, weight and output are there in its own layout, too."""
    image, weight, stride = call.args[0], call.args[1], call.args[3]
    if image.dtype == torch.float64:
        return _columns(image, weight, call.result)
    if _is_product(weight, stride):
        return 0
    if _is_channels_last(image, weight):
        return tensor_bytes(weight) + (_blocked(weight, 0) + _JIT_BYTES if call.args[8] == 1 else 0)
    leaving = _blocked(call.result, 1)
    return max(_entering(image) + _blocked(weight, 0) + leaving - tensor_bytes(call.result), leaving)


def _convolution_backward_cpu(call: Call) -> int:
    """oneDNN, measured: first for the input's gradient, which strides take three times, then for the weight's."""
    grad, image, weight, stride = call.args[0], call.args[1], call.args[2], call.args[4]
    if image.dtype == torch.float64:
        return _columns(image, weight, grad)
    if _is_product(weight, stride):
        return _copied(grad, image, weight)
    if _is_channels_last(image, weight):
        return 3 * _blocked(weight, 0) if call.args[9] == 1 else 2 * tensor_bytes(weight)
    strided = prod(stride) > 1
    for_image = 3 * tensor_bytes(image) if strided else _blocked(grad, 1) + _blocked(weight, 0, 1) + _blocked(image, 1)
    for_weight = tensor_bytes(image) + _entering(image) + _blocked(grad, 1) + _blocked(weight, 0)
    return max(for_image, for_weight) - sum(tensor_bytes(part) for part in call.result if part is not None)


_MIXING = "add add_ sub sub_ mul mul_ div div_ eq ne lt le gt ge minimum maximum"

_CPU: dict[str, Rule] = {
    **dict.fromkeys(_MIXING.split(), _promoted),
    "_safe_softmax": _safe_softmax,
    "_scaled_dot_product_flash_attention_for_cpu": _flash_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward_cpu,
    "native_layer_norm_backward": _weight_sums_cpu,
    "native_batch_norm_backward": _batch_norm_backward_cpu,
    "native_group_norm_backward": group_sums,
    "sort": _sort_cpu,
    "convolution": _convolution_cpu,
    "convolution_backward": _convolution_backward_cpu,
    "logsumexp": log_sum_exp,
    "_cdist_forward": distances,
    "mse_loss": reduced_loss(1),
    "smooth_l1_loss": reduced_loss(1),
    "huber_loss": reduced_loss(1),
    "binary_cross_entropy_with_logits": reduced_loss(2),
}
