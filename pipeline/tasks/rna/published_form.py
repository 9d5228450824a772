"""Weights of RNA-3E-FFI under the names of our network, and back: a table of names, and the constants that e3nn keeps.

Their constants (3j symbols, masks, empty biases) are left out on the way in, and made anew on the way out.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from pipeline.encoder.published_weights import renamed
from pipeline.tasks.irreps import no_weights, product_constants
from pipeline.tasks.rna.pocket_network import EdgeLayer
from pipeline.tasks.rna.turning_fields import FieldGate, FieldLinear, FieldProduct
from pipeline.tasks.task_parts import OriginalForm

if TYPE_CHECKING:
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


def rna_form(network: PocketNetwork) -> OriginalForm:
    """Return the form of RNA-3E-FFI for a network."""
    return replace(FORM, as_published=network.sizes.as_published, constants=partial(_constants, network))


def _constants(network: nn.Module) -> dict[str, Tensor]:
    """Return what e3nn keeps in a state besides weights."""
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
