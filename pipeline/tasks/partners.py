"""Two partners' residue graphs as the tasks take them: the residues of all items in one table, every pair in another.

A batch of such a task is a NamedTuple that begins with the columns made here:

    pos_NA3       the atoms that stand for each residue
    type_N, flags_NF, embedding_ND
    partner_N     whose it is: 2 b for the receptor of item b, 2 b + 1 for its ligand
    other_S       whose partner each is
    from_E, to_E  edges within the partners
    step_E        how far apart along the chain
    receptor_P, ligand_P
    sizes         residues of each item's receptor and ligand

Shapes: N residues of all partners, E edges, P pairs of a receptor and a ligand residue, S partners (two an item), A
atoms that stand for a residue, F flags, D numbers of an embedded residue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import ConfigError
from pipeline.protocol import ITEMS
from pipeline.tasks.options import WHERE
from pipeline.tasks.partners_model import APART, FLAGS, STEPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from pipeline.protocol import Sizes
    from pipeline.training.batch import Graph, Side

NEAR, CA = "near", 1
PLACES = 5  # N, CA, C, CB and the middle of the side chain stand for a residue
OTHER_CHAIN = STEPS - 1


def columns(sides: Sequence[tuple[Side, Side | None]], embedding_dim: int) -> dict[str, Any]:
    """Concatenate the partners of items: a receptor, its ligand, the next receptor and so on."""
    flat = [side for pair in sides for side in pair if side is not None]
    sizes = tuple((size_of(receptor), size_of(ligand)) for receptor, ligand in sides)
    first_S = _firsts([count for pair in sizes for count in pair])
    owner = [place for place, count in enumerate(count for pair in sizes for count in pair) if count]
    from_E, to_E = _edges(flat, [first_S[at] for at in owner])
    receptor_P, ligand_P = _pairs(sizes, first_S)
    return {
        "pos_NA3": torch.cat([_positions(side) for side in flat]),
        "type_N": torch.cat([side.nodes["type"] for side in flat]).long(),
        "flags_NF": _bits(torch.cat([side.nodes["flags"] for side in flat])),
        "embedding_ND": torch.cat([_embedding(side, embedding_dim) for side in flat]),
        "partner_N": torch.cat([torch.full((size_of(side),), at) for side, at in zip(flat, owner, strict=True)]),
        "other_S": torch.arange(2 * len(sides)) ^ 1,
        "from_E": from_E,
        "to_E": to_E,
        "step_E": torch.cat([_steps(side) for side in flat]),
        "receptor_P": receptor_P,
        "ligand_P": ligand_P,
        "sizes": sizes,
    }


def made_up(sizes: Sizes, embedding_dim: int) -> dict[str, Any]:
    """Return columns of these sizes; how they are spread over the items makes no difference."""
    nodes, edges, pairs, items = (sizes[name] for name in ("nodes", "edges", "pairs", ITEMS))
    return {
        "pos_NA3": 10 * torch.randn(nodes, PLACES, 3),
        "type_N": torch.zeros(nodes, dtype=torch.long),
        "flags_NF": torch.zeros(nodes, FLAGS),
        "embedding_ND": torch.randn(nodes, embedding_dim),
        "partner_N": torch.arange(nodes) * 2 * items // max(nodes, 1),
        "other_S": torch.arange(2 * items) ^ 1,
        "from_E": torch.randint(nodes, (edges,)),
        "to_E": torch.randint(nodes, (edges,)),
        "step_E": torch.randint(STEPS, (edges,)),
        "receptor_P": torch.randint(nodes, (pairs,)),
        "ligand_P": torch.randint(nodes, (pairs,)),
        "sizes": tuple(zip(*[iter(shares(nodes, 2 * items))] * 2, strict=True)),
    }


def partners_of(item: Graph) -> tuple[Side, Side | None]:
    """Return the receptor, or whatever stands alone, and the ligand."""
    first, *rest = item.sides.values()
    if first.residues or NEAR not in first.edges:
        what = f"the task reads residue graphs; the nodes of {item.id} are atoms"
        raise ConfigError(what, where="graph.nodes", remedy="--set graph.nodes=residue")
    return first, rest[0] if rest else None


def size_of(side: Side | None) -> int:
    """Count the residues of a partner, or of none."""
    return len(side.nodes["pos"]) if side is not None else 0


def shares(total: int, count: int) -> list[int]:
    """Return so many numbers of about a size that make a sum."""
    return [total * (place + 1) // count - total * place // count for place in range(count)]


def _embedding(side: Side, embedding_dim: int) -> Tensor:
    """Return a partner's embeddings; the configuration must fit them."""
    if not embedding_dim:
        return torch.zeros(size_of(side), 0)
    if side.embedding is None:
        what = f"the task expects embeddings of {embedding_dim} numbers, and the data set has none"
        remedy = "pipeline submit --stage embed, or --set train.options.embedding_dim=0"
        raise ConfigError(what, where=f"{WHERE}.embedding_dim", remedy=remedy)
    if (found := side.embedding.shape[1]) != embedding_dim:
        what = f"the task expects embeddings of {embedding_dim} numbers, those of the data set have {found}"
        remedy = f"--set train.options.embedding_dim={found}"
        raise ConfigError(what, where=f"{WHERE}.embedding_dim", remedy=remedy)
    return side.embedding.float()


def _firsts(counts: Sequence[int]) -> list[int]:
    """Return where the rows of each partner begin."""
    firsts = [0]
    for count in counts:
        firsts.append(firsts[-1] + count)
    return firsts[:-1]


def _positions(side: Side) -> Tensor:
    """Return the atoms that stand for each residue [N, 5, 3]; where one is missing, CA stands for it."""
    pos_N43 = side.nodes["pos"]
    ca_N13 = pos_N43[:, CA : CA + 1]
    pos_N53 = torch.cat([pos_N43, ca_N13 + side.nodes["side"].unsqueeze(1)], 1)
    return torch.where(pos_N53.isnan(), ca_N13, pos_N53)


def _bits(flags_N: Tensor) -> Tensor:
    """Return flags as numbers [N, F]."""
    bits_NF = flags_N.unsqueeze(-1).bitwise_right_shift(torch.arange(FLAGS, dtype=flags_N.dtype)) & 1
    return bits_NF.float()


def _edges(sides: Sequence[Side], firsts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return where the edges of all partners come from and where they go."""
    edges = [side.edges[NEAR] + first for side, first in zip(sides, firsts, strict=True)]
    return torch.cat([one[0] for one in edges]), torch.cat([one[1] for one in edges])


def _steps(side: Side) -> Tensor:
    """Return how far the ends of each edge are apart along the chain, up to a number, or that they are of two."""
    (from_E, to_E), row_N, chain_N = side.edges[NEAR], side.nodes["row"].long(), side.nodes["chain"]
    steps_E = (row_N[from_E] - row_N[to_E]).clamp(-APART, APART) + APART
    is_one_chain_E = (chain_N[from_E] == chain_N[to_E]) & (row_N[from_E] >= 0) & (row_N[to_E] >= 0)
    return torch.where(is_one_chain_E, steps_E, OTHER_CHAIN)


def _pairs(sizes: Sequence[tuple[int, int]], first_S: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the receptor's and the ligand's residue of every pair, item by item."""
    receptors, ligands = [], []
    for item, (receptor, ligand) in enumerate(sizes):
        receptors.append((torch.arange(receptor) + first_S[2 * item]).repeat_interleave(ligand))
        ligands.append((torch.arange(ligand) + first_S[2 * item + 1]).repeat(receptor))
    return torch.cat(receptors), torch.cat(ligands)
