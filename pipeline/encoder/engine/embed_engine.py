"""Embeds sequences with one encoder: one thread reads ahead, this one computes, and a third one writes."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch

from pipeline.device.accelerator import Card, card_here, is_card, release_pinned, unless_out_of_memory
from pipeline.device.batch_transfer import bytes_on_host
from pipeline.encoder.embedding_recipe import BadSequence, Variant
from pipeline.encoder.engine import token_batches
from pipeline.encoder.engine.memory_ladder import QUEUE_BYTES, EmbeddingCounts, Forward, Ladder, RefusedSequence, Work
from pipeline.memory.hardware.host_memory import pinned_bytes
from pipeline.records import Reason
from pipeline.waiting import signals_held

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from numpy.typing import NDArray

    from pipeline.encoder.embedding_recipe import EmbeddingRecipe
    from pipeline.encoder.engine.token_batches import BatchSchedule, EngineSettings

    Integers = NDArray[np.int64]
    Rows = NDArray[Any]
    Read = Callable[[Sequence[int]], Sequence[str]]
    ReadBatch = tuple[list[Work], list[RefusedSequence]]

AHEAD = 3  # batches that are read, or being read: one to compute now, two for later


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding of a sequence, as it is stored."""

    index: int
    text: str
    variant: Variant
    rows_LD: Rows  # in storage precision; bfloat16 as its bits, uint16
    cls_D: Rows | None = None  # the row of the mark before the residues, where the recipe keeps it

    @property
    def arrays(self) -> dict[str, Rows]:
        """The arrays of the record, rows first: loading reads them straight into a batch."""
        return {"rows": self.rows_LD} | ({} if self.cls_D is None else {"cls": self.cls_D})

    @property
    def meta(self) -> dict[str, Any]:
        """The metadata of the record, as JSON data; a truncated text has more residues than rows."""
        cut = self.variant.cut
        return {
            "residues": len(self.text),
            "rows": len(self.rows_LD),
            "precision": self.variant.precision,
            "cut": None if cut is None else {"policy": cut.policy, "length": cut.length, "overlap": cut.overlap},
        }


@dataclass(frozen=True, slots=True)
class Done:
    """A sequence whose embedding the sink has taken."""

    reason: ClassVar[None] = None
    index: int
    variant: Variant


class Source(Protocol):
    """Builds encoders."""

    @property
    def name(self) -> str:
        """Its name, for errors."""

    @property
    def dim(self) -> int:
        """The width of the rows."""

    def build(self, *, layer: int, precision: str, device: torch.device) -> Forward:
        """Return an encoder of a layer."""


class Engine:
    """Embeds sequences with one encoder by one recipe; `figures` hold its progress."""

    def __init__(
        self,
        source: Source,
        recipe: EmbeddingRecipe,
        settings: EngineSettings,
        *,
        precision: str | None = None,
        on: Callable[[Sequence[str]], None] = lambda _: None,  # called with the texts that are computed next
    ) -> None:
        self.figures = EmbeddingCounts()
        self._source, self._recipe, self._settings, self._on = source, recipe, settings, on
        self._variant = Variant(precision or recipe.precision)
        if self._variant not in recipe.accepted(0):
            raise ValueError(f"the recipe does not accept {precision}")
        main = settings.device, self._variant.precision
        self._ladder = Ladder(recipe, main, source.build, self.figures, settings.mem_bytes)

    def run(
        self, lengths_N: Integers, read: Read, sink: Callable[[Embedding], None]
    ) -> Generator[Done | RefusedSequence, None, None]:
        """Embed N sequences of known length, identified by their index; yield the outcome of each.

        `read` is called in one thread only, and so is `sink`. An outcome is yielded after the sink took the embedding.
        At any end, the sink first gets all computed embeddings, except those of the current batch. A failure of `read`
        or `sink` is raised here.
        """
        recipe, settings = self._recipe, self._settings
        refused_N = token_batches.too_long(lengths_N, recipe)
        for index in refused_N.tolist():
            what = f"{lengths_N[index]:,} residues; the recipe allows at most {recipe.length:,}"
            yield RefusedSequence(index, Reason.SEQUENCE_TOO_LONG, what)
        if len(refused_N) == len(lengths_N):
            return
        self._ladder.set_budget(settings, self._source.name)
        cap = None if settings.cap == "auto" else settings.cap
        schedule = token_batches.BatchSchedule(lengths_N, refused_N, recipe, policy=settings.policy, cap=cap)
        costs_N = token_batches.recipe_costs(lengths_N, recipe, self._source.dim)
        with one_thread("embed-reader") as reader, one_thread("embed-writer") as writer:
            read_batch = partial(self._read, lengths_N, read)
            write = RowWriter(sink, cls=recipe.cls)
            with closing(PendingRows(writer, write, recipe, self.figures)) as pending:
                for outcome in self._outcomes(schedule, partial(reader.submit, read_batch), pending):
                    self.figures.cost_done += float(costs_N[outcome.index])
                    yield outcome

    def _outcomes(
        self, schedule: BatchSchedule, submit: Callable[[Integers], Future[ReadBatch]], pending: PendingRows
    ) -> Iterator[Done | RefusedSequence]:
        """Yield the outcomes of the sequences that are not too long."""
        reading: deque[Future[ReadBatch]] = deque()
        while True:
            while len(reading) < AHEAD and (places_K := schedule.draw(self._ladder.budget)) is not None:
                reading.append(submit(places_K))
            if pending.again:
                yield from self._computed([pending.again.pop()], pending)
            elif reading:
                works, refused = reading.popleft().result()
                yield from refused
                if works:
                    yield from self._computed(works, pending)
            elif pending.waiting:
                yield from pending.settled(-1)
            else:
                return

    def _read(self, lengths_N: Integers, read: Read, places_K: Integers) -> ReadBatch:
        """Return the sequences of a batch, ready to be computed, and those that were refused."""
        works, refused = list[Work](), list[RefusedSequence]()
        for index, text in zip(places_K.tolist(), read(places_K.tolist()), strict=True):
            if len(text) != lengths_N[index]:
                raise ValueError(f"sequence {index} has {len(text)} residues, not {lengths_N[index]}")
            try:
                tokens_L = self._ladder.tokenize(text)
            except BadSequence as problem:
                refused.append(RefusedSequence(index, Reason.BAD_SEQUENCE, str(problem)))
                continue
            cut = self._recipe.wanted(len(text)).cut
            kept_L = tokens_L[: cut.length] if cut is not None and cut.policy == "truncate" else tokens_L
            works.append(Work(index, text, kept_L, self._settings.device, replace(self._variant, cut=cut)))
        return works, refused

    def _computed(self, works: Sequence[Work], pending: PendingRows) -> Iterator[Done | RefusedSequence]:
        """Compute sequences that share device and variant, and pass their rows on at once, so that none is lost."""
        self._on([work.text for work in works])
        if len(works) == 1 and works[0].tokens > self._ladder.budget:
            yield from pending.settled(-1)  # the next computation may need all the memory
        batches = [works]
        while batches:
            batch = batches.pop()
            span = Span(batch[0].device)
            found = self._ladder.run(batch)
            if isinstance(found, RefusedSequence):
                yield found
            elif isinstance(found, list):
                batches += found
            else:
                pending.add(batch, [found], span.stop())
                del found  # the next forward may need its memory
                yield from pending.settled(QUEUE_BYTES)


@contextmanager
def one_thread(name: str) -> Iterator[ThreadPoolExecutor]:
    """Yield an executor; on exit all its work is done, even if a signal arrives meanwhile."""
    executor = ThreadPoolExecutor(1, name)
    try:
        yield executor
    finally:
        with signals_held():
            executor.shutdown()


class Submitted(NamedTuple):
    """Rows of some sequences that the writing thread has been given."""

    works: Sequence[Work]
    finite: Future[list[bool]]  # of each sequence
    bytes: int
    span: Span


class PendingRows:
    """Computed rows that a thread passes to the sink; sequences to compute again in full precision."""

    def __init__(
        self, writer: ThreadPoolExecutor, write: RowWriter, recipe: EmbeddingRecipe, figures: EmbeddingCounts
    ) -> None:
        self.waiting: deque[Submitted] = deque()
        self.again: list[Work] = []
        self._writer, self._write, self._recipe, self._figures, self._bytes = writer, write, recipe, figures, 0

    def close(self) -> None:
        """Wait until all rows are written; raise a failure that has not been raised yet."""
        for submitted in self.waiting:
            submitted.finite.result()

    def add(self, works: Sequence[Work], held: list[torch.Tensor], span: Span) -> None:
        """Pass rows to the writer in a list that it empties, because its queue keeps its arguments alive."""
        size = held[0].nbytes
        self.waiting.append(Submitted(works, self._writer.submit(self._write, works, held, span), size, span))
        self._bytes += size

    def settled(self, most_bytes: int) -> Iterator[Done | RefusedSequence]:
        """Wait until at most this many bytes are unwritten; yield the outcomes of the written ones."""
        while self.waiting and (self._bytes > most_bytes or self.waiting[0].finite.done()):
            submitted = self.waiting.popleft()
            finite = submitted.finite.result()
            self._bytes -= submitted.bytes
            self._figures.forward_s += submitted.span.seconds()
            for work, is_finite in zip(submitted.works, finite, strict=True):
                precision = work.variant.precision
                if is_finite:
                    self._figures.residues += len(work.tokens_L)
                    yield Done(work.index, work.variant)
                elif precision != "fp32" and self._recipe.half_fallback:
                    self.again.append(replace(work, variant=replace(work.variant, precision="fp32")))
                else:
                    what = f"the encoder's numbers are not finite in {precision} as stored, or overflow in it"
                    yield RefusedSequence(work.index, Reason.NOT_FINITE, what)


class Span:
    """The time of a computation; on a card, where it is asynchronous, measured by events."""

    def __init__(self, device: str) -> None:
        self._card = Card(device) if is_card(device) and card_here() is not None else None
        self._begin: Any = self._now()
        self._end: Any = self._begin

    def stop(self) -> Span:
        """Mark the end."""
        self._end = self._now()
        return self

    def hold(self, stream: torch.Stream) -> None:
        stream.wait_event(self._end)

    def seconds(self) -> float:
        """Return how long it took; on a card, call this only once it is over."""
        if self._card is not None:
            return float(self._begin.elapsed_time(self._end)) / 1e3
        return float(self._end - self._begin)

    def _now(self) -> Any:
        return time.perf_counter() if self._card is None else self._card.event(timed=True)


class RowWriter:
    """Copies rows to the host, checks that they are finite, and passes them to the sink.

    From a card they come through one pinned buffer and a stream of its own, during the next forward.
    """

    def __init__(self, sink: Callable[[Embedding], None], *, cls: bool = False) -> None:
        self._sink, self._marks, self._has_failed = sink, int(cls), False
        self._stream: torch.Stream | None = None
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def __call__(self, works: Sequence[Work], held: list[torch.Tensor], span: Span) -> list[bool]:
        """Pass the embeddings of one computation to the sink, and say of each whether its numbers are finite.

        After a failure, which is raised where its outcome is waited for, nothing more is stored.
        """
        if self._has_failed:
            return []
        self._has_failed = True
        rows_RD = held.pop()
        host_RD = self._on_host(rows_RD, span) if is_card(rows_RD.device) else rows_RD
        sizes = [self._marks + len(work.tokens_L) for work in works]
        finite = []
        for work, piece_LD in zip(works, torch.split(host_RD, sizes), strict=True):
            finite.append(bool(torch.stack(piece_LD.aminmax()).isfinite().all()))  # NaN is both
            if finite[-1]:
                rows_LD = as_array(piece_LD)
                if host_RD is not rows_RD:
                    rows_LD = rows_LD.copy()  # the next call overwrites the buffer
                cls_D = rows_LD[0] if self._marks else None
                self._sink(Embedding(work.index, work.text, work.variant, rows_LD[self._marks :], cls_D))
        self._has_failed = False
        return finite

    def _on_host(self, rows_RD: torch.Tensor, span: Span) -> torch.Tensor:
        """Return rows from a card in a buffer that the next call overwrites."""
        self._stream = self._stream or Card(rows_RD.device).new_stream()
        host_RD = self._room_for(rows_RD)
        with torch.inference_mode(), self._stream:
            span.hold(self._stream)
            host_RD.copy_(rows_RD, non_blocking=True)
        self._stream.synchronize()  # after which nothing on the card reads the rows: they may be freed
        return host_RD

    def _room_for(self, rows_RD: torch.Tensor) -> torch.Tensor:
        """Return room for rows in the pinned buffer, or unpinned memory where no more can be pinned."""
        needed_bytes = rows_RD.nbytes
        if len(self._pinned) < needed_bytes:
            larger = unless_out_of_memory(lambda: bytes_on_host(pinned_bytes(needed_bytes)))
            if larger is None:
                return torch.empty_like(rows_RD, device="cpu")
            self._pinned = larger
            release_pinned()  # the one before
        return self._pinned[:needed_bytes].view(rows_RD.dtype).view(rows_RD.shape)


def as_array(rows_LD: torch.Tensor) -> Rows:
    """Return rows on the host as an array; bfloat16 as the bits of uint16."""
    if rows_LD.dtype is torch.bfloat16:
        return rows_LD.view(torch.int16).numpy().view(np.uint16)
    return rows_LD.numpy()
