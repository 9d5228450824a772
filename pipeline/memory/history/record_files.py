"""Records of measurements: lines of JSON in files of one writing process each, read from the newest back.

A look-up reads the newest MOST_FILES files and of these MOST_BYTES, however much was ever recorded: what is older no
longer counts. Lines that are torn, foreign or out of bounds are passed over.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import asdict, fields
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pipeline.files import shared_bits
from pipeline.store.format.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

Record = TypeVar("Record")

MOST_FILES, MOST_BYTES = 2000, 64 << 20  # a line has about 300 bytes, and a run some files
_ENDING = ".jsonl"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]+")
_NAME_LENGTH = 80
_LARGEST = float(1 << 62)  # more than any byte count
_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "int | None": (int, NoneType),
}


class RecordFiles(Generic[Record]):
    """The records of one folder: flat dataclasses, each of a run."""

    def __init__(self, folder: Path, kind: type[Record]) -> None:
        self._folder, self._kind = folder, kind
        self._types = {"run": _TYPES["str"], **{field.name: _TYPES[str(field.type)] for field in fields(kind)}}  # type: ignore[arg-type]
        self._names: dict[tuple[str, str, int], str] = {}
        self._torn: set[str] = set()  # files whose last line a full disk has cut

    def append(self, run: str, writer: str, records: Iterable[Record]) -> bool:
        """Append records and sync them to disk; return False where the folder cannot be written."""
        lines = b"".join(measurement_line(run, record) for record in records)
        try:
            if lines:
                self._append(self._name(run, writer), lines)
        except OSError:
            return False
        return True

    def _append(self, name: str, lines: bytes) -> None:
        Disk().make_folder(self._folder)
        lines = b"\n" + lines if name in self._torn else lines
        descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if (bits := shared_bits(self._folder)) and not os.fstat(descriptor).st_size:
                os.fchmod(descriptor, stat.S_IMODE(os.fstat(descriptor).st_mode) | bits)
            self._torn.add(name)
            while lines:
                lines = lines[os.write(descriptor, lines) :]
            self._torn.discard(name)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _name(self, run: str, writer: str) -> str:
        key = (run, writer, os.getpid())  # a forked child is another writer
        if key not in self._names:
            words = (_NOT_IN_NAMES.sub("-", word)[:_NAME_LENGTH] for word in (run, writer))
            self._names[key] = "~".join((*words, secrets.token_hex(6))) + _ENDING
        return self._names[key]

    def newest(
        self, having: Mapping[str, str], lacking: Mapping[str, str] | None = None
    ) -> Iterator[tuple[str, Record]]:
        """Yield runs and records, newest first, with the field values in `having` and none of those in `lacking`."""
        wanted = [_pattern(name, text) for name, text in having.items()]
        unwanted = [_pattern(name, text) for name, text in (lacking or {}).items()]
        for line in self._lines():
            if all(text.search(line) for text in wanted) and not any(text.search(line) for text in unwanted):
                record = self._record_of(line)
                if record is not None:
                    yield record

    def _lines(self) -> Iterator[bytes]:
        """Yield whole lines, the newest first."""
        left_bytes = MOST_BYTES
        for path in self._newest_files():
            data, is_whole = _tail(path, left_bytes)
            left_bytes -= len(data)
            lines = data.split(b"\n")
            yield from lines[-2 : None if is_whole else 0 : -1]  # the last has no end, the first perhaps no beginning
            if left_bytes <= 0:
                return

    def _newest_files(self) -> list[Path]:
        ages: list[tuple[int, str]] = []
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError), os.scandir(self._folder) as entries:
            ages.extend((entry.stat().st_mtime_ns, entry.name) for entry in entries if entry.name.endswith(_ENDING))
        return [self._folder / name for _, name in sorted(ages, reverse=True)[:MOST_FILES]]

    def _record_of(self, line: bytes) -> tuple[str, Record] | None:
        """Return run and record of a line; None if it is torn, foreign or out of bounds."""
        try:
            data = json.loads(line)
            values = {name: data[name] for name in self._types}
            fit = all(_fits(value, types) for value, types in zip(values.values(), self._types.values(), strict=True))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return (values.pop("run"), self._kind(**values)) if fit else None


def measurement_line(run: str, record: Any) -> bytes:
    """Return a record of a run as a line of JSON."""
    return json.dumps({"run": run, **asdict(record)}, separators=(",", ":")).encode() + b"\n"


def _tail(path: Path, most: int) -> tuple[bytes, bool]:
    """Return the end of a file, and whether that is all of it; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - most)
            file.seek(start)
            return file.read(most), start == 0
    except OSError:
        return b"", True


def _pattern(name: str, text: str) -> re.Pattern[bytes]:
    return re.compile(rb"%b: ?%b" % (re.escape(json.dumps(name).encode()), re.escape(json.dumps(text).encode())))


def _fits(value: Any, types: tuple[type, ...]) -> bool:
    """Tell whether a value has one of these types and is within bounds."""
    if type(value) is str:
        value.encode()  # raises where a half of a surrogate pair stands alone
    elif value is not None and not 0 <= value <= _LARGEST:  # NaN is not, either
        return False
    return type(value) in types
