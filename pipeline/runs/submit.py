"""Submitting: freeze what was asked into a run folder, cut what is missing into tasks, say what each task gets."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from pipeline.cluster.spec import TASK, JobSpec
from pipeline.config.hidden import hidden
from pipeline.config.load import dump_resolved
from pipeline.config.schema_cluster import TrainResources
from pipeline.errors import CacheUnusable, JobFailed, PlanInfeasible, SubmissionRefused
from pipeline.keys import recipe_tag
from pipeline.memory.profiles import Profiles
from pipeline.report.tables import size
from pipeline.runs import folder as folders
from pipeline.runs import scripted
from pipeline.runs.attempts import Ask, numbers
from pipeline.runs.folder import writing
from pipeline.runs.frozen import freeze, freeze_files, module_command
from pipeline.runs.only import EVERYTHING, Only
from pipeline.runs.project import asked_bytes
from pipeline.runs.status import Job
from pipeline.runs.tasks import load_reader, load_task, sources
from pipeline.runs.worker import WORKER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.cluster.spec import Executor, Limits
    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import StageResources
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.project import Project
    from pipeline.runs.scripted import Outline
    from pipeline.runs.todo import Found
    from pipeline.runs.workflow import Stage

SUPERVISOR = "pipeline.runs.supervisor"
TASKED = ("train", "evaluate", "predict")  # the stages that run the user's own code


@dataclass(frozen=True, slots=True)
class First:
    """What the first attempt at a task is given, and where its memory is from."""

    ask: Ask
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What one stage of a run will do."""

    stage: Stage
    found: Found
    first: First
    cpus: int
    gpus: int

    def counts(self) -> dict[str, int]:
        """Return the figures that people are told."""
        return {**self.found.counts, "tasks": len(self.found.shards)}

    def row(self) -> tuple[str, Mapping[str, int], int, int, Ask | None]:
        """Return what a table shows of it."""
        ask = self.first.ask if self.found.shards else None
        return self.stage.name, self.counts(), self.found.bytes, self.cpus, ask


def plan(project: Project, stage: Stage, executor: Executor, folder: RunFolder | None) -> Plan:
    """Compare the data set with the store and cut what is missing into tasks; write it down if there is a folder."""
    resources = stage.resources(project.config)
    found = stage.survey(project, folder, tasks_at_once(project.config, stage, executor))
    if folder is not None:
        found.write_shards(folder, stage.name)
    first = first_ask(project, stage, profiles_of(project.config), limits_for(project, stage, executor))
    return Plan(stage, found, first, resources.cpus, resources.gpus)


def tasks_at_once(config: Config, stage: Stage, executor: Executor) -> int:
    """Return how many tasks of a stage can run at once."""
    resources = stage.resources(config)
    if config.cluster.executor != "local" or stage.together:
        return resources.parallel
    by_gpus = executor.gpus // resources.gpus if resources.gpus else executor.cpus
    return max(1, min(executor.cpus // resources.cpus, by_gpus))


def limits_for(project: Project, stage: Stage, executor: Executor) -> Limits:
    """Return what a task of a stage can be given, where its jobs go."""
    resources = stage.resources(project.config)
    each = resources.ranks_per_node if isinstance(resources, TrainResources) else 1
    return executor.limits_of(resources.partition or "", each * resources.cpus, resources.gpus)


def first_ask(project: Project, stage: Stage, profiles: Profiles, limits: Limits) -> First:
    """Return what a task is given to begin with: as pinned, else as measured before, else as planned."""
    resources, planned_bytes = stage.resources(project.config), stage.mem_bytes(project)
    if resources.mem != "auto" or resources.mem_per_gpu is not None:
        return First(Ask(asked_bytes(resources, planned_bytes), int(resources.time)), "as configured")
    recipe, cluster = recipe_name(project, stage), cluster_name(project.config)
    suggested = profiles.suggest(stage.name, recipe, cluster, planned_bytes=planned_bytes)
    is_script = scripted.is_script(project.config, stage.name)
    least_bytes = 0 if is_script else planned_bytes  # what is only stated is no reason to refuse a small machine
    mem_bytes = min(suggested.mem_bytes, max(limits.mem_bytes or suggested.mem_bytes, least_bytes))
    why = scripted.STATED if is_script and not suggested.tasks else suggested.why
    return First(Ask(mem_bytes, int(resources.time)), why)


def script_outline(project: Project, stage: Stage, executor: Executor) -> Outline:
    """Return what is known of a script before it has run, and what its first attempt is given."""
    limits = limits_for(project, stage, executor)
    first = first_ask(project, stage, profiles_of(project.config), limits)
    return scripted.outline(project, first.ask.mem_bytes, first.why, limits.mem_bytes)


def profiles_of(config: Config) -> Profiles:
    """Return what was measured in earlier runs."""
    return Profiles(config.cluster.runs / ".profiles")


def recipe_name(project: Project, stage: Stage) -> str:
    """Return the name under which measurements of a stage are remembered."""
    return recipe_tag(stage.name, stage.recipe(project)).hex()


def cluster_name(config: Config) -> str:
    """Return where tasks run, as measurements are remembered."""
    return config.cluster.slurm.name if config.cluster.executor == "slurm" else "local"


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


def job_spec(project: Project, stage: Stage, tasks: int, limits: Limits, folder: RunFolder | None = None) -> JobSpec:
    """Return the job that does the first attempt at a stage's tasks."""
    first = first_ask(project, stage, profiles_of(project.config), limits)
    resources = stage.resources(project.config)
    job = Job(
        tag=f"{folder.name if folder else 'RUN'}-{stage.name}-0",
        stage=stage.name,
        tasks=f"0-{tasks - 1}",
        attempt=1,
        ask=first.ask,
        cpus=resources.cpus,
        gpus=resources.gpus,
        why=first.why,
    )
    return spec_of(folder, project.config, job)


def spec_of(folder: RunFolder | None, config: Config, job: Job) -> JobSpec:
    """Return a job as an executor takes it; each task is told (run, stage, task) and what this attempt has."""
    resources: StageResources | TrainResources = getattr(config.cluster, job.stage)
    train = resources if isinstance(resources, TrainResources) else None
    nodes, ranks = (train.nodes, scripted.starts_on_node(config, job.stage)) if train else (1, 1)
    each = train.ranks_per_node // ranks if train else 1  # a script may start the processes of a node itself
    run, ask = str(folder.path) if folder else "RUN", job.ask
    words = [run, job.stage, TASK, "--attempt", str(job.attempt), "--mem", str(ask.mem_bytes)]
    words += ["--shrink", str(ask.shrink)] if ask.shrink else []
    words += ["--careful"] if ask.careful else []
    return JobSpec(
        name=job.stage,
        argv=(*module_command(WORKER, folder), *words),
        tasks=tuple(numbers(job.tasks)),
        cpus=job.cpus * each,
        gpus=job.gpus,
        nodes=nodes,
        ranks=ranks if nodes * ranks > 1 else 0,
        mem_bytes=ask.mem_bytes,
        time_s=ask.time_s,
        log_dir=str(folder.logs) if folder else "logs",
        max_parallel=(job.parallel or resources.parallel) if config.cluster.executor == "slurm" else None,
        tag=job.tag,
        partition=job.partition or resources.partition or "",
        constraint=job.constraint or resources.constraint or "",
        card=job.card,
    )


def new_run(
    config: Config, stages: Sequence[str], again: str = "", beside: Path | None = None, only: Only = EVERYTHING
) -> RunFolder:
    """Make the folder of a run and freeze in it what was asked, and the command that asks for it again.

    `beside` is a folder of the user's own modules: those of the task and the reader are frozen, too.
    """
    now, private = datetime.now(tz=timezone.utc), config.cluster.private
    folder = None
    try:
        folder = folders.create(config.cluster.runs, stages[-1], now, private=private)
        with writing(folder.path):
            folder.code.write_text(str(freeze(config.cluster.runs)))
            is_tasked = any(stage in TASKED for stage in stages)
            if (code := freeze_own(config, beside, is_tasked=is_tasked)) is not None:
                folder.task_code.write_text(str(code))
            folder.config.write_text(dump_resolved(config))
            folder.stages.write_text(json.dumps(list(stages)))
            if not only.is_all:
                only.write(folder)
            folder.again.write_text(hidden(again) or f"pipeline submit --stage {stages[-1]}")
    except JobFailed as error:
        if folder is not None:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise SubmissionRefused(error.what, where=error.where, remedy=error.remedy) from error
    return folder


def freeze_own(config: Config, beside: Path | None, *, is_tasked: bool) -> Path | None:
    """Return the folder of a copy of the user's own code; None where it is ours. A script stays where it lies."""
    if is_tasked and config.train.command is not None:
        return beside
    data = config.data
    files: list[tuple[str, Path]] = []
    if is_tasked and config.train.task is not None:
        files += sources(load_task(config.train.task, config.train.options, beside=beside))
    if data.reader is not None:
        files += sources(load_reader(data.reader, data.path, data.options, beside=beside))
    return freeze_files(sorted(dict(files).items()), config.cluster.runs) if files else None


def pay_visit(folder: RunFolder) -> None:
    """Pay a run a visit, by its own code, without waiting for anything; raise when that fails."""
    done = subprocess.run([*module_command(SUPERVISOR, folder), str(folder.path), "--visit", "--now"], check=False)
    if done.returncode:
        what = f"its supervisor ended with {done.returncode}"
        raise JobFailed(what, where=folder.name, remedy=f"pipeline status {folder.name}")


def start_supervisor(folder: RunFolder) -> int:
    """Start a supervisor in a session of its own, so that it outlives this process and its terminal; return its pid."""
    log = (os.POSIX_SPAWN_OPEN, 1, str(folder.supervisor_log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), log, (os.POSIX_SPAWN_DUP2, 1, 2)]
    command = [*module_command(SUPERVISOR, folder), str(folder.path)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=files, setsid=True)
