"""What a process of a task is on, and how far it came: a small file, which outlives any kill."""

from __future__ import annotations

import json
import os
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipeline.runs.folder import RunFolder


class Note:
    """What a process is on and how far it came, in a file that it overwrites in one write: any kill leaves the last."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        self.done_before = _note(path, attempt)[0] if path.exists() else 0  # by an earlier start of this attempt
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def write(self, done: int, names: Sequence[str]) -> None:
        """Put down how much is done, and what comes now."""
        os.pwrite(self._file, json.dumps([self._attempt, done, list(names)]).encode() + b"\n", 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_notes(folder: RunFolder, stage: str, task: int, attempt: int) -> tuple[int, tuple[str, ...]]:
    """Return how much the processes of an attempt at a task had done, and what they were on."""
    done, names = 0, list[str]()
    for part in count():
        try:
            some, on = _note(folder.on(stage, task, part), attempt)
        except OSError:  # there are no more
            break
        done += some
        names += on
    return done, tuple(names)


def _note(path: Path, attempt: int) -> tuple[int, list[str]]:
    """Read a note; one of another attempt, or that was never written, says nothing."""
    try:
        written, done, names = json.loads(path.read_bytes().partition(b"\n")[0])
    except ValueError:
        return 0, []
    return (done, names) if written == attempt else (0, [])
