"""A model spread over ranks trains as one process would: real processes, over gloo."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pipeline.errors import ConfigError
from pipeline.memory.runtime.governor import Governor
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints import checkpoint_reader
from pipeline.training.checkpoints.checkpoint_reader import LoadedCheckpoint
from pipeline.training.checkpoints.sharded_checkpoint import Assembled, assembled
from pipeline.training.checkpoints.tensor_file import CheckpointDamaged
from pipeline.training.items.batch import BatchOrigin
from pipeline.training.ranks.process_group import ProcessGroup
from pipeline.training.ranks.rank_protocol import LOST, SingleRank
from pipeline.training.step.fsdp import ShardedStep, built, local, shard
from pipeline.training.step.local_sharded import ShardedStepper, power_of_two
from pipeline.training.step.micro_batches import RUNGS, Piece
from pipeline.training.step.optimizers import StepSettings
from tests.training.checkpoints.saved import checkpoints
from tests.training.ranks.crews import Crew, crew
from tests.training.step import spread
from tests.training.step.spread import ITEMS, alone, stepper_of

SETTINGS: dict[str, Any] = {"learning_rate": 0.01, "clip": 0.5, "ema": 0.9}
EVERYTHING = list(range(ITEMS))
SHARES: dict[str, list[list[list[int]]]] = {
    "uneven": [[[0, 1, 2], [3, 4], [5], [6, 7, 8]], [[9, 10, 11, 12]]],
    "empty": [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12]], []],
    "first is empty": [[], [[0], EVERYTHING[1:]]],
    "three": [[[0, 1], [2]], [], [EVERYTHING[3:6], EVERYTHING[6:7], EVERYTHING[7:]]],
}


def gradients(group: ProcessGroup, cases: list[tuple[str, str, bool]]) -> list[Any]:
    """Return the gradients of some steps."""
    found = []
    for task, shares, keeps_whole in cases:
        step = spread.step_of(group, task, {"optimizer": "sgd"})
        stepper = stepper_of(step)
        stepper.keeps_whole = keeps_whole
        for _ in range(2):  # of the second, more is known
            spread.accumulate(stepper, SHARES[shares][group.rank])
            found.append([task, spread.gradients(step), float(step.norm())])
            step.release()
    return found


CASES = [(task, shares, whole) for task in spread.TASKS for shares in ("uneven", "empty", "first is empty")
         for whole in (False, True) if shares != "first is empty" or not whole]  # fmt: skip
THREE = [(task, "three", False) for task in spread.TASKS]


@pytest.mark.nightly
@pytest.mark.parametrize(("world", "cases"), [(2, CASES), (3, THREE)])
def test_gradients_are_those_of_one_big_batch(tmp_path: Path, world: int, cases: list[tuple[str, str, bool]]) -> None:
    started = crew(tmp_path, world, gradients, cases)
    assert started.wait() == [0] * world, [started.err(rank) for rank in range(world)]
    for task, found, norm in started.result(0):
        step = alone(task, {"optimizer": "sgd"})
        batch = step.task.collate([{"number": number} for number in EVERYTHING], None)  # type: ignore[arg-type]
        step.accumulate(batch)
        if task == "one":
            step.settle(float(batch["w"].sum()))
        wanted = spread.gradients(step)
        for name, one in wanted.items():
            assert found[name] == (None if one is None else pytest.approx(one, rel=1e-10, abs=1e-12))
        assert (wanted["other.weight"] is None) == (task == "one")
        assert norm == pytest.approx(float(step.norm()), rel=1e-12)
    assert [started.result(rank) for rank in range(world)] == [started.result(0)] * world


def train(group: ProcessGroup, folder: str) -> dict[str, Any]:
    """Train, look at the averages between two steps, and save."""
    found: dict[str, Any] = {}
    for way in ("loop", "foreach"):
        step = spread.step_of(group, "one", {**SETTINGS, "way": way})
        stepper = stepper_of(step)
        norms = spread.train(stepper, [SHARES["uneven"][group.rank], SHARES["empty"][group.rank]])
        with step.averaged():
            (total, _) = step.evaluate(step.task.collate([{"number": 3}], None))["squared"]  # type: ignore[arg-type]
        if way == "foreach":
            spread.save(checkpoints(Path(folder), token="ranks-1"), step, group, 2)
        norms += spread.train(stepper, [SHARES["first is empty"][group.rank]])
        found[way] = [norms, float(total), spread.values(step)]
    placed = {what for what, _, one in step.owned() if hasattr(one, "_local_tensor")}
    spread.save(checkpoints(Path(folder), token="ranks-1"), step, group, 3)
    poisoned = poison(group)
    return {"found": found, "placed": sorted(placed), "saved": spread.everything(step), "poisoned": poisoned}


def poison(group: ProcessGroup) -> list[Any]:
    """Let a gradient of one rank alone be infinite, in half precision."""
    step = spread.step_of(group, "one", {"precision": "fp16", "clip": 1.0})
    stepper = stepper_of(step)
    step.scaler = torch.amp.GradScaler("cpu")
    before = spread.values(step)
    spread.accumulate(stepper, SHARES["uneven"][group.rank])
    if group.rank == 1:
        gradient: Any = step.trained[0].grad
        gradient.to_local().fill_(torch.inf)
    norm = float(step.clip())
    step.apply()
    return [norm, spread.values(step) == before, step.scaler.get_scale()]


def resume(group: ProcessGroup, folder: str) -> dict[str, Any]:
    """Take a training up with another number of ranks, make a step."""
    torch.manual_seed(group.rank)
    step = ShardedStep(spread.OneTerm(), StepSettings(**SETTINGS), group)
    loaded = spread.take_up(checkpoints(Path(folder)), step)
    own = [loaded.own(rank) for rank in range(4)]
    found = spread.everything(step)
    shares = SHARES["three" if group.world == 3 else "uneven"]
    norms = spread.train(stepper_of(step), [shares[group.rank]])
    return {"taken up": found, "norms": norms, "own": [one and [sorted(one.tensors), dict(one.data)] for one in own]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Crew:
    """Two ranks that have trained and saved."""
    folder = tmp_path_factory.mktemp("trained")
    started = crew(folder, 2, train, str(folder / "checkpoints"))
    assert started.wait() == [0, 0], [started.err(rank) for rank in range(2)]
    return started


@pytest.fixture
def saved(trained: Crew, tmp_path: Path) -> Path:
    """Return a copy of what they have saved."""
    return Path(shutil.copytree(trained.folder / "checkpoints", tmp_path / "checkpoints"))


def test_training_is_that_of_one_process(trained: Crew) -> None:
    step = alone("one", SETTINGS)
    norms = spread.train_alone(step, 2)
    with step.averaged():
        (total, _) = step.evaluate(step.task.collate([{"number": 3}], None))["squared"]  # type: ignore[arg-type]
    norms += spread.train_alone(step, 1)
    for way in ("loop", "foreach"):
        for rank in range(2):
            found = trained.result(rank)["found"][way]
            assert found[0] == pytest.approx(norms, rel=1e-10)
            assert found[1] == pytest.approx(float(total), rel=1e-10)
            assert found[2] == pytest.approx(spread.values(step), rel=1e-10, abs=1e-12)
    assert trained.result(0)["placed"] == []


def test_a_step_that_is_infinite_on_one_rank_is_left_out_by_all(trained: Crew) -> None:
    assert [trained.result(rank)["poisoned"] for rank in range(2)] == [[math.inf, True, 2.0**15]] * 2


def test_a_model_that_was_spread_is_taken_up_whole(trained: Crew, saved: Path) -> None:
    step = alone("one", SETTINGS)
    spread.take_up(checkpoints(saved), step)
    assert spread.everything(step) == trained.result(0)["saved"]


@pytest.mark.parametrize("world", [2, 3])
def test_other_numbers_of_ranks_take_up_the_same_bits(trained: Crew, saved: Path, tmp_path: Path, world: int) -> None:
    started = crew(tmp_path, world, resume, str(saved))
    assert started.wait() == [0] * world, [started.err(rank) for rank in range(world)]
    whole = alone("one", SETTINGS)
    spread.take_up(checkpoints(saved), whole)
    norms = spread.train_alone(whole, 1)
    for rank in range(world):
        assert started.result(rank)["taken up"] == trained.result(0)["saved"]
        assert started.result(rank)["norms"] == pytest.approx(norms, rel=1e-10)
        assert started.result(rank)["own"] == [[["rng"], {"governor": 0}], [["rng"], {"governor": 1}], None, None]


def test_what_one_process_has_saved_is_taken_up_spread(tmp_path: Path) -> None:
    step = alone("one", SETTINGS)
    spread.train_alone(step, 2)
    spread.save(checkpoints(tmp_path / "checkpoints"), step, SingleRank(), 2)
    started = crew(tmp_path, 2, resume, str(tmp_path / "checkpoints"))
    assert started.wait() == [0, 0], [started.err(rank) for rank in range(2)]
    assert started.result(1)["taken up"] == spread.everything(step)


def test_each_rank_writes_its_own_parts_and_nothing_is_pickled(saved: Path) -> None:
    folder = saved / "step-00000003"
    names = ["manifest.json", "rank-0000.safetensors", "rank-0001.safetensors", "state.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    json.loads((folder / "manifest.json").read_text())
    whole = load_file(folder / "state.safetensors")
    assert "model.scale" in whole
    assert not {name for name in whole if "exp_avg" in name or "ema" in name}
    parts = [load_file(folder / f"rank-000{rank}.safetensors") for rank in range(2)]
    assert [one["part.model.blocks.0.0.weight"].shape for one in parts] == [(4, 6), (3, 6)]
    assert [one["part.model.head.bias"].shape for one in parts] == [(1,), (0,)]


@pytest.mark.parametrize(("damage", "said"), [("cut", "is cut short"), ("byte", "has other bytes than were written")])
def test_a_damaged_part_is_found_and_the_checkpoint_before_is_used(saved: Path, damage: str, said: str) -> None:
    path = saved / "step-00000003" / "rank-0001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content[:-7] if damage == "cut" else content)
    told: list[str] = []
    loaded = checkpoints(saved, said=told).newest()
    assert loaded is not None
    assert loaded.step == 2
    assert f"step-00000003 is passed over: rank-0001.safetensors {said}" in told[0]
    unchecked = checkpoints(saved).open("step-00000003", verified=True)  # as a rank does that did not look itself
    with pytest.raises(CheckpointDamaged, match=said):
        load_all(unchecked)


def test_a_checkpoint_without_some_parts_is_no_whole_one(saved: Path) -> None:
    told = checkpoint_reader.read_manifest(Disk(), saved / "step-00000003")
    with pytest.raises(CheckpointDamaged, match="not all parts of model"):
        Assembled(Disk(), saved / "step-00000003", replace(told, ranks=told.ranks[:1]))


def test_another_model_is_refused_by_name(saved: Path) -> None:
    loaded = checkpoints(saved).newest()
    assert loaded is not None
    wrong = {"model.head.weight": torch.zeros(2, 6, dtype=torch.float64), "model.tail": torch.zeros(1)}
    with pytest.raises(
        ConfigError, match=r"model.tail is not in it; model.head.weight is float64\[1, 6\], not float64\[2"
    ):
        assembled(loaded).load_into(wrong)


def load_all(loaded: LoadedCheckpoint) -> None:
    """Load everything."""
    found = assembled(loaded)
    found.load_into({name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in found.specs.items()})


def build(group: ProcessGroup, folder: Path) -> dict[str, Any]:
    """Build a model, one rank after the other, no two whole ones at the same time."""

    def make() -> nn.Module:
        whole = folder / "whole"
        whole.touch(exist_ok=False)
        torch.manual_seed(3)
        model = spread.Net()
        weakref.finalize(model.blocks[0][2].weight, whole.unlink)  # type: ignore[index]
        return model

    model, _ = built(make, group, "cpu")
    return {"digests": spread.digests(model.state_dict()), "next": torch.rand(1).item(),
            "bytes": sum(local(one).nbytes for one in model.parameters())}  # fmt: skip


def test_ranks_build_one_after_the_other_what_one_process_would(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, build, tmp_path)
    assert started.wait() == [0, 0], [started.err(rank) for rank in range(2)]
    torch.manual_seed(3)
    model = spread.Net()
    found = [started.result(rank) for rank in range(2)]
    assert [one["digests"] for one in found] == [spread.digests(model.state_dict())] * 2
    assert [one["next"] for one in found] == [torch.rand(1).item()] * 2
    whole = sum(one.nbytes for one in model.parameters())
    assert sum(one["bytes"] for one in found) == whole
    assert max(one["bytes"] for one in found) < 0.65 * whole


def die(group: ProcessGroup, folder: Path) -> None:
    """Let rank 1 be killed within a pass."""
    step = spread.step_of(group, "one", {})
    if group.rank == 1:
        step.model.get_submodule("blocks.2").register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    spread.accumulate(stepper_of(step), SHARES["uneven"][group.rank])


def test_a_rank_that_dies_within_a_pass_is_named(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, die, tmp_path)
    assert started.wait() == [LOST, -signal.SIGKILL]
    assert f"rank 1 ({socket.gethostname()}) died without a word" in started.err(0)


def test_what_cannot_be_spread_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError, match="the parameter scale is a single number"):
        shard(model, SingleRank(), "cpu")
    with pytest.raises(ConfigError, match=r"several types: float32 \(0.bias\) and float64 \(1.bias\)"):
        shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), SingleRank(), "cpu")


def test_divisors_change_no_digit() -> None:
    assert [power_of_two(number) for number in (0, 1, 2, 3, 8, 9)] == [1.0, 1.0, 2.0, 4.0, 8.0, 16.0]


def test_an_item_over_the_budget_is_run_with_remedies() -> None:
    class Sized(ShardedStepper):
        def __init__(self) -> None:  # no ranks are needed to look at an item
            self.cost_N, self.governor = np.array([5, 10, 11, 20, 21]), Governor(budget=10)
            self.ladder = RUNGS[:3]

    sizes: Any = [spread.Given((number,), BatchOrigin(0, 0, 0, 1, 0)) for number in range(5)]
    assert [Sized()._known_rung(Piece(one, 0, 1)) for one in sizes] == [0, 0, 1, 1, 2]
