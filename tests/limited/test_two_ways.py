"""Two independent ways of counting agree: our allocator, and torch's own profiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.limited.models import MODELS, train
from tests.testkit.limited.device import profiled_peak, real_peak


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_torchs_own_profiler_sees_the_same_peak(model: Callable[[], nn.Module]) -> None:
    assert profiled_peak(lambda: train(model)) == real_peak(lambda: train(model)) > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda: torch.randn(1000).sort(stable=True), id="sort"),
        pytest.param(lambda: functional.conv2d(torch.randn(2, 3, 32, 32), torch.randn(8, 3, 3, 3)), id="oneDNN"),
        pytest.param(lambda: torch.randn(64, 32).bfloat16() @ torch.randn(32, 64).bfloat16(), id="bfloat16"),
        pytest.param(lambda: nn.LSTM(16, 32)(torch.randn(10, 2, 16))[0].sum().backward(), id="recurrent"),
        pytest.param(lambda: torch.randn(2, 64, 64).bmm(torch.randn(2, 64, 64)), id="bmm"),
        pytest.param(
            lambda: functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 64, 16).unbind()), id="attention"
        ),
        pytest.param(lambda: torch.empty(0), id="nothing"),
    ],
)
def test_both_see_what_a_kernel_takes_within_itself(run: Callable[[], object]) -> None:
    assert profiled_peak(run) == real_peak(run)
