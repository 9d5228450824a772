"""What this machine can lend to tasks, and one started task: its limits, and how it ended."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from pipeline.cluster.fork_server import Forked
from pipeline.cluster.job_spec import TaskState, mebibytes
from pipeline.cluster.processes import HAS_PROC, MARK, cpu_s, send, used_bytes
from pipeline.device.host import CGROUPS, NO_LIMIT, PROC, memory_cgroups
from pipeline.device.kinds import VISIBLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.cluster.fork_server import ForkServer
    from pipeline.cluster.job_spec import JobId, JobSpec

DEVICES = Path("/dev")
SAME_S = 2.0  # a clock that is adjusted changes a process's creation time by no more


@dataclass(frozen=True, slots=True)
class Machine:
    """The resources that all local tasks share."""

    cpus: int
    gpus: tuple[str, ...]  # as `VISIBLE` names them
    mem_bytes: int

    @classmethod
    def detect(cls, *, cpus: int | None = None, gpus: int | None = None, mem_bytes: int | None = None) -> Machine:
        """Measure this machine; figures that are given replace the measured ones."""
        gpu_names = find_gpus()
        if gpus is not None:
            gpu_names = (*gpu_names, *map(str, range(len(gpu_names), gpus)))[:gpus]
        return cls(
            cpus=find_cpus() if cpus is None else cpus,
            gpus=gpu_names,
            mem_bytes=find_mem_bytes() if mem_bytes is None else mem_bytes,
        )


class Slots:
    """The resources of a machine that are free."""

    def __init__(self, machine: Machine) -> None:
        self._cpus, self._gpus, self._mem_bytes = machine.cpus, list(machine.gpus), machine.mem_bytes

    def fit(self, spec: JobSpec) -> bool:
        """Tell whether one task of the job could start now."""
        return (
            spec.cpus_on_node <= self._cpus
            and spec.gpus <= len(self._gpus)
            and (spec.mem_bytes or 0) <= self._mem_bytes
        )

    def take(self, spec: JobSpec) -> tuple[str, ...]:
        """Reserve what one task asks for; return its GPUs."""
        self._cpus -= spec.cpus_on_node
        self._mem_bytes -= spec.mem_bytes or 0
        taken, self._gpus = self._gpus[: spec.gpus], self._gpus[spec.gpus :]
        return tuple(taken)

    def give_back(self, spec: JobSpec, gpus: tuple[str, ...]) -> None:
        """Release what one task had."""
        self._cpus += spec.cpus_on_node
        self._mem_bytes += spec.mem_bytes or 0
        self._gpus += gpus


def find_cpus() -> int:
    """Count the cores this process may use, which may be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count() or 1


def find_gpus(devices: Path = DEVICES) -> tuple[str, ...]:
    """Name the GPUs this process may use: `VISIBLE`, or else those whose device files exist."""
    visible = os.environ.get(VISIBLE)
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    numbers = sorted(int(path.name[6:]) for path in devices.glob("nvidia[0-9]*") if path.name[6:].isdigit())
    return tuple(map(str, numbers)) or tuple(map(str, range(len(card_names()))))


def card_names() -> list[str]:
    """Return the names of this machine's GPUs, as the driver says them."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = listed.stdout.decode(errors="replace").splitlines()
    # Without the UUID: another GPU of its kind will do
    return [line.partition(" (UUID")[0] for line in lines if line.startswith("GPU ")]


def find_mem_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the free memory, or the limit of this process's cgroup if that is less."""
    return min(psutil.virtual_memory().available, *_cgroup_limits(proc, cgroups))


def _cgroup_limits(proc: Path, cgroups: Path) -> list[int]:
    """Return the memory limits of this process's cgroup and its parents, and NO_LIMIT."""
    limits = [NO_LIMIT]
    for folder in memory_cgroups(proc, cgroups):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                limits.append(int((folder / name).read_text()))
    return limits


def is_alive(pid: int, born: float = 0.0, *, seen: float = math.inf, uid: int | None = None) -> bool:
    """Tell whether a process lives, and is not a later one with the same pid.

    It was created at `born` (0: unknown), had begun its work at `seen`, and is of the user `uid`, as far as is known.
    """
    if min(born or seen, seen) < psutil.boot_time() - SAME_S:
        return False
    try:
        process = psutil.Process(pid)
        created = process.create_time()
        is_it = abs(created - born) < SAME_S if born else created <= seen + SAME_S
        return is_it and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # somebody else's, and there
        return uid is None or _owner(pid) in (None, uid)


def _owner(pid: int) -> int | None:
    """Return the user whose process it is; None where that is not told."""
    try:
        return (PROC / str(pid)).stat().st_uid
    except OSError:
        return None


def born_at(pid: int) -> float:
    """Return when a process was created, which tells it from later ones with the same pid."""
    return psutil.Process(pid).create_time()


def count_oom_kills(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Count the kernel's OOM kills so far: of this process's cgroup, or else of the whole machine."""
    for folder in memory_cgroups(proc, cgroups):
        for name in ("memory.events", "memory.oom_control"):
            count = _read_counter(folder / name)
            if count is not None:
                return count
    return _read_counter(proc / "vmstat") or 0


def _read_counter(path: Path) -> int | None:
    """Return the `oom_kill` figure in a file of the kernel."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


MEASURING_SHARE = 0.1  # at most this part of a core goes into measuring one task
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
KILLED = 128 + signal.SIGKILL  # how a shell reports a program that was killed


@dataclass(frozen=True, slots=True)
class Ending:
    """How a task ended."""

    state: TaskState
    reason: str = ""
    exit_code: int | None = None
    signal: int | None = None


class Child:
    """A running task: its first process leads a session of its own, so a Ctrl-C in the terminal does not reach it."""

    def __init__(
        self,
        spec: JobSpec,
        job: JobId,
        task: int,
        gpus: tuple[str, ...],
        grace_s: float,
        server: ForkServer | None = None,
    ) -> None:
        """Start the task, forked from a server where there is one, or raise OSError."""
        self.mark = f"{job}_{task}"
        self.gpus = gpus
        self.peak_bytes: int | None = None
        self.cpu_s: float | None = None  # once it has ended
        self._spec, self._grace_s = spec, grace_s
        self._oom_kills = count_oom_kills()
        self._process = _start(spec, job, task, task_environment(spec, gpus, self.mark), server)
        self.pid = self._process.pid
        self.exit_fd = _open_exit_fd(self.pid)
        self._timeout_at = None if spec.time_s is None else time.monotonic() + spec.time_s
        self._measure_at = 0.0
        self._verdict: tuple[TaskState, str] | None = None  # if this executor ended the task
        self._terminated = False
        self._kill_at = 0.0
        self._exited = False

    def stop(self, state: TaskState, reason: str) -> None:
        """End the task, after its grace period; the first reason given stands."""
        if self._verdict is None:
            self._verdict = (state, reason)
            self._kill_at = time.monotonic() + self._grace_s

    def kill(self) -> None:
        """End what is left of the grace period."""
        self._kill_at = 0.0

    def has_exited(self) -> bool:
        """Tell whether the first process has exited just now; its pid stays reserved until the whole tree is gone."""
        if self._exited:
            return False
        try:
            if isinstance(self._process, Forked):
                self._exited = self._process.has_exited()
            else:
                self._exited = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody else in this process took its status
            self._exited = True
        return self._exited

    def hold_to_limits(self, pids: list[int]) -> bool:
        """Check the task's living processes and end those that must end; tell whether the whole tree is gone."""
        now = time.monotonic()
        if self._exited:  # as under Slurm, nothing outlives the first process; without /proc it can only be told once
            return not send(signal.SIGKILL, pids) or not HAS_PROC
        self._measure(pids, now)
        if self._timeout_at is not None and now >= self._timeout_at:
            self.stop(TaskState.TIMEOUT, f"ran longer than its limit of {self._spec.time_s} s")
        if self._verdict is not None:
            self._end(pids, now)
        return False

    def _measure(self, pids: list[int], now: float) -> None:
        """Measure the memory of the process tree, and end the task if it is over its limit."""
        if not pids or now < self._measure_at:
            return
        used, limit = used_bytes(pids), self._spec.mem_bytes
        cost_s = time.monotonic() - now
        self._measure_at = now + (cost_s / MEASURING_SHARE if len(pids) > 1 else 0.0)
        self.peak_bytes = max(used, self.peak_bytes or 0) or None
        if limit is not None and used > limit:
            self.stop(TaskState.OUT_OF_MEMORY, f"used {mebibytes(used)} of {mebibytes(limit)} requested")
            self.kill()

    def _end(self, pids: list[int], now: float) -> None:
        """Send SIGTERM once, and SIGKILL after the grace period."""
        if now >= self._kill_at:
            send(signal.SIGKILL, pids)
        elif not self._terminated:
            send(signal.SIGTERM, pids)
        self._terminated = True

    def ending(self) -> Ending:
        """Reap the first process, and judge how the task ended."""
        self.cpu_s = cpu_s(self.pid)
        code = self._collect()
        if code is None:
            return Ending(*(self._verdict or (TaskState.UNKNOWN, "its exit status is unknown")))
        exit_code, killed_by = (code, None) if code >= 0 else (None, -code)
        state, reason = self._verdict or self._judge(exit_code, killed_by)
        return Ending(state, reason, exit_code, killed_by)

    def _collect(self) -> int | None:
        """Return the exit code, negative if a signal killed the process, or None if the status is lost."""
        if isinstance(self._process, Forked):
            return self._process.reap()
        self._process.returncode = 0  # so that Popen does not look for it, too
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            return None

    def _judge(self, exit_code: int | None, killed_by: int | None) -> tuple[TaskState, str]:
        """Judge the end of a task that this executor did not end itself."""
        if exit_code == 0:
            return TaskState.COMPLETED, ""
        if killed_by == signal.SIGKILL or exit_code == KILLED:
            kills = count_oom_kills() - self._oom_kills
            if kills > 0:
                return TaskState.OUT_OF_MEMORY, f"killed by the kernel: out of memory (oom_kill rose by {kills})"
            return TaskState.FAILED, "killed by signal 9 (outside this pipeline; the kernel's OOM killer?)"
        if killed_by is not None:
            return TaskState.FAILED, f"killed by signal {killed_by} ({signal.strsignal(killed_by)})"
        return TaskState.FAILED, f"exit code {exit_code}"


def task_environment(spec: JobSpec, gpus: tuple[str, ...], mark: str) -> dict[str, str]:
    """Return a task's environment: ours, thread counts and GPUs by what it was lent, the job's own, and its mark."""
    threads = dict.fromkeys(THREADS, str(spec.cpus))
    return {**os.environ, **threads, **spec.env, VISIBLE: ",".join(gpus), MARK: mark}


def _start(
    spec: JobSpec, job: JobId, task: int, env: Mapping[str, str], server: ForkServer | None
) -> subprocess.Popen[bytes] | Forked:
    """Start the first process of a task, its output appended to the task's logs."""
    out, err = spec.log_paths(job, task)
    command = spec.command(task)
    with Path(out).open("ab") as stdout, Path(err).open("ab") as stderr:
        if server is not None and server.suits(spec.fork_server, env):
            with contextlib.suppress(OSError):  # it is gone: the task gets a process that was not forked
                return server.fork(command[-spec.fork_words :], env, (stdout.fileno(), stderr.fileno()))
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=env,
            start_new_session=True,
        )


def _open_exit_fd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process exits (Linux's pidfd), or None."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
