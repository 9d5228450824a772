"""Drawn spectra: both ways against one that is written out, their gradients, and what they take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.tasks.peptides.peptide_losses import DrawnPeaks, Grid, similarity
from tests.testkit.limited.device import LimitedDevice, need

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
def test_gradients_are_those_of_finite_differences(way):
    predicted, seen = near_pair(3)
    assert torch.autograd.gradcheck(
        lambda mz_BP: similarity(DrawnPeaks(mz_BP, predicted.height_BP), seen, WAYS[way]),
        predicted.mz_BP.clone().requires_grad_(),
    )


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


@pytest.mark.parametrize("way", WAYS)
def test_heights_that_are_zero_are_no_peaks(way):
    predicted, seen = near_pair()
    more = DrawnPeaks(
        torch.cat([predicted.mz_BP, torch.full((3, 4), 13.0, dtype=torch.float64)], 1),
        torch.cat([predicted.height_BP, torch.zeros(3, 4, dtype=torch.float64)], 1),
    )
    plain, padded = (similarity(one, seen, WAYS[way]) for one in (predicted, more))
    assert torch.allclose(plain, padded, rtol=0, atol=1e-12)


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
