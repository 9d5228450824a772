"""Bundles and crash notes: what a failed step leaves on disk, so that it can be reproduced on one machine.

    bundles/step-00000123-oom-rank-0/
        manifest.json      what happened, to which items, under which cuts, plan and checkpoint
        rng.safetensors    states of the random number generators at the start of the step

A bundle is a sealed folder. The first one is kept, and the newest; a full disk costs a bundle, not the run.

A rank's crash note names the micro-batch in flight, in a file that survives a kill, so that the next start knows where
the last one died. A single crash says nothing about the items; a second one on the same items does.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from pipeline.command_line import Command, quoted
from pipeline.errors import ConfigError, DataError
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.sealed_folder import MANIFEST, FolderDamaged, seal, unseal
from pipeline.units import first_few

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from pipeline.training.checkpoints.sealed_folder import SealedFolder

log = logging.getLogger(__name__)

KEPT = 20  # the newest, in addition to the first
RNG = "rng"
_DEATHS_KEPT = 8
_NOTE_BYTES = 1 << 16  # a longer note is not written: it would have to be cut
_OTHER = "replay another bundle, or train again"
_NAME = re.compile(r"step-(\d{8,})-([a-z]+)-rank-(\d+)(?:-(\d+))?")
_PARTIAL = ".partial-rank-"
_ITEMS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class PieceInFlight:
    """The micro-batch that a rank is running."""

    step: int  # since training began
    epoch: int
    epoch_step: int
    ids: tuple[str, ...]
    numbers: tuple[int, ...]
    rung: int
    budget: int


_NOTE = TypeAdapter(tuple[list[PieceInFlight], PieceInFlight | None])  # the deaths of earlier starts, and what runs


class CrashNote:
    """One rank's crash note; a disk error costs the note, not the run."""

    def __init__(self, path: Path) -> None:
        """Read the note that earlier starts have left; an unreadable one counts as empty."""
        self._path, self.deaths, last = path, list[PieceInFlight](), None
        with suppress(OSError, ValueError):
            self.deaths, last = _NOTE.validate_json(path.read_bytes().partition(b"\n")[0])
        self.poison: PieceInFlight | None = None  # the piece of the last death, if an earlier one shares an item
        if last is not None:
            if any(set(last.ids) & set(death.ids) for death in self.deaths):
                self.poison = last
            self.deaths = [*self.deaths, last][-_DEATHS_KEPT:]
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self.off()

    def on(self, piece: PieceInFlight) -> None:
        """Note the piece that runs now; forget deaths of earlier steps."""
        now = (piece.epoch, piece.epoch_step)
        self.deaths = [death for death in self.deaths if (death.epoch, death.epoch_step) >= now]
        self._write(piece)

    def off(self) -> None:
        """Note that nothing is running."""
        self._write(None)

    def close(self) -> None:
        """Close the note at an orderly end; deaths stay until their step has passed."""
        if self._file is None:
            return
        self.off()
        os.close(self._file)
        self._file = None
        if not self.deaths:
            self._path.unlink(missing_ok=True)

    def _write(self, piece: PieceInFlight | None) -> None:
        """Write the note in one go: a kill leaves this one or the last."""
        text = _NOTE.dump_json((self.deaths, piece)) + b"\n"
        if self._file is not None and len(text) <= _NOTE_BYTES:
            with suppress(OSError):
                os.pwrite(self._file, text, 0)


class BundleKind(StrEnum):
    """What went wrong."""

    OOM = "oom"
    NAN = "nan"
    POISON = "poison"  # the same items killed the process more than once


@dataclass(frozen=True, slots=True)
class BundleCut:
    """A micro-batch of this rank."""

    ids: tuple[str, ...]
    numbers: tuple[int, ...]  # in the table


@dataclass(frozen=True)
class Bundle:
    """A failed step on one rank."""

    kind: BundleKind
    epoch: int
    step: int  # optimizer steps since training began: this would have been the next
    epoch_step: int  # the sampler's step in the epoch
    rank: int
    world: int
    cuts: tuple[BundleCut, ...]  # the micro-batches of this rank in this step, in order
    failed: int | None  # the index of the failed one in `cuts`; None: no single one failed
    budget: Mapping[str, int]
    plan: Mapping[str, Any]
    message: str
    checkpoint: Mapping[str, str] | None  # path and digest of that from which the step is reached
    time_s: float  # since 1970
    torch: str
    device: str
    state: Mapping[str, Any] = field(default_factory=dict)  # everything else that a replay needs, as JSON data

    def words(self) -> str:
        """Describe for people what happened."""
        when = datetime.fromtimestamp(self.time_s, UTC)
        lines = [f"{self.kind.value} in step {self.step:,}, epoch {self.epoch}, on rank {self.rank} of {self.world}"]
        lines += [f"  {self.message}", f"  {when:%Y-%m-%d %H:%M:%S} UTC, torch {self.torch}, {self.device}"]
        for place, cut in enumerate(self.cuts):
            mark = " ← this one" if place == self.failed else ""
            items = f"{len(cut.ids)} items ({first_few(cut.ids, _ITEMS_SHOWN)})"
            lines.append(f"  micro-batch {place + 1} of {len(self.cuts)}: {items}{mark}")
        lines.append(f"  budget {', '.join(f'{most:,} {name}' for name, most in self.budget.items()) or 'none'}")
        at = f"from checkpoint {self.checkpoint['path']}" if self.checkpoint else "before the first checkpoint"
        return "\n".join([*lines, f"  {at}"])


_BUNDLE = TypeAdapter(Bundle)


def write_bundle(folder: Path, bundle: Bundle, rng: Mapping[str, Tensor]) -> Path | None:
    """Write a bundle into the folder of bundles; return its folder, or None on a disk error."""
    name = f"step-{bundle.step:08d}-{bundle.kind.value}-rank-{bundle.rank}"
    numbered = (name, *(f"{name}-{number}" for number in range(2, 1_000_000)))  # where the step has failed before
    try:
        path = next(folder / free for free in numbered if not os.path.lexists(folder / free))
        data = json.loads(json.dumps(asdict(bundle), default=_plain))
        seal(path, {RNG: rng}, data, partial=(aside := folder / f"{_PARTIAL}{bundle.rank}"))
        for old in bundles_in(folder)[1:-KEPT]:  # other ranks may do the same meanwhile
            with suppress(OSError):
                old.rename(aside)  # first, so that a reader sees it whole or not at all
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        log.warning("%s: the replay bundle of step %d was not saved: %s", folder, bundle.step, error.strerror or error)
        return None
    return path


def read_bundle(path: Path) -> Bundle:
    """Read the bundle in a folder."""
    try:
        return _BUNDLE.validate_python(_verified(path).data)
    except ValueError as error:
        raise DataError(f"the bundle cannot be read: {error}", where=str(path), remedy=_OTHER) from error


def read_rng(path: Path) -> dict[str, Tensor]:
    """Read the states of the random number generators at the start of the step."""
    return _verified(path).tensors(RNG)


def bundles_in(folder: Path) -> list[Path]:
    """Return the bundles in a folder, ordered by step."""
    order = {match[0]: _order(match) for match in map(_NAME.fullmatch, Disk().list_folder(folder)) if match}
    return [folder / name for name in sorted(order, key=order.__getitem__)]


def find_bundles(folder: Path, step: int, rank: int | None = None) -> list[Path]:
    """Return the bundles of a step, of one rank or of all; raise an error that lists the others if there is none."""
    bundles = [(path, match) for path in bundles_in(folder) if (match := _NAME.fullmatch(path.name))]
    matching = [path for path, match in bundles if int(match[1]) == step and rank in (None, int(match[3]))]
    if not matching:
        steps = ", ".join(dict.fromkeys(str(int(match[1])) for _, match in bundles))
        whose = "" if rank is None else f" of rank {rank}"
        have = f"available steps: {steps}" if steps else "none has been saved"
        remedy = f"ls {quoted(folder)}" if steps else Command.of("status", then="   (shows failures, if any)")
        raise ConfigError(f"no replay bundle of step {step}{whose}: {have}", where=str(folder), remedy=remedy)
    return matching


def _verified(path: Path) -> SealedFolder:
    if not (path / MANIFEST).exists():
        raise ConfigError("is not a replay bundle", where=str(path), remedy=f"ls {quoted(path.parent)}")
    try:
        return unseal(path)
    except FolderDamaged as error:  # its remedy is about checkpoints
        raise DataError(error.what, where=error.where, remedy=_OTHER) from error


def _plain(value: Any) -> Any:
    """Return a NumPy or torch scalar as a plain number, anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


def _order(match: re.Match[str]) -> tuple[int, int, str, int]:
    return int(match[1]), int(match[4] or 1), match[2], int(match[3])
