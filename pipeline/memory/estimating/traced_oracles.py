"""Oracles around the tracer: one asks it less, one holds what it says to small real steps.

The tapes of a model at several sizes are the same blocks of other bytes, each a polynomial of the sizes. Where every
known size is what the others foretell, one among them is computed in a fraction of the time that a trace takes. Whoever
relies on such an answer has it confirmed; one that is not ends all computing for that choice.

Fake tensors know shapes and no values, and some operators tell less of a kernel than it takes. A step of the smallest
sizes, run for real on the CPU and recorded in the same way, shows both: what traces miss is added, or they are not
believed. A trace for a card is judged by that for the CPU.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise
from math import ceil
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pipeline.errors import PipelineError
from pipeline.files import read_json, write_whole
from pipeline.memory.estimating.extrapolate import DEGREES, Design, block_bytes, extrapolate, projected, stretched
from pipeline.memory.estimating.small_steps import real_peaks
from pipeline.memory.footprint import (
    ALIKE,
    Category,
    Evaluates,
    MemoryChoice,
    MemoryPart,
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

    Key = tuple[tuple[str, int], ...]

LEAST_KNOWN = 7  # sizes, before others are computed from them
NEAREST = 12  # of the known sizes are looked at: the largest, and each size's smallest
NOTE = "most micro-batch sizes were computed from traced blocks; the largest was traced"


class ProjectedOracle:
    """An `Oracle` that asks another about a few sizes, and computes those that lie among them."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._known: dict[MemoryChoice, dict[Key, MicroFootprint]] = {}
        self._computed: dict[MemoryChoice, dict[Key, MicroFootprint]] = {}
        self._wrong: set[MemoryChoice] = set()

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return the memory that does not depend on the batch."""
        return self._oracle.standing(choice)

    def refuses_shards(self, choice: MemoryChoice) -> str:
        """Return why a sharded choice cannot be traced; empty: it can."""
        try:
            self.standing(choice)
        except (Unmeasurable, PipelineError) as refused:  # some models cannot be sharded at all
            return str(refused).partition("\n")[0]
        return ""

    def evaluation(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a batch without gradients."""
        assert isinstance(self._oracle, Evaluates)
        return self._oracle.evaluation(choice, sizes)

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes, computed where that is exact."""
        key, computed = tuple(sorted(sizes.items())), self._computed.setdefault(choice, {})
        known = self._known.setdefault(choice, {})
        if key not in known and key not in computed and choice not in self._wrong and len(known) >= LEAST_KNOWN:
            micro = computed_from(list(known.values()), sizes, self.standing(choice))
            if micro is not None:
                computed[key] = micro
        return computed[key] if key in computed else self.confirmed(choice, sizes)

    def confirmed(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch as the other oracle has it; it holds what was computed to that."""
        key, known = tuple(sorted(sizes.items())), self._known.setdefault(choice, {})
        if key not in known:
            known[key] = self._oracle.micro(choice, sizes)
        guess = self._computed.get(choice, {}).pop(key, None)
        if guess is not None and not guess.is_like(known[key]):
            self._wrong.add(choice)
            self._computed[choice].clear()
        return known[key]


def computed_from(known: Sequence[MicroFootprint], wanted: Sizes, standing: StandingFootprint) -> MicroFootprint | None:
    """Return the memory of a micro-batch from that of known ones; None where that would not be exact."""
    if any(wanted[name] > max(micro.sizes[name] for micro in known) for name in wanted):
        return None
    known = _telling(known, wanted)
    first = projected([(micro.sizes, micro.first) for micro in known], wanted)
    again = projected([(micro.sizes, micro.again) for micro in known], wanted)
    if first is None or again is None or max(first[1].error, again[1].error) > ALIKE:
        return None

    def count(of: Callable[[MicroFootprint], float]) -> int:
        return extrapolate([(micro.sizes, int(of(micro))) for micro in known], wanted).bytes

    total_bytes = standing.bytes + first[0].left_bytes + again[0].peak_bytes
    return MicroFootprint(
        sizes=dict(wanted),
        first=first[0],
        again=again[0],
        parts=_parts(known, wanted, total_bytes),
        flops=float(count(lambda micro: micro.flops)),
        kernels=count(lambda micro: micro.kernels),
        moved_bytes=float(count(lambda micro: micro.moved_bytes)),
        origin=known[-1].origin,
        notes=(*known[-1].notes, NOTE),
        host_bytes=count(lambda micro: micro.host_bytes),
    )


def _telling(known: Sequence[MicroFootprint], wanted: Sizes) -> list[MicroFootprint]:
    """Return the known micro-batches to compute another from, in the order of their size: few, for it takes time."""

    def share(micro: MicroFootprint) -> float:
        return sum(micro.sizes[name] / max(size, 1) for name, size in wanted.items())

    ordered = sorted(known, key=share)
    least = [min(ordered, key=lambda micro: micro.sizes[name]) for name in wanted]
    return [micro for place, micro in enumerate(ordered) if micro in least or place >= len(ordered) - NEAREST]


def _parts(known: Sequence[MicroFootprint], wanted: Sizes, total_bytes: int) -> tuple[MemoryPart, ...]:
    """Return the parts of a peak, each computed by itself; the largest takes what is missing to the sum of all."""
    design = Design.of([micro.sizes for micro in known], wanted)
    laws = [(design.terms(degree), design.wanted.terms(degree)[0]) for degree in DEGREES]
    tables = [{(part.category, part.name): part.bytes for part in micro.parts} for micro in known]
    parts = []
    for category, name in dict.fromkeys(chain.from_iterable(reversed(tables))):
        bytes_P = np.array([table.get((category, name), 0) for table in tables], np.float64)
        parts.append(MemoryPart(category, name, round(block_bytes(bytes_P, laws, design, design.wanted))))
    missing = total_bytes - sum(part.bytes for part in parts)
    passing = [part for part in parts if part.category in (Category.ACTIVATIONS, Category.TEMPORARIES, Category.INPUTS)]
    largest = max(passing or parts, key=lambda part: part.bytes)
    return tuple(replace(part, bytes=part.bytes + missing) if part is largest else part for part in parts)


Answer = TypeVar("Answer", StandingFootprint, MicroFootprint)

WITHIN = 0.02  # of what is traced: more is no rounding
UNCONFIRMED = "not confirmed by a real step"
SLACK_BYTES = 1024  # a few numbers
LEAK = (
    "the model keeps {} more after each micro-batch: probably a leak (store tensor.detach() or tensor.item() instead)"
)
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
        # Without real steps, what the CPU's kernels take is not known.
        is_unknown = self._oracle is self._on_cpu and found.note.startswith(UNCONFIRMED)
        origin = Provenance.GUESSED if found.factor > 1 or is_unknown else answer.origin
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
            return Confirmation(note=f"{UNCONFIRMED}: its parameters take {format_bytes(state_bytes)}")
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
                continue
            if self._takes_long(micro) or micro.again.peak_bytes > MOST_BYTES:
                break
            traced.append((sizes, micro.again.peak_bytes))
        peaks, growth = list[tuple[int, int]](), 0
        if traced:
            peaks, failed, growth = real_peaks(self._real, [sizes for sizes, _ in traced], kernels=is_kernels)
        if failed is not None and not peaks:
            why = str(failed).partition("\n")[0]
            return Confirmation(note=f"{UNCONFIRMED}: it fails on the CPU: {why}")
        is_even = all(max(pair) <= (1 + WITHIN) * min(pair) for pair in peaks)
        pairs = [(max(pair), bytes_) for pair, (_, bytes_) in zip(peaks, traced, strict=False)]
        found, leak = verdict(pairs, is_even=is_even), LEAK.format(format_bytes(growth)) if growth > SLACK_BYTES else ""
        note = "; ".join(filter(None, [found.note, leak]))
        return replace(found, note=note, refused="; ".join(filter(None, [found.refused, found.refused and leak])))


def verdict(pairs: Sequence[tuple[int, int]], *, is_even: bool = True) -> Confirmation:
    """Return what pairs of a real peak and a traced one, of growing sizes, show.

    What is missed is either at most so many bytes at any size, or grows evenly with what is traced. `is_even`: real
    peaks are alike whatever is drawn.
    """
    if not pairs:
        return Confirmation(note=f"{UNCONFIRMED}: its smallest batch takes too long on the CPU")
    missed = [max(0, real - SLACK_BYTES - traced) for real, traced in pairs]
    if all(more <= WITHIN * traced for more, (_, traced) in zip(missed, pairs, strict=True)):
        return Confirmation()
    told = ", ".join(f"{real / max(traced, 1):.2f}" for real, traced in pairs) + " of their traced memory"
    refused = Confirmation(refused=f"small real steps took {told}: the trace is not used")
    if not is_even or len(pairs) < 2:
        return refused
    if max(missed[1:]) <= missed[0]:
        note = f"small real steps took up to {format_bytes(missed[0])} more than traced at every size: added"
        return Confirmation(added_bytes=missed[0], note=note)
    traced = [one for _, one in pairs]
    knots = [*zip(traced, missed, strict=True)] if len(pairs) > 2 else [(0, 0), *zip(traced, missed, strict=True)]
    before, slope = (max(0.0, (y - x) / max(b - a, 1)) for (a, x), (b, y) in pairwise(knots[-3:]))
    if pairs[-1][0] > (1 + WITHIN) * (traced[-1] + knots[-2][1] + before * (traced[-1] - traced[-2])) + SLACK_BYTES:
        return refused
    slope = max(slope, before) if len(pairs) == 2 else slope  # two points are no line
    added = max(0, *(ceil(more - slope * one) for one, more in zip(traced, missed, strict=True)))
    note = f"small real steps took {told}: planned with that, and {WITHIN:.0%}"
    return Confirmation((1 + slope) * (1 + WITHIN), added, note)
