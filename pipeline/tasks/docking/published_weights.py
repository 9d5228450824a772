"""Published weights of DiffDock-PP under the names of our networks, and back: a table of names, nothing is computed.

Everything of theirs is below `encoder.`; their constants (grids, masks, 3j symbols) are left out on the way in and made
anew on the way out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.errors import ConfigError
from pipeline.tasks.docking.equivariant import PairConvolution
from pipeline.training.checkpoints.published_names import renamed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor, nn

# Ours → theirs; "*" is the number of a layer.
NAMES = {
    "trunk.residues.of_type": "atom_embed.atom_ebd",
    "trunk.residues.of_time": "atom_embed.sigma_ebd",
    "trunk.residues.mix": "atom_embed.lm_ebd",
    "trunk.inner_edges.enter": "rec_edge_embed.0",
    "trunk.inner_edges.out": "rec_edge_embed.3",
    "trunk.inner_edges.centres_M": "rec_dist_exp.offset",
    "trunk.cross_edges.centres_M": "cross_dist_exp.offset",
    "centre_edges.centres_M": "center_dist_exp.offset",
    "trunk.cross_edges.enter": "cross_edge_embed.0",
    "trunk.cross_edges.out": "cross_edge_embed.3",
    "trunk.layers.*.inner.hidden": "intra_convs.*.fc.0",
    "trunk.layers.*.inner.weights": "intra_convs.*.fc.3",
    "trunk.layers.*.cross.hidden": "cross_convs.*.fc.0",
    "trunk.layers.*.cross.weights": "cross_convs.*.fc.3",
    "centre_edges.enter": "center_edge_embed.0",
    "centre_edges.out": "center_edge_embed.3",
    "centre.hidden": "final_conv.fc.0",
    "centre.weights": "final_conv.fc.3",
    "translation.enter": "tr_final_layer.0",
    "translation.out": "tr_final_layer.3",
    "rotation.enter": "rot_final_layer.0",
    "rotation.out": "rot_final_layer.3",
    "head.0": "confidence_predictor.0",
    "head.1": "confidence_predictor.4",
    "head.2": "confidence_predictor.8",
}
ROOT = "encoder."
UNUSED, USED = "lig_dist_exp.offset", "rec_dist_exp.offset"  # two names of one grid
_DEGREE_2 = torch.tensor([0.1, 0.1, 2 / 15, 0.1, 0.1], dtype=torch.float64).sqrt()  # their harmonics' norms to ours
SYMBOLS: dict[str, tuple[str, slice, Tensor]] = {
    "1_1_1": ("coupling_111", slice(3), torch.tensor(1 / math.sqrt(6))),
    "1_2_1": ("coupling_121", slice(3, 8), _DEGREE_2[:, None]),
}


def is_published(names: Collection[str]) -> bool:
    """Tell the original's weights by their names."""
    return f"{ROOT}{NAMES['trunk.residues.mix']}.weight" in names


def from_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the original's weights under our names, without its constants; other names stay, to be refused."""
    ours = {theirs: mine for mine, theirs in NAMES.items()}
    return {
        renamed(name.removeprefix(ROOT), ours): tensor for name, tensor in tensors.items() if not _is_constant(name)
    }


@dataclass(frozen=True)
class DockingNames:
    """The form in which weights of DiffDock-PP were published, for a network that behaves as theirs or does not."""

    network: nn.Module
    as_published: bool
    left: tuple[str, ...] = (f"{ROOT}*.tensor_prod.*", ROOT + UNUSED)
    fresh: tuple[str, ...] = ()

    def knows(self, names: Collection[str]) -> bool:
        """Tell them by their names."""
        return is_published(names)

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return them under our names; refuse them for a network that does not behave as theirs."""
        self._refuse_mended("these are weights of DiffDock-PP", "--set train.options.as_published=true")
        return from_published(tensors)

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return our tensors under theirs; refuse those of a network that does not behave as theirs."""
        self._refuse_mended("these would be weights of DiffDock-PP", "train one with train.options.as_published: true")
        return to_published(self.network, tensors)

    def _refuse_mended(self, what: str, remedy: str) -> None:
        if not self.as_published:
            problem = f"{what}, which mean something only where the network has its oddities"
            raise ConfigError(problem, where="train.options.as_published", remedy=remedy)


def to_published(model: nn.Module, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return a model's state, or other tensors of its names, as the original's state dict, with its constants."""
    tensors = model.state_dict() if tensors is None else tensors
    state = {renamed(name, NAMES): tensor for name, tensor in tensors.items()}
    for name, module in model.named_modules():
        if isinstance(module, PairConvolution):
            place = renamed(f"{name}.hidden", NAMES).removesuffix("fc.0")
            state |= {f"{place}tensor_prod.{key}": tensor for key, tensor in _constants(module).items()}
    state[UNUSED] = state[USED]
    return {ROOT + name: tensor for name, tensor in state.items()}


def _constants(convolution: PairConvolution) -> dict[str, Tensor]:
    """Return what e3nn keeps in the state of a tensor product."""
    width = sum(block.channels * block.components for block in convolution.leave)
    constants = {"weight": torch.empty(0), "output_mask": torch.ones(width)}
    used = {f"1_{path.harmonic}_{convolution.leave[path.target].degree}" for path in convolution.bent}
    for degrees in used & set(SYMBOLS):
        name, rows, norm = SYMBOLS[degrees]
        symbol = convolution.get_buffer(name)[:, rows].double() * norm
        constants[f"_compiled_main_left_right._w3j_{degrees}"] = symbol.float()
    return constants


def _is_constant(name: str) -> bool:
    return ".tensor_prod." in name or name == ROOT + UNUSED
