"""A model is looked at as often as was asked for: every few epochs, parts of an epoch, or steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.codec import plain
from pipeline.config.schema import Config
from pipeline.config.schema_train import ValidationSection
from pipeline.journal.run_status import State
from pipeline.stages.trained import progress_of
from pipeline.training.checkpoints.checkpoint import by_metric, checkpoints_in
from pipeline.training.loop.metrics_log import STEP, read_epochs, read_figures
from pipeline.views.compared_models import read_model
from tests.training.loop.loops import Plot, Run, signals_after

ADAM = {"optimizer": "adamw", "ema": 0.9, "clip": 1.0, "weight_decay": 0.1}


def plot_of(every: Any, **more: Any) -> Plot:
    validation = {"split": "val", "every": every, **more}
    return Plot(train={**ADAM, "epochs": 3, "validation": validation}, validated=4, dropout=0.3)


def looked_at(run: Run) -> list[int]:
    """Return after which steps the model was looked at, and that it is written down in order."""
    within = [line[STEP] for line in read_figures(run.made.folder.path) if "validation/loss" in line]
    ends = [epoch.step for epoch in read_epochs(run.made.folder.path) if epoch.validation]
    return sorted(within + ends)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("every", "of_epoch"),
    [
        (1, lambda steps: {steps, 2 * steps, 3 * steps}),
        (2, lambda steps: {2 * steps, 3 * steps}),
        (0.5, lambda steps: {at for e in range(3) for at in (e * steps + -(-steps // 2), (e + 1) * steps)}),
        ("2 steps", lambda steps: {*range(2, 3 * steps + 1, 2), 3 * steps}),
        ("1000 steps", lambda steps: {3 * steps}),
    ],
)
def test_it_is_looked_at_as_often_as_was_asked_for(tmp_path: Path, every: Any, of_epoch: Any) -> None:
    run = Run(plot_of(every), tmp_path).to_end()
    steps = run.trainer.phases[0].steps
    assert steps >= 3
    assert looked_at(run) == sorted(of_epoch(steps))


def test_looking_at_it_changes_nothing_of_what_is_trained(tmp_path: Path) -> None:
    often, seldom = (Run(plot_of(every), tmp_path / str(every)).to_end() for every in ("1 step", 3))
    assert often.state() == seldom.state()


def test_a_checkpoint_within_an_epoch_can_be_the_best(tmp_path: Path) -> None:
    run = Run(plot_of("1 step", better="higher"), tmp_path).to_end()
    best = by_metric(checkpoints_in(run.made.folder.checkpoints))[0]
    figures = {
        line[STEP]: line["validation/loss"] for line in read_figures(run.made.folder.path) if "validation/loss" in line
    }
    figures |= {epoch.step: epoch.validation["loss"] for epoch in read_epochs(run.made.folder.path)}
    assert best.metric == max(figures.values())  # type: ignore[type-var]
    assert figures[best.step] == best.metric


@pytest.mark.nightly
def test_a_run_that_was_ended_is_looked_at_neither_twice_nor_too_seldom(tmp_path: Path) -> None:
    whole = Run(plot_of(0.5), tmp_path / "whole").to_end()
    for stop in range(1, whole.trainer.done):
        Run(plot_of(0.5), tmp_path / str(stop), ending=signals_after(stop)).to_end()
        rest = Run(plot_of(0.5), tmp_path / str(stop)).to_end()
        assert looked_at(rest) == looked_at(whole), stop
        assert rest.state() == whole.state(), stop


def test_patience_counts_looks_within_an_epoch_and_ends_it_there(tmp_path: Path) -> None:
    plot = plot_of("1 step", better="higher", patience=1)
    plot.train["learning_rate"] = 1e-12  # type: ignore[index]
    run = Run(plot, tmp_path).to_end()
    assert run.trainer.is_over
    assert run.trainer.done < run.trainer.phases[0].steps
    (epoch,) = read_epochs(run.made.folder.path)
    assert (epoch.step, epoch.steps) == (run.trainer.done, run.trainer.done)
    assert Run(plot, tmp_path).to_end().trainer.done == run.trainer.done


@pytest.mark.parametrize("every", [1, "1 step"])
@pytest.mark.parametrize("phases", [(), ((2, 30, 50), (1, 999, 100))])
def test_a_training_that_ended_early_goes_on_with_more_patience_as_if_it_had_not(
    tmp_path: Path, every: Any, phases: Any
) -> None:
    def plot(patience: int | None) -> Plot:
        made = plot_of(every, monitor="loss", better="higher", patience=patience)
        return replace(made, train={**made.train, "learning_rate": 1e-12}, phases=phases)

    whole = Run(plot(None), tmp_path / "whole").to_end()
    early = Run(plot(1), tmp_path / "early").to_end()
    assert early.trainer.is_over
    assert early.trainer.done < whole.trainer.done
    rest = Run(plot(None), tmp_path / "early").to_end()
    assert rest.state() == whole.state()
    assert rest.trainer.done == whole.trainer.done
    ends = [[(epoch.epoch, epoch.step) for epoch in read_epochs(run.made.folder.path)] for run in (rest, whole)]
    assert ends[0] == ends[1]


def test_a_training_that_ended_early_within_an_epoch_is_compared_as_done(tmp_path: Path) -> None:
    plot = plot_of("1 step", better="higher", patience=1)
    run = Run(replace(plot, train={**plot.train, "learning_rate": 1e-12}), tmp_path).to_end()
    made, train = run.made.folder, {"validation": {**plot.train["validation"]}}
    made.prepared.write_text(json.dumps(plain(run.made.prepared)))
    settings = Config.model_validate({"data": {"path": Path("data")}, "train": train})
    made.settings.write_text(settings.model_dump_json())
    assert read_model(made.path).state == State.DONE
    more = ValidationSection(patience=2, better="higher")
    assert not progress_of(made).is_stale(more)
    of_another = ValidationSection(patience=1, monitor="auroc")
    assert not progress_of(made).is_stale(of_another), "its count starts from zero"


@pytest.mark.parametrize("every", [0, 1.0, 1.5, -1, True, "steps", "0 steps", "5 epochs", None])
def test_what_is_no_interval_is_refused(every: Any) -> None:
    with pytest.raises(ValueError, match="500 steps"):
        ValidationSection.model_validate_json(json.dumps({"every": every}))
