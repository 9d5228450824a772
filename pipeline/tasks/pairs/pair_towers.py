"""Transformers that embed a side of a pair: CLIP's, of images and of texts, and a plain one of rows; CLIP's names.

CLIP has a vision transformer over an image's patches, and a causal one over a text's tokens. Rows are the bytes of a
text or sequence, or vectors of any kind. CLIP's weights are published under openai's names, which open_clip has too,
and under Hugging Face's.

Shapes: B items, H × W pixels, C channels, L positions, D features of a position, K shared features of both sides.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from pipeline.encoder.published_weights import Form
from pipeline.tasks.task_parts import AttentionLayer, at_least_single

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from torch import Tensor


MEAN = (0.48145466, 0.4578275, 0.40821073)  # of red, green and blue, which images are centred by
SPREAD = (0.26862954, 0.26130258, 0.27577711)
TOKEN_SPREAD, PLACE_SPREAD = 0.02, 0.01  # standard deviations of fresh parameters
INNER = 4  # how much wider a layer is within
SHARP = 1.702
BYTES = 256
ROW_SPREAD = 0.02  # standard deviation of fresh parameters in a tower of rows


class ImageBatch(NamedTuple):
    """The images of a batch, and how each is cropped and mirrored while it is trained on."""

    pixel_BHWC: Tensor  # uint8
    crop_B4: Tensor | None = None  # height, width, shift down and right: the first two of 1, others of its half
    is_mirrored_B: Tensor | None = None


class TextBatch(NamedTuple):
    """The texts of a batch as byte-pair tokens, padded behind their ends."""

    token_BL: Tensor
    end_B: Tensor  # the place of the end token


class PairBatch(NamedTuple):
    """Both sides of a batch's items."""

    left: Any  # Rows, ImageBatch or TextBatch; None: not wanted
    right: Any
    class_B: Tensor | None = None  # -1 where unknown


def quick_gelu(x: Tensor) -> Tensor:
    """Return the activation of openai's CLIP."""
    return x * torch.sigmoid(SHARP * x)


def clip_layers(width: int, heads: int, layers: int, *, is_causal: bool, exact_gelu: bool) -> nn.ModuleList:
    """Return the layers of a tower, initialized as in CLIP: the more layers, the less each adds."""
    activation = functional.gelu if exact_gelu else quick_gelu
    made = [
        AttentionLayer(width, heads, INNER * width, 0.0, activation, bias=True, is_causal=is_causal)
        for _ in range(layers)
    ]
    added = width**-0.5 * (2 * layers) ** -0.5
    for layer in made:
        spreads = (layer.mix, width**-0.5), (layer.out, added), (layer.up, (2 * width) ** -0.5), (layer.down, added)
        for linear, spread in spreads:
            nn.init.normal_(linear.weight, std=spread)
            nn.init.zeros_(linear.bias)
    return nn.ModuleList(made)


class ImageTower(nn.Module):
    """A vision transformer, whose class token embeds an image as a vector of length 1."""

    mean_C: Tensor
    spread_C: Tensor

    def __init__(
        self, size: int, patch: int, width: int, layers: int, heads: int, out: int, *, exact_gelu: bool
    ) -> None:
        super().__init__()
        spread = width**-0.5
        self.patches = nn.Conv2d(3, width, patch, patch, bias=False)
        self.whole_D = nn.Parameter(spread * torch.randn(width))
        self.place_LD = nn.Parameter(spread * torch.randn(1 + (size // patch) ** 2, width))
        self.before, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.layers = clip_layers(width, heads, layers, is_causal=False, exact_gelu=exact_gelu)
        self.out_DK = nn.Parameter(spread * torch.randn(width, out))
        for name, values in (("mean_C", MEAN), ("spread_C", SPREAD)):  # no weights: they are in no checkpoint
            self.register_buffer(name, torch.tensor(values), persistent=False)

    def forward(self, images: ImageBatch) -> Tensor:
        """Return the vector of each image [B, K]."""
        return functional.normalize(at_least_single(self.features(self.shown(images))), dim=-1)

    def features(self, colour_BCHW: Tensor) -> Tensor:
        """Return the features of prepared images [B, K], of any length."""
        x_BLD = self.patches(colour_BCHW).flatten(2).transpose(1, 2)
        x_BLD = torch.cat([self.whole_D.to(x_BLD.dtype).expand(len(x_BLD), 1, -1), x_BLD], 1)
        x_BLD = self.before(x_BLD + self.place_LD)
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        return self.norm(x_BLD[:, 0]) @ self.out_DK  # type: ignore[no-any-return]

    def shown(self, images: ImageBatch) -> Tensor:
        """Return images as the tower sees them; cropped and mirrored as was drawn only while it trains."""
        dtype = self.whole_D.dtype
        colour_BCHW = coloured(images.pixel_BHWC, self.mean_C, self.spread_C).to(dtype)
        if not self.training or images.crop_B4 is None or images.is_mirrored_B is None:
            return colour_BCHW
        return cropped(colour_BCHW, images.crop_B4.to(dtype), images.is_mirrored_B)


def coloured(pixel_BHWC: Tensor, mean_C: Tensor, spread_C: Tensor) -> Tensor:
    """Return bytes of pixels as centred and scaled colours [B, C, H, W]."""
    return ((pixel_BHWC.float() / 255 - mean_C) / spread_C).permute(0, 3, 1, 2)


def cropped(colour_BCHW: Tensor, crop_B4: Tensor, is_mirrored_B: Tensor) -> Tensor:
    """Return the drawn part of each image, enlarged to its size and perhaps mirrored."""
    height_B, width_B, down_B, right_B = crop_B4.unbind(-1)
    zero_B, sign_B = torch.zeros_like(height_B), 1 - 2 * is_mirrored_B.to(crop_B4.dtype)
    rows = (sign_B * width_B, zero_B, right_B), (zero_B, height_B, down_B)
    turn_B23 = torch.stack([torch.stack(row, -1) for row in rows], 1)
    grid_BHW2 = functional.affine_grid(turn_B23, list(colour_BCHW.shape), align_corners=False)
    return functional.grid_sample(colour_BCHW, grid_BHW2, padding_mode="border", align_corners=False)


class TextTower(nn.Module):
    """A causal transformer, whose end token embeds a text as a vector of length 1."""

    def __init__(
        self, vocabulary: int, most: int, width: int, layers: int, heads: int, out: int, *, exact_gelu: bool
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=TOKEN_SPREAD)
        self.place_LD = nn.Parameter(PLACE_SPREAD * torch.randn(most, width))
        self.layers = clip_layers(width, heads, layers, is_causal=True, exact_gelu=exact_gelu)
        self.norm = nn.LayerNorm(width)
        self.out_DK = nn.Parameter(width**-0.5 * torch.randn(width, out))

    def forward(self, texts: TextBatch) -> Tensor:
        """Return the vector of each text [B, K]."""
        return functional.normalize(at_least_single(self.features(texts)), dim=-1)

    def features(self, texts: TextBatch) -> Tensor:
        """Return the features of texts [B, K], of any length; tokens behind an end are not seen."""
        x_BLD = self.embed(texts.token_BL) + self.place_LD[: texts.token_BL.shape[1]]
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        end_BD = x_BLD[torch.arange(len(x_BLD), device=x_BLD.device), texts.end_B]
        return self.norm(end_BD) @ self.out_DK  # type: ignore[no-any-return]


def heads_of(width: int) -> int:
    """Return how many heads a tower of a width has: no checkpoint says it, and published ones have this many."""
    return max(1, width // 64)


def crop_drawn(least: float, rng: np.random.Generator) -> Tensor:
    """Draw a crop [4]: its area is `least` or more of the image's, its shape at most 4:3 from the image's."""
    area, shape, down, right = rng.random(4)
    side, bend = math.sqrt(least + (1 - least) * area), (4 / 3) ** (shape - 0.5)
    height, width = min(1.0, side * bend), min(1.0, side / bend)
    drawn = (height, width, (2 * down - 1) * (1 - height), (2 * right - 1) * (1 - width))
    return torch.tensor(drawn, dtype=torch.float32)


class Rows(NamedTuple):
    """One side of a batch's items, padded."""

    values: Tensor  # [B, L] bytes, or vectors [B, L, D]
    real_BL: Tensor | None  # which are real, the class token first; None: all are


class RowTower(nn.Module):
    """A transformer that embeds one side of an item as a vector of length 1."""

    def __init__(
        self, dim: int, most: int, width: int, layers: int, heads: int, inner: int, out: int, *, dropout: float
    ) -> None:
        """Take the numbers of a vector, 0 for bytes, and the sizes of the transformer."""
        super().__init__()
        self.embed = nn.Linear(dim, width) if dim else nn.Embedding(BYTES, width)
        self.whole_D = nn.Parameter(ROW_SPREAD * torch.randn(width))  # the class token, whose output embeds the item
        self.place_LD = nn.Parameter(ROW_SPREAD * torch.randn(most, width))
        self.layers = nn.ModuleList(
            AttentionLayer(width, heads, inner, dropout, functional.gelu) for _ in range(layers)
        )
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, out, bias=False)

    def forward(self, rows: Rows) -> Tensor:
        """Return the vector of each item [B, D]."""
        x_BLD = self.embed(rows.values) + self.place_LD[: rows.values.shape[1]]
        x_BLD = torch.cat([self.whole_D.expand(len(x_BLD), 1, -1), x_BLD], 1)
        for layer in self.layers:
            x_BLD = layer(x_BLD, rows.real_BL)
        return functional.normalize(at_least_single(self.out(self.norm(x_BLD[:, 0]))), dim=-1)


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
