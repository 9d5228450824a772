"""Images as CLIP sees them, and the names of their classes.

The shorter side is resized, the middle is cut out, three bytes a pixel. Shapes: H × W pixels, C colours.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.command_line import install_extra
from pipeline.errors import ConfigError
from pipeline.readers.entry import UnusableEntry

if TYPE_CHECKING:
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
