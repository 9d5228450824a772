"""The networks of DiffDock-PP: a score of the ligand's move, and the confidence in a pose, over one kind of trunk.

`as_published` is how the original behaves, and what its weights mean: the residue's type is looked up by the first
number of its embedding, and told as a plain number; messages run from a residue to its nearest; receptors hear
directions as ligands do; the score's last convolution is told of the residue whose number is the complex's place in the
batch; rows of rotation tables are counted by one step too many. Without it all of that is mended.

Published weights have other names: everything of theirs is below `encoder.`; their constants (grids, masks, 3j symbols)
are left out on the way in and made anew on the way out. Nothing is computed.

Shapes: B complexes, P poses of each, T times (one for each pose, or one for all), N residues of a partner, R of the
receptor, L of the ligand, C columns of a grid, E embedding dimensions, M features, D components of an irrep.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from pipeline.tasks.docking.docking_trunk import (
    CUTOFF,
    CUTOFF_RATE,
    INNER_FARTHEST,
    TIME_FEATURES,
    DockingTrunk,
    EdgeInput,
    PosedComplex,
    TrunkSizes,
    scalars_of,
    time_features,
)
from pipeline.tasks.docking.equivariant import (
    AllPairs,
    Blocks,
    PairConvolution,
    edge_features,
    edge_harmonics,
)
from pipeline.tasks.docking.rigid_diffusion import NoiseSchedule, table_rows
from pipeline.tasks.irreps import Irrep, product_constants
from pipeline.tasks.task_parts import OriginalForm
from pipeline.training.checkpoints.trained_weights import renamed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from pipeline.protocol import PublishedForm


class ScoreModel(nn.Module):
    """The score of a ligand's translation, and of its rotation about its centre."""

    norms_W: Tensor

    def __init__(self, sizes: TrunkSizes, schedule: NoiseSchedule, norms_W: Tensor) -> None:
        super().__init__()
        self.schedule, self.as_published = schedule, sizes.as_published
        self.trunk = DockingTrunk(sizes, lambda time_T: CUTOFF_RATE * schedule.translation.sigma(time_T) + CUTOFF)
        self.centre_edges = EdgeInput(sizes.scalars, INNER_FARTHEST, time_first=False)
        leave = Irrep(2, 1, -1), Irrep(2, 1, 1)
        self.centre = PairConvolution(sizes.irreps(sizes.layers), leave, [sizes.scalars] * 2)
        self.translation, self.rotation = ScoreLength(sizes.scalars), ScoreLength(sizes.scalars)
        self.register_buffer("norms_W", norms_W.float(), persistent=False)
        drawn_anew(self)

    def forward(self, batch: Sequence[PosedComplex], poses_at_once: int = 1) -> tuple[Tensor, Tensor]:
        """Return the scores of the translations and the rotations [B, P, 3] each.

        As published, the pose p of every complex counts as one batch.
        """
        features = [self.trunk(posed, poses_at_once) for posed in batch]
        ligand_scalars = [scalars_of(ligand) for ligand in features]
        scores = []
        for place, (posed, ligand) in enumerate(zip(batch, features, strict=True)):
            told = _strange(ligand_scalars, place) if self.as_published else ligand_scalars[place]
            # a pose's score is the same to the last bit whatever poses are computed beside it, if one is at once
            pieces = zip(
                posed.pieces(poses_at_once), *(torch.split(x, poses_at_once) for x in (told, *ligand)), strict=True
            )
            found = [self._score(piece, tuple(blocks), told) for piece, told, *blocks in pieces]
            scores.append([torch.cat(parts) for parts in zip(*found, strict=True)])
        translations, rotations = zip(*scores, strict=True)
        return torch.stack(translations), torch.stack(rotations)

    def _score(self, posed: PosedComplex, ligand: Blocks, told_PNM: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the poses of one complex."""
        pos_PL3, time_T = posed.pos_PL3, posed.time_T
        time_TM = time_features(time_T).to(pos_PL3)
        way_P1L3 = (pos_PL3 - pos_PL3.mean(1, keepdim=True)).unsqueeze(1)
        grid, kernel = AllPairs(torch.ones_like(way_P1L3[..., 0])), self.centre.kernel()
        features = edge_features(self.centre_edges(way_P1L3, time_TM), grid)
        edges = self.centre.edges(kernel, grid, edge_harmonics(way_P1L3, grid), (features, told_PNM))
        polar, axial = self.centre(kernel, edges, ligand, row_sends=False)
        translation_P3, rotation_P3 = (polar + axial).squeeze(1).unbind(-1)
        translation_P3 = self.translation(translation_P3, time_TM) / self.schedule.translation.sigma(time_T).unsqueeze(
            -1
        )
        return translation_P3, self.rotation(rotation_P3, time_TM) * self.norm(time_T).to(pos_PL3).unsqueeze(-1)

    def published_forms(self) -> Mapping[str, PublishedForm]:
        """Return the original's names."""
        return published_form(self, as_published=self.as_published)

    def fitting_options(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the options that fit the original's weights."""
        return trunk_options(from_published(tensors))

    def norm(self, time_T: Tensor) -> Tensor:
        """Return the norm of the scores of rotations at a time."""
        rows = table_rows(self.schedule.rotation.sigma(time_T), as_published=self.as_published)
        return self.norms_W[rows]


class ScoreLength(nn.Module):
    """Gives a vector another length, by the one that it has and the time."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.enter, self.out = nn.Linear(1 + TIME_FEATURES, features), nn.Linear(features, 1)

    def forward(self, vector_P3: Tensor, time_TM: Tensor) -> Tensor:
        told_PM = torch.cat([vector_P3.norm(dim=-1, keepdim=True), time_TM.expand(len(vector_P3), -1)], -1)
        scaled_P3: Tensor = functional.normalize(vector_P3, dim=-1) * self.out(self.enter(told_PM).relu())
        return scaled_P3


class ConfidenceModel(nn.Module):
    """The logit of a pose being near the true one."""

    def __init__(self, sizes: TrunkSizes) -> None:
        super().__init__()
        self.trunk = DockingTrunk(sizes, lambda time_T: CUTOFF_RATE * time_T + CUTOFF)
        widths = [2 * sizes.scalars, sizes.scalars, sizes.scalars, 1]
        self.head = nn.ModuleList(nn.Linear(enter, leave) for enter, leave in pairwise(widths))
        drawn_anew(self)

    def forward(self, batch: Sequence[PosedComplex], poses_at_once: int = 1) -> Tensor:
        """Return the logits of poses [B, P]."""
        return torch.stack([self._logits(posed, poses_at_once) for posed in batch])

    def published_forms(self) -> Mapping[str, PublishedForm]:
        """Return the original's names."""
        return published_form(self, as_published=self.trunk.sizes.as_published)

    def _logits(self, posed: PosedComplex, poses_at_once: int) -> Tensor:
        ligand = self.trunk(posed, poses_at_once)
        pooled_PM = torch.cat([scalars_of(ligand), scalars_of(ligand[-1:])], -1).mean(1)
        return torch.cat([self._judged(piece_PM) for piece_PM in torch.split(pooled_PM, poses_at_once)])

    def _judged(self, pooled_PM: Tensor) -> Tensor:
        """Return the logits of poses, from the means of their ligands' scalars, even and odd ones."""
        first, second, last = self.head
        logit_P: Tensor = last(second(first(pooled_PM).relu()).relu()).squeeze(-1)
        return logit_P


def drawn_anew(model: nn.Module) -> None:
    """Draw weights as the original does: Xavier's normal distribution, and 0 for all that has one dimension."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_normal_(parameter)
        else:
            nn.init.zeros_(parameter)


def _strange(ligand_scalars: Sequence[Tensor], place: int) -> Tensor:
    """Return the scalars of the residue with this number among the ligands of a batch [P, 1, M]."""
    for scalars_PLM in ligand_scalars:
        if place < scalars_PLM.shape[1]:
            return scalars_PLM[:, place : place + 1]
        place -= scalars_PLM.shape[1]
    raise AssertionError("a batch has one residue for each complex")


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
UNUSED = "lig_dist_exp.offset"  # another name of a grid
FORM = OriginalForm(
    NAMES,
    signs=("atom_embed.lm_ebd.weight",),
    left=("*.tensor_prod.*", f"*{UNUSED}"),
    prefix="encoder.",
    system="DiffDock-PP",
)


def from_published(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the original's weights under our names, without its constants; other names stay, to be refused."""
    return FORM.read({name: tensor for name, tensor in tensors.items() if not FORM.leaves(name)})


def published_form(model: nn.Module, *, as_published: bool) -> Mapping[str, OriginalForm]:
    """Return the original's form for a network."""
    return {"diffdock_pp": replace(FORM, as_published=as_published, constants=partial(_constants, model))}


def trunk_options(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sizes of a network by the shapes of its weights, under the names of the tasks' options."""
    scalars, told = tensors["trunk.residues.mix.weight"].shape
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("trunk.layers."))
    vectors = (len(tensors["trunk.layers.0.inner.weights.bias"]) - scalars * scalars) // scalars
    return {"embedding_dim": told - scalars, "scalars": scalars, "vectors": vectors, "layers": layers}


def _constants(model: nn.Module) -> dict[str, Tensor]:
    """Return what their state has besides weights."""
    constants = {UNUSED: model.get_buffer("trunk.inner_edges.centres_M")}
    for name, module in model.named_modules():
        if isinstance(module, PairConvolution):
            place = renamed(f"{name}.hidden", NAMES).removesuffix("fc.0")
            constants |= product_constants(f"{place}tensor_prod", module.paths, module.leave)
    return constants
