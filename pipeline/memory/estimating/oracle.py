"""A model's memory from the best source that can answer: traced, measured in small real steps, or from a formula."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pipeline.errors import PlanInfeasible
from pipeline.memory.footprint import (
    CannotRun,
    Category,
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
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from pipeline.memory.footprint import Oracle, Sizes

Answer = TypeVar("Answer", StandingFootprint, MicroFootprint)


class BestOracle:
    """Asks the best source that can answer; one that has failed is not asked again."""

    def __init__(self, sources: Sequence[Callable[[], Oracle]], reasons: Sequence[str] = ()) -> None:
        """Take factories of the sources, the best first, and the reasons why better ones are missing."""
        self.sources, self.reasons = list(sources), list(reasons)
        self.no_evaluation = ""  # why the memory of evaluating is unknown, if a source was asked
        self.source: Oracle | None = None

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return the memory that does not depend on the batch."""
        return self._answer(lambda source: source.standing(choice))

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes."""
        return self._answer(lambda source: source.micro(choice, sizes))

    def confirmed(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes, not computed from that of others."""
        return self._answer(lambda source: getattr(source, "confirmed", source.micro)(choice, sizes))

    def evaluation(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint | None:
        """Return the memory of a batch without gradients; None where the present source does not know it."""
        evaluation = getattr(self.source, "evaluation", None)
        try:
            return evaluation(choice, sizes) if evaluation else None
        except Unmeasurable as failed:
            self.no_evaluation = str(failed)
            return None

    def _answer(self, ask: Callable[[Oracle], Answer]) -> Answer:
        before = list(self.sources), list(self.reasons), self.source
        while self.sources:
            try:
                self.source = self.source or self.sources[0]()
                answer: Answer = ask(self.source)
            except Unmeasurable as failed:
                self.reasons.append(str(failed))
                self.source = None
                del self.sources[0]
            except CannotRun:  # earlier answers of a better source about other choices stay valid
                self.sources, self.reasons, self.source = before
                raise
            else:
                return replace(answer, notes=(*self.reasons, *answer.notes))
        raise PlanInfeasible(
            "the model's memory cannot be estimated: " + "; ".join(self.reasons),
            remedy="pipeline plan train --probe   (a job of minutes on the GPU itself)",
        )


FLOAT_BYTES = 4  # of all numbers: autocast keeps many in float32, and casts come on top
COPIES = 6  # of each output at the peak: measured 1.2 to 3.2 where maps make all, 5.5 with messages and pairs
HALF_BYTES = 2
FLOPS_A_PARAMETER = 6  # and row: 2 forward, 4 backward (Kaplan et al. 2020, section 2.1)
MOVED = 3  # bytes for each one that is live at the peak
KERNELS_A_TENSOR = 12  # forward, backward and what is between two maps
TRUST = (
    "estimated by a formula, nothing was run: low confidence, possibly several times too high; quadratic growth "
    "(attention) counts only if a size expresses it, and repeated modules count once; the savings of checkpointing, "
    "offloading and sharding do not count"
)


class Formula:
    """An `Oracle` that only counts parameters."""

    def __init__(self, model: nn.Module, *, states: int, averages: int, padded: bool) -> None:
        """Count the parameters of a model, which may be on the meta device.

        `states`: optimizer states per trained number (AdamW: 2); `averages`: moving averages of the model.
        `padded`: sizes are those of the largest item, and items are padded to it; else they are sums over the batch.
        """
        counts = [tensor.numel() for tensor in model.parameters()]
        trained = [tensor.numel() for tensor in model.parameters() if tensor.requires_grad]
        self._tensors, self._parameters, self._trained = len(counts), sum(counts), sum(trained)
        self._largest, self._widths, self._padded = max(trained, default=0), map_widths(model), padded
        self._gradients = FLOAT_BYTES * self._trained
        self._state = {
            Category.PARAMETERS: FLOAT_BYTES * self._parameters,
            Category.BUFFERS: sum(tensor.numel() * tensor.element_size() for tensor in model.buffers()),
            Category.EMA: averages * FLOAT_BYTES * self._parameters,
            Category.OPTIMIZER: states * FLOAT_BYTES * self._trained,
        }

    def standing(self, choice: MemoryChoice) -> StandingFootprint:  # noqa: ARG002 - the same for all
        """Return the memory that does not depend on the batch."""
        *built, optimizer = ((-2 - number, size) for number, size in enumerate(self._state.values()))
        # Optimizers that take all tensors at once need about a copy of them on the way (torch.optim, `foreach`).
        passing = [(0, self._gradients), (0, -self._gradients), (-1, -self._gradients)]
        return StandingFootprint(
            setup=_tape(built),
            first_update=_tape([optimizer, *passing]),
            update=_tape(passing),
            parts=_parts(self._state),
            update_parts=_parts(
                {**self._state, **dict.fromkeys((Category.GRADIENTS, Category.TEMPORARIES), self._gradients)}
            ),
            parameters=self._parameters,
            trained=self._trained,
            origin=Provenance.ASSUMED,
            notes=(TRUST,),
        )

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes."""
        largest = max((value for name, value in sizes.items() if name != ITEMS), default=1)
        items = sizes.get(ITEMS, 1)
        rows = largest * items if self._padded else max(largest, items)  # to which each map is assumed to be applied
        casts = 0 if choice.precision == "fp32" else HALF_BYTES * self._parameters
        live = FLOAT_BYTES * (COPIES * rows * self._widths + self._largest) + casts
        return MicroFootprint(
            sizes=dict(sizes),
            first=_tape([(0, live), (-1, self._gradients), (0, -live)]),
            again=_tape([(0, live), (0, -live)]),
            parts=_parts({**self._state, Category.GRADIENTS: self._gradients, Category.ACTIVATIONS: live}),
            flops=float(FLOPS_A_PARAMETER * self._parameters * rows),
            kernels=KERNELS_A_TENSOR * self._tensors,
            moved_bytes=float(MOVED * live),
            origin=Provenance.ASSUMED,
            notes=(TRUST,),
        )


def map_widths(model: nn.Module) -> int:
    """Return the summed output widths of all linear maps; which side of a matrix is the output is not known."""
    total = 0
    for module in model.modules():
        looked_up = type(module).__name__.startswith("Embedding")
        for tensor in module.parameters(recurse=False):
            if tensor.ndim > 1:
                total += tensor.shape[-1] if looked_up else max(tensor.shape[0], tensor.shape[-1])
    return total


def _parts(sizes: Mapping[Category, int]) -> tuple[MemoryPart, ...]:
    return tuple(MemoryPart(category, "", size) for category, size in sizes.items() if size)


def _tape(events: Iterable[tuple[int, int]]) -> Tape:
    table = np.array([event for event in events if event[1]], np.int64).reshape(-1, 2)
    return Tape(table[:, 0].copy(), table[:, 1].copy())
