"""A project of each recipe: its file as it stands, made data, random weights; and the settings that make it small."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.setup.demo_project import DEMOS, small_sets
from tests.conftest import ROOT
from tests.testkit.command import Command
from tests.testkit.project import settle, to_do

RECIPES = ROOT / "configs" / "recipes"
COMMON = ("train.epochs=2", "train.precision=fp32", "cluster.executor=local", "cluster.train.cpus=1")


@dataclass(frozen=True)
class Recipe:
    """What makes a recipe small enough for a processor and seconds, and the card of its guide."""

    name: str
    small: tuple[str, ...]
    card: str
    structures: bool = False  # else a reader gives the items

    def sets(self, *more: str, gpus: int = 0) -> list[str]:
        """Return the words of a command line for the small one, and more settings."""
        return as_words(*self.small, *COMMON, f"cluster.train.gpus={gpus}", *more)


def as_words(*settings: str) -> list[str]:
    """Return settings as they are typed."""
    return [word for setting in settings for word in ("--set", setting)]


def options(**given: Any) -> tuple[str, ...]:
    """Return settings of a task's options, each by its name."""
    return tuple(f"train.options.{name}={json.dumps(value)}" for name, value in given.items())


def recipe_of(name: str, card: str, *, structures: bool = False) -> Recipe:
    """Return a recipe as small as `pipeline demo --recipe` has it, in the folder of its project."""
    settings = small_sets(name, Path("/FOLDER"))
    kept = (setting for setting in settings if "/data/" not in setting and "predict.split" not in setting)
    return Recipe(name, tuple(setting.replace("/FOLDER/", "") for setting in kept), card, structures)


COMPLEX = recipe_of("complex_docking", "3xa100-80gb", structures=True)
RNA = recipe_of("rna_ligand", "rtx4090")
SPECTRA = recipe_of("spectra_finetune", "2xrtx4090")
PRETRAIN = recipe_of("spectra_pretrain", "h200-141gb")
DENOVO = recipe_of("denovo_recursive", "rtx4090")
PAIR = recipe_of("contrastive_pair", "16GiB")
ENCODER = recipe_of("encoder_finetune", "rtx4090")
TIMES = {
    "encoder_finetune": 4,
    "complex_docking": 1,
    "rna_ligand": 2,
    "spectra_finetune": 5,
    "spectra_pretrain": 5,
    "denovo_recursive": 4,
    "contrastive_pair": 4,
}
ALL = {recipe.name: recipe for recipe in (COMPLEX, RNA, SPECTRA, PRETRAIN, DENOVO, ENCODER, PAIR)}


def write(recipe: Recipe, folder: Path, items: int = 6) -> Path:
    """Copy a recipe to a folder, and make what it reads beside it."""
    shutil.copyfile(RECIPES / f"{recipe.name}.yaml", folder / "pipeline.yaml")
    DEMOS[recipe.name].make(folder, TIMES[recipe.name] * items)
    file = folder / "pipeline.yaml"
    for option, name in (("targets", "ligand_embeddings"), ("library", "ligand_library")):
        file.write_text(file.read_text().replace(f"{option}: null", f"{option}: {folder}/data/{name}.h5"))
    settle(folder / "data")
    return folder


def planned(pipeline: Command, *words: str) -> dict[str, Any]:
    """Return what `pipeline plan train` says."""
    done = pipeline("plan", "--stage", "train", "--json", *words)
    assert done.code == 0, done.err
    (document,) = json.loads(done.out)
    assert isinstance(document, dict)
    return document


def written(recipe: Recipe) -> dict[str, Any]:
    """Return what the file of a recipe says."""
    found: dict[str, Any] = yaml.safe_load((RECIPES / f"{recipe.name}.yaml").read_text())
    return found


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    """Return the figures of each epoch of the newest model of a project."""
    file = max(folder.glob("models/*/epochs.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(line) for line in file.read_text().splitlines()]


def ran(pipeline: Command, words: Sequence[str], stage: str = "all") -> Any:
    """Run a stage to its end, on this machine."""
    return pipeline("submit", "--stage", stage, "--follow", "--executor", "local", *words)


def left_to_do() -> Mapping[str, int]:
    """Return how much each stage of the newest run had to do when it began."""
    return {stage: missing for stage, (_, missing) in to_do().items()}


def config_of(recipe: Recipe, *settings: str) -> Config:
    """Return the configuration of a recipe as it stands, with settings of a command line."""
    return read_config(RECIPES / f"{recipe.name}.yaml", settings).config
