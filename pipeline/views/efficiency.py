"""Compares requested with used resources of a run's stages, and suggests better requests (`pipeline report`)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

from pipeline.cluster.verdict import Cause
from pipeline.config.load import read_resolved
from pipeline.config.schema_cluster import StageResources
from pipeline.journal.run_status import NO_JOB, State
from pipeline.project.project import cluster_name, profiles_of
from pipeline.report.plan_tables import Estimate
from pipeline.report.stage_lines import unit_of, wait_lines
from pipeline.report.tables import NUMBERS, Column, plural, table_of
from pipeline.stages.jobs import recipe_name, tasks_at_once
from pipeline.units import GIB, MIB, format_bytes, short_bytes, short_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.cluster.job_spec import Executor
    from pipeline.config.schema import Config
    from pipeline.journal.attempts import Attempt
    from pipeline.journal.budget import Account
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus, StageJob, StageStatus
    from pipeline.memory.history import Suggestion
    from pipeline.project.project import Project
    from pipeline.stages.jobs import StagePlan

    Ran = Sequence[tuple[Attempt, StageJob]]  # attempts that have ended, each with its job

TIME_MARGIN = 1.5
TIME_STEP_S = 300
SPARE_CPUS = 0.5  # efficiency below which fewer cores are suggested
LONG_S = 30.0  # shorter tasks spend most of their time on starting
IDLE_GPU = 0.5  # report GPUs that are busy less than this share of time
SLICE_MARGIN, LEAST_SLICED = 1.1, 20 * GIB  # only larger GPUs have slices
DEFAULT = "default"
COLUMNS: tuple[Column, ...] = (
    ("STAGE", "stage"), ("TASKS", "tasks", "count"), ("TRIES", "attempts", "count"), ("PEAK", "peak_bytes", "bytes"),
    ("REQUESTED", "asked_bytes", "bytes"), ("USED", "mem_used", "percent"), ("CPUS", "cpus", "count"),
    ("CPU USE", "cpu_used", "percent"), ("LONGEST", "longest_s", "span"), ("LIMIT", "limit_s", "span"),
)  # fmt: skip
OOMS = (Cause.HOST_OOM.value, Cause.GPU_OOM.value)
UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Suggested:
    """A better value of a setting for the next run."""

    key: str
    was: int
    value: int  # bytes, seconds or cores
    why: str

    def shown(self, value: int) -> str:
        """Format a value of this setting."""
        name = self.key.rpartition(".")[2]
        return short_bytes(value) if name == "mem" else short_seconds(value) if name == "time" else f"{value:,}"

    @property
    def typed(self) -> str:
        """The better value as --set takes it."""
        units = {"mem": f"{ceil(self.value / MIB)}MiB", "time": f"{self.value // 60}m"}
        return units.get(self.key.rpartition(".")[2], f"{self.value}")


@dataclass(frozen=True, slots=True)
class StageUse:
    """Requested and used resources of a stage's attempts; None: not measured."""

    stage: str
    tasks: int
    attempts: int
    items: int
    causes: dict[str, int]
    cpus: int
    gpus: int
    asked_bytes: int | None  # the highest limit of an attempt
    first_bytes: int | None  # the limit of first attempts
    peak_bytes: int | None  # the highest of all attempts
    median_peak_bytes: int | None
    mem_used: float | None  # used part of the requested memory, weighted by time
    cpu_used: float | None
    limit_s: int | None
    longest_s: float | None
    median_s: float | None
    time_used: float | None  # by the longest
    gpu_peak_bytes: int | None
    gpu_total_bytes: int | None  # of one GPU
    gpu_busy: float | None  # share of the time in which a kernel ran, weighted by time
    items_per_s: float | None  # of one task
    core_hours: float
    gpu_hours: float
    planned_bytes: int | None
    why: str  # the source of the first attempts' memory request
    suggested: tuple[Suggested, ...]
    advice: tuple[str, ...] = ()  # unused resources, in words


def stage_uses(folder: RunFolder, status: RunStatus) -> list[StageUse]:
    """Return the use of each stage with tasks."""
    config = read_resolved(folder.config)
    parts = [part for stage in status.in_order() for part in stage.by_part()]
    stages = [stage for stage in parts if any(task.ended for task in stage.work.values())]
    return [used(stage, config, suggested_memory(config, stage.planned)) for stage in stages]


def suggested_memory(config: Config, planned: StageJob | None) -> Suggestion | None:
    """Return the memory that the next such tasks should request; None without measurements."""
    if planned is None or not planned.recipe:
        return None
    history, cluster = profiles_of(config), cluster_name(config)
    return history.suggest(planned.stage, planned.recipe, cluster, planned_bytes=planned.planned_bytes)


def used(stage: StageStatus, config: Config, mem: Suggestion | None) -> StageUse:
    """Return the use of a stage."""
    ended = [attempt for task in stage.work.values() for attempt in task.ended]
    ran = [(attempt, stage.jobs.get(attempt.job, NO_JOB)) for attempt in ended]
    peaks = [attempt.peak_rss_bytes for attempt in ended if attempt.peak_rss_bytes]
    took = [attempt.elapsed_s for attempt in ended if attempt.elapsed_s > 0]
    limit = max((attempt.ask.time_s for attempt in ended), default=0) or None
    done = [attempt for attempt in ended if attempt.cause is Cause.DONE]
    first = stage.planned or next(iter(stage.jobs.values()), None)
    return StageUse(
        stage=stage.title,
        tasks=sum(not task.split for task in stage.work.values()),
        attempts=len(ended),
        items=sum(attempt.done for attempt in done),
        causes=dict(Counter(attempt.cause.value for attempt in ended)),
        cpus=first.cpus if first else 1,
        gpus=first.gpus if first else 0,
        asked_bytes=max((attempt.ask.mem_bytes for attempt in ended), default=0) or None,
        first_bytes=_asked(ended) or None,
        peak_bytes=max(peaks, default=None),
        median_peak_bytes=int(median(peaks)) if peaks else None,
        mem_used=_share((attempt.peak_rss_bytes, attempt.ask.mem_bytes, attempt.elapsed_s) for attempt in ended),
        cpu_used=_share((attempt.cpu_s, job.cores * attempt.elapsed_s, 1.0) for attempt, job in ran),
        limit_s=limit,
        longest_s=max(took, default=None),
        median_s=median(took) if took else None,
        time_used=max(took) / limit if took and limit else None,
        gpu_peak_bytes=max((attempt.gpu_peak_bytes for attempt in ended if attempt.gpu_peak_bytes), default=None),
        gpu_total_bytes=max((attempt.gpu_total_bytes for attempt in ended if attempt.gpu_total_bytes), default=None),
        gpu_busy=_share((attempt.gpu_busy, 1.0, attempt.elapsed_s) for attempt in ended),
        items_per_s=_share((attempt.done, attempt.elapsed_s, 1.0) for attempt in done),
        core_hours=sum(job.cores * _took_s(attempt) for attempt, job in ran) / 3600,
        gpu_hours=sum(job.cards * _took_s(attempt) for attempt, job in ran) / 3600,
        planned_bytes=(first.planned_bytes or None) if first else None,
        why=first.why if first else "",
        suggested=tuple(_suggestions(stage.name, config, ran, mem)),
        advice=(*_advice(stage.name, config, ran), *_lost(stage)),
    )


def _took_s(attempt: Attempt) -> float:
    """Return the run time of an attempt, including the time before a requeue."""
    return attempt.elapsed_s + attempt.earlier_s


def _advice(name: str, config: Config, ran: Ran) -> Iterator[str]:
    """Yield notes on mostly unused CPUs and GPUs, and sufficient requests."""
    resources = config.cluster.resources(name)
    if (cores := _cores(ran)) and cores < resources.cpus:
        yield f"used {cores} of {resources.cpus} CPUs"
    long = [attempt for attempt, job in ran if job.cards and attempt.elapsed_s >= LONG_S]
    busy = _share((attempt.gpu_busy, 1.0, attempt.elapsed_s) for attempt in long)
    if busy is not None and busy < IDLE_GPU:
        yield f"GPUs were busy {busy:.0%} of the time: loading is slower, give it more CPUs (cluster.{name}.cpus)"
    peak = max((attempt.gpu_peak_bytes or 0 for attempt, _ in ran), default=0)
    total = max((attempt.gpu_total_bytes or 0 for attempt, _ in ran), default=0)
    if peak and total and (slice_bytes := _slice_for(peak, total)):
        cut, whole = round(slice_bytes / GIB), round(total / GIB)
        yield f"the GPU peak of {format_bytes(peak)} would fit a {cut} GB slice of its {whole} GB"


def _lost(stage: StageStatus) -> list[str]:
    """Describe the cost of restarts."""
    said = f"{short_seconds(stage.lost_s)} lost to restarts ({len(stage.restarts)} of them in the same job)"
    return [said] if stage.lost_s else []


def _slice_for(peak_bytes: int, total_bytes: int) -> int | None:
    """Return the smallest MIG slice that holds this memory and a tenth more, or None."""
    parts = [total_bytes // share for share in (8, 4, 2)] if total_bytes >= LEAST_SLICED else []
    return next((part for part in parts if SLICE_MARGIN * peak_bytes <= part), None)


def _share(parts: Iterable[tuple[float | None, float, float]]) -> float | None:
    """Return the weighted share of used in available, without unmeasured or unavailable parts."""
    known = [(used, available, weight) for used, available, weight in parts if used is not None and available > 0]
    total = sum(available * weight for _, available, weight in known)
    return sum(used * weight for used, _, weight in known) / total if total else None


def _suggestions(name: str, config: Config, ran: Ran, mem: Suggestion | None) -> list[Suggested]:
    """Return requests for the next run that are better than the configured ones."""
    key, resources, ended = f"cluster.{name}", config.cluster.resources(name), [attempt for attempt, _ in ran]
    suggestions = []
    if mem is not None and mem.tasks:
        suggestions.append(Suggested(f"{key}.mem", _asked(ended), mem.mem_bytes, mem.why))
    longest = max((attempt.elapsed_s for attempt in ended), default=0.0)
    if longest > 0 and config.cluster.executor != "local":  # no queue rewards a shorter limit there
        time_s = max(1, ceil(TIME_MARGIN * longest / TIME_STEP_S)) * TIME_STEP_S
        why = f"{TIME_MARGIN:g} × the longest task ({short_seconds(longest)}), in steps of {TIME_STEP_S // 60}m"
        suggestions.append(Suggested(f"{key}.time", int(resources.time), time_s, why))
    if (cores := _cores(ran)) and cores < resources.cpus:
        why = f"the busiest task used {cores} of {resources.cpus}"
        suggestions.append(Suggested(f"{key}.cpus", resources.cpus, cores, why))
    return [suggested for suggested in suggestions if suggested.value != suggested.was]


def _asked(ended: Sequence[Attempt]) -> int:
    """Return the memory that the first attempts requested."""
    return max((attempt.ask.mem_bytes for attempt in ended if attempt.number == 1), default=0)


def _cores(ran: Ran) -> int | None:
    """Return how many cores of a process are enough if less than half of their time was used; else None."""
    long = [(attempt.cpu_s, attempt.elapsed_s, job) for attempt, job in ran if attempt.elapsed_s >= LONG_S]
    share = _share((cpu_s, job.cores * elapsed_s, 1.0) for cpu_s, elapsed_s, job in long)
    if share is None or share >= SPARE_CPUS:
        return None
    return max(1, ceil(max((cpu_s or 0.0) / elapsed_s / (job.ranks * job.nodes) for cpu_s, elapsed_s, job in long)))


def estimates(
    project: Project, plans: Iterable[StagePlan], executor: Executor, origins: Mapping[str, str]
) -> list[Estimate]:
    """Return an estimate for each stage, and for each of several encoders."""
    return [_estimate(project, part, executor, origins) for plan in plans for part in plan.parts()]


def _estimate(project: Project, planned: StagePlan, executor: Executor, origins: Mapping[str, str]) -> Estimate:
    stage = planned.stage
    project = stage.at(project, planned.name)
    counts, tasks = planned.counts(), len(planned.survey.shards)
    missing, waiting = counts["missing"], counts.get("waiting", 0)
    at_once = min(tasks, tasks_at_once(project.config, stage, executor)) or 1
    pace = profiles_of(project.config).pace(stage.name, recipe_name(project, stage), cluster_name(project.config))
    task_s = missing / tasks / pace if tasks and pace else None
    ask = planned.ask
    return Estimate(
        stage=planned.title,
        counts=counts,
        tasks=tasks,
        at_once=at_once,
        cpus=planned.job.cpus,
        gpus=planned.job.gpus,
        shared=planned.job.shared,
        mem_bytes=ask.mem_bytes,
        time_s=ask.time_s,
        disk_bytes=planned.survey.bytes,
        task_s=task_s,
        all_s=task_s * ceil(tasks / at_once) if task_s is not None else None if tasks or waiting else 0.0,
        sources=_sources(project, planned, origins, pace),
    )


def _sources(project: Project, planned: StagePlan, origins: Mapping[str, str], pace: float | None) -> dict[str, str]:
    """Return a line on the source of each number of an estimate."""
    key, resources = f"cluster.{planned.stage.name}", planned.stage.resources(project.config)

    def origin(name: str) -> str:
        return origins.get(f"{key}.{name}", DEFAULT)

    mem = "mem" if resources.mem_per_gpu is None else "mem_per_gpu"
    pinned = resources.mem != "auto" or resources.mem_per_gpu is not None
    sources = {}
    if isinstance(resources, StageResources):
        by = "minutes_per_task" if resources.items_per_task == "auto" else "items_per_task"
        sources["tasks"] = f"by {key}.{by}: {getattr(resources, by)} ({origin(by)})"
    sources |= {
        "cpus": f"{key}.cpus ({origin('cpus')})",
        "gpus": f"{key}.gpus ({origin('gpus')})",
        "mem": f"{key}.{mem} ({origin(mem)})" if pinned else planned.job.why,
        "limit": f"{key}.time ({origin('time')})",
        "disk": "estimated" if planned.survey.bytes else "not estimated for this stage",
    }
    about = f"measured: {pace:,.1f} per second and task" if pace else "unknown (no earlier runs)"
    if planned.job.ask.partition:
        sources["partition"] = f"{planned.job.ask.partition}: {planned.job.where}"
    return sources | {"about": about}


def use_report(
    status: RunStatus, stages: Sequence[StageUse], account: Account | None = None, *, verbose: bool = False
) -> list[RenderableType]:
    """Say whether the run's memory was enough; then show what each stage used, and what to request next time."""
    shown: list[RenderableType] = [*_verdict(status, stages)]
    shown += wait_lines(status.waits, status.ended_at or math.inf)
    shown += [f"! {use.stage}: {advice}" for use in stages for advice in use.advice]
    shown += [account.line()] if account else []
    shown += ["", f"Run {status.name} · {status.state.value}"]
    if stages:
        shown.append(table_of(COLUMNS, stages, unknown=UNKNOWN))
    suggested = [setting for use in stages for setting in use.suggested]
    if suggested:
        shown += ["", "Better requests for the next run (mem: auto follows its use by itself):"]
    options = [f"--set {setting.key}={setting.typed}" for setting in suggested]
    width = max(map(len, options), default=0)
    for option, setting in zip(options, suggested, strict=True):
        why = f": {setting.why}" if verbose else ""
        shown.append(f"  {option.ljust(width)}   # was {setting.shown(setting.was)}{why}")
    if not verbose:
        return [*shown, *(["", "Details: -v"] if stages else [])]
    return [*shown, *[""] * bool(stages), *(line for use in stages for line in _details(use))]


def _verdict(status: RunStatus, stages: Sequence[StageUse]) -> Iterator[str]:
    """Yield whether memory was enough, and how many attempts failed."""
    if not stages:
        yield "✓ Up to date: no task was needed" if status.state is State.DONE else "! No task has ended"
        return
    ooms = {use.stage: sum(use.causes.get(cause, 0) for cause in OOMS) for use in stages}
    known = [(use.peak_bytes / use.asked_bytes, use) for use in stages if use.peak_bytes and use.asked_bytes]
    if any(ooms.values()):
        named = ", ".join(f"{stage} ({count})" for stage, count in ooms.items() if count)
        sign, then = ("!", "retries got more") if status.state is State.DONE else ("✗", "see pipeline logs --failed")
        yield f"{sign} Out of memory: {named}; {then}"
    elif known:
        share, use = max(known, key=lambda pair: pair[0])
        size = f"peak {short_bytes(use.peak_bytes or 0)} of {short_bytes(use.asked_bytes or 0)} requested"
        yield f"✓ Memory fits: {size} ({share:.0%}, {use.stage})"
    else:
        yield "! Memory use is unknown: neither Slurm nor the tasks measured it"
    for use in stages:
        if use.gpu_peak_bytes and use.gpu_total_bytes:
            share = use.gpu_peak_bytes / use.gpu_total_bytes
            size = f"peak {short_bytes(use.gpu_peak_bytes)} of {short_bytes(use.gpu_total_bytes)}"
            yield f"✓ GPU memory: {size} ({share:.0%}, {use.stage})"
    if failed := sum(len(stage.failures) for stage in status.in_order()):
        yield f"! {plural(failed, 'attempt')} failed → pipeline logs {status.name} --failed"


def _details(use: StageUse) -> list[str]:
    """Return the measurements of a stage that have no column in the table."""
    pace = f" ({use.items_per_s:,.1f} per second and task)" if use.items_per_s else ""
    parts = [f"{plural(use.items, unit_of(use.stage))}{pace}", f"{use.core_hours:,.2f} core-hours"]
    if use.gpus:
        parts += [f"{use.gpu_hours:,.2f} GPU-hours", f"GPU busy {_known(use.gpu_busy, 'percent')}"]
    planned = f"; planned {short_bytes(use.planned_bytes)}" if use.planned_bytes else ""
    why = f", {use.why}" if use.why else ""
    first, median = (_known(size, "bytes") for size in (use.first_bytes, use.median_peak_bytes))
    memory = f"  memory: first request {first}{why}{planned}, median peak {median}"
    return [f"{use.stage}: {', '.join(parts)}", memory]


def _known(value: float | None, kind: str) -> str:
    return UNKNOWN if value is None else NUMBERS[kind](value)
