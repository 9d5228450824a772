"""Prunes the folder of runs: first finds and shows unneeded run folders, then removes them.

These runs stay: the newest; active ones; for each table of items that a training may read, the newest run that names
it; and the newest run with an item list. Copies of code are removed if no run names them and they are not young.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.command_line import quoted
from pipeline.dataset.reader_items import read_by_run
from pipeline.errors import ConfigError
from pipeline.files import is_mine
from pipeline.journal.budget import note_pruned
from pipeline.journal.run_folder import NAME, RunFolder, hidden, runs_in
from pipeline.journal.run_view import is_active
from pipeline.project.run_code import COPIES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

YOUNG_S = 86_400.0  # a starting run may be about to name a younger copy of code
GOING = ".pruned-"  # prefix of a folder that is being removed
NEWEST, ACTIVE, FOREIGN, TABLE, ITEMS = (
    "among the newest",
    "not ended, or of unknown state",
    "owned by another user",
    "the newest with an item table, which trainings read",
    "the newest with an item list",
)


@dataclass(frozen=True, slots=True)
class OldRun:
    """A run that is no longer needed."""

    folder: RunFolder
    bytes: int


@dataclass(frozen=True, slots=True)
class Pruning:
    """What would be removed from a folder of runs, and why the others stay."""

    runs: Path
    goes: tuple[OldRun, ...]
    stays: Counter[str]  # why → runs
    copies: tuple[Path, ...]  # of code that no run will name
    left: tuple[Path, ...]  # left by an interrupted pruning or start of a run

    @property
    def bytes(self) -> int:
        return sum(run.bytes for run in self.goes)

    def to_json(self) -> dict[str, Any]:
        goes = [{"run": run.folder.name, "bytes": run.bytes} for run in self.goes]
        copies = [str(path) for path in self.copies]
        return {"runs": str(self.runs), "bytes": self.bytes, "goes": goes, "stays": dict(self.stays), "copies": copies}


def foresee_pruning(runs: Path, keep: int) -> Pruning:
    """Find what can go where the newest `keep` runs stay; nothing is changed."""
    goes, stays, tables = list[OldRun](), Counter[str](), set[str]()
    lists_items = False
    for number, folder in enumerate(reversed(runs_in(runs))):
        table, lists = _table_of(folder), folder.inventory.exists()
        why = NEWEST if number < keep else ACTIVE if is_active(folder) else ""
        why = why or (FOREIGN if not is_mine(folder.path) else "")
        why = why or (TABLE if table and table not in tables else ITEMS if lists and not lists_items else "")
        tables.add(table)
        lists_items = lists_items or lists
        if why:
            stays[why] += 1
        else:
            goes.append(OldRun(folder, _size_of(folder.path)))
    left = (*sorted(runs.glob(f"{GOING}*")), *_never_begun(runs)) if runs.is_dir() else ()
    goes.reverse()
    return Pruning(runs, tuple(goes), stays, _copies(runs, {run.folder.path for run in goes}), left)


def prune(pruning: Pruning) -> Iterator[OldRun]:
    """Carry out a plan, and yield each removed run; a run that was resumed meanwhile stays."""
    for path in pruning.left:
        shutil.rmtree(path, ignore_errors=True)
    for run in pruning.goes:
        if is_active(run.folder) or not run.folder.path.exists():
            continue
        aside = run.folder.path.with_name(f"{GOING}{run.folder.name}")
        note_pruned(pruning.runs, run.folder)
        try:
            with suppress(FileNotFoundError):  # another pruning was quicker
                run.folder.path.rename(aside)  # from now on it does not count as a run
                shutil.rmtree(aside)
                yield run
        except OSError as error:
            what = f"cannot be removed: {error.strerror or error}"
            remedy = f"ls -lR {quoted(aside if aside.exists() else run.folder.path)}   (remaining files of the run)"
            raise ConfigError(what, where=str(error.filename or run.folder.path), remedy=remedy) from error
    for path in _copies(pruning.runs, set()):
        shutil.rmtree(path, ignore_errors=True)


def _never_begun(runs: Path) -> list[Path]:
    """Return the folders of runs whose making was interrupted before anything was written in them, unless young."""
    return [
        path
        for path in sorted(runs.iterdir())
        if NAME.fullmatch(path.name)
        and is_mine(path)
        and time.time() - path.stat().st_mtime > YOUNG_S
        and all(entry.is_dir() or entry == RunFolder(path).format for entry in path.rglob("*"))
    ]


def _table_of(folder: RunFolder) -> str:
    """Return the key of the table of items that a run has made; empty where it made none."""
    with suppress(OSError, UnicodeDecodeError):
        if table := folder.table.read_text():
            return table
    return str(read_by_run(folder).get("table", ""))


def _size_of(folder: Path) -> int:
    """Return the bytes of the files in a folder; files that go meanwhile count as nothing."""
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            size += path.lstat().st_size
    return size


def _copies(runs: Path, without: set[Path]) -> tuple[Path, ...]:
    """Return the copies of code that no run names but those in `without`; none where a run cannot be read."""
    if not runs.is_dir() or hidden(runs):
        return ()
    named = set[str]()
    for folder in (RunFolder(path) for path in runs.iterdir() if NAME.fullmatch(path.name) and path not in without):
        for named_in in (folder.code, folder.task_code):
            with suppress(OSError):
                try:
                    named.add(named_in.read_text())
                except UnicodeDecodeError:  # damaged: which copy it named is not known
                    return ()
    own = (folder for folder in runs.iterdir() if re.fullmatch(rf"{re.escape(COPIES)}(-\d+)?", folder.name))
    copies = (copy for folder in own for copy in sorted(folder.iterdir()))
    return tuple(copy for copy in copies if str(copy) not in named and time.time() - copy.stat().st_mtime > YOUNG_S)
