"""Whether the micro-batch that follows may be copied while one runs, and what a plan counts for it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.schema_train import TrainSection
from pipeline.device.kinds import CARD
from pipeline.memory.planning.memory_plan import MemoryPlan
from pipeline.memory.planning.planner import plan_memory
from pipeline.planning.training_outlook import _ahead_bytes
from pipeline.planning.training_work import data_of, example_bytes, host_card
from pipeline.training.prepared import phase_plan
from tests.memory.planning.planned import Ground, request_for
from tests.zoo import ZOO

LIMIT = 1 << 32


@pytest.fixture(scope="module")
def ground() -> Ground:
    made = Ground.of(ZOO["mlp"], 40)
    return replace(made, work=replace(made.work, device=CARD))


@pytest.fixture(scope="module")
def plan(ground: Ground) -> MemoryPlan:
    request = request_for(ground.member, ground.work.blocks)
    data = data_of(ground.sizes, request, padded=ground.member.padded)
    return plan_memory(ground.oracle, data, request, [replace(host_card(LIMIT), caching=True)])


def ahead_of(ground: Ground, plan: MemoryPlan, **train: Any) -> int:
    config: Any = SimpleNamespace(train=TrainSection(**train))
    return _ahead_bytes(config, ground.work, ground.oracle, plan)  # type: ignore[arg-type]


def test_the_next_batch_is_copied_ahead_where_the_largest_fits_beside_the_plan(
    ground: Ground, plan: MemoryPlan
) -> None:
    held = ahead_of(ground, plan)
    largest = max(sum(example_bytes(ground.work.task, bucket.sizes)) for bucket in plan.buckets)  # type: ignore[arg-type]
    assert 0 < largest <= held
    just, total = int(plan.total.value) + held, plan.total.value
    assert ahead_of(ground, replace(plan, limit_bytes=just + 1)) == held
    assert total < just - 1
    assert ahead_of(ground, replace(plan, limit_bytes=just - 1)) == 0


def test_nothing_is_copied_ahead_on_a_cpu_from_memory_that_is_not_pinned_or_for_a_sharded_model(
    ground: Ground, plan: MemoryPlan
) -> None:
    assert ahead_of(replace(ground, work=replace(ground.work, device="cpu")), plan) == 0
    assert ahead_of(ground, plan, pin=False) == 0
    assert ahead_of(ground, replace(plan, choice=replace(plan.choice, shards=2))) == 0


def test_what_is_copied_ahead_is_counted(ground: Ground, plan: MemoryPlan) -> None:
    held = ahead_of(ground, plan)
    without, phase = phase_plan("all", 1, plan), phase_plan("all", 1, plan, ahead_bytes=held)
    assert phase.reserved_bytes == without.reserved_bytes + held
