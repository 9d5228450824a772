"""What kernels allocate within themselves and give back: no tensor shows it, so a trace is charged from these tables.

Sources: torch's own (2.13, under aten/src/ATen/native unless said otherwise), named at each entry. Approximate, where
it says "about"; what a table does not know costs nothing. The CPU's kernels are in `scratch_cpu`.
"""

from __future__ import annotations

from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Capability: TypeAlias = tuple[int, int]

Operator: TypeAlias = Any  # torch._ops.OpOverload, which has no types

_BROADCAST: Any = torch.broadcast_shapes  # torch gives it no types
_MIB = 1 << 20
FLOAT, INDEX = 4, 8
_SORT_IN_PLACE = 1024  # cuda/Sort.cpp: shorter ones are sorted within a block
_SMALL_EMBEDDING = 3072  # cuda/Embedding.cu: fewer indices are added up without sorting
_ROWS_A_THREAD = 10  # cuda/EmbeddingBackwardKernel.cu: NROWS_PER_THREAD
_LONGEST_ROW = 128  # cuda/mem_eff_attention: wider heads are accumulated in memory
_MM_FOR_DISTANCES = 25  # Distance.cpp: more rows than that go through a matrix product
_NORM_BLOCKS = 64  # cuda/layer_norm_kernel.cu: partial sums of a weight's gradient, at most about so many


class Call(NamedTuple):
    """A call of an operator, and what it returned."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any

    def argument(self, place: int, name: str, default: Any) -> Any:
        """Return an argument by its place or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def dim(self) -> int:
        """Return along which dimension it sorts, which is at another place in each overload."""
        numbers = [arg for arg in self.args[1:] if isinstance(arg, int) and not isinstance(arg, bool)]
        return int(self.kwargs.get("dim", numbers[0] if numbers else -1))


Rule: TypeAlias = "Callable[[Call], int]"


def scratch_bytes(op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return what the operator's CUDA kernel takes beyond its results, at its peak."""
    rule = _CUDA.get(operator_name(op))
    return max(0, rule(Call(args, kwargs, result))) if rule else 0


def hidden_bytes(op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return by how much the result's storage is larger than a fake one's, for as long as it lives.

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


def tensor_bytes(tensor: Tensor | None) -> int:
    """Return what a tensor's numbers take; nothing where there is none."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def up(count: int, multiple: int) -> int:
    """Return a count, rounded up."""
    return -(-count // multiple) * multiple


# ---- both ----


def _loss_bytes(args: Sequence[Any]) -> int:
    return int(prod(_BROADCAST(args[0].shape, args[1].shape)) * args[0].element_size())


def reduced_loss(times: int) -> Rule:
    """Loss.cpp: the terms are written out before they are added up; of cross-entropy, the sigmoid's logarithm too."""

    def rule(call: Call) -> int:
        reduced = not call.result.dim() or not call.args[0].dim()
        return times * _loss_bytes(call.args) if reduced else (times - 1) * _loss_bytes(call.args)

    return rule


def log_sum_exp(call: Call) -> int:
    """ReduceOps.cpp: the exponentials, and the largest of each row."""
    return tensor_bytes(call.args[0]) + tensor_bytes(call.result)


def distances(call: Call) -> int:
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


def group_sums(call: Call) -> int:
    """group_norm_kernel: two sums for each item and channel."""
    return int(2 * call.args[5] * call.args[6] * call.args[0].element_size())


# ---- CUDA ----


def copied_bytes(tensor: Tensor) -> int:
    """Return what a copy of it takes, if its heads are not next to each other."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor_bytes(tensor)


def _flash_backward(call: Call) -> int:
    """transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: softmax_d, dq_accum, and keys' gradients for every head."""
    grad, query, key, _, out = call.args[:5]
    items, heads, queries, head = query.shape
    rounded = up(head, 32 if head <= _LONGEST_ROW else 64)
    sums = items * heads * up(queries, 128) * (1 + rounded) * FLOAT
    expanded = 2 * items * heads * key.shape[2] * head * query.element_size() if key.shape[1] != heads else 0
    return int(sums + expanded) + copied_bytes(grad) + copied_bytes(out)


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
        tiles += splits * columns * (up(head, rows) + up(value.shape[-1], rows))
    delta = items * heads * queries * FLOAT
    product = 0 if half else items * heads * queries * value.shape[-1] * FLOAT + delta
    return int(delta + max(product, items * heads * up(tiles, 4) * FLOAT)) + copied_bytes(grad)


def _cudnn_backward(call: Call) -> int:
    """Return about what cuDNN's workspace takes, which only the card knows: as much as Flash Attention's."""
    return _flash_backward(call)


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
    """Return about what cub's radix sort of pairs takes: a second buffer for keys and for values."""
    return count * (key_bytes + INDEX)


def _sort(call: Call) -> int:
    """cuda/Sort.cpp: about; the order before, what cub takes, and a copy where rows are not next to each other."""
    tensor = call.args[0]
    dim = call.dim
    if not tensor.dim() or tensor.shape[dim] <= _SORT_IN_PLACE:
        return 0
    aside = 0 if tensor.stride(dim) == 1 else 3 * tensor_bytes(tensor)
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
    return tensor_bytes(call.args[0]) + tensor_bytes(
        call.result if isinstance(call.result, torch.Tensor) else call.args[1]
    )


_CUDA: dict[str, Rule] = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
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
    "native_group_norm_backward": group_sums,
    "convolution": _convolution_reserve,
    "convolution_backward": _convolution_reserve,
    "logsumexp": log_sum_exp,
    "_cdist_forward": distances,
    "mse_loss": reduced_loss(1),
    "smooth_l1_loss": reduced_loss(1),
    "huber_loss": reduced_loss(1),
    "binary_cross_entropy_with_logits": reduced_loss(2),
}
