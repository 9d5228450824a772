from __future__ import annotations

import csv

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.spatial.transform import Rotation

from pipeline.records import Item, Part, Role
from pipeline.structures.inventory import ScanRecipe, examine_item
from pipeline.structures.parsing.structure_files import plain_files
from pipeline.tasks.docking.pose_quality import (
    RigidMoves,
    capri_class,
    clash_counts,
    docking_truth,
    heavy_positions,
    nearest_move,
    pose_quality,
)
from tests.tasks.docking.dockq_numbers import COMPLEXES, MOVE, PAIRS, SAID, TABLE

MAX_BYTES = 1 << 24
CASES = [(source, name) for source in ("bound", "unbound") for name in PAIRS] + [("complex", c) for c in COMPLEXES]
CLOSE = {"fnat": 1e-5, "iRMSD": 1e-4, "LRMSD": 1e-4, "DockQ": 1e-4}


def item_of(folder, source, name):
    if source == "complex":
        path = str(folder / "complexes" / f"{name}.pdb")
        return Item(name, (Part(Role.RECEPTOR, path, ("A",)), Part(Role.LIGAND, path, ("B",))))

    def parts(kind):
        roles = ((Role.RECEPTOR, "r"), (Role.LIGAND, "l"))
        return tuple(Part(role, str(folder / "pairs" / f"{name}_{side}_{kind}.pdb")) for role, side in roles)

    return Item(name, parts("b")) if source == "bound" else Item(name, parts("u"), parts("b"))


def read(item):
    _, found = examine_item(item, plain_files(MAX_BYTES).of(item), ScanRecipe())
    assert found is not None
    return found


def moves_from(vector_P3, shift_P3):
    return RigidMoves(Rotation.from_rotvec(vector_P3).as_matrix(), np.asarray(shift_P3, float))


def what_dockq_says(source, name):
    with TABLE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["source"], row["complex"]) == (source, name)]
    move_P6 = np.array([[row[column] for column in MOVE] for row in rows], float)
    said = {column: np.array([row[column] for row in rows], float) for column in SAID}
    return moves_from(move_P6[:, :3], move_P6[:, 3:]), said


@pytest.mark.shared
@pytest.mark.parametrize(("source", "name"), CASES, ids=lambda part: part)
def test_measures_are_those_of_dockq(shared_structures, source, name):
    moves, said = what_dockq_says(source, name)
    found = pose_quality(docking_truth(read(item_of(shared_structures, source, name))), moves)
    ours = dict(zip(SAID, (found.fnat_P, found.irmsd_P, found.lrmsd_P, found.dockq_P), strict=True))
    off = {column: np.abs(ours[column] - said[column]).max() for column in SAID}
    assert off == {column: pytest.approx(0, abs=CLOSE[column]) for column in SAID}
