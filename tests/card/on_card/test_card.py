"""The simulated card is what it says: its memory, its streams, its kernels."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import signal
from contextlib import suppress

import pytest
import torch
from torch import nn

from pipeline.memory.hardware.caching_allocator import Allocator, AllocatorSettings, SimulatedOutOfMemory
from tests.card import card

MIB = 1 << 20
accelerator = torch.accelerator


def on_card(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*size, device=card.NAME, dtype=dtype)


# Memory


def test_the_host_cannot_read_a_cards_memory() -> None:
    address = on_card(8).data_ptr()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(address, 1)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV


def test_new_memory_is_full_of_values_that_are_no_numbers() -> None:
    assert on_card(100).isnan().all()


def test_a_limit_is_one_to_the_byte() -> None:
    with card.settings(total_bytes=20 * MIB):
        torch.empty(20 * MIB - 512, device=card.NAME, dtype=torch.uint8)
    with card.settings(total_bytes=20 * MIB - 1), pytest.raises(torch.OutOfMemoryError):
        torch.empty(20 * MIB - 512, device=card.NAME, dtype=torch.uint8)


def test_what_others_have_taken_and_a_fraction_lower_the_limit() -> None:
    with card.settings(total_bytes=40 * MIB, outside_bytes=25 * MIB), pytest.raises(torch.OutOfMemoryError):
        on_card(4 * MIB)
    with card.settings(total_bytes=40 * MIB):
        torch.get_device_module(card.NAME).set_per_process_memory_fraction(0.39)
        with pytest.raises(torch.OutOfMemoryError):
            on_card(4 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_memory_is_reserved_as_by_the_allocator_that_plans_simulate(seed: int, expandable: bool) -> None:
    draw = random.Random(seed)
    accelerator.reset_accumulated_memory_stats()
    accelerator.reset_peak_memory_stats()
    limit = draw.choice([64, 200, 1000]) * MIB
    simulated = Allocator(AllocatorSettings(expandable=expandable), limit)
    with card.settings(total_bytes=limit, expandable=expandable, poison=False):
        tensors: dict[int, torch.Tensor] = {}
        for number in range(300):
            if tensors and draw.random() < 0.45:
                gone = draw.choice(list(tensors))
                del tensors[gone]
                simulated.release(gone)
                continue
            size, is_refused = int(2 ** draw.uniform(2, 25.5)), False
            try:
                simulated.allocate(number, size)
            except SimulatedOutOfMemory:
                is_refused = True
            with suppress(torch.OutOfMemoryError):
                tensors[number] = torch.empty(size, dtype=torch.uint8, device=card.NAME)
            assert is_refused == (number not in tensors)
            assert accelerator.memory_reserved() == simulated.reserved_bytes
            assert accelerator.memory_allocated() == simulated.allocated_bytes
        stats = accelerator.memory_stats()
        assert stats["reserved_bytes.all.peak"] == simulated.peak_reserved_bytes
        assert stats["num_alloc_retries"] == simulated.retries
        tensors.clear()


def test_every_allocation_can_be_refused_and_nothing_stays() -> None:
    weight = torch.randn(64, 64, device=card.NAME, requires_grad=True)

    def step() -> None:
        (weight @ weight).relu().sum().backward()
        weight.grad = None

    step()
    before = card.allocations()
    step()
    count, live = card.allocations() - before, accelerator.memory_allocated()
    assert count > 4
    for number in range(count):
        with card.refusing(number), pytest.raises(torch.OutOfMemoryError):
            step()
        weight.grad = None
        assert accelerator.memory_allocated() == live
    assert card.refused() == count


def test_a_block_that_another_stream_uses_is_not_given_out_again_before() -> None:
    main, side = accelerator.current_stream(), torch.Stream(card.NAME)
    target = torch.empty(1000, dtype=torch.uint8).pin_memory()
    tensor = torch.ones(1000, device=card.NAME, dtype=torch.uint8)
    side.wait_stream(main)
    with side:
        target.copy_(tensor, non_blocking=True)
    tensor.record_stream(side)
    address = tensor.data_ptr()
    del tensor
    if not side.query():
        assert torch.zeros(1000, device=card.NAME, dtype=torch.uint8).data_ptr() != address
    side.synchronize()
    assert (target == 1).all()


# Streams


def late_sum(seed: int, *, wait: bool) -> int:
    """Copy a pinned tensor, write over it at once or after the copy, and return the sum of the copy."""
    card.seed_order(seed)
    pinned = torch.ones(1000).pin_memory()
    copy = pinned.to(card.NAME, non_blocking=True)
    event = accelerator.current_stream().record_event()
    if wait:
        event.synchronize()
    pinned.zero_()
    return int(copy.sum())


def test_copies_from_pinned_memory_happen_late_unless_an_event_is_waited_for() -> None:
    assert {late_sum(seed, wait=True) for seed in range(50)} == {1000}
    assert {late_sum(seed, wait=False) for seed in range(50)} == {0, 1000}


def test_copies_to_pinned_memory_are_there_when_their_event_is() -> None:
    tensor = torch.ones(1000, device=card.NAME)
    seen = set()
    for seed in range(50):
        card.seed_order(seed)
        pinned = torch.zeros(1000).pin_memory()
        pinned.copy_(tensor, non_blocking=True)
        event = accelerator.current_stream().record_event()
        seen.add(int(pinned.sum()))
        event.synchronize()
        assert pinned.sum() == 1000
    assert 0 in seen


@pytest.mark.parametrize("waits", [True, False])
def test_a_kernel_of_another_stream_sees_a_copy_only_if_it_waited(waits: bool) -> None:
    main, side = accelerator.current_stream(), torch.Stream(card.NAME)
    seen = set()
    for seed in range(50):
        card.seed_order(seed)
        pinned = torch.ones(1000).pin_memory()
        target = torch.zeros(1000, device=card.NAME)
        side.wait_stream(main)
        with side:
            target.copy_(pinned, non_blocking=True)
        if waits:
            main.wait_stream(side)
        seen.add(int(target.sum()))
        side.synchronize()
    assert seen == ({1000} if waits else {0, 1000})


# Kernels


def test_tensors_of_two_places_are_refused() -> None:
    one = torch.ones(3, device=card.NAME)
    with pytest.raises(RuntimeError, match="same device"):
        one + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        one + torch.ones(3, device=f"{card.NAME}:1")
    assert (one + torch.tensor(1.0)).sum() == 6  # a number may be the host's


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_layer_gives_what_it_gives_on_the_cpu(norm_first: bool) -> None:
    made = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    values = torch.randn(2, 7, 16)
    made(values).square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in made.parameters() if parameter.grad is not None]
    made.zero_grad()
    made.to(card.NAME)(values.to(card.NAME)).square().sum().backward()
    for parameter, expected in zip(made.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.cpu(), expected)


def test_a_card_has_random_numbers_of_its_own() -> None:
    module = torch.get_device_module(card.NAME)
    torch.manual_seed(7)
    state, host = module.get_rng_state(), torch.get_rng_state()
    first = nn.functional.dropout(torch.ones(100, device=card.NAME))
    assert torch.equal(torch.get_rng_state(), host)
    second = nn.functional.dropout(torch.ones(100, device=card.NAME))
    module.set_rng_state(state)
    again = nn.functional.dropout(torch.ones(100, device=card.NAME))
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_autocast_casts_what_it_casts_on_a_gpu() -> None:
    values = torch.randn(4, 4, device=card.NAME)
    with torch.autocast(card.NAME, dtype=torch.bfloat16):
        assert (values @ values).dtype == torch.bfloat16
        assert (values @ values).sum().dtype == torch.float32
        assert nn.functional.softmax(values @ values, -1).dtype == torch.float32


def test_a_failed_backward_is_forgotten_by_the_cards_own_thread() -> None:
    values = torch.ones(1000, device=card.NAME, requires_grad=True)
    live = accelerator.memory_allocated()
    loss = values.exp().exp().exp().sum()
    with card.refusing(1), pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    del loss
    values.grad = None
    assert accelerator.memory_allocated() == live
