"""ESM-2, ESM-1b, ESM-1v and ESM C through the packed forward pass, with the marks, against their references."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace
from typing import Any

import esm
import pytest
import torch
from torch.nn.functional import cosine_similarity
from transformers import EsmcConfig, EsmcModel

from pipeline.encoder.checkpoint_files import ESM1B, ESMC
from pipeline.encoder.embedding_recipe import CLS, EOS, LETTERS, tokenize
from pipeline.encoder.esm2 import FILL, EsmEncoder
from pipeline.encoder.esm_checkpoint import ESMC_PTH, Architecture, EsmCheckpoint, digest_weights, load_esm_checkpoint
from pipeline.encoder.parity import Reference, check_parity, sample_sequences
from pipeline.encoder.synth import write_random
from tests.encoder.own import drawn

CPU = torch.device("cpu")
SHAPES = {
    "esm2": Architecture(3, 32, 4, token_dropout=True),
    "esm2 of one head": Architecture(2, 64, 1, token_dropout=True),
    "esm1b": Architecture(3, 32, 4, token_dropout=True, family=ESM1B, positions=1024, norm_before=True),
    "esm1v": Architecture(2, 64, 4, token_dropout=True, family=ESM1B, positions=1024),
    "esm1b wide": Architecture(2, 480, 20, token_dropout=False, family=ESM1B, positions=1024, norm_before=True),
    "esmc": Architecture(3, 64, 1, token_dropout=False, family=ESMC),
    "esmc of 30 layers": Architecture(30, 64, 1, token_dropout=False, family=ESMC),
    "esmc as wide as 300M": Architecture(2, 960, 15, token_dropout=False, family=ESMC),
}
TEXTS = [LETTERS, *drawn(1, 2, FILL, 300, 1022)]
# What esm 3.1.3, of ESM C's authors, computes of the weights below for this sequence: the first numbers of its first
# residue after the first layer, of its ninth after the second, and of both ends after the last.
SEQUENCE = "AAVISMRAVEYEPLAKF"
OF_THE_AUTHORS = {
    (1, 0): [1.700064, -0.339213, -1.64854, 1.220531],
    (2, 8): [0.43035, -1.696163, -0.082878, 1.866782],
    (3, 0): [-0.143796, -0.26571, -0.698544, 2.96061],
    (3, 16): [0.427095, -0.65987, -0.177987, 2.572459],
}


@pytest.fixture(scope="module", params=SHAPES)
def checkpoint(request, tmp_path_factory):
    """Return random weights of a family."""
    path = tmp_path_factory.mktemp("weights") / f"{request.param.split()[0]}.pt"
    write_random(path, SHAPES[request.param], seed=5)
    return load_esm_checkpoint(path)


def rows_of(
    checkpoint: EsmCheckpoint, layer: int, texts: list[str], precision: str = "fp32", *, cls: bool = False
) -> list[torch.Tensor]:
    encoder = EsmEncoder(checkpoint, layer=layer, precision=precision, device=CPU)
    return list(encoder([tokenize(text) for text in texts], cls=cls).split([cls + len(text) for text in texts]))


@pytest.mark.parametrize("layer", [0, 1, -1])
def test_every_row_of_every_layer_is_as_the_reference_has_it_with_and_without_marks(checkpoint, layer):
    layer = layer if layer >= 0 else checkpoint.architecture.layers
    assert checkpoint.architecture in SHAPES.values()
    wanted = Reference(checkpoint, layer, CPU)(TEXTS, cls=True)
    marked = rows_of(checkpoint, layer, TEXTS, cls=True)
    for found_LD, wanted_LD in zip(marked, wanted, strict=True):
        cosines_L = cosine_similarity(found_LD.double(), torch.from_numpy(wanted_LD).double(), dim=1)
        assert float(cosines_L.min()) >= 0.99999
    assert all(map(torch.equal, rows_of(checkpoint, layer, TEXTS), [rows_LD[1:] for rows_LD in marked]))
    backwards = rows_of(checkpoint, layer, TEXTS[::-1], cls=True)[::-1]
    assert all(map(torch.equal, backwards, marked))


@pytest.mark.nightly
def test_rows_have_the_same_bits_in_every_batch_and_pass_the_gate_in_half_precision(checkpoint):
    layer = checkpoint.architecture.layers
    texts = TEXTS if checkpoint.dim < 100 else TEXTS[:5]
    for text, rows_LD in zip(texts, rows_of(checkpoint, layer, texts), strict=True):
        assert torch.equal(rows_of(checkpoint, layer, [text])[0], rows_LD)
    assert check_parity(checkpoint, "bf16", layer, "cpu")[0].passed


def test_the_gate_catches_a_family_that_is_computed_as_another(checkpoint):
    layers, sequences = checkpoint.architecture.layers, sample_sequences()
    tensors = dict(checkpoint.tensors)
    turned = {ESMC: "layers.1.self_attn.q_layer_norm.weight", ESM1B: "embed_positions.weight"}
    name = turned.get(checkpoint.architecture.family, "layers.1.fc1.weight")
    tensors[name] = tensors[name].flip(0)
    wanted = Reference(checkpoint, layers, CPU)(sequences)
    found = rows_of(replace(checkpoint, tensors=tensors), layers, sequences)
    pairs = zip(found, map(torch.from_numpy, wanted), strict=True)
    assert min(float(cosine_similarity(mine, theirs, dim=1).min()) for mine, theirs in pairs) < 0.99999


def test_esm_c_is_what_its_authors_compute(tmp_path):
    write_random(tmp_path / "esmc.pth", SHAPES["esmc"], seed=5)
    checkpoint = load_esm_checkpoint(tmp_path / "esmc.pth")
    for (layer, residue), numbers in OF_THE_AUTHORS.items():
        (rows_LD,) = rows_of(checkpoint, layer, [SEQUENCE])
        torch.testing.assert_close(rows_LD[residue, :4], torch.tensor(numbers), rtol=0, atol=2e-5)


def test_fair_esm_itself_loads_the_file_of_esm_1v_and_computes_the_same(tmp_path):
    path = tmp_path / "esm1v_t2.pt"
    write_random(path, SHAPES["esm1v"])
    with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has no regression for contacts
        model, alphabet = esm.pretrained.load_model_and_alphabet_local(str(path))
    _, _, tokens_1T = alphabet.get_batch_converter()([("one", TEXTS[4])])
    with torch.inference_mode():
        wanted: Any = model.eval()(tokens_1T, repr_layers=[2])["representations"][2][0, 1:-1]
    torch.testing.assert_close(rows_of(load_esm_checkpoint(path), 2, [TEXTS[4]])[0], wanted, rtol=0, atol=1e-4)


def test_a_sequence_beyond_the_learned_positions_is_not_encoded_as_one(tmp_path):
    write_random(tmp_path / "esm1b.pt", SHAPES["esm1b"])
    checkpoint = load_esm_checkpoint(tmp_path / "esm1b.pt")
    assert checkpoint.architecture.longest == 1022
    with pytest.raises(AssertionError, match="longer than 1022 residues"):
        rows_of(checkpoint, 3, drawn(1023))


def test_esm_c_under_the_names_of_transformers_is_what_their_model_computes_and_has_the_key_of_its_pth(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = EsmcModel(EsmcConfig(**sizes)).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.randn_like(tensor) * 0.1 + (name.endswith("norm.weight")))
    model.save_pretrained(tmp_path / "esmc")
    checkpoint = load_esm_checkpoint(tmp_path / "esmc")
    assert (checkpoint.form, checkpoint.architecture.family) == ("hugging-face", ESMC)
    tokens_1T = torch.tensor([[CLS, *tokenize(SEQUENCE).tolist(), EOS]])
    with torch.inference_mode():
        found = model(tokens_1T, output_hidden_states=True)
    for layer, wanted_1TD in ((1, found.hidden_states[1]), (3, found.last_hidden_state)):
        (rows_LD,) = rows_of(checkpoint, layer, [SEQUENCE])
        assert float(cosine_similarity(rows_LD.double(), wanted_1TD[0, 1:-1].double(), dim=1).min()) > 0.9999999
    assert check_parity(checkpoint, "fp32", 3, "cpu")[0].passed
    torch.save(ESMC_PTH.write(checkpoint.tensors), tmp_path / "esmc.pth")
    assert digest_weights(load_esm_checkpoint(tmp_path / "esmc.pth")) == digest_weights(checkpoint)
