"""Made pictures with captions: a disc or a square of a colour on grey; as items, and as a small task for them."""

from __future__ import annotations

import numpy as np

from pipeline.readers.byte_pairs import BytePairs
from pipeline.tasks.contrastive_pair import ContrastivePair
from tests.tasks.reader_items import batch_of

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "white": (240, 240, 240)}
SHAPES = ("disc", "square")
SIZE = 16
NAMES = tuple(f"{colour} {shape}" for colour in COLOURS for shape in SHAPES)
TEXT = BytePairs()
CLIP = ContrastivePair(
    left="images", right="text", image_size=SIZE, patch=4, image_width=16, image_layers=2, image_heads=2,
    vocabulary=514, right_most=24, width=16, layers=2, heads=2, out=8,
)  # fmt: skip
CLASSED = ContrastivePair(
    **{name: getattr(CLIP, name) for name in CLIP.__dataclass_fields__}
    | {"classes": NAMES, "class_weight": 0.5, "templates": ("a {}", "one {} on grey")}
)


def picture(seed, kind=None):
    """Return a picture, its caption, and the number of its class."""
    rng = np.random.default_rng(seed)
    number = int(rng.integers(len(NAMES))) if kind is None else kind
    colour, shape = NAMES[number].split()
    down, right, reach = rng.uniform(6, 10), rng.uniform(6, 10), rng.uniform(3, 5)
    far_HW = np.stack(np.mgrid[:SIZE, :SIZE]) - np.array([down, right])[:, None, None]
    is_in_HW = (np.hypot(*far_HW) if shape == "disc" else np.abs(far_HW).max(0)) < reach
    pixel_HWC = rng.integers(90, 130, (SIZE, SIZE, 3)).astype(np.uint8)
    pixel_HWC[is_in_HW] = COLOURS[colour]
    return pixel_HWC, f"a {NAMES[number]}", number


def item(seed, kind=None, known=True):
    pixel_HWC, text, number = picture(seed, kind)
    return {
        "left.image": pixel_HWC,
        "right.token": np.array(TEXT.encoded(text, 24), np.int32),
        "class": np.array(number if known else -1, np.int64),
    }


def items(count, **about):
    return [item(seed, **about) for seed in range(count)]


def collated(values, task=CLASSED, ids=()):
    return task.collate(batch_of(values, ids).items[:], np.random.default_rng(0))
