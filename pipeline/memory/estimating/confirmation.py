"""Traces are held to small real steps on the CPU, once: what they miss is added, or they are not believed.

Fake tensors know shapes and no values, and some operators tell less of a kernel than it takes. A step of the smallest
sizes, run for real and recorded in the same way, shows both. A trace for a card is judged by that for the CPU.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, TypeVar

from pipeline.files import read_json, write_whole
from pipeline.memory.estimating.extrapolate import stretched
from pipeline.memory.estimating.small_steps import real_peaks
from pipeline.memory.footprint import (
    Evaluates,
    MemoryChoice,
    MicroFootprint,
    Provenance,
    StandingFootprint,
    Unmeasurable,
)
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pipeline.memory.footprint import Oracle, Sizes
    from pipeline.memory.tracing.tracer import TraceSession

Answer = TypeVar("Answer", StandingFootprint, MicroFootprint)

WITHIN = 0.02  # of what is traced: more is no rounding
SLACK_BYTES = 1024  # a few numbers
TIMES = (1, 4, 16, 64)  # the smallest sizes: a kernel's own memory may be hidden in a small step
MOST_BYTES = 1 << 30  # of parameters and gradients, or of a step: a larger one is not made for this
MOST_S = 3.0  # of the real steps of a size, as far as can be foretold
RUNS, FLOP_S, KERNEL_S = 3, 1e-10, 3e-4  # a core or two; most of a small kernel's time is that of recording it
NUMBER_BYTES = 4
_FILE = "confirmed.json"
_PLAIN = MemoryChoice()


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What real steps have shown of a model's traces."""

    factor: float = 1.0  # on what passes within a micro-batch
    added_bytes: int = 0  # and beside it
    note: str = ""
    refused: str = ""  # why the traces are not to be believed


class ConfirmedOracle:
    """An `Oracle` that passes on another's traces as real steps have confirmed them."""

    def __init__(
        self,
        oracle: Oracle,
        on_cpu: Oracle,
        real: Callable[[], TraceSession],
        least: Sizes,
        kept: Path | None = None,
    ) -> None:
        """Take an oracle that traces for the CPU, a function that begins real steps, and a folder for the outcome."""
        self._oracle, self._on_cpu, self._real, self._least, self._kept = oracle, on_cpu, real, least, kept
        self._found: Confirmation | None = None

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return the memory that does not depend on the batch."""
        return self._judged(self._oracle.standing(choice))

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes."""
        return self._enlarged(self._judged(self._oracle.micro(choice, sizes)))

    def evaluation(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a batch without gradients."""
        assert isinstance(self._oracle, Evaluates)
        return self._enlarged(self._judged(self._oracle.evaluation(choice, sizes)))

    def _judged(self, answer: Answer) -> Answer:
        """Return an answer with what real steps have shown; raise where they refute it."""
        found = self._confirmation()
        if found.refused:
            raise Unmeasurable(found.refused)
        origin = Provenance.GUESSED if found.factor > 1 else answer.origin
        return replace(answer, origin=origin, notes=(*answer.notes, found.note)) if found.note else answer

    def _enlarged(self, micro: MicroFootprint) -> MicroFootprint:
        """Return a micro-batch with all that passes within it enlarged."""
        found = self._confirmation()
        if found.factor <= 1 and not found.added_bytes:
            return micro
        first, again = (
            stretched(tape, ceil(found.factor * tape.peak_bytes) + found.added_bytes)
            for tape in (micro.first, micro.again)
        )
        largest = max(micro.parts, key=lambda part: part.bytes if part.category.value == "activations" else 0)
        added = again.peak_bytes - micro.again.peak_bytes
        parts = tuple(replace(part, bytes=part.bytes + added) if part is largest else part for part in micro.parts)
        return replace(micro, first=first, again=again, parts=parts, first_parts=())

    def _confirmation(self) -> Confirmation:
        """Return what real steps have shown: now, or when it was asked before."""
        if self._found is None:
            path = self._kept / _FILE if self._kept is not None else None
            with suppress(TypeError):  # of another version
                self._found = Confirmation(**(read_json(path) or {"": ""})) if path is not None else None
            if self._found is None:
                self._found = self._compared()
                with suppress(OSError):  # what cannot be kept is asked again
                    if path is not None:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        write_whole(path, json.dumps(asdict(self._found)))
        return self._found

    @staticmethod
    def _takes_long(micro: MicroFootprint) -> bool:
        return RUNS * (micro.flops * FLOP_S + micro.kernels * KERNEL_S) > MOST_S

    def _compared(self) -> Confirmation:
        """Run small steps, unless the model is too large for that, and compare them with their traces."""
        standing = self._oracle.standing(_PLAIN)
        state_bytes = NUMBER_BYTES * (standing.parameters + standing.trained)
        if state_bytes > MOST_BYTES:
            return Confirmation(note=f"not confirmed by a real step: its parameters take {format_bytes(state_bytes)}")
        traced: list[tuple[Sizes, int]] = []
        failed = None
        is_kernels = self._oracle is self._on_cpu  # those of a card take something else
        for times in TIMES if is_kernels else TIMES[:2]:
            sizes = {name: times * size for name, size in self._least.items()}
            try:
                if not traced and self._takes_long(self._oracle.micro(_PLAIN, sizes)):
                    break
                micro = self._on_cpu.micro(_PLAIN, sizes)
            except Exception as error:  # noqa: BLE001 - it may take no such sizes
                failed = error
                break
            if self._takes_long(micro) or micro.again.peak_bytes > MOST_BYTES:
                break
            traced.append((sizes, micro.again.peak_bytes))
        peaks: list[tuple[int, int]] = []
        if traced:
            peaks, failed = real_peaks(self._real, [sizes for sizes, _ in traced], kernels=is_kernels)
        if failed is not None and not peaks:
            why = str(failed).partition("\n")[0]
            return Confirmation(note=f"not confirmed by a real step: on the CPU it ends in an error: {why}")
        is_even = all(max(pair) <= (1 + WITHIN) * min(pair) for pair in peaks)
        pairs = [(max(pair), bytes_) for pair, (_, bytes_) in zip(peaks, traced, strict=False)]
        return verdict(pairs, is_even=is_even)


def verdict(pairs: Sequence[tuple[int, int]], *, is_even: bool = True) -> Confirmation:
    """Return what pairs of a real peak and a traced one, of growing sizes, show.

    What is missed is either at most so many bytes at any size, or grows evenly with what is traced. `is_even`: real
    peaks are alike whatever is drawn.
    """
    if not pairs:
        return Confirmation(note="not confirmed by a real step: its smallest batch takes too long on the CPU")
    missed = [max(0, real - SLACK_BYTES - traced) for real, traced in pairs]
    if all(more <= WITHIN * traced for more, (_, traced) in zip(missed, pairs, strict=True)):
        return Confirmation()
    told = ", ".join(f"{real / max(traced, 1):.2f}" for real, traced in pairs) + " of what was traced of them"
    refused = Confirmation(refused=f"small real steps took {told}: the trace is not believed")
    if not is_even or len(pairs) < 2:
        return refused
    if max(missed[1:]) <= missed[0]:
        note = f"small real steps took up to {format_bytes(missed[0])} more than was traced, whatever their size: added"
        return Confirmation(added_bytes=missed[0], note=note)
    traced = [one for _, one in pairs]
    knots = [*zip(traced, missed, strict=True)] if len(pairs) > 2 else [(0, 0), *zip(traced, missed, strict=True)]
    before, slope = (max(0.0, (y - x) / max(b - a, 1)) for (a, x), (b, y) in pairwise(knots[-3:]))
    if pairs[-1][0] > (1 + WITHIN) * (traced[-1] + knots[-2][1] + before * (traced[-1] - traced[-2])) + SLACK_BYTES:
        return refused
    slope = max(slope, before) if len(pairs) == 2 else slope  # two points are no line
    added = max(0, *(ceil(more - slope * one) for one, more in zip(traced, missed, strict=True)))
    note = f"small real steps took {told}: so much is planned, and {WITHIN:.0%}"
    return Confirmation((1 + slope) * (1 + WITHIN), added, note)
