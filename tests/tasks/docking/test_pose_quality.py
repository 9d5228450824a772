"""Poses are judged as DockQ judges them, and rates of success count what they say.

What the package said is in tests/reference/dockq.
"""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from pipeline.records import Item, Part, Reason, Role
from pipeline.structures.atoms import UnusableInput
from pipeline.tasks.docking.pose_quality import (
    CLASSES,
    PoseRow,
    capri_class,
    docking_truth,
    heavy_positions,
    moved,
    near_counts,
    pose_quality,
    summaries,
)
from pipeline.tasks.docking.rigid_diffusion import superposed
from tests.reference.dockq.record import COMPLEXES, MOVE, PAIRS, SAID, TABLE
from tests.tasks.docking.docked import as_moves, moves_from, pair_item, read, some_moves

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
    off = {column: np.abs(found[column.lower()] - said[column]).max() for column in SAID}
    assert off == {column: pytest.approx(0, abs=CLOSE[column]) for column in SAID}


def test_measures_do_not_depend_on_which_frame_the_ligand_is_docked_from(structures):
    found = read(pair_item(structures, "1Z0K", unbound=True))
    truth, moves = docking_truth(found), some_moves(found, 3)
    first_12 = moves_from([[0.3, 1.0, -2.0]], [[12.0, -40.0, 5.0]])
    ligand = truth.ligand.docked
    there = replace(ligand, pos_A3=moved(ligand.pos_A3, first_12)[0])
    elsewhere = replace(truth, ligand=truth.ligand._replace(docked=there))
    turn_P33 = moves[:, :9].reshape(-1, 3, 3) @ first_12[0, :9].reshape(3, 3).T
    same = pose_quality(elsewhere, as_moves(turn_P33, moves[:, 9:] - turn_P33 @ first_12[0, 9:]))
    for name, expected in pose_quality(truth, moves).items():
        assert same[name] == (expected if name == "capri" else pytest.approx(expected, abs=1e-9)), name


def test_partners_that_do_not_touch_are_no_truth(structures):
    mixed = pair_item(structures, "1Z0K").parts[0], pair_item(structures, "1HIA").parts[1]
    with pytest.raises(UnusableInput) as refused:
        docking_truth(read(Item("apart", mixed)))
    assert refused.value.reason is Reason.NO_CONTACTS


def test_clashes_are_pairs_of_heavy_atoms_nearer_than_three_angstroms(structures):
    found = read(pair_item(structures, "1Z0K"))
    receptor, ligand = (heavy_positions(found.sides[role]) for role in (Role.RECEPTOR, Role.LIGAND))
    moves = some_moves(found, 5, far=8.0)
    expected = [int((cdist(receptor, pos_N3) < 3.0).sum()) for pos_N3 in moved(ligand, moves)]
    assert max(expected) > 50
    assert near_counts(receptor, ligand, moves, 3.0).tolist() == expected


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
def test_the_nearest_place_undoes_the_move_that_was_made(points, seed):
    rng = np.random.default_rng(seed)
    pos_N3, others_M3 = rng.standard_normal((2, points, 3)) * 10
    move = moves_from(rng.standard_normal((1, 3)), rng.standard_normal((1, 3)) * 30)
    there_N3, expected_M3 = (moved(pos, move)[0] for pos in (pos_N3, others_M3))
    found = superposed(*map(torch.from_numpy, (pos_N3, there_N3, others_M3)))
    np.testing.assert_allclose(found, expected_M3, atol=1e-8)


def score(name, rank, rmsd, dockq, split=""):
    return PoseRow(name, split, rank, complex_rmsd=rmsd, dockq=dockq)


SCORES = [
    score("a", 1, 6.0, 0.30, "test"),
    score("a", 2, 1.0, 0.85, "test"),
    score("b", 1, 1.5, 0.60, "test"),
    score("b", 6, 0.5, 0.90, "test"),
    score("c", None, math.nan, math.nan, "val"),  # exploded: a failure
]


def shares(row):
    below = [row[f"complex_rmsd_percent_below_{limit}"] for limit in (1, 2, 5, 10)]
    return row["complexes"], below, [row[f"percent_{name}"] for name in CLASSES[1:]]


def test_summaries_count_complexes_by_their_first_poses():
    rows = {(row["group"], row["among"]): row for row in summaries(SCORES, {"a": "antibody"})}
    third = pytest.approx
    assert shares(rows["all", "top-1"]) == (3, third([0, 100 / 3, 100 / 3, 200 / 3]), third([200 / 3, 100 / 3, 0]))
    assert shares(rows["all", "top-5"]) == (3, third([0] + [200 / 3] * 3), third([200 / 3, 200 / 3, 100 / 3]))
    assert shares(rows["all", "oracle"]) == (3, third([100 / 3] + [200 / 3] * 3), third([200 / 3] * 3))
    assert rows["split=test", "top-5"]["complexes"] == 2
    assert shares(rows["split=val", "oracle"]) == (1, [0] * 4, [0] * 3)
    assert shares(rows["kind=antibody", "top-1"]) == (1, [0, 0, 0, 100], [100, 0, 0])
    assert [row["group"] for row in summaries(SCORES, {"a": "antibody"})][::3] == [
        "all",
        "split=test",
        "split=val",
        "kind=antibody",
    ]


def test_means_medians_and_deviations_are_of_the_complexes_that_have_a_pose():
    first = summaries(SCORES)[0]
    found = [first[f"{name}_{what}"] for name in ("complex_rmsd", "dockq") for what in ("mean", "median", "sd")]
    assert found == pytest.approx([3.75, 3.75, 2.25, 0.45, 0.45, 0.15])


def test_what_has_no_truth_is_neither_success_nor_failure():
    unknown = score("d", 1, math.nan, math.nan)
    assert shares(summaries([*SCORES, unknown])[0])[1:] == shares(summaries(SCORES)[0])[1:]
    assert all(math.isnan(share) for share in shares(summaries([unknown])[0])[1])
    assert summaries([]) == []


POSES = st.builds(
    score, st.sampled_from("abc"), st.none() | st.integers(1, 9), LENGTHS, SHARES, st.sampled_from(["", "t", "v"])
)


@given(st.lists(POSES, min_size=1))
def test_rates_rise_with_the_number_of_poses_and_fall_with_the_demand(scores):
    rates = [shares(row) for row in summaries(scores)]
    for first, five, oracle in zip(rates[::3], rates[1::3], rates[2::3], strict=True):
        for fewer, more in ((first, five), (five, oracle)):
            assert all(a <= b for a, b in zip(fewer[1] + fewer[2], more[1] + more[2], strict=True))
        assert first[1] == sorted(first[1])
        assert first[2] == sorted(first[2], reverse=True)
