"""Notifies people when a stage ends, and when jobs wait for something that needs a person."""

from __future__ import annotations

import logging
import shutil
import subprocess
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from pipeline.config.masking import MASK, without_secrets, without_secrets_in
from pipeline.records import EventKind
from pipeline.report.stage_lines import wait_lines

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipeline.config.schema_cluster import NotifySection
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_view import RunView

log = logging.getLogger(__name__)

PATIENCE_S = 20.0
SENDMAIL = ("/usr/sbin/sendmail", "/usr/lib/sendmail")


def notify_of_waits(run: RunView, wanted: NotifySection, emit: Callable[..., None]) -> None:
    """Record and report the waits that have begun or ended since the last look."""
    if run.queue.tasks is None:  # the queue does not answer
        return
    folder, status, found, now = run.folder, run.status, run.stuck, round(time.time(), 3)
    still = {(wait.of, wait.reason) for wait in found}
    begun = [replace(wait, since=now) for wait in found if status.open_wait(wait) is None]
    over = [wait for wait in status.waits if not wait.is_over and (wait.of, wait.reason) not in still]
    for wait in begun:
        emit(EventKind.WAITING, **asdict(wait))
        notify(wanted, folder, wait.of, "waiting", *wait_lines([wait]))
    for wait in over:
        emit(EventKind.WAITED, **asdict(wait := replace(wait, until=now)))
        notify(wanted, folder, wait.of, "waited", *wait_lines([wait]))


def notify(wanted: NotifySection, folder: RunFolder, stage: str, state: str, message: str) -> None:
    """Run `cluster.notify.command` and send the configured mail."""
    message = message or f"{stage} of run {folder.name} is {state}"
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
