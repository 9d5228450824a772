"""How good found peptides are: as the field counts it, and as pepTRM does.

The field: a residue is found if its mass is right to 0.1 Da, and the mass up to it, from either end, to 0.5 Da; so I is
L. A peptide is right if all of it is found. Precision is of what was said, recall of what is true.
pepTRM: letters at their places, and how many letters the true peptide has is given.

Shapes: R residues, L places, N spectra (letters, of answers), T answers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.tasks.peptides.vocabulary import SPECIAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from pipeline.tasks.peptides.found_peptides import Answer
    from pipeline.tasks.peptides.vocabulary import Vocabulary

    Masses = NDArray[np.float64]

SAME_MASS, SAME_SUM = 0.1, 0.5  # Da
LENGTHS = {"length_to_12": (0, 12), "length_13_to_17": (13, 17), "length_from_18": (18, math.inf)}


class JudgedPeptide(NamedTuple):
    """One spectrum's peptide beside the true one."""

    is_found_R: NDArray[np.bool_]  # of the residues that were said
    true: int  # residues
    score: float
    modified: NDArray[np.bool_]  # which of the residues that were said are modified

    @property
    def is_right(self) -> bool:
        return bool(self.is_found_R.all()) and len(self.is_found_R) == self.true


def found_residues(said_R: Masses, true_R: Masses) -> NDArray[np.bool_]:
    """Return which residues that were said are found, walking in from the front, then from the back."""
    front = _walk(said_R, true_R)
    if front.all() and len(said_R) == len(true_R):
        return front
    stop = int(np.argmin(front)) if not front.all() else len(front)
    stop_true = min(stop, len(true_R))
    back = _walk(said_R[stop:][::-1], true_R[stop_true:][::-1])[::-1]
    return np.concatenate([front[:stop], front[stop:] | back])


def _walk(said_R: Masses, true_R: Masses) -> NDArray[np.bool_]:
    """Return which residues are found by the mass up to them, going through both peptides side by side."""
    is_found_R = np.zeros(len(said_R), np.bool_)
    said = true = 0
    said_sum = true_sum = 0.0
    while said < len(said_R) and true < len(true_R):
        off = said_sum + said_R[said] - (true_sum + true_R[true])
        if abs(off) < SAME_SUM:
            is_found_R[said] = abs(said_R[said] - true_R[true]) < SAME_MASS
        if off < SAME_SUM:
            said, said_sum = said + 1, said_sum + said_R[said]
        if off > -SAME_SUM:
            true, true_sum = true + 1, true_sum + true_R[true]
    return is_found_R


def judged(answer: Answer, vocabulary: Vocabulary) -> JudgedPeptide:
    """Return a spectrum's peptide beside the true one."""
    is_found_R = found_residues(vocabulary.masses_V[answer.letter_R], vocabulary.masses_V[answer.true_R])
    return JudgedPeptide(is_found_R, len(answer.true_R), answer.score, vocabulary.is_modified_V[answer.letter_R])


def field_metrics(rows: Sequence[JudgedPeptide]) -> dict[str, float]:
    """Return precision and recall of residues and of peptides, by how sure the model is, and by length."""
    found, said = sum(row.is_found_R.sum() for row in rows), sum(len(row.is_found_R) for row in rows)
    right, answered = sum(row.is_right for row in rows), sum(len(row.is_found_R) > 0 for row in rows)
    metrics = {
        "residue_precision": found / max(said, 1),
        "residue_recall": found / sum(row.true for row in rows),
        "peptide_precision": right / max(answered, 1),
        "peptide_recall": right / len(rows),
        "peptide_auc": area(rows),
    }
    if modified := sum(int(row.modified.sum()) for row in rows):
        metrics["modified_precision"] = sum(int((row.is_found_R & row.modified).sum()) for row in rows) / modified
    for name, (least, most) in LENGTHS.items():
        if of_length := [row.is_right for row in rows if least <= row.true <= most]:
            metrics[f"peptide_recall_{name}"] = float(np.mean(of_length))
    return {name: float(value) for name, value in metrics.items()}


def precision_by_coverage(rows: Iterable[JudgedPeptide]) -> tuple[Masses, Masses]:
    """Return the share of spectra that are kept, the surest first, and how many of their peptides are right [N]."""
    right_N = np.array([row.is_right for row in sorted(rows, key=lambda row: -row.score)], np.float64)
    count_N = np.arange(1, len(right_N) + 1)
    return count_N / len(right_N), right_N.cumsum() / count_N


def area(rows: Sequence[JudgedPeptide]) -> float:
    """Return the area under precision by coverage."""
    _, precision_N = precision_by_coverage(rows)
    before_N = np.concatenate([precision_N[:1], precision_N[:-1]])
    return float(((precision_N + before_N) / 2).mean())


class LetterRow(NamedTuple):
    """One spectrum's letters in every answer, at the places of the true peptide, beside the true ones."""

    said_TR: NDArray[np.int64]
    true_R: NDArray[np.int64]
    mass: float  # of the precursor; not a number where it is not known


def letter_row(answer_TL: NDArray[Any], label_L: NDArray[Any], mass: float) -> LetterRow:
    """Return a spectrum's letters where the true peptide has some."""
    is_known_L = label_L >= len(SPECIAL)
    return LetterRow(answer_TL[:, is_known_L].astype(np.int64), label_L[is_known_L].astype(np.int64), mass)


def letter_metrics(rows: Sequence[LetterRow], vocabulary: Vocabulary) -> dict[str, float]:
    """Return pepTRM's own figures: of the last answer, in which I is L, and of what each answer changes."""
    same = [_as_l(row.said_TR[-1], vocabulary) == _as_l(row.true_R, vocabulary) for row in rows]
    masses = [float(vocabulary.masses_V[row.said_TR[-1]].sum()) + vocabulary.water for row in rows]
    off = [abs(mass - row.mass) / row.mass * 1e6 for row, mass in zip(rows, masses, strict=True) if row.mass > 0]
    return {
        "token_accuracy": float(np.concatenate(same).mean()),
        "sequence_accuracy": float(np.mean([is_same_R.all() for is_same_R in same])),
        **({"mass_error_ppm": float(np.mean(off))} if off else {}),
        **recursion_metrics(rows),
    }


def recursion_metrics(rows: Sequence[LetterRow]) -> dict[str, float]:
    """Return how right each answer is, how much it changed, and how much of that for the better."""
    said_TN = np.concatenate([row.said_TR for row in rows], 1)
    is_right_TN = said_TN == np.concatenate([row.true_R for row in rows])
    is_edit_TN = said_TN[1:] != said_TN[:-1]
    better_T = (is_right_TN[1:].astype(np.int64) - is_right_TN[:-1]).sum(1)
    accuracy_T, edits_T = is_right_TN.mean(1), is_edit_TN.sum(1)
    metrics = {f"accuracy_step_{step}": accuracy for step, accuracy in enumerate(accuracy_T)}
    for step, (edits, better) in enumerate(zip(edits_T, better_T, strict=True), 1):
        metrics[f"edit_rate_step_{step}"] = edits / said_TN.shape[1]
        metrics[f"edit_quality_step_{step}"] = better / max(edits, 1)
    metrics["accuracy_gain"] = accuracy_T[-1] - accuracy_T[0]
    return {f"recursion_{name}": float(value) for name, value in metrics.items()}


def _as_l(letter_R: NDArray[np.int64], vocabulary: Vocabulary) -> NDArray[np.int64]:
    """Return letters with L in place of I."""
    return np.where(letter_R == vocabulary.names.index("I"), vocabulary.names.index("L"), letter_R)
