"""Figures of a ranking are those of a plain computation over all scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.tasks.ranking_scores import BINS, Ranking, bins, logits, precision_at

HALVES = st.floats(width=16, allow_nan=False)
SINGLES = st.floats(width=32, allow_nan=False)


def ranked(scores, labels):
    ranking = Ranking()
    ranking.add(np.asarray(scores, np.float32), np.asarray(labels))
    return ranking


def plain_auroc(scores, labels):
    """Compare every yes with every no."""
    yes, no = scores[labels][:, None], scores[~labels]
    return ((yes > no) + 0.5 * (yes == no)).mean()


def plain_auprc(scores, labels):
    """Add up precision times the recall that each threshold adds."""
    total, found_before = 0.0, 0
    for threshold in np.unique(scores)[::-1]:
        chosen = scores >= threshold
        found = int(labels[chosen].sum())
        total += found / chosen.sum() * (found - found_before) / labels.sum()
        found_before = found
    return total


@given(st.lists(st.tuples(HALVES, st.booleans()), min_size=2, max_size=60))
def test_figures_are_exact_for_scores_of_half_precision(rows):
    scores, labels = np.array([score for score, _ in rows], np.float32), np.array([label for _, label in rows])
    scores = np.clip(scores, -65504, 65504)
    ranking = ranked(scores, labels)
    if labels.all() or not labels.any():
        assert math.isnan(ranking.auroc())
        assert math.isnan(ranking.auprc())
    else:
        assert ranking.auroc() == pytest.approx(plain_auroc(scores, labels), abs=1e-12)
        assert ranking.auprc() == pytest.approx(plain_auprc(scores, labels), abs=1e-12)


def test_scores_of_single_precision_are_told_apart_well_enough():
    rng = np.random.default_rng(0)
    labels = rng.random(3000) < 0.1
    scores = (rng.normal(size=3000) + labels).astype(np.float32)
    assert ranked(scores, labels).auroc() == pytest.approx(plain_auroc(scores, labels), abs=1e-5)
    assert ranked(scores, labels).auprc() == pytest.approx(plain_auprc(scores, labels), abs=1e-3)


@given(SINGLES, SINGLES)
def test_bins_are_in_the_order_of_scores(one, other):
    low, high = sorted((one, other))
    low_bin, high_bin = bins(np.array([low, high], np.float32)).tolist()
    assert low_bin <= high_bin
    assert 0 <= low_bin < BINS
    assert 0 <= high_bin < BINS


def test_a_score_that_is_not_a_number_leaves_no_figure():
    ranking = ranked([0.1, np.nan, 0.3], [True, False, False])
    assert math.isnan(ranking.auroc())
    ranking.add([0.1, 0.2], [True, False])
    assert math.isnan(ranking.auprc())


def test_probabilities_near_their_ends_stay_apart_as_logits():
    chances = np.array([0.0, 1e-7, 2e-7, 0.5, 0.9999, 0.99995, 1.0], np.float32)
    assert len(set(bins(logits(chances)).tolist())) == len(chances)


@pytest.mark.parametrize(
    ("most", "wanted"),
    [
        (1, 1.0),
        (2, (1 + 1 / 3) / 2),  # one place for three that are tied, one of them a yes
        (4, 2 / 4),
        (5, 3 / 5),
        (99, 3 / 5),
        (0, 1.0),
    ],
)
def test_precision_of_the_highest_shares_the_last_places_among_ties(most, wanted):
    scores, labels = np.array([0.5, 0.9, 0.5, 0.1, 0.5]), np.array([1, 1, 0, 1, 0], bool)
    assert precision_at(scores, labels, most) == pytest.approx(wanted)


def test_precision_of_nothing_is_not_a_number():
    assert math.isnan(precision_at(np.empty(0), np.empty(0, bool), 3))
    assert math.isnan(precision_at(np.array([np.nan, 1]), np.array([True, False]), 1))
