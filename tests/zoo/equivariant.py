"""Equivariant convolutions over atom graphs, with e3nn: bonds, angles, dihedrals and contacts.

Built as the public code of the guide's model is (github.com/SleepingLei/RNA-3E-FFI, models/e3_gnn_encoder_v2.py):
irreps 32x0e + 16x1o + 8x2e, 4 layers, gates, weights of each edge's tensor product from an MLP of its length.

Shapes: N nodes, E edges, A paths, B items, F numbers of an irreps' features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.zoo.blocks import layers, summed
from tests.zoo.member import Member, Synthetic
from tests.zoo.spread import graphs

if TYPE_CHECKING:
    import numpy as np

    from pipeline.protocol import Sizes

ATOM_TYPES = 71
BASIS, RADIAL = 8, 64  # radial functions, width of their MLP
REACH = 6.0  # Å
SPHERICAL = "1x0e+1x1o+1x2e"
PARAMETERS = {"edges": 2, "contacts": 3, "angles": 2, "dihedrals": 3}  # of the force field, for each


def radial(length_E: Tensor) -> Tensor:
    """Return Bessel functions of lengths, cut off smoothly."""
    order = torch.arange(1, BASIS + 1, device=length_E.device)
    near_E1 = (1 - length_E / REACH).clamp(min=0)[:, None]
    return torch.sin(math.pi * order * length_E[:, None] / REACH) / length_E[:, None] * near_E1**2


class Convolution(nn.Module):
    """A tensor product of neighbours with the directions to them, summed, gated."""

    def __init__(self, irreps: str, parameters: int, *, own: bool, norm: bool) -> None:
        super().__init__()
        from e3nn import o3
        from e3nn.nn import Gate

        hidden = o3.Irreps(irreps)
        scalars = o3.Irreps([part for part in hidden if part.ir.l == 0])
        gated = o3.Irreps([part for part in hidden if part.ir.l > 0])
        gates = o3.Irreps([(part.mul, "0e") for part in gated])
        silu, sigmoid = nn.functional.silu, torch.sigmoid
        self.gate = Gate(scalars, [silu] * len(scalars), gates, [sigmoid] * len(gates), gated)
        self.linear = o3.Linear(hidden, hidden)
        self.product = o3.FullyConnectedTensorProduct(hidden, SPHERICAL, self.gate.irreps_in, shared_weights=False)
        self.weigh = layers(BASIS + parameters, RADIAL, RADIAL, self.product.weight_numel)
        self.own = o3.Linear(hidden, self.gate.irreps_in) if own else None
        self.norm = Norm(hidden) if norm else None

    def forward(self, x_NF: Tensor, edges: Any) -> Tensor:
        source_E, target_E = edges["source"], edges["target"]
        weight_EW = self.weigh(torch.cat([edges["radial"], edges["parameters"]], -1))
        message_EF = self.product(self.linear(x_NF)[source_E], edges["spherical"], weight_EW)
        arrived_NF = summed(message_EF, target_E, len(x_NF))
        out_NF = self.gate(arrived_NF) if self.own is None else x_NF + self.gate(self.own(x_NF) + arrived_NF)
        return out_NF if self.norm is None else self.norm(out_NF)


class Norm(nn.Module):
    """Features of each kind divided by their length."""

    def __init__(self, irreps: Any) -> None:
        super().__init__()
        self.parts = [(part.mul, part.ir.dim) for part in irreps]
        self.weight = nn.Parameter(torch.ones(sum(mul for mul, _ in self.parts)))

    def forward(self, x_NF: Tensor) -> Tensor:
        widths, counts = [mul * dim for mul, dim in self.parts], [mul for mul, _ in self.parts]
        kinds = zip(x_NF.split(widths, -1), self.weight.split(counts), self.parts, strict=True)
        return torch.cat([self._normed(x, weight, *part) for x, weight, part in kinds], -1)

    def _normed(self, x_NF: Tensor, weight: Tensor, mul: int, dim: int) -> Tensor:
        fields = x_NF.unflatten(-1, (mul, dim))
        length = fields.square().sum(-1).mean(-1).add(1e-5).rsqrt()
        return (fields * length[:, None, None] * weight[:, None]).flatten(1)


class Paths(nn.Module):
    """Scalars at both ends of a path of bonds, summed in its middle."""

    def __init__(self, irreps: str, scalars: int, parameters: int) -> None:
        super().__init__()
        from e3nn import o3

        self.scalars = scalars
        self.message = layers(2 * scalars + parameters, RADIAL, RADIAL, scalars)
        self.out = o3.Linear(f"{scalars}x0e", irreps)

    def forward(self, x_NF: Tensor, paths: Any) -> Tensor:
        scalars = x_NF[:, : self.scalars]
        message = self.message(torch.cat([scalars[paths["source"]], scalars[paths["target"]], paths["parameters"]], -1))
        middle = summed(message, paths["middle"], len(x_NF))
        return self.out(middle.to(x_NF.dtype))  # e3nn refuses mixed precisions, even under autocast


class Encoder(nn.Module):
    """A vector for each graph."""

    def __init__(self, task: Equivariant) -> None:
        super().__init__()
        from e3nn import o3

        self.kinds, self.scalars = task.kinds, task.scalars
        self.atom = nn.Embedding(ATOM_TYPES, task.scalars)
        self.lift = o3.Linear(f"{task.scalars}x0e", task.irreps)
        self.layers = nn.ModuleList(
            nn.ModuleDict({kind: _layer(task, kind) for kind in task.kinds}) for _ in range(task.depth)
        )
        self.attend = layers(task.scalars, 128, 1)
        self.out = nn.Sequential(nn.Linear(task.scalars, task.output), nn.LayerNorm(task.output))

    def forward(self, batch: Any) -> Tensor:
        told = {kind: _geometry(batch["position"], batch[kind]) for kind in self.kinds}
        x_NF = self.lift(self.atom(batch["atom"]))
        for layer in self.layers:
            x_NF = sum(layer[kind](x_NF, told[kind]) for kind in self.kinds)
        scalars = x_NF[:, : self.scalars]
        weight_N1 = self.attend(scalars).clamp(max=20).exp()
        graph, items = batch["graph"], len(batch["y"])
        return self.out(summed(weight_N1 * scalars, graph, items) / summed(weight_N1, graph, items))


def _layer(task: Equivariant, kind: str) -> nn.Module:
    if kind in ("angles", "dihedrals"):
        return Paths(task.irreps, task.scalars, PARAMETERS[kind])
    return Convolution(task.irreps, PARAMETERS[kind], own=kind == "edges", norm=task.norm)


def _geometry(position_N3: Tensor, links: Any) -> Any:
    """Add what is known of edges from the positions of their ends."""
    if "middle" in links:
        return links
    from e3nn import o3

    way_E3 = position_N3[links["target"]] - position_N3[links["source"]]
    length_E = way_E3.square().sum(-1).add(1e-6).sqrt()
    spherical = o3.spherical_harmonics(o3.Irreps(SPHERICAL), way_E3, normalize=True, normalization="component")
    return {**links, "spherical": spherical, "radial": radial(length_E)}


@dataclass(frozen=True)
class Equivariant(Synthetic):
    """An embedding of each graph, to be like another."""

    irreps: str = "32x0e+16x1o+8x2e"  # the scalars first
    depth: int = 4
    output: int = 256  # 1536 in the guide
    norm: bool = True
    kinds: tuple[str, ...] = ("edges",)  # and angles, dihedrals, contacts

    @property
    def scalars(self) -> int:
        """Return how many of an atom's features do not turn with it."""
        return int(self.irreps.split("x0e")[0])

    def model(self) -> nn.Module:
        return Encoder(self)

    def example(self, sizes: Sizes) -> dict[str, Any]:
        nodes, items = sizes["nodes"], sizes["items"]
        batch: dict[str, Any] = {
            "atom": torch.randint(ATOM_TYPES, (nodes,)),
            "position": torch.randn(nodes, 3),
            "graph": torch.arange(nodes) * items // nodes,
            "y": torch.randn(items, self.output),
        }
        return batch | {kind: _links(kind, sizes[kind], nodes) for kind in self.kinds}

    def loss(self, model: nn.Module, batch: Any) -> dict[str, tuple[Tensor, float]]:
        return {"embedding": ((model(batch) - batch["y"]).square().mean(-1).sum(), float(len(batch["y"])))}


def _links(kind: str, count: int, nodes: int) -> dict[str, Tensor]:
    ends = ("source", "target", "middle") if kind in ("angles", "dihedrals") else ("source", "target")
    links = {end: torch.randint(nodes, (count,)) for end in ends}
    return links | {"parameters": torch.randn(count, PARAMETERS[kind])}


def _items(count: int, rng: np.random.Generator) -> Any:
    return graphs(count, rng, nodes=20, neighbours=10)


MEMBERS = (
    Member(
        name="equivariant",
        task=Equivariant,
        small={},
        sizes=(
            {"nodes": 20, "edges": 200, "items": 1},
            {"nodes": 60, "edges": 600, "items": 3},
            {"nodes": 120, "edges": 1200, "items": 5},
        ),
        settings={"optimizer": "adam", "foreach": True, "clip": 1.0},
        padded=False,
        items=_items,
    ),
)
