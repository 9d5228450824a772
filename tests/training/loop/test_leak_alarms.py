"""A loader's own buffers are no leak, a look costs a training little, and a leak is reported wherever people look."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from pipeline.memory.leaks.inspection import INSPECTED, Inspection
from pipeline.memory.leaks.leak_detector import malloc_counter
from tests.training.loop.loops import Plot, Run, Tiny

MEBIBYTE = 1 << 20
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype, LIBC.malloc.argtypes, LIBC.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the steps at which Python is slowed down."""
    if malloc_counter() is None:
        pytest.skip("no malloc that tells what is in use: glibc before 2.33, or another one")
    steps: list[int] = []
    real = Inspection.end_step

    def end_step(inspection: Inspection) -> bool:
        steps.append(1)
        return real(inspection)

    monkeypatch.setattr(Inspection, "end_step", end_step)
    return steps


def reported_by(run: Run) -> list[str]:
    return [line for line in run.said if "memory leaks" in line]


class Grabbing(Tiny):
    """Takes memory in a library, where no operator and no line of Python shows it."""

    taken: list[int]

    def loss(self, model: Any, batch: Any) -> Any:
        self.taken.append(LIBC.malloc(MEBIBYTE))
        return super().loss(model, batch)


@pytest.mark.nightly
def test_what_an_inspection_misses_is_inspected_once_and_reported_without_blaming_a_log(
    tmp_path: Path, inspected: list[int]
) -> None:
    plot = Plot(train={"epochs": 40})
    task = Grabbing(plot)
    task.taken = []
    try:
        run = Run(plot, tmp_path, task=task).to_end()
    finally:
        for place in task.taken:
            LIBC.free(place)
    assert len(inspected) <= INSPECTED, "a short training is inspected once"
    reported = reported_by(run)
    assert reported
    assert all("no growing object was found" in line and "kept by" not in line for line in reported)
    assert any("host memory grows" in warning for warning in run.tell.report.warnings.values())
