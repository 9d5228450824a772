"""Runs Slurm's commands, with time limits and an environment that does not change their answers."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cluster import sbatch
from pipeline.cluster.accounting import ENVIRONMENT, CommandFailed
from pipeline.cluster.slurm_words import SQUEUE, Queued, only_ours, parse_squeue
from pipeline.command_line import Command
from pipeline.device.kinds import VISIBLE_TO
from pipeline.errors import SubmissionRefused
from pipeline.files import user_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.cluster.job_spec import Job, JobId


CONFIG = ("scontrol", "show", "config")
ASK_S = 60.0  # a busy controller is slow
SETTING = re.compile(r"\s*([\w/\[\]-]+)\s*=\s?(.*)")
SAYS_NOTHING = "Invalid job id"  # squeue's message for a job that has left the queue
MINE = re.compile(r"(SLURM|SLURMD|SRUN|SBATCH|SQUEUE|SACCT|SINFO|SCONTROL|SCANCEL|SUBMITIT)_")  # of an enclosing job
KEPT = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER"})
DEFAULTS = frozenset(f"SBATCH_{name}" for name in ("ACCOUNT", "PARTITION", "QOS", "RESERVATION", "CONSTRAINT"))


def run_command(words: Sequence[str], timeout_s: float = ASK_S, *, stdin: str = "") -> str:
    """Run a command and return what it prints."""
    try:
        done = subprocess.run(
            words,
            input=stdin,
            capture_output=True,
            timeout=timeout_s,
            env=question_environment(),
            encoding="utf-8",
            errors="surrogateescape",
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandFailed(f"{words[0]} timed out after {timeout_s:.0f} s") from error
    except FileNotFoundError as error:
        raise CommandFailed(f"{words[0]}: No such file or directory") from error
    except OSError as error:
        raise CommandFailed(f"{words[0]}: {error.strerror}") from error
    if done.returncode:
        raise CommandFailed(done.stderr.strip() or f"{words[0]} exited with {done.returncode}")
    return done.stderr if "--test-only" in words else done.stdout


def question_environment() -> dict[str, str]:
    """Return an environment for queries, without the job, filters and formats of the calling session."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT or not MINE.match(name)}
    return {**kept, **ENVIRONMENT}


def without_our_variables(script: str) -> list[str]:
    """Return the words before sbatch that unset variables of an enclosing job or that override the header."""
    in_header = {f"SBATCH_{name.upper()}" for name in re.findall(r"^#SBATCH --([a-z]+)=", script, re.MULTILINE)}
    spared = (KEPT | DEFAULTS) - in_header
    unset = sorted(name for name in os.environ if (MINE.match(name) and name not in spared) or name in VISIBLE_TO)
    return ["env", *(f"--unset={name}" for name in unset)]


def is_there() -> bool:
    """Tell whether Slurm's commands are installed on this machine."""
    return all(shutil.which(name) for name in ("sbatch", "srun", "squeue", "scontrol", "scancel"))


def queue(names: Mapping[JobId, str], timeout_s: float = ASK_S, *, uid: int | None = None) -> dict[str, Queued]:
    """Return the queue's entry of each task by name (12_3), including tasks that have just ended.

    `names` maps each job number to its unique name; `uid` is the owner (default: this user). Both are checked because a
    controller that lost its state reuses numbers.
    """
    known = {job: name for job, name in names.items() if job.isdecimal() and name}
    if not known:
        return {}
    try:
        return parse_squeue(run_command([*SQUEUE, *only_ours(known, uid)], timeout_s))
    except CommandFailed as error:
        if SAYS_NOTHING in error.what:
            return {}
        raise


def parse_settings(text: str) -> dict[str, str]:
    """Parse `scontrol show config`."""
    return {match[1]: match[2].strip() for match in map(SETTING.fullmatch, text.splitlines()) if match}


def cluster_name(timeout_s: float = ASK_S) -> str:
    """Return the name of the cluster that Slurm's commands reach."""
    return parse_settings(run_command(CONFIG, timeout_s)).get("ClusterName", "")


def named(name: str) -> set[JobId]:
    """Return the ids of my jobs with a name, from the queue, else from the accounting if it answers."""
    text = run_command(
        ["squeue", "--noheader", "--states=all", f"--user={os.getuid()}", f"--name={name}", "--format=%F"]
    )
    if job_ids := set(text.split()):
        return job_ids
    words = ["sacct", "--noheader", "--parsable2", "--allocations", f"--user={os.getuid()}", f"--name={name}"]
    try:
        text = run_command([*words, "--starttime=now-30days", "--format=JobID"])
    except CommandFailed:  # then only the queue counts
        return set()
    return {line.partition("_")[0] for line in text.split()}


def reserved_bytes(nodes: str) -> int:
    """Return the memory that nodes reserve for themselves: the least of these nodes; 0 if unknown."""
    text = run_command(["scontrol", "--oneliner", "show", "node", nodes])
    kept = [int(match[1]) if (match := re.search(r"\bMemSpecLimit=(\d+)", line)) else 0 for line in text.splitlines()]
    return min(kept, default=0) << 20


def in_queue(account: str | None, qos: str | None) -> int:
    """Count my tasks in the queue, optionally of an account and a QOS."""
    words = ["squeue", "--noheader", "--array", f"--user={os.getuid()}", "--format=%i"]
    words += [f"--account={account}"] if account else []
    words += [f"--qos={qos}"] if qos else []
    return len(run_command(words).split())


def my_name() -> str:
    """Return this user's name on the cluster."""
    return user_name(os.getuid())


SBATCH_S = 120  # a later answer counts as lost


def submit_text(job: Job, script: str) -> JobId:
    """Submit a script once and keep it next to the job's logs; raise CommandFailed with sbatch's message."""
    draft = script_path(job, sbatch.job_name(job))
    try:
        draft.write_bytes(os.fsencode(script))
    except OSError as error:  # without this folder the job could not write logs
        what = f"cannot write to the log folder: {error.strerror}"
        before = "free disk space, or choose a writable folder: "
        remedy = Command.submit("all", before=before).with_settings(("cluster.runs", "FOLDER"))
        raise SubmissionRefused(what, where=str(draft.parent), remedy=remedy) from error
    try:
        job_id = _submit(script)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    with suppress(OSError):  # the job is queued anyway
        draft.rename(script_path(job, job_id))
    return job_id


def script_path(job: Job, name: str) -> Path:
    """Return the path of a job's script, by its id or, before it has one, its name."""
    return Path(job.log_dir, f"{name}.sbatch")


def _submit(script: str) -> JobId:
    """Submit a script through submitit in a temporary folder, because submitit interprets some folder names."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError  # imported late: slow
    from submitit.slurm.slurm import SlurmExecutor

    class ScriptExecutor(SlurmExecutor):  # type: ignore[misc, unused-ignore]
        def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002
            return script

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            return [*without_our_variables(script), "timeout", str(SBATCH_S), "sbatch", str(submission_file_path)]

    try:
        with tempfile.TemporaryDirectory(prefix="pipeline-") as folder, redirect_stderr(io.StringIO()):  # it says twice
            return str(ScriptExecutor(folder)._submit_command("").job_id)  # noqa: SLF001 - see FIELD.md: the way in
    except (FailedJobError, FailedSubmissionError, UnicodeEncodeError) as error:
        raise CommandFailed(str(error) or "sbatch failed without a message") from error
