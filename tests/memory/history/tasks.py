"""Made tasks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.memory.history import Measured

MIB = 1 << 20
GIB = 1 << 30

TASK = Measured(
    stage="embed",
    recipe="ab12",
    cluster="north",
    attempt=1,
    task=0,
    items=100,
    size=0,
    cpus=2,
    asked_bytes=GIB,
    peak_bytes=500 * MIB,
    gpu_peak_bytes=None,
    killed=False,
    elapsed_s=400.0,
    cpu_s=700.0,
    node="n1",
    at=1000.0,
)


def measured(task: int = 0, **changed: Any) -> Measured:
    """Return a task of the stage; a later one ended later."""
    return replace(TASK, task=task, **{"at": 1000.0 + task, **changed})


def past(task: int = 0, **changed: Any) -> Measured:
    """Return what is remembered of such a task."""
    return replace(TASK, **{"run": "a", "task": task, "at": 1000.0 + task, **changed})
