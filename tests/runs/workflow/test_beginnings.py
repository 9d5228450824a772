"""Weights that a training begins with: looked at when it is submitted, and told apart by what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.tasks.interface import Interface
from tests.runs.workflow.trained import SMALL, write_project
from tests.testkit.command import Command

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

OPTIONS = {"embedding_dim": 16, "width": 8, "layers": 1, "pair_width": 4}
CONFIG = f"""{SMALL}
  task: "pipeline.tasks.interface:Interface"
  micro_batch: 1
  epochs: 1
  pretrained: best.pt
"""
SUBMIT = ("submit", "--stage", "train", "--follow")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_project(tmp_path, CONFIG, {}, [""] * 4)
    monkeypatch.chdir(tmp_path)
    write_weights(tmp_path / "best.pt", 0)
    return tmp_path


def write_weights(path: Path, seed: int, **options: int) -> None:
    torch.manual_seed(seed)
    torch.save(Interface(**OPTIONS | options).model().state_dict(), path)


def models(project: Path) -> set[str]:
    return {path.name for path in (project / "models").iterdir()}


@pytest.mark.nightly
def test_weights_that_were_trained_anew_in_place_begin_another_training(project: Path, pipeline: Command) -> None:
    assert pipeline(*SUBMIT).code == 0
    first = models(project)
    again = pipeline(*SUBMIT)
    assert "cached, 0 to do" in again.err
    write_weights(project / "best.pt", 1)
    other = pipeline(*SUBMIT)
    assert other.code == 0, other.err
    assert len(models(project) - first) == 1, other.err


@pytest.mark.nightly
def test_a_folder_of_weights_is_told_apart_by_what_is_in_it(project: Path, pipeline: Command) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(0)
    weights = Interface(**OPTIONS).model().state_dict()
    (project / "hub").mkdir()
    for number in range(2):
        changed = {name: tensor + number for name, tensor in weights.items()}
        save_file(changed, project / "hub" / "model.safetensors")
        done = pipeline(*SUBMIT, "--set", "train.pretrained=hub")
        assert done.code == 0, done.err
        assert len(models(project)) == number + 1


@pytest.mark.parametrize("partial", ["false", "true"])
def test_weights_that_do_not_fit_are_refused_before_anything_is_submitted(
    project: Path, pipeline: Command, partial: str
) -> None:
    if partial == "true":
        torch.save({"elsewhere": torch.zeros(2)}, project / "best.pt")
    else:
        write_weights(project / "best.pt", 0, width=12)
    refused = pipeline(*SUBMIT, "--set", f"train.pretrained_partial={partial}")
    assert refused.code == 2, refused.err
    assert "train.pretrained" in refused.err
    if partial == "true":
        assert "none of its tensors fits" in refused.err
        assert "pretrained_partial" not in refused.err.partition("next:")[2]
    else:
        assert "of_type.weight: float32[21, 12] in the file, float32[21, 8] in the model" in refused.err
        assert "train.pretrained_partial: true" in refused.err
    assert not (project / "runs").exists() or not list((project / "runs").glob("*train*"))


def test_a_file_to_be_applied_that_does_not_fit_is_told_as_such(project: Path, pipeline: Command) -> None:
    write_weights(project / "best.pt", 0, width=12)
    refused = pipeline("submit", "--stage", "evaluate", "--model", "best.pt", "--only", "--executor", "local")
    assert refused.code == 2, refused.err
    assert f"train.evaluate.checkpoint: {project / 'best.pt'}: the weights are not of this model" in refused.err
    assert refused.err.endswith("next: name weights of this model\n")
