"""`Captions`: images with a text each, from a table of paths and captions, or from webdataset tars.

    data: {source: reader, reader: "pipeline.readers.captions:Captions", path: data/captions.csv,
           options: {merges: merges.txt}}

A table is UTF-8 with a header, CSV or TSV (a `.csv` whose header is parted by tabs is read so, as open_clip writes it).
A tar has `NAME.jpg` (or .png, .webp …) and `NAME.txt` one after the other; a folder may hold several tars. Images are
decoded when they are read. Shapes: H × W pixels, C colours, L tokens.
"""

from __future__ import annotations

import io
import re
import struct
import tarfile
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from pipeline.command_line import install_extra
from pipeline.errors import ConfigError, DataError
from pipeline.readers.byte_pairs import CONTEXT, BytePairs, TooLong
from pipeline.readers.entry import (
    Bytes,
    Column,
    Count,
    UnusableEntry,
    cannot_read,
    check_option,
    column_of,
    decoded,
    entry_id,
    entry_or_rejection,
)
from pipeline.readers.table_rows import FOLDER, MOST_ROW_BYTES, TableReader
from pipeline.records import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from pipeline.records import Rejection

    Arrays = Mapping[str, NDArray[Any]]
    PairArrays = Callable[["Bytes", "TarPair"], Mapping[str, Any]]

TAR, TAR_TEXT = ".tar", ".txt"
IMAGE_COLUMNS = ("filepath", "image", "image_path", "image_filename", "file_name", "filename", "path")  # usual columns
CAPTION_COLUMNS = ("title", "caption", "text")
REFUSE, CUT = LONG = ("refuse", "cut")
PLACE = re.compile(r"\{(\w+)\}")
MOST_BYTES = 1 << 28  # of an image's file
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# By name: Pillow would also hand a file to a program, such as PostScript to Ghostscript, whatever its suffix.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA")
MOST_PIXELS = 1 << 26
BROKEN = (OSError, SyntaxError, ValueError, TypeError, EOFError, IndexError, KeyError, struct.error, zlib.error)


@dataclass(eq=False)
class Captions(TableReader):
    """The images and captions of a table or of tars.

    Arrays: `left.image` uint8 [H, W, C], `right.token` int32 [L], with the start and the end; `class` int64, -1 where
    the cell of `label` is empty. A place is [offset, length] in a table, or [tar, image offset, bytes, text
    offset, bytes]. Where there is no `id`, it is the image's name and the number of the row.
    """

    image: str = ""  # column of paths; a usual name if there is one: filepath, image, …
    caption: str = ""  # column of texts; a usual name if there is one: title, caption, text
    template: str = ""  # instead of a column: "a photo of a {make} {model} car", of columns
    images: str = ""  # folder that paths start from: the table's
    label: str = ""  # column of classes
    classes: Any = ()  # their names, or a file with one a line: what numbers them
    size: Count = 224  # pixels of a side
    merges: str = ""  # file of byte pairs, from the table's folder; without, each byte is a token
    context: Count = CONTEXT  # tokens of a text at most
    long: str = REFUSE  # a longer text is refused, or cut
    most_pixels: Count = MOST_PIXELS  # of an image as it is in its file
    what: ClassVar = "captions"
    others: ClassVar = (TAR, FOLDER)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_option("long", self.long, f"{REFUSE} or {CUT}", fits=self.long in LONG)
        check_option("context", self.context, "a whole number from 2", fits=self.context > 1)
        self._folder = self.path if self.path.is_dir() else self.path.parent
        image_library()
        self.names = class_names(self.classes, where="data.options.classes", beside=self._folder)
        self.pairs = BytePairs.read(self._folder / self.merges if self.merges else None, where="data.options.merges")
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._tars = tuple(sorted(self.path.glob(f"*{TAR}"))) if self.path.is_dir() else (self.path,)
        if not self._tars:
            remedy = f"set data.path to a table, a {TAR} file, or a folder of them"
            raise ConfigError(f"the folder has no {TAR} file", where=str(self.path), remedy=remedy)
        if self.label and not self.names:
            what, remedy = "the number of each class is unknown", "list the classes, or name a file with one a line"
            raise ConfigError(what, where="data.options.classes", remedy=remedy)
        for option in ("image", "caption", "template", "images", "label", "id", "split"):
            if self._table is None and getattr(self, option):
                problem = f"tars have no columns: {option} is of a table"
                raise ConfigError(problem, where=f"data.options.{option}", remedy="remove it")

    def _columns(self) -> list[Column]:
        placed = [
            column_of("template", name)._replace(meaning=f"template.{name}") for name in PLACE.findall(self.template)
        ]
        captions = placed if self.template else [self._column("caption", *CAPTION_COLUMNS, needed=True)]
        return [
            *super()._columns(),
            self._column("image", *IMAGE_COLUMNS, needed=True),
            *captions,
            self._column("label"),
        ]

    def files(self) -> tuple[Path, ...]:
        """Return the table or the tars, and the file of merges; images are looked at when they are read."""
        named = [self.merges, self.classes if isinstance(self.classes, str) else ""]
        return (*self._tars, *(self._folder / name for name in named if name))

    def entries(self) -> Iterator[Entry | Rejection]:
        """Yield every image with its text as an entry, or its rejection."""
        return self._of_tars(self._of_pair) if self._table is None else super().entries()

    def headers(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the id of each pair, and the path of its image and its caption; no image is decoded."""
        for entry in self._of_tars(_texts_of_pair) if self._table is None else self._of_table(self._texts):
            if isinstance(entry, Entry):
                yield entry.id, entry.arrays

    def _at(self, place: list[int]) -> Arrays:
        if self._table is not None:
            return super()._at(place)
        return self._of_pair(
            self._bytes(self._tars[place[0]]), TarPair("", 0, (place[1], place[2]), (place[3], place[4]))
        )

    # Tables

    def _name(self, row: Mapping[str, Any], number: int) -> str:
        stem = Path(row["image"].strip()).stem if row.get("image") else ""
        return super()._name(row, number).strip() or (f"{stem}-{number}" if stem else "")

    def _texts(self, row: Mapping[str, str]) -> dict[str, str]:
        """Return the path of a row's image and its caption."""
        if not (image := row["image"].strip()):
            raise UnusableEntry("no image path")
        caption = PLACE.sub(lambda found: row[f"template.{found[1]}"].strip(), self.template)
        path = str(self._folder / self.images / image)
        return {"image": path, "caption": caption if self.template else row["caption"].strip()}

    def _arrays(self, row: Mapping[str, Any]) -> Arrays:
        texts = self._texts(row)
        arrays = self._of_bytes(_content(Path(texts["image"])), texts["caption"].encode())
        return {**arrays, "class": np.array(self._class(row["label"].strip()), np.int64)} if self.label else arrays

    def _class(self, name: str) -> int:
        if name and name not in self._numbers:
            raise UnusableEntry(f"the class {name!r} is not in data.options.classes")
        return self._numbers[name] if name else -1

    # Tars

    def _of_tars(self, arrays_of: PairArrays) -> Iterator[Entry | Rejection]:
        for number, path in enumerate(self._tars):
            for found in tar_pairs(path):
                name = entry_id(f"{path.stem}-{found.name}" if len(self._tars) > 1 else found.name, path, number)
                arrays = UnusableEntry(found.problem) if found.problem else partial(arrays_of, self._bytes(path), found)
                yield entry_or_rejection(name, [number, *found.image, *found.text], arrays, "", path, found.member)

    def _of_pair(self, data: Bytes, found: TarPair) -> Arrays:
        return self._of_bytes(data.at(*found.image), data.at(*found.text))

    # Both

    def _of_bytes(self, image: bytes, text: bytes) -> Arrays:
        tokens = self._tokens(text)  # which cost less, and are wrong as often
        return {
            "left.image": decoded_image(image, self.size, self.most_pixels),
            "right.token": np.array(tokens, np.int32),
        }

    def _tokens(self, text: bytes) -> Sequence[int]:
        caption = decoded(text)
        if not caption.strip():
            raise UnusableEntry("the caption is empty")
        try:
            return self.pairs.encoded(caption, self.context, cut=self.long == CUT)
        except TooLong as error:
            raise UnusableEntry(f"the caption is too long: {error} (data.options.long: {CUT} cuts it)") from error


def _content(path: Path) -> bytes:
    """Return the bytes of an image file."""
    try:
        if not path.is_file():
            raise UnusableEntry(f"{path} {'is not a regular file' if path.exists() else 'is missing'}")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise UnusableEntry(f"{path} has {size:,} bytes, at most {MOST_BYTES:,} are allowed")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise UnusableEntry(f"{path} cannot be read: {error}") from error


class TarPair(NamedTuple):
    """An image and its text in a tar: where the bytes of each begin, and how many they are."""

    name: str
    member: int  # its number in the tar
    image: tuple[int, int] = (0, 0)
    text: tuple[int, int] = (0, 0)
    problem: str = ""


class _TarBytes(io.FileIO):
    """A tar of which no header is read that would take much memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size and size > MOST_ROW_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return super().read(size)


def _texts_of_pair(data: Bytes, found: TarPair) -> dict[str, str]:
    """Return the name of a pair's image and its caption."""
    return {"image": found.name, "caption": data.at(*found.text).decode(errors="replace").strip()}


def tar_pairs(path: Path) -> Iterator[TarPair]:
    """Yield the pairs of a tar in order; one that lacks its image or its text says so."""
    try:
        with _TarBytes(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            members = (pair for pair in enumerate(tar) if pair[1].isfile())
            for stem, parts in groupby(members, lambda pair: str(_stem(pair[1].name))):
                yield _pair(stem, list(parts))
    except tarfile.TarError as error:
        remedy = "write it again as an uncompressed tar"
        raise DataError(f"damaged tar: {error}", where=str(path), remedy=remedy) from error
    except OSError as error:
        raise cannot_read(path, error) from error


def _stem(name: str) -> PurePosixPath:
    """Return a member's name up to the first dot of its last part, which is what makes a pair."""
    path = PurePosixPath(name)
    return path.with_name(path.name.partition(".")[0] or path.name) if path.name else path


def _pair(stem: str, parts: Sequence[tuple[int, tarfile.TarInfo]]) -> TarPair:
    """Return the last image and the last text of a name, and a problem with them."""
    image = text = (0, 0)
    for _, member in parts:
        suffix = PurePosixPath(member.name).suffix.lower()
        place = (member.offset_data, member.size)
        image = place if suffix in IMAGES else image
        text = place if suffix == TAR_TEXT else text
    problems = []
    for part, (offset, size), most_bytes in (("image", image, MOST_BYTES), ("text", text, MOST_ROW_BYTES)):
        if not offset:
            problems.append(f"there is no {part} of this name")
        elif size > most_bytes:
            problems.append(f"the {part} has {size:,} bytes, at most {most_bytes:,} are allowed")
    return TarPair(stem, parts[0][0], image, text, "; ".join(problems))


# Images, as CLIP sees them: the shorter side is resized, the middle is cut out, three bytes a pixel


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
