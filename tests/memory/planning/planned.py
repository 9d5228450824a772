"""Epochs really trained under a plan, on a device that refuses the first byte above its limit."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._pytree import tree_map_only

from pipeline.memory.footprint import CannotRun, MemoryChoice, Oracle, live_peak_bytes, margin_of
from pipeline.memory.planning.memory_plan import DataSizes, MemoryPlan, Micros, PlanRequest
from pipeline.memory.planning.planner import plan_memory
from pipeline.planning.training_work import Work, cutter, data_of, host_card, least_of, target_of
from pipeline.protocol import ITEMS
from pipeline.training.prepared import COST, LIKENESS, LOOSER, likeness, sampler_settings
from pipeline.training.sampling import Sampler
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.testkit.limited.device import HostCarrier, LimitedDevice, forget_failed_backward
from tests.zoo import Member

BATCH = 16
Integers = NDArray[np.int64]
Sizes = dict[str, Integers]


class OnDevice(Step):
    """A step whose batches come from the host, as they do to a GPU."""

    def moved(self, batch: Any) -> Any:
        return tree_map_only(torch.Tensor, torch.clone, batch)


class Fetched(Sequence[Any]):
    """The batches of a step, each made when its turn comes, in memory that does not count."""

    def __init__(self, member: Member, task: Any, sizes: Sizes, micros: Sequence[Integers], device: Any):
        self._member, self._task, self._sizes, self._micros, self._device = member, task, sizes, micros, device

    def __len__(self) -> int:
        return len(self._micros)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return Fetched(self._member, self._task, self._sizes, self._micros[place], self._device)
        rng = np.random.default_rng(place)
        items = [{name: int(values[item]) for name, values in self._sizes.items()} for item in self._micros[place]]
        with self._device.host():
            return self._task.collate(items, rng)


@dataclass(frozen=True)
class Trained:
    ooms: int
    peak_bytes: int
    steps: int
    micros: int


def work_of(member: Member) -> Work:
    settings = {name: value for name, value in member.settings.items() if name != "foreach"}
    way = "foreach" if member.settings.get("foreach") else "loop"
    return Work(member.build(), StepSettings(way=way, **settings), device="cpu")


def request_for(member: Member, blocks: int, **given: Any) -> PlanRequest:
    """Return what is asked of the planner: checkpointing where the member has it, else as it is needed."""
    checkpointing = member.settings.get("checkpointing")
    return PlanRequest(**{"batch": BATCH, "blocks": blocks, "checkpointing": checkpointing, "offload": None, **given})


@dataclass(frozen=True)
class Ground:
    """A member, its data set, and who answers for it."""

    member: Member
    work: Work
    sizes: Sizes
    oracle: Oracle

    @classmethod
    def of(cls, member: Member, items: int, seed: int = 0, kept: Path | None = None) -> Ground:
        """Make a data set; with a folder for traces, they are held to small real steps as a user's are."""
        made = {name: np.asarray(values) for name, values in member.items(items, np.random.default_rng(seed)).items()}
        work = work_of(member)
        oracle = work.oracle(least_of(made), target_of(None), padded=member.padded, kept=kept)
        return cls(member, work, made, oracle)

    def planned(self, limit: int, request: PlanRequest | None = None) -> MemoryPlan:
        request = request or request_for(self.member, self.work.blocks)
        data = data_of(self.sizes, request, padded=self.member.padded)
        return plan_memory(self.oracle, data, request, [host_card(limit)])

    def choice(self, **changes: Any) -> MemoryChoice:
        return MemoryChoice(checkpointing=self.member.settings.get("checkpointing", 0), **changes)

    def live(self, choice: MemoryChoice, micros: Micros, *, accumulate: bool) -> int:
        """Return the highest peak that is predicted of micro-batches of which none is larger in all sizes."""
        standing = self.oracle.standing(choice)
        rows = largest(micros.sizes_MS)
        asked = [self.oracle.micro(choice, dict(zip(micros.names, row, strict=True))) for row in rows.tolist()]
        return max(live_peak_bytes(standing, micro, accumulate=accumulate) for micro in asked)

    def runs(self, choice: MemoryChoice) -> bool:
        try:
            self.oracle.standing(choice)
        except CannotRun:
            return False
        return True

    def alone(self, choice: MemoryChoice) -> int:
        """Return what the item that takes most takes alone, one of several micro-batches."""
        columns = [np.ones(self.items, np.int64), *self.sizes.values()]
        micros = Micros((ITEMS, *self.sizes), np.stack(columns, axis=1), columns[0], columns[0])
        return self.live(choice, micros, accumulate=True)

    def uncut(self, choice: MemoryChoice) -> int:
        """Return what steps take that no budget cuts: padded items are cut where they differ too much all the same."""
        padded = self.member.padded
        cut = cutter(BATCH, padding=LOOSER[-1] if padded else None)
        cost_N = np.prod([*self.sizes.values()], axis=0) if padded else np.ones(self.items, np.int64)
        micros = cut(DataSizes(self.sizes, cut), cost_N, int(cost_N.max()) * BATCH, 1)
        return self.live(choice, micros, accumulate=padded)

    @property
    def items(self) -> int:
        return len(next(iter(self.sizes.values())))


def largest(rows_MS: Integers) -> Integers:
    """Return the rows of which no other is as large in all sizes."""
    rows_US = np.unique(rows_MS, axis=0)
    over_UU = (rows_US[None] >= rows_US[:, None]).all(axis=2)
    return np.asarray(rows_US[over_UU.sum(axis=1) == 1])


def sampler_under(made: MemoryPlan, sizes: Sizes, budget: int | None = None, ranks: int = 1) -> Sampler:
    """Return the sampler of training under a plan, or as it were with another budget."""
    budget = budget or made.budget_bytes
    settings = sampler_settings(BATCH, budget, padding=made.padding, micro_batch=made.request.micro_batch)
    return Sampler({COST: made.cost(sizes), LIKENESS: likeness(sizes)}, settings, ranks=ranks)


def epoch(ground: Ground, choice: MemoryChoice, sampler: Sampler, limit: int) -> Trained:
    """Train one epoch, from the making of the model on; count the steps that ran out of memory."""
    ooms, micros = 0, 0
    torch.manual_seed(0)
    gc.collect()
    with LimitedDevice(limit) as device, generators_on_host(device):
        changes = {"precision": choice.precision, "checkpointing": choice.checkpointing, "offload": choice.offload}
        step = OnDevice(ground.work.task, replace(ground.work.settings, **changes))
        step.carrier = HostCarrier(device)
        peak = device.peak_bytes
        for number in range(sampler.steps):
            cuts = [micro.items for micro in sampler.micros(0, number)]
            micros += len(cuts)
            device.reset_peak()
            try:
                step.run(Fetched(ground.member, step.task, ground.sizes, cuts, device))
            except torch.OutOfMemoryError:
                ooms += 1
                step.release()
                forget_failed_backward()
            peak = max(peak, device.peak_bytes)
        del step
    return Trained(ooms, peak, sampler.steps, micros)


@contextmanager
def generators_on_host(device: LimitedDevice) -> Iterator[None]:
    """Count no states of random generators: a checkpointed block keeps 5 kB of them, on the host beside a card, too."""
    state = torch.get_rng_state

    def kept() -> torch.Tensor:
        with device.host():
            return state()

    with mock.patch.object(torch, "get_rng_state", kept):
        yield


def limits(ground: Ground, count: int) -> list[int]:
    """Return limits to plan for, the first just above what the largest item takes with every remedy.

    The others go in equal ratios from just above what it takes without remedies to what uncut steps take.
    """
    plain = ground.choice()
    frugal = [MemoryChoice(checkpointing=plain.checkpointing or many, offload=True) for many in (0, ground.work.blocks)]
    least = min(ground.alone(choice) for choice in (plain, *frugal) if ground.runs(choice))
    low, high = ground.alone(plain), ground.uncut(plain)
    room = margin_of(ground.oracle.standing(plain).origin, caching=False).factor + 0.01
    spread = np.geomspace(low, max(high, low), count - 1).tolist()
    return [int(room * bytes_) for bytes_ in (least, *spread)]
