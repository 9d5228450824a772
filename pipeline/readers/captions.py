"""`Captions`: images with a text each, from a table of paths and captions, or from webdataset tars.

    data: {source: reader, reader: "pipeline.readers.captions:Captions", path: data/captions.csv,
           options: {merges: merges.txt}}

A table is UTF-8 with a header, CSV or TSV (a `.csv` whose header is parted by tabs is read so, as open_clip writes it).
A tar has `NAME.jpg` (or .png, .webp …) and `NAME.txt` one after the other; a folder may hold several tars. Images are
decoded when they are read. Shapes: H × W pixels, C colours, L tokens.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.readers.byte_pairs import CONTEXT, BytePairs, TooLong
from pipeline.readers.entry import (
    SCAN_AGAIN,
    Bytes,
    Count,
    Opened,
    UnusableEntry,
    cannot_read,
    check_option,
    check_types,
    checked_path,
    entry_id,
    entry_rejection,
)
from pipeline.readers.images import MOST_PIXELS, SUFFIXES, class_names, decoded_image, image_library
from pipeline.readers.table_rows import MOST_ROW_BYTES, PARTED_BY, TextTable
from pipeline.records import Entry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from pipeline.records import Rejection

    Arrays = Mapping[str, NDArray[Any]]
    PairArrays = Callable[["Bytes", "TarPair"], Mapping[str, Any]]

TAR, TAR_TEXT = ".tar", ".txt"
USUAL = {
    "image": ("filepath", "image", "image_path", "image_filename", "file_name", "filename", "path"),
    "caption": ("title", "caption", "text"),
    "id": ("id",),
    "split": ("split",),
    "label": (),
}
REFUSE, CUT = LONG = ("refuse", "cut")
PLACE = re.compile(r"\{(\w+)\}")
MOST_BYTES = 1 << 28  # of an image's file


@dataclass(eq=False)
class Captions:
    """The images and captions of a table or of tars.

    Arrays: `left.image` uint8 [H, W, C], `right.token` int32 [L], with the start and the end; `class` int64, -1 where
    the cell of `label` is empty. A place is [offset, length] in a table, or [tar, image offset, bytes, text
    offset, bytes].
    """

    path: Path
    image: str = ""  # column of paths; a usual name if there is one: filepath, image, …
    caption: str = ""  # column of texts; a usual name if there is one: title, caption, text
    template: str = ""  # instead of a column: "a photo of a {make} {model} car", of columns
    images: str = ""  # folder that paths start from: the table's
    label: str = ""  # column of classes
    classes: Any = ()  # their names, or a file with one a line: what numbers them
    id: str = ""  # `id` if it is there; else the image's name and the number of the row
    split: str = ""  # `split` if it is there
    size: Count = 224  # pixels of a side
    merges: str = ""  # file of byte pairs, from the table's folder; without, each byte is a token
    context: Count = CONTEXT  # tokens of a text at most
    long: str = REFUSE  # a longer text is refused, or cut
    most_pixels: Count = MOST_PIXELS  # of an image as it is in its file

    def __post_init__(self) -> None:
        self._check_options()
        self.path = checked_path(Path(self.path))
        self._folder = self.path if self.path.is_dir() else self.path.parent
        image_library()
        self.names = class_names(self.classes, where="data.options.classes", beside=self._folder)
        self.pairs = BytePairs.read(self._folder / self.merges if self.merges else None, where="data.options.merges")
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._bytes = Opened(Bytes)
        if self.label and not self.names:
            what, remedy = "the number of each class is unknown", "list the classes, or name a file with one a line"
            raise ConfigError(what, where="data.options.classes", remedy=remedy)
        if self._tars:
            self._refuse_columns()
        else:
            self._read_header()

    def _check_options(self) -> None:
        check_types(self)
        check_option("long", self.long, f"{REFUSE} or {CUT}", fits=self.long in LONG)
        check_option("context", self.context, "a whole number from 2", fits=self.context > 1)

    @cached_property
    def _tars(self) -> tuple[Path, ...]:
        """The tars that are read; none where it is a table."""
        if self.path.is_dir():
            return tuple(sorted(self.path.glob(f"*{TAR}")))
        return (self.path,) if self.path.suffix.lower() == TAR else ()

    def _refuse_columns(self) -> None:
        for option in ("image", "caption", "template", "images", "label", "id", "split"):
            if getattr(self, option):
                problem = f"tars have no columns: {option} is of a table"
                raise ConfigError(problem, where=f"data.options.{option}", remedy="remove it")

    def files(self) -> tuple[Path, ...]:
        """Return the table or the tars, and the file of merges; images are looked at when they are read."""
        named = [self.merges, self.classes if isinstance(self.classes, str) else ""]
        return (*(self._tars or (self.path,)), *(self._folder / name for name in named if name))

    def entries(self) -> Iterator[Entry | Rejection]:
        """Yield every image with its text as an entry, or its rejection."""
        return self._of_tars(self._of_pair) if self._tars else self._of_table(self._of_cells)

    def headers(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the id of each pair, and the path of its image and its caption; no image is decoded."""
        for entry in self._of_tars(_texts_of_pair) if self._tars else self._of_table(self._texts):
            if isinstance(entry, Entry):
                yield entry.id, entry.arrays

    def read(self, place: list[int]) -> Arrays:
        """Return the arrays of the pair at a place."""
        path = self._tars[place[0]] if self._tars else self.path
        try:
            data = self._bytes(path)
            if self._tars:
                return self._of_pair(data, TarPair("", 0, (place[1], place[2]), (place[3], place[4])))
            return self._of_cells(self._cells(data.at(*place)))
        except UnusableEntry as error:
            raise DataError(f"no pair at {place}: {error}", where=str(path), remedy=SCAN_AGAIN) from error

    # Tables

    def _read_header(self) -> None:
        """Read the header; columns that are needed, or named, must be in it exactly once."""
        if self.path.suffix.lower() not in PARTED_BY or not self.path.is_file():
            problem = f"captions are read from {', '.join(PARTED_BY)}, {TAR}, or a folder of {TAR}"
            raise ConfigError(problem, where=str(self.path), remedy="set data.path to one of these")
        self._table = TextTable.read(self.path)
        required = {"image": True, "caption": not self.template}
        found = {
            option: self._table.find(option, getattr(self, option), names, required=required.get(option, False))
            for option, names in USUAL.items()
            if option != "caption" or not self.template
        }
        found |= {f"template.{name}": self._table.column("template", name) for name in PLACE.findall(self.template)}
        self._columns = {meaning: name for meaning, name in found.items() if name}

    def _name(self, cells: Mapping[str, str], number: int) -> str:
        """Return the id of a row: its own, or the image's name and the row's number."""
        stem = Path(cells["image"]).stem if cells.get("image") else ""
        return cells.get("id", "") or (f"{stem}-{number}" if stem else "")

    def _cells(self, line: bytes) -> dict[str, str]:
        """Return the relevant cells of a line, by meaning."""
        return {meaning: cell.strip() for meaning, cell in self._table.cells(line, self._columns).items()}

    def _of_table(self, arrays_of: Callable[[Mapping[str, str]], Mapping[str, Any]]) -> Iterator[Entry | Rejection]:
        return self._table.entries(self._cells, arrays_of, self._name)

    def _texts(self, cells: Mapping[str, str]) -> dict[str, str]:
        """Return the path of a row's image and its caption."""
        path = str(self._path(cells["image"]))
        if self.template:
            return {"image": path, "caption": PLACE.sub(lambda found: cells[f"template.{found[1]}"], self.template)}
        return {"image": path, "caption": cells["caption"]}

    def _of_cells(self, cells: Mapping[str, str]) -> Arrays:
        texts = self._texts(cells)
        arrays = dict(self._arrays(_content(Path(texts["image"])), texts["caption"].encode()))
        if self.label:
            arrays["class"] = np.array(self._class(cells["label"]), np.int64)
        return arrays

    def _path(self, text: str) -> Path:
        if not text:
            raise UnusableEntry("no image path")
        return self._folder / self.images / text

    def _class(self, name: str) -> int:
        if name and name not in self._numbers:
            raise UnusableEntry(f"the class {name!r} is not in data.options.classes")
        return self._numbers[name] if name else -1

    # Tars

    def _of_tars(self, arrays_of: PairArrays) -> Iterator[Entry | Rejection]:
        for number, path in enumerate(self._tars):
            for found in tar_pairs(path):
                yield self._of_tar(number, path, found, arrays_of)

    def _of_pair(self, data: Bytes, found: TarPair) -> Arrays:
        return self._arrays(data.at(*found.image), data.at(*found.text))

    def _of_tar(self, number: int, path: Path, found: TarPair, arrays_of: PairArrays) -> Entry | Rejection:
        name = entry_id(f"{path.stem}-{found.name}" if len(self._tars) > 1 else found.name, path, number)
        try:
            if found.problem:
                raise UnusableEntry(found.problem)
            place = [number, *found.image, *found.text]
            return Entry(name, place, arrays_of(self._bytes(path), found), "", f"{path.name}:{name}")
        except UnusableEntry as error:
            return entry_rejection(name, error, "", path, found.member)

    # Both

    def _arrays(self, image: bytes, text: bytes) -> Arrays:
        tokens = self._tokens(text)  # which cost less, and are wrong as often
        return {
            "left.image": decoded_image(image, self.size, self.most_pixels),
            "right.token": np.array(tokens, np.int32),
        }

    def _tokens(self, text: bytes) -> Sequence[int]:
        try:
            caption = text.decode()
        except UnicodeDecodeError as error:
            raise UnusableEntry(f"not UTF-8 text: byte {error.start} is 0x{text[error.start]:02x}") from error
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


class _TarBytes(FileIO):
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


def _pair(stem: str, parts: Iterable[tuple[int, tarfile.TarInfo]]) -> TarPair:
    image = text = (0, 0)
    first = -1
    for number, member in parts:
        first = number if first < 0 else first
        suffix = PurePosixPath(member.name).suffix.lower()
        place = (member.offset_data, member.size)
        image = place if suffix in SUFFIXES else image
        text = place if suffix == TAR_TEXT else text
    problem = _problem("image", image, MOST_BYTES) or _problem("text", text, MOST_ROW_BYTES)
    return TarPair(stem, first, image, text, problem)


def _problem(part: str, place: tuple[int, int], most_bytes: int) -> str:
    """Say what is wrong with the image or the text of a pair; "" where nothing is."""
    if place == (0, 0):
        return f"there is no {part} of this name"
    return f"the {part} has {place[1]:,} bytes, at most {most_bytes:,} are allowed" if place[1] > most_bytes else ""
