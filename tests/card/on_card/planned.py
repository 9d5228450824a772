"""Steps that are planned, and made on a simulated card: what both say of memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeline.memory.footprint import MemoryChoice, StepTapes
from pipeline.memory.hardware.caching_allocator import DEFAULT, EXPANDABLE, Allocator
from pipeline.memory.tracing.fake_cuda import cuda_casts, cuda_composites
from pipeline.memory.tracing.kernels import operator_name, scratch_bytes
from pipeline.memory.tracing.tracer import Target, Tracer
from pipeline.training.step.checkpointing import Pinned, PinnedChunks
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.step import Step
from tests.card import card
from tests.memory.tracing.traced import chosen

WITHIN = 0.02
TURNS = ((1, 1), (3, 3))  # micro-batches of the steps that are made; the peaks so far are read after each pair
CHUNK_BYTES = 1 << 16  # of offloaded tensors: so small that what is left empty of one does not matter


@contextmanager
def _as_on_the_card() -> Iterator[None]:
    with cuda_casts(), cuda_composites(), sdpa_kernel(SDPBackend.MATH):
        yield


# Its kernels are the CPU's, whose own memory is not the card's; but these are made of several kernels everywhere.
IN_PARTS = {"_safe_softmax", "binary_cross_entropy_with_logits"}


def _scratch(operator: Any, *call: Any) -> int:
    return scratch_bytes(operator, *call) if operator_name(operator) in IN_PARTS else 0


CARD = Target(_as_on_the_card, _scratch, builds=False)


@dataclass(frozen=True)
class Peaks:
    """Bytes at their highest, after steps of one micro-batch, and then after steps of several."""

    allocated_bytes: tuple[int, ...]
    reserved_bytes: tuple[int, ...]
    host_bytes: tuple[int]


def planned(tracer: Tracer, choice: MemoryChoice, sizes: Mapping[str, int], *, expandable: bool = False) -> Peaks:
    """Return the peaks of a plan, as the simulated allocator has them."""
    standing, micro = tracer.standing(choice), tracer.micro(choice, sizes)
    allocator = Allocator(EXPANDABLE if expandable else DEFAULT)
    allocator.play(standing.setup)
    is_first, peaks = True, []
    for turns in TURNS:
        for number in turns:
            for tape in StepTapes.of(standing, [micro] * number, first=is_first).tapes:
                allocator.play(tape)
            is_first = False
        peaks.append((allocator.peak_allocated_bytes, allocator.reserved_bytes))
    allocated, reserved = zip(*peaks, strict=True)
    return Peaks(allocated, reserved, (micro.host_bytes,))


def measured(
    task: Any, choice: MemoryChoice, sizes: Mapping[str, int], *, expandable: bool = False, **settings: Any
) -> Peaks:
    """Return the peaks of steps that a card makes."""
    accelerator, peaks = torch.accelerator, []
    gc.collect()
    accelerator.empty_cache()
    with card.settings(expandable=expandable, poison=False):
        accelerator.reset_peak_memory_stats()
        step = make_step(task, chosen(choice, settings), device=card.NAME)
        chunks = in_small_chunks(step)
        for turns in TURNS:
            for number in turns:
                for _ in range(number):
                    step.accumulate(task.example(sizes))
                step.update()
            found = accelerator.memory_stats()
            peaks.append((found["allocated_bytes.all.peak"], found["reserved_bytes.all.peak"]))
        allocated, reserved = zip(*peaks, strict=True)
        return Peaks(allocated, reserved, (chunks.most_bytes,))


class Counting(PinnedChunks):
    """Counts what it takes."""

    most_bytes = 0

    def __init__(self, chunk_bytes: int) -> None:
        super().__init__(chunk_bytes)
        self._before = card.pinned_bytes()[0]

    def pieces(self, size_bytes: int) -> list[torch.Tensor]:
        found = super().pieces(size_bytes)
        self.most_bytes = max(self.most_bytes, card.pinned_bytes()[0] - self._before)
        return found


def in_small_chunks(step: Step) -> Counting:
    """Have a step offload to chunks that are hardly larger than what is in them."""
    assert isinstance(step.carrier, Pinned)
    chunks = step.carrier._chunks = Counting(CHUNK_BYTES)
    return chunks


def off(plan: Peaks, truth: Peaks) -> dict[str, float]:
    """Return by how much a plan is off, as shares of the truth."""
    shares = {}
    for name, said in vars(plan).items():
        found = getattr(truth, name)
        for place, (one, other) in enumerate(zip(said, found, strict=True)):
            shares[f"{name} {place}"] = one / other - 1 if other else float(one)
    return shares
