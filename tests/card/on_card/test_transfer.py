"""What is moved to a card arrives there whole, of whatever structure, and its memory is not filled anew before."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeline.device.accelerator import RngState
from pipeline.memory.runtime.meters import Maintenance, MaintenanceSettings
from pipeline.training.step.step import Step
from tests.card import card
from tests.training.loop.loops import Plot, Run
from tests.training.step.test_step import OneTerm, StepSettings


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Inner:
    x: Tensor
    pairs: tuple[Pair, ...] = ()
    name: str = "inner"


@dataclass(frozen=True, slots=True)
class Slotted:
    y: Tensor


@dataclass
class Outer:
    inner: Inner
    slotted: Slotted
    more: dict[str, list[Inner]]
    kind: type = Inner
    counted: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.counted += 1
        self.aside = self.inner.x + 1

    @cached_property
    def doubled(self) -> Tensor:
        return self.inner.x * 2


@dataclass
class Own:
    x: Tensor
    said: tuple[Any, ...] = ()

    def to(self, *said: Any) -> Own:
        return Own(self.x.to(*said), said)


def step_on(device: str) -> Step:
    return Step(OneTerm(), StepSettings(), device=device, model=torch.nn.Linear(2, 2))


def test_a_batch_that_is_a_dataclass_is_moved_with_all_that_it_holds() -> None:
    inner = Inner(torch.ones(3), (Pair(torch.zeros(2), torch.ones(2)),))
    batch = Outer(inner, Slotted(torch.ones(1)), {"several": [inner, inner]})
    assert batch.doubled.device.type == "cpu"
    there = step_on(card.NAME).moved(batch)
    found = [
        there.inner.x,
        *there.inner.pairs[0],
        there.slotted.y,
        there.more["several"][1].x,
        there.aside,
        there.doubled,
    ]
    assert {tensor.device.type for tensor in found} == {card.NAME}
    assert (there.doubled.cpu() == 2).all()
    assert (there.inner.name, there.kind, there.counted, type(there.inner.pairs[0])) == ("inner", Inner, 1, Pair)
    assert batch.inner.x.device.type == "cpu"


def test_what_has_a_way_of_its_own_to_be_moved_is_moved_by_it_wherever_it_stands() -> None:
    moved = step_on(card.NAME).moved({"own": [Own(torch.ones(2))]})
    assert moved["own"][0].x.device.type == card.NAME
    assert moved["own"][0].said == (card.NAME,)
    assert step_on(card.NAME).moved(Own(torch.ones(2))).said == (card.NAME,)


def test_the_share_of_a_card_is_asked_for_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int]] = []

    def limit(fraction: float, device: Any) -> None:
        number = device if isinstance(device, int) else torch.device(device).index
        if number is None:  # as torch.cuda does
            raise ValueError("Expected a torch.device with a specified index or an integer")
        asked.append((fraction, number))

    monkeypatch.setattr(getattr(torch, card.NAME), "set_per_process_memory_fraction", limit)
    torch.accelerator.set_device_index(1)
    Maintenance(MaintenanceSettings(memory_fraction=0.5), card.NAME).begin()
    assert asked == [(0.5, 1)]


def test_random_numbers_are_kept_of_the_card_in_use_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = getattr(torch, card.NAME)
    read, asked = module.get_rng_state, []
    monkeypatch.setattr(module, "get_rng_state", lambda device=None: asked.append(device) or read(device))
    torch.accelerator.set_device_index(1)
    with RngState.preserved(card.NAME):
        drawn = torch.rand(4, device=f"{card.NAME}:1")
    assert asked == [1]
    assert torch.equal(torch.rand(4, device=f"{card.NAME}:1"), drawn)


@pytest.mark.parametrize(("device", "pins"), [("cpu", False), (card.NAME, True)])
def test_memory_is_pinned_only_where_the_job_runs_on_a_card(tmp_path: Any, device: str, pins: bool) -> None:
    run = Run(Plot({"epochs": 1}, items=8), tmp_path, make=lambda task, settings: Step(task, settings, device=device))
    loader = run.trainer.phases[0].loader
    batch = next(iter(loader))
    assert all(leaf.is_pinned() == pins for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
    loader.close()
