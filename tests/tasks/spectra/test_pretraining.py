"""Pre-training: its loss is the original's, and what is masked is a matter of each item alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from pipeline.tasks.spectra.peak_transformer import DreamsForm, Peaks, PeakSizes
from pipeline.tasks.spectra_pretrain import NONE, MaskedBatch, SpectraPretrain, mass_classes
from tests.reference import recorded
from tests.tasks.cases import PRETRAIN, RNG, model_of, paired, spectrum
from tests.tasks.originals import PEAK_SIZES, dreams_state, peaks_of
from tests.tasks.reader_items import batch_of

ORIGINAL = SpectraPretrain(**{one.name: getattr(PEAK_SIZES, one.name) for one in fields(PeakSizes)})


def recorded_batch() -> MaskedBatch:
    """Return the original's pairs of masked spectra."""
    inputs, places, classes = recorded("dreams/inputs"), [], []
    for number in "12":
        real_BL, is_masked_BL = inputs[f"pretrain.spec_real_{number}"][..., 0], inputs[f"pretrain.mask_{number}"]
        for real_L, is_masked_L in zip(real_BL, is_masked_BL, strict=True):
            places.append(is_masked_L.nonzero()[:, 0])
            classes.append(mass_classes(real_L[is_masked_L], ORIGINAL.classes))
    peaks = [peaks_of(inputs[f"pretrain.spec_mask_{number}"]) for number in "12"]
    pad = torch.nn.utils.rnn.pad_sequence
    return MaskedBatch(
        Peaks(*(torch.cat(parts) for parts in zip(*peaks, strict=True))),
        pad(places, batch_first=True),
        pad(classes, batch_first=True, padding_value=NONE),
        torch.arange(6),
        inputs["pretrain.ro_label"],
        (51.0, 57.0, 6.0),
    )


@torch.no_grad()
def test_the_loss_is_the_originals_in_all_its_parts():
    batch, outputs = recorded_batch(), recorded("dreams/outputs")
    for number, class_SM in zip("12", batch.class_SM.split(6), strict=True):
        assert torch.equal(class_SM[class_SM != NONE], outputs[f"pretrain.class_{number}"])
    model = ORIGINAL.model().eval()
    model.load_state_dict(DreamsForm.of(model.sizes).read(dreams_state("ssl")))
    terms = {name: float(total / weight) for name, (total, weight) in ORIGINAL.loss(model, batch).items()}
    for name, number in (("masked", "1"), ("masked_other", "2")):
        assert terms[name] == pytest.approx(0.4 * float(outputs[f"pretrain.focal_{number}"].mean()), rel=1e-5)
    assert sum(terms.values()) == pytest.approx(float(outputs["pretrain.loss"]), rel=1e-5)


def test_masses_are_masked_by_intensity_but_not_the_precursors_or_the_highest_peaks():
    item = spectrum(0, 11) | {"peaks.intensity": np.array([1.0, 0.5, *[0.02] * 9], np.float32)}
    counts = Counter[int]()
    for seed in range(300):
        items = batch_of([item], [f"s{seed}"]).items[:]
        batch = replace(PRETRAIN, shift_chance=0.0).collate(items, RNG)
        places_M = batch.place_SM[batch.class_SM != NONE]
        counts.update(places_M.tolist())
        assert len(places_M) == 3
        assert (batch.peaks.mz_BL[0] == -1).nonzero()[:, 0].tolist() == places_M.tolist()
    assert not counts[0]
    assert not counts[1]
    assert counts[2] > 2 * max(counts[place] for place in range(3, 12))


def test_a_spectrum_without_a_second_one_has_only_masked_peaks():
    ids = ["a", "b", "c"]
    batch = PRETRAIN.collate(batch_of([paired(1, 30), spectrum(2), paired(3, 30)], ids).items[:], RNG)
    assert (len(batch.peaks.mz_BL), batch.pair_T.tolist()) == (5, [0, 2])
    assert batch.is_first_T.tolist() == [1, 0]
    terms = PRETRAIN.loss(model_of(PRETRAIN, torch.float32), batch)
    assert {name: weight for name, (_, weight) in terms.items()} == PRETRAIN.weights(batch)
    alone = replace(PRETRAIN, order_weight=0.0)
    assert list(alone.weights(alone.collate(batch_of([paired(1, 30)]).items[:], RNG))) == ["masked"]
