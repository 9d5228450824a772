"""The best peptide of a mass against all peptides there are, and on spectra of a usual size."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pipeline.readers import peptides
from pipeline.readers.peptides import residue_codes
from pipeline.tasks.peptides import found_peptides
from pipeline.tasks.peptides.found_peptides import EOS, Vocabulary, best_of_mass, letter_scores

FEW = Vocabulary(("M[Oxidation]", "[Acetyl]-", "[Ammonia-loss]-"))
PUBLISHED = Vocabulary(as_published=True)


def drawn(seed, places, vocabulary, only, sharp=1.0):
    """Return logarithms of random probabilities, of some letters alone."""
    rng = np.random.default_rng(seed)
    logits_LV = np.full((places, len(vocabulary.names)), -40.0)
    allowed = [vocabulary.names.index(name) for name in only] + [EOS]
    logits_LV[:, allowed] = sharp * rng.normal(size=(places, len(allowed)))
    return logits_LV - np.log(np.exp(logits_LV).sum(1, keepdims=True))


def of_all(log_LV, vocabulary, mass, ppm, only):
    """Return the best score of all peptides of these letters that have the mass, one after the other."""
    letter_LV, end_N = letter_scores(log_LV, vocabulary)
    best = -np.inf
    for length in range(1, len(log_LV) + 1):
        for letters in product([vocabulary.names.index(name) for name in only], repeat=length):
            own = vocabulary.masses_V[list(letters)].sum() + vocabulary.water
            if abs(own - mass) <= ppm * 1e-6 * mass:
                score = letter_LV[np.arange(length), list(letters)].sum() + end_N[length]
                best = max(best, score)
    return best


def score_of(letter_R, log_LV, vocabulary):
    letter_LV, end_N = letter_scores(log_LV, vocabulary)
    return letter_LV[np.arange(len(letter_R)), letter_R].sum() + end_N[len(letter_R)]


@pytest.mark.parametrize("vocabulary", [FEW, PUBLISHED])
@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all_peptides(vocabulary, seed):
    only = ["G", "A", "N", "K", "M", *(["M[Oxidation]", "[Acetyl]-", "[Ammonia-loss]-"] if vocabulary is FEW else [])]
    rng = np.random.default_rng(seed)
    log_LV = drawn(seed, 5, vocabulary, only, sharp=2.0)
    true = [vocabulary.names.index(only[at]) for at in rng.integers(0, 5, rng.integers(2, 6))]
    mass = vocabulary.masses_V[true].sum() + vocabulary.water
    ppm = float(rng.choice([5.0, 50.0, 5000.0]))
    found_R = best_of_mass(log_LV, mass, vocabulary, ppm)
    assert found_R is not None
    assert abs(vocabulary.masses_V[found_R].sum() + vocabulary.water - mass) <= ppm * 1e-6 * mass
    assert score_of(found_R, log_LV, vocabulary) == pytest.approx(of_all(log_LV, vocabulary, mass, ppm, only), abs=1e-9)


def test_where_no_peptide_has_the_mass_there_is_none():
    log_LV = drawn(0, 6, FEW, ["G", "A"])
    assert best_of_mass(log_LV, peptides.WATER + 57.5, FEW, 5.0) is None
    assert best_of_mass(log_LV, 10.0, FEW, 5.0) is None


def test_one_wrong_letter_is_mended_by_the_mass():
    text = "LQAVTDDHIR"
    vocabulary = Vocabulary()
    letter_R = vocabulary.letters(residue_codes(text))
    log_LV = np.full((35, len(vocabulary.names)), np.log(1e-4))
    log_LV[np.arange(len(letter_R)), letter_R] = np.log(0.9)
    log_LV[len(letter_R) :, EOS] = np.log(0.9)
    log_LV[3, letter_R[3]], log_LV[3, vocabulary.names.index("W")] = np.log(0.4), np.log(0.5)
    mass = vocabulary.masses_V[letter_R].sum() + peptides.WATER
    assert vocabulary.text(log_LV.argmax(1)) == "LQAWTDDHIR"
    assert vocabulary.text(best_of_mass(log_LV, mass, vocabulary, 20.0)) == text


def test_as_published_the_mass_tells_where_a_peptide_ends():
    letter_R = PUBLISHED.letters(residue_codes("LQAVTDDHIR"))
    log_LV = np.full((35, 24), np.log(1e-3))
    log_LV[np.arange(35), np.r_[letter_R, np.full(25, 8)]] = np.log(0.9)  # it goes on with C
    mass = PUBLISHED.masses_V[letter_R].sum() + 18.01056
    assert PUBLISHED.text(best_of_mass(log_LV, mass, PUBLISHED, 20.0)) == "LQAVTDDHIR"


def test_a_search_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr(found_peptides, "MOST_STEPS", 50)
    vocabulary = Vocabulary()
    log_LV = np.full((35, len(vocabulary.names)), -3.0)
    assert best_of_mass(log_LV, 2345.6789, vocabulary, 0.001) is None
