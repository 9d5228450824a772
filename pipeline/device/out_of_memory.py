"""Out-of-memory errors, told apart from all others."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, TypeVar

import torch

from pipeline.device.accelerator import computing
from pipeline.device.heap import trim_heap
from pipeline.device.kinds import CARD_IS_FULL, HOST_IS_FULL

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

_KEPT_CHARACTERS = 500  # of an error's text
_PLAIN = RuntimeError, getattr(torch, "AcceleratorError", RuntimeError)  # the latter came with torch 2.8


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return type(error) in _PLAIN and any(text in str(error) for text in HOST_IS_FULL + CARD_IS_FULL)


def unless_out_of_memory(call: Callable[[], Result]) -> Result | None:
    """Return what the call returns, or None if memory ran out; other errors are raised.

    The error is gone when this returns: its traceback holds the tensors of the call, and a retry needs their memory.
    """
    try:
        return call()
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
    return None


def out_of_memory_error(run: Callable[..., object], *arguments: object) -> str | None:
    """Call a function; return the first line of the error if memory ran out, else None.

    The error itself is gone when this returns, as with `unless_out_of_memory`.
    """
    try:
        run(*arguments)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return (str(error).strip().partition("\n")[0] or type(error).__name__)[:_KEPT_CHARACTERS]
    return None


def after_freeing_caches(call: Callable[[], Result], device: str) -> Result:
    """Return what a call returns; if memory runs out, call once more without what is held for reuse."""
    results: list[Result] = []
    if out_of_memory_error(lambda: results.append(call())) is not None:
        free_caches(device)
        results.append(call())
    return results[0]


def free_caches(device: str) -> None:
    """Release memory that Python, the C library and torch keep for reuse."""
    gc.collect()
    trim_heap()
    computing(device).empty_cache()
