"""Complexes of the shared structures, read as they are docked, and moves of their ligands."""

from __future__ import annotations

import numpy as np
from scipy.spatial.transform import Rotation

from pipeline.records import Item, Part, Role
from pipeline.structures.inventory import ScanRecipe, examine_item
from pipeline.structures.parsing.structure_files import plain_files
from pipeline.tasks.docking.pose_quality import heavy_positions

MAX_BYTES = 1 << 24
RECIPE = ScanRecipe()


def pair_item(folder, name, *, unbound=False):
    def parts(kind):
        roles = ((Role.RECEPTOR, "r"), (Role.LIGAND, "l"))
        return tuple(Part(role, str(folder / "pairs" / f"{name}_{side}_{kind}.pdb.gz")) for role, side in roles)

    return Item(name, parts("u"), parts("b")) if unbound else Item(name, parts("b"))


def read(item, recipe=RECIPE):
    inventory, found = examine_item(item, plain_files(MAX_BYTES).of(item), recipe)
    assert found is not None, inventory.detail
    return found


def as_moves(turn_P33, shift_P3):
    return np.concatenate([turn_P33.reshape(-1, 9), shift_P3], 1)


def moves_from(vector_P3, shift_P3):
    return as_moves(Rotation.from_rotvec(vector_P3).as_matrix(), np.asarray(shift_P3, float))


def some_moves(found, poses, far=4.0, seed=0):
    """Turns about the ligand's centre and shifts, the first of which does nothing."""
    rng = np.random.default_rng(seed)
    turn_P33 = Rotation.from_rotvec(rng.standard_normal((poses, 3)) * 0.3).as_matrix()
    shift_P3 = rng.standard_normal((poses, 3)) * far
    turn_P33[0], shift_P3[0] = np.eye(3), 0
    centre_3 = heavy_positions(found.sides[Role.LIGAND]).mean(0)
    return as_moves(turn_P33, centre_3 - turn_P33 @ centre_3 + shift_P3)


def nearest_move(pos_N3, onto_N3):
    """The turn and the shift that brings points nearest to others."""
    turn, _ = Rotation.align_vectors(onto_N3 - onto_N3.mean(0), pos_N3 - pos_N3.mean(0))
    return turn.as_matrix(), onto_N3.mean(0) - turn.apply(pos_N3.mean(0))
