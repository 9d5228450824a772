"""Figures of found peptides: the field's by hand, pepTRM's own against what it tells."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.readers.peptides import residue_codes
from pipeline.tasks.peptides.found_peptides import Answer, Vocabulary, rank_score
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
