"""The names under which ESM-2 is published: read from fair-esm's and Hugging Face's files, and written for the latter.

What is written is an ordinary checkpoint: additions of low rank are in the weights, and `config.json` is beside them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.encoder.checkpoints.checkpoint_files import CONFIG
from pipeline.encoder.checkpoints.esm_checkpoint import Architecture, esm_name, face_config, face_name
from pipeline.tasks.sequences.tuned_esm2 import LORA, NAME, TunedSizes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

SIGN = "embed_tokens.weight"
FREQUENCIES = "self_attn.rot_emb.inv_freq"
OURS = f"{NAME}.frequency_F"


@dataclass(frozen=True)
class Esm2Names:
    """ESM-2 as it is published, of these sizes."""

    sizes: TunedSizes

    @property
    def left(self) -> tuple[str, ...]:
        """Theirs that are not needed: their heads, and positions of other models."""
        return ("*lm_head.*", "*contact_head.*", "*pooler.*", "*position_ids", "*position_embeddings.weight")

    @property
    def fresh(self) -> tuple[str, ...]:
        """Ours that may stay as they begin."""
        return ("head.*", OURS, *(f"*.{name}" for name in LORA))

    def knows(self, names: Collection[str]) -> bool:
        """Say whether tensors of these names are ESM-2's."""
        return OURS not in names and any(esm_name(name) == SIGN for name in names)

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return their tensors under our names; the frequencies are the same in all layers."""
        ours = {esm_name(name): tensor for name, tensor in tensors.items()}
        found = {f"{NAME}.{name}": tensor for name, tensor in ours.items() if not name.endswith(FREQUENCIES)}
        stored = f"layers.0.{FREQUENCIES}"
        return found | ({OURS: ours[stored].float()} if stored in ours else {})

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the encoder's tensors as Hugging Face names them, additions merged; the head is left behind."""
        encoder = {name.removeprefix(f"{NAME}."): tensor for name, tensor in tensors.items() if name.startswith(NAME)}
        frequency_F = encoder.pop("frequency_F")
        merged = {name: self._merged(name, encoder) for name in encoder if not name.endswith(LORA)}
        merged |= {f"layers.{layer}.{FREQUENCIES}": frequency_F for layer in range(self.sizes.layers)}
        return {face_name(name): tensor for name, tensor in merged.items()}

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
