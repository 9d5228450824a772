"""How busy GPUs were: by a stand-in for NVML's binding, by a stand-in for nvidia-smi, or by nothing."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.device.kinds import VISIBLE
from pipeline.memory.runtime import gpu_use
from pipeline.memory.runtime.gpu_use import GpuLook, GpuSampler, looks_of, nvml_look, parse_smi, smi_look
from pipeline.units import GIB, MIB
from pipeline.waiting import wait_for

SOON_S = 30.0


class NVMLError(Exception):
    """As the binding has it."""


class Binding:
    """A stand-in for pynvml: two whole GPUs, and a slice that does not tell how busy it is."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.begun = False

    def nvmlInit(self) -> None:
        self.begun = True

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"index {index}"

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        return name

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if handle.startswith("MIG-"):
            raise NVMLError
        return SimpleNamespace(gpu=40 if handle == "index 0" else 20)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=9 * GIB if handle == "index 1" else GIB, total=80 * GIB)


def seen_by(look: Callable[[], list[GpuLook]]) -> dict[str, float]:
    """Return the figures of a sampler that has looked at least twice."""
    looked = threading.Semaphore(0)

    def counted() -> list[GpuLook]:
        looked.release()
        return look()

    sampler = GpuSampler([(counted, 0.001)])
    for _ in range(3):  # the third begins when the second has been taken into account
        assert looked.acquire(timeout=SOON_S)
    sampler.close()
    return sampler.figures()


def test_gpus_are_asked_by_index_or_uuid_and_a_slice_says_only_its_memory() -> None:
    look = nvml_look(["0", "MIG-1"], binding := Binding())
    assert binding.begun
    assert look() == [GpuLook(0.4, GIB, 80 * GIB), GpuLook(None, GIB, 80 * GIB)]


def test_figures_are_means_and_the_memory_of_the_fullest_and_what_is_unknown_is_left_out() -> None:
    figures = seen_by(nvml_look(["0", "1"], Binding()))
    assert figures["gpu_busy"] == pytest.approx(0.3, abs=0.1)
    assert (figures["gpu_used_bytes"], figures["gpu_total_bytes"]) == (9 * GIB, 80 * GIB)
    sliced = seen_by(nvml_look(["MIG-1"], Binding()))
    assert "gpu_busy" not in sliced
    assert sliced["gpu_used_bytes"] == GIB
    assert seen_by(lambda: [GpuLook(0.0, MIB, GIB)])["gpu_busy"] == 0.0


def test_what_nvidia_smi_prints_is_read_and_not_available_is_unknown() -> None:
    assert parse_smi("35, 1024, 81559\n[N/A], 10, 9856\nno devices were found\n") == [
        GpuLook(0.35, 1024 * MIB, 81559 * MIB),
        GpuLook(None, 10 * MIB, 9856 * MIB),
    ]


def test_nvidia_smi_is_asked_about_the_gpus_that_were_lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\necho "50, 100, 200"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert smi_look(["2", "3"])() == [GpuLook(0.5, 100 * MIB, 200 * MIB)]
    assert "--id=2,3" in (tmp_path / "asked").read_text()


def test_the_binding_goes_before_the_program_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert [every_s for _, every_s in looks_of(["0"])] == [gpu_use.SMI_EVERY_S]
    monkeypatch.setitem(sys.modules, "pynvml", Binding())
    assert [every_s for _, every_s in looks_of(["0"])] == [gpu_use.NVML_EVERY_S, gpu_use.SMI_EVERY_S]


def test_where_nothing_answers_there_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def fail() -> list[GpuLook]:
        failed.set()
        raise OSError

    sampler = GpuSampler([(fail, 0.001)])
    assert failed.wait(SOON_S)
    assert wait_for(lambda: sampler.figures() == {}, SOON_S, 0.01)
    monkeypatch.delenv(VISIBLE, raising=False)
    assert GpuSampler.of_environment().figures() == {}
