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
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.encoder.checkpoints.checkpoint_files import CONFIG, INDEX, SINGLE
from pipeline.encoder.checkpoints.esm_checkpoint import (
    DTYPES,
    as_dtype,
    digest_weights,
    dtype_name,
    frequencies,
    load_esm_checkpoint,
    shapes,
)
from pipeline.encoder.checkpoints.synth import write_random_checkpoint
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

FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refusal(path: Path) -> str:
    """Load what must be refused; return what a person reads."""
    with pytest.raises(WeightsUnusable) as refused:
        load_esm_checkpoint(path)
    assert refused.value.remedy
    assert refused.value.where
    return str(refused.value)


# ── what is accepted ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_fair_esm_checkpoint_becomes_the_tensors_that_encode_and_no_others(tiny: Path) -> None:
    checkpoint = load_esm_checkpoint(tiny)

    assert (checkpoint.name, checkpoint.form, checkpoint.path) == ("esm2_t3_tiny", "fair-esm", tiny)
    shape = checkpoint.architecture
    assert (shape.layers, shape.dim, shape.heads, shape.token_dropout) == (3, 32, 4, True)
    assert len(checkpoint.tensors) == 3 + 3 * 16
    assert not any("lm_head" in name or "contact" in name or "inv_freq" in name for name in checkpoint.tensors)
    assert checkpoint.dtype == torch.float32


def test_hugging_face_folder_holds_the_same_weights_under_the_same_digest(tiny: Path, tmp_path: Path) -> None:
    ours = load_esm_checkpoint(tiny)
    theirs = load_esm_checkpoint(face_folder(tmp_path / "esm2_t3_tiny", face_tensors(tiny)))

    assert (theirs.name, theirs.form) == ("esm2_t3_tiny", "hugging-face")
    assert theirs.tensors.keys() == ours.tensors.keys()
    assert all(torch.equal(theirs.tensors[name], tensor) for name, tensor in ours.tensors.items())
    assert torch.equal(theirs.rotary_F, ours.rotary_F)
    assert digest_weights(theirs) == digest_weights(ours)


@pytest.mark.parametrize("prefix", ["esm.", ""])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("named", ["folder", "file"])
def test_every_shape_of_a_hugging_face_model_is_the_same_model(
    tiny: Path, tmp_path: Path, prefix: str, shards: int, named: str
) -> None:
    folder = face_folder(tmp_path / "model", face_tensors(tiny, prefix), shards=shards)
    path = folder if named == "folder" else sorted(folder.glob("*.safetensors"))[-1]

    assert digest_weights(load_esm_checkpoint(path)) == digest_weights(load_esm_checkpoint(tiny))


def test_folder_of_hugging_faces_cache_is_named_after_its_model(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models--facebook--esm2_t3_tiny" / "snapshots" / "0123abcd"

    assert load_esm_checkpoint(face_folder(folder, face_tensors(tiny))).name == "esm2_t3_tiny"


@pytest.mark.parametrize("precision", DTYPES)
def test_precision_that_was_stored_is_kept(tiny: Path, tmp_path: Path, precision: str) -> None:
    data = contents(tiny)
    data["model"] = {name: tensor.to(as_dtype(precision)) for name, tensor in data["model"].items()}
    torch.save(data, tmp_path / "esm2_a.pt")
    checkpoint = load_esm_checkpoint(tmp_path / "esm2_a.pt")

    assert dtype_name(checkpoint.dtype) == precision
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {as_dtype(precision)}
    assert checkpoint.rotary_F.dtype == torch.float32


def test_old_format_of_torch_is_read_without_mapping(tiny: Path, tmp_path: Path) -> None:
    torch.save(contents(tiny), tmp_path / "esm2_old.pt", _use_new_zipfile_serialization=False)

    assert digest_weights(load_esm_checkpoint(tmp_path / "esm2_old.pt")) == digest_weights(load_esm_checkpoint(tiny))


def test_weights_are_mapped_and_not_copied_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "esm2_a.pt"
    write_random_checkpoint(path, 2, 256, 4)
    held = load_esm_checkpoint(path)

    maps = Path("/proc/self/maps").read_text()
    assert str(path) in maps
    assert held.tensors["layers.1.fc1.weight"].abs().sum() > 0


def test_contact_regression_beside_a_checkpoint_is_not_needed(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "esm2_alone.pt").write_bytes(tiny.read_bytes())

    assert digest_weights(load_esm_checkpoint(tmp_path / "esm2_alone.pt")) == digest_weights(load_esm_checkpoint(tiny))


def test_frequencies_that_are_not_stored_are_made_in_full_precision(tiny: Path, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in face_tensors(tiny).items() if "inv_freq" not in name}
    checkpoint = load_esm_checkpoint(face_folder(tmp_path / "model", tensors))

    assert torch.equal(checkpoint.rotary_F, frequencies(8))
    assert digest_weights(checkpoint) != digest_weights(load_esm_checkpoint(tiny)), (
        "they give other numbers, so they must not share a key"
    )


# ── the digest ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_digest_of_these_weights_is_this_one_until_its_version_is_raised(tmp_path: Path) -> None:
    ones = {"layers": 1, "dim": 8, "heads": 2}
    write_random_checkpoint(tmp_path / "esm2_a.pt", **ones)
    data = contents(tmp_path / "esm2_a.pt")
    data["model"] = {name: torch.full_like(tensor, 0.5) for name, tensor in data["model"].items()}
    data["model"][f"{PREFIX}layers.0.self_attn.rot_emb.inv_freq"] = frequencies(4)
    torch.save(data, tmp_path / "esm2_half.pt")

    # Keys of what is in caches are made of it: who changes this line must raise WEIGHTS_VERSION and ENCODER_VERSION.
    assert digest_weights(load_esm_checkpoint(tmp_path / "esm2_half.pt")) == "910071ca597c81702412958d4a9d7cb7"


def test_one_changed_bit_changes_the_digest(tiny: Path, tmp_path: Path) -> None:
    weight = contents(tiny)["model"][f"{PREFIX}layers.2.fc2.weight"]
    weight.view(torch.int32)[31, 127] ^= 1
    other = changed(tiny, tmp_path / "esm2_a.pt", **{"layers.2.fc2.weight": weight})

    assert digest_weights(load_esm_checkpoint(other)) != digest_weights(load_esm_checkpoint(tiny))


def test_digest_tells_precisions_and_architectures_apart(tiny: Path, tmp_path: Path) -> None:
    data = contents(tiny)
    data["model"] = {name: tensor.half() for name, tensor in data["model"].items()}
    torch.save(data, tmp_path / "esm2_half.pt")
    without = with_settings(tiny, tmp_path / "esm2_plain.pt", token_dropout=False)

    assert len({digest_weights(load_esm_checkpoint(path)) for path in (tiny, tmp_path / "esm2_half.pt", without)}) == 3


def test_digest_knows_nothing_of_the_heads_and_of_the_file(tiny: Path, tmp_path: Path) -> None:
    data = contents(tiny)
    data["model"]["encoder.lm_head.bias"] += 1
    data["model"] = dict(reversed(data["model"].items()))
    torch.save(data, tmp_path / "esm2_other.pt")

    assert digest_weights(load_esm_checkpoint(tmp_path / "esm2_other.pt")) == digest_weights(load_esm_checkpoint(tiny))


def test_transposed_storage_is_digested_as_its_numbers(tiny: Path, tmp_path: Path) -> None:
    weight = contents(tiny)["model"][f"{PREFIX}layers.0.fc1.weight"]
    turned = changed(tiny, tmp_path / "esm2_a.pt", **{"layers.0.fc1.weight": weight.T.contiguous().T})

    assert digest_weights(load_esm_checkpoint(turned)) == digest_weights(load_esm_checkpoint(tiny))


# ── files that are no checkpoint ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"hello, this is text", "not a checkpoint"),
        (b"\0" * 4096, "not a checkpoint"),
        (b"\n<!DOCTYPE html><html>404 not found</html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "git-lfs"),
        (b"PK\x03\x04 and no more of it", "truncated"),
        (b"\x80\x02]q\x00.", "not a checkpoint"),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_file_that_is_no_checkpoint_is_refused_by_what_it_is(
    tmp_path: Path, content: bytes, said: str, suffix: str
) -> None:
    path = tmp_path / f"esm2_a{suffix}"
    path.write_bytes(content)
    (tmp_path / CONFIG).write_text(json.dumps(face_config()))

    if suffix == ".safetensors" and said == "truncated":
        said = "not a checkpoint"  # there it is only another kind of file
    assert said in refusal(path)


@pytest.mark.parametrize("what", [[1, 2], {"a": 1}, {"model": 3}, {"model": {}}, torch.zeros(2), None])
def test_torch_file_of_something_else_is_refused(tmp_path: Path, what: object) -> None:
    torch.save(what, tmp_path / "esm2_a.pt")

    assert "embed.weights" in refusal(tmp_path / "esm2_a.pt")


def test_zip_of_other_things_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "esm2_a.pt", "w") as archive:
        archive.writestr("readme/text.txt", "hello")

    assert "esm2_a.pt" in refusal(tmp_path / "esm2_a.pt")


def test_truncated_checkpoint_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "esm2_cut.pt"
    path.write_bytes(tiny.read_bytes()[:100_000])

    assert f"{path}: is truncated" in refusal(path)


@FUZZ
@given(part=st.floats(0, 1, exclude_max=True))
def test_checkpoint_cut_anywhere_is_refused(tiny: Path, tmp_path: Path, part: float) -> None:
    whole = tiny.read_bytes()
    (tmp_path / "esm2_cut.pt").write_bytes(whole[: int(part * len(whole))])

    assert "esm2_cut.pt" in refusal(tmp_path / "esm2_cut.pt")


@FUZZ
@given(part=st.floats(0, 1, exclude_max=True))
def test_safetensors_cut_anywhere_is_refused(tiny: Path, tmp_path: Path, part: float) -> None:
    folder = face_folder(tmp_path / "model", face_tensors(tiny))
    whole = (folder / SINGLE).read_bytes()
    (folder / SINGLE).unlink()
    (folder / SINGLE).write_bytes(whole[: int(part * len(whole))])

    assert SINGLE in refusal(folder)


@FUZZ
@given(data=st.data())
def test_damage_in_the_description_is_refused_or_harmless_and_never_a_crash(
    tiny: Path, tmp_path: Path, data: st.DataObject
) -> None:
    whole = bytearray(tiny.read_bytes())
    with zipfile.ZipFile(tiny) as archive:
        pickled = archive.getinfo("archive/data.pkl")
    start = whole.index(archive.read("archive/data.pkl") if archive.fp else b"\x80\x02}", pickled.header_offset)
    for _ in range(data.draw(st.integers(1, 4))):
        whole[start + data.draw(st.integers(0, pickled.file_size - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "esm2_hurt.pt").unlink(missing_ok=True)
    (tmp_path / "esm2_hurt.pt").write_bytes(whole)

    with contextlib.suppress(WeightsUnusable):
        read = load_esm_checkpoint(tmp_path / "esm2_hurt.pt")
        assert {name: tuple(one.shape) for name, one in read.tensors.items()} == shapes(read.architecture)


def test_file_that_may_not_be_read_says_so(unprivileged: Path, tiny: Path) -> None:
    path = unprivileged / "esm2_a.pt"
    path.write_bytes(b"PK\x03\x04")
    path.chmod(0)

    assert "Permission denied" in refusal(path)


def test_folder_that_may_not_be_read_says_so(unprivileged: Path) -> None:
    (unprivileged / "model").mkdir(mode=0)

    assert "Permission denied" in refusal(unprivileged / "model")


def test_path_that_is_not_there_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "link.pt").symlink_to(tmp_path / "gone.pt")

    with pytest.raises(ConfigError, match=r"there is no such checkpoint"):
        load_esm_checkpoint(tmp_path / "esm2_a.pt")
    with pytest.raises(ConfigError, match="a link to a file that is not there"):
        load_esm_checkpoint(tmp_path / "link.pt")


def test_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "esm2_a.pt")

    assert "neither a file nor a folder" in refusal(tmp_path / "esm2_a.pt")


# ── code in a pickle ─────────────────────────────────────────────────────────────────────────────────────────────────


class Touch:
    """What a malicious file holds: unpickling it runs a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("form", ["zip", "old", "raw"])
def test_pickle_that_wants_to_run_code_is_refused_and_nothing_of_it_runs(tiny: Path, tmp_path: Path, form: str) -> None:
    path, mark = tmp_path / "esm2_evil.pt", tmp_path / "touched"
    evil = {**contents(tiny), "extra": Touch(mark)}
    if form == "raw":
        path.write_bytes(pickle.dumps(evil["extra"], protocol=2))
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=form == "zip")
    said = refusal(path)

    assert "wants to run code" in said
    assert "posix.system" in said
    assert not mark.exists()
    pickle.loads(pickle.dumps(Touch(mark)))  # the proof that this file would have done it
    assert mark.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_of_any_protocol_is_refused_and_nothing_of_it_runs(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "esm2_evil.pt").write_bytes(pickle.dumps(Touch(tmp_path / "touched"), protocol=protocol))
    refusal(tmp_path / "esm2_evil.pt")

    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("held", "asked"),
    [(io.StringIO, "_io.StringIO"), (functools.partial(print), "functools.partial"), (eval, "eval")],
)
def test_anything_but_tensors_and_plain_data_is_refused_by_its_name(tmp_path: Path, held: Any, asked: str) -> None:
    torch.save({"model": {}, "cfg": held}, tmp_path / "esm2_a.pt")

    assert asked in refusal(tmp_path / "esm2_a.pt")


def test_permission_for_namespaces_ends_with_the_reading(tiny: Path) -> None:
    load_esm_checkpoint(tiny)

    assert Namespace not in torch.serialization.get_safe_globals()


# ── relatives of ESM-2 ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arch", "family"),
    [
        ("protein_bert_base", "ESM-1,"),
        ("msa_transformer", "the MSA Transformer"),
        ("vt_medium_with_invariant_gvp", "ESM-IF1"),
    ],
)
def test_relative_in_fair_esms_format_is_refused_by_its_name(tmp_path: Path, arch: str, family: str) -> None:
    torch.save({"args": Namespace(arch=arch, layers=33), "model": {"a": torch.zeros(1)}}, tmp_path / "esm2_not.pt")

    assert f"is {family}" in refusal(tmp_path / "esm2_not.pt")


@pytest.mark.parametrize(
    ("names", "family"),
    [
        (["esm.embed_tokens.weight", "trunk.blocks.0.layernorm_1.weight"], "ESMFold"),
        (["transformer.blocks.0.attn.layernorm_qkv.1.weight", "transformer.blocks.0.geom_attn.proj.weight"], "ESM3"),
        (["layers.0.row_self_attention.layer.k_proj.weight"], "the MSA Transformer"),
        (["base_model.model.esm.encoder.layer.0.attention.self.query.lora_A.weight"], "an adapter"),
    ],
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_relative_is_known_by_its_tensors(tmp_path: Path, names: list[str], family: str, wrapped: bool) -> None:
    tensors = {name: torch.zeros(1) for name in names}
    torch.save({"model": tensors} if wrapped else OrderedDict(tensors), tmp_path / "esm2_not.pt")

    assert f"is {family}" in refusal(tmp_path / "esm2_not.pt")


def test_contact_regression_given_by_mistake_points_to_its_checkpoint(tiny: Path) -> None:
    said = refusal(tiny.with_name("esm2_t3_tiny-contact-regression.pt"))

    assert "is the contact regression" in said
    assert f"set embed.weights to {tiny}" in said


def test_bare_tensors_of_esm2_are_refused_because_they_do_not_say_how_many_heads(tiny: Path, tmp_path: Path) -> None:
    torch.save(contents(tiny)["model"], tmp_path / "esm2_bare.pt")

    assert "not in fair-esm's format" in refusal(tmp_path / "esm2_bare.pt")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"position_embedding_type": "absolute"}, "no table of positions"),
        ({"position_embedding_type": "relative"}, "its positions are 'relative'"),
        ({"emb_layer_norm_before": True}, "a layer norm before its layers"),
        ({"is_folding_model": True}, "ESMFold"),
        ({"model_type": "bert"}, "a model of the type 'bert'"),
        ({"model_type": "esmc"}, "ESM C"),
        ({"layer_norm_eps": 1e-12}, "layer_norm_eps is 1e-12"),
        ({"is_decoder": True}, "is_decoder"),
        ({"vocab_size": 64}, "vocab_size is 64"),
        ({"vocab_list": ["<cls>"]}, "vocabulary"),
        ({"hidden_size": 33}, "does not divide"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"num_hidden_layers": 4}, "lacks 16 of the 67"),
        ({"num_hidden_layers": 2}, "layers.2."),
        ({"num_attention_heads": 2}, "inv_freq"),
        ({"hidden_size": 64}, "shape"),
    ],
)
def test_config_of_another_model_is_refused(tiny: Path, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    folder = face_folder(tmp_path / "model", face_tensors(tiny), face_config(**settings))

    assert said in refusal(folder)


# ── tensors that are not what they should be ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        ("layers.1.fc2.bias", None, "lacks 1 of the 51 tensors"),
        ("layers.1.fc2.bias", torch.zeros(31), "has the shape (31,), and should have (32,)"),
        ("embed_tokens.weight", torch.zeros(35, 32), "vocabulary has 35 tokens"),
        ("layers.1.fc2.bias", torch.zeros(32).half(), "float16, float32"),
        ("layers.1.fc2.bias", torch.zeros(32).long(), "int64"),
        ("layers.1.fc2.bias", torch.zeros(32).to_sparse(), "not a plain tensor"),
        ("layers.0.self_attn.bias_k", torch.zeros(1, 1, 32), "is ESM-1,"),
        ("layers.0.adapter.weight", torch.zeros(3), "layers.0.adapter.weight"),
        ("layers.3.fc2.bias", torch.zeros(32), "layers.3.fc2.bias"),
        ("layers.0.self_attn.rot_emb.inv_freq", torch.ones(4), "rotary frequencies"),
        ("layers.0.self_attn.rot_emb.inv_freq", torch.ones(3), "shape"),
    ],
)
def test_tensor_that_is_missing_or_odd_is_named(
    tiny: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None, said: str
) -> None:
    assert said in refusal(changed(tiny, tmp_path / "esm2_odd.pt", **{name: tensor}))


def test_frequencies_of_another_base_are_refused(tiny: Path, tmp_path: Path) -> None:
    other_F = 1.0 / (500_000 ** (torch.arange(0, 8, 2).float() / 8))
    names = [f"layers.{layer}.self_attn.rot_emb.inv_freq" for layer in range(3)]
    path = changed(tiny, tmp_path / "esm2_odd.pt", **dict.fromkeys(names, other_F))

    assert "not those of ESM-2" in refusal(path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"encoder_layers": 10**9}, "encoder_layers is 1000000000"),
        ({"encoder_layers": 0}, "encoder_layers is 0"),
        ({"encoder_layers": True}, "encoder_layers is True"),
        ({"encoder_embed_dim": 32.0}, "encoder_embed_dim is 32.0"),
        ({"encoder_attention_heads": None}, "encoder_attention_heads is None"),
        ({"encoder_attention_heads": 5}, "does not divide"),
        ({"encoder_attention_heads": 32}, "even width"),
        ({"token_dropout": "yes"}, "token_dropout is 'yes'"),
        ({"encoder_layers": 999}, "lacks"),
    ],
)
def test_odd_number_in_cfg_is_named(tiny: Path, tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    assert said in refusal(with_settings(tiny, tmp_path / "esm2_odd.pt", **settings))


def test_values_that_are_not_finite_are_no_reason_to_refuse(tiny: Path, tmp_path: Path) -> None:
    path = changed(tiny, tmp_path / "esm2_nan.pt", **{"layers.1.fc2.bias": torch.full((32,), torch.nan)})

    assert load_esm_checkpoint(path).tensors["layers.1.fc2.bias"].isnan().all()


# ── folders ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_folder_with_a_pickle_only_says_how_to_make_safetensors(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(face_config()))
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")

    assert "safetensors" in refusal(tmp_path)
    assert "save_pretrained" in refusal(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("remove", "said"),
    [
        ([CONFIG], "has no config.json"),
        ([INDEX], "neither model.safetensors nor"),
        (["model-00002-of-00003.safetensors"], "1 of its 3 parts are missing: model-00002"),
    ],
)
def test_folder_that_lacks_a_file_says_which(tiny: Path, tmp_path: Path, remove: list[str], said: str) -> None:
    folder = face_folder(tmp_path / "model", face_tensors(tiny), shards=3)
    for name in remove:
        (folder / name).unlink()

    assert said in refusal(folder)


def test_folder_of_a_pt_file_points_to_the_file(tiny: Path) -> None:
    assert "set embed.weights to" in refusal(tiny.parent)


def test_safetensors_without_its_config_asks_for_it(tiny: Path, tmp_path: Path) -> None:
    folder = face_folder(tmp_path / "model", face_tensors(tiny))
    (folder / CONFIG).unlink()

    assert "no config.json beside it" in refusal(folder / SINGLE)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"weight_map": {"a": "../../secret.safetensors"}}', "[" * 100_000])
def test_index_that_is_damaged_or_leads_out_of_its_folder_is_refused(tiny: Path, tmp_path: Path, text: str) -> None:
    folder = face_folder(tmp_path / "model", face_tensors(tiny), shards=2)
    (folder / INDEX).write_text(text)

    assert INDEX in refusal(folder)


@pytest.mark.parametrize("text", ["", "not json", "[]", "{}"])
def test_damaged_config_is_refused(tiny: Path, tmp_path: Path, text: str) -> None:
    folder = face_folder(tmp_path / "model", face_tensors(tiny))
    (folder / CONFIG).write_text(text)

    assert CONFIG in refusal(folder)


def test_config_given_by_mistake_points_to_its_folder(tiny: Path, tmp_path: Path) -> None:
    folder = face_folder(tmp_path / "model", face_tensors(tiny))

    assert f"name its folder: {folder}" in refusal(folder / CONFIG)
