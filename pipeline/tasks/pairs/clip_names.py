"""The names under which CLIP's weights are published: openai's, which open_clip has too, and Hugging Face's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pipeline.encoder.published_weights import Form
from pipeline.tasks.pairs.pair_towers import heads_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

CLIP, CLIP_TRANSFORMERS = "clip", "clip_transformers"
RESIDUAL = {
    "mix.weight": "attn.in_proj_weight",
    "mix.bias": "attn.in_proj_bias",
    "out": "attn.out_proj",
    "before_attention": "ln_1",
    "before_feed": "ln_2",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
ENCODER = {
    "mix": "mix",  # query, key and value, which they have apart
    "out": "self_attn.out_proj",
    "before_attention": "layer_norm1",
    "before_feed": "layer_norm2",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
}


def _layers(side: str, theirs: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return our names of the layers of a tower → theirs."""
    return {f"{side}.layers.*.{ours}": f"{theirs}.*.{name}" for ours, name in names.items()}


FORMS = {
    CLIP: Form(
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
            **_layers("left", "visual.transformer.resblocks", RESIDUAL),
            **_layers("right", "transformer.resblocks", RESIDUAL),
        },
        signs=("visual.class_embedding", "visual.proj", "text_projection", "token_embedding.weight"),
        left=("input_resolution", "context_length", "vocab_size", "attn_mask"),
        fresh=("classes.*",),
    ),
    CLIP_TRANSFORMERS: Form(
        names={
            "log_scale": "logit_scale",
            "left.patches": "vision_model.embeddings.patch_embedding",
            "left.whole_D": "vision_model.embeddings.class_embedding",
            "left.place_LD": "vision_model.embeddings.position_embedding.weight",
            "left.before": "vision_model.pre_layrnorm",
            "left.norm": "vision_model.post_layernorm",
            "left.out_DK": "visual_projection.weight",
            "right.embed": "text_model.embeddings.token_embedding",
            "right.place_LD": "text_model.embeddings.position_embedding.weight",
            "right.norm": "text_model.final_layer_norm",
            "right.out_DK": "text_projection.weight",
            **_layers("left", "vision_model.encoder.layers", ENCODER),
            **_layers("right", "text_model.encoder.layers", ENCODER),
        },
        signs=("vision_model.embeddings.class_embedding", "text_model.embeddings.token_embedding.weight"),
        left=("*.position_ids",),
        fresh=("classes.*",),
        joined={"mix": tuple(f"self_attn.{part}_proj" for part in "qkv")},
        turned=frozenset({"left.out_DK", "right.out_DK"}),
    ),
}


def options_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the task's options that fit published weights of a CLIP with a vision transformer, by their shapes."""
    form = FORMS[CLIP if FORMS[CLIP].knows(tensors) else CLIP_TRANSFORMERS]
    shapes = {name: list(tensor.shape) for name, tensor in form.read(tensors).items()}
    image_width, _, _, patch = shapes["left.patches.weight"]
    vocabulary, width = shapes["right.embed.weight"]
    return {
        "left": "images",
        "right": "text",
        "image_size": patch * math.isqrt(shapes["left.place_LD"][0] - 1),
        "patch": patch,
        "image_width": image_width,
        "image_layers": _depth(shapes, "left"),
        "vocabulary": vocabulary,
        "right_most": shapes["right.place_LD"][0],
        "width": width,
        "layers": _depth(shapes, "right"),
        "heads": heads_of(width),
        "out": shapes["left.out_DK"][1],
    }


def _depth(shapes: Mapping[str, Sequence[int]], side: str) -> int:
    return sum(name.startswith(f"{side}.layers.") and name.endswith(".out.weight") for name in shapes)
