"""What was planned is really trained: whole epochs, cut by the sampler, on a device that refuses a byte too many."""

from __future__ import annotations

import pytest

from pipeline.memory.planning.memory_plan import MemoryPlan, MicroBatchLimit
from tests.memory.planning.planned import Ground, Trained, epoch, sampler_under
from tests.testkit.limited import device
from tests.zoo import ZOO

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

ITEMS = 32
USED = 0.6  # at least; the benchmark says how much
TIMES = (1.03, 2.0)  # what the largest item takes: the limits
NAMES = ("mlp", "transformer_pre", "gnn", "contrastive")


@pytest.fixture(autouse=True)
def _possible(one_thread: None) -> None:
    device.need()


def limit_of(ground: Ground, times: float) -> int:
    return int(times * ground.alone(ground.choice()))


def trained(ground: Ground, made: MemoryPlan) -> Trained:
    return epoch(ground, made.choice, sampler_under(made, ground.sizes), made.limit_bytes)


@pytest.mark.parametrize("name", NAMES)
def test_a_planned_epoch_trains_without_running_out_of_memory(name: str) -> None:
    ground = Ground.of(ZOO[name], ITEMS)
    for times in TIMES:
        made = ground.planned(limit_of(ground, times))
        one = trained(ground, made)
        assert one.ooms == 0
        assert one.micros > one.steps, "the limit has made the sampler cut"
        assert one.peak_bytes > USED * made.limit_bytes or made.cuts.limit is MicroBatchLimit.PADDING


def test_twice_the_planned_budget_runs_out_of_memory() -> None:
    ground = Ground.of(ZOO["mlp"], ITEMS)
    limit = limit_of(ground, TIMES[1])
    made = ground.planned(limit)
    larger = sampler_under(made, ground.sizes, 2 * made.budget_bytes)
    assert epoch(ground, made.choice, larger, limit).ooms > 0


def test_offloading_a_step_leaves_nothing_behind() -> None:
    """What a pack hook hands back as it is, is never released: the graph holds it, and it the graph."""
    ground = Ground.of(ZOO["interface"], 4)
    sizes = ZOO["interface"].sizes[0]
    with device.LimitedDevice() as counted:
        step = ground.work.step(ground.choice(offload=True))
        step.carrier = device.HostCarrier(counted)
        live = []
        for _ in range(3):
            step.accumulate(ground.work.example(sizes))
            live.append(counted.live_bytes)
        del step
    assert live[2] == live[1] == live[0]
