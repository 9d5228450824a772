"""The ladder of oracles: a model's memory from the best source that can answer.

    trace       every allocation of the step, on fake tensors
    rehearsal   small real steps on the CPU, extrapolated
    formula     counts of parameters

Each answer says how far to trust it, and why the higher rungs failed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from pipeline.errors import PlanInfeasible
from pipeline.memory.footprint import (
    AnswersShards,
    CannotRun,
    Category,
    Computes,
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
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from pipeline.memory.footprint import Oracle

    Sizes = Mapping[str, int]

Answer = TypeVar("Answer", StandingFootprint, MicroFootprint)
NOT_TRACED = "the model is not traced"


class OracleLadder:
    """Asks the highest rung that can answer; one that has failed is not asked again.

    Earlier answers are still those of the failed rung: ask again before comparing.
    """

    def __init__(self, rungs: Sequence[Callable[[], Oracle]]) -> None:
        """Take the rungs, the best first, as functions that make them when needed."""
        self.rungs = list(rungs)
        self.reasons: list[str] = []
        self.no_evaluation = ""  # why the memory of evaluating cannot be told, where a rung has tried
        self.oracle: Oracle | None = None

    def standing(self, choice: MemoryChoice) -> StandingFootprint:
        """Return the memory that does not depend on the batch."""
        return self.answer(lambda oracle: oracle.standing(choice))

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes."""
        return self.answer(lambda oracle: oracle.micro(choice, sizes))

    def confirmed(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes, not computed from that of others."""

        def ask(oracle: Oracle) -> MicroFootprint:
            return oracle.confirmed(choice, sizes) if isinstance(oracle, Computes) else oracle.micro(choice, sizes)

        return self.answer(ask)

    def evaluation(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint | None:
        """Return the memory of a batch without gradients; None where the present rung cannot tell."""
        if not isinstance(self.oracle, Evaluates):
            return None
        try:
            return self.oracle.evaluation(choice, sizes)
        except Unmeasurable as failed:
            self.no_evaluation = str(failed)
            return None

    def refuses_shards(self, choice: MemoryChoice) -> str:
        """Return why the present rung cannot answer for a sharded choice; empty: it can."""
        self.standing(replace(choice, shards=1))  # makes the rung that can answer at all
        return self.oracle.refuses_shards(choice) if isinstance(self.oracle, AnswersShards) else NOT_TRACED

    def answerable(self, choice: MemoryChoice) -> MemoryChoice:
        """Return a choice that the present rung can answer for: without shards, where it refuses them."""
        return choice if choice.shards == 1 or not self.refuses_shards(choice) else replace(choice, shards=1)

    def answer(self, ask: Callable[[Oracle], Answer]) -> Answer:
        """Return the answer of the highest rung that has one."""
        before = list(self.rungs), list(self.reasons), self.oracle
        while self.rungs:
            try:
                self.oracle = self.oracle or self.rungs[0]()
                answer: Answer = ask(self.oracle)
            except Unmeasurable as failed:
                self.reasons.append(str(failed))
                self.oracle = None
                del self.rungs[0]
            except CannotRun:  # a higher rung's answers to other choices stand
                self.rungs, self.reasons, self.oracle = before
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
    "(attention) counts only if a size expresses it, and repeated modules count once"
)


class Formula:
    """An `Oracle` that only counts parameters; its answers are of the whole model, whatever the shards."""

    def __init__(self, model: nn.Module, *, states: int, averages: int, padded: bool) -> None:
        """Count the parameters of a model, which may be on the meta device.

        `states`: optimizer states per trained number (AdamW: 2); `averages`: moving averages of the model.
        `padded`: sizes are those of the largest item, and items are padded to it; else they are sums over the batch.
        """
        tensors = list(model.parameters())
        trained = [tensor.numel() for tensor in tensors if tensor.requires_grad]
        self._parameters, self._trained = sum(tensor.numel() for tensor in tensors), sum(trained)
        self._tensors, self._largest = len(tensors), max(trained, default=0)
        self._widths = map_widths(model)
        self._buffer_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.buffers())
        self._states, self._averages, self._padded = states, averages, padded

    def standing(self, choice: MemoryChoice) -> StandingFootprint:  # noqa: ARG002 - all choices stand alike
        """Return the memory that does not depend on the batch."""
        model, gradient = FLOAT_BYTES * self._parameters, FLOAT_BYTES * self._trained
        state, average = self._states * gradient, self._averages * model
        parts = [
            (Category.PARAMETERS, model),
            (Category.BUFFERS, self._buffer_bytes),
            (Category.OPTIMIZER, state),
            (Category.EMA, average),
        ]
        # Optimizers that take all tensors at once need about a copy of them on the way (torch.optim, `foreach`).
        passing = [(0, gradient), (0, -gradient), (-1, -gradient)]
        return StandingFootprint(
            setup=_tape([(-2, model), (-3, self._buffer_bytes), (-4, average)]),
            first_update=_tape([(-5, state), *passing]),
            update=_tape(passing),
            parts=_parts(parts),
            update_parts=_parts([*parts, (Category.GRADIENTS, gradient), (Category.TEMPORARIES, gradient)]),
            parameters=self._parameters,
            trained=self._trained,
            origin=Provenance.ASSUMED,
            notes=(TRUST,),
        )

    def micro(self, choice: MemoryChoice, sizes: Sizes) -> MicroFootprint:
        """Return the memory of a micro-batch of these sizes."""
        largest = max((value for name, value in sizes.items() if name != ITEMS), default=1)
        items = sizes.get(ITEMS, 1)
        rows = largest * items if self._padded else max(largest, items)  # to which each map is thought to be applied
        casts = 0 if choice.precision == "fp32" else HALF_BYTES * self._parameters
        gradient, gradient_on_its_way = FLOAT_BYTES * self._trained, FLOAT_BYTES * self._largest
        live = FLOAT_BYTES * COPIES * rows * self._widths + gradient_on_its_way + casts
        saves = {"checkpointing": choice.checkpointing, "offloading": choice.offload}
        return MicroFootprint(
            sizes=dict(sizes),
            first=_tape([(0, live), (-1, gradient), (0, -live)]),
            again=_tape([(0, live), (0, -live)]),
            parts=(
                *self.standing(choice).parts,
                *_parts([(Category.GRADIENTS, gradient), (Category.ACTIVATIONS, live)]),
            ),
            flops=float(FLOPS_A_PARAMETER * self._parameters * rows),
            kernels=KERNELS_A_TENSOR * self._tensors,
            moved_bytes=float(MOVED * live),
            origin=Provenance.ASSUMED,
            notes=(TRUST, *(f"the formula ignores the savings of {name}" for name, asked in saves.items() if asked)),
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


def _parts(sizes: Iterable[tuple[Category, int]]) -> tuple[MemoryPart, ...]:
    """Return the parts that are not empty."""
    return tuple(MemoryPart(category, "", size) for category, size in sizes if size)


def _tape(events: Iterable[tuple[int, int]]) -> Tape:
    """Return events as a tape, without empty blocks."""
    table = np.array([event for event in events if event[1]], np.int64).reshape(-1, 2)
    return Tape(table[:, 0].copy(), table[:, 1].copy())
