"""Whole trainings of one process: exact, through every out-of-memory, taken up wherever they ended."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from torch import Tensor, nn

from pipeline.command_line import Command
from pipeline.engine.worker import failure_kind
from pipeline.errors import CacheDamaged, DataError, JobFailed, RecordMissing
from pipeline.records import Rejection
from pipeline.training.checkpoints.checkpoint import by_metric, checkpoints_in, latest_checkpoint
from pipeline.training.checkpoints.sealed_folder import unseal
from pipeline.training.items.item_source import DamagedItems, ItemArrays
from pipeline.training.loop.metrics_log import read_epochs
from pipeline.training.loop.train import Job
from pipeline.training.step.step import Step
from tests.store.faulty_disks import FailingDisk
from tests.testkit.limited import device as limited
from tests.testkit.limited.device import LimitedDevice
from tests.training.checkpoints.saved import forked
from tests.training.loop.loops import (
    Aimed,
    Judged,
    Memory,
    Plot,
    Refuse,
    Run,
    Tiny,
    batch_of,
    big_batch,
    furthest,
    signals_after,
    state_of,
    table_of,
    warm,
)

pytestmark = pytest.mark.usefixtures("quick")
EXACT = 1e-10
ADAM = {"optimizer": "adamw", "ema": 0.9, "clip": 1.0, "weight_decay": 0.1}
WARM = {"schedule": {"kind": "cosine", "warmup": 3, "least": 0.1}}


def one_step(plot: Plot, folder: Path) -> dict[str, list[float]]:
    """Return what the parameters lost in one step of plain descent at a rate of one: the gradients."""
    run = Run(plot, folder)
    before = run.state()
    after = run.to_end().state()
    trained = [name for name, one in run.trainer.step.model.named_parameters() if not name.startswith("unused")]
    return {name: [old - new for old, new in zip(before[name], after[name], strict=True)] for name in trained}


@given(
    items=some.integers(1, 14),
    budget=some.integers(1, 120),
    micro=some.sampled_from([None, 1, 2, 3]),
    terms=some.sampled_from(["one", "several", "weighted"]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_step_of_any_micro_batches_has_the_gradient_of_one_batch(
    tmp_path_factory: pytest.TempPathFactory, items: int, budget: int, micro: int | None, terms: str
) -> None:
    train = {"effective_batch": items, "epochs": 1, "learning_rate": 1.0} | (
        {"micro_batch": min(micro, items)} if micro else {}
    )
    plot = Plot(train=train, items=items, budget=budget, terms=terms)
    got = one_step(plot, tmp_path_factory.mktemp("step"))
    assert furthest(got, big_batch(plot, range(items))) < EXACT


# Memory ends


def interrupted(plot: Plot, folder: Path, at: dict[int, int], stop: int | None = None) -> tuple[Run, Aimed]:
    """Train while some blocks are refused: of a call of `accumulate`, which one."""
    run = Run(plot, folder, make=Aimed)
    step = run.trainer.step
    assert isinstance(step, Aimed)
    warm(run)
    step.refuse, step.at = Refuse(), at
    with LimitedDevice(through=step.refuse):
        run.to_end(stop=stop)
    return run, step


def several(plot: Plot, folder: Path) -> dict[int, int]:
    """Return a block of the first micro-batch of several items after the rehearsal."""
    _, step = interrupted(plot, folder, {})
    return {next(call for call, ids in enumerate(step.tried) if call and len(ids) > 1): 5}


def plain(plot: Plot, run: Run, cuts: list[list[tuple[str, ...]]]) -> dict[str, list[float]]:
    """Train by a plain loop over micro-batches that are told, with a model of its own."""
    from pipeline.training.loop.train import fresh_step
    from pipeline.training.step.optimizers import factor, set_rate

    step = fresh_step(run.made)
    step.make_state()
    steps = run.trainer.phases[0].loader.sampler.steps
    for number, step_cuts in enumerate(cuts):
        set_rate(step.optimizer, factor(plot.config().schedule, number, len(cuts)))
        weight = 0.0
        for ids in step_cuts:
            batch = batch_of(plot, step.task, [int(name[4:]) for name in ids], number // steps)
            step.accumulate(batch)
            weight += float(len(batch["y"]))
        step.settle({"squares": (0.0, weight)})
        step.apply()
    return state_of(step)


def test_wherever_memory_ends_the_run_is_the_one_that_was_cut_so_from_the_start(tmp_path: Path) -> None:
    limited.need()
    plot = Plot(train={**ADAM, **WARM, "epochs": 1}, items=9, budget=60, dropout=0.3)
    undisturbed, step = interrupted(plot, tmp_path / "undisturbed", {})
    calls = list(step.blocks)
    assert len(calls) >= 5  # the rehearsal among them
    assert plain(plot, undisturbed, step.cuts) == undisturbed.state()
    ooms = 0
    for call, blocks in enumerate(calls):
        for block in sorted({1, blocks // 3, 2 * blocks // 3, blocks}):
            run, step = interrupted(plot, tmp_path / f"{call}-{block}", {call: block})
            assert sum(map(len, step.cuts)) >= len(calls) - 1
            assert plain(plot, run, step.cuts) == run.state(), (call, block)
            assert run.trainer.done == run.trainer.steps
            ooms += read_epochs(run.made.folder.path)[0].ooms
    assert ooms == 4 * (len(calls) - 1)


# Ends, and is taken up


FULL = Plot(train={**ADAM, **WARM, "epochs": 3, "checkpoints": {"every": 2}}, items=14, budget=60, dropout=0.3)


@pytest.mark.parametrize("behind", [False, True])
def test_a_run_that_is_killed_at_random_goes_on_as_if_it_had_not_been(tmp_path: Path, *, behind: bool) -> None:
    checkpoints = {"every": 1, "asynchronous": behind}
    plot = replace(FULL, train={**FULL.train, "checkpoints": checkpoints})
    whole = Run(plot, tmp_path / "whole").to_end()
    steps = whole.trainer.steps
    killed_at = random.Random(3 + behind)
    done, kills = 0, 0
    while done < steps and kills < 12:
        last = done + killed_at.randint(1, 3)

        def work(last: int = last) -> None:
            torch.set_num_threads(1)
            run = Run(plot, tmp_path / "killed")
            for number in run.trainer.run():
                if number == last:
                    os.kill(os.getpid(), signal.SIGKILL)

        _, status = os.waitpid(forked(work), 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        kills += 1
        done = last if not behind else done + 1
    assert kills >= 2
    assert Run(plot, tmp_path / "killed").to_end().state() == whole.state()


@dataclass(frozen=True)
class Purged(Memory):
    """Graphs of which some can no longer be read."""

    damaged: DamagedItems
    gone: set[str]

    def read(self, numbers: Sequence[int]) -> Iterator[ItemArrays | Rejection]:
        for made in super().read(numbers):
            gone = made.id in self.gone
            yield self.damaged.leave_out(RecordMissing("no record", item=made.id)) if gone else made


@pytest.mark.parametrize("spare", [0, 2])
@pytest.mark.parametrize(("later", "lost"), [(1, range(4, 11)), (4, range(4, 11)), (1, range(14, 17))])
def test_a_purge_of_the_cache_ends_on_the_last_checkpoint_that_all_items_made(
    tmp_path: Path, spare: int, later: int, lost: range
) -> None:
    plot, gone = replace(FULL, validated=3), set[str]()  # items 14 to 16
    quiet, damaged = Run(plot, tmp_path / "quiet").to_end(), DamagedItems(lambda *_: False, 14, spare, "cache")

    class OfPurged(Run):
        def job(self) -> Job:
            return replace(super().job(), source=lambda table: Purged(table, damaged, gone), damaged=damaged)

    def purge(done: int) -> None:
        gone.update(f"item{number}" for number in (lost if done >= 2 + later else lost[:2] if done >= 2 else ()))

    run = OfPurged(plot, tmp_path / "run")
    with pytest.raises(CacheDamaged, match="max_rejected_fraction"):
        run.to_end(each=purge)
    newest = latest_checkpoint(run.made.folder.checkpoints)
    assert newest is not None
    assert newest.of_all_items
    assert newest.step >= 1
    assert Run(plot, tmp_path / "run").to_end().state() == quiet.state()


# A full disk


@pytest.mark.parametrize("behind", [False, True])
def test_a_full_disk_is_said_and_training_goes_on(tmp_path: Path, *, behind: bool) -> None:
    plot = replace(FULL, train={**FULL.train, "checkpoints": {"every": 2, "asynchronous": behind}})
    whole = Run(plot, tmp_path / "whole").to_end()
    run = Run(plot, tmp_path / "run")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for done in run.trainer.run():
        if done == 2:  # a checkpoint is there
            run.trainer.keeper.finish()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        elif done == 5:
            run.trainer.keeper.finish()
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.state() == whole.state()
    warnings = [line for line in run.said if line.startswith("WARNING")]
    assert len(warnings) == 2  # after step 4 and at the epoch's end
    assert all("could not be saved" in line and "step-00000002" in line for line in warnings)
    assert run.context.report.warnings["checkpoints"].startswith(
        "2 checkpoints could not be saved; the last error: the checkpoint"
    )


def test_a_model_that_cannot_be_saved_in_the_end_says_why(tmp_path: Path) -> None:
    run = Run(FULL, tmp_path)
    run.trainer.keeper.checkpoints.disk = FailingDisk("write_at", errno.ENOSPC)
    with pytest.raises(JobFailed, match="No space left on device") as raised:
        run.to_end()
    assert failure_kind(raised.value) == "disk_full"


# What is not finite


def poisoned(policy: str, **more: Any) -> Plot:
    return Plot(
        train={"epochs": 1, "nan": policy, "effective_batch": 3, "checkpoints": {"every": 1}}, nan={7: 0}, **more
    )


def test_a_loss_that_is_not_finite_ends_with_the_item_and_the_step(tmp_path: Path) -> None:
    run = Run(poisoned("stop"), tmp_path)
    with pytest.raises(DataError, match=r"the loss of step (\d) is not finite \(of item7\)") as raised:
        run.to_end()
    number = int(str(raised.value).partition("step ")[2][0])
    raised.value.in_project(Command.about("mine.yaml", []))
    assert f"next: pipeline replay --step {number} --config mine.yaml   or   " in str(raised.value)
    (bundle,) = (run.made.folder.bundles).iterdir()
    content = unseal(bundle).data
    assert content["step"] == number
    latest = latest_checkpoint(run.made.folder.checkpoints)
    assert latest is not None
    assert latest.step == number - 1
    assert content["checkpoint"]["path"].endswith(latest.name)
    # taken up, it comes to the same step
    with pytest.raises(DataError, match=f"step {number} is not finite"):
        Run(poisoned("stop"), tmp_path).to_end()


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_loss_that_is_not_finite_costs_its_step_alone(tmp_path: Path, policy: str) -> None:
    """A checkpoint after every step: also a rollback loses nothing else."""
    run = Run(poisoned(policy), tmp_path / "run").to_end()
    (epoch,) = read_epochs(run.made.folder.path)
    assert run.trainer.done == run.trainer.steps
    assert epoch.left_out_steps == 1
    assert all(value == value and value is not None for value in epoch.loss.values())
    finite = run.state()
    assert all(value == value for one in finite.values() for value in one)
    lines = [line for line in run.said if "not finite" in line]
    assert "item7" in lines[0]
    assert Run(poisoned("skip"), tmp_path / "skip").to_end().state() == finite


def test_many_rollbacks_without_a_good_step_end_the_run(tmp_path: Path) -> None:
    plot = replace(poisoned("rollback"), nan=dict.fromkeys(range(14), 0))
    with pytest.raises(JobFailed, match="did not help"):
        Run(plot, tmp_path).to_end()


def test_a_gradient_that_is_not_finite_is_seen_where_the_loss_is(tmp_path: Path) -> None:
    plot = replace(poisoned("skip"), nan={}, outgrown=True)
    run = Run(plot, tmp_path).to_end()
    assert any("the gradient of step" in line for line in run.said)
    assert read_epochs(run.made.folder.path)[0].left_out_steps == 1
    assert all(value == value for one in run.state().values() for value in one)


# Epochs and their ends


def test_an_average_is_validated_and_the_best_is_kept(tmp_path: Path) -> None:
    train = {**ADAM, "epochs": 4, "validation": {"split": "val", "every": 2, "monitor": "mean", "better": "higher"}}
    plot = Plot(train=train, validated=5)
    run = Run(plot, tmp_path, task=Judged(plot)).to_end()
    epochs = read_epochs(run.made.folder.path)
    assert [bool(one.validation) for one in epochs] == [False, True, False, True]
    figures = [one.validation["mean"] for one in epochs if one.validation]
    best = by_metric(checkpoints_in(run.made.folder.checkpoints))[0]
    assert best.metric == max(figures)
    step = run.trainer.step
    table = table_of(plot.items + plot.validated)
    batch = batch_of(replace(plot, items=len(table)), step.task, range(plot.items, len(table)), 0)
    with step.averaged(), torch.no_grad():
        value = [one.mean().item() for one in step.model.eval()(batch["x"]).split(batch["sizes"].tolist())]
    assert sum(value) / len(value) == pytest.approx(figures[-1], abs=1e-12)


def test_a_figure_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    train = {"validation": {"split": "val", "monitor": "auroc"}}
    with pytest.raises(DataError, match=r"auroc.*loss"):
        Run(Plot(train=train, validated=3), tmp_path).to_end()


CURRICULUM = Plot(
    train={**ADAM, "epochs": 4, "checkpoints": {"every": 2}},
    items=14,
    dropout=0.3,
    phases=((2, 30, 50), (2, 999, 100)),
)


@pytest.mark.nightly
def test_a_curriculum_trains_smaller_items_first_and_goes_on_from_anywhere(tmp_path: Path) -> None:
    limited.need()
    at = several(CURRICULUM, tmp_path / "look")
    whole, step = interrupted(CURRICULUM, tmp_path / "whole", at)
    small = {f"item{n}" for n, nodes in enumerate(table_of(14).sizes["nodes"]) if nodes <= 30}
    assert 4 <= len(small) < 14
    first = whole.trainer.phases[0]
    per = first.loader.sampler.steps
    seen = [{name for cut in one for name in cut} for one in step.cuts]
    assert set().union(*seen[: 2 * per]) == small
    assert set().union(*seen[2 * per :]) == {f"item{n}" for n in range(14)}
    # each epoch has its own order and its own random numbers
    assert seen[2 * per : 2 * per + 3] != seen[-3:]
    # what was learned of the first budget holds for the second in proportion
    assert whole.trainer.governor.budget < 100
    for stop in (2 * per - 1, 2 * per, 2 * per + 1):
        interrupted(CURRICULUM, tmp_path / str(stop), at, stop)
        rest = Run(CURRICULUM, tmp_path / str(stop)).to_end()
        assert rest.state() == whole.state(), stop
        assert rest.trainer.governor.budget == whole.trainer.governor.budget


@pytest.mark.nightly
@pytest.mark.parametrize("terms", ["several", "weighted"])
def test_a_stage_of_other_options_has_its_own_loss_and_is_validated_by_that_of_the_last(
    tmp_path: Path, terms: str
) -> None:
    train = {**ADAM, "epochs": 4, "validation": {"split": "val"}}
    plot = Plot(train=train, terms=terms, first_terms="one", phases=((2, 999, 50), (2, 999, 50)), validated=4)
    whole = Run(plot, tmp_path / "whole").to_end()
    per = whole.trainer.phases[0].steps
    begun = Run(plot, tmp_path / "begun").to_end(stop=2 * per)
    alone = Run(replace(plot, terms="one", phases=((4, 999, 50),)), tmp_path / "alone").to_end(stop=2 * per)
    assert begun.state() == alone.state()
    epochs = read_epochs(whole.made.folder.path)
    assert [set(one.loss) for one in epochs] == [{"squares"}] * 2 + [{"squares", "means"}] * 2
    assert all({"loss.squares", "loss.means"} <= set(one.validation) for one in epochs)
    for stop in (2 * per - 1, 2 * per, 2 * per + 1):
        Run(plot, tmp_path / str(stop)).to_end(stop=stop)
        assert Run(plot, tmp_path / str(stop)).to_end().state() == whole.state(), stop


# Settings


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_trains_and_goes_on_as_if_it_had_not_ended(tmp_path: Path, precision: str) -> None:
    plot = replace(FULL, train={**FULL.train, "precision": precision}, dropout=0.0)

    def scaled(task: Any, given: Any) -> Step:
        return Step(task, given, scaled=True)

    whole = Run(plot, tmp_path / "whole", make=scaled).to_end()
    assert whole.trainer.step.scaler.is_enabled() == (precision == "fp16")
    Run(plot, tmp_path / "run", make=scaled, ending=signals_after(4)).to_end()
    run = Run(plot, tmp_path / "run", make=scaled).to_end()
    assert run.state() == whole.state()
    exact = Run(replace(FULL, dropout=0.0), tmp_path / "exact").to_end()
    weights = {name: one for name, one in exact.state().items() if name.endswith("weight") and "optim" not in name}
    assert 0 < furthest(weights, {name: run.state()[name] for name in weights}) < 0.05


def test_a_scale_that_is_too_large_leaves_steps_out_and_shrinks(tmp_path: Path) -> None:
    plot = Plot(train={"precision": "fp16", "epochs": 2})
    run = Run(plot, tmp_path, make=lambda task, given: Step(task, given, scaled=True))
    run.trainer.step.scaler.load_state_dict({**run.trainer.step.scaler.state_dict(), "scale": 1e38})
    before = run.state()
    for done in run.trainer.run():
        if done == 1:
            assert run.state()["first.weight"] == before["first.weight"]
    assert run.trainer.step.scaler.get_scale() < 1e38
    assert run.trainer.done == run.trainer.steps


def test_items_are_cropped_and_counted(tmp_path: Path) -> None:
    train = {"epochs": 2, "effective_batch": 5}
    run = Run(Plot(train=train, crop={"nodes": 20}), tmp_path).to_end()
    larger = int((table_of(14).sizes["nodes"] > 20).sum())
    assert larger >= 3
    assert [one.cropped for one in read_epochs(run.made.folder.path)] == [larger, larger]


def test_a_step_without_any_item_changes_nothing(tmp_path: Path) -> None:
    left = tuple(f"item{n}" for n in range(14) if n != 5)
    plot = Plot(train={"effective_batch": 1, "epochs": 1, "precision": "fp16"}, leave_out=left)
    run = Run(plot, tmp_path, make=lambda task, given: Step(task, given, scaled=True)).to_end()
    assert run.trainer.done == 14
    assert read_epochs(run.made.folder.path)[0].items == 1


def test_a_host_whose_memory_is_nearly_used_up_ends_the_run_in_order(tmp_path: Path) -> None:
    run = Run(FULL, tmp_path, mem_bytes=1 << 20)
    with pytest.raises(JobFailed) as raised:
        run.to_end()
    assert isinstance(raised.value.__cause__, MemoryError)
    assert run.trainer.done == 1
    rest = Run(FULL, tmp_path)
    assert next(rest.trainer.run()) == 1


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # within torch's own compiler
def test_a_compiled_model_trains_the_same(tmp_path: Path) -> None:
    if limited.why_not():
        pytest.skip("no C++ compiler is installed, which torch.compile needs on the CPU")
    plot = Plot(train={"epochs": 3, "effective_batch": 1}, items=1, terms="weighted")  # one shape: compiled once
    eager = Run(plot, tmp_path / "eager").to_end()
    compiled = Run(replace(plot, train={**plot.train, "compile": True}), tmp_path / "compiled").to_end()
    assert compiled.trainer.step.model._compiled_call_impl is not None
    assert furthest(eager.state(), compiled.state()) < EXACT


def test_an_epoch_in_which_nothing_could_be_learned_ends_the_training(tmp_path: Path) -> None:
    class Unlabelled(Tiny):
        def loss(self, model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, float]]:
            return {name: (total * 0, 0.0) for name, (total, _) in super().loss(model, batch).items()}

    with pytest.raises(DataError, match="nothing was learned"):
        Run(Plot(), tmp_path, task=Unlabelled(Plot())).to_end()
