"""The state of the random number generators a model draws from: torch's, its device's, Python's and NumPy's.

    state = RngState.capture("cuda")
    ...
    state.restore()

`tensors` and `from_tensors` convert it for checkpoints. Capturing does not synchronise with the device.
"""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.device.accelerator import computing
from pipeline.device.kinds import CPU
from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RngState:
    """The state of all generators; states are equal if they would draw the same numbers."""

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]
    cpu: Tensor | None  # of torch; None: torch's generators were not captured, and stay as they are
    device: torch.device | str = CPU
    on_device: Tensor | None = None  # None on CPUs

    @classmethod
    def capture(cls, device: torch.device | str = CPU) -> RngState:
        """Return the present state; other devices are not asked, since that would allocate memory there."""
        return cls(*_of_libraries(), torch.get_rng_state(), device, computing(device).rng_state())

    @classmethod
    def capture_without_torch(cls) -> RngState:
        """Return the present state of Python's and NumPy's generators alone, as within torch's dispatch modes."""
        return cls(*_of_libraries(), None)

    def restore(self) -> None:
        """Make the generators continue from this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002 - users' code draws from it
        if self.cpu is not None:
            torch.set_rng_state(self.cpu)
        if self.on_device is not None:
            computing(self.device).set_rng_state(self.on_device)

    @classmethod
    @contextmanager
    def preserved(cls, device: torch.device | str) -> Iterator[None]:
        """Restore the present state on exit, so that a loss computed twice, or in vain, draws the same numbers."""
        state = cls.capture(device)
        try:
            yield
        finally:
            state.restore()

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as tensors by name."""
        version, words, gauss = self.python
        _, keys, position, has_gauss, cached = self.numpy
        state = {
            "rng.python": torch.tensor([version, *words], dtype=torch.int64),
            "rng.python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
            "rng.numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
            "rng.numpy.gauss": torch.tensor([cached], dtype=torch.float64),
        }
        if self.cpu is not None:
            state["rng.torch"] = self.cpu
        if self.on_device is not None:
            state[f"rng.{computing(self.device).kind}"] = self.on_device
        return state

    @classmethod
    def from_tensors(cls, state: Mapping[str, Tensor], device: torch.device | str = CPU) -> RngState:
        """Read what `tensors` returned; the generator of a device of another kind is left as it is."""
        version, *words = state["rng.python"].tolist()
        gauss = state["rng.python.gauss"].tolist()
        *keys, position, has_gauss = state["rng.numpy"].tolist()
        cached = state["rng.numpy.gauss"].item()
        return cls(
            python=(version, tuple(words), gauss[0] if gauss else None),
            numpy=("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached),
            cpu=state.get("rng.torch"),
            device=device,
            on_device=state.get(f"rng.{computing(device).kind}"),
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RngState) and self._bits() == other._bits()

    __hash__ = None  # type: ignore[assignment]  # it holds arrays

    def _bits(self) -> tuple[object, ...]:
        name, keys, *rest = self.numpy
        of_torch = (None if state is None else state.numpy().tobytes() for state in (self.cpu, self.on_device))
        return self.python, name, keys.tobytes(), *rest, *of_torch


def _of_libraries() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the states of Python's and NumPy's global generators."""
    of_numpy: Any = np.random.get_state()  # noqa: NPY002 - users' code draws from it
    if not isinstance(of_numpy, tuple):
        kind = of_numpy["bit_generator"]
        raise ConfigError(f"NumPy's global random state is {kind}, not MT19937", where="train.task")
    return random.getstate(), of_numpy
