"""The loop of a run: between the thread that reads, the ladder that computes, and the thread that writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pipeline.encoder.budget import QUEUE_BYTES
from pipeline.encoder.ladder import Refused
from pipeline.encoder.steps import full_precision
from pipeline.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipeline.encoder.figures import Figures
    from pipeline.encoder.ladder import Ladder
    from pipeline.encoder.recipe import Recipe, Variant
    from pipeline.encoder.schedule import Schedule
    from pipeline.encoder.steps import Work
    from pipeline.encoder.threads import Reader, Writer

AHEAD = 3  # batches that are read, or being read: one to compute now, two for later


@dataclass(frozen=True, slots=True)
class Done:
    """A sequence whose embedding the sink has taken."""

    reason: ClassVar[None] = None
    index: int
    variant: Variant


@dataclass(slots=True)
class Flow:
    """What is under way in one run; no more rows than `QUEUE_BYTES`, and one batch, wait to be written."""

    ladder: Ladder
    recipe: Recipe
    figures: Figures
    schedule: Schedule
    reader: Reader
    writer: Writer
    on: Callable[[Sequence[str]], None]  # is told which texts are computed now
    reading: int = 0
    writing: int = 0
    writing_bytes: int = 0
    again: list[Work] = field(default_factory=list)  # in full precision

    def outcomes(self) -> Iterator[Done | Refused]:
        """Do everything, and yield what became of each sequence."""
        while True:
            self._read_ahead()
            if self.again:
                yield from self._compute([self.again.pop()])
            elif self.reading:
                batch = self.reader.hear()
                self.reading -= 1
                yield from batch.refused
                yield from self._compute(batch.works)
            elif self.writing:
                yield from self._settle()
            else:
                return

    def _read_ahead(self) -> None:
        while self.reading < AHEAD and (places := self.schedule.draw(self.ladder.budget)) is not None:
            self.reader.ask(places)
            self.reading += 1

    def _compute(self, works: Sequence[Work]) -> Iterator[Done | Refused]:
        """Compute sequences; their rows are the writer's before anything else can happen, so that none is lost."""
        self.on([work.text for work in works])
        if len(works) == 1 and works[0].tokens > self.ladder.budget:
            yield from self._settle_down_to(-1)  # it may need all the memory there is
        for result in self.ladder.climb(works):
            if isinstance(result, Refused):
                yield result
                continue
            self.writer.ask(result)
            self.writing += 1
            self.writing_bytes += result.bytes
            del result  # the next forward may need its memory
            yield from self._settle_down_to(QUEUE_BYTES)

    def _settle_down_to(self, most_bytes: int) -> Iterator[Done | Refused]:
        """Wait until no more than this is left to be written, and take what answers are there."""
        while self.writing and (self.writing_bytes > most_bytes or self.writer.has_answered()):
            yield from self._settle()

    def _settle(self) -> Iterator[Done | Refused]:
        """Wait for the next rows to be written, and yield what became of them."""
        written = self.writer.hear()
        self.writing -= 1
        self.writing_bytes -= written.bytes
        self.figures.forward_s += written.seconds
        for work in written.spoiled:
            yield from self._repeat(work)
        for work in written.stored:
            self.figures.sequences += 1
            self.figures.residues += len(work.tokens_L)
            yield Done(work.index, work.step.variant)

    def _repeat(self, work: Work) -> Iterator[Refused]:
        """Have a sequence whose numbers are not finite done again in full precision, or refuse it."""
        step = full_precision(self.recipe, work.step)
        if step is None:
            what = f"the encoder's numbers are not finite in {work.step.variant.precision} as stored"
            yield Refused(work.index, Reason.NOT_FINITE, what)
        else:
            self.figures.again += 1
            self.again.append(work.at(step))
