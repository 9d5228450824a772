"""What kernels take beyond their results: CUDA's as its sources say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipeline.memory.tracing.kernel_workspace import hidden_bytes, scratch_bytes

aten = torch.ops.aten


@pytest.mark.parametrize("op", [aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default])
def test_a_mean_keeps_the_storage_of_its_terms(op: Any) -> None:
    for reduction in (0, 1, 2):
        args = (torch.randn(30, 7), torch.randn(30, 7), reduction)
        result = op(*args)
        plain = torch.empty(result.shape)  # as fake ones are
        assert hidden_bytes(op, args, {}, plain) == result.untyped_storage().nbytes() - plain.nbytes


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
