"""Masses of peptides and of what they break into."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.readers import peptides
from pipeline.readers.peptides import residue_codes

PEPTIDE = st.text(peptides.LETTERS, min_size=2, max_size=40)


def test_masses_are_those_that_are_published() -> None:
    residue_L = residue_codes("PEPTIDE")
    assert peptides.mass(residue_L) == pytest.approx(799.35996, abs=1e-5)
    assert peptides.b_ions(residue_L)[1] == pytest.approx(227.10263, abs=1e-5)
    assert peptides.y_ions(residue_L)[0] == pytest.approx(148.06043, abs=1e-5)
    assert peptides.y_ions(residue_L, charge=2)[5] == pytest.approx(352.16087, abs=1e-5)


def test_every_letter_has_the_mass_of_its_atoms() -> None:
    atoms = {"C": 12.0, "H": 1.00782503207, "N": 14.0030740048, "O": 15.99491461956, "S": 31.97207100}
    formulas = {
        "G": "C2 H3 N1 O1", "A": "C3 H5 N1 O1", "S": "C3 H5 N1 O2", "P": "C5 H7 N1 O1", "V": "C5 H9 N1 O1",
        "T": "C4 H7 N1 O2", "C": "C3 H5 N1 O1 S1", "L": "C6 H11 N1 O1", "I": "C6 H11 N1 O1", "N": "C4 H6 N2 O2",
        "D": "C4 H5 N1 O3", "Q": "C5 H8 N2 O2", "K": "C6 H12 N2 O1", "E": "C5 H7 N1 O3", "M": "C5 H9 N1 O1 S1",
        "H": "C6 H7 N3 O1", "F": "C9 H9 N1 O1", "R": "C6 H12 N4 O1", "Y": "C9 H9 N1 O2", "W": "C11 H10 N2 O1",
    }  # fmt: skip
    assert list(formulas) == list(peptides.LETTERS)
    expected = [sum(atoms[part[0]] * int(part[1:]) for part in formula.split()) for formula in formulas.values()]
    np.testing.assert_allclose(peptides.MASSES, expected, rtol=0, atol=1e-6)


@given(PEPTIDE)
def test_each_beginning_and_its_end_weigh_the_whole_peptide(text: str) -> None:
    residue_L = residue_codes(text)
    both_F = peptides.b_ions(residue_L) + peptides.y_ions(residue_L)[::-1]
    np.testing.assert_allclose(both_F, peptides.mass(residue_L) + 2 * peptides.PROTON)


def test_modifications_weigh_what_unimod_says() -> None:
    shifts = dict(zip(peptides.RESIDUES, peptides.DELTAS.tolist(), strict=True))
    assert {name: round(shift, 6) for name, shift in shifts.items() if shift} == {
        "M[Oxidation]": 15.994915,
        "C[Carbamidomethyl]": 57.021464,
        "N[Deamidated]": 0.984016,
        "Q[Deamidated]": 0.984016,
        "[Acetyl]-": 42.010565,
        "[Carbamyl]-": 43.005814,
        "[Ammonia-loss]-": -17.026549,
        "[+25.979265]-": 25.979265,
    }
    assert peptides.mass(residue_codes("C[Carbamidomethyl]K")) - peptides.mass(residue_codes("CK")) == pytest.approx(
        57.021464
    )


WRITTEN = {
    "LQAVTDDHIR": ["LQAVTDDHIR"],
    "M[Oxidation]DEELAAIVGVR": ["M+15.995DEELAAIVGVR", "M(+15.99)DEELAAIVGVR"],
    "M[Oxidation]DEEL": ["M[Oxidation]DEEL", "M[oxidation]DEEL", "M[U:Oxidation]DEEL", "M[+15.9949]DEEL"],
    "GGC[Carbamidomethyl]EAIV": ["GGC[UNIMOD:4]EAIV", "GGC(+57.02)EAIV", "GGC+57.021EAIV"],
    "N[Deamidated]GIDTQ[Deamidated]K": ["N+0.984GIDTQ(+.98)K", "N+0.984GIDTQ(+0.98)K"],
    "[Acetyl]-SDKPDMAEIEK": ["+42.011SDKPDMAEIEK"],
    "[Acetyl]-SDK": ["(+42.01)SDK", "[Acetyl]-SDK", "[UNIMOD:1]-SDK/2", "S(+42.01)DK"],
    "[Carbamyl]-AEK": ["+43.006AEK"],
    "[Ammonia-loss]-QAEELNR": ["-17.027QAEELNR", "Q(-17.03)AEELNR"],
    "[+25.979265]-QAEELNR": ["+43.006-17.027QAEELNR", "[+25.980265]-QAEELNR"],
    "[Acetyl]-M[Oxidation]K": ["[Acetyl]-M[Oxidation]K", "mzspec:PXD1:a:scan:2:[UNIMOD:1]-M[UNIMOD:35]K/3"],
    "VLHPLEGAVVIIFK": ["mzspec:PXD000561:Adult_Frontalcortex_bRP_Elite_85_f09:scan:17555:VLHPLEGAVVIIFK/2"],
}


def test_peptides_are_read_however_they_are_written() -> None:
    for proforma, texts in WRITTEN.items():
        assert {text: peptides.peptide_text(residue_codes(text)) for text in texts} == dict.fromkeys(texts, proforma)


@given(st.lists(st.sampled_from([name for name in peptides.RESIDUES if not name.endswith("-")]), min_size=1))
def test_what_is_written_is_read_again(names: list[str]) -> None:
    for before in ("", "[Acetyl]-", "[Carbamyl]-"):
        text = before + "".join(names)
        assert peptides.peptide_text(residue_codes(text)) == text


NOT_UNDERSTOOD = {  # and what the message names
    "PEPTXDE": "'X'",
    "pep": "'p'",
    "": "",
    "/2": "",
    "[Acetyl]-": "",
    "M(+17)K": "M(+17)",
    "AS[Phospho]K": "[Phospho]",
    "AK[Oxidation]": "K[Oxidation]",
    "A[UNIMOD:0]K": "UNIMOD:0",
    "+99.9AK": "+99.9",
    "AM[Oxidation": "'['",
    "mzspec:PXD1:run:scan:12": "",
    "PEK-[Amidated]": "'-'",
}


def test_what_is_not_understood_is_named() -> None:
    for text, named in NOT_UNDERSTOOD.items():
        with pytest.raises(ValueError, match=re.escape(named) or None):
            residue_codes(text)
