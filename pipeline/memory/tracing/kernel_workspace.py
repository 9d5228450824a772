"""Memory that kernels allocate and release internally: no tensor shows it, so traces add it from these tables.

Sources: torch's own (2.13, under aten/src/ATen/native unless said otherwise), named at each entry. Approximate, where
it says "about"; what a table does not know costs nothing. The CPU's were measured with torch.profiler on x86 with
AVX-512, and are tested so.
"""

from __future__ import annotations

from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

Operator: TypeAlias = Any  # torch._ops.OpOverload, which has no types

_BROADCAST: Any = torch.broadcast_shapes  # torch gives it no types
FLOAT, INDEX = 4, 8
_SORT_IN_PLACE = 1024  # cuda/Sort.cpp: shorter ones are sorted within a block
_SMALL_EMBEDDING = 3072  # cuda/Embedding.cu: fewer indices are added up without sorting
_ROWS_A_THREAD = 10  # cuda/EmbeddingBackwardKernel.cu: NROWS_PER_THREAD
_LONGEST_ROW = 128  # cuda/mem_eff_attention: wider heads are accumulated in memory
_MM_FOR_DISTANCES = 25  # Distance.cpp: more rows than that go through a matrix product
_NORM_BLOCKS = 64  # cuda/layer_norm_kernel.cu: partial sums of a weight's gradient, at most about so many


class Call(NamedTuple):
    """A call of an operator with its result."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any

    def argument(self, place: int, name: str, default: Any) -> Any:
        """Return an argument by its place or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def dim(self) -> int:
        """Return the dimension that it sorts along, whose position differs between overloads."""
        numbers = [arg for arg in self.args[1:] if isinstance(arg, int) and not isinstance(arg, bool)]
        return int(self.kwargs.get("dim", numbers[0] if numbers else -1))


Rule: TypeAlias = "Callable[[Call], int]"


def hidden_bytes(op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return by how many bytes the real result's storage is larger than the fake one's.

    Loss.cpp: the mean is written into what was allocated for all the terms; CPU and CUDA alike.
    """
    if (
        operator_name(op) not in ("mse_loss", "smooth_l1_loss")
        or Call(args, kwargs, result).argument(2, "reduction", 1) == 0
    ):
        return 0
    return _loss_bytes(args) - int(result.element_size())


def operator_name(op: Operator) -> str:
    """Return an operator's name, whatever its overload."""
    return str(op._schema.name).removeprefix("aten::")


def _bytes_of(tensor: Tensor | None) -> int:
    """Return a tensor's bytes; 0 for None."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def _up(count: int, multiple: int) -> int:
    """Return a count rounded up to a multiple."""
    return -(-count // multiple) * multiple


# ---- both ----


def _loss_bytes(args: Sequence[Any]) -> int:
    return int(prod(_BROADCAST(args[0].shape, args[1].shape)) * args[0].element_size())


def _reduced_loss(times: int) -> Rule:
    """Loss.cpp: the terms are written out before they are added up; of cross-entropy, the sigmoid's logarithm too."""

    def rule(call: Call) -> int:
        reduced = not call.result.dim() or not call.args[0].dim()
        return times * _loss_bytes(call.args) if reduced else (times - 1) * _loss_bytes(call.args)

    return rule


def _log_sum_exp(call: Call) -> int:
    """ReduceOps.cpp: the exponentials, and the largest of each row."""
    return _bytes_of(call.args[0]) + _bytes_of(call.result)


def _distances(call: Call) -> int:
    """Distance.cpp: `_euclidean_dist` puts norms and ones beside both, and multiplies."""
    first, second, norm, mode = call.args[0], call.args[1], call.args[2], call.argument(3, "compute_mode", None)
    rows, columns, width = first.shape[-2], second.shape[-2], first.shape[-1]
    many = rows > _MM_FOR_DISTANCES or columns > _MM_FOR_DISTANCES
    if norm != 2 or mode == 2 or not (mode == 1 or many):
        return 0
    items = call.result.numel() // max(1, rows * columns)
    beside = (rows + columns) * (width + 2)
    before = rows * width + rows * (width + 2) + 2 * (rows + columns) - rows * columns
    return int(items * max(beside, before) * call.result.element_size())


def _group_sums(call: Call) -> int:
    """group_norm_kernel: two sums for each item and channel."""
    return int(2 * call.args[5] * call.args[6] * call.args[0].element_size())


# ---- CUDA ----


def _copied_bytes(tensor: Tensor) -> int:
    """Return the bytes of the copy that is made if the heads are not contiguous."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else _bytes_of(tensor)


def _flash_backward(call: Call) -> int:
    """transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: softmax_d, dq_accum, and keys' gradients for every head."""
    grad, query, key, _, out = call.args[:5]
    items, heads, queries, head = query.shape
    rounded = _up(head, 32 if head <= _LONGEST_ROW else 64)
    sums = items * heads * _up(queries, 128) * (1 + rounded) * FLOAT
    expanded = 2 * items * heads * key.shape[2] * head * query.element_size() if key.shape[1] != heads else 0
    return int(sums + expanded) + _copied_bytes(grad) + _copied_bytes(out)


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
        tiles += splits * columns * (_up(head, rows) + _up(value.shape[-1], rows))
    delta = items * heads * queries * FLOAT
    product = 0 if half else items * heads * queries * value.shape[-1] * FLOAT + delta
    return int(delta + max(product, items * heads * _up(tiles, 4) * FLOAT)) + _copied_bytes(grad)


def _embedding_backward(call: Call) -> int:
    """cuda/Embedding.cu, cuda/EmbeddingBackwardKernel.cu: indices are sorted, rows added up in parts."""
    grad, indices, rows = call.args[0], call.args[1], call.args[2]
    count, width = indices.numel(), grad.shape[-1]
    if count <= _SMALL_EMBEDDING:
        return 0
    segments = min(count, rows)
    parts = count // _ROWS_A_THREAD + segments
    sums = parts * (width * max(FLOAT, grad.element_size()) + indices.element_size())
    return int(2 * count * indices.element_size() + max(sums + 3 * count * indices.element_size(), _sorting(count)))


def _sorting(count: int, key_bytes: int = INDEX) -> int:
    """Return about what cub's radix sort of pairs needs: a second buffer for keys and for values."""
    return count * (key_bytes + INDEX)


def _sort(call: Call) -> int:
    """cuda/Sort.cpp: about; the order before, what cub takes, and a copy where rows are not next to each other."""
    tensor = call.args[0]
    dim = call.dim
    if not tensor.dim() or tensor.shape[dim] <= _SORT_IN_PLACE:
        return 0
    aside = 0 if tensor.stride(dim) == 1 else 3 * _bytes_of(tensor)
    return aside + INDEX * int(tensor.numel()) + _sorting(tensor.numel(), tensor.element_size())


def _top_k(call: Call) -> int:
    """cuda/TensorTopK.cpp: many are sorted after they were found."""
    values = call.result[0]
    return _sorting(values.numel(), values.element_size()) + INDEX * int(values.numel())


def _put(call: Call) -> int:
    """cuda/Indexing.cu, index_put_with_sort_kernel: places, their order before and after, and what cub takes."""
    indices = [index for index in call.args[1] if index is not None]
    if not call.argument(3, "accumulate", False) or not indices:  # noqa: FBT003
        return 0
    count = prod(_BROADCAST(*(index.shape for index in indices)))
    return int(4 * INDEX * count + _sorting(count))


def _add(call: Call) -> int:
    """cuda/Indexing.cu, cuda/ScatterGatherKernel.cu: atomics; sorted only where results must be the same each time."""
    if not torch.are_deterministic_algorithms_enabled():
        return 0
    count = int(call.args[2].numel())
    return int(4 * INDEX * count + _sorting(count))


def _prefix_sum(call: Call) -> int:
    """cuda/IndexKernel.cu: where each chosen number is from."""
    return INDEX * int(call.args[1].numel())


def _weight_sums(call: Call) -> int:
    """cuda/layer_norm_kernel.cu: about; partial sums of the gradients of weight and bias."""
    return int(2 * _NORM_BLOCKS * prod(call.args[2]) * FLOAT)


def _convolution_reserve(call: Call) -> int:
    """Return a reserve: cuDNN's workspace is known only on the card; input and output in another layout are assumed."""
    return _bytes_of(call.args[0]) + _bytes_of(call.result if isinstance(call.result, torch.Tensor) else call.args[1])


_BLOCK = 16  # channels that oneDNN keeps together with AVX-512
_JIT_BYTES = 8216  # what a oneDNN convolution of channels_last takes beside its weights, measured


# ---- the CPU ----


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
    return _copied_bytes(grad) + int(torch.get_num_threads() * a_thread)


def _weight_sums_cpu(call: Call) -> int:
    """cpu/layer_norm_kernel.cpp: each thread's sums."""
    return int(2 * torch.get_num_threads() * prod(call.args[2]) * call.args[0].element_size())


def _batch_norm_backward_cpu(call: Call) -> int:
    """Normalization.cpp: the gradient once more."""
    return _bytes_of(call.args[1])


def _sort_cpu(call: Call) -> int:
    """cpu/SortingKernel.cpp: one row's order."""
    return INDEX * int(call.args[0].shape[call.dim]) if call.args[0].dim() else 0


def _blocked(tensor: Tensor, *channels: int) -> int:
    """Return a tensor's bytes in oneDNN's layout, where the dimensions that are channels come in blocks."""
    padded = [_up(size, _BLOCK) if place in channels else size for place, size in enumerate(tensor.shape)]
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


def _copied(grad: Tensor, image: Tensor, weight: Tensor) -> int:
    """Return the bytes of the copy of the output's gradient if its memory order is not the input's: Convolution.cpp."""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    order = orders[image.dim()] if _is_channels_last(image, weight) else torch.contiguous_format
    return 0 if grad.is_contiguous(memory_format=order) else _bytes_of(grad)


def _columns(image: Tensor, weight: Tensor, out: Tensor) -> int:
    """Return the bytes of a convolution in double, which oneDNN lacks: ConvolutionMM2d.cpp, all windows."""
    windows = int(image.shape[0]) * prod(out.shape[2:])
    return int(windows * image.shape[1] * prod(weight.shape[2:]) * image.element_size())


def _promoted(call: Call) -> int:
    """TensorIterator.cpp: on a CPU, numbers of another type than the common one are converted first."""
    pair = [arg for arg in call.args[:2] if isinstance(arg, torch.Tensor)]
    common = torch.result_type(*call.args[:2])
    return sum(int(tensor.numel()) * common.itemsize for tensor in pair if tensor.dtype != common and tensor.dim())


def _safe_softmax(call: Call) -> int:
    """attention.cpp: which numbers are masked, and which rows wholly."""
    rows = int(call.result.numel() // max(1, call.result.shape[-1])) if call.result.dim() else 1
    return int(call.result.numel()) + rows


def _entering(image: Tensor) -> int:
    """Return the bytes of the input in oneDNN's layout; one with few channels is read as it is."""
    return _bytes_of(image) if image.shape[1] >= _BLOCK else 0


def _convolution_cpu(call: Call) -> int:
    """oneDNN, measured: input, weight and output are there in its own layout, too."""
    image, weight, stride = call.args[0], call.args[1], call.args[3]
    if image.dtype == torch.float64:
        return _columns(image, weight, call.result)
    if _is_product(weight, stride):
        return 0
    if _is_channels_last(image, weight):
        return _bytes_of(weight) + (_blocked(weight, 0) + _JIT_BYTES if call.args[8] == 1 else 0)
    leaving = _blocked(call.result, 1)
    return max(_entering(image) + _blocked(weight, 0) + leaving - _bytes_of(call.result), leaving)


def _convolution_backward_cpu(call: Call) -> int:
    """oneDNN, measured: first for the input's gradient, which strides take three times, then for the weight's."""
    grad, image, weight, stride = call.args[0], call.args[1], call.args[2], call.args[4]
    if image.dtype == torch.float64:
        return _columns(image, weight, grad)
    if _is_product(weight, stride):
        return _copied(grad, image, weight)
    if _is_channels_last(image, weight):
        return 3 * _blocked(weight, 0) if call.args[9] == 1 else 2 * _bytes_of(weight)
    strided = prod(stride) > 1
    for_image = 3 * _bytes_of(image) if strided else _blocked(grad, 1) + _blocked(weight, 0, 1) + _blocked(image, 1)
    for_weight = _bytes_of(image) + _entering(image) + _blocked(grad, 1) + _blocked(weight, 0)
    return max(for_image, for_weight) - sum(_bytes_of(part) for part in call.result if part is not None)


_MIXING = "add add_ sub sub_ mul mul_ div div_ eq ne lt le gt ge minimum maximum"

_BOTH: dict[str, Rule] = {
    "native_group_norm_backward": _group_sums,
    "logsumexp": _log_sum_exp,
    "_cdist_forward": _distances,
    "mse_loss": _reduced_loss(1),
    "smooth_l1_loss": _reduced_loss(1),
    "huber_loss": _reduced_loss(1),
    "binary_cross_entropy_with_logits": _reduced_loss(2),
    "_safe_softmax": _safe_softmax,
}
_CUDA: dict[str, Rule] = {
    **_BOTH,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _flash_backward,  # about: only the card knows cuDNN's workspace
    "embedding_dense_backward": _embedding_backward,
    "sort": _sort,
    "topk": _top_k,
    "index_put": _put,
    "index_put_": _put,
    "_index_put_impl_": _put,
    "_unsafe_index_put": _put,
    "index_add": _add,
    "index_add_": _add,
    "scatter_add": _add,
    "scatter_add_": _add,
    "masked_scatter": _prefix_sum,
    "masked_scatter_": _prefix_sum,
    "native_layer_norm_backward": _weight_sums,
    "convolution": _convolution_reserve,
    "convolution_backward": _convolution_reserve,
}
_CPU: dict[str, Rule] = {
    **_BOTH,
    **dict.fromkeys(_MIXING.split(), _promoted),
    "_scaled_dot_product_flash_attention_for_cpu": _flash_cpu,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward_cpu,
    "native_layer_norm_backward": _weight_sums_cpu,
    "native_batch_norm_backward": _batch_norm_backward_cpu,
    "sort": _sort_cpu,
    "convolution": _convolution_cpu,
    "convolution_backward": _convolution_backward_cpu,
}


def scratch_bytes(op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the peak bytes of the operator's CUDA kernel beyond its results."""
    return _scratch_bytes(_CUDA, op, Call(args, kwargs, result))


def scratch_bytes_cpu(op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the peak bytes of the operator's CPU kernel beyond its results."""
    return _scratch_bytes(_CPU, op, Call(args, kwargs, result))


def _scratch_bytes(rules: dict[str, Rule], op: Operator, call: Call) -> int:
    rule = rules.get(operator_name(op))
    return max(0, rule(call)) if rule else 0
