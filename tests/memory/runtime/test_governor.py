"""Budgets that are learned, what they are learned from, and a loop of somebody's own under them."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError, JobFailed
from pipeline.memory.runtime.meters import NEAR, HostMeter, Maintenance, MaintenanceSettings, Memory, ProcessMeter
from pipeline.memory.runtime.recovery import Governor, is_crowded
from pipeline.training.own_loops import governed as governed_module
from pipeline.training.own_loops.governed import Governed, GovernedEvent
from tests.testkit.limited import device as limited
from tests.testkit.limited.device import LimitedDevice

pytestmark = pytest.mark.usefixtures("quick")
MB = 1 << 20


def memory(*, live: int | None, reserved: int, limit: int | None = 1000, retries: int = 0) -> Memory:
    return Memory(live, reserved, live, reserved, 0, limit, retries)


def planned(**changes: object) -> Governor:
    return Governor(**{"planned": 800, "base_bytes": 100, "limit_bytes": 1000, "largest": 50, **changes})


# Before step 1


@pytest.mark.parametrize(
    ("changes", "found", "budget"),
    [
        ({"margin": 0.02}, memory(live=900, reserved=900), 800),  # as predicted
        ({}, memory(live=1300, reserved=1300, limit=None), 600),  # items cost 1.5 times as much: (1000 - 100) / 1.5
        ({}, memory(live=500, reserved=500), 800),  # less raises nothing
        ({}, memory(live=900, reserved=1000), 800),
        ({}, memory(live=900, reserved=1000, limit=950), 750),  # what the allocator holds is lost to items
        ({}, memory(live=900, reserved=900, limit=700), 600),  # others have taken memory since the plan
        ({"margin": 0.02, "largest": 500}, memory(live=2500, reserved=2500), 500),  # never below the largest item
    ],
)
def test_the_budget_is_what_a_measured_peak_and_the_limit_leave(
    changes: dict[str, float], found: Memory, budget: int
) -> None:
    governor = planned(**{"margin": 0.0, **changes})
    live_bytes = found.peak_allocated_bytes
    assert live_bytes is not None
    assert governor.measured(found, 900) == (budget, live_bytes / 900)
    governor.adopt(1800)
    assert governor.budget == 800  # nothing changes before all ranks agree, and no budget grows
    governor.adopt(budget)
    assert governor.budget == budget


# Admission


CUTS: list[tuple[list[int], int, list[list[int]]]] = [
    ([1, 2, 3], 6, [[1, 2, 3]]),
    ([3, 3, 3, 3], 9, [[3, 3], [3, 3]]),  # even, and not three and one
    ([9, 1, 1, 9], 10, [[9, 1], [1, 9]]),
    ([2, 50, 2], 10, [[2], [50], [2]]),  # too large is alone
    ([50], 10, [[50]]),
    ([], 10, []),
    ([0, 0], 10, [[0, 0]]),
]


def test_a_micro_batch_is_cut_into_as_few_even_pieces_as_fit() -> None:
    found = [[costs[cut.start : cut.stop] for cut in Governor(planned=budget).cuts(costs)] for costs, budget, _ in CUTS]
    assert found == [pieces for *_, pieces in CUTS]


# After a step


def test_an_oom_lowers_the_next_budget_by_a_tenth_of_what_failed() -> None:
    governor = planned()
    governor.failed([350, 350])
    governor.ran(350)
    assert governor.budget == 800
    want = governor.after_step()
    assert want.budget == 630
    assert governor.budget == 800  # until it is agreed upon
    assert governor.adopt(want.budget)
    assert governor.after_step().budget == 630


@pytest.mark.parametrize(
    ("before", "failed", "after", "budget"),
    [
        ([690], [700], [], 690),  # ran just below what failed: it runs again
        ([790], [700], [350], 630),  # ran before less failed: no evidence
        ([], [800, 400], [], 360),  # the smallest that failed counts
        ([], [1500], [], 800),  # one item alone, above what the budget allows several: teaches nothing
        ([], [50], [], 50),  # no budget falls below the largest item
    ],
)
def test_what_ran_and_what_failed_decide(before: list[int], failed: list[int], after: list[int], budget: int) -> None:
    governor = planned()
    for cost in before:
        governor.ran(cost)
    for cost in failed:
        governor.failed([cost - 1, 1])
    for cost in after:
        governor.ran(cost)
    assert governor.after_step().budget == budget


def test_a_retry_of_the_allocator_lowers_the_budget_a_little_but_not_for_ever() -> None:
    governor = planned()
    governor.after_step(memory(live=500, reserved=600, retries=3))  # what was before training does not count
    budgets = []
    for retries in range(4, 40):
        governor.ran(min(800, governor.budget))
        want = governor.after_step(memory(live=500, reserved=600, retries=retries))
        assert want.empty_cache
        governor.adopt(want.budget)
        budgets.append(governor.budget)
    assert budgets[:2] == [760, 722]
    assert budgets[-1] == 400


def test_the_retry_that_belongs_to_an_oom_is_not_held_against_it_twice() -> None:
    governor = planned()
    governor.after_step(memory(live=500, reserved=600))
    governor.failed([350, 350])
    governor.ran(350)
    want = governor.after_step(memory(live=500, reserved=600, retries=1))
    assert want.budget == 630
    governor.adopt(want.budget)
    governor.ran(600)
    assert governor.after_step(memory(live=500, reserved=600, retries=1)).why == ""


def test_unused_blocks_near_the_limit_are_given_back_and_only_then_is_less_run() -> None:
    governor, crowded = planned(), memory(live=800, reserved=960)
    assert is_crowded(crowded)
    assert not is_crowded(memory(live=900, reserved=960))  # full of tensors: as planned
    assert not is_crowded(memory(live=None, reserved=960))
    governor.ran(700)
    first = governor.after_step(crowded)
    assert (first.budget, first.empty_cache) == (800, True)
    governor.ran(700)
    second = governor.after_step(crowded)
    assert (second.budget, second.empty_cache) == (665, True)
    governor.ran(700)
    assert governor.after_step(memory(live=800, reserved=810)).empty_cache is False
    governor.ran(700)
    assert governor.after_step(crowded).budget == 800  # again the first time


def test_what_was_learned_goes_on_from_a_checkpoint() -> None:
    governor = planned(ladder=("checkpointing", "offload", "cpu"))
    governor.failed([350, 350])
    for cost, rung in ((300, 1), (200, 0), (350, 1)):
        governor.failed([cost], rung)
    governor.adopt(governor.after_step().budget)
    resumed = planned(ladder=governor.ladder)
    resumed.load(json.loads(json.dumps(governor.state())))
    assert resumed.learned == governor.learned
    assert resumed.budget == 630
    assert [resumed.rung(cost) for cost in (100, 200, 299, 300, 900)] == [0, 1, 1, 2, 2]


def test_a_resumed_run_keeps_to_a_plan_that_has_become_smaller() -> None:
    smaller = planned(planned=400)
    smaller.load(planned().state())
    assert smaller.budget == 400


# Meters


def cgroups(folder: Path, files: dict[str, str]) -> dict[str, Path]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"proc": folder / "proc", "cgroups": folder / "cgroup"}


STATUS = (
    "Name:\tx\nVmHWM:\t  9216 kB\nVmRSS:\t  6144 kB\nRssAnon:\t  4096 kB\nRssFile:\t  1024 kB\nRssShmem:\t  1024 kB\n"
)


def test_file_cache_does_not_count_towards_the_limit_v2(tmp_path: Path) -> None:
    there = cgroups(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slurm/job_1/step_0\n",
            "proc/self/status": STATUS,
            "cgroup/slurm/job_1/memory.max": f"{100 * MB}\n",
            "cgroup/slurm/job_1/memory.current": f"{98 * MB}\n",
            "cgroup/slurm/job_1/memory.stat": f"anon 1\ninactive_file {20 * MB}\nactive_file {MB}\n",
            "cgroup/slurm/job_1/step_0/memory.max": "max\n",
            "cgroup/slurm/job_1/step_0/memory.current": f"{90 * MB}\n",
        },
    )
    meter = HostMeter(**there)
    assert (meter.read().used_bytes, meter.read().limit_bytes) == (77 * MB, 100 * MB)
    assert meter.read().share < NEAR
    (tmp_path / "cgroup/slurm/job_1/memory.stat").write_text(f"inactive_file {2 * MB}\n")
    assert meter.read().share >= NEAR


def test_the_cgroup_that_is_nearest_its_limit_counts_v1(tmp_path: Path) -> None:
    there = cgroups(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/job_1/step_0\n0::/\n",
            "proc/self/status": STATUS,
            "cgroup/memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n",
            "cgroup/memory/memory.usage_in_bytes": f"{500 * MB}\n",
            "cgroup/memory/job_1/memory.limit_in_bytes": f"{100 * MB}\n",
            "cgroup/memory/job_1/memory.usage_in_bytes": f"{50 * MB}\n",
            "cgroup/memory/job_1/memory.stat": f"inactive_file 1\ntotal_inactive_file {10 * MB}\n",
            "cgroup/memory/job_1/step_0/memory.limit_in_bytes": f"{40 * MB}\n",
            "cgroup/memory/job_1/step_0/memory.usage_in_bytes": f"{39 * MB}\n",
        },
    )
    host = HostMeter(**there).read()
    assert (host.used_bytes, host.limit_bytes) == (39 * MB, 40 * MB)
    assert HostMeter(**there).read().share >= NEAR
    figures = ProcessMeter(**there).read()
    assert (figures.reserved_bytes, figures.peak_reserved_bytes) == (6 * MB, 9 * MB)
    assert (figures.allocated_bytes, figures.limit_bytes, figures.outside_bytes) == (None, 40 * MB, 33 * MB)


def test_without_a_cgroup_limit_a_told_one_counts_what_the_process_holds(tmp_path: Path) -> None:
    there = cgroups(tmp_path, {"proc/self/status": STATUS})
    assert HostMeter(**there).read().limit_bytes is None
    assert HostMeter(**there).read().share < NEAR
    host = HostMeter(limit_bytes=5 * MB, **there).read()
    assert (host.used_bytes, host.limit_bytes) == (5 * MB, 5 * MB)  # mapped files are dropped before anything dies


def test_the_meter_of_this_process_sees_memory_come_and_its_peak_stay() -> None:
    meter = ProcessMeter()
    meter.reset_peak()
    before = meter.read()
    held = torch.ones(256 * MB // 4)  # much more than other tests' threads free meanwhile
    during = meter.read()
    del held
    after = meter.read()
    assert during.reserved_bytes - before.reserved_bytes > 224 * MB
    assert after.peak_reserved_bytes - after.reserved_bytes > 224 * MB
    meter.reset_peak()
    assert meter.read().peak_reserved_bytes - after.reserved_bytes < 32 * MB


def test_what_a_process_had_at_most_is_not_forgotten_when_its_peak_is_reset() -> None:
    code = (
        "from pipeline.memory.runtime.meters import ProcessMeter, highest_resident_bytes\n"
        "held = bytearray(b'x') * (200 << 20)\ndel held\n"
        "meter, before = ProcessMeter(), highest_resident_bytes()\n"
        "meter.reset_peak()\n"
        "print(before, highest_resident_bytes(), meter.read().peak_reserved_bytes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, highest, since = map(int, done.stdout.split())
    assert highest >= before > 200 * MB > since


def test_what_a_process_had_at_most_is_nothing_of_what_started_it() -> None:
    own = "from pipeline.memory.runtime.meters import highest_resident_bytes; print(highest_resident_bytes())"
    code = (
        f"import subprocess, sys\nheld = bytearray(b'x') * (200 << 20)\nsubprocess.run([sys.executable, '-c', {own!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 5 * MB < int(done.stdout) < 100 * MB


# MaintenanceSettings


def test_garbage_is_collected_by_count_and_as_before_afterwards() -> None:
    class Loop:
        pass

    def lost() -> None:
        loop = Loop()
        loop.itself = loop

    def left() -> int:
        return sum(isinstance(one, Loop) for one in gc.get_objects())

    gc.unfreeze()
    assert gc.isenabled()
    upkeep = Maintenance(MaintenanceSettings(collect_every=3), "cpu")
    upkeep.begin()
    try:
        assert not gc.isenabled()
        counts = []
        for _ in range(6):
            lost()
            upkeep.after_micro_batch()
            upkeep.after_step()
            counts.append(left())
        assert counts == [0, 1, 0, 1, 2, 0]
        assert gc.get_freeze_count() > 1000
    finally:
        upkeep.end()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.freeze()  # for the tests that follow


# A loop of somebody's own


class Items:
    """Rows of uneven number, a model, and what it loses."""

    def __init__(self, width: int = 16, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, 1)).to(dtype)
        self.items = [torch.randn(rows, width, dtype=dtype) for rows in (7, 1, 12, 5, 9, 3, 3, 8)]
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.calls: list[int] = []

    def loss_of(self, items: list[Tensor]) -> tuple[Tensor, float]:
        self.calls.append(len(items))
        rows = torch.cat(items)
        return self.model(rows).square().sum(), len(rows)

    def governed(self, **options: object) -> Governed:
        return Governed(self.model, self.optimizer, **options)


def parameters(items: Items) -> Tensor:
    return torch.cat([one.detach().flatten() for one in items.model.parameters()])


def one_big_batch(steps: int = 1) -> Items:
    items = Items()
    for _ in range(steps):
        total, weight = items.loss_of(items.items)
        items.optimizer.zero_grad()
        (total / weight).backward()
        items.optimizer.step()
    return items


@pytest.mark.parametrize("budget", [None, 30, 20, 1])
def test_a_step_in_parts_is_the_step_of_one_big_batch(budget: int | None) -> None:
    items = Items()
    loss = items.governed(budget=budget, cost=len).step(items.items, items.loss_of)
    expected = one_big_batch()
    assert torch.allclose(parameters(items), parameters(expected), rtol=0, atol=1e-12)
    assert len(items.calls) == {None: 1, 30: 2, 20: 3, 1: 8}[budget]
    with torch.no_grad():
        total, weight = Items().loss_of(items.items)
    assert loss.item() == pytest.approx((total / weight).item(), abs=1e-12)
    assert all(one.grad is None for one in items.model.parameters())


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=1024.0)])
def test_clipping_sees_the_gradient_of_the_whole_step_and_a_scaler_changes_none(scaler: object) -> None:
    items, expected = Items(), Items()
    items.governed(budget=20, cost=len, clip=0.01, scaler=scaler).step(items.items, items.loss_of)
    total, weight = expected.loss_of(expected.items)
    (total / weight).backward()
    torch.nn.utils.clip_grad_norm_(expected.model.parameters(), 0.01)
    expected.optimizer.step()
    assert torch.allclose(parameters(items), parameters(expected), rtol=0, atol=1e-9 if scaler else 1e-12)


def room(items: Items) -> int:
    """Return a limit under which the largest item and a small one run at once, beside gradients."""
    with LimitedDevice() as device:
        for _ in range(2):
            items.loss_of([*items.items[1:3], items.items[5]])[0].backward()
    items.model.zero_grad()
    items.calls.clear()
    return device.peak_bytes


def test_it_trains_where_the_plain_loop_dies() -> None:
    limited.need()
    items = Items(width=64)
    limit_bytes = room(items)
    with LimitedDevice(limit_bytes), pytest.raises(torch.OutOfMemoryError):
        items.loss_of(items.items)[0].backward()
    items.model.zero_grad()
    limited.forget_failed_backward()
    items.calls.clear()
    reported: list[GovernedEvent] = []
    governed = items.governed(cost=len)
    governed.on_event = reported.append
    with LimitedDevice(limit_bytes) as device:
        for _ in range(3):
            governed.step(items.items, items.loss_of)
        refused = device.refused
    assert refused > 0
    assert reported == governed.events
    assert {event.what for event in reported} == {"out of memory", "budget"}
    assert parameters(items).isfinite().all()
    replays = [event.step for event in reported if event.what == "out of memory"]
    assert replays.count(0) > replays.count(1) >= replays.count(2) == 0  # it learns
    expected = Items(width=64)
    for _ in range(3):
        expected.governed().step(expected.items, expected.loss_of)
    assert torch.allclose(parameters(items), parameters(expected), rtol=0, atol=1e-10)


def test_the_five_lines_of_the_documentation_run() -> None:
    items = Items()
    lines = [line[4:] for line in governed_module.__doc__.splitlines() if line.startswith("    ")]
    assert len(lines) == 4  # besides the model
    known = {"model": items.model, "optimizer": items.optimizer, "loader": [items.items], "loss_of": items.loss_of}
    exec("\n".join(lines), known)
    assert torch.allclose(parameters(items), parameters(one_big_batch()), rtol=0, atol=1e-12)
    assert known["loss"] > 0


def test_memory_that_ends_within_the_optimizer_is_no_matter_of_splitting() -> None:
    limited.need()
    items = Items()
    optimizer = torch.optim.AdamW(items.model.parameters())
    governed = Governed(items.model, optimizer)
    with LimitedDevice() as device:
        optimizer.register_step_pre_hook(lambda *told: setattr(device, "limit_bytes", device.live_bytes))
        with pytest.raises(JobFailed, match="optimizer"):
            governed.step(items.items, items.loss_of)
    assert len(items.calls) == 1
    assert governed.events == []


def test_an_error_of_the_users_function_is_passed_on_unchanged() -> None:
    items, error = Items(), RuntimeError("shapes differ")

    def loss_of(some: list[Tensor]) -> tuple[Tensor, float]:
        raise error

    with pytest.raises(RuntimeError) as caught:
        items.governed().step(items.items, loss_of)
    assert caught.value is error
    governed = items.governed()
    governed.step(items.items, items.loss_of)
    assert torch.equal(parameters(items), parameters(one_big_batch()))


def test_what_is_no_sum_and_weight_is_refused_and_a_step_without_items_changes_nothing() -> None:
    items = Items()
    for wrong in (torch.ones(()), (torch.ones(3), 3), (1.0, 3), (torch.ones(()),), None, (torch.ones(()), "3")):
        with pytest.raises(ConfigError):
            items.governed().step(items.items, lambda some, wrong=wrong: wrong)
    before = parameters(items).clone()
    assert items.governed().step([], items.loss_of).item() == 0
    assert torch.equal(parameters(items), before)
