"""A rank's share of a step: its micro-batches, iterable several times, and pieces of them.

A step of two passes keeps the batches of the first pass for the second, which drops each after its turn. After an
out-of-memory a step runs again, in pieces of its micro-batches, whose items are read again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.training.step_clock import READ

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from pipeline.device.batch_transfer import CopyAhead
    from pipeline.protocol import Batch
    from pipeline.training.items.batch import TaskBatch
    from pipeline.training.sampling import BatchOrigin
    from pipeline.training.step_clock import StepClock

CHECKPOINTING, OFFLOAD, HOST, SKIP = "checkpointing", "offload", "cpu", "skip"
RUNGS = (CHECKPOINTING, OFFLOAD, HOST, SKIP)  # the ladder of remedies; a piece's `rung` counts those it has climbed
ON_HOST = RUNGS.index(HOST) + 1  # such a count


class Timed(Protocol):
    """Anything whose time a clock measures, such as a `Step`."""

    clock: StepClock


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice of a micro-batch, and how many memory remedies it needs beyond the settings."""

    batch: TaskBatch
    start: int
    stop: int
    rung: int = 0

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def ids(self) -> tuple[str, ...]:
        return self.batch.ids[self.start : self.stop]

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.batch.numbers[self.start : self.stop]

    @property
    def is_on_host(self) -> bool:
        return self.rung >= ON_HOST

    @property
    def weights(self) -> Mapping[str, Any] | None:
        """The weights of its terms, where they are known already."""
        return self.batch.weights if len(self) == len(self.batch) else None

    def collated(self, step: Timed) -> Batch:
        """Return the task's batch of these items; of some of a micro-batch, they are read again."""
        with step.clock.within(READ):
            return self.batch.part(self.start, self.stop)

    def singles(self) -> list[Piece]:
        """Split it into pieces of one item."""
        return [replace(self, start=place, stop=place + 1) for place in range(self.start, self.stop)]


class RankShare:
    """A rank's pieces of one step; each iteration starts over, and the first one reads from the loader."""

    def __init__(
        self,
        batches: Iterator[TaskBatch],
        fetch: Callable[[Sequence[int], BatchOrigin], TaskBatch],
        *,
        hold: int,
        leave_out: Collection[str] = (),
        ahead: CopyAhead | None = None,
        at_hand: Callable[[], TaskBatch | None] = lambda: None,
    ) -> None:
        """Read the step's first batch, which says which step it is; keep at most `hold` batches for a second pass.

        `ahead` receives what follows each piece: a held batch, or the next one to be read, once it is `at_hand`.
        """
        self._batches, self.fetch, self._hold, self._leave_out = batches, fetch, hold, set(leave_out)
        self._ahead, self._at_hand = ahead, at_hand
        self.skipped: list[str] = []  # items that `leave_out` added
        self.cuts: list[tuple[tuple[str, ...], tuple[int, ...]]] = []  # ids and numbers of each batch read
        self._origins: list[BatchOrigin] = []
        self._held: dict[int, TaskBatch] = {}
        self.is_last_pass = False  # batches are dropped once they were iterated
        self.rejected = self.cropped = 0
        self.is_over = not self._read()  # there was no further step

    def leave_out(self, ids: Sequence[str]) -> None:
        """Leave out items that fit nowhere from now on."""
        self._leave_out.update(ids)
        self.skipped += ids

    @property
    def origin(self) -> BatchOrigin:
        return self._origins[0]

    def __iter__(self) -> Iterator[Piece]:
        """Yield a piece for each micro-batch that has items."""
        place = 0
        while (batch := self._batch(place)) is not None:
            if self.is_last_pass or len(self._held) > self._hold:
                self._held.pop(place, None)
            place += 1
            if self._ahead is not None:
                self._ahead.following = partial(self._following, place)
            yield from self._pieces(batch)
            del batch  # its slot is free for the next one

    def drain(self) -> None:
        """Read the rest of the step from the loader and drop it."""
        self._held.clear()
        if self._ahead is not None:
            self._ahead.drop()
        while self._read():
            self._held.clear()

    def _read(self) -> bool:
        """Read the next batch of the step from the loader; return False if there is none."""
        batch = None if self._is_whole else next(self._batches, None)
        if batch is None:
            return False
        self._held[len(self._origins)] = batch
        self.rejected += len(batch.rejected)
        self.cropped += batch.cropped
        self._origins.append(batch.origin)
        self.cuts.append((batch.ids, batch.numbers))
        return True

    @property
    def _is_whole(self) -> bool:
        """Whether all micro-batches of the step were read."""
        return bool(self._origins) and self._origins[-1].index + 1 == self._origins[-1].of

    def _batch(self, place: int) -> TaskBatch | None:
        """Return the batch at a place of the step: held, read, or read again; None after the last one."""
        if place == len(self._origins) and not self._read():
            return None
        held = self._held.get(place)  # compared with None: an empty batch is falsy
        return self.fetch(self.cuts[place][1], self._origins[place]) if held is None else held

    def _pieces(self, batch: TaskBatch) -> Iterator[Piece]:
        """Yield a batch as one piece, or as the runs between items that are left out."""
        start = 0
        for place, name in enumerate((*batch.ids, "")):
            if place == len(batch.ids) or name in self._leave_out:
                if place > start:
                    yield Piece(batch, start, place)
                start = place + 1

    def _following(self, place: int) -> Batch | None:
        """Return what is collated of the micro-batch that comes after so many, or after them all; None: not at hand."""
        if place < len(self._origins):
            batch = self._held.get(place)
        elif self._is_whole and not self.is_last_pass:
            batch = self._held.get(0)
        else:
            batch = self._at_hand()
        return batch.value if batch is not None and batch.is_made else None
