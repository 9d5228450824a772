"""Supervisors that are jobs: each visit claims its number, and submits the next visit and a standby for it.

The next visit begins when all jobs that are under way have ended; the standby only if that visit fails. A number is
claimed by creating a file exclusively, so that no two supervisors pay the same visit.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.cluster.job_spec import SUPERVISE, Job, Request
from pipeline.command_line import Command
from pipeline.config.masking import MASK, without_secrets, without_secrets_in
from pipeline.engine.repair import avoid_bad_nodes
from pipeline.errors import ConfigError, JobFailed, SubmissionRefused
from pipeline.files import create_claim
from pipeline.journal.run_folder import shown_mode, writing_run
from pipeline.journal.run_status import ENDED
from pipeline.project.run_code import SUPERVISOR, module_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.cluster.job_spec import Executor, JobId
    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import NotifySection
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus


def claim_visit(folder: RunFolder, number: int) -> int:
    """Claim the visit of that number, or the first free one after it; return its number."""
    claimant = f"{socket.gethostname()} {os.getpid()} {own_job()}\n"
    with writing_run(folder.claims):
        while not create_claim(folder.claims / f"{number:06d}", claimant):
            number += 1
    return number


def own_job() -> JobId:
    """Return the id of the Slurm job that this process runs in; empty outside of a job."""
    return os.environ.get("SLURM_JOB_ID", "")


def refuse_elsewhere(folder: RunFolder, status: RunStatus, executor: Executor, verb: str) -> None:
    """Refuse to act on a run whose jobs another cluster has, which cannot be seen or ended from here."""
    if status.cluster and status.state not in ENDED and (what := status.elsewhere(executor.cluster)):
        gone = f"or, if that cluster no longer exists: rm -r {shlex.quote(str(folder.path))}"
        remedy = Command.of(verb, folder.name, then=f"   (on a login node of {status.cluster}), {gone}")
        raise ConfigError(what, where=str(folder.path), remedy=remedy)


def hand_over(
    folder: RunFolder, config: Config, executor: Executor, run: RunStatus, jobs: Sequence[JobId]
) -> dict[JobId, str]:
    """Submit the next visit and its standby, off the nodes that failed; return their jobs with their names."""
    coming = avoid_bad_nodes(run, executor, supervisor_job(folder, config, f"{run.visits + 1}", after_any=tuple(jobs)))
    following = executor.submit(coming)
    standby = replace(coming, tag=f"{coming.tag}-standby", after_any=(), after_not_ok=(following,))
    names = {following: coming.tag}
    with suppress(SubmissionRefused):  # a full queue: without a standby the run goes on, until `pipeline resume`
        names[executor.submit(standby)] = standby.tag
    return names


def supervisor_job(
    folder: RunFolder | None,
    config: Config,
    visit: str,
    *,
    after_any: tuple[JobId, ...] = (),
) -> Job:
    """Return the job of a visit; without a folder, one to show or to ask the scheduler about."""
    wanted = config.cluster.supervisor
    return Job(
        name=SUPERVISE,
        argv=(*module_command(SUPERVISOR, folder), str(folder.path) if folder else "RUN", "--visit"),
        tasks=range(1),
        log_dir=str(folder.logs) if folder else "logs",
        after_any=after_any,
        tag=f"{folder.unique if folder else 'RUN'}-{SUPERVISE}-{visit}",
        request=Request(
            mem_bytes=int(wanted.mem),
            time_s=int(wanted.time),
            partition=wanted.partition or "",
            qos=wanted.qos or "",
        ),
    )


log = logging.getLogger(__name__)

STOPPED_CODE = 130  # of a run that somebody stopped

PATIENCE_S = 20.0
SENDMAIL = ("/usr/sbin/sendmail", "/usr/lib/sendmail")


def notify(wanted: NotifySection, folder: RunFolder, stage: str, state: str, error: str) -> None:
    """Run the command and send the mail by which the configuration wants people notified."""
    message = error or f"{stage} of run {folder.name} is {state}"
    if wanted.command:
        _run([*wanted.command, folder.name, stage, state, message], "")
    if wanted.mail:
        program = shutil.which("sendmail") or next(filter(shutil.which, SENDMAIL), "")
        subject = f"Subject: pipeline: {stage} {state} ({folder.name})".replace("\n", " ")
        _run([program or "sendmail", wanted.mail], f"{subject}\nTo: {wanted.mail}\n\n{message}\n{folder.path}\n")


def _run(command: list[str], text: str) -> None:
    """Run a command with this text on its stdin; a failure is only logged."""
    try:
        done = subprocess.run(command, input=text, text=True, timeout=PATIENCE_S, capture_output=True, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        log.warning("notification failed: cannot run %s: %s", command[0], error)
        return
    if done.returncode:
        log.warning("%s ended with %d: %s", command[0], done.returncode, _unquoted(done.stderr.strip(), command))


def _unquoted(message: str, command: list[str]) -> str:
    """Return the output of a command with the secrets of its arguments masked."""
    for word, shown in zip(command, without_secrets_in(command), strict=True):
        message = message.replace(word, shown) if shown == MASK else message
    return without_secrets(message)


def pay_visit(folder: RunFolder) -> None:
    """Run one supervisor visit now, with the run's frozen code; raise when it fails."""
    done = subprocess.run([*module_command(SUPERVISOR, folder), str(folder.path), "--visit", "--now"], check=False)
    if done.returncode:
        what = f"its supervisor ended with {done.returncode}"
        raise JobFailed(what, where=folder.name, remedy=Command.of("status", folder.name))


def start_supervisor(folder: RunFolder) -> int:
    """Start a supervisor in a new session, so that it outlives this process and its terminal; return its pid."""
    mode = shown_mode(folder.path)
    log = (os.POSIX_SPAWN_OPEN, 1, str(folder.supervisor_log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    files = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0), log, (os.POSIX_SPAWN_DUP2, 1, 2)]
    command = [*module_command(SUPERVISOR, folder), str(folder.path)]
    return os.posix_spawn(sys.executable, command, os.environ, file_actions=files, setsid=True)
