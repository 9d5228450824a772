"""Supervisors that are jobs: each visit claims its number, and hands over to the next and to a standby for that one.

The next begins when all jobs that are under way have ended; the standby only if the next does not end well, whatever
became of it. A number is claimed by a file that only one can make, so that no two supervisors pay the same visit.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from pipeline.cluster.refusals import SUPERVISE
from pipeline.cluster.spec import JobSpec
from pipeline.errors import SubmissionRefused
from pipeline.runs.folder import writing
from pipeline.runs.frozen import module_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.cluster.spec import Executor, JobId
    from pipeline.config.schema import Config
    from pipeline.runs.folder import RunFolder

MODULE = "pipeline.runs.supervisor"


def claim(folder: RunFolder, number: int) -> int:
    """Claim the visit of that number, or the first after it that nobody has; return its number."""
    who = f"{socket.gethostname()} {os.getpid()} {own_job()}\n"
    while True:
        path = folder.claims / f"{number:06d}"
        with writing(path):
            try:
                with path.open("x") as file:
                    file.write(who)
            except FileExistsError:
                number += 1
            else:
                return number


def claimed_after(folder: RunFolder, number: int) -> bool:
    """Tell whether somebody has claimed a later visit; a listing is not cached as a look for one name may be."""
    return any(int(path.name) > number for path in folder.claims.iterdir())


def own_job() -> JobId:
    """Return the job that this process is of, empty where it is of none."""
    return os.environ.get("SLURM_JOB_ID", "")


def hand_over(folder: RunFolder, config: Config, executor: Executor, number: int, jobs: Sequence[JobId]) -> list[JobId]:
    """Submit the next visit and its standby; return their jobs."""
    coming = supervisor_spec(folder, config, f"{number + 1}", after_any=tuple(jobs))
    following = executor.submit(coming)
    try:
        standby = executor.submit(supervisor_spec(folder, config, f"{number + 1}-standby", after_not_ok=(following,)))
    except SubmissionRefused:  # a full queue: without a standby the run goes on, and `pipeline resume` takes its place
        return [following]
    return [following, standby]


def supervisor_spec(
    folder: RunFolder | None,
    config: Config,
    visit: str,
    *,
    after_any: tuple[JobId, ...] = (),
    after_not_ok: tuple[JobId, ...] = (),
) -> JobSpec:
    """Return the job of a visit."""
    wanted = config.cluster.supervisor
    return JobSpec(
        name=SUPERVISE,
        argv=(*module_command(MODULE, folder), str(folder.path) if folder else "RUN", "--visit"),
        tasks=range(1),
        mem_bytes=int(wanted.mem),
        time_s=int(wanted.time),
        log_dir=str(folder.logs) if folder else "logs",
        after_any=after_any,
        after_not_ok=after_not_ok,
        tag=f"{folder.name if folder else 'RUN'}-{SUPERVISE}-{visit}",
        partition=wanted.partition or "",
        qos=wanted.qos or "",
    )
