"""Items for docking: both partners by their CA atoms, and the true pose in the receptor's frame.

Shapes: N residues of a partner, R of the receptor, L of the ligand, M of them that are in the bound structure, C
neighbours of a residue, E embedding dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from pipeline.encoder.embedding_recipe import VOCABULARY
from pipeline.errors import ConfigError
from pipeline.graphs.residue_graph import LETTERS
from pipeline.protocol import ITEMS
from pipeline.tasks.docking.equivariant import ListedPairs, listed_pairs
from pipeline.tasks.docking.rigid_diffusion import superposed
from pipeline.tasks.docking.score_network import DockingPartner
from pipeline.tasks.partner_graphs import CA, embedding_of, partners_of

if TYPE_CHECKING:
    from torch import Tensor

    from pipeline.protocol import Sizes
    from pipeline.training.items.batch import ItemTensors, PartnerTensors

NEIGHBOURS = 20  # of a residue within its partner, by CA
FEWEST = 3  # residues that define a partner's orientation
HEARD = 40  # residues rarely count among the nearest of more than these
TOKENS = torch.tensor([VOCABULARY.index(letter) if letter != "X" else VOCABULARY.index("<unk>") for letter in LETTERS])


class PlacedPartners(NamedTuple):
    """The partners of an item, each about the centre of its CA atoms, and where the ligand is from the receptor."""

    receptor: DockingPartner
    ligand: DockingPartner
    true_L3: Tensor  # float64, like the next ones
    file_L3: Tensor  # as its file has it
    centre_3: Tensor  # of the receptor, in its file
    is_known: bool  # whether the true pose is


def placed_partners(item: ItemTensors, embedding_dim: int) -> PlacedPartners:
    """Return an item's partners; raise where it has one, or they are in no common frame."""
    receptor, ligand = partners_of(item)
    if ligand is None:
        problem = f"docking needs two partners, but {item.id} has one"
        raise ConfigError(problem, where="data", remedy="remove it, or assign chains with data.receptor_chains")
    receptor_R3, ligand_L3 = map(_in_file, (receptor, ligand))
    centre_3, true_L3 = receptor_R3.mean(0), ligand_L3
    if is_from_elsewhere := is_unbound(receptor, ligand):
        bound_R3, bound_L3 = bound_frame(receptor, ligand)
        true_L3 = superposed(bound_R3, receptor_R3, bound_L3)
    return PlacedPartners(
        docking_partner(receptor, embedding_dim),
        docking_partner(ligand, embedding_dim),
        true_L3=true_L3 - centre_3,
        file_L3=ligand_L3,
        centre_3=centre_3,
        # native contacts show that both are in one frame
        is_known=is_from_elsewhere or len(item.labels.get("contact_pairs", ())) > 0,
    )


def bound_frame(receptor: PartnerTensors, ligand: PartnerTensors) -> tuple[Tensor, Tensor]:
    """Return the CA atoms of the receptor [R, 3] and of the ligand [L, 3] at the true pose, in float64.

    Partners of a bound input are already in one frame, that of their file. Each unbound partner is superposed onto the
    bound structure by the residues that are in it, in the frame of `labels["bound_centre"]`.
    """
    sides = receptor, ligand
    receptor_R3, ligand_L3 = (_onto_bound(side) if is_unbound(*sides) else _in_file(side) for side in sides)
    return receptor_R3, ligand_L3


def is_unbound(*sides: PartnerTensors) -> bool:
    """Tell whether partners have places in a bound structure; batched with such items, bound ones have empty fields."""
    return any(bool(side.nodes["labelled"].any()) for side in sides if "labelled" in side.nodes)


def _in_file(side: PartnerTensors) -> Tensor:
    return side.nodes["pos"][:, CA].double() + side.centre.double()


def _onto_bound(side: PartnerTensors) -> Tensor:
    """Return a partner's CA atoms where its residues that are in the bound structure are nearest to their places."""
    known_N = side.nodes["labelled"]
    known = int(known_N.sum())
    if known < FEWEST:
        problem = f"only {known} residues of the {side.role} are in the bound structure; superposing needs {FEWEST}"
        raise ConfigError(problem, where="data", remedy="remove it, or   --set data.state=bound")
    pos_N3, bound_M3 = side.nodes["pos"][:, CA].double(), side.nodes["bound"][known_N].double()
    return superposed(pos_N3[known_N], bound_M3, pos_N3)


def docking_partner(side: PartnerTensors, embedding_dim: int) -> DockingPartner:
    """Return a partner as the network takes it, about the centre of its CA atoms."""
    pos_N3 = side.nodes["pos"][:, CA].float()
    pos_N3 = pos_N3 - pos_N3.mean(0)
    embedding_NE = embedding_of(side, embedding_dim).float() if embedding_dim else pos_N3.new_zeros(len(pos_N3), 0)
    token_N = TOKENS[side.nodes["type"].long()]
    return DockingPartner(pos_N3, token_N, embedding_NE, listed_pairs(nearest(pos_N3), pos_N3, HEARD))


def nearest(pos_N3: Tensor) -> Tensor:
    """Return the nearest residues of each [N, C], the nearest first; -1 where there are no more."""
    apart_NN = torch.cdist(pos_N3, pos_N3, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(torch.inf)
    count = min(NEIGHBOURS, len(pos_N3) - 1)
    found_NC = apart_NN.topk(count, largest=False).indices if count else torch.zeros(len(pos_N3), 0, dtype=torch.long)
    return functional.pad(found_NC, (0, NEIGHBOURS - count), value=-1)


def example_partner(count: int, embedding_dim: int) -> DockingPartner:
    """Return a partner with a number of residues, with random values."""
    around_NC = (torch.arange(count).unsqueeze(1) + torch.arange(1, NEIGHBOURS + 1)) % count
    pairs = ListedPairs(
        column_RC=around_NC,
        real_PRC=torch.ones(1, count, NEIGHBOURS),
        there_NK=torch.zeros(count, HEARD, dtype=torch.long),
        back_RC=torch.zeros_like(around_NC),
        real_NK=torch.ones(count, HEARD),
    )
    token_N, pos_N3 = torch.zeros(count, dtype=torch.long), 10 * torch.randn(count, 3)
    return DockingPartner(pos_N3, token_N, torch.randn(count, embedding_dim), pairs)


def example_counts(sizes: Sizes) -> list[tuple[int, int]]:
    """Return the residues of receptor and ligand of each item of a batch of these sizes, or a little more."""
    count = sizes[ITEMS]
    nodes, pairs = (max(1, -(-sizes[name] // count)) for name in ("nodes", "pairs"))
    # two numbers with this sum and this product, as nearly as whole ones can be
    ligand = max(1, round((nodes - max(0, nodes * nodes - 4 * pairs) ** 0.5) / 2))
    return [(max(-(-pairs // ligand), nodes - ligand, 1), ligand)] * count
