"""Matrix products in bf16 on a CPU: close to fp32 in every token, or not done."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cosine_similarity

from pipeline.encoder.embedding_recipe import BF16_PRODUCTS, tokenize
from pipeline.encoder.esm2 import EsmEncoder, bf16_products_here
from pipeline.encoder.esm_checkpoint import EsmCheckpoint, load_esm_checkpoint
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


def test_the_sample_must_be_four_times_closer_than_any_token_may_be(tmp_path):
    lowest = {}
    for stress in (1.0, 6.0):
        path = tmp_path / f"esm2_{stress}.pt"
        write_random_checkpoint(path, layers=4, dim=64, heads=4, stress=stress)
        verdict = check_parity(load_esm_checkpoint(path), BF16_PRODUCTS, 4, "cpu")[0]
        assert verdict.threshold == 0.99975
        lowest[stress] = verdict
    assert lowest[1.0].passed
    assert not lowest[6.0].passed
