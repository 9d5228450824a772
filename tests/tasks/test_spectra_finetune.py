"""The spectra task: what it takes of a spectrum, what it returns, and what of it is kept in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.memory.footprint import Category, MemoryChoice, live_peak_bytes
from pipeline.protocol import ITEMS
from pipeline.tasks.spectra_finetune import SpectraFinetune
from tests.memory.tracing.traced import of, tracer
from tests.tasks.cases import MIXED_SPECTRA as MIXED
from tests.tasks.cases import RNG, model_of, spectrum, stepped
from tests.tasks.cases import SPECTRA as SMALL
from tests.tasks.items import double
from tests.tasks.reader_items import batch_of

CHOICE = MemoryChoice()
SIZES = ({"peaks": 12, ITEMS: 1}, {"peaks": 40, ITEMS: 6}, {"peaks": 60, ITEMS: 24})


def collated(*spectra, task=SMALL):
    return task.collate(batch_of(spectra).items[:], RNG)


# ---- what it is ----


def test_cost_is_what_is_taken_of_one_item_or_of_whole_columns():
    assert SMALL.cost({"peaks": 12}) == {"peaks": 12}
    assert SMALL.cost({"peaks": np.array([12, 60, 10_000])})["peaks"].tolist() == [12, 60, 60]


def test_published_sizes_are_those_of_the_published_weights():
    with torch.device("meta"):
        model = SpectraFinetune(as_published=True).model()
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("head.")}
    published = model.published_forms()["dreams"].write(state)
    frequencies = published["fourier_enc.b"].numel()
    assert sum(tensor.numel() for tensor in published.values()) - frequencies == 116_051_429
    assert published["ff_out.ff.0.weight"].shape == (20_000, 1024)
    assert published["transformer_encoder.scales.14.weight"].shape == (1024,)
    assert not any(one.requires_grad for one in model.pretraining.parameters())


def test_as_published_spectra_are_padded_to_the_most_peaks_whatever_they_have():
    task = replace(SMALL, as_published=True)
    assert task.cost({"peaks": np.array([3, 500])})["peaks"].tolist() == [60, 60]
    peaks = collated(spectrum(0, 7), task=task).peaks
    assert peaks.mz_BL.shape == (1, 61)
    assert peaks.real_BL.sum() == 8


# ---- what it takes of a spectrum ----


def test_the_most_intense_peaks_are_kept_in_their_order_and_of_equals_the_first():
    item = spectrum(0, 5) | {"peaks.intensity": np.array([0.5, 1.0, 0.5, 0.1, 0.5], np.float32)}
    batch = collated(item, task=replace(SMALL, max_peaks=3))
    assert batch.peaks.intensity_BL[0].tolist() == pytest.approx([1.1, 0.5, 1.0, 0.5])
    assert batch.peaks.mz_BL[0, 1:].tolist() == item["peaks.mz"][:3].tolist()
    assert batch.peaks.mz_BL[0, 0] == item["precursor_mz"]


@pytest.mark.parametrize("name", ["peaks.mz", "peaks.intensity", "precursor_mz"])
def test_everything_of_a_spectrum_is_seen(name):
    item = spectrum(0)
    other = item | {name: item[name] * np.float32(0.97)}
    model = model_of(SMALL)
    assert (model(double(collated(item)).peaks) - model(double(collated(other)).peaks)).abs().max() > 1e-6


def test_waves_are_those_of_the_published_frequencies():
    masses = SpectraFinetune().model().embed.masses.double()
    fine = [1 / (1e-4 * number) for number in range(2, 10_000, 2)]
    frequency = torch.tensor(fine + [1 / number for number in range(2, 1000)], dtype=torch.float64)
    assert torch.allclose(masses.frequency_1Q[0], frequency, rtol=1e-7)
    angle = 2 * torch.pi * 123.456 * masses.frequency_1Q[0]
    waves = masses.waves(torch.full((1, 1), 123.456, dtype=torch.float64)).flatten()
    assert torch.allclose(waves, torch.cat([angle.cos(), angle.sin()]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mz", [123.456, 499.987, 999.9871])
def test_waves_in_single_precision_are_those_in_double_but_not_as_published(mz):
    masses = SpectraFinetune(d_fourier=20, heads=1).model().embed.masses
    mz_11 = torch.tensor([[mz]])
    angle = 2 * np.pi * mz_11.double().squeeze() * masses.frequency_1Q[0].double()
    wanted, waves = torch.cat([angle.cos(), angle.sin()]), masses.waves(mz_11).flatten()
    assert waves.dtype == torch.float32
    assert torch.allclose(waves.double(), wanted, rtol=0, atol=1e-5)
    assert (masses.rounded_waves(mz_11).flatten().double() - wanted).abs().max() > 0.05


def test_a_precursor_that_is_not_known_is_taken_as_0():
    known, unknown = spectrum(0), spectrum(1)
    del unknown["precursor_mz"]
    for batch in (collated(known, unknown), collated(unknown)):
        assert float(batch.peaks.mz_BL[-1, 0]) == 0
        assert torch.isfinite(model_of(SMALL, dtype=torch.float32)(batch.peaks)).all()


# ---- targets ----


def test_what_is_not_known_has_no_weight():
    batch = collated(*MIXED)
    total, weight = SMALL.loss(model_of(SMALL, dtype=torch.float32), batch)["target"]
    assert weight == 2 + 1 + 2
    assert SMALL.weights(batch) == {"target": weight}
    changed = batch._replace(target_BK=torch.where(batch.is_known_BK, batch.target_BK, 1e6))
    assert torch.equal(SMALL.loss(model_of(SMALL, dtype=torch.float32), changed)["target"][0], total)


def test_spectra_without_any_target_are_told_and_have_no_figures():
    bare = [{name: array for name, array in spectrum(seed).items() if name != "target"} for seed in (0, 1)]
    found = SMALL.outputs(model_of(SMALL), double(collated(*bare)))
    assert found["prediction"].shape == (2, 2)
    assert [target.tolist() for target in found["target"]] == [[], []]  # no column, and no file, of NaN
    assert SMALL.metrics({name: [one.detach().numpy() for one in rows] for name, rows in found.items()}) == {}


def test_training_on_spectra_whose_reader_gives_no_target_is_refused():
    bare = {name: array for name, array in spectrum(0).items() if name != "target"}
    with pytest.raises(ConfigError, match="nothing to learn") as caught:
        SMALL.loss(model_of(SMALL, dtype=torch.float32), collated(bare))
    assert caught.value.where == "data.options.target"
    unknown = collated(spectrum(0, target=(np.nan, np.nan)))
    assert float(SMALL.loss(model_of(SMALL, dtype=torch.float32), unknown)["target"][0].detach()) == 0


def test_figures_are_those_of_numpy():
    target_N2 = RNG.normal(size=(50, 2)) * (1, 30) + (0, 500)
    told_N2 = target_N2 + RNG.normal(size=(50, 2))
    target_N2[::7, 0] = np.nan
    figures = SMALL.metrics({"prediction": list(told_N2), "target": list(target_N2)})
    error_N2 = told_N2 - target_N2
    assert figures["mae"] == pytest.approx(np.nanmean(np.abs(error_N2)))
    assert figures["rmse"] == pytest.approx(np.sqrt(np.nanmean(error_N2**2)))
    spread = np.nansum((target_N2 - np.nanmean(target_N2, axis=0)) ** 2)
    assert figures["r2"] == pytest.approx(1 - np.nansum(error_N2**2) / spread)


# ---- memory ----


DEEP = replace(SMALL, d_fourier=504)  # what the layers keep is most of it
LOWER = ("embed.", "layers.0.", "layers.1.")


@cache
def kept(frozen, choice=CHOICE):
    """Return the bytes that the layers keep for backward, and the peak of a step."""
    traced = tracer(DEEP, least=SIZES[0], frozen=frozen)
    standing, micro = traced.standing(choice), traced.micro(choice, SIZES[2])
    kept = {name: size for name, size in of(micro.parts, Category.ACTIVATIONS).items() if name.startswith("layers")}
    return sum(kept.values()), live_peak_bytes(standing, micro, accumulate=False)


@pytest.mark.nightly
def test_layers_below_the_lowest_that_is_trained_keep_nothing_and_planned_memory_falls():
    (kept_by_all, peak), (kept_by_one, lower_peak) = kept(()), kept(LOWER)
    assert kept_by_one == pytest.approx(kept_by_all / 3, rel=0.1)
    assert lower_peak < 0.5 * peak


def test_frozen_parameters_have_no_gradient():
    moved = stepped(SMALL, [double(collated(*MIXED))], frozen=LOWER)
    found = [name for name, one in moved.items() if one.any()]
    assert {name.partition(".")[0] for name in found} == {"layers", "norm", "head"}
    assert {name.split(".")[1] for name in found if name.startswith("layers")} == {"2"}


# ---- bad input ----


def test_a_target_of_another_size_is_refused_with_what_to_set():
    with pytest.raises(ConfigError, match="item0 has a target of 3") as caught:
        collated(spectrum(0, target=(1.0, 2.0, 3.0)))
    assert caught.value.remedy == "--set train.options.targets=3"


def test_items_that_are_no_spectra_are_refused():
    with pytest.raises(ConfigError, match=r"reads peaks.mz and peaks.intensity; item0 has left.token"):
        collated({"left.token": np.zeros(3, np.uint8)})
