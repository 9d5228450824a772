"""Losses and their gradients against pepTRM's, and what is mended for models that are trained here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.readers import peptides
from pipeline.readers.peptides import residue_codes
from pipeline.tasks.peptides.found_peptides import Vocabulary
from pipeline.tasks.peptides.peptide_losses import (
    DrawnPeaks,
    Grid,
    expected_peptide,
    fragments,
    published_peptide,
    similarity,
)
from tests.reference import recorded
from tests.tasks.originals import PEPTRM, off, peptide_batch
from tests.testkit.limited.device import LimitedDevice, need

TERM = {"ce": "peptide", "spectrum": "spectrum", "precursor": "precursor"}
ALONE = {"spectrum_weight": 0.0, "precursor_weight": 0.0}
CASES = {
    **{
        f"ce.{kind}.smoothing_{smoothing}": {**ALONE, "answer_weights": kind, "smoothing": smoothing}
        for kind in ("linear", "uniform", "exponential")
        for smoothing in (0.0, 0.1)
    },
    "ce.linear_smoothing_0.1": ALONE,
    "spectrum.coverage.HCD2021": {"spectrum_weight": 1.0, "fragment_charges": 1},
    "spectrum.coverage.HCDch2": {"spectrum_weight": 1.0},
    "spectrum.drawn.HCD2021": {"spectrum_weight": 1.0, "spectrum_loss": "drawn", "fragment_charges": 1},
    "spectrum.drawn.HCDch2": {"spectrum_weight": 1.0, "spectrum_loss": "drawn"},
    "precursor": {"precursor_weight": 1.0},
    "precursor.old": {"precursor_weight": 1.0, "precursor_loss": "absolute"},
}
# An ion at 2000 is rounded by 1.2e-4, which moves a drawn peak's slope, of sigma 0.05, by a hundredth.
GRADIENTS = {"ce": 1e-5, "precursor": 1e-5, "spectrum.coverage": 2e-3, "spectrum.drawn": 3e-2}
LOSSES = {"ce": 1e-5, "precursor": 1e-5, "spectrum.coverage": 1e-5, "spectrum.drawn": 2e-5}


def of_case(table, name):
    return next(value for start, value in table.items() if name.startswith(start))


class Said(torch.nn.Module):
    """A model that says what the original said."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(recorded("peptrm/outputs")["logits"].clone())

    def forward(self, _spectra):
        return self.logits


@pytest.mark.parametrize("name", CASES)
def test_each_loss_and_its_gradient_is_the_originals(name):
    task, model, known = replace(PEPTRM, **CASES[name]), Said(), recorded("peptrm/outputs")
    total, weight = task.loss(model, peptide_batch())[of_case(TERM, name)]
    loss = total / weight
    expected = float(known[f"loss.{name}"])
    assert float(loss.detach()) == pytest.approx(expected, rel=of_case(LOSSES, name))
    if gradients := [key for key in known if key.startswith(f"loss.{name}.gradient")]:
        gradient = known[gradients[0]]
        loss.backward()
        found = model.logits.grad
        if gradients[0].endswith(".last"):  # of the last answer alone; of the others it is 0
            assert not found[:-1].any()
            found = found[-1]
        assert off(found, gradient) < of_case(GRADIENTS, name) * float(gradient.abs().max())


def test_the_weighted_sum_of_terms_is_the_originals():
    model, known = Said(), recorded("peptrm/outputs")
    terms = PEPTRM.loss(model, peptide_batch())  # 0.25 of the spectrum, 0.08 of the mass
    loss = sum(total / weight for total, weight in terms.values())
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(known["loss.combined"]), rel=1e-5)
    gradient = known["loss.combined.gradient"]
    assert off(model.logits.grad, gradient) < 2e-3 * float(gradient.abs().max())


@pytest.mark.parametrize(("name", "charges"), [("HCD2021", 1), ("HCDch2", 2)])
def test_fragments_are_the_originals(name, charges):
    given, known = peptide_batch(), recorded("peptrm/outputs")
    masses_V = torch.from_numpy(PEPTRM.vocabulary.masses_V).float()
    truth_BLV = 1000.0 * torch.nn.functional.one_hot(given.letter_BL, 24)
    for logits_BLV, expected in (
        (known["logits"][-1], known[f"fragments.{name}"]),
        (truth_BLV, known[f"fragments.{name}.of_the_truth"]),
    ):
        peptide = expected_peptide(logits_BLV, masses_V, given.residues_B, given.has_terminal_B)
        ions = fragments(published_peptide(peptide), charges, PEPTRM.vocabulary)
        assert off(ions.mz_BP, expected) < 5e-4  # two roundings at 2000


def right(text, vocabulary, places=12):
    """Return the expected masses of a peptide that is known for sure."""
    letter_R = torch.from_numpy(vocabulary.letters(residue_codes(text)))
    logits_BLV = torch.zeros(1, places, len(vocabulary.names), dtype=torch.float64)
    logits_BLV[0, torch.arange(len(letter_R)), letter_R] = 1000.0
    terminal_B = torch.tensor([bool(vocabulary.is_terminal_V[letter_R[0]])])
    masses_V = torch.from_numpy(vocabulary.masses_V)
    return expected_peptide(logits_BLV, masses_V, torch.tensor([len(letter_R)]), terminal_B)


@pytest.mark.parametrize("text", ["PEPTIDE", "[Acetyl]-M[Oxidation]PEK", "C[Carbamidomethyl]K"])
def test_a_model_that_is_trained_here_has_every_ion_and_no_other(text):
    codes = residue_codes(text)
    ions = fragments(right(text, Vocabulary()), 2, Vocabulary())
    there = ions.mz_BP[0][ions.height_BP[0] > 0].tolist()
    breaks = slice(int(codes[0] in peptides.TERMINAL), None)  # nothing breaks off between a change and its residue
    expected = [
        ion
        for charge in (1, 2)
        for ions_of in (peptides.b_ions(codes, charge)[breaks], peptides.y_ions(codes, charge)[::-1][breaks])
        for ion in ions_of
    ]
    assert there == pytest.approx(expected)


def test_as_published_the_first_residue_is_lost_to_all_ions():
    whole = right("PEPTIDE", Vocabulary(as_published=True))
    cut = published_peptide(whole)
    assert float(whole.mass_BL.sum() - cut.mass_BL.sum()) == pytest.approx(97.05276)
    assert bool(cut.is_break_BF.all())


WHOLE = Grid(bin_size=0.1, max_mz=50.0, sigma=0.07)
WAYS = {
    "whole": WHOLE,
    "near": replace(WHOLE, reach=8.0),
}


def peaks(items, count, seed, most=WHOLE.max_mz):
    generator = torch.Generator().manual_seed(seed)
    mz_BP = most * torch.rand(items, count, generator=generator, dtype=torch.float64)
    return DrawnPeaks(mz_BP, torch.rand(items, count, generator=generator, dtype=torch.float64))


def near_pair(items=3):
    """Return spectra some of whose peaks overlap, at both ends of the grid and beyond it too."""
    seen = peaks(items, 9, 1)
    mz_BP = seen.mz_BP[:, :7] + 0.1 * peaks(items, 7, 2, most=1.0).mz_BP
    mz_BP[0, 0], mz_BP[1, 0], mz_BP[2, 0], mz_BP[2, 1] = 0.02, 49.99, 50.05, 400.0
    return DrawnPeaks(mz_BP, torch.ones_like(mz_BP)), seen


def written_out(predicted, seen, grid):
    """Return the cosines, one number at a time."""
    cosines = []
    for item in range(len(predicted.mz_BP)):
        drawn = np.zeros((2, grid.bins))
        for row, spectrum in enumerate((predicted, seen)):
            for mz, height in zip(spectrum.mz_BP[item].tolist(), spectrum.height_BP[item].tolist(), strict=True):
                for place in range(grid.bins):
                    drawn[row, place] += height * np.exp(-0.5 * ((mz - grid.bin_size * place) / grid.sigma) ** 2)
        cosines.append(drawn[0] @ drawn[1] / np.sqrt((drawn[0] @ drawn[0]) * (drawn[1] @ drawn[1])))
    return cosines


def with_gradient(predicted, seen, grid):
    mz_BP = predicted.mz_BP.clone().requires_grad_()
    alike_B = similarity(DrawnPeaks(mz_BP, predicted.height_BP), seen, grid)
    (gradient,) = torch.autograd.grad((alike_B * torch.tensor([1.0, 2.0, 3.0])).sum(), mz_BP)
    return alike_B.detach(), gradient


@pytest.mark.parametrize("way", WAYS)
def test_spectra_are_as_alike_as_when_each_number_is_written_out(way):
    predicted, seen = near_pair()
    wanted = written_out(predicted, seen, WHOLE)
    assert min(wanted) > 0.1
    assert similarity(predicted, seen, WAYS[way]).tolist() == pytest.approx(wanted, abs=1e-12)


def test_near_bins_have_the_gradients_of_the_whole_table():
    predicted, seen = near_pair()
    (alike, gradient), (other, its) = (with_gradient(predicted, seen, grid) for grid in WAYS.values())
    assert gradient.abs().max() > 0.1
    assert (alike - other).abs().max() < 1e-10
    assert (gradient - its).abs().max() < 1e-10


@pytest.mark.parametrize("way", WAYS)
def test_a_spectrum_is_itself_and_like_no_empty_one(way):
    seen = peaks(2, 5, 0)
    nothing = DrawnPeaks(seen.mz_BP.clone().requires_grad_(), torch.zeros_like(seen.height_BP))
    no_peaks = DrawnPeaks(seen.mz_BP[:, :0], seen.height_BP[:, :0])
    assert similarity(seen, seen, WAYS[way]).tolist() == pytest.approx([1.0, 1.0])
    empty_B = similarity(nothing, seen, WAYS[way])
    empty_B.sum().backward()
    assert empty_B.tolist() == [0.0, 0.0]
    assert torch.isfinite(nothing.mz_BP.grad).all()
    assert similarity(seen, no_peaks, WAYS[way]).tolist() == [0.0, 0.0]


def test_a_table_of_all_bins_takes_many_times_what_near_bins_take():
    need()
    items, count, grid = 4, 40, Grid(0.1, 500.0, 0.05)
    table = items * count * grid.bins * 4
    taken = {}
    for name, one in {"whole": grid, "near": replace(grid, reach=8.0)}.items():
        with LimitedDevice() as device:
            mz_BP = (500 * torch.rand(items, count)).requires_grad_()
            seen = DrawnPeaks(500 * torch.rand(items, count), torch.rand(items, count))
            similarity(DrawnPeaks(mz_BP, torch.ones(items, count)), seen, one).sum().backward()
            taken[name] = device.peak_bytes
    assert taken["whole"] > 2 * table
    assert taken["near"] < 0.5 * table
    assert taken["near"] < 6 * items * grid.bins * 4
