"""The checkpoints of a training: written by all ranks, published whole, the last and the best kept.

A checkpoint is written into `.step-00001234.partial-TOKEN/`, each rank its own file; then rank 0 seals and renames it.
A rank that fails to write reports it and trains on: no file is tried again, the next checkpoint is a new one.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pipeline.errors import JobFailed
from pipeline.store.format.disk import FULL, Disk, room_left
from pipeline.training.checkpoints import sealed_folder
from pipeline.training.checkpoints.checkpoint import (
    NAME,
    STATE,
    by_figure,
    by_step,
    checkpoints_in,
    open_checkpoint,
    rank_file,
)
from pipeline.training.checkpoints.sealed_folder import MANIFEST, TENSORS, FolderDamaged, WrittenFile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pipeline.training.checkpoints.checkpoint import Checkpoint, State

    Receipt = Mapping[str, Any]  # JSON data: what a rank has written, or why it has not

_ASIDE = re.compile(r"\.(step-\d{8,}(?:-\d+)?)\.(partial|removed)-([\w.-]+)")
_OURS = re.compile(rf"{re.escape(MANIFEST)}|({STATE}|rank-\d{{4,}}){re.escape(TENSORS)}")
_DAY_S = 86_400


class NotSaved(JobFailed):
    """A checkpoint could not be written; training can go on, and the last good one is still there."""


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
        self.identity: Mapping[str, Any] = json.loads(json.dumps(identity))
        self.token = token or new_token(secrets.token_hex(4))
        self.disk, self.check = disk or Disk(), check
        self._damaged: dict[str, str] = {}  # by name: how
        self._ours = set(self.disk.list_folder(folder))  # what an earlier process of this training left, and then more

    # Writing, in two phases

    def write(self, state: State, step: int, *, rank: int = 0) -> Receipt:
        """Write this rank's part of a checkpoint; return a receipt, which every rank must pass to rank 0.

        A disk error is not raised here: the receipt has it, and `publish` raises NotSaved.
        """
        self.check()
        partial = self._partial(step)
        files = {rank_file(rank): state.own} | ({STATE: state.tensors} if rank == 0 else {})
        for tensors in files.values():
            sealed_folder.refuse_strange(tensors)
        written: dict[str, Any] = {}
        try:
            self.disk.make_folder(partial)
            for name, tensors in files.items():
                path = partial / f"{name}{TENSORS}"
                if self.disk.exists(path):  # of an earlier try, which could not be removed
                    self.disk.unlink(path)
                file = sealed_folder.write_tensors(path, tensors, self.disk)
                written[path.name] = [file.bytes, file.digest]
        except OSError as error:
            size = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
            why = f"{self._why(error)} ({size / 1e6:,.1f} MB to write)"
            return {"rank": rank, "not_saved": why, "errno": error.errno}
        return {"rank": rank, "files": written, "data": state.own_data}

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
        partial, receipts = self._partial(step), sorted(receipts, key=lambda receipt: int(receipt["rank"]))
        try:
            self.check()
            if failed := [receipt for receipt in receipts if "not_saved" in receipt]:
                why = "; ".join(f"rank {receipt['rank']}: {receipt['not_saved']}" for receipt in failed)
                raise OSError(failed[0]["errno"], why)
            assert [receipt["rank"] for receipt in receipts] == list(range(len(receipts))), "a receipt from every rank"
            content = {
                "step": step,
                "serial": 1 + max((checkpoint.serial for checkpoint in self._known()), default=0),
                "figure": None if figure is None or math.isnan(figure) else float(figure),
                "lower_is_better": lower_is_better,
                "ranks": [receipt["data"] for receipt in receipts],
                "data": data,
            }
            files = {name: WrittenFile(*file) for receipt in receipts for name, file in receipt["files"].items()}
            path = self.folder / self._free_name(step)
            sealed_folder.publish(partial, path, files, content, self.identity, disk=self.disk)
        except OSError as error:
            self._remove(partial)
            raise self._not_saved(step, error) from error
        except BaseException:
            self._remove(partial)
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
                self._remove(self.folder / name)

    # Reading

    def newest(self, *, of_all: bool = False) -> Checkpoint | None:
        """Return the newest intact checkpoint, all its bytes verified; None only where none was ever saved.

        `of_all`: the newest that all items made, if there is one.
        Damaged ones are reported and skipped; one of another model is an error.
        """
        known = self._known()
        known = [checkpoint for checkpoint in known if of_all and checkpoint.of_all_items] or known
        for checkpoint in known:
            checkpoint.sealed.refuse_stranger(self.identity)
            try:
                checkpoint.sealed.verify()
            except FolderDamaged as error:
                self._skip(checkpoint.path, error)
                continue
            if self._damaged:
                self.tell(f"checkpoint {checkpoint.name} is used instead: step {checkpoint.step}")
            return checkpoint
        if self._damaged:
            first = self._damaged[max(self._damaged, key=by_step)]
            problem = f"none of the {len(self._damaged)} checkpoints is intact; the newest: {first}"
            remedy = f"to start over: mv {self.folder} {self.folder}.damaged"
            raise JobFailed(problem, where=str(self.folder), remedy=remedy)
        return None

    def open(self, name: str) -> Checkpoint:
        """Return a checkpoint by the name of its folder; each file is verified before it is used."""
        checkpoint = open_checkpoint(self.folder / name, disk=self.disk)
        checkpoint.sealed.refuse_stranger(self.identity)
        return checkpoint

    def _known(self) -> list[Checkpoint]:
        return checkpoints_in(self.folder, skip=self._skip, disk=self.disk)

    def _skip(self, path: Path, error: FolderDamaged) -> None:
        """Report a damaged checkpoint once; it no longer counts among those to keep."""
        message = f"checkpoint {path.name} is skipped: {os.path.basename(error.where)} {error.what}"  # noqa: PTH119 - text
        if path.name not in self._damaged:
            self.tell(message)
        self._damaged[path.name] = message

    # Details of writing

    def _partial(self, step: int) -> Path:
        return self.folder / f".step-{step:08d}.partial-{self.token}"

    def _free_name(self, step: int) -> str:
        """Return a name that is not taken: after a rollback the same step comes again, and the old one must stay."""
        name, copy = f"step-{step:08d}", 1
        while self.disk.exists(self.folder / name):
            copy += 1
            name = f"step-{step:08d}-{copy}"
        return name

    def _rotate(self, published: str) -> None:
        """Remove all but the last and the best; a failure is only reported.

        Damaged ones stay where they are, uncounted: a disk that cannot be read now may be readable later.
        """
        try:
            known = [checkpoint for checkpoint in self._known() if checkpoint.sealed.identity == self.identity]
            known = [checkpoint for checkpoint in known if checkpoint.name in self._ours - self._damaged.keys()]
            of_all = [checkpoint for checkpoint in known if checkpoint.of_all_items]
            needed = (*known[: self.last], *by_figure(known)[: self.best_kept], *of_all[:1])
            kept = {published, *(checkpoint.name for checkpoint in needed)}
            for name in {checkpoint.name for checkpoint in known} - kept:
                self.disk.rename(self.folder / name, aside := self.folder / f".{name}.removed-{self.token}")
                self._remove(aside)
        except OSError as error:
            self.tell(f"old checkpoints cannot be removed: {error.strerror or error}")

    def _remove(self, folder: Path) -> None:
        """Remove an unpublished folder, but only files of checkpoints in it; `sweep` tries again what fails."""
        try:
            for name in filter(_OURS.fullmatch, self.disk.list_folder(folder)):
                with suppress(OSError):
                    self.disk.unlink(folder / name)
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            self.tell(f"{folder} cannot be removed: {error.strerror or error}")

    def _why(self, error: OSError) -> str:
        return f"{error.strerror or error}{room_left(self.disk, self.folder)}"

    def _not_saved(self, step: int, error: OSError) -> NotSaved:
        left = max(filter(NAME.fullmatch, self.disk.list_folder(self.folder)), key=by_step, default=None)
        last = f"the newest saved one: {left}" if left else "there is no earlier one"
        problem = f"the checkpoint of step {step} could not be saved: {self._why(error)}; {last}"
        is_full = error.errno in FULL
        look = f"make room: df -h {self.folder}" if is_full else f"make it writable: findmnt -T {self.folder}"
        return NotSaved(problem, where=str(self.folder), remedy=look)


def new_token(writer: str) -> str:
    """Return a name for one attempt of a writer: the writer's name, then a random part."""
    return f"{re.sub(r'[^A-Za-z0-9_.]', '_', writer)}-{secrets.token_hex(4)}"


def _is_old(folder: Path) -> bool:
    """Tell whether a folder and its files have not changed for a day."""
    try:
        touched = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return False
    return time.time() - touched > _DAY_S
