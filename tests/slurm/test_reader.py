"""Items that are no structures on a real cluster: a reader and a task of the user's own, scanned and trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.projects import settle
from tests.runs.workflow.reader_project import CODE, SPLITS, write_spectrum
from tests.slurm.runs import make_project

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("healthy"), pytest.mark.timeout(900)]

SETTINGS: dict[str, Any] = {
    "data__source": "reader",
    "data__reader": "spectra:Spectra",
    "data__options": {"scale": 1.0},
    "train__task": "spectra:Sum",
    "train__effective_batch": 2,
    "train__micro_batch": 1,
    "train__epochs": 2,
    "train__log_every": 1,
}


@pytest.mark.slow
def test_what_a_reader_of_the_users_own_gives_is_scanned_and_trained_on(tmp_path: Path) -> None:
    project = make_project(tmp_path / "project", 0, **SETTINGS)
    (project.folder / "spectra.py").write_text(CODE)
    for number, split in enumerate(SPLITS):
        write_spectrum(project.folder, number, split)
    write_spectrum(project.folder, len(SPLITS), "train")
    settle(project.folder / "data")
    run = project.submits("train")
    run.ends()
    scan, train = run.stage("scan"), run.stage("train")
    assert (scan["failures"], train["failures"]) == ([], [])
    assert scan["census"]["splits"] == {"train": 7, "test": 2}
    steps = 2 * 4  # epochs, each of 7 items by 2
    assert (train["items_done"], train["census"]["steps"]) == (steps, steps)
    (model,) = (project.folder / "models").iterdir()
    figures = [json.loads(line) for line in (model / "figures.jsonl").read_text().splitlines()]
    assert figures[-1]["step"] == steps
    again = project.types("submit", "--stage", "train", "--executor", "slurm", "--dry-run")
    assert again.code == 0, again.err
    assert "scan data sets 1 0 0 1 0 0 " in again.said  # items, refused, unusable, cached, missing, tasks
