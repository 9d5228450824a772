"""`embed.cls`: the row of the mark before a sequence, against fair-esm's, in packed batches, windows and storage."""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import esm
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import cosine_similarity

from pipeline.encoder.checkpoint_files import ESM1B, ESMC
from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, EmbeddingRecipe, as_floats, tokenize
from pipeline.encoder.engine.embed_engine import Embedding, Engine
from pipeline.encoder.engine.encoder_source import EsmSource
from pipeline.encoder.engine.token_batches import EngineSettings
from pipeline.encoder.esm2 import EsmEncoder
from pipeline.encoder.esm_checkpoint import Architecture, EsmCheckpoint, load_esm_checkpoint
from pipeline.encoder.parity import Reference, check_parity, judge_rows
from pipeline.encoder.synth import write_random, write_random_checkpoint
from tests.encoder.engine.stand_ins import Shelf, Workshop, recipe, run, settings, texts
from tests.encoder.own import drawn

CPU = torch.device("cpu")
RELATIVES = {
    "esm1b": Architecture(2, 32, 4, token_dropout=True, family=ESM1B, positions=1024, norm_before=True),
    "esm1v": Architecture(2, 64, 4, token_dropout=True, family=ESM1B, positions=1024),
    "esmc": Architecture(3, 64, 1, token_dropout=False, family=ESMC),
    "esmc as wide as 300M": Architecture(1, 960, 15, token_dropout=False, family=ESMC),
}
ESM2 = {"esm2": (3, 32, 4), "esm2 of 8M": (1, 320, 20), "esm2 of one head": (2, 64, 1)}
TEXTS = drawn(1, 2, 30, 30, 300, 7)


def written(name: str, folder: Path) -> EsmCheckpoint:
    """Return random weights of a family and a shape."""
    path = folder / f"{name.split()[0]}.pt"
    if name in ESM2:
        layers, dim, heads = ESM2[name]
        write_random_checkpoint(path, layers=layers, dim=dim, heads=heads, seed=3)
    else:
        write_random(path, RELATIVES[name], seed=5)
    return load_esm_checkpoint(path)


@pytest.fixture(scope="module", params=[*ESM2, *RELATIVES])
def checkpoint(request, tmp_path_factory):
    return written(request.param, tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module", params=["esm2", "esm1b", "esmc"])
def small(request, tmp_path_factory):
    """Return one that is quick."""
    return written(request.param, tmp_path_factory.mktemp("small"))


def apart(rows_RD: torch.Tensor, sequences: list[str]) -> list[torch.Tensor]:
    """Return the rows of each sequence, the first of which is that of its mark."""
    return list(rows_RD.split([1 + len(text) for text in sequences]))


def lowest(found: list[NDArray[np.float32]], wanted: list[NDArray[np.float32]]) -> float:
    """Return the lowest cosine of two rows."""
    pairs = zip(found, wanted, strict=True)
    return min(float(cosine_similarity(*(torch.from_numpy(row).double() for row in pair), dim=0)) for pair in pairs)


@pytest.mark.parametrize("layer", [0, 1, -1])
def test_the_row_of_every_mark_is_as_the_reference_has_it(checkpoint, layer):
    layer = layer if layer >= 0 else checkpoint.architecture.layers
    wanted = [rows_LD[0] for rows_LD in Reference(checkpoint, layer, CPU)(TEXTS, cls=True)]
    encoder = EsmEncoder(checkpoint, layer=layer, precision="fp32", device=CPU)
    tokens = [tokenize(text) for text in TEXTS]
    found = apart(encoder(tokens, cls=True), TEXTS)
    assert lowest([rows_LD[0].numpy() for rows_LD in found], wanted) >= 0.99999
    assert torch.equal(torch.cat([rows_LD[1:] for rows_LD in found]), encoder(tokens))
    backwards = apart(encoder(tokens[::-1], cls=True), TEXTS[::-1])[::-1]
    assert all(torch.equal(rows_LD, other_LD) for rows_LD, other_LD in zip(found, backwards, strict=True))
    assert torch.equal(encoder(tokens[:1], cls=True), found[0])


@pytest.mark.parametrize("storage", ["fp32", "fp16", "bf16"])
def test_what_the_engine_gives_in_any_storage_is_the_row_of_the_mark(small, storage):
    layer = small.architecture.layers
    how = EmbeddingRecipe("0", layer, "chain", "fp32", storage, cls=True)
    made = embedded(small, how, TEXTS)
    wanted = [rows_LD[0] for rows_LD in Reference(small, layer, CPU)(TEXTS, cls=True)]
    kept = [made[text].arrays["cls"] for text in TEXTS]
    assert {(row.dtype.name, row.shape) for row in kept} == {
        ({"fp32": "float32", "fp16": "float16", "bf16": "uint16"}[storage], (small.dim,))
    }
    found = [as_floats(row).astype(np.float32) for row in kept]
    # bfloat16 keeps 8 bits of a number: rounding a row alone takes 3e-6 from its cosine.
    assert lowest(found, wanted) >= 0.99999
    plain = embedded(small, replace(how, cls=False), TEXTS)
    assert all(np.array_equal(made[text].rows_LD, plain[text].rows_LD) for text in TEXTS)
    assert all(plain[text].arrays.keys() == {"rows"} for text in TEXTS)
    verdict = check_parity(small, storage, layer, "cpu", cls=True)[0]
    assert (verdict.passed, verdict.sequences) == (True, 9)


def embedded(checkpoint: EsmCheckpoint, how: EmbeddingRecipe, sequences: list[str]) -> dict[str, Embedding]:
    """Return what the engine makes of sequences."""
    made: dict[str, Embedding] = {}
    engine = Engine(EsmSource(checkpoint), how, EngineSettings("divisor", 4, 4096, "cpu"))
    lengths_N = np.array([len(text) for text in sequences])

    def keep(each: Embedding) -> None:
        made[each.text] = each

    outcomes = list(engine.run(lengths_N, lambda places: [sequences[at] for at in places], keep))
    assert all(outcome.reason is None for outcome in outcomes)
    return made


def test_fair_esm_itself_computes_the_same_of_weights_from_the_command(tmp_path):
    path = tmp_path / "esm2_t2.pt"
    typed = (sys.executable, "-m", "pipeline", "weights", "synth", "--layers", "2", "--dim", "64", "--heads", "4")
    subprocess.run([*typed, "--out", str(path)], check=True, capture_output=True, timeout=120, cwd=tmp_path)
    with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has no regression for contacts
        model, alphabet = esm.pretrained.load_model_and_alphabet_local(str(path))
    tokens_BT = alphabet.get_batch_converter()([(text, text) for text in TEXTS])[2]
    encoder = EsmEncoder(load_esm_checkpoint(path), layer=1, precision="fp32", device=CPU)
    found = apart(encoder([tokenize(text) for text in TEXTS], cls=True), TEXTS)
    with torch.inference_mode():
        wanted_BD = model.eval()(tokens_BT, repr_layers=[1])["representations"][1][:, 0]
    assert lowest([rows_LD[0].numpy() for rows_LD in found], list(wanted_BD.numpy())) >= 0.99999


@pytest.mark.parametrize("precision", ["fp32", "bf16", BF16_PRODUCTS])
def test_a_mark_that_is_wrong_among_many_right_residues_does_not_pass(precision):
    wanted = np.random.default_rng(0).normal(size=(2000, 32)).astype(np.float32)
    found = wanted.copy()
    found[0] = wanted[0][::-1]
    assert not judge_rows([found], [wanted], precision, cls=True).passed
    assert judge_rows([wanted], [wanted], precision, cls=True).passed


def kept(sequences: list[str], limit: int = 1 << 60, budget: int = 10_000, **changes: object) -> list[list[float]]:
    """Return the marks that the engine keeps of sequences; the rows are those without marks."""
    shelves = Shelf(), Shelf()
    for shelf, cls in zip(shelves, (True, False), strict=True):
        engine = Engine(Workshop({"cpu": limit}), recipe(cls=cls, **changes), settings(budget=budget))
        run(engine, sequences, shelf)
    assert shelves[0].rows() == shelves[1].rows()
    return [made.arrays["cls"].tolist() for _, made in sorted(shelves[0].taken.items())]


@pytest.mark.nightly
def test_the_mark_of_what_is_cut_or_done_in_halves_is_that_of_what_was_encoded():
    long, *short = texts(120, 30, 29, 28, 27)
    marks = [[tokenize(text)[0], -1, len(text), 1] for text in short]
    first = float(np.mean([tokenize(long)[start] for start in (0, 40, 70)]))
    for budget in (52, 120, 10_000):  # whatever fits at once: the mean of the marks of the windows
        found = kept([long, *short], budget=budget, long="windows")
        np.testing.assert_allclose(found, [[first, -1, 50, 1], *marks], rtol=1e-6)
    assert kept([long], long="truncate") == [[tokenize(long)[0], -1, 50, 1]]
    assert kept(short, limit=64) == marks
