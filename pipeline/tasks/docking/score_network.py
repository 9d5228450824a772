"""The networks of DiffDock-PP: a score of the ligand's move, and the confidence in a pose, over one kind of trunk.

The trunk computes features of residues by messages within and across the partners. `as_published` is how the original
behaves, and what its weights need: the residue's type is looked up by the first number of its embedding, and enters as
a plain number; messages run from a residue to its nearest; receptors hear directions as ligands do; the score's last
convolution sees the residue whose number is the complex's place in the batch; rows of rotation tables are counted by
one step too many. Without it all of that is corrected.

Published weights have other names: everything of theirs is below `encoder.`; their constants (grids, masks, 3j symbols)
are left out on the way in and computed on the way out.

Shapes: B complexes, P poses of each, T times (one for each pose, or one for all), N residues of a partner, R of the
receptor, L of the ligand, C columns of a grid, E embedding dimensions, M features, D components of an irrep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from pipeline.tasks.docking.equivariant import (
    AllPairs,
    Blocks,
    Kernel,
    ListedPairs,
    PairConvolution,
    edge_features,
    edge_harmonics,
)
from pipeline.tasks.docking.rigid_diffusion import NoiseSchedule, table_rows
from pipeline.tasks.irreps import Irrep, product_constants
from pipeline.tasks.task_parts import OriginalForm
from pipeline.training.checkpoints.trained_weights import renamed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor


TYPES = 24  # ESM-2's tokens of residues end with 23
TIME_FEATURES, DISTANCES = 32, 32
TIME_SCALE = 10_000
INNER_FARTHEST, CROSS_FARTHEST = 30.0, 80.0  # Å, of the Gaussians on distances
LEAST_EXPONENT = -70.0  # of Gaussians: smaller ones make no difference
CUTOFF, CUTOFF_RATE = 40.0, 3.0  # Å between residues that hear of each other, and for each Å of noise
FLIPPED = (-1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0)  # harmonics of the opposite direction


@dataclass(frozen=True)
class TrunkSizes:
    """Sizes of a network; the defaults are the published score model's."""

    scalars: int = 32  # features of a residue that do not turn with it
    vectors: int = 6  # features that do
    layers: int = 4
    embedding_dim: int = 1280  # of ESM-2 650M; 0: without embeddings
    as_published: bool = False  # like DiffDock-PP, with its mistakes: published weights need this

    def irreps(self, layer: int) -> tuple[Irrep, ...]:
        """Return the features that enter a layer: each adds a kind until there are four."""
        kinds = (
            Irrep(self.scalars, 0, 1),
            Irrep(self.vectors, 1, -1),
            Irrep(self.vectors, 1, 1),
            Irrep(self.scalars, 0, -1),
        )
        return kinds[: layer + 1]


class DockingPartner(NamedTuple):
    """A protein in its file's frame, about any origin."""

    pos_N3: Tensor  # CA, Å
    token_N: Tensor  # of the residue's type in ESM-2's vocabulary
    embedding_NE: Tensor
    pairs: ListedPairs  # of each residue and its nearest


class PosedComplex(NamedTuple):
    """A complex with poses of its ligand in the receptor's frame."""

    receptor: DockingPartner
    ligand: DockingPartner
    pos_PL3: Tensor
    time_T: Tensor

    def pieces(self, poses_at_once: int) -> list[PosedComplex]:
        """Split the poses into groups of `poses_at_once`."""
        positions = torch.split(self.pos_PL3, poses_at_once)
        times = torch.split(self.time_T, poses_at_once) if len(self.time_T) > 1 else (self.time_T,) * len(positions)
        return [self._replace(pos_PL3=pos, time_T=time) for pos, time in zip(positions, times, strict=True)]


class EdgeInput(nn.Module):
    """Features of edges from Gaussians on their length, and the time."""

    centres_M: Tensor

    def __init__(self, features: int, farthest: float, *, time_first: bool = True) -> None:
        super().__init__()
        self.register_buffer("centres_M", torch.linspace(0.0, farthest, DISTANCES))  # published ones differ by a bit
        self.factor = -0.5 / (farthest / (DISTANCES - 1)) ** 2
        self.time_first = time_first
        self.enter, self.out = nn.Linear(TIME_FEATURES + DISTANCES, features), nn.Linear(features, features)

    def forward(self, way_PRC3: Tensor, time_TM: Tensor) -> Tensor:
        apart_PRCM = way_PRC3.norm(dim=-1, keepdim=True) - self.centres_M
        # in place: there are many, and no gradients; numbers too small for the type slow the products that they enter
        near_PRCM = apart_PRCM.square_().mul_(self.factor).clamp_(min=LEAST_EXPONENT).exp_()
        parts = torch.split(self.enter.weight.T, TIME_FEATURES)  # of which there are as many as distances
        of_time, of_distance = parts if self.time_first else reversed(parts)
        inputs_PRCM = near_PRCM @ of_distance
        of_pose_P11M = (time_TM @ of_time + self.enter.bias)[:, None, None]
        is_alike = len(of_pose_P11M) in (1, len(inputs_PRCM))  # else one pose has many times
        inputs_PRCM = (inputs_PRCM.add_(of_pose_P11M) if is_alike else inputs_PRCM + of_pose_P11M).relu_()
        features_PRCM: Tensor = self.out(inputs_PRCM)
        return features_PRCM


class ResidueInput(nn.Module):
    """Features of residues from their type, their embedding and the time."""

    def __init__(self, sizes: TrunkSizes) -> None:
        super().__init__()
        self.of_type = nn.Embedding(TYPES, sizes.scalars)
        self.of_time = nn.Linear(TIME_FEATURES, sizes.scalars)
        self.mix = nn.Linear(sizes.scalars + sizes.embedding_dim, sizes.scalars)
        self.sizes = sizes

    def forward(self, partner: DockingPartner, time_TM: Tensor) -> Tensor:
        """Return features [T, N, M]."""
        type_N, inputs_NE = partner.token_N, partner.embedding_NE
        # The embedding and the type are joined in the other order than they are taken apart
        if self.sizes.as_published:
            type_N, inputs_NE = (
                inputs_NE[:, 0].long().clamp(0, TYPES - 1),
                torch.cat([inputs_NE[:, 1:], type_N.to(inputs_NE).unsqueeze(1)], 1),
            )
        of_known, of_embedding = self.mix.weight.T.split_with_sizes([self.sizes.scalars, self.sizes.embedding_dim])
        known_TNM = self.of_type(type_N) + self.of_time(time_TM).unsqueeze(1)
        features_TNM: Tensor = known_TNM @ of_known + (inputs_NE @ of_embedding + self.mix.bias)
        return features_TNM


class PartnerEdges(NamedTuple):
    """A partner's inner edges before any layer."""

    pairs: ListedPairs
    harmonics_PRC8: Tensor
    features_PRCM: Tensor


class SharedInput(NamedTuple):
    """Features that are the same for all poses of a complex."""

    time_TM: Tensor
    receptor: Blocks
    ligand: Blocks
    receptor_edges: PartnerEdges
    kernels: Sequence[tuple[Kernel, Kernel]]


@dataclass(frozen=True)
class Chosen:
    """Some of a partner's residues, or all."""

    places: Tensor | None
    total: int

    def of(self, x: Tensor) -> Tensor:
        """Return their features [P, N, …]."""
        return x if self.places is None else x.index_select(1, self.places)

    def back(self, x: Tensor) -> Tensor:
        """Return features of all, with 0 for those not chosen."""
        if self.places is None:
            return x
        return x.new_zeros(len(x), self.total, *x.shape[2:]).index_copy(1, self.places, x)


class MetPairs(NamedTuple):
    """The pairs of the partners before any layer."""

    pairs: AllPairs
    harmonics_PRL8: Tensor
    features_PRLM: Tensor
    rows: Chosen
    columns: Chosen


class TrunkLayer(nn.Module):
    """Messages within the partners, and between them; the last layer computes no receptor, which nothing reads."""

    flipped_8: Tensor

    def __init__(self, sizes: TrunkSizes, layer: int) -> None:
        super().__init__()
        blocks, inputs = (sizes.irreps(layer), sizes.irreps(layer + 1)), [sizes.scalars] * 3
        self.inner, self.cross = PairConvolution(*blocks, inputs), PairConvolution(*blocks, inputs)
        self.as_published, self.is_last = sizes.as_published, layer == sizes.layers - 1
        self.register_buffer("flipped_8", torch.tensor(FLIPPED), persistent=False)

    def forward(
        self,
        receptor: Blocks,
        ligand: Blocks,
        edges: tuple[PartnerEdges, PartnerEdges],
        met: MetPairs | None,
        kernels: tuple[Kernel, Kernel],
    ) -> tuple[Blocks, Blocks]:
        """Return the features of both partners after the layer."""
        inner, between = kernels
        spoken, heard = ((), ()) if met is None else self._crossed(met, between, receptor, ligand)
        after = receptor
        if not self.is_last:
            after = _added(receptor, self._within(inner, edges[0], receptor), spoken)
        return after, _added(ligand, self._within(inner, edges[1], ligand), heard)

    def _crossed(self, met: MetPairs, kernel: Kernel, receptor: Blocks, ligand: Blocks) -> tuple[Blocks, Blocks]:
        """Return the messages between receptor and ligand."""
        receptor, ligand = tuple(map(met.rows.of, receptor)), tuple(map(met.columns.of, ligand))
        inputs = met.features_PRLM, scalars_of(ligand), scalars_of(receptor)
        edges = self.cross.edges(kernel, met.pairs, met.harmonics_PRL8, inputs)
        heard = self.cross(kernel, edges, receptor, row_sends=True)
        spoken: Blocks = ()
        if not self.is_last:
            if not self.as_published:
                edges = edges._replace(harmonics_PRC8=met.harmonics_PRL8 * self.flipped_8)
            spoken = self.cross(kernel, edges, ligand, row_sends=False)
        return tuple(map(met.rows.back, spoken)), tuple(map(met.columns.back, heard))

    def _within(self, kernel: Kernel, edges: PartnerEdges, x: Blocks) -> Blocks:
        """Return the messages among a partner's residues."""
        inputs = edges.features_PRCM, scalars_of(x), scalars_of(x)
        made = self.inner.edges(kernel, edges.pairs, edges.harmonics_PRC8, inputs)
        heard: Blocks = self.inner(kernel, made, x, row_sends=self.as_published)
        return heard


class DockingTrunk(nn.Module):
    """Features of residues from a pose."""

    def __init__(self, sizes: TrunkSizes, cutoff: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.sizes, self.cutoff = sizes, cutoff
        self.residues = ResidueInput(sizes)
        self.inner_edges = EdgeInput(sizes.scalars, INNER_FARTHEST)
        self.cross_edges = EdgeInput(sizes.scalars, CROSS_FARTHEST)
        self.layers: Sequence[TrunkLayer] = nn.ModuleList(TrunkLayer(sizes, at) for at in range(sizes.layers))  # type: ignore[assignment]

    def _shared(self, posed: PosedComplex) -> SharedInput:
        """Compute the features that do not depend on the pose."""
        time_TM = time_features(posed.time_T).to(posed.pos_PL3)
        receptor, ligand = posed.receptor, posed.ligand
        return SharedInput(
            time_TM=time_TM,
            receptor=(self.residues(receptor, time_TM).unsqueeze(2),),
            ligand=(self.residues(ligand, time_TM).unsqueeze(2),),
            receptor_edges=self._inner(receptor.pos_N3.unsqueeze(0), receptor.pairs, time_TM),
            kernels=[(layer.inner.kernel(), layer.cross.kernel()) for layer in self.layers],
        )

    def forward(self, posed: PosedComplex, poses_at_once: int) -> Blocks:
        """Return the features of the ligand, for a number of poses at a time."""
        shared = self._shared(posed) if len(posed.time_T) == 1 else None
        found = []
        for piece in posed.pieces(poses_at_once):
            own = shared or self._shared(piece)
            receptor, ligand, met = own.receptor, own.ligand, self._met(piece, own)
            edges = own.receptor_edges, self._inner(piece.pos_PL3, piece.ligand.pairs, own.time_TM)
            for layer, kernels in zip(self.layers, own.kernels, strict=True):
                receptor, ligand = layer(receptor, ligand, edges, met, kernels)
            found.append(ligand)
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def _met(self, posed: PosedComplex, shared: SharedInput) -> MetPairs | None:
        """Return the pairs of the partners, without gradients only of residues with an edge; None: there is none."""
        real_PRL = _edge_mask(posed, self.cutoff(posed.time_T))
        rows, columns = Chosen(None, real_PRL.shape[1]), Chosen(None, real_PRL.shape[2])
        if not torch.is_grad_enabled():
            if not real_PRL.any():
                return None
            rows, columns = _chosen(real_PRL.amax((0, 2))), _chosen(real_PRL.amax((0, 1)))
        pairs = AllPairs(columns.of(rows.of(real_PRL).transpose(1, 2)).transpose(1, 2))
        pos_PR3, pos_PL3 = rows.of(posed.receptor.pos_N3.unsqueeze(0)), columns.of(posed.pos_PL3)
        way_PRL3 = pos_PR3.unsqueeze(2) - pos_PL3.unsqueeze(1)
        features_PRLM = edge_features(self.cross_edges(way_PRL3, shared.time_TM), pairs)
        return MetPairs(pairs, edge_harmonics(way_PRL3, pairs), features_PRLM, rows, columns)

    def _inner(self, pos_PN3: Tensor, pairs: ListedPairs, time_TM: Tensor) -> PartnerEdges:
        """Return a partner's edges; their directions are the sender's minus the receiver's position."""
        way_PRC3 = pairs.of_row(pos_PN3) - pairs.of_column(pos_PN3)
        if not self.sizes.as_published:
            way_PRC3 = -way_PRC3
        features_PRCM = edge_features(self.inner_edges(way_PRC3, time_TM), pairs)
        return PartnerEdges(pairs, edge_harmonics(way_PRC3, pairs), features_PRCM)


def time_features(time_T: Tensor) -> Tensor:
    """Return sines and cosines of a time [T, M], in single precision: of large arguments no other has the same."""
    steps = torch.arange(TIME_FEATURES // 2, dtype=torch.float32, device=time_T.device)
    frequency_M = torch.exp(steps * -(math.log(10_000) / (TIME_FEATURES // 2 - 1)))
    angle_TM = TIME_SCALE * time_T.float().unsqueeze(-1) * frequency_M
    return torch.cat([angle_TM.sin(), angle_TM.cos()], -1)


def _edge_mask(posed: PosedComplex, cutoff_T: Tensor) -> Tensor:
    """Return 1 for pairs that are nearer than a cutoff [P, R, L], tested on scaled coordinates, as in the original."""
    cutoff_T11 = cutoff_T[:, None, None]
    receptor_TR3, ligand_PL3 = posed.receptor.pos_N3 / cutoff_T11, posed.pos_PL3 / cutoff_T11
    apart_PRL = (receptor_TR3.unsqueeze(2) - ligand_PL3.unsqueeze(1)).square().sum(-1)
    return (apart_PRL < 1).to(apart_PRL)


def scalars_of(x: Blocks) -> Tensor:
    """Return the first block's scalars [P, N, M]."""
    return x[0].squeeze(2)


def _chosen(real_N: Tensor) -> Chosen:
    """Return the residues that have any edge."""
    index = real_N.nonzero().squeeze(1)
    return Chosen(None if len(index) == len(real_N) else index, len(real_N))


def _added(x: Blocks, *updates: Blocks) -> Blocks:
    """Return features with updates, which may have more blocks, added to them."""
    parts = zip_longest(x, *updates)
    return tuple(reduce(torch.add, [part for part in group if part is not None]) for group in parts)


class DockingModel(nn.Module):
    """A network over a trunk that has the original's names."""

    trunk: DockingTrunk

    def published_forms(self) -> Mapping[str, OriginalForm]:
        as_published = self.trunk.sizes.as_published
        return {"diffdock_pp": replace(FORM, as_published=as_published, constants=partial(_constants, self))}

    def reset_parameters(self) -> None:
        """Draw weights as the original does: Xavier's normal distribution, and 0 for all that has one dimension."""
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)
            else:
                nn.init.zeros_(parameter)


class ScoreModel(DockingModel):
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
        self.reset_parameters()

    def forward(self, batch: Sequence[PosedComplex], poses_at_once: int = 1) -> tuple[Tensor, Tensor]:
        """Return the scores of the translations and the rotations [B, P, 3] each.

        As published, the pose p of every complex counts as one batch.
        """
        features = [self.trunk(posed, poses_at_once) for posed in batch]
        ligand_scalars = [scalars_of(ligand) for ligand in features]
        scores = []
        for place, (posed, ligand) in enumerate(zip(batch, features, strict=True)):
            inputs = _published_residue(ligand_scalars, place) if self.as_published else ligand_scalars[place]
            # a pose's score is the same to the last bit whatever other poses are computed, if one is at once
            pieces = zip(
                posed.pieces(poses_at_once), *(torch.split(x, poses_at_once) for x in (inputs, *ligand)), strict=True
            )
            found = [self._score(piece, tuple(blocks), inputs) for piece, inputs, *blocks in pieces]
            scores.append([torch.cat(parts) for parts in zip(*found, strict=True)])
        translations, rotations = zip(*scores, strict=True)
        return torch.stack(translations), torch.stack(rotations)

    def _score(self, posed: PosedComplex, ligand: Blocks, inputs_PNM: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the poses of one complex."""
        pos_PL3, time_T = posed.pos_PL3, posed.time_T
        time_TM = time_features(time_T).to(pos_PL3)
        way_P1L3 = (pos_PL3 - pos_PL3.mean(1, keepdim=True)).unsqueeze(1)
        grid, kernel = AllPairs(torch.ones_like(way_P1L3[..., 0])), self.centre.kernel()
        features = edge_features(self.centre_edges(way_P1L3, time_TM), grid)
        edges = self.centre.edges(kernel, grid, edge_harmonics(way_P1L3, grid), (features, inputs_PNM))
        polar, axial = self.centre(kernel, edges, ligand, row_sends=False)
        translation_P3, rotation_P3 = (polar + axial).squeeze(1).unbind(-1)
        translation_P3 = self.translation(translation_P3, time_TM) / self.schedule.translation.sigma(time_T).unsqueeze(
            -1
        )
        return translation_P3, self.rotation(rotation_P3, time_TM) * self.norm(time_T).to(pos_PL3).unsqueeze(-1)

    def fitting_options(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the options that fit the original's weights."""
        return trunk_options(FORM.read(tensors))

    def norm(self, time_T: Tensor) -> Tensor:
        """Return the norm of the scores of rotations at a time."""
        return self.norms_W[table_rows(self.schedule.rotation.sigma(time_T), as_published=self.as_published)]


class ScoreLength(nn.Module):
    """Gives a vector another length, by the one that it has and the time."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.enter, self.out = nn.Linear(1 + TIME_FEATURES, features), nn.Linear(features, 1)

    def forward(self, vector_P3: Tensor, time_TM: Tensor) -> Tensor:
        inputs_PM = torch.cat([vector_P3.norm(dim=-1, keepdim=True), time_TM.expand(len(vector_P3), -1)], -1)
        scaled_P3: Tensor = functional.normalize(vector_P3, dim=-1) * self.out(self.enter(inputs_PM).relu())
        return scaled_P3


class ConfidenceModel(DockingModel):
    """The logit of a pose being near the true one."""

    def __init__(self, sizes: TrunkSizes) -> None:
        super().__init__()
        self.trunk = DockingTrunk(sizes, lambda time_T: CUTOFF_RATE * time_T + CUTOFF)
        widths = [2 * sizes.scalars, sizes.scalars, sizes.scalars, 1]
        self.head = nn.ModuleList(nn.Linear(enter, leave) for enter, leave in pairwise(widths))
        self.reset_parameters()

    def forward(self, batch: Sequence[PosedComplex], poses_at_once: int = 1) -> Tensor:
        """Return the logits of poses [B, P]."""
        return torch.stack([self._logits(posed, poses_at_once) for posed in batch])

    def _logits(self, posed: PosedComplex, poses_at_once: int) -> Tensor:
        ligand = self.trunk(posed, poses_at_once)
        pooled_PM = torch.cat([scalars_of(ligand), scalars_of(ligand[-1:])], -1).mean(1)
        return torch.cat([self._judged(piece_PM) for piece_PM in torch.split(pooled_PM, poses_at_once)])

    def _judged(self, pooled_PM: Tensor) -> Tensor:
        """Return the logits of poses, from the means of their ligands' scalars, even and odd ones."""
        first, second, last = self.head
        logit_P: Tensor = last(second(first(pooled_PM).relu()).relu()).squeeze(-1)
        return logit_P


def _published_residue(ligand_scalars: Sequence[Tensor], place: int) -> Tensor:
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


def trunk_options(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sizes of a network by the shapes of its weights, under the names of the tasks' options."""
    scalars, inputs = tensors["trunk.residues.mix.weight"].shape
    layers = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("trunk.layers."))
    vectors = (len(tensors["trunk.layers.0.inner.weights.bias"]) - scalars * scalars) // scalars
    return {"embedding_dim": inputs - scalars, "scalars": scalars, "vectors": vectors, "layers": layers}


def _constants(model: nn.Module) -> dict[str, Tensor]:
    """Return the constants in the original's state."""
    constants = {UNUSED: model.get_buffer("trunk.inner_edges.centres_M")}
    for name, module in model.named_modules():
        if isinstance(module, PairConvolution):
            place = renamed(f"{name}.hidden", NAMES).removesuffix("fc.0")
            constants |= product_constants(f"{place}tensor_prod", module.paths, module.leave)
    return constants
