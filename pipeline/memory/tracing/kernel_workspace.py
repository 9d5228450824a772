"""Memory that kernels allocate and release internally: no tensor shows it, so traces add it from these tables.

Sources: torch 2.13, under aten/src/ATen/native unless named otherwise, at each rule. Approximate where it says "about";
operators without a rule cost nothing. Small real steps measure the CPU's kernels (`estimating/traced`); its own tables
have only the two whose memory grows otherwise than the rest of a step.
"""

from __future__ import annotations

from functools import partial
from math import ceil, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

Operator: TypeAlias = Any  # torch._ops.OpOverload, which has no types

_BROADCAST: Any = torch.broadcast_shapes  # torch gives it no types
FLOAT, INDEX = 4, 8
_SORT_IN_PLACE = 1024  # cuda/Sort.cpp: shorter rows are sorted within a block
_SMALL_EMBEDDING = 3072  # cuda/Embedding.cu: fewer indices are added up without sorting
_ROWS_A_THREAD = 10  # cuda/EmbeddingBackwardKernel.cu: NROWS_PER_THREAD
_LONGEST_ROW = 128  # cuda/mem_eff_attention: wider heads are accumulated in memory
_MM_FOR_DISTANCES = 25  # Distance.cpp: more rows than that go through a matrix product
_NORM_BLOCKS = 64  # cuda/layer_norm_kernel.cu: partial sums of a weight's gradient, about this many at most


class Call(NamedTuple):
    """A call of an operator with its result."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any
    name: str  # of the operator, whatever its overload

    def argument(self, place: int, name: str, default: Any) -> Any:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)


Rule: TypeAlias = "Callable[[Call], int]"


def operator_name(op: Operator) -> str:
    """Return an operator's name, whatever its overload."""
    return str(op._schema.name).removeprefix("aten::")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _first_bytes(call: Call) -> int:
    return _bytes(call.args[0])


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# ---- losses and products, made of several kernels on every device ----


def _loss_bytes(args: Sequence[Any]) -> int:
    """Return the bytes of all terms of a loss."""
    return int(prod(_BROADCAST(args[0].shape, args[1].shape)) * args[0].element_size())


def _reduced_loss(times: int) -> Rule:
    """Loss.cpp: the terms are written out before they are added up; of cross-entropy, the sigmoid's logarithm too."""

    def rule(call: Call) -> int:
        reduced = not call.result.dim() or not call.args[0].dim()
        return (times if reduced else times - 1) * _loss_bytes(call.args)

    return rule


def _distances(call: Call) -> int:
    """Distance.cpp: `_euclidean_dist` puts norms and ones next to both, and multiplies."""
    first, second, norm, mode = call.args[0], call.args[1], call.args[2], call.argument(3, "compute_mode", None)
    rows, columns, width = first.shape[-2], second.shape[-2], first.shape[-1]
    many = rows > _MM_FOR_DISTANCES or columns > _MM_FOR_DISTANCES
    if norm != 2 or mode == 2 or not (mode == 1 or many):
        return 0
    items = call.result.numel() // max(1, rows * columns)
    during = (rows + columns) * (width + 2)
    before = rows * width + rows * (width + 2) + 2 * (rows + columns) - rows * columns
    return int(items * max(during, before) * call.result.element_size())


def _euclidean_distances(call: Call) -> int:
    """Distance.cpp, `_euclidean_dist`: norms and ones next to both."""
    first, second = call.args[:2]
    rows = (first.numel() + second.numel()) // first.shape[-1]
    return _bytes(first) + _bytes(second) + int(2 * rows * FLOAT)


def _safe_softmax(call: Call) -> int:
    """attention.cpp: masks of the numbers, and of the rows that are masked wholly."""
    rows = int(call.result.numel() // max(1, call.result.shape[-1])) if call.result.dim() else 1
    return int(call.result.numel()) + rows


def _is_in_order(tensor: Tensor) -> bool:
    """Tell whether a tensor is contiguous, channels last or not."""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = orders.get(tensor.dim())
    return tensor.is_contiguous() or (last is not None and tensor.is_contiguous(memory_format=last))


def _copied(*places: int) -> Rule:
    """Return the rule of kernels that copy these arguments where they are not contiguous, as expanded gradients are."""

    def rule(call: Call) -> int:
        given = [call.args[place] for place in places if len(call.args) > place]
        return sum(_bytes(arg) for arg in given if isinstance(arg, torch.Tensor) and not _is_in_order(arg))

    return rule


def _sum_of(*rules: Rule) -> Rule:
    return lambda call: sum(rule(call) for rule in rules)


def _is_operand(matrix: Tensor) -> bool:
    """Tell whether BLAS takes a matrix as it lies: rows or columns next to each other."""
    rows, columns = matrix.shape[-2:]
    down, along = matrix.stride()[-2:]
    return (down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns))


def _operands(first: int) -> Rule:
    """LinearAlgebra.cpp and cuda/Blas.cpp: matrices that BLAS cannot take are copied."""
    return lambda call: sum(_bytes(arg) for arg in call.args[first : first + 2] if not _is_operand(arg))


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


def _pseudo_inverse(call: Call) -> int:
    """LinearAlgebra.cpp, `pinv`: a copy, and the singular vectors of both sides."""
    matrix = call.args[0]
    least = min(matrix.shape[-2:])
    return int(_bytes(matrix) * 2 + _bytes(matrix) // max(matrix.shape[-2:]) * (least + 2))


def _scattered_mean(call: Call) -> int:
    """TensorAdvancedIndexing.cpp, `scatter_reduce`: a mean counts what arrives with as many ones."""
    return _bytes(call.args[3]) + _bytes(call.args[0]) if call.args[4] == "mean" else 0


# ---- attention ----


def _copied_heads(tensor: Tensor) -> int:
    """Return the bytes of the copy that is made if the heads are not contiguous."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else _bytes(tensor)


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


# ---- sorting, scattering, norms, convolutions, recurrent layers ----


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
    """cuda/Sort.cpp: about; the order before, cub's buffers, and a copy where rows are not next to each other."""
    tensor = call.args[0]
    numbers = [arg for arg in call.args[1:] if isinstance(arg, int) and not isinstance(arg, bool)]
    dim = int(call.kwargs.get("dim", numbers[0] if numbers else -1))  # its position differs between overloads
    if not tensor.dim() or tensor.shape[dim] <= _SORT_IN_PLACE:
        return 0
    copy = 0 if tensor.stride(dim) == 1 else 3 * _bytes(tensor)
    return copy + INDEX * int(tensor.numel()) + _sorting(tensor.numel(), tensor.element_size())


def _top_k(call: Call) -> int:
    """cuda/TensorTopK.cpp: many are sorted after they were found."""
    values = call.result[0]
    return _sorting(values.numel(), values.element_size()) + INDEX * int(values.numel())


def _put(call: Call) -> int:
    """cuda/Indexing.cu, index_put_with_sort_kernel: places, their order before and after, and cub's buffers."""
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


def _weight_sums(call: Call) -> int:
    """cuda/layer_norm_kernel.cu: about; partial sums of the gradients of weight and bias."""
    return int(2 * _NORM_BLOCKS * prod(call.args[2]) * FLOAT)


def _convolution_reserve(call: Call) -> int:
    """Return a reserve: cuDNN's workspace is known only on the card; input and output in another layout are assumed."""
    return _bytes(call.args[0]) + _bytes(call.result if isinstance(call.result, torch.Tensor) else call.args[1])


def _recurrent_kept(call: Call) -> int:
    """Return the memory that cuDNN keeps of an LSTM layer for backward, assumed: gates, cells, their tanh, outputs."""
    steps, items = call.args[0].shape[:2]
    width, is_training = call.args[10], call.args[15]
    return int(steps * items * width * 7 * call.args[0].element_size()) if is_training else 0


def _recurrent_scratch(call: Call) -> int:
    """Return cuDNN's workspace for an LSTM layer, assumed: the gates of all steps, and the weights once more."""
    steps, items = call.args[0].shape[:2]
    weights = sum(_bytes(arg) for arg in call.args[1:5])
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


_COPYING = (  # their first argument
    "_softmax _log_softmax native_layer_norm tril triu pixel_unshuffle pixel_shuffle col2im avg_pool2d_backward "
    "_adaptive_avg_pool2d_backward adaptive_max_pool2d_backward upsample_bilinear2d_backward "
    "upsample_nearest2d_backward "
    "reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward replication_pad2d_backward "
    "grid_sampler_2d_backward grid_sampler_3d_backward _segment_reduce_backward embedding_dense_backward "
    "linalg_solve_triangular"
)

_SCRATCH: dict[str, Rule] = {
    **dict.fromkeys(_COPYING.split(), _copied(0)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _copied(0, 1)),
    # group_norm_kernel: two sums for each item and channel
    "native_group_norm_backward": lambda call: 2 * call.args[5] * call.args[6] * call.args[0].element_size(),
    # ReduceOps.cpp: the exponentials, and the largest of each row
    "logsumexp": lambda call: _first_bytes(call) + _bytes(call.result),
    "_cdist_forward": _distances,
    "_euclidean_dist": _euclidean_distances,
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss"), _reduced_loss(1)),
    "binary_cross_entropy_with_logits": _reduced_loss(2),
    "soft_margin_loss_backward": lambda call: 2 * _loss_bytes(call.args[1:]),
    "_safe_softmax": _safe_softmax,
    "_trilinear": _three_linear,
    # LinearAlgebra.cpp, `linalg_matrix_exp`: about; powers of the matrix for the highest degree, measured
    "linalg_matrix_exp": lambda call: 10 * _first_bytes(call),
    "linalg_pinv": _pseudo_inverse,
    # BatchLinearAlgebra.cpp: LAPACK and cuSOLVER write over a copy
    **dict.fromkeys(("_linalg_svd", "linalg_inv_ex", "linalg_lu"), _first_bytes),
    "scatter_reduce": _scattered_mean,
    # UnaryOps.cpp: the absolute values of complex numbers are complex before they are real
    "abs": lambda call: _first_bytes(call) if call.args[0].is_complex() else 0,
    "mm": _operands(0),
    "addmm": _operands(1),
    "bmm": _operands(0),
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _flash_backward,  # about: only the GPU knows cuDNN's workspace
    "embedding_dense_backward": _sum_of(_embedding_backward, _copied(0)),
    "sort": _sort,
    "topk": _top_k,
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"), _put),
    **dict.fromkeys(("index_add", "index_add_", "scatter_add", "scatter_add_"), _add),
    # cuda/IndexKernel.cu: where each chosen number is from
    **dict.fromkeys(("masked_scatter", "masked_scatter_"), lambda call: INDEX * int(call.args[1].numel())),
    "native_layer_norm_backward": _sum_of(_weight_sums, _copied(0, 1)),
    **dict.fromkeys(("convolution", "convolution_backward"), _convolution_reserve),
    **dict.fromkeys(("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), _recurrent_scratch),
}
_REDUCTION = {"mse_loss": 2, "smooth_l1_loss": 2, "binary_cross_entropy": 3}  # place of the argument


def _kept_terms(call: Call) -> int:
    """Loss.cpp: the mean is written into the storage that was allocated for all the terms."""
    return 0 if call.argument(_REDUCTION[call.name], "reduction", 1) == 0 else _loss_bytes(call.args)


_KEPT: dict[str, Rule] = {**dict.fromkeys(_REDUCTION, _kept_terms), "mkldnn_rnn_layer": _recurrent_kept}
_SCRATCH_ON_CPU: dict[str, Rule] = {"_trilinear": _three_linear}
_KEPT_ON_CPU: dict[str, Rule] = {"mkldnn_rnn_layer": _onednn_recurrent_kept}


def _charged(rules: dict[str, Rule], op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that a table has for a call; no rule knows nested tensors."""
    name = operator_name(op)
    rule = rules.get(name)
    if rule is None or any(getattr(value, "is_nested", False) for value in (*args, result)):
        return 0
    return max(0, int(rule(Call(args, kwargs, result, name))))


def _hidden(rules: dict[str, Rule], op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    size = _charged(rules, op, args, kwargs, result)
    last = result[-1] if isinstance(result, (list, tuple)) else result
    return max(0, size - int(last.untyped_storage().nbytes())) if size else 0


# The peak bytes of an operator's kernel beyond its results.
scratch_bytes, scratch_bytes_cpu = partial(_charged, _SCRATCH), partial(_charged, _SCRATCH_ON_CPU)
# By how many bytes the storage of the last result is larger than here.
hidden_bytes, hidden_bytes_cpu = partial(_hidden, _KEPT), partial(_hidden, _KEPT_ON_CPU)
