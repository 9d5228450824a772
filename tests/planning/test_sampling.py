"""Training on drawn items through the command line: epochs of the planned length, and the same draws after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.testkit.project import Project
from tests.testkit.trained import TASK, TRAINED, weights, write_project

SPLITS = ("train",) * 9 + ("val",) * 2


def project_of(folder: Path, **settings: object) -> Project:
    """Write a project with nine items to train on in three clusters; an epoch draws two of each cluster."""
    folder.mkdir()
    sampling = {"table": "clusters.csv", "cluster": "family", "per_cluster": 2}
    write_project(folder, {**TRAINED, "train__sampling": sampling, **settings}, {"trained_task.py": TASK}, SPLITS)
    rows = [f"c{number},family-{number % 3}\n" for number in range(len(SPLITS))]
    (folder / "clusters.csv").write_text("id,family\n" + "".join(rows))
    return Project(folder)


def steps_of(project: Project) -> list[int]:
    """Return the number of steps of each epoch."""
    (model,) = (project.folder / "models").iterdir()
    lines = [json.loads(line) for line in (model / "epochs.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines]


@pytest.mark.nightly
def test_an_epoch_is_as_long_as_planned_and_a_resumed_training_draws_alike(tmp_path):
    whole, resumed = project_of(tmp_path / "whole", train__epochs=4), project_of(tmp_path / "resumed", train__epochs=2)
    whole.finishes("train")
    resumed.finishes("train")
    resumed.sets(train__epochs=4)
    resumed.finishes("train")
    assert steps_of(whole) == steps_of(resumed) == [3, 6, 9, 12]  # six of nine items, two in a step
    assert weights(next((whole.folder / "models").iterdir())) == weights(next((resumed.folder / "models").iterdir()))
    (model,) = (whole.folder / "models").iterdir()
    (whole.folder / "clusters.csv").write_text(
        (whole.folder / "clusters.csv").read_text().replace("family-2", "family-1")
    )
    whole.finishes("train")
    assert len(list((whole.folder / "models").iterdir())) == 2  # another table: another model
    assert model.exists()
