"""Which kernel attention takes on a card, and what it allocates there."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.memory.tracing.kernels import AttentionCall, Backend, attention_backend, cuda_attention

A100, HOPPER, ADA, VOLTA = (8, 0), (9, 0), (8, 9), (7, 0)
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def asked(dtype: torch.dtype, head: int = 64, *, queries: int = 32, heads: int = 4, **options: Any) -> AttentionCall:
    query = torch.empty(2, 4, queries, head, dtype=dtype, requires_grad=True)
    key = torch.empty(2, heads, 32, head, dtype=dtype, requires_grad=True)
    return AttentionCall(query, key, key, **options)


CHOSEN = [
    (asked(BF16), A100, Backend.FLASH),
    (asked(FP16, 256), A100, Backend.FLASH),
    (asked(FP16, 30), A100, Backend.FLASH),  # padded
    (asked(BF16, heads=2, gqa=True), A100, Backend.FLASH),
    (asked(BF16, queries=16, causal=True), A100, Backend.EFFICIENT),
    (asked(BF16, mask=torch.ones(32, 32)), A100, Backend.EFFICIENT),
    (asked(FP16, 264), A100, Backend.EFFICIENT),
    (asked(BF16, 224), ADA, Backend.EFFICIENT),
    (asked(BF16, 256), ADA, Backend.FLASH),
    (asked(BF16, 256, dropout=0.1), ADA, Backend.EFFICIENT),
    (asked(FP32), A100, Backend.EFFICIENT),
    (asked(FP32, 30), A100, Backend.MATH),
    (asked(torch.float64), A100, Backend.MATH),
    (asked(FP32, 30), VOLTA, Backend.EFFICIENT),
    (asked(FP16, 30), VOLTA, Backend.MATH),
    (asked(FP16), VOLTA, Backend.EFFICIENT),
    (asked(BF16), VOLTA, Backend.MATH),
    (asked(BF16), HOPPER, Backend.CUDNN),
    (asked(BF16, mask=torch.ones(32, 32)), HOPPER, Backend.CUDNN),
    (asked(BF16, dropout=0.1), HOPPER, Backend.FLASH),  # cuDNN drops in sixteenths
    (asked(BF16, dropout=0.125), HOPPER, Backend.CUDNN),
    (asked(BF16, 256), HOPPER, Backend.FLASH),
    (asked(FP32), HOPPER, Backend.EFFICIENT),
    (asked(BF16, heads=2), A100, Backend.MATH),
]


def test_the_kernel_is_the_one_torch_would_choose() -> None:
    found = [attention_backend(attention, capability) for attention, capability, _ in CHOSEN]
    assert found == [expected for _, _, expected in CHOSEN]


def test_kernels_that_were_switched_off_are_not_chosen() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert attention_backend(asked(BF16), HOPPER) is Backend.MATH
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert attention_backend(asked(BF16), HOPPER) is Backend.EFFICIENT


class Ran(TorchDispatchMode):
    """Remembers what ran, and what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[str, list[tuple[tuple[int, ...], torch.dtype]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, tuple) else (result,)
        made = [(tuple(t.shape), t.dtype) for t in tensors if isinstance(t, torch.Tensor)]
        self.results[func._schema.name.removeprefix("aten::_scaled_dot_product_")] = made
        return result


def ran(dtype: torch.dtype, capability: tuple[int, int], head: int = 64, **options: Any) -> Ran:
    with FakeTensorMode(), cuda_attention(capability):
        q, k, v = (torch.randn(2, 4, 50, head, dtype=dtype, requires_grad=True) for _ in range(3))
        mask = torch.ones(50, 50, dtype=torch.bool) if options.pop("masked", False) else None
        with Ran() as log:
            out = F.scaled_dot_product_attention(q, k, v, mask, **options)
            assert out.shape == q.shape
            out.sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape
    return log


def test_each_kernel_makes_what_its_source_says() -> None:
    """Results, sums of each query, gradients; odd heads and unaligned masks are padded."""
    flash = ran(BF16, A100).results
    assert flash["flash_attention"][:2] == [((2, 4, 50, 64), BF16), ((2, 4, 50), FP32)]
    assert flash["flash_attention_backward"] == [((2, 4, 50, 64), BF16)] * 3
    assert ran(BF16, A100, 30).results["flash_attention"][0] == ((2, 4, 50, 32), BF16)
    efficient = ran(BF16, A100, masked=True).results
    assert efficient["efficient_attention"][:2] == [((2, 4, 50, 64), BF16), ((2, 4, 64), FP32)]
    assert efficient["aten::constant_pad_nd"] == [((50, 56), BF16)]
    cudnn = ran(BF16, HOPPER).results
    assert cudnn["cudnn_attention"][1] == ((2, 4, 50, 1), FP32)
    assert len(cudnn["cudnn_attention_backward"]) == 3
    assert ran(FP32, A100, 30).results["aten::_safe_softmax"] == [((2, 4, 50, 50), FP32)]


def test_no_sums_are_kept_where_no_gradient_is_wanted() -> None:
    with FakeTensorMode(), cuda_attention(A100), torch.no_grad(), Ran() as log:
        q = torch.randn(2, 4, 50, 64)
        F.scaled_dot_product_attention(q, q, q)
    assert log.results["efficient_attention"][1] == ((2, 4, 0), FP32)


def test_layers_of_torchs_own_take_the_cards_kernel() -> None:
    with FakeTensorMode(), cuda_attention(A100), Ran() as log:
        layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
        layer(torch.randn(2, 50, 64)).sum().backward()
    assert "efficient_attention_backward" in log.results


def test_real_tensors_get_the_numbers_they_had_and_all_is_as_before_afterwards() -> None:
    q = torch.randn(2, 4, 50, 64, requires_grad=True)
    mask = torch.ones(50, 50, dtype=torch.bool).tril()
    calls: list[dict[str, Any]] = [{}, {"attn_mask": mask}, {"is_causal": True}, {"attn_mask": mask, "dropout_p": 0.5}]

    def numbers() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [F.scaled_dot_product_attention(q, q, q, **options) for options in calls]

    before = numbers()
    with cuda_attention(A100):
        within = numbers()
    with FakeTensorMode(), Ran() as log:
        fake = torch.randn(2, 4, 50, 64, dtype=BF16)
        F.scaled_dot_product_attention(fake, fake, fake)
    assert all(torch.equal(*pair) for pair in zip(before, within, strict=True))
    assert "flash_attention_for_cpu" in log.results
