"""Memory ends on one rank of a sharded model, at any block of a step: all begin the step again, and none waits."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.errors import PlanInfeasible
from pipeline.memory.runtime.governor import Governor
from pipeline.memory.runtime.meters import Habits, Upkeep
from pipeline.training.evaluating.evaluator import Evaluator
from pipeline.training.items.batch import BatchOrigin
from pipeline.training.ranks.process_group import ProcessGroup
from pipeline.training.ranks.rank_protocol import LOST
from pipeline.training.step.fsdp import ShardedStep, local
from pipeline.training.step.global_step import StepReport, WholeStep
from pipeline.training.step.local_sharded import ShardedStepper, joint_pass
from pipeline.training.step.local_step import Local
from tests.testkit.limited import device
from tests.training.ranks.crews import crew
from tests.training.step import spread
from tests.training.step.test_sharded_half import Guess

Micros = list[list[int]]

SHARES: dict[str, list[Micros]] = {
    "two": [[[0, 1, 2], [3, 4], [5]], [[6, 7, 8, 9], [10, 11, 12]]],
    "empty": [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9, 10, 11, 12]], []],
    "alone": [[[0], [1]], [[2]]],
    "four": [[[0, 1, 2]], [[3, 4], [5, 6]], [], [[7, 8, 9, 10, 11, 12]]],
}
MOST = 12  # blocks that are refused, of each case


class RefuseWithin:
    """Refuses one block that is allocated within a pass, after so many more; counts all that are.

    What gloo copies to within a collective does not count: on a card there is no such thing.
    """

    def __init__(self) -> None:
        self.after, self.seen, self.is_within, self.refused = -1, 0, False, 0

    def __call__(self, block: int, signed_bytes: int) -> bool:
        if signed_bytes < 0 or not self.is_within:
            return True
        self.seen += 1
        self.refused += self.seen == self.after
        return self.seen != self.after

    def begin(self, after: int) -> None:
        """Count anew."""
        self.after, self.seen, self.refused = after, 0, 0

    def watch(self, step: ShardedStep) -> None:
        """Count within the passes of a step."""
        passes, ranks = step.spread.passes, cast("Any", step.ranks)
        passes._make = self._during(passes._make, is_within=True)  # type: ignore[method-assign]
        ranks.collective = self._during(type(ranks).collective.__get__(ranks), is_within=False)

    def _during(self, call: Callable[..., None], *, is_within: bool) -> Callable[..., None]:
        def run(*arguments: Any, **named: Any) -> None:
            before, self.is_within = self.is_within, is_within
            try:
                call(*arguments, **named)
            finally:
                self.is_within = before

        return run


@dataclass
class Trial:
    """A step made as in a training: its report, what this rank ran in the end, its shards, how often memory ended."""

    report: StepReport
    ran: Micros
    shards: str
    ooms: int


def trial(step: ShardedStep, group: ProcessGroup, micros: Micros, *, whole: bool = False) -> Trial:
    """Make a step from the same parameters as every other; they are the same again afterwards."""
    ran: Micros = []
    ooms: list[str] = []
    stepper = ShardedStepper(
        step,
        Governor(budget=1 << 30, ladder=("checkpointing", "offload")),
        np.ones(spread.ITEMS, np.int64),
        Upkeep(Habits(), "cpu"),
        too_large="skip",
        begin=lambda piece: ran.append(list(piece.numbers)),
        failed=lambda _, oom: ooms.append(oom.error),
    )
    stepper.keeps_whole = whole
    run = stepper.run

    def run_anew(*arguments: Any) -> Local:
        ran.clear()  # of an attempt before, or of the pass that looked for weights
        return run(*arguments)

    stepper.run = run_anew  # type: ignore[method-assign]
    before = [local(one).clone() for one in step.model.state_dict().values()]
    torch.manual_seed(11 + group.rank)
    together = WholeStep(step, stepper, group, meter=None, complete=lambda _: None, say=lambda _: None)
    report = together.accumulate(spread.share_of(micros, together.step.task), 1)
    assert together.take(report) is not None
    shards = [local(one) for one in step.model.state_dict().values()]
    found = hashlib.sha256(b"".join(one.numpy().tobytes() for one in shards)).hexdigest()
    for one, kept in zip(shards, before, strict=True):
        one.copy_(kept)
    return Trial(report, ran, found, len(ooms))


def begin_again(group: ProcessGroup, cases: list[tuple[str, str, dict[str, Any], bool]], failing: int) -> list[Any]:
    """Refuse blocks of every case on one rank, one at a time; return what came of each step."""
    gc.freeze()  # else every collection goes through all of torch
    spread.TASKS["words"] = Guess
    told: list[Any] = []
    for task, name, settings, whole in cases:
        step = spread.step_of(group, task, {**PLAIN, **settings})
        refuse, micros = RefuseWithin(), SHARES[name][group.rank]
        refuse.watch(step)
        with ExitStack() as stack:
            if group.rank == failing:
                stack.enter_context(device.LimitedDevice(through=refuse))
            trial(step, group, micros, whole=whole)  # the first allocates what stays
            refuse.begin(-1)
            undisturbed = {"": trial(step, group, micros, whole=whole)}
            blocks = group.exchange({"blocks": refuse.seen})[failing]["blocks"]
            for place in range(1, blocks + 1, max(1, blocks // MOST)):
                refuse.begin(place)
                disturbed = trial(step, group, micros, whole=whole)
                refuse.begin(-1)
                cut = str(group.exchange({"ran": disturbed.ran}))
                if cut not in undisturbed:
                    undisturbed[cut] = trial(step, group, disturbed.ran, whole=whole)
                same = disturbed.shards == undisturbed[cut].shards
                told.append([f"{task} {name} {place}", disturbed.ooms, disturbed.report.sum_of("items"), same])
            told.append([f"{task} {name}", len(undisturbed)])
    return told


PLAIN: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.0}
CASES: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "clipped": ("one", "two", {"clip": 0.5}, False),
    "two terms": ("two", "two", {}, False),
    "weights known": ("told", "empty", {}, True),
    "half": ("words", "two", {"precision": "bf16", "checkpointing": True}, False),
    "offloaded": ("one", "two", {"offload": True}, True),
    "alone": ("one", "alone", {}, False),
    "four": ("two", "four", {}, False),
}


QUICK = (("clipped", 0), ("half", 1), ("four", 1))


@pytest.mark.parametrize(
    ("case", "failing"),
    [
        pytest.param(case, failing, marks=() if (case, failing) in QUICK else pytest.mark.nightly)
        for case in CASES
        for failing in (0, 1)
    ],
)
def test_a_step_that_ran_out_on_one_rank_is_made_again_by_all(tmp_path: Path, case: str, failing: int) -> None:
    device.need()
    device.library()
    _, name, *_ = CASES[case]
    world = len(SHARES[name])
    started = crew(tmp_path, world, begin_again, [CASES[case]], failing)
    assert started.wait() == [0] * world, [started.err(rank) for rank in range(world)]
    items = sum(len(micro) for micros in SHARES[name] for micro in micros)
    for rank in range(world):
        *places, (_, cuts) = started.result(rank)
        assert len(places) >= MOST
        for what, ooms, count, same in places:
            assert (ooms, count, same) == (rank == failing, items, True), (rank, what)
        assert cuts > 1 or name == "alone"  # pieces were halved


class Full(spread.OneTerm):
    """A task for which memory ends at one item, whatever is done about it."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        terms = super().loss(model, batch)
        if 4 in batch["number"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return terms


def run_out(group: ProcessGroup, too_large: str) -> list[Any]:
    """Train with an item that fits nowhere."""
    spread.TASKS["full"] = Full
    step = spread.step_of(group, "full", PLAIN)
    if too_large == "skip":
        with_it = trial(step, group, SHARES["two"][group.rank])
        without = trial(spread.step_of(group, "one", PLAIN), group, with_it.ran)
        return [with_it.report.sum_of("skipped"), with_it.report.sum_of("items"), with_it.shards == without.shards]
    stepper = spread.stepper_of(step)
    stepper.too_large, stepper.governor = too_large, Governor(budget=1 << 30, ladder=stepper.ladder)
    together = WholeStep(step, stepper, group, meter=None, complete=lambda _: None, say=lambda _: None)
    together.accumulate(spread.share_of(SHARES["two"][group.rank]), 1)
    return []


def test_an_item_that_fits_on_no_rung_is_left_out_by_all(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, run_out, "skip")
    assert started.wait() == [0, 0], [started.err(rank) for rank in range(2)]
    assert [started.result(rank) for rank in range(2)] == [[1, spread.ITEMS - 1, True]] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("too_large", ["cpu", "error"])
def test_an_item_that_fits_on_no_rung_and_may_not_go_ends_all(tmp_path: Path, too_large: str) -> None:
    started = crew(tmp_path, 2, run_out, too_large)
    assert started.wait() == [PlanInfeasible.exit_code, LOST]
    assert "item-4 does not fit in memory, not even alone and with every remedy" in started.err(0)
    assert "gave up: training: item-4 does not fit in memory" in started.err(1)


class FullBeside(spread.OneTerm):
    """A task for which memory always ends on the second rank, and which is not tried for ever."""

    tried = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        terms = super().loss(model, batch)
        if torch.distributed.get_rank():
            FullBeside.tried += 1
            assert FullBeside.tried < 20, "the same is tried again and again"
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
        return terms


def run_out_beside(group: ProcessGroup) -> None:
    """Run another rank's items along where none fits."""
    spread.TASKS["beside"] = FullBeside
    trial(spread.step_of(group, "beside", PLAIN), group, SHARES["empty"][group.rank])


def test_an_item_of_another_rank_that_fits_on_no_rung_of_this_one_ends_all(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, run_out_beside)
    assert started.wait() == [LOST, PlanInfeasible.exit_code]
    assert "does not fit in memory, not even alone and with every remedy" in started.err(1)


def differ(group: ProcessGroup) -> None:
    """Let one rank make a pass that gathers, and the other one that does not."""
    step = spread.step_of(group, "one", {})
    batch = step.task.collate([{"number": 1}], None)  # type: ignore[arg-type]
    made: Callable[[], Any] = (lambda: step.evaluate(batch)) if group.rank else lambda: None
    joint_pass(step, made)


def test_ranks_that_make_different_passes_are_told_so_and_do_not_hang(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, differ)
    started.wait()
    for rank in range(2):
        assert "the model does not run the same blocks on all ranks" in started.err(rank)


def search(group: ProcessGroup) -> list[str]:
    """Look for items whose loss is not finite, where one does not fit."""
    spread.TASKS["full"] = Full
    step = spread.step_of(group, "full", {})
    stepper = spread.stepper_of(step)
    with torch.no_grad():
        for parameter in step.trained:
            spread_out: Any = parameter
            spread_out._local_tensor.fill_(torch.nan)
    return stepper.not_finite(spread.share_of(SHARES["two"][group.rank]))


def test_the_search_for_what_is_not_finite_goes_on_past_what_does_not_fit(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, search)
    assert started.wait() == [0, 0], [started.err(rank) for rank in range(2)]
    found = sorted(started.result(0) + started.result(1))
    assert found == sorted(f"item-{number}" for number in range(spread.ITEMS) if number != 4)


def lose(group: ProcessGroup) -> list[str]:
    """Let memory end within the optimizer of one rank; return what each hears of it in the next step."""
    step = spread.step_of(group, "told", PLAIN)
    stepper = spread.stepper_of(step)
    together = WholeStep(step, stepper, group, meter=None, complete=lambda _: None, say=lambda _: None)
    heard = []
    for is_full in (True, False):
        report = together.accumulate(spread.share_of(SHARES["two"][group.rank]), 1)
        heard.append(report.lost)
        if is_full and group.rank:
            step.apply = lambda: torch.empty(1 << 60)  # type: ignore[method-assign, assignment, return-value]
        if not report.lost:
            together.take(report)
    return heard


def test_memory_that_ends_within_the_optimizer_of_one_rank_is_heard_by_all_before_the_next_pass(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, lose)
    assert started.wait() == [0, 0], [started.err(rank) for rank in range(2)]
    for rank in range(2):
        first, second = started.result(rank)
        assert first == ""
        assert second.startswith("rank 1: memory ended within the optimizer")


def tell(group: ProcessGroup) -> list[list[str]]:
    """Return what each rank told that it is on while weights were looked for."""
    stepper = spread.stepper_of(spread.step_of(group, "two", PLAIN))
    told: list[list[str]] = []
    stepper._begin = lambda piece: told.append(list(piece.ids))
    stepper.weights(spread.share_of(SHARES["two"][group.rank]))
    return told


def test_ranks_that_look_for_weights_tell_their_own_items_before_they_run(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, tell)
    assert started.wait() == [0, 0], [started.err(rank) for rank in range(2)]
    for rank in range(2):
        own = [[spread.NAMES[number] for number in micro] for micro in SHARES["two"][rank]]
        assert started.result(rank) == own


class Wide(spread.OneTerm):
    """A task for which memory ends at more than two items of the first rank's, or at its item 9."""

    rank = 0

    def loss(self, model: nn.Module, batch: Any) -> Any:
        terms = super().loss(model, batch)
        if self.rank == 0 and (len(batch["number"]) > 2 or 9 in batch["number"]):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return terms


class Held(list[list[int]]):
    """A loader, as far as an evaluation looks at it: a rank's micro-batches."""

    def set_epoch(self, epoch: int) -> None:
        pass

    def read(self) -> Iterator[Any]:
        for numbers in self:
            yield self.fetch(tuple(numbers), None)

    def fetch(self, numbers: tuple[int, ...], _: Any) -> Any:
        return spread.Given(numbers, BatchOrigin(0, 0, 0, 1, 0))


def evaluate(group: ProcessGroup, folder: Path) -> list[Any]:
    """Evaluate what does not fit at once."""
    spread.TASKS["wide"] = Wide
    step = spread.step_of(group, "wide", {})
    step.task.rank = group.rank  # type: ignore[attr-defined]
    loader: Any = Held([[[0, 1, 2, 3], [9], [4]], [[5, 6, 7, 8, 10, 11, 12]]][group.rank])
    rejected: list[str] = []
    evaluator = Evaluator(
        step, loader, group, folder, too_large="skip", reject=lambda rejection: rejected.append(rejection.id)
    )
    return [evaluator.figures()["loss"], rejected]


def test_an_evaluation_goes_on_in_halves_and_counts_each_item_once(tmp_path: Path) -> None:
    started = crew(tmp_path, 2, evaluate, tmp_path / "outputs")
    assert started.wait() == [0, 0], [started.err(rank) for rank in range(2)]
    step = spread.alone("one", {})
    batch = step.task.collate([{"number": number} for number in range(spread.ITEMS) if number != 9], None)  # type: ignore[arg-type]
    ((total, weight),) = step.evaluate(batch).values()
    for rank in range(2):
        assert started.result(rank) == [pytest.approx(float(total) / float(weight), rel=1e-10), [["item-9"], []][rank]]
