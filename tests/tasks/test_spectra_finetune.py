"""The spectra task: what it takes of a spectrum, what it returns, and what of it is kept in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from pipeline.errors import ConfigError
from pipeline.memory.footprint import Category, MemoryChoice, live_peak_bytes
from pipeline.protocol import ITEMS, Example, Outputs, Weights
from pipeline.readers import made
from pipeline.readers.spectra import Spectra
from pipeline.runs.model.task_contract import breaches
from pipeline.tasks.spectra_finetune import SpectraFinetune
from pipeline.training.step.checkpointing import repeated
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.memory.tracing.traced import of, tracer, true_peak
from tests.tasks.items import double
from tests.tasks.reader_items import batch_of
from tests.testkit.limited import device

RNG = np.random.default_rng(0)
SMALL = SpectraFinetune(
    targets=2, layers=3, heads=2, d_fourier=24, d_peak=8, finest=1e-2, fourier_width=16, max_peaks=60
)
CHOICE = MemoryChoice()
SIZES = ({"peaks": 12, ITEMS: 1}, {"peaks": 40, ITEMS: 6}, {"peaks": 60, ITEMS: 24})


def spectrum(seed, peaks=30, target=(1.0, -2.0)):
    rng = np.random.default_rng(seed)
    return {
        "peaks.mz": np.sort(rng.uniform(50, 900, peaks)).astype(np.float32),
        "peaks.intensity": rng.uniform(0.01, 1, peaks).astype(np.float32),
        "precursor_mz": np.array(rng.uniform(200, 900), np.float32),
        "target": np.array(target, np.float32),
    }


def collated(*spectra, task=SMALL):
    return task.collate(batch_of(spectra).items[:], RNG)


def model_of(task=SMALL, dtype=torch.float64):
    torch.manual_seed(0)
    return task.model().to(dtype).eval()


def gradients(batches, task=SMALL, **settings):
    step = Step(task, StepSettings(optimizer="sgd", **settings), model=model_of(task).train())
    weights = step.weights(batches)
    for batch in batches:
        step.accumulate(batch, weights)
    return {name: one.grad.clone() for name, one in step.model.named_parameters() if one.grad is not None}


def max_difference(ones, others):
    assert ones.keys() == others.keys()
    return max(float((one - others[name]).abs().max()) for name, one in ones.items())


MIXED = [spectrum(0), spectrum(1, 7, (np.nan, 0.5)), spectrum(2, 90), spectrum(3, 1, (np.nan, np.nan))]


# ---- what it is ----


def test_it_keeps_the_contract():
    assert isinstance(SMALL, Example)
    assert isinstance(SMALL, Weights)
    assert isinstance(SMALL, Outputs)
    sizes = {"peaks": 20, ITEMS: 3}
    assert list(breaches(SMALL, sizes, batch_of(MIXED).items[:])) == []


def test_cost_is_what_is_taken_of_one_item_or_of_whole_columns():
    assert SMALL.cost({"peaks": 12}) == {"peaks": 12}
    assert SMALL.cost({"peaks": np.array([12, 60, 10_000])})["peaks"].tolist() == [12, 60, 60]


def test_an_example_has_the_shapes_of_a_batch_of_its_sizes():
    for spectra, sizes in ((MIXED, {"peaks": 60, ITEMS: 4}), (MIXED[:1], {"peaks": 30, ITEMS: 1})):
        wanted, got = ([(one.shape, one.dtype) for one in tree_leaves(batch) if isinstance(one, torch.Tensor)]
                       for batch in (collated(*spectra), SMALL.example(sizes)))  # fmt: skip
        assert got == wanted


def test_the_published_sizes_are_the_default():
    with torch.device("meta"):
        model = SpectraFinetune().model()
    assert model.embed.masses.frequency_1Q.shape == (1, 5997)
    assert model.layers[0].attention.weight.shape == (4 * 1024, 1024)
    assert sum(one.numel() for one in model.parameters()) == 95_544_409


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


def test_layers_are_what_runs_again_in_backward_and_nothing_else():
    assert set(repeated(SMALL.model())) == {"layers.0", "layers.1", "layers.2"}
    batch = double(collated(*MIXED))
    assert max_difference(gradients([batch]), gradients([batch], checkpointing=True)) < 1e-12


# ---- what it takes of a spectrum ----


def test_the_most_intense_peaks_are_kept_in_their_order_and_of_equals_the_first():
    item = spectrum(0, 5) | {"peaks.intensity": np.array([0.5, 1.0, 0.5, 0.1, 0.5], np.float32)}
    batch = collated(item, task=replace(SMALL, max_peaks=3))
    assert batch.peaks.intensity_BL[0].tolist() == pytest.approx([1.1, 0.5, 1.0, 0.5])
    assert batch.peaks.mz_BL[0, 1:].tolist() == item["peaks.mz"][:3].tolist()
    assert batch.peaks.mz_BL[0, 0] == item["precursor_mz"]


def test_ten_thousand_peaks_take_no_more_than_the_most_that_is_taken():
    assert collated(spectrum(0, 10_000)).peaks.mz_BL.shape == (1, 61)


def test_peaks_that_are_not_kept_change_nothing():
    many = spectrum(0, 90)
    kept = np.sort(np.argsort(-many["peaks.intensity"])[:60])
    few = many | {name: many[name][kept] for name in ("peaks.mz", "peaks.intensity")}
    model = model_of(dtype=torch.float32)
    assert torch.equal(model(collated(many).peaks), model(collated(few).peaks))


def test_the_order_of_peaks_changes_nothing():
    item, turned = spectrum(0), spectrum(0)
    turned |= {name: turned[name][::-1] for name in ("peaks.mz", "peaks.intensity")}
    model = model_of()
    one, other = (model(double(collated(each)).peaks) for each in (item, turned))
    assert torch.allclose(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["peaks.mz", "peaks.intensity", "precursor_mz"])
def test_everything_of_a_spectrum_is_seen(name):
    item = spectrum(0)
    other = item | {name: item[name] * np.float32(0.97)}
    model = model_of()
    assert (model(double(collated(item)).peaks) - model(double(collated(other)).peaks)).abs().max() > 1e-6


def test_masses_a_few_thousandths_apart_are_told_apart_however_heavy():
    masses = SpectraFinetune(d_fourier=20, heads=1).model().embed.masses
    near, far = (masses(torch.tensor([[900.0, other]]))[0] for other in (900.005, 950.0))
    assert (near[0] - near[1]).norm() > 0.1 * (far[0] - far[1]).norm()


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


def test_masses_in_double_precision_are_read_in_single():
    item = spectrum(0)
    batch = collated(item | {name: item[name].astype(np.float64) for name in ("peaks.mz", "peaks.intensity")})
    assert batch.peaks.mz_BL.dtype == batch.peaks.intensity_BL.dtype == torch.float32
    assert torch.equal(batch.peaks.mz_BL, collated(item).peaks.mz_BL)


def test_a_precursor_that_is_not_known_is_taken_as_0():
    known, unknown = spectrum(0), spectrum(1)
    del unknown["precursor_mz"]
    for batch in (collated(known, unknown), collated(unknown)):
        assert float(batch.peaks.mz_BL[-1, 0]) == 0
        assert torch.isfinite(model_of(dtype=torch.float32)(batch.peaks)).all()


def test_it_takes_what_the_reader_of_spectra_gives(tmp_path):
    made.spectra(tmp_path / "made.mgf", 6)
    entries = list(Spectra(tmp_path / "made.mgf", target=("target",)).entries())
    task = replace(SMALL, targets=1)
    batch = task.collate(batch_of([one.arrays for one in entries], [one.id for one in entries]).items[:], RNG)
    assert task.weights(batch) == {"target": 6.0}
    assert task.outputs(model_of(task, torch.float32), batch)["prediction"].shape == (6, 1)


# ---- batches ----


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_an_item_is_told_the_same_alone_and_in_a_batch(dtype, tolerance):
    model = model_of(dtype=dtype)
    convert = double if dtype is torch.float64 else (lambda batch: batch)
    together = model(convert(collated(*MIXED)).peaks)
    alone = torch.cat([model(convert(collated(one)).peaks) for one in MIXED])
    assert torch.allclose(together, alone, rtol=0, atol=tolerance)


@pytest.mark.parametrize("cuts", [(1, 2, 3), (2,), (1,)])
def test_gradients_of_micro_batches_add_up_to_those_of_one_batch(cuts):
    whole = gradients([double(collated(*MIXED))])
    parts = [MIXED[start:stop] for start, stop in zip((0, *cuts), (*cuts, len(MIXED)), strict=True)]
    cut = gradients([double(collated(*part)) for part in parts])
    assert max(float(one.abs().max()) for one in whole.values()) > 1e-3
    assert max_difference(whole, cut) < 1e-12


def test_half_precision_is_finite_and_sums_the_loss_in_single():
    batch, model = collated(*MIXED), model_of(dtype=torch.float32).train()
    plain = float(SMALL.loss(model, batch)["target"][0].detach())
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            half, _ = SMALL.loss(model, batch)["target"]
        half.backward()
        assert half.dtype == torch.float32
        assert float(half.detach()) == pytest.approx(plain, rel=0.05)
        assert all(torch.isfinite(one.grad).all() for one in model.parameters())


# ---- targets ----


def test_what_is_not_known_has_no_weight():
    batch = collated(*MIXED)
    total, weight = SMALL.loss(model_of(dtype=torch.float32), batch)["target"]
    assert weight == 2 + 1 + 2
    assert SMALL.weights(batch) == {"target": weight}
    changed = batch._replace(target_BK=torch.where(batch.is_known_BK, batch.target_BK, 1e6))
    assert torch.equal(SMALL.loss(model_of(dtype=torch.float32), changed)["target"][0], total)


def test_spectra_without_any_target_are_told_and_have_no_figures():
    bare = [{name: array for name, array in spectrum(seed).items() if name != "target"} for seed in (0, 1)]
    found = {name: told.detach().numpy() for name, told in SMALL.outputs(model_of(), double(collated(*bare))).items()}
    assert found["prediction"].shape == (2, 2)
    assert np.isnan(found["target"]).all()
    assert SMALL.metrics(found) == {}


def test_training_on_spectra_whose_reader_gives_no_target_is_refused():
    bare = {name: array for name, array in spectrum(0).items() if name != "target"}
    with pytest.raises(ConfigError, match="there is nothing to learn") as caught:
        SMALL.loss(model_of(dtype=torch.float32), collated(bare))
    assert caught.value.where == "data.options.target"
    unknown = collated(spectrum(0, target=(np.nan, np.nan)))
    assert float(SMALL.loss(model_of(dtype=torch.float32), unknown)["target"][0].detach()) == 0


def test_a_single_number_is_a_target_too():
    item = spectrum(0) | {"target": np.array(3.0, np.float32)}
    assert collated(item, task=replace(SMALL, targets=1)).target_BK.tolist() == [[3.0]]


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


def test_targets_that_are_all_alike_have_no_r2():
    alike = [np.array([500.1, 0.1])] * 9
    figures = SMALL.metrics({"prediction": alike, "target": alike})
    assert figures == dict.fromkeys(("mae", "rmse", "mae_0", "rmse_0", "mae_1", "rmse_1"), 0.0)


# ---- memory ----


@pytest.mark.nightly
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("size", range(len(SIZES)))
@pytest.mark.parametrize("frozen", [(), ("embed.", "layers.0.")])
def test_the_planner_traces_it_to_two_thousandths_of_what_it_takes(size, frozen):
    device.need()
    settings = {"clip": 1.0, "frozen": frozen}
    traced = tracer(SMALL, least=SIZES[0], **settings)
    standing, micro = traced.standing(CHOICE), traced.micro(CHOICE, SIZES[size])
    for times in (1, 2):
        predicted = live_peak_bytes(standing, micro, accumulate=times > 1)
        assert predicted == pytest.approx(true_peak(SMALL, SIZES[size], times, **settings), rel=0.002)


OTHERS = {
    "published": replace(SMALL, as_published=True, classes=50),
    "summed": replace(SMALL, head="fingerprint", targets=40, summed=True),
    "embedding": replace(SMALL, head="embedding"),
}


@pytest.mark.nightly
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("items", [1, 6, 24])
@pytest.mark.parametrize("name", OTHERS)
def test_the_planner_traces_every_head_and_the_published_network_as_well(name, items):
    device.need()
    task, sizes = OTHERS[name], {"peaks": 60, ITEMS: items}
    traced = tracer(task, least={"peaks": 60, ITEMS: 1})
    predicted = live_peak_bytes(traced.standing(CHOICE), traced.micro(CHOICE, sizes), accumulate=False)
    assert predicted == pytest.approx(true_peak(task, sizes, 1), rel=0.002)


DEEP = replace(SMALL, d_fourier=504)  # what the layers keep is most of it
LOWER = ("embed.", "layers.0.", "layers.1.")


@cache
def kept(frozen, choice=CHOICE):
    """Return the bytes that the layers keep for backward, and the peak of a step."""
    traced = tracer(DEEP, least=SIZES[0], frozen=frozen)
    standing, micro = traced.standing(choice), traced.micro(choice, SIZES[2])
    kept = {name: size for name, size in of(micro.parts, Category.ACTIVATIONS).items() if name.startswith("layers")}
    return sum(kept.values()), live_peak_bytes(standing, micro, accumulate=False)


def test_layers_below_the_lowest_that_is_trained_keep_nothing_and_planned_memory_falls():
    (kept_by_all, peak), (kept_by_one, lower_peak) = kept(()), kept(LOWER)
    assert kept_by_one == pytest.approx(kept_by_all / 3, rel=0.1)
    assert lower_peak < 0.5 * peak


def test_layers_above_a_trained_embedding_keep_what_they_need_although_they_are_frozen():
    assert kept(LOWER[1:])[0] > 2 * kept(LOWER)[0]


def test_frozen_parameters_have_no_gradient():
    found = gradients([double(collated(*MIXED))], frozen=LOWER)
    assert {name.partition(".")[0] for name in found} == {"layers", "norm", "head"}
    assert {name.split(".")[1] for name in found if name.startswith("layers")} == {"2"}


def test_checkpointing_keeps_less():
    plain, again = kept(()), kept((), MemoryChoice(checkpointing=True))
    assert again[0] < 0.4 * plain[0]
    assert again[1] < 0.85 * plain[1]


# ---- bad input ----


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("targets", 0, "targets is 0"),
        ("max_peaks", 0, "max_peaks is 0"),
        ("layers", -1, "layers is -1"),
        ("finest", 0.0, "finest is 0.0"),
        ("finest", 1e-7, "it must be from 1e-05 to 0.25 Da"),
        ("finest", float("nan"), "finest is nan"),
        ("dropout", 1.0, "dropout is 1.0"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(name, value, said):
    with pytest.raises(ConfigError, match=said) as caught:
        SpectraFinetune(**{name: value})
    assert caught.value.where == f"train.options.{name}"


def test_a_width_that_heads_do_not_share_is_refused_with_one_that_they_do():
    with pytest.raises(ConfigError, match=r"979 \+ 44 features cannot be divided among 8 heads") as caught:
        SpectraFinetune(d_fourier=979)
    assert caught.value.remedy == "--set train.options.d_fourier=980"


def test_a_target_of_another_size_is_refused_with_what_to_set():
    with pytest.raises(ConfigError, match="item0 has a target of 3") as caught:
        collated(spectrum(0, target=(1.0, 2.0, 3.0)))
    assert caught.value.remedy == "--set train.options.targets=3"


def test_items_that_are_no_spectra_are_refused():
    with pytest.raises(ConfigError, match=r"reads peaks.mz and peaks.intensity; item0 has left.token"):
        collated({"left.token": np.zeros(3, np.uint8)})


# ---- it learns ----


def test_it_learns_what_is_made_to_be_learned():
    spectra = [spectrum(seed, 20) for seed in range(12)]
    for one in spectra:
        one["target"] = np.array([one["precursor_mz"] / 500 - 1, one["peaks.intensity"].mean()], np.float32)
    torch.manual_seed(0)
    step = Step(SMALL, StepSettings(learning_rate=3e-3, clip=1.0))
    batches = [collated(*spectra[at : at + 6]) for at in (0, 6)]
    losses = [float(step.run(batches)["target"]) for _ in range(40)]
    assert losses[-1] < 0.2 * losses[0]
