"""A limited device counts every byte, and refuses the first too many; torch's own profiler counts the same."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.memory.footprint import Tape
from pipeline.memory.hardware.caching_allocator import DEFAULT, EXPANDABLE, Allocator
from tests.testkit.limited import device
from tests.testkit.limited.device import HostCarrier, LimitedDevice, RefuseOne, built, forget_failed_backward


@pytest.fixture(autouse=True)
def _possible(one_thread: None) -> None:
    device.need()


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))

    def forward(self) -> Tensor:
        return self.layers(torch.randn(64, 32)).square().mean()


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 5))

    def forward(self) -> Tensor:
        return self.layers(torch.randn(4, 3, 24, 24)).square().mean()


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)

    def forward(self) -> Tensor:
        return self.layer(self.words(torch.randint(50, (2, 48)))).square().mean()


class Messages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(48, 16), nn.Linear(16, 16)

    def forward(self) -> Tensor:
        nodes, edges = torch.randn(100, 16), torch.randint(100, (2, 600))
        for _ in range(2):
            pairs = torch.cat([nodes[edges[0]], nodes[edges[1]], torch.randn(600, 16)], dim=-1)
            gathered = torch.zeros_like(nodes).index_add(0, edges[1], self.message(pairs).relu())
            nodes = nodes + self.update(gathered)
        return nodes.square().mean()


def train(model: Callable[[], nn.Module], steps: int = 2, seed: int = 0) -> list[float]:
    """Build a model and train it; return its losses."""
    torch.manual_seed(seed)
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, foreach=True)
    return [step(network, optimizer) for _ in range(steps)]


def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = network()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


MODELS = (Perceptron, Convolutions, Transformer, Messages)


def real_peak(step: Callable[[], object]) -> int:
    """Run something; return the most that was live of what it allocated, by our allocator.

    What it releases of before is not taken off: let it make what it drops.
    """
    with _uncollected(), LimitedDevice() as device:
        step()
    return device.peak_bytes


def profiled_peak(step: Callable[[], object]) -> int:
    """Return the same by the events of torch's own profiler, which knows nothing of our allocator."""
    # kineto writes a line to stderr at each start unless told before the first (pytorch/kineto#1325)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    with _uncollected(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results = profiler.profiler.kineto_results
    memory = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    memory.sort(key=lambda event: event[0])
    return int(np.cumsum([signed_bytes for _, signed_bytes in memory], dtype=np.int64).max(initial=0))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let garbage be collected before, and not in between: it would come at another place each time."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def bytes_of(*tensors: Tensor) -> int:
    return sum(one.nbytes for one in tensors)


@pytest.mark.nightly
@pytest.mark.parametrize("model", MODELS)
def test_a_training_passes_at_its_peak_and_a_byte_less_is_out_of_memory(model: Callable[[], nn.Module]) -> None:
    peak_bytes = real_peak(lambda: train(model))
    with LimitedDevice(peak_bytes) as device:
        losses = train(model)
    assert device.peak_bytes == peak_bytes
    assert losses == train(model)
    with LimitedDevice(peak_bytes - 1) as device, pytest.raises(torch.OutOfMemoryError):
        train(model)
    assert device.refused == 1
    assert device.peak_bytes < peak_bytes


def test_exactly_the_limit_can_be_had() -> None:
    with LimitedDevice(1000) as device:
        kept = torch.empty(600, dtype=torch.uint8)
        assert bytes_of(kept, torch.empty(400, dtype=torch.uint8)) == 1000
        with pytest.raises(torch.OutOfMemoryError, match="allocate 401 bytes; 600 are live, of a limit of 1000"):
            torch.empty(401, dtype=torch.uint8)
        assert (device.live_bytes, device.peak_bytes, device.refused) == (600, 1000, 1)


def test_a_failed_backward_keeps_memory_until_it_is_forgotten() -> None:
    """If this fails, torch has mended it, and `forget_failed_backward` may go."""
    kept = []
    for place in range(0, 100, 3):
        refuse = RefuseOne()
        with LimitedDevice(through=refuse) as device:
            network = Transformer()
            before = device.live_bytes
            refuse.after = place
            with pytest.raises(torch.OutOfMemoryError):
                network().backward()
            network.zero_grad()
            kept.append(device.live_bytes - before)
            forget_failed_backward()
            assert device.live_bytes == before
    assert max(kept) > 0


@pytest.mark.parametrize("expandable", [False, True])
def test_a_training_passes_at_what_the_simulated_allocator_reserves_and_not_a_page_below(expandable: bool) -> None:
    def reserved_bytes(limit_bytes: int | None) -> int:
        allocator = Allocator(EXPANDABLE if expandable else DEFAULT)

        def is_had(block: int, signed_bytes: int) -> bool:
            allocator.play(Tape(np.array([-1 - block]), np.array([signed_bytes])))
            return limit_bytes is None or allocator.reserved_bytes <= limit_bytes

        with LimitedDevice(through=is_had) as device:
            train(Perceptron)
        assert allocator.peak_allocated_bytes >= device.peak_bytes
        return allocator.reserved_bytes

    need_bytes = reserved_bytes(None)
    assert reserved_bytes(need_bytes) == need_bytes
    with pytest.raises(torch.OutOfMemoryError):
        reserved_bytes(need_bytes - (2 << 20))


def test_what_is_offloaded_to_the_host_does_not_count() -> None:
    with LimitedDevice(1000) as device:
        carrier = HostCarrier(device)
        tensor = torch.arange(200.0)
        away = carrier.away(tensor)
        del tensor
        assert device.live_bytes == 0
        back = carrier.back(away, torch.device("cpu"))
        assert device.live_bytes == 800
        assert torch.equal(back, away)
        del away
        assert device.live_bytes == 800


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


# Building


def test_two_may_build_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(built, [tmp_path, tmp_path])
    assert one == other
    assert list(tmp_path.iterdir()) == [one]


def test_without_a_compiler_the_reason_is_told_and_ci_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no C++ compiler" in device.why_not()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no C"):
        device.need()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no C"):
        device.need()
