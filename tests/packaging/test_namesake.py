"""A user's own `pipeline` beside their configuration, a folder or a file: it is never taken for this package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.packaging.conftest import Installed
from tests.testkit.project import write_complexes

CONFIG = """\
data: {source: glob, path: data}
embed: {weights: weights/esm2_tiny.pt}
train:
  task: "mylab.model:Task"
  options: {embedding_dim: 16, width: 8, layers: 1, pair_width: 4}
  split: null
  validation: {split: null}
  effective_batch: 2
  epochs: 1
  readers: processes
"""
TASK = "from mylab.layers import Interface\n\n\nclass Task(Interface):\n    pass\n"
LAYERS = "from pipeline.tasks.interface import Interface as Interface\n"
TRAP = "raise SystemExit('the user\\'s own pipeline was imported')\n"
NAMESAKES = {"package": "pipeline/__init__.py", "module": "pipeline.py", "plain folder": "pipeline/notes.txt"}
RUN = ("--executor", "local", "--follow")


@pytest.fixture(params=NAMESAKES)
def project(request: pytest.FixtureRequest, installed: Installed, tmp_path: Path) -> Path:
    """Make a project whose task is beside it, and beside that something called as this package is."""
    write_complexes(tmp_path / "data", 4)
    for name, text in {"mylab/__init__.py": "", "mylab/model.py": TASK, "mylab/layers.py": LAYERS}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "pipeline.yaml").write_text(CONFIG)
    namesake = tmp_path / NAMESAKES[request.param]
    namesake.parent.mkdir(exist_ok=True)
    namesake.write_text(TRAP)
    return tmp_path


@pytest.mark.nightly
def test_a_supervisor_and_its_workers_use_this_package_beside_a_namesake(project: Path, installed: Installed) -> None:
    installed("pipeline", "submit", "--stage", "scan", *RUN, cwd=project)
    (code,) = project.glob("runs/2*/code.txt")
    assert (Path(code.read_text()) / "pipeline/api.py").is_file()  # what was frozen, and ran
    again = installed("pipeline", "submit", "--stage", "scan", *RUN, cwd=project)
    assert "nothing to do" in again.stdout


@pytest.mark.nightly
def test_ranks_and_readers_train_a_task_beside_a_namesake(project: Path, installed: Installed) -> None:
    synth = ("--layers", "1", "--dim", "16", "--heads", "2", "--out", "weights/esm2_tiny.pt")
    installed("pipeline", "weights", "synth", *synth, cwd=project)
    installed("pipeline", "submit", "--stage", "train", *RUN, cwd=project)
    shown = json.loads(installed("pipeline", "status", "--json", cwd=project).stdout)
    assert {stage["name"]: stage["state"] for stage in shown["stages"]} == dict.fromkeys(
        ("scan", "embed", "graph", "train"), "done"
    )


@pytest.mark.nightly
def test_code_that_means_the_namesake_is_told_why_it_is_not_found(project: Path, installed: Installed) -> None:
    (project / "mylab/layers.py").write_text("from pipeline.own_layers import Interface\n")
    (project / "pipeline").mkdir(exist_ok=True)
    refused = installed("pipeline", "config", "check", cwd=project, check=False)
    assert refused.returncode == 2, refused.stderr + refused.stdout
    assert "which is also named `pipeline`" in refused.stderr
    assert "mv pipeline my_pipeline" in refused.stderr
