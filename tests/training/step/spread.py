"""Small models that are spread over ranks, and the same trained by one process, to compare with."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.memory.runtime.governor import Governor
from pipeline.memory.runtime.meters import Habits, Upkeep
from pipeline.training.checkpoints.checkpoint_folder import CheckpointFolder, State
from pipeline.training.checkpoints.sharded_checkpoint import Assembled, assembled, divided
from pipeline.training.checkpoints.training_state import by_name, pack, unpack
from pipeline.training.items.batch import BatchOrigin
from pipeline.training.ranks.process_group import ProcessGroup
from pipeline.training.ranks.rank_protocol import Ranks
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.fsdp import ShardedStep
from pipeline.training.step.local_sharded import ShardedStepper
from pipeline.training.step.micro_batches import RankShare
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step

# Ranks are forked from a process that has imported all this: what FSDP needs takes seconds.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    ["tests.training.ranks.crews", "tests.training.step.test_sharded", "torch._dynamo"]
)

WIDTH, ITEMS = 6, 13
NAMES = tuple(f"item-{number}" for number in range(ITEMS))


class Net(nn.Module):
    """Repeated blocks, one of them tied to what comes after, a head that is hardly ever used, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH + 1), nn.Tanh(), nn.Linear(WIDTH + 1, WIDTH))
                                    for _ in range(3))  # fmt: skip
        self.tied = nn.Linear(WIDTH + 1, WIDTH, bias=False)
        self.tied.weight = self.blocks[1][2].weight  # type: ignore[index]
        self.head = nn.Linear(WIDTH, 1)
        self.other = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.full((3,), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor, *, both: bool) -> tuple[Tensor, Tensor | None]:
        x = x * self.get_buffer("scale").mean()
        for block in self.blocks:
            x = x + block(x)
        x = self.tied(nn.functional.pad(x, (0, 1)))
        return self.head(x).squeeze(-1), self.other(x).squeeze(-1) if both else None


class OneTerm:
    """A loss that is a mean over items of unequal weight; the other head is used by none."""

    def model(self) -> nn.Module:
        return Net().double()

    def cost(self, item: Mapping[str, Any]) -> Mapping[str, Any]:
        return item

    def collate(self, items: Sequence[Any], rng: Any) -> Any:
        numbers = torch.tensor([one["number"] for one in items])
        drawn = torch.randn(ITEMS, WIDTH + 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))[numbers]
        return {"x": drawn[:, :WIDTH], "y": drawn[:, WIDTH], "w": drawn[:, -1].abs() + 0.1, "number": numbers}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, tuple[Tensor, Tensor | float]]:
        said, _ = model(batch["x"], both=False)
        return {"squared": (((said - batch["y"]).square() * batch["w"]).sum(), batch["w"].sum())}


class TwoTerms(OneTerm):
    """Two terms; the second, with the other head, is of a few items alone."""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, tuple[Tensor, Tensor | float]]:
        known = batch["number"] % 5 == 0
        said, other = model(batch["x"], both=bool(known.any()))
        extra = said.sum() * 0.0 if other is None else ((other - 1).square() * known).sum()
        return {"squared": ((said - batch["y"]).square().sum(), float(len(said))), "known": (extra, known.sum())}


class Told(TwoTerms):
    """The same, and it tells the weights beforehand."""

    def weights(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor | float]:
        return {"squared": float(len(batch["number"])), "known": (batch["number"] % 5 == 0).sum()}


TASKS = {"one": OneTerm, "two": TwoTerms, "told": Told}


ANY: Any = OneTerm()  # all of them collate alike


@dataclass
class Given:
    """A micro-batch, as far as a step looks at it."""

    numbers: tuple[int, ...]
    origin: BatchOrigin
    rejected: tuple[Any, ...] = ()
    weights: Any = None
    task: Any = ANY  # that collates

    def part(self, start: int, stop: int) -> Any:
        """Return what the task makes of some of the items."""
        return self.task.collate([{"number": number} for number in self.numbers[start:stop]], None)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(NAMES[number] for number in self.numbers)


def share_of(micros: Sequence[Sequence[int]], task: Any = ANY) -> RankShare:
    """Return a rank's share of a step, as a task collates it: here they all do alike."""
    given = [tuple(one) for one in micros] or [()]
    batches: list[Any] = [
        Given(numbers, BatchOrigin(0, 0, index, len(given), 0), task=task) for index, numbers in enumerate(given)
    ]
    return RankShare(iter(batches), lambda numbers, origin: Given(tuple(numbers), origin, task=task), hold=9)  # type: ignore[arg-type,return-value]


def stepper_of(step: ShardedStep, *, budget: int = 1 << 30) -> ShardedStepper:
    """Return who runs a share; every item costs 1."""
    return ShardedStepper(step, Governor(budget=budget), np.ones(ITEMS, np.int64), Upkeep(Habits(), "cpu"))


def train(stepper: ShardedStepper, shares: Sequence[Sequence[Sequence[int]]]) -> list[float]:
    """Make a step of each of this rank's shares; return the norms of the gradients."""
    norms = []
    for share in shares:
        accumulate(stepper, share)
        norms.append(float(stepper.step.clip()))
        stepper.step.apply()
    return norms


def train_alone(step: Step, steps: int) -> list[float]:
    """Make as many steps of all items as one batch."""
    norms = []
    batch = step.task.collate([{"number": number} for number in range(ITEMS)], None)  # type: ignore[arg-type]
    for _ in range(steps):
        step.accumulate(batch)
        if len(step.totals) == 1:
            step.settle(float(batch["w"].sum()))
        norms.append(float(step.clip()))
        step.apply()
    return norms


def values(step: Step) -> list[float]:
    """Return all parameters and averages."""
    return [one for tensor in (*step.trained, *step.averages) for one in whole(tensor).flatten().tolist()]


def step_of(group: ProcessGroup, task: str, settings: Mapping[str, Any]) -> ShardedStep:
    """Return a step of a model that is spread, the same as that of `alone`."""
    torch.manual_seed(7)
    return ShardedStep(TASKS[task](), StepSettings(**settings), group)


def alone(task: str, settings: Mapping[str, Any]) -> Step:
    """Return the step of one process."""
    torch.manual_seed(7)
    return make_step(TASKS[task](), StepSettings(**settings))


def accumulate(stepper: ShardedStepper, micros: Sequence[Sequence[int]]) -> None:
    """Do what the loop does until gradients are whole."""
    group, share = stepper.ranks, share_of(micros, stepper.step.task)
    weights = None
    if stepper.needs_weights:
        told = group.exchange(stepper.weights(share))
        names = {name: None for one in told for name in one}
        stepper.learn_terms(len(names))
        if stepper.needs_weights:
            weights = {name: sum(one.get(name, 0.0) for one in told) for name in names}
    local = stepper.run(share, weights)
    terms = [one["terms"] for one in group.exchange({"terms": local.terms})]
    names = {name: None for one in terms for name in one}
    if weights is None and len(names) == 1:
        (name,) = names
        stepper.step.settle(sum(one[name][1] for one in terms if name in one))


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor; all ranks ask."""
    one: Any = tensor.detach()
    full: Tensor = one.full_tensor() if hasattr(one, "full_tensor") else one
    return full


def gradients(step: Step) -> dict[str, list[float] | None]:
    """Return all gradients."""
    named = step.model.named_parameters()
    return {name: None if one.grad is None else whole(one.grad).flatten().tolist() for name, one in named}


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what tells whether tensors have the same bits."""
    found = {name: whole(one).contiguous() for name, one in tensors.items()}
    return {
        name: hashlib.sha256(f"{one.dtype}{list(one.shape)}".encode() + one.numpy().tobytes()).hexdigest()
        for name, one in found.items()
    }


def everything(step: Step) -> dict[str, dict[str, str]]:
    """Return all that training changes."""
    state = {
        f"{place}.{what}": value
        for place, parameter in enumerate(step.trained)
        for what, value in step.optimizer.state.get(parameter, {}).items()
    }
    return {
        "model": digests(step.model.state_dict()),
        "averages": digests({str(place): one for place, one in enumerate(step.averages)}),
        "optimizer": digests(state),
    }


def save(checkpoints: CheckpointFolder, step: Step, ranks: Ranks, done: int) -> None:
    """Save a checkpoint by all ranks, as `Keeper` does."""
    packed = pack(step.model, step.optimizer, averages=_averages(step), scaler=step.scaler)
    whole, parts, told = divided(packed.tensors)
    own = {"rng": torch.full((3,), ranks.rank, dtype=torch.uint8)} | parts
    state = State(whole, packed.data, own, {"governor": ranks.rank} | told)
    receipts = ranks.exchange(checkpoints.write(state, done, rank=ranks.rank))
    if ranks.rank == 0:
        checkpoints.publish(receipts, packed.data, done)
    ranks.exchange({})


def take_up(checkpoints: CheckpointFolder, step: Step) -> Assembled:
    """Load the newest checkpoint, as `Keeper` does."""
    loaded = checkpoints.newest()
    assert loaded is not None
    found = assembled(loaded)
    unpack(found, found.data, step.model, step.optimizer, averages=_averages(step), scaler=step.scaler)
    return found


def _averages(step: Step) -> dict[str, Tensor] | None:
    return by_name(step.model, step.trained, step.averages) if step.averages else None
