"""The names under which CLIP's weights are published: openai's, which open_clip has too, and Hugging Face's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipeline.tasks.pairs.pair_towers import heads_of
from pipeline.training.checkpoints.trained_weights import NameTable, renamed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from torch import Tensor

    from pipeline.protocol import PublishedForm

CLIP, CLIP_TRANSFORMERS = "clip", "clip_transformers"
FRESH = ("classes.*",)
RESIDUAL = {
    "mix.weight": "attn.in_proj_weight",
    "mix.bias": "attn.in_proj_bias",
    "out": "attn.out_proj",
    "before_attention": "ln_1",
    "before_feed": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
OPENAI = NameTable(
    names={
        "log_scale": "logit_scale",
        "left.patches": "visual.conv1",
        "left.whole_D": "visual.class_embedding",
        "left.place_LD": "visual.positional_embedding",
        "left.before": "visual.ln_pre",
        "left.norm": "visual.ln_post",
        "left.out_DK": "visual.proj",
        "right.embed": "token_embedding",
        "right.place_LD": "positional_embedding",
        "right.norm": "ln_final",
        "right.out_DK": "text_projection",
        **{f"left.layers.*.{ours}": f"visual.transformer.resblocks.*.{theirs}" for ours, theirs in RESIDUAL.items()},
        **{f"right.layers.*.{ours}": f"transformer.resblocks.*.{theirs}" for ours, theirs in RESIDUAL.items()},
    },
    signs=("visual.class_embedding", "visual.proj", "text_projection", "token_embedding.weight"),
    left=("input_resolution", "context_length", "vocab_size", "attn_mask"),
    fresh=FRESH,
)
ENCODER = {
    "out": "self_attn.out_proj",
    "before_attention": "layer_norm1",
    "before_feed": "layer_norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}
QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
TURNED = {"left.out_DK": "visual_projection.weight", "right.out_DK": "text_projection.weight"}
APART = NameTable(
    names={
        "log_scale": "logit_scale",
        **TURNED,
        "left.patches": "vision_model.embeddings.patch_embedding",
        "left.whole_D": "vision_model.embeddings.class_embedding",
        "left.place_LD": "vision_model.embeddings.position_embedding.weight",
        "left.before": "vision_model.pre_layrnorm",
        "left.norm": "vision_model.post_layernorm",
        "right.embed": "text_model.embeddings.token_embedding",
        "right.place_LD": "text_model.embeddings.position_embedding.weight",
        "right.norm": "text_model.final_layer_norm",
        **{
            f"{side}.layers.*.{ours}": f"{part}_model.encoder.layers.*.{theirs}"
            for side, part in (("left", "vision"), ("right", "text"))
            for ours, theirs in ENCODER.items()
        },
    },
    signs=("vision_model.embeddings.class_embedding", "text_model.embeddings.token_embedding.weight"),
)


@dataclass(frozen=True)
class ClipApart:
    """Hugging Face's form: query, key and value apart, both projections turned."""

    left: tuple[str, ...] = ("*.position_ids",)
    fresh: tuple[str, ...] = FRESH

    def knows(self, names: Collection[str]) -> bool:
        """Say whether tensors of these names are in this form."""
        return APART.knows(names)

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under our names."""
        found = dict(tensors)
        for name in tensors:
            parts = [name.replace(QKV[0], part) for part in QKV]
            if QKV[0] in name and all(part in found for part in parts):
                found[name.replace(QKV[0], "mix")] = torch.cat([found.pop(part) for part in parts])
        ours = {renamed(name, _BACK): tensor for name, tensor in found.items()}
        return {name: tensor.T.contiguous() if name in TURNED else tensor for name, tensor in ours.items()}

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under their names."""
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            theirs = renamed(name, _THERE)
            if ".mix." in theirs:
                found |= zip((theirs.replace("mix", part) for part in QKV), tensor.chunk(3), strict=True)
            else:
                found[theirs] = tensor.T.contiguous() if name in TURNED else tensor
        return found


_THERE = {
    **APART.names,
    "left.layers.*.mix": "vision_model.encoder.layers.*.mix",
    "right.layers.*.mix": "text_model.encoder.layers.*.mix",
}
_BACK = {theirs: ours for ours, theirs in _THERE.items()}
FORMS: dict[str, PublishedForm] = {CLIP: OPENAI, CLIP_TRANSFORMERS: ClipApart()}


def options_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the task's options that fit published weights of a CLIP with a vision transformer, by their shapes."""
    form = CLIP if OPENAI.knows(tensors) else CLIP_TRANSFORMERS
    shapes = {name: list(tensor.shape) for name, tensor in FORMS[form].read(tensors).items()}
    layers = {side: _layers(shapes, side) for side in ("left", "right")}
    image_width, _, _, patch = shapes["left.patches.weight"]
    vocabulary, width = shapes["right.embed.weight"]
    return {
        "left": "images",
        "right": "text",
        "image_size": patch * math.isqrt(shapes["left.place_LD"][0] - 1),
        "patch": patch,
        "image_width": image_width,
        "image_layers": layers["left"],
        "vocabulary": vocabulary,
        "right_most": shapes["right.place_LD"][0],
        "width": width,
        "layers": layers["right"],
        "heads": heads_of(width),
        "out": shapes["left.out_DK"][1],
    }


def _layers(shapes: Mapping[str, Sequence[int]], side: str) -> int:
    places = {int(name.split(".")[2]) for name in shapes if name.startswith(f"{side}.layers.")}
    return 1 + max(places, default=-1)
