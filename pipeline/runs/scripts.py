"""The scripts that a submission would hand to Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.runs.attempts import ranges
from pipeline.runs.dispatch import pieces
from pipeline.runs.handover import supervisor_spec
from pipeline.runs.submit import job_spec, limits_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.cluster.spec import Executor
    from pipeline.runs.project import Project
    from pipeline.runs.submit import Plan


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
