"""Checkpoints of a training: a folder each, published whole, verified whenever it is read, the last and the best kept.

    step-00001234/   state.safetensors    tensors that are the same on all ranks, written by rank 0
                     rank-0000.safetensors …   each rank's own tensors
                     manifest.json        sizes and digests of the files, the training's identity, all JSON data

A checkpoint is written into `.step-00001234.partial-TOKEN/`, each rank its own file; every file and the folder are
flushed; then rank 0 renames it. So a visible `step-…` folder is complete, and digests reveal a disk that lost data.
A rank that fails to write reports it and trains on: no file is tried again, the next checkpoint is a new one.
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
from pipeline.store.format.disk import FULL, Disk, room_left
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
    """The content of a checkpoint, on one rank."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)  # same on every rank; only rank 0's are written
    data: Mapping[str, Any] = field(default_factory=dict)  # JSON data, also rank 0's
    own: Mapping[str, Tensor] = field(default_factory=dict)  # this rank's, such as its random numbers
    own_data: Mapping[str, Any] = field(default_factory=dict)


class CheckpointFolder:
    """The folder of a training's checkpoints.

    Every rank has an instance. Rank 0 draws `token` for this attempt (`new_token`) and shares it, so that all write
    into one folder. Only rank 0 publishes, removes and sweeps. Its `check` raises where another process writes the
    folder now. It never removes a checkpoint that appeared here from elsewhere.
    """

    def __init__(
        self,
        folder: Path,
        *,
        last: int,
        best: int,
        identity: Mapping[str, Any],
        tell: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
        token: str = "",
        disk: Disk | None = None,
    ) -> None:
        self.folder, self.last, self.best_kept, self.tell = folder, max(last, 1), best, tell
        self.identity = checkpoint_reader.plain_json(identity, "identity")
        self.token = token or new_token(secrets.token_hex(4))
        self.disk, self.check = disk or Disk(), check
        self._damaged: set[str] = set()
        self._ours = set(self.disk.list_folder(folder))  # what an earlier process of this training left, and then more

    # Writing, in two phases

    def write(self, state: State, step: int, *, rank: int = 0) -> Receipt:
        """Write this rank's part of a checkpoint; return a receipt, which every rank must pass to rank 0.

        A disk error is not raised here: the receipt has it, and `publish` raises NotSaved.
        """
        self.check()
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
            return {"rank": rank, "not_saved": self._why(error, state), "errno": error.errno}
        except BaseException:
            self._take_back(partial, files)
            raise
        sizes_and_digests = {name: [file.bytes, file.digest] for name, file in written.items()}
        return {"rank": rank, "files": sizes_and_digests, "data": data}

    def publish(
        self,
        receipts: Sequence[Receipt],
        data: Mapping[str, Any],
        step: int,
        *,
        figure: float | None = None,
        lower_is_better: bool = True,
    ) -> Path:
        """Publish what all ranks have written as a checkpoint and remove older ones; raise NotSaved."""
        partial = self._partial(step)
        try:
            self.check()
            manifest = self._manifest(receipts, data, step, figure, lower_is_better=lower_is_better)
            path = self._publish(partial, manifest)
        except OSError as error:
            self._abandon(partial)
            raise self._not_saved(step, self._why(error), error.errno) from error
        except BaseException:
            self._abandon(partial)
            raise
        self._ours.add(path.name)
        self._rotate(path.name)
        return path

    def save(self, state: State, step: int, *, figure: float | None = None, lower_is_better: bool = True) -> Path:
        """Write and publish a checkpoint of one rank alone; raise NotSaved."""
        return self.publish([self.write(state, step)], state.data, step, figure=figure, lower_is_better=lower_is_better)

    def sweep(self) -> None:
        """Remove the leftovers of dead runs: those of this writer's earlier attempts, and any untouched for a day.

        To be called once, by rank 0, before any rank writes.
        """
        writer = self.token.rpartition("-")[0]
        for name in self.disk.list_folder(self.folder):
            if (match := _ASIDE.fullmatch(name)) is None or match[3] == self.token:
                continue
            if match[2] == "removed" or match[3].rpartition("-")[0] == writer or _is_old(self.folder / name):
                self._abandon(self.folder / name)

    # Reading

    def newest(self, *, of_all: bool = False) -> LoadedCheckpoint | None:
        """Return the newest intact checkpoint, all its bytes verified; None only where none was ever saved.

        `of_all`: the newest that all items made, if there is one.
        Damaged ones are reported and skipped; one of another model is an error.
        """
        passed: list[str] = []
        known = sorted(self._manifests(passed), key=lambda manifest: -manifest.serial)
        known = [manifest for manifest in known if of_all and manifest.of_all_items] or known
        whole = self._first_whole(known, passed)
        if whole is None and passed:
            problem = f"none of the {len(passed)} checkpoints is intact; the newest: {passed[0]}"
            remedy = f"to start over: mv {self.folder} {self.folder}.damaged"
            raise JobFailed(problem, where=str(self.folder), remedy=remedy)
        if whole is not None and passed:
            self.tell(f"checkpoint {whole.name} is used instead: step {whole.step}")
        return whole

    def latest(self) -> Manifest | None:
        """Return the newest checkpoint's manifest; no tensors are read."""
        return max(self._manifests([]), key=lambda manifest: manifest.serial, default=None)

    def best(self) -> LoadedCheckpoint | None:
        """Return the whole checkpoint with the best figure; None where none has a figure."""
        passed: list[str] = []
        return self._first_whole(by_figure(list(self._manifests(passed))), passed)

    def open(self, path: Path | str, *, verified: bool = False) -> LoadedCheckpoint:
        """Return a checkpoint by its name or its folder; reads and checks all bytes, unless another rank just has.

        Loading digests the bytes again and so notices damage too, but only after the targets are overwritten.
        """
        return open_checkpoint(self.folder / path, self.identity, verified=verified, disk=self.disk)

    def _first_whole(self, known: Sequence[Manifest], passed: list[str]) -> LoadedCheckpoint | None:
        for manifest in known:
            checkpoint_reader.refuse_stranger(manifest, self.identity, self.folder / manifest.name)
            try:
                return verified_checkpoint(self.disk, self.folder / manifest.name, manifest)
            except CheckpointDamaged as error:
                passed.append(self._pass_over(manifest.name, error))
        return None

    def _pass_over(self, name: str, error: CheckpointDamaged) -> str:
        """Report a damaged checkpoint once, and no longer count it among those to keep; return the message."""
        message = f"checkpoint {name} is skipped: {os.path.basename(error.where)} {error.what}"  # noqa: PTH119 - text
        if name not in self._damaged:
            self.tell(message)
        self._damaged.add(name)
        return message

    def _manifests(self, passed: list[str]) -> Iterator[Manifest]:
        """Yield the manifests, newest step first; one that cannot be read is reported, and added to `passed`."""
        for name in sorted(filter(_NAME.fullmatch, self.disk.list_folder(self.folder)), key=_order, reverse=True):
            try:
                yield checkpoint_reader.read_manifest(self.disk, self.folder / name)
            except CheckpointDamaged as error:
                passed.append(self._pass_over(name, error))

    # Details of writing

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
        failed = [f"rank {receipt['rank']}: {receipt['not_saved']}" for receipt in receipts if "not_saved" in receipt]
        if failed:
            number = next(receipt["errno"] for receipt in receipts if "not_saved" in receipt)
            raise self._not_saved(step, why := "; ".join(failed), number) from OSError(number, why)
        assert [receipt["rank"] for receipt in receipts] == list(range(len(receipts))), (
            "a receipt from every rank is needed"
        )
        return Manifest(
            name=self._free_name(step),
            step=step,
            serial=1 + max((manifest.serial for manifest in self._manifests([])), default=0),
            identity=self.identity,
            figure=None if figure is None or math.isnan(figure) else float(figure),
            lower_is_better=lower_is_better,
            files={name: WrittenFile(*file) for receipt in receipts for name, file in receipt["files"].items()},
            ranks=[receipt["data"] for receipt in receipts],
            data=checkpoint_reader.plain_json(data, "data"),
        )

    def _free_name(self, step: int) -> str:
        """Return a name that is not taken: after a rollback the same step comes again, and the old one must stay."""
        name, copy = f"step-{step:08d}", 1
        while self.disk.exists(self.folder / name):
            copy += 1
            name = f"step-{step:08d}-{copy}"
        return name

    def _publish(self, partial: Path, manifest: Manifest) -> Path:
        for stray in set(filter(_OURS.fullmatch, self.disk.list_folder(partial))) - set(manifest.files):
            self.disk.unlink(partial / stray)
        checkpoint_reader.write_manifest(self.disk, partial, manifest)
        self.disk.fsync_folder(partial)
        self.disk.rename(partial, path := self.folder / manifest.name)
        self.disk.fsync_folder(self.folder)
        self.disk.fsync_folder(self.folder.parent)
        return path

    def _rotate(self, published: str) -> None:
        """Remove all but the last and the best; a failure is only reported.

        Damaged ones stay where they are, uncounted: a disk that cannot be read now may be readable later.
        """
        try:
            known = [manifest for manifest in self._manifests([]) if manifest.identity == self.identity]
            known = [manifest for manifest in known if manifest.name in self._ours - self._damaged]
            newest = sorted(known, key=lambda manifest: -manifest.serial)
            of_all = [manifest for manifest in newest if manifest.of_all_items]
            needed = (*newest[: self.last], *by_figure(known)[: self.best_kept], *of_all[:1])
            kept = {published, *(manifest.name for manifest in needed)}
            for name in {manifest.name for manifest in known} - kept:
                self.disk.rename(self.folder / name, aside := self.folder / f".{name}.removed-{self.token}")
                self._abandon(aside)
        except OSError as error:
            self.tell(f"old checkpoints cannot be removed: {error.strerror or error}")

    def _abandon(self, folder: Path) -> None:
        """Remove a folder that is not published, but only files of checkpoints in it."""
        try:
            self._remove_files(folder, filter(_OURS.fullmatch, self.disk.list_folder(folder)))
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            self.tell(f"{folder} cannot be removed: {error.strerror or error}")

    def _take_back(self, partial: Path, files: Iterable[str]) -> None:
        """Remove the files that one rank has begun to write, and the folder if it is then empty."""
        self._remove_files(partial, files)
        with suppress(OSError):
            partial.rmdir()

    def _remove_files(self, folder: Path, names: Iterable[str]) -> None:
        for name in names:
            with suppress(OSError):  # not created yet, or the disk failed: `sweep` tries again
                self.disk.unlink(folder / name)

    def _why(self, error: OSError, state: State | None = None) -> str:
        size = sum(map(tensor_file.nbytes, state.tensors.values())) if state is not None else 0
        needed = f" ({size / 1e6:,.1f} MB to write)" if size else ""
        return f"{error.strerror or error}{room_left(self.disk, self.folder)}{needed}"

    def _not_saved(self, step: int, why: str, number: int | None) -> NotSaved:
        left = max(filter(_NAME.fullmatch, self.disk.list_folder(self.folder)), key=_order, default=None)
        last = f"the newest saved one: {left}" if left else "there is no earlier one"
        problem = f"the checkpoint of step {step} could not be saved: {why}; {last}"
        look = f"make room: df -h {self.folder}" if number in FULL else f"make it writable: findmnt -T {self.folder}"
        return NotSaved(problem, where=str(self.folder), remedy=look)


def new_token(writer: str) -> str:
    """Return a name for one attempt of a writer: the writer's name, then a random part."""
    return f"{re.sub(r'[^A-Za-z0-9_.]', '_', writer)}-{secrets.token_hex(4)}"


def by_figure(known: Sequence[Manifest]) -> list[Manifest]:
    """Sort those with a figure, best first and newer first among equals; the newest says whether lower is better."""
    known = [manifest for manifest in known if manifest.figure is not None]
    if not known:
        return []
    lower = max(known, key=lambda manifest: manifest.serial).lower_is_better
    alike = [manifest for manifest in known if manifest.lower_is_better == lower]
    return sorted(
        alike, key=lambda manifest: (manifest.figure if lower else -(manifest.figure or 0.0), -manifest.serial)
    )


def _order(name: str) -> tuple[int, int]:
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _is_old(folder: Path) -> bool:
    """Say whether a folder and its files have not changed for a day."""
    try:
        touched = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False
    return time.time() - touched > _DAY_S
