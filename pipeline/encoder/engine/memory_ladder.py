"""How much is computed at once: the token budget that the memory allows, and the fallbacks when it does not suffice."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch

from pipeline.cluster.machine import find_mem_bytes
from pipeline.cluster.processes import used_bytes
from pipeline.command_line import Command
from pipeline.device.accelerator import Card, computing, is_card, located, torch_sees
from pipeline.device.host import trim_heap
from pipeline.device.kinds import CPU
from pipeline.device.out_of_memory import free_caches, unless_out_of_memory
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
from pipeline.encoder.esm2 import TILE
from pipeline.errors import JobFailed
from pipeline.memory.runtime.meters import highest_resident_bytes
from pipeline.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from pipeline.encoder.embedding_recipe import EmbeddingRecipe, SequenceCut
    from pipeline.encoder.engine.sequence_work import EmbeddingCounts
    from pipeline.encoder.engine.token_batches import EngineSettings

    Tokens = NDArray[np.uint8]
    Kind = tuple[str, str]  # device and precision

CPU_TOKENS, CARD_TOKENS = 8_192, 65_536  # beyond these a batch is not faster, only larger
SHARE = 0.8  # of what is free; the rest is for fragments, for rows on their way, and for what was not foreseen
QUEUE_BYTES = 128 << 20  # rows that may wait to be written
_PROBES = (512, 2_048)  # tokens


@dataclass(frozen=True, slots=True)
class Room:
    """The host memory that is left for computing.

    The CPU must not try what does not fit: where a cgroup or the executor limits memory, no allocation ever fails, and
    the process is killed.
    """

    free_bytes: int
    token_bytes: int

    @classmethod
    def beside(cls, encoder: Forward, mem_bytes: int | None) -> Room:
        """Return the memory left beside an encoder that has just been built."""
        free_caches(CPU)
        return cls(host_free_bytes(mem_bytes), encoder.bytes_per_token())

    def tokens(self, taken_bytes: int = 0, token_bytes: int = 0) -> int:
        """Return how many tokens can be computed at once with so many bytes taken; none if this is not positive.

        `token_bytes` is what each takes where that is not as usual.
        """
        # At width 1,280, 1,022 tokens took 12 rows of fp32 a token, and 9,000 took 8, where 7 are told: a tile is more.
        return int(SHARE * (self.free_bytes - taken_bytes)) // max(1, token_bytes or self.token_bytes) - TILE


def measured(encoder: Forward, device: str, room: Room | None) -> int:
    """Return the token budget that the free memory of the device allows."""
    if room is not None:
        return max(1, min(CPU_TOKENS, room.tokens(QUEUE_BYTES)))
    encode_made_up(encoder, 64)  # what is set up once does not belong to a batch
    per_token = bytes_per_token(lambda tokens: card_peak_bytes(encoder, tokens, device)) or encoder.bytes_per_token()
    free_caches(device)
    return tokens_that_fit(Card(device).free_and_total_bytes()[0] - QUEUE_BYTES, per_token, CARD_TOKENS)


def tokens_that_fit(free_bytes: int, per_token_bytes: int, most: int) -> int:
    """Return how many tokens fit a share of the free memory; at least one."""
    return max(1, min(most, int(SHARE * free_bytes) // max(1, per_token_bytes)))


def bytes_per_token(peak_of: Callable[[int], int | None]) -> int | None:
    """Return the memory that one more token takes, from the peaks at two sizes; None when these cannot be measured."""
    small, large = (peak_of(tokens) for tokens in _PROBES)
    if small is None or large is None or large <= small:
        return None
    return -(-(large - small) // (_PROBES[1] - _PROBES[0]))


def card_peak_bytes(encoder: Forward, tokens: int, device: str) -> int | None:
    """Return the peak memory of a forward pass of that many tokens on the GPU; None if it did not fit."""
    card = Card(device)
    card.reset_peaks()
    before = card.memory("allocated")
    fits = unless_out_of_memory(lambda: encode_made_up(encoder, tokens))
    return None if fits is None else card.memory("allocated", "peak") - before


def encode_made_up(encoder: Forward, tokens: int) -> float:
    """Encode made-up sequences of that many tokens in all, and wait for the result."""
    sequence = encoder.typical[: tokens - ENDS]
    rows_RD = encoder([sequence] * (tokens // (len(sequence) + ENDS)))
    return float(rows_RD[-1, -1])  # asking for a number waits for the card


def host_free_bytes(mem_bytes: int | None) -> int:
    """Return how much more host memory this process may take, within its allocation and its address space limit.

    Files that are mapped, weights above all, are not counted as taken: the executor does not, and the kernel drops them
    before it kills.
    """
    taken = used_bytes([os.getpid()]) or device_peak_bytes(CPU)  # without /proc, the peak stands for it
    left = (find_mem_bytes() if mem_bytes is None else mem_bytes) - taken
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return left if limit == resource.RLIM_INFINITY else min(left, limit - psutil.Process().memory_info().vms)


def device_peak_bytes(device: str) -> int:
    """Return this process's peak memory, on the host or on the GPU."""
    return Card(device).memory("allocated", "peak") if is_card(device) else highest_resident_bytes()


def device_name(device: str) -> str:
    """Name what can change a result: the GPU, or the CPU instructions that torch uses; and torch's version."""
    return f"{computing(device).name}, torch {torch.__version__}"


def memory_bytes(settings: EngineSettings) -> int:
    """Return the memory of the card, or what the allocation gives this process on the host."""
    return Card(settings.device).total_bytes if is_card(settings.device) else settings.mem_bytes or 1


def on_its_device(settings: EngineSettings) -> EngineSettings:
    """Use as many threads as the allocation has cores, and the card that is here; raise if torch sees none."""
    torch.set_num_threads(settings.threads)  # more than there are cores made one forward pass ten times slower
    if (device := located(settings.device)) is None:
        what = f"this task needs a GPU, but torch sees none ({torch_sees()})"
        on_cpu = ("embed.device", "cpu"), ("cluster.embed.gpus", "0")
        remedy = Command.submit("embed", before="nvidia-smi   or   ").with_settings(*on_cpu)
        raise JobFailed(what, where="embed.device", remedy=remedy)
    return replace(settings, device=device)


ROW_COPIES = 2  # of finished rows: they themselves, and as the store encodes them


class MemoryLadder:
    """Computes batches; halves what does not fit, then falls back to windows and the CPU, and refuses the rest."""

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
        return self._encoder(self._main)

    @property
    def room(self) -> Room | None:
        """The memory beside the main encoder on the CPU; None on a GPU."""
        return self._room(self._main)

    def allow(self, budget: int) -> None:
        self.budget = self._figures.budget_tokens = budget

    def climb(self, works: Sequence[SequenceWork]) -> Iterator[Computed | RefusedSequence]:
        """Compute sequences that share a step, with every fallback that it takes."""
        waiting = [works] if works else []
        while waiting:
            yield from self._climb_once(waiting.pop(), waiting)

    def _climb_once(
        self, batch: Sequence[SequenceWork], waiting: list[Sequence[SequenceWork]]
    ) -> Iterator[Computed | RefusedSequence]:
        """Compute a batch, or append to `waiting` what to try in its place; keep no reference to rows."""
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
        """Free cached host memory for one large sequence."""
        trim_heap()
        if step.device == CPU and self._is_main(step):
            self._drop_others(step.device)

    def _has_room(self, work: SequenceWork, count: int) -> bool:
        """Say whether the CPU has the memory for a batch of so many tokens, or for a sequence in windows."""
        room = self._room(_kind(work.step))
        if room is None:
            return True
        cut = work.windows
        residues = len(work.tokens_L) if cut is None else min(cut.length, len(work.tokens_L))
        least = count if cut is None else residues + ENDS
        token_bytes = self._encoder(_kind(work.step)).bytes_per_token(residues)
        return room.tokens(self._rows_bytes(work.step, count), token_bytes) >= least

    def _rows_bytes(self, step: ComputeStep, count: int) -> int:
        """Return the memory that the finished rows of so many tokens take until they are stored."""
        return ROW_COPIES * count * self._encoder(_kind(step)).dim * self._storage.itemsize

    def _in_windows(self, work: SequenceWork, cut: SequenceCut) -> torch.Tensor | None:
        """Return the rows of a sequence computed in windows, or None when not even one of them fits.

        Each window has a mark of its own: the sequence's is their mean.
        """
        marks, mark_1D = int(self._recipe.cls), list[torch.Tensor]()
        spans = windows(len(work.tokens_L), cut.length, cut.overlap)
        shares = window_shares(spans)
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
                shape = marks + len(work.tokens_L), rows_RD.shape[1]
                rows_LD = unless_out_of_memory(partial(rows_RD.new_empty, shape))
                if rows_LD is None:
                    return None
            mark_1D += _fill(rows_LD, rows_RD, spans[group], shares[group], marks)
            del rows_RD  # the next forward needs its memory
            done += len(spans[group])
        if rows_LD is not None and marks:
            rows_LD[0] = torch.cat(mark_1D).mean(0)
        return rows_LD

    def _tokens_at_once(self, work: SequenceWork) -> int:
        """Return how many tokens of a sequence in windows may be computed at once, beside its finished rows."""
        if not self._is_main(work.step):
            return 1
        room = self._room(self._main)
        if room is None:
            return self.budget
        token_bytes = self.main.bytes_per_token(work.windows.length if work.windows else len(work.tokens_L))
        return min(self.budget, room.tokens(self._rows_bytes(work.step, work.tokens), token_bytes))

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
        rows_RD = encoder(tokens, cls=self._recipe.cls).to(self._storage)
        self._figures.encoded_residues += count - ENDS * len(tokens)
        self._figures.tokens += -(-count // encoder.fill) * encoder.fill
        return rows_RD

    def _learn(self, budget: int) -> None:
        if budget < self.budget:
            self.allow(budget)
            self._learned(budget)

    def _is_main(self, step: ComputeStep) -> bool:
        """Say whether the budget applies to this step; on fallback steps sequences are computed one by one."""
        return _kind(step) == self._main

    def _encoder(self, kind: Kind) -> Forward:
        """Return the encoder of a precision on a device, built when it is first asked for."""
        if kind not in self._encoders:
            encoder = self._build(*kind)
            if kind[0] == CPU:
                self._rooms[kind] = Room.beside(encoder, self._mem_bytes)
            self._encoders[kind] = encoder
        return self._encoders[kind]

    def _room(self, kind: Kind) -> Room | None:
        """Return the memory beside an encoder on the CPU; None on a GPU."""
        self._encoder(kind)
        return self._rooms.get(kind)

    def _builds(self, kind: Kind) -> bool:
        """Say whether an encoder exists or can be built; one that did not fit is not tried again."""
        if kind not in self._unfit and unless_out_of_memory(lambda: self._encoder(kind)) is None:
            self._unfit.add(kind)
            self._figures.splits += 1
            free_caches(kind[0])
        return kind not in self._unfit

    def _drop_others(self, device: str) -> bool:
        """Drop all encoders on a device but the main one; return whether there were any."""
        others = [kind for kind in self._encoders if kind[0] == device and kind != self._main]
        for kind in others:
            del self._encoders[kind]
        if others:
            free_caches(device)
        return bool(others)

    def _note_batch(self) -> None:
        """Count a batch, and update the peak memory."""
        self._figures.batches += 1
        self._figures.host_peak_bytes = device_peak_bytes(CPU)
        if self._main[0] != CPU:
            self._figures.device_peak_bytes = device_peak_bytes(self._main[0])


def _kind(step: ComputeStep) -> Kind:
    return step.device, step.variant.precision


def _fill(
    rows_LD: torch.Tensor,
    rows_RD: torch.Tensor,
    spans: Sequence[tuple[int, int]],
    shares: Sequence[tuple[int, int]],
    marks: int,
) -> Iterator[torch.Tensor]:
    """Put each window's share of the rows in its place; yield copies of the rows of their marks."""
    parts = torch.split(rows_RD, [marks + stop - start for start, stop in spans])
    for part_WD, (begin, _), (start, stop) in zip(parts, spans, shares, strict=True):
        rows_LD[marks + start : marks + stop] = part_WD[marks + start - begin : marks + stop - begin]
        if marks:
            yield part_WD[:marks].to(torch.float32, copy=True)


def _halves(batch: Sequence[SequenceWork]) -> tuple[Sequence[SequenceWork], Sequence[SequenceWork]]:
    """Return two halves by count, the first one last, for the last is popped first."""
    middle = len(batch) // 2
    return batch[middle:], batch[:middle]


def _refusal(work: SequenceWork) -> RefusedSequence:
    how = f" in windows of {work.windows.length:,}" if work.windows else ""
    where = "this process (cluster.embed.mem)" if work.step.device == CPU else "the GPU"
    what = f"{len(work.tokens_L):,} residues{how} do not fit into the memory of {where}"
    return RefusedSequence(work.index, Reason.DOES_NOT_FIT, what)
