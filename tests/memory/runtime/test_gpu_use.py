"""How busy GPUs were: by a stand-in for nvidia-smi, or by nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.device.kinds import VISIBLE
from pipeline.memory.runtime.meters import GpuReading, GpuSampler, parse_smi, read_gpus
from pipeline.units import GIB, MIB
from pipeline.waiting import wait_for

SOON_S = 30.0


def sampled(read: Callable[[], list[GpuReading]]) -> dict[str, float]:
    """Return the figures of a sampler that has read at least twice."""
    done = threading.Semaphore(0)

    def counted() -> list[GpuReading]:
        done.release()
        return read()

    sampler = GpuSampler(counted, 0.001)
    for _ in range(3):  # the third begins when the second was added
        assert done.acquire(timeout=SOON_S)
    sampler.close()
    return sampler.figures()


def test_figures_are_means_and_the_memory_of_the_fullest_and_unknown_values_are_left_out() -> None:
    whole = [GpuReading(0.4, GIB, 80 * GIB), GpuReading(0.2, 9 * GIB, 80 * GIB)]
    figures = sampled(lambda: whole)
    assert figures["gpu_busy"] == pytest.approx(0.3, abs=0.1)
    assert (figures["gpu_used_bytes"], figures["gpu_total_bytes"]) == (9 * GIB, 80 * GIB)
    sliced = sampled(lambda: [GpuReading(None, GIB, 80 * GIB)])
    assert "gpu_busy" not in sliced
    assert sliced["gpu_used_bytes"] == GIB
    assert sampled(lambda: [GpuReading(0.0, MIB, GIB)])["gpu_busy"] == 0.0


def test_the_lines_of_nvidia_smi_are_read_and_not_available_is_unknown() -> None:
    assert parse_smi("35, 1024, 81559\n[N/A], 10, 9856\nno devices were found\n") == [
        GpuReading(0.35, 1024 * MIB, 81559 * MIB),
        GpuReading(None, 10 * MIB, 9856 * MIB),
    ]


def test_nvidia_smi_is_asked_about_the_assigned_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "50, 100, 200"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert read_gpus(["2", "MIG-3"]) == [GpuReading(0.5, 100 * MIB, 200 * MIB)]
    assert "--id=2,MIG-3" in (tmp_path / "asked").read_text()


def test_without_an_answer_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def fail() -> list[GpuReading]:
        failed.set()
        raise OSError

    sampler = GpuSampler(fail, 0.001)
    assert failed.wait(SOON_S)
    assert wait_for(lambda: sampler.figures() == {}, SOON_S, 0.01)
    monkeypatch.delenv(VISIBLE, raising=False)
    assert GpuSampler.of_environment().figures() == {}
