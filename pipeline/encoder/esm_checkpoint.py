"""Loading of checkpoints of the ESM families, checked against the architecture that they declare or show.

Three forms are known: fair-esm's .pt file of ESM-2, ESM-1b and ESM-1v, Hugging Face's folder of config.json and
safetensors of the same, and the .pth file of ESM C. All give tensors under fair-esm's names, those of ESM C under names
like them, in their stored precision, memory-mapped where the file allows it.

Shapes: F rotary frequencies, one for two columns of a head.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from pipeline.encoder.checkpoint_files import (
    ESM1B,
    ESM2,
    ESMC,
    EVOLUTIONARY_SCALE,
    FAIR_ESM,
    FAMILIES,
    FETCH_AGAIN,
    CheckpointFiles,
    files_of,
    read_json_object,
)
from pipeline.encoder.embedding_recipe import ENDS, MASK, PAD, VOCABULARY
from pipeline.encoder.published_weights import (
    family_of,
    family_of_config,
    read_pt,
    read_safetensors,
    refuse_names,
)
from pipeline.errors import WeightsUnusable

if TYPE_CHECKING:
    from pathlib import Path

PT_PREFIX = "encoder.sentence_encoder."
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MOST_LAYERS, MOST_DIM = 1_000, 100_000  # beyond them a number is a mistake
_INV_FREQ = "self_attn.rot_emb.inv_freq"
_ROTARY_TOLERANCE = 0.01  # relative; bfloat16 rounds by 0.004
_OF_ENCODER = ("layers.", "embed", "emb_", "encoder.", "transformer.")  # other tensors belong to heads
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
_FACE_ESM1B = {
    "embeddings.position_embeddings.weight": "embed_positions.weight",
    "embeddings.layer_norm.weight": "emb_layer_norm_before.weight",
    "embeddings.layer_norm.bias": "emb_layer_norm_before.bias",
}
_ESMC_LAYER = re.compile(r"^transformer\.blocks\.(\d+)\.(.+)\.(\w+)$")
_ESMC_PARTS = {
    "attn.layernorm_qkv.0": "self_attn_layer_norm",
    "attn.layernorm_qkv.1": "self_attn.qkv_proj",
    "attn.q_ln": "self_attn.q_layer_norm",
    "attn.k_ln": "self_attn.k_layer_norm",
    "attn.out_proj": "self_attn.out_proj",
    "ffn.0": "final_layer_norm",
    "ffn.1": "fc1",
    "ffn.3": "fc2",
}
_ESMC_OTHERS = {"embed.weight": "embed_tokens.weight", "transformer.norm.weight": "emb_layer_norm_after.weight"}
_ESMC_TOKENS, _ESMC_HEAD_DIM = 64, 64  # rows of its table, of which it uses the first; columns of a head in every size


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes and settings of a model; what only other families than ESM-2 have comes last."""

    layers: int
    dim: int
    heads: int
    token_dropout: bool
    family: str = ESM2
    positions: int = 0  # learned ones, one for a token; 0: they are rotary
    norm_before: bool = False  # whether a layer norm stands before the first layer

    @property
    def longest(self) -> int:
        """The most residues that are encoded as one; 0 where there is no limit."""
        return self.positions - ENDS if self.positions else 0

    @property
    def wide(self) -> int:
        """The numbers within the feed-forward part; ESM C has 8/3 of its width, in steps of 256."""
        return (8 * self.dim // 3 + 255) // 256 * 256 if self.family == ESMC else 4 * self.dim

    def plain(self) -> dict[str, Any]:
        """Return what tells the model from others; of an ESM-2 nothing but what its digest has always had."""
        plain = asdict(self)
        return plain if self.family != ESM2 else {name: plain[name] for name in _OF_EVERY_FAMILY}


_OF_EVERY_FAMILY = ("layers", "dim", "heads", "token_dropout")


@dataclass(frozen=True, slots=True)
class EsmCheckpoint:
    """The encoder's tensors, under fair-esm's names without prefix; no heads."""

    name: str
    form: str  # fair-esm, hugging-face or evolutionary-scale
    path: Path
    architecture: Architecture
    tensors: Mapping[str, torch.Tensor]
    # ESM-2 was trained with frequencies that had been rounded to half precision, and they are stored with the weights.
    # Made anew they differ by up to 0.04%, which at position 1,000 turns a pair of columns by up to 0.16 radian.
    rotary_F: torch.Tensor  # fp32; empty where positions are learned

    @property
    def dim(self) -> int:
        return self.architecture.dim

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
    dim = architecture.dim
    is_esmc = architecture.family == ESMC
    layer = _esmc_layer(architecture) if is_esmc else _layer(architecture)
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (_ESMC_TOKENS if is_esmc else len(VOCABULARY), dim)}
    if architecture.positions:
        found["embed_positions.weight"] = (architecture.positions + PAD + 1, dim)
    if architecture.norm_before:
        found |= {"emb_layer_norm_before.weight": (dim,), "emb_layer_norm_before.bias": (dim,)}
    found |= {f"layers.{n}.{name}": shape for n in range(architecture.layers) for name, shape in layer.items()}
    found["emb_layer_norm_after.weight"] = (dim,)
    return found if is_esmc else found | {"emb_layer_norm_after.bias": (dim,)}


def _layer(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer of ESM-2, ESM-1b or ESM-1v."""
    dim, wide = architecture.dim, architecture.wide
    layer: dict[str, tuple[int, ...]] = {"self_attn_layer_norm.weight": (dim,), "self_attn_layer_norm.bias": (dim,)}
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        layer |= {f"self_attn.{part}.weight": (dim, dim), f"self_attn.{part}.bias": (dim,)}
    layer |= {"final_layer_norm.weight": (dim,), "final_layer_norm.bias": (dim,)}
    return layer | {"fc1.weight": (wide, dim), "fc1.bias": (wide,), "fc2.weight": (dim, wide), "fc2.bias": (dim,)}


def _esmc_layer(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a layer of ESM C: no linear has a bias, and queries and keys have a norm each."""
    dim, wide = architecture.dim, architecture.wide
    norms = {f"{name}.{kind}": (dim,) for name in ("self_attn_layer_norm", "final_layer_norm") for kind in _NORM}
    return norms | {
        "self_attn.qkv_proj.weight": (3 * dim, dim),
        "self_attn.q_layer_norm.weight": (dim,),
        "self_attn.k_layer_norm.weight": (dim,),
        "self_attn.out_proj.weight": (dim, dim),
        "fc1.weight": (2 * wide, dim),  # the half that is a gate, and the half that passes it
        "fc2.weight": (dim, wide),
    }


_NORM = ("weight", "bias")


def load_esm_checkpoint(path: Path) -> EsmCheckpoint:
    """Return the checkpoint at a path, with every tensor of the encoder there and of the right shape and type."""
    files = files_of(path)
    state, architecture = _torch_file(files) if files.form == FAIR_ESM else _hugging_face(files)
    refuse_names(state, path)
    tensors = _checked_tensors(architecture, state, path)
    form = EVOLUTIONARY_SCALE if architecture.family == ESMC else files.form
    return EsmCheckpoint(files.name, form, path, architecture, tensors, _rotary(architecture, state, path))


def digest_weights(checkpoint: EsmCheckpoint) -> str:
    """Return a digest of the weights: the same for both file forms, and different if any bit differs."""
    hasher = hashlib.blake2b(json.dumps(checkpoint.architecture.plain(), sort_keys=True).encode(), digest_size=16)
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


def _torch_file(files: CheckpointFiles) -> tuple[dict[str, Any], Architecture]:
    """Read a .pt or .pth file."""
    (path,) = files.tensors
    data = read_pt(path)
    family = family_of(data, path)
    if family == ESMC:
        return _esmc(data.get("model", data.get("state_dict", data)), path)
    state = {_FAIR_PREFIX.sub("", str(name)): tensor for name, tensor in data["model"].items()}
    settings = data["args"] if family == ESM1B else data["cfg"]["model"]
    values = settings if isinstance(settings, Mapping) else vars(settings)
    names = ("encoder_layers", "encoder_embed_dim", "encoder_attention_heads", "token_dropout")
    if family == ESM1B:  # which is silent on what it does without
        values = {"token_dropout": False, **{f"encoder_{name}": value for name, value in values.items()}, **values}
    return state, _learned(_architecture([values.get(name) for name in names], names, path), family, state, path)


def _esmc(tensors: Mapping[str, Any], path: Path) -> tuple[dict[str, Any], Architecture]:
    """Return ESM C's tensors under our names, and the architecture, of which its file says nothing."""
    state = {_esmc_name(str(name)): tensor for name, tensor in tensors.items()}
    numbers = [int(match[1]) for name in tensors if (match := _ESMC_LAYER.match(str(name)))]
    table = state.get("embed_tokens.weight")
    dim = table.shape[-1] if isinstance(table, torch.Tensor) and table.ndim else 0
    if not numbers or max(numbers) >= MOST_LAYERS or not dim or dim % _ESMC_HEAD_DIM:
        what = f"has {len(set(numbers))} layers of width {dim}; ESM C's heads have {_ESMC_HEAD_DIM} numbers each"
        raise WeightsUnusable(what, where=str(path), remedy="use the published .pth file")
    return state, Architecture(max(numbers) + 1, dim, dim // _ESMC_HEAD_DIM, token_dropout=False, family=ESMC)


def _esmc_name(name: str) -> str:
    """Translate a tensor's name of ESM C to ours; unknown names stay as they are."""
    match = _ESMC_LAYER.match(name)
    if match and match[2] in _ESMC_PARTS:
        return f"layers.{match[1]}.{_ESMC_PARTS[match[2]]}.{match[3]}"
    return _ESMC_OTHERS.get(name, name)


def esmc_name(name: str) -> str:
    """Translate a tensor's name to the one under which ESM C was published."""
    if name in (ours := {mine: theirs for theirs, mine in _ESMC_OTHERS.items()}):
        return ours[name]
    _, number, part = name.split(".", 2)
    part, _, kind = part.rpartition(".")
    return f"transformer.blocks.{number}.{next(theirs for theirs, mine in _ESMC_PARTS.items() if mine == part)}.{kind}"


def _learned(architecture: Architecture, family: str, state: Mapping[str, Any], path: Path) -> Architecture:
    """Return the architecture with what ESM-1b and ESM-1v have and ESM-2 has not."""
    if family != ESM1B:
        return architecture
    table = state.get("embed_positions.weight")
    positions = len(table) - PAD - 1 if isinstance(table, torch.Tensor) and table.ndim else 0
    if positions <= ENDS:
        what = "has too small a position table (embed_positions.weight)"
        raise WeightsUnusable(what, where=str(path), remedy=FETCH_AGAIN)
    norm_before = any(name.startswith("emb_layer_norm_before") for name in state)
    return replace(architecture, family=ESM1B, positions=positions, norm_before=norm_before)


def _hugging_face(files: CheckpointFiles) -> tuple[dict[str, Any], Architecture]:
    """Read a folder of config.json and safetensors."""
    config_path = files.others[0]
    config = read_json_object(config_path)
    family = family_of_config(config, config_path)
    config.setdefault("token_dropout", False)  # as transformers has it
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "token_dropout")
    architecture = _architecture([config.get(name) for name in names], names, config_path)
    others = _FACE_OTHERS | (_FACE_ESM1B if family == ESM1B else {})
    state = {_face_name(name, others): tensor for name, tensor in read_safetensors(files.tensors).items()}
    return state, _learned(architecture, family, state, config_path)


def _face_name(name: str, others: Mapping[str, str]) -> str:
    """Translate a Hugging Face tensor name to fair-esm's; unknown names stay as they are."""
    name = name.removeprefix("esm.")
    match = _FACE_LAYER.match(name)
    if match and match[2] in _FACE_PARTS:
        return f"layers.{match[1]}.{_FACE_PARTS[match[2]]}.{match[3]}"
    return others.get(name, name)


def esm_name(name: str) -> str:
    """Return fair-esm's bare name of a tensor that fair-esm or Hugging Face published; others stay as they are."""
    bare = _FAIR_PREFIX.sub("", name)
    is_fair = bare.startswith(("layers.", "embed_tokens.", "emb_layer_norm_after."))
    return bare if is_fair else _face_name(name, _FACE_OTHERS)


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


def esm1b_settings(architecture: Architecture) -> dict[str, Any]:
    """Return what fair-esm's file of an ESM-1b or ESM-1v says of this architecture."""
    return {
        "arch": "roberta_large",
        "encoder_layers": architecture.layers,
        "encoder_embed_dim": architecture.dim,
        "encoder_ffn_embed_dim": architecture.wide,
        "encoder_attention_heads": architecture.heads,
        "max_positions": architecture.positions,
        "token_dropout": architecture.token_dropout,
    }


def _architecture(values: list[Any], names: tuple[str, ...], path: Path) -> Architecture:
    """Return the architecture; refuse impossible values."""
    for name, value, most in zip(names, values, (MOST_LAYERS, MOST_DIM, MOST_DIM), strict=False):
        if type(value) is not int or not 1 <= value <= most:
            raise WeightsUnusable(f"{name} is {value!r}, which is invalid for ESM", where=str(path), remedy=FETCH_AGAIN)
    layers, dim, heads, token_dropout = values
    if not isinstance(token_dropout, bool):
        what = f"{names[3]} is {token_dropout!r}, which is invalid for ESM"
        raise WeightsUnusable(what, where=str(path), remedy=FETCH_AGAIN)
    if dim % heads or (dim // heads) % 2:
        what = f"{names[1]} {dim} cannot be divided into {names[2]} {heads} of an even width"
        raise WeightsUnusable(what, where=str(path), remedy=FETCH_AGAIN)
    return Architecture(layers, dim, heads, token_dropout)


def _checked_tensors(architecture: Architecture, state: Mapping[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the architecture; refuse missing, extra and wrong ones, and mixed precisions."""
    expected = shapes(architecture)
    family, size = FAMILIES[architecture.family], f"{architecture.layers} layers of width {architecture.dim}"
    if missing := [name for name in expected if name not in state]:
        what = f"lacks {len(missing)} of the {len(expected)} tensors of {size}; the first is {missing[0]}"
        raise WeightsUnusable(what, where=str(path), remedy=FETCH_AGAIN)
    more = [name for name in state if name.startswith(_OF_ENCODER) and name not in expected and not _UNUSED.match(name)]
    if more:
        what = f"has extra tensors for {family} of {size}; the first is {more[0]}"
        raise WeightsUnusable(what, where=str(path), remedy="use an unmodified checkpoint with adapters merged")
    tensors = {name: _checked(name, state[name], shape, path) for name, shape in expected.items()}
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors.values()}
    if (total := sum(tensor.nbytes for tensor in tensors.values())) > (stored := sum(storages.values())):
        what = f"its tensors overlap: {stored:,} bytes stand for {total:,}"
        raise WeightsUnusable(what, where=str(path), remedy=FETCH_AGAIN)
    kinds = {tensor.dtype for tensor in tensors.values()}
    if len(kinds) > 1 or not kinds <= set(DTYPES.values()):
        precisions = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        what = f"is stored in {precisions}; all tensors must share one of float32, float16, bfloat16"
        raise WeightsUnusable(what, where=str(path), remedy="save it again in one of these")
    return tensors


def _checked(name: str, tensor: object, shape: tuple[int, ...], path: Path) -> torch.Tensor:
    """Return a tensor if it is a plain CPU tensor of that shape; else refuse it."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise WeightsUnusable(f"{name} is not a plain tensor", where=str(path), remedy=FETCH_AGAIN)
    if tuple(tensor.shape) != shape:
        what = f"{name} has the shape {tuple(tensor.shape)}, expected {shape}"
        if name == "embed_tokens.weight" and tensor.shape[0] != shape[0]:
            what = f"its vocabulary has {tensor.shape[0]} tokens, expected {shape[0]}"
        raise WeightsUnusable(what, where=str(path), remedy=FETCH_AGAIN)
    return tensor.detach()


def _rotary(architecture: Architecture, state: Mapping[str, Any], path: Path) -> torch.Tensor:
    """Return the stored rotary frequencies, which must be equal in all layers, or computed ones if none are stored."""
    if architecture.positions:
        return torch.empty(0)
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
