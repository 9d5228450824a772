"""Images as CLIP sees them, the classes that they are of, and made pictures with captions for a trial without data.

The shorter side is made to size, the middle cut out, three bytes a pixel.

    python -m pipeline.readers.made captions FOLDER/captions.csv --count 1000 --seed 0

Each made picture has two figures side by side on grey, and its caption says which: "a red disc left of a blue ring".
Beside the table are `images/`, `classes.txt` (the left figures, as in column `class`) and `merges.txt`, by which each
word is one token. An item depends only on the seed and its number. Shapes: H × W pixels, C colours.
"""

from __future__ import annotations

import csv
import io
import struct
import zlib
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.command_line import install_extra
from pipeline.errors import ConfigError
from pipeline.readers.entry import UnusableEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# By name: Pillow would also hand a file to a program, such as PostScript to Ghostscript, whatever its suffix.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA")
MOST_PIXELS = 1 << 26
BROKEN = (OSError, SyntaxError, ValueError, TypeError, EOFError, IndexError, KeyError, struct.error, zlib.error)


def decoded_image(content: bytes, size: int, most_pixels: int = MOST_PIXELS) -> NDArray[np.uint8]:
    """Return the pixels of an image file [size, size, 3]; raise UnusableEntry where it is none, or not whole."""
    library = image_library()
    if not content:
        raise UnusableEntry("the image file is empty")
    try:
        with library.open(io.BytesIO(content), formats=[name for name in FORMATS if name in library.OPEN]) as image:
            if image.width * image.height > most_pixels:
                raise UnusableEntry(_too_large(f"{image.width:,} × {image.height:,} pixels", most_pixels))
            return np.asarray(_middle(image, size, library).convert("RGB"))  # in this order, as openai does it
    except (library.DecompressionBombError, library.DecompressionBombWarning) as error:
        raise UnusableEntry(_too_large(str(error), most_pixels)) from error
    except library.UnidentifiedImageError as error:
        raise UnusableEntry(f"not an image of a supported format ({', '.join(FORMATS)})") from error
    except BROKEN as error:
        raise UnusableEntry(f"the image cannot be decoded: {error}") from error


def _too_large(what: str, most_pixels: int) -> str:
    return f"the image is too large: {what} and at most {most_pixels:,} pixels are allowed (data.options.most_pixels)"


def _middle(image: Any, size: int, library: Any) -> Any:
    """Return the middle of an image whose shorter side was made to size, by bicubic with antialiasing."""
    width, height = image.size
    short = min(width, height)
    scaled = (size, int(size * height / width)) if width == short else (int(size * width / height), size)
    if scaled != (width, height):
        image = image.resize(scaled, library.Resampling.BICUBIC)
    left, top = (round((side - size) / 2) for side in scaled)
    return image.crop((left, top, left + size, top + size))


@lru_cache(1)
def image_library() -> Any:
    """Return Pillow's module for images; raise ConfigError where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        what = "reading images needs Pillow, which is not installed"
        raise ConfigError(what, where="data.reader", remedy=install_extra("images")) from error
    Image.init()  # here, and not in several threads at once
    return Image


def class_names(given: Any, *, where: str, beside: Path | None = None) -> tuple[str, ...]:
    """Return the names in their order, which is what numbers them; each may be there only once."""
    if isinstance(given, str):
        path = (beside or Path()) / given
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if given else []
        except (OSError, UnicodeDecodeError) as error:
            remedy = "give a UTF-8 file with one class a line, or list the classes"
            raise ConfigError(f"{path} cannot be read: {error}", where=where, remedy=remedy) from error
        given = [line.strip() for line in lines if line.strip()]
    names = tuple(str(name).strip() for name in given)
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"the class {twice!r} is listed twice", where=where, remedy="name each class once")
    return names


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
