"""What a stage of a run will do, computed before it begins: its plan, its limits, and the jobs that it asks for."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline.cluster.card_choice import choose_shape, eligible
from pipeline.cluster.job_spec import TASK, JobSpec
from pipeline.config.schema_cluster import TrainResources
from pipeline.errors import CacheUnusable, PlanInfeasible, SubmissionRefused
from pipeline.journal.attempts import Ask, parse_ranges
from pipeline.journal.run_status import StageJob
from pipeline.keys import recipe_tag
from pipeline.memory.history.task_history import Profiles
from pipeline.project.project import asked_bytes, cluster_name, profiles_of
from pipeline.project.run_code import WORKER, module_command
from pipeline.report.tables import size
from pipeline.runs.workflow import script_stage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.cluster.card_choice import Choice, Shape
    from pipeline.cluster.job_spec import Executor, Limits
    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import StageResources
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.runs.dataset.worklist import Found
    from pipeline.runs.workflow.script_stage import Outline
    from pipeline.runs.workflow.stage import Stage


@dataclass(frozen=True, slots=True)
class First:
    """What the first attempt at a task is given, and where its memory is from."""

    ask: Ask
    why: str


@dataclass(frozen=True, slots=True)
class StagePlan:
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


def plan_stage(project: Project, stage: Stage, executor: Executor, folder: RunFolder | None) -> StagePlan:
    """Compare the data set with the store and cut what is missing into tasks; write it down if there is a folder."""
    resources = stage.resources(project.config)
    found = stage.survey(project, folder, tasks_at_once(project.config, stage, executor))
    if folder is not None:
        found.write_shards(folder, stage.name)
    first = first_ask(project, stage, profiles_of(project.config), limits_for(project, stage, executor))
    return StagePlan(stage, found, first, resources.cpus, resources.gpus)


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


def recipe_name(project: Project, stage: Stage) -> str:
    """Return the name under which measurements of a stage are remembered."""
    return recipe_tag(stage.name, stage.recipe(project)).hex()


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
    job = StageJob(
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


def spec_of(folder: RunFolder | None, config: Config, job: StageJob) -> JobSpec:
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
        tasks=tuple(parse_ranges(job.tasks)),
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

    return choose_shape(eligible(cards, stage.gpu_bytes(project), gpus), start_of, time.time())


def shaped(spec: JobSpec, shape: Shape) -> JobSpec:
    """Return a job that asks for these cards."""
    return replace(
        spec,
        card=shape.card,
        partition=shape.partition or spec.partition,
        constraint="&".join(filter(None, [spec.constraint, f"[{shape.constraint}]" if shape.constraint else ""])),
    )
