"""The network of the RNA-ligand task: equivariant convolutions over atoms, with e3nn, and a vector for each item.

What e3nn computes is computed in single precision whatever autocast says: directions in half precision are off by 1%.

Shapes: N atoms of all items, E edges, B items, F numbers of all features of an atom, C components of a field, M fields
of one kind, I numbers of an atom that do not turn with it, H numbers of the spherical harmonics, W weights of an edge's
product, K distances that one is compared with, D numbers of the output.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from pipeline.errors import ConfigError
from pipeline.graphs.atom_graph import RESIDUE_TYPES
from pipeline.graphs.item_graph import ROLES

if TYPE_CHECKING:
    from torch import Tensor

WHERE = "train.options.hidden_irreps"
USUAL = "32x0e+16x1o+8x2e"
KINDS = ("bond", "angle", "dihedral", "near")
ELEMENTS = 120  # gemmi's codes
CENTRES = 16
CLOSEST = 0.8  # Å
MOST_L = 11  # of e3nn's spherical harmonics
TINY = 1e-6
_PART = re.compile(r"(?:([1-9]\d*)\s*x\s*)?(\d+)\s*[eo]")


class RnaLigandBatch(NamedTuple):
    """The atoms of some items, concatenated."""

    pos_N3: Tensor
    element_N: Tensor
    type_N: Tensor  # of its residue
    side_N: Tensor
    item_N: Tensor
    from_E: Tensor
    to_E: Tensor
    kind_E: Tensor
    target_BD: Tensor
    has_target_B: Tensor
    known: tuple[bool, ...]  # the same


@dataclass(frozen=True)
class RnaLigandSizes:
    """The options of the network, which come first among the task's."""

    hidden_irreps: str = USUAL  # what an atom has: 32 scalars, 16 vectors, 8 of degree 2
    layers: int = 4
    output_dim: int = 1536
    use_gate: bool = True  # scalars decide how much of each vector is left; without, only scalars are activated
    use_layer_norm: bool = True
    product: str = "depthwise"  # full: each edge mixes all fields with each other, at many times the memory
    radial_width: int = 64  # of the network that makes weights of lengths
    head_width: int = 256  # of an atom's part in its item's vector
    reach: float = 5.0  # Å up to which lengths are told apart; as graph.atom.radius


def checked_irreps(irreps: str) -> str:
    """Return the irreps if they are valid, without e3nn, which need not be installed to check a configuration."""
    remedy = f"--set {WHERE}={USUAL}   (32 scalars, 16 vectors, 8 of degree 2)"
    parts = [part.strip() for part in irreps.split("+")]
    for part in parts:
        match = _PART.fullmatch(part)
        if match is None or int(match[2]) > MOST_L:
            problem = (
                f"{part!r} of {irreps!r} is no irrep: COUNTxDEGREE and e or o, degree at most {MOST_L}, such as 16x1o"
            )
            raise ConfigError(problem, where=WHERE, remedy=remedy)
    if not any(part.endswith("e") and int(_PART.fullmatch(part)[2]) == 0 for part in parts):  # type: ignore[index]
        raise ConfigError(f"{irreps!r} has no scalars, such as 32x0e: nothing could be said of an item", where=WHERE,
                          remedy=remedy)  # fmt: skip
    return irreps


def e3nn() -> Any:
    """Import e3nn, or raise an error that says how to install it."""
    try:
        import e3nn.nn
        import e3nn.o3
    except ImportError as error:
        problem = f"the model needs e3nn: {error}"
        raise ConfigError(problem, where="train.task", remedy="pip install 'pipeline[e3nn]'") from None
    return e3nn


class AtomGeometry(nn.Module):
    """Edge geometry: the harmonics that products are taken with, and the lengths that their weights depend on."""

    centres_K: Tensor

    def __init__(self, degree: int, reach: float) -> None:
        super().__init__()
        self.harmonics = e3nn().o3.SphericalHarmonics(
            list(range(degree + 1)), normalize=True, normalization="component"
        )
        self.register_buffer("centres_K", torch.linspace(CLOSEST, reach, CENTRES), persistent=False)
        self.gap = (reach - CLOSEST) / (CENTRES - 1)

    def forward(self, pos_N3: Tensor, from_E: Tensor, to_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return the spherical harmonics of each edge, and radial basis features of its length."""
        way_E3 = pos_N3.index_select(0, from_E) - pos_N3.index_select(0, to_E)
        apart_E1 = way_E3.square().sum(-1, keepdim=True).sqrt()
        return self.harmonics(way_E3), (-((apart_E1 - self.centres_K) / self.gap).square()).exp()


class IrrepsNorm(nn.Module):
    """Fields of each kind divided by how long they are on average; scalars also less their mean."""

    def __init__(self, irreps: Any) -> None:
        super().__init__()
        self.parts = [(part.mul, part.ir.dim, part.ir.l == 0 and part.ir.p == 1) for part in irreps]
        self.weight = nn.Parameter(torch.ones(irreps.num_irreps))
        self.bias = nn.Parameter(torch.zeros(sum(mul for mul, _, is_scalar in self.parts if is_scalar)))

    def forward(self, x_NF: Tensor) -> Tensor:
        fields = torch.split_with_sizes(x_NF, [mul * dim for mul, dim, _ in self.parts], -1)
        weights = torch.split_with_sizes(self.weight, [mul for mul, _, _ in self.parts])
        normed = [
            self._normed(field, weight, *part) for field, weight, part in zip(fields, weights, self.parts, strict=True)
        ]
        return torch.cat(normed, -1)

    def _normed(self, x_NF: Tensor, weight_M: Tensor, mul: int, dim: int, is_scalar: bool) -> Tensor:  # noqa: FBT001
        if is_scalar:
            return functional.layer_norm(x_NF, (mul,), weight_M, self.bias)
        x_NMC = x_NF.view(-1, mul, dim)
        size_N11 = x_NMC.square().mean((-1, -2), keepdim=True)
        normed_NMC = x_NMC * (size_N11 + TINY).rsqrt() * weight_M.unsqueeze(-1)
        return normed_NMC.flatten(-2)


class EquivariantLayer(nn.Module):
    """Messages along edges: a neighbour's features times the direction to it, by weights of length and kind."""

    def __init__(self, irreps: Any, sizes: RnaLigandSizes) -> None:
        super().__init__()
        o3, width = e3nn().o3, sizes.radial_width
        self.norm = IrrepsNorm(irreps) if sizes.use_layer_norm else nn.Identity()
        self.act = _gate(irreps) if sizes.use_gate else _activation(irreps)
        harmonics = o3.Irreps.spherical_harmonics(irreps.lmax)
        self.inner = o3.Linear(irreps, irreps)
        self.product = _full(irreps, harmonics) if sizes.product == "full" else _depthwise(irreps, harmonics)
        heard = self.product.irreps_out.simplify()
        self.widths = [part.dim for part in heard]
        self.outer = _by_kind(heard, self.act.irreps_in)
        self.own = o3.Linear(irreps, self.act.irreps_in)
        self.of_length, self.of_kind = nn.Linear(CENTRES, width), nn.Embedding(len(KINDS), width)
        self.weigh = nn.Linear(width, self.product.weight_numel)

    def forward(
        self, x_NF: Tensor, harmonics_EH: Tensor, near_EK: Tensor, share_N1: Tensor, batch: RnaLigandBatch
    ) -> Tensor:
        with torch.autocast(x_NF.device.type, enabled=False):
            normed_NF = self.norm(x_NF)
            weight_EW = self.weigh(functional.silu(self.of_length(near_EK) + self.of_kind(batch.kind_E)))
            sent_EF = self.inner(normed_NF).index_select(0, batch.from_E)
            sent_EF = self.product(sent_EF, harmonics_EH, weight_EW)
            heard_NF = sent_EF.new_zeros(len(x_NF), sent_EF.shape[1]).index_add(0, batch.to_E, sent_EF)
            # Each kind apart: else the scalars kept for backward would hold all the others.
            parts = torch.split_with_sizes(heard_NF, self.widths, -1)
            mixed = [outer(part_NF * share_N1) for outer, part_NF in zip(self.outer, parts, strict=True)]
            changed_NF: Tensor = x_NF + self.act(self.own(normed_NF) + torch.cat(mixed, -1))
        return changed_NF


class AtomPool(nn.Module):
    """Pools the rotation-invariant part of the atoms' features into a vector for each item."""

    def __init__(self, irreps: Any, width: int, output_dim: int) -> None:
        super().__init__()
        self.parts = [(part.mul, part.ir.dim, part.ir.l == 0) for part in irreps]
        self.inner, self.norm = nn.Linear(irreps.num_irreps, width), nn.LayerNorm(width)
        self.outer = nn.Linear(width, output_dim)

    def forward(self, x_NF: Tensor, item_N: Tensor, items: int) -> Tensor:
        fields = zip(
            torch.split_with_sizes(x_NF, [mul * dim for mul, dim, _ in self.parts], -1), self.parts, strict=True
        )
        x_NI = torch.cat([x if is_scalar else _lengths(x, mul, dim) for x, (mul, dim, is_scalar) in fields], -1)
        said_ND = functional.silu(self.inner(x_NI)).to(x_NF.dtype)  # half precision sums badly
        sums_BD = said_ND.new_zeros(items, said_ND.shape[1]).index_add(0, item_N, said_ND)
        number_B1 = said_ND.new_zeros(items, 1).index_add(0, item_N, said_ND.new_ones(len(said_ND), 1))
        vector_BD: Tensor = self.outer(self.norm(sums_BD / number_B1.clamp(min=1)))
        return vector_BD


class RnaLigandNetwork(nn.Module):
    """The network: from atoms and edges of several kinds to a vector for each item."""

    def __init__(self, sizes: RnaLigandSizes) -> None:
        super().__init__()
        irreps = e3nn().o3.Irreps(sizes.hidden_irreps).sort().irreps.simplify()
        self.scalars, before = irreps.count("0e"), irreps.count("0o")
        self.others = before, irreps.dim - before - self.scalars
        self.of_element = nn.Embedding(ELEMENTS, self.scalars)
        self.of_type = nn.Embedding(len(RESIDUE_TYPES), self.scalars)
        self.of_side = nn.Embedding(len(ROLES), self.scalars)
        self.geometry = AtomGeometry(irreps.lmax, sizes.reach)
        self.layers = nn.ModuleList(EquivariantLayer(irreps, sizes) for _ in range(sizes.layers))
        self.norm = IrrepsNorm(irreps) if sizes.use_layer_norm else nn.Identity()
        self.pool = AtomPool(irreps, sizes.head_width, sizes.output_dim)

    def forward(self, batch: RnaLigandBatch) -> Tensor:
        """Return the vectors [B, D]."""
        scalar_NM = self.of_element(batch.element_N) + self.of_type(batch.type_N) + self.of_side(batch.side_N)
        x_NF = functional.pad(scalar_NM, self.others)
        with torch.autocast(x_NF.device.type, enabled=False):
            harmonics_EH, near_EK = self.geometry(batch.pos_N3, batch.from_E, batch.to_E)
            share_N1 = _shares(batch.to_E, x_NF)
        for layer in self.layers:
            x_NF = layer(x_NF, harmonics_EH, near_EK, share_N1, batch)
        vector_BD: Tensor = self.pool(self.norm(x_NF), batch.item_N, len(batch.target_BD))
        return vector_BD


def _lengths(x_NF: Tensor, mul: int, dim: int) -> Tensor:
    """Return how long each field is."""
    return (x_NF.view(-1, mul, dim).square().sum(-1) + TINY).sqrt()


def _shares(to_E: Tensor, x_NF: Tensor) -> Tensor:
    """Return the factors on sums over an atom's neighbours that bring them to the same scale for all atoms."""
    number_N = x_NF.new_zeros(len(x_NF)).index_add(0, to_E, x_NF.new_ones(len(to_E)))
    return number_N.clamp(min=1).rsqrt().unsqueeze(-1)


def _acts(scalars: Any) -> list[Any]:
    """Return a function for the scalars of each parity that keeps it."""
    return [functional.silu if part.ir.p == 1 else torch.tanh for part in scalars]


def _gate(irreps: Any) -> Any:
    """Return the gate that multiplies every field with a scalar between 0 and 1."""
    o3, made = e3nn().o3, e3nn().nn
    scalars, fields = (o3.Irreps([part for part in irreps if (part.ir.l > 0) is turns]) for turns in (False, True))
    if not len(fields):
        return _activation(irreps)
    gates = o3.Irreps([(part.mul, "0e") for part in fields])
    return made.Gate(scalars, _acts(scalars), gates, [torch.sigmoid] * len(gates), fields)


def _activation(irreps: Any) -> Any:
    """Return the activation for scalars only."""
    scalars = [part for part in irreps if part.ir.l == 0]
    return e3nn().nn.Activation(irreps, _acts(scalars) + [None] * (len(irreps) - len(scalars)))


def _by_kind(irreps: Any, wanted: Any) -> nn.ModuleList:
    """Return linear layers that mix the fields of each kind; both irreps have the same kinds in e3nn's order."""
    o3 = e3nn().o3
    pairs = zip(irreps, wanted.simplify(), strict=True)
    return nn.ModuleList(o3.Linear(o3.Irreps([source]), o3.Irreps([target])) for source, target in pairs)


def _full(irreps: Any, harmonics: Any) -> Any:
    """Return the product that mixes all fields of each edge, by a weight for every two of them."""
    return e3nn().o3.FullyConnectedTensorProduct(
        irreps, harmonics, irreps, internal_weights=False, shared_weights=False
    )


def _depthwise(irreps: Any, harmonics: Any) -> Any:
    """Return the product of each field with each harmonic; a weight for each, and no field is mixed with others."""
    o3 = e3nn().o3
    ways = [
        (mul, out, left, right)
        for left, (mul, one) in enumerate(irreps)
        for right, (_, other) in enumerate(harmonics)
        for out in one * other
        if out in irreps
    ]
    sorted_irreps, place, _ = o3.Irreps([(mul, out) for mul, out, _, _ in ways]).sort()
    taken = [(left, right, place[at], "uvu", True) for at, (_, _, left, right) in enumerate(ways)]
    return o3.TensorProduct(irreps, harmonics, sorted_irreps, taken, internal_weights=False, shared_weights=False)
