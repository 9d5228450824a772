"""Each recipe with each of its encoders, from files to predictions: a model for each, and nothing is done twice.

The first of its encoders trains as the recipe stands, with its curriculum; the others for one epoch without it.

Where items are structures an encoder is one of `embed`, alone or beside another. Where they are not, it is whatever
reads an item: a tower, a network of peaks, a checkpoint that is tuned, or vectors that another encoder made of it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import yaml

from pipeline.encoder.synth import write_random_checkpoint
from pipeline.errors import ConfigError
from pipeline.planning.prepare import embeddings_used
from pipeline.project.project import Project
from pipeline.readers import made
from pipeline.tasks.encoder_finetune import EncoderFinetune
from pipeline.training.checkpoints.trained_weights import write_published
from tests.recipes.conftest import Scanned
from tests.recipes.projects import ALL, Recipe, config_of, epochs_of, left_to_do, options, ran, written
from tests.testkit.command import Command
from tests.testkit.project import settle

Prepare = Callable[[Recipe, Path, Command], list[str]]  # makes what an encoder needs, and returns what is typed
ESM2, ESMC = 16, 64  # widths
OWN = ("train.predict.split=test", "train.seed=26")  # no other test has these models
PLAIN = (*OWN, "train.epochs=1", "train.curriculum=[]")


def as_it_stands(recipe: Recipe, _: Path, __: Command) -> list[str]:
    return recipe.sets(*OWN)


def as_published(recipe: Recipe, _: Path, __: Command, **also: Any) -> list[str]:
    return recipe.sets(*PLAIN, *options(as_published=True, **also))


def weights_of(family: str, folder: Path) -> Path:
    """Return random weights of a family, made where they are not there yet."""
    path = folder / "weights" / {"esm2": "esm2_other.pt", "esmc": "esmc_other.pth"}[family]
    path.parent.mkdir(exist_ok=True)
    dim, heads = {"esm2": (ESM2, 2), "esmc": (ESMC, 1)}[family]
    if not path.exists():
        write_random_checkpoint(path, 1, dim, heads, seed=7, family=family)
    return path


def embedded(recipe: Recipe, folder: Path, _: Command, names: str, width: int) -> list[str]:
    """Embed the chains of structures by ESM-2, ESM C, or both side by side."""
    weights_of("esmc", folder)
    also = "embed.also.esmc={weights: weights/esmc_other.pth, encoder: esmc}"
    return recipe.sets(*PLAIN, also, f"train.embeddings=[{names}]", *options(embedding_dim=width))


def vectors_of_sequences(recipe: Recipe, folder: Path, pipeline: Command, family: str) -> list[str]:
    """Match sentences to sequences as an encoder sees them: a FASTA file in, means out, and these as a side."""
    made_sequences = [made.sequence(0, number) for number in range(24)]
    (folder / "pairs.fasta").write_text("".join(f">{one.id}\n{one.sequence}\n" for one in made_sequences))
    settle(folder)
    own, out = f"embedded/{family}", ("--out", f"{family}.npy", "--force")
    for words in (
        ("embed", "pairs.fasta", "--weights", str(weights_of(family, folder)), "--out", own, "--executor", "local"),
        ("export", "embeddings", "--pool", "mean", *out, "--config", f"{own}/pipeline.yaml"),
    ):
        done = pipeline(*words)
        assert done.code == 0, done.err
    with (folder / f"{family}.csv").open(newline="") as table:
        row_of = {row["id"]: place for place, row in enumerate(csv.DictReader(table))}
    means = np.load(folder / f"{family}.npy")[[row_of[one.id] for one in made_sequences]]
    with h5py.File(folder / "data" / f"{family}.h5", "w") as file:
        file["left"] = means[:, None]  # a row each
        file["right"] = [f"{one.sites.count('1')} aromatic residues" for one in made_sequences]
        for name in ("id", "split"):
            file[name] = [getattr(one, name) for one in made_sequences]
    data = {"source": "reader", "reader": "pipeline.readers.pairs:Pairs", "path": f"data/{family}.h5"}
    (folder / f"{family}.yaml").write_text(yaml.safe_dump({**written(recipe), "data": data}))
    settle(folder / "data")
    small = replace(recipe, small=tuple(one for one in recipe.small if not one.startswith("data.")))
    sides = options(left="vectors", left_dim=means.shape[1], right="tokens", crop_least=1.0)
    return [*small.sets(*PLAIN, *sides), "--config", f"{family}.yaml"]


def another_checkpoint(recipe: Recipe, folder: Path, _: Command) -> list[str]:
    """Tune an ESM-2 of other sizes, in Hugging Face's form, by its top layer."""
    sizes = {"layers": 1, "width": 8, "heads": 2, "rank": 0, "top_layers": 1}
    torch.manual_seed(7)
    model = EncoderFinetune(**sizes).model()
    place = folder / "weights" / "tuned"
    if not place.exists():
        place.mkdir()
        write_published(place, "esm2", model, model.state_dict())
    return recipe.sets(*PLAIN, "train.pretrained=weights/tuned/esm2/model.safetensors", *options(**sizes))


def sequences_of_pockets(recipe: Recipe, folder: Path, _: Command) -> list[str]:
    """Tell the network beside a pocket's atoms what an encoder of RNA says of its sequence."""
    names = {path.name.rpartition("_rna")[0] for path in (folder / "data" / "pockets").iterdir()}
    rng = np.random.default_rng(0)
    with h5py.File(folder / "data" / "sequences.h5", "w") as file:
        for name in sorted(names):
            file[name] = rng.standard_normal(5).astype(np.float32)
    return recipe.sets(*PLAIN, *options(sequences=f"{folder}/data/sequences.h5", sequence_dim=5))


ENCODERS: dict[str, dict[str, Prepare]] = {
    "complex_docking": {
        "ESM-2": as_it_stands,
        "ESM C": partial(embedded, names="esmc", width=ESMC),
        "both": partial(embedded, names="esmc, main", width=ESMC + ESM2),
    },
    "contrastive_pair": {
        "images": as_it_stands,
        "sequences by ESM-2": partial(vectors_of_sequences, family="esm2"),
        "sequences by ESM C": partial(vectors_of_sequences, family="esmc"),
    },
    "denovo_recursive": {
        "mended": as_it_stands,
        "as published": as_published,
    },
    "rna_ligand": {
        "mended": as_it_stands,
        "as published": as_published,
        "and sequences": sequences_of_pockets,
    },
    "spectra_finetune": {
        "mended": as_it_stands,
        "as published": partial(as_published, classes=8),
    },
    "spectra_pretrain": {
        "mended": as_it_stands,
        "as published": as_published,
    },
    "encoder_finetune": {"fair-esm's, by LoRA": as_it_stands, "transformers', its top": another_checkpoint},
}
CASES = [pytest.param(ALL[name], how, id=f"{name}-{how}") for name, hows in ENCODERS.items() for how in hows]
READ = [recipe for recipe in ALL.values() if not recipe.structures]


def told(folder: Path) -> dict[str, str]:
    """Return what each prediction of a project says, as a digest of its numbers, by its folder."""
    found = {}
    for place in (folder / "predictions").glob("*"):
        files = sorted(path for path in place.rglob("*") if path.suffix in (".npy", ".csv") and path.is_file())
        found[place.name] = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return found


def test_every_recipe_has_two_encoders_or_more() -> None:
    assert ENCODERS.keys() == ALL.keys()
    assert all(len(hows) > 1 for hows in ENCODERS.values())


@pytest.mark.nightly
@pytest.mark.timeout(900)  # it plans and trains for real
@pytest.mark.parametrize(("recipe", "how"), CASES)
def test_a_recipe_goes_from_files_to_predictions_with_an_encoder_and_does_nothing_twice(
    recipe: Recipe, how: str, pipeline: Command, scanned: Scanned
) -> None:
    folder = scanned(recipe)
    words = ENCODERS[recipe.name][how](recipe, folder, pipeline)
    checked = pipeline("config", "check", *words)
    assert checked.code == 0, checked.err
    models, before = {*folder.glob("models/*")}, told(folder)
    for stage in ("all", "predict"):
        done = ran(pipeline, words, stage)
        assert done.code == 0, done.err
    if recipe.structures:
        assert left_to_do()["graph"] == 0  # they are of no encoder
    (model,) = {*folder.glob("models/*")} - models  # whose name says what decides the outcome
    epochs = epochs_of(folder)
    assert [one["epoch"] for one in epochs] == ([1, 2] if ENCODERS[recipe.name][how] is as_it_stands else [1])
    assert all(one["items"] > 0 and math.isfinite(term) for one in epochs for term in one["loss"].values())
    assert all(one["ooms"] == 0 and one["allocated_bytes"] > 0 and one["reserved_bytes"] > 0 for one in epochs)
    (kept,) = model.glob("evaluations/test-*.json")
    assert math.isfinite(json.loads(kept.read_text())["evaluation"]["figures"]["loss"])
    (new,) = told(folder).keys() - before.keys()
    assert told(folder)[new] not in before.values()
    for stage, last in (("all", "evaluate"), ("predict", "predict")):
        again = ran(pipeline, words, stage)
        assert again.code == 0, again.err
        assert {"scan", "train", last} <= left_to_do().keys()
        assert not any(left_to_do().values())
    assert {*folder.glob("models/*")} - models == {model}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_width_that_is_not_the_encoders_is_told_with_the_one_that_is(pipeline: Command, scanned: Scanned) -> None:
    recipe = ALL["complex_docking"]
    folder = scanned(recipe)
    refused = ran(pipeline, embedded(recipe, folder, pipeline, "esmc", ESM2), "train")
    assert refused.code != 0
    assert f"--set train.options.embedding_dim={ESMC}" in refused.err


@pytest.mark.parametrize("recipe", READ, ids=lambda recipe: recipe.name)
def test_a_recipe_whose_items_have_no_embeddings_trains_on_none_and_refuses_to_name_some(recipe: Recipe) -> None:
    with_others = config_of(recipe, "embed.also.other.layer=1")
    assert embeddings_used(Project.open(with_others)) == {}
    with pytest.raises(ConfigError, match="items of a reader have no embeddings"):
        config_of(recipe, "train.embeddings=[main]")
