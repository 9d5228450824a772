"""The de-novo task: what it is told, what it returns, what it takes, and that it learns."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.readers import peptides
from pipeline.tasks.peptides.found_peptides import EOS, PAD, SOS, UNK
from tests.tasks.cases import DENOVO as SMALL
from tests.tasks.cases import MIXED_PEPTIDES, RNG, SHALLOW, apart, model_of, peptide, stepped
from tests.tasks.cases import outputs_of as said
from tests.tasks.items import double
from tests.tasks.reader_items import batch_of

WHOLE = {"render_reach": 0.0}


def items_of(*many):
    return batch_of([peptide(one) if isinstance(one, str) else one for one in many]).items[:]


def collated(*many, task=SMALL):
    return task.collate(items_of(*many), RNG)


# ---- what it is ----


@pytest.mark.parametrize(
    ("sizes", "cost"),
    [
        ({"peaks": [10_000, 3], "peptide": [5, 7]}, {"peaks": [40, 3], "residues": [5, 7]}),
        ({"peaks": [3, 50]}, {"peaks": [3, 40], "residues": [0, 0]}),  # without peptides: to predict
    ],
)
def test_cost_counts_no_more_peaks_than_are_read(sizes, cost):
    columns = SMALL.cost({name: np.array(values) for name, values in sizes.items()})
    assert {name: values.tolist() for name, values in columns.items()} == cost
    first = {name: values[0] for name, values in sizes.items()}
    assert SMALL.cost(first) == {name: values[0] for name, values in cost.items()}


# ---- the spectrum and its peptide ----


def test_the_highest_peaks_are_read_in_their_order():
    task = replace(SMALL, max_peaks=12)
    many = peptide("PEPTIDE", extra=200)
    spectra = collated(many, task=task).spectra
    assert spectra.mz_BP.shape == (1, 12)
    kept = np.sort(np.argsort(-many["peaks.intensity"], kind="stable")[:12])
    assert spectra.mz_BP[0].tolist() == many["peaks.mz"][kept].tolist()
    assert float(spectra.intensity_BP.max()) == 1.0


@pytest.mark.parametrize("kind", ["coverage", "drawn"])
def test_a_right_answer_has_the_mass_and_the_spectrum_of_its_peptide(kind):
    drawn = {"spectrum_loss": kind, "fragment_charges": 1, "max_mz": 1000.0, "bin_size": 0.1, "sigma": 0.1}
    task = replace(SMALL, smoothing=0.0, spectrum_weight=1.0, precursor_weight=1.0, **drawn)
    batch = double(collated("PEPTIDE", "WYFR", "C[Carbamidomethyl]M[Oxidation]K", task=task))

    def right(_spectra):
        letters = len(task.vocabulary.names)
        logits = 100.0 * torch.nn.functional.one_hot(batch.letter_BL, letters).double()
        return logits.expand(3, -1, -1, -1).requires_grad_()

    losses = {name: float(total.detach()) for name, (total, _) in task.loss(right, batch).items()}
    assert losses["peptide"] == pytest.approx(0, abs=1e-9)
    assert losses["spectrum"] == pytest.approx(0, abs=1e-4)
    assert losses["precursor"] == pytest.approx(0, abs=1e-3)


def test_weights_count_what_is_known():
    nothing = {name: value[:0] for name, value in peptide("WYFR").items() if name.startswith("peaks")}
    batch = collated(
        "PEPTIDE", peptide("WYFR", "peptide.residue"), peptide("WYFR", "precursor_mz"), peptide("WYFR") | nothing, "K"
    )
    assert SMALL.weights(batch) == {"peptide": 8.0 + 5 + 5 + 2, "spectrum": 2.0, "precursor": 3.0}
    terms = SMALL.loss(model_of(SMALL, dtype=torch.float32), batch)
    assert {name: weight for name, (_, weight) in terms.items()} == SMALL.weights(batch)
    assert all(math.isfinite(float(total.detach())) for total, _ in terms.values())


def test_a_batch_of_spectra_without_peptides_has_outputs_and_no_figures():
    batch = collated(peptide("PEPTIDE", "peptide.residue"))
    assert SMALL.weights(batch) == {"peptide": 0.0, "spectrum": 0.0, "precursor": 0.0}
    found = said(SMALL, model_of(SMALL, dtype=torch.float32), batch)
    assert found["letter"][0].shape == (16,)
    assert SMALL.metrics(found) == {}


# ---- batches ----


@pytest.mark.parametrize(
    "changes",
    [
        *({"detach": True}, WHOLE, {"spectrum_loss": "coverage", "precursor_loss": "absolute"}),
        *({"as_published": True}, {"gated": False}, {"noise_peaks": 5, "peak_dropout": 0.2, "mass_error_ppm": 9.0}),
    ],
)
def test_micro_batches_add_up_to_one_batch_whatever_is_set(changes):
    task, batch = replace(SHALLOW, sigma=5.0, **changes), batch_of(MIXED_PEPTIDES)
    whole, cut = (
        stepped(task, [double(task.collate(batch.items[slice(*span)], RNG)) for span in spans])
        for spans in ([(0, 5)], [(0, 1), (1, 3), (3, 5)])
    )
    assert apart(whole, cut) < 1e-10


@pytest.mark.nightly
def test_the_network_is_one_graph_to_a_compiler():
    model, batch = model_of(SHALLOW, torch.float32), collated("PEPTIDE", "WYFR")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(batch.spectra), model(batch.spectra), atol=1e-5)


# ---- what it says ----


def said_of(*many, task=SMALL, found=None):
    """Return outputs as they would be of a model that says these peptides with an end behind each."""
    batch = collated(*many, task=task)
    letter_BL = batch.letter_BL if found is None else collated(*found, task=task).letter_BL

    class Says(torch.nn.Module):
        def forward(self, _spectra):
            return 9.0 * torch.nn.functional.one_hot(letter_BL, len(task.vocabulary.names)).float().expand(
                3, -1, -1, -1
            )

    return said(task, Says(), batch)


def test_what_is_said_is_scored_as_the_field_does_and_as_the_original_does():
    found = said_of("PEPTIDE", "WYFR", found=["PEPTLDE", "WYRF"])
    figures = SMALL.metrics(found)
    assert figures["residue_precision"] == figures["residue_recall"] == pytest.approx(9 / 11)
    assert figures["peptide_precision"] == figures["peptide_recall"] == 0.5
    assert figures["token_accuracy"] == pytest.approx(9 / 11)
    assert figures["sequence_accuracy"] == 0.5
    assert figures["mass_error_ppm"] < 1
    assert figures["recursion_accuracy_step_2"] == pytest.approx(8 / 11)  # in which I is not L


def test_an_answer_tells_its_length_its_score_and_the_error_of_its_mass():
    found = said_of("PEPTIDE", "WYFR", peptide("MHLAR", "precursor_mz"), found=["PEPTIDE", "WYF", "MHLAR"])
    assert [int(length) for length in found["length"]] == [7, 3, 5]
    assert float(found["error_ppm"][0]) == pytest.approx(0, abs=0.3)
    assert float(found["error_ppm"][1]) < -100_000
    assert math.isnan(found["error_ppm"][2])
    assert 0.9 < float(found["score"][0]) < 1


def test_nothing_is_said_that_cannot_stand_at_its_place():
    class Everywhere(torch.nn.Module):
        def __init__(self, letter):
            super().__init__()
            self.letter = letter

        def forward(self, _spectra):
            logits = torch.zeros(1, 1, 16, len(SMALL.vocabulary.names))
            logits[..., self.letter], logits[..., SMALL.vocabulary.names.index("A")] = 9.0, 5.0
            return logits

    acetyl = SMALL.vocabulary.names.index("[Acetyl]-")
    batch = collated("PEPTIDE")
    assert said(SMALL, Everywhere(acetyl), batch)["letter"][0].tolist() == [acetyl] + 15 * [4]
    for special in (PAD, SOS, UNK):
        assert said(SMALL, Everywhere(special), batch)["letter"][0].tolist() == 16 * [4]
    assert said(SMALL, Everywhere(EOS), batch)["length"][0] == 0


# ---- letters ----


def test_a_peptide_is_followed_by_an_end_where_it_is_trained_here_and_by_nothing_as_published():
    here, published = collated("WYFR"), collated("WYFR", task=replace(SMALL, as_published=True))
    assert here.letter_BL[0, 4] == EOS
    assert (here.letter_BL[0, 5:] == PAD).all()
    assert (published.letter_BL[0, 4:] == PAD).all()
    assert (here.known[0], published.known[0]) == (5.0, 4.0)


def test_modifications_are_letters_here_and_are_cut_off_as_published():
    text = "[Acetyl]-M[Oxidation]C[Carbamidomethyl]N[Deamidated]K"
    task = replace(SMALL, as_published=True)
    assert SMALL.vocabulary.text(collated(text).letter_BL[0].numpy()) == text
    assert task.vocabulary.text(collated(text, task=task).letter_BL[0].numpy()) == "MCNK"
    assert collated(text).has_terminal_B.tolist() == [True]


def test_every_c_is_read_as_modified_where_the_data_do_not_say_so():
    task = replace(SMALL, carbamidomethyl=True)
    assert task.vocabulary.text(collated("ACK", task=task).letter_BL[0].numpy()) == "AC[Carbamidomethyl]K"


def test_a_modification_that_is_no_letter_is_refused_by_its_name():
    task = replace(SMALL, modifications=("M[Oxidation]",))
    with pytest.raises(ConfigError, match=r"peptide of item0 has \[Acetyl\]-, which is not") as caught:
        collated("[Acetyl]-M[Oxidation]K", task=task)
    assert caught.value.where == "train.options.modifications"


def test_noise_is_an_items_own_and_leaves_some_clean():
    task = replace(SMALL, noise_peaks=8, mass_error_ppm=20.0, intensity_variation=0.5, peak_dropout=0.3)
    first, again = (collated("PEPTIDE", "WYFR", task=task).spectra for _ in range(2))
    alone, plain = collated("PEPTIDE", task=task).spectra, collated("PEPTIDE").spectra
    peaks = int(alone.is_peak_BP.sum())
    assert torch.equal(first.mz_BP, again.mz_BP)
    assert torch.equal(first.mz_BP[0, :peaks], alone.mz_BP[0])
    assert alone.mz_BP.shape != plain.mz_BP.shape or not torch.equal(alone.mz_BP, plain.mz_BP)
    clean = collated("PEPTIDE", task=replace(task, clean_share=1.0)).spectra
    assert torch.equal(clean.mz_BP, plain.mz_BP)


# ---- bad input ----


def test_a_peptide_that_is_too_long_is_refused_with_what_to_set():
    with pytest.raises(ConfigError, match="peptide of item0 has 20 residues, but longest is 16") as caught:
        collated(peptides.LETTERS)
    assert caught.value.remedy == "--set train.options.longest=20"
