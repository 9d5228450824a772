"""One run is one folder; this file owns every name in it."""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.command_line import Command
from pipeline.errors import ConfigError, JobFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}-[a-z]+")
FORMAT = 1  # of the folder's files; a folder that does not tell is of the first
PRIVATE, SHARED = 0o700, 0o777  # what the umask leaves of it
NOBODY_ELSE_WRITES = 0o755  # of the folder of runs: who may write in it could put another run in the place of one


class _RunFile:
    """The path of one name in a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, _owner: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where the files of a run are."""

    path: Path

    format = _RunFile("format.txt")  # the format of the folder, as a number
    config = _RunFile("config.json")  # the configuration, resolved and frozen at submission
    stages = _RunFile("stages.json")  # the names of the stages, in order
    again = _RunFile("again.txt")  # the command that does what is missing: the one that was typed
    items = _RunFile("items.jsonl")  # every item of the data set, a line each, as the sources gave them
    only = _RunFile("only")  # the keys of the records that the run is confined to; absent where it does all
    meetings = _RunFile("meetings")  # where the ranks of a task tell each other where they are
    task_code = _RunFile("task_code.txt")  # the folder of the user's own code at submission; absent where there is none
    table = _RunFile("table.txt")  # the key of the table of what can be trained on, in hex
    entered = _RunFile("entered.json")  # what was read of items that are no structures, and from what
    rejected = _RunFile("rejected.jsonl")  # every item that was left out, a line each, with the reason
    events = _RunFile("events")  # one file of events per process that took part
    left_out = _RunFile("left_out.jsonl")  # what killed its task and is left out for that, a line each
    claims = _RunFile("claims")  # who looks after the run: a file for each visit of a supervisor
    code = _RunFile("code.txt")  # the folder of the package as it was at submission
    logs = _RunFile("logs")  # what the tasks printed
    report = _RunFile("report.html")  # the page that shows how the run goes, as its last supervisor has left it
    supervisor_log = _RunFile("supervisor.log")  # what the supervisor printed, when it ran in the background

    @property
    def name(self) -> str:
        """The name people type."""
        return self.path.name

    @property
    def task_root(self) -> Path | None:
        """Return where the user's own modules are found."""
        return Path(self.task_code.read_text()) if self.task_code.exists() else None

    def command(self) -> Command:
        """Return the command that was typed."""
        return Command.read(self.again.read_text())

    def todo(self, stage: str) -> Path:
        """Return the list of what a stage had to do, a line each: items to scan, or sequences to embed."""
        return self.path / f"{stage}.todo"

    def order(self, stage: str) -> Path:
        """Return the place and length of each line of `todo`, in the order in which tasks take them: pairs of u64."""
        return self.path / f"{stage}.order"

    def shards(self, stage: str) -> Path:
        """Return the list of what each task of a stage takes."""
        return self.path / f"{stage}.shards.json"

    def found(self, stage: str) -> Path:
        """Return the folder of what the tasks of a stage have found: a damage list each."""
        return self.path / f"{stage}.found"

    def plan(self, stage: str) -> Path:
        """Return what was decided about a stage before it began."""
        return self.path / f"{stage}.plan.json"

    def on(self, stage: str, task: int, part: int = 0) -> Path:
        """Return the note of what a task (or one of its processes) is working on, and how far it is."""
        return self.path / "on" / f"{stage}-{task:06d}-{part}"


def create_folder(runs: Path, stage: str, now: datetime, *, private: bool = True) -> RunFolder:
    """Make a new run folder, private to the user unless they want otherwise; names sort by time."""
    name = f"{now:%Y%m%d-%H%M%S}-{now.microsecond // 16:04x}-{stage}"
    with writing_run(runs / name):
        runs.mkdir(NOBODY_ELSE_WRITES if private else SHARED, parents=True, exist_ok=True)
        folder, mode = RunFolder(runs / name), PRIVATE if private else SHARED
        folder.path.mkdir(mode)
        for subfolder in (folder.events, folder.logs, folder.claims, folder.on("", 0).parent):
            subfolder.mkdir(mode)
        folder.format.write_text(f"{FORMAT}\n")
    return folder


def runs_in(runs: Path) -> list[RunFolder]:
    """Return the runs in a folder that this user and this version can read, oldest first."""
    return [folder for folder in _all_in(runs) if not is_newer(folder.path)]


def _all_in(runs: Path) -> list[RunFolder]:
    """Return the runs in a folder that this user can read, of whatever format, oldest first."""
    try:
        names = sorted(path.name for path in runs.iterdir() if NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        remedy = f"ls -ld {runs}   or another folder: --set cluster.runs=FOLDER"
        raise ConfigError(f"cannot be listed: {error.strerror}", where=str(runs), remedy=remedy) from error
    return [RunFolder(runs / name) for name in names if _is_run(runs / name)]


def _is_run(path: Path) -> bool:
    """Say whether a folder was made by `create` and can be read; run folders are private to who made them."""
    return os.access(path / "stages.json", os.R_OK)


def is_newer(path: Path) -> bool:
    """Say whether a run was made by a later version, in a format that this one does not know."""
    try:
        format_text = RunFolder(path).format.read_text(errors="replace").strip()
    except OSError:
        return False
    return bool(format_text) and not (format_text.isdecimal() and int(format_text) <= FORMAT)


def _readable(folder: RunFolder) -> RunFolder:
    """Return a run; raise ConfigError where a later version made it."""
    if is_newer(folder.path):
        what = f"is a run of a newer format; this version of pipeline reads up to format {FORMAT}"
        raise ConfigError(
            what, where=str(folder.path), remedy="use the version of pipeline that made it, or a newer one"
        )
    return folder


def find_run(runs: Path, name: str | None) -> RunFolder:
    """Return the run that was named by its name or its beginning; the newest when none was."""
    known = _all_in(runs)
    if name is None:
        if not known:
            raise ConfigError("there is no run yet", where=str(runs), remedy="pipeline submit --stage scan")
        return _readable(known[-1])
    matches = [folder for folder in known if name and folder.name.startswith(name)]
    if len(matches) != 1:
        what = f"{len(matches)} runs begin with {name!r}" if matches else f"no run {name!r} that you can read"
        raise ConfigError(what, where=str(runs), remedy=f"ls {runs}")
    return _readable(matches[0])


def by_path(name: str) -> RunFolder | None:
    """Return the run whose folder this is, if it is one."""
    path = Path(name).absolute()
    return _readable(RunFolder(path)) if _is_run(path) else None


@contextmanager
def writing_run(path: Path) -> Iterator[None]:
    """Turn what a disk refuses in a run folder into an error for people."""
    try:
        yield
    except OSError as error:
        then = "   (one with room, that can be written)"
        remedy = Command.submit("all").with_settings(("cluster.runs", "FOLDER"), then=then)
        raise JobFailed(f"cannot write: {error.strerror or error}", where=str(path), remedy=remedy) from error
