"""The packed forward pass against fair-esm's own model."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import esm
import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import cosine_similarity

from pipeline.encoder.checkpoints.esm_checkpoint import load_esm_checkpoint
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.encoder.embedding_recipe import LETTERS, tokenize
from pipeline.encoder.forward import esm2, linear
from pipeline.encoder.forward.esm2 import (
    FILL,
    TILE,
    EsmEncoder,
    SequenceBounds,
    all_at_once,
    by_sequence,
    choose_attention,
)
from pipeline.encoder.forward.linear import PackedLinear, TorchLinear, choose_linear

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
def real_width(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint as wide as the published 35M model, with few layers."""
    path = tmp_path_factory.mktemp("weights") / "esm2_t2_wide.pt"
    write_random_checkpoint(path, layers=2, dim=480, heads=20)
    return path


@pytest.fixture
def without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make torch one that has no packed linear layers."""
    monkeypatch.setattr(linear, "packed_works", lambda weights, rows: False)


def assert_close(found_RD: torch.Tensor, wanted_RD: torch.Tensor, cosine: float = 0.99999, atol: float = 2e-5) -> None:
    assert found_RD.shape == wanted_RD.shape
    assert float(cosine_similarity(found_RD.double(), wanted_RD.double(), dim=1).min()) >= cosine
    torch.testing.assert_close(found_RD.float(), wanted_RD, rtol=0, atol=atol * float(wanted_RD.abs().max()))


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_every_layer_is_what_fair_esm_computes(tiny: Path, layer: int) -> None:
    sequences = [draw(length) for length in (40, 1, 333, 2, 90)]
    encoder = EsmEncoder(load_esm_checkpoint(tiny), layer=layer, precision="fp32", device=CPU)
    assert_close(encode(encoder, sequences), reference(tiny)(sequences, layer))


@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_is_right_alone(tiny: Path, length: int) -> None:
    encoder = EsmEncoder(load_esm_checkpoint(tiny), layer=3, precision="fp32", device=CPU)
    assert_close(encode(encoder, [draw(length)]), reference(tiny)([draw(length)], 3))


def test_all_lengths_are_right_in_one_batch(tiny: Path) -> None:
    sequences = [draw(length) for length in LENGTHS]
    encoder = EsmEncoder(load_esm_checkpoint(tiny), layer=3, precision="fp32", device=CPU)
    assert_close(encode(encoder, sequences), reference(tiny)(sequences, 3))


def test_all_residue_letters_are_right(tiny: Path) -> None:
    assert len(LETTERS) == 25
    encoder = EsmEncoder(load_esm_checkpoint(tiny), layer=3, precision="fp32", device=CPU)
    assert_close(encode(encoder, [LETTERS]), reference(tiny)([LETTERS], 3))


def test_real_width_is_right_and_goes_through_onednn(real_width: Path) -> None:
    sequences = [draw(length) for length in (300, 77, 5)]
    encoder = EsmEncoder(load_esm_checkpoint(real_width), layer=2, precision="fp32", device=CPU)
    if torch.backends.mkldnn.is_available():
        assert isinstance(encoder._layers[0].qkv, PackedLinear)
    assert_close(encode(encoder, sequences), reference(real_width)(sequences, 2))


@pytest.mark.usefixtures("without_onednn")
def test_without_onednn_it_is_as_right(real_width: Path) -> None:
    sequences = [draw(length) for length in (300, 77, 5)]
    encoder = EsmEncoder(load_esm_checkpoint(real_width), layer=2, precision="fp32", device=CPU)
    assert isinstance(encoder._layers[0].qkv, TorchLinear)
    assert_close(encode(encoder, sequences), reference(real_width)(sequences, 2))


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


@pytest.mark.parametrize("seed", range(6))
def test_a_result_has_the_same_bits_in_every_batch(tiny: Path, seed: int) -> None:
    encoder = EsmEncoder(load_esm_checkpoint(tiny), layer=3, precision="fp32", device=CPU)
    sequences = [draw(int(length)) for length in {*np.random.default_rng(seed).integers(1, 500, 14), 1, 2, 1100}]
    check_bits_in_batches(encoder, sequences, seed)


def test_at_real_width_too(real_width: Path) -> None:
    encoder = EsmEncoder(load_esm_checkpoint(real_width), layer=2, precision="fp32", device=CPU)
    check_bits_in_batches(encoder, [draw(length) for length in (1, 2, 3, 29, 64, 129, 333, 800)], 0)


@pytest.mark.usefixtures("without_onednn")
def test_and_without_onednn(real_width: Path) -> None:
    encoder = EsmEncoder(load_esm_checkpoint(real_width), layer=2, precision="fp32", device=CPU)
    check_bits_in_batches(encoder, [draw(length) for length in (1, 2, 3, 29, 64, 129, 333, 800)], 1)


def test_sharp_attention_stays_right(tmp_path: Path) -> None:
    path = tmp_path / "esm2_stress.pt"
    write_random_checkpoint(path, layers=3, dim=64, heads=4, stress=6.0)
    sequences = [draw(length) for length in (200, 30)]
    encoder = EsmEncoder(load_esm_checkpoint(path), layer=3, precision="fp32", device=CPU)
    assert_close(encode(encoder, sequences), reference(path)(sequences, 3), atol=1e-3)


@pytest.mark.parametrize(("precision", "cosine"), [("fp16", 0.9999), ("bf16", 0.999)])
def test_half_precision_is_close(tiny: Path, precision: str, cosine: float) -> None:
    sequences = [draw(length) for length in (200, 3, 31)]
    found_RD = encode(EsmEncoder(load_esm_checkpoint(tiny), layer=3, precision=precision, device=CPU), sequences)
    assert found_RD.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    assert_close(found_RD, reference(tiny)(sequences, 3), cosine, atol=0.1)


def test_positions_of_long_sequences_survive_half_precision() -> None:
    turn_T1F = esm2.Rotary(torch.tensor([1.0, 0.01]), CPU).at(torch.tensor([4097]), 4098)
    qk_1HC = torch.tensor([[[1.0, 0.0, 1.0, 0.0]]], dtype=torch.bfloat16)
    out_1HC = torch.empty_like(qk_1HC)
    esm2.turn(qk_1HC, turn_T1F, out_1HC)
    wanted = torch.tensor([4097.0, 40.97], dtype=torch.float64)
    torch.testing.assert_close(out_1HC[0, 0, ::2].double(), wanted.cos(), rtol=0, atol=4e-3)


def test_layers_beyond_the_asked_one_are_not_read(tiny: Path) -> None:
    checkpoint = load_esm_checkpoint(tiny)
    asked: list[str] = []

    class Watched(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            asked.append(name)
            return super().__getitem__(name)

    EsmEncoder(
        dataclasses.replace(checkpoint, tensors=Watched(checkpoint.tensors)), layer=1, precision="fp32", device=CPU
    )
    assert any(name.startswith("layers.0.") for name in asked)
    assert not any(name.startswith(("layers.1.", "layers.2.", "emb_layer_norm_after")) for name in asked)


@pytest.mark.parametrize("columns", [16, 24, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_takes_the_kernel_that_makes_no_square_matrix(columns: int, dtype: torch.dtype) -> None:
    qkv_T3HC = torch.randn(70, 3, 2, columns).to(dtype)
    bounds = SequenceBounds((0, 3, 70), torch.tensor([0, 3, 70], dtype=torch.int32), 67)
    room_THC = torch.empty(70, 2, columns, dtype=dtype)
    chosen_THC = by_sequence(qkv_T3HC, bounds, room_THC).clone()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises where it cannot
        assert torch.equal(by_sequence(qkv_T3HC, bounds, room_THC), chosen_THC)


def test_largest_single_allocation_grows_with_the_tokens_and_not_their_square(tiny: Path) -> None:
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


def test_half_precision_takes_the_packed_kernel_in_one_split(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_kernel_without_splits_is_called_without_the_word() -> None:
    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k):
        return stand_in(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)

    chosen = choose_attention(CPU, torch.float16, 2, 8, kernel=older)
    assert isinstance(chosen, partial)
    assert chosen.func is all_at_once
    assert chosen.args == (older, {})


@pytest.mark.parametrize("error", [RuntimeError, ValueError, NotImplementedError])
def test_a_card_that_refuses_the_kernel_goes_by_sequence(error: type[Exception]) -> None:
    def refuses(*_: object, **__: object) -> torch.Tensor:
        raise error("FlashAttention only supports Ampere GPUs or newer")

    assert choose_attention(CPU, torch.float16, 2, 8, kernel=refuses) is by_sequence


def test_a_kernel_that_is_wrong_is_not_used() -> None:
    def wrong(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.zeros_like(query)

    assert choose_attention(CPU, torch.float16, 2, 8, kernel=wrong) is by_sequence


def test_full_precision_goes_by_sequence() -> None:
    assert choose_attention(CPU, torch.float32, 2, 8, kernel=stand_in) is by_sequence


@pytest.mark.usefixtures("without_onednn")
def test_fp32_is_full_precision_whatever_the_environment_allows_products(
    real_width: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_call_fits_the_kernel_of_this_torch() -> None:
    starts = torch.tensor([0, 2], dtype=torch.int32)

    def bind(*arguments: object, **options: object) -> object:
        inspect.signature(varlen_attn).bind(*arguments, **options)
        return arguments[0]

    qkv_T3HC = torch.randn(2, 3, 1, 8)
    all_at_once(bind, {"num_splits": 1}, qkv_T3HC, SequenceBounds((0, 2), starts, 2), torch.empty(0))


def test_rows_that_depend_on_the_tile_make_all_tiles_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_rows_alike", lambda *_: False)
    kind, fill = choose_linear([(torch.randn(8, 16), torch.randn(8))], 64, 16)
    assert fill == 64
    assert kind in (PackedLinear, TorchLinear)


def test_an_onednn_that_miscounts_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedLinear, "gelu", lambda self, x_RI: self(x_RI))
    assert choose_linear([(torch.randn(32, 16), torch.randn(32))], 64, 16)[0] is TorchLinear
