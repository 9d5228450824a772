"""One task as it was measured, and the line of JSON that keeps it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.memory.lines import Lines


@dataclass(frozen=True, slots=True)
class Measured:
    """One attempt at a task that ended well, or died of host memory; None is what nobody measured."""

    stage: str
    recipe: str  # hex
    cluster: str
    attempt: int
    task: int
    items: int  # what this attempt finished; 0 says nothing of its pace
    size: int  # its largest item, in the stage's unit of cost; 0 is unknown
    cpus: int
    asked_bytes: int | None
    peak_bytes: int | None
    gpu_peak_bytes: int | None
    killed: bool  # died of host memory: it needed more than the larger of what it asked for and its peak
    elapsed_s: float
    cpu_s: float
    node: str
    at: float  # when it ended: by run, task, attempt and this a task told twice counts once


TASKS = Lines(Measured)
line_of = TASKS.line_of
