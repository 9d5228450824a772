"""The network against pepTRM's own: its answers, its names, and its weights to the last bit."""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeline.tasks.denovo_recursive import DenovoRecursive
from pipeline.tasks.peptides.recursive_network import COMPILED, COMPILED_FORM, FORM
from tests.reference import checkpoint, document, recorded
from tests.tasks.originals import PEPTRM, off, peptide_network, peptide_spectra

CLOSE = 1e-4


def test_answers_and_what_is_thought_are_the_originals():
    with torch.no_grad():
        logits_TBLV, latent_BLD = peptide_network().answered(peptide_spectra())
        three_TBLV = peptide_network()(peptide_spectra(), 3)
    assert off(logits_TBLV, recorded("peptrm/outputs")["logits"]) < CLOSE
    assert off(latent_BLD, recorded("peptrm/outputs")["latent"]) < CLOSE
    assert off(three_TBLV, recorded("peptrm/outputs")["logits_3_steps"]) < CLOSE


def test_a_mass_in_place_of_mz_would_be_seen():
    given = peptide_spectra()._replace(precursor_mz_B=recorded("peptrm/inputs")["nine.precursor_mass"])
    with torch.no_grad():
        logits_BLV = peptide_network()(given)[-1]
    assert off(logits_BLV, recorded("peptrm/outputs")["neutral_mass_given_instead.logits"]) < CLOSE
    assert off(logits_BLV, recorded("peptrm/outputs")["logits"][-1]) > 0.1


def test_a_compiled_model_has_its_own_names_and_keeps_them():
    state = torch.load(checkpoint("peptrm/of_a_compiled_model.pt"), weights_only=True)["model_state_dict"]
    assert all(name.startswith(COMPILED) for name in state)
    model = PEPTRM.model()
    forms = model.published_forms()
    assert [name for name, form in forms.items() if form.knows(state)] == [COMPILED_FORM]
    model.load_state_dict(forms[COMPILED_FORM].read(state))
    written = forms[COMPILED_FORM].write(model.state_dict())
    assert written.keys() == state.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in state.items())


def test_models_from_before_the_gate_have_neither_gate_nor_embedding_of_steps():
    state = recorded("peptrm/state")
    earlier = {name: one for name, one in state.items() if "gate_head" not in name and "step_emb" not in name}
    model = replace(PEPTRM, gated=False).model().eval()
    model.load_state_dict(model.published_forms()[FORM].read(earlier))
    assert model.published_forms()[FORM].write(model.state_dict()).keys() == earlier.keys()
    with torch.no_grad():
        assert off(model(peptide_spectra(), 1)[0], peptide_network()(peptide_spectra(), 1)[0]) > 0.1


def test_the_published_size_has_the_names_shapes_and_number_of_parameters_that_are_published():
    with torch.device("meta"):
        model = DenovoRecursive(as_published=True).model()
    written = model.published_forms()[FORM].write(model.state_dict())
    assert {name: list(tensor.shape) for name, tensor in written.items()} == document("peptrm/hparams")["shapes_full"]
    unused = sum(model.get_buffer(name).numel() for name in ("unused_letter",))
    assert sum(one.numel() for one in model.parameters()) + unused == document("peptrm/hparams")["parameters_full"]


def test_a_model_that_is_trained_here_says_an_end_and_modifications_and_goes_out_under_the_same_names():
    task = replace(PEPTRM, as_published=False)
    model = task.model()
    assert model.out.out_features == 24 + 8
    written = model.published_forms()[FORM].write(model.state_dict())
    assert "recursive_core.decoder.output_head.weight" in written
    assert "recursive_core.decoder.token_embedding.weight" not in written
    assert all(name.split(".")[0] in ("encoder", "recursive_core") for name in written)
