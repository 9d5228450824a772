"""Habits of a training loop that have to do with memory: when it collects garbage, empties caches, waits for the card.

Emptying the allocator's cache by count frees nothing that it would not use again, and costs 27 to 54 calls of the
driver each time (`pipeline lint` says so); under measured pressure it helps, and a governor asks for it then.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.memory.oom import free_caches

if TYPE_CHECKING:
    from types import TracebackType


@dataclass(frozen=True, slots=True)
class Habits:
    """What a loop does besides training."""

    memory_fraction: float | None = None  # of a card that may be used; None: all of it
    empty_cache_every: int | None = None  # micro-batches; None: never
    collect_every: int | None = None  # steps between collections of garbage; None: whenever Python wants to
    synchronise: bool = False  # after every micro-batch: for measuring


class Upkeep:
    """Keeps habits between `with` and its end; then Python's collector is as it was before."""

    def __init__(self, habits: Habits, device: str) -> None:
        self.habits, self._device = habits, device
        self._is_card = device != "cpu"
        self._micro_batches = self._steps = 0
        self._was_collecting, self._had_frozen = True, 0

    def __enter__(self) -> Upkeep:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def begin(self) -> None:
        """Set the card's share, and collect garbage by count from now on."""
        self._was_collecting, self._had_frozen = gc.isenabled(), gc.get_freeze_count()
        if self._is_card and self.habits.memory_fraction is not None:
            import torch

            torch.cuda.set_per_process_memory_fraction(self.habits.memory_fraction, torch.device(self._device))
        if self.habits.collect_every is not None:
            gc.disable()

    def end(self) -> None:
        """Let Python collect garbage as before."""
        if self.habits.collect_every is not None:
            if not self._had_frozen:  # there is no telling whose they are
                gc.unfreeze()
            if self._was_collecting:
                gc.enable()

    def after_micro_batch(self) -> None:
        """Wait for the card, and empty its cache, where that is a habit."""
        self._micro_batches += 1
        every = self.habits.empty_cache_every
        if self._is_card and self.habits.synchronise:
            import torch

            torch.cuda.synchronize(self._device)
        if every is not None and self._micro_batches % every == 0:
            self._empty_cache()

    def after_step(self, *, empty_cache: bool = False) -> None:
        """Collect garbage, if it is time; what is there after the first step stays, and is not looked at again."""
        self._steps += 1
        every = self.habits.collect_every
        if every is not None and (self._steps == 1 or self._steps % every == 0):
            gc.collect()
            if self._steps == 1:
                gc.freeze()
        if empty_cache:
            free_caches(self._device)

    def _empty_cache(self) -> None:
        if self._is_card:
            import torch

            torch.cuda.empty_cache()
