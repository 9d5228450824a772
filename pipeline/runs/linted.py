"""Known-bad settings of a configuration and its environment, for `pipeline doctor`; and whether the task loads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pipeline.errors import PipelineError
from pipeline.memory.lint import Facts, Severity, lint
from pipeline.runs import finding
from pipeline.runs.finding import Finding, Verdict
from pipeline.runs.project import Project
from pipeline.runs.scripted import inspect
from pipeline.runs.tasks import load_task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.config.load import Loaded
    from pipeline.config.schema import Config


def check(loaded: Loaded) -> Iterator[Finding]:
    """Name every setting that is known to do harm, and load the task if one is named."""
    for found in lint(facts_of(loaded.config)):
        bad = found.severity is Severity.ERROR
        verdict, remedy = Verdict.BAD if bad else Verdict.NOTE, f"{found.remedy}   ({found.source})"
        yield Finding("settings", verdict, f"{found.what}: {found.why}", remedy, exit_code=2 if bad else 0)
    if loaded.config.train.task is not None:
        try:
            load_task(loaded.config.train.task, loaded.config.train.options, beside=loaded.base_dir)
        except PipelineError as error:
            yield finding.failed("task", error)
        else:
            yield finding.good("task", loaded.config.train.task)
    if loaded.config.train.command is not None:
        try:
            inspect(Project.open(loaded.config, remember=False))
        except PipelineError as error:
            yield finding.failed("script", error)
        else:
            yield finding.good("script", loaded.config.train.command)


def facts_of(config: Config) -> Facts:
    """Return what is known before a model is built."""
    train, resources = config.train, config.cluster.train
    return Facts(
        environment=dict(os.environ),
        empty_cache_every=train.empty_cache_every,
        memory_fraction=train.memory_fraction,
        batch=train.effective_batch,
        micro_batch=None if train.micro_batch == "auto" else train.micro_batch,
        gpus=max(1, resources.gpus) * resources.nodes,
        compile_mode="default" if train.compile else None,
    )
