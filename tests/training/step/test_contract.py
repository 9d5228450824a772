"""What every kind of stepper keeps: the gradient of one batch, through every end of memory, the same on all ranks."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.errors import DataError, JobFailed, PlanInfeasible
from pipeline.training.ranks import LOST, Ranks
from pipeline.training.ranks.process_group import ProcessGroup
from tests.testkit.cost import uncounted
from tests.testkit.limited import device as limited
from tests.training.loop.loops import Plot, furthest, signals_after
from tests.training.ranks.crews import crew
from tests.training.step.exactness import CASES, EXACT, largest_difference
from tests.training.step.kinds import (
    FULL,
    KINDS,
    TRAINED,
    Always,
    Trouble,
    outcome,
    task_of,
    training,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("quick")
ADAM = {"optimizer": "adamw", "ema": 0.9, "clip": 1.0, "weight_decay": 0.1, "epochs": 2, "checkpoints": {"every": 2}}
LONG = Plot(train={**ADAM, "validation": {"split": "val"}}, items=TRAINED, budget=60, validated=5)
STEPS = 6  # of it
SEVERAL = [name for name, kind in KINDS.items() if kind.world > 1]
FAILING = 1  # the rank whose memory ends, of two
Outcomes = list[dict[str, Any]]


def done(name: str, folder: Path, part: Callable[..., Any], *words: Any, world: int | None = None) -> list[Any]:
    """Let each rank of a kind do a part; return what came of it, by rank."""
    world = world or KINDS[name].world
    folder.mkdir(parents=True, exist_ok=True)
    if world == 1:
        return [json.loads(json.dumps(part(Ranks(), folder, name, *words)))]
    return crew(folder, world, part, folder, name, *words).results()


def are_alike(ranks: Outcomes) -> bool:
    return all(one["state"] == ranks[0]["state"] and one["done"] == ranks[0]["done"] for one in ranks)


# The gradient of one batch


@pytest.mark.parametrize(
    ("name", "world"), [pytest.param(*case, marks=pytest.mark.nightly) if case[1] > 2 else case for case in CASES]
)
def test_a_step_has_the_gradient_of_one_batch_wherever_memory_ends(tmp_path: Path, name: str, world: int) -> None:
    assert largest_difference(tmp_path / "calm", name, world, fails=False)[0] < EXACT
    apart, failures = largest_difference(tmp_path / "failing", name, world, fails=True)
    assert failures > 0
    assert apart < EXACT


# Memory ends


def through_all(ranks: Ranks, folder: Path, name: str) -> Mapping[str, Any]:
    """Train undisturbed, and once through the end of memory at each site, on one rank."""
    found = {}
    for site in ("", *KINDS[name].sites):
        trouble = Trouble(site) if ranks.rank == ranks.world - 1 else Trouble()
        found[site] = outcome(name, LONG, folder / site, ranks, trouble)
    return found


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Mapping[str, Any]]]:
    made: dict[str, list[Any]] = {}

    def get(name: str) -> list[Any]:
        if name not in made:
            with uncounted():
                made[name] = done(name, tmp_path_factory.mktemp("through"), through_all)
        return made[name]

    return get


@pytest.mark.parametrize(("name", "site"), [(name, site) for name in KINDS for site in KINDS[name].sites])
def test_wherever_memory_ends_a_training_is_that_of_enough_memory(through: Any, name: str, site: str) -> None:
    found = through(name)
    ranks, calm = [one[site] for one in found], found[0][""]
    assert [one["has_struck"] for one in ranks] == [rank == len(ranks) - 1 for rank in range(len(ranks))]
    assert are_alike(ranks)
    assert ranks[0]["done"] == calm["done"] == STEPS
    assert furthest(ranks[0]["state"], calm["state"]) < EXACT
    assert calm["ooms"] == 0
    validations = [[epoch["loss"] for epoch in one["validation"]] for one in (ranks[0], calm)]
    assert validations[0] == pytest.approx(validations[1], rel=EXACT)
    if site == "optimizer":
        assert ranks[0]["state"] == calm["state"], "it goes back to the checkpoint"
        assert any("returning to the last checkpoint" in line for line in ranks[0]["said"])
    elif site in ("embed", "forward", "backward"):  # what could not be collated or contrasted is tried again as it is
        assert ranks[0]["ooms"] == 1, "counted once for all ranks"


@pytest.mark.parametrize("name", KINDS)
def test_any_kind_trains_what_one_process_does(through: Any, name: str) -> None:
    same = "contrastive" if KINDS[name].contrasts else "local"
    assert furthest(through(name)[0][""]["state"], through(same)[0][""]["state"]) < EXACT


def at_blocks(ranks: Ranks, folder: Path, name: str, plot: Plot, blocks: list[int]) -> Outcomes:
    return [
        outcome(
            name, plot, folder / str(block), ranks, Trouble("block", block if ranks.rank == ranks.world - 1 else -1)
        )
        for block in blocks
    ]


@pytest.mark.parametrize(
    ("name", "every"),
    [("ranks", 16), *(pytest.param(name, 3, marks=pytest.mark.nightly) for name in KINDS)],
)
def test_whatever_block_a_step_cannot_have_its_training_is_that_of_enough_memory(
    tmp_path: Path, name: str, every: int
) -> None:
    """Of the forward, of the backward, of the sums over ranks, of clipping, of the optimizer."""
    limited.need()
    plot = replace(LONG, train={**ADAM, "epochs": 1}, validated=0)
    calm = done(name, tmp_path / "calm", at_blocks, plot, [-1])
    blocks = list(range(1, calm[-1][0]["blocks"] + 1, every))
    assert len(blocks) > 5
    for block, *ranks in zip(blocks, *done(name, tmp_path / "run", at_blocks, plot, blocks), strict=True):
        assert ranks[-1]["has_struck"], block
        assert are_alike(ranks), block
        assert furthest(ranks[0]["state"], calm[0][0]["state"]) < EXACT, block


# What does not fit at all


def without_room(task: Any, item: str) -> Any:
    """Let memory end wherever an item is trained on, whatever is done about it."""
    for method in {"loss", "embed"} & set(dir(task)):
        inner = getattr(task, method)

        def full(model: nn.Module, batch: Any, inner: Any = inner) -> Any:
            if model.training and item in batch["ids"]:
                raise torch.OutOfMemoryError(FULL)
            return inner(model, batch)

        object.__setattr__(task, method, full)
    return task


def too_large(ranks: Ranks, folder: Path, name: str, plot: Plot) -> dict[str, Any]:
    return outcome(name, plot, folder / "run", ranks, task=without_room(task_of(KINDS[name], plot), "item3"))


@pytest.mark.parametrize("name", KINDS)
def test_an_item_that_fits_nowhere_is_left_out_of_the_others_steps(tmp_path: Path, name: str) -> None:
    plot = replace(LONG, train={**ADAM, "epochs": 1, "effective_batch": 14, "too_large": "skip"}, validated=0)
    ranks = done(name, tmp_path / "skip", too_large, plot)
    assert are_alike(ranks)
    assert ranks[0]["skipped"] == 1
    same = "contrastive" if KINDS[name].contrasts else "local"
    without = outcome(same, replace(plot, leave_out=("item3",)), tmp_path / "without")
    assert furthest(ranks[0]["state"], without["state"]) < EXACT


@pytest.mark.parametrize("name", SEVERAL)
def test_an_item_that_fits_nowhere_ends_all_where_none_may_be_left_out(tmp_path: Path, name: str) -> None:
    plot = replace(LONG, train={**ADAM, "too_large": "error"}, validated=0)
    ranks = crew(tmp_path, 2, too_large, tmp_path, name, plot)
    codes = ranks.wait()
    assert sorted(map(str, codes)) == sorted(map(str, (PlanInfeasible.exit_code, LOST))), ranks.err(0) + ranks.err(1)
    assert all("item3 does not fit" in ranks.err(rank) for rank in range(2))


def always_torn(ranks: Ranks, folder: Path, name: str) -> None:
    outcome(name, LONG, folder / "run", ranks, Always("optimizer" if ranks.rank == ranks.world - 1 else ""))


@pytest.mark.parametrize("name", ["local", "ranks", "sharded"])
def test_memory_that_always_ends_in_the_optimizer_ends_the_training(tmp_path: Path, name: str) -> None:
    if KINDS[name].world == 1:
        with pytest.raises(JobFailed, match="did not help"):
            always_torn(Ranks(), tmp_path, name)
        return
    ranks = crew(tmp_path, 2, always_torn, tmp_path, name)
    assert ranks.wait() == [JobFailed.exit_code] * 2
    assert all("did not help" in ranks.err(rank) for rank in range(2))


# What is not finite


def spoiled(ranks: Ranks, folder: Path, name: str, plot: Plot) -> dict[str, Any]:
    return outcome(name, plot, folder / "run", ranks)


@pytest.mark.parametrize("name", KINDS)
def test_an_item_that_is_no_number_ends_all_ranks_by_its_name(tmp_path: Path, name: str) -> None:
    plot = replace(LONG, train={**ADAM, "nan": "stop"}, nan={7: 0}, validated=0)
    if KINDS[name].world == 1:
        with pytest.raises(DataError, match=r"of item7\b"):
            spoiled(Ranks(), tmp_path, name, plot)
        return
    ranks = crew(tmp_path, 2, spoiled, tmp_path, name, plot)
    assert ranks.wait() == [DataError.exit_code] * 2
    assert all("of item7)" in ranks.err(rank) for rank in range(2))


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("policy", ["skip", pytest.param("rollback", marks=pytest.mark.nightly)])
def test_a_step_that_is_not_finite_on_one_rank_is_left_out_by_all(tmp_path: Path, name: str, policy: str) -> None:
    plot = replace(LONG, train={**ADAM, "nan": policy, "checkpoints": {"every": 1}}, nan={7: 0}, validated=0)
    ranks = done(name, tmp_path / "ranks", spoiled, plot)
    assert are_alike(ranks)
    assert ranks[0]["left_out"] == 2, "one of each epoch"
    same = outcome("contrastive" if KINDS[name].contrasts else "local", plot, tmp_path / "alone")
    assert furthest(ranks[0]["state"], same["state"]) < EXACT


# Ends, and is continued


def part_of_it(ranks: Ranks, folder: Path, name: str, steps: int, plot: Plot = LONG) -> dict[str, Any]:
    """Train so many steps, 0 for all."""
    run = training(name, plot, folder.parent / "run", ranks)
    if steps:
        run.ending = signals_after(steps)
    run.to_end()
    return {"state": weights_of(run), "done": run.trainer.done}


@pytest.mark.parametrize(
    ("first", "then", "world"),
    [
        ("contrastive", "contrastive", 1),
        ("ranks", "local", 1),
        ("sharded", "local", 1),
        ("local", "sharded", 2),
        pytest.param("sharded", "sharded", 3, marks=pytest.mark.nightly),
        pytest.param("local", "ranks", 3, marks=pytest.mark.nightly),
        pytest.param("ranks", "sharded", 2, marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_of_any_kind_and_number_of_ranks_is_continued_by_others(
    tmp_path: Path, first: str, then: str, world: int
) -> None:
    plot = replace(LONG, validated=0)
    whole = outcome("contrastive" if KINDS[first].contrasts else "local", plot, tmp_path / "whole")
    begun = done(first, tmp_path / "first", part_of_it, 3, plot)
    assert begun[0]["done"] == 3
    rest = done(then, tmp_path / "then", part_of_it, 0, plot, world=world)
    assert are_alike(rest)
    assert rest[0]["done"] == STEPS
    assert furthest(rest[0]["state"], whole["state"]) < EXACT


def killed(ranks: Ranks, folder: Path, name: str, plot: Plot) -> None:
    """Let the last rank be killed within a pass of the third step."""
    run = training(name, plot, folder.parent / "run", ranks)

    def die(done: int) -> None:
        if done == 2 and ranks.rank == FAILING:
            run.trainer.step.model.get_submodule("blocks.2").register_forward_hook(
                lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            )

    run.to_end(each=die)


@pytest.mark.parametrize(
    ("name", "behind"), [("sharded", False), *(pytest.param("ranks", it, marks=pytest.mark.nightly) for it in (0, 1))]
)
def test_a_rank_that_is_killed_within_a_pass_is_named_and_changes_no_bit(
    tmp_path: Path, name: str, behind: bool
) -> None:
    """Checkpoints may be written behind the training."""
    plot = replace(LONG, validated=0, train={**ADAM, "checkpoints": {"every": 1, "asynchronous": bool(behind)}})
    whole = done(name, tmp_path / "calm" / "crew", part_of_it, 0, plot)
    ranks = crew(tmp_path / "killed", 2, killed, tmp_path / "killed", name, plot)
    assert ranks.wait() == [LOST, -signal.SIGKILL]
    assert f"rank 1 ({socket.gethostname()}) died" in ranks.err(0)
    assert done(name, tmp_path / "rest", part_of_it, 0, plot) == whole


def broken(group: ProcessGroup, folder: Path, name: str) -> None:
    """Fail in the task of one rank, in step 2."""

    class Bug(Trouble):
        def _strikes(self, site: str, items: int = 2) -> bool:
            if super()._strikes(site, items):
                raise KeyError("no such field")
            return False

    outcome(name, LONG, folder, group, Bug("forward" if group.rank == FAILING else ""))


@pytest.mark.parametrize("name", SEVERAL)
def test_a_task_that_fails_on_one_rank_ends_all(tmp_path: Path, name: str) -> None:
    ranks = crew(tmp_path / "crew", 2, broken, tmp_path / "run", name)
    assert ranks.wait() == [LOST, 1]
    assert "no such field" in ranks.err(0)
