"""Saves and restores the state of random number generators: torch's, its device's, Python's and NumPy's."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from pipeline.device.accelerator import computing
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def rng_state(device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return all states as tensors by name; only this rank's device is asked, since another would allocate memory."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = cast(
        "tuple[str, Any, int, int, float]",
        np.random.get_state(),  # noqa: NPY002 - what users' code draws from
    )
    if kind != "MT19937":
        raise ConfigError(f"NumPy's global random state is {kind}, not MT19937", where="train.task")
    state = {
        "rng.torch": torch.get_rng_state(),
        "rng.python": torch.tensor([version, *words], dtype=torch.int64),
        "rng.python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "rng.numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),
        "rng.numpy.gauss": torch.tensor([cached], dtype=torch.float64),
    }
    own = computing(device)
    if (own_state := own.rng_state()) is not None:
        state[f"rng.{own.kind}"] = own_state
    return state


def drawn_so_far(device: torch.device | str) -> tuple[Any, ...]:
    """Return what changes when a random number is drawn, to be compared: much sooner had than all states."""
    _, keys, *more = np.random.get_state()  # noqa: NPY002 - what users' code draws from
    own_state = computing(device).rng_state()
    card = b"" if own_state is None else own_state.numpy().tobytes()
    return random.getstate(), np.asarray(keys).tobytes(), *more, torch.get_rng_state().numpy().tobytes(), card


def set_rng_state(state: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
    """Restore the states; a generator whose state was not saved stays as it is."""
    torch.set_rng_state(state["rng.torch"])
    version, *words = state["rng.python"].tolist()
    gauss = state["rng.python.gauss"].tolist()
    random.setstate((version, tuple(words), gauss[0] if gauss else None))
    *keys, position, has_gauss = state["rng.numpy"].tolist()
    cached = state["rng.numpy.gauss"].item()
    words_of = np.array(keys, dtype=np.uint32)
    np.random.set_state(("MT19937", words_of, position, has_gauss, cached))  # noqa: NPY002
    own = computing(device)
    if (own_state := state.get(f"rng.{own.kind}")) is not None:
        own.set_rng_state(own_state)


@contextmanager
def as_drawn(device: str) -> Iterator[None]:
    """Restore the random states on exit, so that a loss computed twice, or in vain, draws the same numbers."""
    numbers = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(numbers, device)
