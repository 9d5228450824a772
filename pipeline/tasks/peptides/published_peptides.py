"""What stage predict leaves of peptides: a table for people, one for programs, and a picture for the page of the run.

    peptides.csv     a line a spectrum: peptide (ProForma), score, charge, m/z measured and computed, error, scores
    peptides.mzTab   the same as PSMs of mzTab 1.0, as the field's programs read them
    pictures.json    precision by coverage, where true peptides are known

A spectrum for which no letter was found stands in the CSV with an empty peptide, and not in the mzTab.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.files import replacing, write_whole
from pipeline.protocol import PICTURES
from pipeline.readers.peptides import LETTER_OF, LETTERS, MODIFICATIONS, peptide_text
from pipeline.tasks.peptides.found_peptides import LETTERS as LETTER_COLUMN
from pipeline.tasks.peptides.found_peptides import rank_score
from pipeline.tasks.peptides.peptide_scores import judged, precision_by_coverage
from pipeline.tasks.task_parts import first_of, task_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.tasks.peptides.found_peptides import Answer, PeptideChoice
    from pipeline.tasks.peptides.peptide_scores import JudgedPeptide

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
    """Write both tables in one pass, and the picture where peptides are known; return what was written.

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
    told = {
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
    return [told[name] for name in COLUMNS]


def mztab_head(choice: PeptideChoice, runs: Sequence[Path]) -> str:
    """Return the part of an mzTab that tells where it is from, and the names of its columns."""
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
    told = {
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
    return [told.get(name, "null") for name in PSM_COLUMNS]


def modifications_text(code_R: NDArray[np.int64]) -> str:
    """Return where a peptide is modified as mzTab tells it: `0-UNIMOD:1,3-UNIMOD:35`; the N-terminus is 0."""
    told, place = [], 0
    for code in code_R:
        is_terminal = LETTER_OF[code] < 0
        place += not is_terminal
        if code >= len(LETTERS):
            told.append(f"{0 if is_terminal else place}-{_unimod(_change_of(int(code)))}")
    return ",".join(told)


def _change_of(code: int) -> Any:
    at = code - len(LETTERS)
    return [change for change in MODIFICATIONS for _ in change.letters or ("",)][at]


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
