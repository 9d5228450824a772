"""Out-of-memory errors, told apart from all others."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, TypeVar

import torch

from pipeline.device.accelerator import computing
from pipeline.device.host import trim_heap
from pipeline.device.kinds import CARD_IS_FULL, HOST_IS_FULL

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

_KEPT_CHARACTERS = 500  # of an error's text


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return type(error) in (RuntimeError, torch.AcceleratorError) and any(
        text in str(error) for text in HOST_IS_FULL + CARD_IS_FULL
    )


def out_of_memory_error(run: Callable[..., object], *arguments: object) -> str | None:
    """Call a function; return the first line of the error if memory ran out, else None; other errors are raised.

    The error is gone when this returns: its traceback holds the tensors of the call, and a retry needs their memory.
    """
    try:
        run(*arguments)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return (str(error).strip().partition("\n")[0] or type(error).__name__)[:_KEPT_CHARACTERS]
    return None


def unless_out_of_memory(call: Callable[[], Result]) -> Result | None:
    """Return what the call returns, or None if memory ran out."""
    results: list[Result] = []
    return results.pop() if out_of_memory_error(lambda: results.append(call())) is None else None


def after_freeing_caches(call: Callable[[], Result], device: str) -> Result:
    """Return what a call returns; if memory runs out, call once more without what is held for reuse."""
    results: list[Result] = []
    if out_of_memory_error(lambda: results.append(call())) is None:
        return results.pop()
    free_caches(device)
    return call()


def free_caches(device: str) -> None:
    """Release memory that Python, the C library and torch keep for reuse."""
    gc.collect()
    trim_heap()
    computing(device).empty_cache()
