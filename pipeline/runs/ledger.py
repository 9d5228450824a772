"""The events of a run: every process appends lines to a file of its own, so nobody waits for a lock.

A line that was cut by a crash is not an event yet; a reader leaves it for the next look.
"""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError
from pipeline.records import Event, EventKind
from pipeline.runs.folder import writing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.runs.folder import RunFolder


class Ledger:
    """Appends events to one file."""

    def __init__(self, folder: RunFolder, writer: str) -> None:
        self._path = folder.events / f"{writer}.jsonl"
        with writing(self._path):
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            size = os.fstat(self._file).st_size
            self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"  # an earlier writer died in a line

    def emit(self, kind: EventKind, **data: Any) -> None:
        """Append one event in one write."""
        event = {"at": round(time.time(), 3), "kind": kind.value, **data}
        line = ("\n" if self._torn else "") + json.dumps(event, separators=(",", ":")) + "\n"
        with writing(self._path):
            self._torn = os.write(self._file, line.encode()) < len(line)
            if self._torn:
                raise OSError(errno.ENOSPC, "only a part of an event could be written")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Reader:
    """Follows every event file of a run; memory is one position per file."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.events
        self._positions: dict[str, int] = {}

    def fresh(self) -> Iterator[Event]:
        """Yield the events that came since the last call, file by file; only files that grew are opened."""
        try:
            entries = sorted(os.scandir(self._folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            return  # the run was never begun
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}", where=str(self._folder), remedy="ls -l") from error
        for entry in entries:
            if entry.stat().st_size > self._positions.get(entry.name, 0):
                yield from self._fresh_of(Path(entry.path))

    def _fresh_of(self, path: Path) -> Iterator[Event]:
        """Yield the whole lines that were added to a file."""
        with path.open("rb") as file:
            file.seek(self._positions.get(path.name, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._positions[path.name] = self._positions.get(path.name, 0) + len(line)
                event = _event(line, path.stem)
                if event is not None:
                    yield event


def _event(line: bytes, writer: str) -> Event | None:
    """Read one line; one that a crash has torn, or of a kind that only a newer version knows, is none."""
    try:
        data = json.loads(line)
        return Event(kind=EventKind(data.pop("kind")), at=data.pop("at"), writer=writer, data=data)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def write_rejections(path: Path, rejections: Iterator[dict[str, Any]]) -> int:
    """Write the list of what was left out; return how many there were."""
    count = 0
    partial = path.with_suffix(".partial")
    with writing(path), partial.open("w", encoding="utf-8") as file:
        for rejection in rejections:
            file.write(json.dumps(rejection) + "\n")
            count += 1
    partial.replace(path)
    return count
