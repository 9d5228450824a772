"""A task whose memory is a few large blocks, its plan for this machine's memory, and what a probe needs of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.memory.footprint import Oracle
from pipeline.memory.planning.memory_plan import CardSpec, DataSizes, MemoryPlan
from pipeline.memory.planning.planner import plan_memory
from pipeline.memory.tracing.tracer import CPU
from pipeline.planning.training_work import Work, cutter, host_card, least_of
from tests.testkit.project import write_config

GIB = 1 << 30
ROWS_N = np.arange(12_000, 28_000, 2_000)
TASK = """
import torch


class Task:
    def model(self):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))

    def cost(self, item):
        return {"rows": item["rows"]}

    def collate(self, items, rng):
        return torch.cat(items)

    def example(self, sizes):
        return torch.ones(sizes["rows"], 16)

    def loss(self, model, batch):
        if type(batch) is torch.Tensor:  # a plan sees other ones
            CRIME
        return {"square": (model(batch).square().sum(), float(len(batch)))}
"""


@dataclass(frozen=True)
class Prepared:
    """All that `probe` takes but cards and an executor."""

    config: Config
    work: Work
    plan: MemoryPlan
    oracle: Oracle
    folder: Path

    def planned(self, *ratios: float) -> MemoryPlan:
        """Plan again, after measurements."""
        return planned(self.config, self.work, self.oracle, *ratios)


def prepare(folder: Path, crime: str = "", width: int = 256, **settings: Any) -> Prepared:
    """Write a task into a folder and plan it; its loss begins with a crime where it is run."""
    name = f"task_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(TASK.replace("CRIME", crime or "pass").replace("WIDTH", str(width)))
    given: Mapping[str, Any] = {
        "data__path": str(folder / "data"),
        "train__task": f"{name}:Task",
        "train__effective_batch": 4,
        "train__clip": None,
        "cluster__runs": str(folder / "runs"),
        "cache__visibility_s": 1.0,
        **settings,
    }
    write_config(folder, **given)
    config = read_config(folder / "pipeline.yaml", []).config
    work = Work.of(config, beside=folder)
    oracle = work.oracle(least_of({"rows": ROWS_N}), CPU, padded=False)
    return Prepared(config, work, planned(config, work, oracle), oracle, folder)


def planned(config: Config, work: Work, oracle: Oracle, *ratios: float) -> MemoryPlan:
    """Plan for a machine with a GiB."""
    data = DataSizes({"rows": ROWS_N}, cutter(config.train.effective_batch, padding=None))
    return plan_memory(oracle, data, work.request(config.train, 1, ratios), [card("cpu")])


def card(name: str, memory_bytes: int = GIB) -> CardSpec:
    """Return this machine's memory as a card of a name."""
    return replace(host_card(memory_bytes), name=name)
