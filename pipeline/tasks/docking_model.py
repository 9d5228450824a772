"""The network of the docking task: messages within each partner, then across all pairs, then a pull on the ligand.

It is told of distances and angles, so that features are the same however a complex is turned and moved as a whole. Each
pair of residues pulls the ligand's residue along the line between the two; the pulls on all of them make one shift and
one turn, which turn with the complex.

Shapes: N residues of all partners, P pairs of a receptor and a ligand residue, B items, S partners (two an item), D
features, C columns of what pairs add up to.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline.tasks.partners import CA
from pipeline.tasks.partners_model import Encoder, Geometry, direction, means

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pipeline.tasks.complex_docking import Batch

CA_ONLY = ((CA, CA),)  # whose distances are told of a pair: there are too many pairs for more
FARTHEST = 46.0  # Å; pairs further apart than this are told only which way they point
NOTHING = 1e-6  # added to weights, so that nothing is divided by 0


class Pairs(nn.Module):
    """Two residues, and how they stand to each other in the noised pose, to features of the pair."""

    def __init__(self, width: int, pair_width: int) -> None:
        super().__init__()
        self.geometry = Geometry(CA_ONLY, FARTHEST)
        self.of_receptor, self.of_ligand = nn.Linear(width, pair_width), nn.Linear(width, pair_width, bias=False)
        self.of_geometry = nn.Linear(self.geometry.width, pair_width, bias=False)
        self.inner = nn.Linear(pair_width, pair_width)

    def ends(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return what each residue brings to its pairs, as one of a receptor and as one of a ligand."""
        return self.of_receptor(x_ND), self.of_ligand(x_ND)

    def forward(
        self, receptor_ND: Tensor, ligand_ND: Tensor, pos_NA3: Tensor, receptor_P: Tensor, ligand_P: Tensor
    ) -> Tensor:
        """Return the features of pairs."""
        x_PD = self.of_geometry(self.geometry(pos_NA3, receptor_P, ligand_P))
        x_PD = x_PD + receptor_ND.index_select(0, receptor_P) + ligand_ND.index_select(0, ligand_P)
        changed_PD: Tensor = functional.silu(self.inner(functional.silu(x_PD)))
        return changed_PD


class CrossLayer(nn.Module):
    """What each residue hears from all residues of the other partner."""

    def __init__(self, width: int, pair_width: int, dropout: float, pairs_at_once: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.pairs, self.gate = Pairs(width, pair_width), nn.Linear(pair_width, 1)
        self.update = nn.Sequential(nn.Linear(width + pair_width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.dropout, self.pairs_at_once = dropout, pairs_at_once

    def forward(self, x_ND: Tensor, batch: Batch) -> Tensor:
        """Return the residues' features with what they heard."""
        normed_ND = self.norm(x_ND)
        ends = self.pairs.ends(normed_ND)

        def heard(receptor_P: Tensor, ligand_P: Tensor) -> Tensor:
            pair_PD = self.pairs(*ends, batch.pos_NA3, receptor_P, ligand_P)
            weight_P1 = torch.sigmoid(self.gate(pair_PD))
            said = (weight_P1 * pair_PD, weight_P1)  # apart: joined, they would be in memory twice
            return torch.cat([_at_both(one.to(x_ND.dtype), receptor_P, ligand_P, len(x_ND)) for one in said], -1)

        sums_NC = summed(heard, batch, self.pairs_at_once)
        heard_ND = sums_NC[:, :-1] / (sums_NC[:, -1:] + NOTHING)
        change_ND = self.update(torch.cat([normed_ND, heard_ND], -1))
        return x_ND + functional.dropout(change_ND, self.dropout, self.training)


class Pull(nn.Module):
    """The shift and the turn of the ligand that all pairs together ask for, in units of their own."""

    def __init__(self, width: int, pair_width: int, pairs_at_once: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.pairs, self.outer = Pairs(width, pair_width), nn.Linear(pair_width, 3)
        self.pairs_at_once = pairs_at_once

    def forward(self, x_ND: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the translation and the rotation vector about the ligand's centre [B, 3] each."""
        ends = self.pairs.ends(self.norm(x_ND))
        ca_N3 = batch.pos_NA3[:, CA]

        def pulled(receptor_P: Tensor, ligand_P: Tensor) -> Tensor:
            pair_PD = self.pairs(*ends, batch.pos_NA3, receptor_P, ligand_P)
            shift_P1, turn_P1, logit_P1 = self.outer(pair_PD).to(x_ND.dtype).unsqueeze(-1).unbind(1)
            weight_P1 = torch.sigmoid(logit_P1)
            way_P3 = direction(ca_N3.index_select(0, receptor_P) - ca_N3.index_select(0, ligand_P))
            said_PC = torch.cat([weight_P1 * shift_P1 * way_P3, weight_P1 * turn_P1 * way_P3, weight_P1], -1)
            return x_ND.new_zeros(len(x_ND), said_PC.shape[1]).index_add(0, ligand_P, said_PC)

        sums_NC = summed(pulled, batch, self.pairs_at_once)
        shift_N3, turn_N3, weight_N1 = torch.split_with_sizes(sums_NC, [3, 3, 1], -1)
        arm_N3 = arms(batch)
        long_S1 = means(arm_N3.square().sum(-1, keepdim=True), batch.partner_N, len(batch.other_S))
        arm_N3 = arm_N3 * (long_S1 + NOTHING).rsqrt().index_select(0, batch.partner_N)  # whatever the ligand's size
        torque_N3 = torch.linalg.cross(arm_N3, turn_N3)
        asked_NC = torch.cat([shift_N3, torque_N3, weight_N1], -1)
        asked_BC = asked_NC.new_zeros(len(batch.translation_B3), asked_NC.shape[1])
        asked_BC = asked_BC.index_add(0, batch.partner_N // 2, asked_NC)
        asked_B6 = asked_BC[:, :-1] / (asked_BC[:, -1:] + NOTHING)
        return asked_B6[:, :3], asked_B6[:, 3:]


class Network(Encoder):
    """Two partners in a noised pose to what brings the ligand back."""

    def __init__(
        self,
        *,
        embedding_dim: int,
        width: int,
        layers: int,
        cross_layers: int,
        pair_width: int,
        dropout: float,
        pairs_at_once: int,
    ) -> None:
        super().__init__(embedding_dim=embedding_dim, width=width, layers=layers, dropout=dropout)
        self.cross_layers = nn.ModuleList(
            CrossLayer(width, pair_width, dropout, pairs_at_once) for _ in range(cross_layers)
        )
        self.pull = Pull(width, pair_width, pairs_at_once)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the translation and the rotation vector of each ligand [B, 3], in units of the noise."""
        x_ND = self.encode(batch)
        for layer in self.cross_layers:
            x_ND = layer(x_ND, batch)
        translation_B3, rotation_B3 = self.pull(x_ND, batch)
        return translation_B3, rotation_B3


def summed(run: Callable[[Tensor, Tensor], Tensor], batch: Batch, pairs_at_once: int) -> Tensor:
    """Return a sum over all pairs; of so many at once, if that is asked for, nothing is kept for backward."""
    ends = batch.receptor_P, batch.ligand_P
    if not pairs_at_once:
        return run(*ends)
    pieces = (slice(first, first + pairs_at_once) for first in range(0, len(ends[0]), pairs_at_once))
    again = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    total: Tensor = reduce(torch.add, (again(*(of_P[piece] for of_P in ends)) for piece in pieces))
    return total


def _at_both(of_PD: Tensor, receptor_P: Tensor, ligand_P: Tensor, count: int) -> Tensor:
    """Return the sums of what pairs say, at both residues of each."""
    return of_PD.new_zeros(count, of_PD.shape[1]).index_add(0, receptor_P, of_PD).index_add(0, ligand_P, of_PD)


def arms(batch: Batch) -> Tensor:
    """Return where each residue is from the centre of its partner."""
    ca_N3 = batch.pos_NA3[:, CA]
    centre_S3 = means(ca_N3, batch.partner_N, len(batch.other_S))
    return ca_N3 - centre_S3.index_select(0, batch.partner_N)
