"""The folder of a run: the names of all files in it, and how runs are created and found."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date, datetime
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.command_line import Command, quoted
from pipeline.errors import ConfigError, JobFailed, PipelineError
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = re.compile(r"\d{8}-[0-9a-f]{4}")
DATE = len("YYYYMMDD-")
TIMES = 1 << 16  # moments of a day that names distinguish
FORMAT = 1  # format of a run folder; a folder without format.txt has format 1
PRIVATE, SHARED = 0o700, 0o777  # before the umask
OWNER_WRITES = 0o755  # anyone who can write into the folder of runs could replace a run


class _RunFile:
    """The path of one name in a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, _owner: type[RunFolder]) -> Path:
        return folder.path / self._name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of the files of a run."""

    path: Path

    format = _RunFile("format.txt")  # the format of the folder
    config = _RunFile("config.json")  # the configuration, resolved and frozen at submission
    stages = _RunFile("stages.json")  # the names of the stages, in order
    again = _RunFile("again.txt")  # the typed command; it continues the run
    recipes = _RunFile("recipes.json")  # kind and tag of each recipe that the run reads
    items = _RunFile("items.jsonl")  # all items of the data set as the sources gave them, one per line
    only = _RunFile("only")  # the keys of the records that the run may write; absent if it may write all
    meetings = _RunFile("meetings")  # where the ranks of a task exchange their addresses
    task_code = _RunFile("task_code.txt")  # the folder with the frozen copy of your code, if any
    table = _RunFile("table.txt")  # the key of the table of trainable items, in hex
    entered = _RunFile("entered.json")  # the entries of a reader, and their files
    rejected = _RunFile("rejected.jsonl")  # all rejected items with their reasons, one per line
    inventory = _RunFile("inventory.csv")  # all usable items: chains, sizes and keys
    residues_left_out = _RunFile("residues_left_out.csv")  # residues of usable items that are no nodes, and their atoms
    points = _RunFile("points")  # a link to the model of each sweep point, named by its settings
    leaks = _RunFile("leaks.csv")  # items that share an id, a sequence or a cluster with another split
    events = _RunFile("events")  # one file of events per process
    left_out = _RunFile("left_out.jsonl")  # items that killed their task and are skipped from then on, one per line
    claims = _RunFile("claims")  # one file per supervisor visit
    code = _RunFile("code.txt")  # the folder with the frozen copy of this package
    logs = _RunFile("logs")  # output of the tasks
    supervisor_log = _RunFile("supervisor.log")  # output of a supervisor in the background

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def unique(self) -> str:
        """The name with a digest of the path: runs of other projects may begin in the same second."""
        return f"{self.name}-{hashlib.blake2b(os.fsencode(os.path.realpath(self.path)), digest_size=3).hexdigest()}"

    @property
    def task_root(self) -> Path | None:
        """The folder that the user's modules are imported from, or None."""
        return Path(self.task_code.read_text()) if self.task_code.exists() else None

    def command(self) -> Command:
        """Return the command that the run was submitted with; if unknown, one for all stages."""
        try:
            return Command.read(self.again.read_text())
        except OSError:
            return Command.submit("all")

    def todo(self, stage: str) -> Path:
        """Return the work list of a stage, a line each: items to scan, or sequences to embed."""
        return self.path / f"{stage}.todo"

    def order(self, stage: str) -> Path:
        """Return the file with offset and length of each `todo` line, in the order of the tasks, as pairs of u64."""
        return self.path / f"{stage}.order"

    def shards(self, stage: str) -> Path:
        """Return the file that says which part of the work list each task takes."""
        return self.path / f"{stage}.shards.json"

    def found(self, stage: str) -> Path:
        """Return the folder of the damage lists that the tasks of a stage write."""
        return self.path / f"{stage}.found"

    def plan(self, stage: str) -> Path:
        """Return the file with the plan of a stage, which its tasks read."""
        return self.path / f"{stage}.plan.json"

    def on(self, stage: str, task: int, part: int = 0) -> Path:
        """Return the note of a process: its items in work and its progress."""
        return self.path / "on" / f"{stage}-{task:06d}-{part}"


def shown_mode(folder: Path) -> int:
    """Return the mode of a file that only its owner writes and that readers of the folder can read."""
    return 0o600 | (folder.stat().st_mode & 0o044)


def create_folder(runs: Path, now: datetime, *, private: bool = True) -> RunFolder:
    """Create a run folder, private to the user unless configured otherwise; names sort by time."""
    mode = PRIVATE if private else SHARED
    with writing_run(runs):
        runs.mkdir(OWNER_WRITES if private else SHARED, parents=True, exist_ok=True)
        folder = RunFolder(_first_free(runs, now, mode))
    with writing_run(folder.path):
        for subfolder in (folder.events, folder.logs, folder.claims, folder.on("", 0).parent):
            subfolder.mkdir(mode)
        folder.format.write_text(f"{FORMAT}\n")
    return folder


def _first_free(runs: Path, now: datetime, mode: int) -> Path:
    """Create a folder named by the time, or by the next free time."""
    seconds = now.hour * 3600 + now.minute * 60 + now.second
    for number in count(now.toordinal() * TIMES + seconds * TIMES // 86400):
        path = runs / f"{date.fromordinal(number // TIMES):%Y%m%d}-{number % TIMES:04x}"
        with suppress(FileExistsError):
            path.mkdir(mode)
            return path
    raise AssertionError


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
        remedy = f"ls -ld {quoted(runs)}   or use another folder: --set cluster.runs=FOLDER"
        raise ConfigError(f"cannot be listed: {error.strerror}", where=str(runs), remedy=remedy) from error
    return [RunFolder(runs / name) for name in names if _is_run(runs / name)]


def _is_run(path: Path) -> bool:
    """Tell whether a folder is a run that this user can read."""
    return os.access(path / "stages.json", os.R_OK)


def is_newer(path: Path) -> bool:
    """Tell whether a later version made the run, in a format that this one does not know."""
    try:
        format_text = RunFolder(path).format.read_text(errors="replace").strip()
    except OSError:
        return False
    return bool(format_text) and not (format_text.isdecimal() and int(format_text) <= FORMAT)


def hidden(runs: Path) -> list[str]:
    """Return the names of unreadable runs: private to other users, or of a later version."""
    try:
        names = sorted(name for name in os.listdir(runs) if NAME.fullmatch(name))  # noqa: PTH208 - names are enough
        known = {folder.name for folder in runs_in(runs)}
    except FileNotFoundError:
        return []
    except (OSError, PipelineError):
        return [runs.name]
    unknown = [runs / name for name in names if name not in known]
    return [path.name for path in unknown if not os.access(path, os.X_OK) or is_newer(path)]


def _readable(folder: RunFolder) -> RunFolder:
    """Return the run; raise ConfigError if a later version made it."""
    if is_newer(folder.path):
        what = f"has a newer format; this version of pipeline reads up to format {FORMAT}"
        raise ConfigError(
            what, where=str(folder.path), remedy="use the version of pipeline that made it, or a newer one"
        )
    return folder


def find_run(runs: Path, name: str | None) -> RunFolder:
    """Return the run whose name, or its part after the date, has this prefix; without a name, the newest."""
    known = _all_in(runs)
    if name is None:
        if not known:
            raise ConfigError("no runs yet", where=str(runs), remedy=Command.submit("scan"))
        return _readable(known[-1])
    matches = [run for run in known if name and any(part.startswith(name) for part in (run.name, run.name[DATE:]))]
    if len(matches) != 1:
        several = f"{len(matches)} runs begin with {name!r}: {first_few(run.name for run in matches)}"
        what = several if matches else f"no run {name!r} that you can read"
        raise ConfigError(what, where=str(runs), remedy=Command.of("runs list"))
    return _readable(matches[0])


def by_path(name: str) -> RunFolder | None:
    """Return the run in a folder; None if it is not a run."""
    path = Path(name).absolute()
    return _readable(RunFolder(path)) if _is_run(path) else None


@contextmanager
def writing_run(path: Path, setting: str = "cluster.runs") -> Iterator[None]:
    """Turn an OSError while writing into the folder that a setting names into a JobFailed with a remedy."""
    try:
        yield
    except OSError as error:
        then = "   (a writable folder with free space)"
        remedy = Command.submit("all").with_settings((setting, "FOLDER"), then=then)
        raise JobFailed(f"cannot write: {error.strerror or error}", where=str(path), remedy=remedy) from error
