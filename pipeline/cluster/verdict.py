"""Judges why a task ended, from the executor's status, the worker's report and the end of its log.

Slurm's state can be wrong both ways: a COMPLETED job can hide a failed worker, and a FAILED one can have finished. So
the evidence counts in this order: the worker's report that it finished (the cache verifies its records later), signs of
the kernel and of Slurm, the worker's report on its failure, the exit of the process. If the worker recorded nothing and
the job failed, its node is at fault: a line of `setup` failed there, or Python is missing or broken. Without evidence
the verdict is LOST, never DONE.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from pipeline.cluster.job_spec import TaskState, mebibytes
from pipeline.cluster.slurm_words import is_stuck
from pipeline.device.kinds import CARD_IS_FULL, HOST_IS_FULL, LOG_OF_BROKEN_CARD, LOG_OF_FULL_CARD
from pipeline.errors import CacheDamaged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.cluster.job_spec import TaskStatus

HUNG = 77  # exit code of a process that made no progress for too long
PEER_LOST = 76  # exit code of a process whose peer is gone or hangs
GO_ON = 75  # EX_TEMPFAIL: the worker was asked to end, stopped cleanly and wants to continue
CANNOT_RUN = (126, 127)  # exit codes of shells for a missing or broken program
SIGNALLED = 128  # shells add this to the signal that ended a program; sacct subtracts it
CANNOT_WRITE_LOG = 53  # the "signal" with which Slurm reports that it could not open the task's log
NEARLY = 0.9  # share of the limit that counts as reached: peaks are sampled
LINE_MOST = 300
UNFIT = "is unfit for this job"  # in a rank's report on its node before the first step
LINES_AFTER_END = 3  # lines that srun and slurmstepd still write after Slurm has ended a task
RESTARTS = "starts again in this job: "  # starts a log line at a restart; earlier lines belong to earlier starts
TAKEN_ALONG = "srun: First task exited"  # srun ended the other processes
NO_CONTAINER = (  # the node could not start it: no runtime, no image, or a folder to bind is missing
    "error: execve(): apptainer:",
    "error: execve(): podman:",
    "FATAL:   container creation failed",
    "FATAL:   could not open image",
    "pyxis: container start failed",
)
LAST_LINES = 25  # end of the log in which a program's error counts; it survived earlier ones


class Cause(StrEnum):
    """The outcome of a task, which decides the repair."""

    DONE = "done"
    ACTIVE = "active"  # it has not ended
    HELD = "held"  # it has not ended, and will not start by itself
    HOST_OOM = "host_oom"
    GPU_OOM = "gpu_oom"
    TIMEOUT = "timeout"
    NODE = "node"  # the node died, could not start it, or has a broken GPU or file system
    PREEMPTED = "preempted"
    INTERRUPTED = "interrupted"  # it was asked to end before its limit and did so
    CRASHED = "crashed"  # ended by a signal of unknown origin
    CANCELLED = "cancelled"
    DISK = "disk"
    DAMAGE = "damage"  # the cache is damaged, and the worker could not continue
    REFUSED = "refused"  # the worker refused its input: a retry would fail the same way
    FAILED = "failed"
    LOST = "lost"  # it has ended, or may have, and the end is unknown


@dataclass(frozen=True, slots=True)
class Word:
    """The worker's record of an attempt; the default means no record."""

    started: bool = False
    finished: bool = False
    exit_code: int | None = None  # its intended exit code
    what: str = ""
    kind: str = ""  # gpu_oom, host_oom, disk_full, node, or empty
    done: int = 0  # items
    at: float = 0.0
    began: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskVerdict:
    """The outcome of a task, the reason, and a lower bound of the memory it needed."""

    cause: Cause
    reason: str = ""
    peak_bytes: int | None = None
    node: str = ""  # node of the failure by the log, the only source for a task on several nodes


_Finding: TypeAlias = tuple[Cause, str]


def judge_attempt(status: TaskStatus, word: Word, log_end: str, *, asked_bytes: int | None = None) -> TaskVerdict:
    """Judge one attempt at a task by its status, its worker's record and the end of its log.

    `log_end` is the end of its log, `asked_bytes` its memory limit.
    """
    log = log_end.rpartition(f"\n{RESTARTS}")[2]
    case = _Case(status, word, _this_run(log) if status.restarts else log, asked_bytes)
    cause, reason = case.judge()
    peak = status.peak_rss_bytes
    if cause is Cause.HOST_OOM:
        least = 0 if case.was_refused() else asked_bytes or 0
        return TaskVerdict(cause, _joined(reason, case.memory()), max(peak or 0, least) or None, case.node())
    return TaskVerdict(cause, reason, peak, "" if cause in _WITHOUT_FAULT else case.node())


@dataclass(frozen=True, slots=True)
class _Case:
    """The evidence about one attempt."""

    status: TaskStatus
    word: Word
    log: str
    asked_bytes: int | None

    def judge(self) -> _Finding:
        """Return the cause and the reason, by the strongest evidence."""
        state = self.status.state
        if not state.ended and state not in _PERHAPS_OVER:
            return self._not_over()
        if self.word.finished:
            return Cause.DONE, "" if state.ok else f"the worker finished, but Slurm reports {state.value}"
        if state in _CERTAIN:
            cause, reason = _CERTAIN[state]
            return cause, _joined(reason, self.status.reason)
        if state is TaskState.COMPLETING:
            return Cause.ACTIVE, "its processes are being stopped"
        if state is TaskState.CANCELLED:
            return self._by_scheduler() or (Cause.CANCELLED, _joined("cancelled", self.status.reason))
        if state in _LIMITED:
            return self._at_limit()
        return self._by_evidence()

    def node(self) -> str:
        """Return the node where it failed, if the log names it."""
        lost = first_lost(self.log, GO_ON)
        return failed_node(self.log) or (lost.node if lost else "")

    def was_refused(self) -> bool:
        """Tell whether it ended because an allocation failed, perhaps far below its limit."""
        is_own = self.word.exit_code not in (None, SIGNALLED + signal.SIGKILL) or bool(self.status.exit_code)
        return is_own and self.status.state is not TaskState.OUT_OF_MEMORY and not self._by_kernel()

    def memory(self) -> str:
        """Say how much memory it used and could use."""
        peak, asked = self.status.peak_rss_bytes, self.asked_bytes
        limit = f"its limit was {mebibytes(asked)}" if asked else ""
        return _joined(limit, f"at most {mebibytes(peak)} were sampled" if peak else "")

    def _not_over(self) -> _Finding:
        """Judge a task that has not ended."""
        state, waits_for = self.status.state, self.status.waits_for
        if is_stuck(state, waits_for):
            return Cause.HELD, waits_for or f"held by the scheduler ({state.value})"
        return Cause.ACTIVE, waits_for or f"it is {state.value}"

    def _at_limit(self) -> _Finding:
        """Judge a task at its time limit: INTERRUPTED if the worker made progress and stopped in order."""
        if self.word.exit_code == GO_ON and self.word.done:
            return Cause.INTERRUPTED, f"stopped cleanly at its time limit, {self.word.done} items done"
        limit = "time limit" if self.status.state is TaskState.TIMEOUT else "deadline"
        timeout = Cause.TIMEOUT, _joined(f"reached its {limit}", self.status.reason)
        return self._by_kernel() or self._by_kind() or timeout

    def _by_evidence(self) -> _Finding:
        """Judge a task whose state is only FAILED, or less specific."""
        if finding := self._by_kernel() or self._by_kind() or self._by_scheduler():
            return finding
        if self.status.signal == CANNOT_WRITE_LOG:
            return Cause.NODE, f"its node could not open its log {self.status.stdout}"
        if PEER_LOST in (self.word.exit_code, self.status.exit_code) or TAKEN_ALONG in self.log:
            return self._by_peer()
        if self.word.exit_code:
            return last_words(self.word.what) or _exited(self.word.exit_code, self.word.what)
        cause, reason = self._by_ending()
        if self.word.started or cause not in _BLAMES_WORKER:
            return cause, reason
        return Cause.NODE, f"the worker did not start: {reason}"

    def _by_kernel(self) -> _Finding | None:
        """Judge by the messages of srun and slurmstepd about a kill at the memory limit."""
        killed = any(map(says_oom_kill, self.log.splitlines()))
        return (Cause.HOST_OOM, "killed at its memory limit, as its log says") if killed else None

    def _by_kind(self) -> _Finding | None:
        """Judge by the kind of failure that the worker recorded."""
        cause = _KINDS.get(self.word.kind)
        return (cause, self.word.what or cause.value) if cause else None

    def _by_scheduler(self) -> _Finding | None:
        """Judge by Slurm's message in the log when it ended the task."""
        for sign, finding in _SCHEDULER_SIGNS.items():
            if sign in self.log:
                return finding
        cancelled = self.status.state is TaskState.UNKNOWN and "*** JOB" in self.log and "CANCELLED AT" in self.log
        return (Cause.CANCELLED, "cancelled, as its log says") if cancelled else None

    def _by_peer(self) -> _Finding:
        """Judge a task whose processes ended because of a lost one, by the end of that one."""
        lost = first_lost(self.log, GO_ON)
        its_log = lost.said(self.log) if lost else self.log
        words = last_words(_tail(its_log))
        if lost is None:
            return words or (
                Cause.CRASHED,
                self.word.what or "lost: Slurm has no record of how one of its processes ended",
            )
        if words is None and lost.signal in _POLITE:
            words = Cause.INTERRUPTED, f"ended by {named_signal(lost.signal)}"
        elif words is None and lost.signal == signal.SIGKILL:
            words = self._killed()
        elif words is None and lost.exit_code in CANNOT_RUN:
            words = Cause.NODE, _joined(f"exit code {lost.exit_code}", _message(its_log))
        elif words is None and lost.exit_code:
            words = _exited(lost.exit_code, _joined(f"exit code {lost.exit_code}", _message(its_log)))
        cause, reason = words or (Cause.CRASHED, lost.how)
        return cause, f"{lost.who}: {reason}"

    def _by_ending(self) -> _Finding:
        """Judge by the exit code or signal, when the worker recorded nothing."""
        killed_by, code = self._signal(), self.status.exit_code
        if killed_by is None and code is None and (lost := first_lost(self.log, GO_ON)):  # by srun, without accounting
            killed_by, code = lost.signal, lost.exit_code
        if killed_by in _POLITE:
            return Cause.INTERRUPTED, f"ended by {named_signal(killed_by)} before it could stop cleanly"
        if finding := last_words(_tail(self.log)):
            return finding
        if killed_by == signal.SIGKILL:
            return self._killed()
        if killed_by is not None:
            return Cause.CRASHED, f"crashed by {named_signal(killed_by)}"
        if code:
            return _exited(code, self.word.what or _joined(f"exit code {code}", _message(self.log)))
        if self.status.state is TaskState.FAILED:
            return Cause.FAILED, _joined("failed without an exit code", self.status.reason, _message(self.log))
        return Cause.LOST, self._unknown()

    def _signal(self) -> int | None:
        """Return the signal that ended the worker; sacct may have subtracted 128 from its exit code."""
        code = self.status.exit_code or 0
        if self.status.signal or code > SIGNALLED:
            return self.status.signal or code - SIGNALLED
        return code if code in _AS_AFTER_SIGNALS else None

    def _killed(self) -> _Finding:
        """Judge an unexplained SIGKILL: near the memory limit it means out of memory."""
        peak, asked = self.status.peak_rss_bytes, self.asked_bytes
        if peak and asked and peak >= NEARLY * asked:
            return Cause.HOST_OOM, "killed by signal 9 (SIGKILL) close to its memory limit"
        where = ", far below its memory limit" if peak and asked else ""
        return Cause.CRASHED, _joined(f"killed by signal 9 (SIGKILL) from outside{where}", self.memory())

    def _unknown(self) -> str:
        """List the missing reports of a task without signs of failure or success."""
        state = self.status.state
        known = "Slurm has no record of how it ended" if state is TaskState.UNKNOWN else f"it is {state.value}"
        worker = "reported a start but no end" if self.word.started else "reported no start"
        return _joined(f"{known}, and the worker {worker}", self.status.reason)


def _exited(code: int, message: str) -> _Finding:
    """Judge the worker's exit code."""
    if is_interruption(code):
        return Cause.INTERRUPTED, message or "was asked to stop and stopped cleanly"
    if code in REFUSALS:
        cause = Cause.DAMAGE if code == CacheDamaged.exit_code else Cause.REFUSED
        return cause, message or f"exit code {code}: {REFUSALS[code]}"
    if code == HUNG:
        return Cause.CRASHED, message or "made no progress for too long (train.hang)"
    if code - SIGNALLED in _AS_AFTER_SIGNALS:  # a child of the worker was killed
        return Cause.CRASHED, message or f"crashed by {named_signal(code - SIGNALLED)}"
    return Cause.FAILED, message or f"exit code {code}"


def says_oom_kill(line: str) -> bool:
    """Tell whether srun or slurmstepd wrote in a log that a process was killed at its memory limit."""
    return bool(_OF_SLURM.match(line)) and any(sign in line for sign in _KERNEL_SIGNS)


def is_interruption(code: int) -> bool:
    """Tell whether a worker exits with this code because it was asked to end."""
    return code == GO_ON or code - SIGNALLED in _POLITE


def last_words(text: str) -> _Finding | None:
    """Judge by the error message at the end of a program."""
    for line in reversed(text.splitlines()):
        for sign, cause in _LAST_WORDS.items():
            if sign in line:
                return cause, line.strip()[:LINE_MOST]
    return None


def _tail(log: str) -> str:
    """Return the last lines of a log; the program survived earlier errors."""
    return "\n".join([line for line in log.splitlines() if line.strip()][-LAST_LINES:])


def _message(log: str) -> str:
    """Return the program's own last line, such as the last line of a traceback."""
    for line in reversed(log.splitlines()):
        if line.strip() and not line.startswith(("srun:", "slurmstepd")):
            return f"its log ends: {line.strip()[:LINE_MOST]}"
    return ""


def _this_run(log: str) -> str:
    """Return the log since the last requeue or restart; keep the newest message about an end."""
    lines = log.splitlines()
    ends = [number for number, line in enumerate(lines) if "*** JOB" in line and "DUE TO" in line]
    before = [number for number in ends if number < len(lines) - LINES_AFTER_END]
    return "\n".join(lines[before[-1] + 1 :] if before else lines)


def _joined(*parts: str) -> str:
    """Join the parts that are not empty, without repetition."""
    return "; ".join(dict.fromkeys(part for part in parts if part))


def named_signal(number: int | None) -> str:
    """Format a signal with its number and name."""
    try:
        return f"signal {number} ({signal.Signals(number or 0).name})"
    except ValueError:
        return f"signal {number}"


_PERHAPS_OVER = frozenset({TaskState.UNKNOWN, TaskState.COMPLETING})
_BLAMES_WORKER = frozenset({Cause.FAILED, Cause.REFUSED, Cause.DAMAGE, Cause.CRASHED})  # it has to run first
_WITHOUT_FAULT = frozenset({Cause.DONE, Cause.ACTIVE, Cause.HELD})
_LIMITED = frozenset({TaskState.TIMEOUT, TaskState.DEADLINE})
_CERTAIN: Mapping[TaskState, _Finding] = {
    TaskState.OUT_OF_MEMORY: (Cause.HOST_OOM, "killed at its memory limit"),
    TaskState.PREEMPTED: (Cause.PREEMPTED, "preempted by a job with higher priority"),
    TaskState.NODE_FAIL: (Cause.NODE, "its node failed"),
    TaskState.BOOT_FAIL: (Cause.NODE, "its node did not boot"),
    TaskState.LAUNCH_FAILED: (Cause.NODE, "its node could not start it"),
    TaskState.RECONFIG_FAIL: (Cause.NODE, "its node could not be configured for it"),
    TaskState.REVOKED: (Cause.CANCELLED, "revoked: another cluster of the federation took it"),
}
_KINDS = {"gpu_oom": Cause.GPU_OOM, "host_oom": Cause.HOST_OOM, "disk_full": Cause.DISK, "node": Cause.NODE}
_OF_SLURM = re.compile(r"(\s*\d+: )?(srun: |slurmstepd)")  # srun may prefix a line with the number of its rank
_KERNEL_SIGNS = (
    "oom-kill event",
    "oom_kill",
    "Out Of Memory",
    "Exceeded job memory limit",
    "Exceeded step memory limit",
)
_SCHEDULER_SIGNS: Mapping[str, _Finding] = {
    "DUE TO TIME LIMIT": (Cause.TIMEOUT, "reached its time limit, as its log says"),
    "DUE TO PREEMPTION": (Cause.PREEMPTED, "preempted by a job with higher priority, as its log says"),
    "NODE FAILURE": (Cause.NODE, "its node failed, as its log says"),
}
_LAST_WORDS = {
    "by allocator cpu": Cause.HOST_OOM,  # TensorFlow: "OOM when allocating tensor …"
    "by allocator mklcpu": Cause.HOST_OOM,
    "OOM when allocating tensor": Cause.GPU_OOM,
    "RESOURCE_EXHAUSTED: Out of memory": Cause.GPU_OOM,  # JAX
    "RESOURCE_EXHAUSTED: Failed to allocate": Cause.GPU_OOM,
    "HOST_ALLOCATION_FAILED": Cause.HOST_OOM,  # cuDNN 9 distinguishes the two
    **dict.fromkeys(CARD_IS_FULL + LOG_OF_FULL_CARD, Cause.GPU_OOM),
    "No space left on device": Cause.DISK,
    "Disk quota exceeded": Cause.DISK,
    **dict.fromkeys(("MemoryError", *HOST_IS_FULL), Cause.HOST_OOM),
    "Application launch failed": Cause.NODE,
    **dict.fromkeys(NO_CONTAINER, Cause.NODE),
    "srun: error: Task launch for": Cause.NODE,
    "uncorrectable ECC error": Cause.NODE,
    UNFIT: Cause.NODE,
    **dict.fromkeys(LOG_OF_BROKEN_CARD, Cause.NODE),
    "Stale file handle": Cause.NODE,
    "Transport endpoint is not connected": Cause.NODE,
    "Segmentation fault": Cause.CRASHED,
    "Bus error": Cause.CRASHED,
    "Illegal instruction": Cause.CRASHED,
    "Aborted (core dumped)": Cause.CRASHED,
}
REFUSALS = {
    2: "the configuration or the command line is wrong",
    3: "the input data cannot be used",
    4: "the cache is damaged",
    5: "no plan fits",
    6: "the scheduler rejected a job",
}
_POLITE = frozenset(map(int, (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)))
_CRASHES = (signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)
_ENDINGS = (signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_AS_AFTER_SIGNALS = frozenset(map(int, _CRASHES + _ENDINGS))  # exit codes from which sacct subtracted 128


# srun's log lines show which process of a task failed first and ended the others.
#
# The accounting keeps one exit code of a step, the highest, and ranks signals below codes. Measured on 22.05: one
# process was killed and the others exited with 76: the step reads 76:0. With one at the memory limit on one of two
# nodes it reads 76:0 or OUT_OF_MEMORY. Only srun's lines are reliable. They name the right node and the right process;
# only after an OOM kill they may name another process on that node.
RANKS_MOST = 10_000  # more ranks mean a garbled line
_LINE = re.compile(r"^srun: error: (?P<node>\S+): tasks? (?P<tasks>\d[0-9,-]*): (?P<how>.+)$", re.MULTILINE)
_CODE = re.compile(r"Exited with exit code (\d+)")
_NODE = re.compile(r"^srun: error: Node failure on (?P<node>\S+)", re.MULTILINE)
_SIGNALS = {words: number for number in signal.valid_signals() if (words := signal.strsignal(number))}  # srun's lines


@dataclass(frozen=True, slots=True)
class Lost:
    """A failed process, or several on one node that failed alike."""

    ranks: str  # in srun's format: 1, 2-3, 0,2
    node: str
    exit_code: int | None = None
    signal: int | None = None
    how: str = ""  # in srun's words

    @property
    def who(self) -> str:
        return f"rank{'' if self.ranks.isdecimal() else 's'} {self.ranks} on {self.node}"

    def said(self, log: str) -> str:
        """Return its lines from a log in which srun prefixes each line with the rank."""
        own = re.compile(rf"^[ 0]*(?:{'|'.join(map(str, self._numbers()))}): (.*)$", re.MULTILINE)
        return "\n".join(own.findall(log))

    def _numbers(self) -> Iterator[int]:
        """Yield the rank numbers."""
        for part in self.ranks.split(","):
            first, _, last = part.partition("-")
            if first.isdecimal() and (last or first).isdecimal():
                yield from range(int(first), min(int(last or first), int(first) + RANKS_MOST) + 1)


def first_lost(log: str, orderly: int) -> Lost | None:
    """Return the first process that failed by itself: not orderly, and not because of a lost peer."""
    return next((lost for lost in _ended(log) if lost.exit_code not in (orderly, PEER_LOST)), None)


def failed_node(log: str) -> str:
    """Return the node that srun reports as failed; empty if none."""
    match = _NODE.search(log)
    return match["node"] if match else ""


def _ended(log: str) -> Iterator[Lost]:
    """Yield the processes that srun reports as failed, in the order of the log."""
    for match in _LINE.finditer(log):
        node, tasks, how = match["node"], match["tasks"], match["how"].strip()
        code = _CODE.match(how)
        killed_by = next((int(number) for word, number in _SIGNALS.items() if how.startswith(word)), None)
        yield Lost(tasks, node, int(code[1]) if code else None, killed_by, how)
