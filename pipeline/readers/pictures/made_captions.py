"""Writes made pictures with captions, to try out the whole path without data of one's own.

    python -m pipeline.readers.made captions FOLDER/captions.csv --count 1000 --seed 0

Each picture has two figures side by side on grey, and its caption says which: "a red disc left of a blue ring". Beside
the table are `images/`, `classes.txt` (the left figures, as in column `class`) and `merges.txt`, by which each word is
one token. An item depends only on the seed and its number. Shapes: H × W pixels, C colours.
"""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.readers.pictures.images import image_library

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (40, 70, 220), "yellow": (235, 220, 50),
    "purple": (150, 50, 190), "white": (245, 245, 245), "black": (15, 15, 15), "orange": (240, 140, 30),
}  # fmt: skip
FIGURES = ("disc", "square", "ring", "cross")
CLASSES = tuple(f"{colour} {figure}" for colour in COLOURS for figure in FIGURES)
SIDE = 48  # pixels
WORDS = (*COLOURS, *FIGURES, "left", "of")
COLUMNS = ("id", "split", "filepath", "title", "class")


class MadePicture(NamedTuple):
    """A made picture and what its caption says."""

    id: str
    split: str
    pixel_HWC: NDArray[np.uint8]
    left: str
    right: str

    @property
    def caption(self) -> str:
        """What is to be seen."""
        return f"a {self.left} left of a {self.right}"


def write_captions(path: Path, made: Iterator[MadePicture]) -> None:
    """Write a table, its pictures, the names of classes and the merges of its words."""
    folder = path.parent / "images"
    folder.mkdir(parents=True, exist_ok=True)
    (path.parent / "classes.txt").write_text("\n".join([*CLASSES, ""]), encoding="utf-8")
    (path.parent / "merges.txt").write_text("\n".join(["#version: made", *merges(WORDS), ""]), encoding="utf-8")
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", lineterminator="\n")
        rows.writerow(COLUMNS)
        for picture in made:
            name = f"{picture.id}.png"
            (folder / name).write_bytes(png(picture.pixel_HWC))
            rows.writerow([picture.id, picture.split, f"images/{name}", picture.caption, picture.left])


def picture(seed: int, number: int, split: str) -> MadePicture:
    """Return a picture of two figures, each somewhere in its half."""
    rng = np.random.default_rng((seed, number))
    left, right = (CLASSES[kind] for kind in rng.integers(len(CLASSES), size=2))
    pixel_HWC = rng.integers(100, 140, (SIDE, SIDE, 3)).astype(np.uint8)
    for half, name in enumerate((left, right)):
        colour, figure = name.split()
        centre = rng.uniform((0.35, 0.2 + 0.5 * half), (0.65, 0.3 + 0.5 * half)) * SIDE
        pixel_HWC[_is_in(figure, centre, float(rng.uniform(0.14, 0.2)) * SIDE)] = COLOURS[colour]
    return MadePicture(f"made-{number:07d}", split, pixel_HWC, left, right)


def _is_in(figure: str, centre: NDArray[np.float64], reach: float) -> NDArray[np.bool_]:
    """Return which pixels a figure covers."""
    down_HW, right_HW = np.mgrid[:SIDE, :SIDE] - centre[:, None, None]
    far_HW, wide_HW = np.hypot(down_HW, right_HW), np.maximum(abs(down_HW), abs(right_HW))
    narrow_HW = np.minimum(abs(down_HW), abs(right_HW))
    covered: dict[str, NDArray[np.bool_]] = {
        "disc": far_HW < reach,
        "square": wide_HW < 0.9 * reach,
        "ring": (far_HW < reach) & (far_HW > 0.55 * reach),
        "cross": (wide_HW < reach) & (narrow_HW < 0.3 * reach),
    }
    return covered[figure]


def merges(words: Iterable[str]) -> list[str]:
    """Return the lines of a file of merges by which each of these words is one token."""
    rank: dict[tuple[str, str], int] = {}
    for word in words:
        parts = [*word[:-1], f"{word[-1]}</w>"]
        while len(parts) > 1:
            known = [place for place in range(len(parts) - 1) if (parts[place], parts[place + 1]) in rank]
            place = min(known, key=lambda place: rank[parts[place], parts[place + 1]]) if known else 0
            rank.setdefault((parts[place], parts[place + 1]), len(rank))
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [f"{left} {right}" for left, right in rank]


def png(pixel_HWC: NDArray[np.uint8]) -> bytes:
    """Return the bytes of a picture's file."""
    file = io.BytesIO()
    image_library().fromarray(pixel_HWC).save(file, "PNG")
    return file.getvalue()
