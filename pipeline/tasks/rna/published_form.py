"""Weights of RNA-3E-FFI under the names of our network, and back: a table of names, and the constants that e3nn keeps.

Their constants (3j symbols, masks, empty biases) are left out on the way in, and made anew on the way out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pipeline.tasks.rna.pocket_network import EdgeLayer
from pipeline.tasks.rna.turning_fields import FieldGate, FieldLinear, FieldProduct, coupling
from pipeline.tasks.task_parts import refuse_mended
from pipeline.training.checkpoints.trained_weights import NameTable, renamed

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from torch import Tensor, nn

    from pipeline.tasks.rna.pocket_network import PocketNetwork

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
SIGNS = ("input_embedding.irreps_projection.weight", "bonded_mp_layers.0.bessel_basis.frequencies")
LINEARS = ("input_embedding.irreps_projection", "*.linear_in", "*.self_connection", "*_mp_layers.*.output_projection")
LEFT = (
    *(f"{name}.{constant}" for name in LINEARS for constant in ("bias", "output_mask")),
    *("*.tp.weight", "*.tp.output_mask", "*._w3j_*", "*.nonlinearity.*"),
)
SYMBOLS = ((1, 1, 2), (1, 2, 1), (2, 1, 1), (2, 2, 2))  # the others are so simple that e3nn keeps none
FRESH = ("atoms.mean_3", "atoms.deviation_3")  # which they keep beside their data
TABLE = NameTable(NAMES, SIGNS, LEFT, FRESH)


class RnaForm:
    """The names of RNA-3E-FFI for one network."""

    left: tuple[str, ...] = LEFT
    fresh: tuple[str, ...] = FRESH

    def __init__(self, network: PocketNetwork) -> None:
        self._network = network

    def knows(self, names: Collection[str]) -> bool:
        """Say whether tensors of these names are of RNA-3E-FFI."""
        return TABLE.knows(names)

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return their tensors under our names; refuse those for a network that does not behave as theirs."""
        refuse_mended("RNA-3E-FFI", as_published=self._network.sizes.as_published)
        return TABLE.read(tensors)

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return our tensors under their names, with the constants that their state has."""
        refuse_mended("RNA-3E-FFI", as_published=self._network.sizes.as_published)
        own = {name: tensor for name, tensor in tensors.items() if name not in FRESH}
        return TABLE.write(own) | dict(_constants(self._network))


def _constants(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what e3nn keeps in a state besides weights."""
    for name, module in network.named_modules():
        theirs = renamed(name, NAMES)
        if isinstance(module, FieldLinear):
            is_there = [width * bool(before) for width, before in zip(module.leave.widths, module.enter, strict=True)]
            mask = [
                torch.full((width,), float(bool(kept)))
                for width, kept in zip(module.leave.widths, is_there, strict=True)
            ]
            yield f"{theirs}.bias", torch.empty(0)
            yield f"{theirs}.output_mask", torch.cat(mask)
        elif isinstance(module, FieldProduct):
            yield f"{theirs}.weight", torch.empty(0)
            yield f"{theirs}.output_mask", torch.ones(module.leave.size)
            kept = {path[:3] for path in module.paths} & set(SYMBOLS)
            for symbol in kept:
                place = f"{theirs}._compiled_main_left_right._w3j_{'_'.join(map(str, symbol))}"
                yield place, torch.tensor(coupling(*symbol), dtype=torch.float32)
        elif isinstance(module, EdgeLayer):
            yield from _of_activation(renamed(f"{name}.act", NAMES), module)


def _of_activation(theirs: str, layer: EdgeLayer) -> Iterator[tuple[str, Tensor]]:
    fields = layer.enter.enter
    if isinstance(layer.act, FieldGate):
        products = {"mul": fields.size - fields.scalars}
    else:
        products = {"norm.tp": sum(fields), "scalar_multiplier": fields.size}
    for product, width in products.items():
        yield f"{theirs}.{product}.weight", torch.empty(0)
        yield f"{theirs}.{product}.output_mask", torch.ones(width)
