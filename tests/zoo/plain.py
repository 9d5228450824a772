"""A perceptron, and message passing over concatenated graphs, once with edges picked from the data.

Shapes: N nodes, E edges, B items, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.zoo.blocks import layers
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import graphs, lengths

if TYPE_CHECKING:
    from pipeline.protocol import Sizes

FEATURES = 32  # of a node and of an edge, as they come


class Passing(nn.Module):
    """Messages along edges, summed where they arrive."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message, self.update = layers(3 * width, width, width), layers(2 * width, width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, node_ND: Tensor, edge_ED: Tensor, source_E: Tensor, target_E: Tensor) -> Tensor:
        message_ED = self.message(torch.cat([node_ND[source_E], node_ND[target_E], edge_ED], -1))
        arrived_ND = torch.zeros_like(node_ND).index_add(0, target_E, message_ED.to(node_ND.dtype))
        return self.norm(node_ND + self.update(torch.cat([node_ND, arrived_ND], -1)))


class Network(nn.Module):
    """A value for each graph."""

    def __init__(self, width: int, depth: int, *, picky: bool) -> None:
        super().__init__()
        self.picky = picky
        self.node, self.edge = nn.Linear(FEATURES, width), nn.Linear(FEATURES, width)
        self.passing = nn.ModuleList(Passing(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, batch: Any) -> Tensor:
        node_ND, edge_ED = self.node(batch["nodes"]), self.edge(batch["edges"])
        source_E, target_E = batch["source"], batch["target"]
        for passing in self.passing:
            if self.picky:
                node_ND = passing(node_ND, *_strongest(edge_ED, source_E, target_E))
            else:
                node_ND = passing(node_ND, edge_ED, source_E, target_E)
        value_N = self.out(node_ND).squeeze(-1).to(batch["y"].dtype)
        return torch.zeros_like(batch["y"]).index_add(0, batch["graph"], value_N)


def _strongest(edge_ED: Tensor, source_E: Tensor, target_E: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the half of the edges above the median: how many they are, only the data know."""
    strength_E = edge_ED.detach().mean(-1)
    kept = torch.nonzero(strength_E > strength_E.median()).squeeze(-1)
    return edge_ED[kept], source_E[kept], target_E[kept]


@dataclass(frozen=True)
class Graphs(Synthetic):
    """Regression of each graph."""

    width: int = 64
    depth: int = 3
    picky: bool = False  # chooses edges by their values: shapes depend on data

    def model(self) -> nn.Module:
        return Network(self.width, self.depth, picky=self.picky)

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        nodes, edges, items = sizes["nodes"], sizes["edges"], sizes["items"]
        return {
            "nodes": torch.randn(nodes, FEATURES),
            "edges": torch.randn(edges, FEATURES),
            "source": torch.randint(nodes, (edges,)),
            "target": torch.randint(nodes, (edges,)),
            "graph": torch.arange(nodes) * items // nodes,
            "y": torch.randn(items),
        }

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        return {"squares": ((model(batch) - batch["y"]).square().sum(), float(len(batch["y"])))}


@dataclass(frozen=True)
class Perceptron(Synthetic):
    """Regression of each row."""

    inputs: int = 64
    width: int = 256
    depth: int = 6

    def model(self) -> nn.Module:
        return layers(self.inputs, *[self.width] * self.depth, 1, activation=nn.GELU)

    def example(self, sizes: Sizes) -> dict[str, Tensor]:
        return {"x": torch.randn(sizes["rows"], self.inputs), "y": torch.randn(sizes["rows"], 1)}

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        return {"squares": ((model(batch["x"]) - batch["y"]).square().sum(), float(len(batch["x"])))}


SIZES = (
    {"nodes": 150, "edges": 3000, "items": 2},
    {"nodes": 500, "edges": 10000, "items": 6},
    {"nodes": 1200, "edges": 24000, "items": 14},
)
SETTINGS = {"optimizer": "adamw", "foreach": True, "clip": 10.0}
MEMBERS = (
    Member(
        "mlp",
        Perceptron,
        {},
        ({"rows": 1500, "items": 3}, {"rows": 4000, "items": 8}, {"rows": 9000, "items": 18}),
        {"optimizer": "adamw", "foreach": True},
        padded=False,
        items=partial(lengths, median=500, name="rows"),
    ),
    Member("gnn", Graphs, {}, SIZES, SETTINGS, padded=False, items=graphs),
    Member("data_dependent", Graphs, {"picky": True}, SIZES, SETTINGS, padded=False, items=graphs),
)
