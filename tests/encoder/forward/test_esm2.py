"""The packed forward pass against fair-esm's own model."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import esm
import numpy as np
import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import cosine_similarity

from pipeline.encoder import esm2
from pipeline.encoder.embedding_recipe import LETTERS, tokenize
from pipeline.encoder.esm2 import (
    FILL,
    TILE,
    EsmEncoder,
    PackedLinear,
    SequenceBounds,
    TorchLinear,
    all_at_once,
    by_sequence,
    choose_attention,
    choose_linear,
)
from pipeline.encoder.esm_checkpoint import load_esm_checkpoint
from pipeline.encoder.synth import write_random_checkpoint

CPU = torch.device("cpu")
LENGTHS = (1, 2, 3, FILL - 2, FILL, 700, TILE - 3, TILE - 2, TILE - 1)
Reference = Callable[[Sequence[str], int], torch.Tensor]


def draw(length: int, seed: int = 0) -> str:
    return "".join(np.random.default_rng([seed, length]).choice(list(LETTERS), length))


def encode(encoder: EsmEncoder, sequences: Sequence[str]) -> torch.Tensor:
    return encoder([tokenize(sequence) for sequence in sequences])


def reference(path: Path) -> Reference:
    """Return fair-esm's own way to the rows of sequences, one after another, without padding."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        model, alphabet = esm.pretrained.load_model_and_alphabet_local(str(path))
    model.eval()
    convert = alphabet.get_batch_converter()

    @torch.inference_mode()
    def rows(sequences: Sequence[str], layer: int) -> torch.Tensor:
        found = []
        for sequence in sequences:
            _, _, tokens_1T = convert([("one", sequence)])
            found.append(model(tokens_1T, repr_layers=[layer])["representations"][layer][0, 1:-1])
        return torch.cat(found)

    return rows


@pytest.fixture(scope="module")
def real_width(tmp_path_factory):
    """Return a checkpoint as wide as the published 35M model, with few layers."""
    path = tmp_path_factory.mktemp("weights") / "esm2_t2_wide.pt"
    write_random_checkpoint(path, layers=2, dim=480, heads=20)
    return path


def assert_close(found_RD: torch.Tensor, wanted_RD: torch.Tensor, cosine: float = 0.99999, atol: float = 2e-5) -> None:
    assert found_RD.shape == wanted_RD.shape
    assert float(cosine_similarity(found_RD.double(), wanted_RD.double(), dim=1).min()) >= cosine
    torch.testing.assert_close(found_RD.float(), wanted_RD, rtol=0, atol=atol * float(wanted_RD.abs().max()))


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_every_layer_is_what_fair_esm_computes_at_every_length_for_every_letter(tiny, layer):
    sequences = [LETTERS, *(draw(length) for length in LENGTHS)]
    encoder = EsmEncoder(load_esm_checkpoint(tiny), layer=layer, precision="fp32", device=CPU)
    assert_close(encode(encoder, sequences), reference(tiny)(sequences, layer))


@pytest.fixture(params=[True, False], ids=["onednn", "torch"])
def real_width_encoder(request, real_width, monkeypatch):
    """Return an encoder with packed linear layers, and one of a torch that has none."""
    if not request.param:
        monkeypatch.setattr(esm2, "packed_works", lambda weights, rows: False)
    return EsmEncoder(load_esm_checkpoint(real_width), layer=2, precision="fp32", device=CPU)


def test_real_width_is_right_with_the_same_bits_in_every_batch(real_width_encoder, real_width):
    sequences = [draw(length) for length in (300, 77, 5)]
    assert_close(encode(real_width_encoder, sequences), reference(real_width)(sequences, 2))
    check_bits_in_batches(real_width_encoder, [draw(length) for length in (1, 2, 3, 29, 64, 129, 333, 800)], 0)


def check_bits_in_batches(encoder: EsmEncoder, sequences: Sequence[str], seed: int) -> None:
    """Shuffle sequences into batches of all sizes, and hold each to what it is alone."""
    random = np.random.default_rng(seed)
    alone = {sequence: encode(encoder, [sequence]) for sequence in sequences}
    order = [sequences[at] for at in random.permutation(len(sequences))]
    while order:
        size = int(random.integers(1, len(order) + 1))
        batch, order = order[:size], order[size:]
        parts = encode(encoder, batch).split([len(sequence) for sequence in batch])
        for sequence, part_LD in zip(batch, parts, strict=True):
            assert torch.equal(part_LD, alone[sequence]), f"{len(sequence)} in {[len(one) for one in batch]}"


def test_a_result_has_the_same_bits_in_every_batch(tiny):
    encoder = EsmEncoder(load_esm_checkpoint(tiny), layer=3, precision="fp32", device=CPU)
    for seed in range(6):
        drawn = np.random.default_rng(seed).integers(1, 500, 14).tolist()
        lengths = {*drawn, 1, 2, 1100, *LENGTHS[3 * (seed % 3) :][:3]}
        check_bits_in_batches(encoder, [draw(length) for length in lengths], seed)


def test_sharp_attention_stays_right(tmp_path):
    path = tmp_path / "esm2_stress.pt"
    write_random_checkpoint(path, layers=3, dim=64, heads=4, stress=6.0)
    sequences = [draw(length) for length in (200, 30)]
    encoder = EsmEncoder(load_esm_checkpoint(path), layer=3, precision="fp32", device=CPU)
    assert_close(encode(encoder, sequences), reference(path)(sequences, 3), atol=1e-3)


@pytest.mark.parametrize(("precision", "cosine"), [("fp16", 0.9999), ("bf16", 0.999)])
def test_half_precision_is_close(tiny, precision, cosine):
    sequences = [draw(length) for length in (200, 3, 31)]
    half, full = (
        EsmEncoder(load_esm_checkpoint(tiny), layer=3, precision=how, device=CPU) for how in (precision, "fp32")
    )
    found_RD = encode(half, sequences)
    assert found_RD.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    assert_close(found_RD, reference(tiny)(sequences, 3), cosine, atol=0.1)
    long = [draw(4200)]  # whose positions half precision could not count
    assert_close(encode(half, long), encode(full, long), cosine, atol=0.1)


def test_largest_single_allocation_grows_with_the_tokens_and_not_their_square(tiny):
    def largest_bytes(length: int) -> int:
        encoder = EsmEncoder(load_esm_checkpoint(tiny), layer=3, precision="fp32", device=CPU)
        with torch.profiler.profile(profile_memory=True) as profile:
            encode(encoder, [draw(length)])
        return max(event.cpu_memory_usage for event in profile.events())

    assert largest_bytes(4000) < 2.5 * largest_bytes(2000)


def stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, num_splits=None):
    """Do what torch's packed kernel does, on the CPU."""
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k == int(cu_seq_q.diff().max())
    qkv_T3HC = torch.stack([query, key, value], 1)
    return by_sequence(qkv_T3HC, SequenceBounds(tuple(cu_seq_k.tolist()), cu_seq_k, max_k), torch.empty_like(query))


def test_half_precision_takes_the_packed_kernel_in_one_split(tiny, monkeypatch):
    calls = []

    def watched(*arguments, **options):
        calls.append(options)
        return stand_in(*arguments, **options)

    monkeypatch.setattr(esm2, "choose_attention", partial(choose_attention, kernel=watched))
    sequences = [draw(length) for length in (20, 7)]
    encoder = EsmEncoder(load_esm_checkpoint(tiny), layer=3, precision="fp16", device=CPU)
    monkeypatch.undo()
    wanted_RD = encode(EsmEncoder(load_esm_checkpoint(tiny), layer=3, precision="fp16", device=CPU), sequences)
    # What fills the last tile is no sequence of the kernel's: its rows are missing there.
    monkeypatch.setattr(encoder, "fill", 1)
    monkeypatch.setattr(encoder, "_tile", 0)
    torch.testing.assert_close(encode(encoder, sequences), wanted_RD, rtol=0, atol=1e-2)
    assert calls == [{"num_splits": 1}] * 4


def test_a_kernel_that_is_missing_older_or_wrong_is_not_used():
    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k):
        return stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)

    def wrong(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.zeros_like(query)

    for error in (RuntimeError, ValueError, NotImplementedError):

        def refuses(*_: object, error: type[Exception] = error, **__: object) -> torch.Tensor:
            raise error("FlashAttention only supports Ampere GPUs or newer")

        assert choose_attention(CPU, torch.float16, 2, 8, kernel=refuses) is by_sequence
    assert choose_attention(CPU, torch.float16, 2, 8, kernel=wrong) is by_sequence
    assert choose_attention(CPU, torch.float32, 2, 8, kernel=stand_in) is by_sequence  # full precision has no kernel
    chosen = choose_attention(CPU, torch.float16, 2, 8, kernel=older)  # which knows no splits
    assert isinstance(chosen, partial)
    assert chosen.args == (older, {})


def test_fp32_is_full_precision_whatever_the_environment_allows_products(real_width, monkeypatch):
    monkeypatch.setattr(esm2, "packed_works", lambda weights, rows: False)
    allowed, sequences = list[str](), [draw(300), draw(64)]

    def watched(encoder: EsmEncoder) -> torch.Tensor:
        monkeypatch.setattr(encoder, "_project", lambda *given: noted(encoder, *given))
        return encode(encoder, sequences)

    def noted(encoder: EsmEncoder, *given: object) -> torch.Tensor:
        allowed.append(torch.get_float32_matmul_precision())
        return EsmEncoder._project(encoder, *given)  # type: ignore[arg-type]

    checkpoint = load_esm_checkpoint(real_width)
    wanted_RD = encode(EsmEncoder(checkpoint, layer=2, precision="fp32", device=CPU), sequences)
    before = torch.get_float32_matmul_precision()
    try:
        for less in ("high", "medium"):  # images of containers say TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, which is high
            torch.set_float32_matmul_precision(less)
            assert torch.equal(watched(EsmEncoder(checkpoint, layer=2, precision="fp32", device=CPU)), wanted_RD)
            assert torch.get_float32_matmul_precision() == less
    finally:
        torch.set_float32_matmul_precision(before)
    assert allowed == ["highest"] * 4


def test_the_call_fits_the_kernel_of_this_torch():
    starts = torch.tensor([0, 2], dtype=torch.int32)

    def bind(*arguments: object, **options: object) -> object:
        inspect.signature(varlen_attn).bind(*arguments, **options)
        return arguments[0]

    qkv_T3HC = torch.randn(2, 3, 1, 8)
    all_at_once(bind, {"num_splits": 1}, qkv_T3HC, SequenceBounds((0, 2), starts, 2), torch.empty(0))


def test_rows_that_depend_on_the_tile_make_all_tiles_whole_and_a_wrong_onednn_is_not_used(monkeypatch):
    layers = [(torch.randn(32, 16), torch.randn(32))]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "equal", lambda *_: False)
        assert choose_linear(layers, 64, 16)[1] == 64
    monkeypatch.setattr(PackedLinear, "gelu", lambda self, x_RI: self(x_RI))
    assert choose_linear(layers, 64, 16)[0] is TorchLinear
