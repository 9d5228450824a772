"""Hands a text to the cluster by way of submitit: the text stays as it is, and nothing is pickled."""

from __future__ import annotations

import io
import os
import tempfile
from contextlib import redirect_stderr, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.cluster import sbatch
from pipeline.cluster.accounting import CommandFailed
from pipeline.cluster.slurm_commands import unset_for_jobs
from pipeline.errors import SubmissionRefused

if TYPE_CHECKING:
    from pipeline.cluster.job_spec import JobId, JobSpec

SBATCH_S = 120  # an answer that has not come by then counts as lost


def submit_text(spec: JobSpec, script: str) -> JobId:
    """Submit a script once and keep it beside the job's logs; raise CommandFailed with what sbatch says."""
    draft = script_path(spec, sbatch.job_name(spec))
    _write(draft, script)
    try:
        job = _submit(script)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    with suppress(OSError):  # what is submitted is submitted
        draft.rename(script_path(spec, job))
    return job


def _write(path: Path, script: str) -> None:
    """Write a script where its logs will be: a folder that takes none would take no logs either."""
    try:
        path.write_bytes(os.fsencode(script))
    except OSError as error:
        what = f"the folder of the logs cannot be written: {error.strerror}"
        remedy = "make room, or choose a folder that can be written: pipeline submit … --set cluster.runs=FOLDER"
        raise SubmissionRefused(what, where=str(path.parent), remedy=remedy) from error


def _submit(script: str) -> JobId:
    """Submit a script by way of submitit, in a folder of its own: it reads more into some names of folders."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError  # late: it is slow to import

    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        try:
            with redirect_stderr(io.StringIO()):  # submitit prints what it also raises
                job = _executor_class()(folder, script)._submit_command("")  # noqa: SLF001 - see FIELD.md: the way in
        except (FailedJobError, FailedSubmissionError, UnicodeEncodeError) as error:
            raise CommandFailed(str(error) or "sbatch ended without a word") from error
        return str(job.job_id)


def script_path(spec: JobSpec, job: JobId) -> Path:
    """Return where the script of a job is kept."""
    return Path(spec.log_dir, f"{job}.sbatch")


@cache
def _executor_class() -> Any:
    """Return submitit's executor with our text in the place of its own."""
    from submitit.slurm.slurm import SlurmExecutor

    class TextExecutor(SlurmExecutor):
        """Submits one text."""

        def __init__(self, folder: str, script: str) -> None:
            super().__init__(folder)
            self.script = script

        def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002
            return self.script

        def _make_submission_command(self, submission_file_path: Path) -> list[str]:
            unset = [f"--unset={name}" for name in unset_for_jobs(self.script)]
            return ["env", *unset, "timeout", str(SBATCH_S), "sbatch", str(submission_file_path)]

    return TextExecutor
