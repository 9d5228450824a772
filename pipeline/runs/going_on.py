"""Which runs are going on that use a cache, as far as anybody can tell."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.load import from_resolved
from pipeline.errors import ConfigError, PipelineError
from pipeline.runs.folder import NAME, RunFolder, is_newer, runs_in
from pipeline.runs.pending import look
from pipeline.runs.status import RunState, status_of

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.runs.status import RunStatus

HEARD_OF_S = 86_400  # a run of which nothing was heard for so long has never begun


@dataclass(frozen=True, slots=True)
class Going:
    """A run that goes on, and its configuration, where this version can read it."""

    folder: RunFolder
    config: Config | None


def going_on(runs: Path, root: Path) -> list[Going]:
    """Return the runs of a folder that go on and use the cache at `root`, as far as this user can see."""
    try:
        folders = runs_in(runs)
    except ConfigError:  # it is another user's
        return []
    found = []
    for folder in folders:
        config = _config_of(folder)
        if (config is None or uses(config, root)) and _goes_on(folder):
            found.append(Going(folder, config))
    return found


def uses(config: Config, root: Path) -> bool:
    """Say whether a configuration reads a cache."""
    return root.resolve() in {path.resolve() for path in (config.cache.root, *config.cache.under)}


def hidden(runs: Path) -> list[str]:
    """Return the runs of a folder of which nothing can be told: private to others, or of a later version."""
    try:
        names = sorted(name for name in os.listdir(runs) if NAME.fullmatch(name))  # noqa: PTH208 - names are enough
        known = {folder.name for folder in runs_in(runs)}
    except FileNotFoundError:
        return []
    except (OSError, PipelineError):
        return [runs.name]
    unknown = [runs / name for name in names if name not in known]
    return [path.name for path in unknown if not os.access(path, os.X_OK) or is_newer(path)]


def _goes_on(folder: RunFolder) -> bool:
    """Say whether anybody works on a run; jobs may do so that nobody looks after."""
    status: RunStatus = status_of(folder, socket.gethostname())
    jobs = look(status)
    if status.state is RunState.WAITING:
        return time.time() - folder.path.stat().st_mtime < HEARD_OF_S
    if status.state is RunState.RUNNING:
        status = status_of(folder, socket.gethostname(), jobs)
    if status.state is RunState.RUNNING:
        return True
    live = [job for stage in status.stages.values() for job in stage.live]
    return status.state is RunState.ABANDONED and bool(jobs.queued(live))


def _config_of(folder: RunFolder) -> Config | None:
    try:
        return from_resolved(folder.config.read_text(), str(folder.config))
    except (OSError, ConfigError):
        return None
