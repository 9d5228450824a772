"""What docking leaves behind of a complex: its best poses as structure files, and a row of measures for every pose.

Shapes: P poses, L residues of the ligand, R of the receptor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pipeline.errors import DataError
from pipeline.files import write_whole
from pipeline.records import Role
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing.read_structure import PLAIN, FileReading
from pipeline.structures.policy import BACKBONE
from pipeline.tasks.docking import rigid_diffusion
from pipeline.tasks.docking.docked_partners import docked_sources, heavy_positions
from pipeline.tasks.docking.pose_quality import (
    CLASH,
    CONTACT,
    RMSDS,
    PoseQuality,
    PoseScore,
    RigidMoves,
    docking_truth,
    near_counts,
    nearest_move,
    pose_quality,
)
from pipeline.tasks.docking.posed_files import PosedFile, posed_file
from pipeline.tasks.docking.rigid_diffusion import pose_rmsd

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.records import Item
    from pipeline.structures.inventory import Complex
    from pipeline.structures.parsing.structure_files import File

FARTHEST = 500.0  # Å between the centres of receptor and ligand; farther off, the sampling has exploded
LEAST_TURN = 1e-3  # by which the columns of a rotation may miss being of length 1 and at right angles
CA = BACKBONE.index("CA")
TRUTH = ("complex_rmsd", "ligand_rmsd", "interface_rmsd", "fnat", "irmsd", "lrmsd", "dockq", "capri")


@dataclass(frozen=True, slots=True)
class DockedComplex:
    """An item that was docked, as it was read, and the bytes of its files by path."""

    item: Item
    read: Complex
    files: Mapping[str, File]
    reading: FileReading = PLAIN
    has_truth: bool = True  # the input is bound, or bound structures are named


class SampledPoses(NamedTuple):
    """The poses of one complex, in the order in which they were sampled."""

    moves: RigidMoves
    sample_P: NDArray[np.int64]
    confidence_P: NDArray[np.float64] | None  # None: nothing ranks them but their order


class PoseRow(NamedTuple):
    """What is known of a pose; NaN where there is no truth to compare it with."""

    complex: str
    split: str = ""
    rank: int | None = None  # 1 is the best; None: it is of no use, for `problem`
    sample: int = 0
    confidence: float = math.nan
    complex_rmsd: float = math.nan  # Å between CA atoms, as `rigid_diffusion.PoseRmsd` says
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

    def score(self, kind: str = "") -> PoseScore:
        """Return what summaries are made of."""
        rmsds = {name: getattr(self, name) for name in RMSDS}
        return PoseScore(self.complex, self.rank, rmsds, self.dockq, self.split, kind)


def posed_text(docked: DockedComplex) -> PosedFile:
    """Return the text of a complex's files, for poses to be written into: mmCIF if any of the files is."""
    text = posed_file(docked_sources(docked.item, docked.read, docked.files, docked.reading))
    if not len(text.pos_N3):
        raise DataError("no atom of the ligand was found in its file", item=docked.item.id)
    return text


def write_docked(folder: Path, docked: DockedComplex, poses: SampledPoses, *, top: int = 5) -> list[PoseRow]:
    """Write the best poses of a complex as `ID/rank-01.pdb` and so on; return a row of each pose, the best first."""
    problems = pose_problems(docked.read, poses)
    ranked, text = _ranked(poses, problems), posed_text(docked)
    home = folder / docked.item.id
    home.mkdir(parents=True, exist_ok=True)
    rows: list[PoseRow] = []
    for at, measured in zip(ranked.tolist(), _measured(docked, poses.moves.take(ranked)), strict=True):
        row = measured._replace(rank=len(rows) + 1, **_told(poses, at))
        if len(rows) < top:
            row = row._replace(file=f"{docked.item.id}/rank-{row.rank:02d}{text.suffix}")
            write_whole(folder / row.file, text.pose(poses.moves.take(slice(at, at + 1)), _remarks(docked, text, row)))
        rows.append(row)
    _remove_older(home, {row.file.rpartition("/")[2] for row in rows})
    useless = [at for at, problem in enumerate(problems) if problem]
    own = docked.item.id, docked.item.split
    return rows + [PoseRow(*own, **_told(poses, at), problem=problems[at]) for at in useless]


def write_trajectory(path: Path, docked: DockedComplex, moves: RigidMoves) -> None:
    """Write the ligand alone after each move, as one file of several models beside which the receptor can be opened."""
    text = posed_text(docked)
    write_whole(path, text.trajectory(moves, [f"LIGAND OF {docked.item.id}: {len(moves.turn_P33)} POSES"]))


def pose_problems(read: Complex, poses: SampledPoses) -> list[str]:
    """Say of each pose why it is of no use, nothing if it is."""
    receptor_3, ligand_3 = (heavy_positions(read.sides[role]).mean(0) for role in (Role.RECEPTOR, Role.LIGAND))
    turn_P33, shift_P3 = poses.moves
    finite_P = np.isfinite(turn_P33).all((1, 2)) & np.isfinite(shift_P3).all(1)
    with np.errstate(all="ignore"):
        square_P33 = turn_P33.transpose(0, 2, 1) @ turn_P33
        is_turn_P = (np.abs(square_P33 - np.eye(3)).max((1, 2)) < LEAST_TURN) & (np.linalg.det(turn_P33) > 0)
        away_P = np.linalg.norm(turn_P33 @ ligand_3 + shift_P3 - receptor_3, axis=-1)
    missing_P = np.zeros(len(turn_P33), bool) if poses.confidence_P is None else np.isnan(poses.confidence_P)
    tests: tuple[tuple[Any, str], ...] = (
        (~finite_P, "not finite"),
        (~is_turn_P, "no rotation"),
        (~(away_P < FARTHEST), f"farther than {FARTHEST:g} Å"),
        (missing_P, "no confidence"),
    )
    return [next((problem for is_so_P, problem in tests if is_so_P[at]), "") for at in range(len(turn_P33))]


def _ranked(poses: SampledPoses, problems: list[str]) -> NDArray[np.int64]:
    """Return the poses of use, the most confident first, and those alike as they were sampled."""
    useful = np.array([at for at, problem in enumerate(problems) if not problem], np.int64)
    if poses.confidence_P is None:
        return useful
    return useful[np.argsort(-poses.confidence_P[useful], kind="stable")]


def _told(poses: SampledPoses, at: int) -> dict[str, Any]:
    """Return what the sampler said of a pose."""
    confidence = math.nan if poses.confidence_P is None else float(poses.confidence_P[at])
    return {"sample": int(poses.sample_P[at]), "confidence": confidence}


def _remarks(docked: DockedComplex, text: PosedFile, row: PoseRow) -> list[str]:
    """Return what is said at the top of a pose's file."""
    confidence = "NO CONFIDENCE" if math.isnan(row.confidence) else f"CONFIDENCE {row.confidence:.4f}"
    chains = {role: ", ".join(chain.name for chain in side.chains) for role, side in docked.read.sides.items()}
    return [
        f"POSE OF {docked.item.id}: RANK {row.rank}, SAMPLE {row.sample}, {confidence}",
        f"RECEPTOR {chains[Role.RECEPTOR]} AS IT WAS, LIGAND {chains[Role.LIGAND]} MOVED ({len(text.pos_N3)} ATOMS)",
    ]


def _remove_older(home: Path, written: set[str]) -> None:
    """Remove the poses of an earlier, longer list, which would be taken for some of this one."""
    for path in home.glob("rank-*"):
        if path.name not in written:
            path.unlink(missing_ok=True)


def _measured(docked: DockedComplex, moves: RigidMoves) -> list[PoseRow]:
    """Return the measures of poses that are of use."""
    receptor, ligand = (heavy_positions(docked.read.sides[role]) for role in (Role.RECEPTOR, Role.LIGAND))
    counts = (near_counts(receptor, ligand, moves, limit).tolist() for limit in (CONTACT, CLASH))
    own = docked.item.id, docked.item.split
    rows = [PoseRow(*own, contacts=near, clashes=clashes) for near, clashes in zip(*counts, strict=True)]
    if not docked.has_truth or not rows:
        return rows
    if (apart := _ca_rmsd(docked.read, moves)) is not None:
        rows = _with(rows, dict(zip(("complex_rmsd", "ligand_rmsd", "interface_rmsd"), apart, strict=True)))
    if (quality := _quality(docked.read, moves)) is not None:
        columns = dict(zip(("fnat", "irmsd", "lrmsd", "dockq"), quality, strict=True))
        rows = _with(rows, columns | {"capri": np.array(quality.classes())})
    return rows


def _with(rows: list[PoseRow], columns: Mapping[str, NDArray[Any] | torch.Tensor]) -> list[PoseRow]:
    """Return rows with some of their columns filled in."""
    cells = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [row._replace(**dict(zip(columns, own, strict=True))) for row, own in zip(rows, cells, strict=True)]


def _quality(read: Complex, moves: RigidMoves) -> PoseQuality | None:
    """Return the measures of DockQ; None where the true partners do not touch."""
    try:
        return pose_quality(docking_truth(read), moves)
    except UnusableInput:
        return None


def _ca_rmsd(read: Complex, moves: RigidMoves) -> rigid_diffusion.PoseRmsd | None:
    """Return how far CA atoms are from the truth, which is brought into the receptor's frame; None without contacts."""
    receptor_R3, true_R3 = _ca_atoms(read, Role.RECEPTOR)
    ligand_L3, true_L3 = _ca_atoms(read, Role.LIGAND)
    if not (len(receptor_R3) and len(ligand_L3)):
        return None
    if read.bound:
        true_L3 = nearest_move(true_R3, receptor_R3).of(true_L3)[0]
    pos_PL3, target_L3, fixed_R3 = (torch.from_numpy(part) for part in (moves.of(ligand_L3), true_L3, receptor_R3))
    if not (torch.cdist(fixed_R3, target_L3) < rigid_diffusion.CONTACT).any():
        return None
    return pose_rmsd(pos_PL3, target_L3, fixed_R3)


def _ca_atoms(read: Complex, role: Role) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the CA atoms of a side as it was docked, and as it truly is, of residues that have them in both."""
    docked, true = read.sides[role], read.bound.get(role, read.sides[role])
    mine, theirs = docked.residues(), true.residues()
    rows = read.maps.get(f"bound.{role.value}", np.arange(len(mine)))
    pairs_N2 = np.stack([docked.structure.backbone_R5[mine, CA], true.structure.backbone_R5[theirs[rows], CA]], 1)
    pairs_N2 = pairs_N2[(pairs_N2 >= 0).all(1) & (rows >= 0)]
    places = ((docked, pairs_N2[:, 0]), (true, pairs_N2[:, 1]))
    mine_N3, true_N3 = (side.structure.pos_A3[atoms].astype(np.float64) for side, atoms in places)
    return mine_N3, true_N3
