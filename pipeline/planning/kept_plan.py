"""The plan that `pipeline plan train` shows, kept: asked again, it is there at once if nothing has changed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from pipeline.cluster.job_spec import Request
from pipeline.codec import recall, remember
from pipeline.dataset.early_items import naming_sizes
from pipeline.dataset.loading import made_table
from pipeline.device.kinds import SETTINGS
from pipeline.planning.prepare import plan_facts
from pipeline.project.user_code import plans_folder

if TYPE_CHECKING:
    from pipeline.memory.outlook import TrainOutlook
    from pipeline.planning.offers import Question


def shown_plan(question: Question) -> TrainOutlook:
    """Return the plan of training as it was made before, or as it is made now and kept."""
    from pipeline.memory.outlook import TrainOutlook

    table: str | None = f"typed: {dict(question.sizes or {})}"
    if not question.sizes:  # what follows from a scan alone is only shown
        with naming_sizes(question.config):
            table = made_table(question.project)
    asked = _asked(question, table) if table else {}
    folder = plans_folder(question.config)
    if asked and (known := recall(folder, "shown plan", asked, TrainOutlook)) is not None:
        question.tell("using the cached plan: its inputs have not changed")
        return known
    from pipeline.planning.training_outlook import plan_training

    outlook = plan_training(question)
    if asked and not outlook.waits_s:  # how long a queue is changes from minute to minute
        remember(folder, "shown plan", asked, outlook)
    return outlook


def _asked(question: Question, table: str) -> dict[str, Any]:
    """Return what a shown plan follows from: its own facts, where it may run, what was measured so far."""
    config, resources = question.config, question.config.cluster.train
    history = sorted((config.cluster.runs / ".profiles").rglob("*.jsonl"))
    limits = ""  # of this machine's own memory, what is free changes from minute to minute
    if config.cluster.executor == "slurm" and not (question.gpus or resources.gpus):
        limits = repr(question.executor.limits_of(Request.of(resources)))
    return {
        **plan_facts(question.project, table),
        "gpus": list(question.gpus),
        "cluster": config.cluster.model_dump(mode="json"),
        "limits": limits,
        "detailed": question.detailed,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)},
        "measured": [(path.name, path.stat().st_size) for path in history],
    }
