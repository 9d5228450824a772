"""`pipeline submit evaluate` as people type it: what a model comes to on a split, and what stops that."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.testkit.command import Command
from tests.testkit.project import to_do

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

SUBMIT = ("submit", "--stage", "evaluate", "--only", "--follow")
TEST_ITEMS = 5


def stage(pipeline: Command) -> dict[str, Any]:
    """Return what the newest run says of its evaluation, as `status --json` has it."""
    run = json.loads(pipeline("status", "--json").out)
    return dict(next(one for one in run["stages"] if one["name"] == "evaluate"))


@pytest.mark.nightly
def test_a_split_is_evaluated_once_and_then_cached(pipeline, trained):
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    assert to_do()["evaluate"] == (0, TEST_ITEMS)
    census = stage(pipeline)["census"]
    assert census["items"] == census["accepted"] == TEST_ITEMS
    assert {"loss", "loss.interface", "loss.contacts", "interface_auroc"} <= set(census["figures"])
    assert census["figures"] == trained.figures
    assert sorted(trained.asked()) == [f"c{number}" for number in range(4, 9)]
    assert [path.name for path in trained.file.parent.iterdir()] == [trained.file.name]
    assert pipeline(*SUBMIT).code == 0
    assert to_do()["evaluate"] == (TEST_ITEMS, 0)
    assert stage(pipeline)["census"]["figures"] == trained.figures
    assert len(trained.asked()) == TEST_ITEMS


@pytest.mark.nightly
def test_two_ranks_come_to_the_same_figures_as_one(pipeline, trained):
    done = pipeline(*SUBMIT, "--set", "cluster.evaluate.ranks=2")
    assert done.code == 0, done.err
    found = stage(pipeline)
    assert found["census"]["figures"] == pytest.approx(trained.figures, rel=1e-6)
    assert found["items_done"] == TEST_ITEMS
    assert len(found["done"]) >= 2
    assert len(trained.asked()) == TEST_ITEMS


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told to end"])
def test_what_was_done_before_the_end_is_not_done_again(pipeline, trained, number):
    trained.tell_to_die(number)
    done = pipeline(*SUBMIT)
    assert done.code == 0, done.err
    found = stage(pipeline)
    assert len(found["failures"]) == 1
    assert found["census"]["figures"] == pytest.approx(trained.figures, rel=1e-12)
    twice = 1 if number == signal.SIGKILL else 0  # the one that it was on
    assert len(trained.asked()) == TEST_ITEMS + twice
    assert found["items_done"] == TEST_ITEMS


@pytest.mark.nightly
def test_another_split_has_figures_of_its_own(pipeline, trained):
    done = pipeline(*SUBMIT, "--set", "train.evaluate.split=val")
    assert done.code == 0, done.err
    census = stage(pipeline)["census"]
    assert census["items"] == 2
    assert Path(census["file"]).name.startswith("val-")
    assert set(trained.asked()) == {"c2", "c3"}


def test_a_split_that_is_not_there_is_an_error_that_names_those_that_are(pipeline, trained):
    done = pipeline(*SUBMIT, "--set", "train.evaluate.split=holdout")
    assert done.code == 3
    assert "--set train.evaluate.split=val" in done.err
    assert not trained.asked()


@pytest.mark.parametrize("setting", ["split=vla", "monitor=losss"])
def test_a_training_warns_where_no_checkpoint_is_the_best(pipeline, trained, setting):
    done = pipeline("submit", "--stage", "train", "--follow", "--set", f"train.validation.{setting}")
    assert (done.code, to_do()["train"][1]) == (0, 0), done.err
    assert f"train.validation.{setting.partition('=')[0]}" in done.err


def test_all_stages_say_that_there_is_nothing_to_evaluate_where_no_item_is_in_the_split(pipeline, trained):
    done = pipeline("submit", "--stage", "all", "--follow", "--set", "train.evaluate.split=holdout")
    assert done.code == 0, done.err
    assert to_do()["train"][1] == 0
    assert not trained.asked()


@pytest.mark.nightly
def test_a_model_that_was_not_trained_is_an_error_with_the_command_that_trains_it(pipeline, trained):
    done = pipeline(*SUBMIT, "--set", "train.learning_rate=0.5")
    assert done.code == 3
    assert "pipeline submit train --set train.learning_rate=0.5" in done.err
    assert len(list(trained.folder.glob("models/*"))) == 1


@pytest.mark.nightly
def test_where_no_checkpoint_is_whole_that_is_said_and_nothing_is_evaluated(pipeline, trained):
    (state,) = trained.folder.glob("models/*/checkpoints/step-*/state.safetensors")
    whole, mode = state.read_bytes(), state.stat().st_mode
    state.chmod(0o600)
    state.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    done = pipeline(*SUBMIT)
    of_a_model = pipeline(*SUBMIT, "--model", str(state.parents[2]))
    state.write_bytes(whole)
    state.chmod(mode)
    assert "submit train" not in of_a_model.err, "to train another makes that one no better"
    assert done.code == 7
    assert not trained.asked()


@pytest.mark.nightly
def test_a_damaged_file_of_figures_counts_as_missing(pipeline, trained):
    trained.file.parent.mkdir()
    trained.file.write_text(trained.content.replace(f'"items": {TEST_ITEMS}', '"items": 6'))
    assert pipeline(*SUBMIT).code == 0
    assert to_do()["evaluate"] == (0, TEST_ITEMS)
    assert stage(pipeline)["census"]["figures"] == trained.figures
    whole, before = (json.loads(text)["evaluation"] for text in (trained.file.read_text(), trained.content))
    assert whole | {"source": ""} == before | {"source": ""}  # which is where the project was copied from
