"""The ladder: what a model takes, from the best source that can tell.

    trace       every allocation of the step, on fake tensors
    rehearsal   small real steps on the CPU, extrapolated
    formula     counts of parameters

Each rung says in its answers where it stands and how far to trust it; what made the higher ones fail is told with it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pipeline.errors import PlanInfeasible
from pipeline.memory.footprint import Evaluates, Micro, Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeline.memory.footprint import Choice, Oracle

    Sizes = Mapping[str, int]

Answer = TypeVar("Answer", Standing, Micro)


class Unmeasurable(Exception):
    """A rung cannot answer; its text says why."""


class Ladder:
    """Asks the highest rung that can answer; one that has failed is not asked again.

    What was answered before a rung failed stays true of it: ask again what is to be compared.
    """

    def __init__(self, rungs: Sequence[Callable[[], Oracle]]) -> None:
        """Keep the rungs, the best first; each is made when it is needed."""
        self.rungs = list(rungs)
        self.reasons: list[str] = []
        self.oracle: Oracle | None = None

    def standing(self, choice: Choice) -> Standing:
        """Return what it takes whatever the batch."""
        return self.answer(lambda oracle: oracle.standing(choice))

    def micro(self, choice: Choice, sizes: Sizes) -> Micro:
        """Return what a micro-batch of these sizes takes."""
        return self.answer(lambda oracle: oracle.micro(choice, sizes))

    def evaluation(self, choice: Choice, sizes: Sizes) -> Micro | None:
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
