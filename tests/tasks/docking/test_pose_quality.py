"""Poses are judged as DockQ judges them, and rates of success count what they say.

What the package said is in tests/reference/dockq.
"""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from pipeline.records import Item, Part, Reason, Role
from pipeline.structures.atoms import UnusableInput
from pipeline.tasks.docking.docked_partners import heavy_positions
from pipeline.tasks.docking.pose_quality import (
    CLASSES,
    PoseScore,
    RigidMoves,
    capri_class,
    clash_counts,
    docking_truth,
    nearest_move,
    pose_quality,
    success_rates,
)
from tests.reference.dockq.record import COMPLEXES, MOVE, PAIRS, SAID, TABLE
from tests.tasks.docking.docked import moves_from, pair_item, read, some_moves

CASES = [(source, name) for source in ("bound", "unbound") for name in PAIRS] + [("complex", c) for c in COMPLEXES]
CLOSE = {"fnat": 1e-5, "iRMSD": 1e-4, "LRMSD": 1e-4, "DockQ": 1e-4}  # the table has 5 digits, DockQ single precision
SHARES = st.floats(0, 1)
LENGTHS = st.floats(0, 40)


def item_of(folder, source, name):
    if source != "complex":
        return pair_item(folder, name, unbound=source == "unbound")
    path = str(folder / "complexes" / f"{name}.pdb")
    return Item(name, (Part(Role.RECEPTOR, path, ("A",)), Part(Role.LIGAND, path, ("B",))))


def what_dockq_says(source, name):
    with TABLE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["source"], row["complex"]) == (source, name)]
    move_P6 = np.array([[row[column] for column in MOVE] for row in rows], float)
    said = {column: np.array([row[column] for row in rows], float) for column in SAID}
    return moves_from(move_P6[:, :3], move_P6[:, 3:]), said


@pytest.mark.parametrize(("source", "name"), CASES, ids=lambda part: part)
def test_measures_are_those_of_dockq(structures, source, name):
    moves, said = what_dockq_says(source, name)
    found = pose_quality(docking_truth(read(item_of(structures, source, name))), moves)
    ours = dict(zip(SAID, (found.fnat_P, found.irmsd_P, found.lrmsd_P, found.dockq_P), strict=True))
    off = {column: np.abs(ours[column] - said[column]).max() for column in SAID}
    assert off == {column: pytest.approx(0, abs=CLOSE[column]) for column in SAID}


def test_the_table_of_dockq_has_poses_of_every_class_and_partners_of_several_chains(structures):
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    classes = {capri_class(*(float(row[column]) for column in SAID[:3])) for row in rows}
    assert (len(rows), classes) == (8 * len(CASES), set(CLASSES))
    several = [name for name in PAIRS if len(read(pair_item(structures, name)).sides[Role.RECEPTOR].chains) > 1]
    assert {"1HIA", "1KKL", "2VXT"} <= set(several)


def test_measures_do_not_depend_on_which_frame_the_ligand_is_docked_from(structures):
    found = read(pair_item(structures, "1Z0K", unbound=True))
    truth, moves = docking_truth(found), some_moves(found, 3)
    ((first_33,), (first_3,)) = moves_from([[0.3, 1.0, -2.0]], [[12.0, -40.0, 5.0]])
    ligand = truth.ligand.docked
    moved = ligand.pos_A3 @ first_33.T + first_3
    elsewhere = replace(truth, ligand=truth.ligand._replace(docked=replace(ligand, pos_A3=moved)))
    turn_P33 = moves.turn_P33 @ first_33.T
    same = pose_quality(elsewhere, RigidMoves(turn_P33, moves.shift_P3 - turn_P33 @ first_3))
    np.testing.assert_allclose(same, pose_quality(truth, moves), atol=1e-9)


def test_partners_that_do_not_touch_are_no_truth(structures):
    mixed = pair_item(structures, "1Z0K").parts[0], pair_item(structures, "1HIA").parts[1]
    with pytest.raises(UnusableInput) as refused:
        docking_truth(read(Item("apart", mixed)))
    assert refused.value.reason is Reason.NO_CONTACTS


def test_clashes_are_pairs_of_heavy_atoms_nearer_than_three_angstroms(structures):
    found = read(pair_item(structures, "1Z0K"))
    receptor, ligand = (heavy_positions(found.sides[role]) for role in (Role.RECEPTOR, Role.LIGAND))
    moves = some_moves(found, 5, far=8.0)
    expected = [int((cdist(receptor, pos_N3) < 3.0).sum()) for pos_N3 in moves.of(ligand)]
    assert max(expected) > 50
    assert clash_counts(receptor, ligand, moves).tolist() == expected


@given(SHARES, LENGTHS, LENGTHS)
def test_a_better_pose_is_never_of_a_worse_class(fnat, irmsd, lrmsd):
    rank = CLASSES.index(capri_class(fnat, irmsd, lrmsd))
    for better in ((min(1, fnat + 0.2), irmsd, lrmsd), (fnat, irmsd / 2, lrmsd), (fnat, irmsd, lrmsd / 2)):
        assert CLASSES.index(capri_class(*better)) >= rank


@pytest.mark.parametrize(
    ("measures", "expected"),
    [
        ((0.5, 1.0, 9.0), "high"),
        ((0.5, 9.0, 1.0), "high"),
        ((0.49, 1.0, 1.0), "medium"),
        ((0.9, 2.0, 9.0), "medium"),
        ((0.9, 2.1, 5.1), "acceptable"),
        ((0.1, 4.0, 99.0), "acceptable"),
        ((0.1, 4.1, 10.1), "incorrect"),
        ((0.09, 0.5, 0.5), "incorrect"),
    ],
)
def test_classes_follow_the_criteria_of_capri(measures, expected):
    assert capri_class(*measures) == expected


@given(st.integers(3, 20), st.integers(0, 1000))
def test_the_nearest_move_finds_the_move_that_was_made(points, seed):
    rng = np.random.default_rng(seed)
    pos_N3 = rng.standard_normal((points, 3)) * 10
    move = moves_from(rng.standard_normal((1, 3)), rng.standard_normal((1, 3)) * 30)
    found = nearest_move(pos_N3, move.of(pos_N3)[0])
    np.testing.assert_allclose(found.of(pos_N3), move.of(pos_N3), atol=1e-8)
    np.testing.assert_allclose(found.undone(move.of(pos_N3)[0])[0], pos_N3, atol=1e-8)
    assert np.linalg.det(found.turn_P33[0]) == pytest.approx(1)


SCORES = [
    PoseScore("a", 1, 6.0, 0.30, "test", "antibody"),
    PoseScore("a", 2, 1.0, 0.85, "test", "antibody"),
    PoseScore("b", 1, 1.5, 0.60, "test"),
    PoseScore("b", 6, 0.5, 0.90, "test"),
    PoseScore("c", None, math.nan, math.nan, "val"),  # exploded: a failure
]


def test_rates_of_success_count_complexes_by_their_first_poses():
    rates = {(rate.group, rate.top): rate for rate in success_rates(SCORES)}
    assert rates["all", "top-1"][2:] == (3, (1 / 3, 1 / 3, 2 / 3), (2 / 3, 1 / 3, 0.0))
    assert rates["all", "top-5"][2:] == (3, (2 / 3,) * 3, (2 / 3, 2 / 3, 1 / 3))
    assert rates["all", "oracle"][2:] == (3, (2 / 3,) * 3, (2 / 3,) * 3)
    assert rates["split=test", "top-5"].complexes == 2
    assert rates["split=val", "oracle"][2:] == (1, (0.0,) * 3, (0.0,) * 3)
    assert rates["kind=antibody", "top-1"][2:] == (1, (0.0, 0.0, 1.0), (1.0, 0.0, 0.0))
    assert [rate.group for rate in success_rates(SCORES)][::3] == ["all", "split=test", "split=val", "kind=antibody"]


def test_what_has_no_truth_is_neither_success_nor_failure():
    unknown = PoseScore("d", 1, math.nan, math.nan)
    assert success_rates([*SCORES, unknown])[0][3:] == success_rates(SCORES)[0][3:]
    assert all(math.isnan(share) for share in success_rates([unknown])[0].below_A)
    assert success_rates([]) == []


POSES = st.builds(
    PoseScore, st.sampled_from("abc"), st.none() | st.integers(1, 9), LENGTHS, SHARES, st.sampled_from(["", "t", "v"])
)


@given(st.lists(POSES, min_size=1))
def test_rates_rise_with_the_number_of_poses_and_fall_with_the_demand(scores):
    rates = success_rates(scores)
    for first, five, oracle in zip(rates[::3], rates[1::3], rates[2::3], strict=True):
        for fewer, more in ((first, five), (five, oracle)):
            assert all(
                a <= b for a, b in zip(fewer.below_A + fewer.at_least, more.below_A + more.at_least, strict=True)
            )
        assert list(first.below_A) == sorted(first.below_A)
        assert list(first.at_least) == sorted(first.at_least, reverse=True)
