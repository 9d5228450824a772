"""The two threads beside the one that computes: one reads ahead, one writes behind.

They are spoken to by `SimpleQueue` alone, which a signal handler may interrupt anywhere without leaving a lock taken;
what bounds the queues is counted by the caller, so that nothing here can wait for somebody who is gone.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from pipeline.encoder import steps
from pipeline.encoder.ladder import Computed, Refused
from pipeline.encoder.steps import Work
from pipeline.encoder.tokens import BadSequence, tokenize
from pipeline.encoder.transfer import Fetch, as_array, is_finite
from pipeline.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Self

    from pipeline.encoder.recipe import Recipe, Variant

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Embedding:
    """What is stored of a sequence."""

    index: int
    text: str
    variant: Variant
    rows_LD: NDArray[Any]  # in storage precision; bfloat16 as its bits, uint16

    @property
    def residues(self) -> int:
        """Count the residues of the text; a truncated one has fewer rows."""
        return len(self.text)

    @property
    def meta(self) -> dict[str, Any]:
        """Return what the record says beside the rows: plain JSON."""
        cut = self.variant.cut
        return {
            "residues": self.residues,
            "rows": len(self.rows_LD),
            "precision": self.variant.precision,
            "cut": None if cut is None else {"policy": cut.policy, "length": cut.length, "overlap": cut.overlap},
        }


@dataclass(frozen=True, slots=True)
class Read:
    """Sequences that are ready to be computed, and those that never will be."""

    works: list[Work]
    refused: list[Refused]


@dataclass(frozen=True, slots=True)
class Written:
    """What became of computed rows."""

    stored: list[Work]
    spoiled: list[Work]  # those with numbers that are not finite
    bytes: int
    seconds: float  # that computing them took


class Servant(Generic[Asked, Answer]):
    """A thread that answers what it is asked, in order; after a failure it answers no more, and stands in no way.

    Only the thread that owns it may ask and listen.
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

    def ask(self, something: Asked) -> None:
        """Give it something to do; this never waits."""
        self._asked.put(something)

    def hear(self) -> Answer:
        """Wait for the next answer; what failed in the thread is raised here."""
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            self._failed = True
            raise answer
        return answer

    def has_answered(self) -> bool:
        """Say whether an answer is there to be heard."""
        return not self._answers.empty()

    def finish(self) -> None:
        """Wait until all that was asked is done and the thread has ended, whatever a signal handler raises meanwhile.

        Before Python 3.13, an interrupted `Thread.join` could take a living thread for a dead one: it is not relied on.
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
        """Do what was asked."""


class Reader(Servant["NDArray[np.int64]", Read]):
    """Reads and tokenises batches before they are needed."""

    name = "reader"

    def __init__(
        self,
        read: Callable[[Sequence[int]], Sequence[str]],
        lengths_N: NDArray[np.int64],
        recipe: Recipe,
        main: steps.Step,
    ) -> None:
        super().__init__()
        self._read, self._lengths_N, self._recipe, self._main = read, lengths_N, recipe, main

    def answer(self, asked: NDArray[np.int64]) -> Read:
        """Return the sequences of one batch."""
        works, refused = list[Work](), list[Refused]()
        for index, text in zip(asked.tolist(), self._read(asked.tolist()), strict=True):
            if len(text) != self._lengths_N[index]:
                raise ValueError(f"sequence {index} has {len(text)} residues, not {self._lengths_N[index]}")
            try:
                works.append(self._work(index, text))
            except BadSequence as problem:
                refused.append(Refused(index, Reason.BAD_SEQUENCE, str(problem)))
        return Read(works, refused)

    def _work(self, index: int, text: str) -> Work:
        """Return a sequence as it begins: its tokens, as many as are wanted."""
        step = steps.first(self._recipe, self._main.variant.precision, len(text), self._main.device)
        cut = step.variant.cut
        truncated = cut is not None and cut.policy == "truncate"
        tokens_L = tokenize(text)
        return Work(index, text, tokens_L[: cut.length] if cut and truncated else tokens_L, step)


class Writer(Servant[Computed, Written]):
    """Takes rows to the host, looks whether they are finite, and gives them away."""

    name = "writer"

    def __init__(self, sink: Callable[[Embedding], None]) -> None:
        super().__init__()
        self._sink = sink
        self._fetch = Fetch()

    def finish(self) -> None:
        """End as any servant does; if it failed and nobody has heard of it yet, they hear of it now."""
        super().finish()
        while self.has_answered() and not self._failed:
            self.hear()

    def answer(self, asked: Computed) -> Written:
        """Give away the embeddings of one computation."""
        host_RD = self._fetch(asked.rows_RD, asked.span)
        is_buffer = host_RD is not asked.rows_RD
        stored, spoiled = list[Work](), list[Work]()
        pieces = torch.split(host_RD, [len(work.tokens_L) for work in asked.works])
        for work, piece_LD in zip(asked.works, pieces, strict=True):
            rows_LD = as_array(piece_LD, copy=is_buffer)
            if not is_finite(rows_LD):
                spoiled.append(work)
                continue
            self._sink(Embedding(work.index, work.text, work.step.variant, rows_LD))
            stored.append(work)
        return Written(stored, spoiled, asked.bytes, asked.span.seconds())
