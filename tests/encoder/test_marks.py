"""`embed.cls`: the row of the mark before a sequence, in windows, in storage and in the gate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.functional import cosine_similarity

from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, EmbeddingRecipe, as_floats, tokenize
from pipeline.encoder.engine.embed_engine import Embedding, Engine
from pipeline.encoder.engine.encoder_source import EsmSource
from pipeline.encoder.engine.token_batches import EngineSettings
from pipeline.encoder.esm_checkpoint import EsmCheckpoint, load_esm_checkpoint
from pipeline.encoder.parity import Reference, check_parity, judge_rows
from pipeline.encoder.synth import write_random
from tests.encoder.engine.stand_ins import Shelf, Workshop, recipe, run, settings, texts
from tests.encoder.forward.test_families import SHAPES
from tests.encoder.own import drawn

CPU = torch.device("cpu")
TEXTS = drawn(1, 2, 30, 30, 300, 7)


@pytest.fixture(scope="module", params=["esm2", "esm1b", "esmc"])
def small(request, tmp_path_factory):
    """Return random weights of a family."""
    path = tmp_path_factory.mktemp("small") / f"{request.param}.pt"
    write_random(path, SHAPES[request.param], seed=5)
    return load_esm_checkpoint(path)


def lowest(found: list[NDArray[np.float32]], wanted: list[NDArray[np.float32]]) -> float:
    """Return the lowest cosine of two rows."""
    pairs = zip(found, wanted, strict=True)
    return min(float(cosine_similarity(*(torch.from_numpy(row).double() for row in pair), dim=0)) for pair in pairs)


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
