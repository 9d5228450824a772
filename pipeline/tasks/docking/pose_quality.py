"""The quality of poses, by the measures of CAPRI and DockQ.

They are those of the package DockQ 2 run on two merged chains, as is done for antibodies: all chains of a partner are
one. As there, modified residues are left out, and LRMSD is of the smaller partner, whichever is docked. Compared are
the residues that docked and true structure share, by alignment, or by number where that pairs as many: residues on
both sides of a gap then find their own side, which DockQ's alignment cannot know.

Shapes: P poses, A heavy atoms, R residues, B names of backbone atoms, N and M points, K pairs of atoms, C pairs of
residues.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.spatial import cKDTree

from pipeline.protocol import item_of
from pipeline.records import Kind, Reason, Role
from pipeline.structures.atoms import UnusableInput, name_word
from pipeline.structures.partners import bound_rows
from pipeline.tasks.docking.rigid_diffusion import RMSDS, rmsd, superposed
from pipeline.tasks.task_parts import known_figures

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.structures.inventory import Complex, ComplexSide
    from pipeline.structures.policy import Structure

    Floats = NDArray[np.float64]
    Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]

BACKBONE = (
    "CA", "C", "N", "O",
    "P", "OP1", "OP2", "O2'", "O3'", "O4'", "O5'", "C1'", "C2'", "C3'", "C4'", "C5'",
)  # fmt: skip
HYDROGENS = (1, 119)  # gemmi's 119 is deuterium


@dataclass(frozen=True, slots=True)
class PartnerAtoms:
    """The heavy atoms of a partner's polymers, without modified residues."""

    pos_A3: NDArray[np.float64]
    residue_A: NDArray[np.int64]
    backbone_RB: NDArray[np.int64]  # the atom of each name in `BACKBONE`, -1 where missing
    sequences: tuple[str, ...]  # of its chains
    number_R: NDArray[np.int64]  # with the insertion code

    @property
    def residues(self) -> int:
        """Count the residues of all chains."""
        return len(self.backbone_RB)

    def letters(self) -> NDArray[np.str_]:
        return np.array([*"".join(self.sequences)], np.str_)

    def chains(self) -> NDArray[np.int64]:
        """Return the chain of each residue, as a number."""
        return np.repeat(np.arange(len(self.sequences)), [*map(len, self.sequences)])


def partner_atoms(side: ComplexSide) -> PartnerAtoms:
    """Return the compared atoms of a side."""
    structure, chains = side.structure, [chain for chain in side.chains if chain.kind is not Kind.OTHER]
    kept = [chain.first + np.flatnonzero(~structure.modified_R[chain.first : chain.last]) for chain in chains]
    sequences = (
        "".join(np.array([*chain.sequence])[own - chain.first]) for chain, own in zip(chains, kept, strict=True)
    )
    residues = np.concatenate(kept) if kept else np.empty(0, np.int64)
    atoms, residue_A = _heavy_atoms(structure, residues)
    backbone_RB = np.full((len(residues), len(BACKBONE)), -1)
    for column, name in enumerate(BACKBONE):
        rows = np.flatnonzero(structure.name_A[atoms] == name_word(name))
        backbone_RB[residue_A[rows], column] = rows
    number_R = structure.number_R[residues].astype(np.int64) * 256 + structure.icode_R[residues]
    pos_A3 = structure.pos_A3[atoms].astype(np.float64)
    return PartnerAtoms(pos_A3, residue_A, backbone_RB, tuple(sequences), number_R)


def _heavy_atoms(structure: Structure, residues: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the heavy atoms of some residues, and the place of each one's residue among them."""
    place_R = np.full(len(structure.number_R), -1)
    place_R[residues] = np.arange(len(residues))
    place_A = place_R[structure.residue_A]
    atoms = np.flatnonzero((place_A >= 0) & ~np.isin(structure.element_A, HYDROGENS))
    atoms = atoms[np.argsort(place_A[atoms], kind="stable")]
    return atoms, place_A[atoms]


def heavy_positions(side: ComplexSide) -> NDArray[np.float64]:
    """Return the positions of all heavy atoms of a side, those of modified residues and kept molecules, too."""
    atoms, _ = _heavy_atoms(side.structure, side.residues())
    return side.structure.pos_A3[atoms].astype(np.float64)


class MatchedPartner(NamedTuple):
    """A partner as it is docked and as it truly is, with the residues that both have."""

    docked: PartnerAtoms
    true: PartnerAtoms
    shared_R2: NDArray[np.int64]  # residues of either that are the same


def matched_partner(docked: PartnerAtoms, true: PartnerAtoms) -> MatchedPartner:
    """Find the residues that a docked and a true partner share: corresponding ones, of one kind."""
    if docked.sequences == true.sequences:
        return MatchedPartner(docked, true, np.stack([np.arange(docked.residues)] * 2, 1))
    row_R = bound_rows(docked.sequences, true.sequences).astype(np.int64)
    row_R[(row_R >= 0) & (docked.letters() != true.letters()[row_R])] = -1
    for chain in range(len(docked.sequences)):
        _prefer_numbers(docked, true, row_R, np.flatnonzero(docked.chains() == chain))
    shared_R = np.flatnonzero(row_R >= 0)
    return MatchedPartner(docked, true, np.stack([shared_R, row_R[shared_R]], 1))


def _prefer_numbers(
    docked: PartnerAtoms, true: PartnerAtoms, row_R: NDArray[np.int64], own_R: NDArray[np.int64]
) -> None:
    """Let the residues of a chain correspond by their numbers where those pair as many as the alignment does."""
    aligned_R = row_R[own_R[row_R[own_R] >= 0]]
    if not len(aligned_R):
        return
    their_R = np.flatnonzero(true.chains() == true.chains()[aligned_R[0]])
    _, mine, theirs = np.intersect1d(docked.number_R[own_R], true.number_R[their_R], return_indices=True)
    mine_R, same_R = own_R[mine], their_R[theirs]
    alike = docked.letters()[mine_R] == true.letters()[same_R]
    if alike.sum() >= len(aligned_R):
        row_R[own_R] = -1
        row_R[mine_R[alike]] = same_R[alike]


def shared_backbones(pair: MatchedPartner, chosen: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Return the backbone atoms of some shared residues, as docked and in truth, where both have them."""
    docked = pair.docked.backbone_RB[pair.shared_R2[chosen, 0]]
    true = pair.true.backbone_RB[pair.shared_R2[chosen, 1]]
    both = (docked >= 0) & (true >= 0)
    return pair.docked.pos_A3[docked[both]], pair.true.pos_A3[true[both]]


CONTACT, INTERFACE, CLASH = 5.0, 10.0, 3.0  # Å between heavy atoms
CLASSES = ("incorrect", "acceptable", "medium", "high")
LEAST_DOCKQ = (0.23, 0.49, 0.80)  # of the classes after the first
RMSD_BELOW = (1.0, 2.0, 5.0, 10.0)  # Å
EXPLODED = "exploded"  # the problem of a pose with NaN
TOPS: dict[str, float] = {"top-1": 1, "top-5": 5, "oracle": math.inf}


def moved(pos_N3: Floats, move_P12: Floats) -> Floats:
    """Return positions in their file after each move, x → turn @ x + shift [P, N, 3]; nine numbers are the turn's."""
    return pos_N3 @ move_P12[:, :9].reshape(-1, 3, 3).transpose(0, 2, 1) + move_P12[:, None, 9:]


def _near_residues(receptor: PartnerAtoms, ligand: PartnerAtoms, ligand_A3: Floats, limit: float) -> Pairs:
    """Return the residues of each pair with heavy atoms nearer than a limit, where the ligand's atoms are [C] each."""
    trees = cKDTree(receptor.pos_A3), cKDTree(ligand_A3)
    near_K = trees[0].sparse_distance_matrix(trees[1], np.nextafter(limit, 0), output_type="ndarray")
    code_C = np.unique(receptor.residue_A[near_K["i"]] * ligand.residues + ligand.residue_A[near_K["j"]])
    return np.divmod(code_C, max(ligand.residues, 1))


@dataclass(frozen=True, slots=True)
class DockingTruth:
    """What poses of one complex are compared with."""

    receptor: MatchedPartner
    ligand: MatchedPartner
    contacts: int  # of the truth, between residues that were docked or not
    is_docked_RR: NDArray[np.bool_]  # which docked residues they are between
    near: tuple[NDArray[np.int64], ...]  # shared residues of either side at the interface


def docking_truth(read: Complex) -> DockingTruth:
    """Return the truth for poses of a complex: its bound structures, or the input where that is bound."""
    true = {role: read.bound.get(role, side) for role, side in read.sides.items()}
    docked, truth = (
        [partner_atoms(sides[role]) for role in (Role.RECEPTOR, Role.LIGAND)] for sides in (read.sides, true)
    )
    receptor, ligand = map(matched_partner, docked, truth)
    return truth_of(receptor, ligand)


def truth_of(receptor: MatchedPartner, ligand: MatchedPartner) -> DockingTruth:
    """Find the contacts and the interface of the truth; refuse one without contacts."""
    contacts, near = (
        _near_residues(receptor.true, ligand.true, ligand.true.pos_A3, limit) for limit in (CONTACT, INTERFACE)
    )
    if not len(contacts[0]):
        raise UnusableInput(Reason.NO_CONTACTS, f"no heavy atoms of the true partners within {CONTACT:g} Å")
    receptor_C, ligand_C = _places(receptor, ligand, contacts)
    is_docked_RR = np.zeros((receptor.docked.residues, ligand.docked.residues), bool)
    is_docked_RR[receptor.shared_R2[receptor_C, 0], ligand.shared_R2[ligand_C, 0]] = True
    at_interface = tuple(map(np.unique, _places(receptor, ligand, near)))
    if not len(at_interface[0]):
        raise UnusableInput(Reason.NO_CONTACTS, "no residue of the true interface is in the docked structures")
    return DockingTruth(receptor, ligand, len(contacts[0]), is_docked_RR, at_interface)


def _places(receptor: MatchedPartner, ligand: MatchedPartner, pairs: Pairs) -> Pairs:
    """Return places among the shared residues of pairs of true ones, without those that are not shared."""
    found = []
    for partner, true_C in zip((receptor, ligand), pairs, strict=True):
        place_R = np.full(partner.true.residues, -1)
        place_R[partner.shared_R2[:, 1]] = np.arange(len(partner.shared_R2))
        found.append(place_R[true_C])
    is_shared_C = (found[0] >= 0) & (found[1] >= 0)
    return found[0][is_shared_C], found[1][is_shared_C]


def pose_quality(truth: DockingTruth, move_P12: Floats) -> dict[str, list[Any]]:
    """Return how near poses are to the truth, by the names of columns.

    fnat: share of the true contacts. irmsd: of the interface's backbone, superposed (Å). lrmsd: of the smaller
    partner's backbone, the larger one superposed.
    """
    sides = truth.receptor, truth.ligand
    receptor, ligand = truth.receptor.docked, truth.ligand.docked
    found = (_near_residues(receptor, ligand, pos_A3, CONTACT) for pos_A3 in _posed(ligand.pos_A3, move_P12))
    fnat_P = np.array([truth.is_docked_RR[pairs].sum() / truth.contacts for pairs in found])
    irmsd_P = _rmsd([shared_backbones(side, near) for side, near in zip(sides, truth.near, strict=True)], move_P12)
    whole = [shared_backbones(side, np.arange(len(side.shared_R2))) for side in sides]
    larger = 0 if truth.receptor.true.residues > truth.ligand.true.residues else 1
    lrmsd_P = _rmsd(whole, move_P12, by=larger)
    score_P = (fnat_P + 1 / (1 + (irmsd_P / 1.5) ** 2) + 1 / (1 + (lrmsd_P / 8.5) ** 2)) / 3
    columns = {"fnat": fnat_P, "irmsd": irmsd_P, "lrmsd": lrmsd_P, "dockq": score_P}
    classes = [capri_class(*row) for row in zip(fnat_P, irmsd_P, lrmsd_P, strict=True)]
    return {name: values_P.tolist() for name, values_P in columns.items()} | {"capri": classes}


def _posed(pos_N3: Floats, move_P12: Floats) -> Iterator[Floats]:
    """Yield the ligand's positions in each pose."""
    return (moved(pos_N3, move_P12[at : at + 1])[0] for at in range(len(move_P12)))


def _rmsd(sides: Sequence[tuple[Floats, Floats]], move_P12: Floats, by: int | None = None) -> Floats:
    """Return the RMSD of both sides' atoms, superposed; or of one side's after the other is superposed."""
    true = [torch.from_numpy(true_N3) for _, true_N3 in sides]
    receptor_N3, ligand_PM3 = torch.from_numpy(sides[0][0]), torch.from_numpy(moved(sides[1][0], move_P12))
    posed = [receptor_N3.expand(len(ligand_PM3), -1, -1), ligand_PM3]
    if by is None:
        posed_PN3, true_N3 = torch.cat(posed, 1), torch.cat(true)
        return rmsd(superposed(posed_PN3, true_N3), true_N3).numpy()
    return rmsd(superposed(posed[by], true[by], posed[1 - by]), true[1 - by]).numpy()


def capri_class(fnat: float, irmsd: float, lrmsd: float) -> str:
    """Return the class of a pose by the criteria of CAPRI."""
    limits = ((0.5, 1.0, 1.0), (0.3, 2.0, 5.0), (0.1, 4.0, 10.0))
    for name, (least, interface, ligand) in zip(reversed(CLASSES), limits, strict=False):
        if fnat >= least and (irmsd <= interface or lrmsd <= ligand):
            return name
    return CLASSES[0]


def near_counts(receptor_A3: Floats, ligand_N3: Floats, move_P12: Floats, limit: float) -> NDArray[np.int64]:
    """Count the pairs of atoms across partners that are nearer than a limit (Å), by pose."""
    tree, below = cKDTree(receptor_A3), np.nextafter(limit, 0)
    counts = (tree.query_ball_point(pos_N3, below, return_length=True).sum() for pos_N3 in _posed(ligand_N3, move_P12))
    return np.fromiter(counts, np.int64)


class PoseRow(NamedTuple):
    """What is known of a pose; NaN where there is no truth to compare it with."""

    complex: str
    split: str = ""
    rank: int | None = None  # 1 is the best; None: unusable, see `problem`
    sample: int = 0
    confidence: float = math.nan
    complex_rmsd: float = math.nan  # Å between CA atoms, by `rigid_diffusion.pose_rmsds`
    ligand_rmsd: float = math.nan
    interface_rmsd: float = math.nan
    fnat: float = math.nan
    irmsd: float = math.nan
    lrmsd: float = math.nan
    dockq: float = math.nan
    capri: str = ""
    contacts: int | None = None  # pairs of heavy atoms within 5 Å; 0: the partners do not touch
    clashes: int | None = None  # of these, pairs within 3 Å
    file: str = ""
    problem: str = ""


def summaries(rows: Iterable[PoseRow], kind_of: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return rows about each complex's best pose among its first ones: overall, by split and by kind of complex.

    A complex without a ranked pose counts as not near; means, medians and deviations leave it out. NaN means unknown.
    """
    groups: dict[str, dict[str, list[PoseRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        named = ("split", row.split), ("kind", (kind_of or {}).get(row.complex, ""))
        for group in ("all", *(f"{what}={name}" for what, name in named if name)):
            groups[group][row.complex].append(row)
    ordered = sorted(groups, key=lambda group: (group != "all", group.startswith("kind="), group))
    return [
        {"group": group, "among": top, **_summary([*groups[group].values()], TOPS[top])}
        for group in ordered
        for top in TOPS
    ]


def _summary(complexes: list[list[PoseRow]], top: float) -> dict[str, float]:
    chosen = [[pose for pose in poses if pose.rank is not None and pose.rank <= top] for poses in complexes]
    row: dict[str, float] = {"complexes": len(complexes)}
    for name in RMSDS:
        best_N = np.array([_least([getattr(pose, name) for pose in poses]) for poses in chosen])
        spread = _spread(best_N) | {f"percent_below_{at:g}": _percent(best_N, best_N < at) for at in RMSD_BELOW}
        row |= {f"{name}_{what}": value for what, value in spread.items()}
    best_N = -np.array([_least([-pose.dockq for pose in poses]) for poses in chosen])
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


def pose_rows(outputs: Mapping[str, Any], of: str) -> list[PoseRow]:
    """Return a row for each pose that has a value in one of the outputs' columns."""
    columns = {name: _by_pose(outputs, name) for name in ("confidence", *RMSDS)}
    rows = []
    for pose, value in _by_pose(outputs, of).items():
        known: dict[str, Any] = {name: float(column[pose][0]) for name, column in columns.items() if pose in column}
        row = PoseRow(item_of(pose), sample=int(pose.partition(" ")[2] or 0))
        rows.append(row._replace(problem="" if np.isfinite(value).all() else EXPLODED, **known))
    return rows


def _by_pose(outputs: Mapping[str, Any], name: str) -> dict[str, NDArray[Any]]:
    """Return an output by the name of each pose that has it; without ids, by its place."""
    column = outputs.get(name, ())
    pose_of = getattr(column, "id", str)
    return {pose_of(place): np.ravel(value) for place, value in enumerate(column) if value is not None}


def ranked(rows: Sequence[PoseRow]) -> list[PoseRow]:
    """Rank the poses of each complex: the most confident first, ties in sampling order, unusable ones last."""
    ranks, useful = Counter[str](), [row for row in rows if not row.problem]
    useful.sort(key=lambda row: -np.nan_to_num(row.confidence, nan=-np.inf))
    for place, row in enumerate(useful):
        ranks[row.complex] += 1
        useful[place] = row._replace(rank=ranks[row.complex])
    return useful + [row for row in rows if row.problem]


def docking_metrics(outputs: Mapping[str, Any]) -> dict[str, float]:
    """Return medians of all poses' RMSDs, and metrics of complexes by their best-ranked pose, the first five, and all.

    Without confidences the first pose of a complex is ranked best. A pose that exploded is nowhere near.
    """
    rows = ranked(pose_rows(outputs, RMSDS[0]))
    useful = [row for row in rows if row.rank is not None]
    figures = {f"{name}_median": _spread(np.array([getattr(row, name) for row in useful]))["median"] for name in RMSDS}
    figures |= {"exploded": 1 - len(useful) / len(rows)} if len(useful) < len(rows) else {}
    for row in summaries(rows):
        for name in RMSDS:
            of = f"{name.removesuffix('_rmsd')}_{row['among'].replace('-', '')}"
            figures |= {f"{of}_within_{limit:g}": row[f"{name}_percent_below_{limit:g}"] / 100 for limit in RMSD_BELOW}
            if row["among"] == "top-1":
                figures |= {f"{of}_{what}": row[f"{name}_{what}"] for what in ("mean", "median", "sd")}
    return known_figures(figures)
