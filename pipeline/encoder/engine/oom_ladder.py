"""The ways of computing one sequence, from the one that is wanted down to the last that will do.

Memory that does not suffice leads down: whole → windows (or the CPU, as configured) → the CPU → nothing. A number that
is not finite leads from half to full precision. Only variants that the recipe accepts are steps.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from pipeline.encoder.embedding_recipe import ENDS, window_shares, windows
from pipeline.encoder.engine.sequence_work import (
    Computed,
    ComputeStep,
    Forward,
    RefusedSequence,
    SequenceWork,
    Span,
    below,
)
from pipeline.encoder.engine.token_budget import Room, device_peak_bytes
from pipeline.memory.runtime.out_of_memory import free_caches, trim_heap, unless_out_of_memory
from pipeline.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pipeline.encoder.embedding_recipe import EmbeddingRecipe, SequenceCut
    from pipeline.encoder.engine.sequence_work import EmbeddingCounts

    Tokens = NDArray[np.uint8]
    Kind = tuple[str, str]  # device and precision


ROW_COPIES = 2  # of finished rows: they themselves, and as the store encodes them


class MemoryLadder:
    """Takes batches; gives rows and refusals."""

    def __init__(
        self,
        recipe: EmbeddingRecipe,
        main: ComputeStep,
        build: Callable[[str, str], Forward],
        storage: torch.dtype,
        figures: EmbeddingCounts,
        learned: Callable[[int], None],
        mem_bytes: int | None,
    ) -> None:
        self.budget = 0  # until it is allowed
        self._recipe = recipe
        self._main = (main.device, main.variant.precision)
        self._build = build
        self._storage = storage
        self._figures = figures
        self._learned = learned
        self._mem_bytes = mem_bytes
        self._encoders: dict[Kind, Forward] = {}
        self._rooms: dict[Kind, Room] = {}  # on the CPU
        self._unfit: set[Kind] = set()  # what could not be built in place of the main one

    @property
    def main(self) -> Forward:
        """The encoder that everything is computed with to begin with."""
        return self._encoder(self._main)

    @property
    def room(self) -> Room | None:
        """What there is beside the main encoder on the CPU; None on a card."""
        return self._room(self._main)

    def allow(self, budget: int) -> None:
        """Say how many tokens a batch may have."""
        self.budget = self._figures.budget_tokens = budget

    def climb(self, works: Sequence[SequenceWork]) -> Iterator[Computed | RefusedSequence]:
        """Compute sequences that stand on one step, whatever it takes."""
        waiting = [works] if works else []
        while waiting:
            yield from self._climb_once(waiting.pop(), waiting)

    def _climb_once(
        self, batch: Sequence[SequenceWork], waiting: list[Sequence[SequenceWork]]
    ) -> Iterator[Computed | RefusedSequence]:
        """Compute a batch, or let `waiting` have what to try in its place; no rows are held on to after this."""
        computed = self._compute(batch)
        if computed is not None:
            self._note_batch()
            yield computed
        elif len(batch) > 1:
            waiting += _halves(batch)
        elif (lower := below(self._recipe, len(batch[0].text), batch[0].step)) is not None:
            waiting.append([batch[0].at(lower)])
        else:
            yield _refusal(batch[0])

    def _compute(self, batch: Sequence[SequenceWork]) -> Computed | None:
        """Return the rows of a batch, or None when they do not fit."""
        work, count = batch[0], sum(work.tokens for work in batch)
        if count > self.budget:
            if len(batch) > 1:
                return None
            self._make_room(work.step)
        if not self._builds(_kind(work.step)) or not self._has_room(work, count):
            return None
        span = Span(work.step.device)
        cut = work.windows
        tokens = [work.tokens_L for work in batch]
        rows_RD = self._forward(work.step, tokens) if cut is None else self._in_windows(work, cut)
        if count > self.budget:
            trim_heap()  # storing large rows takes as much again
        return None if rows_RD is None else Computed(batch, rows_RD, span.stop())

    def _make_room(self, step: ComputeStep) -> None:
        """Let one large sequence have what the host's memory holds for reuse."""
        trim_heap()
        if step.device == "cpu" and self._is_main(step):
            self._drop_others(step.device)

    def _has_room(self, work: SequenceWork, count: int) -> bool:
        """Say whether the CPU has the memory for a batch of so many tokens, or for a sequence in windows."""
        room = self._room(_kind(work.step))
        if room is None:
            return True
        cut = work.windows
        least = count if cut is None else min(cut.length, len(work.tokens_L)) + ENDS
        return room.tokens(self._rows_bytes(work.step, count)) >= least

    def _rows_bytes(self, step: ComputeStep, count: int) -> int:
        """Return what the finished rows of so many tokens take until they are stored."""
        return ROW_COPIES * count * self._encoder(_kind(step)).dim * self._storage.itemsize

    def _in_windows(self, work: SequenceWork, cut: SequenceCut) -> torch.Tensor | None:
        """Return the rows of a sequence computed in windows, or None when not even one of them fits."""
        spans = windows(len(work.tokens_L), cut.length, cut.overlap)
        given = window_shares(spans)
        rows_LD: torch.Tensor | None = None
        done = 0
        while done < len(spans):
            group = slice(done, done + max(1, self._tokens_at_once(work) // (cut.length + ENDS)))
            rows_RD = self._forward(work.step, [work.tokens_L[start:stop] for start, stop in spans[group]])
            if rows_RD is None:
                if len(spans[group]) == 1:
                    return None
                continue
            if rows_LD is None:  # one place for all: windows kept until they can be joined would be a second one
                rows_LD = unless_out_of_memory(partial(rows_RD.new_empty, (len(work.tokens_L), rows_RD.shape[1])))
                if rows_LD is None:
                    return None
            _fill(rows_LD, rows_RD, spans[group], given[group])
            del rows_RD  # the next forward needs its memory
            done += len(spans[group])
        return rows_LD

    def _tokens_at_once(self, work: SequenceWork) -> int:
        """Return how many tokens of a sequence in windows may be computed at once, beside its finished rows."""
        if not self._is_main(work.step):
            return 1
        room = self._room(self._main)
        if room is None:
            return self.budget
        return min(self.budget, room.tokens(self._rows_bytes(work.step, work.tokens)))

    def _forward(self, step: ComputeStep, tokens: Sequence[Tokens]) -> torch.Tensor | None:
        """Send sequences through the encoder of a step; None, and a smaller budget, when memory does not suffice."""
        count = sum(map(len, tokens)) + ENDS * len(tokens)
        rows_RD = unless_out_of_memory(lambda: self._encode(step, tokens, count))
        if rows_RD is not None:
            return rows_RD
        self._figures.splits += 1
        free_caches(step.device)
        if self._is_main(step):
            if self._drop_others(step.device):
                return self._forward(step, tokens)
            self._learn(max(1, count // 2))
        return None

    def _encode(self, step: ComputeStep, tokens: Sequence[Tokens], count: int) -> torch.Tensor:
        """Return the rows of sequences that have so many tokens, in storage precision."""
        encoder = self._encoder(_kind(step))
        rows_RD = encoder(tokens).to(self._storage)
        self._figures.encoded_residues += count - ENDS * len(tokens)
        self._figures.tokens += -(-count // encoder.fill) * encoder.fill
        return rows_RD

    def _learn(self, budget: int) -> None:
        """Remember a smaller budget."""
        if budget < self.budget:
            self.allow(budget)
            self._learned(budget)

    def _is_main(self, step: ComputeStep) -> bool:
        """Say whether the budget is about this step: what stands in for it elsewhere goes one by one."""
        return _kind(step) == self._main

    def _encoder(self, kind: Kind) -> Forward:
        """Return the encoder of a precision on a device, built when it is first asked for."""
        if kind not in self._encoders:
            encoder = self._build(*kind)
            if kind[0] == "cpu":
                self._rooms[kind] = Room.beside(encoder, self._mem_bytes)
            self._encoders[kind] = encoder
        return self._encoders[kind]

    def _room(self, kind: Kind) -> Room | None:
        """Return what there is beside an encoder on the CPU; None on a card."""
        self._encoder(kind)
        return self._rooms.get(kind)

    def _builds(self, kind: Kind) -> bool:
        """Say whether there is an encoder, or one can be built; what once did not fit is not tried again."""
        if kind not in self._unfit and unless_out_of_memory(lambda: self._encoder(kind)) is None:
            self._unfit.add(kind)
            self._figures.splits += 1
            free_caches(kind[0])
        return kind not in self._unfit

    def _drop_others(self, device: str) -> bool:
        """Let go of what stands in for the main encoder on its device; say whether there was something."""
        others = [kind for kind in self._encoders if kind[0] == device and kind != self._main]
        for kind in others:
            del self._encoders[kind]
        if others:
            free_caches(device)
        return bool(others)

    def _note_batch(self) -> None:
        """Count a batch, and look how much memory it took."""
        self._figures.batches += 1
        self._figures.host_peak_bytes = device_peak_bytes("cpu")
        if self._main[0] != "cpu":
            self._figures.device_peak_bytes = device_peak_bytes(self._main[0])


def _kind(step: ComputeStep) -> Kind:
    """Return which encoder a step takes."""
    return step.device, step.variant.precision


def _fill(
    rows_LD: torch.Tensor, rows_RD: torch.Tensor, spans: Sequence[tuple[int, int]], given: Sequence[tuple[int, int]]
) -> None:
    """Put what a few windows give into its place."""
    parts = torch.split(rows_RD, [stop - start for start, stop in spans])
    for part_WD, (begin, _), (start, stop) in zip(parts, spans, given, strict=True):
        rows_LD[start:stop] = part_WD[start - begin : stop - begin]


def _halves(batch: Sequence[SequenceWork]) -> tuple[Sequence[SequenceWork], Sequence[SequenceWork]]:
    """Return two halves by count, the first one last: it is taken first."""
    middle = len(batch) // 2
    return batch[middle:], batch[:middle]


def _refusal(work: SequenceWork) -> RefusedSequence:
    """Say what did not fit."""
    how = f" in windows of {work.windows.length:,}" if work.windows else ""
    where = "this process (cluster.embed.mem)" if work.step.device == "cpu" else "the GPU"
    what = f"{len(work.tokens_L):,} residues{how} do not fit the memory of {where}"
    return RefusedSequence(work.index, Reason.DOES_NOT_FIT, what)
