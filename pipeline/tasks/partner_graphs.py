"""Graph network over each partner of a complex: messages along its edges, plus the mean features of the other partner.

Shapes: N residues of all partners, E edges, S partners (two an item), A pairs of atoms of two residues, K radial basis
centres, D features.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from pipeline.command_line import Command
from pipeline.errors import ConfigError
from pipeline.graphs.residue_graph import LETTERS, UNSURE
from pipeline.protocol import ITEMS
from pipeline.tasks.task_parts import WHERE, means, refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pipeline.protocol import Sizes
    from pipeline.training.items.batch import ItemTensors, PartnerTensors

FLAGS = int(UNSURE).bit_length()  # bits of a node's flags
APART = 8  # largest distinct offset along the chain; farther ones count as this
STEPS = 2 * APART + 2  # offsets from -APART to APART, and another chain
CENTRES = 12  # of the radial basis for distances, in Å
CLOSEST, FARTHEST = 2.0, 24.0
ATOMS = ((1, 1), (3, 3), (4, 4), (1, 4), (4, 1), (0, 2))  # whose distances: of N, CA, C, CB and the side chain's middle
ANGLES = 3
NEAREST = 1e-6  # Å², so that nothing is divided by 0


class PartnerBatch(NamedTuple):
    """The partners of some items, concatenated: a receptor, its ligand, the next receptor and so on."""

    pos_NA3: Tensor
    type_N: Tensor
    flags_NF: Tensor
    embedding_ND: Tensor
    partner_N: Tensor  # whose it is: 2 b for the receptor of item b, 2 b + 1 for its ligand
    other_S: Tensor  # whose partner each is
    from_E: Tensor
    to_E: Tensor
    step_E: Tensor  # how far apart along the chain
    receptor_P: Tensor
    ligand_P: Tensor
    sizes: tuple[tuple[int, int], ...]  # residues of each item's receptor and ligand


class PartnerGeometry(nn.Module):
    """Edge features from positions, unchanged when all of these are moved together."""

    centres_K: Tensor
    sender_A: Tensor
    receiver_A: Tensor

    def __init__(self, atoms: tuple[tuple[int, int], ...] = ATOMS, farthest: float = FARTHEST) -> None:
        super().__init__()
        self.register_buffer("centres_K", torch.linspace(CLOSEST, farthest, CENTRES), persistent=False)
        for name, places in zip(("sender_A", "receiver_A"), zip(*atoms, strict=True), strict=True):
            self.register_buffer(name, torch.tensor(places), persistent=False)
        self.gap = (farthest - CLOSEST) / (CENTRES - 1)
        self.width = CENTRES * len(atoms) + ANGLES

    def forward(self, pos_NA3: Tensor, from_E: Tensor, to_E: Tensor) -> Tensor:
        """Return for each edge radial basis features of atom distances, and cosines of the side chains' directions."""
        from_EA3, to_EA3 = pos_NA3.index_select(0, from_E), pos_NA3.index_select(0, to_E)
        apart_EA3 = from_EA3.index_select(1, self.sender_A) - to_EA3.index_select(1, self.receiver_A)
        apart_EA = apart_EA3.square().sum(-1).sqrt()
        near_EAK = (-((apart_EA.unsqueeze(-1) - self.centres_K) / self.gap).square()).exp()
        across_E3 = direction(from_EA3[:, 1] - to_EA3[:, 1])
        side_E3, other_E3 = (direction(pos_EA3[:, 4] - pos_EA3[:, 1]) for pos_EA3 in (to_EA3, from_EA3))
        pairs = ((side_E3, across_E3), (other_E3, across_E3), (side_E3, other_E3))
        angles_E3 = torch.stack([(left_E3 * right_E3).sum(-1) for left_E3, right_E3 in pairs], -1)
        return torch.cat([near_EAK.flatten(1), angles_E3], -1)


class EmbeddingFeatures(nn.Module):
    """Projects embeddings, normalized first, to features."""

    def __init__(self, embedding_dim: int, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(embedding_dim), nn.Linear(embedding_dim, width)

    def forward(self, embedding_ND: Tensor) -> Tensor:
        features_ND: Tensor = self.linear(self.norm(embedding_ND))
        return features_ND


class PartnerLayer(nn.Module):
    """A layer of messages along edges, and of the other partner's mean."""

    def __init__(self, width: int, edge_width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.of_sender, self.of_receiver = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.of_edge, self.of_step = nn.Linear(edge_width, width, bias=False), nn.Embedding(STEPS, width)
        self.message = nn.Linear(width, width)
        self.of_other = nn.Linear(width, width)
        self.update = nn.Sequential(nn.Linear(3 * width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.dropout = dropout

    def forward(self, x_ND: Tensor, edge_ED: Tensor, batch: PartnerBatch) -> Tensor:
        normed_ND = self.norm(x_ND)
        sent_ED = self.of_sender(normed_ND).index_select(0, batch.from_E)
        sent_ED = sent_ED + self.of_receiver(normed_ND).index_select(0, batch.to_E)
        sent_ED = functional.silu(sent_ED + self.of_edge(edge_ED) + self.of_step(batch.step_E))
        heard_ND = means(self.message(sent_ED).to(x_ND.dtype), batch.to_E, len(x_ND))  # half precision sums badly
        partner_SD = means(normed_ND.to(x_ND.dtype), batch.partner_N, len(batch.other_S))
        other_ND = self.of_other(partner_SD.index_select(0, batch.other_S)).index_select(0, batch.partner_N)
        change_ND = self.update(torch.cat([normed_ND, heard_ND, other_ND], -1))
        return x_ND + functional.dropout(change_ND, self.dropout, self.training)


class PartnerEncoder(nn.Module):
    """Residue features by layers that both partners share."""

    def __init__(self, embedding_dim: int, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.geometry = PartnerGeometry()
        self.of_type, self.of_role = nn.Embedding(len(LETTERS), width), nn.Embedding(2, width)
        self.of_flags = nn.Linear(FLAGS, width, bias=False)
        self.of_embedding = EmbeddingFeatures(embedding_dim, width) if embedding_dim else None
        self.layers = nn.ModuleList(PartnerLayer(width, self.geometry.width, dropout) for _ in range(layers))

    def encode(self, batch: PartnerBatch) -> Tensor:
        """Return the features of all residues."""
        x_ND: Tensor = self.of_type(batch.type_N) + self.of_role(batch.partner_N % 2) + self.of_flags(batch.flags_NF)
        if self.of_embedding is not None:
            x_ND = x_ND + self.of_embedding(batch.embedding_ND)
        edge_ED = self.geometry(batch.pos_NA3, batch.from_E, batch.to_E)
        for layer in self.layers:
            x_ND = layer(x_ND, edge_ED, batch)
        return x_ND


def direction(way_E3: Tensor) -> Tensor:
    """Normalize vectors to length 1; those of length 0 stay so."""
    return way_E3 * (way_E3.square().sum(-1, keepdim=True) + NEAREST).rsqrt()


NEAR, CA = "near", 1
PLACES = 5  # N, CA, C, CB and the middle of the side chain represent a residue
OTHER_CHAIN = STEPS - 1
CHAIN_LENGTH = 1 << 32  # rows are fewer than half of that


def joined_partners(sides: Sequence[tuple[PartnerTensors, PartnerTensors | None]], embedding_dim: int) -> PartnerBatch:
    """Concatenate the partners of items."""
    flat = [side for pair in sides for side in pair if side is not None]
    sizes = tuple((size_of(receptor), size_of(ligand)) for receptor, ligand in sides)
    counts = [count for pair in sizes for count in pair]
    first_S = [*accumulate(counts, initial=0)]
    owner = [place for place, count in enumerate(counts) if count]
    edges = [side.edges[NEAR] + first_S[at] for side, at in zip(flat, owner, strict=True)]
    from_E, to_E = (torch.cat(ends) for ends in zip(*edges, strict=True))  # no views of one: each compiles alone
    receptor_P, ligand_P = _pairs(sizes, first_S)
    flags_N1 = torch.cat([side.nodes["flags"] for side in flat]).unsqueeze(-1)
    return PartnerBatch(
        pos_NA3=torch.cat([_positions(side) for side in flat]),
        type_N=torch.cat([side.nodes["type"] for side in flat]).long(),
        flags_NF=(flags_N1.bitwise_right_shift(torch.arange(FLAGS, dtype=flags_N1.dtype)) & 1).float(),
        embedding_ND=_embeddings(flat, embedding_dim),
        partner_N=torch.cat([torch.full((size_of(side),), at) for side, at in zip(flat, owner, strict=True)]),
        other_S=torch.arange(2 * len(sides)) ^ 1,
        from_E=from_E,
        to_E=to_E,
        step_E=_steps(flat, from_E, to_E),
        receptor_P=receptor_P,
        ligand_P=ligand_P,
        sizes=sizes,
    )


def example_partners(sizes: Sizes, embedding_dim: int) -> PartnerBatch:
    """Return random partners of these sizes; how they are spread over the items makes no difference."""
    nodes, edges, pairs, items = (sizes[name] for name in ("nodes", "edges", "pairs", ITEMS))
    return PartnerBatch(
        pos_NA3=10 * torch.randn(nodes, PLACES, 3),
        type_N=torch.zeros(nodes, dtype=torch.long),
        flags_NF=torch.zeros(nodes, FLAGS),
        embedding_ND=torch.randn(nodes, embedding_dim),
        partner_N=torch.arange(nodes) * 2 * items // max(nodes, 1),
        other_S=torch.arange(2 * items) ^ 1,
        from_E=torch.randint(nodes, (edges,)),
        to_E=torch.randint(nodes, (edges,)),
        step_E=torch.randint(STEPS, (edges,)),
        receptor_P=torch.randint(nodes, (pairs,)),
        ligand_P=torch.randint(nodes, (pairs,)),
        sizes=tuple(zip(*[iter(even_shares(nodes, 2 * items))] * 2, strict=True)),
    )


def partners_of(item: ItemTensors) -> tuple[PartnerTensors, PartnerTensors | None]:
    """Return the receptor, or a single partner, and the ligand, if any."""
    receptor, *ligands = item.sides.values()
    if receptor.residues or NEAR not in receptor.edges:
        problem = f"the task reads residue graphs; the nodes of {item.id} are atoms"
        raise ConfigError(problem, where="graph.nodes", remedy="--set graph.nodes=residue")
    return receptor, ligands[0] if ligands else None


def size_of(side: PartnerTensors | None) -> int:
    """Count the residues of a partner, or of none."""
    return len(side.nodes["pos"]) if side is not None else 0


def even_shares(total: int, count: int) -> list[int]:
    """Split a total into `count` nearly equal integers."""
    return [total * (place + 1) // count - total * place // count for place in range(count)]


def _embeddings(sides: Sequence[PartnerTensors], embedding_dim: int) -> Tensor:
    """Return the embeddings of all partners as single precision; they are written once."""
    joined_ND = torch.empty(sum(map(size_of, sides)), embedding_dim)
    for rows_ND, side in zip(joined_ND.split_with_sizes(list(map(size_of, sides))), sides, strict=True):
        if embedding_dim:
            rows_ND.copy_(embedding_of(side, embedding_dim))
    return joined_ND


def embedding_of(side: PartnerTensors, embedding_dim: int) -> Tensor:
    """Return a partner's embeddings; the configuration must fit them."""
    if side.embedding is None:
        problem = f"the task expects embeddings of {embedding_dim} numbers, but the data set has no embeddings"
        embed = Command.submit("embed", then="   (or --set train.options.embedding_dim=0)")
        raise ConfigError(problem, where=f"{WHERE}.embedding_dim", remedy=embed)
    if (width := side.embedding.shape[1]) != embedding_dim:
        problem = f"the task expects embeddings of {embedding_dim} numbers, but the data set's have {width}"
        refuse("embedding_dim", problem, f"--set {WHERE}.embedding_dim={width}")
    return side.embedding


def _positions(side: PartnerTensors) -> Tensor:
    """Return the atoms that represent each residue [N, 5, 3]; CA replaces a missing one."""
    pos_N43 = side.nodes["pos"]
    ca_N13 = pos_N43[:, CA : CA + 1]
    pos_N53 = torch.cat([pos_N43, ca_N13 + side.nodes["side"].unsqueeze(1)], 1)
    return torch.where(pos_N53.isnan(), ca_N13, pos_N53)


def _steps(sides: Sequence[PartnerTensors], from_E: Tensor, to_E: Tensor) -> Tensor:
    """Return the clamped offset along the chain between the ends of each edge, as an index; OTHER_CHAIN for two."""
    row_N, chain_N = (torch.cat([side.nodes[name] for side in sides]).long() for name in ("row", "chain"))
    alone_N = -torch.arange(2, 2 + len(row_N))  # residues that are in no row are in no chain either
    place_N = torch.where(row_N < 0, CHAIN_LENGTH * alone_N, CHAIN_LENGTH * chain_N + row_N)
    apart_E = place_N.index_select(0, from_E) - place_N.index_select(0, to_E)
    return torch.where(apart_E.abs() < CHAIN_LENGTH // 2, apart_E.clamp(-APART, APART) + APART, OTHER_CHAIN)


def _pairs(sizes: Sequence[tuple[int, int]], first_S: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the receptor's and the ligand's residue of every pair, item by item."""
    counts = [receptor * ligand for receptor, ligand in sizes]
    receptor_P, ligand_P = (torch.empty(sum(counts), dtype=torch.long) for _ in range(2))
    pieces = zip(sizes, receptor_P.split_with_sizes(counts), ligand_P.split_with_sizes(counts), strict=True)
    for item, ((receptor, ligand), of_receptor_P, of_ligand_P) in enumerate(pieces):
        of_receptor_P.view(receptor, ligand).copy_(torch.arange(receptor).unsqueeze(1) + first_S[2 * item])
        of_ligand_P.view(receptor, ligand).copy_(torch.arange(ligand) + first_S[2 * item + 1])
    return receptor_P, ligand_P
