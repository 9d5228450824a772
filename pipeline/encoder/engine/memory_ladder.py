"""The token budget that memory allows, and the fallbacks when memory does not suffice."""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import psutil
import torch

from pipeline.cluster.machine import find_mem_bytes
from pipeline.cluster.processes import used_bytes
from pipeline.command_line import Command
from pipeline.device.accelerator import Card, computing, free_caches, is_card, located, torch_sees, unless_out_of_memory
from pipeline.device.host import trim_heap
from pipeline.device.kinds import CPU
from pipeline.encoder.embedding_recipe import ENDS, Variant, window_shares, windows
from pipeline.encoder.esm2 import TILE
from pipeline.encoder.esm_checkpoint import DTYPES
from pipeline.encoder.parity import no_room
from pipeline.errors import JobFailed
from pipeline.memory.runtime.meters import highest_resident_bytes
from pipeline.records import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pipeline.encoder.embedding_recipe import EmbeddingRecipe, SequenceCut, Span
    from pipeline.encoder.engine.token_batches import EngineSettings

    Tokens = NDArray[np.uint8]
    Kind = tuple[str, str]  # device and precision

CPU_TOKENS, CARD_TOKENS = 8_192, 65_536  # beyond these a batch is not faster, only larger
SHARE = 0.8  # of the free memory; the rest is for fragments, for rows that are being written, and a reserve
QUEUE_BYTES = 128 << 20  # rows that may wait to be written
ROW_COPIES = 2  # of finished rows: they themselves, and as the store encodes them
_PROBES = (512, 2_048)  # tokens


class Forward(Protocol):
    """An encoder of batches."""

    dim: int
    fill: int  # tokens are filled up to a multiple of this
    typical: Tokens  # tokens of a sequence that is made up to try it

    def tokenize(self, sequence: str) -> Tokens:
        """Return a number for each residue; raise BadSequence for one that it cannot read."""

    def bytes_per_token(self, residues: int = ...) -> int:
        """Return the memory that one more token takes in a sequence of this length."""

    def __call__(self, tokens: Sequence[Tokens], *, cls: bool = False) -> torch.Tensor:
        """Return the rows of all residues, in order; where `cls`, before those of each sequence that of its mark."""


@dataclass(slots=True)
class EmbeddingCounts:
    """Progress, for the run's status; changed by the engine alone."""

    residues: int = 0  # of the stored embeddings
    encoded_residues: int = 0  # in all forward passes: what windows share counts twice
    tokens: int = 0  # in all forward passes: ends and filling included, and what windows share twice
    splits: int = 0  # times that memory did not suffice
    forward_s: float = 0.0
    cost_done: float = 0.0
    budget_tokens: int = 0
    host_peak_bytes: int = 0
    device_peak_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence to compute, and the device and variant by which it is tried."""

    index: int  # its place in what the engine was given
    text: str
    tokens_L: Tokens  # of the residues that get a row
    device: str  # cpu, or a kind of card
    variant: Variant

    @property
    def kind(self) -> Kind:
        return self.device, self.variant.precision

    @property
    def windows(self) -> SequenceCut | None:
        """The windows it is cut into; None where it goes through the encoder whole."""
        cut = self.variant.cut
        return cut if cut is not None and cut.policy == "windows" else None

    @property
    def tokens(self) -> int:
        return len(self.tokens_L) + ENDS


@dataclass(frozen=True, slots=True)
class RefusedSequence:
    """A sequence without an embedding, and why."""

    index: int
    reason: Reason
    detail: str


class Ladder:
    """Computes batches; halves what does not fit, then falls back to windows and the CPU, and refuses the rest.

    On the CPU, a batch that may not fit must not be tried: under a cgroup's limit no allocation fails, and the process
    is killed.
    """

    def __init__(
        self,
        recipe: EmbeddingRecipe,
        main: Kind,
        build: Callable[..., Forward],
        counts: EmbeddingCounts,
        mem_bytes: int | None,
    ) -> None:
        self.budget = 0  # tokens of a batch
        self._recipe, self._main, self._build, self._storage = recipe, main, build, DTYPES[recipe.storage]
        self._counts, self._mem_bytes = counts, mem_bytes
        self._encoders: dict[Kind, Forward | None] = {}
        self._free: dict[Kind, int] = {}  # bytes that were free beside an encoder on the CPU when it had been built

    def set_budget(self, settings: EngineSettings, name: str) -> None:
        """Build the main encoder and decide how many tokens it is given at once; do nothing the second time."""
        if self.budget:
            return
        encoder, tokens = self._encoder(self._main), None if settings.budget == "auto" else settings.budget
        if encoder is not None and tokens is None:
            tokens = unless_out_of_memory(lambda: self._fitting_budget(encoder))
        if encoder is None or tokens is None:
            raise no_room(f"the weights of {name} do", settings.device)
        self.tokenize = encoder.tokenize
        self._allow(max(1, tokens >> settings.shrink))

    def _encoder(self, kind: Kind) -> Forward | None:
        """Return an encoder, built when first asked for; None where it did not fit, for good."""
        if kind not in self._encoders:
            device, precision = kind
            how = {"layer": self._recipe.layer, "precision": precision, "device": torch.device(device)}
            encoder = unless_out_of_memory(lambda: self._build(**how))
            free_caches(device)
            if encoder is None:
                self._counts.splits += 1
            elif device == CPU:
                self._free[kind] = host_free_bytes(self._mem_bytes)
            self._encoders[kind] = encoder
        return self._encoders[kind]

    def _allow(self, budget: int) -> None:
        self.budget = self._counts.budget_tokens = budget

    def _fitting_budget(self, encoder: Forward) -> int:
        """Return the token budget that the free memory of the device allows beside the main encoder."""
        device = self._main[0]
        if device == CPU:
            return max(1, min(CPU_TOKENS, tokens_beside(self._free[self._main] - QUEUE_BYTES, encoder)))
        encode_made_up(encoder, 64)  # one-time allocations do not count for a batch
        small, large = (card_peak_bytes(encoder, tokens, device) for tokens in _PROBES)
        token_bytes = encoder.bytes_per_token()
        if small is not None and large is not None and large > small:
            token_bytes = -(-(large - small) // (_PROBES[1] - _PROBES[0]))
        free_caches(device)
        free_bytes = Card(device).free_and_total_bytes()[0] - QUEUE_BYTES
        return max(1, min(CARD_TOKENS, int(SHARE * free_bytes) // max(1, token_bytes)))

    def run(self, batch: Sequence[Work]) -> torch.Tensor | RefusedSequence | list[Sequence[Work]]:
        """Return the rows of sequences that share device and variant, one after another, in storage precision.

        Where memory does not suffice for them, return what to try in their place, the first one last; for a single one
        that cannot be tried otherwise, its refusal.
        """
        rows_RD = self._rows(batch)
        if rows_RD is not None:
            self._counts.host_peak_bytes = device_peak_bytes(CPU)
            if self._main[0] != CPU:
                self._counts.device_peak_bytes = device_peak_bytes(self._main[0])
            return rows_RD
        if len(batch) > 1:
            middle = len(batch) // 2
            return [batch[middle:], batch[:middle]]
        lower = self._below(batch[0])
        return _refusal(batch[0]) if lower is None else [[lower]]

    def _below(self, work: Work) -> Work | None:
        """Return a sequence as it is tried next where it does not fit the memory; None when there is no other way."""
        residues = len(work.text)
        cut = self._recipe.windowed(residues)
        lower = [replace(work, variant=replace(work.variant, cut=cut))] if cut != work.variant.cut else []
        if work.device != CPU:
            lower.append(replace(work, device=CPU, variant=Variant("fp32", cut)))
        accepted = self._recipe.accepted(residues)
        return next((candidate for candidate in lower if candidate.variant in accepted), None)

    def _rows(self, batch: Sequence[Work]) -> torch.Tensor | None:
        """Return the rows of a batch, or None when they do not fit."""
        work, count = batch[0], sum(work.tokens for work in batch)
        is_large = count > self.budget
        if is_large:
            if len(batch) > 1:
                return None
            trim_heap()
            if work.kind == self._main and work.device == CPU:
                self._drop_others(CPU)
        cut = work.windows
        residues = len(work.tokens_L) if cut is None else min(cut.length, len(work.tokens_L))
        least = count if cut is None else residues + ENDS
        encoder = self._encoder(work.kind)
        if encoder is None or self._room(work.kind, encoder, count, residues) < least:
            return None
        whole = [work.tokens_L for work in batch]
        rows_RD = self._forward(work.kind, encoder, whole) if cut is None else self._in_windows(work, encoder, cut)
        if is_large:
            trim_heap()  # storing large rows takes as much again
        return rows_RD

    def _room(self, kind: Kind, encoder: Forward, rows: int, residues: int) -> float:
        """Return how many tokens, in sequences of that length, fit the host at once in addition to finished rows."""
        if kind not in self._free:
            return math.inf
        rows_bytes = ROW_COPIES * rows * encoder.dim * self._storage.itemsize
        return tokens_beside(self._free[kind] - rows_bytes, encoder, residues)

    def _in_windows(self, work: Work, encoder: Forward, cut: SequenceCut) -> torch.Tensor | None:
        """Return the rows of a sequence computed in windows, or None when not even one of them fits.

        Each window has a mark of its own: the sequence's is their mean.
        """
        marks, mark_1D = int(self._recipe.cls), list[torch.Tensor]()
        spans = windows(len(work.tokens_L), cut.length, cut.overlap)
        parts = list(zip(spans, window_shares(spans), strict=True))
        rows_LD: torch.Tensor | None = None
        while parts:
            room = self._room(work.kind, encoder, work.tokens, cut.length)
            at_once = min(self.budget, room) if work.kind == self._main else 1
            group = parts[: max(1, int(at_once) // (cut.length + ENDS))]
            rows_RD = self._forward(work.kind, encoder, [work.tokens_L[start:stop] for (start, stop), _ in group])
            if rows_RD is None:
                if len(group) == 1:
                    return None
                continue
            if rows_LD is None:  # allocated once: keeping all windows until they are joined would take twice the memory
                rows_LD = unless_out_of_memory(
                    partial(rows_RD.new_empty, (marks + len(work.tokens_L), rows_RD.shape[1]))
                )
                if rows_LD is None:
                    return None
            mark_1D += _fill(rows_LD, rows_RD, group, marks)
            del rows_RD  # the next forward needs its memory
            parts = parts[len(group) :]
        if rows_LD is not None and marks:
            rows_LD[0] = torch.cat(mark_1D).mean(0)
        return rows_LD

    def _forward(self, kind: Kind, encoder: Forward, tokens: Sequence[Tokens]) -> torch.Tensor | None:
        """Send sequences through an encoder; None, and a smaller budget, when memory does not suffice."""
        count = sum(map(len, tokens)) + ENDS * len(tokens)
        rows_RD = unless_out_of_memory(lambda: encoder(tokens, cls=self._recipe.cls).to(self._storage))
        if rows_RD is not None:
            self._counts.encoded_residues += count - ENDS * len(tokens)
            self._counts.tokens += -(-count // encoder.fill) * encoder.fill
            return rows_RD
        self._counts.splits += 1
        free_caches(kind[0])
        if kind == self._main:  # the budget is the main encoder's; others compute sequences one by one
            if self._drop_others(kind[0]):
                return self._forward(kind, encoder, tokens)
            if (half := max(1, count // 2)) < self.budget:
                self._allow(half)
        return None

    def _drop_others(self, device: str) -> bool:
        """Drop all encoders on a device but the main one; return whether there were any."""
        others = [kind for kind, built in self._encoders.items() if built and kind[0] == device and kind != self._main]
        for kind in others:
            del self._encoders[kind]
        free_caches(device)
        return bool(others)


def _fill(
    rows_LD: torch.Tensor, rows_RD: torch.Tensor, group: Sequence[tuple[Span, Span]], marks: int
) -> list[torch.Tensor]:
    """Put each window's share of the rows in its place; return copies of the rows of their marks."""
    parts = torch.split(rows_RD, [marks + stop - start for (start, stop), _ in group])
    for part_WD, ((begin, _), (start, stop)) in zip(parts, group, strict=True):
        rows_LD[marks + start : marks + stop] = part_WD[marks + start - begin : marks + stop - begin]
    return [part_WD[:marks].to(torch.float32, copy=True) for part_WD in parts] if marks else []


def _refusal(work: Work) -> RefusedSequence:
    how = f" in windows of {work.windows.length:,}" if work.windows else ""
    where = "this process (cluster.embed.mem)" if work.device == CPU else "the GPU"
    what = f"{len(work.tokens_L):,} residues{how} do not fit into the memory of {where}"
    return RefusedSequence(work.index, Reason.DOES_NOT_FIT, what)


def tokens_beside(free_bytes: int, encoder: Forward, *residues: int) -> int:
    """Return how many tokens the CPU can compute at once in that memory; none if this is not positive."""
    # At width 1,280, `bytes_per_token` counts 7 rows of fp32; 9,000 tokens took 8 each, 1,022 took 12: hence a tile.
    return int(SHARE * free_bytes) // max(1, encoder.bytes_per_token(*residues)) - TILE


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


def on_its_device(settings: EngineSettings) -> EngineSettings:
    """Use as many threads as the allocation has cores, and the card that is here; raise if torch sees none."""
    torch.set_num_threads(settings.threads)  # more threads than cores made a forward pass ten times slower
    if (device := located(settings.device)) is None:
        what = f"this task needs a GPU, but torch sees none ({torch_sees()})"
        on_cpu = ("embed.device", "cpu"), ("cluster.embed.gpus", "0")
        remedy = Command.submit("embed", before="nvidia-smi   or   ").with_settings(*on_cpu)
        raise JobFailed(what, where="embed.device", remedy=remedy)
    return replace(settings, device=device)
