"""Former names for `pipeline.device.rng`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeline.device.rng import RngState

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor


def rng_state(device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return `RngState.capture(device).tensors()`."""
    return RngState.capture(device).tensors()


def drawn_so_far(device: torch.device | str) -> RngState:
    """Return `RngState.capture(device)`."""
    return RngState.capture(device)


def set_rng_state(state: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
    """Restore what `rng_state` returned."""
    RngState.from_tensors(state, device).restore()


def as_drawn(device: str) -> AbstractContextManager[None]:
    """Return `RngState.preserved(device)`."""
    return RngState.preserved(device)
