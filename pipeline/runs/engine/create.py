"""Submitting: freeze what was asked into a run folder, cut what is missing into tasks, say what each task gets."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from pipeline.cluster.card_choice import choose, eligible
from pipeline.cluster.job_spec import TASK, JobSpec
from pipeline.config.load import dump_resolved, from_resolved
from pipeline.config.masking import without_secrets
from pipeline.config.schema_cluster import TrainResources
from pipeline.errors import CacheUnusable, ConfigError, JobFailed, PlanInfeasible, SubmissionRefused
from pipeline.journal import run_folder as folders
from pipeline.journal.attempts import Ask, numbers, ranges
from pipeline.journal.run_folder import runs_in, writing
from pipeline.journal.run_status import Job, RunState, status_of
from pipeline.keys import recipe_tag
from pipeline.memory.history.task_history import Profiles
from pipeline.project.frozen_code import freeze, freeze_files, module_command
from pipeline.project.project import asked_bytes, open_executor
from pipeline.project.restriction import EVERYTHING, Only
from pipeline.project.user_code import load_reader, load_task, sources
from pipeline.report.tables import size
from pipeline.runs.engine.dispatch import pieces
from pipeline.runs.engine.handover import supervisor_spec
from pipeline.runs.engine.run_task import WORKER
from pipeline.runs.model.prepare import DECISIVE
from pipeline.runs.workflow import script_stage, validate_stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.cluster.card_choice import Choice, Shape
    from pipeline.cluster.job_spec import Executor, Limits
    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import StageResources
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import Queue
    from pipeline.project.project import Project
    from pipeline.runs.dataset.worklist import Found
    from pipeline.runs.workflow.script_stage import Outline
    from pipeline.runs.workflow.table import Stage

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
    is_script = script_stage.is_script(project.config, stage.name)
    least_bytes = 0 if is_script else planned_bytes  # what is only stated is no reason to refuse a small machine
    mem_bytes = min(suggested.mem_bytes, max(limits.mem_bytes or suggested.mem_bytes, least_bytes))
    why = script_stage.STATED if is_script and not suggested.tasks else suggested.why
    return First(Ask(mem_bytes, int(resources.time)), why)


def script_outline(project: Project, stage: Stage, executor: Executor) -> Outline:
    """Return what is known of a script before it has run, and what its first attempt is given."""
    limits = limits_for(project, stage, executor)
    first = first_ask(project, stage, profiles_of(project.config), limits)
    return script_stage.outline(project, first.ask.mem_bytes, first.why, limits.mem_bytes)


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
    nodes, ranks = (train.nodes, script_stage.starts_on_node(config, job.stage)) if train else (1, 1)
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
            folder.again.write_text(without_secrets(again) or f"pipeline submit --stage {stages[-1]}")
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


def scripts(project: Project, plans: Sequence[Plan], executor: Executor) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each script; the run's folder stands as RUN."""
    from dataclasses import replace

    from pipeline.cluster.slurm import SlurmExecutor

    assert isinstance(executor, SlurmExecutor)
    for planned in (one for one in plans if one.stage.has_tasks):
        limits = limits_for(project, planned.stage, executor)
        spec = job_spec(project, planned.stage, max(1, len(planned.found.shards)), limits)
        cut = list(pieces(spec.tasks, limits, len(spec.tasks)))
        most = max(1, (spec.max_parallel or len(spec.tasks)) // len(cut))
        for tasks in cut:
            job = replace(spec, tasks=tuple(tasks), max_parallel=most)
            yield f"{planned.stage.name}-{ranges(tasks)}.sbatch", executor.script_for(job)
    yield "supervise.sbatch", executor.script_for(supervisor_spec(None, project.config, "1"))


def choose_cards(project: Project, stage: Stage, spec: JobSpec, executor: Executor) -> Choice | None:
    """Return the cards on which a stage would end first; None where there is nothing to choose from."""
    cards, gpus = project.config.cluster.slurm.cards, stage.resources(project.config).gpus
    if not cards or not gpus or project.config.cluster.executor != "slurm":
        return None

    def start_of(shape: Shape) -> float | None:
        try:
            return executor.starts(shaped(spec, shape))
        except SubmissionRefused:
            return None

    return choose(eligible(cards, stage.gpu_bytes(project), gpus), start_of, time.time())


def shaped(spec: JobSpec, shape: Shape) -> JobSpec:
    """Return a job that asks for these cards."""
    return replace(
        spec,
        card=shape.card,
        partition=shape.partition or spec.partition,
        constraint="&".join(filter(None, [spec.constraint, f"[{shape.constraint}]" if shape.constraint else ""])),
    )


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
    return all(name == validate_stage.NAME for name in stages)


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
