"""Decides whether a training restarts its processes within its job after one of them has died or hangs.

The job script (Slurm) or the first process of the task (one machine) asks this after all ranks have ended. So all
nodes get the same answer. Each start has its own rendezvous name: a late process of an earlier start cannot join the
next. The ranks continue from the newest checkpoint. `repair.restarts_in_job` decides. If it says no, the attempt ends
and the supervisor repairs it like any other.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from pipeline.cluster.job_spec import TaskState, TaskStatus
from pipeline.cluster.sbatch import warning_s
from pipeline.cluster.verdict import RESTARTS
from pipeline.config.load import from_resolved
from pipeline.engine.dispatch import highest_figures, judged
from pipeline.engine.repair import restarts_in_job
from pipeline.journal.run_status import StatusReader
from pipeline.records import EventKind
from pipeline.stage_names import StageName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.journal.ledger import Ledger
    from pipeline.journal.run_folder import RunFolder


def restarts(folder: RunFolder, ledger: Ledger, facts: Mapping[str, Any], code: int, spent_s: float, log: str) -> bool:
    """Tell whether a task whose processes exited with `code` restarts them in its job; if so, record the restart.

    `facts` are the stage, the task and the attempt; `spent_s` is the used part of the job's time limit.
    """
    stage, number = facts["stage"], facts["task"]
    if stage != StageName.TRAIN:
        return False
    status, now = StatusReader(folder).read().stages[stage], time.time()
    task = status.task(number)
    if (ask := task.ask) is None:  # the file system does not show the submission yet
        return False
    figures, ranks = highest_figures(status, {number}).get(number, {}), status.jobs[task.job or ""].ranks
    peak_bytes, job = ranks * int(figures.get("host_peak_bytes", 0)) or None, task.job or ""
    ended = TaskStatus(job, number, TaskState.FAILED, log, log, exit_code=code, ended=now, peak_rss_bytes=peak_bytes)
    start = judged(folder, status, ended, figures, ranks)
    site = from_resolved(folder.config.read_text(), str(folder.config)).cluster.slurm
    has_time = not ask.time_s or ask.time_s - spent_s > 2 * warning_s(site, ask.time_s)
    if not (has_time and restarts_in_job([*task.history, start])):
        return False
    lost_s = max(0.0, now - folder.on(stage, number, 0).stat().st_mtime)
    ledger.emit(EventKind.RESTARTED, **{**facts, **start.to_event()}, lost_s=round(lost_s, 3))
    print(f"{RESTARTS}{start.reason}", file=sys.stderr, flush=True)  # noqa: T201 - it belongs into the job's log
    return True
