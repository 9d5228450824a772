"""Whole trainings on a device of limited memory, as the planner planned them; and memory that must not grow."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.memory.footprint import MemoryChoice
from pipeline.training.loop.metrics_log import Epoch, read_epochs
from pipeline.training.loop.train import Items
from pipeline.training.prepared import PhasePlan, likeness, phase_plan
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.memory.planning.planned import BATCH, Ground, OnDevice, limits
from tests.testkit.limited import device as limited
from tests.testkit.limited.device import HostCarrier, LimitedDevice
from tests.training.loop.loops import Plot, Run, furthest, table_of, task_of, warm
from tests.zoo import ZOO

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

ITEMS = 32
LIMITS = 5
HOST_BYTES = 64 << 10  # random states of two steps: on a card they are in the host's memory


@pytest.fixture(autouse=True, scope="module")
def _possible(quick: None) -> None:
    limited.need()


@dataclass
class Lent:
    """A task of the zoo that is told its items by numbers; its batches are made in the host's memory."""

    ground: Ground
    device: LimitedDevice

    def __post_init__(self) -> None:
        self.inner = self.ground.work.task
        self.model, self.loss, self.cost = self.inner.model, self.inner.loss, self.inner.cost

    def collate(self, items: Sequence[Any], rng: np.random.Generator) -> Any:
        """Return a batch as large as the items of these numbers make it."""
        sizes = self.ground.sizes
        told = [{name: int(values[int(item.id[4:])]) for name, values in sizes.items()} for item in items]
        torch_state = torch.get_rng_state()
        torch.manual_seed(items[0].number)
        with self.device.host():
            batch = self.inner.collate(told, rng)
        torch.set_rng_state(torch_state)
        return batch


def trained(
    ground: Ground, folder: Path, phase: PhasePlan, choice: MemoryChoice, limit: int, **train: Any
) -> tuple[Run, LimitedDevice]:
    """Train under a phase on a device of so many bytes."""
    member = ground.member
    device = LimitedDevice()

    def make(task: Any, _: StepSettings) -> Step:
        given = {"precision": choice.precision, "checkpointing": choice.checkpointing, "offload": choice.offload}
        step = OnDevice(task, replace(ground.work.settings, **given))
        step.carrier = HostCarrier(device)
        return step

    settings = {
        "effective_batch": BATCH,
        "epochs": phase.epochs,
        "batching": "padded" if member.padded else "concatenated",
        "slots": 4,
        **train,
    }
    cost_N = phase.cost(ground.sizes)
    items = [(phase, Items(table_of(ground.items), cost_N, likeness(ground.sizes)))]
    run = Run(Plot(train=settings, items=ground.items), folder, make=make, task=Lent(ground, device), phases=items)
    warm(run)
    step = run.trainer.step
    before = sum(one.nbytes for one in (*step.model.parameters(), *step.model.buffers(), *step.averages))
    gc.collect()
    with device:
        device.limit_bytes = limit - before + HOST_BYTES  # parameters were made before
        run.to_end()
    return run, device


def ooms(run: Run) -> int:
    return sum(one.ooms for one in epochs(run))


def epochs(run: Run) -> list[Epoch]:
    return read_epochs(run.made.folder.path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["mlp", "gnn", "transformer_pre"])
def test_a_planned_training_loses_no_step_at_any_limit(tmp_path: Path, name: str) -> None:
    ground = Ground.of(ZOO[name], ITEMS)
    micros = []
    for place, limit in enumerate(limits(ground, LIMITS)):
        made = ground.planned(limit)
        run, device = trained(ground, tmp_path / str(place), phase_plan("all", 1, made), made.choice, limit)
        assert run.trainer.done == run.trainer.steps == ITEMS // BATCH
        assert device.refused == ooms(run) == 0, place
        micros.append(epochs(run)[0].micro_batches)
    assert micros[-1] < max(micros)


def test_a_plan_that_is_wrong_by_half_costs_no_step(tmp_path: Path) -> None:
    ground = Ground.of(ZOO["mlp"], ITEMS)
    limit = limits(ground, LIMITS)[-2]
    made = ground.planned(limit)
    phase = replace(phase_plan("all", 3, made), budget_bytes=2 * made.budget_bytes)
    run, device = trained(ground, tmp_path / "run", phase, made.choice, limit)
    assert run.trainer.done == run.trainer.steps
    assert device.refused > 0
    assert run.trainer.governor.budget < phase.budget_bytes
    assert epochs(run)[-1].ooms == 0, "learned in the rehearsal, or in an epoch before"
    roomy, _ = trained(ground, tmp_path / "roomy", phase, made.choice, 1 << 40)
    assert ooms(roomy) == 0
    assert weights(run).keys() == weights(roomy).keys()


def weights(run: Run) -> Mapping[str, list[float]]:
    return {name: one for name, one in run.state().items() if "optimizer" not in name}


def tall() -> Ground:
    """Return items of which two are so long that what they take is most of what there is."""
    made = Ground.of(ZOO["transformer_pre"], 6)
    return replace(made, sizes={"length": np.array([150] * 4 + [900] * 2)})


def single(ground: Ground, budget_items: int = 1) -> PhasePlan:
    """Return a phase whose micro-batches are as large as its largest item."""
    (name,) = ground.sizes
    most = int(ground.sizes[name].max()) * budget_items
    return PhasePlan("all", 2, most, 0, most, most, {name: 1.0})


@pytest.mark.nightly
def test_an_item_that_does_not_fit_alone_climbs_the_ladder(tmp_path: Path) -> None:
    ground = tall()
    plain = ground.choice()
    one, both = replace(plain, checkpointing=4), replace(plain, checkpointing=4, offload=True)
    needs = [ground.alone(choice) for choice in (plain, one, both)]
    assert needs[2] < needs[1] < needs[0]
    phase = single(ground)
    fits, _ = trained(ground, tmp_path / "fits", phase, plain, 1 << 40, micro_batch=1)
    for limit, rung in (((needs[0] + needs[1]) // 2, "checkpointing"), ((needs[1] + needs[2]) // 2, "offload")):
        run, device = trained(ground, tmp_path / rung, phase, plain, limit, micro_batch=1)
        assert device.refused > 0
        assert dict(run.trainer.governor.learned.rungs).keys() >= {rung}
        assert sum(one.remedied.get(rung, 0) for one in read_epochs(run.made.folder.path)) > 0, "and it is counted"
        assert run.trainer.done == run.trainer.steps
        assert epochs(run)[-1].items == 6
        assert epochs(run)[-1].ooms == 0, "what an item needs is known in the second epoch"
        assert furthest(weights(run), weights(fits)) < 1e-3


# Memory that stays


def read_in_the_hosts_memory(run: Run, device: LimitedDevice) -> None:
    """Count nothing that readers make: how many batches there are at a time, and how far one is, is their business."""
    for loader in run.trainer.loaders:
        make = loader.make

        def in_host(*given: Any, make: Any = make) -> Any:
            with device.host():
                return make(*given)

        loader.make = in_host  # type: ignore[method-assign]


@pytest.mark.nightly
def test_memory_between_steps_is_flat_over_fifty_epochs(tmp_path: Path) -> None:
    train = {"optimizer": "adamw", "ema": 0.9, "clip": 1.0, "epochs": 50, "checkpoints": {"every": 7}}
    run = Run(Plot(train=train, items=14, dropout=0.2), tmp_path)
    warm(run)
    live: dict[int, set[int]] = {}
    with LimitedDevice() as device:
        read_in_the_hosts_memory(run, device)
        for _ in run.trainer.run():
            live.setdefault(run.trainer.state.epoch, set()).add(device.live_bytes)
        assert run.trainer.done == 150
    assert len(live[1]) == 1
    assert all(live[epoch] == live[1] for epoch in range(1, 50))


class Keeping(type(task_of(Plot()))):  # type: ignore[misc]
    """Keeps what it should not."""

    kept: list[Any]

    def loss(self, model: Any, batch: Any) -> Any:
        if torch.is_grad_enabled():
            self.kept.append(torch.ones(64 << 10))
        return super().loss(model, batch)


@pytest.mark.nightly
def test_an_injected_leak_is_named(tmp_path: Path) -> None:
    plot = Plot(train={"epochs": 12}, items=14)
    task = Keeping(plot)
    task.kept = []
    run = Run(plot, tmp_path, task=task).to_end()
    told = [line for line in run.said if "memory leaks" in line]
    assert told
    assert "test_loop_memory.py" in told[0]
    clean = Run(plot, tmp_path / "clean").to_end()
    assert not [line for line in clean.said if "memory leaks" in line]


LIBC = ctypes.CDLL(None)
LIBC.malloc.restype, LIBC.malloc.argtypes, LIBC.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]


class Grabbing(Keeping):
    """Takes memory in a library, where no operator and no line of Python shows it."""

    def loss(self, model: Any, batch: Any) -> Any:
        self.kept.append(LIBC.malloc(1 << 20))
        return super(Keeping, self).loss(model, batch)


@pytest.mark.nightly
def test_a_leak_that_an_inspection_misses_is_reported_without_blaming_an_object(tmp_path: Path) -> None:
    task = Grabbing(plot := Plot(train={"epochs": 40}))
    task.kept = []
    try:
        run = Run(plot, tmp_path, task=task).to_end()
    finally:
        for place in task.kept:
            LIBC.free(place)
    told = [line for line in run.said if "memory leaks" in line]
    assert told
    assert all("no growing object was found" in line and "kept by" not in line for line in told)
    assert any("host memory grows" in warning for warning in run.context.report.warnings.values())
