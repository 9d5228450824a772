"""The network of the interface task: messages within each partner, then every pair of residues of the two.

It is told of distances and angles within a partner and nothing of how the two stand to each other, so that it gives the
same numbers however a partner is turned, moved or mirrored.

Shapes: N residues of all partners, P pairs, D features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn import functional

from pipeline.tasks.partners_model import Encoder

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.tasks.interface import Batch

USUAL_INTERFACE, USUAL_CONTACT = -1.5, -5.5  # logits of what is usual, to begin with: one in 6, one in 250


class Head(nn.Module):
    """Features to a logit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return a logit of each row."""
        logit_N: Tensor = self.outer(functional.silu(self.inner(x_ND))).squeeze(-1)
        return logit_N


class PairLayer(nn.Module):
    """What two residues have to do with each other, thought over once more."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x_PD: Tensor) -> Tensor:
        """Return the pairs' features, changed."""
        changed_PD: Tensor = x_PD + self.outer(functional.silu(self.inner(x_PD)))
        return changed_PD


class Network(Encoder):
    """Two partners' graphs to a logit for each residue and for each pair of residues between them."""

    def __init__(
        self, *, embedding_dim: int, width: int, layers: int, pair_width: int, pair_layers: int, dropout: float
    ) -> None:
        super().__init__(embedding_dim=embedding_dim, width=width, layers=layers, dropout=dropout)
        self.norm = nn.LayerNorm(width)
        self.residue = Head(width)
        self.receptor, self.ligand = nn.Linear(width, pair_width), nn.Linear(width, pair_width)
        self.pair_layers = nn.ModuleList(PairLayer(pair_width) for _ in range(pair_layers))
        self.pair = nn.Linear(pair_width, 1)
        nn.init.constant_(self.residue.outer.bias, USUAL_INTERFACE)
        nn.init.constant_(self.pair.bias, USUAL_CONTACT)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the logits of residues and of pairs."""
        x_ND = self.norm(self.encode(batch))
        receptor_PD = self.receptor(x_ND).index_select(0, batch.receptor_P)
        x_PD = receptor_PD * self.ligand(x_ND).index_select(0, batch.ligand_P)
        for layer in self.pair_layers:
            x_PD = layer(x_PD)
        return self.residue(x_ND), self.pair(x_PD).squeeze(-1)
