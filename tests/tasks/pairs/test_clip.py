"""CLIP's towers with published weights against what openai's and Hugging Face's own code gave."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.readers.byte_pairs import BytePairs, TooLong
from pipeline.readers.captions import Captions
from pipeline.tasks.contrastive_pair import ContrastivePair
from pipeline.tasks.pairs.pair_towers import CLIP, CLIP_TRANSFORMERS, FORMS, ImageBatch, TextBatch, options_of
from pipeline.training.checkpoints.trained_weights import load_pretrained, stored_weights
from tests.reference import checkpoint, document, recorded, transformers_folder
from tests.tasks.originals import CLIP_FILES, MERGES, clip_features, clip_logits, clip_task, clip_texts, clip_with, off
from tests.tasks.reader_items import batch_of

CLOSE, LOSS = 1e-4, 1e-5


def half_file():
    return checkpoint("clip/openai_half.pt")


def hugging_file():
    return transformers_folder() / "model.safetensors"


def half():
    return stored_weights(half_file())


def hugging():
    return stored_weights(hugging_file())


def loss_of(model):
    """Return the task's own loss of the reference batch."""
    image, text = clip_features(model)
    rows = {"left": torch.nn.functional.normalize(image, dim=-1), "right": torch.nn.functional.normalize(text, dim=-1)}
    total, weight = clip_task().contrast(model, rows)["pairs"]
    return total / weight


@torch.no_grad()
def test_features_and_logits_are_openais():
    model, outputs = clip_with(recorded("clip/state")), recorded("clip/outputs")
    image, text = clip_features(model)
    assert off(image, outputs["openai.image_features"]) < CLOSE
    assert off(text, outputs["openai.text_features"]) < CLOSE
    assert off(model.left.features(recorded("clip/inputs")["image"]), outputs["openai.image_features_of_files"]) < CLOSE
    assert off(clip_logits(model), outputs["openai.logits_per_image"]) < CLOSE
    assert off(clip_logits(model).T, outputs["openai.logits_per_text"]) < CLOSE


@torch.no_grad()
def test_embeddings_and_logits_are_hugging_faces():
    model, outputs = clip_with(hugging(), CLIP_TRANSFORMERS), recorded("clip/outputs")
    for found, side in zip(clip_features(model), ("image", "text"), strict=True):
        assert off(torch.nn.functional.normalize(found, dim=-1), outputs[f"transformers.{side}_embeds"]) < CLOSE
    assert off(clip_logits(model), outputs["transformers.logits_per_image"]) < CLOSE


@torch.no_grad()
def test_half_precision_weights_are_read_as_single():
    tensors = half()
    assert {one.dtype for one in tensors.values() if one.is_floating_point()} == {torch.float16, torch.float32}
    model = clip_with(tensors)
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert off(clip_logits(model), recorded("clip/outputs")["openai.half_weights.logits_per_image"]) < CLOSE


def test_loss_and_gradients_are_the_originals():
    model, outputs = clip_with(recorded("clip/state")), recorded("clip/outputs")
    loss = loss_of(model)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(outputs["openai.loss"]), rel=LOSS)
    own = FORMS[CLIP].write({name: one.grad for name, one in model.named_parameters()})
    names = [name.removeprefix("openai.gradient.") for name in outputs if name.startswith("openai.gradient.")]
    assert len(names) == 5
    for name in names:
        expected = outputs[f"openai.gradient.{name}"]
        assert off(own[name], expected) < CLOSE * max(1.0, float(expected.abs().max()))
    with torch.no_grad():
        apart = clip_with(hugging(), CLIP_TRANSFORMERS)
        for name in ("transformers.loss", "transformers.loss_with_mask"):
            assert float(loss_of(apart)) == pytest.approx(float(outputs[name]), rel=LOSS)


@torch.no_grad()
def test_what_stands_behind_an_end_changes_nothing_so_that_texts_need_no_padding():
    model = clip_with(recorded("clip/state"))
    whole = clip_texts()
    short = whole.end_B.argsort()[:3]
    whole = TextBatch(whole.token_BL[short], whole.end_B[short])
    longest = int(whole.end_B.max()) + 1
    assert longest < whole.token_BL.shape[1]
    other = whole.token_BL.clone()
    for row, end in enumerate(whole.end_B.tolist()):
        other[row, end + 1 :] = 7
    expected = model.right.features(whole)
    assert off(model.right.features(TextBatch(whole.token_BL[:, :longest], whole.end_B)), expected) < CLOSE
    assert off(model.right.features(TextBatch(other, whole.end_B)), expected) < CLOSE


@pytest.mark.parametrize("form", FORMS)
def test_every_half_precision_number_is_the_same_after_in_and_out(form):
    tensors = half()
    model = clip_with(tensors)
    if form == CLIP_TRANSFORMERS:  # by way of the other form, too
        model.load_state_dict(FORMS[form].read(FORMS[form].write(model.state_dict())))
    back = FORMS[CLIP].write(model.state_dict())
    assert all(torch.equal(back[name], tensor.float()) for name, tensor in tensors.items() if name in back)
    assert set(tensors) - set(back) == {"input_resolution", "context_length", "vocab_size"}


@pytest.mark.parametrize(("path", "form"), [(half_file, CLIP), (hugging_file, CLIP_TRANSFORMERS)], ids=FORMS)
def test_a_training_begins_with_published_weights_and_a_fresh_head_for_classes(path, form):
    classed = ContrastivePair(**options_of(stored_weights(path())), classes=("cat", "dog"), class_weight=1.0)
    model = classed.model()
    report = load_pretrained(model, path())
    assert (report.form, report.fresh) == (form, ("classes.weight", "classes.bias"))
    assert set(report.left) == ({"input_resolution", "context_length", "vocab_size"} if form == CLIP else set())
    plain = clip_with(stored_weights(path()), form).state_dict()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in plain.items())


def test_each_form_knows_its_own_names_and_no_others():
    forms = {CLIP: recorded("clip/state"), CLIP_TRANSFORMERS: hugging()}
    for name, form in FORMS.items():
        assert [other for other, tensors in forms.items() if form.knows(tensors)] == [name]
        assert not form.knows(["visual.layer1.0.conv1.weight", "visual.attnpool.positional_embedding"])  # a ResNet


def test_the_published_model_has_as_many_parameters_of_the_same_shapes():
    with torch.device("meta"):
        model = ContrastivePair(left="images", right="text", right_most=77).model()
    shapes = {name: list(one.shape) for name, one in FORMS[CLIP].write(model.state_dict()).items()}
    facts = document("clip/hparams")
    assert shapes == facts["shapes_full_vit_b_32"]
    assert sum(one.numel() for one in model.parameters()) == facts["parameters_full_vit_b_32"] == 151_277_313


def test_a_fresh_model_begins_with_openais_temperature_and_exact_gelu_is_an_option():
    assert math.isclose(float(clip_task().model().log_scale.detach()), math.log(1 / 0.07), rel_tol=1e-6)
    plain, exact = (clip_with(recorded("clip/state"), exact_gelu=exact) for exact in (False, True))
    with torch.no_grad():
        assert 1e-4 < off(clip_logits(exact), clip_logits(plain)) < 1


@pytest.fixture(scope="module")
def pairs():
    return BytePairs.read(MERGES, where="data.options.merges")


def test_tokens_of_captions_are_openais(pairs):
    facts = document("clip/tokens")
    assert (pairs.start, pairs.start + 1) == (facts["start"], facts["end"])
    assert len(facts["tokens"]) == 8
    for text, tokens in facts["tokens"].items():
        assert pairs.encoded(text, facts["context"]) == tokens


def test_a_longer_text_is_refused_and_cut_with_the_end_last(pairs):
    text = "dog " * 76
    with pytest.raises(TooLong, match="78 tokens"):
        pairs.encoded(text)
    cut = pairs.encoded(text, cut=True)
    assert cut == [pairs.start, *[1929] * 75, pairs.start + 1]


def entries():
    """The four pictures with their captions, in the order of the table."""
    classes = ["car", "van", "bus", "cat"]
    reader = Captions(CLIP_FILES / "captions.csv", merges=MERGES.name, label="make", classes=classes, size=32)
    return list(reader.entries())


def batch():
    found = entries()
    return batch_of([entry.arrays for entry in found], [entry.id for entry in found])


def pixels():
    return torch.stack([item.values["left.image"] for item in batch().items])


def test_images_are_prepared_as_the_original_prepares_them():
    assert torch.equal(
        clip_with(recorded("clip/state")).left.shown(ImageBatch(pixels())), recorded("clip/inputs")["image"]
    )


def test_the_task_takes_what_the_reader_gives():
    wide = replace(clip_task(), vocabulary=49408)
    (total, weight) = wide.loss(wide.model(), wide.collate(batch().items[:], np.random.default_rng(0)))["pairs"]
    assert weight == 4
    assert torch.isfinite(total)
    assert [int(entry.arrays["class"]) for entry in entries()] == [0, 1, 2, 3]
