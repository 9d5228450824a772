"""Commands typed where there are cards: the projects that they work in, and what came of them."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from pipeline.device.kinds import VISIBLE
from pipeline.setup.demo_project import make_project
from tests.card import card
from tests.recipes.projects import ALL, Recipe, ran, write
from tests.testkit.command import Command

CARD = "cluster.slurm.cards=[{gres: a100, mem: 16GiB}]"  # by name one that has bf16
INTERFACE = Recipe(
    "interface",
    ("train.effective_batch=8", "train.validation.every=2", "cluster.embed.gpus=1", "embed.precision=fp32"),
    "a100-40gb",
    structures=True,
)
EVERY = {**ALL, INTERFACE.name: INTERFACE}
_made: dict[str, Path] = {}


@dataclass(frozen=True)
class Typist:
    """Types commands where there are two simulated cards."""

    pipeline: Command
    monkeypatch: pytest.MonkeyPatch
    root: Path

    def go(self, recipe: Recipe) -> Path:
        """Go to the project of a recipe, made once for all tests."""
        if recipe.name not in _made:
            folder = self.root / recipe.name
            folder.mkdir()
            _made[recipe.name] = folder
            if recipe is INTERFACE:
                make_project(folder)
                task = folder / "demo_task.py"  # on purpose, one of its complexes runs out of memory
                task.write_text(task.read_text().replace("\nGREEDY = (", "\nGREEDY = None and ("))
            else:
                write(recipe, folder)
        self.monkeypatch.chdir(_made[recipe.name])
        return _made[recipe.name]

    def submit(self, stage: str, recipe: Recipe, *settings: str, gpus: int = 1) -> None:
        """Run a stage of a recipe to its end."""
        words = recipe.sets(*([CARD] if gpus else []), *settings, gpus=gpus)
        done = ran(self.pipeline, words, stage)
        assert done.code == 0, done.out[-4000:] + done.err[-4000:]

    def gpu_peak_bytes(self) -> int:
        """Return the most memory of a card that a stage of the newest run took."""
        stages = json.loads(self.pipeline("status", "--json").out)["stages"]
        return max(stage["use"]["gpu_peak_bytes"] or 0 for stage in stages)


@pytest.fixture(scope="session")
def projects_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("projects")


@pytest.fixture
def typist(pipeline: Command, monkeypatch: pytest.MonkeyPatch, projects_root: Path) -> Typist:
    """Return who types commands whose jobs have two cards."""
    for name, value in card.environment(card.Cards()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(VISIBLE, "0,1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Typist(pipeline, monkeypatch, projects_root)


def epochs(models: Path) -> list[dict[str, Any]]:
    """Return the figures of each epoch of the one model of a folder."""
    (file,) = models.glob("*/epochs.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def losses(models: Path) -> dict[str, float]:
    """Return every loss that a training told, by epoch and term."""
    told = {}
    for epoch in epochs(models):
        told |= {f"{epoch['epoch']} {term}": float(value) for term, value in epoch["loss"].items()}
    return told


def predicted(folder: Path) -> dict[str, Any]:
    """Return the predictions of a folder: each array, and each number of its table."""
    (made,) = (path for path in folder.iterdir() if path.is_dir())
    found: dict[str, Any] = {}
    for file in sorted(made.glob("*.safetensors")):
        found |= {f"{file.stem} {name}": array.astype(np.float64) for name, array in load_file(file).items()}
    with (made / "predictions.csv").open(newline="") as table:
        for row in csv.DictReader(table):
            found |= {f"{row['id']} {name}": _number(text) for name, text in row.items()}
    return found


def _number(text: str) -> NDArray[np.float64] | str:
    try:
        return np.array(float(text))
    except ValueError:
        return text
