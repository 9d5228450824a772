"""Two partners: layers within each that both share, and layers across all pairs of their nodes.

Shapes: N nodes (R of the receptor, L of the ligand), E edges within a partner, X pairs across, B items, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.zoo.blocks import layers, summed
from tests.zoo.gnn import Passing
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import complexes

if TYPE_CHECKING:
    from pipeline.protocol import Sizes

DISTANCES = 16  # numbers that tell how far a pair is apart
PARTNERS = ("receptor", "ligand")


class Across(nn.Module):
    """Messages from every node of one partner to every node of the other, weighted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.gate = layers(2 * width + DISTANCES, width, width), nn.Linear(width, 1)
        self.norm = nn.LayerNorm(width)

    def forward(self, to_D: Tensor, from_D: Tensor, to_X: Tensor, from_X: Tensor, distance_X: Tensor) -> Tensor:
        message_XD = self.message(torch.cat([to_D[to_X], from_D[from_X], distance_X], -1))
        return self.norm(to_D + summed(torch.sigmoid(self.gate(message_XD)) * message_XD, to_X, len(to_D)))


class Docker(nn.Module):
    """How the ligand must move."""

    def __init__(self, features: int, width: int, depth: int) -> None:
        super().__init__()
        self.node, self.edge = nn.Linear(features, width), nn.Linear(DISTANCES, width)
        self.within = nn.ModuleList(Passing(width) for _ in range(depth))
        self.across = nn.ModuleList(Across(width) for _ in range(depth))
        self.out = layers(width, width, 6)

    def forward(self, batch: Any) -> Tensor:
        nodes = [self.node(batch[name]["nodes"]) for name in PARTNERS]
        edges = [self.edge(batch[name]["edges"]) for name in PARTNERS]
        receptor_X, ligand_X, distance_X = batch["receptor_X"], batch["ligand_X"], batch["distance_X"]
        for within, across in zip(self.within, self.across, strict=True):
            receptor, ligand = (
                within(node, edge, batch[name]["source"], batch[name]["target"])
                for name, node, edge in zip(PARTNERS, nodes, edges, strict=True)
            )
            nodes = [
                across(receptor, ligand, receptor_X, ligand_X, distance_X),
                across(ligand, receptor, ligand_X, receptor_X, distance_X),
            ]
        return summed(self.out(nodes[1]), batch["ligand"]["graph"], len(batch["y"]))


@dataclass(frozen=True)
class Docking(Synthetic):
    """A translation and a rotation of each complex."""

    features: int = 128  # 1280 of ESM-2 650M
    width: int = 48
    depth: int = 3

    def model(self) -> nn.Module:
        return Docker(self.features, self.width, self.depth)

    def example(self, sizes: Sizes) -> dict[str, Any]:
        """Return complexes both partners of which are as large."""
        batch: dict[str, Any] = partners(sizes, self.features, DISTANCES)
        return batch | {"distance_X": torch.randn(sizes["pairs"], DISTANCES), "y": torch.randn(sizes["items"], 6)}

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        error_B6 = (model(batch) - batch["y"]).square()
        weight = float(len(batch["y"]))
        return {"translation": (error_B6[:, :3].sum(), weight), "rotation": (error_B6[:, 3:].sum(), weight)}

    def weights(self, batch: Any) -> dict[str, float]:
        return dict.fromkeys(("translation", "rotation"), float(len(batch["y"])))


def partners(sizes: Sizes, node_features: int, edge_features: int) -> dict[str, Any]:
    """Return two partners' graphs, each half of all nodes and edges, and which nodes are paired."""
    nodes, edges, pairs, items = (sizes[name] for name in ("nodes", "edges", "pairs", "items"))
    counts = {"receptor": (nodes // 2, edges // 2), "ligand": (nodes - nodes // 2, edges - edges // 2)}
    batch: dict[str, Any] = {
        name: {
            "nodes": torch.randn(count, node_features),
            "edges": torch.randn(links, edge_features),
            "source": torch.randint(count, (links,)),
            "target": torch.randint(count, (links,)),
            "graph": torch.arange(count) * items // count,
        }
        for name, (count, links) in counts.items()
    }
    return batch | {f"{name}_X": torch.randint(counts[name][0], (pairs,)) for name in PARTNERS}


MEMBERS = (
    Member(
        name="docking",
        task=Docking,
        small={},
        sizes=(
            {"nodes": 100, "edges": 2000, "pairs": 2500, "items": 1},
            {"nodes": 300, "edges": 6000, "pairs": 9000, "items": 3},
            {"nodes": 800, "edges": 16000, "pairs": 32000, "items": 6},
        ),
        settings={"optimizer": "adam", "foreach": True},
        padded=False,
        items=complexes,
    ),
)
