"""Submitting: freeze what was asked into a run folder, and cut what is missing into tasks."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from pipeline.cluster.spec import TASK, JobSpec
from pipeline.config.load import dump_resolved
from pipeline.runs import folder as folders
from pipeline.runs import todo
from pipeline.runs.folder import writing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.config.schema import Config
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.project import Project
    from pipeline.runs.todo import Shard, Todo
    from pipeline.runs.workflow import Stage

WORKER = "pipeline.runs.worker"
SUPERVISOR = "pipeline.runs.supervisor"
TASKS_PER_CPU = 4  # enough that the last task to finish is short
FEWEST_PER_TASK, MOST_PER_TASK = 64, 2048  # a task costs an interpreter and a published file


@dataclass(frozen=True, slots=True)
class Plan:
    """What one stage of a run will do."""

    stage: Stage
    todo: Todo
    shards: tuple[Shard, ...]
    job: JobSpec | None  # None when nothing is missing

    def counts(self) -> dict[str, int]:
        """Return the figures that people are told."""
        found = self.todo
        return {
            "items": found.items,
            "refused": found.refused,
            "unusable": found.unusable,
            "cached": found.cached,
            "missing": found.missing,
            "tasks": len(self.shards),
        }


def plan(project: Project, stage: Stage, cpus: int, folder: RunFolder | None) -> Plan:
    """Compare the data set with the store and cut what is missing into tasks; write it down if there is a folder."""
    found = todo.survey(project, todo.list_items(project), folder)
    shards = todo.cut(found, items_per_task(project, stage, found.missing, cpus)) if found.missing else []
    if folder is not None:
        with writing(folder.shards):
            folder.shards.write_text(json.dumps([asdict(shard) for shard in shards]))
    job = job_spec(project, stage, len(shards), folder) if shards else None
    return Plan(stage, found, tuple(shards), job)


def items_per_task(project: Project, stage: Stage, missing: int, cpus: int) -> int:
    """Return how many items a task takes: as configured, else enough tasks for every core several times over."""
    asked = stage.resources(project).items_per_task
    if asked != "auto":
        return int(asked)
    return max(FEWEST_PER_TASK, min(MOST_PER_TASK, math.ceil(missing / (TASKS_PER_CPU * max(1, cpus)))))


def job_spec(project: Project, stage: Stage, tasks: int, folder: RunFolder | None) -> JobSpec:
    """Return the job that does a stage's tasks; it is told (run, stage, task) and nothing else."""
    resources = stage.resources(project)
    mem_bytes = stage.auto_mem_bytes(project) if resources.mem == "auto" else int(resources.mem)
    if resources.mem_per_gpu is not None:
        mem_bytes = int(resources.mem_per_gpu) * resources.gpus
    run = str(folder.path) if folder else "RUN"
    return JobSpec(
        name=stage.name,
        argv=(*module_command(WORKER), run, stage.name, TASK),
        tasks=tasks,
        cpus=resources.cpus,
        gpus=resources.gpus,
        mem_bytes=mem_bytes,
        time_s=int(resources.time),
        log_dir=str(folder.logs) if folder else "logs",
    )


def module_command(module: str) -> tuple[str, ...]:
    """Return the command that runs a module of this installation, whatever lies in the current folder."""
    code = f"import sys; sys.path[:] = filter(None, sys.path); from {module} import main; sys.exit(main(sys.argv[1:]))"
    return (sys.executable, "-c", code)


def new_run(config: Config, stages: Sequence[str]) -> RunFolder:
    """Make the folder of a run and freeze in it what was asked."""
    label = stages[0] if len(stages) == 1 else "all"
    folder = folders.create(config.cluster.runs, label, datetime.now(tz=timezone.utc))
    with writing(folder.path):
        folder.config.write_text(dump_resolved(config))
        folder.stages.write_text(json.dumps(list(stages)))
    return folder


def start_supervisor(folder: RunFolder) -> int:
    """Start a supervisor in a session of its own, so that it outlives this process and its terminal; return its pid."""
    log = (os.POSIX_SPAWN_OPEN, 1, str(folder.supervisor_log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), log, (os.POSIX_SPAWN_DUP2, 1, 2)]
    command = [*module_command(SUPERVISOR), str(folder.path)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=files, setsid=True)
