"""The plan of a sharded model is of the very step that trains it: a trace plays one rank that is made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.device.kinds import CPU as ON_CPU
from pipeline.errors import ConfigError, PlanInfeasible
from pipeline.memory.footprint import Category, MemoryChoice, Provenance, Unmeasurable, live_peak_bytes
from pipeline.memory.planning.budget_search import ChoiceMemory
from pipeline.memory.planning.memory_plan import PlanRequest
from pipeline.memory.planning.planner import plan_memory
from pipeline.memory.tracing.tracer import Tracer
from pipeline.planning.training_work import Work, data_of, host_card, target_of
from pipeline.protocol import ITEMS
from pipeline.training.step.fsdp import ShardedStep, imagined
from pipeline.training.step.optimizers import StepSettings
from tests.memory.tracing.traced import Small, of
from tests.testkit.limited import device

RANKS, WIDTH, SIZES = 4, 256, {ITEMS: 64}
AMPERE = (8, 0)


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    device.need()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.maps = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        return x_ND + self.maps(self.norm(x_ND))


def blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)))


def work_of(make: Any = blocks, **settings: Any) -> Work:
    return Work(Small(make, width=WIDTH), StepSettings(way="foreach", clip=1.0, ema=0.9, **settings), ON_CPU)  # type: ignore[arg-type]


def traced(work: Work) -> Tracer:
    return Tracer(work.build, work.model, work.example, SIZES)


def true_peak(work: Work, choice: MemoryChoice, times: int) -> int:
    """Return the most that is allocated in the second step and later, of so many micro-batches."""
    with imagined(RANKS) as ranks, device.LimitedDevice() as limited:
        step = ShardedStep(work.task, work.under(choice), ranks)
        step.carrier = device.HostCarrier(limited)
        for turn in range(3):
            for _ in range(times):
                step.accumulate(work.example(SIZES))
            step.update()
            if turn == 0:
                limited.reset_peak()
        return limited.peak_bytes


@pytest.mark.parametrize(
    "choice",
    [
        MemoryChoice(shards=RANKS),
        MemoryChoice("fp16", checkpointing=6, shards=RANKS),
        MemoryChoice(offload=True, shards=RANKS),
        MemoryChoice("bf16", checkpointing=6, offload=True, shards=RANKS),
    ],
)
def test_the_peak_of_a_sharded_step_is_that_of_a_real_one(choice: MemoryChoice) -> None:
    work = work_of()
    tracer, within = traced(work), 0.005 if choice.precision == "fp32" else 0.015  # oneDNN packs: not charged
    standing, micro = tracer.standing(choice), tracer.micro(choice, SIZES)
    for times in (1, 2):
        truth = true_peak(work, choice, times)
        assert live_peak_bytes(standing, micro, accumulate=times > 1) == pytest.approx(truth, rel=within)
    whole = sum(one.nbytes for one in blocks().parameters())
    assert of(standing.parts, Category.PARAMETERS) == {"": whole // RANKS}
    assert micro.first.left_bytes == whole // RANKS
    assert not torch.distributed.is_initialized()


def asked(work: Work, choice: MemoryChoice, kept: Path | None = None) -> tuple[Any, Any, tuple[str, ...]]:
    """Return what a planner hears of a choice: standing, a micro-batch, the notes of both."""
    memory = ChoiceMemory(work.oracle(SIZES, target_of(None), padded=False, kept=kept), choice, (ITEMS,))
    return memory.standing, memory.micro((64,)), memory.notes


def test_a_plan_takes_the_trace_and_says_so(tmp_path: Path) -> None:
    work, choice = work_of(), MemoryChoice("bf16", shards=RANKS)
    standing, micro, _ = asked(work, choice, tmp_path)
    assert (standing.origin, micro.origin) == (Provenance.TRACED, Provenance.TRACED)
    assert live_peak_bytes(standing, micro, accumulate=False) == pytest.approx(true_peak(work, choice, 1), rel=0.01)
    answers = len(list(tmp_path.iterdir()))
    others = [MemoryChoice(shards=RANKS), MemoryChoice("bf16", shards=2)]  # other precision, other ranks: asked anew
    peaks = {asked(work, other, tmp_path)[0].bytes for other in others}
    assert len(list(tmp_path.iterdir())) > answers
    assert peaks == {standing.bytes, asked(work, MemoryChoice(shards=2), tmp_path)[0].bytes}


def test_a_step_that_looks_at_a_gpu_is_traced_on_a_machine_without_one() -> None:
    choice = MemoryChoice("bf16", shards=RANKS)
    tracer = Tracer(work_of().build, blocks, work_of().example, SIZES, target_of(AMPERE))
    assert tracer.micro(choice, SIZES).again.peak_bytes > 0
    assert tracer.standing(choice).origin is Provenance.TRACED


class Scaled(nn.Module):
    """A model with a parameter that cannot be spread over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        return self.map(x_ND) * self.scale


def test_a_model_that_cannot_be_sharded_is_planned_without_and_says_why() -> None:
    choice, work = MemoryChoice(shards=RANKS), work_of(Scaled)
    with pytest.raises(ConfigError, match="cannot be sharded"):
        asked(work, choice)
    request, sizes = PlanRequest(batch=8, ranks=RANKS, shards=None), {"length": np.arange(1, 17)}
    data = data_of(sizes, request, padded=False)
    oracle, card = work.oracle(SIZES, target_of(None), padded=False), host_card(1 << 30)
    assert plan_memory(oracle, data, request, [card]).choice.shards == 1
    with pytest.raises(PlanInfeasible, match="parameter scale"):
        plan_memory(oracle, data, replace(request, shards=RANKS), [card])


def test_a_model_that_cannot_be_traced_is_measured_in_shards() -> None:
    class Branching(nn.Linear):
        def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
            y_ND = super().forward(x_ND)
            return y_ND * float(y_ND.max())

    work, choice = work_of(lambda: Branching(WIDTH, WIDTH)), MemoryChoice(shards=RANKS)
    standing, _, _ = asked(work, choice)
    whole, _, _ = asked(work, MemoryChoice())
    assert standing.origin is Provenance.EXTRAPOLATED
    assert standing.bytes == pytest.approx(whole.bytes / RANKS, rel=0.1)


def test_within_a_group_of_real_ranks_nothing_is_imagined() -> None:
    with imagined(2), pytest.raises(Unmeasurable, match="within a process group"), imagined(2):
        pass
