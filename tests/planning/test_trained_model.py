"""What is shown of a trained model, and what is taken to another machine."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.errors import ConfigError
from pipeline.planning.trained_model import TrainedModel, portable_settings
from pipeline.training.prepared import BEST, ModelFolder

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared


@pytest.mark.parametrize("target", ["taken", "taken/below"])
def test_an_export_into_a_file_is_refused_with_what_to_type(target, pipeline, trained, tmp_path):
    model = trained.model
    (tmp_path / "taken").write_text("mine")
    done = pipeline("model", "export", model.name, str(tmp_path / target))
    assert done.code == 2
    assert str(tmp_path / target) in done.err
    assert "next: " in done.err
    assert (tmp_path / "taken").read_text() == "mine"


def _on_full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_export_that_fills_the_disk_leaves_nothing_and_is_done_again(pipeline, trained, monkeypatch):
    folder = trained.folder / "taken"
    with monkeypatch.context() as full:
        full.setattr("pipeline.training.checkpoints.trained_weights.write_tensors", _on_full_disk)
        assert pipeline("model", "export", trained.model.name, str(folder)).code == 2
    assert not list(trained.folder.glob("*taken*"))
    folder.mkdir()
    assert pipeline("model", "export", trained.model.name, str(folder)).code == 0
    assert (folder / "model.safetensors").is_file()


@pytest.mark.parametrize("file", ["state.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_that_is_exported_is_damage(file, pipeline, trained, tmp_path):
    model = trained.model
    step = next((model / "checkpoints").glob("step-*"))
    copy = tmp_path / "damaged" / model.name
    shutil.copytree(model, copy)
    for path in (copy / "checkpoints").glob(f"{step.name}/{file}"):
        content = bytearray(path.read_bytes())
        content[-2] ^= 1
        path.write_bytes(content)
    done = pipeline("model", "export", str(copy / "checkpoints" / step.name), str(tmp_path / "taken"))
    assert done.code == 4, done.err
    assert file in done.err
    assert not (tmp_path / "taken").exists()


def test_a_model_is_shown_whose_evaluation_is_damaged(pipeline, trained):
    trained.file.parent.mkdir(exist_ok=True)
    trained.file.write_text(trained.content)
    (trained.file.parent / "val-torn.json").write_text(trained.content[:100])
    figure = str(json.loads(trained.content)["evaluation"]["step"])
    (trained.file.parent / "val-changed.json").write_text(trained.content.replace(f": {figure},", ": 999,"))
    model = trained.model
    Path("pipeline.yaml").rename("trained.yaml")  # where models lie, no configuration need be named
    shown = pipeline("model", "show", model.name)
    assert (shown.code, shown.err) == (0, "")
    assert "evaluations/val-torn.json" in shown.out
    assert "evaluations/val-changed.json" in shown.out
    assert "999" not in shown.out


def test_portable_settings_name_the_place_of_the_encoder_even_where_it_is_the_usual_one():
    structures = Config.model_validate({"data": {"path": Path("data")}, "train": {"task": "own:Task", "epochs": 7}})
    assert portable_settings(structures) == {
        "embed": {"weights": "weights/esm2_t33_650M_UR50D.pt"},
        "train": {"task": "own:Task"},
    }
    reader = {"source": "reader", "path": Path("data"), "reader": "own:Reader"}
    assert "embed" not in portable_settings(Config.model_validate({"data": reader}))


@pytest.mark.parametrize("here", ["{depth: 2, width: 4}", "{width: 4}", "{}"])
def test_what_a_model_wants_to_be_set_makes_the_options_those_of_its_training(here, tmp_path):
    options, typed = {"width": 8, "head": "wide"}, ["data.path=/data", "train.task=own:Task"]
    prepared: Any = SimpleNamespace(recipe={"task": "own:Task", "options": options})
    project: Any = SimpleNamespace(config=read_config(None, [*typed, f"train.options={here}"]).config)
    model = TrainedModel(ModelFolder(tmp_path), prepared, BEST, None)
    with pytest.raises(ConfigError) as refused:
        model.refuse_other_settings(project)
    said = shlex.split(refused.value.remedy.removeprefix("the same command with "))
    sets = [setting for setting in said if setting != "--set"]
    assert read_config(None, [*typed, f"train.options={here}", *sets]).config.train.options == options
