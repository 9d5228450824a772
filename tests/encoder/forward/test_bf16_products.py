"""Matrix products in bf16 on a CPU: close to fp32 in every token, or not done."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, EmbeddingRecipe, Variant, tokenize
from pipeline.encoder.engine.embed_engine import Engine
from pipeline.encoder.engine.sequence_work import Embedding
from pipeline.encoder.engine.token_batches import EngineSettings
from pipeline.encoder.esm2 import EsmEncoder, Strain
from pipeline.encoder.esm_checkpoint import EsmCheckpoint, load_esm_checkpoint
from pipeline.encoder.linear import bf16_products_here
from pipeline.encoder.parity import check_parity
from pipeline.encoder.synth import write_random_checkpoint
from tests.encoder.sequences import natural

pytestmark = pytest.mark.skipif(not bf16_products_here(), reason="this processor has neither AVX512-BF16 nor AMX")
CPU = torch.device("cpu")
SEQUENCES = [*natural(6, shortest=20, longest=400), natural(1, shortest=1100, longest=1100)[0]]
SHAPES = {"35M": (480, 20), "150M": (640, 20), "650M": (1280, 20)}


def encoder_of(checkpoint: EsmCheckpoint, precision: str = BF16_PRODUCTS) -> EsmEncoder:
    return EsmEncoder(checkpoint, layer=checkpoint.architecture.layers, precision=precision, device=CPU)


def rows_of(encoder: EsmEncoder, sequences: list[str]) -> list[torch.Tensor]:
    rows_RD = encoder([tokenize(text) for text in sequences])
    return list(rows_RD.split([len(text) for text in sequences]))


@pytest.fixture(scope="module", params=SHAPES)
def published(request, tmp_path_factory):
    """Return two layers as wide as a published model's."""
    dim, heads = SHAPES[request.param]
    path = tmp_path_factory.mktemp("weights") / "esm2_shape.pt"
    write_random_checkpoint(path, layers=2, dim=dim, heads=heads)
    return load_esm_checkpoint(path)


@pytest.mark.nightly
def test_every_token_is_close_to_fp32_at_each_published_width_with_the_same_bits_in_every_batch(published):
    found, wanted = (torch.cat(rows_of(encoder_of(published, how), SEQUENCES)) for how in (BF16_PRODUCTS, "fp32"))
    cosines_R = cosine_similarity(found.double(), wanted.double(), dim=1)
    assert found.dtype == torch.float32
    assert float(cosines_R.min()) > 0.9999
    assert float(cosines_R.min()) < 0.99999999  # or bf16 had no part in it
    encoder = encoder_of(published)
    for text, rows_LD in zip(SEQUENCES, found.split([len(text) for text in SEQUENCES]), strict=True):
        assert torch.equal(rows_of(encoder, [text])[0], rows_LD)


@pytest.fixture(scope="module")
def sharp_on_o(tmp_path_factory):
    """Return weights whose attention is sharp where the letter O meets itself, and nowhere else."""
    path = tmp_path_factory.mktemp("weights") / "esm2_o.pt"
    write_random_checkpoint(path, layers=3, dim=64, heads=4)
    checkpoint = load_esm_checkpoint(path)
    tensors = dict(checkpoint.tensors)
    query, key = (tensors[f"layers.0.self_attn.{name}_proj.weight"][:16].clone() for name in "qk")
    scores = query.T @ key
    row_D = torch.linalg.eigh(scores + scores.T).eigenvectors[:, -1]
    table_VD = tensors["embed_tokens.weight"].clone()
    table_VD[int(tokenize("O")[0])] = 8 * row_D
    tensors["embed_tokens.weight"] = table_VD
    for name in "qk":  # along that row alone: other letters have little of it
        weight = tensors[f"layers.0.self_attn.{name}_proj.weight"]
        tensors[f"layers.0.self_attn.{name}_proj.weight"] = weight + 8 * torch.outer(weight @ row_D, row_D)
    return dataclasses.replace(checkpoint, tensors=tensors)


def sampled(encoder: EsmEncoder, sequences: list[str]) -> Strain:
    rows_of(encoder, sequences)
    strains = encoder.strains
    return Strain(max(strain.scores for strain in strains), max(strain.growth for strain in strains))


def test_a_sequence_unlike_the_sample_is_done_in_fp32_under_its_key_and_its_neighbours_are_not(sharp_on_o):
    usual = sampled(encoder_of(sharp_on_o), SEQUENCES)

    def build(checkpoint: EsmCheckpoint, *, layer: int, precision: str, device: torch.device) -> EsmEncoder:
        encoder = EsmEncoder(checkpoint, layer=layer, precision=precision, device=device)
        encoder.sampled = usual
        return encoder

    texts = [*SEQUENCES, "O" * 40 + SEQUENCES[0]]
    recipe = EmbeddingRecipe("", 3, "chain", BF16_PRODUCTS, "fp32")
    engine = Engine(sharp_on_o, recipe, EngineSettings("tokens", cap=4, budget=4096, device="cpu"), build=build)
    made: dict[str, Embedding] = {}
    lengths_N = np.array([len(text) for text in texts])
    for outcome in engine.run(lengths_N, lambda at: [texts[n] for n in at], lambda row: made.update({row.text: row})):
        assert outcome.reason is None
    assert {made[text].variant for text in SEQUENCES} == {Variant(BF16_PRODUCTS)}
    assert made[texts[-1]].variant == Variant("fp32")
    wanted_LD = rows_of(encoder_of(sharp_on_o, "fp32"), texts[-1:])[0]
    assert np.array_equal(made[texts[-1]].rows_LD, wanted_LD.numpy())


def test_the_sample_must_be_four_times_closer_than_any_token_may_be(tmp_path):
    lowest = {}
    for stress in (1.0, 6.0):
        path = tmp_path / f"esm2_{stress}.pt"
        write_random_checkpoint(path, layers=4, dim=64, heads=4, stress=stress)
        verdict = check_parity(load_esm_checkpoint(path), BF16_PRODUCTS, 4, "cpu")
        assert verdict.threshold == 0.99975
        lowest[stress] = verdict
    assert lowest[1.0].passed
    assert not lowest[6.0].passed
