"""The network of the docking task: messages within each partner, then across all pairs, then a pull on the ligand.

It is told of distances and angles, so that features are the same however a complex is turned and moved as a whole. Each
pair of residues pulls the ligand's residue along the line between the two; the pulls on all of them make one shift and
one turn, which turn with the complex.

Shapes: N residues of all partners, P pairs of a receptor and a ligand residue, B items, S partners (two an item), D
features, C columns of what pairs add up to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeline.errors import ConfigError
from pipeline.protocol import ITEMS
from pipeline.tasks.partner_graphs import (
    CA,
    PartnerBatch,
    PartnerEncoder,
    PartnerGeometry,
    direction,
    example_partners,
    joined_partners,
    means,
    partners_of,
)
from pipeline.tasks.task_parts import above_zero, at_least, dropout_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from pipeline.protocol import Sizes
    from pipeline.training.items.batch import ItemTensors, PartnerTensors

CA_ONLY = ((CA, CA),)  # whose distances are told of a pair: there are too many pairs for more
FARTHEST = 46.0  # Å; pairs further apart than this are told only which way they point
NOTHING = 1e-6  # added to weights, so that nothing is divided by 0


class PairFeatures(nn.Module):
    """Computes features of a pair of residues from both and from their geometry in the noised pose."""

    def __init__(self, width: int, pair_width: int) -> None:
        super().__init__()
        self.geometry = PartnerGeometry(CA_ONLY, FARTHEST)
        self.of_receptor, self.of_ligand = nn.Linear(width, pair_width), nn.Linear(width, pair_width, bias=False)
        self.of_geometry = nn.Linear(self.geometry.width, pair_width, bias=False)
        self.inner = nn.Linear(pair_width, pair_width)

    def ends(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return each residue's contribution to its pairs, as a receptor's residue and as a ligand's."""
        return self.of_receptor(x_ND), self.of_ligand(x_ND)

    def forward(
        self, receptor_ND: Tensor, ligand_ND: Tensor, pos_NA3: Tensor, receptor_P: Tensor, ligand_P: Tensor
    ) -> Tensor:
        x_PD = self.of_geometry(self.geometry(pos_NA3, receptor_P, ligand_P))
        x_PD = x_PD + receptor_ND.index_select(0, receptor_P) + ligand_ND.index_select(0, ligand_P)
        changed_PD: Tensor = functional.silu(self.inner(functional.silu(x_PD)))
        return changed_PD


class CrossLayer(nn.Module):
    """A layer of messages to each residue from all residues of the other partner."""

    def __init__(self, task: ComplexDocking) -> None:
        super().__init__()
        width, pair_width = task.width, task.pair_width
        self.norm = nn.LayerNorm(width)
        self.pairs, self.gate = PairFeatures(width, pair_width), nn.Linear(pair_width, 1)
        self.update = nn.Sequential(nn.Linear(width + pair_width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.dropout, self.pairs_at_once = task.dropout, task.pairs_at_once

    def forward(self, x_ND: Tensor, partners: PartnerBatch) -> Tensor:
        normed_ND = self.norm(x_ND)
        ends = self.pairs.ends(normed_ND)

        def messages(receptor_P: Tensor, ligand_P: Tensor) -> Tensor:
            pair_PD = self.pairs(*ends, partners.pos_NA3, receptor_P, ligand_P)
            weight_P1 = torch.sigmoid(self.gate(pair_PD))
            parts = (weight_P1 * pair_PD, weight_P1)  # apart: joined, they would be in memory twice
            return torch.cat([_at_both(part.to(x_ND.dtype), receptor_P, ligand_P, len(x_ND)) for part in parts], -1)

        sums_NC = sum_over_pairs(messages, partners, self.pairs_at_once)
        heard_ND = sums_NC[:, :-1] / (sums_NC[:, -1:] + NOTHING)
        change_ND = self.update(torch.cat([normed_ND, heard_ND], -1))
        return x_ND + functional.dropout(change_ND, self.dropout, self.training)


class Pull(nn.Module):
    """Sums the pulls of all pairs to a translation and a rotation of the ligand, in units of the noise."""

    def __init__(self, task: ComplexDocking) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(task.width)
        self.pairs, self.outer = PairFeatures(task.width, task.pair_width), nn.Linear(task.pair_width, 3)
        self.pairs_at_once = task.pairs_at_once

    def forward(self, x_ND: Tensor, partners: PartnerBatch) -> tuple[Tensor, Tensor]:
        """Return the translation and the rotation vector about the ligand's centre [B, 3] each."""
        ends = self.pairs.ends(self.norm(x_ND))
        ca_N3 = partners.pos_NA3[:, CA]

        def pulled(receptor_P: Tensor, ligand_P: Tensor) -> Tensor:
            pair_PD = self.pairs(*ends, partners.pos_NA3, receptor_P, ligand_P)
            shift_P1, turn_P1, logit_P1 = self.outer(pair_PD).to(x_ND.dtype).unsqueeze(-1).unbind(1)
            weight_P1 = torch.sigmoid(logit_P1)
            way_P3 = direction(ca_N3.index_select(0, receptor_P) - ca_N3.index_select(0, ligand_P))
            said_PC = torch.cat([weight_P1 * shift_P1 * way_P3, weight_P1 * turn_P1 * way_P3, weight_P1], -1)
            return x_ND.new_zeros(len(x_ND), said_PC.shape[1]).index_add(0, ligand_P, said_PC)

        sums_NC = sum_over_pairs(pulled, partners, self.pairs_at_once)
        shift_N3, turn_N3, weight_N1 = torch.split_with_sizes(sums_NC, [3, 3, 1], -1)
        arm_N3 = arms(partners)
        long_S1 = means(arm_N3.square().sum(-1, keepdim=True), partners.partner_N, len(partners.other_S))
        arm_N3 = arm_N3 * (long_S1 + NOTHING).rsqrt().index_select(0, partners.partner_N)  # whatever the ligand's size
        torque_N3 = torch.linalg.cross(arm_N3, turn_N3)
        asked_NC = torch.cat([shift_N3, torque_N3, weight_N1], -1)
        asked_BC = asked_NC.new_zeros(len(partners.sizes), asked_NC.shape[1])
        asked_BC = asked_BC.index_add(0, partners.partner_N // 2, asked_NC)
        asked_B6 = asked_BC[:, :-1] / (asked_BC[:, -1:] + NOTHING)
        return asked_B6[:, :3], asked_B6[:, 3:]


class DockingNetwork(PartnerEncoder):
    """Predicts the translation and rotation that bring the ligand back, from two partners in a noised pose."""

    def __init__(self, task: ComplexDocking) -> None:
        super().__init__(task.embedding_dim, task.width, task.layers, task.dropout)
        self.cross_layers = nn.ModuleList(CrossLayer(task) for _ in range(task.cross_layers))
        self.pull = Pull(task)

    def forward(self, batch: DockingBatch) -> tuple[Tensor, Tensor]:
        """Return the translation and the rotation vector of each ligand [B, 3], in units of the noise."""
        x_ND = self.encode(batch.partners)
        for layer in self.cross_layers:
            x_ND = layer(x_ND, batch.partners)
        translation_B3, rotation_B3 = self.pull(x_ND, batch.partners)
        return translation_B3, rotation_B3


def sum_over_pairs(run: Callable[[Tensor, Tensor], Tensor], partners: PartnerBatch, pairs_at_once: int) -> Tensor:
    """Return a sum over all pairs; taken in pieces of `pairs_at_once`, which are computed again in backward."""
    ends = partners.receptor_P, partners.ligand_P
    if not pairs_at_once:
        return run(*ends)
    pieces = (slice(first, first + pairs_at_once) for first in range(0, len(ends[0]), pairs_at_once))
    again = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=False)
    total: Tensor = reduce(torch.add, (again(*(of_P[piece] for of_P in ends)) for piece in pieces))
    return total


def _at_both(of_PD: Tensor, receptor_P: Tensor, ligand_P: Tensor, count: int) -> Tensor:
    """Add up the values of pairs at both residues of each."""
    return of_PD.new_zeros(count, of_PD.shape[1]).index_add(0, receptor_P, of_PD).index_add(0, ligand_P, of_PD)


def arms(partners: PartnerBatch) -> Tensor:
    """Return the position of each residue relative to the centre of its partner."""
    ca_N3 = partners.pos_NA3[:, CA]
    centre_S3 = means(ca_N3, partners.partner_N, len(partners.other_S))
    return ca_N3 - centre_S3.index_select(0, partners.partner_N)


TERMS = (TRANSLATION, ROTATION) = ("translation", "rotation")
LABEL = "label"  # suffix of an output's name, after an underscore, for the true value
BEFORE, AFTER = "rmsd_before", "rmsd_after"  # Å, of the ligand's CA atoms, from where they belong
LEAST = {"width": 1, "layers": 0, "cross_layers": 0, "pair_width": 1, "embedding_dim": 0, "pairs_at_once": 0}


class DockingBatch(NamedTuple):
    """Some items' partners, and what would bring each ligand back."""

    partners: PartnerBatch  # the ligands where the noise has moved them
    translation_B3: Tensor  # Å, that brings each ligand back, after
    rotation_B3: Tensor  # a turn about its centre: an axis times radians


class Noise(NamedTuple):
    """How a ligand was moved away: turned about its centre, then shifted."""

    rotation_3: NDArray[np.float64]
    translation_3: NDArray[np.float64]


@dataclass(frozen=True)
class ComplexDocking:
    """The task: predict how to move a displaced ligand back, from both partners' structures and sequences."""

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
        return DockingNetwork(self)

    def cost(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes that decide how much memory an item takes: mostly pairs, n_rec × n_lig."""
        return {name: item[name] for name in ("nodes", "edges", "pairs")}

    def collate(self, items: Sequence[ItemTensors], rng: np.random.Generator) -> DockingBatch:  # noqa: ARG002 - items have their own
        """Concatenate items, each ligand moved away at random by the item's own generator."""
        sides = [_complex(item) for item in items]
        noises = [self._noise(item.rng) for item in items]
        partners = joined_partners(sides, self.embedding_dim)
        pos = list(partners.of_each(partners.pos_NA3))
        pos[1::2] = [_moved(ligand, pair, noise) for ligand, pair, noise in zip(pos[1::2], sides, noises, strict=True)]
        back = (_stacked([-noise.translation_3 for noise in noises]), _stacked([-noise.rotation_3 for noise in noises]))
        return DockingBatch(partners._replace(pos_NA3=torch.cat(pos)), *back)

    def _noise(self, rng: np.random.Generator) -> Noise:
        """Draw a rotation of at most 180 degrees and a translation."""
        axis_3 = rng.normal(size=3)
        angle = (self.rotation_sigma * rng.normal() + np.pi) % (2 * np.pi) - np.pi
        return Noise(angle * axis_3 / np.linalg.norm(axis_3), self.translation_sigma * rng.normal(size=3))

    def predict(self, model: nn.Module, batch: DockingBatch) -> tuple[Tensor, Tensor]:
        """Return the translation in Å and the rotation vector in radians [B, 3] each."""
        translation_B3, rotation_B3 = model(batch)
        return self.translation_sigma * translation_B3, self.rotation_sigma * rotation_B3

    def loss(self, model: nn.Module, batch: DockingBatch) -> dict[str, tuple[Tensor, float]]:
        """Return the squared errors of translations and of rotation vectors, in units of the noise."""
        translation_B3, rotation_B3 = model(batch)
        weights = self.weights(batch)
        away_B3 = translation_B3 - batch.translation_B3 / self.translation_sigma
        turned_B3 = rotation_B3 - batch.rotation_B3 / self.rotation_sigma
        errors = dict(zip(TERMS, (away_B3, turned_B3), strict=True))
        return {name: (error_B3.square().sum(), weights[name]) for name, error_B3 in errors.items()}

    def weights(self, batch: DockingBatch) -> dict[str, float]:
        """Return how many items there are."""
        return dict.fromkeys(TERMS, float(len(batch.translation_B3)))

    def outputs(self, model: nn.Module, batch: DockingBatch) -> dict[str, list[Tensor]]:
        """Return each item's translation and rotation [3], the right ones, and the RMSD before and after [1]."""
        translation_B3, rotation_B3 = self.predict(model, batch)
        right_N3 = _rigid(batch, batch.translation_B3, batch.rotation_B3)
        before_B = _rmsd(batch, arms(batch.partners), right_N3)
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
        """Return the metrics of a split: RMSD in Å, mean errors of translations in Å and of rotations in degrees."""
        rmsd = {name: np.array([float(value[0]) for value in outputs[name]]) for name in (BEFORE, AFTER)}
        pairs = {name: zip(outputs[name], outputs[f"{name}_{LABEL}"], strict=True) for name in TERMS}
        shifts = [float(np.linalg.norm(predicted - right)) for predicted, right in pairs[TRANSLATION]]
        angles = [_degrees_between(predicted, right) for predicted, right in pairs[ROTATION]]
        if not angles:
            return {}
        figures = {f"{name}_mean": float(values_B.mean()) for name, values_B in rmsd.items()}
        figures |= {f"{name}_median": float(np.median(values_B)) for name, values_B in rmsd.items()}
        return figures | {"translation_error": float(np.mean(shifts)), "rotation_error": float(np.mean(angles))}

    def example(self, sizes: Sizes) -> DockingBatch:
        """Return a batch of these sizes; how they are spread over its items makes no difference."""
        items = sizes[ITEMS]
        partners = example_partners(sizes, self.embedding_dim)
        return DockingBatch(partners, torch.randn(items, 3), torch.randn(items, 3))


def _complex(item: ItemTensors) -> tuple[PartnerTensors, PartnerTensors]:
    """Return the two partners of an item; raise unless they are in one frame."""
    receptor, ligand = partners_of(item)
    if ligand is None:
        problem = f"docking is of two partners, and {item.id} has one"
        remedy = "leave it out, or say which chains are whose: data.receptor_chains"
        raise ConfigError(problem, where="data", remedy=remedy)
    # Beside items of unbound structures, a batch says of all others that no residue is labelled.
    if any(side.nodes["labelled"].any() for side in (receptor, ligand) if "labelled" in side.nodes):
        problem = f"the partners of {item.id} are unbound structures: there is no pose of the two in one frame"
        raise ConfigError(problem, where="data.state", remedy="--set data.state=bound")
    if not len(item.labels.get("contact_pairs", ())):
        problem = f"{item.id} has no native contacts, which show that its partners stand in one frame"
        raise ConfigError(problem, where="graph.contacts", remedy="--set graph.contacts=5")
    return receptor, ligand


def _moved(pos_NA3: Tensor, sides: tuple[PartnerTensors, PartnerTensors], noise: Noise) -> Tensor:
    """Return the atoms of a ligand, turned about the mean of its CA atoms and shifted, in the receptor's frame."""
    receptor, ligand = sides
    there_3 = ligand.centre.double() - receptor.centre.double()  # sides have their own origins
    centre_3 = pos_NA3[:, CA].double().mean(0)
    turn_33 = rotation_matrices(torch.from_numpy(noise.rotation_3))
    moved_NA3 = (pos_NA3 - centre_3) @ turn_33.T + centre_3 + there_3 + torch.from_numpy(noise.translation_3)
    return moved_NA3.to(pos_NA3.dtype)


def _stacked(vectors: Sequence[NDArray[np.float64]]) -> Tensor:
    return torch.from_numpy(np.stack(vectors)).float()


def rotation_matrices(vector_3: Tensor) -> Tensor:
    """Return the matrices of rotation vectors [..., 3, 3]."""
    x, y, z = vector_3.unbind(-1)
    nought = torch.zeros_like(x)
    skew = torch.stack([nought, -z, y, z, nought, -x, -y, x, nought], -1).reshape(*x.shape, 3, 3)
    matrices: Tensor = torch.linalg.matrix_exp(skew)
    return matrices


def _rigid(batch: DockingBatch, translation_B3: Tensor, rotation_B3: Tensor) -> Tensor:
    """Return the residues' positions after a rotation and a translation, relative to their partner's present centre."""
    item_N, arm_N3 = batch.partners.partner_N // 2, arms(batch.partners)
    with torch.autocast(arm_N3.device.type, enabled=False):  # in half precision, tenths of an Å would be lost
        turn_N33 = rotation_matrices(rotation_B3.to(arm_N3.dtype)).index_select(0, item_N)
        turned_N3 = (turn_N33 @ arm_N3.unsqueeze(-1)).squeeze(-1)
    return turned_N3 + translation_B3.index_select(0, item_N)


def _rmsd(batch: DockingBatch, pos_N3: Tensor, other_N3: Tensor) -> Tensor:
    """Return the RMSD of each item's ligand between two sets of positions [B]."""
    apart_N = (pos_N3 - other_N3).square().sum(-1)
    return torch.stack([apart.mean() for apart in batch.partners.of_each(apart_N)[1::2]]).sqrt()


def _degrees_between(first_3: NDArray[Any], second_3: NDArray[Any]) -> float:
    """Return the angle between two rotation vectors' rotations, in degrees."""
    first_33, second_33 = (
        rotation_matrices(torch.from_numpy(np.asarray(vector_3, np.float64))) for vector_3 in (first_3, second_3)
    )
    cosine = float((torch.trace(first_33.T @ second_33) - 1) / 2)
    return float(np.degrees(np.arccos(np.clip(cosine, -1, 1))))
