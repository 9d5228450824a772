"""Telling ESM-2 from its relatives: each is refused by its own name, because each is used differently."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.encoder.files import USE_ESM2
from pipeline.encoder.tokens import MASK, PAD, VOCABULARY
from pipeline.errors import WeightsUnusable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_ESM_1B = "ESM-1b or ESM-1v"
_ARCHITECTURES = {
    "roberta_large": _ESM_1B,
    "protein_bert_base": "ESM-1",
    "msa_transformer": "the MSA Transformer",
    "invariant_gvp": "ESM-IF1",
}
# Part of a tensor's name, and whose it is; the first that is found decides.
_SIGNS = {
    "esm_s_combine": "ESMFold",
    "trunk.": "ESMFold",
    "layernorm_qkv": "ESM C or ESM3",
    "row_self_attention": "the MSA Transformer",
    "column_self_attention": "the MSA Transformer",
    "lora_": "an adapter (LoRA) beside or over a model",
    "emb_layer_norm_before": _ESM_1B,
    "embed_positions": _ESM_1B,
    "self_attn.bias_k": "ESM-1",
}
_MODEL_TYPES = {"esmc": "ESM C", "esm3": "ESM3", "esmplusplus": "ESM C", "ESMplusplus": "ESM C", "esmfold": "ESMFold"}
# What config.json may say otherwise, what it means if it is not there (as transformers has it), and what ESM-2 needs.
_SETTINGS: dict[str, tuple[Any, Any]] = {
    "hidden_act": ("gelu", "gelu"),
    "layer_norm_eps": (1e-12, 1e-5),
    "is_decoder": (False, False),
    "vocab_size": (len(VOCABULARY), len(VOCABULARY)),
    "pad_token_id": (PAD, PAD),
    "mask_token_id": (MASK, MASK),
}


def refuse_container(data: object, path: Path) -> None:
    """Refuse what is in a .pt file unless it has a model and says of which architecture."""
    if not isinstance(data, Mapping):
        raise _not_esm2(f"holds a {type(data).__name__}, not a checkpoint", path)
    architecture = getattr(data.get("args"), "arch", None)
    for name, family in _ARCHITECTURES.items():
        if isinstance(architecture, str) and name in architecture:
            raise _is_other(family, path)
    model = data.get("model", data.get("state_dict", data))
    names = [str(name) for name in model] if isinstance(model, Mapping) else []
    refuse_names(names, path)
    if names and all("contact_head.regression" in name for name in names):
        what = "is the contact regression that lies beside a checkpoint, not the checkpoint"
        name = path.name.replace("-contact-regression", "")
        raise WeightsUnusable(what, where=str(path), remedy=f"set embed.weights to {path.with_name(name)}")
    settings = data.get("cfg")
    if "model" not in data or not isinstance(model, Mapping) or not isinstance(settings, Mapping):
        held = ", ".join(repr(str(name)) for name in list(data)[:4]) or "nothing"
        raise _not_esm2(f"is not in fair-esm's format, which has cfg and model; it holds {held}", path)
    if not isinstance(settings.get("model"), Mapping) and not hasattr(settings.get("model"), "__dict__"):
        raise _not_esm2("its cfg says nothing of the model's architecture", path)


def refuse_names(names: Iterable[str], path: Path) -> None:
    """Refuse the tensors of a relative."""
    names = list(names)
    for sign, family in _SIGNS.items():
        if any(sign in name for name in names):
            raise _is_other(family, path)


def refuse_config(config: Mapping[str, Any], path: Path) -> None:
    """Refuse a Hugging Face model that is not ESM-2, or not used as ESM-2 is."""
    kind = config.get("model_type")
    if kind != "esm":
        raise _is_other(_MODEL_TYPES.get(str(kind), f"a model of the type {kind!r}"), path)
    if config.get("is_folding_model"):
        raise _is_other("ESMFold", path)
    positions = config.get("position_embedding_type", "absolute")
    if positions != "rotary" or config.get("emb_layer_norm_before"):
        raise _is_other(f"{_ESM_1B} (its positions are {positions})", path)
    for name, (default, needed) in _SETTINGS.items():
        if (value := config.get(name, default)) != needed:
            raise _not_esm2(f"{name} is {value!r}, and ESM-2's is {needed!r}", path)
    if config.get("vocab_list") not in (None, list(VOCABULARY)):
        raise _not_esm2("its vocab_list is not the vocabulary of ESM-2", path)


def _is_other(family: str, path: Path) -> WeightsUnusable:
    return _not_esm2(f"is {family}, not ESM-2", path)


def _not_esm2(what: str, path: Path) -> WeightsUnusable:
    return WeightsUnusable(what, where=str(path), remedy=USE_ESM2)
