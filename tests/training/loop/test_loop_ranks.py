"""Whole trainings of several processes: the same steps as one, the same decisions on all."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.training.loop.metrics_log import read_epochs
from pipeline.training.ranks.process_group import ProcessGroup
from pipeline.training.ranks.rank_protocol import LOST
from tests.testkit.limited import device as limited
from tests.testkit.limited.device import LimitedDevice
from tests.training.checkpoints.saved import spoil
from tests.training.loop.loops import (
    Aimed,
    Plot,
    Refuse,
    Run,
    batch_of,
    big_batch,
    furthest,
    signals_after,
    state_of,
    warm,
)
from tests.training.loop.test_loop import Tearing
from tests.training.ranks.crews import Crew, crew

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

EXACT = 1e-10
ADAM = {"optimizer": "adamw", "ema": 0.9, "clip": 1.0, "weight_decay": 0.1, "epochs": 2}
CASES = [
    ("one", 9, 60, {}),
    ("one", 9, 25, {"micro_batch": 1}),
    ("one", 2, 60, {}),  # with three ranks, one has no item
    ("several", 7, 40, {}),
    ("weighted", 7, 40, {}),
    ("several", 1, 40, {}),
    ("weighted", 2, 200, {}),
]
LONG = Plot(train={**ADAM, "checkpoints": {"every": 2}}, items=14, budget=60)

State = Mapping[str, list[float]]


def apart(one: State, other: State) -> float:
    """Return how far two trainings are apart, but for what each rank has seen for itself."""
    return furthest({**one, "seen": []}, {**other, "seen": []})


def weights(state: State) -> State:
    """Return a state without what each rank has seen for itself."""
    return {name: one for name, one in state.items() if name != "seen"}


def done(world: int, folder: Path, part: Any, *words: Any) -> list[Any]:
    """Let ranks do a part to its end; return what came of it, by rank."""
    made = crew(folder, world, part, *words)
    codes = made.wait()
    assert codes == [0] * world, "".join(made.err(rank) for rank in range(world))
    return [made.result(rank) for rank in range(world)]


def one_steps(group: ProcessGroup, folder: Path, plots: list[Plot]) -> list[dict[str, list[float]]]:
    """Return the gradients of one step of each plot."""
    found = []
    for number, plot in enumerate(plots):
        run = Run(plot, folder / str(number), ranks=group)
        before = run.state()
        after = run.to_end().state()
        trained = [name for name, _ in run.trainer.step.model.named_parameters() if not name.startswith("unused")]
        found.append({name: [a - b for a, b in zip(before[name], after[name], strict=True)] for name in trained})
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_a_step_of_several_ranks_has_the_gradient_of_one_batch(tmp_path: Path, world: int) -> None:
    plots = [
        Plot(
            train={"effective_batch": items, "epochs": 1, "learning_rate": 1.0, **more},
            items=items,
            budget=budget,
            terms=terms,
        )
        for terms, items, budget, more in CASES
    ]
    told = done(world, tmp_path, one_steps, tmp_path, plots)
    assert all(one == told[0] for one in told)
    for plot, got in zip(plots, told[0], strict=True):
        assert furthest(got, big_batch(plot, range(plot.items))) < EXACT, plot


def trained(
    group: ProcessGroup, folder: Path, plot: Plot, stop: int | None = None, told: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Train to the end, until a rank kills itself after a step, or until one is told to end."""
    told = told or {}
    run = Run(plot, folder, ranks=group)
    if told.get("end") and group.rank == told.get("rank", 0):
        run.ending = signals_after(told["end"])
    for step in run.trainer.run():
        if step == stop and group.rank == told.get("rank", 0):
            os.kill(os.getpid(), signal.SIGKILL)
    return {
        "state": run.state(),
        "done": run.trainer.done,
        "ended_by": run.trainer.ended_by,
        "budget": run.trainer.governor.budget,
        "said": run.said,
    }


@pytest.mark.nightly
def test_any_number_of_ranks_trains_the_same_and_takes_up_what_others_began(tmp_path: Path) -> None:
    alone = Run(LONG, tmp_path / "alone").to_end().state()
    two = done(2, tmp_path / "two", trained, tmp_path / "two", LONG)
    assert apart(alone, two[0]["state"]) < EXACT
    assert weights(two[0]["state"]) == weights(two[1]["state"])
    begun = done(2, tmp_path / "begun", trained, tmp_path / "begun", LONG, None, {"end": 3, "rank": 1})
    assert [(one["done"], one["ended_by"]) for one in begun] == [(3, signal.SIGTERM)] * 2
    taken = Run(LONG, tmp_path / "begun").to_end()
    assert apart(alone, taken.state()) < EXACT
    assert any("of 2 ranks, now there are 1" in line for line in taken.said)
    Run(LONG, tmp_path / "one", ending=signals_after(2)).to_end()
    three = done(3, tmp_path / "three", trained, tmp_path / "one", LONG)
    assert apart(alone, three[2]["state"]) < EXACT


@pytest.mark.nightly
@pytest.mark.parametrize("behind", [False, True])
def test_ranks_of_which_one_is_killed_go_on_bitwise_as_if_it_had_not_been(tmp_path: Path, *, behind: bool) -> None:
    plot = replace(LONG, dropout=0.3, train={**ADAM, "checkpoints": {"every": 1, "asynchronous": behind}})
    whole = done(2, tmp_path / "whole", trained, tmp_path / "whole", plot)
    for attempt, (stop, rank) in enumerate([(2, 1), (4, 0)]):
        killed = crew(tmp_path / f"killed{attempt}", 2, trained, tmp_path / "run", plot, stop, {"rank": rank})
        codes = killed.wait()
        assert codes[rank] == -signal.SIGKILL
        assert codes[1 - rank] == LOST, killed.err(1 - rank)
    rest = done(2, tmp_path / "rest", trained, tmp_path / "run", plot)
    assert [one["state"] for one in rest] == [one["state"] for one in whole]


# Memory ends on one rank


def interrupted(group: ProcessGroup, folder: Path, plot: Plot, at: list[Mapping[int, int]]) -> list[dict[str, Any]]:
    """Train some times, while blocks are refused on one rank: of a call, which one."""
    found = []
    for number, one in enumerate(at):
        run = Run(plot, folder / str(number), ranks=group, make=Aimed)
        step = run.trainer.step
        assert isinstance(step, Aimed)
        warm(run)
        step.refuse = Refuse()
        step.at = {int(call): block for call, block in one.items()} if group.rank == number % group.world else {}
        with LimitedDevice(through=step.refuse):
            run.to_end()
        epoch = read_epochs(run.made.folder.path)[0]
        found.append({"cuts": step.cuts, "state": run.state(), "blocks": step.blocks, "ooms": epoch.ooms})
    return found


def plain(plot: Plot, run: Run, cuts: list[list[list[tuple[str, ...]]]]) -> State:
    """Train by a plain loop over the micro-batches of two ranks, with random numbers of each."""
    from pipeline.stages.train import fresh_step

    step = fresh_step(run.made)
    step.make_state()
    step.agreed = 8.0  # any power of two: it changes no digit
    numbers = []
    for rank in range(2):
        torch.manual_seed(plot.config().seed + 1 + rank)
        numbers.append(torch.get_rng_state())
    for both in zip(*cuts, strict=True):
        gradients = []
        weights = [sum(float(len(batch_of(plot, step.task, _numbers(ids), 0)["y"])) for ids in one) for one in both]
        weight = sum(weights)
        for rank, own in enumerate(both):
            torch.set_rng_state(numbers[rank])
            for ids in own:
                step.accumulate(batch_of(plot, step.task, _numbers(ids), 0))
            gradients.append([None if one.grad is None else one.grad.clone() for one in step.trained])
            numbers[rank] = torch.get_rng_state()
            step.release()
        for parameter, first, second in zip(step.trained, *gradients, strict=True):
            if first is not None or second is not None:
                parts = [torch.zeros_like(parameter) if one is None else one for one in (first, second)]
                parameter.grad = parts[0] + parts[1]
        step.settle(weight)
        step.clip()
        step.apply()
    return state_of(step)


def _numbers(ids: tuple[str, ...]) -> list[int]:
    return [int(name[4:]) for name in ids]


@pytest.mark.nightly
def test_memory_that_ends_on_one_rank_is_a_step_that_was_cut_so_from_the_start(tmp_path: Path) -> None:
    limited.need()
    plot = Plot(train={**ADAM, "epochs": 1, "effective_batch": 9}, items=9, budget=60, dropout=0.3)
    ((undisturbed,), _) = done(2, tmp_path / "first", interrupted, tmp_path / "first", plot, [{}])
    calls = undisturbed["blocks"]
    at = [{call: 1 + call % min(calls)} for call in range(len(calls)) for _ in range(2)]
    at += [{call: calls[call] - 1} for call in range(len(calls)) for _ in range(2)]
    told = done(2, tmp_path / "run", interrupted, tmp_path / "run", plot, at)
    reference = Run(plot, tmp_path / "reference")
    ooms = 0
    for number, both in enumerate(zip(*told, strict=True)):
        cuts = [one["cuts"] for one in both]
        expected = plain(plot, reference, cuts)
        for rank, one in enumerate(both):
            assert weights(one["state"]) == weights(expected), (number, rank)
        ooms += both[0]["ooms"]
    assert ooms >= 2 * (len(calls) - 1)


@pytest.mark.nightly
def test_without_dropout_memory_that_ends_on_one_rank_changes_nothing_beyond_rounding(tmp_path: Path) -> None:
    limited.need()
    plot = Plot(train={**ADAM, "epochs": 1, "effective_batch": 5}, items=9, budget=60)
    alone = Run(plot, tmp_path / "alone").to_end().state()
    at: list[dict[int, int]] = [{}, {1: 4}, {1: 4}, {2: 9, 4: 3}, {2: 9, 4: 3}]
    told = done(2, tmp_path / "run", interrupted, tmp_path / "run", plot, at)
    for one in told[0]:
        assert apart(alone, one["state"]) < EXACT


# What all must decide alike


def tearing(group: ProcessGroup, folder: Path, plot: Plot, at: list[int]) -> dict[str, Any]:
    """Train while memory ends in the optimizer of the second rank."""
    run = Run(plot, folder, ranks=group, make=Tearing)
    if group.rank == 1:
        run.trainer.step.at = frozenset(at)  # type: ignore[attr-defined]
    run.to_end()
    return {"state": run.state(), "said": run.said}


@pytest.mark.nightly
def test_memory_that_ends_in_one_optimizer_takes_all_ranks_back(tmp_path: Path) -> None:
    whole = done(2, tmp_path / "whole", trained, tmp_path / "whole", LONG)
    for at in ([1], [3], [6]):
        told = done(2, tmp_path / str(at), tearing, tmp_path / str(at), LONG, at)
        assert [one["state"] for one in told] == [one["state"] for one in whole]
        assert any("rank 1: memory ended within the optimizer" in line for line in told[0]["said"])


def test_memory_that_always_ends_in_one_optimizer_ends_all_ranks(tmp_path: Path) -> None:
    made = crew(tmp_path / "crew", 2, tearing, tmp_path / "run", LONG, list(range(2, 99)))
    assert made.wait() == [7, 7]
    assert all("did not help" in made.err(rank) for rank in range(2))


def ended(group: ProcessGroup, folder: Path, plot: Plot) -> None:
    """Train to what is expected to be an error."""
    Run(plot, folder, ranks=group).to_end()


def ending(tmp_path: Path, plot: Plot, where: str = "run") -> tuple[list[int | None], Crew]:
    made = crew(tmp_path / "crew", 2, ended, tmp_path / where, plot)
    return made.wait(), made


def test_terms_of_other_names_on_another_rank_are_refused_by_both_names(tmp_path: Path) -> None:
    codes, made = ending(tmp_path, Plot(terms="uneven"))
    assert codes == [3, 3]
    assert all("of0 on rank 0 and of1 on rank 1" in made.err(rank) for rank in range(2))


def test_a_loss_that_is_not_finite_ends_all_ranks_with_the_item(tmp_path: Path) -> None:
    plot = Plot(train={"nan": "stop", "effective_batch": 6}, nan={7: 0})
    codes, made = ending(tmp_path, plot)
    assert codes == [3, 3]
    assert all("(of item7)" in made.err(rank) for rank in range(2))


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_step_that_is_not_finite_is_left_out_by_all_ranks(tmp_path: Path, policy: str) -> None:
    plot = Plot(train={**ADAM, "nan": policy, "checkpoints": {"every": 1}}, nan={7: 0})
    alone = Run(plot, tmp_path / "alone").to_end()
    told = done(2, tmp_path / "run", trained, tmp_path / "run", plot)
    assert weights(told[0]["state"]) == weights(told[1]["state"])
    assert apart(alone.state(), told[0]["state"]) < EXACT


@pytest.mark.nightly
def test_checkpoints_of_which_none_is_whole_end_all_ranks_at_once(tmp_path: Path) -> None:
    Run(LONG, tmp_path / "run", ending=signals_after(2)).to_end()
    for one in (tmp_path / "run/model/checkpoints").glob("step-*"):
        spoil(one / "state.safetensors", bytearray.clear)
    codes, made = ending(tmp_path, LONG)
    assert codes == [7, 7]
    assert "none of the" in made.err(0)
    assert "none of the" in made.err(1)
