"""What is measured on the card or its stand-in: steps of one size, and epochs as planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.gpu_memory_parts.cards import opened
from benchmarks.gpu_memory_parts.predicting import MICROS, STEPS, member_of, work_for
from pipeline.memory.footprint import MemoryChoice

EPOCH_S = 30.0  # may take


def compared(case: Mapping[str, Any], ready: Callable[[], None]) -> dict[str, Any]:
    """Run steps of one size, as a probe does, and measure them."""
    import torch

    torch.manual_seed(0)
    work, choice = work_for(case), MemoryChoice(**case["choice"])
    batch = work.example(case["sizes"])
    ready()
    began, died = time.perf_counter(), ""
    with opened(case) as card:
        try:
            step = card.step(work, choice)
            for _ in range(STEPS):
                start = time.perf_counter()
                step.run([batch] * MICROS)
                card.wait()
        except torch.OutOfMemoryError as error:
            died = str(error).partition("\n")[0]
        found = card.read()
        step = None
    last_s = time.perf_counter() - start
    return {**found, "step_s": round(last_s, 3), "wall_s": round(time.perf_counter() - began, 2), "died": died}


class Epoch(Sequence[Any]):
    """The batches of a step, each made when its turn comes."""

    def __init__(self, member: Any, task: Any, sizes: Mapping[str, Any], micros: Sequence[Any]) -> None:
        self._member, self._task, self._sizes, self._micros = member, task, sizes, micros

    def __len__(self) -> int:
        return len(self._micros)

    def __getitem__(self, place: Any) -> Any:
        items = [{name: int(values[item]) for name, values in self._sizes.items()} for item in self._micros[place]]
        return self._task.collate(items, np.random.default_rng(place))


def trained(case: Mapping[str, Any], ready: Callable[[], None]) -> dict[str, Any]:
    """Train an epoch as planned; count the steps that ran out of memory."""
    import torch

    from pipeline.training.prepared import COST, LIKENESS, PADDING, likeness, sampler_settings
    from pipeline.training.sampling.sampler import Sampler

    torch.manual_seed(0)
    work, member = work_for(case), member_of(case)
    sizes = member.items(case["items"], np.random.default_rng(0))
    settings = sampler_settings(case["batch"], case["budget"], padding=PADDING if member.padded else None)
    costs = {COST: np.array(case["cost"], np.int64), LIKENESS: likeness(sizes)}
    sampler = Sampler(costs, settings)
    steps = [[micro.items for micro in sampler.micros(0, step)] for step in range(sampler.steps)]
    ready()
    began, ooms, done = time.perf_counter(), 0, 0
    with opened(case) as card:
        step = card.step(work, MemoryChoice(**case["choice"]))
        for cuts in steps:
            if time.perf_counter() - began > EPOCH_S:
                break
            ooms += not survived(step, Epoch(member, step.task, sizes, cuts))
            done += 1
        found = card.read()
        step = None
    found.pop("outside_bytes")  # other cases are on the card meanwhile
    micros = sum(len(cuts) for cuts in steps[:done])
    wall_s = round(time.perf_counter() - began, 2)
    return {**found, "ooms": ooms, "steps": done, "steps_planned": len(steps), "micros": micros, "wall_s": wall_s}


def survived(step: Any, batches: Sequence[Any]) -> bool:
    """Make a step; tell whether it had enough memory."""
    import torch

    try:
        step.run(batches)
    except torch.OutOfMemoryError:
        is_done = False
    else:
        return True
    step.release()  # here, where no traceback holds tensors any more
    return is_done
