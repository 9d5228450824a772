"""The batch that follows is copied to the card while a step runs: nothing else is different, and nothing is lost."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.device.batch_transfer import CopyAhead, map_tensors
from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.hardware.caching_allocator import DEFAULT
from pipeline.memory.planning.step_estimates import ahead_bytes
from pipeline.planning.training_work import example_bytes
from pipeline.training.items.loader import Loader
from pipeline.training.loop.train import close
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.exact_step import RankShare
from tests.card import card
from tests.card.on_card.planned import CARD, WITHIN, planned
from tests.card.on_card.test_late_copies import BATCHES, COLLATES, FEW, Mover, is_right
from tests.card.on_card.test_plans import AGAIN, BF16, FAMILIES, NONE
from tests.card.on_card.test_refused_memory import OneStep, shown, step_on_card
from tests.memory.tracing.traced import chosen, tracer
from tests.training.loop.loops import Plot, Run, phases_of, task_of

SEEDS = 48
WORDS = 1 << 12
FORMS = [form for form in COLLATES if form != "batch"]  # which has a `to` of its own


def surely_at_hand(loader: Loader) -> None:
    """Have a loader wait for the batch that it is asked for: whether one is at hand is no question of luck."""
    ask = loader.at_hand

    def waited() -> Any:
        assert loader._reading is not None
        wait([*loader._reading._waiting][:1])
        return ask()

    loader.at_hand = waited  # type: ignore[method-assign]


class Counting(CopyAhead):
    """Counts what is copied ahead, and what of it is taken."""

    begun = taken = 0

    def moved(self, batch: Any) -> Any:
        self.taken += batch is not None and batch is self._source
        return super().moved(batch)

    def _begin(self, batch: Any) -> None:
        super()._begin(batch)
        self.begun += self._source is not None


class Unwaited(Counting):
    """Has nobody wait for a copy."""

    def _begin(self, batch: Any) -> None:
        super()._begin(batch)
        self._copied = None


class Ahead(Mover):
    """The same batches, each copied while the one before is there."""

    def __init__(self, form: str, kind: type[Counting] = Counting) -> None:
        super().__init__(form)
        surely_at_hand(self.loader)
        self.ahead = self.step.ahead = kind(card.NAME)

    def wrong(self, seed: int) -> int:
        card.seed_order(seed)
        there, batches = [], self.loader.read()
        while True:
            share = RankShare(batches, self.loader.fetch, hold=0, ahead=self.ahead, at_hand=self.loader.at_hand)
            share.is_last_pass = True
            if share.is_over:
                break
            there += [self.step.moved(piece.collated()) for piece in share]
        wrong = sum(not is_right(batch, numbers) for batch, numbers in zip(there, self.lists, strict=True))
        torch.accelerator.synchronize()
        return wrong


@pytest.mark.parametrize("form", FORMS)
def test_no_batch_that_was_copied_ahead_is_wrong_whatever_the_order_of_copies(form: str) -> None:
    mover = Ahead(form)
    assert {seed: wrong for seed in range(SEEDS) if (wrong := mover.wrong(seed))} == {}
    assert mover.ahead.begun == mover.ahead.taken == SEEDS * (BATCHES - 1)
    assert len(mover.loader._in_use) == 0


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_that_nobody_waits_for_is_wrong(form: str) -> None:
    mover = Ahead(form, Unwaited)
    assert any(mover.wrong(seed) for seed in range(FEW))


def test_what_has_its_own_way_or_is_not_pinned_is_moved_when_its_turn_comes() -> None:
    ahead = Counting(card.NAME)
    pinned, plain = torch.full((WORDS,), 7.0).pin_memory(), torch.full((WORDS,), 8.0)
    batch = {"pinned": pinned, "plain": plain, "turned": pinned.view(2, -1).t(), "name": "n"}
    ahead.following = lambda: batch
    ahead.moved({})
    assert ahead.bytes == pinned.nbytes
    there = ahead.moved(batch)
    assert ahead.bytes == 0
    assert there.pop("name") == "n"
    assert {one.device.type for one in there.values()} == {card.NAME}
    assert {name: set(one.flatten().tolist()) for name, one in there.items()} == {
        "pinned": {7.0},
        "plain": {8.0},
        "turned": {7.0},
    }


def spoilt(kind: type[Counting], seed: int) -> bool:
    """Tell whether memory that had a batch nobody took is written to after it was given to another."""
    card.seed_order(seed)
    ahead, batch = kind(card.NAME), {"x": torch.full((WORDS,), 1.0).pin_memory()}
    ahead.following = lambda: batch
    ahead.moved({})
    assert ahead.begun
    ahead.drop()
    other = torch.full((WORDS,), 2.0, device=card.NAME)
    torch.accelerator.synchronize()
    return bool((other.cpu() != 2).any())


def test_memory_of_a_batch_that_nobody_took_goes_to_others_only_after_the_copy() -> None:
    assert not any(spoilt(Counting, seed) for seed in range(SEEDS))
    assert any(spoilt(Unwaited, seed) for seed in range(FEW))


# Trainings


def training(folder: Path, name: str, *, ahead: bool = True, batch: int = 6, make: Any = step_on_card) -> Run:
    """Return a training of a few steps of several micro-batches."""
    is_shown = name in ("interface", "contrastive_pair")
    train: dict[str, Any] = {"effective_batch": batch, "epochs": 2, "optimizer": "adamw", "clip": 1.0}
    plot = Plot(items=3 * batch, budget=40, train=train, dropout=0.2, terms="one" if is_shown else name)
    if batch == 3 or is_shown:
        plot = replace(plot, budget=1, train={**train, "micro_batch": 1})
    phases = [(replace(phase, ahead_bytes=int(ahead)), items) for phase, items in phases_of(plot)]
    task = shown(name) if is_shown else task_of(plot)
    run = Run(plot, folder, make=make, task=task, phases=phases)
    for phase in run.trainer.phases:
        surely_at_hand(phase.loader)
    if run.trainer.step.ahead is not None:
        run.trainer.step.ahead = Counting(card.NAME)
    return run


@pytest.mark.parametrize("name", ["one", "several", "weighted", "interface", "contrastive_pair"])
def test_a_training_is_the_same_to_the_bit_with_batches_that_are_copied_ahead(tmp_path: Path, name: str) -> None:
    without = training(tmp_path / "without", name, ahead=False).to_end()
    assert without.trainer.step.ahead.begun == 0  # type: ignore[union-attr]
    for seed in range(2):
        card.seed_order(seed)
        run = training(tmp_path / str(seed), name).to_end()
        ahead: Any = run.trainer.step.ahead
        assert run.state() == without.state()
        assert ahead.begun >= ahead.taken > 4
        assert ahead.bytes == 0
        (loader,) = run.trainer.loaders
        del run
        gc.collect()
        assert len(loader._in_use) == 0


class OneStepAhead(OneStep):
    """Makes a step whose micro-batches, and the first of the next step, are copied ahead."""

    def made(self, refuse: int | None = None) -> tuple[dict[str, list[float]] | None, int]:
        ahead: Any = self.run.trainer.step.ahead
        ahead.drop()
        ahead.following, ahead._is_refused = None, False
        return super().made(refuse)


@pytest.mark.parametrize("name", ["weighted", "contrastive_pair"])
def test_a_step_whose_copies_are_under_way_survives_the_refusal_of_any_allocation(tmp_path: Path, name: str) -> None:
    expected, _ = OneStep(training(tmp_path / "without", name, ahead=False, batch=3)).made()
    step = OneStepAhead(training(tmp_path / "with", name, batch=3))
    ahead: Any = step.run.trainer.step.ahead
    begun = ahead.begun
    found, count = step.made()
    assert found == expected
    assert ahead.begun - begun >= 2  # `made` holds two batches of the three
    gc.collect()
    gc.freeze()
    back = []
    for place in range(count):
        state, _ = step.made(refuse=place)
        assert state in (None, expected), f"allocation {place} of {count}"
        back += [place] if state is None else []
    assert back == list(range(back[0], count)), "only within the optimizer, which comes last"
    close(step.run.trainer)
    ahead.drop()
    gc.unfreeze()
    gc.collect()
    assert len(step.phase.loader._in_use) == 0


def test_a_card_that_has_no_room_is_asked_once_and_the_training_goes_on(tmp_path: Path) -> None:
    expected = training(tmp_path / "without", "one", ahead=False).to_end().state()
    run = training(tmp_path / "with", "one")
    ahead: Any = run.trainer.step.ahead
    begin = ahead._begin

    def full(batch: Any) -> None:
        with card.refusing(0, times=1):
            begin(batch)

    ahead._begin = full
    run.to_end()
    assert run.state() == expected
    assert (ahead.begun, ahead._is_refused) == (0, True)
    assert not any("out of memory" in line for line in run.said)


# Memory


def given(task: Any, sizes: Any) -> Iterator[Any]:
    """Yield batches in pinned memory, as a loader has them."""
    while True:
        yield map_tensors(lambda tensor: tensor.contiguous().pin_memory(), task.example(sizes))


@pytest.mark.parametrize(
    ("family", "choice"),
    [("mlp", NONE), ("interface", AGAIN), ("docking", NONE), ("spectra", BF16)],
    ids=["mlp", "interface again", "docking", "spectra bf16"],
)
def test_what_is_copied_ahead_takes_what_the_plan_counts(family: str, choice: MemoryChoice) -> None:
    task, sizes = FAMILIES[family]
    oracle = tracer(task, CARD, sizes, clip=1.0)
    plan, inputs = planned(oracle, choice, sizes), example_bytes(task, sizes)
    more = ahead_bytes(oracle.standing(choice), oracle.micro(choice, sizes), inputs, DEFAULT)
    gc.collect()
    torch.accelerator.empty_cache()
    with card.settings(poison=False):
        torch.accelerator.reset_peak_memory_stats()
        step, batches = make_step(task, chosen(choice, {"clip": 1.0}), device=card.NAME), given(task, sizes)
        ahead = step.ahead = Counting(card.NAME)
        batch = next(batches)
        for micros in (1, 1, 3, 3):
            for _ in range(micros):
                after = next(batches)
                ahead.following = lambda after=after: after
                step.accumulate(batch)
                batch = after
            step.update()
        found = torch.accelerator.memory_stats()
    assert (ahead.begun, ahead.taken) == (8, 7)
    allocated, reserved = found["allocated_bytes.all.peak"], found["reserved_bytes.all.peak"]
    assert allocated <= (1 + WITHIN) * (plan.allocated_bytes[-1] + more)
    if more > 2 * WITHIN * plan.allocated_bytes[-1]:  # else it is not seen beside what the plan may be off
        assert allocated > (1 + WITHIN) * plan.allocated_bytes[-1]
    assert reserved <= (1 + WITHIN) * (plan.reserved_bytes[-1] + more)
