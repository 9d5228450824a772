"""Figures of found peptides: the field's by hand, pepTRM's own against what it tells."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from pipeline.readers import peptides
from pipeline.readers.peptides import residue_codes
from pipeline.tasks.peptides import found_peptides
from pipeline.tasks.peptides.found_peptides import EOS, Answer, Vocabulary, best_of_mass, letter_scores, rank_score
from pipeline.tasks.peptides.published_peptides import (
    area,
    field_metrics,
    found_residues,
    judged,
    letter_metrics,
    letter_row,
    precision_by_coverage,
    precision_picture,
)
from tests.reference import document, recorded
from tests.tasks.originals import PEPTRM

HERE = Vocabulary()


def letters(text, vocabulary=HERE):
    return vocabulary.letters(residue_codes(text)) if text else np.array([], np.int64)


def judgement(said, true, score=0.5):
    sure_R = np.full(len(letters(said)), score)
    return judged(Answer(letters(said), sure_R, False, math.nan, letters(true), math.nan, 0), HERE)


@pytest.mark.parametrize(
    ("said", "true", "found", "right"),
    [
        ("PEPTIDE", "PEPTIDE", "1111111", True),
        ("PEPTLDE", "PEPTIDE", "1111111", True),  # I and L weigh the same
        ("PETPIDE", "PEPTIDE", "1100111", False),  # what follows is found by the mass behind it, too
        ("PEPT", "PEPTIDE", "1111", False),
        ("PEPTIDEK", "PEPTIDE", "11111110", False),
        ("GGPEK", "NPEK", "00111", False),  # two G weigh as much as an N: what follows is found
        ("WEPTIDE", "PEPTIDE", "0111111", False),  # from the end
        ("PEPTIDW", "PEPTIDE", "1111110", False),
        ("WEPTIDW", "PEPTIDE", "0000000", False),  # neither end is right, and so no mass up to a residue is
        ("M[Oxidation]K", "FK", "11", True),  # 147.0354 and 147.0684 are the same to 0.1 Da
        ("Q[Deamidated]K", "EK", "11", True),
        ("[Acetyl]-AK", "AK", "011", False),
        ("", "PEPTIDE", "", False),
    ],
)
def test_residues_are_found_by_their_mass_and_the_mass_up_to_them_from_either_end(said, true, found, right):
    row = judgement(said, true)
    assert "".join(str(int(is_found)) for is_found in row.is_found_R) == found
    assert row.is_right == right


def test_a_residue_is_found_only_once():
    said_R, true_R = HERE.masses_V[letters("AAAAAA")], HERE.masses_V[letters("AA")]
    assert found_residues(said_R, true_R).sum() <= 2


def test_precision_is_of_what_was_said_and_recall_of_what_is_true():
    rows = [judgement("PEPTIDE", "PEPTIDE"), judgement("PEPT", "PEPTIDE"), judgement("", "WYFRK")]
    figures = field_metrics(rows)
    assert figures["residue_precision"] == 1
    assert figures["residue_recall"] == pytest.approx(11 / 19)
    assert figures["peptide_precision"] == 0.5
    assert figures["peptide_recall"] == pytest.approx(1 / 3)
    assert figures["peptide_recall_length_to_12"] == pytest.approx(1 / 3)
    assert "peptide_recall_length_13_to_17" not in figures
    assert "modified_precision" not in figures


def test_modified_residues_have_a_precision_of_their_own():
    rows = [judgement("M[Oxidation]EK", "M[Oxidation]EK"), judgement("EM[Oxidation]K", "EFFK")]
    assert field_metrics(rows)["modified_precision"] == 1.0  # an oxidised M weighs what F does
    rows = [judgement("M[Oxidation]EK", "M[Oxidation]EK"), judgement("AM[Oxidation]WK", "AEEK")]
    assert field_metrics(rows)["modified_precision"] == 0.5


def test_precision_by_coverage_begins_with_the_surest():
    rows = [
        judgement("AK", "AK", 0.9),
        judgement("WK", "AK", 0.8),
        judgement("CK", "CK", 0.7),
        judgement("K", "R", 0.1),
    ]
    coverage_N, precision_N = precision_by_coverage(reversed(rows))
    assert coverage_N.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert precision_N.tolist() == pytest.approx([1, 1 / 2, 2 / 3, 1 / 2])
    assert area(rows) == pytest.approx((1 + (1 + 1 / 2) / 2 + (1 / 2 + 2 / 3) / 2 + (2 / 3 + 1 / 2) / 2) / 4)
    assert area([judgement("AK", "AK")]) == 1.0
    picture = precision_picture(rows)
    assert picture["lines"][0]["points"][-1] == [100.0, 50.0]
    assert len(precision_picture(1000 * rows)["lines"][0]["points"]) == 200


def test_rank_by_score_and_mass_is_the_originals():
    guide = document("peptrm/decoded")["guide"]
    scores = {"LQAVTDDHIR": 0.5, "QLAVTDDHIR": 0.9, "LKAVTDDHIR": 0.8, "AVDSLVPIGR": 0.99}
    ranked = {text: rank_score(scores[text], ppm, 0.5) for text, ppm in guide["error_ppm"].items()}
    assert sorted(ranked, key=lambda text: -ranked[text]) == [text for text, _ in guide["reranked"]]
    assert ranked == pytest.approx(dict(map(tuple, guide["reranked"])), abs=1e-7)


def test_errors_of_mass_are_the_originals():
    guide, choice = document("peptrm/decoded")["guide"], PEPTRM.choice
    for text, ppm in guide["error_ppm"].items():
        assert choice.ppm(letters(text, PEPTRM.vocabulary), guide["mass"]) == pytest.approx(ppm, abs=1e-6)


def rows_of(answer_TBL):
    data = recorded("peptrm/inputs")
    triples = zip(
        answer_TBL.transpose(1, 0, 2), data["nine.sequence"].numpy(), data["nine.precursor_mass"], strict=True
    )
    return [letter_row(answer_TL, label_L, float(mass)) for answer_TL, label_L, mass in triples]


def test_letters_are_counted_as_the_original_counts_them():
    known = document("peptrm/decoded")
    found, close = (
        letter_metrics(rows_of(logits.argmax(-1).numpy()), PEPTRM.vocabulary)
        for logits in (recorded("peptrm/outputs")["logits"], recorded("peptrm/inputs")["metrics.logits"][None])
    )
    for theirs, ours in ((known["metrics"], found), (known["metrics_of_close"], close)):
        assert ours["token_accuracy"] == pytest.approx(theirs["token_accuracy"])
        assert ours["sequence_accuracy"] == pytest.approx(theirs["sequence_accuracy"])
        assert ours["mass_error_ppm"] == pytest.approx(theirs["mean_mass_error_ppm"])
    steps = {name: value for name, value in known["refinement"].items() if "step_" in name and "by_step" not in name}
    assert len(steps) == 22
    assert {name: found[name.replace("/", "_")] for name in steps} == pytest.approx(steps, abs=1e-7)
    assert found["recursion_accuracy_gain"] == pytest.approx(known["refinement"]["recursion/accuracy_gain"])


def test_letters_are_written_as_the_original_writes_them():
    known, vocabulary = document("peptrm/decoded"), PEPTRM.vocabulary
    letter_BL, is_known_BL = (
        recorded("peptrm/outputs")["logits"][-1].argmax(-1),
        recorded("peptrm/inputs")["nine.sequence_mask"],
    )
    assert [vocabulary.text(letter_L.numpy()) for letter_L in letter_BL] == known["to_the_end_token"]
    by_mask = [letter_L[known_L].numpy() for letter_L, known_L in zip(letter_BL, is_known_BL, strict=True)]
    assert [vocabulary.text(letter_L) for letter_L in by_mask] == known["by_mask"]


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
