"""The state of all random number generators: captured, compared, stored as tensors and restored."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.device.accelerator import RngState

DRAWS = [
    lambda: random.random(),
    lambda: random.gauss(0, 1),  # it keeps the second number of a pair
    lambda: float(np.random.rand()),  # noqa: NPY002
    lambda: float(np.random.standard_normal()),  # noqa: NPY002
    lambda: float(torch.rand(())),
]


def drawn() -> list[Any]:
    return [draw() for draw in DRAWS]


@pytest.mark.parametrize("pairs", [0, 1])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_a_restored_state_draws_the_same_numbers(*, pairs: int, as_tensors: bool) -> None:
    for _ in range(pairs):
        drawn()
    state = RngState.capture()
    wanted = drawn() + drawn()
    if as_tensors:
        state = RngState(state.tensors())
    state.restore()
    assert drawn() + drawn() == wanted


@pytest.mark.parametrize("draw", DRAWS)
def test_states_differ_once_any_generator_drew_a_number(draw: Any) -> None:
    before = RngState.capture()
    assert RngState.capture() == before
    draw()
    assert RngState.capture() != before
    before.restore()
    assert RngState.capture() == before


def test_numbers_drawn_within_a_preserved_block_are_drawn_again_even_after_an_error() -> None:
    before = RngState.capture()

    def draw_and_fail() -> None:
        with RngState.preserved("cpu"):
            drawn()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        draw_and_fail()
    assert RngState.capture() == before


def test_a_state_without_torch_leaves_its_generator_alone() -> None:
    state, wanted = RngState.capture_without_torch(), random.random()
    numbers = torch.rand(3).tolist()
    state.restore()
    assert random.random() == wanted
    assert torch.rand(3).tolist() != numbers
