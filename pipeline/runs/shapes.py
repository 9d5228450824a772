"""Which cards a stage's jobs ask for, where the configuration names what the cluster has."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.cluster.choice import choose, eligible
from pipeline.errors import SubmissionRefused

if TYPE_CHECKING:
    from pipeline.cluster.choice import Choice, Shape
    from pipeline.cluster.spec import Executor, JobSpec
    from pipeline.runs.project import Project
    from pipeline.runs.workflow import Stage


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
