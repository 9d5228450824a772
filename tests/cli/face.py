"""The names that Hugging Face gives to the tensors of ESM-2."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pipeline.encoder.checkpoints.esm_checkpoint import EsmCheckpoint

PARTS = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "LayerNorm",
}


def face_names(checkpoint: EsmCheckpoint) -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors as Hugging Face would name them."""
    tensors = {face_name(name): tensor.clone() for name, tensor in checkpoint.tensors.items()}
    for layer in range(checkpoint.architecture.layers):
        name = f"esm.encoder.layer.{layer}.attention.self.rotary_embeddings.inv_freq"
        tensors[name] = checkpoint.rotary_F.clone()
    return tensors


def face_name(name: str) -> str:
    if name == "embed_tokens.weight":
        return "esm.embeddings.word_embeddings.weight"
    if name.startswith("emb_layer_norm_after"):
        return f"esm.encoder.{name}"
    _, layer, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return f"esm.encoder.layer.{layer}.{PARTS[part]}.{kind}"
