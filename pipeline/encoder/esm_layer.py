"""The layers of the ESM families, and their parameters as a computation wants them.

Shapes: M rows of a tile, D width, H heads, X three times the width, V tokens, P positions, O outputs, I inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import layer_norm

from pipeline.encoder.checkpoint_files import ESMC
from pipeline.encoder.embedding_recipe import PAD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.encoder.esm_checkpoint import EsmCheckpoint
    from pipeline.encoder.linear import Parameters, TorchLinear

MASKED_IN_TRAINING = 0.15 * 0.8  # of the tokens; fair-esm scales embeddings by what was left
EPSILON = 1e-5
_PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2")
_ESMC_PARTS = ("self_attn.qkv_proj", "self_attn.out_proj", "fc1", "fc2")
_ESMC_UNSCALED = 36  # layers of the model whose layers' results are added as they are


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """A layer norm; its sums are in fp32 whatever the precision."""

    weight_D: torch.Tensor
    bias_D: torch.Tensor | None

    def __call__(self, x_MD: torch.Tensor) -> torch.Tensor:
        return layer_norm(x_MD, self.weight_D.shape, self.weight_D, self.bias_D, EPSILON)


@dataclass(frozen=True, slots=True, eq=False)
class EsmLayer:
    """One transformer layer."""

    before_attention: LayerNorm
    qkv: TorchLinear
    attended: TorchLinear
    before_wide: LayerNorm
    widen: TorchLinear
    narrow: TorchLinear
    of_queries_and_keys: tuple[LayerNorm, ...] = ()
    is_gated: bool = False

    def finish(self, x_MD: torch.Tensor, context_MD: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer from its input and the attention's result."""
        x_MD = self.attended.add(context_MD, x_MD)
        y_MD = self.before_wide(x_MD)
        return self.narrow.add(self.widen.gated(y_MD) if self.is_gated else self.widen.gelu(y_MD), x_MD)

    def project(self, x_MD: torch.Tensor, heads: int) -> torch.Tensor:
        """Return queries, keys and values."""
        qkv_MX: torch.Tensor = self.qkv(self.before_attention(x_MD))
        if self.of_queries_and_keys:
            qkv_MX = qkv_MX.to(x_MD.dtype)
            for part_MD, norm in zip(qkv_MX.chunk(3, 1), self.of_queries_and_keys, strict=False):
                part_MD.copy_(norm(part_MD))
        return qkv_MX.view(len(x_MD), 3, heads, -1)


def pairs_together(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the outputs of a projection within each head, so that columns c and c + C/2 become neighbours.

    Scores do not change when queries and keys are reordered alike.
    """
    return weight.view(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


class ParameterReader:
    """Takes parameters out of a checkpoint into the memory and the precision of the computation."""

    def __init__(self, checkpoint: EsmCheckpoint, device: torch.device, dtype: torch.dtype) -> None:
        self._tensors: Mapping[str, torch.Tensor] = checkpoint.tensors
        self._shape = checkpoint.architecture
        self._device = device
        self._dtype = dtype

    def table(self, *, token_dropout: bool) -> torch.Tensor:
        """Return the embedding table, scaled as every sequence without masks is."""
        scale = 1 - MASKED_IN_TRAINING if token_dropout else 1.0
        return (self._tensors["embed_tokens.weight"].float() * scale).to(self._device, self._dtype)

    def positions(self) -> torch.Tensor:
        """Return the learned positions, the first of which is that of the first token."""
        return self._take("embed_positions.weight")[PAD + 1 :]

    def norm(self, name: str) -> LayerNorm:
        bias = f"{name}.bias"
        return LayerNorm(self._take(f"{name}.weight"), self._take(bias) if bias in self._tensors else None)

    def layer(self, number: int, kind: type[TorchLinear]) -> EsmLayer:
        norms = (self.norm(f"layers.{number}.{name}") for name in ("self_attn_layer_norm", "final_layer_norm"))
        before_attention, before_wide = norms
        qkv, attended, widen, narrow = (kind(weight_OI, bias_O) for weight_OI, bias_O in self.pairs(number))
        if self._shape.family != ESMC:
            return EsmLayer(before_attention, qkv, attended, before_wide, widen, narrow)
        names = (f"layers.{number}.self_attn.{part}_layer_norm.weight" for part in "qk")
        of_queries_and_keys = (LayerNorm(self._in_pairs(self._take(name)), None) for name in names)
        return EsmLayer(
            before_attention, qkv, attended, before_wide, widen, narrow, tuple(of_queries_and_keys), is_gated=True
        )

    def pairs(self, number: int) -> list[Parameters]:
        """Return weight and bias of a layer's linears: queries, keys and values joined, attention output, fc1, fc2."""
        if self._shape.family == ESMC:
            return self._esmc_pairs(number)
        parts = {part: [self._take(f"layers.{number}.{part}.{kind}") for kind in ("weight", "bias")] for part in _PARTS}
        for part in _PARTS[:2]:
            parts[part] = [self._in_pairs(tensor) for tensor in parts[part]]
        joined = [torch.cat(tensors) for tensors in zip(*(parts[part] for part in _PARTS[:3]), strict=True)]
        return [(weight_OI, bias_O) for weight_OI, bias_O in (joined, *(parts[part] for part in _PARTS[3:]))]

    def _esmc_pairs(self, number: int) -> list[Parameters]:
        """Return the same of ESM C, which has no biases; what its layers add is divided by a number of their count."""
        qkv, out, widen, narrow = (self._tensors[f"layers.{number}.{part}.weight"] for part in _ESMC_PARTS)
        query, key, value = qkv.chunk(3)
        divided = (weight.float() / math.sqrt(self._shape.layers / _ESMC_UNSCALED) for weight in (out, narrow))
        joined = torch.cat([self._in_pairs(query), self._in_pairs(key), value])
        out, narrow = divided
        return [(weight.to(self._device, self._dtype, copy=True), None) for weight in (joined, out, widen, narrow)]

    def _in_pairs(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a parameter of queries or keys as `turn` wants it; without rotary positions, as it is."""
        return weight if self._shape.positions else pairs_together(weight, self._shape.heads)

    def _take(self, name: str) -> torch.Tensor:
        """Return a parameter, copied: the file it is mapped from may change."""
        return self._tensors[name].to(self._device, self._dtype, copy=True)
