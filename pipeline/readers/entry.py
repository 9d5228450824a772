"""Shared by all readers: rejections of entries, checks of paths and options, and a cache of open files."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from pipeline.command_line import Command, quoted
from pipeline.errors import ConfigError, DataError
from pipeline.files import EXPANSION_FLOOR_BYTES, MAX_EXPANSION, PIECE_BYTES
from pipeline.records import Entry, Reason, Rejection
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import BinaryIO

T = TypeVar("T")
MOST_OPEN = 256  # files at a time
PACKED = ".gz"
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
NOT_KNOWN = {"", "nan", "na", "n/a", "none", "null"}  # what cells and headers write for an unknown number
SCAN_AGAIN = Command.submit("scan", then="   (the file changed since)")


class UnusableEntry(Exception):
    """An entry cannot be used; says why, and on which of its lines, from 0."""

    def __init__(self, detail: str, line: int = 0) -> None:
        super().__init__(detail)
        self.detail = detail
        self.line = line


def parse_number(text: str) -> float:
    """Return the number in a text; underscores, which Python allows in numbers, are refused."""
    if "_" in text:
        raise ValueError(f"not a number: {text!r}")
    return float(text)


def bounded_number(text: str, name: str, least: float = -LARGEST) -> float:
    """Return the number in a text; refuse a text that is none, and numbers that float32 does not hold."""
    try:
        number = parse_number(text)
    except ValueError:
        what = f"is not a number: {printable_text(text)!r}" if text else "is missing"
        raise UnusableEntry(f"{name} {what}") from None
    if not least <= number <= LARGEST:
        raise UnusableEntry(f"{name} is {number:g}")
    return number


def entry_id(text: str, path: Path, place: int) -> str:
    """Return an id without white space: the given text, else the file's name and the entry's number in it, from 0."""
    return "_".join(text.split()) or f"{path.name}-{place}"


def entry_rejection(name: str, error: UnusableEntry, split: str, path: Path, line: int) -> Rejection:
    """Return the rejection of an entry that starts at a line, or is a row."""
    return Rejection(
        printable_text(name),
        Reason.BAD_ENTRY,
        error.detail,
        f"{path.name}:{line + error.line}",
        printable_text(split),
    )


def entry_or_rejection(
    name: str,
    place: list[Any],
    arrays: Callable[[], Mapping[str, Any]] | UnusableEntry,
    split: str,
    path: Path,
    line: int,
) -> Entry | Rejection:
    """Return an entry with the arrays that it is made of; its rejection where they cannot be made."""
    try:
        if isinstance(arrays, UnusableEntry):
            raise arrays
        return Entry(name, place, arrays(), split, f"{path.name}:{line}")
    except UnusableEntry as error:
        return entry_rejection(name, error, split, path, line)


class Column(NamedTuple):
    """A column of a table, or a dataset: the first of some names that is there."""

    meaning: str  # to the reader
    names: tuple[str, ...]
    remedy: str = ""  # if no such column exists; empty: the column is optional


def column_of(option: str, given: str, *usual: str, needed: bool = False, meaning: str = "") -> Column:
    """Return the column that an option names, which must be there; else one with a usual name."""
    remedy = f"--set data.options.{option}=COLUMN   (a column or dataset that occurs once)"
    names = (given.strip(),) if given.strip() else usual
    return Column(meaning or option, names, remedy if given.strip() or needed else "")


def decoded(text: bytes) -> str:
    """Return the text of bytes that should be UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UnusableEntry(f"not UTF-8 text: byte {error.start} is 0x{text[error.start]:02x}") from error


def cannot_read(path: Path, error: OSError) -> DataError:
    """Return the error for a file that the system cannot open or read."""
    return DataError(f"cannot be read: {error.strerror or error}", where=str(path), remedy=f"ls -l {quoted(path)}")


def checked_path(path: Path) -> Path:
    """Return the path; raise if nothing is there."""
    if not path.exists():
        raise ConfigError("file or folder not found", where=str(path), remedy="set data.path to an existing file")
    return path


def checked_file(path: Path) -> Path:
    """Return the path; raise if it is not a regular file."""
    if not checked_path(path).is_file():
        what = "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "a device or a socket"
        what = f"{what}, not a file"
        raise ConfigError(what, where=str(path), remedy="set data.path to a regular file, or move this one away")
    return path


def check_option(name: str, value: object, wanted: str, *, fits: bool) -> None:
    """Raise for an option's value that does not fit."""
    if not fits:
        raise ConfigError(f"{value!r} is not {wanted}", where=f"data.options.{name}", remedy=f"set it to {wanted}")


Count = int  # the type of an option that is a whole number from 1
CHECKED_TYPES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "str": ("a name, as text", lambda value: type(value) is str),
    "bool": ("true or false", lambda value: type(value) is bool),
    "Count": ("a whole number from 1", lambda value: type(value) is int and value >= 1),
}


def check_types(reader: Any) -> None:
    """Raise for an option whose value does not have the type that the reader's class declares."""
    for option in fields(reader):
        if checked := CHECKED_TYPES.get(str(option.type)):
            wanted, fits = checked
            check_option(option.name, value := getattr(reader, option.name), wanted, fits=fits(value))


def opened(path: Path) -> BinaryIO:
    """Open a file for reading; unpack a .gz file to a temporary one first, since gzip has no random access."""
    if path.suffix.lower() != PACKED:
        return path.open("rb")
    most_bytes = EXPANSION_FLOOR_BYTES + MAX_EXPANSION * path.stat().st_size
    try:
        with TemporaryFile() as unpacked, gzip.open(path) as packed:
            while piece := packed.read(PIECE_BYTES):
                if unpacked.tell() + len(piece) > most_bytes:
                    raise zlib.error(f"it unpacks to more than {MAX_EXPANSION} times its size")
                unpacked.write(piece)
            unpacked.seek(0)
            return os.fdopen(os.dup(unpacked.fileno()), "rb")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        what = f"cannot be unpacked: {error}"
        raise DataError(what, where=str(path), remedy=f"gzip -t {quoted(path)}") from error


class Bytes:
    """A file that several threads may read at once."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        with opened(path) as file:
            self._descriptor = os.dup(file.fileno())

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def at(self, offset: int, length: int) -> bytes:
        """Return a number of bytes from an offset; raise if the file ends too early."""
        data = os.pread(self._descriptor, length, offset)
        if len(data) < length:
            raise UnusableEntry("the file ends too early")
        return data


class Opened(Generic[T]):
    """A cache of the files used last, opened once a process; each is closed when its last user is done."""

    def __init__(self, opener: Callable[[Path], T]) -> None:
        self._opener = opener
        self._kept = lru_cache(MOST_OPEN)(lambda path, _process: opener(path))

    def __call__(self, path: Path) -> T:
        """Return the open file."""
        try:
            return self._kept(path, os.getpid())
        except OSError as error:
            raise cannot_read(path, error) from error

    def __reduce__(self) -> tuple[type[Opened[T]], tuple[Callable[[Path], T]]]:
        """Pickle without the open files."""
        return Opened, (self._opener,)
