"""What goes into CLIP, against the originals' own: tokens of captions, and images as they were prepared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.readers.byte_pairs import BytePairs, TooLong
from pipeline.readers.captions import Captions
from pipeline.tasks.pairs.pair_towers import ImageBatch
from tests.reference import document, recorded
from tests.tasks.originals import CLIP_FILES, MERGES, clip_task, clip_with, off
from tests.tasks.reader_items import batch_of


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


@torch.no_grad()
def test_features_of_the_files_are_openais():
    model = clip_with(recorded("clip/state"))
    found = model.left.features(model.left.shown(ImageBatch(pixels())))
    assert off(found, recorded("clip/outputs")["openai.image_features_of_files"]) < 1e-4


def test_the_task_takes_what_the_reader_gives():
    wide = replace(clip_task(), vocabulary=49408)
    (total, weight) = wide.loss(wide.model(), wide.collate(batch().items[:], np.random.default_rng(0)))["pairs"]
    assert weight == 4
    assert torch.isfinite(total)
    assert [int(entry.arrays["class"]) for entry in entries()] == [0, 1, 2, 3]
