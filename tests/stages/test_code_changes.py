"""A task's code that changes: what cannot change weights trains nothing anew, and other changes can be accepted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.testkit.project import to_do
from tests.testkit.trained import SMALL, write_project

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

TASK = '''\
"""Ours."""

from pipeline.tasks.interface import Interface


class Mine(Interface):
    """Interfaces."""

    def loss(self, model, batch):
        factor = 1.0
        return {name: (factor * total, weight) for name, (total, weight) in super().loss(model, batch).items()}

    def metrics(self, outputs):
        return {f"old_{name}": value for name, value in super().metrics(outputs).items()}
'''
COMMENTED = TASK.replace("factor = 1.0", "factor = (\n            1.0  # why\n        )").replace(
    "Interfaces.", "Mine."
)
RENAMED = COMMENTED.replace("old_", "new_")
OTHER = RENAMED.replace("1.0", "2.0")
SUBMIT = ("submit", "--stage", "train", "--follow")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_project(
        tmp_path,
        {**SMALL, "train__task": "mine:Mine", "train__epochs": 1},
        {"mine.py": TASK},
        ["train"] * 4 + ["test"] * 2,
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))  # what the commands add goes with the test
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def write_task(project: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the task, and have it imported again, as another process would: not from the run that has frozen it."""
    (project / "mine.py").write_text(text)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.startswith(str(project))])


def models(project: Path) -> list[str]:
    return sorted(path.name for path in (project / "models").iterdir() if path.is_dir())


@pytest.mark.nightly
def test_what_cannot_change_weights_trains_nothing_anew(project, pipeline, monkeypatch):
    done = pipeline("submit", "--stage", "evaluate", "--follow")
    assert done.code == 0, done.err
    (trained,) = models(project)
    write_task(project, RENAMED, monkeypatch)
    again = pipeline("submit", "--stage", "evaluate", "--follow")
    assert again.code == 0, again.err
    assert to_do()["train"][1] == 0
    assert models(project) == [trained]
    figures = [json.loads(path.read_text()) for path in project.glob("models/*/evaluations/*.json")]
    names = {name.partition("_")[0] for figure in figures for name in figure["evaluation"]["figures"]}
    assert {"old", "new"} <= names  # figures are computed again by the metrics of today


@pytest.mark.nightly
def test_a_change_of_code_can_be_accepted_and_that_is_recorded(project, pipeline, monkeypatch):
    assert pipeline(*SUBMIT).code == 0
    (trained,) = models(project)
    write_task(project, OTHER, monkeypatch)
    asked = pipeline("submit", "--stage", "train", "--dry-run")
    assert "--accept-code" in asked.err + asked.out
    accepted = pipeline(*SUBMIT, "--accept-code")
    assert accepted.code == 0, accepted.err
    assert to_do()["train"][1] == 0
    (record,) = json.loads((project / "models" / trained / "accepted_code.json").read_text())
    assert record["code"]
    assert pipeline(*SUBMIT).code == 0
    assert to_do()["train"][1] == 0
    assert models(project) == [trained]
