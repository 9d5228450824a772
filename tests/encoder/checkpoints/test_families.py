"""Checkpoints of ESM-1b, ESM-1v and ESM C: what is read, what is refused, what is in keys."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.encoder.checkpoints.checkpoint_files import CONFIG, ESM1B, ESMC, SINGLE
from pipeline.encoder.checkpoints.esm_checkpoint import Architecture, digest_weights, load_esm_checkpoint
from pipeline.encoder.checkpoints.synth import write_random_relative
from pipeline.encoder.checkpoints.weights import CheckpointFacts, checkpoint_facts
from pipeline.errors import WeightsUnusable
from tests.encoder.checkpoints.relatives import PREFIX, contents, face_config, face_name
from tests.encoder.own import drawn
from tests.testkit.command import Command

OLD = Architecture(3, 32, 4, token_dropout=True, family=ESM1B, positions=100, norm_before=True)
NEW = Architecture(2, 64, 1, token_dropout=False, family=ESMC)


@pytest.fixture
def old(tmp_path: Path) -> Path:
    write_random_relative(tmp_path / "esm1b_tiny.pt", OLD)
    return tmp_path / "esm1b_tiny.pt"


@pytest.fixture
def new(tmp_path: Path) -> Path:
    write_random_relative(tmp_path / "esmc_tiny.pth", NEW)
    return tmp_path / "esmc_tiny.pth"


def test_facts_say_the_family_and_what_is_encoded_as_one(old: Path, new: Path) -> None:
    facts = checkpoint_facts(old), checkpoint_facts(new)
    told = [(one.family, one.longest, one.layers, one.dim) for one in facts]
    assert told == [("esm1b", 98, 3, 32), ("esmc", 0, 2, 64)]
    assert [one.form for one in facts] == ["fair-esm", "evolutionary-scale"]
    assert all(CheckpointFacts.from_json(one.to_json()) == one for one in facts)


def test_hugging_faces_form_of_esm_1b_is_the_same_model(old: Path, tmp_path: Path) -> None:
    others = {"embed_positions.weight": "embeddings.position_embeddings.weight"}
    others |= {f"emb_layer_norm_before.{kind}": f"embeddings.layer_norm.{kind}" for kind in ("weight", "bias")}
    model = {name.removeprefix(PREFIX): tensor for name, tensor in contents(old)["model"].items() if PREFIX in name}
    tensors = {f"esm.{others.get(name) or face_name(name)}": tensor for name, tensor in model.items()}
    (tmp_path / "face").mkdir()
    config = face_config(position_embedding_type="absolute", emb_layer_norm_before=True)
    (tmp_path / "face" / CONFIG).write_text(json.dumps(config))
    save_file(tensors, tmp_path / "face" / SINGLE)

    theirs, ours = load_esm_checkpoint(tmp_path / "face"), load_esm_checkpoint(old)
    assert theirs.architecture == ours.architecture
    assert digest_weights(theirs) == digest_weights(ours)


def test_positions_are_in_the_digest(old: Path, tmp_path: Path) -> None:
    data = contents(old)
    data["model"][f"{PREFIX}embed_positions.weight"][50, 3] += 1
    torch.save(data, tmp_path / "esm1b_other.pt")
    assert digest_weights(load_esm_checkpoint(tmp_path / "esm1b_other.pt")) != digest_weights(load_esm_checkpoint(old))


@pytest.mark.parametrize(
    ("leave_out", "said"),
    [
        (f"{PREFIX}embed_positions.weight", "has no table of positions"),
        (f"{PREFIX}emb_layer_norm_before.bias", "the first is emb_layer_norm_before.bias"),
        (f"{PREFIX}layers.1.fc1.bias", "the first is layers.1.fc1.bias"),
    ],
)
def test_an_esm_1b_that_lacks_something_is_refused(old: Path, tmp_path: Path, leave_out: str, said: str) -> None:
    data = contents(old)
    del data["model"][leave_out]
    torch.save(data, tmp_path / "esm1b_part.pt")
    with pytest.raises(WeightsUnusable, match=said):
        load_esm_checkpoint(tmp_path / "esm1b_part.pt")


def test_args_that_are_silent_are_told(old: Path, tmp_path: Path) -> None:
    data = contents(old)
    data["args"] = Namespace(arch="roberta_large", layers=3, embed_dim=32)
    torch.save(data, tmp_path / "esm1b_silent.pt")
    with pytest.raises(WeightsUnusable, match="encoder_attention_heads is None"):
        load_esm_checkpoint(tmp_path / "esm1b_silent.pt")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"transformer.blocks.1.attn.q_ln.weight": None}, "the first is layers.1.self_attn.q_layer_norm.weight"),
        ({"transformer.blocks.0.attn.out_proj.bias": torch.zeros(64)}, "tensors that ESM C of 2 layers"),
        ({"transformer.norm.weight": torch.zeros(63)}, r"has the shape \(63,\)"),
        ({"embed.weight": torch.zeros(64, 60)}, "2 layers of width 60; ESM C's heads have 64"),
        ({"transformer.blocks.0.geom_attn.proj.weight": torch.zeros(1)}, "is ESM3"),
    ],
)
def test_an_esm_c_that_is_none_is_refused(
    new: Path, tmp_path: Path, change: dict[str, torch.Tensor | None], said: str
) -> None:
    data = {name: tensor for name, tensor in (contents(new) | change).items() if tensor is not None}
    torch.save(data, tmp_path / "esmc_odd.pth")
    with pytest.raises(WeightsUnusable, match=said):
        load_esm_checkpoint(tmp_path / "esmc_odd.pth")


def write_settings(folder: Path, weights: Path, *settings: str) -> None:
    (folder / "data.fasta").write_text("".join(f">s{at}\n{text}\n" for at, text in enumerate(drawn(40, 60, 150))))
    lines = "".join(f"  {setting}\n" for setting in settings)
    (folder / "pipeline.yaml").write_text(
        f"data: {{source: fasta, path: data.fasta}}\nembed:\n  weights: {weights.name}\n{lines}"
    )


@pytest.mark.parametrize(
    ("file", "settings", "said"),
    [
        ("esm1b_tiny.pt", ("encoder: esm2",), "embed.encoder is esm2, and these weights are ESM-1b or ESM-1v"),
        ("esmc_tiny.pth", ("encoder: esm1b",), "embed.encoder is esm1b, and these weights are ESM C"),
        ("esm1b_tiny.pt", ("long: {length: 99, overlap: 9}",), "length is 99, and esm1b_tiny takes 98 residues"),
    ],
)
def test_settings_that_do_not_go_with_the_weights_are_told(
    old: Path,
    new: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: str,
    settings: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_settings(tmp_path, tmp_path / file, *settings)
    done = Command(monkeypatch, capsys)("submit", "--stage", "embed", "--executor", "local", "--dry-run")
    assert done.code == 2
    assert said in done.err


@pytest.mark.nightly
def test_sequences_beyond_the_positions_go_in_windows_from_the_command_line(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from pipeline.store.cache_folder import CacheFolder

    monkeypatch.chdir(tmp_path)
    write_settings(tmp_path, old, "encoder: esm1v")
    done = Command(monkeypatch, capsys)("submit", "--stage", "embed", "--executor", "local", "--follow")
    assert done.code == 0, done.err
    store = CacheFolder(tmp_path / "cache").kind("embed")
    cuts = {len(record.meta["text"]): record.meta["cut"] for record in store.read(store.keys())}
    assert cuts == {40: None, 60: None, 150: {"policy": "windows", "length": 98, "overlap": 49}}
