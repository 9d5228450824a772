"""Branches on values that fake tensors do not have, such as `if mask.any():`, are guessed, and the guesses told.

A branch is guessed to be taken, which is mostly the costlier way; where that ends in an error, not to be.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from types import FrameType

MOST = 16  # branches that are tried the other way, for one model


class Guesses(TorchFunctionMode):
    """Answers what a fake tensor is worth, the same at the same line of code."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: dict[tuple[str, int], bool] = {}  # by the line of code, in the order in which they were met
        self._flips = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer for a fake tensor; let everything else happen."""
        if func is torch.Tensor.__bool__ and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return self._taken.setdefault(_line(), True)
        return func(*args, **(kwargs or {}))

    def reconsider(self) -> bool:
        """After an error: guess the last branch otherwise that was guessed to be taken; False where none is left."""
        taken = [line for line, answer in self._taken.items() if answer]
        if not taken or self._flips >= MOST:
            return False
        self._flips += 1
        self._taken[taken[-1]] = False
        return True

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what was guessed, in words."""
        return tuple(
            f"guessed that the condition at {Path(file).name}:{line} is {str(answer).lower()}: it needs data"
            for (file, line), answer in self._taken.items()
        )


def _line() -> tuple[str, int]:
    """Return the line of code that asks, outside torch and all modes."""
    frame: FrameType = sys._getframe(2)
    while frame.f_back is not None and _is_between(frame):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _is_between(frame: FrameType) -> bool:
    in_torch = str(frame.f_globals.get("__name__", "")).startswith("torch.")
    return in_torch or frame.f_code.co_name == "__torch_function__"
