"""What openai's CLIP and Hugging Face's made, read from beside the project: weights, inputs, outputs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.tasks.contrastive_pair import ContrastivePair
from pipeline.tasks.pairs.clip_names import CLIP, FORMS, options_of
from pipeline.tasks.pairs.pair_towers import TextBatch

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "originals" / "clip"
FILES = FOLDER / "files"
MERGES = FILES / "bpe_simple_vocab_16e6.txt.gz"
END = 999

needs_original = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="what the original made (../shared/originals/clip) is not beside this checkout"
)


@cache
def stored(name):
    return load_file(FOLDER / f"{name}.safetensors")


@cache
def told(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


@cache
def task():
    return ContrastivePair(**options_of(stored("state")))


def model_with(tensors, form=CLIP, **options):
    """Return a model with published weights, which it must have all."""
    made = ContrastivePair(**options_of(tensors) | options)
    model = made.model()
    left = FORMS[form].left
    model.load_state_dict({name: one for name, one in FORMS[form].read(tensors).items() if name not in left})
    return model.eval()


def texts():
    """The texts of the reference, padded to all places as the originals pad them."""
    token_BL = stored("inputs")["text"]
    return TextBatch(token_BL, token_BL.argmax(-1))


def colours(name="image_noise"):
    return stored("inputs")[name]


def off(found, expected):
    """The largest difference."""
    return float((found.detach().double() - expected.double()).abs().max())


def features(model):
    """Features of both sides as the towers have them, before they are made of length 1."""
    return model.left.features(colours()), model.right.features(texts())


def logits(model):
    image, text = (torch.nn.functional.normalize(one, dim=-1) for one in features(model))
    return model.scale() * image @ text.T
