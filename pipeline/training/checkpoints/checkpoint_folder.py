"""Checkpoints of a training: a folder each, published whole, verified whenever it is read, the last and the best kept.

    step-00001234/   state.safetensors    what all ranks have alike, written by rank 0
                     rank-0000.safetensors …   what each rank has of its own
                     manifest.json        what the files must be, whose they are, and all that is no tensor

A checkpoint is written into `.step-00001234.partial-TOKEN/`, each rank its own file; every file and the folder are
flushed; then rank 0 renames it. So whoever sees `step-…` sees all of it, unless the disk lies, and then digests tell.
Whoever fails to write says so and trains on: no file is tried again, the next checkpoint is a new one.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.errors import JobFailed
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints import checkpoint_reader, tensor_file
from pipeline.training.checkpoints.checkpoint_reader import (
    MANIFEST,
    STATE,
    LoadedCheckpoint,
    Manifest,
    open_checkpoint,
    rank_file,
    verified_checkpoint,
)
from pipeline.training.checkpoints.tensor_file import CheckpointDamaged, WrittenFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    Receipt = Mapping[str, Any]  # JSON data: what a rank has written, or why it has not

_NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_ASIDE = re.compile(r"\.(step-\d{8,}(?:-\d+)?)\.(partial|removed)-([\w.-]+)")
_OURS = re.compile(rf"{re.escape(MANIFEST)}|{re.escape(STATE)}|rank-\d{{4,}}\.safetensors")
_DAY_S = 86_400


class NotSaved(JobFailed):
    """A checkpoint could not be written; training can go on, and the last good one is still there."""


@dataclass(frozen=True)
class State:
    """What a checkpoint holds."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # alike on every rank; only rank 0's are written
    data: Mapping[str, Any] = field(default_factory=dict)  # JSON data, also rank 0's
    own: Mapping[str, Tensor] = field(default_factory=dict)  # this rank's, such as its random numbers
    own_data: Mapping[str, Any] = field(default_factory=dict)


class CheckpointFolder:
    """A folder of checkpoints of one training.

    All ranks have one; `token` is what rank 0 has drawn for this attempt (`new_token`) and told the others, so that
    they write into one folder. Only rank 0 publishes, removes and sweeps.
    """

    def __init__(
        self,
        folder: Path,
        *,
        last: int,
        best: int,
        identity: Mapping[str, Any],
        tell: Callable[[str], None],
        token: str = "",
        disk: Disk | None = None,
    ) -> None:
        self.folder, self.last, self.best_kept, self.tell = folder, max(last, 1), best, tell
        self.identity = checkpoint_reader.plain_json(identity, "identity")
        self.token = token or new_token(secrets.token_hex(4))
        self.disk = disk or Disk()
        self._damaged: set[str] = set()

    # Writing, in two phases

    def write(self, state: State, step: int, *, rank: int = 0) -> Receipt:
        """Write this rank's share of a checkpoint; every rank does, then tells rank 0 its receipt, whatever is in it.

        A disk that will not take it is no exception here: the receipt says so, and `publish` raises NotSaved.
        """
        partial = self._partial(step)
        files = {rank_file(rank): state.own} | ({STATE: state.tensors} if rank == 0 else {})
        data = checkpoint_reader.plain_json(state.own_data, "own_data")
        for tensors in files.values():
            tensor_file.refuse_strange(tensors)
        try:
            self.disk.make_folder(partial)
            written = {name: self._written(partial / name, tensors) for name, tensors in files.items()}
        except OSError as error:
            self._take_back(partial, files)
            return {"rank": rank, "not_saved": self._why(error, state)}
        except BaseException:
            self._take_back(partial, files)
            raise
        return {"rank": rank, "files": {n: [w.bytes, w.digest] for n, w in written.items()}, "data": data}

    def publish(
        self,
        receipts: Sequence[Receipt],
        data: Mapping[str, Any],
        step: int,
        *,
        figure: float | None = None,
        lower_is_better: bool = True,
    ) -> Path:
        """Make a checkpoint of what all ranks have written, and remove what is no longer kept; raise NotSaved."""
        partial = self._partial(step)
        try:
            told = self._manifest(receipts, data, step, figure, lower_is_better=lower_is_better)
            path = self._publish(partial, told)
        except OSError as error:
            self._abandon(partial)
            raise self._not_saved(step, self._why(error)) from error
        except BaseException:
            self._abandon(partial)
            raise
        self._rotate(path.name)
        return path

    def save(self, state: State, step: int, *, figure: float | None = None, lower_is_better: bool = True) -> Path:
        """Write and publish a checkpoint of one rank alone; raise NotSaved."""
        return self.publish([self.write(state, step)], state.data, step, figure=figure, lower_is_better=lower_is_better)

    def sweep(self) -> None:
        """Remove what dead runs have left: this writer's, whatever its attempt, and what nobody has touched for a day.

        To be called once, by rank 0, before any rank writes.
        """
        writer = self.token.rpartition("-")[0]
        for name in self.disk.list_folder(self.folder):
            if (match := _ASIDE.fullmatch(name)) is None or match[3] == self.token:
                continue
            if match[2] == "removed" or match[3].rpartition("-")[0] == writer or _is_old(self.folder / name):
                self._abandon(self.folder / name)

    # Reading

    def newest(self) -> LoadedCheckpoint | None:
        """Return the checkpoint saved last, of those that are whole; nothing only where none was ever saved.

        Every byte of it was read. Damaged ones are passed over and told of; one of another model is an error.
        """
        passed: list[str] = []
        known = sorted(self._manifests(passed), key=lambda told: -told.serial)
        found = self._first_whole(known, passed)
        if found is None and passed:
            what = f"none of the {len(passed)} checkpoints is whole; the newest: {passed[0]}"
            raise JobFailed(
                what, where=str(self.folder), remedy=f"to begin anew: mv {self.folder} {self.folder}.damaged"
            )
        if found is not None and passed:
            self.tell(f"checkpoint {found.name} is used instead: step {found.step}")
        return found

    def latest(self) -> Manifest | None:
        """Return what the newest checkpoint tells of itself; none of its tensors is read."""
        return max(self._manifests([]), key=lambda told: told.serial, default=None)

    def best(self) -> LoadedCheckpoint | None:
        """Return the checkpoint with the best figure, of those that are whole; nothing where none has a figure."""
        passed: list[str] = []
        known = list(self._manifests(passed))
        return self._first_whole(by_figure(known), passed)

    def open(self, path: Path | str, *, verified: bool = False) -> LoadedCheckpoint:
        """Return a checkpoint by its name or its folder, all its bytes read, unless another rank has just done that.

        Bytes are digested again wherever they are loaded, so that it is safe either way, but then the targets are lost.
        """
        return open_checkpoint(self.folder / path, self.identity, verified=verified, disk=self.disk)

    def _first_whole(self, known: Sequence[Manifest], passed: list[str]) -> LoadedCheckpoint | None:
        for told in known:
            checkpoint_reader.refuse_stranger(told, self.identity, self.folder / told.name)
            try:
                return verified_checkpoint(self.disk, self.folder / told.name, told)
            except CheckpointDamaged as error:
                passed.append(self._pass_over(told.name, error))
        return None

    def _pass_over(self, name: str, error: CheckpointDamaged) -> str:
        """Tell of a damaged checkpoint, once; it no longer counts among those that are kept."""
        said = f"checkpoint {name} is passed over: {os.path.basename(error.where)} {error.what}"  # noqa: PTH119 - text
        if name not in self._damaged:
            self.tell(said)
        self._damaged.add(name)
        return said

    def _manifests(self, passed: list[str]) -> Iterator[Manifest]:
        """Yield what is told of each checkpoint; those of which nothing can be known are passed over."""
        for name in sorted(filter(_NAME.fullmatch, self.disk.list_folder(self.folder)), key=_order, reverse=True):
            try:
                yield checkpoint_reader.read_manifest(self.disk, self.folder / name)
            except CheckpointDamaged as error:
                passed.append(self._pass_over(name, error))

    # How it is done

    def _partial(self, step: int) -> Path:
        return self.folder / f".step-{step:08d}.partial-{self.token}"

    def _written(self, path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
        if self.disk.exists(path):  # an attempt of the same name was killed here
            self.disk.unlink(path)
        return tensor_file.write_tensors(self.disk, path, tensors)

    def _manifest(
        self,
        receipts: Sequence[Receipt],
        data: Mapping[str, Any],
        step: int,
        figure: float | None,
        *,
        lower_is_better: bool,
    ) -> Manifest:
        receipts = sorted(receipts, key=lambda receipt: int(receipt["rank"]))
        failed = [f"rank {one['rank']}: {one['not_saved']}" for one in receipts if "not_saved" in one]
        if failed:
            raise self._not_saved(step, "; ".join(failed))
        assert [one["rank"] for one in receipts] == list(range(len(receipts))), "a receipt of each rank is needed"
        return Manifest(
            name=self._free_name(step),
            step=step,
            serial=1 + max((told.serial for told in self._manifests([])), default=0),
            identity=self.identity,
            figure=None if figure is None or math.isnan(figure) else float(figure),
            lower_is_better=lower_is_better,
            files={name: WrittenFile(*told) for receipt in receipts for name, told in receipt["files"].items()},
            ranks=[receipt["data"] for receipt in receipts],
            data=checkpoint_reader.plain_json(data, "data"),
        )

    def _free_name(self, step: int) -> str:
        """Return a name that is not taken: after a step back the same step comes again, and the old one must stay."""
        name, copy = f"step-{step:08d}", 1
        while self.disk.exists(self.folder / name):
            copy += 1
            name = f"step-{step:08d}-{copy}"
        return name

    def _publish(self, partial: Path, told: Manifest) -> Path:
        for stray in set(filter(_OURS.fullmatch, self.disk.list_folder(partial))) - set(told.files):
            self.disk.unlink(partial / stray)
        checkpoint_reader.write_manifest(self.disk, partial, told)
        self.disk.fsync_folder(partial)
        self.disk.rename(partial, path := self.folder / told.name)
        self.disk.fsync_folder(self.folder)
        self.disk.fsync_folder(self.folder.parent)
        return path

    def _rotate(self, published: str) -> None:
        """Remove all but the last and the best; that it cannot is told, and harms nothing but the disk.

        Damaged ones are left where they are: they count for nothing, and a disk that cannot be read now may be later.
        """
        try:
            known = [one for one in self._manifests([]) if one.identity == self.identity]
            known = [one for one in known if one.name not in self._damaged]
            newest = sorted(known, key=lambda told: -told.serial)
            kept = {told.name for told in (*newest[: self.last], *by_figure(known)[: self.best_kept])} | {published}
            for name in {told.name for told in known} - kept:
                self.disk.rename(self.folder / name, aside := self.folder / f".{name}.removed-{self.token}")
                self._abandon(aside)
        except OSError as error:
            self.tell(f"checkpoints that are no longer needed cannot be removed: {error.strerror or error}")

    def _abandon(self, folder: Path) -> None:
        """Remove a folder that is no checkpoint, but nothing in it that is not ours."""
        try:
            self._remove_files(folder, filter(_OURS.fullmatch, self.disk.list_folder(folder)))
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            self.tell(f"{folder} is left behind and cannot be removed: {error.strerror or error}")

    def _take_back(self, partial: Path, files: Iterable[str]) -> None:
        """Remove what one rank has begun to write, and the folder after the last of them."""
        self._remove_files(partial, files)
        with suppress(OSError):
            partial.rmdir()

    def _remove_files(self, folder: Path, names: Iterable[str]) -> None:
        for name in names:
            with suppress(OSError):  # not made yet, or the disk is beyond help: `sweep` comes back to it
                self.disk.unlink(folder / name)

    def _why(self, error: OSError, state: State | None = None) -> str:
        size = sum(map(tensor_file.nbytes, state.tensors.values())) if state is not None else 0
        needed = f" ({size / 1e6:,.1f} MB are to be written)" if size else ""
        try:
            free = f", {self.disk.free_bytes(self.folder) / 1e6:,.1f} MB free"
        except OSError:
            free = ""
        return f"{error.strerror or error}{free}{needed}"

    def _not_saved(self, step: int, why: str) -> NotSaved:
        left = max(filter(_NAME.fullmatch, self.disk.list_folder(self.folder)), key=_order, default=None)
        last = f"the last one that is there: {left}" if left else "there is none before it"
        what = f"the checkpoint of step {step} could not be saved: {why}; {last}"
        return NotSaved(what, where=str(self.folder), remedy=f"make room: df -h {self.folder}; training goes on")


def new_token(writer: str) -> str:
    """Return a name for one attempt of a writer: who it is, which stays the same, and a random part."""
    return f"{re.sub(r'[^A-Za-z0-9_.]', '_', writer)}-{secrets.token_hex(4)}"


def by_figure(known: Sequence[Manifest]) -> list[Manifest]:
    """Return those with a figure, the best first, of equal ones the newer; what is better, the newest one says."""
    if not (known := [told for told in known if told.figure is not None]):
        return []
    lower = max(known, key=lambda told: told.serial).lower_is_better
    alike = [told for told in known if told.lower_is_better == lower]
    return sorted(alike, key=lambda told: (told.figure if lower else -(told.figure or 0.0), -told.serial))


def _order(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _is_old(folder: Path) -> bool:
    """Say whether nobody has touched a folder or its files for a day, by the file system's own clock if need be."""
    try:
        touched = max(one.stat().st_mtime for one in (folder, *folder.iterdir()))
    except OSError:
        return False
    return time.time() - touched > _DAY_S
