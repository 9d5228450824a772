"""Runs several tasks side by side in one job, each a process with a log and an end of its own.

python -m pipeline.engine.worker RUN STAGE TASK ... --beside 0-7 --sharing 4

starts workers for TASK and the three tasks that follow it in this list, and waits for all of them. A worker that fails
ends no other. When Slurm restarts the job, only tasks that have not ended are started again.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster.job_spec import log_beside, parse_ranges
from pipeline.cluster.machine import THREADS
from pipeline.cluster.verdict import GO_ON, is_interruption
from pipeline.config.load import from_resolved
from pipeline.device.kinds import MPS_FOLDER
from pipeline.journal.attempts import SILENCE
from pipeline.journal.run_status import StatusReader
from pipeline.project.run_code import WORKER, module_command
from pipeline.stages import table
from pipeline.training.ranks.launch import FORWARDED, StartedProcesses
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from pipeline.journal.attempts import TaskRecord
    from pipeline.journal.run_folder import RunFolder

LOOK_EVERY_S = 1.0  # how often the ledger is read for cancelled tasks
ERR = ".err"


def run_side_by_side(words: Sequence[str], folder: RunFolder, arguments: argparse.Namespace) -> int:
    """Run the tasks of a group; return 75 if any has more to do, else the highest exit code."""
    tasks, status, stage = parse_ranges(arguments.beside), StatusReader(folder), arguments.stage
    first = tasks.index(arguments.task)
    group = tasks[first : first + arguments.sharing]
    due = [number for number in group if not _is_over(status.read().stages[stage].task(number), arguments.attempt)]
    config = from_resolved(folder.config.read_text(), str(folder.config))
    resources = table.stage(stage, config).resources(config)
    line = f"tasks {', '.join(map(str, due))} run side by side{mps_note() if resources.gpus else ''}"
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - a task's stderr is its log
    env = {**os.environ, **dict.fromkeys(THREADS, str(resources.cpus))}  # each gets its own cpus, as if it were alone
    workers = StartedProcesses()
    for forwarded in FORWARDED:
        signal.signal(forwarded, workers.forward)
    for number in due:
        own = (words[0], stage, str(number), *words[3 : words.index("--beside")])
        stem = log_beside(_own_log(folder), number - arguments.task)
        with Path(f"{stem}.out").open("ab") as out, Path(f"{stem}{ERR}").open("ab") as err:
            workers.start([*module_command(WORKER, folder), *own], env, (out, err))

    def have_ended() -> bool:
        for number, worker in zip(due, workers.processes, strict=True):
            if status.read().stages[stage].task(number).cancelled:
                worker.terminate()
        return workers.all_ended()

    wait_for(have_ended, float("inf"), LOOK_EVERY_S)
    return GO_ON if GO_ON in workers.ended.values() else max(workers.ended.values(), default=0)


def _is_over(task: TaskRecord, attempt: int) -> bool:
    """Tell whether a task was cancelled, or has ended in an earlier start of this attempt."""
    word = task.words.get(attempt, SILENCE)
    has_failed = word.exit_code is not None and not is_interruption(word.exit_code)
    return bool(task.cancelled) or word.finished or has_failed


def _own_log(folder: RunFolder) -> str:
    """Return the path of this job's log, without its ending."""
    own = str(Path("/proc/self/fd/2").readlink())
    if not own.endswith(ERR):  # Slurm writes it, from a pipe
        own = str(folder.logs / "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format_map(os.environ))
    return own.removesuffix(ERR)


def mps_note() -> str:
    """Return a note on MPS: whether kernels of several processes overlap on the GPUs of this machine."""
    folder = Path(os.environ.get(MPS_FOLDER, "/tmp/nvidia-mps"))  # noqa: S108 - NVIDIA's default
    if (folder / "control").exists():
        return f"; MPS is running ({folder}), so that their kernels overlap"
    return "; without MPS their kernels take turns"
