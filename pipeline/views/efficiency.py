"""What the stages of a run requested and used, and what the next run should request."""

from __future__ import annotations

from collections import Counter
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

from pipeline.cluster.verdict import Cause
from pipeline.config.load import read_resolved
from pipeline.config.schema_cluster import StageResources
from pipeline.project.project import cluster_name, profiles_of
from pipeline.report.facts import Estimate, StageUse, Suggested
from pipeline.stages.jobs import recipe_name, tasks_at_once
from pipeline.units import GIB, format_bytes, short_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pipeline.cluster.job_spec import Executor
    from pipeline.config.schema import Config
    from pipeline.journal.attempts import Attempt
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus, StageJob, StageStatus
    from pipeline.memory.history import Suggestion
    from pipeline.project.project import Project
    from pipeline.stages.jobs import StagePlan

TIME_MARGIN = 1.5
TIME_STEP_S = 300
SPARE_CPUS = 0.5  # efficiency below which fewer cores are suggested
TELLING_S = 30.0  # of shorter tasks most is their start
IDLE_GPU = 0.5  # share of busy time below which it is worth saying
SLICE_MARGIN, LEAST_SLICED = 1.1, 20 * GIB  # smaller GPUs have no slices


def stage_uses(folder: RunFolder, status: RunStatus) -> list[StageUse]:
    """Return what each stage with tasks has used."""
    config = read_resolved(folder.config)
    parts = [part for stage in status.in_order() for part in stage.by_part()]
    stages = [stage for stage in parts if any(task.ended for task in stage.work.values())]
    return [used(stage, config, suggested_memory(config, stage.planned)) for stage in stages]


def suggested_memory(config: Config, planned: StageJob | None) -> Suggestion | None:
    """Return what the next such tasks should request; None without measurements."""
    if planned is None or not planned.recipe:
        return None
    history, cluster = profiles_of(config), cluster_name(config)
    return history.suggest(planned.stage, planned.recipe, cluster, planned_bytes=planned.planned_bytes)


def used(stage: StageStatus, config: Config, mem: Suggestion | None) -> StageUse:
    """Return what a stage has used."""
    ended = [attempt for task in stage.work.values() for attempt in task.ended]
    jobs = stage.jobs
    peaks = [attempt.peak_rss_bytes for attempt in ended if attempt.peak_rss_bytes]
    took = [attempt.elapsed_s for attempt in ended if attempt.elapsed_s > 0]
    limit = max((attempt.ask.time_s for attempt in ended), default=0) or None
    done = [attempt for attempt in ended if attempt.cause is Cause.DONE]
    first = stage.planned or next(iter(jobs.values()), None)
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
        cpu_used=_share((attempt.cpu_s, _cores_of(jobs, attempt) * attempt.elapsed_s, 1.0) for attempt in ended),
        limit_s=limit,
        longest_s=max(took, default=None),
        median_s=median(took) if took else None,
        time_used=max(took) / limit if took and limit else None,
        gpu_peak_bytes=max((attempt.gpu_peak_bytes for attempt in ended if attempt.gpu_peak_bytes), default=None),
        gpu_total_bytes=max((attempt.gpu_total_bytes for attempt in ended if attempt.gpu_total_bytes), default=None),
        gpu_busy=_share((attempt.gpu_busy, 1.0, attempt.elapsed_s) for attempt in ended),
        items_per_s=_share((attempt.done, attempt.elapsed_s, 1.0) for attempt in done),
        core_hours=sum(_cores_of(jobs, attempt) * _took_s(attempt) for attempt in ended) / 3600,
        gpu_hours=sum(_cards_of(jobs, attempt) * _took_s(attempt) for attempt in ended) / 3600,
        planned_bytes=(first.planned_bytes or None) if first else None,
        why=first.why if first else "",
        suggested=tuple(_suggestions(stage.name, config, ended, jobs, mem)),
        advice=tuple(_advice(stage.name, config, ended, jobs)),
    )


def _cores_of(jobs: Mapping[str, StageJob], attempt: Attempt) -> int:
    """Return the cores of an attempt, on all of its nodes."""
    return jobs[attempt.job].cores if attempt.job in jobs else 1


def _cards_of(jobs: Mapping[str, StageJob], attempt: Attempt) -> int:
    """Return the GPUs of an attempt, on all of its nodes."""
    return jobs[attempt.job].cards if attempt.job in jobs else 0


def _took_s(attempt: Attempt) -> float:
    """Return how long an attempt ran, with the time before the scheduler requeued it."""
    return attempt.elapsed_s + attempt.earlier_s


def _advice(name: str, config: Config, ended: Sequence[Attempt], jobs: Mapping[str, StageJob]) -> Iterator[str]:
    """Yield which CPUs and GPUs were mostly unused, as far as measured, and what would be enough."""
    resources = config.cluster.resources(name)
    if (cores := _cores(ended, jobs)) and cores < resources.cpus:
        yield f"used {cores} of {resources.cpus} CPUs"
    telling = [attempt for attempt in ended if _cards_of(jobs, attempt) and attempt.elapsed_s >= TELLING_S]
    busy = _share((attempt.gpu_busy, 1.0, attempt.elapsed_s) for attempt in telling)
    if busy is not None and busy < IDLE_GPU:
        yield f"GPUs were busy {busy:.0%} of the time: loading is slower, give it more CPUs (cluster.{name}.cpus)"
    peak = max((attempt.gpu_peak_bytes or 0 for attempt in ended), default=0)
    total = max((attempt.gpu_total_bytes or 0 for attempt in ended), default=0)
    if peak and total and (slice_bytes := _slice_for(peak, total)):
        cut, whole = round(slice_bytes / GIB), round(total / GIB)
        yield f"the GPU peak of {format_bytes(peak)} would fit a {cut} GB slice of its {whole} GB"


def _slice_for(peak_bytes: int, total_bytes: int) -> int | None:
    """Return the smallest MIG slice of a GPU that holds so much and a tenth more; None if none does."""
    parts = [total_bytes // share for share in (8, 4, 2)] if total_bytes >= LEAST_SLICED else []
    return next((part for part in parts if SLICE_MARGIN * peak_bytes <= part), None)


def _share(parts: Iterable[tuple[float | None, float, float]]) -> float | None:
    """Return used of available by weight; unmeasured or unavailable parts do not count."""
    known = [(used, available, weight) for used, available, weight in parts if used is not None and available > 0]
    total = sum(available * weight for _, available, weight in known)
    return sum(used * weight for used, _, weight in known) / total if total else None


def _suggestions(
    name: str, config: Config, ended: Sequence[Attempt], jobs: Mapping[str, StageJob], mem: Suggestion | None
) -> list[Suggested]:
    """Return better requests for the next run, where they differ from the configured ones."""
    key, resources = f"cluster.{name}", config.cluster.resources(name)
    suggestions = []
    if mem is not None and mem.tasks:
        suggestions.append(Suggested(f"{key}.mem", _asked(ended), mem.mem_bytes, mem.why))
    if (longest := max((attempt.elapsed_s for attempt in ended), default=0.0)) > 0:
        time_s = max(1, ceil(TIME_MARGIN * longest / TIME_STEP_S)) * TIME_STEP_S
        why = f"{TIME_MARGIN:g} × the longest task ({short_seconds(longest)}), in steps of {TIME_STEP_S // 60}m"
        suggestions.append(Suggested(f"{key}.time", int(resources.time), time_s, why))
    if (cores := _cores(ended, jobs)) and cores < resources.cpus:
        why = f"the busiest task used {cores} of {resources.cpus}"
        suggestions.append(Suggested(f"{key}.cpus", resources.cpus, cores, why))
    return [suggested for suggested in suggestions if suggested.value != suggested.was]


def _asked(ended: Sequence[Attempt]) -> int:
    """Return the memory that first attempts requested."""
    return max((attempt.ask.mem_bytes for attempt in ended if attempt.number == 1), default=0)


def _cores(ended: Sequence[Attempt], jobs: Mapping[str, StageJob]) -> int | None:
    """Return how many cores of a process are enough if less than half of their time was used; else None."""
    telling = [attempt for attempt in ended if attempt.cpu_s is not None and attempt.elapsed_s >= TELLING_S]
    share = _share((attempt.cpu_s, _cores_of(jobs, attempt) * attempt.elapsed_s, 1.0) for attempt in telling)
    if share is None or share >= SPARE_CPUS:
        return None
    return max(1, ceil(max(_busy_cores(jobs, attempt) for attempt in telling)))


def _busy_cores(jobs: Mapping[str, StageJob], attempt: Attempt) -> float:
    """Return how many cores a process of an attempt kept busy."""
    job = jobs.get(attempt.job)
    return (attempt.cpu_s or 0.0) / attempt.elapsed_s / (job.ranks * job.nodes if job else 1)


DEFAULT = "default"


def estimates(
    project: Project, plans: Iterable[StagePlan], executor: Executor, origins: Mapping[str, str]
) -> list[Estimate]:
    """Return what each stage would take, and each encoder where there are several."""
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
        mem_bytes=ask.mem_bytes,
        time_s=ask.time_s,
        disk_bytes=planned.survey.bytes,
        task_s=task_s,
        all_s=task_s * ceil(tasks / at_once) if task_s is not None else None if tasks or waiting else 0.0,
        sources=_sources(project, planned, origins, pace),
    )


def _sources(project: Project, planned: StagePlan, origins: Mapping[str, str], pace: float | None) -> dict[str, str]:
    """Return a line for each number of an estimate that says where it comes from."""
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
