"""Telling people that a stage has ended; nobody's mail server is a reason for a run to fail."""

from __future__ import annotations

import logging
import shutil
import subprocess
from typing import TYPE_CHECKING

from pipeline.config.hidden import MASK, hidden, hidden_in

if TYPE_CHECKING:
    from pipeline.config.schema_cluster import Notify
    from pipeline.runs.folder import RunFolder

log = logging.getLogger(__name__)

PATIENCE_S = 20.0
SENDMAIL = ("/usr/sbin/sendmail", "/usr/lib/sendmail")


def notify(wanted: Notify, folder: RunFolder, stage: str, state: str, error: str) -> None:
    """Run the command and send the mail that the configuration asks for."""
    message = error or f"{stage} of run {folder.name} is {state}"
    if wanted.command:
        _run([*wanted.command, folder.name, stage, state, message], "")
    if wanted.mail:
        program = shutil.which("sendmail") or next(filter(shutil.which, SENDMAIL), "")
        subject = f"Subject: pipeline: {stage} {state} ({folder.name})".replace("\n", " ")
        _run([program or "sendmail", wanted.mail], f"{subject}\nTo: {wanted.mail}\n\n{message}\n{folder.path}\n")


def _run(command: list[str], text: str) -> None:
    """Run a command that has something to read, and a while for it."""
    try:
        done = subprocess.run(command, input=text, text=True, timeout=PATIENCE_S, capture_output=True, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        log.warning("nobody was told, as %s could not be run: %s", command[0], error)
        return
    if done.returncode:
        log.warning("%s ended with %d: %s", command[0], done.returncode, _unquoted(done.stderr.strip(), command))


def _unquoted(said: str, command: list[str]) -> str:
    """Return what a command said, without the secrets among its words."""
    for word, shown in zip(command, hidden_in(command), strict=True):
        said = said.replace(word, shown) if shown == MASK else said
    return hidden(said)
