"""The records: each writer appends lines to a file of its own, which nobody else writes and nothing rewrites.

A file's name ends in chance, so that a supervisor and the one that replaced it never share one, also where a network
file system would let their appends overwrite each other. What a reader elsewhere sees of a file that is being written
may end in half a line, or hold zeros where bytes are still to come: it takes the whole lines before and comes back.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.memory.measured import TASKS
from pipeline.store.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pipeline.memory.lines import Lines, Row

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
