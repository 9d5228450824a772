"""Loading of checkpoints of the ESM families, checked against the architecture that they declare or show.

Four forms are known: fair-esm's .pt file of ESM-2, ESM-1b and ESM-1v, Hugging Face's folder of config.json and
safetensors of the same and of ESM C, and the .pth file of ESM C. All give tensors under fair-esm's names, or names like
them, in their stored precision, memory-mapped where the file allows it.

Shapes: F rotary frequencies, one for two columns of a head.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch

from pipeline.encoder.checkpoint_files import (
    ESM1B,
    ESM2,
    ESMC,
    EVOLUTIONARY_SCALE,
    FAMILIES,
    FETCH_AGAIN,
    HUGGING_FACE,
    USE_ESM2,
    files_of,
    read_json_object,
    unusable,
)
from pipeline.encoder.embedding_recipe import ENDS, MASK, PAD, VOCABULARY
from pipeline.encoder.published_weights import Form, read_pt, read_safetensors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FREQUENCIES = "self_attn.rot_emb.inv_freq"
_ROTARY_TOLERANCE = 0.01  # relative; bfloat16 rounds by 0.004
_ESMC_TOKENS, _ESMC_HEAD_DIM = 64, 64  # rows of its table, of which it uses the first; columns of a head in every size
_HEADS = ("*lm_head.*", "*contact_head.*", "*sequence_head.*", "*pooler.*", "*position_ids")
_OF_ENCODER = ("layers.", "embed", "emb_", "encoder.", "transformer.")  # other tensors belong to heads
_KNOWN = "ESM-2, ESM-1b, ESM-1v or ESM C"
_OWN = "to begin a training with weights of your own model, set train.pretrained to this file"
_BEFORE = "emb_layer_norm_before"
_BOTH = ("weight", "bias")
_LAYER = re.compile(r"layers\.(\d+)\.")

FAIR = Form({}, ("embed_tokens.weight", "layers.0.fc1.weight"), _HEADS, prefix="encoder.sentence_encoder.")
FACE = Form(
    {
        "embed_tokens": "embeddings.word_embeddings",
        "embed_positions": "embeddings.position_embeddings",
        "emb_layer_norm_before": "embeddings.layer_norm",
        "layers.*.self_attn.q_proj": "encoder.layer.*.attention.self.query",
        "layers.*.self_attn.k_proj": "encoder.layer.*.attention.self.key",
        "layers.*.self_attn.v_proj": "encoder.layer.*.attention.self.value",
        "layers.*.self_attn.rot_emb": "encoder.layer.*.attention.self.rotary_embeddings",
        "layers.*.self_attn.out_proj": "encoder.layer.*.attention.output.dense",
        "layers.*.self_attn_layer_norm": "encoder.layer.*.attention.LayerNorm",
        "layers.*.fc1": "encoder.layer.*.intermediate.dense",
        "layers.*.fc2": "encoder.layer.*.output.dense",
        "layers.*.final_layer_norm": "encoder.layer.*.LayerNorm",
        "emb_layer_norm_after": "encoder.emb_layer_norm_after",
    },
    signs=("embeddings.word_embeddings.weight", "encoder.layer.0.intermediate.dense.weight"),
    left=_HEADS,
    prefix="esm.",
)
ESMC_PTH = Form(
    {
        "embed_tokens": "embed",
        "layers.*.self_attn_layer_norm": "transformer.blocks.*.attn.layernorm_qkv.0",
        **{f"layers.*.self_attn.{x}_proj": f"transformer.blocks.*.attn.layernorm_qkv.1{x}" for x in "qkv"},
        **{f"layers.*.self_attn.{x}_layer_norm": f"transformer.blocks.*.attn.{x}_ln" for x in "qk"},
        "layers.*.self_attn.out_proj": "transformer.blocks.*.attn.out_proj",
        "layers.*.final_layer_norm": "transformer.blocks.*.ffn.0",
        "layers.*.gate": "transformer.blocks.*.ffn.1gate",
        "layers.*.fc1": "transformer.blocks.*.ffn.1passed",
        "layers.*.fc2": "transformer.blocks.*.ffn.3",
        "emb_layer_norm_after": "transformer.norm",
    },
    signs=("embed.weight", "transformer.blocks.0.attn.layernorm_qkv.1.weight"),
    left=_HEADS,
    parted={"layernorm_qkv.1": tuple(f"layernorm_qkv.1{x}" for x in "qkv"), "ffn.1": ("ffn.1gate", "ffn.1passed")},
)
ESMC_FACE = Form(
    {
        "layers.*.self_attn_layer_norm": "layers.*.input_layernorm",
        **{f"layers.*.self_attn.{x}_layer_norm": f"layers.*.self_attn.{x}_norm" for x in "qk"},
        "layers.*.self_attn.out_proj": "layers.*.self_attn.o_proj",
        "layers.*.final_layer_norm": "layers.*.post_attention_layernorm",
        "layers.*.gate": "layers.*.mlp.gate_proj",
        "layers.*.fc1": "layers.*.mlp.up_proj",
        "layers.*.fc2": "layers.*.mlp.down_proj",
        "emb_layer_norm_after": "norm",
    },
    signs=("embed_tokens.weight", "layers.0.mlp.gate_proj.weight"),
    left=_HEADS,
    prefix="esmc.",
)
# The digest of an ESM C is that of its .pth file, which joins these of ours.
_DIGESTED = {".q_proj": ".qkv_proj", ".k_proj": ".qkv_proj", ".v_proj": ".qkv_proj", ".gate.": ".fc1."}
# Part of a tensor's name, and the model family that has it; the first match decides.
_SIGNS = {
    "esm_s_combine": "ESMFold",
    "geom_attn": "ESM3",
    "structure_tokens_embed": "ESM3",
    "row_self_attention": "the MSA Transformer",
    "lora_": "a LoRA adapter",
    "self_attn.bias_k": "ESM-1",
}
# Settings of config.json by its model_type: the default of transformers, and the value that the forward pass computes.
_SETTINGS: dict[str, dict[str, tuple[Any, Any]]] = {
    "esm": {
        "is_folding_model": (False, False),
        "hidden_act": ("gelu", "gelu"),
        "layer_norm_eps": (1e-12, 1e-5),
        "is_decoder": (False, False),
        "vocab_size": (len(VOCABULARY), len(VOCABULARY)),
        "vocab_list": (list(VOCABULARY), list(VOCABULARY)),
        "pad_token_id": (PAD, PAD),
        "mask_token_id": (MASK, MASK),
    },
    "esmc": {
        "hidden_act": ("silu", "silu"),
        "attention_bias": (False, False),
        "mlp_bias": (False, False),
        "vocab_size": (_ESMC_TOKENS, _ESMC_TOKENS),
        "rope_theta": (1e4, 1e4),
        "rope_type": ("default", "default"),
    },
}


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

    def plain(self) -> dict[str, Any]:
        """Return what tells the model from others; of an ESM-2 nothing but what its digest has always had."""
        plain = asdict(self)
        of_every_family = ("layers", "dim", "heads", "token_dropout")
        return plain if self.family != ESM2 else {name: plain[name] for name in of_every_family}


@dataclass(frozen=True, slots=True)
class EsmCheckpoint:
    """The encoder's tensors, under fair-esm's names without prefix; no heads."""

    name: str
    form: str  # fair-esm, hugging-face or evolutionary-scale
    path: Path
    architecture: Architecture
    tensors: Mapping[str, torch.Tensor]
    # ESM-2 was trained with frequencies that had been rounded to half precision, and they are stored with the weights.
    # Computed again, they differ by up to 0.04%, which at position 1,000 turns a pair of columns by up to 0.16 radian.
    rotary_F: torch.Tensor  # fp32; empty where positions are learned

    @property
    def dim(self) -> int:
        return self.architecture.dim

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["embed_tokens.weight"].dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return fp32, fp16 or bf16."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def frequencies(head_dim: int) -> torch.Tensor:
    """Return the rotary frequencies as they are defined, before any rounding."""
    return 1.0 / (10000 ** (torch.arange(0, head_dim, 2).float() / head_dim))


def shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of the encoder; digests and random weights depend on their order."""
    dim, is_esmc = architecture.dim, architecture.family == ESMC
    wide = (8 * dim // 3 + 255) // 256 * 256 if is_esmc else 4 * dim
    first, last = ({f"{norm}_layer_norm": (dim,)} for norm in ("self_attn", "final"))
    qkv, out = {f"self_attn.{part}_proj": (dim, dim) for part in "qkv"}, {"self_attn.out_proj": (dim, dim)}
    feed = {"fc1": (wide, dim), "fc2": (dim, wide)}
    layer: dict[str, tuple[int, ...]] = {**first, **qkv, **out, **last, **feed}
    if is_esmc:
        norms = {f"self_attn.{part}_layer_norm": (dim,) for part in "qk"}
        layer = {**first, **last, **qkv, **norms, **out, "gate": (wide, dim), **feed}
    found: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (_ESMC_TOKENS if is_esmc else len(VOCABULARY), dim)}
    if architecture.positions:
        found["embed_positions.weight"] = (architecture.positions + PAD + 1, dim)
    if architecture.norm_before:
        found |= {f"emb_layer_norm_before.{kind}": (dim,) for kind in _BOTH}
    for number in range(architecture.layers):
        for name, shape in layer.items():
            kinds = _BOTH if not is_esmc or name in (*first, *last) else _BOTH[:1]
            found |= {f"layers.{number}.{name}.{kind}": shape if kind == "weight" else shape[:1] for kind in kinds}
    return found | {f"emb_layer_norm_after.{kind}": (dim,) for kind in (_BOTH[:1] if is_esmc else _BOTH)}


def load_esm_checkpoint(path: Path) -> EsmCheckpoint:
    """Return the checkpoint at a path, with every tensor of the encoder there and of the right shape and type."""
    files = files_of(path)
    described = files.others[0] if files.form == HUGGING_FACE else path
    found, settings = _folder(files.tensors, described) if files.form == HUGGING_FACE else _torch_file(path)
    for sign, family in _SIGNS.items():
        if any(sign in name for name in found):
            raise unusable(f"is {family}, not {_KNOWN}", path)
    form = next((known for known in (FAIR, FACE, ESMC_PTH, ESMC_FACE) if known.knows(found)), None)
    if form is None:
        what = f"is not an encoder's checkpoint ({_KNOWN}); it holds {', '.join(list(found)[:4]) or 'nothing'}"
        raise unusable(what, path, f"{_OWN}; or {USE_ESM2}")
    state = form.read({n: t for n, t in found.items() if not any(fnmatchcase(n, pattern) for pattern in form.left)})
    family = ESMC if form in (ESMC_PTH, ESMC_FACE) else ESM1B if settings["positions"] == "absolute" else ESM2
    if family == ESM2:
        state.pop("embed_positions.weight", None)  # which transformers keeps, and does not use
    architecture = _architecture(family, state, settings, described)
    tensors = _checked_tensors(architecture, state, path)
    kind = EVOLUTIONARY_SCALE if form is ESMC_PTH else files.form
    return EsmCheckpoint(files.name, kind, path, architecture, tensors, _rotary(architecture, state, path))


def _folder(files: Sequence[Path], config: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of a Hugging Face folder, and its settings; refuse other models, and other settings."""
    given = read_json_object(config)
    kind = str(given.get("model_type"))
    if kind not in _SETTINGS:
        raise unusable(f"is a model of the type {kind!r}, not {_KNOWN}", config)
    given = {**given, **(given.get("rope_parameters") or {})}
    for name, (default, needed) in _SETTINGS[kind].items():
        if (value := default if given.get(name) is None else given[name]) != needed:
            raise unusable(f"{name} is {value!r}, expected {needed!r}", config)
    positions = given.get("position_embedding_type", "absolute")
    if kind == "esm" and (positions not in ("rotary", "absolute") or (positions == "rotary" and given.get(_BEFORE))):
        raise unusable(f"its positions are {positions!r} with {_BEFORE} {given.get(_BEFORE)!r}", config)
    names = {"layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads"}
    settings = {ours: given.get(theirs) for ours, theirs in names.items()}
    settings |= {"token_dropout": given.get("token_dropout", False), "positions": positions}
    return read_safetensors(files), settings


def _torch_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors of a .pt or .pth file, and its settings."""
    data = read_pt(path)
    model = data.get("model", data.get("state_dict", data)) if isinstance(data, Mapping) else None
    if not isinstance(model, Mapping):
        raise unusable(f"holds a {type(data).__name__}, not a checkpoint", path)
    cfg = data.get("cfg")
    is_old = not isinstance(cfg, Mapping)  # as ESM-1b and ESM-1v, whose file is silent on what they do without
    arguments = data.get("args") if is_old else cfg.get("model")
    arguments = arguments if isinstance(arguments, Mapping) else getattr(arguments, "__dict__", {})
    names = {"layers": "layers", "width": "embed_dim", "heads": "attention_heads"}
    settings = {ours: arguments.get(f"encoder_{theirs}", arguments.get(theirs)) for ours, theirs in names.items()}
    settings |= {"token_dropout": arguments.get("token_dropout", False if is_old else None)}
    settings |= {"positions": "absolute" if is_old else "rotary"}
    return {str(name): tensor for name, tensor in model.items()}, settings


def digest_weights(checkpoint: EsmCheckpoint) -> str:
    """Return a digest of the weights: the same for all file forms, and different if any bit differs."""
    parts: dict[str, list[torch.Tensor]] = {"rotary": [checkpoint.rotary_F]}
    for name, tensor in checkpoint.tensors.items():
        joined = _DIGESTED.items() if checkpoint.architecture.family == ESMC else ()
        whole = next((name.replace(part, other) for part, other in joined if part in name), name)
        parts.setdefault(whole, []).append(tensor)
    hasher = hashlib.blake2b(json.dumps(checkpoint.architecture.plain(), sort_keys=True).encode(), digest_size=16)
    for name, tensors in sorted(parts.items()):
        shape = [sum(map(len, tensors)), *tensors[0].shape[1:]]
        hasher.update(json.dumps([name, dtype_name(tensors[0].dtype), shape]).encode())
        for tensor in tensors:
            hasher.update(tensor.contiguous().view(torch.uint8).numpy().data)  # the mapped file; nothing is copied
    return hasher.hexdigest()


def refuse_not_finite(checkpoint: EsmCheckpoint) -> None:
    """Refuse weights with NaN or infinite numbers."""
    for name, tensor in checkpoint.tensors.items():
        if not torch.isfinite(
            torch.stack(tensor.aminmax())
        ).all():  # NaN is both; looking at each took ten times longer
            raise unusable(f"{name} holds numbers that are not finite", checkpoint.path, FETCH_AGAIN)


def face_config(architecture: Architecture) -> dict[str, Any]:
    """Return the config.json with which Hugging Face's EsmModel is ESM-2 of this architecture."""
    settings = {name: needed for name, (_, needed) in _SETTINGS["esm"].items()}
    return settings | {
        "architectures": ["EsmModel"],
        "model_type": "esm",
        "num_hidden_layers": architecture.layers,
        "hidden_size": architecture.dim,
        "intermediate_size": 4 * architecture.dim,
        "num_attention_heads": architecture.heads,
        "token_dropout": architecture.token_dropout,
        "position_embedding_type": "rotary",
        "emb_layer_norm_before": False,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 1026,
    }


def esm1b_settings(architecture: Architecture) -> dict[str, Any]:
    """Return what fair-esm's file of an ESM-1b or ESM-1v says of this architecture."""
    return {
        "arch": "roberta_large",
        "encoder_layers": architecture.layers,
        "encoder_embed_dim": architecture.dim,
        "encoder_ffn_embed_dim": 4 * architecture.dim,
        "encoder_attention_heads": architecture.heads,
        "max_positions": architecture.positions,
        "token_dropout": architecture.token_dropout,
    }


def _architecture(family: str, state: Mapping[str, Any], settings: Mapping[str, Any], path: Path) -> Architecture:
    """Return the architecture by the shapes of the tensors; refuse settings that do not go with them."""
    layers = len({match[1] for name in state if (match := _LAYER.match(name))})
    dim, rows = (_size(state.get(f"embed_{of}.weight"), axis) for of, axis in (("tokens", -1), ("positions", 0)))
    if family == ESMC:  # whose .pth file says nothing
        given = {name: value for name, value in settings.items() if value is not None}
        settings = {"layers": layers, "width": dim, "heads": dim // _ESMC_HEAD_DIM, **given, "token_dropout": False}
    heads, token_dropout = settings["heads"], settings["token_dropout"]
    for name, found in (("layers", layers), ("width", dim)):
        if type(settings[name]) is not int or settings[name] != found:
            raise unusable(f"says {settings[name]!r} for its {name}; its weights have {found}", path, FETCH_AGAIN)
    if type(heads) is not int or heads < 1 or dim % heads or (dim // heads) % 2:
        raise unusable(f"its width {dim} cannot be divided into {heads!r} heads of an even width", path, FETCH_AGAIN)
    if not isinstance(token_dropout, bool):
        raise unusable(f"token_dropout is {token_dropout!r}, which is invalid for ESM", path, FETCH_AGAIN)
    positions = rows - PAD - 1 if family == ESM1B else 0
    if family == ESM1B and positions <= ENDS:
        raise unusable("has too small a position table (embed_positions.weight)", path, FETCH_AGAIN)
    norm_before = any(name.startswith("emb_layer_norm_before") for name in state)
    return Architecture(layers, dim, heads, token_dropout, family, positions, norm_before)


def _size(table: object, axis: int) -> int:
    return table.shape[axis] if isinstance(table, torch.Tensor) and table.ndim == 2 else 0


def _checked_tensors(architecture: Architecture, state: Mapping[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the architecture; refuse missing, extra and wrong ones, and mixed precisions."""
    expected = shapes(architecture)
    model = f"{FAMILIES[architecture.family]} of {architecture.layers} layers of width {architecture.dim}"
    if missing := [name for name in expected if name not in state]:
        what = f"lacks {len(missing)} of the {len(expected)} tensors of {model}; the first is {missing[0]}"
        raise unusable(what, path, FETCH_AGAIN)
    more = [name for name in state if name.startswith(_OF_ENCODER) and name not in expected]
    if more := [name for name in more if not name.endswith(FREQUENCIES)]:
        what = f"has extra tensors for {model}; the first is {more[0]}"
        raise unusable(what, path, "use an unmodified checkpoint with adapters merged")
    tensors = {name: _checked(name, state[name], shape, path) for name, shape in expected.items()}
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors.values()}
    if (total := sum(tensor.nbytes for tensor in tensors.values())) > (stored := sum(storages.values())):
        raise unusable(f"its tensors overlap: {stored:,} bytes stand for {total:,}", path, FETCH_AGAIN)
    kinds = {tensor.dtype for tensor in tensors.values()}
    if len(kinds) > 1 or not kinds <= set(DTYPES.values()):
        precisions = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        what = f"is stored in {precisions}; all tensors must share one of float32, float16, bfloat16"
        raise unusable(what, path, "save it again in one of these")
    return tensors


def _checked(name: str, tensor: object, shape: tuple[int, ...], path: Path) -> torch.Tensor:
    """Return a tensor if it is a plain CPU tensor of that shape; else refuse it."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise unusable(f"{name} is not a plain tensor", path, FETCH_AGAIN)
    if tuple(tensor.shape) != shape:
        raise unusable(f"{name} has the shape {tuple(tensor.shape)}, expected {shape}", path, FETCH_AGAIN)
    return tensor.detach()


def _rotary(architecture: Architecture, state: Mapping[str, Any], path: Path) -> torch.Tensor:
    """Return the stored rotary frequencies, which must be equal in all layers, or computed ones if none are stored."""
    if architecture.positions:
        return torch.empty(0)
    head_dim = architecture.dim // architecture.heads
    fresh_F = frequencies(head_dim)
    names = [f"layers.{layer}.{FREQUENCIES}" for layer in range(architecture.layers)]
    stored = [_checked(name, state[name], (head_dim // 2,), path).float() for name in names if name in state]
    if not stored:
        return fresh_F
    if not all(torch.equal(frequency_F, stored[0]) for frequency_F in stored):
        raise unusable("its layers differ in their rotary frequencies", path, FETCH_AGAIN)
    if not torch.allclose(stored[0], fresh_F, rtol=_ROTARY_TOLERANCE, atol=1e-4):
        raise unusable("its rotary frequencies are not those of ESM-2", path, FETCH_AGAIN)
    return stored[0].clone()
