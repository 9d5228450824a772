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
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pipeline.command_line import Command, quoted
from pipeline.errors import ConfigError, DataError
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.sealed_folder import MANIFEST, FolderDamaged, seal, unseal
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from pipeline.training.checkpoints.sealed_folder import SealedFolder

_DEATHS_KEPT = 8
_NOTE_BYTES = 1 << 16  # a longer note is not written: it would have to be cut


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

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PieceInFlight:
        return cls(**{**data, "ids": tuple(data["ids"]), "numbers": tuple(data["numbers"])})

    def is_before(self, other: PieceInFlight) -> bool:
        return (self.epoch, self.epoch_step) < (other.epoch, other.epoch_step)


class CrashNote:
    """One rank's crash note; a disk error costs the note, not the run."""

    def __init__(self, path: Path) -> None:
        """Read the note that earlier starts have left."""
        self._path = path
        self.deaths, last = _noted(path)
        self.poison = _poison(self.deaths, last)  # the piece of the last death, if an earlier one shares an item
        if last is not None:
            self.deaths = [*self.deaths, last][-_DEATHS_KEPT:]
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        self._write(None)

    def on(self, piece: PieceInFlight) -> None:
        """Note the piece that runs now; forget deaths of earlier steps."""
        self.deaths = [death for death in self.deaths if not death.is_before(piece)]
        self._write(piece)

    def off(self) -> None:
        """Note that nothing is running."""
        self._write(None)

    def close(self) -> None:
        """Close the note of a start that ended in order; deaths stay until their step has passed."""
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
        deaths = [asdict(death) for death in self.deaths]
        text = json.dumps([deaths, asdict(piece) if piece else None]).encode() + b"\n"
        if len(text) <= _NOTE_BYTES:
            with suppress(OSError):
                os.pwrite(self._file, text, 0)


def _noted(path: Path) -> tuple[list[PieceInFlight], PieceInFlight | None]:
    """Return the deaths of earlier starts, and the piece in flight at the last; an unreadable note counts as empty."""
    try:
        deaths, last = json.loads(path.read_bytes().partition(b"\n")[0])
        return list(map(PieceInFlight.from_json, deaths)), PieceInFlight.from_json(last) if last else None
    except (OSError, ValueError, TypeError, KeyError):
        return [], None


def _poison(deaths: list[PieceInFlight], last: PieceInFlight | None) -> PieceInFlight | None:
    if last is None or all(set(last.ids).isdisjoint(death.ids) for death in deaths):
        return None
    return last


log = logging.getLogger(__name__)

KEPT = 20  # the newest, in addition to the first
RNG = "rng"
_OTHER = "replay another bundle, or train again"
_NAME = re.compile(r"step-(\d{8,})-([a-z]+)-rank-(\d+)(?:-(\d+))?")
_PARTIAL = ".partial-rank-"
_ITEMS_SHOWN = 4


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
    sizes: Mapping[str, int] = field(default_factory=dict)  # of all its items together
    cost: int | None = None  # predicted bytes

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BundleCut:
        return cls(tuple(data["ids"]), tuple(data["numbers"]), data["sizes"], data["cost"])

    def words(self) -> str:
        """Describe it for people."""
        shown = ", ".join(self.ids[:_ITEMS_SHOWN]) + (", …" if len(self.ids) > _ITEMS_SHOWN else "")
        sizes = "".join(f", {value:,} {name}" for name, value in self.sizes.items())
        cost = f", {format_bytes(self.cost)} predicted" if self.cost is not None else ""
        return f"{len(self.ids)} items ({shown}){sizes}{cost}"


@dataclass(frozen=True, slots=True)
class BundleCheckpoint:
    """The checkpoint from which the step is reached."""

    path: str
    digest: str  # of its manifest


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
    failed: int | None  # the number of the failed one in `cuts`; None: none by itself
    budget: Mapping[str, int]
    choice: Mapping[str, Any]
    plan: Mapping[str, Any]
    seed: int
    message: str
    checkpoint: BundleCheckpoint | None
    time_s: float  # since 1970
    torch: str
    device: str
    state: Mapping[str, Any] = field(default_factory=dict)  # everything else that replaying needs, as JSON data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Bundle:
        known = {entry.name: data[entry.name] for entry in fields(cls)}
        known["kind"] = BundleKind(data["kind"])
        known["cuts"] = tuple(BundleCut.from_json(cut) for cut in data["cuts"])
        known["checkpoint"] = BundleCheckpoint(**data["checkpoint"]) if data["checkpoint"] else None
        return cls(**known)

    def words(self) -> str:
        """Describe for people what happened."""
        when = datetime.fromtimestamp(self.time_s, UTC)
        lines = [f"{self.kind.value} in step {self.step:,}, epoch {self.epoch}, on rank {self.rank} of {self.world}"]
        lines += [f"  {self.message}", f"  {when:%Y-%m-%d %H:%M:%S} UTC, torch {self.torch}, {self.device}"]
        for place, cut in enumerate(self.cuts):
            mark = " ← this one" if place == self.failed else ""
            lines.append(f"  micro-batch {place + 1} of {len(self.cuts)}: {cut.words()}{mark}")
        lines.append(f"  budget {', '.join(f'{most:,} {name}' for name, most in self.budget.items()) or 'none'}")
        lines.append(
            f"  from checkpoint {self.checkpoint.path}" if self.checkpoint else "  before the first checkpoint"
        )
        return "\n".join(lines)


def write_bundle(folder: Path, bundle: Bundle, rng: Mapping[str, Tensor]) -> Path | None:
    """Write a bundle into the folder of bundles; return its folder, or None on a disk error."""
    name = f"step-{bundle.step:08d}-{bundle.kind.value}-rank-{bundle.rank}"
    numbered = (name, *(f"{name}-{number}" for number in range(2, 1_000_000)))  # where the step has failed before
    try:
        path = next(folder / free for free in numbered if not os.path.lexists(folder / free))
        data = json.loads(json.dumps(asdict(bundle), default=_plain))
        seal(path, {RNG: rng}, data, partial=(aside := folder / f"{_PARTIAL}{bundle.rank}"))
        _prune(folder, aside)
    except OSError as error:
        log.warning("%s: the replay bundle of step %d was not saved: %s", folder, bundle.step, error.strerror or error)
        return None
    return path


def read_bundle(path: Path) -> Bundle:
    """Read the bundle in a folder."""
    try:
        return Bundle.from_json(_verified(path).data)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        problem = f"the bundle cannot be read: {type(error).__name__}: {error}"
        raise DataError(problem, where=str(path), remedy=_OTHER) from error


def read_rng(path: Path) -> dict[str, Tensor]:
    """Read the states of the random number generators at the start of the step."""
    return _verified(path).tensors(RNG)


def bundles_in(folder: Path) -> list[Path]:
    """Return the bundles in a folder, ordered by step."""
    order = {name: _order(match) for name in Disk().list_folder(folder) if (match := _NAME.fullmatch(name))}
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


def _prune(folder: Path, aside: Path) -> None:
    """Remove bundles that are neither the first nor among the newest; other ranks may do the same meanwhile."""
    for path in bundles_in(folder)[1:-KEPT]:
        with suppress(OSError):
            path.rename(aside)  # first, so that a reader sees it whole or not at all
            shutil.rmtree(aside, ignore_errors=True)


def _order(match: re.Match[str]) -> tuple[int, int, str, int]:
    return int(match[1]), int(match[4] or 1), match[2], int(match[3])
