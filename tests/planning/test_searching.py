"""A search on this machine, whose supervisor is killed between any two of its steps, up to its report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.command_line import Command as Words
from pipeline.config.load import read_config
from pipeline.engine.lifecycle import new_run
from pipeline.journal.ledger import LedgerReader
from pipeline.journal.run_folder import RunFolder, runs_in
from pipeline.records import EventKind
from tests.testkit.command import Command
from tests.testkit.project import Project, to_do
from tests.testkit.trained import SMALL, write_project

pytestmark = [pytest.mark.nightly, pytest.mark.fault, pytest.mark.timeout(1800)]

TRIALS = 12
SPACE = {"train.learning_rate": {"low": 1e-4, "high": 1.0, "log": True}, "train.options.width": [4, 8]}
SEARCH = {"search": "optuna", "space": SPACE, "trials": TRIALS, "at_once": 2, "prune": "median", "grace": 1}
SETTINGS = {
    **SMALL,
    "train__task": "pipeline.tasks.interface:Interface",
    "train__epochs": 2,
    "train__sweep": SEARCH,
    "cluster__supervisor": {"tries": 20},  # a task on this machine ends with its supervisor
}
# A supervisor that kills itself before, or after, it writes an event of a kind for the n-th time
DYING = """\
import os, signal, sys
from pathlib import Path
from pipeline.engine import supervisor

kind, count, when = sys.argv[2], int(sys.argv[3]), sys.argv[4]
emit = supervisor.Supervisor._emit

def dying(self, event, **data):
    global count
    count -= event == kind
    if when == "before" and event == kind and not count:
        os.kill(os.getpid(), signal.SIGKILL)
    emit(self, event, **data)
    if event == kind and not count:
        os.kill(os.getpid(), signal.SIGKILL)

supervisor.Supervisor._emit = dying
sys.exit(supervisor.main(sys.argv[1:2]))
"""
DEATHS = (
    (EventKind.TRIAL_ASKED, 2, "before"),
    (EventKind.TRIAL_ASKED, 1, "after"),  # its task was not submitted
    (EventKind.JOB_SUBMITTING, 2, "after"),
    (EventKind.TRIAL_ENDED, 1, "before"),
    (EventKind.TRIAL_ENDED, 2, "after"),
    (EventKind.JOB_SUBMITTED, 2, "after"),
    (EventKind.TASK_ENDED, 2, "after"),
)


def supervised(folder: Path, run: RunFolder, *death: object) -> int:
    """Supervise a run until it ends, or its supervisor dies; return the exit code."""
    words = [str(run.path), *map(str, death)] if death else [str(run.path)]
    script = ["-c", DYING] if death else ["-m", "pipeline.engine.supervisor"]
    return subprocess.run([sys.executable, *script, *words], cwd=folder, check=False).returncode


def trials_of(run: RunFolder) -> list[dict[str, Any]]:
    """Return the trials in the order in which they were asked."""
    return [event.data for event in LedgerReader(run).fresh() if event.kind is EventKind.TRIAL_ASKED]


def test_a_search_that_is_killed_anywhere_asks_and_trains_as_if_it_was_not(tmp_path: Path, pipeline: Command) -> None:
    write_project(tmp_path, SETTINGS, {}, ["train"] * 3 + ["val"] * 2)
    Project(tmp_path).finishes("embed", "graph")
    run = new_run(read_config(tmp_path / "pipeline.yaml").config, ["train"], Words.submit("train"), tmp_path)
    for death in DEATHS:
        assert supervised(tmp_path, run, *death) == -signal.SIGKILL
    assert supervised(tmp_path, run) == 0
    asked = trials_of(run)
    assert [trial["number"] for trial in asked] == [*range(TRIALS)]
    events = list(LedgerReader(run).fresh())
    finished = Counter(event.data["task"] for event in events if event.kind is EventKind.TASK_FINISHED)
    assert finished == Counter(range(TRIALS))  # each once
    ended = Counter(event.data["number"] for event in events if event.kind is EventKind.TRIAL_ENDED)
    assert ended == Counter(range(TRIALS))

    told = json.loads(pipeline("status", run.name, "--json").out)
    (stage,) = told["stages"]
    assert {trial["state"] for trial in stage["asked"]} <= {"done", "pruned"}
    best = min(trial["value"] for trial in stage["asked"])
    assert min(model["best"] for model in json.loads(pipeline("compare", run.name, "--json").out)["models"]) == best
    assert pipeline("report", run.name, "--html", str(tmp_path / "page.html")).code == 0
    assert 'id="search"' in (tmp_path / "page.html").read_text()

    # Submitted again, undisturbed and from an empty ledger, it asks the same, and every model is there
    Project(tmp_path).finishes("train")
    again = runs_in(tmp_path / "runs")[-1]
    assert [trial["settings"] for trial in trials_of(again)] == [trial["settings"] for trial in asked]
    assert to_do(tmp_path)["train"][1] == 0


def test_trials_whose_settings_do_not_go_together_are_left_out(tmp_path: Path, pipeline: Command) -> None:
    space = {"train.options.layers": [-1, 1], "train.options.width": [4, 8]}
    sweep = {"search": "optuna", "space": space, "trials": 4, "at_once": 1}
    sets = {**SETTINGS, "train__epochs": 1, "train__sweep": sweep}
    write_project(tmp_path, sets, {}, ["train"] * 3 + ["val"] * 2)
    assert pipeline("submit", "train", "--follow").code == 0
    (stage,) = [stage for stage in json.loads(pipeline("status", "--json").out)["stages"] if stage["asked"]]
    states = {trial["settings"]["train.options.layers"]: trial["state"] for trial in stage["asked"]}
    assert states == {1: "done", -1: "infeasible"}
    neither = json.dumps({**space, "train.options.layers": [-1, -2]})
    assert pipeline("submit", "train", "--dry-run", "--set", f"train.sweep.space={neither}").code == 2


def test_a_search_of_which_every_trial_fails_ends_as_failed(tmp_path: Path, pipeline: Command) -> None:
    space = {"train.learning_rate": {"low": 1e30, "high": 1e36, "log": True}}  # the weights do not stay finite
    sets = {**SETTINGS, "train__sweep": {"search": "optuna", "space": space, "trials": 12, "at_once": 1}}
    write_project(tmp_path, sets, {}, ["train"] * 3 + ["val"] * 2)
    assert pipeline("submit", "train", "--follow").code == 7
    stage = json.loads(pipeline("status", "--json").out)["stages"][-1]
    assert stage["state"] == "failed"
    assert [trial["state"] for trial in stage["asked"]] == ["failed"] * 5
