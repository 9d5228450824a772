"""Runs a user's script: passes its output and signals on, and finds out why it ended.

The contract with a script; all of it is optional:

Requests to end. SIGUSR2 comes some time before the time limit, SIGTERM at a cancellation or preemption; both may come
more than once. They go only to those of its processes that handle them, so a warning does not kill a wrapper or a data
worker. A SIGTERM that no process handles goes to all. Exit 75, or exit 0 after a handled signal, means "saved, restart
me". Any other exit after a request counts as ended by it.

Ends. Exit 0 is success, whatever was printed: the script may have survived running out of memory. For any other exit we
search its last lines for out of memory (GPU or host) or a full disk, as `cluster.verdict` does. A SIGKILL at the memory
limit, or counted by the kernel, means out of memory. Processes that it leaves behind are ended.

Progress. A line `pipeline: {"step": 10, "loss": 0.5}` on stdout sets figures for `pipeline status`; only finite numbers
count. "step" shows whether an attempt makes progress or is stuck.
"""

from __future__ import annotations

import json
import math
import os
import re
import resource
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster.machine import count_oom_kills
from pipeline.cluster.processes import ProcessTable, send, used_bytes
from pipeline.cluster.verdict import (
    GO_ON,
    LAST_LINES,
    NEARLY,
    REFUSALS,
    SIGNALLED,
    Cause,
    last_words,
    named_signal,
    says_oom_kill,
)
from pipeline.errors import ConfigError
from pipeline.training.ranks.launch import FORWARDED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    OnFigures = Callable[[Mapping[str, float]], None]

PREFIX = "pipeline: {"
STEP = "step"
READ_BYTES = 1 << 16
LINE_MOST, LINES_MOST = 2000, 300  # characters of a line, and lines, of output kept
PARTIAL_MOST = 1 << 16  # most bytes of a line without an end
LOOK_EVERY_S, MEASURE_EVERY_S = 0.1, 1.0
LINGER_S = 30.0  # time to save after a request to end, as with Slurm
DEAF_S = 10.0  # time after a SIGTERM for a late script or after a peer's failure
KILLED_CODE = SIGNALLED + signal.SIGKILL
OURS = REFUSALS.keys() - {ConfigError.exit_code}  # 2: any program uses it for a wrong command line
KIB = 1024  # the unit of getrusage
TROUBLES = {Cause.GPU_OOM: "gpu_oom", Cause.HOST_OOM: "host_oom", Cause.DISK: "disk_full"}
EXCEPTION = re.compile(r"(?:\[rank\d+\]: ?)?[A-Za-z_][\w.]*(?:Error|Exception)\b")
LAUNCHER = re.compile(r"failed \(exitcode: (-?\d+)\)")  # torchrun; the lines after it are about itself


@dataclass(frozen=True, slots=True)
class ScriptOutcome:
    """How a script ended."""

    exit_code: int | None
    signal: int | None = None  # the signal that ended it
    handled_signal: int | None = None  # the last request to end that one of its processes handled
    trouble: str = ""  # gpu_oom, host_oom, disk_full, or empty
    reason: str = ""  # the line with the reason
    last_lines: tuple[str, ...] = ()
    peak_rss_bytes: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Whether it asks to be restarted."""
        return self.exit_code == GO_ON or (self.exit_code == 0 and self.handled_signal is not None)

    @property
    def finished(self) -> bool:
        return self.exit_code == 0 and self.handled_signal is None

    @property
    def code(self) -> int:
        """The exit code of the task: 75 to continue, 128 plus a signal, or the script's unless it is one of ours."""
        if self.goes_on:
            return GO_ON
        if self.handled_signal is not None and not self.trouble:
            return SIGNALLED + self.handled_signal
        if self.signal is not None:
            return SIGNALLED + self.signal
        return 1 if self.exit_code in OURS else self.exit_code or 0  # a script's 4 does not mean a damaged cache

    @property
    def step(self) -> int:
        """The last step that it reported."""
        return int(self.figures.get(STEP, 0))

    @property
    def what(self) -> str:
        """How and why it ended, in words."""
        if self.signal is not None:
            ended = f"the script was killed by {named_signal(self.signal)}"
        else:
            ended = f"the script ended with exit code {self.exit_code}"
        reason = self.reason or next((f"its last line: {line}" for line in reversed(self.last_lines)), "")
        return f"{ended}; {reason}" if reason else ended


def run_script(
    words: Sequence[str],
    *,
    environment: Mapping[str, str],
    cwd: Path,
    out: int = 1,
    err: int = 2,
    on_figures: OnFigures = lambda _figures: None,
    mem_bytes: int = 0,
    longest_s: float = math.inf,
    is_lost: Callable[[], bool] = lambda: False,
) -> ScriptOutcome:
    """Run a script to its end, in the main thread; pass its output on to `out` and `err`.

    `mem_bytes`, the memory of the task, shows whether a kill was for memory. After `longest_s`, or when it `is_lost`,
    the script gets a SIGTERM.
    """
    with _signals() as arrived, closing(_Process(words, environment, cwd, (out, err), on_figures)) as process:
        process.follow(arrived, time.monotonic() + longest_s, is_lost)
        return process.outcome(mem_bytes)


@contextmanager
def _signals() -> Iterator[int]:
    """Turn requests to end into bytes in a pipe; yield its reading end."""
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def take(number: int, _frame: object) -> None:
        os.write(write, bytes([number]))

    before = {}
    try:
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            before = {number: signal.signal(number, take) for number in FORWARDED}
        yield read
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


class _Output:
    """An output stream of a script: passed on, and split into lines."""

    def __init__(self, pipe: int, onward: int, take: Callable[[str], None]) -> None:
        self.pipe = pipe
        self._onward, self._take = onward, take
        self._partial = b""
        self.ended = False
        os.set_blocking(pipe, False)

    def pump(self) -> bool:
        """Read once; return whether there was output."""
        try:
            chunk = os.read(self.pipe, READ_BYTES)
        except BlockingIOError:
            return False
        self.ended = not chunk
        self._pass_on(chunk)
        *lines, unfinished = (self._partial + chunk).replace(b"\r", b"\n").split(b"\n")
        self._partial = unfinished[:PARTIAL_MOST]
        if not chunk and unfinished:
            lines, self._partial = [unfinished], b""
        for line in lines:
            self._take(line.decode(errors="replace"))
        return bool(chunk)

    def _pass_on(self, chunk: bytes) -> None:
        """Write all of it; a full disk under the log does not end the training."""
        with suppress(OSError):
            while chunk:
                chunk = chunk[os.write(self._onward, chunk) :]


class _Process:
    """A running script, with its last lines, figures and peak of memory."""

    def __init__(
        self, words: Sequence[str], environment: Mapping[str, str], cwd: Path, onward: tuple[int, int], take: OnFigures
    ) -> None:
        """Start it, in a session of its own."""
        self._take_figures = take
        self._lines: deque[str] = deque(maxlen=LINES_MOST)
        self._figures: dict[str, float] = {}
        self._handled: int | None = None
        self._kill_at = math.inf
        self._peak_bytes, self._measure_at = 0, 0.0
        self._oom_kills = count_oom_kills()
        self._process = _start(words, environment, cwd)
        self._pid = self._process.pid
        self._table = ProcessTable(f"script of {self._pid}")
        assert self._process.stdout is not None and self._process.stderr is not None  # noqa: PT018 - both are pipes
        stdout, stderr = self._process.stdout.fileno(), self._process.stderr.fileno()
        self._outputs = [_Output(stdout, onward[0], self._take_out), _Output(stderr, onward[1], self._take)]

    def follow(self, arrived: int, ends_at: float, is_lost: Callable[[], bool]) -> None:
        """Pass on output and signals until the script and its descendants have ended; request its end in time."""
        with selectors.DefaultSelector() as selector:
            selector.register(arrived, selectors.EVENT_READ)
            for output in self._outputs:
                selector.register(output.pipe, selectors.EVENT_READ, output)
            while not self._has_exited():
                now = time.monotonic()
                if self._kill_at == math.inf and (now >= ends_at or is_lost()):
                    os.kill(os.getpid(), signal.SIGTERM)  # as if from a scheduler
                    self._kill_at = now + DEAF_S
                if now >= self._kill_at:
                    send(signal.SIGKILL, self._pids())
                for key, _ in selector.select(LOOK_EVERY_S):
                    if key.data is None:
                        self._pass_signals(arrived)
                        continue
                    key.data.pump()
                    if key.data.ended:
                        selector.unregister(key.fd)
                self._measure()
        self._end_the_rest()

    def _pass_signals(self, arrived: int) -> None:
        """Send received signals to those of its processes that handle them."""
        for number in os.read(arrived, READ_BYTES):
            pids = self._pids()
            listening = [pid for pid in pids if _listens(pid, number)]
            if not listening and number == signal.SIGTERM:
                listening = pids
            if send(number, listening):
                self._handled = number

    def _has_exited(self) -> bool:
        """Tell whether its first process has exited, without reaping it, so that its pid is not reused."""
        exited = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if exited is not None and exited.si_code != os.CLD_EXITED and exited.si_status in FORWARDED:
            self._handled = exited.si_status  # the scheduler signals all processes; this one has no handler
        return exited is not None

    def _pids(self) -> list[int]:
        """Return the pids of its living processes."""
        self._table.refresh({self._pid: "script"})
        return self._table.of("script")

    def _measure(self) -> None:
        """Update its peak of memory, about once a second."""
        now = time.monotonic()
        if now >= self._measure_at:
            self._peak_bytes = max(self._peak_bytes, used_bytes(self._pids()))
            self._measure_at = now + max(MEASURE_EVERY_S, 20 * (time.monotonic() - now))

    def _end_the_rest(self) -> None:
        """Kill the processes left behind (after time to save, if it was asked to end); read the last output."""
        deadline = time.monotonic() + (LINGER_S if self._handled is not None else 0.0)
        while (pids := self._pids()) and time.monotonic() < deadline:
            self._drain()
            time.sleep(LOOK_EVERY_S)
        send(signal.SIGKILL, pids)
        self._drain()

    def _drain(self) -> None:
        for output in self._outputs:
            while output.pump():
                pass

    def _take_out(self, line: str) -> None:
        """Process a line of stdout: figures or text."""
        figures = figures_in(line)
        if figures:
            self._figures.update(figures)
            self._take_figures(figures)
        else:
            self._take(line)

    def _take(self, line: str) -> None:
        """Keep a line."""
        if line.strip():
            self._lines.append(line.rstrip()[:LINE_MOST])

    def outcome(self, mem_bytes: int) -> ScriptOutcome:
        """Reap it and find out how it ended."""
        own_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        _, status, usage = os.wait4(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code  # so that Popen does not wait for it
        its_bytes = usage.ru_maxrss * KIB
        peak_bytes = max(self._peak_bytes, its_bytes if its_bytes > own_bytes else 0)  # a fork inherits our peak
        lines = tuple(self._lines)
        exit_code, killed_by = (behind_launcher(code, lines), None) if code >= 0 else (None, -code)
        at_limit = count_oom_kills() > self._oom_kills or peak_bytes >= NEARLY * mem_bytes > 0
        plain = ScriptOutcome(exit_code, killed_by, self._handled, "", "", lines, peak_bytes, self._figures)
        if plain.goes_on or plain.finished or (killed_by is not None and killed_by == self._handled):
            return plain
        trouble, reason = script_trouble(exit_code, killed_by, lines, at_limit=at_limit)
        return ScriptOutcome(exit_code, killed_by, self._handled, trouble, reason, lines, peak_bytes, self._figures)

    def close(self) -> None:
        """Close its streams; kill it if it still runs after an error of ours."""
        if self._process.returncode is None:
            send(signal.SIGKILL, self._pids())
            self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


def _start(words: Sequence[str], environment: Mapping[str, str], cwd: Path) -> subprocess.Popen[bytes]:
    """Start a script; raise ConfigError if it cannot be started."""
    try:
        return subprocess.Popen(
            list(words),
            env=dict(environment),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        what = f"{words[0]!r} cannot be started in {cwd}: {error.strerror}"
        remedy = "put it on the job's PATH (cluster.slurm.setup), or give a path from the configuration's folder"
        raise ConfigError(what, where="train.command", remedy=remedy) from error


def _listens(pid: int, number: int) -> bool:
    """Tell whether a process handles a signal; True where that is unknown."""
    try:
        for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return True


def figures_in(line: str) -> dict[str, float]:
    """Return the finite numbers of a line of figures; empty for other lines."""
    if not line.startswith(PREFIX):
        return {}
    try:
        figures = json.loads(line[len(PREFIX) - 1 :], parse_int=float)
    except (ValueError, RecursionError):
        return {}
    return {name: value for name, value in figures.items() if isinstance(value, float) and math.isfinite(value)}


def script_trouble(
    exit_code: int | None, killed_by: int | None, lines: Sequence[str], *, at_limit: bool
) -> tuple[str, str]:
    """Return the resource that ran out when a script failed, and the line with the message; empty if unknown.

    A SIGKILL without a message means out of memory only if the memory was at its limit.
    """
    ends = [(at, match) for at, line in enumerate(lines) if (match := LAUNCHER.search(line))]
    trouble, reason = _trouble(lines[: ends[0][0]] if ends else lines)
    of_slurm = [line for line in lines if says_oom_kill(line)]
    if of_slurm and trouble != "gpu_oom":
        return "host_oom", of_slurm[-1]
    killed = killed_by == signal.SIGKILL or exit_code == KILLED_CODE or any(int(end[1]) == -9 for _, end in ends)
    if killed and at_limit and trouble != "gpu_oom":
        return "host_oom", reason or "killed at its memory limit"
    return trouble, reason


def behind_launcher(exit_code: int, lines: Sequence[str]) -> int:
    """Return the exit code of the script behind a launcher: torchrun itself always exits with 1."""
    ends = [int(match[1]) for line in lines if (match := LAUNCHER.search(line))]
    return ends[0] if exit_code == 1 and ends and ends[0] > 0 else exit_code


def _trouble(lines: Sequence[str]) -> tuple[str, str]:
    """Return the trouble in the last lines or the last exception; the script survived earlier errors."""
    for text in ("\n".join(lines[-LAST_LINES:]), next((line for line in reversed(lines) if EXCEPTION.match(line)), "")):
        last = last_words(text)
        if last and last[0] in TROUBLES:
            return TROUBLES[last[0]], last[1]
    return "", ""
