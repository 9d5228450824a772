"""What a job executes: one task of one stage of a run, named by three words.

python -m pipeline.runs.worker RUN STAGE TASK
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.config.load import from_resolved
from pipeline.errors import PipelineError
from pipeline.records import EventKind
from pipeline.runs import workflow
from pipeline.runs.folder import RunFolder
from pipeline.runs.ledger import Ledger
from pipeline.runs.project import Project

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

PROGRESS_EVERY_S = 0.5
STOPPED = 128 + signal.SIGTERM


class Stopped(BaseException):
    """Somebody asked this process to end; what is finished is published on the way out."""


def main(arguments: Sequence[str]) -> int:
    """Do one task and report on it."""
    folder, stage, task = RunFolder(Path(arguments[0])), arguments[1], int(arguments[2])
    signal.signal(signal.SIGTERM, _stop)
    ledger = Ledger(folder, f"{stage}-{task:06d}")
    ledger.emit(EventKind.TASK_STARTED, stage=stage, task=task, host=socket.gethostname())
    try:
        done, rejected = work(folder, stage, task, ledger)
    except PipelineError as error:
        ledger.emit(EventKind.TASK_FAILED, stage=stage, task=task, what=str(error), exit_code=error.exit_code)
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - a task's stderr is its log
        return error.exit_code
    except Stopped:
        ledger.emit(EventKind.TASK_FAILED, stage=stage, task=task, what="stopped by a signal", exit_code=STOPPED)
        return STOPPED
    ledger.emit(EventKind.TASK_FINISHED, stage=stage, task=task, done=done, rejected=rejected)
    return 0


def work(folder: RunFolder, stage: str, task: int, ledger: Ledger) -> tuple[int, dict[str, int]]:
    """Work through a task's items, telling the ledger twice a second."""
    project = Project.open(from_resolved(folder.config.read_text()))
    done, rejected, told = 0, Counter[str](), 0.0
    with closing(workflow.stage(stage).work(project, folder, task)) as outcomes:  # closing publishes what is finished
        for reason in outcomes:
            done += 1
            if reason is not None:
                rejected[reason.value] += 1
            if time.monotonic() - told > PROGRESS_EVERY_S:
                ledger.emit(EventKind.PROGRESS, stage=stage, task=task, done=done, rejected=dict(rejected))
                told = time.monotonic()
    return done, dict(rejected)


def _stop(_signal: int, _frame: FrameType | None) -> None:
    """Turn the first SIGTERM into an orderly end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
