"""What kernels take beyond their results: CUDA's as its sources say."""

from __future__ import annotations

import torch

from pipeline.memory.tracing.kernels import scratch_bytes

aten = torch.ops.aten


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


def test_only_accumulating_index_put_sorts() -> None:
    op, index = aten.index_put.default, meta(1000, dtype=torch.int64)
    args = (meta(50, 8), [index], meta(1000, 8))
    assert scratch_bytes(op, args, {}, None) == 0
    assert scratch_bytes(op, (*args, True), {}, None) == scratch_bytes(op, args, {"accumulate": True}, None) == 48_000
