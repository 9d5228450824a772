"""What is shown of a trained model, and what is taken to another machine."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.runs.model.trained_model import TrainedModel, portable_settings
from pipeline.training.prepared import BEST, ModelFolder
from tests.runs.workflow.trained import Trained, trained_project
from tests.testkit.command import Command

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared


@pytest.fixture
def project(tmp_path_factory: pytest.TempPathFactory, pipeline: Command, monkeypatch: pytest.MonkeyPatch) -> Trained:
    return trained_project(tmp_path_factory, pipeline, monkeypatch)


@pytest.mark.parametrize(
    ("target", "problem"), [("taken", "something is there already"), ("taken/below", "cannot write: Not a directory")]
)
def test_an_export_into_a_file_is_refused_with_what_to_type(
    target: str, problem: str, pipeline: Command, project: Trained, tmp_path: Path
) -> None:
    (model,) = (project.folder / "models").iterdir()
    (tmp_path / "taken").write_text("mine")
    done = pipeline("model", "export", model.name, str(tmp_path / target))
    assert done.code == 2
    assert f"{tmp_path / target}: {problem}" in done.err
    assert "next: " in done.err
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_that_is_exported_is_damage(
    file: str, pipeline: Command, project: Trained, tmp_path: Path
) -> None:
    (model,) = (project.folder / "models").iterdir()
    step = next((model / "checkpoints").glob("step-*"))
    copy = tmp_path / "models" / model.name
    shutil.copytree(model, copy)
    for path in (copy / "checkpoints").glob(f"{step.name}/{file}"):
        content = bytearray(path.read_bytes())
        content[-2] ^= 1
        path.write_bytes(content)
    done = pipeline("model", "export", str(copy / "checkpoints" / step.name), str(tmp_path / "taken"))
    assert done.code == 4, done.err
    assert file in done.err
    assert not (tmp_path / "taken").exists()


def test_a_model_is_shown_whose_evaluation_is_damaged(pipeline: Command, project: Trained) -> None:
    project.file.parent.mkdir(exist_ok=True)
    project.file.write_text(project.content)
    (project.file.parent / "val-torn.json").write_text(project.content[:100])
    figure = str(json.loads(project.content)["evaluation"]["step"])
    (project.file.parent / "val-changed.json").write_text(project.content.replace(f": {figure},", ": 999,"))
    (model,) = (project.folder / "models").iterdir()
    shown = pipeline("model", "show", model.name)
    assert (shown.code, shown.err) == (0, "")
    assert "- test (5 items" in shown.out
    assert "- evaluations/val-torn.json: cannot be read" in shown.out
    assert "- evaluations/val-changed.json: cannot be read" in shown.out
    assert "999" not in shown.out


def test_portable_settings_name_the_place_of_the_encoder_even_where_it_is_the_usual_one() -> None:
    structures = Config.model_validate({"data": {"path": Path("data")}, "train": {"task": "own:Task", "epochs": 7}})
    assert portable_settings(structures) == {
        "embed": {"weights": "weights/esm2_t33_650M_UR50D.pt"},
        "train": {"task": "own:Task"},
    }
    reader = {"source": "reader", "path": Path("data"), "reader": "own:Reader"}
    assert "embed" not in portable_settings(Config.model_validate({"data": reader}))


@pytest.mark.parametrize("here", ["{depth: 2, width: 4}", "{width: 4}", "{}"])
def test_what_a_model_wants_to_be_set_makes_the_options_those_of_its_training(here: str, tmp_path: Path) -> None:
    options, typed = {"width": 8, "head": "wide"}, ["data.path=/data", "train.task=own:Task"]
    prepared: Any = SimpleNamespace(recipe={"task": "own:Task", "options": options})
    project: Any = SimpleNamespace(config=read_config(None, [*typed, f"train.options={here}"]).config)
    model = TrainedModel(ModelFolder(tmp_path), prepared, BEST, None)
    with pytest.raises(ConfigError, match="the model was trained with other settings") as refused:
        model.refuse_other_settings(project)
    said = shlex.split(refused.value.remedy.removeprefix("the same command with "))
    sets = [setting for setting in said if setting != "--set"]
    assert read_config(None, [*typed, f"train.options={here}", *sets]).config.train.options == options
