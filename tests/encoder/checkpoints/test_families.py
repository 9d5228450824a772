"""Checkpoints of ESM-1b, ESM-1v and ESM C: what is read, what is refused, what is in keys."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.encoder.checkpoint_files import CONFIG, ESM1B, ESMC, SINGLE
from pipeline.encoder.esm_checkpoint import Architecture, digest_weights, load_esm_checkpoint
from pipeline.encoder.synth import write_random
from pipeline.encoder.weights import checkpoint_facts
from pipeline.errors import WeightsUnusable
from pipeline.store.cache_folder import CacheFolder
from tests.encoder.checkpoints.relatives import PREFIX, contents, face_config, face_name
from tests.encoder.own import drawn

OLD = Architecture(3, 32, 4, token_dropout=True, family=ESM1B, positions=100, norm_before=True)
NEW = Architecture(2, 64, 1, token_dropout=False, family=ESMC)


@pytest.fixture
def old(tmp_path):
    write_random(tmp_path / "esm1b_tiny.pt", OLD)
    return tmp_path / "esm1b_tiny.pt"


@pytest.fixture
def new(tmp_path):
    write_random(tmp_path / "esmc_tiny.pth", NEW)
    return tmp_path / "esmc_tiny.pth"


def test_facts_say_the_family_and_what_is_encoded_as_one(old, new):
    facts = checkpoint_facts(old), checkpoint_facts(new)
    told = [(one.family, one.longest, one.layers, one.dim) for one in facts]
    assert told == [("esm1b", 98, 3, 32), ("esmc", 0, 2, 64)]
    assert [one.form for one in facts] == ["fair-esm", "evolutionary-scale"]


def test_hugging_faces_form_of_esm_1b_is_the_same_model(old, tmp_path):
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


def test_positions_are_in_the_digest(old, tmp_path):
    data = contents(old)
    data["model"][f"{PREFIX}embed_positions.weight"][50, 3] += 1
    torch.save(data, tmp_path / "esm1b_other.pt")
    assert digest_weights(load_esm_checkpoint(tmp_path / "esm1b_other.pt")) != digest_weights(load_esm_checkpoint(old))


def test_what_lacks_a_part_or_has_another_is_refused_by_its_name(old, new, tmp_path):
    args = Namespace(arch="roberta_large", layers=3, embed_dim=32)
    cases: list[tuple[Path, str, object, str]] = [
        (old, f"{PREFIX}embed_positions.weight", None, "position"),
        (old, f"{PREFIX}emb_layer_norm_before.bias", None, "emb_layer_norm_before.bias"),
        (old, f"{PREFIX}layers.1.fc1.bias", None, "layers.1.fc1.bias"),
        (old, "args", args, "None heads"),
        (new, "transformer.blocks.1.attn.q_ln.weight", None, "layers.1.self_attn.q_layer_norm.weight"),
        (new, "transformer.blocks.0.attn.out_proj.bias", torch.zeros(64), "ESM C"),
        (new, "transformer.norm.weight", torch.zeros(63), "(63,)"),
        (new, "embed.weight", torch.zeros(64, 60), "60"),
        (new, "transformer.blocks.0.geom_attn.proj.weight", torch.zeros(1), "ESM3"),
    ]
    for path, name, value, said in cases:
        data = contents(path)
        place = data["model"] if name.startswith(PREFIX) else data
        place[name] = value
        if value is None:
            del place[name]
        out = tmp_path / f"{path.stem.replace('tiny', 'odd')}{path.suffix}"
        torch.save(data, out)
        with pytest.raises(WeightsUnusable) as refused:
            load_esm_checkpoint(out)
        assert said in str(refused.value)


def write_settings(folder: Path, weights: Path, *settings: str) -> None:
    (folder / "data.fasta").write_text("".join(f">s{at}\n{text}\n" for at, text in enumerate(drawn(40, 60, 150))))
    lines = "".join(f"  {setting}\n" for setting in settings)
    (folder / "pipeline.yaml").write_text(
        f"data: {{source: fasta, path: data.fasta}}\nembed:\n  weights: {weights.name}\n{lines}"
    )


def test_settings_that_do_not_go_with_the_weights_are_refused(old, new, tmp_path, pipeline):
    for weights, setting, said in (
        (old, "encoder: esm2", "embed.encoder"),
        (new, "encoder: esm1b", "embed.encoder"),
        (old, "long: {length: 99, overlap: 9}", "98"),
    ):
        write_settings(tmp_path, weights, setting)
        done = pipeline("submit", "--stage", "embed", "--executor", "local", "--dry-run")
        assert done.code == 2
        assert said in done.err


@pytest.mark.nightly
def test_sequences_beyond_the_positions_go_in_windows_from_the_command_line(old, tmp_path, pipeline):
    write_settings(tmp_path, old, "encoder: esm1v")
    done = pipeline("submit", "--stage", "embed", "--executor", "local", "--follow")
    assert done.code == 0, done.err
    store = CacheFolder(tmp_path / "cache").kind("embed")
    cuts = {len(record.meta["text"]): record.meta["cut"] for record in store.read(store.keys())}
    assert cuts == {40: None, 60: None, 150: {"policy": "windows", "length": 98, "overlap": 49}}
