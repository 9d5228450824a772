"""DreaMS' two steps by the command line, on real spectra: pre-training, then fine-tuning from its weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeline.training.checkpoints.trained_weights import stored_weights
from tests.recipes.projects import PRETRAIN, RECIPES, SPECTRA, epochs_of, ran
from tests.reference import FOLDER
from tests.testkit.command import Command
from tests.testkit.project import settle

pytestmark = [pytest.mark.timeout(900), pytest.mark.nightly]  # they train for real
EVERY = ("train.split=null", "train.validation.split=null", "train.evaluate.split=null", "train.effective_batch=2")


def test_fine_tuning_starts_from_a_pre_training_on_real_spectra(
    pipeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/spectra.mgf").write_bytes((FOLDER / "dreams" / "files" / "example_5_spectra.mgf").read_bytes())
    settle(tmp_path / "data")
    for recipe in (PRETRAIN, SPECTRA):
        Path(f"{recipe.name}.yaml").write_bytes((RECIPES / f"{recipe.name}.yaml").read_bytes())
    done = ran(pipeline, ["--config", "spectra_pretrain.yaml", *PRETRAIN.sets(*EVERY)])
    assert done.code == 0, done.err
    (figures,) = (
        json.loads(path.read_text())["evaluation"]["figures"] for path in Path("models").glob("*/evaluations/*")
    )
    assert {"masked_error", "masked_accuracy", "order_accuracy"} <= figures.keys()
    (model,) = Path("models").iterdir()
    exported = pipeline("model", "export", model.name, "pretrained", "--config", "spectra_pretrain.yaml")
    assert exported.code == 0, exported.err
    words = SPECTRA.sets(
        *EVERY, "train.pretrained=pretrained", "train.frozen=[embed.]", "data.options={target: [exactmass]}"
    )
    done = ran(pipeline, ["--config", "spectra_finetune.yaml", *words], stage="train")
    assert done.code == 0, done.err
    assert epochs_of(tmp_path)[-1]["epoch"] == 2
    (tuned,) = set(Path("models").iterdir()) - {model}
    before, after = map(stored_weights, (Path("pretrained"), max(tuned.glob("checkpoints/step-*"))))
    assert torch.equal(after["embed.peak.weight"], before["embed.peak.weight"])
    assert "head.steps.0.weight" in after
