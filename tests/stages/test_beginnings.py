"""Weights that a training begins with: looked at when it is submitted, and told apart by what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.tasks.interface import Interface
from tests.testkit.command import Command
from tests.testkit.project import TRAIN, to_do
from tests.testkit.trained import SMALL, write_project

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared

OPTIONS = TRAIN["train__options"]
SETTINGS = {
    **SMALL,
    "train__task": TRAIN["train__task"],
    "train__micro_batch": 1,
    "train__epochs": 1,
    "train__pretrained": "best.pt",
}
SUBMIT = ("submit", "--stage", "train", "--follow")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_project(tmp_path, SETTINGS, {}, [""] * 4)
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
    assert pipeline(*SUBMIT).code == 0
    assert to_do()["train"][1] == 0
    write_weights(project / "best.pt", 1)
    other = pipeline(*SUBMIT)
    assert other.code == 0, other.err
    assert len(models(project) - first) == 1, other.err


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
    assert ("pretrained_partial" in refused.err.partition("next:")[2]) == (partial == "false")
    assert not (project / "runs").exists() or not list((project / "runs").glob("*train*"))


def test_a_file_to_be_applied_that_does_not_fit_is_told_as_such(project: Path, pipeline: Command) -> None:
    write_weights(project / "best.pt", 0, width=12)
    refused = pipeline("submit", "--stage", "evaluate", "--model", "best.pt", "--only", "--executor", "local")
    assert refused.code == 2, refused.err
    assert "train.evaluate.checkpoint" in refused.err
