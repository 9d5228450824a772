"""Memory that kernels allocate and release internally: no tensor shows it, so traces add it from these tables.

Sources: torch's own (2.13, under aten/src/ATen/native unless said otherwise), named at each entry. Approximate, where
it says "about"; what a table does not know costs nothing. What only CPU kernels take is in no table: small real steps
measure it (`traced_oracles`).
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
_SORT_IN_PLACE = 1024  # cuda/Sort.cpp: shorter ones are sorted within a block
_SMALL_EMBEDDING = 3072  # cuda/Embedding.cu: fewer indices are added up without sorting
_ROWS_A_THREAD = 10  # cuda/EmbeddingBackwardKernel.cu: NROWS_PER_THREAD
_LONGEST_ROW = 128  # cuda/mem_eff_attention: wider heads are accumulated in memory
_MM_FOR_DISTANCES = 25  # Distance.cpp: more rows than that go through a matrix product
_PAGE = 4096  # oneDNN begins each part of a workspace at one
_LINE = 16  # numbers of a cache line
_ALIASED = 256  # numbers: rows as long as a multiple of it would fall together in the cache
_NORM_BLOCKS = 64  # cuda/layer_norm_kernel.cu: partial sums of a weight's gradient, at most about so many


class Call(NamedTuple):
    """A call of an operator with its result."""

    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any

    name: str = ""  # of the operator, whatever its overload

    def argument(self, place: int, name: str, default: Any) -> Any:
        """Return an argument by its place or its name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def dim(self) -> int:
        """Return the dimension that it sorts along, whose position differs between overloads."""
        numbers = [arg for arg in self.args[1:] if isinstance(arg, int) and not isinstance(arg, bool)]
        return int(self.kwargs.get("dim", numbers[0] if numbers else -1))


Rule: TypeAlias = "Callable[[Call], int]"


def operator_name(op: Operator) -> str:
    """Return an operator's name, whatever its overload."""
    return str(op._schema.name).removeprefix("aten::")


def bytes_held(tensor: Tensor | None) -> int:
    """Return a tensor's bytes; 0 for None."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def up_to_multiple(count: int, multiple: int) -> int:
    """Return a count rounded up to a multiple."""
    return -(-count // multiple) * multiple


# ---- both ----


def loss_bytes(args: Sequence[Any]) -> int:
    """Return the bytes of all terms of a loss."""
    return int(prod(_BROADCAST(args[0].shape, args[1].shape)) * args[0].element_size())


def _reduced_loss(times: int) -> Rule:
    """Loss.cpp: the terms are written out before they are added up; of cross-entropy, the sigmoid's logarithm too."""

    def rule(call: Call) -> int:
        reduced = not call.result.dim() or not call.args[0].dim()
        return times * loss_bytes(call.args) if reduced else (times - 1) * loss_bytes(call.args)

    return rule


def _log_sum_exp(call: Call) -> int:
    """ReduceOps.cpp: the exponentials, and the largest of each row."""
    return bytes_held(call.args[0]) + bytes_held(call.result)


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


def _safe_softmax(call: Call) -> int:
    """attention.cpp: which numbers are masked, and which rows wholly."""
    rows = int(call.result.numel() // max(1, call.result.shape[-1])) if call.result.dim() else 1
    return int(call.result.numel()) + rows


def _group_sums(call: Call) -> int:
    """group_norm_kernel: two sums for each item and channel."""
    return int(2 * call.args[5] * call.args[6] * call.args[0].element_size())


def _distances_by_product(call: Call) -> int:
    """Distance.cpp, `_euclidean_dist`: norms and ones beside both."""
    first, second = call.args[:2]
    rows = (first.numel() + second.numel()) // first.shape[-1]
    return bytes_held(first) + bytes_held(second) + int(2 * rows * FLOAT)


def is_in_order(tensor: Tensor) -> bool:
    """Tell whether a tensor is contiguous, channels last or not."""
    orders = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = orders.get(tensor.dim())
    return tensor.is_contiguous() or (last is not None and tensor.is_contiguous(memory_format=last))


def copied(*places: int) -> Rule:
    """Return the rule of kernels that copy these arguments where they are not contiguous, as expanded gradients are."""

    def rule(call: Call) -> int:
        given = [call.args[place] for place in places if len(call.args) > place]
        return sum(bytes_held(one) for one in given if isinstance(one, torch.Tensor) and not is_in_order(one))

    return rule


def together(*rules: Rule) -> Rule:
    """Return the rule of kernels that take what several rules say at once."""
    return lambda call: sum(rule(call) for rule in rules)


def is_operand(matrix: Tensor) -> bool:
    """Tell whether BLAS takes a matrix as it lies: rows or columns next to each other."""
    rows, columns = matrix.shape[-2:]
    down, along = matrix.stride()[-2:]
    return (down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns))


def _operands(first: int) -> Rule:
    """LinearAlgebra.cpp and cuda/Blas.cpp: matrices that BLAS cannot take are copied."""
    return lambda call: sum(bytes_held(one) for one in call.args[first : first + 2] if not is_operand(one))


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


def _matrix_exponential(call: Call) -> int:
    """LinearAlgebra.cpp, `linalg_matrix_exp`: about; powers of the matrix for the highest degree, measured."""
    return 10 * bytes_held(call.args[0])


def _inverse(call: Call) -> int:
    """LinearAlgebra.cpp, `pinv`: a copy, and the singular vectors of both sides."""
    matrix = call.args[0]
    least = min(matrix.shape[-2:])
    return int(bytes_held(matrix) * 2 + bytes_held(matrix) // max(matrix.shape[-2:]) * (least + 2))


def _whole_input(call: Call) -> int:
    """BatchLinearAlgebra.cpp: LAPACK and cuSOLVER write over a copy."""
    return bytes_held(call.args[0])


def _scattered_mean(call: Call) -> int:
    """TensorAdvancedIndexing.cpp, `scatter_reduce`: a mean counts what arrives with as many ones."""
    return bytes_held(call.args[3]) + bytes_held(call.args[0]) if call.args[4] == "mean" else 0


def _magnitudes(call: Call) -> int:
    """UnaryOps.cpp: the absolute values of complex numbers are complex before they are real."""
    return bytes_held(call.args[0]) if call.args[0].is_complex() else 0


# ---- storages that are larger than what fake ones show ----


def kept_terms(call: Call) -> int:
    """Loss.cpp: the mean is written into what was allocated for all the terms; CPU and CUDA alike."""
    return 0 if call.argument(_REDUCTION[call.name], "reduction", 1) == 0 else loss_bytes(call.args)


_REDUCTION = {"mse_loss": 2, "smooth_l1_loss": 2, "binary_cross_entropy": 3}
KEPT_ON_BOTH: dict[str, Rule] = dict.fromkeys(_REDUCTION, kept_terms)


def _cudnn_reserve(call: Call) -> int:
    """Return what cuDNN keeps of an LSTM's layer for backward, as assumed: gates, cells, their tanh and outputs."""
    steps, items = call.args[0].shape[:2]
    width, is_training = call.args[10], call.args[15]
    return int(steps * items * width * 7 * call.args[0].element_size()) if is_training else 0


def _cudnn_gates(call: Call) -> int:
    """Return what cuDNN works in for an LSTM's layer, as assumed: the gates of all steps, and the weights once more."""
    steps, items = call.args[0].shape[:2]
    weights = sum(bytes_held(one) for one in call.args[1:5])
    return int(steps * items * call.args[1].shape[0] * call.args[0].element_size()) + weights


# ---- CUDA ----


def copied_heads(tensor: Tensor) -> int:
    """Return the bytes of the copy that is made if the heads are not contiguous."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else bytes_held(tensor)


def _flash_backward(call: Call) -> int:
    """transformers/cuda/flash_attn/flash_api.cpp, mha_bwd: softmax_d, dq_accum, and keys' gradients for every head."""
    grad, query, key, _, out = call.args[:5]
    items, heads, queries, head = query.shape
    rounded = up_to_multiple(head, 32 if head <= _LONGEST_ROW else 64)
    sums = items * heads * up_to_multiple(queries, 128) * (1 + rounded) * FLOAT
    expanded = 2 * items * heads * key.shape[2] * head * query.element_size() if key.shape[1] != heads else 0
    return int(sums + expanded) + copied_heads(grad) + copied_heads(out)


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
        tiles += splits * columns * (up_to_multiple(head, rows) + up_to_multiple(value.shape[-1], rows))
    delta = items * heads * queries * FLOAT
    product = 0 if half else items * heads * queries * value.shape[-1] * FLOAT + delta
    return int(delta + max(product, items * heads * up_to_multiple(tiles, 4) * FLOAT)) + copied_heads(grad)


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
    aside = 0 if tensor.stride(dim) == 1 else 3 * bytes_held(tensor)
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
    return bytes_held(call.args[0]) + bytes_held(call.result if isinstance(call.result, torch.Tensor) else call.args[1])


_COPYING = (  # their first argument
    "_softmax _log_softmax native_layer_norm tril triu pixel_unshuffle pixel_shuffle col2im avg_pool2d_backward "
    "_adaptive_avg_pool2d_backward adaptive_max_pool2d_backward upsample_bilinear2d_backward "
    "upsample_nearest2d_backward "
    "reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward replication_pad2d_backward "
    "grid_sampler_2d_backward grid_sampler_3d_backward _segment_reduce_backward embedding_dense_backward "
    "linalg_solve_triangular"
)

BOTH_DEVICES: dict[str, Rule] = {
    "native_group_norm_backward": _group_sums,
    "logsumexp": _log_sum_exp,
    "_cdist_forward": _distances,
    "mse_loss": _reduced_loss(1),
    "smooth_l1_loss": _reduced_loss(1),
    "huber_loss": _reduced_loss(1),
    "binary_cross_entropy_with_logits": _reduced_loss(2),
    "_safe_softmax": _safe_softmax,
    "_euclidean_dist": _distances_by_product,
    "_trilinear": _three_linear,
    "linalg_matrix_exp": _matrix_exponential,
    "linalg_pinv": _inverse,
    "_linalg_svd": _whole_input,
    "linalg_inv_ex": _whole_input,
    "linalg_lu": _whole_input,
    "soft_margin_loss_backward": lambda call: 2 * loss_bytes(call.args[1:]),
    "scatter_reduce": _scattered_mean,
    "abs": _magnitudes,
    "mm": _operands(0),
    "addmm": _operands(1),
    **dict.fromkeys(_COPYING.split(), copied(0)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), copied(0, 1)),
}
_CUDA: dict[str, Rule] = {
    **BOTH_DEVICES,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_cudnn_attention_backward": _flash_backward,  # about: only the card knows cuDNN's workspace
    "embedding_dense_backward": together(_embedding_backward, copied(0)),
    "bmm": _operands(0),
    **dict.fromkeys(("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"), _cudnn_gates),
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
    "native_layer_norm_backward": together(_weight_sums, copied(0, 1)),
    "convolution": _convolution_reserve,
    "convolution_backward": _convolution_reserve,
}


_CUDA_KEPT: dict[str, Rule] = {**KEPT_ON_BOTH, "mkldnn_rnn_layer": _cudnn_reserve}


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


_CPU_KEPT: dict[str, Rule] = {**KEPT_ON_BOTH, "mkldnn_rnn_layer": _recurrent_workspace}


def taken(rules: dict[str, Rule], op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return what a table says of a call; what it does not know costs nothing, and no rule knows nested tensors."""
    name = operator_name(op)
    rule = rules.get(name)
    if rule is None or any(getattr(value, "is_nested", False) for value in (*args, result)):
        return 0
    return max(0, rule(Call(args, kwargs, result, name)))


def unseen(rules: dict[str, Rule], op: Operator, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Return what a table says the last result's storage has, beyond what it has here: real ones have it all."""
    size = taken(rules, op, args, kwargs, result)
    last = result[-1] if isinstance(result, (list, tuple)) else result
    return max(0, size - int(last.untyped_storage().nbytes())) if size else 0


# The peak bytes of an operator's kernel beyond its results; for a CPU, what is not the CPU's own.
scratch_bytes, scratch_bytes_cpu = partial(taken, _CUDA), partial(taken, BOTH_DEVICES)
# By how many bytes the storage of the last result is larger than the one here.
hidden_bytes, hidden_bytes_cpu = partial(unseen, _CUDA_KEPT), partial(unseen, _CPU_KEPT)
