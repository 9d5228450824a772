"""Memory that the CPU's kernels allocate and release internally, and what they keep that fake ones do not.

Measured with torch.profiler on x86 with AVX-512, and tested so.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from pipeline.memory.tracing.kernel_workspace import (
    BOTH_DEVICES,
    FLOAT,
    INDEX,
    KEPT_ON_BOTH,
    Call,
    Operator,
    Rule,
    bytes_held,
    copied,
    copied_heads,
    is_operand,
    taken,
    together,
    unseen,
    up_to_multiple,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_BLOCK = 16  # channels that oneDNN keeps together with AVX-512
_JIT_BYTES = 8216  # what a oneDNN convolution of channels_last takes beside its weights, measured


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
    return copied_heads(grad) + int(torch.get_num_threads() * a_thread)


def _weight_sums_cpu(call: Call) -> int:
    """cpu/layer_norm_kernel.cpp: each thread's sums."""
    return int(2 * torch.get_num_threads() * prod(call.args[2]) * call.args[0].element_size())


def _batch_norm_backward_cpu(call: Call) -> int:
    """Normalization.cpp: the gradient once more, where it is not expanded."""
    return bytes_held(call.args[1]) if 0 not in call.args[0].stride() else 0


def _sort_cpu(call: Call) -> int:
    """cpu/SortingKernel.cpp: one row's order."""
    return INDEX * int(call.args[0].shape[call.dim]) if call.args[0].dim() else 0


def _blocked(tensor: Tensor, *channels: int) -> int:
    """Return a tensor's bytes in oneDNN's layout, where the dimensions that are channels come in blocks."""
    padded = [up_to_multiple(size, _BLOCK) if place in channels else size for place, size in enumerate(tensor.shape)]
    return int(prod(padded) * tensor.element_size())


def _is_product(weight: Tensor, stride: Sequence[int]) -> bool:
    """Tell whether a convolution is a matrix product, which needs no other layout."""
    return prod(weight.shape[2:]) == 1 and prod(stride) == 1


def _is_channels_last(image: Tensor, weight: Tensor) -> bool:
    """Tell whether a convolution is in oneDNN's own order already (`mkldnn_conv_use_channels_last`)."""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    order = orders.get(image.dim())
    if order is None:
        return False
    return any(tensor.is_contiguous(memory_format=order) > tensor.is_contiguous() for tensor in (image, weight))


def _brought_in_order(image: Tensor, weight: Tensor, *tensors: Tensor) -> int:
    """Return the bytes of copies of tensors that are not in the convolution's memory order: Convolution.cpp."""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    order = orders[image.dim()] if _is_channels_last(image, weight) else torch.contiguous_format
    return sum(bytes_held(one) for one in tensors if not one.is_contiguous(memory_format=order))


def _columns(image: Tensor, weight: Tensor, out: Tensor) -> int:
    """Return the bytes of a convolution in double, which oneDNN lacks: ConvolutionMM2d.cpp, all windows."""
    windows = int(image.shape[0]) * prod(out.shape[2:])
    return int(windows * image.shape[1] * prod(weight.shape[2:]) * image.element_size())


def _promoted(call: Call) -> int:
    """TensorIterator.cpp: on a CPU, numbers of another type than the common one are converted first."""
    pair = [arg for arg in call.args[:2] if isinstance(arg, torch.Tensor)]
    common = torch.result_type(*call.args[:2])
    return sum(int(tensor.numel()) * common.itemsize for tensor in pair if tensor.dtype != common and tensor.dim())


def _entering(image: Tensor, weight: Tensor) -> int:
    """Return the bytes of the input in oneDNN's layout; one with few channels in a group is read as it is."""
    return bytes_held(image) if weight.shape[1] >= _BLOCK else 0


def _convolution_cpu(call: Call) -> int:
    """oneDNN, measured: input, weight and output are there in its own layout, too."""
    image, weight, stride = call.args[0], call.args[1], call.args[3]
    if image.dtype == torch.float64:
        return _columns(image, weight, call.result)
    return _brought_in_order(image, weight, image) + _convolved(call, image, weight, stride)


def _convolved(call: Call, image: Tensor, weight: Tensor, stride: Sequence[int]) -> int:
    """Return what a convolution takes of tensors that are in its memory order."""
    if call.args[6]:  # transposed
        return 2 * bytes_held(call.result)
    if _is_product(weight, stride):
        return 0
    if _is_channels_last(image, weight):
        return bytes_held(weight) + (_blocked(weight, 0) + _JIT_BYTES if call.args[8] == 1 else 0)
    leaving = _blocked(call.result, 1)
    return max(_entering(image, weight) + _blocked(weight, 0) + leaving - bytes_held(call.result), leaving)


def _convolution_backward_cpu(call: Call) -> int:
    """oneDNN, measured: first for the input's gradient, which strides take three times, then for the weight's."""
    grad, image, weight, stride = call.args[0], call.args[1], call.args[2], call.args[4]
    if image.dtype == torch.float64:
        return _columns(image, weight, grad)
    brought = _brought_in_order(image, weight, grad, image)
    if _is_product(weight, stride):
        return brought
    if _is_channels_last(image, weight):
        return brought + (3 * _blocked(weight, 0) if call.args[9] == 1 else 2 * bytes_held(weight))
    strided = prod(stride) > 1
    weights = _blocked(weight, 0, 1) if call.args[9] == 1 else bytes_held(weight)  # of groups as they are
    for_image = 3 * bytes_held(image) if strided else _blocked(grad, 1) + weights + _blocked(image, 1)
    for_weight = bytes_held(image) + _entering(image, weight) + _blocked(grad, 1) + _blocked(weight, 0)
    results = sum(bytes_held(part) for part in call.result if part is not None)
    return brought + max(0, max(for_image, for_weight) - results)


_PAGE = 4096  # oneDNN begins each part of a workspace at one
_LINE = 16  # numbers of a cache line
_ALIASED = 256  # numbers: rows as long as a multiple of it would fall together in the cache


def _row(width: int) -> int:
    """Return the length of a row as oneDNN lays it out (rnn_utils.cpp, `get_good_ld`)."""
    padded = up_to_multiple(width, _LINE)
    return padded if padded % _ALIASED else padded + _LINE


def _recurrent_workspace(call: Call) -> int:
    """OneDNN's rnn_utils.cpp: what an LSTM's layer keeps for backward: gates, outputs, states and their gradients."""
    steps, items, inputs = call.args[0].shape
    width, is_training = call.args[10], call.args[15]
    between = 2 * (steps + 1) * items  # states before and after each step, of the layer and below it
    parts = [steps * items * _row(4 * width), steps * items * _row(width)]
    parts += [between * _row(max(inputs, width))] * 3 + [between * width] * 2
    return sum(up_to_multiple(FLOAT * part, _PAGE) for part in parts) if is_training else 0


def _recurrent(call: Call) -> int:
    """oneDNN, measured: an LSTM's weights in its own layout, states, and gates: of all steps where items are few."""
    steps, items, inputs = call.args[0].shape
    width = call.args[10]
    at_once = steps if items < _FEW_ITEMS else 1
    weights = (inputs + width) * _row(4 * width)
    return int(FLOAT * (weights + items * (at_once * _row(4 * width) + 2 * width))) + _RECURRENT_BYTES


def _recurrent_backward(call: Call) -> int:
    """oneDNN, measured: the gates' gradients of all steps, and weights twice where their rows are padded."""
    steps, items, inputs = call.args[0].shape
    width = call.args[5].shape[-1]
    weights = sum(4 * width * (_row(dim) + (0 if dim % _ALIASED else dim)) for dim in (inputs, width))
    gates = items * (steps * _row(4 * width) + 4 * width)
    return int(FLOAT * (weights + gates)) + _RECURRENT_BYTES + copied(10)(call)


_FEW_ITEMS = 128  # rnn_utils.cpp: with fewer, inputs of all steps are multiplied at once
_RECURRENT_BYTES = 5432  # whatever the sizes


def _upsampled(call: Call) -> int:
    """cpu/UpSampleKernel.cpp: small images are made channels_last, and so is the result."""
    image, result = call.args[0], call.result
    is_last = image.is_contiguous(memory_format=torch.channels_last)
    if sum(result.shape[-2:]) > 128 and not (is_last and image.shape[1] > 3):
        return 0
    is_result_last = result.is_contiguous(memory_format=torch.channels_last)
    return (0 if is_last else bytes_held(image)) + (0 if is_result_last else bytes_held(result))


def _pooled_backward(call: Call) -> int:
    """MaxPooling and DilatedMaxPool2d.cpp: gradient, places and result in the memory order of what was pooled."""
    grad, image, places = call.args[0], call.args[1], call.args[7]
    last = 0 not in grad.stride() and image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last)
    order = torch.channels_last if last and not image.is_contiguous() else torch.contiguous_format
    touched = (grad, places, call.result)
    return sum(bytes_held(one) for one in touched if not one.is_contiguous(memory_format=order))


def _cast_before_sum(call: Call) -> int:
    """TensorIterator.cpp: on a CPU, what is summed in another type is converted first."""
    numbers = call.args[0]
    return int(numbers.numel() * call.result.itemsize) if numbers.dtype != call.result.dtype else 0


def _one_operand(call: Call) -> int:
    """LinearAlgebra.cpp: batches of matrices are multiplied one by one."""
    return sum(bytes_held(one) // max(1, int(one.shape[0])) for one in call.args[:2] if not is_operand(one))


def _bag(call: Call) -> int:
    """EmbeddingBag.cpp: about; where each bag begins and ends."""
    return 3 * bytes_held(call.args[2])


_MIXING = "add add_ sub sub_ mul mul_ div div_ eq ne lt le gt ge minimum maximum"

_CPU: dict[str, Rule] = {
    **BOTH_DEVICES,
    **dict.fromkeys(_MIXING.split(), _promoted),
    "_scaled_dot_product_flash_attention_for_cpu": _flash_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward_cpu,
    "native_layer_norm_backward": together(_weight_sums_cpu, copied(0, 1)),
    "native_batch_norm_backward": _batch_norm_backward_cpu,
    "sort": _sort_cpu,
    "kthvalue": lambda call: int(call.args[0].numel()) * (call.args[0].element_size() + INDEX),
    "bmm": _one_operand,
    "gelu_backward": copied(0, 1),
    "native_layer_norm": copied(0),
    "im2col": lambda call: bytes_held(call.args[0]) + copied(0)(call),
    "_embedding_bag": _bag,
    "_embedding_bag_dense_backward": lambda call: 3 * bytes_held(call.args[1]) + copied(0)(call),
    "_embedding_bag_backward": lambda call: 3 * bytes_held(call.args[1]) + copied(0)(call),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d"), _upsampled),
    "max_pool2d_with_indices_backward": _pooled_backward,
    **dict.fromkeys(("sum", "cumsum"), _cast_before_sum),
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward,
    "convolution": _convolution_cpu,
    "convolution_backward": _convolution_backward_cpu,
}


_CPU_KEPT: dict[str, Rule] = {**KEPT_ON_BOTH, "mkldnn_rnn_layer": _recurrent_workspace}


def scratch_bytes_cpu(op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the peak bytes of the operator's CPU kernel beyond its results."""
    return taken(_CPU, op, args, kwargs, result)


def hidden_bytes_cpu(op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return by how many bytes the storage of the last result is larger than the one here."""
    return unseen(_CPU_KEPT, op, args, kwargs, result)
