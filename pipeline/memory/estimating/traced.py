"""Traces of a model for the planner: kept in files, interpolated from each other, checked against real steps.

The tapes of a model at several sizes have the same blocks; the bytes of each are a polynomial of the sizes. Where each
known size equals what the others predict, sizes between them are computed in a fraction of a trace's time. The planner
then confirms the answer it relies on by a trace. A wrong answer ends the interpolation for that choice.

Fake tensors know shapes and no values, and some operators report less of a kernel than it takes. Steps of the smallest
sizes, run for real on the CPU and recorded in the same way, show both: what traces miss is added, or the traces are not
used. A trace for a card is judged by that for the CPU.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipeline.files import read_json, replacing, write_whole
from pipeline.keys import recipe_key
from pipeline.memory.estimating.small_steps import extrapolate, projected, real_peaks, stretched
from pipeline.memory.footprint import (
    ALIKE,
    Category,
    MemoryChoice,
    MemoryPart,
    MicroFootprint,
    Provenance,
    StandingFootprint,
    Tape,
    Unmeasurable,
)
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pipeline.memory.footprint import Oracle, Sizes
    from pipeline.memory.tracing.tracer import TraceSession

    Question = tuple[MemoryChoice, tuple[tuple[str, int], ...]]

Answer = TypeVar("Answer", StandingFootprint, MicroFootprint)

LEAST_KNOWN = 7  # sizes, before others are computed from them
NEAREST = 12  # of the known sizes are used: the largest, and each size's smallest
NOTE = "most micro-batch sizes were computed from traced blocks; the largest was traced"
MOST_MODELS = 32  # whose answers are kept; the oldest go
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile)


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What real steps have shown of a model's traces."""

    factor: float = 1.0  # on temporary memory within a micro-batch
    added_bytes: int = 0  # on top of it
    note: str = ""
    refused: str = ""  # why the traces are not used
    is_guess: bool = False


class TracedOracle:
    """An `Oracle` that traces what neither a file nor other traces answer."""

    def __init__(
        self,
        trace: Callable[[], Oracle],
        compare: Callable[[StandingFootprint], Confirmation] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Take functions that make the tracer and compare traces with real steps, and a folder for the answers.

        The caller names the folder by everything that the answers follow from.
        """
        self._make, self._compare, self._folder = trace, compare, folder
        self._tracer: Oracle | None = None
        self._traced: dict[Question, MicroFootprint] = {}
        self._computed: dict[Question, MicroFootprint] = {}
        self._wrong: set[MemoryChoice] = set()  # for which something was computed wrongly
        self._found = Confirmation() if compare is None else None

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return the memory that does not depend on the batch."""
        return self._judged(choice, self._answer(StandingFootprint, "standing", choice))

    def evaluation(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a batch without gradients."""
        return self._judged(choice, self._answer(MicroFootprint, "evaluation", choice, sizes))

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes, computed where that is exact."""
        asked = (choice, tuple(sorted(sizes.items())))
        known = [micro for (of, _), micro in self._traced.items() if of == choice]
        is_new = asked not in self._traced and asked not in self._computed
        if is_new and choice not in self._wrong and len(known) >= LEAST_KNOWN:
            micro = computed_from(known, sizes)
            if micro is not None:
                self._computed[asked] = micro
        return self._computed.get(asked) or self.confirmed(choice, sizes)

    def confirmed(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch as it is traced; if another was computed, compute no more."""
        asked = (choice, tuple(sorted(sizes.items())))
        if asked not in self._traced:
            self._traced[asked] = self._judged(choice, self._answer(MicroFootprint, "micro", choice, sizes))
        guess = self._computed.pop(asked, None)
        if guess is not None and not guess.is_like(self._traced[asked]):
            self._wrong.add(choice)
            self._computed = {other: micro for other, micro in self._computed.items() if other[0] != choice}
        return self._traced[asked]

    def _answer(self, kind: type[Answer], question: str, choice: MemoryChoice, sizes: Sizes | None = None) -> Answer:
        """Return the answer to a question: as a file has it, or traced."""
        name = recipe_key("trace", {"what": question, "choice": asdict(choice), "sizes": dict(sizes or {})}).hex()
        path = self._folder / f"{name}.npz" if self._folder is not None else None
        answer = read_answer(path, kind) if path is not None else None
        if answer is None:
            self._tracer = self._tracer or self._make()
            answer = getattr(self._tracer, question)(choice, *([] if sizes is None else [sizes]))
            if path is not None:
                write_answer(path, answer)
        assert isinstance(answer, kind)
        return answer

    def _judged(self, choice: MemoryChoice, answer: Answer) -> Answer:
        """Return an answer with what real steps have shown; raise where they refute it."""
        found = self._found = self._found or self._confirmation(choice)
        if found.refused:
            raise Unmeasurable(found.refused)
        answer = enlarged(answer, found) if isinstance(answer, MicroFootprint) else answer
        origin = Provenance.GUESSED if found.is_guess else answer.origin
        return replace(answer, origin=origin, notes=(*answer.notes, found.note)) if found.note else answer

    def _confirmation(self, choice: MemoryChoice) -> Confirmation:
        """Return what real steps have shown: now, or when they were run before."""
        path = self._folder / "confirmed.json" if self._folder is not None else None
        with suppress(TypeError):  # written by another version
            if path is not None and (kept := read_json(path)) is not None:
                return Confirmation(**kept)
        assert self._compare is not None
        found = self._compare(self._answer(StandingFootprint, "standing", choice))
        with suppress(OSError):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, json.dumps(asdict(found)))
        return found


def enlarged(micro: MicroFootprint, by: Confirmation) -> MicroFootprint:
    """Return a micro-batch with everything that is temporary in it enlarged."""
    if by.factor <= 1 and not by.added_bytes:
        return micro
    first, again = (
        stretched(tape, ceil(by.factor * tape.peak_bytes) + by.added_bytes) for tape in (micro.first, micro.again)
    )
    more = MemoryPart(Category.SCRATCH, "seen in real steps", again.peak_bytes - micro.again.peak_bytes)
    return replace(micro, first=first, again=again, parts=(*micro.parts, more), first_parts=())


def computed_from(known: Sequence[MicroFootprint], wanted: Sizes) -> MicroFootprint | None:
    """Return the memory of a micro-batch from that of known ones, without its parts; None where it is not exact."""
    if any(wanted[name] > max(micro.sizes[name] for micro in known) for name in wanted):
        return None
    ordered = sorted(known, key=lambda micro: sum(micro.sizes[name] / max(wanted[name], 1) for name in wanted))
    least = [min(ordered, key=lambda micro: micro.sizes[name]) for name in wanted]  # each size has to vary
    near = [micro for place, micro in enumerate(ordered) if micro in least or place >= len(ordered) - NEAREST]
    (events, _), *_ = Counter(len(micro.again.bytes_E) for micro in near).most_common()
    near = [micro for micro in near if len(micro.again.bytes_E) == events]  # a first size may fill lookup tables
    first = projected([(micro.sizes, micro.first) for micro in near], wanted)
    again = projected([(micro.sizes, micro.again) for micro in near], wanted)
    if first is None or again is None or max(first[1].error, again[1].error) > ALIKE:
        return None
    counts: dict[str, Any] = {
        name: extrapolate([(micro.sizes, int(getattr(micro, name))) for micro in near], wanted).likely
        for name in ("flops", "kernels", "moved_bytes", "host_bytes")
    }
    notes = (*near[-1].notes, NOTE)
    return replace(near[-1], sizes=dict(wanted), first=first[0], again=again[0], parts=(), notes=notes, **counts)


def write_answer(path: Path, answer: StandingFootprint | MicroFootprint) -> None:
    """Write an answer to a NumPy archive without pickled objects: its tapes as arrays, the rest as JSON.

    The first answer of a model takes the place of the oldest model's where there are many. What cannot be kept is
    traced again.
    """
    values = {field.name: getattr(answer, field.name) for field in fields(answer)}
    arrays: dict[str, Any] = {
        name: np.stack((tape.block_E, tape.bytes_E)) for name, tape in values.items() if isinstance(tape, Tape)
    }
    rest = {name: value for name, value in values.items() if name not in arrays}
    with suppress(OSError):
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            models = sorted(path.parent.parent.iterdir(), key=lambda model: model.stat().st_mtime_ns, reverse=True)
            for model in models[MOST_MODELS:]:
                shutil.rmtree(model, ignore_errors=True)
        with replacing(path) as aside, aside.open("wb") as file:
            np.savez_compressed(file, rest=np.array(json.dumps(rest, default=asdict)), **arrays)


def read_answer(path: Path, kind: type[Answer]) -> Answer | None:
    """Return the answer in a file; None if it cannot be read."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            values = json.loads(str(file["rest"]))
            values |= {name: Tape(*file[name]) for name in file.files if name != "rest"}
        for name in [name for name in values if name.endswith("parts")]:
            values[name] = tuple(MemoryPart(**{**row, "category": Category(row["category"])}) for row in values[name])
        return kind(**{**values, "origin": Provenance(values["origin"]), "notes": tuple(values["notes"])})
    except _UNREADABLE:
        return None


WITHIN = 0.02  # of the traced bytes: less is rounding
UNCONFIRMED = "not confirmed by a real step"
SLACK_BYTES = 1024  # a few numbers
LEAK = (
    "the model keeps {} more after each micro-batch: probably a leak (store tensor.detach() or tensor.item() instead)"
)
TIMES = (1, 4, 16, 64)  # the smallest sizes: a kernel's own memory may be hidden in a small step
MOST_BYTES = 1 << 30  # of parameters and gradients, or of a step: a larger one is not run for this
MOST_S = 3.0  # of the real steps of a size, as far as can be predicted
RUNS, FLOP_S, KERNEL_S = 3, 1e-10, 3e-4  # a core or two; recording a small kernel takes longer than running it
NUMBER_BYTES = 4
TOO_LONG = "its smallest batch takes too long on the CPU"


def compared(
    standing: StandingFootprint,
    on_cpu: Callable[[], Oracle],
    real: Callable[[], TraceSession],
    least: Sizes,
    *,
    on_card: bool,
) -> Confirmation:
    """Run small steps, unless the model is too large for that, and compare them with their traces for the CPU.

    `on_cpu` and `real` begin traces and real steps; `on_card`: it is traces for a card that are to be confirmed.
    """

    def unconfirmed(why: str) -> Confirmation:
        return Confirmation(note=f"{UNCONFIRMED}: {why}", is_guess=not on_card)  # the memory of CPU kernels is unknown

    state_bytes = NUMBER_BYTES * (standing.parameters + standing.trained)
    if state_bytes > MOST_BYTES:
        return unconfirmed(f"its parameters take {format_bytes(state_bytes)}")
    if RUNS * standing.kernels * KERNEL_S > MOST_S:
        return unconfirmed(TOO_LONG)
    traced: list[tuple[Sizes, int]] = []
    failed: Exception | None = None
    traces = on_cpu()
    for times in TIMES[:2] if on_card else TIMES:
        sizes = {name: times * size for name, size in least.items()}
        try:
            micro = traces.micro(MemoryChoice(), sizes)
        except Exception as error:  # noqa: BLE001 - it may take no such sizes
            failed = error
            continue
        takes_s = RUNS * (micro.flops * FLOP_S + micro.kernels * KERNEL_S)
        if takes_s > MOST_S or micro.again.peak_bytes > MOST_BYTES:
            break
        traced.append((sizes, micro.again.peak_bytes))
    peaks, growth = list[tuple[int, int]](), 0
    if traced:
        peaks, failed, growth = real_peaks(real, [sizes for sizes, _ in traced], kernels=not on_card)
    if not peaks:
        why = str(failed).partition("\n")[0]
        return unconfirmed(f"it fails on the CPU: {why}" if failed else TOO_LONG)
    pairs = [(max(pair), bytes_) for pair, (_, bytes_) in zip(peaks, traced, strict=False)]
    found = verdict(pairs, is_even=all(max(pair) <= (1 + WITHIN) * min(pair) for pair in peaks))
    leak = LEAK.format(format_bytes(growth)) if growth > SLACK_BYTES else ""
    if found.refused:
        return replace(found, refused="; ".join(filter(None, (found.refused, leak))))
    return replace(found, note="; ".join(filter(None, (found.note, leak))))


def verdict(pairs: Sequence[tuple[int, int]], *, is_even: bool = True) -> Confirmation:
    """Return what pairs of a real peak and a traced one, of growing sizes, show.

    The untraced memory is either bounded by a number of bytes at any size, or proportional to the traced memory.
    `is_even`: real peaks are alike whatever is drawn.
    """
    missed = [max(0, real - SLACK_BYTES - traced) for real, traced in pairs]
    if all(more <= WITHIN * traced for more, (_, traced) in zip(missed, pairs, strict=True)):
        return Confirmation()
    shown = ", ".join(f"{real / max(traced, 1):.2f}" for real, traced in pairs) + " of their traced memory"
    refused = Confirmation(refused=f"small real steps took {shown}: the trace is not used")
    if not is_even or len(pairs) < 2:
        return refused
    if max(missed[1:]) <= missed[0]:
        note = f"small real steps took up to {format_bytes(missed[0])} more than traced at every size: added"
        return Confirmation(added_bytes=missed[0], note=note)
    knots = [(traced, more) for (_, traced), more in zip(pairs, missed, strict=True)]
    lines = knots if len(knots) > 2 else [(0, 0), *knots]  # two points are no line
    before, slope = (max(0.0, (y - x) / max(b - a, 1)) for (a, x), (b, y) in pairwise(lines[-3:]))
    (earlier, more), (last, _) = knots[-2:]
    if pairs[-1][0] > (1 + WITHIN) * (last + more + before * (last - earlier)) + SLACK_BYTES:  # steeper and steeper
        return refused
    slope = max(slope, before) if len(knots) == 2 else slope
    added = max(0, *(ceil(more - slope * traced) for traced, more in knots))
    note = f"small real steps took {shown}: planned with that, and {WITHIN:.0%}"
    return Confirmation((1 + slope) * (1 + WITHIN), added, note, is_guess=True)
