"""A loss that compares all items of a step has its gradient, however the step is cut, over whatever ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError, DataError, PlanInfeasible
from pipeline.stages.train import fresh_step
from pipeline.training.ranks.process_group import ProcessGroup
from pipeline.training.ranks.rank_protocol import LOST, SingleRank
from pipeline.training.step.contrastive import ContrastiveStep, joined_rows, make_step
from pipeline.training.step.local_contrastive import ContrastiveStepper, _Embedded, gathered
from pipeline.training.step.micro_batches import Piece
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from pipeline.training.step_clock import StepClock
from tests.tasks import items as graphs
from tests.testkit.limited import device as limited
from tests.testkit.limited.device import LimitedDevice
from tests.training.loop.loops import Plot, Refuse, Run, batch_of, furthest, signals_after, state_of, warm
from tests.training.loop.test_loop import Tearing
from tests.training.ranks.crews import crew
from tests.training.step.towers import Pairs, cut, drawn, of

pytestmark = pytest.mark.usefixtures("quick")
EXACT = 1e-10
ITEMS = 128
CUTS = {"one": [128], "8 x 16": [16] * 8, "16 x 8": [8] * 16, "1 x 128": [1] * 128, "uneven": [100, 3, 25]}
ONE_STEP = {"effective_batch": 14, "epochs": 1, "learning_rate": 1.0}
PLOT = Plot(train=ONE_STEP, budget=90)
LONG = Plot(train={"optimizer": "adamw", "ema": 0.9, "clip": 1.0, "weight_decay": 0.1, "epochs": 2}, budget=60)


class Caught(ContrastiveStep):
    """Keeps what the optimizer is given."""

    def apply(self) -> None:
        """Keep the gradients."""
        self.caught = {name: one.grad.clone() for name, one in self.model.named_parameters() if one.grad is not None}
        super().apply()


def gradients(
    sizes: list[int], task: Pairs | None = None, *, scaled: bool = False, **settings: Any
) -> tuple[dict[str, Tensor], dict[str, float], Caught]:
    """Return the gradients of a step of some micro-batches, and the values of its terms."""
    torch.manual_seed(0)
    task = task or Pairs()
    step = Caught(task, StepSettings(optimizer="sgd", **settings), scaled=scaled)
    told = step.run(cut(drawn(sum(sizes), task.dtype), sizes))
    return step.caught, {name: float(value) for name, value in told.items()}, step


def error(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Return the largest error of a gradient beside its norm."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in other)


# A step


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("sizes", CUTS.values(), ids=CUTS)
def test_a_step_cut_anyhow_has_the_gradient_of_one_batch_of_128(sizes: list[int], terms: int) -> None:
    task = Pairs(terms=terms)
    torch.manual_seed(0)
    model, whole = task.model(), drawn(ITEMS)
    told = task.loss(model, whole)
    torch.autograd.backward(sum((total / weight for total, weight in told.values()), torch.zeros(())))
    true = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    found, values, step = gradients(sizes, task)
    assert error(found, true) < EXACT
    for name, (total, weight) in told.items():
        assert values[name] == pytest.approx(float(total.detach()) / weight, rel=EXACT)
    assert int(step.model.seen) == ITEMS, "statistics move once a step"


def test_micro_batches_alone_would_have_another_gradient() -> None:
    task = Pairs()
    torch.manual_seed(0)
    model = task.model()
    for batch in cut(drawn(ITEMS), [16] * 8):
        ((total, _),) = task.loss(model, batch).values()
        (total / ITEMS).backward()
    plain = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    assert error(plain, gradients([ITEMS])[0]) > 0.05


def test_both_passes_draw_the_same_random_numbers() -> None:
    task = Pairs(dropout=0.5)
    torch.manual_seed(0)
    model = task.model()
    torch.manual_seed(1)
    rows = joined_rows([task.embed(model, batch) for batch in cut(drawn(24), [10, 14])])
    ((total, weight),) = task.contrast(model, rows).values()
    (total / weight).backward()
    true = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    after = torch.get_rng_state()
    torch.manual_seed(0)
    step = Caught(task, StepSettings(optimizer="sgd"))
    torch.manual_seed(1)
    step.run(cut(drawn(24), [10, 14]))
    assert error(step.caught, true) < EXACT
    assert torch.equal(torch.get_rng_state(), after), "as many are used up as by one pass"


def test_a_loss_that_draws_does_not_shift_the_second_pass() -> None:
    rows: list[Tensor] = []

    class Noisy(Pairs):
        def embed(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
            told = super().embed(model, batch)
            rows.append(told["left"].detach().clone())
            return told

        def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> Any:
            torch.rand(7)
            return super().contrast(model, embedded)

    gradients([10, 14], Noisy(dropout=0.5))
    assert all(torch.equal(rows[place], rows[place + 2]) for place in range(2))


def test_embeddings_in_memory_that_the_next_call_writes_to_are_kept() -> None:
    true = gradients([24])[0]

    class Reusing(Pairs):
        def embed(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
            told = super().embed(model, batch)
            if torch.is_grad_enabled():
                return told
            kept = memory.setdefault("left", told["left"])  # as a CUDA graph's output
            return {**told, "left": kept.copy_(told["left"])}

    memory: dict[str, Tensor] = {}
    assert error(gradients([8, 8, 8], Reusing())[0], true) < EXACT


def test_a_micro_batch_that_comes_back_with_other_items_is_refused() -> None:
    step = make_step(Pairs(), StepSettings(optimizer="sgd"))
    rows = step.embed(drawn(10))
    with pytest.raises(ConfigError, match="'left' has 9 rows, not 10"):
        step.go_back(drawn(9), rows)
    batch = graphs.batch_of([graphs.made(1, 6, 5)] * 3, None, ("a", "b", "c"))
    done = [_Embedded(batch.origin.index, 0, 2, 0, ("a", "b"), None), _Embedded(0, 2, 4, 0, ("c", "d"), None)]
    found = ContrastiveStepper._as_embedded(None, [Piece(batch, 0, 3)], done)  # type: ignore[arg-type]
    assert next(found).ids == ("a", "b")
    with pytest.raises(DataError, match="d was read at the start of the step"):
        next(found)


def test_running_means_move_once_for_each_micro_batch() -> None:
    task = Pairs(norm=True)
    _, _, step = gradients([10, 14], task)
    torch.manual_seed(0)
    model = task.model()
    for batch in cut(drawn(24), [10, 14]):
        task.embed(model, batch)
    assert all(torch.equal(one, dict(model.named_buffers())[name]) for name, one in step.model.named_buffers())


def test_gradients_are_clipped_and_averaged_as_ever() -> None:
    _, _, whole = gradients([24], clip=0.01, ema=0.5, learning_rate=1.0)
    _, _, parts = gradients([5, 19], clip=0.01, ema=0.5, learning_rate=1.0)
    assert furthest(state_of(whole), state_of(parts)) < EXACT


def test_losses_of_half_precision_are_scaled_before_they_go_back() -> None:
    task = Pairs(double=False)
    true = gradients([24], task)[0]
    found, _, step = gradients([5, 19], task, scaled=True, precision="fp16")
    assert step.scaler.get_scale() > 1
    scale = step.scaler.get_scale()
    assert error({name: one / scale for name, one in found.items()}, true) < 0.02


def test_blocks_that_are_computed_again_change_nothing() -> None:
    task = Pairs(dropout=0.5)
    plain, again = (gradients([5, 19], task, checkpointing=on)[0] for on in (False, True))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_a_tower_that_is_frozen_leaves_the_other_its_gradient() -> None:
    whole, parts = (gradients(sizes, frozen=("left",))[0] for sizes in ([24], [5, 19]))
    assert not any(name.startswith("left") for name in parts)
    assert error(parts, whole) < EXACT


def test_only_a_temperature_may_be_trained() -> None:
    frozen = ("left", "right", "unused")
    whole, parts = (gradients(sizes, frozen=frozen)[0] for sizes in ([24], [5, 19]))
    assert set(parts) == {"sharpness"}
    assert error(parts, whole) < EXACT


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "got nothing"),
        (torch.zeros(5, 2), "tensors by name"),
        ({"left": 1.0}, "must be a tensor"),
        ({"left": torch.zeros(())}, "a single number"),
        ({"left": torch.zeros(5, 2), "right": torch.zeros(4, 2)}, "'right' has 4 rows, not 5"),
    ],
)
def test_embeddings_that_are_no_rows_of_items_are_refused(told: Any, said: str) -> None:
    class Wrong(Pairs):
        def embed(self, model: nn.Module, batch: Any) -> Any:
            return told

    with pytest.raises(ConfigError, match=said):
        gradients([5, 5], Wrong())


def test_a_loss_of_nothing_embedded_is_refused() -> None:
    class Detached(Pairs):
        def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> Any:
            return super().contrast(model, {name: one.detach() for name, one in embedded.items()})

    with pytest.raises(ConfigError, match="depends on no embedding"):
        gradients([5, 5], Detached())


# A training


@dataclass(frozen=True)
class Noted(Pairs):
    """Notes which items are embedded together, and whether with a trace."""

    calls: list[tuple[bool, tuple[str, ...]]] = field(default_factory=list, compare=False)

    def embed(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        self.calls.append((torch.is_grad_enabled(), batch["ids"]))
        return super().embed(model, batch)


class Aim(StepClock):
    """Refuses a block of some part of a step."""

    def __init__(self, phase: str, turns: Mapping[int, int]) -> None:
        self.refuse, self.name, self.turns, self.turn = Refuse(), phase, turns, 0

    def phase(self, name: str) -> None:
        self.refuse.at = None
        if name == self.name:
            self.refuse.at, self.refuse.count = self.turns.get(self.turn), 0
            self.turn += 1


def made(plot: Plot, folder: Path, task: Pairs | None = None, **more: Any) -> Run:
    """Return a training of the towers."""

    def make(task: Any, settings: StepSettings) -> Step:
        return make_step(task, replace(settings, batch=plot.config().effective_batch))

    return Run(plot, folder, task=task or of(plot), make=make, **more)


def aimed(plot: Plot, folder: Path, phase: str, turns: Mapping[int, int]) -> tuple[Run, Noted]:
    """Train while blocks of some parts are refused: by the turn of a part, which of its blocks."""
    limited.need()
    task = Noted(dropout=plot.dropout)
    run, aim = made(plot, folder, task), Aim(phase, turns)
    warm(run)
    run.trainer.step.watch = aim
    with LimitedDevice(through=aim.refuse):
        run.to_end()
    return run, task


def one_batch(plot: Plot) -> list[int]:
    return list(range(plot.items))


def last_cuts(task: Noted) -> list[tuple[str, ...]]:
    """Return the micro-batches of which the step came to consist: those that went back last, of all items once."""
    cuts: list[tuple[str, ...]] = []
    for had_trace, ids in reversed(task.calls):
        if not had_trace or sum(map(len, cuts)) == PLOT.items:
            break
        cuts.insert(0, ids)
    return cuts


def by_hand(plot: Plot, run: Run, cuts: list[tuple[str, ...]]) -> dict[str, list[float]]:
    """Return the state after one step of micro-batches that are told."""
    batches = [batch_of(plot, of(plot), [int(one[4:]) for one in ids], 0) for ids in cuts]
    step = fresh_step(run.made)
    step.make_state()
    step.run(batches)
    return state_of(step)


def test_a_training_step_has_the_gradient_of_one_batch(tmp_path: Path) -> None:
    run = made(PLOT, tmp_path, task := Noted())
    before = run.state()
    after = run.to_end().state()
    assert isinstance(run.trainer.stepper, ContrastiveStepper)
    ids = last_cuts(task)
    assert len(ids) > 2
    torch.manual_seed(PLOT.config().seed)
    model = (plain := Pairs()).model()
    ((total, weight),) = plain.loss(model, batch_of(PLOT, plain, one_batch(PLOT), 0)).values()
    (total / weight).backward()
    for name, one in model.named_parameters():
        if one.grad is not None:
            step = np.subtract(before[name], after[name])
            np.testing.assert_allclose(step, one.grad.flatten().numpy(), rtol=EXACT, atol=1e-12)
    assert run.trainer.done == 1


def test_a_step_of_one_micro_batch_is_made_in_one_pass(tmp_path: Path) -> None:
    plot = replace(PLOT, budget=10_000)
    whole = made(plot, tmp_path / "whole", task := Noted()).to_end().state()
    assert [had_trace for had_trace, _ in task.calls[-1:]] == [True]
    assert all(had_trace for had_trace, _ in task.calls)
    assert furthest({**whole, "seen": []}, {**made(PLOT, tmp_path / "cut").to_end().state(), "seen": []}) < EXACT


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("phase", "turns"),
    [
        ("embed", {1: 3}),
        ("embed", {0: 2, 4: 5}),
        ("contrast", {1: 2}),
        ("forward", {3: 4}),
        ("backward", {2: 6}),
        ("backward", {3: 2, 9: 2}),
    ],
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_step_that_runs_out_of_memory_anywhere_is_that_of_the_cuts_it_ends_with(
    tmp_path: Path, phase: str, turns: dict[int, int], dropout: float
) -> None:
    plot = replace(PLOT, dropout=dropout)
    run, task = aimed(plot, tmp_path / "aimed", phase, turns)
    assert run.trainer.done == 1
    cuts = last_cuts(task)
    assert sum(map(len, cuts)) == plot.items
    embedded = [ids for had_trace, ids in task.calls if not had_trace][-len(cuts) :]
    assert embedded == cuts, "both passes are cut alike"
    if not dropout:
        clean = made(plot, tmp_path / "clean").to_end().state()
        assert furthest(run.state(), clean) < EXACT
    assert run.state() == by_hand(plot, run, cuts)


def test_a_loss_that_fits_nowhere_says_that_the_effective_batch_is_too_large(tmp_path: Path) -> None:
    with pytest.raises(PlanInfeasible, match="the loss of all 14 items") as raised:
        aimed(PLOT, tmp_path, "contrast", dict.fromkeys(range(1, 9), 2))
    assert raised.value.where == "train.effective_batch"


def test_an_item_that_fits_nowhere_is_left_out_of_the_loss_of_the_others(tmp_path: Path) -> None:
    class Hungry(Noted):
        def embed(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
            if "item3" in batch["ids"]:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            return super().embed(model, batch)

    plot = replace(PLOT, train={**ONE_STEP, "too_large": "skip"})
    run = made(plot, tmp_path / "run", task := Hungry()).to_end()
    assert run.trainer.done == 1
    left = [number for number in one_batch(plot) if number != 3]
    assert sorted(name for ids in last_cuts_of(task, 13) for name in ids) == sorted(f"item{one}" for one in left)
    others = by_hand(plot, run, [tuple(f"item{one}" for one in left)])
    assert furthest({**run.state(), "seen": []}, {**others, "seen": []}) < EXACT


def last_cuts_of(task: Noted, items: int) -> list[tuple[str, ...]]:
    cuts: list[tuple[str, ...]] = []
    while sum(map(len, cuts)) < items:
        cuts.insert(0, task.calls[-1 - len(cuts)][1])
    return cuts


def test_a_training_goes_on_bitwise_as_if_it_had_not_ended(tmp_path: Path) -> None:
    plot = replace(LONG, dropout=0.3)
    whole = made(plot, tmp_path / "whole").to_end()
    for steps in (1, 4):
        made(plot, tmp_path / str(steps), ending=signals_after(steps)).to_end()
        assert made(plot, tmp_path / str(steps)).to_end().state() == whole.state()


def test_items_whose_embedding_is_no_number_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the loss of step 1 is not finite \(of item5\)"):
        made(replace(PLOT, nan={5: 0}), tmp_path).to_end()


def test_a_step_of_which_no_item_alone_is_to_blame_says_so(tmp_path: Path) -> None:
    class Overflowing(Pairs):
        def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> Any:
            ((total, weight),) = super().contrast(model, embedded).values()
            return {"pairs": (total * (math.inf if len(embedded["left"]) > 1 else 1.0), weight)}

    with pytest.raises(DataError, match="of no single item alone"):
        made(PLOT, tmp_path, Overflowing()).to_end()


# Evaluation


@pytest.mark.parametrize("budget", [30, 60, 10_000])
def test_a_validation_is_the_same_however_it_is_cut(tmp_path: Path, budget: int) -> None:
    settings = {**ONE_STEP, "validation": {"split": "val"}, "effective_batch": 5}
    plot = Plot(train=settings, items=5, validated=12, budget=budget)
    run = made(plot, tmp_path)
    assert run.trainer.validation is not None
    found = run.trainer.validation.figures()
    task, numbers = of(plot), range(5, 17)
    model, totals = run.trainer.step.model.eval(), []
    rows = [batch_of(replace(plot, items=17), task, [one], 0) for one in numbers]
    with torch.no_grad():
        for group in (rows[:5], rows[5:10], rows[10:]):
            embedded = joined_rows([task.embed(model, one) for one in group])
            totals.append(float(task.contrast(model, embedded)["pairs"][0]))
    assert isinstance(found, dict)
    assert found["loss"] == pytest.approx(math.fsum(totals) / 12, rel=1e-9)


@pytest.mark.parametrize("policy", ["cpu", "error"])
def test_a_validation_loss_that_a_card_does_not_hold_is_taken_on_the_processor(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**ONE_STEP, "validation": {"split": "val"}, "effective_batch": 5}
    run = made(Plot(train=settings, items=5, validated=12), tmp_path)
    validation = run.trainer.validation
    assert validation is not None
    whole, hosted = validation.figures(), list[bool]()
    taken, full = ContrastiveStep.evaluate_rows, "CUDA out of memory. Tried to allocate 1 GiB"

    def evaluated(step: ContrastiveStep, rows: Mapping[str, Tensor], *, on_host: bool = False) -> Any:
        hosted.append(on_host)
        if not on_host:
            raise torch.OutOfMemoryError(full)
        return taken(step, rows, on_host=True)

    monkeypatch.setattr(ContrastiveStep, "evaluate_rows", evaluated)
    validation.step.device = "meta"  # it plays a card
    monkeypatch.setattr(validation.step, "moved", lambda batch: batch)
    validation.too_large = policy
    if policy == "error":
        with pytest.raises(PlanInfeasible, match="the loss of all 5 items together does not fit"):
            validation.figures()
        return
    assert validation.figures() == whole
    assert hosted == [False, False, True] * 3


# Ranks


def apart(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> float:
    return furthest({**one, "seen": []}, {**other, "seen": []})


def trained(group: ProcessGroup, folder: Path, plots: list[Plot]) -> list[Any]:
    """Train each plot; say where that ended."""
    torch.set_num_threads(1)
    return [made(plot, folder / str(place), ranks=group).to_end().state() for place, plot in enumerate(plots)]


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_train_what_one_does(tmp_path: Path, world: int) -> None:
    few = Plot(train={**ONE_STEP, "effective_batch": 3}, items=4, budget=30)  # the last step is of one item
    plots = [PLOT, LONG, few, replace(PLOT, budget=10_000)]
    ranks = crew(tmp_path / "crew", world, trained, tmp_path / "crew", plots)
    assert ranks.wait() == [0] * world, "".join(ranks.err(rank) for rank in range(world))
    for place, plot in enumerate(plots):
        alone = made(plot, tmp_path / f"alone{place}").to_end().state()
        states = [ranks.result(rank)[place] for rank in range(world)]
        assert apart(alone, states[0]) < EXACT
        assert all(apart(states[0], one) == 0 for one in states)


def starved(group: ProcessGroup, folder: Path, phase: str) -> dict[str, list[float]]:
    """Train while a block of one rank is refused."""
    torch.set_num_threads(1)
    run = made(PLOT, folder, ranks=group)
    warm(run)
    aim = Aim(phase, {2: 3} if group.rank == 1 else {})
    run.trainer.step.watch, ooms = aim, list[int]()
    run.trainer.watcher.epoch = lambda tally, *_: ooms.append(tally.ooms)  # type: ignore[method-assign]
    with LimitedDevice(through=aim.refuse) as device:
        run.to_end()
        refused = device.refused
    return {**run.state(), "refused": [float(refused)], "ooms": [float(sum(ooms))]}


@pytest.mark.nightly
@pytest.mark.parametrize("phase", ["embed", "backward"])
def test_a_rank_that_runs_out_of_memory_keeps_no_other_waiting(tmp_path: Path, phase: str) -> None:
    limited.need()
    ranks = crew(tmp_path / "crew", 2, starved, tmp_path / "crew", phase)
    assert ranks.wait() == [0, 0], ranks.err(0) + ranks.err(1)
    first, second = ranks.result(0), ranks.result(1)
    assert [one.pop("refused") for one in (first, second)] == [[0.0], [1.0]]
    assert first["ooms"] == second["ooms"] == [1.0], "all ranks count it, on the way back too"
    alone = {**made(PLOT, tmp_path / "alone").to_end().state(), "ooms": [1.0]}
    assert apart(alone, first) < EXACT
    assert apart(first, second) == 0


class TearingPairs(Tearing, ContrastiveStep):
    pass


def torn(group: ProcessGroup, folder: Path, at: int) -> dict[str, Any]:
    """Train while memory ends in the optimizer of one rank."""
    torch.set_num_threads(1)

    def make(task: Any, settings: StepSettings) -> Step:
        return TearingPairs(task, replace(settings, batch=LONG.config().effective_batch))

    run = Run(LONG, folder, ranks=group, task=of(LONG), make=make)
    run.trainer.step.at = frozenset({at} if group.rank == 1 else ())  # type: ignore[attr-defined]
    return {"state": run.to_end().state(), "said": run.said}


@pytest.mark.nightly
@pytest.mark.parametrize("at", [1, 2])
def test_memory_that_ends_in_one_optimizer_takes_all_ranks_back(tmp_path: Path, at: int) -> None:
    ranks = crew(tmp_path / "crew", 2, torn, tmp_path / "crew", at)
    assert ranks.wait() == [0, 0], ranks.err(0) + ranks.err(1)
    assert any("back to the last checkpoint" in line for line in ranks.result(0)["said"])
    alone = made(LONG, tmp_path / "alone").to_end().state()
    assert all(apart(alone, ranks.result(rank)["state"]) < EXACT for rank in range(2))


class Broken(Pairs):
    """Fails in the loss of all items, on one rank."""

    def contrast(self, model: nn.Module, embedded: Mapping[str, Tensor]) -> Any:
        raise ValueError("no")


def broken(group: ProcessGroup, folder: Path) -> None:
    try:
        made(PLOT, folder, Broken() if group.rank == 1 else None, ranks=group).to_end()
    except ValueError as error:
        group.close(str(error))
        raise


def test_a_rank_that_fails_between_the_passes_ends_the_others(tmp_path: Path) -> None:
    ranks = crew(tmp_path / "crew", 2, broken, tmp_path / "crew")
    codes = ranks.wait()
    assert codes[0] == LOST
    assert codes[1] not in (0, None)


class Said(SingleRank):
    """One of two ranks; the other's words are told."""

    def __init__(self, other: Mapping[str, Any]) -> None:
        self.world, self.other = 2, other  # type: ignore[misc]

    def exchange(self, said: Any) -> list[Any]:
        return [said, self.other]


def test_ranks_that_embed_to_other_shapes_are_refused() -> None:
    other = {"items": 2, "like": {"left": [[4], "float32"]}}
    with pytest.raises(DataError, match=r"on rank 0 and .* on rank 1"):
        gathered(Said(other), {"left": torch.zeros(2, 3)}, 2, "cpu")


def test_ranks_that_embed_in_other_precisions_keep_the_wider() -> None:
    other = {"items": 2, "like": {"left": [[3], "bfloat16"]}}
    rows, _ = gathered(Said(other), {"left": torch.full((2, 3), 0.1)}, 2, "cpu")
    assert rows["left"].dtype == torch.float32
    assert rows["left"][:2].eq(torch.tensor(0.1)).all()


def test_a_rank_without_items_has_the_rows_of_the_others() -> None:
    other = {"items": 2, "like": {"left": [[4], "float32"], "is_whole": [[], "bool"]}}
    rows, start = gathered(Said(other), {}, 0, "cpu")
    assert start == 0
    assert rows["left"].shape == (2, 4)
    assert rows["is_whole"].dtype == torch.bool
