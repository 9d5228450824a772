"""What kernels take beyond their results: the CPU's as measured here, CUDA's as its sources say."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.memory.tracing.kernel_workspace import scratch_bytes
from pipeline.memory.tracing.kernel_workspace_cpu import hidden_bytes_cpu, scratch_bytes_cpu

aten = torch.ops.aten
MIB = 1 << 20


def measured(op: Any, args: tuple[Any, ...]) -> tuple[int, Any]:
    """Return what an operator took beyond what it left, and what it left."""
    with torch.no_grad():
        op(*args)  # the first call allocates more
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            result = op(*args)
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest - live, result


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def attended(items: int, heads: int, queries: int, keys: int, head: int) -> tuple[Any, ...]:
    q, k = rows(items, queries, heads, head).transpose(1, 2), rows(items, keys, heads, head).transpose(1, 2)
    return q, k, *aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)


def forward(*sizes: int) -> tuple[Any, ...]:
    q, k, _, _ = attended(*sizes)
    return q, k, k


def backward(*sizes: int) -> tuple[Any, ...]:
    q, k, out, sums = attended(*sizes)
    return torch.randn_like(out), q, k, k, out, sums, 0.0, False


def layer_norm(count: int, width: int) -> tuple[Any, ...]:
    x, scale, weight = rows(count, width), rows(count, 1).abs(), rows(width)
    return x, x, [width], scale, scale, weight, weight, [True] * 3


def convolved(channels: int, out: int, kernel: int, stride: int, size: int, dims: int) -> tuple[Any, ...]:
    image, weight = rows(4, channels, *[size] * dims), rows(out, channels, *[kernel] * dims)
    same = [kernel // 2] * dims
    return image, weight, None, [stride] * dims, same, [1] * dims, False, [0] * dims, 1


def convolved_back(*sizes: int) -> tuple[Any, ...]:
    image, weight, _, stride, *rest = convolved(*sizes)
    grad = torch.randn_like(aten.convolution(image, weight, None, stride, *rest))
    return grad, image, weight, [sizes[1]], stride, *rest, [True] * 3


CASES = [
    *(
        (aten._cdist_forward.default, (rows(n, d), rows(m, d), 2.0, None))
        for n, d, m in ((900, 96, 100), (64, 300, 999))
    ),
    (aten._cdist_forward.default, (rows(20, 5), rows(10, 5), 2.0, None)),
    *((op.default, (rows(300, 96), rows(300, 96))) for op in (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss)),
    (aten.binary_cross_entropy_with_logits.default, (rows(300, 96), rows(300, 96))),
    (aten.binary_cross_entropy_with_logits.default, (rows(300, 96), rows(300, 96), None, None, 0)),
    (aten.mse_loss.default, (rows(300, 96), rows(300, 96), 0)),
    (aten.logsumexp.default, (rows(300, 96), [-1])),
    (aten.sort.default, (rows(3000, 9), 0)),
    (aten.native_layer_norm_backward.default, layer_norm(300, 96)),
    *(
        (aten._scaled_dot_product_flash_attention_for_cpu.default, forward(*s))
        for s in ((2, 4, 200, 90, 32), (1, 2, 900, 900, 16))
    ),
    *(
        (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, backward(*s))
        for s in ((2, 4, 200, 90, 32), (1, 2, 900, 900, 16))
    ),
    *(
        (aten.convolution.default, convolved(*s))
        for s in ((16, 32, 3, 1, 24, 2), (64, 64, 3, 2, 24, 2), (64, 64, 1, 1, 24, 2), (32, 32, 5, 1, 600, 1))
    ),
    *(
        (aten.convolution_backward.default, convolved_back(*s))
        for s in ((16, 32, 3, 1, 24, 2), (64, 64, 3, 2, 24, 2), (3, 16, 3, 1, 24, 2), (32, 32, 5, 1, 600, 1))
    ),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("op", "args"), CASES, ids=lambda case: str(case) if not isinstance(case, tuple) else "")
def test_the_table_of_the_cpu_is_what_its_kernels_take(op: Any, args: tuple[Any, ...]) -> None:
    if "conv" in str(op) and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("oneDNN's layouts were measured with AVX-512")
    taken, result = measured(op, args)
    assert scratch_bytes_cpu(op, args, {}, result) == pytest.approx(taken, rel=0.02, abs=64)


@pytest.mark.parametrize("op", [aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_a_mean_keeps_the_storage_of_its_terms(op: Any, reduction: int) -> None:
    args = (rows(30, 7), rows(30, 7), reduction)
    result = op(*args)
    plain = torch.empty(result.shape)  # as fake ones are
    assert hidden_bytes_cpu(op, args, {}, plain) == result.untyped_storage().nbytes() - plain.nbytes


def test_an_operator_that_is_in_no_table_costs_nothing() -> None:
    x = rows(3, 3)
    assert scratch_bytes(aten.mm.default, (x, x), {}, x @ x) == 0
    assert scratch_bytes_cpu(aten.mm.default, (x, x), {}, x @ x) == 0


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def heads(items: int, count: int, length: int, head: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return meta(items, length, count, head, dtype=dtype).transpose(1, 2)


def test_flash_attentions_backward_accumulates_in_fp32() -> None:
    q = heads(2, 4, 100, 64)
    op = aten._scaled_dot_product_flash_attention_backward.default
    assert scratch_bytes(op, (q, q, q, q, q), {}, None) == 2 * 4 * 128 * (64 + 1) * 4
    shared = heads(2, 1, 100, 64)
    expanded = scratch_bytes(op, (q, q, shared, shared, q), {}, None) - scratch_bytes(op, (q, q, q, q, q), {}, None)
    assert expanded == 2 * 2 * 4 * 100 * 64 * 2
    apart = q.contiguous()
    assert (
        scratch_bytes(op, (apart, q, q, q, q), {}, None) - scratch_bytes(op, (q, q, q, q, q), {}, None)
        == 2 * 4 * 100 * 64 * 2
    )


def test_memory_efficient_attention_takes_tiles_of_the_querys_gradient() -> None:
    op, q = aten._scaled_dot_product_efficient_attention_backward.default, heads(2, 4, 128, 64, torch.float32)
    tiles = 2 * 4 * 2 * (64 * 64 + 4) * 4
    delta = 2 * 4 * 128 * 4
    product = 2 * 4 * 128 * 64 * 4 + delta
    assert scratch_bytes(op, (q, q, q, q), {}, None) == delta + max(tiles, product)
    wide = heads(2, 4, 128, 192)
    assert (
        scratch_bytes(aten._scaled_dot_product_efficient_attention.default, (wide, wide, wide), {}, None)
        == 2 * 4 * 128 * 192 * 4
    )


def test_attention_that_no_kernel_fuses_says_which_scores_are_masked_and_which_rows_wholly() -> None:
    scores = meta(2, 4, 50, 50)
    operator = aten._safe_softmax.default
    assert scratch_bytes(operator, (scores, -1), {}, scores) == 2 * 4 * 50 * (50 + 1)


def test_few_indices_of_an_embedding_are_added_up_without_scratch_and_many_in_parts() -> None:
    op = aten.embedding_dense_backward.default
    few, many = meta(3072, dtype=torch.int64), meta(10_000, dtype=torch.int64)
    assert scratch_bytes(op, (meta(3072, 64), few, 33), {}, None) == 0
    parts = 1000 + 33
    assert scratch_bytes(op, (meta(10_000, 64), many, 33), {}, None) == 5 * 80_000 + parts * (64 * 4 + 8)


def test_only_accumulating_index_put_sorts() -> None:
    op, index = aten.index_put.default, meta(1000, dtype=torch.int64)
    args = (meta(50, 8), [index], meta(1000, 8))
    assert scratch_bytes(op, args, {}, None) == 0
    assert scratch_bytes(op, (*args, True), {}, None) == scratch_bytes(op, args, {"accumulate": True}, None) == 48_000


def test_index_add_sorts_only_where_results_must_be_the_same_each_time() -> None:
    args = (meta(50, 8), 0, meta(1000, dtype=torch.int64), meta(1000, 8))
    assert scratch_bytes(aten.index_add.default, args, {}, None) == 0
    torch.use_deterministic_algorithms(True)
    try:
        assert scratch_bytes(aten.index_add.default, args, {}, None) == 48_000
    finally:
        torch.use_deterministic_algorithms(False)


def test_short_rows_are_sorted_in_place_on_cuda_and_long_ones_not() -> None:
    short, long = meta(10, 1000), meta(10, 5000)
    assert scratch_bytes(aten.sort.default, (short,), {}, None) == 0
    assert scratch_bytes(aten.sort.default, (long,), {}, None) == 50_000 * (8 + 2 + 8)
    assert scratch_bytes(aten.sort.default, (long, 0), {}, None) == 0
    assert scratch_bytes(aten.sort.stable, (long.T,), {"stable": True, "dim": 0}, None) == 50_000 * (8 + 2 + 8)
