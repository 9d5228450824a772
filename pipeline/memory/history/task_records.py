"""Values as lines of JSON: how records are written, and read back only where they are whole and within bounds."""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from pipeline.store.format.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Row: TypeAlias = tuple[Any, ...]

_SURROGATE = "\\ud"  # as JSON writes the halves of a character beyond 16 bits
_LARGEST = float(1 << 62)  # what an SQLite integer holds, and more than any byte count
_TYPES: dict[str, set[type]] = {
    "str": {str},
    "int": {int},
    "bool": {bool},
    "float": {int, float},
    "int | None": {int, type(None)},
}


class Lines:
    """The lines of one kind of value, a flat dataclass; each is of a run."""

    def __init__(self, kind: type) -> None:
        """Take the dataclass; it has numbers that must be there, and texts."""
        found = fields(kind)
        self.columns: tuple[str, ...] = ("run", *(field.name for field in found))
        wanted: tuple[set[type], ...] = ({str}, *(_TYPES[str(field.type)] for field in found))
        self._pick = itemgetter(*self.columns)
        self._numbers = [place for place, one in enumerate(wanted) if int in one]
        self._fits = lru_cache(maxsize=256)(
            lambda types: all(told in one for told, one in zip(types, wanted, strict=True))
        )

    def line_of(self, run: str, value: Any) -> bytes:
        """Write a value of a run as a line."""
        return json.dumps({"run": run, **asdict(value)}, separators=(",", ":")).encode() + b"\n"

    def row_of(self, line: str) -> Row | None:
        """Read a line into `columns`; one that is torn, foreign or out of bounds is none."""
        try:
            row: Row = self._pick(_read(line))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if not self._fits(tuple(map(type, row))) or not self._bounded(row):
            return None
        return row if _SURROGATE not in line or _is_text(row) else None

    def _bounded(self, row: Row) -> bool:
        """Tell whether every number is one that a count, a size or a time can be."""
        numbers = [row[place] or 0 for place in self._numbers]
        return bool(min(numbers) >= 0 and max(numbers) <= _LARGEST)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no measurement")


_read = json.JSONDecoder(parse_constant=_refuse).decode


def _is_text(row: Row) -> bool:
    """Tell whether every text can be written down: half a surrogate pair cannot."""
    try:
        "".join(value for value in row if isinstance(value, str)).encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Measured:
    """One attempt at a task that ended well, or died of host memory; None is what nobody measured."""

    stage: str
    recipe: str  # hex
    cluster: str
    attempt: int
    task: int
    items: int  # what this attempt finished; 0 says nothing of its pace
    size: int  # its largest item, in the stage's unit of cost; 0 is unknown
    cpus: int
    asked_bytes: int | None
    peak_bytes: int | None
    gpu_peak_bytes: int | None
    killed: bool  # died of host memory: it needed more than the larger of what it asked for and its peak
    elapsed_s: float
    cpu_s: float
    node: str
    at: float  # when it ended: by run, task, attempt and this a task told twice counts once


TASKS = Lines(Measured)
line_of = TASKS.line_of


_ENDING = ".jsonl"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_NAME_LENGTH = 80
_NOT_THERE_YET = b"\0"


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a file has been read."""

    taken: int  # the end of the last whole line
    seen: int  # at this size there is nothing new in it


@dataclass(frozen=True, slots=True)
class Part:
    """What came of reading on in a file."""

    rows: list[Row]
    mark: Mark


class Journal:
    """The record files of one folder, by default of tasks."""

    def __init__(self, folder: Path, lines: Lines = TASKS) -> None:
        self._folder, self._lines = folder, lines
        self._names: dict[tuple[str, str, int], str] = {}
        self._torn: set[str] = set()  # files whose last line a full disk has cut

    def append(self, run: str, writer: str, many: Iterable[object]) -> None:
        """Add lines in one write, and wait until they are on the disk."""
        lines = b"".join(self._lines.line_of(run, one) for one in many)
        if not lines:
            return
        Disk().make_folder(self._folder)
        name = self._name(run, writer)
        descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            self._write(descriptor, name, lines)
        finally:
            os.close(descriptor)

    def _write(self, descriptor: int, name: str, lines: bytes) -> None:
        lines = b"\n" + lines if name in self._torn else lines
        self._torn.add(name)
        while lines:
            lines = lines[os.write(descriptor, lines) :]
        self._torn.discard(name)
        os.fsync(descriptor)

    def _name(self, run: str, writer: str) -> str:
        key = (run, writer, os.getpid())  # a forked child is another writer
        if key not in self._names:
            words = (_NOT_IN_NAMES.sub("-", word)[:_NAME_LENGTH] for word in (run, writer))
            self._names[key] = "~".join((*words, secrets.token_hex(6))) + _ENDING
        return self._names[key]

    def sizes(self) -> dict[str, int]:
        """Return the files there are, with their sizes."""
        sizes: dict[str, int] = {}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.endswith(_ENDING):
                        sizes[entry.name] = entry.stat().st_size
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            pass  # nothing was recorded, for us
        return sizes

    def read(self, name: str, taken: int) -> Part | None:
        """Read the lines after the first `taken` bytes; a file that cannot be read now is none."""
        path = self._folder / name
        try:
            with path.open("rb") as file:
                file.seek(taken)
                data = file.read()
        except PermissionError:
            return Part([], Mark(0, path.stat().st_size))  # somebody's own: when it grows there is another look
        except OSError:
            return None
        return _part(data, taken, self._lines)


def _part(data: bytes, start: int, lines: Lines) -> Part:
    hole = data.find(_NOT_THERE_YET)
    settled = data if hole < 0 else data[:hole]
    whole = settled[: settled.rfind(b"\n") + 1]
    rows = [row for line in whole.decode(errors="replace").split("\n") if (row := lines.row_of(line)) is not None]
    taken = start + len(whole)
    return Part(rows, Mark(taken, start + len(data) if hole < 0 else taken))


@dataclass(frozen=True, slots=True)
class Past:
    """What is remembered of a task."""

    at: float
    run: str
    task: int
    attempt: int
    killed: bool
    peak_bytes: int | None
    asked_bytes: int | None
    size: int
    items: int
    elapsed_s: float

    @property
    def told_bytes(self) -> int:
        """What it needed at least; 0 where nobody measured it."""
        return max(self.peak_bytes or 0, (self.asked_bytes or 0) if self.killed else 0)

    @property
    def lived(self) -> bool:
        """Tell whether its peak is that of a task that ended well."""
        return not self.killed and bool(self.peak_bytes)
