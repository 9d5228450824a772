"""Training on drawn items through the command line: epochs of the planned length, and the same draws after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.load import read_config
from pipeline.errors import ConfigError, DataError
from pipeline.planning.prepare import _sampling_of, pretrained_digest, trained_table
from pipeline.project import project as projects
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


def test_a_table_that_changed_since_the_plan_is_refused(tmp_path):
    project, path = project_of(tmp_path / "project"), tmp_path / "project" / "clusters.csv"

    def opened() -> projects.Project:
        return projects.Project.open(read_config(project.folder / "pipeline.yaml").config, remember=False)

    prepared: Any = SimpleNamespace(recipe={"sampling": _sampling_of(opened())})
    path.write_text(path.read_text().replace("family-2", "family-1"))
    with pytest.raises(DataError) as refused:
        trained_table(opened(), prepared)
    assert refused.value.where == str(path)


@pytest.mark.parametrize(
    "missing", [{"train__sampling": {"table": "no.csv", "cluster": "family"}}, {"train__pretrained": "no.pt"}]
)
def test_a_file_that_does_not_exist_is_refused_by_its_path(tmp_path, missing):
    config = read_config(project_of(tmp_path / "project", **missing).folder / "pipeline.yaml").config
    project = projects.Project.open(config, remember=False)
    with pytest.raises(ConfigError) as refused:
        _ = pretrained_digest(project), _sampling_of(project)
    assert Path(refused.value.where).name in ("no.csv", "no.pt")


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
