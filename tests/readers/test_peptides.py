"""Masses of peptides and of what they break into."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.readers import peptides

PEPTIDE = st.text(peptides.LETTERS, min_size=2, max_size=40)


def test_masses_are_those_that_are_published() -> None:
    residue_L = peptides.residue_codes("PEPTIDE")
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
def test_letters_and_codes_are_each_other(text: str) -> None:
    assert peptides.peptide_text(peptides.residue_codes(text)) == text


@given(PEPTIDE)
def test_each_beginning_and_its_end_weigh_the_whole_peptide(text: str) -> None:
    residue_L = peptides.residue_codes(text)
    both_F = peptides.b_ions(residue_L) + peptides.y_ions(residue_L)[::-1]
    np.testing.assert_allclose(both_F, peptides.mass(residue_L) + 2 * peptides.PROTON)


def test_fixed_modifications_weigh_on_their_letters_alone() -> None:
    heavier = peptides.masses(carbamidomethyl=True, oxidised=True) - peptides.MASSES
    shifts = dict(zip(peptides.LETTERS, heavier.tolist(), strict=True))
    assert {letter: round(shift, 4) for letter, shift in shifts.items() if shift} == {"C": 57.0215, "M": 15.9949}
    residue_L = peptides.residue_codes("MC")
    each = peptides.masses(carbamidomethyl=True)
    assert peptides.mass(residue_L, each) - peptides.mass(residue_L) == pytest.approx(57.021464)


@pytest.mark.parametrize(
    ("text", "named"), [("PEPTXDE", "'X'"), ("pep", "'p'"), ("M(+16)K", r"'\('"), ("", "at least")]
)
def test_a_letter_that_is_no_amino_acid_is_named(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        peptides.residue_codes(text)
