"""`pipeline submit --stage evaluate` as people type it: what a model comes to on a split, and what stops that."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.runs.engine.test_submit import newest_status, wait_for
from tests.runs.workflow.trained import Trained, trained_project
from tests.testkit.command import Command

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

SUBMIT = ("submit", "--stage", "evaluate", "--only", "--follow")
TEST_ITEMS = 5


@pytest.fixture
def project(tmp_path_factory: pytest.TempPathFactory, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> Trained:
    return trained_project(tmp_path_factory, pipeline, monkeypatch)


def stage(pipeline: Command) -> dict[str, Any]:
    """Return what the newest run says of its evaluation, as `status --json` has it."""
    run = json.loads(pipeline("status", "--json").out)
    return dict(next(one for one in run["stages"] if one["name"] == "evaluate"))


@pytest.mark.nightly
def test_a_split_is_evaluated_once_and_then_cached(pipeline: Command, project: Trained) -> None:
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    assert f"evaluate: {TEST_ITEMS} items: 0 cached, {TEST_ITEMS} to do in 1 task" in done.err
    census = stage(pipeline)["census"]
    assert census["items"] == census["accepted"] == TEST_ITEMS
    assert {"loss", "loss.interface", "loss.contacts", "interface_auroc"} <= set(census["figures"])
    assert census["figures"] == project.figures
    assert "interface_auroc" in done.out
    assert sorted(project.asked()) == [f"c{number}" for number in range(4, 9)]
    assert [path.name for path in project.file.parent.iterdir()] == [project.file.name]
    again = pipeline(*SUBMIT)
    assert again.code == 0
    assert f"evaluate: {TEST_ITEMS} items: {TEST_ITEMS} cached, 0 to do" in again.err
    assert stage(pipeline)["census"]["figures"] == project.figures
    assert len(project.asked()) == TEST_ITEMS


@pytest.mark.nightly
def test_two_ranks_come_to_the_same_figures_as_one(pipeline: Command, project: Trained) -> None:
    done = pipeline(*SUBMIT, "--set", "cluster.evaluate.ranks=2")
    assert done.code == 0, done.err
    found = stage(pipeline)
    assert found["census"]["figures"] == pytest.approx(project.figures, rel=1e-6)
    assert found["items_done"] == TEST_ITEMS
    assert len(found["done"]) >= 2
    assert len(project.asked()) == TEST_ITEMS


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end"])
def test_what_was_done_before_the_end_is_not_done_again(pipeline: Command, project: Trained, number: int) -> None:
    project.tell_to_die(number)
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    found = stage(pipeline)
    assert len(found["failures"]) == 1
    assert found["census"]["figures"] == pytest.approx(project.figures, rel=1e-12)
    twice = 1 if number == signal.SIGKILL else 0  # the one that it was on
    assert len(project.asked()) == TEST_ITEMS + twice
    assert found["items_done"] == TEST_ITEMS


@pytest.mark.nightly
def test_another_split_has_figures_of_its_own(pipeline: Command, project: Trained) -> None:
    done = pipeline(*SUBMIT, "--set", "train.evaluate.split=val")
    assert done.code == 0, done.err
    census = stage(pipeline)["census"]
    assert census["items"] == 2
    assert Path(census["file"]).name.startswith("val-")
    assert set(project.asked()) == {"c2", "c3"}


def test_a_split_that_is_not_there_is_an_error_that_names_those_that_are(pipeline: Command, project: Trained) -> None:
    done = pipeline(*SUBMIT, "--set", "train.evaluate.split=holdout")
    assert done.code == 3
    assert "no item is in split 'holdout'; there are: 'train', 'val', 'test'" in done.err
    assert "--set train.evaluate.split=val" in done.err
    assert not project.asked()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("split=vla", "nothing is validated: no item is in split 'vla' (train.validation.split); there are: 'train', "),
        ("monitor=losss", "no figure of a validation is called 'losss' (train.validation.monitor); there are: loss, "),
    ],
)
def test_a_training_says_where_no_checkpoint_is_the_best(
    pipeline: Command, project: Trained, setting: str, said: str
) -> None:
    done = pipeline("submit", "--stage", "train", "--follow", "--set", f"train.validation.{setting}")
    assert (done.code, "train: 1 step: 1 cached, 0 to do" in done.err) == (0, True), done.err
    assert f"warning: {said}" in done.out


def test_a_new_training_says_when_it_is_submitted_that_nothing_will_be_validated(
    pipeline: Command, project: Trained, tmp_path: Path
) -> None:
    models = tmp_path / "models"  # other tests have the only model of the project
    sets = ("train.validation.split=vla", "train.learning_rate=0.5", f"train.models={models}")
    done = pipeline("submit", "--stage", "train", *(word for one in sets for word in ("--set", one)))
    assert done.code == 0, done.err  # nobody follows: what is said is said now
    assert "nothing is validated: no item is in split 'vla' (train.validation.split)" in done.err
    wait_for("the run to end", lambda: newest_status(project.folder)["state"] == "done")
    assert len(list(models.iterdir())) == 1
    assert len(list((project.folder / "models").iterdir())) == 1


def test_all_stages_say_that_there_is_nothing_to_evaluate_where_no_item_is_in_the_split(
    pipeline: Command, project: Trained
) -> None:
    done = pipeline("submit", "--stage", "all", "--follow", "--set", "train.evaluate.split=holdout")
    assert done.code == 0, done.err
    assert "no item is in split 'holdout': nothing to do" in done.out
    assert "train: 1 step: 1 cached, 0 to do" in done.err
    assert not project.asked()


@pytest.mark.nightly
def test_a_model_that_was_not_trained_is_an_error_with_the_command_that_trains_it(
    pipeline: Command, project: Trained
) -> None:
    done = pipeline(*SUBMIT, "--set", "train.learning_rate=0.5")
    assert done.code == 3
    assert "no model was trained with this configuration" in done.err
    assert "pipeline submit --stage train --set train.learning_rate=0.5" in done.err
    assert len(list(project.folder.glob("models/*"))) == 1


@pytest.mark.nightly
def test_where_no_checkpoint_is_whole_that_is_said_and_nothing_is_evaluated(
    pipeline: Command, project: Trained
) -> None:
    (state,) = project.folder.glob("models/*/checkpoints/step-*/state.safetensors")
    whole, mode = state.read_bytes(), state.stat().st_mode
    state.chmod(0o600)
    state.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    done = pipeline(*SUBMIT)
    of_a_model = pipeline(*SUBMIT, "--model", str(state.parents[2]))
    state.write_bytes(whole)
    state.chmod(mode)
    assert "next: name another model or checkpoint\n" in of_a_model.err, "to train another makes that one no better"
    log = "".join(path.read_text() for path in sorted(project.folder.glob("runs/*-evaluate/logs/*")))
    assert done.code == 7
    assert "is passed over" in log
    assert "no checkpoint of it can be read" in log
    assert not project.asked()


@pytest.mark.nightly
def test_a_damaged_file_of_figures_counts_as_missing(pipeline: Command, project: Trained) -> None:
    project.file.parent.mkdir()
    project.file.write_text(project.content.replace(f'"items": {TEST_ITEMS}', '"items": 6'))
    done = pipeline(*SUBMIT)
    assert f"0 cached, {TEST_ITEMS} to do" in done.err
    assert stage(pipeline)["census"]["figures"] == project.figures
    assert project.file.read_text() == project.content
