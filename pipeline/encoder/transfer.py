"""Between the device and the host: when a computation ran, and its rows as arrays.

Shapes: R residues of several sequences, D features.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.memory.oom import unless_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Rows = NDArray[Any]

_EXPONENT = {np.dtype(np.uint16): 0x7F80}  # of bfloat16, whose bits numpy holds as integers
_LOOKED_AT_ONCE = 1024  # rows


class Span:
    """The time a computation takes: on CUDA, where it goes on after the call, by the card's own clock."""

    def __init__(self, device: str) -> None:
        self._on_card = device != "cpu" and torch.cuda.is_available()
        self._begin: Any = self._now()
        self._end: Any = self._begin

    def stop(self) -> Span:
        """Mark the end."""
        self._end = self._now()
        return self

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Let what follows on a stream wait for the end."""
        stream.wait_event(self._end)

    def seconds(self) -> float:
        """Return how long it took; on CUDA, only once it is over."""
        if self._on_card:
            return float(self._begin.elapsed_time(self._end)) / 1e3
        return float(self._end - self._begin)

    def _now(self) -> Any:
        if not self._on_card:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class Fetch:
    """Brings rows to the host: on CUDA through one pinned buffer and a stream of its own, beside the next forward."""

    def __init__(self, pin: Callable[[int], torch.Tensor] | None = None) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._pin = pin or pinned
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def __call__(self, rows_RD: torch.Tensor, span: Span) -> torch.Tensor:
        """Return the rows on the host; what CUDA's are in is overwritten by the next call."""
        if rows_RD.device.type == "cpu":
            return rows_RD
        if self._stream is None:
            self._stream = torch.cuda.Stream(rows_RD.device)  # type: ignore[no-untyped-call]
        host_RD = self.place(rows_RD)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            span.hold(self._stream)
            host_RD.copy_(rows_RD, non_blocking=True)
        self._stream.synchronize()  # after which nothing on the card reads the rows: they may be freed
        return host_RD

    def place(self, rows_RD: torch.Tensor) -> torch.Tensor:
        """Return a place for rows in the pinned buffer; one that is not pinned where no more memory can be."""
        needed_bytes = rows_RD.numel() * rows_RD.element_size()
        if len(self._pinned) < needed_bytes:
            # To powers of two, as pinned memory grows anyway.
            larger = unless_out_of_memory(lambda: self._pin(1 << (needed_bytes - 1).bit_length()))
            if larger is None:
                return torch.empty(rows_RD.shape, dtype=rows_RD.dtype)
            self._pinned = larger
        return self._pinned[:needed_bytes].view(rows_RD.dtype).view(rows_RD.shape)


def pinned(size_bytes: int) -> torch.Tensor:
    """Return memory of the host that a card can write to by itself."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


def as_array(rows_LD: torch.Tensor, *, copy: bool) -> Rows:
    """Return rows on the host as an array; bfloat16 as the bits of uint16."""
    if rows_LD.dtype is torch.bfloat16:
        array: Rows = rows_LD.view(torch.int16).numpy().view(np.uint16)
    else:
        array = rows_LD.numpy()
    return array.copy() if copy else array


def is_finite(rows_LD: Rows) -> bool:
    """Say whether every number is finite, whatever holds it."""
    starts = range(0, len(rows_LD), _LOOKED_AT_ONCE)  # a part at a time: what the answer is made from is no small thing
    return all(_all_finite(rows_LD[start : start + _LOOKED_AT_ONCE]) for start in starts)


def _all_finite(rows_LD: Rows) -> bool:
    if (exponent := _EXPONENT.get(rows_LD.dtype)) is not None:
        return bool(((rows_LD & exponent) != exponent).all())
    return bool(np.isfinite(rows_LD).all())
