"""Tasks written from the documentation alone, with e3nn and with PyG, do all that a user's task is promised."""

from __future__ import annotations

import json
import math
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.conftest import Demo
from tests.docs.conftest import demo as demo
from tests.testkit.command import Command

HERE = Path(__file__).parent
TASKS = {"e3nn": "equivariant:Placement", "pyg": "gat:Contacts"}
FIGURES = {"e3nn": {"loss", "accuracy", "off_angstrom"}, "pyg": {"loss", "off"}}
CONFIG = """\
data: {{path: data/manifest.csv, max_rejected_fraction: 0.1}}
embed: {{weights: weights/esm2_demo.pt}}
train:
  task: "{task}"
  options: {{embedding: 32, width: 8}}
  learning_rate: 0.003
  effective_batch: 4
  epochs: 2
"""


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # PyG, when it is imported
@pytest.mark.parametrize("kind", TASKS)
def test_a_task_written_from_the_documentation_plugs_in(
    kind: str, demo: Demo, pipeline: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "project"
    shutil.copytree(demo.pristine, project)
    shutil.rmtree(project / "models")
    shutil.copy(HERE / f"{TASKS[kind].partition(':')[0]}.py", project)
    (project / "pipeline.yaml").write_text(CONFIG.format(task=TASKS[kind]))
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    checked = pipeline("config", "check")
    assert checked.code == 0, checked.err

    run = pipeline("submit", "--stage", "evaluate", "--executor", "local", "--follow")
    assert run.code == 0, run.out + run.err
    (model,) = (project / "models").iterdir()
    first, last = lines(model / "epochs.jsonl")
    assert (first["batch"]["least"], first["batch"]["most"], last["step"]) == (4, 4, 8)
    for term, was in first["loss"].items():
        assert math.isfinite(was)
        assert math.isfinite(last["loss"][term])
    assert sum(last["loss"].values()) < sum(first["loss"].values())
    (evaluation,) = (model / "evaluations").glob("*.json")
    assert all(name in evaluation.read_text() for name in FIGURES[kind])

    shown = pipeline("plan", "train", "--json")
    assert shown.code == 0, shown.err
    (document,) = json.loads(shown.out)
    (plan,) = document["plans"].values()
    assert plan["live"]["origin"] == "traced"
    assert json.loads((model / "prepared.json").read_text())["phases"][0]["live_bytes"] > 0

    run = pipeline("submit", "--stage", "predict", "--executor", "local", "--follow")
    assert run.code == 0, run.out + run.err
    (predicted,) = (project / "predictions").iterdir()
    assert len({line["id"] for line in lines(predicted / "predictions.jsonl")}) == 24


def test_a_turned_complex_has_a_turned_displacement_and_the_same_contacts() -> None:
    import torch
    from e3nn import o3

    torch.manual_seed(0)
    task = runpy.run_path(str(HERE / "equivariant.py"))["Placement"](embedding=32, width=8)
    model, batch = task.model(), task.example({"nodes": 40, "edges": 200, "items": 3})
    turn, pos = o3.rand_matrix(), 10 * batch["pos"]
    logits, away = task.answer(model, {**batch, "pos": pos})
    same, turned = task.answer(model, {**batch, "pos": pos @ turn.T})
    assert float(away.detach().abs().min()) > 0
    torch.testing.assert_close(same, logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(turned, away @ turn.T, rtol=1e-4, atol=1e-4 * float(away.detach().abs().max()))
