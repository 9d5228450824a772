"""Docking with tensor products of e3nn within the partners and across all their pairs, at the sizes of the guide.

Built as the public code is (github.com/ketatam/DiffDock-PP, src/model/diffusion.py, config/dips_esm.yaml): the weights
of every pair's tensor product come from an MLP, which is what takes the memory.

Shapes: N nodes, E edges, X pairs, F numbers of an irreps' features, S scalars.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.blocks import layers, summed
from tests.zoo.docking import PARTNERS, partners
from tests.zoo.member import Synthetic

if TYPE_CHECKING:
    from pipeline.protocol import Sizes

SPHERICAL = "1x0e+1x1o+1x2e"
NUMBERS = 9  # in them
NOISE, DISTANCES = 32, 32  # numbers that tell the noise's level, and a distance


class Convolution(nn.Module):
    """Means over neighbours of their tensor products with the directions to them."""

    def __init__(self, inner: str, outer: str, features: int) -> None:
        super().__init__()
        from e3nn import o3

        self.product = o3.FullyConnectedTensorProduct(inner, SPHERICAL, outer, shared_weights=False)
        self.weigh = layers(features, features, self.product.weight_numel, activation=nn.ReLU)

    def forward(self, x_NF: Tensor, to_E: Tensor, from_E: Tensor, told: tuple[Tensor, Tensor], count: int) -> Tensor:
        features_E, spherical_E = told
        message_EF = self.product(x_NF[from_E], spherical_E, self.weigh(features_E))
        number_N1 = summed(torch.ones_like(message_EF[:, :1]), to_E, count).clamp(min=1)
        return summed(message_EF, to_E, count) / number_N1


class Score(nn.Module):
    """How the ligand must move, at a level of noise."""

    def __init__(self, task: ScoreMatching) -> None:
        super().__init__()
        self.scalars = task.scalars
        irreps = task.irreps
        self.node = nn.Linear(task.features + NOISE, task.scalars)
        self.edge, self.pair = (layers(NOISE + DISTANCES, task.scalars, task.scalars) for _ in range(2))
        steps = list(pairwise(irreps))
        self.within, self.across = (
            nn.ModuleList(Convolution(*step, 3 * task.scalars) for step in steps) for _ in range(2)
        )
        self.centre = Convolution(irreps[-1], "2x1o+2x1e", task.scalars)

    def forward(self, batch: Any) -> Tensor:
        ends = batch["receptor_X"], batch["ligand_X"]
        nodes = [self.node(batch[name]["nodes"]) for name in PARTNERS]
        edges = [self.edge(batch[name]["edges"]) for name in PARTNERS]
        pair = self.pair(batch["pairs"])
        for place, (within, across) in enumerate(zip(self.within, self.across, strict=True)):
            last = place == len(self.within) - 1  # then only the ligand is still needed
            moved = []
            for own in (1,) if last else (0, 1):
                name, mine, other = PARTNERS[own], nodes[own], nodes[1 - own]
                source, target = batch[name]["source"], batch[name]["target"]
                inner = self._told(edges[own], mine, mine, source, target), batch[name]["spherical"]
                cross = self._told(pair, mine, other, ends[own], ends[1 - own]), batch["spherical"]
                update = within(mine, source, target, inner, len(mine))
                update = update + across(other, ends[own], ends[1 - own], cross, len(mine))
                moved.append(functional.pad(mine, (0, update.shape[-1] - mine.shape[-1])) + update)
            nodes = [nodes[0], *moved] if last else moved
        return self._centred(nodes[1], batch)

    def _told(self, given: Tensor, mine: Tensor, other: Tensor, to_E: Tensor, from_E: Tensor) -> Tensor:
        return torch.cat([given, mine[to_E, : self.scalars], other[from_E, : self.scalars]], -1)

    def _centred(self, ligand: Tensor, batch: Any) -> Tensor:
        graph, every = batch["ligand"]["graph"], torch.arange(len(ligand), device=ligand.device)
        told = ligand[:, : self.scalars], batch["centre"]
        moved = self.centre(ligand, graph, every, told, len(batch["y"]))
        return moved[:, :6] + moved[:, 6:]


@dataclass(frozen=True)
class ScoreMatching(Synthetic):
    """A translation and a rotation of each complex."""

    features: int = 1280  # of ESM-2 650M
    scalars: int = 16
    vectors: int = 4
    depth: int = 4

    @property
    def irreps(self) -> list[str]:
        """Return the irreps before and after each layer."""
        s, v = self.scalars, self.vectors
        grown = [f"{s}x0e", f"{s}x0e+{v}x1o", f"{s}x0e+{v}x1o+{v}x1e", f"{s}x0e+{v}x1o+{v}x1e+{s}x0o"]
        return [grown[min(place, 3)] for place in range(self.depth + 1)]

    def model(self) -> nn.Module:
        return Score(self)

    def example(self, sizes: Sizes) -> dict[str, Any]:
        batch: dict[str, Any] = partners(sizes, self.features + NOISE, NOISE + DISTANCES)
        for name in PARTNERS:
            batch[name]["spherical"] = torch.randn(len(batch[name]["source"]), NUMBERS)
        return batch | {
            "pairs": torch.randn(sizes["pairs"], NOISE + DISTANCES),
            "spherical": torch.randn(sizes["pairs"], NUMBERS),
            "centre": torch.randn(sizes["nodes"] - sizes["nodes"] // 2, NUMBERS),
            "y": torch.randn(sizes["items"], 6),
        }

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        error_B6 = (model(batch) - batch["y"]).square()
        weight = float(len(batch["y"]))
        return {"translation": (error_B6[:, :3].sum(), weight), "rotation": (error_B6[:, 3:].sum(), weight)}

    def weights(self, batch: Any) -> dict[str, float]:
        return dict.fromkeys(("translation", "rotation"), float(len(batch["y"])))
