"""ESM-2 as a network that is trained: frozen but for low-rank additions (LoRA), or for its top layers.

Its parameters have fair-esm's names, and what it computes is what `encoder.esm2` computes, padded instead of packed.
Its weights are read from fair-esm's and Hugging Face's files, and written for the latter as an ordinary checkpoint:
additions of low rank are in the weights, and `config.json` is beside them.

Shapes: B sequences, L tokens of the longest (its residues between two marks), D features, H heads, C columns of a head,
F frequencies of it, R the rank of an addition, I inputs, O outputs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from pipeline.encoder.checkpoint_files import CONFIG
from pipeline.encoder.embedding_recipe import PAD, VOCABULARY
from pipeline.encoder.esm2 import EPSILON, MASKED_IN_TRAINING
from pipeline.encoder.esm_checkpoint import FACE, FAIR, FREQUENCIES, Architecture, face_config, frequencies
from pipeline.tasks.task_parts import at_least_single

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

LORA = ("lora_down", "lora_up")
NAME = "encoder"  # of the encoder within a model
OURS = f"{NAME}.frequency_F"


@dataclass(frozen=True)
class TunedSizes:
    """The sizes of an ESM-2, and what of it is trained."""

    layers: int = 33  # of the checkpoint, as are the next three
    width: int = 1280
    heads: int = 20
    token_dropout: bool = True
    rank: int = 8  # of additions to queries, keys, values and outputs of attention; 0: none
    alpha: float = 16.0  # additions are scaled by alpha / rank
    top_layers: int = 0  # trained whole, with the norm behind them, instead of additions

    @property
    def scale(self) -> float:
        return self.alpha / self.rank if self.rank else 0.0


class LowRankLinear(nn.Linear):
    """A frozen linear layer, and a trained addition of low rank that begins as nothing."""

    def __init__(self, width: int, sizes: TunedSizes) -> None:
        super().__init__(width, width)
        self.scale = sizes.scale
        self.lora_down = nn.Parameter(torch.empty(sizes.rank, width))
        self.lora_up = nn.Parameter(torch.zeros(width, sizes.rank))
        nn.init.kaiming_uniform_(self.lora_down, a=5**0.5)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's word for it
        added = functional.linear(functional.linear(input, self.lora_down), self.lora_up)
        return super().forward(input) + self.scale * added


class TunedAttention(nn.Module):
    """Attention with rotary positions."""

    def __init__(self, sizes: TunedSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            layer = LowRankLinear(sizes.width, sizes) if sizes.rank else nn.Linear(sizes.width, sizes.width)
            self.add_module(name, layer)

    def forward(self, x_BLD: Tensor, turn_2LC: Tensor, real_BL: Tensor | None) -> Tensor:
        queries, keys, values = (
            self.get_submodule(name)(x_BLD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        mask = None if real_BL is None else real_BL[:, None, None, :]
        mixed_BHLC = functional.scaled_dot_product_attention(
            turned(queries, turn_2LC), turned(keys, turn_2LC), values, attn_mask=mask
        )
        attended_BLD: Tensor = self.get_submodule("out_proj")(mixed_BHLC.transpose(1, 2).flatten(2))
        return attended_BLD


class TunedLayer(nn.Module):
    """A transformer layer of ESM-2."""

    def __init__(self, sizes: TunedSizes) -> None:
        super().__init__()
        width = sizes.width
        self.self_attn = TunedAttention(sizes)
        self.self_attn_layer_norm = nn.LayerNorm(width, eps=EPSILON)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.final_layer_norm = nn.LayerNorm(width, eps=EPSILON)

    def forward(self, x_BLD: Tensor, turn_2LC: Tensor, real_BL: Tensor | None) -> Tensor:
        x_BLD = x_BLD + self.self_attn(self.self_attn_layer_norm(x_BLD), turn_2LC, real_BL)
        changed_BLD: Tensor = x_BLD + self.fc2(functional.gelu(self.fc1(self.final_layer_norm(x_BLD))))
        return changed_BLD


class TunedEsm2(nn.Module):
    """ESM-2, of which little is trained."""

    frequency_F: Tensor

    def __init__(self, sizes: TunedSizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(len(VOCABULARY), sizes.width)
        self.layers = nn.ModuleList(TunedLayer(sizes) for _ in range(sizes.layers))
        self.emb_layer_norm_after = nn.LayerNorm(sizes.width, eps=EPSILON)
        self.register_buffer("frequency_F", frequencies(sizes.width // sizes.heads))
        self.scale = 1 - MASKED_IN_TRAINING if sizes.token_dropout else 1.0
        self.requires_grad_(requires_grad=False)
        for name, parameter in self.named_parameters():
            parameter.requires_grad = name.endswith(LORA)
        if sizes.top_layers:
            for module in (*self.layers[-sizes.top_layers :], self.emb_layer_norm_after):
                module.requires_grad_(requires_grad=True)

    def forward(self, token_BL: Tensor) -> Tensor:
        """Return the features of every token, marks and padding included."""
        x_BLD = self.scale * self.embed_tokens(token_BL)
        angle_LF = torch.outer(torch.arange(token_BL.shape[1], device=x_BLD.device).float(), self.frequency_F.float())
        angle_LC = torch.cat([angle_LF, angle_LF], -1)
        turn_2LC = torch.stack([angle_LC.cos(), angle_LC.sin()])
        real_BL = None if len(token_BL) == 1 else token_BL != PAD
        for layer in self.layers:
            x_BLD = layer(x_BLD, turn_2LC, real_BL)
        features_BLD: Tensor = self.emb_layer_norm_after(x_BLD)
        return features_BLD


def turned(x_BHLC: Tensor, turn_2LC: Tensor) -> Tensor:
    """Return queries or keys rotated by their positions, in single precision where the rest is in half."""
    left, right = at_least_single(x_BHLC).chunk(2, -1)
    cosine_LC, sine_LC = turn_2LC
    turned_BHLC: Tensor = torch.cat([left, right], -1) * cosine_LC + torch.cat([-right, left], -1) * sine_LC
    return turned_BHLC.to(x_BHLC.dtype)


@dataclass(frozen=True)
class Esm2Names:
    """ESM-2 as it is published, of these sizes."""

    sizes: TunedSizes
    # theirs that are not needed: their heads, and positions of other models
    left: tuple[str, ...] = (
        "*lm_head.*",
        "*contact_head.*",
        "*pooler.*",
        "*position_ids",
        "*position_embeddings.weight",
    )
    fresh: tuple[str, ...] = ("head.*", OURS, *(f"*.{name}" for name in LORA))  # ours that may stay as they begin

    def knows(self, names: Collection[str]) -> bool:
        """Say whether tensors of these names are ESM-2's."""
        return OURS not in names and (FAIR.knows(names) or FACE.knows(names))

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return their tensors under our names; the frequencies are the same in all layers."""
        ours = (FAIR if FAIR.knows(tensors) else FACE).read(tensors)
        found = {f"{NAME}.{name}": tensor for name, tensor in ours.items() if not name.endswith(FREQUENCIES)}
        stored = f"layers.0.{FREQUENCIES}"
        return found | ({OURS: ours[stored].float()} if stored in ours else {})

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the encoder's tensors as Hugging Face names them, additions merged; the head is left behind."""
        encoder = {name.removeprefix(f"{NAME}."): tensor for name, tensor in tensors.items() if name.startswith(NAME)}
        frequency_F = encoder.pop("frequency_F")
        merged = {name: self._merged(name, encoder) for name in encoder if not name.endswith(LORA)}
        merged |= {f"layers.{layer}.{FREQUENCIES}": frequency_F for layer in range(self.sizes.layers)}
        return replace(FACE, prefix="").write(merged)

    def beside(self) -> dict[str, str]:
        """Return the files that belong to the weights."""
        sizes = self.sizes
        architecture = Architecture(sizes.layers, sizes.width, sizes.heads, sizes.token_dropout)
        return {CONFIG: json.dumps(face_config(architecture), indent=1) + "\n"}

    def _merged(self, name: str, encoder: Mapping[str, Tensor]) -> Tensor:
        down, up = (encoder.get(f"{name.removesuffix('.weight')}.{part}") for part in LORA)
        weight = encoder[name]
        if down is None or up is None or not name.endswith(".weight"):
            return weight
        return (weight.double() + self.sizes.scale * (up.double() @ down.double())).to(weight.dtype)
