"""The network against the original's numbers."""

from __future__ import annotations

import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.tasks.spectra.peak_transformer import DreamsForm, PeakSizes, PeakTransformer
from tests.reference import recorded
from tests.tasks.originals import HEADS, dreams_state, off, peak_model, peak_sizes, peaks_of, tokens_of

NEAR = 1e-4


@torch.no_grad()
def test_embeddings_are_the_originals():
    inputs, outputs = recorded("dreams/inputs"), recorded("dreams/outputs")
    for peaks in (100, 60):
        tokens_BLD = tokens_of(peak_model(), peaks_of(inputs[f"spec_{peaks}"]))
        assert off(tokens_BLD[:, 0], outputs[f"ssl.embedding_{peaks}"]) < NEAR
    assert off(tokens_of(peak_model(), peaks_of(inputs["spec_100"])), outputs["ssl.all_100"]) < NEAR


@torch.no_grad()
def test_spectra_one_by_one_padded_further_and_in_double_are_the_originals():
    spec_BL2, outputs = recorded("dreams/inputs")["spec_100"], recorded("dreams/outputs")
    alone = [tokens_of(peak_model(), peaks_of(one[None]))[:, 0] for one in spec_BL2]
    assert off(torch.cat(alone), outputs["ssl.embedding_100_alone"]) < NEAR
    further = torch.nn.functional.pad(spec_BL2, (0, 0, 0, 28))
    assert off(tokens_of(peak_model(), peaks_of(further))[:, 0], outputs["ssl.embedding_128_padded"]) < NEAR
    in_double = tokens_of(peak_model(dtype=torch.float64), peaks_of(spec_BL2.double()))
    assert off(in_double[:, 0], outputs["ssl.embedding_100_double"]) < 1e-10


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_what_heads_tell_is_the_originals(name):
    found = peak_model(name)(peaks_of(recorded("dreams/inputs")["spec_100"]))
    if name == "binary":
        found = found.sigmoid()
    expected = recorded("dreams/outputs")[f"{name}.prediction"]
    assert off(found, expected) < NEAR * max(float(expected.abs().max()), 1)


@torch.no_grad()
def test_what_is_told_of_masses_is_the_originals():
    model = peak_model()
    tokens_BLD = tokens_of(model, peaks_of(recorded("dreams/inputs")["spec_100"][5:6]))
    assert off(model.pretraining.mass(tokens_BLD[0, :4]), recorded("dreams/outputs")["ssl.mask_logits"]) < NEAR


@torch.no_grad()
def test_without_its_oddities_the_published_weights_tell_something_else():
    peaks, expected = peaks_of(recorded("dreams/inputs")["spec_100"]), recorded("dreams/outputs")["ssl.embedding_100"]
    mended = tokens_of(peak_model(as_published=False), peaks)[:, 0]
    assert off(mended, expected) > 1


@pytest.mark.parametrize("name", ["ssl", *HEADS])
def test_published_weights_go_in_and_out_without_a_change(name):
    before, form = dreams_state(name), DreamsForm.of(peak_sizes(name))
    assert form.knows(before)
    ours = form.read(before)
    model = PeakTransformer(peak_sizes(name))
    model.load_state_dict(ours, strict=name != "ssl")
    kept = model.state_dict()
    back = form.write({key: kept[key] for key in ours})
    assert set(back) == set(before)
    assert all(torch.equal(back[key], tensor) for key, tensor in before.items())


def test_published_weights_are_refused_where_the_network_has_no_oddities():
    form = DreamsForm.of(PeakSizes())
    for use in (form.read, form.write):
        with pytest.raises(ConfigError, match="as_published") as caught:
            use(dreams_state("ssl"))
        assert "as_published=true" in str(caught.value)
