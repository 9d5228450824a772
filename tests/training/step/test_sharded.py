"""A model sharded over ranks, as far as the contract does not cover it. Real processes, over gloo."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pipeline.training.ranks.process_group import ProcessGroup
from pipeline.training.step.fsdp import ShardedStep, SpreadModel
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import local
from tests.testkit.limited import device
from tests.training.checkpoints.saved import spoil
from tests.training.loop.loops import Plot, signals_after, whole
from tests.training.ranks.crews import crew
from tests.training.step.kinds import GRADIENT, Heads, Net, outcome, training

PLOT = Plot(train={"epochs": 2, "optimizer": "adamw", "ema": 0.9, "checkpoints": {"every": 1}}, items=13)


# Checkpoints


def train(group: ProcessGroup, folder: Path) -> None:
    training("sharded", PLOT, folder, group, ending=signals_after(3)).to_end()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a training that two ranks have begun: checkpoints after the steps 2 and 3 are there."""
    folder = tmp_path_factory.mktemp("trained")
    crew(folder / "crew", 2, train, folder / "run").results()
    return folder / "run"


def test_each_rank_writes_its_own_parts_and_nothing_is_pickled(trained: Path) -> None:
    folder = trained / "model/checkpoints/step-00000003"
    names = ["manifest.json", "rank-0000.safetensors", "rank-0001.safetensors", "state.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    json.loads((folder / "manifest.json").read_text())
    state = load_file(folder / "state.safetensors")
    assert "model.scale" in state
    assert not {name for name in state if "exp_avg" in name or "ema" in name}
    parts = [load_file(folder / f"rank-000{rank}.safetensors") for rank in range(2)]
    assert [one["part.model.blocks.0.0.weight"].shape for one in parts] == [(4, 6), (3, 6)]
    assert [one["part.model.last.bias"].shape for one in parts] == [(1,), (0,)]


@pytest.mark.parametrize("damage", ["cut", "byte"])
def test_a_damaged_part_is_found_and_the_checkpoint_before_is_used(trained: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(trained, tmp_path / "run")

    def change(content: bytearray) -> None:
        content[-1] ^= 1
        del content[len(content) - (7 if damage == "cut" else 0) :]

    spoil(tmp_path / "run/model/checkpoints/step-00000003/rank-0001.safetensors", change)
    run = training("local", PLOT, tmp_path / "run")
    assert next(run.trainer.run()) == 2
    assert any("step-00000003 is skipped: rank-0001.safetensors" in line for line in run.said)


# The model


def build(group: ProcessGroup, folder: Path) -> dict[str, Any]:
    """Build a model, one rank after the other, no two whole ones at the same time."""

    def make() -> nn.Module:
        there = folder / "whole"
        there.touch(exist_ok=False)
        torch.manual_seed(3)
        model = Net()
        weakref.finalize(model.blocks[0][2].weight, there.unlink)  # type: ignore[index]
        return model

    model = SpreadModel(make, group, "cpu").model
    values = {name: whole(one).flatten().tolist() for name, one in model.state_dict().items()}
    own_bytes = sum(local(one).nbytes for one in model.parameters())
    return {"values": values, "next": torch.rand(1).item(), "bytes": own_bytes}


def test_ranks_build_one_after_the_other_what_one_process_would(tmp_path: Path) -> None:
    found = crew(tmp_path / "crew", 2, build, tmp_path).results()
    torch.manual_seed(3)
    model = Net()
    values = {name: one.flatten().tolist() for name, one in model.state_dict().items()}
    assert [one["values"] for one in found] == [values] * 2
    assert [one["next"] for one in found] == [torch.rand(1).item()] * 2
    whole_bytes = sum(one.nbytes for one in model.parameters())
    assert sum(one["bytes"] for one in found) == whole_bytes
    assert max(one["bytes"] for one in found) < 0.65 * whole_bytes


class Unequal(Heads):
    """Does not run the model on the first rank."""

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, float]]:
        if model.training and self.rank == 0:
            return {"squares": (torch.zeros((), dtype=torch.float64, requires_grad=True), float(len(batch["x"])))}
        return super().loss(model, batch)


def differ(group: ProcessGroup, folder: Path) -> None:
    training("sharded", PLOT, folder, group, Unequal(PLOT, group.rank)).to_end()


def test_ranks_that_run_other_passes_fail_and_do_not_hang(tmp_path: Path) -> None:
    started = crew(tmp_path / "crew", 2, differ, tmp_path / "run")
    assert all(started.wait())
    assert "ranks run different blocks" in started.err(0) + started.err(1)


# Half precision

WIDTH, BLOCKS, WORDS, LENGTH, ITEMS = 64, 4, 11, 5, 13
HALF_BYTES = 2


class Attention(nn.Module):
    """A block that has all that autocast treats apart: maps, norms of two kinds, a softmax, places, a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.three = nn.Linear(WIDTH, 3 * WIDTH)
        self.groups = nn.GroupNorm(2, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x_NLD: Tensor, places_NL: Tensor) -> Tensor:
        q, k, v = self.three(self.norm(x_NLD)).chunk(3, dim=-1)
        far_NLL = (places_NL[:, :, None] - places_NL[:, None, :]).abs()
        weights_NLL = (q @ k.transpose(1, 2) / WIDTH**0.5 - far_NLL / 1000).softmax(-1)
        mixed = self.groups((weights_NLL @ v).transpose(1, 2)).transpose(1, 2)
        return x_NLD + self.out(mixed) * self.scale


class Words(nn.Module):
    """A small transformer; its places are numbers that half precision cannot tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words_NL: Tensor, places_NL: Tensor) -> Tensor:
        x_NLD = self.words(words_NL)
        for block in self.blocks:
            x_NLD = block(x_NLD, places_NL)
        return self.head(self.norm(x_NLD))


class Guess:
    """Which word is where."""

    def model(self) -> nn.Module:
        return Words()

    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"nodes": item["nodes"]}

    def collate(self, items: Sequence[Any], rng: Any) -> Any:
        numbers = torch.tensor([int(item.id[4:]) for item in items])
        drawn = torch.Generator().manual_seed(1)
        words = torch.randint(WORDS, (ITEMS, LENGTH), generator=drawn)[numbers]
        places = (1000 + torch.rand(ITEMS, LENGTH, generator=drawn))[numbers]
        return {"words": words, "places": places, "ids": tuple(item.id for item in items)}

    def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> Mapping[str, tuple[Tensor, Tensor | float]]:
        said = model(batch["words"], batch["places"]).flatten(0, 1)
        total = nn.functional.cross_entropy(said, batch["words"].flatten(), reduction="sum")
        return {"guess": (total, float(batch["words"].numel()))}


def half(group: ProcessGroup, folder: Path, plot: Plot) -> dict[str, list[float]]:
    lost: dict[str, list[float]] = outcome("sharded", plot, folder, group, task=Guess())["lost"]
    return lost


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_that_of_a_whole_model(tmp_path: Path, precision: str) -> None:
    train = {**GRADIENT, "effective_batch": ITEMS, "precision": precision}
    plot = Plot(train=train, items=ITEMS, budget=70)
    first, second = crew(tmp_path / "crew", 2, half, tmp_path / "run", plot).results()
    assert first == second
    wanted = outcome("local", plot, tmp_path / "local", task=Guess())["lost"]
    for name in wanted:
        apart = torch.tensor(first[name]) - torch.tensor(wanted[name])
        assert float(apart.norm()) <= 0.03 * float(torch.tensor(wanted[name]).norm()) + 1e-5, name


def kept(group: ProcessGroup) -> dict[str, int]:
    """Return how many bytes a forward keeps for its backward, and how many the weights have in half precision."""
    torch.manual_seed(7)
    step = ShardedStep(Guess(), StepSettings(precision="bf16"), group)
    words = torch.randint(WORDS, (1, LENGTH))
    batch = {"words": words, "places": 1000.0 + words}
    step.accumulate(batch)
    step.release()
    with device.LimitedDevice() as limited:
        terms = step.terms_of(batch)
        live = limited.live_bytes
        del terms
    return {"live": live, "weights": HALF_BYTES * sum(one.numel() for one in step.model.parameters())}


def test_no_copy_of_all_weights_waits_for_backward(tmp_path: Path) -> None:
    device.need()
    device.library()
    found = crew(tmp_path / "crew", 2, kept).results()[0]
    assert found["live"] < 0.5 * found["weights"]
