"""What code written for CUDA does on CPU tensors: casts, calls, and operators made of others."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from pipeline.memory.tracing.fake_cuda import POLICIES, NeedsCuda, cuda_calls, cuda_casts, cuda_composites, policies

HALF = torch.bfloat16


def list_of(header: str, name: str) -> set[str]:
    """Read one of the header's lists, as operator names."""
    body = header.split(f"#define AT_FORALL_{name}(_)")[1].split("\n\n")[0]
    entries = [line.strip().removeprefix("_(").split(")")[0] for line in body.splitlines() if "_(" in line]
    return {".".join(part.strip() for part in entry.split(",")) for entry in entries}


@pytest.mark.parametrize(
    ("policy", "name"),
    [("lower", "LOWER_PRECISION_FP"), ("fp32", "FP32"), ("dtype", "FP32_SET_OPT_DTYPE"), ("promote", "PROMOTE")],
)
def test_the_table_is_that_of_torchs_own_header(policy: str, name: str) -> None:
    header = Path(torch.__file__).with_name("include") / "ATen" / "autocast_mode.h"
    elsewhere = {"cudnn_convolution", "cudnn_convolution_transpose", "norm.Scalar", "norm.ScalarOpt_dim"}
    assert set(POLICIES[policy].split()) - elsewhere == list_of(header.read_text(), name)


def test_every_operator_that_cuda_casts_has_a_policy() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    assert {f"aten::{name}" for name in policies()} == set(registered)


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_types_are_those_of_cuda(half: torch.dtype, real: bool) -> None:
    with warnings.catch_warnings() if real else FakeTensorMode(), cuda_casts():
        x, w = torch.randn(4, 8), nn.Parameter(torch.randn(8, 8))
        with torch.autocast("cpu", dtype=half):
            y = F.linear(x, w)
            results = {
                half: [y, x @ w, torch.einsum("bi,ij->bj", x, w), torch.mv(w, x[0]), F.gelu(y), torch.cat([y, y])],
                torch.float32: [
                    y.softmax(-1), F.layer_norm(y, (8,)), y.exp(), y.pow(2), y.sum(), y.norm(), torch.norm(y, 2, 1),
                    F.cross_entropy(y, torch.zeros(4, dtype=torch.long)), F.mse_loss(y, y), y.cumsum(0),
                    torch.addcmul(x, y, y), torch.cat([x, y]), y.logsumexp(-1), F.rms_norm(y, (8,)),
                ],
            }  # fmt: skip
    for dtype, tensors in results.items():
        assert [tensor.dtype for tensor in tensors] == [dtype] * len(tensors)


def test_a_type_that_was_asked_for_is_kept() -> None:
    with cuda_casts(), torch.autocast("cpu", dtype=HALF):
        y = torch.randn(4, 8, dtype=HALF)
        assert y.softmax(-1, dtype=HALF).dtype == HALF
        assert torch.softmax(y, -1, HALF).dtype == HALF
        assert y.double().exp().dtype == torch.float64
        assert torch.arange(3).sum().dtype == torch.int64


def test_what_cuda_refuses_to_autocast_is_refused() -> None:
    y = torch.rand(3)
    with cuda_casts(), torch.autocast("cpu", dtype=HALF), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(y, y)


def test_cpus_casts_are_back_afterwards_also_after_an_error_and_when_entered_twice() -> None:
    def kinds() -> list[torch.dtype]:
        with torch.autocast("cpu", dtype=HALF):
            y = torch.randn(4, 8) @ torch.randn(8, 8)
            return [y.softmax(-1).dtype, y.exp().dtype, torch.stack([y, y.float()]).dtype]

    before = kinds()
    with pytest.raises(KeyError), cuda_casts(), cuda_casts():
        raise KeyError
    assert kinds() == before
    with cuda_casts():
        with cuda_casts():
            pass
        assert kinds() != before
    assert kinds() == before


class Doubled(torch.autograd.Function):
    """Uses what custom functions for CUDA use."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        assert not torch.is_autocast_enabled("cuda")
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad * torch.full((1,), 2.0, device="cuda")


def cuda_step() -> None:
    """Train as scripts for CUDA do."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert device.type == "cuda"
    model = nn.Linear(4, 4).cuda().to(device).to("cuda:0").to(device="cuda", non_blocking=True)
    x = torch.randn(2, 4, device=device, pin_memory=True).to(0, non_blocking=True).cuda().pin_memory()
    x.record_stream(torch.cuda.current_stream())

    def block(x: torch.Tensor) -> torch.Tensor:
        return model(x) + torch.zeros(4, device="cuda")

    with torch.autocast("cuda", dtype=HALF):
        h = checkpoint(block, x, use_reentrant=False) + Doubled.apply(model(x))
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: torch.empty_like(t, device="cuda", pin_memory=True).copy_(t), lambda t: t.to("cuda")
    ):
        loss = model(h).pow(2).sum()
    loss.backward()
    y = torch.randn(2, 4, device="cuda", requires_grad=True)
    torch.autograd.grad(checkpoint(block, y, use_reentrant=False).sum(), y, create_graph=True)
    assert model.weight.grad is not None
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(model(x).sum()).backward()


@pytest.mark.parametrize("real", [True, False])
def test_a_step_written_for_cuda_runs_on_the_cpu(real: bool) -> None:
    with cuda_calls(), warnings.catch_warnings() if real else FakeTensorMode():
        cuda_step()


def test_autocast_for_cuda_is_one_for_the_cpu_with_cudas_type() -> None:
    x = torch.randn(2, 2)
    with cuda_calls(), cuda_casts():
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled("cuda")
            assert torch.is_autocast_enabled()
            assert torch.get_autocast_dtype("cuda") == (x @ x).dtype == torch.float16
        with torch.amp.autocast(device_type="cuda", dtype=HALF):
            assert (x @ x).dtype == HALF
            with torch.autocast("cuda", enabled=False):
                assert (x @ x).dtype == torch.float32
        with pytest.warns(FutureWarning), torch.cuda.amp.autocast(dtype=HALF):
            assert (x @ x).dtype == HALF


def test_default_devices_and_generators_are_the_cpus() -> None:
    with cuda_calls():
        with torch.device("cuda"):
            assert torch.zeros(2).device.type == "cpu"
        torch.set_default_device("cuda")
        assert torch.zeros(2).device.type == "cpu"
        torch.set_default_device(None)
        generator = torch.Generator(device="cuda").manual_seed(1)
        torch.randn(2, generator=generator, device="cuda")
        assert isinstance(generator, torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: torch.cuda.CUDAGraph(), "torch.cuda.CUDAGraph"),
        (lambda: torch.cuda.get_sync_debug_mode(), "torch.cuda.get_sync_debug_mode"),
    ],
)
def test_what_cannot_be_answered_is_named(call, name: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(NeedsCuda, match=name), cuda_calls():
        call()


def test_torch_is_as_it_was_afterwards() -> None:
    places = (torch.cuda, torch.Tensor, torch.nn.Module, torch.autograd, torch.cuda.nvtx)
    names = ("Generator", "load", "get_autocast_dtype", "is_autocast_enabled", "set_autocast_enabled")

    def state() -> list[object]:
        return [dict(vars(place)) for place in places] + [getattr(torch, name) for name in names]

    before = state()
    with pytest.raises(KeyError), cuda_calls():
        raise KeyError
    assert state() == before
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def saved_bytes(call) -> int:  # type: ignore[no-untyped-def]
    """Return what a call keeps for backward, weights and inputs aside."""
    seen: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return seen.setdefault(tensor.untyped_storage()._cdata, tensor)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        call().sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())


def test_dropout_and_norms_keep_less_on_cuda() -> None:
    with FakeTensorMode():
        x, w = torch.randn(100, 50, requires_grad=True), torch.randn(50, requires_grad=True)
        on_cpu = saved_bytes(lambda: F.dropout(x, 0.1))
        with cuda_composites():
            assert (on_cpu, saved_bytes(lambda: F.dropout(x, 0.1))) == (4 * 5000, 5000)
            assert saved_bytes(lambda: F.rms_norm(x, (50,), w)) == 4 * (100 * 50 + 50 + 100)


def test_real_tensors_get_the_numbers_they_had() -> None:
    x, w = torch.randn(4, 8), torch.randn(8)

    def numbers() -> list[torch.Tensor]:
        torch.manual_seed(0)
        half = x.half()
        return [
            F.dropout(x, 0.1), F.dropout(x, 1.0), F.dropout(x, 0.5, training=False), F.rms_norm(x, (8,), w),
            x.softmax(-1), half.softmax(-1, dtype=torch.float32), F.log_softmax(x, 0),
        ]  # fmt: skip

    before = numbers()
    with cuda_composites():
        within = numbers()
    assert all(torch.equal(*pair) for pair in zip(before, within, strict=True))
