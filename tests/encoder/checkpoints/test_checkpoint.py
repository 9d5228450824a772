"""Checkpoints of ESM-2 in every form are the same weights; anything else is refused by name, and none of it runs."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.encoder.checkpoint_files import CONFIG, INDEX, SINGLE
from pipeline.encoder.esm_checkpoint import (
    DTYPES,
    digest_weights,
    dtype_name,
    frequencies,
    load_esm_checkpoint,
    shapes,
)
from pipeline.encoder.synth import write_random_checkpoint
from pipeline.errors import ConfigError, WeightsUnusable
from tests.encoder.checkpoints.relatives import (
    PREFIX,
    changed,
    contents,
    face_config,
    face_folder,
    face_tensors,
    with_settings,
)
from tests.testkit.evil import Evil

FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refusal(path: Path) -> str:
    """Load what must be refused; return what a person reads."""
    with pytest.raises(WeightsUnusable) as refused:
        load_esm_checkpoint(path)
    assert refused.value.remedy
    assert refused.value.where
    return str(refused.value)


def unnamed(cases: Iterable[tuple[Path, str]]) -> list[tuple[str, str]]:
    """Return what was said of those files whose refusal does not name what is wrong."""
    found = [(said, refusal(path)) for path, said in cases]
    assert found
    return [(said, text) for said, text in found if said not in text]


def digest(path: Path) -> str:
    return digest_weights(load_esm_checkpoint(path))


def test_fair_esm_checkpoint_becomes_the_tensors_that_encode_and_no_others(tiny):
    checkpoint = load_esm_checkpoint(tiny)
    assert (checkpoint.name, checkpoint.form, checkpoint.path) == ("esm2_t3_tiny", "fair-esm", tiny)
    shape = checkpoint.architecture
    assert (shape.layers, shape.dim, shape.heads, shape.token_dropout) == (3, 32, 4, True)
    assert len(checkpoint.tensors) == 3 + 3 * 16
    assert not any("lm_head" in name or "contact" in name or "inv_freq" in name for name in checkpoint.tensors)
    assert checkpoint.dtype == torch.float32


def test_every_form_of_a_hugging_face_model_is_the_same_model(tiny, tmp_path):
    ours = load_esm_checkpoint(tiny)
    for prefix, shards in (("esm.", 1), ("", 1), ("esm.", 3)):
        cache = tmp_path / f"{prefix}{shards}" / "models--facebook--esm2_t3_tiny" / "snapshots" / "0123abcd"
        folder = face_folder(cache, face_tensors(tiny, prefix), shards=shards)
        for path in (folder, sorted(folder.glob("*.safetensors"))[-1]):
            theirs = load_esm_checkpoint(path)
            assert (theirs.name, theirs.form) == ("esm2_t3_tiny", "hugging-face")
            assert theirs.tensors.keys() == ours.tensors.keys()
            assert all(torch.equal(theirs.tensors[name], tensor) for name, tensor in ours.tensors.items())
            assert torch.equal(theirs.rotary_F, ours.rotary_F)
            assert digest_weights(theirs) == digest_weights(ours)


@pytest.mark.parametrize("precision", DTYPES)
def test_precision_that_was_stored_is_kept(tiny, tmp_path, precision):
    data = contents(tiny)
    data["model"] = {name: tensor.to(DTYPES[precision]) for name, tensor in data["model"].items()}
    torch.save(data, tmp_path / "esm2_a.pt")
    checkpoint = load_esm_checkpoint(tmp_path / "esm2_a.pt")
    assert dtype_name(checkpoint.dtype) == precision
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {DTYPES[precision]}
    assert checkpoint.rotary_F.dtype == torch.float32


def test_weights_are_mapped_and_not_copied_into_memory(tmp_path):
    path = tmp_path / "esm2_a.pt"
    write_random_checkpoint(path, 2, 256, 4)
    held = load_esm_checkpoint(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    assert held.tensors["layers.1.fc1.weight"].abs().sum() > 0


def test_frequencies_that_are_not_stored_are_made_in_full_precision_and_are_another_key(tiny, tmp_path):
    tensors = {name: tensor for name, tensor in face_tensors(tiny).items() if "inv_freq" not in name}
    checkpoint = load_esm_checkpoint(face_folder(tmp_path / "model", tensors))
    assert torch.equal(checkpoint.rotary_F, frequencies(8))
    assert digest_weights(checkpoint) != digest(tiny)


def test_values_that_are_not_finite_are_no_reason_to_refuse(tiny, tmp_path):
    path = changed(tiny, tmp_path / "esm2_nan.pt", **{"layers.1.fc2.bias": torch.full((32,), torch.nan)})
    assert load_esm_checkpoint(path).tensors["layers.1.fc2.bias"].isnan().all()


def test_digest_of_these_weights_is_this_one_until_its_version_is_raised(tmp_path):
    write_random_checkpoint(tmp_path / "esm2_a.pt", layers=1, dim=8, heads=2)
    data = contents(tmp_path / "esm2_a.pt")
    data["model"] = {name: torch.full_like(tensor, 0.5) for name, tensor in data["model"].items()}
    data["model"][f"{PREFIX}layers.0.self_attn.rot_emb.inv_freq"] = frequencies(4)
    torch.save(data, tmp_path / "esm2_half.pt")
    # Cache keys contain it: a change of this line needs another WEIGHTS_VERSION and ENCODER_VERSION.
    assert digest(tmp_path / "esm2_half.pt") == "910071ca597c81702412958d4a9d7cb7"


def test_digest_tells_bits_precisions_and_architectures_apart(tiny, tmp_path):
    data = contents(tiny)
    data["model"] = {name: tensor.half() for name, tensor in data["model"].items()}
    torch.save(data, tmp_path / "esm2_half.pt")
    weight = contents(tiny)["model"][f"{PREFIX}layers.2.fc2.weight"]
    weight.view(torch.int32)[31, 127] ^= 1
    others = (
        tmp_path / "esm2_half.pt",
        with_settings(tiny, tmp_path / "esm2_plain.pt", token_dropout=False),
        changed(tiny, tmp_path / "esm2_bit.pt", **{"layers.2.fc2.weight": weight}),
    )
    assert len({digest(path) for path in (tiny, *others)}) == 4


def test_digest_knows_nothing_of_heads_files_and_storage(tiny, tmp_path):
    data = contents(tiny)
    data["model"]["encoder.lm_head.bias"] += 1
    data["model"] = dict(reversed(data["model"].items()))
    torch.save(data, tmp_path / "esm2_other.pt")
    torch.save(contents(tiny), tmp_path / "esm2_old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "esm2_alone.pt").write_bytes(tiny.read_bytes())  # without its contact regression
    weight = contents(tiny)["model"][f"{PREFIX}layers.0.fc1.weight"]
    turned = changed(tiny, tmp_path / "esm2_a.pt", **{"layers.0.fc1.weight": weight.T.contiguous().T})
    same = (turned, *(tmp_path / f"esm2_{name}.pt" for name in ("other", "old", "alone")))
    assert {digest(path) for path in same} == {digest(tiny)}


def test_a_file_that_is_no_checkpoint_is_refused_by_what_it_is(tmp_path):
    contents_of = {
        b"": "empty",
        b"hello, this is text": "not a checkpoint",
        b"\0" * 4096: "not a checkpoint",
        b"\n<!DOCTYPE html><html>404 not found</html>": "web page",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n": "git-lfs",
        b"PK\x03\x04 and no more of it": "",  # truncated, or no safetensors
        b"\x80\x02]q\x00.": "not a checkpoint",
    }
    (tmp_path / CONFIG).write_text(json.dumps(face_config()))

    def cases() -> Iterable[tuple[Path, str]]:
        for number, (content, said) in enumerate(contents_of.items()):
            for suffix in (".pt", ".safetensors"):
                path = tmp_path / f"esm2_{number}{suffix}"
                path.write_bytes(content)
                yield path, said
        for number, what in enumerate(([1, 2], {"a": 1}, {"model": 3}, {"model": {}}, torch.zeros(2), None)):
            torch.save(what, tmp_path / f"esm2_{number}.pt")
            yield tmp_path / f"esm2_{number}.pt", "embed.weights"
        with zipfile.ZipFile(tmp_path / "esm2_zip.pt", "w") as archive:
            archive.writestr("readme/text.txt", "hello")
        yield tmp_path / "esm2_zip.pt", ""
        os.mkfifo(tmp_path / "esm2_pipe.pt")  # which is not waited for
        yield tmp_path / "esm2_pipe.pt", ""

    assert unnamed(cases()) == []


@FUZZ
@given(part=st.floats(0, 1, exclude_max=True))
def test_a_checkpoint_cut_anywhere_is_refused(tiny, tmp_path, part):
    whole = tiny.read_bytes()
    (tmp_path / "esm2_cut.pt").write_bytes(whole[: int(part * len(whole))])
    assert "esm2_cut.pt" in refusal(tmp_path / "esm2_cut.pt")
    folder = face_folder(tmp_path / "model", face_tensors(tiny))
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).unlink()
    (folder / SINGLE).write_bytes(whole[: int(part * len(whole))])
    assert SINGLE in refusal(folder)


@FUZZ
@given(data=st.data())
def test_damage_in_the_description_is_refused_or_harmless_and_never_a_crash(tiny, tmp_path, data):
    whole = bytearray(tiny.read_bytes())
    with zipfile.ZipFile(tiny) as archive:
        pickled = archive.getinfo("archive/data.pkl")
        start = whole.index(archive.read("archive/data.pkl"), pickled.header_offset)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[start + data.draw(st.integers(0, pickled.file_size - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "esm2_hurt.pt").unlink(missing_ok=True)
    (tmp_path / "esm2_hurt.pt").write_bytes(whole)
    with contextlib.suppress(WeightsUnusable):
        read = load_esm_checkpoint(tmp_path / "esm2_hurt.pt")
        assert {name: tuple(one.shape) for name, one in read.tensors.items()} == shapes(read.architecture)


def test_what_may_not_be_read_says_so(unprivileged):
    (unprivileged / "model").mkdir(mode=0)
    (unprivileged / "esm2_a.pt").write_bytes(b"PK\x03\x04")
    (unprivileged / "esm2_a.pt").chmod(0)
    assert unnamed((unprivileged / name, "Permission denied") for name in ("model", "esm2_a.pt")) == []


def test_path_that_is_not_there_is_an_error_of_the_configuration(tmp_path):
    (tmp_path / "link.pt").symlink_to(tmp_path / "gone.pt")
    for name in ("esm2_a.pt", "link.pt"):
        with pytest.raises(ConfigError):
            load_esm_checkpoint(tmp_path / name)


@pytest.mark.parametrize("form", ["zip", "old", "raw"])
def test_pickle_that_wants_to_run_code_is_refused_and_nothing_of_it_runs(tiny, tmp_path, form):
    path, mark = tmp_path / "esm2_evil.pt", tmp_path / "touched"
    evil = {**contents(tiny), "extra": Evil(mark)}
    if form == "raw":
        path.write_bytes(pickle.dumps(evil["extra"], protocol=2))
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=form == "zip")
    assert "posix.system" in refusal(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Evil(mark)))  # the proof that this file would have done it
    assert mark.exists()


def test_anything_but_tensors_and_plain_data_is_refused_by_its_name(tiny, tmp_path):
    for held, asked in ((io.StringIO, "_io.StringIO"), (functools.partial(print), "functools.partial"), (eval, "eval")):
        torch.save({"model": {}, "cfg": held}, tmp_path / "esm2_a.pt")
        assert asked in refusal(tmp_path / "esm2_a.pt")
    load_esm_checkpoint(tiny)  # which allows namespaces, for that long
    assert Namespace not in torch.serialization.get_safe_globals()


def test_relatives_are_refused_by_their_names(tmp_path):
    by_tensors = {
        ("esm.embed_tokens.weight", "esm_s_combine"): "ESMFold",
        (
            "transformer.blocks.0.attn.layernorm_qkv.1.weight",
            "transformer.blocks.0.geom_attn.proj.weight",
        ): "ESM3",
        ("layers.0.row_self_attention.layer.k_proj.weight",): "the MSA Transformer",
        ("base_model.model.esm.encoder.layer.0.attention.self.query.lora_A.weight",): "adapter",
    }

    def cases() -> Iterable[tuple[Path, str]]:
        path = tmp_path / "esm2_not.pt"
        for names, family in by_tensors.items():
            tensors = {name: torch.zeros(1) for name in names}
            for held in ({"model": tensors}, OrderedDict(tensors)):
                torch.save(held, path)
                yield path, family

    assert unnamed(cases()) == []


def test_a_file_beside_the_right_one_points_to_it(tiny, tmp_path):
    folder = face_folder(tmp_path / "model", face_tensors(tiny))
    pickled = face_folder(tmp_path / "pickled", face_tensors(tiny))
    (pickled / SINGLE).rename(pickled / "pytorch_model.bin")
    torch.save(contents(tiny)["model"], tmp_path / "esm2_bare.pt")  # which does not say how many heads
    cases = [
        (tiny.with_name("esm2_t3_tiny-contact-regression.pt"), "contact_head.regression.weight"),
        (tmp_path / "esm2_bare.pt", "layers"),
        (folder / CONFIG, str(folder)),
        (tiny.parent, "embed.weights"),
        (pickled, "safetensors"),
        (pickled / "pytorch_model.bin", "save_pretrained"),
    ]
    assert unnamed(cases) == []


def test_a_config_of_another_model_is_refused_by_what_is_odd(tiny, tmp_path):
    odd: list[tuple[dict[str, Any], str]] = [
        ({"position_embedding_type": "absolute"}, "position"),
        ({"position_embedding_type": "relative"}, "'relative'"),
        ({"emb_layer_norm_before": True}, "emb_layer_norm_before"),
        ({"is_folding_model": True}, "is_folding_model"),
        ({"model_type": "bert"}, "'bert'"),
        ({"model_type": "esmc"}, "hidden_act"),
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps"),
        ({"is_decoder": True}, "is_decoder"),
        ({"vocab_size": 64}, "vocab_size"),
        ({"vocab_list": ["<cls>"]}, "vocab_list"),
        ({"hidden_size": 33}, "33"),
        ({"num_hidden_layers": "3"}, "'3' for its layers"),
        ({"num_hidden_layers": 4}, "4 for its layers"),
        ({"num_hidden_layers": 2}, "2 for its layers"),
        ({"num_attention_heads": 2}, "inv_freq"),
        ({"hidden_size": 64}, "64 for its width"),
    ]
    folder = face_folder(tmp_path / "model", face_tensors(tiny))

    def cases() -> Iterable[tuple[Path, str]]:
        for config, said in odd:
            (folder / CONFIG).write_text(json.dumps(face_config(**config)))
            yield folder, said
        for text in ("", "not json", "[]", "{}"):
            (folder / CONFIG).write_text(text)
            yield folder, CONFIG
        (folder / CONFIG).unlink()
        yield folder, CONFIG
        yield folder / SINGLE, CONFIG

    assert unnamed(cases()) == []


def test_a_tensor_or_number_that_is_missing_or_odd_is_named(tiny, tmp_path):
    out, bias, frequency = tmp_path / "esm2_odd.pt", "layers.1.fc2.bias", "layers.0.self_attn.rot_emb.inv_freq"
    tensors = [
        (bias, None, bias),
        (bias, torch.zeros(31), "(31,)"),
        ("embed_tokens.weight", torch.zeros(35, 32), "35"),
        (bias, torch.zeros(32).half(), "float16, float32"),
        (bias, torch.zeros(32).long(), "int64"),
        (bias, torch.zeros(32).to_sparse(), bias),
        ("layers.0.self_attn.bias_k", torch.zeros(1, 1, 32), "ESM-1,"),
        ("layers.0.adapter.weight", torch.zeros(3), "layers.0.adapter.weight"),
        ("layers.3.fc2.bias", torch.zeros(32), "its weights have 4"),
        (frequency, torch.ones(4), "frequencies"),
        (frequency, torch.ones(3), "shape"),
    ]
    numbers: list[dict[str, Any]] = [
        {"encoder_layers": 10**9},
        {"encoder_layers": 0},
        {"encoder_layers": True},
        {"encoder_embed_dim": 32.0},
        {"encoder_attention_heads": None},
        {"token_dropout": "yes"},
    ]
    of_another_base = [f"layers.{layer}.self_attn.rot_emb.inv_freq" for layer in range(3)]
    other_F = 1.0 / (500_000 ** (torch.arange(0, 8, 2).float() / 8))

    def cases() -> Iterable[tuple[Path, str]]:
        for name, tensor, said in tensors:
            yield changed(tiny, out, **{name: tensor}), said
        for numbers_of in numbers:
            yield with_settings(tiny, out, **numbers_of), str(next(iter(numbers_of.values())))
        for heads, layers in ((5, 3), (32, 3), (4, 999)):
            yield with_settings(tiny, out, encoder_attention_heads=heads, encoder_layers=layers), ""
        yield changed(tiny, out, **dict.fromkeys(of_another_base, other_F)), "ESM-2"

    assert unnamed(cases()) == []


def test_a_folder_in_parts_that_lacks_one_or_leads_out_of_itself_is_refused(tiny, tmp_path):
    folder = face_folder(tmp_path / "model", face_tensors(tiny), shards=3)

    def cases() -> Iterable[tuple[Path, str]]:
        for text in ("", "{", "[]", '{"weight_map": {"a": "../../secret.safetensors"}}', "[" * 100_000):
            (folder / INDEX).write_text(text)
            yield folder, INDEX
        face_folder(folder, face_tensors(tiny), shards=3)
        for name in ("model-00002-of-00003.safetensors", INDEX):
            (folder / name).unlink()
            yield folder, "model-00002" if name != INDEX else SINGLE

    assert unnamed(cases()) == []
