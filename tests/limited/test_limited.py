"""A limited device counts every byte, and refuses the first too many."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.memory.footprint import Tape
from pipeline.memory.hardware.caching_allocator import Allocator, AllocatorSettings
from tests.limited.models import MODELS, Messages, Perceptron, Transformer, train
from tests.testkit.limited.device import (
    CUDA_ROUNDING,
    HostCarrier,
    LimitedDevice,
    RefuseOne,
    forget_failed_backward,
    real_peak,
)


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


def test_the_recording_replays_to_the_same_peak() -> None:
    with LimitedDevice(record=True) as device:
        train(Messages)
    tape = device.tape()
    assert tape.peak_bytes == device.peak_bytes
    assert tape.left_bytes == device.live_bytes
    assert (tape.block_E >= 0).all()
    allocator = Allocator(AllocatorSettings())
    allocator.play(tape)
    assert allocator.peak_allocated_bytes == real_peak_rounded(lambda: train(Messages))


def real_peak_rounded(run: Callable[[], object]) -> int:
    with LimitedDevice(round_to=CUDA_ROUNDING) as device:
        run()
    return device.peak_bytes


@pytest.mark.parametrize("expandable", [False, True])
def test_a_training_passes_at_what_the_simulated_allocator_reserves_and_not_a_page_below(expandable: bool) -> None:
    def reserved_bytes(limit_bytes: int | None) -> int:
        allocator = Allocator(AllocatorSettings(expandable=expandable))

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
