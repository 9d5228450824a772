"""The two threads beside the one that computes: one reads ahead, one writes behind.

All communication is by `SimpleQueue`, which a signal handler may interrupt anywhere without leaving a lock taken. The
caller bounds the queues by counting, so that no thread here ever blocks on a full queue whose reader is gone.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np
import torch

from pipeline.device.accelerator import Card, is_card, release_pinned
from pipeline.device.out_of_memory import unless_out_of_memory
from pipeline.encoder.embedding_recipe import BadSequence
from pipeline.encoder.engine.sequence_work import (
    Computed,
    ComputeStep,
    Embedding,
    RefusedSequence,
    SequenceWork,
    Span,
    first_step,
)
from pipeline.memory.hardware.host_memory import pinned_bytes
from pipeline.memory.runtime.pinned_tensors import bytes_on_host
from pipeline.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from pipeline.encoder.embedding_recipe import EmbeddingRecipe

    Rows = NDArray[Any]

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class TokenizedBatch:
    """Sequences that are ready to be computed, and those that were refused."""

    works: list[SequenceWork]
    refused: list[RefusedSequence]


@dataclass(frozen=True, slots=True)
class WrittenRows:
    """The outcome of storing computed rows."""

    stored: list[SequenceWork]
    spoiled: list[SequenceWork]  # those with numbers that are not finite
    bytes: int
    seconds: float  # that computing them took


class Servant(Generic[Asked, Answer]):
    """A worker thread that answers requests in order; after its first failure it has ended.

    Only the thread that owns it may call `ask` and `hear`.
    """

    name = "servant"

    def __init__(self) -> None:
        self._asked: SimpleQueue[Asked | None] = SimpleQueue()
        self._answers: SimpleQueue[Answer | BaseException] = SimpleQueue()
        self._thread = Thread(target=self._serve, name=f"embed-{self.name}", daemon=True)
        self._failed = False
        self._over = False
        self._ended: SimpleQueue[None] = SimpleQueue()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    def ask(self, request: Asked) -> None:
        """Queue a request; this never waits."""
        self._asked.put(request)

    def hear(self) -> Answer:
        """Wait for the next answer; an error of the thread is raised here."""
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            self._failed = True
            raise answer
        return answer

    def has_answered(self) -> bool:
        return not self._answers.empty()

    def finish(self) -> None:
        """Wait until all requests are done and the thread has ended, even if a signal handler raises meanwhile.

        Before Python 3.13, an interrupted `Thread.join` could take a running thread for an ended one, so a queue tells.
        """
        interruption: BaseException | None = None
        while not self._over:
            try:
                self._asked.put(None)
                self._ended.get()
            except BaseException as error:  # noqa: BLE001 - raised again below
                interruption = error
        self._thread.join()
        if interruption is not None:
            raise interruption

    def _serve(self) -> None:
        try:
            while (asked := self._asked.get()) is not None:
                answer = self.answer(asked)
                del asked  # it may hold rows, whose memory the next forward needs
                self._answers.put(answer)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that owns this one
            self._answers.put(error)
        finally:
            self._over = True
            self._ended.put(None)

    @abstractmethod
    def answer(self, asked: Asked) -> Answer:
        """Do one request, in the thread, and return its answer."""


class BatchReader(Servant["NDArray[np.int64]", TokenizedBatch]):
    """Reads and tokenises batches before they are needed."""

    name = "reader"

    def __init__(
        self,
        read: Callable[[Sequence[int]], Sequence[str]],
        lengths_N: NDArray[np.int64],
        recipe: EmbeddingRecipe,
        main: ComputeStep,
        tokenize: Callable[[str], NDArray[np.uint8]],
    ) -> None:
        super().__init__()
        self._read, self._lengths_N, self._recipe, self._main = read, lengths_N, recipe, main
        self._tokenize = tokenize

    def answer(self, asked: NDArray[np.int64]) -> TokenizedBatch:
        """Return the sequences of one batch."""
        works, refused = list[SequenceWork](), list[RefusedSequence]()
        for index, text in zip(asked.tolist(), self._read(asked.tolist()), strict=True):
            if len(text) != self._lengths_N[index]:
                raise ValueError(f"sequence {index} has {len(text)} residues, not {self._lengths_N[index]}")
            try:
                works.append(self._work(index, text))
            except BadSequence as problem:
                refused.append(RefusedSequence(index, Reason.BAD_SEQUENCE, str(problem)))
        return TokenizedBatch(works, refused)

    def _work(self, index: int, text: str) -> SequenceWork:
        """Return a sequence on its first step, its tokens truncated if the recipe wants that."""
        step = first_step(self._recipe, self._main.variant.precision, len(text), self._main.device)
        cut = step.variant.cut
        truncated = cut is not None and cut.policy == "truncate"
        tokens_L = self._tokenize(text)
        return SequenceWork(index, text, tokens_L[: cut.length] if cut and truncated else tokens_L, step)


class RowWriter(Servant[Computed, WrittenRows]):
    """Copies rows to the host, checks that they are finite, and passes them to the sink."""

    name = "writer"

    def __init__(self, sink: Callable[[Embedding], None], *, cls: bool = False) -> None:
        super().__init__()
        self._sink, self._marks = sink, int(cls)
        self._fetch = Fetch()

    def finish(self) -> None:
        """Wait for the thread to end; raise its error if `hear` has not raised it yet."""
        super().finish()
        while self.has_answered() and not self._failed:
            self.hear()

    def answer(self, asked: Computed) -> WrittenRows:
        """Pass the embeddings of one computation to the sink."""
        host_RD = self._fetch(asked.rows_RD, asked.span)
        is_buffer = host_RD is not asked.rows_RD
        stored, spoiled = list[SequenceWork](), list[SequenceWork]()
        pieces = torch.split(host_RD, [self._marks + len(work.tokens_L) for work in asked.works])
        for work, piece_LD in zip(asked.works, pieces, strict=True):
            rows_LD = as_array(piece_LD, copy=is_buffer)
            if not is_finite(rows_LD):
                spoiled.append(work)
                continue
            cls_D = rows_LD[0] if self._marks else None
            self._sink(Embedding(work.index, work.text, work.step.variant, rows_LD[self._marks :], cls_D))
            stored.append(work)
        return WrittenRows(stored, spoiled, asked.bytes, asked.span.seconds())


_EXPONENT = {np.dtype(np.uint16): 0x7F80}  # of bfloat16, whose bits numpy holds as integers
_LOOKED_AT_ONCE = 1024  # rows


class Fetch:
    """Copies rows to the host; from a card through one pinned buffer and its own stream, beside the next forward."""

    def __init__(self, pin: Callable[[int], torch.Tensor] | None = None) -> None:
        self._stream: torch.Stream | None = None
        self._pin = pin or bytes_on_host
        self._pinned = torch.empty(0, dtype=torch.uint8)

    def __call__(self, rows_RD: torch.Tensor, span: Span) -> torch.Tensor:
        """Return the rows on the host; those from a card are in a buffer that the next call overwrites."""
        if not is_card(rows_RD.device):
            return rows_RD
        if self._stream is None:
            self._stream = Card(rows_RD.device).new_stream()
        host_RD = self.place(rows_RD)
        with torch.inference_mode(), self._stream:
            span.hold(self._stream)
            host_RD.copy_(rows_RD, non_blocking=True)
        self._stream.synchronize()  # after which nothing on the card reads the rows: they may be freed
        return host_RD

    def place(self, rows_RD: torch.Tensor) -> torch.Tensor:
        """Return room for rows in the pinned buffer, or unpinned memory where no more can be pinned."""
        needed_bytes = rows_RD.numel() * rows_RD.element_size()
        if len(self._pinned) < needed_bytes:
            larger = unless_out_of_memory(lambda: self._pin(pinned_bytes(needed_bytes)))
            if larger is None:
                return torch.empty(rows_RD.shape, dtype=rows_RD.dtype)
            self._pinned = larger
            release_pinned()  # the one before
        return self._pinned[:needed_bytes].view(rows_RD.dtype).view(rows_RD.shape)


def as_array(rows_LD: torch.Tensor, *, copy: bool) -> Rows:
    """Return rows on the host as an array; bfloat16 as the bits of uint16."""
    if rows_LD.dtype is torch.bfloat16:
        array: Rows = rows_LD.view(torch.int16).numpy().view(np.uint16)
    else:
        array = rows_LD.numpy()
    return array.copy() if copy else array


def is_finite(rows_LD: Rows) -> bool:
    """Say whether every number is finite, in any storage precision."""
    starts = range(0, len(rows_LD), _LOOKED_AT_ONCE)  # in parts, to bound the temporary arrays
    return all(_all_finite(rows_LD[start : start + _LOOKED_AT_ONCE]) for start in starts)


def _all_finite(rows_LD: Rows) -> bool:
    if (exponent := _EXPONENT.get(rows_LD.dtype)) is not None:
        return bool(((rows_LD & exponent) != exponent).all())
    return bool(np.isfinite(rows_LD).all())
