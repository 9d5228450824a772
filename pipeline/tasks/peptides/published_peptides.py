"""Metrics of predicted peptides, and the files that stage predict writes.

The field's metrics: a residue is found if its mass is right to 0.1 Da, and the mass up to it, from either end, to 0.5
Da; so I is L. A peptide is right if all of it is found. Precision is of predicted, recall of true residues.
pepTRM's: letters at their places, and how many letters the true peptide has is given.

    peptides.csv     a line a spectrum: peptide (ProForma), score, charge, m/z measured and computed, error, scores
    peptides.mzTab   the same as PSMs of mzTab 1.0, as the field's programs read them
    pictures.json    precision by coverage, where true peptides are known

A spectrum for which no letter was found has an empty peptide in the CSV, and no line in the mzTab.
Shapes: R residues, L places, N spectra (letters, of answers), T answers.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.files import replacing, write_whole
from pipeline.protocol import PICTURES
from pipeline.readers.peptides import LETTER_OF, LETTERS, MODIFICATIONS, peptide_text
from pipeline.tasks.peptides.found_peptides import LETTERS as LETTER_COLUMN
from pipeline.tasks.peptides.found_peptides import SPECIAL, rank_score
from pipeline.tasks.task_parts import first_of, task_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from pipeline.tasks.peptides.found_peptides import Answer, Vocabulary

    Masses = NDArray[np.float64]
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.tasks.peptides.found_peptides import PeptideChoice


SAME_MASS, SAME_SUM = 0.1, 0.5  # Da
LENGTHS = {"length_to_12": (0, 12), "length_13_to_17": (13, 17), "length_from_18": (18, math.inf)}


class JudgedPeptide(NamedTuple):
    """One spectrum's peptide compared with the true one."""

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
    """Compare a spectrum's peptide with the true one."""
    is_found_R = found_residues(vocabulary.masses_V[answer.letter_R], vocabulary.masses_V[answer.true_R])
    return JudgedPeptide(is_found_R, len(answer.true_R), answer.score, vocabulary.codes_V[answer.letter_R] >= 20)


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
    """One spectrum's letters in every answer, at the places of the true peptide, and the true ones."""

    said_TR: NDArray[np.int64]
    true_R: NDArray[np.int64]
    mass: float  # of the precursor; not a number where it is not known


def letter_row(answer_TL: NDArray[Any], label_L: NDArray[Any], mass: float) -> LetterRow:
    """Return a spectrum's letters where the true peptide has some."""
    is_known_L = label_L >= len(SPECIAL)
    return LetterRow(answer_TL[:, is_known_L].astype(np.int64), label_L[is_known_L].astype(np.int64), mass)


def letter_metrics(rows: Sequence[LetterRow], vocabulary: Vocabulary) -> dict[str, float]:
    """Return pepTRM's own metrics: of the last answer, in which I is L, and of the changes by each answer."""
    same = [_as_l(row.said_TR[-1], vocabulary) == _as_l(row.true_R, vocabulary) for row in rows]
    off = [abs(vocabulary.mass(row.said_TR[-1]) - row.mass) / row.mass * 1e6 for row in rows if row.mass > 0]
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


TABLE, MZTAB = "peptides.csv", "peptides.mzTab"
COLUMNS = (
    *("id", "peptide", "score", "rank_score", "charge", "precursor_mz", "computed_mz", "error_ppm"),
    *("residue_scores", "searched_by_mass", "true_peptide", "right"),
)
PSM_COLUMNS = (
    *("sequence", "PSM_ID", "accession", "unique", "database", "database_version", "search_engine"),
    *("search_engine_score[1]", "modifications", "retention_time", "charge", "exp_mass_to_charge"),
    *("calc_mass_to_charge", "spectra_ref", "pre", "post", "start", "end"),
    *("opt_ms_run[1]_aa_scores", "opt_ms_run[1]_proforma"),
)
ENGINE = "[, , pipeline denovo_recursive, ]"
SCORE = "[, , mean probability of residues, ]"
POINTS = 200  # of a curve


def publish_peptides(folder: Path, outputs: Mapping[str, Any], choice: PeptideChoice, described: Any) -> list[Path]:
    """Write both tables in one pass, and the picture where peptides are known; return the files.

    `described` is the reader, whose `runs()` give its files and the ids in each, or anything else.
    """
    known: list[JudgedPeptide] = []
    paths = [folder / TABLE, folder / MZTAB]
    runs = list(described.runs()) if hasattr(described, "runs") else []
    names = ((name, run) for run, (_, headers) in enumerate(runs, 1) for name, _ in headers)
    run_of = first_of(names, outputs[LETTER_COLUMN]) if len(runs) > 1 else {}
    head = mztab_head(choice, [path for path, _ in runs])
    with task_table(paths[0], COLUMNS) as add, replacing(paths[1]) as aside, aside.open("w", encoding="utf-8") as psms:
        psms.write(head)
        for place, answer in enumerate(choice.answers(outputs)):
            name = outputs[LETTER_COLUMN].id(place)
            judgement = judged(answer, choice.vocabulary) if len(answer.true_R) else None
            add(table_line(name, answer, choice, judgement))
            if len(answer.letter_R):
                ref = f"ms_run[{run_of.get(name, 1)}]:title={name}"
                psms.write("\t".join(("PSM", *psm_line(ref, answer, choice, place + 1))) + "\n")
            known += [judgement] if judgement else []
    if known:
        write_whole(folder / PICTURES, json.dumps([precision_picture(known)]))
        paths.append(folder / PICTURES)
    return paths


def table_line(name: str, answer: Answer, choice: PeptideChoice, judgement: JudgedPeptide | None) -> list[str]:
    """Return the cells of a spectrum's line."""
    rank = rank_score(answer.score, answer.ppm, choice.mass_weight) if choice.tolerance_ppm else answer.score
    cells = {
        "id": name,
        "peptide": choice.vocabulary.text(answer.letter_R),
        "score": f"{answer.score:.4f}",
        "rank_score": f"{rank:.4f}",
        "charge": str(answer.charge or ""),
        "precursor_mz": _mz(answer.mz),
        "computed_mz": _mz(choice.mz_of(answer)) if len(answer.letter_R) else "",
        "error_ppm": f"{answer.ppm:.2f}" if math.isfinite(answer.ppm) else "",
        "residue_scores": " ".join(f"{sure:.3f}" for sure in answer.confidence_R),
        "searched_by_mass": "yes" if answer.is_searched else "no",
        "true_peptide": choice.vocabulary.text(answer.true_R),
        "right": "" if judgement is None else "yes" if judgement.is_right else "no",
    }
    return [cells[name] for name in COLUMNS]


def mztab_head(choice: PeptideChoice, runs: Sequence[Path]) -> str:
    """Return the metadata of an mzTab, and the names of its columns."""
    lines = [
        *("mzTab-version\t1.0.0", "mzTab-mode\tSummary", "mzTab-type\tIdentification"),
        *("description\tPeptides de novo, by pipeline denovo_recursive", f"software[1]\t{ENGINE}"),
        f"psm_search_engine_score[1]\t{SCORE}",
        "fixed_mod[1]\t[MS, MS:1002453, No fixed modifications searched, ]",
        *_modification_lines(choice),
        *(f"ms_run[{run}]-location\t{path.absolute().as_uri()}" for run, path in enumerate(runs, 1)),
        *([] if runs else ["ms_run[1]-location\tnull"]),
    ]
    return "".join(f"MTD\t{line}\n" for line in lines) + "\n" + "\t".join(("PSH", *PSM_COLUMNS)) + "\n"


def _modification_lines(choice: PeptideChoice) -> list[str]:
    names = choice.vocabulary.names
    there = [change for change in MODIFICATIONS if any(f"[{change.name}]" in name for name in names)]
    if not there:
        return ["variable_mod[1]\t[MS, MS:1002454, No variable modifications searched, ]"]
    lines = []
    for at, change in enumerate(there, 1):
        lines.append(f"variable_mod[{at}]\t[UNIMOD, {_unimod(change)}, {change.name}, ]")
        lines += [f"variable_mod[{at}]-site\t{site}" for site in change.letters[:1] or ("N-term",)]
    return lines


def psm_line(ref: str, answer: Answer, choice: PeptideChoice, number: int) -> list[str]:
    """Return the cells of a spectrum's line in an mzTab."""
    code_R = choice.vocabulary.codes_V[answer.letter_R]
    cells = {
        "sequence": peptide_text(LETTER_OF[code_R][LETTER_OF[code_R] >= 0]),
        "PSM_ID": str(number),
        "search_engine": ENGINE,
        "search_engine_score[1]": f"{answer.score:.4f}",
        "modifications": modifications_text(code_R) or "null",
        "charge": str(answer.charge or "null"),
        "exp_mass_to_charge": _mz(answer.mz) or "null",
        "calc_mass_to_charge": _mz(choice.mz_of(answer)) or "null",
        "spectra_ref": ref,
        "opt_ms_run[1]_aa_scores": ",".join(f"{sure:.4f}" for sure in answer.confidence_R),
        "opt_ms_run[1]_proforma": choice.vocabulary.text(answer.letter_R),
    }
    return [cells.get(name, "null") for name in PSM_COLUMNS]


def modifications_text(code_R: NDArray[np.int64]) -> str:
    """Return the modifications of a peptide in mzTab's notation: `0-UNIMOD:1,3-UNIMOD:35`; the N-terminus is 0."""
    parts, place = [], 0
    for code in code_R:
        is_terminal = LETTER_OF[code] < 0
        place += not is_terminal
        if code >= len(LETTERS):
            parts.append(f"{0 if is_terminal else place}-{_unimod(_change_of(int(code)))}")
    return ",".join(parts)


def _change_of(code: int) -> Any:
    return [change for change in MODIFICATIONS for _ in change.letters or ("",)][code - len(LETTERS)]


def _unimod(change: Any) -> str:
    return f"UNIMOD:{change.unimod}" if change.unimod else f"CHEMMOD:{change.delta:+.6f}"


def precision_picture(known: Sequence[JudgedPeptide]) -> dict[str, Any]:
    """Return how many peptides are right among the surest ones, as a curve."""
    coverage_N, precision_N = precision_by_coverage(known)
    shown = np.unique(np.linspace(0, len(coverage_N) - 1, min(POINTS, len(coverage_N))).astype(np.int64))
    points = [[100 * float(coverage_N[at]), 100 * float(precision_N[at])] for at in shown]
    line = {"name": "peptides that are right", "points": points}
    return {"title": "precision by coverage", "x": "% of spectra, the surest first", "y": "%", "lines": [line]}


def _mz(mz: float) -> str:
    return f"{mz:.5f}" if math.isfinite(mz) and mz > 0 else ""
