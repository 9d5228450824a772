"""The gate lets the right encoder through, and no other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.encoder.embedding_recipe import LETTERS, tokenize
from pipeline.encoder.esm2 import EsmEncoder
from pipeline.encoder.esm_checkpoint import load_esm_checkpoint
from pipeline.encoder.parity import (
    Reference,
    against_double,
    check_parity,
    judge_rows,
    sample_sequences,
)
from pipeline.encoder.synth import write_random_checkpoint
from pipeline.errors import WeightsUnusable

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tiny):
    return load_esm_checkpoint(tiny)


@pytest.fixture(scope="module")
def wanted(checkpoint):
    return Reference(checkpoint, 3, CPU)(sample_sequences())


def broken(checkpoint, **tensors):
    """Return the checkpoint with some tensors changed."""
    changed = {name.replace("__", "."): change for name, change in tensors.items()}
    return replace(
        checkpoint,
        tensors={**checkpoint.tensors, **{name: change(checkpoint.tensors[name]) for name, change in changed.items()}},
    )


def verdict_on(broken_checkpoint, wanted, precision="fp32", layer=3):
    return judge_rows(rows_of(broken_checkpoint, precision, layer), wanted, precision)


def rows_of(checkpoint, precision="fp32", layer=3):
    """Return the rows that our encoder gives the sample, by sequence."""
    encoder = EsmEncoder(checkpoint, layer=layer, precision=precision, device=CPU)
    rows_RD = encoder([tokenize(text) for text in sample_sequences()]).float()
    return [part.numpy() for part in rows_RD.split([*map(len, sample_sequences())])]


def test_the_right_encoder_passes_in_every_layer_and_precision(checkpoint):
    for precision, layer, lowest in (
        ("fp32", 0, 0.9999999),
        ("fp32", 3, 0.9999999),
        ("bf16", 3, 0.999),
        ("fp16", 3, 0.999),
    ):
        verdict = check_parity(checkpoint, precision, layer, "cpu")[0]
        assert verdict.passed
        assert verdict.lowest > lowest
        assert verdict.sequences == 9


def test_the_sample_is_the_same_everywhere_and_has_every_letter():
    assert sample_sequences() == sample_sequences()
    assert [len(one) for one in sample_sequences()] == [len(LETTERS), 300, 251, 190, 128, 97, 64, 33, 17]
    assert set(sample_sequences()[0]) == set(LETTERS)
    assert set("".join(sample_sequences()[1:])) == set("ACDEFGHIKLMNPQRSTVWY")


WRONG = {
    "a layer": {"layers__1__fc1__weight": lambda weight: weight.flip(0)},
    "a bias": {"layers__2__self_attn__out_proj__bias": lambda bias: bias + 0.02 * torch.arange(32) % 0.5},
    "a letter": {"embed_tokens__weight": lambda table: table[[*range(27), 28, 27, *range(29, 33)]]},
}


def test_a_wrong_encoder_is_caught(checkpoint, wanted):
    for what, tensors in WRONG.items():
        assert not verdict_on(broken(checkpoint, **tensors), wanted).passed, what
    rotary_F = checkpoint.rotary_F
    for other_F in (rotary_F * 1.01, rotary_F.flip(0), torch.zeros_like(rotary_F)):
        assert not verdict_on(replace(checkpoint, rotary_F=other_F), wanted).passed
    assert not verdict_on(checkpoint, wanted, layer=2).passed
    negated = broken(checkpoint, layers__1__self_attn__v_proj__weight=lambda weight: -weight)
    assert not verdict_on(negated, wanted, "bf16").passed
    assert not judge_rows([np.roll(rows_LD, 1, 0) for rows_LD in rows_of(checkpoint)], wanted, "fp32").passed
    for value in (float("nan"), float("inf"), 0.0):
        verdict = judge_rows([np.full_like(rows_LD, value) for rows_LD in wanted], wanted, "fp32")
        assert not verdict.passed
        assert -1.0 <= verdict.lowest <= 1.0  # it can be written down


def test_sharp_attention_passes_in_full_precision_and_is_judged_truly_in_half(tmp_path):
    write_random_checkpoint(tmp_path / "esm2_sharp.pt", layers=4, dim=64, heads=4, seed=0, stress=6.0)
    checkpoint = load_esm_checkpoint(tmp_path / "esm2_sharp.pt")
    assert check_parity(checkpoint, "fp32", 4, "cpu")[0].passed
    half = check_parity(checkpoint, "bf16", 4, "cpu")[0]
    assert half.passed == (half.lowest >= 0.999)
    assert half.lowest == pytest.approx(_lowest_by_hand(checkpoint), abs=1e-6)
    assert half.lowest < 0.999  # 0.986 when this was written: sharp enough to hurt


def _lowest_by_hand(checkpoint):
    """Return the lowest cosine of a whole sequence in bf16, computed the plain way."""
    wanted = Reference(checkpoint, 4, CPU)(sample_sequences())
    pairs = zip(rows_of(checkpoint, "bf16", 4), wanted, strict=True)
    flat = ([torch.from_numpy(rows).double().flatten() for rows in pair] for pair in pairs)
    return min(float(torch.cosine_similarity(*pair, dim=0)) for pair in flat)


def test_a_checkpoint_that_leaves_a_part_empty_is_refused(checkpoint):
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != "layers.1.fc2.bias"}
    with pytest.raises(WeightsUnusable, match="bias"):
        Reference(replace(checkpoint, tensors=tensors), 3, CPU)


def test_where_fp32_itself_is_in_doubt_fair_esm_is_the_measure_and_a_wrong_encoder_is_still_caught(tmp_path):
    path = tmp_path / "esm2_doubtful.pt"  # so sharp that fair-esm in fp32 is not what it is in fp64
    write_random_checkpoint(path, layers=6, dim=64, heads=2, stress=10.0)
    doubtful = load_esm_checkpoint(path)
    verdict = check_parity(doubtful, "fp32", 6, "cpu")[0]
    assert verdict.lowest < 0.99999
    assert 0.999 <= verdict.threshold < 0.99999
    assert verdict.passed
    truth = Reference(doubtful, 6, CPU, torch.float64)(sample_sequences())
    theirs = Reference(doubtful, 6, CPU)(sample_sequences())
    wrong = broken(doubtful, layers__5__fc2__bias=lambda bias: bias + 0.05 * torch.arange(64) % 0.5)
    assert not against_double(verdict_on(wrong, truth, layer=6), theirs, truth).passed
