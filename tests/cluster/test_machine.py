"""What is found on machines of several kinds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pipeline.cluster.machine import born_at, count_oom_kills, find_gpus, find_mem_bytes, is_alive

GIB = 1 << 30
UNLIMITED_V1 = str(0x7FFFFFFFFFFFF000)


def write(root: Path, files: dict[str, str]) -> tuple[Path, Path]:
    for name, text in {"proc/self/cgroup": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroup"


def test_memory_is_what_is_free_or_what_the_cgroup_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    group, v1 = "proc/self/cgroup", "cgroup/memory/a/memory.limit_in_bytes"
    for kind, files, expected in [
        ("no cgroup", {}, 8 * GIB),
        ("v2", {group: "0::/a/b\n", "cgroup/a/b/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ("above", {group: "0::/a/b\n", "cgroup/a/b/memory.max": "max\n", "cgroup/a/memory.max": f"{GIB}"}, GIB),
        ("larger", {group: "0::/a\n", "cgroup/a/memory.max": f"{64 * GIB}\n"}, 8 * GIB),
        ("v1", {group: "4:memory:/a\n0::/\n", v1: f"{GIB}"}, GIB),
        ("unlimited", {group: "4:memory:/a\n", v1: UNLIMITED_V1}, 8 * GIB),
        ("namespaced", {group: "4:memory:/not/here\n", "cgroup/memory/memory.limit_in_bytes": f"{GIB}"}, GIB),
    ]:
        assert find_mem_bytes(*write(tmp_path / kind, files)) == expected, kind


def test_oom_kills_are_those_of_the_cgroup_where_it_tells(tmp_path: Path) -> None:
    group, events = "proc/self/cgroup", "oom 9\noom_kill 2\noom_group_kill 0\n"
    v1 = {group: "4:memory:/a\n0::/\n", "cgroup/memory/a/memory.oom_control": "under_oom 0\noom_kill 1\n"}
    for kind, files, expected in [
        ("nothing tells", {}, 0),
        ("machine", {"proc/vmstat": "nr_free_pages 7\noom_kill 5\n"}, 5),
        ("v2", {"proc/vmstat": "oom_kill 5\n", group: "0::/a\n", "cgroup/a/memory.events": events}, 2),
        ("v1", v1, 1),
    ]:
        assert count_oom_kills(*write(tmp_path / kind, files)) == expected, kind


def test_gpus_are_those_that_were_given_or_the_device_files_or_what_the_driver_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus(tmp_path) == ()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: some card'\necho 'GPU 1: some card'\n")
    tool.chmod(0o755)
    assert find_gpus(tmp_path) == ("0", "1")
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert find_gpus(tmp_path) == ("0", "2", "10")
    for visible, found in {"3, MIG-5a": ("3", "MIG-5a"), "": ()}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert find_gpus(tmp_path) == found


def test_a_number_that_another_process_has_by_now_is_not_alive() -> None:
    own = os.getpid()
    assert is_alive(own)
    assert is_alive(own, born_at(own))
    assert is_alive(own, seen=time.time())
    assert not is_alive(own, born_at(own) - 60)
    assert not is_alive(own, seen=born_at(own) - 60)
    assert not is_alive(0)


def test_what_has_ended_and_was_not_collected_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_alive(child.pid)


def test_a_process_that_may_not_be_looked_at_is_not_one_from_before_the_last_boot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where /proc hides what others run, another user's process counted as the supervisor that had its number."""

    def denied(_process: psutil.Process) -> float:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "create_time", denied)
    own = os.getpid()
    assert is_alive(own, time.time(), uid=os.getuid())
    assert not is_alive(own, psutil.boot_time() - 60)
    assert not is_alive(own, seen=psutil.boot_time() - 60)
    assert not is_alive(own, time.time(), uid=os.getuid() + 1)
