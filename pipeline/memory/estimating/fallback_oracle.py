"""The ladder: what a model takes, from the best source that can tell.

    trace       every allocation of the step, on fake tensors
    rehearsal   small real steps on the CPU, extrapolated
    formula     counts of parameters

Each rung says in its answers where it stands and how far to trust it; what made the higher ones fail is told with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pipeline.errors import PlanInfeasible
from pipeline.memory.footprint import (
    Category,
    Evaluates,
    MemoryChoice,
    MemoryPart,
    MicroFootprint,
    Provenance,
    StandingFootprint,
    Tape,
    Unmeasurable,
)
from pipeline.protocol import ITEMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeline.memory.footprint import Oracle

    Sizes = Mapping[str, int]
    from collections.abc import Iterable, Mapping

    from torch import nn

Answer = TypeVar("Answer", StandingFootprint, MicroFootprint)


class OracleLadder:
    """Asks the highest rung that can answer; one that has failed is not asked again.

    What was answered before a rung failed stays true of it: ask again what is to be compared.
    """

    def __init__(self, rungs: Sequence[Callable[[], Oracle]]) -> None:
        """Keep the rungs, the best first; each is made when it is needed."""
        self.rungs = list(rungs)
        self.reasons: list[str] = []
        self.oracle: Oracle | None = None

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return what it takes whatever the batch."""
        return self.answer(lambda oracle: oracle.standing(choice))

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return what a micro-batch of these sizes takes."""
        return self.answer(lambda oracle: oracle.micro(choice, sizes))

    def evaluation(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint | None:
        """Return what a batch takes without gradients; None where the present rung cannot tell."""
        return self.oracle.evaluation(choice, sizes) if isinstance(self.oracle, Evaluates) else None

    def answer(self, ask: Callable[[Oracle], Answer]) -> Answer:
        """Return the first answer, going down."""
        while self.rungs:
            try:
                self.oracle = self.oracle or self.rungs[0]()
                answer: Answer = ask(self.oracle)
            except Unmeasurable as failed:
                self.reasons.append(str(failed))
                self.oracle = None
                del self.rungs[0]
            else:
                return replace(answer, notes=(*self.reasons, *answer.notes))
        raise PlanInfeasible(
            "nothing can tell what the model takes: " + "; ".join(self.reasons),
            remedy="pipeline plan --stage train --probe   (a job of minutes on the card itself)",
        )


FLOAT_BYTES = 4  # of all numbers: autocast keeps many in float32, and casts come on top
COPIES = 6  # of each output at the peak: measured 1.2 to 3.2 where maps make all, 5.5 with messages and pairs
HALF_BYTES = 2
FLOPS_A_PARAMETER = 6  # and row: 2 forward, 4 backward (Kaplan et al. 2020, section 2.1)
MOVED = 3  # bytes for each one that is live at the peak
KERNELS_A_TENSOR = 12  # forward, backward and what is between two maps
TRUST = (
    "from a formula, nothing was run: trust is low, it may be several times too high; what grows with the square of a "
    "size (attention) is in it only where a size counts it, maps that are applied again and again count once"
)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a model's parameters tell without running it."""

    parameters: int
    trained: int
    largest: int  # of the trained tensors
    tensors: int
    widths: int  # outputs of all maps together, for one row
    buffer_bytes: int

    @classmethod
    def of(cls, model: nn.Module) -> Counts:
        """Count those of a model; it may be on the meta device."""
        tensors = list(model.parameters())
        trained = [tensor.numel() for tensor in tensors if tensor.requires_grad]
        return cls(
            parameters=sum(tensor.numel() for tensor in tensors),
            trained=sum(trained),
            largest=max(trained, default=0),
            tensors=len(tensors),
            widths=widths(model),
            buffer_bytes=sum(tensor.numel() * tensor.element_size() for tensor in model.buffers()),
        )


def widths(model: nn.Module) -> int:
    """Return how many numbers all maps make of a row; which side of a matrix is the output nobody tells."""
    total = 0
    for module in model.modules():
        looked_up = type(module).__name__.startswith("Embedding")
        for tensor in module.parameters(recurse=False):
            if tensor.ndim > 1:
                total += tensor.shape[-1] if looked_up else max(tensor.shape[0], tensor.shape[-1])
    return total


class Formula:
    """An `Oracle` that only counts; its answers are of the whole model, whatever the shards."""

    def __init__(self, counts: Counts, *, states: int, averages: int, padded: bool) -> None:
        """Keep the counts; `states`: the optimizer's of each trained number (AdamW: 2); `averages`: of the model.

        `padded`: sizes are those of the largest item, and items are padded to it; else they are sums over the batch.
        """
        self.counts = counts
        self.states = states
        self.averages = averages
        self.padded = padded

    def standing(self, choice: MemoryChoice) -> StandingFootprint:  # noqa: ARG002 - all choices stand alike
        """Return what it takes whatever the batch."""
        counts = self.counts
        model, gradient = FLOAT_BYTES * counts.parameters, FLOAT_BYTES * counts.trained
        state, average = self.states * gradient, self.averages * model
        parts = sized_parts(
            {
                Category.PARAMETERS: model,
                Category.BUFFERS: counts.buffer_bytes,
                Category.OPTIMIZER: state,
                Category.EMA: average,
            }
        )
        # Optimizers that take all tensors at once need about a copy of them on the way (torch.optim, `foreach`).
        passing = [(0, gradient), (0, -gradient), (-1, -gradient)]
        return StandingFootprint(
            setup=tape([(-2, model), (-3, counts.buffer_bytes), (-4, average)]),
            first_update=tape([(-5, state), *passing]),
            update=tape(passing),
            parts=parts,
            update_parts=(*parts, *sized_parts({Category.GRADIENTS: gradient, Category.TEMPORARIES: gradient})),
            parameters=counts.parameters,
            trained=counts.trained,
            origin=Provenance.ASSUMED,
            notes=(TRUST,),
        )

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return what a micro-batch of these sizes takes."""
        kept = FLOAT_BYTES * COPIES * self.rows(sizes) * self.counts.widths
        gradient = FLOAT_BYTES * self.counts.trained
        live = kept + self.passing_bytes(choice)
        play = [(0, live), (0, -live)]
        return MicroFootprint(
            sizes=dict(sizes),
            first=tape([play[0], (-1, gradient), play[1]]),
            again=tape(play),
            parts=(
                *self.standing(choice).parts,
                *sized_parts({Category.GRADIENTS: gradient, Category.ACTIVATIONS: live}),
            ),
            flops=float(FLOPS_A_PARAMETER * self.counts.parameters * self.rows(sizes)),
            kernels=KERNELS_A_TENSOR * self.counts.tensors,
            moved_bytes=float(MOVED * live),
            origin=Provenance.ASSUMED,
            notes=(TRUST, *ignored(choice)),
        )

    def rows(self, sizes: Sizes) -> int:
        """Return to how many rows each map is thought to be applied."""
        largest = max((value for name, value in sizes.items() if name != ITEMS), default=1)
        return largest * sizes.get(ITEMS, 1) if self.padded else max(largest, sizes.get(ITEMS, 1))

    def passing_bytes(self, choice: MemoryChoice) -> int:
        """Return what a micro-batch makes of parameters: a gradient on its way, and casts."""
        casts = 0 if choice.precision == "fp32" else HALF_BYTES * self.counts.parameters
        return FLOAT_BYTES * self.counts.largest + casts


def sized_parts(sizes: Mapping[Category, int]) -> tuple[MemoryPart, ...]:
    """Return the parts that are there."""
    return tuple(MemoryPart(category, "", size) for category, size in sizes.items() if size)


def ignored(choice: MemoryChoice) -> tuple[str, ...]:
    """Say what the formula does not know to save."""
    asked = {"checkpointing": choice.checkpointing, "offloading": choice.offload}
    return tuple(f"what {name} saves is not in the formula" for name, is_asked in asked.items() if is_asked)


def tape(events: Iterable[tuple[int, int]]) -> Tape:
    """Return events as a tape; empty blocks are left out."""
    table = np.array([event for event in events if event[1]], np.int64).reshape(-1, 2)
    return Tape(table[:, 0].copy(), table[:, 1].copy())
