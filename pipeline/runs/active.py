"""Runs that go on: a second submission of the same work joins them, and is refused where it would do it twice."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from pipeline.config.load import dump_resolved, from_resolved
from pipeline.errors import ConfigError, SubmissionRefused
from pipeline.runs import validating
from pipeline.runs.executors import open_executor
from pipeline.runs.folder import runs_in
from pipeline.runs.only import EVERYTHING, Only
from pipeline.runs.preparing import DECISIVE
from pipeline.runs.status import RunState, status_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.cluster.spec import Executor
    from pipeline.config.schema import Config
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.status import Queue

LOOKED_AT = 20  # runs, the newest


def refuse_double(
    config: Config, stages: Sequence[str], executor: Executor, only: Only = EVERYTHING
) -> RunFolder | None:
    """Return a run that does exactly this already; raise SubmissionRefused when one does it by other means."""
    for folder in reversed(runs_in(config.cluster.runs)[-LOOKED_AT:]):
        if not _has_same_work(folder, config) or _only_looks(stages) != _only_looks(_stages_of(folder)):
            continue
        status = status_of(folder, socket.gethostname(), _queue_of(folder, executor))
        if status.state not in (RunState.RUNNING, RunState.WAITING):
            continue
        is_part = set(stages) <= set(status.planned)
        is_confined = folder.only.exists() or not only.is_all  # to a list of what to do, and perhaps to another
        if is_part and not is_confined and folder.config.read_text() == dump_resolved(config):
            return folder
        what = f"run {folder.name} is working on this data set with the same settings already"
        remedy = f"pipeline status {folder.name}   or   pipeline cancel {folder.name}"
        raise SubmissionRefused(what, where=str(config.cluster.runs), remedy=remedy)
    return None


def _only_looks(stages: Sequence[str]) -> bool:
    """Say whether a run leaves the cache as it is: it may go on beside one that does not."""
    return all(name == validating.NAME for name in stages)


def _stages_of(folder: RunFolder) -> Sequence[str]:
    """Return what a run is to do."""
    names: Sequence[str] = json.loads(folder.stages.read_text())
    return names


def _queue_of(folder: RunFolder, executor: Executor) -> Queue:
    """Return what knows of the jobs of a run: another executor than ours, perhaps."""
    try:
        config = from_resolved(folder.config.read_text(), str(folder.config))
    except ConfigError:  # of another version, whose settings are not ours
        return executor
    return open_executor(config) if config.cluster.executor == "slurm" and not executor.outlives else executor


def _has_same_work(folder: RunFolder, config: Config) -> bool:
    """Tell whether a run makes the same records: whatever is configured alike but where and with how much."""
    try:
        text = folder.config.read_text()
        with suppress(ConfigError):  # of a later version, whose settings are not ours
            text = dump_resolved(from_resolved(text))  # what has become a setting since, was as it is by default
        frozen = json.loads(text)
    except (OSError, ValueError):
        return False
    wanted = json.loads(dump_resolved(config))
    alike = all(frozen.get(name) == value for name, value in wanted.items() if name not in ("cluster", "train"))
    before, now = frozen.get("train", {}), wanted["train"]
    return alike and all(before.get(name) == now[name] for name in (*DECISIVE, "command"))
