"""How a ligand that was moved away is to come back: one step of rigid docking, as in fine-tuning on known complexes.

    train: {task: "pipeline.tasks.complex_docking:ComplexDocking", options: {embedding_dim: 1280}}

It reads residue graphs (`graph.nodes: residue`) of complexes as they stand, and the embeddings of their residues. Each
time an item is seen its ligand is turned about its centre and shifted, and the network is to say the shift and the turn
that bring it back. It is told no level of noise and draws no samples: this is the step that a diffusion model such as
DiffDock-PP repeats, not its sampler.

Unbound structures are refused: their partners have a frame each, so there is no pose to bring a ligand back to.

Shapes: N residues of all partners, E edges, P pairs, S partners (two an item), B items, D numbers of an embedded
residue, F flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pipeline.errors import ConfigError
from pipeline.protocol import ITEMS
from pipeline.tasks.docking_model import Network, arms
from pipeline.tasks.options import above_zero, at_least, dropout_of
from pipeline.tasks.partners import CA, columns, made_up, partners_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from pipeline.protocol import Sizes
    from pipeline.training.batch import Graph, Side

TERMS = (TRANSLATION, ROTATION) = ("translation", "rotation")
LABEL = "label"  # of an output, behind an underscore: what would be right
BEFORE, AFTER = "rmsd_before", "rmsd_after"  # Å, of the ligand's CA atoms, from where they belong
LEAST = {"width": 1, "layers": 0, "cross_layers": 0, "pair_width": 1, "embedding_dim": 0, "pairs_at_once": 0}


class Batch(NamedTuple):
    """Some items' partners, concatenated: see `partners`."""

    pos_NA3: Tensor  # the ligands' where the noise has moved them
    type_N: Tensor
    flags_NF: Tensor
    embedding_ND: Tensor
    partner_N: Tensor
    other_S: Tensor
    from_E: Tensor
    to_E: Tensor
    step_E: Tensor
    receptor_P: Tensor
    ligand_P: Tensor
    sizes: tuple[tuple[int, int], ...]
    translation_B3: Tensor  # Å, that brings each ligand back, after
    rotation_B3: Tensor  # a turn about its centre: an axis times radians


class Noise(NamedTuple):
    """How a ligand was moved away: turned about its centre, then shifted."""

    rotation_3: NDArray[np.float64]
    translation_3: NDArray[np.float64]


@dataclass(frozen=True)
class ComplexDocking:
    """A ligand's way back, from both partners' structures and sequences."""

    embedding_dim: int = 1280  # of ESM-2 650M; 0: without embeddings
    width: int = 128  # features of a residue
    layers: int = 4  # within the partners, the same for both
    cross_layers: int = 2  # across all pairs of a receptor and a ligand residue
    pair_width: int = 64  # features of a pair: what memory goes by
    pairs_at_once: int = 0  # so many are in memory together, and are computed again in backward; 0: all, once
    translation_sigma: float = 5.0  # Å, the standard deviation of the shift along each axis
    rotation_sigma: float = 0.5  # radians, that of the turn about an axis drawn evenly from the sphere
    dropout: float = 0.0

    def __post_init__(self) -> None:
        at_least(self, LEAST)
        above_zero(self, ("translation_sigma", "rotation_sigma"))
        dropout_of(self)

    def model(self) -> nn.Module:
        """Return the network."""
        return Network(
            embedding_dim=self.embedding_dim,
            width=self.width,
            layers=self.layers,
            cross_layers=self.cross_layers,
            pair_width=self.pair_width,
            dropout=self.dropout,
            pairs_at_once=self.pairs_at_once,
        )

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return what memory goes by: mostly by pairs, n_rec × n_lig."""
        return {name: item[name] for name in ("nodes", "edges", "pairs")}

    def collate(self, items: Sequence[Graph], rng: np.random.Generator) -> Batch:  # noqa: ARG002 - items have their own
        """Concatenate items, each ligand moved away by what the item's own random numbers say."""
        sides = [_complex(item) for item in items]
        noises = [self._noise(item.rng) for item in items]
        taken = columns(sides, self.embedding_dim)
        pos = list(taken["pos_NA3"].split([count for pair in taken["sizes"] for count in pair]))
        pos[1::2] = [_moved(one, pair, noise) for one, pair, noise in zip(pos[1::2], sides, noises, strict=True)]
        back = (_stacked([-one.translation_3 for one in noises]), _stacked([-one.rotation_3 for one in noises]))
        return Batch(**taken | {"pos_NA3": torch.cat(pos)}, translation_B3=back[0], rotation_B3=back[1])

    def _noise(self, rng: np.random.Generator) -> Noise:
        """Draw a turn, whose angle is never more than half of a full one, and a shift."""
        axis_3 = rng.normal(size=3)
        angle = (self.rotation_sigma * rng.normal() + np.pi) % (2 * np.pi) - np.pi
        return Noise(angle * axis_3 / np.linalg.norm(axis_3), self.translation_sigma * rng.normal(size=3))

    def predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the translation in Å and the rotation vector in radians [B, 3] each."""
        translation_B3, rotation_B3 = model(batch)
        return self.translation_sigma * translation_B3, self.rotation_sigma * rotation_B3

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, float]]:
        """Return the squared errors of translations and of rotation vectors, in units of the noise."""
        translation_B3, rotation_B3 = model(batch)
        weights = self.weights(batch)
        away_B3 = translation_B3 - batch.translation_B3 / self.translation_sigma
        turned_B3 = rotation_B3 - batch.rotation_B3 / self.rotation_sigma
        errors = dict(zip(TERMS, (away_B3, turned_B3), strict=True))
        return {name: (error_B3.square().sum(), weights[name]) for name, error_B3 in errors.items()}

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return how many items there are."""
        return dict.fromkeys(TERMS, float(len(batch.translation_B3)))

    def outputs(self, model: nn.Module, batch: Batch) -> dict[str, list[Tensor]]:
        """Return each item's translation and rotation [3], what would be right, and the RMSD before and after [1]."""
        translation_B3, rotation_B3 = self.predict(model, batch)
        right_N3 = _rigid(batch, batch.translation_B3, batch.rotation_B3)
        before_B = _rmsd(batch, arms(batch), right_N3)
        after_B = _rmsd(batch, _rigid(batch, translation_B3, rotation_B3), right_N3)
        named = {
            TRANSLATION: translation_B3,
            ROTATION: rotation_B3,
            f"{TRANSLATION}_{LABEL}": batch.translation_B3,
            f"{ROTATION}_{LABEL}": batch.rotation_B3,
            BEFORE: before_B.unsqueeze(-1),
            AFTER: after_B.unsqueeze(-1),
        }
        return {name: list(of_items) for name, of_items in named.items()}

    def metrics(self, outputs: Mapping[str, Sequence[Any]]) -> dict[str, float]:
        """Return the figures of a split: RMSD in Å, mean errors of the translation in Å and of the turn in degrees."""
        rmsd = {name: np.array([float(one[0]) for one in outputs[name]]) for name in (BEFORE, AFTER)}
        pairs = {name: zip(outputs[name], outputs[f"{name}_{LABEL}"], strict=True) for name in TERMS}
        shifts = [float(np.linalg.norm(one - right)) for one, right in pairs[TRANSLATION]]
        turns = [_degrees_between(one, right) for one, right in pairs[ROTATION]]
        if not turns:
            return {}
        figures = {f"{name}_mean": float(values_B.mean()) for name, values_B in rmsd.items()}
        figures |= {f"{name}_median": float(np.median(values_B)) for name, values_B in rmsd.items()}
        return figures | {"translation_error": float(np.mean(shifts)), "rotation_error": float(np.mean(turns))}

    def example(self, sizes: Sizes) -> Batch:
        """Return a batch of these sizes; how they are spread over its items makes no difference."""
        items = sizes[ITEMS]
        back: dict[str, Any] = {"translation_B3": torch.randn(items, 3), "rotation_B3": torch.randn(items, 3)}
        return Batch(**made_up(sizes, self.embedding_dim), **back)


def _complex(item: Graph) -> tuple[Side, Side]:
    """Return the two partners of an item that stands as it was found."""
    receptor, ligand = partners_of(item)
    if ligand is None:
        what = f"docking is of two partners, and {item.id} has one"
        raise ConfigError(
            what, where="data", remedy="leave it out, or say which chains are whose: data.receptor_chains"
        )
    # Beside items of unbound structures, a batch says of all others that no residue is labelled.
    if any(side.nodes["labelled"].any() for side in (receptor, ligand) if "labelled" in side.nodes):
        what = f"the partners of {item.id} are unbound structures: there is no pose of the two in one frame"
        raise ConfigError(what, where="data.state", remedy="--set data.state=bound")
    if not len(item.labels.get("contact_pairs", ())):
        what = f"{item.id} has no native contacts, which show that its partners stand in one frame"
        raise ConfigError(what, where="graph.contacts", remedy="--set graph.contacts=5")
    return receptor, ligand


def _moved(pos_NA3: Tensor, sides: tuple[Side, Side], noise: Noise) -> Tensor:
    """Return the atoms of a ligand, turned about the mean of its CA atoms and shifted, in the receptor's frame."""
    receptor, ligand = sides
    there_3 = ligand.centre.double() - receptor.centre.double()  # sides have their own origins
    centre_3 = pos_NA3[:, CA].double().mean(0)
    turn_33 = turns(torch.from_numpy(noise.rotation_3))
    moved_NA3 = (pos_NA3 - centre_3) @ turn_33.T + centre_3 + there_3 + torch.from_numpy(noise.translation_3)
    return moved_NA3.to(pos_NA3.dtype)


def _stacked(vectors: Sequence[NDArray[np.float64]]) -> Tensor:
    return torch.from_numpy(np.stack(vectors)).float()


def turns(vector_3: Tensor) -> Tensor:
    """Return the matrices of rotation vectors [..., 3, 3]."""
    x, y, z = vector_3.unbind(-1)
    nought = torch.zeros_like(x)
    skew = torch.stack([nought, -z, y, z, nought, -x, -y, x, nought], -1).reshape(*x.shape, 3, 3)
    matrices: Tensor = torch.linalg.matrix_exp(skew)
    return matrices


def _rigid(batch: Batch, translation_B3: Tensor, rotation_B3: Tensor) -> Tensor:
    """Return where residues would be, from the present centre of their partner, if it were turned and shifted so."""
    item_N, arm_N3 = batch.partner_N // 2, arms(batch)
    with torch.autocast(arm_N3.device.type, enabled=False):  # in half precision, tenths of an Å would be lost
        turn_N33 = turns(rotation_B3.to(arm_N3.dtype)).index_select(0, item_N)
        turned_N3 = (turn_N33 @ arm_N3.unsqueeze(-1)).squeeze(-1)
    return turned_N3 + translation_B3.index_select(0, item_N)


def _rmsd(batch: Batch, one_N3: Tensor, other_N3: Tensor) -> Tensor:
    """Return how far the residues of each item's ligand are from where they are to be compared with [B]."""
    apart_N = (one_N3 - other_N3).square().sum(-1)
    of_partners = torch.split_with_sizes(apart_N, [count for pair in batch.sizes for count in pair])
    return torch.stack([one.mean() for one in of_partners[1::2]]).sqrt()


def _degrees_between(one_3: NDArray[Any], other_3: NDArray[Any]) -> float:
    """Return the angle of the turn that leads from one to the other."""
    one_33, other_33 = (turns(torch.from_numpy(np.asarray(vector_3, np.float64))) for vector_3 in (one_3, other_3))
    cosine = float((torch.trace(one_33.T @ other_33) - 1) / 2)
    return float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))
