"""What each stage would take, before anything is submitted, and where each number is from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from pipeline.config.schema_cluster import StageResources
from pipeline.runs import workflow
from pipeline.runs.submit import cluster_name, plan, profiles_of, recipe_name, tasks_at_once

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.cluster.spec import Executor
    from pipeline.runs.project import Project
    from pipeline.runs.submit import Plan
    from pipeline.runs.workflow import Stage

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one stage would take; None is what nobody knows."""

    stage: str
    counts: Mapping[str, int]
    tasks: int
    at_once: int
    cpus: int
    gpus: int
    mem_bytes: int
    time_s: int
    disk_bytes: int
    task_s: float | None
    all_s: float | None
    sources: Mapping[str, str]  # what a number is called → where it is from

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return asdict(self)


def estimates(
    project: Project, names: Sequence[str], executor: Executor, origins: Mapping[str, str]
) -> Iterator[Estimate]:
    """Yield what each stage would take."""
    for stage in map(workflow.stage, names):
        yield _estimate(project, stage, plan(project, stage, executor, folder=None), executor, origins)


def _estimate(
    project: Project, stage: Stage, planned: Plan, executor: Executor, origins: Mapping[str, str]
) -> Estimate:
    tasks, missing = len(planned.found.shards), planned.counts()["missing"]
    abreast = min(tasks, tasks_at_once(project.config, stage, executor)) or 1
    pace = profiles_of(project.config).pace(stage.name, recipe_name(project, stage), cluster_name(project.config))
    task_s = missing / tasks / pace if tasks and pace else None
    ask = planned.first.ask
    return Estimate(
        stage=stage.name,
        counts=planned.counts(),
        tasks=tasks,
        at_once=abreast,
        cpus=planned.cpus,
        gpus=planned.gpus,
        mem_bytes=ask.mem_bytes,
        time_s=ask.time_s,
        disk_bytes=planned.found.bytes,
        task_s=task_s,
        all_s=task_s * ceil(tasks / abreast) if task_s is not None else 0.0 if not tasks else None,
        sources=_sources(project, planned, origins, pace),
    )


def _sources(project: Project, planned: Plan, origins: Mapping[str, str], pace: float | None) -> dict[str, str]:
    """Return where each number is from."""
    key, resources = f"cluster.{planned.stage.name}", planned.stage.resources(project.config)

    def said(name: str) -> str:
        """Return where a setting was made."""
        return origins.get(f"{key}.{name}", DEFAULT)

    assert isinstance(resources, StageResources)  # training is planned apart
    by = "minutes_per_task" if resources.items_per_task == "auto" else "items_per_task"
    mem = "mem" if resources.mem_per_gpu is None else "mem_per_gpu"
    pinned = resources.mem != "auto" or resources.mem_per_gpu is not None
    sources = {
        "tasks": f"by {key}.{by}: {getattr(resources, by)} ({said(by)})",
        "cpus": f"{key}.cpus ({said('cpus')})",
        "gpus": f"{key}.gpus ({said('gpus')})",
        "mem": f"{key}.{mem} ({said(mem)})" if pinned else planned.first.why,
        "limit": f"{key}.time ({said('time')})",
        "disk": "planned" if planned.found.bytes else "not planned for this stage",
    }
    about = f"measured here: {pace:,.1f} a second and task" if pace else "no task of this recipe was measured here"
    return sources | {"about": about}
