"""Fewer questions to an oracle: the memory of some sizes is computed from that of others, block by block.

The tapes of a model at several sizes are the same blocks of other bytes, each a polynomial of the sizes. Where every
known size is what the others foretell, one among them is computed in a fraction of the time that a trace takes. Whoever
relies on such an answer has it confirmed; one that is not ends all computing for that choice.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import PipelineError
from pipeline.memory.estimating.extrapolate import DEGREES, Design, block_bytes, extrapolate, projected
from pipeline.memory.footprint import ALIKE, Category, Evaluates, MemoryPart, MicroFootprint, Unmeasurable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeline.memory.footprint import MemoryChoice, Oracle, Sizes, StandingFootprint

    Key = tuple[tuple[str, int], ...]

LEAST_KNOWN = 7  # sizes, before others are computed from them
NEAREST = 12  # of the known sizes are looked at: the largest, and each size's smallest
NOTE = "most sizes of micro-batches were computed block by block from traced ones; the largest was traced"


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
