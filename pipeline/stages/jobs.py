"""Plans a stage before it begins: its tasks, its jobs, their limits and their GPUs.

A request admits the GPUs of its partition, of its type (`gpu:a100:1`) and with a feature of its constraint. It is made
only if the plan fits every GPU that it admits, because the scheduler may pick any.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pipeline.cluster.candidates import candidates_of, choose, why_there
from pipeline.cluster.job_spec import TASK, Job, Request, format_ranges, parse_ranges
from pipeline.command_line import Command
from pipeline.errors import CacheUnusable, ClusterSilent, PlanInfeasible, SubmissionRefused
from pipeline.files import whose
from pipeline.journal.attempts import Ask
from pipeline.journal.run_status import StageJob
from pipeline.keys import recipe_tag
from pipeline.planning.trainings import PER_GPU
from pipeline.project.container_image import folders_inside
from pipeline.project.project import asked_bytes, cluster_name, profiles_of
from pipeline.project.run_code import TASK_SERVER, WORKER, module_command
from pipeline.stage_names import StageName
from pipeline.stages import script as script_stage
from pipeline.stages import table
from pipeline.store.format.cache_layout import KindLayout
from pipeline.store.format.disk import lay_over
from pipeline.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pipeline.cluster.candidates import Candidate
    from pipeline.cluster.job_spec import Executor, Limits
    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import CardSection
    from pipeline.dataset.worklist import StageSurvey
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.stages.stage import Stage


FORKED = (StageName.EMBED, StageName.TRAIN, StageName.EVALUATE, StageName.PREDICT)  # these stages import torch
_TIE_S = 60.0  # a larger GPU must start earlier by more than this
_REMEDY = (
    "pipeline config show   (cluster.slurm.cards lists this cluster's GPUs; mem, gres and feature distinguish them)"
)


def eligible(cards: Sequence[CardSection], need_bytes: int, gpus: int) -> dict[Request, int]:
    """Return the requests that admit only GPUs with enough memory, each with the memory of its smallest GPU.

    Raise PlanInfeasible if there are none. Without configured GPUs the request does not name a type.
    """
    if not cards or not gpus:
        return {Request(gpus=gpus): 0}
    kinds = dict.fromkeys((card.partition, card.gres) for card in cards)
    fitting = dict(filter(None, (_admitting(cards, *kind, need_bytes, gpus) for kind in kinds)))
    if not fitting:
        raise PlanInfeasible(_shortage(cards, need_bytes), where="cluster.slurm.cards", remedy=_REMEDY)
    return fitting


def first_to_start(requests: Mapping[Request, int], start_of: Callable[[Request], float | None], now: float) -> Request:
    """Return the request whose job starts first; of several within a minute, the one for the smallest GPU."""
    starts = {request: max(start, now) for request in requests if (start := start_of(request)) is not None}
    first = min(starts.values(), default=0.0)
    together = [request for request, start in starts.items() if start <= first + _TIE_S]
    return min(together or requests, key=lambda request: (requests[request], starts.get(request, 0.0), str(request)))


def _admitting(
    cards: Sequence[CardSection], partition: str | None, gres: str | None, need_bytes: int, gpus: int
) -> tuple[Request, int] | None:
    """Return the request for GPUs of a partition and type (empty: every type); None if none of them fits.

    A constraint excludes GPUs that are too small.
    """
    admitted = [card for card in cards if card.partition == partition and gres in (None, card.gres)]
    constraint = ""
    if small := {card.feature for card in admitted if card.mem < need_bytes}:
        admitted = [card for card in admitted if card.feature is not None and card.feature not in small]
        constraint = "|".join(sorted({str(card.feature) for card in admitted}))
    if not admitted:
        return None
    request = Request(gpus=gpus, partition=partition or "", constraint=constraint, card=gres or "")
    return request, min(card.mem for card in admitted)


def _shortage(cards: Sequence[CardSection], need_bytes: int) -> str:
    largest = max(cards, key=lambda card: card.mem)
    name = largest.gres or largest.feature or "GPU"
    needs, has = f"a GPU needs {format_bytes(need_bytes)}", f"has {format_bytes(largest.mem)}"
    if largest.mem < need_bytes:
        return f"{needs}, but the largest GPU here, {name}, {has}"
    return f"{needs}: {name} {has}, but no request distinguishes it from smaller GPUs"


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The plan of a stage; it is recorded when the stage is submitted."""

    stage: Stage
    survey: StageSurvey
    limits: Limits
    job: StageJob  # of first attempts, with all of its tasks
    own: Mapping[str, StageJob] = field(default_factory=dict)  # by encoder, or point of a sweep
    name: str = ""  # the encoder, if this plan is a part of another

    @property
    def ask(self) -> Ask:
        return self.job.ask

    @property
    def title(self) -> str:
        return f"{self.stage.name} {self.name}".rstrip()

    def parts(self) -> list[StagePlan]:
        """Return the plan of each encoder if there are several, else only this one."""
        return [
            StagePlan(self.stage, survey, self.limits, self.own.get(name, self.job), name=name)
            for name, survey in self.survey.parts.items()
        ] or [self]

    def jobs(self) -> Iterable[StageJob]:
        """Return the jobs to submit; the points of a sweep share one."""
        return self.own.values() if self.survey.parts and self.own else [self.job]

    def counts(self) -> dict[str, int]:
        """Return the counts to show and to record."""
        return {**self.survey.counts, "tasks": len(self.survey.shards)}

    def to_json(self) -> dict[str, Any]:
        """Return the JSON for the ledger."""
        counts = {**self.counts(), "cost": self.survey.cost}
        plain = {**counts, "job": self.job.to_json(), "limits": self.limits.to_json()}
        if self.survey.parts:
            plain["parts"] = {part.name: {**part.counts(), "cost": part.survey.cost} for part in self.parts()}
        if self.own:
            plain["jobs"] = {name: job.to_json() for name, job in self.own.items()}
        if self.survey.search:
            plain["search"] = dict(self.survey.search)
        return plain


def plan_stage(project: Project, stage: Stage, executor: Executor, folder: RunFolder | None) -> StagePlan:
    """Find the missing work, cut it into tasks, and choose their resources.

    With a run folder, also write the share of each task into it, and choose the GPUs.
    """
    survey = stage.survey(project, folder, tasks_at_once(project.config, stage, executor))
    if folder is not None:
        survey.write_shards(folder, stage.name)
    first = first_job(project, stage, executor, folder, max(1, len(survey.shards)))
    if folder is not None and survey.shards:
        first = on_cards(project, stage, executor, folder, first)
    first = side_by_side(project, stage, executor, first)
    own = {name: _own_job(project, stage, executor, first, name, survey, folder) for name in survey.names}
    return StagePlan(stage, survey, limits_of(project.config, stage, executor, first.partition), first, own)


def _own_job(
    project: Project,
    stage: Stage,
    executor: Executor,
    first: StageJob,
    name: str,
    survey: StageSurvey,
    folder: RunFolder | None,
) -> StageJob:
    """Return the job for the tasks of one encoder or point: that of all tasks, with its own memory."""
    tasks = [number for number, shard in enumerate(survey.shards) if shard.of == name]
    job = first_job(stage.at(project, name), stage, executor, folder)
    ask = replace(job.ask, partition="") if first.partition else job.ask
    ask = first.ask if first.sharing > 1 else ask  # equal requests share a job
    job = replace(job, tag=first.tag, tasks=format_ranges(tasks), ask=ask, where="" if first.partition else job.where)
    job = replace(job, card=first.card, partition=first.partition, constraint=first.constraint)
    return replace(job, sharing=first.sharing)


def side_by_side(project: Project, stage: Stage, executor: Executor, job: StageJob) -> StageJob:
    """Return the job with as many tasks side by side as share its GPU and fit on a node."""
    wanted = min(stage.sharing(project), len(parse_ranges(job.tasks)))
    most, why = wanted, ""
    while most > 1:
        try:
            executor.check(job_of(None, project.config, replace(job, tasks=f"0-{most - 1}", sharing=most)))
            break
        except ClusterSilent:
            break
        except SubmissionRefused as error:
            most, why = most - 1, error.what
    if why and project.config.train.sweep.per_gpu != "auto":
        what = f"{wanted} trainings do not fit side by side on a node: {why}"
        remedy = Command.submit(stage.name).with_settings((PER_GPU, str(most)))
        raise PlanInfeasible(what, where=PER_GPU, remedy=remedy)
    return replace(job, sharing=most)


def tasks_at_once(config: Config, stage: Stage, executor: Executor) -> int:
    """Return how many tasks of a stage can run at once."""
    most = limits_of(config, stage, executor).running_tasks
    if most is not None and not executor.outlives and not stage.together:
        return most
    return stage.parallel(config) if most is None else min(stage.parallel(config), most)


def limits_of(config: Config, stage: Stage, executor: Executor, partition: str = "") -> Limits:
    """Return the limits of a stage's tasks in a partition. Default: the configured one."""
    request = Request.of(stage.resources(config))
    return executor.limits_of(replace(request, partition=partition or request.partition))


def candidates(project: Project, stage: Stage, executor: Executor) -> tuple[Candidate, ...]:
    """Return the partitions that a stage's tasks may use, the best first; empty if only one is configured."""
    resources, site = stage.resources(project.config), project.config.cluster.slurm
    if resources.partition or project.config.cluster.executor != "slurm":
        return ()
    return candidates_of(site, lambda name: limits_of(project.config, stage, executor, name))


def _placed(project: Project, stage: Stage, executor: Executor, job: StageJob) -> StageJob:
    """Return a job with its partition, chosen among several, and the reason."""
    where, why = place(project, stage, executor, job.ask)
    return replace(job, ask=replace(job.ask, partition=where), where=why)


def place(project: Project, stage: Stage, executor: Executor, ask: Ask) -> tuple[str, str]:
    """Return the partition for such a request, and the reason; both empty if only one is configured."""
    if not (found := candidates(project, stage, executor)):
        return "", ""
    nodes = stage.resources(project.config).nodes
    where = choose(found, ask.mem_bytes, ask.time_s, nodes=nodes)
    return where, why_there(found, where, ask.mem_bytes, ask.time_s, nodes)


def first_job(
    project: Project, stage: Stage, executor: Executor, folder: RunFolder | None = None, tasks: int = 1
) -> StageJob:
    """Return the job of first attempts; its memory is the configured, else the measured, else the planned."""
    limits, resources = limits_of(project.config, stage, executor), stage.resources(project.config)
    planned_bytes, recipe = stage.mem_bytes(project), recipe_name(project, stage)
    mem_bytes, why = _first_bytes(project, stage, limits, planned_bytes, recipe)
    job = StageJob(
        tag=f"{folder.unique if folder else 'RUN'}-{stage.name}-0",
        stage=stage.name,
        tasks=f"0-{tasks - 1}",
        attempt=1,
        ask=Ask(mem_bytes, int(resources.time)),
        cpus=resources.cpus,
        gpus=resources.gpus,
        why=why,
        planned_bytes=planned_bytes,
        recipe=recipe,
        nodes=resources.nodes,
        ranks=resources.ranks_per_node,
        parallel=stage.parallel(project.config) if stage.are_apart(project.config) else 0,
    )
    return _placed(project, stage, executor, job)


def _first_bytes(project: Project, stage: Stage, limits: Limits, planned_bytes: int, recipe: str) -> tuple[int, str]:
    """Return the memory of a first attempt, and the reason for it."""
    resources = stage.resources(project.config)
    if resources.mem != "auto" or resources.mem_per_gpu is not None:
        return asked_bytes(resources, planned_bytes), "as configured"
    cluster = cluster_name(project.config)
    suggested = profiles_of(project.config).suggest(stage.name, recipe, cluster, planned_bytes=planned_bytes)
    least_bytes = 0 if stage.is_script else planned_bytes  # do not refuse a small machine because of a guess
    mem_bytes = min(suggested.mem_bytes, max(limits.mem_bytes or suggested.mem_bytes, least_bytes))
    return mem_bytes, script_stage.STATED if stage.is_script and not suggested.tasks else suggested.why


def on_cards(project: Project, stage: Stage, executor: Executor, folder: RunFolder, job: StageJob) -> StageJob:
    """Return the job on the GPUs where it would end first; unchanged if no GPUs are configured."""
    config = project.config
    cards, common = config.cluster.slurm.cards, stage.resources(config).constraint or ""
    if not cards or not job.gpus or config.cluster.executor != "slurm":
        return job

    def asking(request: Request) -> StageJob:
        wanted = f"[{request.constraint}]" if request.constraint else ""
        constraint = "&".join(filter(None, [common, wanted]))
        kept = "" if request.partition else job.ask.partition
        ask, why = replace(job.ask, partition=kept), job.where if kept else ""
        return replace(job, card=request.card, partition=request.partition, constraint=constraint, ask=ask, where=why)

    def start_of(request: Request) -> float | None:
        try:
            return executor.starts(job_of(folder, config, replace(asking(request), tasks="0")))
        except SubmissionRefused:
            return None

    requests = eligible(cards, stage.gpu_bytes(project), job.gpus)
    return asking(first_to_start(requests, start_of, time.time()))


def script_outline(project: Project, stage: Stage, executor: Executor) -> dict[str, Any]:
    """Return the plan of a script, with the resources of its first attempt."""
    first, limits = first_job(project, stage, executor), limits_of(project.config, stage, executor)
    return script_stage.outline(project, first.ask.mem_bytes, first.why, limits.mem_bytes)


def recipe_name(project: Project, stage: Stage) -> str:
    """Return the name under which measurements of a stage are remembered."""
    return recipe_tag(stage.name, stage.recipe(project)).hex()


def refuse_unfit_disk(project: Project, survey: StageSurvey, kinds: Iterable[str]) -> None:
    """Raise if the cache's disk is read-only or too full for the results of a stage."""
    root = project.config.cache.root
    place = next(folder for folder in (root, *root.parents) if folder.exists())
    layouts = [KindLayout(root / kind) for kind in kinds]
    written = [folder for layout in layouts for folder in (layout.folder, layout.partials, layout.shards)]
    try:
        with tempfile.TemporaryFile(dir=place):
            free_bytes = shutil.disk_usage(place).free
        if closed := next((folder for folder in written if folder.exists() and not os.access(folder, os.W_OK)), None):
            place = closed  # a private folder of another user
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        what = f"the cache cannot be written: {error.strerror}; {whose(place)}"
        elsewhere = lay_over([*([root] if root == place or root in place.parents else []), *project.config.cache.under])
        raise CacheUnusable(what, where=str(root), remedy=elsewhere) from error
    if survey.bytes > free_bytes:
        what = f"the results need {format_bytes(survey.bytes)}, but only {format_bytes(free_bytes)} are free"
        remedy = "free space, or use another disk: --set cache.root=FOLDER"
        raise PlanInfeasible(what, where=str(root), remedy=remedy)


def job_of(folder: RunFolder | None, config: Config, job: StageJob) -> Job:
    """Return a job for an executor; each task's command names run, stage, task and the attempt's resources."""
    stage, ask = table.stage(job.stage, config), job.ask
    resources, ranks = stage.resources(config), stage.starts_on_node(config)
    request = Request.of(resources)
    if ranks < resources.ranks_per_node:
        request = replace(request, ranks=ranks if resources.nodes * ranks > 1 else 0)  # it starts the others
    request = replace(
        request,
        cpus=job.cpus * resources.ranks_per_node // ranks * job.sharing,
        gpus=job.gpus,
        mem_bytes=ask.mem_bytes * job.sharing,
        time_s=ask.time_s,
        partition=ask.partition or job.partition or request.partition,
        constraint=job.constraint or request.constraint,
        card=job.card,
    )
    words = [str(folder.path) if folder else "RUN", job.stage, TASK]
    words += ["--attempt", str(job.attempt), "--mem", str(ask.mem_bytes)]
    words += ["--shrink", str(ask.shrink)] if ask.shrink else []
    words += ["--careful"] if ask.careful else []
    words += ["--beside", job.tasks, "--sharing", str(job.sharing)] if job.sharing > 1 else []
    parallel = max(1, (job.parallel or resources.parallel) // job.sharing)
    return Job(
        name=job.stage,
        argv=(*module_command(WORKER, folder), *words),
        tasks=tuple(group[0] for group in job.groups),
        log_dir=str(folder.logs) if folder else "logs",
        request=request,
        max_parallel=parallel if config.cluster.executor == "slurm" else None,
        tag=job.tag,
        sees=folders_inside(config, folder.task_root if folder else None),
        fork_server=module_command(TASK_SERVER, folder) if folder and _is_before_forks(folder, config, job) else (),
        # excludes killed tasks and processes that start others
        fork_words=len(words) if job.attempt == job.sharing == 1 and _is_forked(config, stage) else 0,
    )


def _is_forked(config: Config, stage: Stage) -> bool:
    """Tell whether tasks are forked: on one machine, if they import torch and start no processes."""
    if stage.name not in FORKED or config.cluster.executor == "slurm" or stage.is_script:
        return False
    resources = stage.resources(config)
    return not resources.gpus and getattr(resources, "world", 1) == 1


def _is_before_forks(folder: RunFolder, config: Config, job: StageJob) -> bool:
    """Tell whether tasks of this stage or a later one are forked, with the environment of this stage's."""
    stages = json.loads(folder.stages.read_text()) if folder.stages.exists() else []
    names = stages[stages.index(job.stage) :] if job.stage in stages else []
    ahead = (table.stage(name, config) for name in names)
    return any(_is_forked(config, stage) and stage.resources(config).cpus == job.cpus for stage in ahead)
