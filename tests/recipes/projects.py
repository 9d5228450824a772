"""A project of each recipe: its file as it stands, made data, random weights; and the settings that make it small."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from pipeline.config.load import read_config
from pipeline.config.schema import Config
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.memory.footprint import MemoryChoice, live_peak_bytes
from pipeline.readers import made
from pipeline.setup import checkup
from pipeline.structures.synthetic import complex_pdb
from pipeline.tasks.rna.made_pockets import write_pockets
from tests.command import Command
from tests.conftest import ROOT
from tests.memory.tracing.traced import tracer
from tests.projects import settle

RECIPES = ROOT / "configs" / "recipes"
SPLITS = ("train", "train", "train", "train", "val", "test")
DIM = 16  # of the small encoder, and of the targets of the small RNA model


@dataclass(frozen=True)
class Recipe:
    """What makes a recipe small enough for a processor and seconds, and the card of its guide."""

    name: str
    small: tuple[str, ...]
    card: str
    structures: bool = False  # else a reader gives the items

    def sets(self, *more: str, gpus: int = 0) -> list[str]:
        """Return the words of a command line for the small one, and more settings."""
        common = (
            "train.epochs=2",
            "train.precision=fp32",
            f"cluster.train.gpus={gpus}",
            "cluster.executor=local",
            "cluster.train.cpus=1",
        )
        return as_words(*self.small, *common, *more)


def as_words(*settings: str) -> list[str]:
    """Return settings as they are typed."""
    return [word for setting in settings for word in ("--set", setting)]


def options(**given: Any) -> tuple[str, ...]:
    """Return settings of a task's options, each by its name."""
    return tuple(f"train.options.{name}={json.dumps(value)}" for name, value in given.items())


COMPLEX = Recipe(
    "complex_docking",
    (
        "embed.weights=weights/esm2_tiny.pt",
        "cluster.embed.gpus=0",
        "cluster.embed.cpus=1",
        "graph.neighbours=8",
        *options(embedding_dim=DIM, scalars=4, vectors=2, layers=2, steps=2),
        "train.evaluate.options={samples: 2}",
        "train.predict.options={samples: 2, steps: 2}",
        "train.effective_batch=2",
        "train.validation.every=1",
    ),
    "3xa100-80gb",
    structures=True,
)
RNA = Recipe(
    "rna_ligand",
    (*options(hidden_irreps="4x0e+2x1o", layers=2, output_dim=DIM, feature_width=8),),
    "rtx4090",
)
SPECTRA = Recipe(
    "spectra_finetune",
    (
        *options(layers=2, heads=2, d_fourier=12, d_peak=4, fourier_width=8, finest=0.1, max_peaks=20),
        "train.frozen=[embed., layers.0.]",
    ),
    "2xrtx4090",
)
DENOVO = Recipe(
    "denovo_recursive",
    (
        *options(width=36, heads=2, encoder_layers=1, decoder_layers=1, latent_steps=2, supervision_steps=2),
        *options(max_peaks=20),
        "train.effective_batch=4",
        "train.curriculum=[{epochs: 1, largest: {residues: 12}}]",
    ),
    "rtx4090",
)
PAIR = Recipe(
    "contrastive_pair",
    (
        *options(width=16, layers=2, heads=2, out=8, vocabulary=1000),
        *options(image_size=16, patch=8, image_width=16, image_layers=2, image_heads=2),
        "data.options.size=16",
        "train.effective_batch=8",
        "train.micro_batch=2",
    ),
    "16GiB",
)
ALL = {recipe.name: recipe for recipe in (COMPLEX, RNA, SPECTRA, DENOVO, PAIR)}


def write(recipe: Recipe, folder: Path, items: int = 6) -> Path:
    """Copy a recipe to a folder, and make what it reads beside it."""
    shutil.copyfile(RECIPES / f"{recipe.name}.yaml", folder / "pipeline.yaml")
    data = folder / "data"
    data.mkdir()
    {
        "complex_docking": _complexes,
        "rna_ligand": _pockets,
        "spectra_finetune": _spectra,
        "denovo_recursive": _peptides,
        "contrastive_pair": _pairs,
    }[recipe.name](data, items)
    settle(data)
    return folder


def _complexes(data: Path, items: int) -> None:
    """Write a pair of files for each complex, the table of splits, and a small encoder."""
    structures = data / "structures"
    structures.mkdir()
    rows = ["path,split"]
    for number in range(items):
        lines = complex_pdb(number, 20 + number, 20 + number).decode().splitlines(keepends=True)
        for chain, letter in (("A", "r"), ("B", "l")):
            own = [line for line in lines if line.startswith("ATOM") and line[21] == chain]
            (structures / f"c{number}_{letter}_b.pdb").write_text("".join([*own, "END\n"]))
        rows.append(f"c{number},{SPLITS[number % len(SPLITS)]}")
    (data / "splits.csv").write_text("\n".join([*rows, ""]))
    settle(structures)
    write_random_checkpoint(data.parent / "weights" / "esm2_tiny.pt", layers=1, dim=DIM, heads=2)


def _pockets(data: Path, items: int) -> None:
    """Write made pockets of three ligands, the targets of their complexes, and the library."""
    write_pockets(data, 2 * items, ligands=3, width=DIM, pairs=1)
    file = data.parent / "pipeline.yaml"
    for option, name in (("targets", "ligand_embeddings"), ("library", "ligand_library")):
        file.write_text(file.read_text().replace(f"{option}: null", f"{option}: {data / name}.h5"))


def _spectra(data: Path, items: int) -> None:
    made.spectra(data / "spectra.mgf", 2 * items)


def _peptides(data: Path, items: int) -> None:
    made.spectra(data / "peptides.mgf", 4 * items)


def _pairs(data: Path, items: int) -> None:
    made.captions(data / "captions.csv", 4 * items)


def planned(pipeline: Command, *words: str) -> dict[str, Any]:
    """Return what `pipeline plan --stage train` says."""
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


def done_again(said: str) -> Mapping[str, int]:
    """Return how much each stage of a run still had to do, as it says at its beginning."""
    return {stage: int(count.replace(",", "")) for stage, count in re.findall(r"^(\w+): .*?([\d,]+) to do", said, re.M)}


def config_of(recipe: Recipe, *settings: str) -> Config:
    """Return the configuration of a recipe as it stands, with settings of a command line."""
    return read_config(RECIPES / f"{recipe.name}.yaml", settings).config


def settings_of(recipe: Recipe, *settings: str) -> dict[str, str]:
    """Return what `pipeline doctor` says of settings that do harm: each thing found, and what to do."""
    loaded = read_config(RECIPES / f"{recipe.name}.yaml", settings)
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):  # else that is warned of, too
        return {one.found: one.remedy for one in checkup.settings_findings(loaded) if one.what == "settings"}


def peak(task: Any, sizes: Mapping[str, int], choice: MemoryChoice = MemoryChoice(), **settings: Any) -> int:  # noqa: B008
    """Return what a step of one micro-batch takes, as it is planned."""
    traced = tracer(task, least=sizes, **settings)
    return live_peak_bytes(traced.standing(choice), traced.micro(choice, sizes), accumulate=False)
