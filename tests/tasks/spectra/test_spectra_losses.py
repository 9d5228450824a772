"""Losses and figures against the original's numbers, and against what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.readers.spectra import Spectra
from pipeline.tasks.spectra.peak_transformer import SpectraBatch
from pipeline.tasks.spectra.spectra_measures import bit_figures, found_error
from pipeline.tasks.spectra_finetune import SpectraContrast, SpectraFinetune
from tests.readers.compared import hdf5_file
from tests.reference import document, recorded
from tests.tasks.originals import peak_model, peaks_of
from tests.tasks.reader_items import batch_of as laid_out

SMALL: dict[str, Any] = {
    "layers": 3, "heads": 4, "d_fourier": 40, "d_peak": 8, "fourier_width": 16, "as_published": True
}  # fmt: skip
CASES = {
    "regression": ("regression", {"sigmoid": True}, "regression.loss"),
    "mol_props": ("mol_props", {"targets": 11}, "mol_props.loss"),
    "binary": ("binary", {"head": "binary"}, "binary.loss_plain"),
    "focal": ("binary", {"head": "binary", "alpha": 0.8, "gamma": 0.5}, "binary.loss_alpha08_gamma05"),
    **{
        f"{name} {measure}": (name, {"head": "fingerprint", "targets": 64, "measure": measure, **more}, f"{name}.{key}")
        for name, more in (("fingerprint", {"summed": True}), ("fingerprint_precursor", {"head_depth": 2}))
        for measure, key in (("cosine", "loss_cos"), ("iou", "loss_smooth_iou"))
    },
}


def batch_of(spec_BL2: torch.Tensor, target_BK: torch.Tensor, task: SpectraFinetune, triplets: int = 0) -> SpectraBatch:
    items = len(target_BK)
    is_known_BK = ~target_BK.isnan()
    return SpectraBatch(
        peaks=peaks_of(spec_BL2),
        anchor_T=torch.arange(triplets),
        target_BK=target_BK.nan_to_num(0.0),
        is_known_BK=is_known_BK,
        precursor_B=spec_BL2[:items, 0, 0],
        molecule_S=torch.arange(1, len(spec_BL2) + 1),
        known=task._known(is_known_BK, triplets),
        is_labelled=(True,) * items,
    )


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_losses_are_the_originals(case):
    name, options, key = CASES[case]
    task = SpectraFinetune(**SMALL, **options)
    label = recorded("dreams/inputs")[f"label.{name.removesuffix('_precursor')}"]
    batch = batch_of(recorded("dreams/inputs")["spec_100"][: len(label)], label.reshape(len(label), -1), task)
    ((total, weight),) = task.loss(peak_model(name), batch).values()
    assert float(total / weight) == pytest.approx(float(recorded("dreams/outputs")[key]), rel=1e-5)


@pytest.mark.parametrize(("margin", "key"), [(0.1, "loss_margin01"), (0.5, "loss_margin_05"), (1.0, "loss_margin_10")])
@torch.no_grad()
def test_triplets_are_the_originals(margin, key):
    task = SpectraFinetune(**SMALL, head="embedding", margin=margin)
    inputs = recorded("dreams/inputs")
    spec = [inputs["triplet.spec"], inputs["triplet.pos_specs"][:, 0], inputs["triplet.neg_specs"][:, 0]]
    batch = batch_of(torch.cat(spec), torch.full((4, 1), torch.nan), task, triplets=4)
    ((total, weight),) = task.loss(peak_model("contrastive"), batch).values()
    assert weight == 4
    assert float(total / weight) == pytest.approx(float(recorded("dreams/outputs")[f"contrastive.{key}"]), rel=1e-5)


@torch.no_grad()
def test_from_raw_spectra_to_embeddings_the_task_tells_what_the_original_tells(tmp_path):
    inputs = recorded("dreams/inputs")
    path = hdf5_file(tmp_path / "x.h5", inputs["raw.peaks"].numpy(), precursor_mz=inputs["raw.precursor_mz"].numpy())
    task = SpectraFinetune(**SMALL, head="embedding")
    items = laid_out([entry.arrays for entry in Spectra(path).entries()]).items
    expected = recorded("dreams/outputs")["contrastive.prediction"]
    for some in (slice(0, 11), slice(0, 1), slice(6, 9)):
        batch = task.collate(items[some], np.random.default_rng(0))
        found = task.outputs(peak_model("contrastive"), batch)["embedding"]
        assert (found - expected[some]).abs().max() < 1e-4


def test_errors_of_properties_in_their_units_are_the_originals():
    spans = document("dreams/properties")["min_max"]
    lowest, highest = ([span[end] for span in spans.values()] for end in ("min", "max"))
    task = SpectraFinetune(**SMALL, targets=11, lowest=lowest, highest=highest, names=list(spans))
    label = recorded("dreams/inputs")["label.mol_props"]
    batch = batch_of(recorded("dreams/inputs")["spec_100"][:5], label, task)
    with torch.no_grad():
        outputs = {
            name: [one.numpy() for one in rows] for name, rows in task.outputs(peak_model("mol_props"), batch).items()
        }
    figures = task.metrics(outputs)
    found = [figures[f"mae_{name}"] for name in spans]
    assert found == pytest.approx(recorded("dreams/outputs")["mol_props.mae_denormalised"].tolist(), rel=1e-4)


@pytest.mark.parametrize("name", ["fingerprint", "fingerprint_precursor"])
def test_figures_of_fingerprints_are_the_originals(name):
    outputs = recorded("dreams/outputs")
    figures = bit_figures(
        list(outputs[f"{name}.prediction"].numpy()), list(recorded("dreams/inputs")["label.fingerprint"].numpy()), 0.5
    )
    theirs = {
        "auroc": "BinaryAUROC",
        "accuracy": "BinaryAccuracy",
        "jaccard": "BinaryJaccardIndex",
        "precision": "BinaryPrecision",
        "recall": "BinaryRecall",
        "cosine": "CosineSimilarity",
    }
    for ours, their in theirs.items():
        expected = float(outputs[f"{name}.metric_of_sigmoid.{their}"])
        assert figures[ours] == pytest.approx(expected, abs=1e-4 if ours == "auroc" else 1e-6)


@pytest.mark.parametrize(
    "options", [{"head": "binary"}, {"head": "fingerprint"}, {"head": "fingerprint", "measure": "iou"}]
)
@torch.no_grad()
def test_what_is_not_known_changes_nothing(options):
    torch.manual_seed(0)
    task = SpectraFinetune(**{**SMALL, "classes": 0}, targets=5, **options)
    target_BK = torch.randint(2, (4, 5)).float()
    target_BK[0, 2], target_BK[1] = torch.nan, torch.nan
    spec_BL2 = torch.rand(4, 101, 2)
    model = task.model().eval()
    batch = batch_of(spec_BL2, target_BK, task)
    other = batch._replace(target_BK=torch.where(batch.is_known_BK, batch.target_BK, 7.0))
    (one, weight), (same, _) = (next(iter(task.loss(model, each).values())) for each in (batch, other))
    assert weight == (14.0 if options["head"] == "binary" else 3.0)
    assert float(one) == float(same) > 0


def test_an_anchor_is_found_among_the_others_but_those_of_its_own_molecule():
    anchor_BD, far_BD = torch.eye(4)[[0, 1, 2]], -torch.eye(4)[[0, 1, 2]]
    alone = found_error(anchor_BD, anchor_BD, far_BD, torch.tensor([5, 5, 6]), torch.tensor([7, 0, 8]), 1.0)
    expected = [np.log(np.e + 1 + np.exp(-1) + 2) - 1] * 2 + [np.log(np.e + 2 + np.exp(-1) + 2) - 1]
    assert float(alone) == pytest.approx(sum(expected), rel=1e-6)


@torch.no_grad()
def test_items_without_a_positive_are_left_out_of_the_contrast():
    task = SpectraContrast(**{**SMALL, "classes": 0})
    torch.manual_seed(0)
    model = task.model().eval()
    spec_BL2 = torch.rand(7, 101, 2)
    batch = batch_of(spec_BL2, torch.full((3, 1), torch.nan), task, triplets=2)._replace(anchor_T=torch.tensor([0, 2]))
    embedded = task.embed(model, batch)
    assert embedded["is_whole"].tolist() == [1, 0, 1]
    ((total, weight),) = task.contrast(model, embedded).values()
    some = {name: rows[[0, 2]] for name, rows in embedded.items()}
    ((same, _),) = task.contrast(model, some).values()
    assert weight == 2
    assert float(total) == float(same)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"head": "x"}, "head is 'x': it must be regression, binary"),
        ({"summed": True}, "summed needs the fingerprint head"),
        ({"targets": 2, "lowest": [0.0], "highest": [1.0]}, "lowest has 1 entries, but there are 2 targets"),
        ({"lowest": [1.0], "highest": [1.0]}, "in this order"),
        ({"alpha": 1.0}, "alpha is 1.0: it must be between 0 and 1"),
    ],
)
def test_options_that_make_no_sense_are_refused_with_the_reason(options, said):
    with pytest.raises(ConfigError, match=said):
        SpectraFinetune(**options)
