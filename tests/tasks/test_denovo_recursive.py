"""The de-novo task: what it is told, what it returns, what it takes, and that it learns."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from pipeline.errors import ConfigError
from pipeline.memory.footprint import MemoryChoice, live_peak_bytes
from pipeline.protocol import ITEMS, Example, Outputs, Weights
from pipeline.readers import peptides
from pipeline.readers.peptides import residue_codes
from pipeline.runs.model.task_contract import breaches
from pipeline.tasks.denovo_recursive import DenovoRecursive
from pipeline.tasks.peptides.vocabulary import EOS, PAD, SOS, UNK
from pipeline.training.step.checkpointing import repeated
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.memory.tracing.traced import tracer, true_peak
from tests.tasks.items import double
from tests.tasks.reader_items import batch_of
from tests.testkit.limited import device

RNG = np.random.default_rng(0)
SMALL = DenovoRecursive(
    width=40, heads=2, encoder_layers=2, decoder_layers=2, latent_steps=2, supervision_steps=3,
    max_peaks=40, longest=16, spectrum_loss="drawn", bin_size=0.5, sigma=0.3,
)  # fmt: skip
SHALLOW = replace(SMALL, encoder_layers=1, decoder_layers=1, latent_steps=1, supervision_steps=2)
PEPTIDES = ("PEPTIDE", "GASPVTCK", "WYFR", "NDQEK", "MHLAR", "AAGVLSTK")
SIZES = (
    {"peaks": 10, "residues": 5, ITEMS: 2},
    {"peaks": 30, "residues": 12, ITEMS: 6},
    {"peaks": 40, "residues": 16, ITEMS: 16},
)
WHOLE, CHUNKED = {"render_reach": 0.0}, {"render_reach": 0.0, "render_chunk": 300}


def values_of(sequence, *, charge=2, extra=0):
    """Return what a reader gives of a peptide's b and y ions, and of some peaks that are noise."""
    residue = residue_codes(sequence)
    rng = np.random.default_rng(len(sequence))
    mz = np.concatenate([peptides.b_ions(residue), peptides.y_ions(residue), rng.uniform(50, 900, extra)])
    intensity = np.concatenate([np.full(2 * len(sequence) - 2, 0.8), rng.uniform(0.1, 0.3, extra)])
    order = mz.argsort()
    return {
        "peaks.mz": mz[order].astype(np.float32),
        "peaks.intensity": intensity[order].astype(np.float32),
        "precursor_mz": np.array(peptides.mz(peptides.mass(residue), charge), np.float32),
        "charge": np.array(charge, np.int64),
        "peptide.residue": residue,
    }


def items_of(*many):
    return batch_of([values_of(one) if isinstance(one, str) else one for one in many]).items[:]


def collated(*many, task=SMALL):
    return task.collate(items_of(*many), RNG)


def without(sequence, *names):
    return {name: value for name, value in values_of(sequence).items() if name not in names}


def model_of(task=SMALL, dtype=torch.float64):
    torch.manual_seed(0)
    return task.model().to(dtype).eval()


def gradients(task, batches, **settings):
    step = Step(task, StepSettings(optimizer="sgd", **settings), model=model_of(task).train())
    weights = step.weights(batches)
    for batch in batches:
        step.accumulate(batch, weights)
    return {name: one.grad.clone() for name, one in step.model.named_parameters()}


def max_difference(ones, others):
    return max(float((ones[name] - others[name]).abs().max()) for name in ones)


def said(task, model, batch):
    with torch.no_grad():
        return {name: [one.numpy() for one in values] for name, values in task.outputs(model, batch).items()}


# ---- what it is ----


@pytest.mark.nightly
def test_it_keeps_to_what_is_asked_of_a_task():
    assert isinstance(SMALL, Example)
    assert isinstance(SMALL, Weights)
    assert isinstance(SMALL, Outputs)
    items = items_of(*PEPTIDES[:3], without("PEPTIDE", "peptide.residue"), without("PEPTIDE", "precursor_mz"))
    assert list(breaches(SMALL, sizes=SIZES[0], items=items)) == []


def test_the_model_has_twelve_and_a_half_million_parameters():
    with torch.device("meta"):
        model = DenovoRecursive().model()
    assert sum(one.numel() for one in model.parameters()) == pytest.approx(12.5e6, rel=0.01)


def test_cost_counts_no_more_peaks_than_are_read():
    assert SMALL.cost({"peaks": 10_000, "peptide": 9}) == {"peaks": 40, "residues": 9}
    columns = SMALL.cost({"peaks": np.array([3, 50]), "peptide": np.array([5, 7])})
    assert {name: one.tolist() for name, one in columns.items()} == {"peaks": [3, 40], "residues": [5, 7]}


def test_spectra_that_never_had_a_peptide_have_a_cost_of_none():
    assert SMALL.cost({"peaks": 9}) == {"peaks": 9, "residues": 0}
    assert SMALL.cost({"peaks": np.array([3, 50])})["residues"].tolist() == [0, 0]


def test_spectra_without_a_peptide_have_no_weight_where_letters_are_learned():
    terms = SMALL.loss(model_of(dtype=torch.float32), collated(without("PEPTIDE", "peptide.residue")))
    assert (float(terms["peptide"][0].detach()), terms["peptide"][1], terms["spectrum"][1]) == (0.0, 0.0, 0.0)


def test_an_example_has_the_shapes_of_a_batch_of_its_sizes():
    sizes = {"peaks": 12, "residues": 7, ITEMS: 2}
    wanted, got = ([(one.shape, one.dtype) for one in tree_leaves(batch) if isinstance(one, torch.Tensor)]
                   for batch in (collated("PEPTIDE", "WYFR"), SMALL.example(sizes)))  # fmt: skip
    assert got == wanted


def test_outputs_of_an_example_can_be_traced():
    with FakeTensorMode():
        found = SMALL.outputs(SMALL.model(), SMALL.example(SIZES[0]))
    assert {len(values) for values in found.values()} == {2}


# ---- the spectrum and its peptide ----


def test_the_highest_peaks_are_read_in_their_order():
    task = replace(SMALL, max_peaks=12)
    many = values_of("PEPTIDE", extra=200)
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
    nothing = {name: value[:0] for name, value in values_of("WYFR").items() if name.startswith("peaks")}
    batch = collated(
        "PEPTIDE", without("WYFR", "peptide.residue"), without("WYFR", "precursor_mz"), values_of("WYFR") | nothing, "K"
    )
    assert SMALL.weights(batch) == {"peptide": 8.0 + 5 + 5 + 2, "spectrum": 2.0, "precursor": 3.0}
    terms = SMALL.loss(model_of(dtype=torch.float32), batch)
    assert {name: weight for name, (_, weight) in terms.items()} == SMALL.weights(batch)
    assert all(math.isfinite(float(total.detach())) for total, _ in terms.values())


@pytest.mark.parametrize(
    ("changes", "terms"),
    [({"spectrum_weight": 0.0}, {"peptide", "precursor"}), ({"precursor_weight": 0.0}, {"peptide", "spectrum"})],
)
def test_a_term_without_weight_is_left_out(changes, terms):
    task, batch = replace(SMALL, **changes), collated("PEPTIDE")
    assert set(task.loss(model_of(task, torch.float32), batch)) == set(task.weights(batch)) == terms


def test_a_batch_of_spectra_without_peptides_has_outputs_and_no_figures():
    batch = collated(without("PEPTIDE", "peptide.residue"))
    assert SMALL.weights(batch) == {"peptide": 0.0, "spectrum": 0.0, "precursor": 0.0}
    found = said(SMALL, model_of(dtype=torch.float32), batch)
    assert found["letter"][0].shape == (16,)
    assert SMALL.metrics(found) == {}


# ---- batches ----


@pytest.mark.parametrize(
    "changes",
    [
        *({}, {"detach": True}, CHUNKED, {"spectrum_loss": "coverage", "precursor_loss": "absolute"}),
        *({"as_published": True}, {"gated": False}, {"noise_peaks": 5, "peak_dropout": 0.2, "mass_error_ppm": 9.0}),
    ],
)
def test_gradients_of_micro_batches_add_up_to_those_of_one_batch(changes):
    task = replace(SHALLOW, sigma=5.0, **changes)
    many = *PEPTIDES[:3], without("NDQEK", "peptide.residue"), without("MHLAR", "precursor_mz")
    whole = gradients(task, [double(collated(*many))])
    cut = gradients(task, [double(collated(*many[:1])), double(collated(*many[1:3])), double(collated(*many[3:]))])
    assert max(float(one.abs().max()) for one in whole.values()) > 1e-3
    assert max_difference(whole, cut) < 1e-10


@pytest.mark.parametrize("changes", [WHOLE, CHUNKED])
def test_every_way_to_draw_spectra_has_the_same_gradients(changes):
    batch = double(collated(*PEPTIDES[:3]))
    wide = replace(SHALLOW, sigma=5.0)  # so that what is guessed at first is near enough to some peak
    near, other, without_it = (
        gradients(replace(wide, **one), [batch]) for one in ({}, changes, {"spectrum_weight": 0.0})
    )
    assert max_difference(near, without_it) > 1e-4
    assert max_difference(near, other) < 1e-10


def test_gradients_end_at_each_answer_only_if_told():
    batch = double(collated("PEPTIDE"))
    ended, whole = (gradients(replace(SHALLOW, detach=detach), [batch]) for detach in (True, False))
    assert max_difference(ended, whole) > 1e-4


def test_layers_may_run_again_in_backward():
    assert set(repeated(SMALL.model())) == {"spectrum.layers.0", "spectrum.layers.1", "decoder.0", "decoder.1"}
    batch = double(collated(*PEPTIDES[:2]))
    plain, again = (gradients(SMALL, [batch], checkpointing=checkpointing) for checkpointing in (False, True))
    assert max_difference(plain, again) < 1e-12


def test_an_item_has_the_same_outputs_alone_and_in_a_batch():
    model = model_of()
    together = said(SMALL, model, double(collated(*PEPTIDES[:3])))
    for place, one in enumerate(PEPTIDES[:3]):
        alone = said(SMALL, model, double(collated(one)))
        assert (together["letter"][place] == alone["letter"][0]).all()
        assert np.allclose(together["confidence"][place], alone["confidence"][0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_finite_and_near_single(precision):
    batch = collated(*PEPTIDES)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    model = model_of(dtype=torch.float32)
    plain = SMALL.loss(model, batch)
    with torch.autocast("cpu", dtype):
        half = SMALL.loss(model, batch)
    for name, (total, _) in half.items():
        assert total.dtype == torch.float32
        assert float(total.detach()) == pytest.approx(float(plain[name][0].detach()), rel=0.03)
    step = Step(SMALL, StepSettings(precision=precision), model=model.train())
    step.accumulate(batch, step.weights([batch]))
    assert all(torch.isfinite(one.grad).all() for one in step.trained)


@pytest.mark.nightly
def test_the_network_is_one_graph_to_a_compiler():
    model, batch = model_of(SHALLOW, torch.float32), collated("PEPTIDE", "WYFR")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(batch.spectra), model(batch.spectra), atol=1e-5)


# ---- memory ----


@pytest.mark.nightly
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("changes", [{}, WHOLE])
def test_the_plan_is_within_a_hundredth_of_what_it_takes(changes):
    device.need()
    task, given = replace(SHALLOW, **changes), {"ema": 0.99, "clip": 1.0}
    traced = tracer(task, least=SIZES[0], **given)
    for sizes in SIZES[1:]:
        planned = live_peak_bytes(traced.standing(MemoryChoice()), traced.micro(MemoryChoice(), sizes), accumulate=True)
        assert planned == pytest.approx(true_peak(task, sizes, 2, **given), rel=0.01)


@pytest.mark.nightly
def test_more_peaks_take_more_and_longer_peptides_do_not_as_each_answer_has_all_its_places():
    traced = tracer(SHALLOW, least=SIZES[0])
    of = [{"peaks": 20, "residues": 8}, {"peaks": 40, "residues": 8}, {"peaks": 20, "residues": 16}]
    few, many, longer = (traced.micro(MemoryChoice(), {**sizes, ITEMS: 8}).again.peak_bytes for sizes in of)
    assert many > 1.1 * few
    assert longer == pytest.approx(few, rel=1e-4)


# ---- what it says ----


@pytest.mark.nightly
def test_it_learns_a_handful_of_peptides():
    task = replace(SHALLOW, smoothing=0.0, precursor_weight=0.02, spectrum_weight=0.2, fragment_charges=1)
    torch.manual_seed(0)
    step = Step(task, StepSettings(learning_rate=4e-3))
    batch = collated(*PEPTIDES)
    values = [step.run([batch]) for _ in range(120)]
    figures = task.metrics(said(task, step.model.eval(), batch))
    assert values[-1]["peptide"] < 0.3 * values[0]["peptide"]
    assert values[-1]["spectrum"] < 0.8 * values[0]["spectrum"]
    assert figures["residue_recall"] > 0.8
    assert figures["residue_precision"] > 0.8


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
    found = said_of("PEPTIDE", "WYFR", without("MHLAR", "precursor_mz"), found=["PEPTIDE", "WYF", "MHLAR"])
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
    with pytest.raises(ConfigError, match=r"peptide of item0 has \[Acetyl\]-, which is none") as caught:
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
    with pytest.raises(ConfigError, match="peptide of item0 has 20 residues, and longest is 16") as caught:
        collated(peptides.LETTERS)
    assert caught.value.remedy == "--set train.options.longest=20"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"width": 0}, "width"),
        ({"width": 50, "heads": 4}, "width"),
        ({"latent_steps": 0}, "latent_steps"),
        ({"max_peaks": 0}, "max_peaks"),
        ({"longest": 0}, "longest"),
        ({"bin_size": 0.0}, "bin_size"),
        ({"sigma": float("nan")}, "sigma"),
        ({"spectrum_weight": -1.0}, "spectrum_weight"),
        ({"render_chunk": -5}, "render_chunk"),
        ({"render_chunk": 100}, "render_chunk"),  # of peaks that end
        ({"render_reach": float("inf")}, "render_reach"),
        ({"width": 32, "heads": 4}, "width"),  # no room for waves
        ({"spectrum_loss": "cosine"}, "spectrum_loss"),
        ({"answer_weights": "falling"}, "answer_weights"),
        ({"precursor_loss": ""}, "precursor_loss"),
        ({"modifications": ["K[Acetyl]"]}, "modifications"),
        ({"carbamidomethyl": True, "as_published": True}, "carbamidomethyl"),
        ({"carbamidomethyl": True, "modifications": []}, "carbamidomethyl"),
        ({"smoothing": 1.5}, "smoothing"),
        ({"dropout": 1.0}, "dropout"),
        ({"tolerance_ppm": -1.0}, "tolerance_ppm"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options, name):
    with pytest.raises(ConfigError) as caught:
        DenovoRecursive(**options)
    assert caught.value.where == f"train.options.{name}"
