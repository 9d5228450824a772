"""What stage predict leaves of docked complexes: structures of the best poses, and tables of all of them.

    poses.csv               a line a pose: its rank, confidence and, where the truth is known, its distance from it
    summary.csv             how near the truth the first poses of complexes are, and how many are near it
    pictures.json           the same as curves, which the page of the run draws
    1ABC/rank-01.pdb        the input structure with its ligand moved
    1ABC/rank-01-way.pdb    the ligand after each step, where that was asked for

Shapes: P poses of a complex.
"""

from __future__ import annotations

import json
import logging
import math
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import DataError
from pipeline.files import write_whole
from pipeline.protocol import PICTURES
from pipeline.records import Reason, Role
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.inventory import examine_item
from pipeline.structures.parsing.structure_files import plain_files
from pipeline.structures.sources.item_ids import KIND
from pipeline.tasks.docking.docked_partners import heavy_positions
from pipeline.tasks.docking.pose_quality import (
    CLASH,
    CONTACT,
    RMSDS,
    PoseRow,
    RigidMoves,
    docking_truth,
    near_counts,
    pose_quality,
    pose_rows,
    ranked,
    summaries,
)
from pipeline.tasks.docking.posed_files import DockedComplex, PosedFile, posed_file
from pipeline.tasks.task_parts import task_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.records import Item
    from pipeline.structures.inventory import ScanRecipe
    from pipeline.structures.parsing.structure_files import StructureFiles

log = logging.getLogger(__name__)

TABLE, SUMMARY = "poses.csv", "summary.csv"
SHOWN = range(31)  # Å
RANKS_SHOWN = 30
QUARTILES = {"a quarter is below": 25, "half is below": 50, "three quarters are below": 75}
MOVE, CONFIDENCE, TRAJECTORY = "move", "confidence", "trajectory"
UNJUDGED = "no confidence"
TRUTH = (*RMSDS, "fnat", "irmsd", "lrmsd", "dockq", "capri")


def publish_poses(
    folder: Path, outputs: Mapping[str, Any], items: Iterable[Item], reading: ScanRecipe, top: int
) -> list[Path]:
    """Write the files of all complexes that have poses; return them."""
    poses_of = defaultdict[str, dict[int, PoseRow]](dict)  # by their place among the outputs
    for place, row in enumerate(pose_rows(outputs, MOVE)):
        poses_of[row.complex][place] = row
    known = {row.complex for row in pose_rows(outputs, RMSDS[0])}
    absent = {*(() if CONFIDENCE in outputs else (CONFIDENCE,)), *(() if known else TRUTH)}
    names = [name for name in PoseRow._fields if name not in absent]
    files = plain_files(reading.max_file_bytes, reading.paths)
    written: list[Path] = []
    compared: list[PoseRow] = []
    kind_of: dict[str, str] = {}
    with task_table(folder / TABLE, names) as add:
        for item in items:
            if item.id not in poses_of:
                continue
            poses = {place: row._replace(split=item.split) for place, row in poses_of[item.id].items()}
            try:
                docked = _docked(item, files, reading, has_truth=item.id in known)
                moves = moves_of(np.stack([outputs[MOVE][place] for place in poses]))
                rows = write_docked(folder, docked, [*poses.values()], moves, top=top)
            except (DataError, UnusableInput) as error:
                what = error.what if isinstance(error, DataError) else error.detail
                log.warning("%s: no poses are written: %s", item.id, what)
                rows = [PoseRow(item.id, item.split, sample=row.sample, problem=what) for row in poses.values()]
            else:
                compared += rows if docked.has_truth else []
                kind_of[item.id] = item.labels.get(KIND, "")
                written += [folder / row.file for row in rows if row.file]
                if TRAJECTORY in outputs:
                    ways = {row.sample: outputs[TRAJECTORY][place] for place, row in poses.items()}
                    written += [_write_trajectory(folder, docked, row, ways[row.sample]) for row in rows if row.file]
            for row in rows:
                add(getattr(row, name) for name in names)
    if compared:
        summary = summaries(compared, kind_of)
        with task_table(folder / SUMMARY, summary[0]) as add:
            for line in summary:
                add(line.values())
        write_whole(folder / PICTURES, json.dumps(pictures(compared)))
        written += [folder / SUMMARY, folder / PICTURES]
    return [folder / TABLE, *written]


def _docked(item: Item, files: StructureFiles, reading: ScanRecipe, *, has_truth: bool) -> DockedComplex:
    content = files.of(item)
    taken, read = examine_item(item, content, reading)
    if read is None:
        raise UnusableInput(taken.reason or Reason.NO_NODES, taken.detail)
    return DockedComplex(item, read, content, reading.reading, has_truth=has_truth)


def write_docked(
    folder: Path, docked: DockedComplex, poses: Sequence[PoseRow], moves: RigidMoves, *, top: int = 5
) -> list[PoseRow]:
    """Write the best poses of a complex as `ID/rank-01.pdb` and so on; return a row of each pose, the best first."""
    text, home = posed_file(docked), folder / docked.item.id
    home.mkdir(parents=True, exist_ok=True)
    if any(not math.isnan(pose.confidence) for pose in poses):
        poses = [pose._replace(problem=pose.problem or UNJUDGED * math.isnan(pose.confidence)) for pose in poses]
    places = {pose.sample: place for place, pose in enumerate(poses)}
    rows = ranked(poses)
    useful = [places[row.sample] for row in rows if not row.problem]
    measured = _measured(docked, moves.take(np.array(useful, np.int64)))
    for place, measures in enumerate(measured):
        row = rows[place]._replace(**measures)
        if place < top:
            row = row._replace(file=f"{docked.item.id}/rank-{row.rank:02d}{text.suffix}")
            move = moves.take(slice(useful[place], useful[place] + 1))
            write_whole(folder / row.file, text.pose(move, _remarks(docked, text, row)))
        rows[place] = row
    names = {row.file.rpartition("/")[2] for row in rows}
    for path in home.glob("rank-*"):  # of an earlier, longer list
        if path.name not in names:
            path.unlink(missing_ok=True)
    return rows


def _write_trajectory(folder: Path, docked: DockedComplex, row: PoseRow, way_S12: NDArray[np.float64]) -> Path:
    """Write the trajectory of a pose: one model per step, to open together with the receptor."""
    stem, dot, suffix = row.file.rpartition(".")
    path = folder / f"{stem}-way{dot}{suffix}"
    remark = f"LIGAND OF {docked.item.id}: {len(way_S12)} POSES"
    write_whole(path, posed_file(docked).trajectory(moves_of(way_S12), [remark]))
    return path


def moves_of(move_P12: NDArray[np.float64]) -> RigidMoves:
    """Return moves as outputs have them: a rotation, row by row, and a shift."""
    return RigidMoves(move_P12[:, :9].reshape(-1, 3, 3), move_P12[:, 9:])


def _remarks(docked: DockedComplex, text: PosedFile, row: PoseRow) -> list[str]:
    """Return what is said at the top of a pose's file."""
    confidence = "NO CONFIDENCE" if math.isnan(row.confidence) else f"CONFIDENCE {row.confidence:.4f}"
    chains = {role: ", ".join(chain.name for chain in side.chains) for role, side in docked.read.sides.items()}
    return [
        f"POSE OF {docked.item.id}: RANK {row.rank}, SAMPLE {row.sample}, {confidence}",
        f"RECEPTOR {chains[Role.RECEPTOR]} AS IT WAS, LIGAND {chains[Role.LIGAND]} MOVED ({len(text.pos_N3)} ATOMS)",
    ]


def _measured(docked: DockedComplex, moves: RigidMoves) -> list[dict[str, Any]]:
    """Return what is measured of each pose: contacts, and where the true partners touch, what DockQ measures."""
    receptor, ligand = (heavy_positions(docked.read.sides[role]) for role in (Role.RECEPTOR, Role.LIGAND))
    columns: dict[str, Any] = {
        name: near_counts(receptor, ligand, moves, limit).tolist()
        for name, limit in (("contacts", CONTACT), ("clashes", CLASH))
    }
    if docked.has_truth:
        with suppress(UnusableInput):
            columns |= pose_quality(docking_truth(docked.read), moves)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def pictures(rows: Sequence[PoseRow]) -> list[dict[str, Any]]:
    """Return what the page of a run draws: the share of complexes within an RMSD, and RMSDs by rank."""
    drawn_rows = [row for row in rows if row.rank is not None and math.isfinite(row.complex_rmsd)]
    if not drawn_rows:
        return []
    by_complex, by_rank = (defaultdict[Any, list[float]](list) for _ in range(2))
    for row in sorted(drawn_rows, key=lambda row: row.rank or 0):
        by_complex[row.complex].append(row.complex_rmsd)
        by_rank[row.rank].append(row.complex_rmsd)
    chosen = {
        "best-ranked pose": [rmsds[0] for rmsds in by_complex.values()],
        "best of all": [min(rmsds) for rmsds in by_complex.values()],
        "every pose": [row.complex_rmsd for row in drawn_rows],
    }
    within = {name: [[limit, _percent_below(rmsds, limit)] for limit in SHOWN] for name, rmsds in chosen.items()}
    drawn = [_picture("complexes within an RMSD", "Å of complex RMSD", "%", within)]
    if len(by_rank) > 1:
        spread = {
            name: [[rank, float(np.percentile(by_rank[rank], share))] for rank in sorted(by_rank)[:RANKS_SHOWN]]
            for name, share in QUARTILES.items()
        }
        drawn.append(_picture("RMSD by rank", "rank", "Å", spread))
    return drawn


def _percent_below(rmsds: Sequence[float], limit: float) -> float:
    return 100 * sum(rmsd < limit for rmsd in rmsds) / len(rmsds)


def _picture(title: str, x: str, y: str, curves: Mapping[str, Any]) -> dict[str, Any]:
    lines = [{"name": name, "points": points} for name, points in curves.items()]
    return {"title": title, "x": x, "y": y, "lines": lines}
