"""The simulated card is what it says: its memory and its kernels."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.memory.footprint import Tape
from pipeline.memory.hardware.caching_allocator import DEFAULT, EXPANDABLE, Allocator
from tests.card import card

MIB = 1 << 20
accelerator = torch.accelerator


def on_card(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*size, device=card.NAME, dtype=dtype)


# Memory


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
    simulated = Allocator(EXPANDABLE if expandable else DEFAULT)
    with card.settings(total_bytes=4000 * MIB, expandable=expandable, poison=False):
        tensors: dict[int, torch.Tensor] = {}
        for number in range(300):
            if tensors and draw.random() < 0.45:
                gone = draw.choice(list(tensors))
                simulated.play(Tape(np.array([-1 - gone]), np.array([-tensors.pop(gone).nbytes])))
                continue
            size = int(2 ** draw.uniform(2, 25.5))
            simulated.play(Tape(np.array([-1 - number]), np.array([size])))
            tensors[number] = torch.empty(size, dtype=torch.uint8, device=card.NAME)
            assert accelerator.memory_reserved() == simulated.reserved_bytes
            assert accelerator.memory_allocated() == simulated.allocated_bytes
        assert accelerator.memory_stats()["reserved_bytes.all.peak"] == simulated.reserved_bytes
        tensors.clear()


# Kernels


def test_tensors_of_two_places_are_refused() -> None:
    one = torch.ones(3, device=card.NAME)
    with pytest.raises(RuntimeError, match="same device"):
        one + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        one + torch.ones(3, device=f"{card.NAME}:1")
    assert (one + torch.tensor(1.0)).sum() == 6  # a number may be the host's


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
