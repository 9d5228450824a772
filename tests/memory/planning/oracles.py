"""A model in closed form: what it takes is known for every micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pipeline.memory.footprint import (
    Category,
    MemoryChoice,
    MemoryPart,
    MicroFootprint,
    Provenance,
    StandingFootprint,
    Tape,
)
from pipeline.memory.planning.memory_plan import CardSpec, DataSizes, Micros

MIB = 1 << 20
GIB = 1 << 30
LAYERS = 16
Integers = NDArray[np.int64]
_PARAMETERS, _GRADIENTS, _MOMENTS = -1, -2, -3


def tape(*events: tuple[int, int]) -> Tape:
    blocks, sizes = zip(*events, strict=True)
    return Tape(np.array(blocks, np.int64), np.array(sizes, np.int64))


@dataclass
class Model:
    """Activations are a function of the sizes; checkpointing keeps a part of them, half precision a half."""

    activations: Callable[[Mapping[str, int]], float]
    parameters: int = 4 * MIB  # bytes
    kept: float = 0.3  # of the activations, with checkpointing
    flops_a_byte: float = 2000.0
    kernels: int = 200
    origin: Provenance = Provenance.TRACED
    asked: list[tuple[MemoryChoice, tuple[tuple[str, int], ...]]] = field(default_factory=list)

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        size = self.parameters // choice.shards
        update = ((0, size), (0, -size))
        blocks = tuple(MemoryPart(Category.PARAMETERS, f"block {block}", size // LAYERS) for block in range(LAYERS))
        parts = (*blocks, MemoryPart(Category.OPTIMIZER, "", 2 * size))
        return StandingFootprint(
            setup=tape((_PARAMETERS, size)),
            first_update=tape((_MOMENTS, 2 * size), *update, (_GRADIENTS, -size)),
            update=tape(*update, (_GRADIENTS, -size)),
            parts=parts,
            update_parts=(*parts, MemoryPart(Category.GRADIENTS, "", size), MemoryPart(Category.TEMPORARIES, "", size)),
            parameters=size // 4,
            trained=size // 4,
            origin=self.origin,
        )

    def live(self, choice: MemoryChoice, sizes: Mapping[str, int]) -> int:
        """Return what is kept from forward to backward."""
        kept = self.activations(sizes) * (0.5 if choice.precision != "fp32" else 1.0)
        kept *= 1.0 - (1.0 - self.kept) * choice.checkpointing / LAYERS
        return int(kept * (0.5 if choice.offload else 1.0))

    def peak(self, choice: MemoryChoice, sizes: Mapping[str, int]) -> int:
        """Return the live peak of a step of several such micro-batches: the truth, told without tapes."""
        return max(
            4 * self.parameters // choice.shards + self.live(choice, sizes), 5 * self.parameters // choice.shards
        )

    def micro(self, choice: MemoryChoice, sizes: Mapping[str, int]) -> MicroFootprint:
        self.asked.append((choice, tuple(sizes.items())))
        live, size = self.live(choice, sizes), self.parameters // choice.shards
        kept = [(block, live * (block + 1) // LAYERS - live * block // LAYERS) for block in range(LAYERS)]
        gone = [(block, -bytes_) for block, bytes_ in reversed(kept)]
        parts = (
            *self.standing(choice).parts,
            MemoryPart(Category.GRADIENTS, "", size),
            MemoryPart(Category.ACTIVATIONS, "", live),
        )
        whole = self.activations(sizes)
        return MicroFootprint(
            sizes=sizes,
            first=tape(*kept, (_GRADIENTS, size), *gone),
            again=tape(*kept, *gone),
            parts=parts,
            flops=self.flops_a_byte * whole * (1.0 + choice.checkpointing / LAYERS / 3),
            kernels=int(self.kernels * (1.0 + choice.checkpointing / LAYERS / 3)),
            moved_bytes=3 * whole,
            origin=self.origin,
            host_bytes=int(whole / 2) if choice.offload else 0,
        )


def card(budget: int, name: str = "card", *, half: bool = True, caching: bool = False, speed: float = 1.0) -> CardSpec:
    rates = {"fp32": 20e12 * speed} | ({"bf16": 40e12 * speed} if half else {})
    return CardSpec(name, budget, budget, rates, 1e12 * speed, caching=caching)


def greedy(batch: int, *, padded: bool = False, seed: int = 0) -> Callable[..., Micros]:
    """Return a cut that fills one micro-batch after the other, in an order drawn at random."""

    def cut(data: DataSizes, cost_N: Integers, budget: int, ranks: int) -> Micros:
        sizes = data.sizes
        count = len(cost_N)
        order = np.random.default_rng(seed).permutation(count)
        made: list[tuple[int, int, list[int]]] = []
        for step, first in enumerate(range(0, count, batch)):
            for rank, share in enumerate(np.array_split(order[first : first + batch], ranks)):
                part: list[int] = []
                for item in sorted(share.tolist(), key=lambda item: -cost_N[item]):
                    costs = [int(cost_N[one]) for one in (*part, item)]
                    assert costs[-1] <= budget, "an item above the budget"
                    if part and (len(costs) * max(costs) if padded else sum(costs)) > budget:
                        made.append((step, rank, part))
                        part = []
                    part = [*part, item]
                if part:
                    made.append((step, rank, part))
        names = ("items", *sizes)
        rows = [
            [len(part), *((values[part].max() if padded else values[part].sum()) for values in sizes.values())]
            for *_, part in made
        ]
        steps, ranks_M = (np.array([one[place] for one in made]) for place in (0, 1))
        return Micros(names, np.array(rows, np.int64), steps, ranks_M)

    return cut


def data(sizes: Mapping[str, Integers], batch: int, *, padded: bool = False, seed: int = 0) -> DataSizes:
    return DataSizes(sizes, greedy(batch, padded=padded, seed=seed), padded)


def heavy(count: int, seed: int = 0, spread: float = 0.6) -> dict[str, Integers]:
    """Return sizes with a long tail, of several kinds that do not go together."""
    generator = np.random.default_rng(seed)
    nodes = np.exp(generator.normal(5.0, spread, count)).astype(np.int64) + 10
    edges = (nodes * generator.uniform(10, 30, count)).astype(np.int64)
    return {"nodes": nodes, "edges": edges}
