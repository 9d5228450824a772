"""What a job executes: one task of one stage of a run, named by three words.

python -m pipeline.runs.worker RUN STAGE TASK

A task with several GPUs is one process for each of them: it starts this again for each, with a fourth word.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.load import from_resolved
from pipeline.errors import PipelineError
from pipeline.records import EventKind, Tell
from pipeline.runs import workflow
from pipeline.runs.folder import RunFolder
from pipeline.runs.ledger import Ledger
from pipeline.runs.project import Project
from pipeline.runs.submit import WORKER, module_command

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType
    from typing import Any

    from pipeline.records import Reason

PROGRESS_EVERY_S = 0.5
SIGNALLED = 128  # and the signal's number: how a shell reports a program that was killed
STOPPED = SIGNALLED + signal.SIGTERM
ENDING = (signal.SIGTERM, signal.SIGUSR1)  # a cancellation or a limit; what Slurm may send some time before one
GPUS = "CUDA_VISIBLE_DEVICES"


class Stopped(BaseException):
    """Somebody asked this process to end; what is finished is published on the way out."""


def main(arguments: Sequence[str]) -> int:
    """Do one task, or one process's part of it, and report on it."""
    folder, stage, task = RunFolder(Path(arguments[0])), arguments[1], int(arguments[2])
    part = _part(arguments[3]) if len(arguments) > 3 else None
    for number in ENDING:
        signal.signal(number, _stop)
    writer = f"{stage}-{task:06d}" + (f"-{part[0]}" if part else "")
    ledger = Ledger(folder, writer)
    facts: dict[str, Any] = {"stage": stage, "task": task}
    if part is None:
        ledger.emit(EventKind.TASK_STARTED, **facts, host=socket.gethostname())
    try:
        project = Project.open(from_resolved(folder.config.read_text()))
        processes = workflow.stage(stage).processes(project)
        if part is None and processes > 1:
            return _fan_out(arguments, processes, ledger, facts)
        work(project, folder, part or (0, 1), ledger, facts)
    except PipelineError as error:
        ledger.emit(EventKind.TASK_FAILED, **facts, what=str(error), exit_code=error.exit_code)
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - a task's stderr is its log
        return error.exit_code
    except Stopped:
        ledger.emit(EventKind.TASK_FAILED, **facts, what="stopped by a signal", exit_code=STOPPED)
        return STOPPED
    return 0


def work(project: Project, folder: RunFolder, part: tuple[int, int], ledger: Ledger, facts: dict[str, Any]) -> None:
    """Work through a task, telling the ledger twice a second."""
    done, rejected, told = 0, Counter[str](), 0.0

    def refuse(key: str, reason: Reason, detail: str) -> None:
        ledger.emit(EventKind.REFUSED, **facts, key=key, reason=reason.value, detail=detail)

    def news() -> dict[str, Any]:
        return {**facts, "done": done, "rejected": dict(rejected), "figures": tell.figures}

    tell = Tell(refuse)
    outcomes = workflow.stage(facts["stage"]).work(project, folder, facts["task"], tell, part)
    with closing(outcomes):  # closing publishes what is finished
        for reason in outcomes:
            done += 1
            if reason is not None:
                rejected[reason.value] += 1
            if time.monotonic() - told > PROGRESS_EVERY_S:
                ledger.emit(EventKind.PROGRESS, **news())
                told = time.monotonic()
    ledger.emit(EventKind.TASK_FINISHED, **news())


def _fan_out(arguments: Sequence[str], processes: int, ledger: Ledger, facts: dict[str, Any]) -> int:
    """Start a process for each GPU and wait for all; what one of them cannot do does not stop the others."""
    lent = [name for name in os.environ.get(GPUS, "").split(",") if name] or list(map(str, range(processes)))
    command = [*module_command(WORKER), *arguments]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(processes):
            environment = {**os.environ, GPUS: lent[number % len(lent)]}
            started.append(subprocess.Popen([*command, f"{number}/{processes}"], env=environment))
        codes = [process.wait() for process in started]
    except Stopped:
        for process in started:
            process.terminate()
        codes = [process.wait() for process in started] or [STOPPED]
    failed = [SIGNALLED - code if code < 0 else code for code in codes if code]
    if not failed:
        ledger.emit(EventKind.TASK_FINISHED, **facts, done=0, rejected={}, figures={})  # the processes tell theirs
    return failed[0] if failed else 0


def _part(word: str) -> tuple[int, int]:
    """Return which of how many processes this is."""
    number, _, processes = word.partition("/")
    return int(number), int(processes)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Turn the first signal into an orderly end."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    raise Stopped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
