"""Loading of ESM-2 checkpoints, checked against the architecture that they declare.

Two forms are known: fair-esm's .pt file, and Hugging Face's folder of config.json and safetensors. Both give the same
tensors under fair-esm's names, in their stored precision, memory-mapped where the file allows it.

Shapes: F rotary frequencies, one for two columns of a head.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipeline.encoder.checkpoints.checkpoint_files import (
    FAIR_ESM,
    FETCH_AGAIN,
    CheckpointFiles,
    files_of,
    read_json_object,
)
from pipeline.encoder.checkpoints.weight_containers import (
    read_pt,
    read_safetensors,
    refuse_config,
    refuse_container,
    refuse_names,
)
from pipeline.encoder.embedding_recipe import MASK, PAD, VOCABULARY
from pipeline.errors import WeightsUnusable

if TYPE_CHECKING:
    from pathlib import Path

PT_PREFIX = "encoder.sentence_encoder."
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MOST_LAYERS, MOST_DIM = 1_000, 100_000  # beyond them a number is a mistake
_INV_FREQ = "self_attn.rot_emb.inv_freq"
_ROTARY_TOLERANCE = 0.01  # relative; bfloat16 rounds by 0.004
_OF_ENCODER = ("layers.", "embed_", "emb_", "encoder.", "embeddings.")  # other tensors belong to heads
_UNUSED = re.compile(r"embeddings\.position_(ids|embeddings\.weight)|layers\.\d+\.self_attn\.rot_emb\.inv_freq")
_FAIR_PREFIX = re.compile(r"^encoder\.(sentence_encoder\.)?")
_FACE_LAYER = re.compile(r"^encoder\.layer\.(\d+)\.(.+)\.(\w+)$")
_FACE_PARTS = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.self.rotary_embeddings": "self_attn.rot_emb",
    "attention.output.dense": "self_attn.out_proj",
    "attention.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "LayerNorm": "final_layer_norm",
}
_FACE_OTHERS = {
    "embeddings.word_embeddings.weight": "embed_tokens.weight",
    "encoder.emb_layer_norm_after.weight": "emb_layer_norm_after.weight",
    "encoder.emb_layer_norm_after.bias": "emb_layer_norm_after.bias",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes and settings of an ESM-2 model."""

    layers: int
    dim: int
    heads: int
    token_dropout: bool


@dataclass(frozen=True, slots=True)
class EsmCheckpoint:
    """The encoder's tensors, under fair-esm's names without prefix; no heads."""

    name: str
    form: str  # fair-esm or hugging-face
    path: Path
    architecture: Architecture
    tensors: Mapping[str, torch.Tensor]
    # ESM-2 was trained with frequencies that had been rounded to half precision, and they are stored with the weights.
    # Made anew they differ by up to 0.04%, which at position 1,000 turns a pair of columns by up to 0.16 radian.
    rotary_F: torch.Tensor  # fp32

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["embed_tokens.weight"].dtype


def as_dtype(name: str) -> torch.dtype:
    """Return torch's type for fp32, fp16 or bf16."""
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return fp32, fp16 or bf16."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def frequencies(head_dim: int) -> torch.Tensor:
    """Return the rotary frequencies as they are defined, before any rounding."""
    return 1.0 / (10000 ** (torch.arange(0, head_dim, 2).float() / head_dim))


def shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of the encoder."""
    dim, wide = architecture.dim, 4 * architecture.dim
    layer: dict[str, tuple[int, ...]] = {"self_attn_layer_norm.weight": (dim,), "self_attn_layer_norm.bias": (dim,)}
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        layer |= {f"self_attn.{part}.weight": (dim, dim), f"self_attn.{part}.bias": (dim,)}
    layer |= {"final_layer_norm.weight": (dim,), "final_layer_norm.bias": (dim,)}
    layer |= {"fc1.weight": (wide, dim), "fc1.bias": (wide,), "fc2.weight": (dim, wide), "fc2.bias": (dim,)}
    return {
        "embed_tokens.weight": (len(VOCABULARY), dim),
        **{f"layers.{n}.{name}": shape for n in range(architecture.layers) for name, shape in layer.items()},
        "emb_layer_norm_after.weight": (dim,),
        "emb_layer_norm_after.bias": (dim,),
    }


def load_esm_checkpoint(path: Path) -> EsmCheckpoint:
    """Return the checkpoint at a path, with every tensor of the encoder there and of the right shape and type."""
    files = files_of(path)
    state, architecture = _fair_esm(files) if files.form == FAIR_ESM else _hugging_face(files)
    refuse_names(state, path)
    tensors = _checked_tensors(architecture, state, path)
    return EsmCheckpoint(files.name, files.form, path, architecture, tensors, _rotary(architecture, state, path))


def digest_weights(checkpoint: EsmCheckpoint) -> str:
    """Return a digest of the weights: the same for both file forms, and different if any bit differs."""
    hasher = hashlib.blake2b(json.dumps(asdict(checkpoint.architecture), sort_keys=True).encode(), digest_size=16)
    for name, tensor in sorted([*checkpoint.tensors.items(), ("rotary", checkpoint.rotary_F)]):
        hasher.update(json.dumps([name, dtype_name(tensor.dtype), list(tensor.shape)]).encode())
        hasher.update(tensor.contiguous().view(torch.uint8).numpy().data)  # reads the mapped file; nothing is copied
    return hasher.hexdigest()


def refuse_not_finite(checkpoint: EsmCheckpoint) -> None:
    """Refuse weights with NaN or infinite numbers."""
    for name, tensor in checkpoint.tensors.items():
        finite = torch.isfinite(tensor)
        if not finite.all():
            what = f"{name} holds {int((~finite).sum()):,} numbers that are not finite"
            raise WeightsUnusable(what, where=str(checkpoint.path), remedy=FETCH_AGAIN)


def _fair_esm(files: CheckpointFiles) -> tuple[dict[str, Any], Architecture]:
    """Read a .pt file."""
    (path,) = files.tensors
    data = read_pt(path)
    refuse_container(data, path)
    state = {_FAIR_PREFIX.sub("", str(name)): tensor for name, tensor in data["model"].items()}
    settings = data["cfg"]["model"]
    values = settings if isinstance(settings, Mapping) else vars(settings)
    names = ("encoder_layers", "encoder_embed_dim", "encoder_attention_heads", "token_dropout")
    return state, _architecture([values.get(name) for name in names], names, path)


def _hugging_face(files: CheckpointFiles) -> tuple[dict[str, Any], Architecture]:
    """Read a folder of config.json and safetensors."""
    config_path = files.others[0]
    config = read_json_object(config_path)
    refuse_config(config, config_path)
    config.setdefault("token_dropout", False)  # as transformers has it
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "token_dropout")
    architecture = _architecture([config.get(name) for name in names], names, config_path)
    state = {_face_name(name): tensor for name, tensor in read_safetensors(files.tensors).items()}
    return state, architecture


def _face_name(name: str) -> str:
    """Translate a Hugging Face tensor name to fair-esm's; unknown names stay as they are."""
    name = name.removeprefix("esm.")
    match = _FACE_LAYER.match(name)
    if match and match[2] in _FACE_PARTS:
        return f"layers.{match[1]}.{_FACE_PARTS[match[2]]}.{match[3]}"
    return _FACE_OTHERS.get(name, name)


def esm_name(name: str) -> str:
    """Return fair-esm's bare name of a tensor that fair-esm or Hugging Face published; others stay as they are."""
    bare = _FAIR_PREFIX.sub("", name)
    return bare if bare.startswith(("layers.", "embed_tokens.", "emb_layer_norm_after.")) else _face_name(name)


def face_name(name: str) -> str:
    """Return Hugging Face's name of a tensor."""
    for face, ours in _FACE_OTHERS.items():
        if ours == name:
            return face
    _, layer, part, kind = name.split(".", 2)[:2] + name.split(".", 2)[2].rsplit(".", 1)
    face = next(face for face, ours in _FACE_PARTS.items() if ours == part)
    return f"encoder.layer.{layer}.{face}.{kind}"


def face_config(architecture: Architecture) -> dict[str, Any]:
    """Return the config.json with which Hugging Face's EsmModel is ESM-2 of this architecture."""
    return {
        "architectures": ["EsmModel"],
        "model_type": "esm",
        "num_hidden_layers": architecture.layers,
        "hidden_size": architecture.dim,
        "intermediate_size": 4 * architecture.dim,
        "num_attention_heads": architecture.heads,
        "token_dropout": architecture.token_dropout,
        "position_embedding_type": "rotary",
        "emb_layer_norm_before": False,
        "is_folding_model": False,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 1026,
        "vocab_size": len(VOCABULARY),
        "pad_token_id": PAD,
        "mask_token_id": MASK,
        "vocab_list": list(VOCABULARY),
    }


def _architecture(values: list[Any], names: tuple[str, ...], path: Path) -> Architecture:
    """Return the architecture; refuse impossible values."""
    for name, value, most in zip(names, values, (MOST_LAYERS, MOST_DIM, MOST_DIM), strict=False):
        if type(value) is not int or not 1 <= value <= most:
            raise WeightsUnusable(f"{name} is {value!r}, which no ESM-2 has", where=str(path), remedy=FETCH_AGAIN)
    layers, dim, heads, token_dropout = values
    if not isinstance(token_dropout, bool):
        what = f"{names[3]} is {token_dropout!r}, which no ESM-2 has"
        raise WeightsUnusable(what, where=str(path), remedy=FETCH_AGAIN)
    if dim % heads or (dim // heads) % 2:
        what = f"{names[1]} {dim} does not divide into {names[2]} {heads} of an even width"
        raise WeightsUnusable(what, where=str(path), remedy=FETCH_AGAIN)
    return Architecture(layers, dim, heads, token_dropout)


def _checked_tensors(architecture: Architecture, state: Mapping[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the architecture; refuse missing, extra and wrong ones, and mixed precisions."""
    expected = shapes(architecture)
    size = f"{architecture.layers} layers of width {architecture.dim}"
    if missing := [name for name in expected if name not in state]:
        what = f"lacks {len(missing)} of the {len(expected)} tensors of {size}; the first is {missing[0]}"
        raise WeightsUnusable(what, where=str(path), remedy=FETCH_AGAIN)
    more = [name for name in state if name.startswith(_OF_ENCODER) and name not in expected and not _UNUSED.match(name)]
    if more:
        what = f"has tensors that ESM-2 of {size} has not; the first is {more[0]}"
        raise WeightsUnusable(what, where=str(path), remedy="use the checkpoint of an unchanged ESM-2, adapters merged")
    tensors = {name: _checked(name, state[name], shape, path) for name, shape in expected.items()}
    kinds = {tensor.dtype for tensor in tensors.values()}
    if len(kinds) > 1 or not kinds <= set(DTYPES.values()):
        precisions = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        what = f"is stored in {precisions}; the whole of it must be in one of float32, float16, bfloat16"
        raise WeightsUnusable(what, where=str(path), remedy="save it once more in one of these")
    return tensors


def _checked(name: str, tensor: object, shape: tuple[int, ...], path: Path) -> torch.Tensor:
    """Return a tensor if it is a plain CPU tensor of that shape; else refuse it."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise WeightsUnusable(f"{name} is not a plain tensor", where=str(path), remedy=FETCH_AGAIN)
    if tuple(tensor.shape) != shape:
        what = f"{name} has the shape {tuple(tensor.shape)}, and should have {shape}"
        if name == "embed_tokens.weight" and tensor.shape[0] != shape[0]:
            what = f"its vocabulary has {tensor.shape[0]} tokens, and ESM-2's has {shape[0]}"
        raise WeightsUnusable(what, where=str(path), remedy=FETCH_AGAIN)
    return tensor.detach()


def _rotary(architecture: Architecture, state: Mapping[str, Any], path: Path) -> torch.Tensor:
    """Return the stored rotary frequencies, which must be equal in all layers, or computed ones if none are stored."""
    head_dim = architecture.dim // architecture.heads
    fresh_F = frequencies(head_dim)
    names = [f"layers.{layer}.{_INV_FREQ}" for layer in range(architecture.layers)]
    stored = [_checked(name, state[name], (head_dim // 2,), path).float() for name in names if name in state]
    if not stored:
        return fresh_F
    if not all(torch.equal(frequency_F, stored[0]) for frequency_F in stored):
        raise WeightsUnusable("its layers differ in their rotary frequencies", where=str(path), remedy=FETCH_AGAIN)
    if not torch.allclose(stored[0], fresh_F, rtol=_ROTARY_TOLERANCE, atol=1e-4):
        raise WeightsUnusable("its rotary frequencies are not those of ESM-2", where=str(path), remedy=FETCH_AGAIN)
    return stored[0].clone()
