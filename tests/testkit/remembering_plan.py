"""A plan together with the oracle that answered for the model: it remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.memory.planning.planner import plan_memory
from pipeline.planning.training_work import Work, data_of, least_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pipeline.config.schema_train import TrainSection
    from pipeline.memory.footprint import Oracle
    from pipeline.memory.planning.memory_plan import CardSpec, MemoryPlan, PlanRequest
    from pipeline.memory.tracing.tracer import Target


def plan_with_oracle(
    work: Work,
    train: TrainSection,
    sizes: Mapping[str, NDArray[np.int64]],
    cards: Sequence[CardSpec],
    target: Target,
    request: PlanRequest,
) -> tuple[MemoryPlan, Oracle]:
    """Plan, and return what answered as well."""
    padded = train.batching == "padded"
    oracle = work.oracle(least_of(sizes), target, padded=padded)
    return plan_memory(oracle, data_of(sizes, request, padded=padded), request, cards), oracle
