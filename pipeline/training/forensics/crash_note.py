"""What a process is on, in a file that outlives a kill: so that the next start knows on what the one before has died.

A signal or a crash that comes once says nothing about the items; the same items twice do.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

KEPT = 8  # deaths
_SIZE = 1 << 16  # a longer note is not written: it would have to be cut


@dataclass(frozen=True, slots=True)
class PieceInFlight:
    """A piece of a step."""

    step: int  # since training began
    epoch: int
    epoch_step: int
    ids: tuple[str, ...]
    numbers: tuple[int, ...]
    rung: int
    budget: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PieceInFlight:
        return cls(**{**data, "ids": tuple(data["ids"]), "numbers": tuple(data["numbers"])})

    def is_before(self, other: PieceInFlight) -> bool:
        """Say whether it is of an earlier step."""
        return (self.epoch, self.epoch_step) < (other.epoch, other.epoch_step)


class CrashNote:
    """One rank's note; what the disk refuses costs the note, not the run."""

    def __init__(self, path: Path) -> None:
        """Read what earlier starts have left."""
        self._path = path
        self.deaths, last = _read(path)
        self.poison = _poison(self.deaths, last)  # what the last start died on, if one before it did so, too
        if last is not None:
            self.deaths = [*self.deaths, last][-KEPT:]
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._write(None)

    def on(self, piece: PieceInFlight) -> None:
        """Note what comes now; what has been passed since is forgotten."""
        self.deaths = [one for one in self.deaths if not one.is_before(piece)]
        self._write(piece)

    def off(self) -> None:
        """Note that nothing is worked on."""
        self._write(None)

    def close(self) -> None:
        """End in order; deaths are kept for the next start, until their step has passed."""
        if self._file is None:
            return
        self._write(None)
        os.close(self._file)
        self._file = None
        if not self.deaths:
            with suppress(OSError):
                self._path.unlink()

    def _write(self, piece: PieceInFlight | None) -> None:
        """Write the note in one go: a kill leaves this one or the last."""
        if self._file is None:
            return
        text = json.dumps([[asdict(one) for one in self.deaths], asdict(piece) if piece else None]).encode() + b"\n"
        if len(text) <= _SIZE:
            with suppress(OSError):
                os.pwrite(self._file, text, 0)


def _read(path: Path) -> tuple[list[PieceInFlight], PieceInFlight | None]:
    """Return the deaths of earlier starts, and what the last was on; a note that was cut says nothing."""
    try:
        deaths, last = json.loads(path.read_bytes().partition(b"\n")[0])
        return [PieceInFlight.from_json(one) for one in deaths], PieceInFlight.from_json(last) if last else None
    except (OSError, ValueError, TypeError, KeyError):
        return [], None


def _poison(deaths: list[PieceInFlight], last: PieceInFlight | None) -> PieceInFlight | None:
    if last is None or all(set(last.ids).isdisjoint(one.ids) for one in deaths):
        return None
    return last
