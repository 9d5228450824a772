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
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import DataError
from pipeline.files import write_whole
from pipeline.protocol import PICTURES, item_of
from pipeline.records import Reason
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.inventory import examine_item
from pipeline.structures.parsing.structure_files import plain_files
from pipeline.structures.sources.item_ids import KIND
from pipeline.tasks.docking.docked_files import (
    TRUTH,
    DockedComplex,
    PoseRow,
    SampledPoses,
    write_docked,
    write_trajectory,
)
from pipeline.tasks.docking.pose_quality import RigidMoves, summaries
from pipeline.tasks.task_parts import task_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from pipeline.records import Item
    from pipeline.structures.inventory import ScanRecipe
    from pipeline.tasks.docking.pose_quality import PoseScore

log = logging.getLogger(__name__)

TABLE, SUMMARY = "poses.csv", "summary.csv"
SHOWN = range(31)  # Å
RANKS_SHOWN = 30
QUARTILES = {"a quarter is below": 25, "half is below": 50, "three quarters are below": 75}
MOVE, CONFIDENCE, TRAJECTORY, KNOWN = "move", "confidence", "trajectory", "ligand_rmsd"
COMPLEX = "complex_rmsd"  # which is drawn


def publish_poses(
    folder: Path, outputs: Mapping[str, Any], items: Iterable[Item], reading: ScanRecipe, top: int
) -> list[Path]:
    """Write the files of all complexes that have poses; return them."""
    publishing = _Publishing(folder, outputs, reading, top)
    absent = {*(() if CONFIDENCE in outputs else (CONFIDENCE,)), *(() if publishing.known else TRUTH)}
    names = [name for name in PoseRow._fields if name not in absent]
    with task_table(folder / TABLE, names) as add:
        for item in items:
            if item.id in publishing.places:
                for row in publishing.rows(item):
                    add(getattr(row, name) for name in names)
    if publishing.scores:
        publishing.written += [folder / SUMMARY, folder / PICTURES]
        rows = summaries(publishing.scores)
        with task_table(folder / SUMMARY, rows[0]) as add:
            for summary in rows:
                add(summary.values())
        write_whole(folder / PICTURES, json.dumps(pictures(publishing.scores)))
    return [folder / TABLE, *publishing.written]


class _Publishing:
    """Writes complex by complex, and remembers what was written and how good it is."""

    def __init__(self, folder: Path, outputs: Mapping[str, Any], reading: ScanRecipe, top: int) -> None:
        self._folder, self._outputs, self._reading, self._top = folder, outputs, reading, top
        self._files = plain_files(reading.max_file_bytes, reading.paths)
        self.places, self.known = _places(outputs[MOVE]), set(_places(outputs.get(KNOWN, ())))
        self.written: list[Path] = []
        self.scores: list[PoseScore] = []

    def rows(self, item: Item) -> list[PoseRow]:
        """Write a complex's best poses; return a row of each, which says so where there is nothing to write."""
        poses = self._poses(self.places[item.id])
        try:
            docked = self._read(item)
            rows = write_docked(self._folder, docked, poses, top=self._top)
        except (DataError, UnusableInput) as error:
            what = error.what if isinstance(error, DataError) else error.detail
            log.warning("%s: no poses are written: %s", item.id, what)
            return [PoseRow(item.id, item.split, sample=int(at), problem=what) for at in poses.sample_P]
        self.written += [self._folder / row.file for row in rows if row.file]
        if TRAJECTORY in self._outputs:
            self._write_ways(docked, rows, poses.sample_P.tolist())
        if docked.has_truth:
            self.scores += [row.score(item.labels.get(KIND, "")) for row in rows]
        return rows

    def _poses(self, places: slice) -> SampledPoses:
        moves = RigidMoves(*_turns_and_shifts(np.stack(self._outputs[MOVE][places])))
        confidence_P = None
        if CONFIDENCE in self._outputs:
            confidence_P = np.array([float(one) for one in self._outputs[CONFIDENCE][places]])
        told = (self._outputs[MOVE].id(at).partition(" ")[2] for at in range(places.start, places.stop))
        return SampledPoses(moves, np.array([int(number or 0) for number in told]), confidence_P)

    def _read(self, item: Item) -> DockedComplex:
        content = self._files.of(item)
        taken, read = examine_item(item, content, self._reading)
        if read is None:
            raise UnusableInput(taken.reason or Reason.NO_NODES, taken.detail)
        return DockedComplex(item, read, content, self._reading.reading, has_truth=item.id in self.known)

    def _write_ways(self, docked: DockedComplex, rows: Iterable[PoseRow], samples: list[int]) -> None:
        """Write how the ligand came to each pose that was written."""
        ways = self._outputs[TRAJECTORY][self.places[docked.item.id]]
        for row in rows:
            if row.file:
                stem, dot, suffix = row.file.rpartition(".")
                self.written.append(self._folder / f"{stem}-way{dot}{suffix}")
                write_trajectory(
                    self.written[-1], docked, RigidMoves(*_turns_and_shifts(ways[samples.index(row.sample)]))
                )


def pictures(scores: Sequence[PoseScore]) -> list[dict[str, Any]]:
    """Return what the page of a run draws: the share of complexes within an RMSD, and RMSDs by rank."""
    ranked = [score for score in scores if score.rank is not None and math.isfinite(score.rmsds[COMPLEX])]
    by_complex, by_rank = (defaultdict[Any, list[float]](list) for _ in range(2))
    for score in sorted(ranked, key=lambda score: score.rank or 0):
        by_complex[score.complex].append(score.rmsds[COMPLEX])
        by_rank[score.rank].append(score.rmsds[COMPLEX])
    if not ranked:
        return []
    chosen = {
        "best-ranked pose": [rmsds[0] for rmsds in by_complex.values()],
        "best of all": [min(rmsds) for rmsds in by_complex.values()],
        "every pose": [score.rmsds[COMPLEX] for score in ranked],
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


def _places(column: Any) -> dict[str, slice]:
    """Return where the rows of each complex are, which are one after the other."""
    places: dict[str, slice] = {}
    for at in range(len(column)):
        name = item_of(column.id(at))
        places[name] = slice(places[name].start if name in places else at, at + 1)
    return places


def _turns_and_shifts(move_P12: Any) -> tuple[Any, Any]:
    return move_P12[:, :9].reshape(-1, 3, 3), move_P12[:, 9:]
