"""Embeds sequences with one encoder: a thread reads ahead, this one computes, and another one writes behind."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from pipeline.device.accelerator import Card, card_here, is_card, release_pinned, unless_out_of_memory
from pipeline.device.batch_transfer import bytes_on_host
from pipeline.encoder.embedding_recipe import BadSequence, Variant
from pipeline.encoder.engine import token_batches
from pipeline.encoder.engine.memory_ladder import QUEUE_BYTES, EmbeddingCounts, Forward, Ladder, RefusedSequence, Work
from pipeline.encoder.esm2 import EsmEncoder
from pipeline.encoder.esm_checkpoint import as_dtype
from pipeline.encoder.parity import no_room
from pipeline.memory.hardware.host_memory import pinned_bytes
from pipeline.records import Reason

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


class Engine:
    """Embeds sequences with one checkpoint by one recipe; `figures` hold its progress."""

    def __init__(
        self,
        checkpoint: Any,  # a checkpoint, or a source of the stage: it has a name, and the width of the rows
        recipe: EmbeddingRecipe,
        settings: EngineSettings,
        *,
        precision: str | None = None,
        ceiling: int | None = None,
        learned: Callable[[int], None] = lambda _: None,
        build: Callable[..., Forward] = EsmEncoder,  # called with the checkpoint, layer, precision and device
        on: Callable[[Sequence[str]], None] = lambda _: None,  # called with the texts that are computed next
    ) -> None:
        self.figures = EmbeddingCounts()
        self._checkpoint, self._recipe, self._settings, self._build = checkpoint, recipe, settings, build
        self._precision, self._ceiling, self._on = precision or recipe.precision, ceiling, on
        if Variant(self._precision) not in recipe.accepted(0):
            raise ValueError(f"the recipe does not accept {self._precision}")
        main, storage = (settings.device, self._precision), as_dtype(recipe.storage)
        self._ladder = Ladder(recipe, main, self._encoder, storage, self.figures, learned, settings.mem_bytes)

    def run(
        self, lengths_N: Integers, read: Read, sink: Callable[[Embedding], None]
    ) -> Generator[Done | RefusedSequence, None, None]:
        """Embed N sequences of known length, identified by their index; yield the outcome of each.

        `read` is called in one thread only, and so is `sink`. An outcome is yielded after the sink took the embedding.
        However this ends, what had been computed is given to the sink first, all but the batch under way; a failure of
        `read` or `sink` is raised here.
        """
        recipe, settings = self._recipe, self._settings
        refused_N = token_batches.too_long(lengths_N, recipe)
        for index in refused_N.tolist():
            self.figures.refused += 1
            what = f"{lengths_N[index]:,} residues; the recipe allows at most {recipe.length:,}"
            yield RefusedSequence(index, Reason.SEQUENCE_TOO_LONG, what)
        if len(refused_N) == len(lengths_N):
            return
        self._set_budget()
        cap = None if settings.cap == "auto" else settings.cap
        schedule = token_batches.BatchSchedule(lengths_N, refused_N, recipe, policy=settings.policy, cap=cap)
        costs_N = token_batches.recipe_costs(lengths_N, recipe, self._checkpoint.dim)
        with PendingRows(sink, recipe, self.figures) as pending, ExitStack() as stack:
            reader = ThreadPoolExecutor(1, "embed-reader")
            stack.callback(finish, reader)
            batches = partial(reader.submit, partial(self._read, lengths_N, read))
            for outcome in self._outcomes(schedule, batches, pending):
                self.figures.refused += isinstance(outcome, RefusedSequence)
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
                tokens_L = self._tokenize(text)
            except BadSequence as problem:
                refused.append(RefusedSequence(index, Reason.BAD_SEQUENCE, str(problem)))
                continue
            cut = self._recipe.wanted(len(text)).cut
            kept_L = tokens_L[: cut.length] if cut is not None and cut.policy == "truncate" else tokens_L
            works.append(Work(index, text, kept_L, self._settings.device, Variant(self._precision, cut)))
        return works, refused

    def _computed(self, works: Sequence[Work], pending: PendingRows) -> Iterator[Done | RefusedSequence]:
        """Compute sequences that share device and variant, and hand their rows over at once, so that none is lost."""
        self._on([work.text for work in works])
        if len(works) == 1 and works[0].tokens > self._ladder.budget:
            yield from pending.settled(-1)  # it may need all the memory there is
        batches = [works] if works else []
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

    def _encoder(self, device: str, precision: str) -> Forward:
        return self._build(self._checkpoint, layer=self._recipe.layer, precision=precision, device=torch.device(device))

    def _set_budget(self) -> None:
        """Build the encoder and measure how many tokens fit beside it, once."""
        if self._ladder.budget:
            return
        encoder, asked = self._ladder.encoder(), self._settings.budget
        tokens = asked if asked != "auto" else None
        if encoder is not None and tokens is None:
            tokens = unless_out_of_memory(lambda: self._ladder.fitting_budget(encoder))
        if encoder is None or tokens is None:
            raise no_room(f"the weights of {self._checkpoint.name} do", self._settings.device)
        self._tokenize = encoder.tokenize
        self._ladder.allow(max(1, min(tokens, self._ceiling or tokens) >> self._settings.shrink))


def finish(executor: ThreadPoolExecutor) -> None:
    """Wait until all that an executor of one thread was given is done, even if a signal handler raises meanwhile.

    Before Python 3.13, an interrupted `Thread.join` could take a running thread for an ended one, so a last task tells.
    """
    interruption: BaseException | None = None
    last: Future[int] | None = None
    while last is None or not last.done():
        try:
            last = last or executor.submit(int)
            wait([last])
        except Exception:
            raise
        except BaseException as error:  # noqa: BLE001 - raised again below
            interruption = error
    executor.shutdown()
    if interruption is not None:
        raise interruption


@dataclass(frozen=True, slots=True)
class Submitted:
    """Rows of some sequences that the writing thread has been given."""

    works: Sequence[Work]
    finite: Future[list[bool]]  # of each sequence
    bytes: int
    span: Span


class PendingRows:
    """Computed rows on their way to the sink, by a thread of their own; what begins again in full precision."""

    def __init__(self, sink: Callable[[Embedding], None], recipe: EmbeddingRecipe, figures: EmbeddingCounts) -> None:
        self.waiting: deque[Submitted] = deque()
        self.again: list[Work] = []
        self._recipe, self._figures, self._bytes = recipe, figures, 0
        self._writer, self._executor = RowWriter(sink, cls=recipe.cls), ThreadPoolExecutor(1, "embed-writer")

    def __enter__(self) -> PendingRows:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the thread to end; raise its failure if it has not been raised yet."""
        finish(self._executor)
        for submitted in self.waiting:
            submitted.finite.result()

    def add(self, works: Sequence[Work], held: list[torch.Tensor], span: Span) -> None:
        """Hand over rows, as the only thing in a list that the writer empties: its queue keeps what it was given."""
        size = held[0].numel() * held[0].element_size()
        self.waiting.append(Submitted(works, self._executor.submit(self._writer, works, held, span), size, span))
        self._bytes += size

    def settled(self, most_bytes: int) -> Iterator[Done | RefusedSequence]:
        """Wait until at most so many bytes are left to be written; yield the outcomes of what has been."""
        while self.waiting and (self._bytes > most_bytes or self.waiting[0].finite.done()):
            submitted = self.waiting.popleft()
            finite = submitted.finite.result()
            self._bytes -= submitted.bytes
            self._figures.forward_s += submitted.span.seconds()
            for work, is_finite in zip(submitted.works, finite, strict=True):
                if is_finite:
                    self._figures.sequences += 1
                    self._figures.residues += len(work.tokens_L)
                    yield Done(work.index, work.variant)
                elif work.variant.precision != "fp32" and self._recipe.half_fallback:
                    self._figures.again += 1
                    self.again.append(replace(work, variant=replace(work.variant, precision="fp32")))
                else:
                    what = (
                        f"the encoder's numbers are not finite in {work.variant.precision} as stored, or overflow in it"
                    )
                    yield RefusedSequence(work.index, Reason.NOT_FINITE, what)


class Span:
    """The time a computation takes; on a card, where it goes on after the call, by events."""

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
            rows_LD = as_array(piece_LD)
            if host_RD is not rows_RD:
                rows_LD = rows_LD.copy()  # the next call overwrites the buffer
            finite.append(is_finite(rows_LD))
            if finite[-1]:
                cls_D = rows_LD[0] if self._marks else None
                self._sink(Embedding(work.index, work.text, work.variant, rows_LD[self._marks :], cls_D))
        self._has_failed = False
        return finite

    def _on_host(self, rows_RD: torch.Tensor, span: Span) -> torch.Tensor:
        """Return rows from a card in a buffer that the next call overwrites."""
        if self._stream is None:
            self._stream = Card(rows_RD.device).new_stream()
        host_RD = self._room_for(rows_RD)
        with torch.inference_mode(), self._stream:
            span.hold(self._stream)
            host_RD.copy_(rows_RD, non_blocking=True)
        self._stream.synchronize()  # after which nothing on the card reads the rows: they may be freed
        return host_RD

    def _room_for(self, rows_RD: torch.Tensor) -> torch.Tensor:
        """Return room for rows in the pinned buffer, or unpinned memory where no more can be pinned."""
        needed_bytes = rows_RD.numel() * rows_RD.element_size()
        if len(self._pinned) < needed_bytes:
            larger = unless_out_of_memory(lambda: bytes_on_host(pinned_bytes(needed_bytes)))
            if larger is None:
                return torch.empty(rows_RD.shape, dtype=rows_RD.dtype)
            self._pinned = larger
            release_pinned()  # the one before
        return self._pinned[:needed_bytes].view(rows_RD.dtype).view(rows_RD.shape)


_EXPONENT = {np.dtype(np.uint16): 0x7F80}  # of bfloat16, whose bits numpy holds as integers
_LOOKED_AT_ONCE = 1024  # rows


def as_array(rows_LD: torch.Tensor) -> Rows:
    """Return rows on the host as an array; bfloat16 as the bits of uint16."""
    if rows_LD.dtype is torch.bfloat16:
        return rows_LD.view(torch.int16).numpy().view(np.uint16)
    array: Rows = rows_LD.numpy()
    return array


def is_finite(rows_LD: Rows) -> bool:
    """Say whether every number is finite, in any storage precision."""
    exponent = _EXPONENT.get(rows_LD.dtype)
    for start in range(0, len(rows_LD), _LOOKED_AT_ONCE):  # in parts, to bound the temporary arrays
        part_LD = rows_LD[start : start + _LOOKED_AT_ONCE]
        if not (np.isfinite(part_LD) if exponent is None else (part_LD & exponent) != exponent).all():
            return False
    return True
