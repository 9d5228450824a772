"""How good poses are, by the measures of CAPRI and DockQ.

They are those of the package DockQ 2 run on two merged chains, as is done for antibodies: all chains of a partner are
one. As there, modified residues are left out, and LRMSD is of the smaller partner, whichever is docked. Compared are
the residues that docked and true structure share, by alignment, or by number where that pairs as many: what stands on
both sides of a gap then finds its own side, which DockQ's alignment cannot know.

Shapes: P poses, A heavy atoms, R residues, B backbone atoms, N points, K pairs of atoms, C contacts of the truth.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.spatial import cKDTree

from pipeline.protocol import item_of
from pipeline.records import Reason, Role
from pipeline.structures.atoms import UnusableInput
from pipeline.tasks.docking.docked_partners import matched_partner, partner_atoms, shared_backbones
from pipeline.tasks.docking.rigid_diffusion import nearest_turn, superposed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from pipeline.structures.inventory import Complex
    from pipeline.tasks.docking.docked_partners import MatchedPartner, PartnerAtoms

CONTACT, INTERFACE, CLASH = 5.0, 10.0, 3.0  # Å between heavy atoms
POSES_AT_ONCE = 32
CLASSES = ("incorrect", "acceptable", "medium", "high")
LEAST_DOCKQ = (0.23, 0.49, 0.80)  # of the classes after the first
RMSD_BELOW = (1.0, 2.0, 5.0, 10.0)  # Å
RMSDS = ("ligand_rmsd", "complex_rmsd", "interface_rmsd")  # as tasks tell them
TOPS: dict[str, float] = {"top-1": 1, "top-5": 5, "oracle": math.inf}


class RigidMoves(NamedTuple):
    """Moves of a ligand from where its file has it: x → turn @ x + shift."""

    turn_P33: NDArray[np.float64]
    shift_P3: NDArray[np.float64]

    def of(self, pos_N3: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return positions after each move [P, N, 3]."""
        moved_PN3: NDArray[np.float64] = pos_N3 @ self.turn_P33.transpose(0, 2, 1) + self.shift_P3[:, None]
        return moved_PN3

    def undone(self, pos_N3: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return positions after the opposite of each move [P, N, 3]."""
        back_PN3: NDArray[np.float64] = (pos_N3 - self.shift_P3[:, None]) @ self.turn_P33
        return back_PN3

    def take(self, chosen: NDArray[np.int64] | slice) -> RigidMoves:
        """Return some of the moves."""
        return RigidMoves(self.turn_P33[chosen], self.shift_P3[chosen])


def nearest_move(pos_N3: NDArray[np.float64], onto_N3: NDArray[np.float64]) -> RigidMoves:
    """Return the one move that brings points nearest to others (Kabsch)."""
    centre_3, target_3 = pos_N3.mean(0), onto_N3.mean(0)
    centred = (torch.from_numpy(points_N3) for points_N3 in ((pos_N3 - centre_3)[None], onto_N3 - target_3))
    turn_133 = nearest_turn(*centred).transpose(1, 2).numpy()
    return RigidMoves(turn_133, target_3 - turn_133 @ centre_3)


def _near_residues(receptor: PartnerAtoms, ligand: PartnerAtoms) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the pairs of residues with heavy atoms within the reach of an interface, and their least distances."""
    trees = cKDTree(receptor.pos_A3), cKDTree(ligand.pos_A3)
    near_K = trees[0].sparse_distance_matrix(trees[1], INTERFACE, output_type="ndarray")
    code_K = receptor.residue_A[near_K["i"]] * ligand.residues + ligand.residue_A[near_K["j"]]
    order_K = np.lexsort((near_K["v"], code_K))
    code_C, first_C = np.unique(code_K[order_K], return_index=True)
    return np.stack(np.divmod(code_C, max(ligand.residues, 1)), 1), near_K["v"][order_K][first_C]


class _AtomPairs(NamedTuple):
    """All pairs of docked heavy atoms between the residues of each contact."""

    receptor_K: NDArray[np.int64]
    ligand_K: NDArray[np.int64]
    first_C: NDArray[np.int64]


def _atom_pairs(receptor: PartnerAtoms, ligand: PartnerAtoms, contacts_C2: NDArray[np.int64]) -> _AtomPairs:
    """List the pairs of atoms of some pairs of residues."""
    bounds = [np.searchsorted(own.residue_A, np.arange(own.residues + 1)) for own in (receptor, ligand)]
    pairs = [np.empty((0, 2), np.int64)]
    for left, right in contacts_C2.tolist():
        mine, theirs = np.arange(*bounds[0][left : left + 2]), np.arange(*bounds[1][right : right + 2])
        if len(mine) and len(theirs):  # of a residue, hydrogens alone may have been docked
            pairs.append(np.stack([np.repeat(mine, len(theirs)), np.tile(theirs, len(mine))], 1))
    pairs_K2 = np.concatenate(pairs)
    return _AtomPairs(pairs_K2[:, 0], pairs_K2[:, 1], np.cumsum([*map(len, pairs)])[:-1])


@dataclass(frozen=True, slots=True)
class DockingTruth:
    """What poses of one complex are compared with."""

    receptor: MatchedPartner
    ligand: MatchedPartner
    contacts: int  # of the truth, between residues that were docked or not
    found: _AtomPairs  # by which the contacts between docked residues are looked for
    near: tuple[NDArray[np.int64], NDArray[np.int64]]  # shared residues at the interface


def docking_truth(read: Complex) -> DockingTruth:
    """Return what poses of a complex are compared with: its bound structures, or the input where that is bound."""
    true = {role: read.bound.get(role, side) for role, side in read.sides.items()}
    docked, truth = (
        [partner_atoms(sides[role]) for role in (Role.RECEPTOR, Role.LIGAND)] for sides in (read.sides, true)
    )
    receptor, ligand = map(matched_partner, docked, truth)
    return truth_of(receptor, ligand)


def truth_of(receptor: MatchedPartner, ligand: MatchedPartner) -> DockingTruth:
    """Find the contacts and the interface of the truth; refuse one without contacts."""
    near_C2, distance_C = _near_residues(receptor.true, ligand.true)
    contact_C = distance_C < CONTACT
    if not contact_C.any():
        raise UnusableInput(Reason.NO_CONTACTS, f"no heavy atoms of the true partners within {CONTACT:g} Å")
    places_C2 = np.stack([_places(pair)[near_C2[:, at]] for at, pair in enumerate((receptor, ligand))], 1)
    is_shared_C, is_inside_C = (places_C2 >= 0).all(1), distance_C < INTERFACE
    docked = [pair.shared_R2[places_C2[contact_C & is_shared_C, at], 0] for at, pair in enumerate((receptor, ligand))]
    near = [np.unique(places_C2[is_shared_C & is_inside_C, at]) for at in (0, 1)]
    if not len(near[0]):
        raise UnusableInput(Reason.NO_CONTACTS, "no residue of the true interface is in the docked structures")
    found = _atom_pairs(receptor.docked, ligand.docked, np.stack(docked, 1))
    return DockingTruth(receptor, ligand, int(contact_C.sum()), found, (near[0], near[1]))


def _places(pair: MatchedPartner) -> NDArray[np.int64]:
    """Return the place of each true residue among the shared ones, -1 where it is not shared."""
    place_R = np.full(pair.true.residues, -1)
    place_R[pair.shared_R2[:, 1]] = np.arange(len(pair.shared_R2))
    return place_R


class PoseQuality(NamedTuple):
    """How near poses are to the truth [P]."""

    fnat_P: NDArray[np.float64]  # share of the true contacts
    irmsd_P: NDArray[np.float64]  # Å, backbone of the interface, superposed
    lrmsd_P: NDArray[np.float64]  # Å, backbone of the smaller partner, the larger one superposed
    dockq_P: NDArray[np.float64]

    def classes(self) -> list[str]:
        """Return the class of each pose by the criteria of CAPRI."""
        return [capri_class(*row) for row in zip(self.fnat_P, self.irmsd_P, self.lrmsd_P, strict=True)]


def pose_quality(truth: DockingTruth, moves: RigidMoves) -> PoseQuality:
    """Return how near the poses are to the truth, a few at a time."""
    parts = [(_fnat(truth, some), _interface_rmsd(truth, some), _smaller_rmsd(truth, some)) for some in _pieces(moves)]
    fnat_P, irmsd_P, lrmsd_P = (
        (np.concatenate(part) for part in zip(*parts, strict=True)) if parts else (np.empty(0),) * 3
    )
    return PoseQuality(fnat_P, irmsd_P, lrmsd_P, dockq_score(fnat_P, irmsd_P, lrmsd_P))


def _pieces(moves: RigidMoves) -> Iterator[RigidMoves]:
    for first in range(0, len(moves.turn_P33), POSES_AT_ONCE):
        yield moves.take(slice(first, first + POSES_AT_ONCE))


def _fnat(truth: DockingTruth, moves: RigidMoves) -> NDArray[np.float64]:
    """Return the share of the true contacts that poses have."""
    if not len(truth.found.first_C):
        return np.zeros(len(moves.turn_P33))
    used, ligand_K = np.unique(truth.found.ligand_K, return_inverse=True)
    receptor_K3 = truth.receptor.docked.pos_A3[truth.found.receptor_K]
    apart_PK3 = moves.of(truth.ligand.docked.pos_A3[used])[:, ligand_K] - receptor_K3
    least_PC = np.minimum.reduceat(np.einsum("pki,pki->pk", apart_PK3, apart_PK3), truth.found.first_C, axis=1)
    share_P: NDArray[np.float64] = (least_PC < CONTACT**2).sum(1) / truth.contacts
    return share_P


def _interface_rmsd(truth: DockingTruth, moves: RigidMoves) -> NDArray[np.float64]:
    (receptor_B3, true_B3), (ligand_N3, true_N3) = (
        shared_backbones(pair, near) for pair, near in zip((truth.receptor, truth.ligand), truth.near, strict=True)
    )
    moved_PN3 = moves.of(ligand_N3)
    posed_PB3 = np.concatenate([np.broadcast_to(receptor_B3, (len(moved_PN3), *receptor_B3.shape)), moved_PN3], 1)
    onto_B3 = np.concatenate([true_B3, true_N3])
    return _apart(superposed(torch.from_numpy(posed_PB3), torch.from_numpy(onto_B3)).numpy(), onto_B3)


def _smaller_rmsd(truth: DockingTruth, moves: RigidMoves) -> NDArray[np.float64]:
    """Return the RMSD of the smaller partner; the larger one is as rigid, so that it is superposed only once."""
    receptor, ligand = (
        shared_backbones(pair, np.arange(len(pair.shared_R2))) for pair in (truth.receptor, truth.ligand)
    )
    if truth.receptor.true.residues > truth.ligand.true.residues:
        fit, posed_PN3, true_N3 = nearest_move(*receptor), moves.of(ligand[0]), ligand[1]
    else:
        fit, posed_PN3, true_N3 = nearest_move(*ligand), moves.undone(receptor[0]), receptor[1]
    return _apart(posed_PN3 @ fit.turn_P33[0].T + fit.shift_P3[0], true_N3)


def _apart(pos_PN3: NDArray[np.float64], true_N3: NDArray[np.float64]) -> NDArray[np.float64]:
    apart_P: NDArray[np.float64] = np.sqrt(np.square(pos_PN3 - true_N3).sum(-1).mean(-1))
    return apart_P


def dockq_score(
    fnat_P: NDArray[np.float64], irmsd_P: NDArray[np.float64], lrmsd_P: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the score that DockQ makes of three measures, between 0 and 1."""
    score_P: NDArray[np.float64] = (fnat_P + 1 / (1 + (irmsd_P / 1.5) ** 2) + 1 / (1 + (lrmsd_P / 8.5) ** 2)) / 3
    return score_P


def capri_class(fnat: float, irmsd: float, lrmsd: float) -> str:
    """Return the class of a pose by the criteria of CAPRI."""
    limits = ((0.5, 1.0, 1.0), (0.3, 2.0, 5.0), (0.1, 4.0, 10.0))
    for name, (least, interface, ligand) in zip(reversed(CLASSES), limits, strict=False):
        if fnat >= least and (irmsd <= interface or lrmsd <= ligand):
            return name
    return CLASSES[0]


def near_counts(
    receptor_A3: NDArray[np.float64], ligand_N3: NDArray[np.float64], moves: RigidMoves, limit: float
) -> NDArray[np.int64]:
    """Count the pairs of atoms across partners that are nearer than a limit (Å), by pose."""
    tree, below = cKDTree(receptor_A3), np.nextafter(limit, 0)
    counts = [tree.query_ball_point(some.of(ligand_N3), below, return_length=True).sum(-1) for some in _pieces(moves)]
    return np.concatenate([np.empty(0, np.int64), *counts])


class PoseScore(NamedTuple):
    """A pose of some complex, for summaries."""

    complex: str
    rank: int | None  # 1 is the best; None: the pose is of no use
    rmsds: Mapping[str, float]  # Å, by name
    dockq: float = math.nan
    split: str = ""
    kind: str = ""  # of complex


def summaries(scores: Iterable[PoseScore]) -> list[dict[str, Any]]:
    """Return rows about each complex's best pose among its first ones: overall, by split and by kind of complex.

    A complex without any ranked pose is near nothing; means, medians and deviations are of the others. NaN stands where
    nothing is known.
    """
    groups: dict[str, dict[str, list[PoseScore]]] = defaultdict(lambda: defaultdict(list))
    for score in scores:
        named = [f"{what}={name}" for what, name in (("split", score.split), ("kind", score.kind)) if name]
        for group in ("all", *named):
            groups[group][score.complex].append(score)
    ordered = sorted(groups, key=lambda group: (group != "all", group.startswith("kind="), group))
    return [
        {"group": group, "among": top, **_summary([*groups[group].values()], TOPS[top])}
        for group in ordered
        for top in TOPS
    ]


def _summary(complexes: list[list[PoseScore]], top: float) -> dict[str, float]:
    chosen = [[score for score in scores if score.rank is not None and score.rank <= top] for scores in complexes]
    row: dict[str, float] = {"complexes": len(complexes)}
    for name in complexes[0][0].rmsds:
        best_N = np.array([_least([score.rmsds[name] for score in scores]) for scores in chosen])
        spread = _spread(best_N) | {f"percent_below_{at:g}": _percent(best_N, best_N < at) for at in RMSD_BELOW}
        row |= {f"{name}_{what}": value for what, value in spread.items()}
    best_N = -np.array([_least([-score.dockq for score in scores]) for scores in chosen])
    row |= {
        f"percent_{name}": _percent(best_N, best_N >= at) for name, at in zip(CLASSES[1:], LEAST_DOCKQ, strict=True)
    }
    return row | {f"dockq_{what}": value for what, value in _spread(best_N).items()}


def _spread(values_N: NDArray[np.float64]) -> dict[str, float]:
    finite_N = values_N[np.isfinite(values_N)]
    if not len(finite_N):
        return dict.fromkeys(("mean", "median", "sd"), math.nan)
    return {"mean": float(finite_N.mean()), "median": float(np.median(finite_N)), "sd": float(finite_N.std())}


def _least(numbers: list[float]) -> float:
    """Return the least number: NaN if none is known, infinity if there are none at all."""
    return min((number for number in numbers if not math.isnan(number)), default=math.nan if numbers else math.inf)


def _percent(of_N: NDArray[np.float64], are_N: NDArray[np.bool_]) -> float:
    """Return the percentage of those that are known, NaN if none is."""
    known_N = ~np.isnan(of_N)
    return 100 * float(are_N[known_N].mean()) if known_N.any() else math.nan


def docking_metrics(outputs: Mapping[str, Any]) -> dict[str, float]:
    """Return medians of all poses' RMSDs, and figures of complexes by their best-ranked pose, five, and any of all.

    Without confidences the first pose of a complex is ranked best. A pose that exploded is nowhere near.
    """
    merits = _by_pose(outputs, "confidence")
    figures: dict[str, float] = {}
    for name in RMSDS:
        rmsds = _by_pose(outputs, name)
        sound = [rmsd for rmsd in rmsds.values() if not math.isnan(rmsd)]
        figures |= {f"{name}_median": float(np.median(sound))} if sound else {}
        figures |= {"exploded": 1 - len(sound) / len(rmsds)} if len(sound) < len(rmsds) else {}
        for row in summaries(_scores(name, rmsds, merits)):
            of = f"{name.removesuffix('_rmsd')}_{row['among'].replace('-', '')}"
            figures |= {f"{of}_within_{limit:g}": row[f"{name}_percent_below_{limit:g}"] / 100 for limit in RMSD_BELOW}
            if row["among"] == "top-1" and sound:
                figures |= {f"{of}_{what}": row[f"{name}_{what}"] for what in ("mean", "median", "sd")}
    return figures


def _scores(name: str, rmsds: Mapping[str, float], merits: Mapping[str, float]) -> list[PoseScore]:
    """Rank the poses of each complex, the most confident first; those that exploded have no rank."""
    ranks, scores = defaultdict[str, int](int), []
    for pose in sorted(rmsds, key=lambda pose: -np.nan_to_num(merits.get(pose, math.nan), nan=-np.inf)):
        is_sound, of = not math.isnan(rmsds[pose]), item_of(pose)
        ranks[of] += is_sound
        scores.append(PoseScore(of, ranks[of] if is_sound else None, {name: rmsds[pose]}))
    return scores


def _by_pose(outputs: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return an output by the name of each pose that has it; without ids, by its place."""
    column = outputs.get(name, ())
    pose_of = getattr(column, "id", str)
    return {pose_of(place): float(np.ravel(value)[0]) for place, value in enumerate(column) if value is not None}
