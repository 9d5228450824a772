"""The gate lets the right encoder through, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.encoder.checkpoints.esm_checkpoint import load_esm_checkpoint
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.encoder.embedding_recipe import LETTERS, tokenize
from pipeline.encoder.forward.esm2 import EsmEncoder
from pipeline.encoder.forward.parity import (
    ParityVerdict,
    Reference,
    beside_the_truth,
    check_parity,
    compare,
    sample_sequences,
)
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
    encoder = EsmEncoder(broken_checkpoint, layer=layer, precision=precision, device=CPU)
    return compare(encoder, wanted, sample_sequences(), precision)


@pytest.mark.parametrize("layer", [0, 1, 3])
def test_the_encoder_agrees_with_the_reference_in_every_layer(checkpoint, layer):
    verdict = check_parity(checkpoint, "fp32", layer, "cpu")
    assert verdict.passed
    assert verdict.lowest > 0.9999999
    assert verdict.sequences == 9


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_agrees_for_each_sequence(checkpoint, precision):
    verdict = check_parity(checkpoint, precision, 3, "cpu")
    assert verdict.passed
    assert verdict.threshold == 0.999


def test_the_sample_is_the_same_everywhere_and_has_every_letter():
    assert sample_sequences() == sample_sequences()
    assert [len(one) for one in sample_sequences()] == [len(LETTERS), 300, 251, 190, 128, 97, 64, 33, 17]
    assert set(sample_sequences()[0]) == set(LETTERS)
    assert set("".join(sample_sequences()[1:])) == set("ACDEFGHIKLMNPQRSTVWY")


def test_a_layer_with_wrong_weights_is_caught(checkpoint, wanted):
    name = "layers__1__fc1__weight"
    assert not verdict_on(broken(checkpoint, **{name: lambda weight: weight.flip(0)}), wanted).passed


def test_a_single_wrong_bias_is_caught(checkpoint, wanted):
    name = "layers__2__self_attn__out_proj__bias"
    assert not verdict_on(
        broken(checkpoint, **{name: lambda bias: bias + 0.02 * torch.arange(32) % 0.5}), wanted
    ).passed


@pytest.mark.parametrize("change", [lambda f: f * 1.01, lambda f: f.flip(0), torch.zeros_like])
def test_wrong_rotary_frequencies_are_caught(checkpoint, wanted, change):
    assert not verdict_on(replace(checkpoint, rotary_F=change(checkpoint.rotary_F)), wanted).passed


def test_one_layer_too_few_is_caught(checkpoint, wanted):
    assert not verdict_on(checkpoint, wanted, layer=2).passed


def test_a_letter_with_the_token_of_another_is_caught(checkpoint, wanted):
    swapped = {"embed_tokens__weight": lambda table: table[[*range(27), 28, 27, *range(29, 33)]]}
    assert not verdict_on(broken(checkpoint, **swapped), wanted).passed


def test_rows_that_belong_to_other_residues_are_caught(checkpoint, wanted):
    encoder = EsmEncoder(checkpoint, layer=3, precision="fp32", device=CPU)
    assert not compare(lambda tokens: encoder(tokens).roll(1, 0), wanted, sample_sequences(), "fp32").passed


def test_half_precision_with_a_wrong_layer_is_caught(checkpoint, wanted):
    name = "layers__1__self_attn__v_proj__weight"
    assert not verdict_on(broken(checkpoint, **{name: lambda weight: -weight}), wanted, "bf16").passed


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_numbers_that_are_none_are_caught_and_can_be_written_down(wanted, value):
    rows = sum(map(len, sample_sequences()))
    verdict = compare(lambda tokens: torch.full((rows, 32), value), wanted, sample_sequences(), "fp32")
    assert not verdict.passed
    assert -1.0 <= verdict.lowest <= 1.0


def test_sharp_attention_passes_in_full_precision_and_is_judged_truly_in_half(tmp_path):
    write_random_checkpoint(tmp_path / "esm2_sharp.pt", layers=4, dim=64, heads=4, seed=0, stress=6.0)
    checkpoint = load_esm_checkpoint(tmp_path / "esm2_sharp.pt")
    assert check_parity(checkpoint, "fp32", 4, "cpu").passed
    half = check_parity(checkpoint, "bf16", 4, "cpu")
    assert half.passed == (half.lowest >= 0.999)
    assert half.lowest == pytest.approx(_lowest_by_hand(checkpoint), abs=1e-6)
    assert half.lowest < 0.999  # 0.986 when this was written: sharp enough to hurt


def _lowest_by_hand(checkpoint):
    """Return the lowest cosine of a whole sequence in bf16, computed the plain way."""
    found_RD = EsmEncoder(checkpoint, layer=4, precision="bf16", device=CPU)(
        [tokenize(text) for text in sample_sequences()]
    )
    pieces = torch.split(found_RD.double(), [len(text) for text in sample_sequences()])
    wanted = map(torch.from_numpy, Reference(checkpoint, 4, CPU)(sample_sequences()))
    flat = [(piece.flatten(), rows.double().flatten()) for piece, rows in zip(pieces, wanted, strict=True)]
    return min(float(torch.cosine_similarity(*pair, dim=0)) for pair in flat)


def test_the_reference_makes_no_copy_of_full_precision_weights(checkpoint):
    model = Reference(checkpoint, 3, CPU)._model
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == checkpoint.tensors[name].data_ptr()


def test_a_checkpoint_that_leaves_a_part_empty_is_refused(checkpoint):
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name != "layers.1.fc2.bias"}
    with pytest.raises(WeightsUnusable, match=r"no layers\.1\.fc2\.bias"):
        Reference(replace(checkpoint, tensors=tensors), 3, CPU)


def test_a_verdict_at_the_threshold_has_passed():
    assert ParityVerdict(0.999, 9, 0.999).passed
    assert not ParityVerdict(0.998999, 9, 0.999).passed


@pytest.fixture(scope="module")
def doubtful(tmp_path_factory):
    """Return weights so sharp that fair-esm in fp32 is not what it is in fp64."""
    path = tmp_path_factory.mktemp("weights") / "esm2_doubtful.pt"
    write_random_checkpoint(path, layers=6, dim=64, heads=2, stress=10.0)
    return load_esm_checkpoint(path)


def test_where_fp32_itself_is_in_doubt_fair_esm_is_the_measure(doubtful):
    verdict = check_parity(doubtful, "fp32", 6, "cpu")
    assert verdict.lowest < 0.99999
    assert 0.999 <= verdict.threshold < 0.99999
    assert verdict.passed


def test_where_fp32_itself_is_in_doubt_a_wrong_encoder_is_still_caught(doubtful):
    truth = Reference(doubtful, 6, CPU, torch.float64)(sample_sequences())
    theirs = Reference(doubtful, 6, CPU)(sample_sequences())
    wrong = broken(doubtful, layers__5__fc2__bias=lambda bias: bias + 0.05 * torch.arange(64) % 0.5)
    assert not beside_the_truth(verdict_on(wrong, truth, layer=6), theirs, truth).passed
