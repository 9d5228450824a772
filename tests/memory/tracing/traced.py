"""Small tasks to trace, and the truth about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.memory.estimating.traced import TracedOracle, compared
from pipeline.memory.footprint import Category, MemoryChoice, MemoryPart, Tape
from pipeline.memory.tracing.tracer import CPU, Target, Tracer, TraceSession
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.testkit.limited.device import HostCarrier, LimitedDevice

SIZES = {"items": 32}
WIDTH = 64
LARGE = {"items": 4096}


@dataclass
class Small:
    """A task around any module that takes numbers of some width; the loss is made of parts of what it returns."""

    make: Callable[[], nn.Module]
    width: int = WIDTH
    terms: Callable[[nn.Module, Tensor], Mapping[str, Any]] | None = None

    def model(self) -> nn.Module:
        return self.make()

    def example(self, sizes: Mapping[str, int]) -> Tensor:
        return torch.randn(sizes["items"], self.width)

    def loss(self, model: nn.Module, batch: Tensor) -> Mapping[str, Any]:
        if self.terms is not None:
            return self.terms(model, batch)
        return {"square": (model(batch).square().sum(), float(len(batch)))}


def layers(*, depth: int = 3, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))


def tracer(task: Any, target: Target = CPU, least: Mapping[str, int] = SIZES, **settings: Any) -> Tracer:
    """Return what traces a task; a choice decides the rest."""

    def build(choice: MemoryChoice, watch: Any, model: nn.Module | None) -> Step:
        return make_step(task, chosen(choice, settings), model=model, watch=watch)

    return Tracer(build, task.model, task.example, least, target)


def confirmed(
    task: Any, least: Mapping[str, int] = SIZES, kept: Any = None, real: Any = None, **settings: Any
) -> TracedOracle:
    """Return an oracle that compares the traces of a task with real steps."""

    def build(choice, watch, model):
        return make_step(task, chosen(choice, settings), model=model, watch=watch)

    traces = Tracer(build, task.model, task.example, least)
    steps = partial(TraceSession, partial(build, MemoryChoice()), task.example, least)
    compare = partial(compared, on_cpu=lambda: traces, real=real or steps, least=least, on_card=False)
    return TracedOracle(lambda: traces, compare, kept)


def chosen(choice: MemoryChoice, settings: Mapping[str, Any]) -> StepSettings:
    own = {"precision": choice.precision, "offload": choice.offload, "checkpointing": choice.checkpointing}
    return StepSettings(**{"way": "foreach", **own, **settings})


def true_peak(
    task: Any,
    sizes: Mapping[str, int],
    times: int = 1,
    choice: MemoryChoice | None = None,
    turns: int = 3,
    **settings: Any,
) -> int:
    """Return the most that is allocated in steps of so many micro-batches: of the only one, or of all but the first."""
    with LimitedDevice() as device:
        step = make_step(task, chosen(choice or MemoryChoice(), settings))
        step.carrier = HostCarrier(device)
        device.reset_peak()
        for turn in range(turns):
            for _ in range(times):
                step.accumulate(task.example(sizes))
            step.update()
            if turn == 0 and turns > 1:
                device.reset_peak()
        return device.peak_bytes


def play(live: dict[int, int], tape: Tape) -> int:
    """Play a tape over what is live of the blocks that all tapes know; return the most that was live."""
    own: dict[int, int] = {}
    now = most = sum(live.values())
    for number, size in zip(tape.block_E.tolist(), tape.bytes_E.tolist(), strict=True):
        blocks = own if number >= 0 else live
        if size == 0:
            continue  # what is empty is no block
        if size > 0:
            assert number not in blocks, "allocated twice"
            blocks[number] = size
        else:
            assert blocks.pop(number) == -size, "released with another size"
        now += size
        most = max(most, now)
    assert not own, "left in use by its tape"
    return most


def of(parts: tuple[MemoryPart, ...], category: Category) -> dict[str, int]:
    """Return the bytes of a category, by name."""
    return {part.name: part.bytes for part in parts if part.category is category}
