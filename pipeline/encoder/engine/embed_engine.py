"""Embeds sequences with one checkpoint: draws batches, computes them, has rows written, and yields the outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pipeline.device.out_of_memory import unless_out_of_memory
from pipeline.encoder.embedding_recipe import Variant
from pipeline.encoder.engine import memory_ladder, token_batches
from pipeline.encoder.engine.io_threads import BatchReader, RowWriter
from pipeline.encoder.engine.memory_ladder import QUEUE_BYTES, MemoryLadder
from pipeline.encoder.engine.sequence_work import (
    ComputeStep,
    Done,
    Embedding,
    EmbeddingCounts,
    RefusedSequence,
    full_precision,
)
from pipeline.encoder.engine.token_batches import EngineSettings
from pipeline.encoder.esm2 import EsmEncoder
from pipeline.encoder.esm_checkpoint import as_dtype
from pipeline.encoder.parity import no_room
from pipeline.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pipeline.encoder.embedding_recipe import EmbeddingRecipe
    from pipeline.encoder.engine.sequence_work import Forward, SequenceWork
    from pipeline.encoder.engine.token_batches import BatchSchedule

    Integers = NDArray[np.int64]


AHEAD = 3  # batches that are read, or being read: one to compute now, two for later


@dataclass(slots=True)
class Flow:
    """One run of the engine; at most `QUEUE_BYTES` of rows, and one batch, wait to be written."""

    ladder: MemoryLadder
    recipe: EmbeddingRecipe
    figures: EmbeddingCounts
    schedule: BatchSchedule
    reader: BatchReader
    writer: RowWriter
    on: Callable[[Sequence[str]], None]  # called with the texts that are computed next
    reading: int = 0
    writing: int = 0
    writing_bytes: int = 0
    again: list[SequenceWork] = field(default_factory=list)  # in full precision

    def outcomes(self) -> Iterator[Done | RefusedSequence]:
        """Embed all sequences, and yield the outcome of each."""
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

    def _compute(self, works: Sequence[SequenceWork]) -> Iterator[Done | RefusedSequence]:
        """Compute sequences and hand their rows to the writer at once, so that none is lost."""
        self.on([work.text for work in works])
        if len(works) == 1 and works[0].tokens > self.ladder.budget:
            yield from self._settle_down_to(-1)  # it may need all the memory there is
        for result in self.ladder.climb(works):
            if isinstance(result, RefusedSequence):
                yield result
                continue
            self.writer.ask(result)
            self.writing += 1
            self.writing_bytes += result.bytes
            del result  # the next forward may need its memory
            yield from self._settle_down_to(QUEUE_BYTES)

    def _settle_down_to(self, most_bytes: int) -> Iterator[Done | RefusedSequence]:
        """Wait until at most so many bytes are left to be written, and take the answers that have come."""
        while self.writing and (self.writing_bytes > most_bytes or self.writer.has_answered()):
            yield from self._settle()

    def _settle(self) -> Iterator[Done | RefusedSequence]:
        """Wait for the next rows to be written, and yield their outcomes."""
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

    def _repeat(self, work: SequenceWork) -> Iterator[RefusedSequence]:
        """Queue a sequence whose numbers are not finite for full precision, or refuse it."""
        step = full_precision(self.recipe, work.step)
        if step is None:
            what = f"the encoder's numbers are not finite in {work.step.variant.precision} as stored, or overflow in it"
            yield RefusedSequence(work.index, Reason.NOT_FINITE, what)
        else:
            self.figures.again += 1
            self.again.append(work.at(step))


class EncoderWeights(Protocol):
    """What encoders are built from, a checkpoint or a source: its name, and the width of its rows."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...


class Builder(Protocol):
    """Makes an encoder: the class itself, the stage's that asks the gate first, or a stand-in of a test."""

    def __call__(self, checkpoint: Any, *, layer: int, precision: str, device: torch.device) -> Forward: ...


class Engine:
    """Embeds sequences with one checkpoint by one recipe; `figures` hold its progress."""

    def __init__(
        self,
        checkpoint: EncoderWeights,
        recipe: EmbeddingRecipe,
        settings: EngineSettings,
        *,
        precision: str | None = None,
        ceiling: int | None = None,
        learned: Callable[[int], None] = lambda _: None,
        build: Builder = EsmEncoder,
        on: Callable[[Sequence[str]], None] = lambda _: None,
    ) -> None:
        self.figures = EmbeddingCounts()
        self._checkpoint, self._recipe, self._settings, self._build = checkpoint, recipe, settings, build
        self._main = ComputeStep(settings.device, Variant(precision or recipe.precision))
        if self._main.variant not in recipe.accepted(0):
            raise ValueError(f"the recipe does not accept {self._main.variant.precision}")
        self._ceiling, self._on = ceiling, on
        storage = as_dtype(recipe.storage)
        self._ladder = MemoryLadder(
            recipe, self._main, self._encoder, storage, self.figures, learned, settings.mem_bytes
        )

    def run(
        self,
        lengths_N: Integers,
        read: Callable[[Sequence[int]], Sequence[str]],
        sink: Callable[[Embedding], None],
    ) -> Generator[Done | RefusedSequence, None, None]:
        """Embed N sequences of known length, identified by their index; yield the outcome of each.

        `read` is called in one thread only, and so is `sink`. An outcome is yielded after the sink took the embedding.
        However this ends, what had been computed is given to the sink first, all but the batch under way; a failure of
        `read` or `sink` is raised here.
        """
        refused_N = token_batches.too_long(lengths_N, self._recipe)
        for index in refused_N.tolist():
            self.figures.refused += 1
            what = f"{lengths_N[index]:,} residues; the recipe allows at most {self._recipe.length:,}"
            yield RefusedSequence(index, Reason.SEQUENCE_TOO_LONG, what)
        if len(refused_N) == len(lengths_N):
            return
        self._set_budget()
        reader = BatchReader(read, lengths_N, self._recipe, self._main, self._ladder.main.tokenize)
        with RowWriter(sink, cls=self._recipe.cls) as writer, reader:
            yield from self._run(lengths_N, refused_N, reader, writer)

    def _run(
        self, lengths_N: Integers, refused_N: Integers, reader: BatchReader, writer: RowWriter
    ) -> Iterator[Done | RefusedSequence]:
        """Yield the outcomes of the sequences that are not too long, and keep the figures."""
        settings = self._settings
        cap = None if settings.cap == "auto" else settings.cap
        order = token_batches.BatchSchedule(lengths_N, refused_N, self._recipe, policy=settings.policy, cap=cap)
        costs_N = token_batches.recipe_costs(lengths_N, self._recipe, self._checkpoint.dim)
        for outcome in Flow(self._ladder, self._recipe, self.figures, order, reader, writer, self._on).outcomes():
            self.figures.refused += isinstance(outcome, RefusedSequence)
            self.figures.cost_done += float(costs_N[outcome.index])
            yield outcome

    def _encoder(self, device: str, precision: str) -> Forward:
        return self._build(self._checkpoint, layer=self._recipe.layer, precision=precision, device=torch.device(device))

    def _set_budget(self) -> None:
        """Build the encoder and measure how many tokens fit beside it, once."""
        if self._ladder.budget:
            return
        tokens = unless_out_of_memory(self._measure)
        if tokens is None:
            raise no_room(f"the weights of {self._checkpoint.name} do", self._main.device)
        self._ladder.allow(max(1, min(tokens, self._ceiling or tokens) >> self._settings.shrink))

    def _measure(self) -> int:
        encoder = self._ladder.main
        if self._settings.budget != "auto":
            return self._settings.budget
        return memory_ladder.measured(encoder, self._settings.device, self._ladder.room)
