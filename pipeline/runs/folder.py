"""One run is one folder; this file owns every name in it."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pipeline.errors import ConfigError

NAME = re.compile(r"\d{8}-\d{6}-[a-z]+-[0-9a-f]{4}")
PRIVATE = 0o700


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where the files of a run are."""

    path: Path

    @property
    def name(self) -> str:
        """The name people type."""
        return self.path.name

    @property
    def config(self) -> Path:
        """The configuration, resolved and frozen at submission."""
        return self.path / "config.json"

    @property
    def stages(self) -> Path:
        """The names of the stages, in order."""
        return self.path / "stages.json"

    @property
    def items(self) -> Path:
        """Every item of the data set, a line each, as the sources gave them."""
        return self.path / "items.jsonl"

    @property
    def todo(self) -> Path:
        """The items that had to be scanned, a line each; shards are ranges of its bytes."""
        return self.path / "todo.jsonl"

    @property
    def shards(self) -> Path:
        """What each task of the run takes of `todo`."""
        return self.path / "shards.json"

    @property
    def rejected(self) -> Path:
        """Every item that was left out, a line each, with the reason."""
        return self.path / "rejected.jsonl"

    @property
    def events(self) -> Path:
        """One file of events per process that took part."""
        return self.path / "events"

    @property
    def logs(self) -> Path:
        """What the tasks printed."""
        return self.path / "logs"

    @property
    def supervisor_log(self) -> Path:
        """What the supervisor printed, when it ran in the background."""
        return self.path / "supervisor.log"


def create(runs: Path, stage: str, now: datetime) -> RunFolder:
    """Make a new run folder, private to the user."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(runs / f"{now:%Y%m%d-%H%M%S}-{stage}-{secrets.token_hex(2)}")
        folder.path.mkdir(mode=PRIVATE)
        folder.events.mkdir()
        folder.logs.mkdir()
    except OSError as error:
        what = f"cannot make a run folder: {error.strerror}"
        remedy = "pipeline submit --stage scan --set cluster.runs=DIR"
        raise ConfigError(what, where=str(runs), remedy=remedy) from error
    return folder


def runs_in(runs: Path) -> list[RunFolder]:
    """Return the runs in a folder, oldest first."""
    if not runs.is_dir():
        return []
    return [RunFolder(runs / name) for name in sorted(path.name for path in runs.iterdir()) if NAME.fullmatch(name)]


def find(runs: Path, name: str | None) -> RunFolder:
    """Return the run that was named, by its name, its beginning or its path; the newest when none was."""
    known = runs_in(runs)
    if name is None:
        if not known:
            raise ConfigError("there is no run yet", where=str(runs), remedy="pipeline submit --stage scan")
        return known[-1]
    if (Path(name) / "config.json").is_file():
        return RunFolder(Path(name).resolve())
    matches = [folder for folder in known if folder.name.startswith(name)]
    if len(matches) != 1:
        what = f"{len(matches)} runs begin with {name!r}" if matches else f"no run {name!r}"
        raise ConfigError(what, where=str(runs), remedy=f"ls {runs}")
    return matches[0]
