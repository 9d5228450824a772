"""The events of a run. Each process appends lines to its own file, so no lock is needed.

A reader skips an incomplete last line until it is complete.
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.masking import without_secrets
from pipeline.errors import ConfigError
from pipeline.files import last_claim, replacing, whose
from pipeline.journal.run_folder import shown_mode, writing_run
from pipeline.records import Event, EventKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.journal.run_folder import RunFolder

SUFFIX = ".jsonl"
SUPERVISOR = "supervisor"  # a visit writes as this name with its number
_decode = json.JSONDecoder().raw_decode  # faster than json.loads
_KINDS = {kind.value: kind for kind in EventKind}
_PROGRESS, _FINISHED = (b'"kind":"%s"' % kind.value.encode() for kind in (EventKind.PROGRESS, EventKind.TASK_FINISHED))
READ_BYTES = 1 << 18
QUOTED = ("what", "error")  # foreign text may hold secrets: an exception may quote a command line or a URL
_NO_FIGURES = b'"figures":{}'


class Ledger:
    """Appends the events of one process to its file."""

    def __init__(self, folder: RunFolder, writer: str) -> None:
        self._writer, self._path = writer, folder.events / f"{writer}{SUFFIX}"
        with writing_run(self._path):
            self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            size = os.fstat(self._file).st_size
            if not size:
                os.fchmod(self._file, shown_mode(folder.events))
            self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"  # an earlier writer died within a line

    def emit(self, kind: EventKind, **data: Any) -> Event:
        """Append an event in a single write; return it as readers see it."""
        masked = {name: without_secrets(data[name]) for name in QUOTED if isinstance(data.get(name), str)}
        event = {"at": round(time.time(), 3), "kind": kind.value, **data, **masked}
        text = json.dumps(event, separators=(",", ":"))
        line = ("\n" if self._torn else "") + text + "\n"
        with writing_run(self._path):
            self._torn = os.write(self._file, line.encode()) < len(line)
            if self._torn:
                raise OSError(errno.ENOSPC, "an event was written only in part")
        written = _event(text.encode(), self._writer)
        assert written is not None
        return written

    def close(self) -> None:
        os.close(self._file)


class LedgerReader:
    """Reads new events from all event files of a run; it keeps one position per file."""

    def __init__(self, folder: RunFolder, *, whole: bool = True) -> None:
        """Read the events of a run; unless `whole`, skip superseded progress."""
        self._folder, self._whole = folder.events, whole
        self._positions: dict[str, int] = {}
        self._own = ""

    def skip(self, writer: str) -> None:
        """Skip this writer from now on: the process knows its own events."""
        self._own = f"{writer}{SUFFIX}"

    def fresh(self) -> Iterator[Event]:
        """Yield the events since the last call, file by file; only files that grew are opened."""
        for path, writer in self._grown():
            for lines in self._fresh_of(path):
                yield from filter(None, (_event(line, writer) for line in (lines if self._whole else _telling(lines))))

    def _grown(self) -> Iterator[tuple[str, str]]:
        """Yield path and writer of each file that grew since it was last read."""
        try:
            entries = sorted(os.scandir(self._folder), key=lambda entry: entry.name)
        except FileNotFoundError:
            return  # the run was never begun
        except OSError as error:
            what = f"cannot be read: {error.strerror}; {whose(self._folder)}"
            raise ConfigError(what, where=str(self._folder), remedy="ls -l") from error
        for entry in entries:
            if entry.name == self._own:
                continue
            position = self._positions.get(entry.path)
            if position is None or entry.stat().st_size > position:  # read a new file at once
                yield entry.path, entry.name.removesuffix(SUFFIX)

    def _fresh_of(self, path: str) -> Iterator[list[bytes]]:
        """Yield the whole lines that were added to a file, some at a time."""
        position, most = self._positions.get(path, 0), READ_BYTES
        try:
            file = os.open(path, os.O_RDONLY)
        except PermissionError as error:
            what = f"cannot be read: {error.strerror}; {whose(Path(path))}"
            raise ConfigError(what, where=path, remedy="ask its owner to share it (cluster.private: false)") from error
        try:
            while chunk := os.pread(file, most, position):
                end = chunk.rfind(b"\n") + 1
                if end:
                    position += end
                    self._positions[path] = position
                    yield chunk[: end - 1].split(b"\n")
                if len(chunk) < most:
                    return
                if not end:
                    most *= 2  # a line that is longer
        finally:
            os.close(file)


def _telling(lines: list[bytes]) -> Iterator[bytes]:
    """Yield the lines of a writer, without superseded progress events."""
    for line, following in zip(lines, [*lines[1:], b""], strict=False):
        if not (
            _PROGRESS in line
            and (_PROGRESS in following or _FINISHED in following)
            and (_NO_FIGURES in line or _NO_FIGURES not in following)
        ):
            yield line


def _event(line: bytes, writer: str) -> Event | None:
    """Parse a line; return None for a torn line or an event kind of a newer version."""
    try:
        text = line.decode()
        data, end = _decode(text)
        if text[end:]:
            return None
        return Event(kind=_KINDS[data.pop("kind")], at=data.pop("at"), writer=writer, data=data)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def has_ended(folder: RunFolder) -> bool:
    """Tell cheaply whether a run has ended, by the last event of its last supervisor; False if unknown."""
    try:
        with (folder.events / f"{SUPERVISOR}-{last_claim(folder.claims):06d}{SUFFIX}").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            lines = file.read().splitlines()
    except (OSError, ValueError):
        return False
    event = _event(lines[-1], SUPERVISOR) if lines else None
    return event is not None and event.kind is EventKind.RUN_ENDED


def write_rejections(path: Path, rejections: Iterator[dict[str, Any]]) -> int:
    """Write the list of rejected items; return how many there are."""
    count = 0
    with writing_run(path), replacing(path) as aside, aside.open("w", encoding="utf-8") as file:
        for rejection in rejections:
            file.write(json.dumps(rejection) + "\n")
            count += 1
    return count


class Note:
    """The items in work and the progress of a process, in a file overwritten in place, which survives any kill."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        self.done_before = _note(path, attempt)[0] if path.exists() else 0  # by an earlier start
        with writing_run(path):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def write(self, done: int, names: Sequence[str]) -> None:
        """Record the count of finished items and the next ones; on a full disk the previous note stays."""
        with suppress(OSError):
            os.pwrite(self._file, json.dumps([self._attempt, done, list(names)]).encode() + b"\n", 0)

    def close(self) -> None:
        os.close(self._file)


def read_notes(folder: RunFolder, stage: str, task: int, attempt: int) -> tuple[int, tuple[str, ...]]:
    """Return how many items the processes of an attempt had finished, and those in work."""
    done, names = 0, list[str]()
    for part in count():
        try:
            done_by_process, on = _note(folder.on(stage, task, part), attempt)
        except OSError:  # there are no more
            break
        done += done_by_process
        names += on
    return done, tuple(names)


def _note(path: Path, attempt: int) -> tuple[int, list[str]]:
    """Return the progress and items of a note; nothing if it is empty or of another attempt."""
    try:
        written, done, names = json.loads(path.read_bytes().partition(b"\n")[0])
    except ValueError:
        return 0, []
    return (done, names) if written == attempt else (0, [])
