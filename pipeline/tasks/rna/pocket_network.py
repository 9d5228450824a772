"""The network of RNA-3E-FFI: from a pocket's atoms and the terms of its force field to a vector for each pocket.

Features that turn are computed in single precision whatever autocast says: directions in half precision are off by 1%.
Of the original's weights, constants of e3nn (3j symbols, masks, empty biases) are left out on the way in, and computed
on the way out.

Shapes: N atoms of all items, E entries of one kind (bonds, angles, dihedrals, near pairs), P atoms of an entry, K
parameters of one, F numbers of an atom's fields, S its scalars, I its invariants, B items, H heads, D numbers of a
vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from pipeline.encoder.published_weights import renamed
from pipeline.tasks.irreps import no_weights, product_constants
from pipeline.tasks.rna.turning_fields import (
    USUAL,
    FieldGate,
    FieldLinear,
    FieldNorm,
    FieldProduct,
    Fields,
    LengthActivation,
    WholeNorm,
    field_harmonics,
    fields_of,
)
from pipeline.tasks.task_parts import OriginalForm, means

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


FEATURES = 3  # of an atom: charge, atomic number, mass
# Of RNA with its hydrogens under RNA.OL3: what features are measured by where no file says otherwise.
FEATURE_MEAN, FEATURE_DEVIATION = (-0.023, 4.95, 9.56), (0.457, 3.25, 7.0)
TERM_WIDTH, POOL_WIDTH = 64, 128
CUTOFF = 6.0  # Å, though near pairs end at 4
CLOSEST = 1e-6  # Å
KINDS = {"bonds": (2, 2), "angles": (3, 2), "dihedrals": (4, 3), "near": (2, 3)}  # atoms and parameters of an entry


class Entries(NamedTuple):
    """Entries of one kind: atoms, numbered over all items, and their parameters."""

    atom_PE: Tensor
    constant_EK: Tensor


class PocketBatch(NamedTuple):
    """The atoms of some pockets, concatenated, and the target of each pocket."""

    feature_N3: Tensor
    pos_N3: Tensor
    item_N: Tensor
    bonds: Entries
    angles: Entries
    dihedrals: Entries
    near: Entries
    target_BD: Tensor
    has_target_B: Tensor
    known: tuple[bool, ...]  # the same
    ids: tuple[str, ...] = ()
    sequence_BS: Tensor | None = None  # an encoder's vector of each pocket's sequence


@dataclass(frozen=True)
class PocketSizes:
    """The options of the network, which come first among the task's; many have the original's names."""

    hidden_irreps: str = USUAL  # fields of an atom: 32 scalars, 16 vectors, 8 of degree 2
    layers: int = 6
    output_dim: int = 1536
    feature_width: int = 64  # of the network that reads charge, atomic number and mass
    radial_functions: int = 8
    use_multi_hop: bool = True  # angles and dihedrals
    use_nonbonded: bool = True  # pairs near each other
    use_gate: bool = True  # scalars decide how much of each vector is left; without, lengths are activated
    use_layer_norm: bool = True
    use_enhanced_invariants: bool = True  # cosines between an atom's vectors, too, not their lengths alone
    use_improved_layers: bool = True  # an atom's own fields are added after the gate
    norm_type: str = "layer"  # rms: all numbers of an atom by one; as_published only
    num_attention_heads: int = 8  # of the pooling; 0: one weight for each atom
    bonded_weight: float = 0.4  # how much each kind counts; learned ones start so where version is 2
    angle_weight: float = 0.2
    dihedral_weight: float = 0.2
    nonbonded_weight: float = 0.2
    version: int = 3  # 2: the older network, whose kinds have learned weights
    dropout: float = 0.0
    sequence_dim: int = 0  # length of an RNA encoder's vector of a pocket's sequence; 0: none
    as_published: bool = False  # with the norm that depends on how a pocket lies in space, and phases as they had them

    @property
    def fields(self) -> Fields:
        return fields_of(self.hidden_irreps)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of entries that are used."""
        used = True, self.use_multi_hop, self.use_multi_hop, self.use_nonbonded
        return tuple(kind for kind, is_used in zip(KINDS, used, strict=True) if is_used)

    @property
    def shares(self) -> dict[str, float]:
        """Return how much each kind counts."""
        weights = self.bonded_weight, self.angle_weight, self.dihedral_weight, self.nonbonded_weight
        return dict(zip(KINDS, weights, strict=True))


class LayerChain(nn.Module):
    """Layers one after the other, numbered; a module of its own, so that checkpointing takes none of them alone."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        for place, layer in enumerate(layers):
            self.add_module(str(place), layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def _perceptron(enter: int, leave: int, width: int = TERM_WIDTH) -> LayerChain:
    """Return three linear layers with SiLU between them."""
    return LayerChain(nn.Linear(enter, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, leave))


class AtomEmbedding(nn.Module):
    """An atom's features, by their mean and deviation in the data set, as scalars among its fields."""

    mean_3: Tensor
    deviation_3: Tensor

    def __init__(self, sizes: PocketSizes) -> None:
        super().__init__()
        fields, width = sizes.fields, sizes.feature_width
        blocks = ((nn.Linear(enter, width), nn.SiLU(), nn.LayerNorm(width)) for enter in (FEATURES, width))
        self.read = LayerChain(*(layer for block in blocks for layer in block), nn.Linear(width, fields.scalars))
        self.enter = FieldLinear(Fields(fields.scalars), fields)
        self.register_buffer("mean_3", torch.tensor(FEATURE_MEAN))
        self.register_buffer("deviation_3", torch.tensor(FEATURE_DEVIATION))

    def forward(self, feature_N3: Tensor) -> Tensor:
        fields_NF: Tensor = self.enter(self.read((feature_N3 - self.mean_3) / self.deviation_3))
        return fields_NF


class EdgeShape(NamedTuple):
    """What layers need of edges: the same in all of them."""

    harmonics_EH: Tensor
    length_E1: Tensor


def edge_shape(pos_N3: Tensor, atom_PE: Tensor) -> EdgeShape:
    """Return the directions of edges, from source to target, and their lengths."""
    way_E3 = pos_N3.index_select(0, atom_PE[1]) - pos_N3.index_select(0, atom_PE[0])
    length_E1 = way_E3.square().sum(-1, keepdim=True).clamp(min=CLOSEST**2).sqrt()
    return EdgeShape(field_harmonics(way_E3), length_E1)


class RadialBasis(nn.Module):
    """Bessel functions of a length, which end smoothly at the cutoff."""

    frequency: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.arange(1, count + 1) * math.pi)

    def forward(self, length_E1: Tensor) -> Tensor:
        waves = (self.frequency * (length_E1 / CUTOFF)).sin() * (math.sqrt(2 / CUTOFF) / length_E1)
        return waves * smooth_end(length_E1)


def smooth_end(length_E1: Tensor) -> Tensor:
    """Return a factor that falls from 1 to 0 at the cutoff, with two derivatives."""
    part_E1 = (length_E1 / CUTOFF).clamp(max=1)
    return 1 - 28 * part_E1**6 + 48 * part_E1**7 - 21 * part_E1**8


class EdgeLayer(nn.Module):
    """Messages along edges: a neighbour's fields times the direction to it, weighted by length and parameters."""

    def __init__(self, sizes: PocketSizes, kind: str) -> None:
        super().__init__()
        fields = sizes.fields
        self.act = FieldGate(fields) if sizes.use_gate else LengthActivation(fields)
        self.is_improved, is_bonded = sizes.use_improved_layers and sizes.version > 2, kind == "bonds"
        self.enter = FieldLinear(fields, fields)
        self.basis = RadialBasis(sizes.radial_functions)
        self.product = FieldProduct(fields, self.act.enter)
        self.weigh = _perceptron(sizes.radial_functions + KINDS[kind][1], self.product.weights)
        self.own = FieldLinear(fields, fields if self.is_improved else self.act.enter) if is_bonded else None
        self.norm = _inner_norm(sizes)

    def forward(self, x_NF: Tensor, entries: Entries, shape: EdgeShape) -> Tensor:
        heard_NF = self.heard(x_NF, entries, shape)
        if self.own is not None and not self.is_improved:
            heard_NF = heard_NF + self.own(x_NF)
        heard_NF = self.act(heard_NF)
        if self.own is not None:
            heard_NF = heard_NF + (self.own(x_NF) + x_NF if self.is_improved else x_NF)
        normed_NF: Tensor = self.norm(heard_NF)
        return normed_NF

    def heard(self, x_NF: Tensor, entries: Entries, shape: EdgeShape) -> Tensor:
        """Return the sums of the messages at each atom."""
        weights = self.weigh(torch.cat([self.basis(shape.length_E1), entries.constant_EK], -1))
        sent_EF = self.product(self.enter(x_NF).index_select(0, entries.atom_PE[0]), shape.harmonics_EH, weights)
        heard_NF: Tensor = sent_EF.new_zeros(len(x_NF), sent_EF.shape[1]).index_add(0, entries.atom_PE[1], sent_EF)
        return heard_NF


def _inner_norm(sizes: PocketSizes) -> nn.Module:
    how = "published" if sizes.as_published else "together"
    return FieldNorm(sizes.fields, how) if sizes.use_layer_norm else nn.Identity()


def _outer_norm(sizes: PocketSizes) -> nn.Module:
    """Return the norm around a layer."""
    if not sizes.use_layer_norm:
        return nn.Identity()
    if sizes.norm_type == "rms":
        return WholeNorm(sizes.fields)
    if sizes.as_published and not sizes.use_improved_layers:
        return FieldNorm(sizes.fields, "each")
    return _inner_norm(sizes)


class TermLayer(nn.Module):
    """Messages of angles to their middle atom, or of dihedrals to both: of both ends, parameters and present shape."""

    def __init__(self, sizes: PocketSizes, kind: str) -> None:
        super().__init__()
        fields, (self.atoms, constants) = sizes.fields, KINDS[kind]
        self.sees_shape = sizes.version > 2
        width = 2 * fields.scalars + constants + (self.atoms - 2) * self.sees_shape
        self.norm = nn.LayerNorm(width) if self.sees_shape else nn.Identity()
        self.read = _perceptron(width, fields.scalars)
        self.leave = FieldLinear(Fields(fields.scalars), fields)

    def forward(self, x_NF: Tensor, entries: Entries, shape_EX: Tensor) -> Tensor:
        scalar_NS = x_NF[:, : self.leave.enter.scalars]
        ends = [scalar_NS.index_select(0, entries.atom_PE[place]) for place in (0, -1)]
        inputs = [*ends, entries.constant_EK, *([shape_EX] if self.sees_shape else [])]
        said_ES = self.read(self.norm(torch.cat(inputs, -1)))
        heard = [means(said_ES, entries.atom_PE[place], len(x_NF)) for place in range(1, self.atoms - 1)]
        fields_NF: Tensor = self.leave(torch.stack(heard).mean(0))
        return fields_NF


def cosines(pos_N3: Tensor, atom_PE: Tensor) -> Tensor:
    """Return the cosine of each angle [E, 1]."""
    first, middle, last = (pos_N3.index_select(0, atom_E) for atom_E in atom_PE)
    return functional.cosine_similarity(first - middle, last - middle, -1).unsqueeze(-1)


def torsions(pos_N3: Tensor, atom_PE: Tensor) -> Tensor:
    """Return cosine and sine of each dihedral [E, 2]."""
    places = [pos_N3.index_select(0, atom_E) for atom_E in atom_PE]
    first, axis, last = (after - before for before, after in pairwise(places))
    left, right = torch.linalg.cross(first, axis), torch.linalg.cross(axis, last)
    left, right, axis = (functional.normalize(way, dim=-1) for way in (left, right, axis))
    sine = (torch.linalg.cross(right, left) * axis).sum(-1)  # the original's sign, not IUPAC's
    return torch.stack([(left * right).sum(-1), sine], -1)


# The part of the present shape that layers of each kind see.
SHAPES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "bonds": edge_shape, "angles": cosines, "dihedrals": torsions, "near": edge_shape
}  # fmt: skip


class PocketLayer(nn.Module):
    """One round of messages of all kinds."""

    def __init__(self, sizes: PocketSizes) -> None:
        super().__init__()
        self.shares = sizes.shares
        self.is_old, self.dropout, self.scalars = sizes.version == 2, sizes.dropout, sizes.fields.scalars
        self.kinds = nn.ModuleDict(
            {kind: (EdgeLayer if KINDS[kind][0] == 2 else TermLayer)(sizes, kind) for kind in sizes.kinds}
        )
        self.before = nn.Identity() if self.is_old else _outer_norm(sizes)
        self.after = nn.Identity() if self.is_old else _outer_norm(sizes)

    def forward(
        self, x_NF: Tensor, batch: PocketBatch, shapes: Mapping[str, Any], learned: Mapping[str, Tensor]
    ) -> Tensor:
        normed_NF = self.before(x_NF)
        total = torch.zeros_like(x_NF)
        for kind, layer in self.kinds.items():
            said_NF = layer(normed_NF, getattr(batch, kind), shapes[kind])
            total = total + learned.get(kind, 1.0 if self.is_old else self.shares[kind]) * said_NF
        return self._dropped(total if self.is_old else x_NF + self.after(total))

    def _dropped(self, x_NF: Tensor) -> Tensor:
        if not (self.training and self.dropout):
            return x_NF
        return torch.cat([functional.dropout(x_NF[:, : self.scalars], self.dropout), x_NF[:, self.scalars :]], -1)


def invariants(fields: Fields, x_NF: Tensor, *, with_cosines: bool) -> Tensor:
    """Return the invariants of an atom's fields: scalars, lengths, and cosines of all pairs of one degree."""
    scalars, *turning = fields.split(x_NF)
    lengths = [x_NMD.square().sum(-1).clamp(min=CLOSEST**2).sqrt() for x_NMD in turning]
    parts = [scalars.squeeze(-1), *lengths]
    if with_cosines:
        for x_NMD, length_NM in zip(turning, lengths, strict=True):
            one_NMD = x_NMD / length_NM.unsqueeze(-1)
            left, right = torch.triu_indices(one_NMD.shape[1], one_NMD.shape[1], 1, device=x_NF.device)
            parts.append((one_NMD.index_select(1, left) * one_NMD.index_select(1, right)).sum(-1))
    return torch.cat(parts, -1)


def invariant_count(sizes: PocketSizes) -> int:
    """Return how many numbers of an atom do not turn."""
    pairs = [count * (count - 1) // 2 for count in sizes.fields[1:]]
    return sum(sizes.fields) + (sum(pairs) if sizes.use_enhanced_invariants and sizes.version > 2 else 0)


def shares_of(score_NH: Tensor, item_N: Tensor, items: int) -> Tensor:
    """Return the softmax of scores over the atoms of each item."""
    index_NH = item_N.unsqueeze(-1).expand_as(score_NH)
    floor_BH = score_NH.new_full((items, score_NH.shape[1]), -torch.inf)
    most_BH = floor_BH.scatter_reduce(0, index_NH, score_NH.detach(), "amax")
    power_NH = (score_NH - most_BH.index_select(0, item_N)).exp()
    sums_BH = power_NH.new_zeros(items, power_NH.shape[1]).index_add(0, item_N, power_NH)
    return power_NH / sums_BH.index_select(0, item_N)


class HeadPool(nn.Module):
    """Several weighted means of an item's atoms: each head has a query of its own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(width, POOL_WIDTH), nn.Linear(width, POOL_WIDTH)
        self.query = nn.Parameter(torch.randn(heads, POOL_WIDTH // heads) / math.sqrt(POOL_WIDTH // heads))
        self.out = nn.Linear(POOL_WIDTH, width)

    def forward(self, x_NI: Tensor, item_N: Tensor, items: int) -> Tensor:
        key, value = (layer(x_NI).unflatten(-1, (len(self.query), -1)) for layer in (self.key, self.value))
        score_NH = (key * self.query).sum(-1) / math.sqrt(self.query.shape[1])
        share_NH = shares_of(score_NH, item_N, items)
        weighed_ND = (value * share_NH.unsqueeze(-1)).flatten(1)
        pooled_BI: Tensor = self.out(weighed_ND.new_zeros(items, POOL_WIDTH).index_add(0, item_N, weighed_ND))
        return pooled_BI


class WeightPool(nn.Module):
    """One weighted mean of an item's atoms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = _perceptron(width, 1, POOL_WIDTH)

    def forward(self, x_NI: Tensor, item_N: Tensor, items: int) -> Tensor:
        weighed_NI = x_NI * shares_of(self.score(x_NI), item_N, items)
        return weighed_NI.new_zeros(items, x_NI.shape[1]).index_add(0, item_N, weighed_NI)


class PocketNetwork(nn.Module):
    """The network: from atoms and the terms of their force field to a vector for each pocket."""

    def __init__(self, sizes: PocketSizes) -> None:
        super().__init__()
        self.sizes, width = sizes, invariant_count(sizes)
        self.atoms = AtomEmbedding(sizes)
        self.layers = nn.ModuleList(PocketLayer(sizes) for _ in range(sizes.layers))
        has_heads = sizes.num_attention_heads > 0 and sizes.version > 2
        self.pool = HeadPool(width, sizes.num_attention_heads) if has_heads else WeightPool(width)
        self.out, self.out_norm = nn.Linear(width, sizes.output_dim), nn.LayerNorm(sizes.output_dim)
        self.sequence = nn.Linear(sizes.sequence_dim, width) if sizes.sequence_dim else None
        learned = [kind for kind in sizes.kinds if sizes.version == 2 and kind != "bonds"]
        self.kind_weights = nn.ParameterDict({kind: torch.tensor(sizes.shares[kind]) for kind in learned})

    def forward(self, batch: PocketBatch) -> Tensor:
        """Return the vectors [B, D]."""
        with torch.autocast(batch.pos_N3.device.type, enabled=False):
            pooled_BI = self.pool(self.atom_invariants(batch), batch.item_N, len(batch.target_BD))
            if self.sequence is not None and batch.sequence_BS is not None:
                pooled_BI = pooled_BI + self.sequence(batch.sequence_BS)
            vector_BD: Tensor = self.out_norm(self.out(pooled_BI))
        return vector_BD

    def atom_invariants(self, batch: PocketBatch) -> Tensor:
        """Return the input of pooling for each atom [N, I]."""
        x_NF = self.atoms(batch.feature_N3)
        shapes = {kind: SHAPES[kind](batch.pos_N3, getattr(batch, kind).atom_PE) for kind in self.sizes.kinds}
        for layer in self.layers:
            x_NF = layer(x_NF, batch, shapes, self.kind_weights)
        with_cosines = self.sizes.use_enhanced_invariants and self.sizes.version > 2
        return invariants(self.sizes.fields, x_NF, with_cosines=with_cosines)

    def published_forms(self) -> dict[str, OriginalForm]:
        """Return the form of RNA-3E-FFI for this network."""
        return {SYSTEM: replace(FORM, as_published=self.sizes.as_published, constants=partial(_constants, self))}


SYSTEM = "rna3effi"
EDGES = {
    "enter": "linear_in",
    "basis.frequency": "bessel_basis.frequencies",
    "weigh": "radial_mlp",
    "own": "self_connection",
    "norm": "layer_norm",
    "product": "tp",
    "act": "nonlinearity",
}
TERMS = {"norm": "input_norm", "leave": "output_projection"}
NAMES = {
    "atoms.read": "input_embedding.feature_mlp",
    "atoms.enter": "input_embedding.irreps_projection",
    **{f"layers.*.kinds.bonds.{ours}": f"bonded_mp_layers.*.{theirs}" for ours, theirs in EDGES.items()},
    **{f"layers.*.kinds.near.{ours}": f"nonbonded_mp_layers.*.{theirs}" for ours, theirs in EDGES.items()},
    **{f"layers.*.kinds.angles.{ours}": f"angle_mp_layers.*.{theirs}" for ours, theirs in TERMS.items()},
    **{f"layers.*.kinds.dihedrals.{ours}": f"dihedral_mp_layers.*.{theirs}" for ours, theirs in TERMS.items()},
    "layers.*.kinds.angles.read": "angle_mp_layers.*.angle_mlp",
    "layers.*.kinds.dihedrals.read": "dihedral_mp_layers.*.dihedral_mlp",
    "layers.*.before": "aggregation_layer_norms.*",
    "layers.*.after": "post_aggregation_layer_norms.*",
    "pool.key": "pooling.key_proj",
    "pool.value": "pooling.value_proj",
    "pool.query": "pooling.queries",
    "pool.out": "pooling.output_proj",
    "out": "output_projection.0",
    "out_norm": "output_projection.1",
    **{f"pool.score.{ours}": f"pooling_mlp.{theirs}" for ours, theirs in ((0, 0), (2, 3), (4, 6))},  # dropout between
    "kind_weights.angles": "angle_weight",
    "kind_weights.dihedrals": "dihedral_weight",
    "kind_weights.near": "nonbonded_weight",
}
LINEARS = ("input_embedding.irreps_projection", "*.linear_in", "*.self_connection", "*_mp_layers.*.output_projection")
LEFT = (
    *(f"{name}.{constant}" for name in LINEARS for constant in ("bias", "output_mask")),
    *("*.tp.weight", "*.tp.output_mask", "*._w3j_*", "*.nonlinearity.*"),
)
FORM = OriginalForm(
    NAMES,
    signs=("input_embedding.irreps_projection.weight", "bonded_mp_layers.0.bessel_basis.frequencies"),
    left=LEFT,
    fresh=("atoms.mean_3", "atoms.deviation_3"),  # which they keep with their data
    system="RNA-3E-FFI",
)


def _constants(network: nn.Module) -> dict[str, Tensor]:
    """Return the constants in e3nn's state."""
    found: dict[str, Tensor] = {}
    for name, module in network.named_modules():
        theirs = renamed(name, NAMES)
        if isinstance(module, FieldLinear):
            parts = zip(module.leave.widths, module.enter, strict=True)
            mask = torch.cat([torch.full((width,), float(before > 0)) for width, before in parts])
            found |= no_weights(theirs, mask, "bias")
        elif isinstance(module, FieldProduct):
            found |= product_constants(theirs, module.paths, module.leave.irreps)
        elif isinstance(module, EdgeLayer):
            fields, act = module.enter.enter, renamed(f"{name}.act", NAMES)
            if isinstance(module.act, FieldGate):
                products = {"mul": fields.size - fields.scalars}
            else:
                products = {"norm.tp": sum(fields), "scalar_multiplier": fields.size}
            for product, width in products.items():
                found |= no_weights(f"{act}.{product}", torch.ones(width))
    return found
