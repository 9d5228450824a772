"""A limited device counts every byte, and refuses the first too many."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeline.memory.hardware.caching_allocator import Allocator, AllocatorSettings, SimulatedOutOfMemory
from tests.limited.models import MODELS, Messages, Perceptron, Transformer, step, train
from tests.testkit.limited.device import (
    CUDA_ROUNDING,
    HostCarrier,
    LimitedDevice,
    RefuseOne,
    forget_failed_backward,
    real_peak,
)

FLOAT_BYTES = 4


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


def test_every_block_is_rounded_as_on_a_gpu() -> None:
    with LimitedDevice(round_to=CUDA_ROUNDING) as device:
        kept = [torch.empty(size, dtype=torch.uint8) for size in (1, 512, 513)]
        assert device.live_bytes == 512 + 512 + 1024
        del kept
        assert device.live_bytes == 0


def test_freed_memory_is_given_back_to_the_count() -> None:
    with LimitedDevice(FLOAT_BYTES * 100) as device:
        for _ in range(10):
            kept = torch.empty(100)
            del kept  # else the next would be made before it is dropped
        assert (device.live_bytes, device.peak_bytes) == (0, FLOAT_BYTES * 100)


def test_a_storage_that_is_resized_counts_as_what_it_is_now() -> None:
    with LimitedDevice() as device:
        tensor = torch.empty(100)
        tensor.untyped_storage().resize_(0)
        assert device.live_bytes == 0
        tensor.untyped_storage().resize_(400)
        assert device.live_bytes == 400


def test_release_of_what_is_older_than_the_device_counts_for_nothing() -> None:
    old = torch.empty(1000)
    with LimitedDevice() as device:
        older = torch.empty(10)
    with LimitedDevice() as device:
        del old, older
        assert device.live_bytes == 0
        kept = torch.empty(10)
        assert device.live_bytes == kept.nbytes


def test_nothing_is_counted_after_the_with() -> None:
    with LimitedDevice(100, record=True) as device:
        kept = torch.empty(10)
    more = torch.empty(1000)
    events = device.mark()
    del kept, more
    assert (device.live_bytes, device.peak_bytes, device.refused, events) == (40, 40, 0, device.mark())
    with LimitedDevice(8):
        pass
    assert device.peak_bytes == 40


def test_a_limit_inside_backward_is_raised_out_of_backward() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with LimitedDevice() as device:
        loss = layers(torch.randn(4, 64)).sum()
        device.limit_bytes = device.live_bytes + 5 * FLOAT_BYTES * 64 * 64 // 2  # half of all gradients
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
    assert layers[-1].weight.grad is not None
    assert layers[0].weight.grad is None


@pytest.mark.nightly
def test_after_an_out_of_memory_at_any_block_the_same_training_gives_the_same_numbers() -> None:
    torch.manual_seed(0)
    with LimitedDevice(record=True) as device:
        network = Transformer()
        start = device.mark()
        network().backward()
        blocks = int((device.tape(start).bytes_E > 0).sum())
    expected = train(Transformer)
    assert blocks > 50
    for place in range(0, blocks, 3):
        assert trained_with_a_failure(Transformer, place) == expected


def trained_with_a_failure(model: Callable[[], nn.Module], place: int) -> list[float]:
    """Train two steps, the second of which fails once, at some block."""
    refuse = RefuseOne()
    with LimitedDevice(through=refuse) as device:
        torch.manual_seed(0)
        network = model()
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, foreach=True)
        losses = [step(network, optimizer)]
        state = torch.get_rng_state()
        optimizer.zero_grad()
        before = device.live_bytes
        refuse.after = place
        with pytest.raises(torch.OutOfMemoryError):
            step(network, optimizer)
        optimizer.zero_grad()
        forget_failed_backward()
        assert device.live_bytes == before
        torch.set_rng_state(state)
        losses.append(step(network, optimizer))
    assert device.refused == 1
    return losses


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


def test_blocks_from_before_a_mark_are_negative_in_what_follows_it() -> None:
    with LimitedDevice(record=True) as device:
        old, kept = torch.empty(10), torch.empty(20)
        mark = device.mark()
        del old
        new = torch.empty(30)
        end = device.mark()
        del kept, new
    tape = device.tape(mark, end)
    assert tape.block_E.tolist() == [-1, 2]
    assert tape.bytes_E.tolist() == [-40, 120]
    assert device.tape(end).block_E.tolist() == [-2, -3]


def test_a_fake_allocator_is_told_of_every_block_and_its_refusal_is_out_of_memory() -> None:
    fake = FakeAllocator(limit_bytes=100)
    with LimitedDevice(through=fake) as device:
        kept = torch.empty(80, dtype=torch.uint8)
        with pytest.raises(torch.OutOfMemoryError, match="80 are live, but its allocator refuses"):
            torch.empty(21, dtype=torch.uint8)
        del kept
        torch.empty(21, dtype=torch.uint8)
    assert fake.told == [("allocate", 0, 80), ("allocate", 1, 21), ("release", 0), ("allocate", 2, 21), ("release", 2)]
    assert device.peak_bytes == 80


class FakeAllocator:
    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.live: dict[int, int] = {}
        self.told: list[tuple[object, ...]] = []

    def allocate(self, number: int, size: int) -> None:
        self.told.append(("allocate", number, size))
        if sum(self.live.values()) + size > self.limit_bytes:
            raise SimulatedOutOfMemory(size, sum(self.live.values()), 0, self.limit_bytes)
        self.live[number] = size

    def release(self, number: int) -> None:
        self.told.append(("release", number))
        del self.live[number]


@pytest.mark.parametrize("expandable", [False, True])
def test_a_training_passes_at_what_the_simulated_allocator_reserves_and_not_a_page_below(expandable: bool) -> None:
    def reserved_bytes(limit_bytes: int | None) -> int:
        allocator = Allocator(AllocatorSettings(expandable=expandable), limit_bytes)
        with LimitedDevice(through=allocator) as device:
            train(Perceptron)
        assert allocator.peak_allocated_bytes >= device.peak_bytes
        return allocator.peak_reserved_bytes

    need_bytes = reserved_bytes(None)
    assert reserved_bytes(need_bytes) == need_bytes
    with pytest.raises(torch.OutOfMemoryError):
        reserved_bytes(need_bytes - (2 << 20))


def test_an_error_of_the_hook_itself_is_raised_by_the_with() -> None:
    with pytest.raises(ZeroDivisionError), LimitedDevice(through=lambda block, size: 1 // 0 == 0):
        torch.empty(10)


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


def test_threads_are_counted_together() -> None:
    def work() -> None:
        for size in range(1, 300):
            kept.append(torch.empty(size))
            torch.empty(2 * size)

    kept: list[Tensor] = []
    with LimitedDevice(through=lambda block, signed_bytes: True, record=True) as device:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert device.live_bytes == bytes_of(*kept) == device.tape().left_bytes
    assert device.tape().peak_bytes == device.peak_bytes


def test_two_devices_at_once_are_refused() -> None:
    with LimitedDevice(1 << 20) as device:
        with pytest.raises(RuntimeError, match="another limited device is open"), LimitedDevice(10):
            pass
        kept = torch.empty(1000)
        assert device.live_bytes == kept.nbytes
    with LimitedDevice(10):
        pass
