"""Checkpoints in other forms, and files that are none, made from a synthetic one."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipeline.encoder.checkpoint_files import CONFIG, INDEX, SINGLE

PREFIX = "encoder.sentence_encoder."
PARTS = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.rot_emb": "attention.self.rotary_embeddings",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "LayerNorm",
}


def contents(path: Path) -> dict[str, Any]:
    """Read a synthetic checkpoint as it is in its file."""
    with torch.serialization.safe_globals([Namespace]):
        data: dict[str, Any] = torch.load(path, weights_only=True)
    return data


def changed(source: Path, out: Path, **tensors: torch.Tensor | None) -> Path:
    """Write a checkpoint with some tensors replaced, or left out."""
    data = contents(source)
    for name, tensor in tensors.items():
        data["model"].pop(PREFIX + name, None)
        if tensor is not None:
            data["model"][PREFIX + name] = tensor
    torch.save(data, out)
    return out


def with_settings(source: Path, out: Path, **settings: Any) -> Path:
    """Write a checkpoint whose cfg says something else."""
    data = contents(source)
    data["cfg"]["model"] = Namespace(**{**vars(data["cfg"]["model"]), **settings})
    torch.save(data, out)
    return out


def face_config(**settings: Any) -> dict[str, Any]:
    """Return the config.json of the tiny model, as transformers writes it for ESM-2."""
    return {
        "architectures": ["EsmForMaskedLM"],
        "model_type": "esm",
        "emb_layer_norm_before": False,
        "hidden_act": "gelu",
        "hidden_size": 32,
        "intermediate_size": 128,
        "is_folding_model": False,
        "layer_norm_eps": 1e-05,
        "mask_token_id": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "pad_token_id": 1,
        "position_embedding_type": "rotary",
        "token_dropout": True,
        "vocab_list": None,
        "vocab_size": 33,
        **settings,
    }


def face_tensors(source: Path, prefix: str = "esm.") -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint under Hugging Face's names, with the heads that come with them."""
    found = {
        f"{prefix}embeddings.position_ids": torch.arange(1026)[None],
        f"{prefix}contact_head.regression.bias": torch.zeros(1),
        "lm_head.bias": torch.zeros(33),
    }
    for name, tensor in contents(source)["model"].items():
        if name.startswith(PREFIX):
            found[prefix + face_name(name.removeprefix(PREFIX))] = tensor.clone()
    return found


def face_name(name: str) -> str:
    """Return Hugging Face's name of a tensor."""
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        part, leaf = rest.rsplit(".", 1)
        return f"encoder.layer.{layer}.{PARTS[part]}.{leaf}"
    return f"encoder.{name}" if name.startswith("emb_layer_norm") else "embeddings.word_embeddings.weight"


def face_folder(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None, *, shards: int = 1
) -> Path:
    """Write a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config or face_config()))
    if shards == 1:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    where = {name: f"model-{at % shards + 1:05}-of-{shards:05}.safetensors" for at, name in enumerate(names)}
    for file in sorted(set(where.values())):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder
