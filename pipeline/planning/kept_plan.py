"""The plan that `pipeline plan train` shows, kept: asked again, it is there at once if nothing has changed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from types import UnionType
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from pipeline.cluster.job_spec import Request
from pipeline.dataset.early_items import naming_sizes
from pipeline.dataset.loading import made_table
from pipeline.device.kinds import SETTINGS
from pipeline.files import read_json, write_whole
from pipeline.keys import recipe_key
from pipeline.memory.footprint import EMPTY, Tape
from pipeline.planning.prepare import plan_facts
from pipeline.project.user_code import PLANS

if TYPE_CHECKING:
    from pipeline.planning.offers import Question
    from pipeline.report.plan_facts import TrainOutlook


def shown_plan(question: Question) -> TrainOutlook:
    """Return the plan of training as it was made before, or as it is made now and kept."""
    from pipeline.report.plan_facts import TrainOutlook

    table: str | None = f"typed: {dict(question.sizes or {})}"
    if not question.sizes:  # what follows from a scan alone is only shown
        with naming_sizes(question.config):
            table = made_table(question.project)
    path = question.config.cluster.runs / PLANS / f"{_shown_key(question, table)}.json" if table else None
    with suppress(KeyError, TypeError, ValueError):  # of another version, or torn
        if path is not None and (data := read_json(path)) is not None:
            outlook: TrainOutlook = rebuilt(TrainOutlook, data)
            question.tell("using the cached plan: its inputs have not changed")
            return outlook
    from pipeline.memory.planning.memory_plan import json_data
    from pipeline.planning.training_outlook import plan_training

    outlook = plan_training(question)
    if path is not None and not outlook.waits_s:  # how long a queue is changes from minute to minute
        standing = replace(outlook.standing, setup=EMPTY, first_update=EMPTY, update=EMPTY)  # which no screen shows
        plain = {field.name: getattr(outlook, field.name) for field in fields(outlook)}
        parts = {field.name: getattr(standing, field.name) for field in fields(standing)}
        plain["standing"] = {name: None if isinstance(value, Tape) else value for name, value in parts.items()}
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(json_data(plain)))
    return outlook


def _shown_key(question: Question, table: str) -> str:
    """Return the key of what is shown of a plan: what it follows from, where it may run, what was measured so far."""
    config, resources = question.config, question.config.cluster.train
    history = sorted((config.cluster.runs / ".profiles").rglob("*.jsonl"))
    limits = ""  # of this machine's own memory, what is free changes from minute to minute
    if config.cluster.executor == "slurm" and not (question.gpus or resources.gpus):
        limits = repr(question.executor.limits_of(Request.of(resources)))
    asked = {
        **plan_facts(question.project, table),
        "gpus": list(question.gpus),
        "cluster": config.cluster.model_dump(mode="json"),
        "limits": limits,
        "detailed": question.detailed,
        "environment": {name: value for name, value in os.environ.items() if name.startswith(SETTINGS)},
        "measured": [(path.name, path.stat().st_size) for path in history],
    }
    return recipe_key("shown plan", asked).hex()


def rebuilt(hint: Any, value: Any) -> Any:
    """Return a value of the type that a hint names from plain JSON data; tapes are not kept."""
    if hint is Tape:
        return EMPTY
    if value is None:
        return None
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return rebuilt(next(kind for kind in inner if kind is not type(None)), value)
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return tuple(map(rebuilt, kinds, value))
    if origin in (list, Sequence):
        return [rebuilt(inner[0], entry) for entry in value]
    if origin in (dict, Mapping):
        return {name: rebuilt(inner[1], entry) for name, entry in value.items()}
    if is_dataclass(hint):
        hints = get_type_hints(hint, localns=_names())
        return hint(**{field.name: rebuilt(hints[field.name], value[field.name]) for field in fields(hint)})  # type: ignore[operator]
    return hint(value) if isinstance(hint, type) and issubclass(hint, Enum) else value


def _names() -> dict[str, Any]:
    """Return the names that the types of a plan are written with."""
    from pipeline import errors
    from pipeline.memory import footprint, history, lint
    from pipeline.memory.hardware import host_memory
    from pipeline.memory.planning import memory_plan
    from pipeline.report import plan_facts as shown

    modules = (errors, footprint, host_memory, history, lint, memory_plan, shown)
    names = {name: value for module in modules for name, value in vars(module).items()}
    return {**names, "Mapping": Mapping, "Sequence": Sequence, "Any": Any}
