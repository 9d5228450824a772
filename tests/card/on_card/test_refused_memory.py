"""Whichever allocation of a training is refused on a card, the training ends with the weights that it would have had.

Micro-batches are of one item each: one that fails runs again on the next rung, which changes no bit of a gradient.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.project.run_code import load_task
from pipeline.training.loop.train import close
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.card import card
from tests.training.loop.loops import Plot, Run, furthest, task_of

TASKS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, int]]] = {
    "interface": (
        "pipeline.tasks.interface:Interface",
        {"embedding_dim": 8, "width": 8, "layers": 1, "pair_width": 4},
        {"nodes": 8, "edges": 12, "pairs": 16},
    ),
    "spectra_finetune": (
        "pipeline.tasks.spectra_finetune:SpectraFinetune",
        {
            "layers": 1,
            "heads": 2,
            "d_fourier": 6,
            "d_peak": 2,
            "fourier_width": 4,
            "finest": 0.1,
            "max_peaks": 6,
            "dropout": 0.1,
        },
        {"peaks": 6},
    ),
    "contrastive_pair": (
        "pipeline.tasks.contrastive_pair:ContrastivePair",
        {"width": 8, "layers": 1, "heads": 2, "out": 4, "left_most": 6, "right_most": 6},
        {"left": 4, "right": 4},
    ),
}
ITEMS = 18  # at most


def shown(name: str) -> Any:
    """Return a reference task whose items are examples of one size, each drawn by its own number."""
    path, options, sizes = TASKS[name]
    task = load_task(path, options)

    def drawn(number: int) -> Any:
        with torch.random.fork_rng([]):
            torch.manual_seed(number)
            return task.example({"items": 1, **sizes})

    made = list(map(drawn, range(ITEMS)))  # now: the threads that read would seed one and the same generator

    def collate(items: Sequence[Any], rng: np.random.Generator) -> Any:
        (item,) = items
        return made[int(item.id[4:])]

    object.__setattr__(task, "collate", collate)
    object.__setattr__(task, "cost", lambda item: {"nodes": item["nodes"]})
    return task


def step_on_card(task: Any, settings: StepSettings) -> Step:
    return make_step(task, settings, device=card.NAME)


@dataclass
class OneStep:
    """A training on a card, whose second step can be made again and again."""

    run: Run

    def __post_init__(self) -> None:
        trainer = self.run.trainer
        steps = trainer.run()
        next(steps)
        next(steps)  # the first step
        (self.phase,) = trainer.phases
        model, optimizer = trainer.step.model.state_dict(), trainer.step.optimizer.state_dict()
        self.model = {name: tensor.cpu().clone() for name, tensor in model.items()}
        self.optimizer = copy.deepcopy(optimizer)
        self.random = torch.get_device_module(card.NAME).get_rng_state()

    def made(self, refuse: int | None = None) -> tuple[dict[str, list[float]] | None, int]:
        """Make the step; return what stands after it, None where the training goes back to a checkpoint instead.

        The other number is how often the card was asked for memory.
        """
        trainer = self.run.trainer
        trainer.step.model.load_state_dict(self.model)
        trainer.step.optimizer.load_state_dict(copy.deepcopy(self.optimizer))
        torch.get_device_module(card.NAME).set_rng_state(self.random)
        trainer.stepper.governor = trainer.governor_of(self.phase)  # which remembers who climbed
        share = next(iter(self.phase.shares(trainer.step, 0, 1, frozenset())))
        before = card.allocations()
        with nullcontext() if refuse is None else card.refusing(refuse):
            trainer.stepper.start()
            report = trainer.stepper.accumulate(share)
            norm = trainer.stepper.take(report)
        count = card.allocations() - before
        if lost := trainer.stepper.lost:
            trainer.stepper.go_back()  # as the trainer does before it returns to a checkpoint
            assert "optimizer" in lost
            return None, count
        assert norm is not None
        return self.run.state(), count


def training(folder: Path, name: str) -> Run:
    """Return a training of two steps."""
    batch = 1 if name in ("interface", "spectra_finetune") else 2
    train: dict[str, Any] = {"effective_batch": batch, "epochs": 1, "micro_batch": 1, "optimizer": "adamw", "clip": 1.0}
    plot = Plot(
        items=2 * batch, budget=1, train=train, dropout=0.2 * (name == "dropout"), terms=name.replace("dropout", "one")
    )
    return Run(plot, folder, make=step_on_card, task=shown(name) if name in TASKS else task_of(plot))


@pytest.mark.parametrize("name", ["dropout", "weighted", *TASKS])
def test_a_step_survives_the_refusal_of_any_allocation_with_the_same_bits(tmp_path: Path, name: str) -> None:
    step = OneStep(training(tmp_path, name))
    expected, count = step.made()
    assert step.made() == (expected, count)
    gc.collect()
    gc.freeze()  # every replay collects garbage: what is there now need not be looked at again
    refused, back = card.refused(), []
    for place in range(count):
        state, _ = step.made(refuse=place)
        assert state in (None, expected), f"allocation {place} of {count}"
        back += [place] if state is None else []
    assert card.refused() - refused == count > 50
    assert back == list(range(back[0], count)), "only within the optimizer, which comes last"
    close(step.run.trainer)
    gc.unfreeze()


def test_memory_refused_within_the_optimizer_leads_back_to_a_checkpoint_and_to_the_same_weights(tmp_path: Path) -> None:
    allocations: list[int] = []

    def trained(folder: str, refuse: int | None) -> Run:
        run = training(tmp_path / folder, "weighted")
        apply = run.trainer.step.apply
        calls = iter((refuse,))

        def refused(norm: torch.Tensor) -> None:
            before = card.allocations()
            place = next(calls, None)
            with nullcontext() if place is None else card.refusing(place):
                apply(norm)
            allocations.append(card.allocations() - before)

        run.trainer.step.apply = refused  # type: ignore[method-assign]
        return run.to_end()

    expected = trained("undisturbed", None).state()
    for place in range(allocations[0]):
        run = trained(str(place), place)
        assert any("returning to the last checkpoint" in line for line in run.said)
        assert furthest(run.state(), expected) < 1e-12
