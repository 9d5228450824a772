"""A fine-tune of ESM-2: fair-esm's own layers, all of them trained, with a head for each residue.

Shapes: B items, T tokens, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.blocks import present, token_loss
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import lengths

if TYPE_CHECKING:
    from pipeline.protocol import Sizes

FIRST, LETTERS, ENDS = 4, 20, 2  # fair-esm's alphabet: where the amino acids begin, how many; begin and end of sequence


class FineTuned(nn.Module):
    """Letters masked out, and a value for each residue."""

    def __init__(self, depth: int, width: int, heads: int, *, stock: bool) -> None:
        super().__init__()
        from esm.model.esm2 import ESM2

        self.stock = stock
        self.esm = ESM2(depth, width, heads)
        self.esm.contact_head.requires_grad_(False)  # takes no part
        self.site = nn.Linear(width, 1)

    def forward(self, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        if self.stock:
            last = self.esm.num_layers
            told = self.esm(tokens_BT, repr_layers=[last])
            return told["logits"], self.site(told["representations"][last]).squeeze(-1)
        x_BTD = self._encoded(tokens_BT)
        return self.esm.lm_head(x_BTD), self.site(x_BTD).squeeze(-1)

    def _encoded(self, tokens_BT: Tensor) -> Tensor:
        """Run the layers as `ESM2.forward` does, but without asking the data whether anything is padded."""
        absent_BT = tokens_BT.eq(self.esm.padding_idx)
        x_BTD = self.esm.embed_tokens(tokens_BT)
        x_BTD = x_BTD * (1 - 0.15 * 0.8) * (~absent_BT).unsqueeze(-1).to(x_BTD.dtype)
        x_TBD = x_BTD.transpose(0, 1)
        for layer in self.esm.layers:
            x_TBD, _ = layer(x_TBD, self_attn_padding_mask=absent_BT)
        return self.esm.emb_layer_norm_after(x_TBD).transpose(0, 1)


@dataclass(frozen=True)
class Esm2(Synthetic):
    """Masked letters and a value for each residue."""

    padded = True
    depth: int = 6  # 33 in the model of 650M parameters
    width: int = 160  # 1280
    heads: int = 10  # 20
    stock: bool = False  # fair-esm's `forward`, which branches on data: cannot be faked as it is

    def model(self) -> nn.Module:
        return FineTuned(self.depth, self.width, self.heads, stock=self.stock)

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        shape = sizes["items"], sizes["length"] + ENDS
        mask = present(*shape)
        labels = torch.randint(FIRST, FIRST + LETTERS, shape)
        return {"tokens": torch.where(mask, labels, 1), "labels": labels, "mask": mask, "values": torch.randn(*shape)}

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        logits, values = model(batch["tokens"])
        squares = functional.mse_loss(values, batch["values"], reduction="none") * batch["mask"]
        letters = token_loss(logits, batch["labels"], batch["mask"])
        return {"letters": letters, "values": (squares.sum(), batch["mask"].sum())}

    def weights(self, batch: Any) -> dict[str, Tensor]:
        return {"letters": batch["mask"].sum(), "values": batch["mask"].sum()}


MEMBERS = (
    Member(
        "esm2_finetune",
        Esm2,
        {},
        ({"length": 60, "items": 4}, {"length": 120, "items": 5}, {"length": 200, "items": 6}),
        {"optimizer": "adamw", "foreach": True, "clip": 1.0},
        padded=True,
        items=lengths,
    ),
)
