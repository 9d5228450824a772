"""Submitting: freeze what was asked into a run folder, and cut what is missing into tasks."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from pipeline.cluster.spec import TASK, JobSpec
from pipeline.config.load import dump_resolved
from pipeline.errors import CacheUnusable, PlanInfeasible
from pipeline.report.tables import size
from pipeline.runs import folder as folders
from pipeline.runs.folder import writing
from pipeline.runs.project import asked_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.config.schema import Config, StageResources
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.project import Project
    from pipeline.runs.todo import Found
    from pipeline.runs.workflow import Stage

WORKER = "pipeline.runs.worker"
SUPERVISOR = "pipeline.runs.supervisor"


@dataclass(frozen=True, slots=True)
class Plan:
    """What one stage of a run will do."""

    stage: Stage
    found: Found
    job: JobSpec | None  # None when nothing is missing
    mem_bytes: int  # what a task is thought to need

    def counts(self) -> dict[str, int]:
        """Return the figures that people are told."""
        return {**self.found.counts, "tasks": len(self.found.shards)}


def plan(project: Project, stage: Stage, cpus: int, gpus: int, folder: RunFolder | None) -> Plan:
    """Compare the data set with the store and cut what is missing into tasks; write it down if there is a folder."""
    found = stage.survey(project, folder, _at_once(stage.resources(project), cpus, gpus))
    if folder is not None:
        found.write_shards(folder, stage.name)
    job = job_spec(project, stage, len(found.shards), folder) if found.shards else None
    return Plan(stage, found, job, stage.mem_bytes(project))


def _at_once(resources: StageResources, cpus: int, gpus: int) -> int:
    """Return how many tasks of a stage can run at once on so much."""
    return max(1, min(cpus // resources.cpus, gpus // resources.gpus if resources.gpus else cpus))


def refuse_unfit_disk(project: Project, found: Found) -> None:
    """Raise when the cache's disk cannot be written, or has no room for what a stage will make."""
    root = project.config.cache.root
    place = next(one for one in (root, *root.parents) if one.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            free_bytes = shutil.disk_usage(place).free
    except OSError as error:
        what = f"the cache cannot be written: {error.strerror}"
        remedy = "choose a folder that can be written: --set cache.root=FOLDER"
        raise CacheUnusable(what, where=str(root), remedy=remedy) from error
    if found.bytes > free_bytes:
        what = f"the results need {size(found.bytes)}, and {size(free_bytes)} are free"
        remedy = "make room, or choose another disk: --set cache.root=FOLDER"
        raise PlanInfeasible(what, where=str(root), remedy=remedy)


def job_spec(project: Project, stage: Stage, tasks: int, folder: RunFolder | None) -> JobSpec:
    """Return the job that does a stage's tasks; it is told (run, stage, task) and nothing else."""
    resources = stage.resources(project)
    run = str(folder.path) if folder else "RUN"
    return JobSpec(
        name=stage.name,
        argv=(*module_command(WORKER), run, stage.name, TASK),
        tasks=tasks,
        cpus=resources.cpus,
        gpus=resources.gpus,
        mem_bytes=asked_bytes(resources, stage.mem_bytes(project)),
        time_s=int(resources.time),
        log_dir=str(folder.logs) if folder else "logs",
    )


def module_command(module: str) -> tuple[str, ...]:
    """Return the command that runs a module of this installation, whatever lies in the current folder."""
    code = f"import sys; sys.path[:] = filter(None, sys.path); from {module} import main; sys.exit(main(sys.argv[1:]))"
    return (sys.executable, "-c", code)


def new_run(config: Config, stages: Sequence[str], again: str = "") -> RunFolder:
    """Make the folder of a run and freeze in it what was asked, and the command that asks for it again."""
    folder = folders.create(config.cluster.runs, stages[-1], datetime.now(tz=timezone.utc))
    with writing(folder.path):
        folder.config.write_text(dump_resolved(config))
        folder.stages.write_text(json.dumps(list(stages)))
        folder.again.write_text(again or f"pipeline submit --stage {stages[-1]}")
    return folder


def start_supervisor(folder: RunFolder) -> int:
    """Start a supervisor in a session of its own, so that it outlives this process and its terminal; return its pid."""
    log = (os.POSIX_SPAWN_OPEN, 1, str(folder.supervisor_log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), log, (os.POSIX_SPAWN_DUP2, 1, 2)]
    command = [*module_command(SUPERVISOR), str(folder.path)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=files, setsid=True)
