"""The events of a run: every process appends lines to a file of its own, so nobody waits for a lock.

A line that was cut by a crash is not an event yet; a reader leaves it for the next look.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.records import Event, EventKind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.runs.folder import RunFolder


class Ledger:
    """Appends events to one file."""

    def __init__(self, folder: RunFolder, writer: str) -> None:
        path = folder.events / f"{writer}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def emit(self, kind: EventKind, **data: Any) -> None:
        """Append one event in one write."""
        line = json.dumps({"at": round(time.time(), 3), "kind": kind.value, **data}, separators=(",", ":"))
        os.write(self._file, f"{line}\n".encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


class Reader:
    """Follows every event file of a run; memory is one position per file."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.events
        self._positions: dict[str, int] = {}

    def fresh(self) -> Iterator[Event]:
        """Yield the events that came since the last call, file by file."""
        for path in sorted(self._folder.iterdir()):
            yield from self._fresh_of(path)

    def _fresh_of(self, path: Path) -> Iterator[Event]:
        """Yield the whole lines that were added to a file."""
        with path.open("rb") as file:
            file.seek(self._positions.get(path.name, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._positions[path.name] = self._positions.get(path.name, 0) + len(line)
                yield _event(line, path.stem)


def _event(line: bytes, writer: str) -> Event:
    """Read one line."""
    data = json.loads(line)
    return Event(kind=EventKind(data.pop("kind")), at=data.pop("at"), writer=writer, data=data)


def write_rejections(path: Path, rejections: Iterator[dict[str, Any]]) -> int:
    """Write the list of what was left out; return how many there were."""
    count = 0
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for rejection in rejections:
            file.write(json.dumps(rejection) + "\n")
            count += 1
    partial.replace(path)
    return count
