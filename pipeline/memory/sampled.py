"""What processes hold, measured by short real runs: `host` predicts, this checks.

Memory is counted as what a job can be killed for: anonymous and shared pages by proportional set size, so that workers
do not count what they share, and the files that are mapped in full and once, whoever else on this machine has them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipeline.errors import JobFailed
from pipeline.memory.footprint import Origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import IO

IMPORT_BYTES = 322_040 << 10  # of torch 2.2 for CUDA 11.8 (https://github.com/pytorch/pytorch/issues/113326)
TRAINING = ("torch", "torch._dynamo")  # the first optimizer imports the second: 68 MiB [measured, torch 2.13.0]
IMPORT_S = 120.0  # from a cold network file system
LOOK_EVERY_S = 0.05
GRACE_S = 5.0  # that a probed process has to end when told to
_IMPORT = """
import sys
for name in sys.argv[1:]:
    __import__(name)
for file in "smaps_rollup", "status":
    sys.stdout.write(open(f"/proc/self/{file}").read())
"""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a process takes before it does anything."""

    bytes: int
    origin: Origin
    why: str


STATED = Baseline(IMPORT_BYTES, Origin.ASSUMED, "as others measured it (pytorch#113326)")


@dataclass(frozen=True, slots=True)
class Probed:
    """What a short run took: a baseline, and so much more for each byte that was predicted."""

    baseline_bytes: int
    slope: float
    peak_bytes: int
    levels: tuple[tuple[int, int], ...] = ()  # bytes as predicted beyond the baseline, and as measured in all


def measured_baseline(modules: Sequence[str] = TRAINING) -> Baseline:
    """Return what a process takes that has imported some modules, measured on one; stated where that cannot be."""
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _IMPORT, *modules], capture_output=True, text=True, timeout=IMPORT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return STATED
    size = tree_bytes([_Held.read(ran.stdout)])
    return Baseline(size, Origin.MEASURED, f"a process that imported {', '.join(modules)}") if size else STATED


def probe_host(argv: Sequence[str], seconds: float = 30.0, *, env: Mapping[str, str] | None = None) -> Probed:
    """Run a command for so long at most, and return what memory it and its children took.

    It may print numbers, a line each: from now on it will hold so many bytes more than before its data, as was
    predicted, 0 first. What it takes until the next line counts for that number.
    """
    with tempfile.TemporaryFile() as errors, _child(argv, errors, env) as child:
        levels, peak = _watch(child, time.monotonic() + seconds)
        if child.poll():
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()
            what = f"the probe of the memory ended with exit code {child.returncode}: {said[-1] if said else 'no word'}"
            raise JobFailed(what, where=shlex.join(argv), remedy="run this command by hand")
    if not peak:
        raise JobFailed("the memory of a process cannot be read: /proc/PID/smaps_rollup", remedy="pipeline doctor")
    return fitted(levels, peak)


def fitted(levels: Mapping[int, int], peak: int) -> Probed:
    """Return the line through what was measured at each level; without levels all of it is baseline."""
    told = tuple(sorted(levels.items()))
    if len(told) < 2:
        return Probed(told[0][1] - told[0][0] if told else peak, 1.0, peak, told)
    predicted, measured = np.array(told, np.float64).T
    slope, start = np.polyfit(predicted, measured, 1).tolist()
    return Probed(max(0, round(start)), slope, peak, told)


class _Held(NamedTuple):
    """What a process holds: memory that only its end would free, and pages of files."""

    held: int
    files: int

    @classmethod
    def read(cls, text: str) -> _Held:
        """Read `smaps_rollup` and `status`; shared pages count in proportion, but those of files in full.

        How many neighbours happen to share a library says nothing of the node where the job will run.
        """
        held = sum(_kilobytes(text, name) for name in ("Pss_Anon", "Pss_Shmem"))
        return cls((held or _kilobytes(text, "Pss")) << 10, _kilobytes(text, "RssFile") << 10)


def tree_bytes(processes: Iterable[tuple[int, int]]) -> int:
    """Return what a tree of processes takes, which share the pages of files."""
    held, files = np.array([*processes, (0, 0)], np.int64).T
    return int(held.sum() + files.max())


def _kilobytes(text: str, name: str) -> int:
    _, found, rest = text.partition(f"{name}:")
    return int(rest.split(maxsplit=1)[0]) if found else 0


@contextlib.contextmanager
def _child(argv: Sequence[str], errors: IO[bytes], env: Mapping[str, str] | None) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a session of its own, and end whatever is left of it."""
    given = dict(env) if env is not None else None
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=errors, env=given, start_new_session=True)
    try:
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        yield child
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    if child.stdout is not None:
        child.stdout.close()


def _watch(child: subprocess.Popen[bytes], until: float) -> tuple[dict[int, int], int]:
    """Return the most that was seen at each level, and at all."""
    levels: dict[int, int] = {}
    level, peak, unread = None, 0, b""
    while child.poll() is None and time.monotonic() < until:
        size = tree_bytes(_session(child.pid))
        peak = max(peak, size)
        unread, told = _numbers(unread + _said(child))
        if told:
            level = told[-1]  # what was just seen may be of either level
        elif level is not None and size:
            levels[level] = max(levels.get(level, 0), size)
        time.sleep(LOOK_EVERY_S)
    return levels, peak


def _said(child: subprocess.Popen[bytes]) -> bytes:
    assert child.stdout is not None
    with contextlib.suppress(BlockingIOError):
        return os.read(child.stdout.fileno(), 1 << 16)
    return b""


def _numbers(text: bytes) -> tuple[bytes, list[int]]:
    """Return the unfinished line, and the numbers among the others."""
    *lines, unfinished = text.split(b"\n")
    return unfinished, [int(line) for line in lines if line.strip().isdigit()]


def _session(leader: int) -> Iterator[_Held]:
    """Yield what each process of a session holds."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with contextlib.suppress(OSError):
                if int((process / "stat").read_bytes().rpartition(b")")[2].split()[3]) == leader:
                    yield _Held.read("".join((process / file).read_text() for file in ("smaps_rollup", "status")))
