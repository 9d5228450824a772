"""The executor for Slurm: a job is an array, submitted through submitit as the text that `sbatch.py` renders.

The state of tasks comes from squeue, for all jobs at once; from sacct for tasks that squeue lacks or calls ended. A
task that neither knows becomes UNKNOWN after a while.
"""

from __future__ import annotations

import re
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pipeline.cluster import sbatch, slurm_commands
from pipeline.cluster.accounting import Accounting, AccountingLook, CommandFailed
from pipeline.cluster.following import Followed, Views
from pipeline.cluster.job_spec import LEAST
from pipeline.cluster.placing import make_log_dir
from pipeline.cluster.refusals import refusal_of, transient
from pipeline.cluster.site import Site
from pipeline.cluster.slurm_commands import run_command, script_path, submit_text
from pipeline.cluster.slurm_words import epoch_of
from pipeline.errors import ClusterSilent, SubmissionRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from pipeline.cluster.job_spec import Job, JobId, Limits, Request, TaskStatus
    from pipeline.cluster.slurm_words import Queued
    from pipeline.config.schema_cluster import SlurmSection

T = TypeVar("T")
TRIES_S = (2.0, 5.0, 10.0, 20.0, 30.0, 60.0)  # waits between retries of a submission to a busy cluster
TESTS_AGAIN = 3  # tries with the first wait only: a user may be waiting
PATIENCE_S = 15.0  # how long the queue and the accounting may disagree before a task is called UNKNOWN
SACCT_S = 20.0
ALREADY_ENDS = "scancel exited with 229"  # the last byte of ESLURM_ALREADY_DONE, the exit code of a quiet scancel
FORGOTTEN_S = 30 * 86_400.0  # how far back the accounting is asked about adopted jobs
SACCT_AGAIN_S = 30.0  # a failing accounting is not asked again for this long
HAS_BEGUN = ("no longer pending", "already finished", "already completed")  # scontrol's message for an ended job
STARTS_AT = re.compile(r"to start at (\S+)")  # in the output of sbatch --test-only


class SlurmExecutor:
    """Runs jobs on a Slurm cluster; they continue without this process."""

    outlives: bool = True
    ends_at: float | None = None

    def __init__(self, profile: SlurmSection, *, poll_s: float | None = None, patience_s: float = PATIENCE_S) -> None:
        """Poll jobs every `poll_s` seconds. Default: the site's interval."""
        self.site = Site(profile)
        self.trouble = ""  # why squeue or sacct did not answer last time
        self._poll_s = float(profile.poll) if poll_s is None else poll_s
        self._patience_s = patience_s
        self._accounting = Accounting(run_command, timeout_s=SACCT_S)
        self._ask_again_at = self._look_at = 0.0
        self._jobs: dict[JobId, Followed] = {}
        self._names: dict[JobId, str] = {}  # job number → unique name: numbers alone may be reused
        self._changed: dict[tuple[JobId, int], TaskStatus] = {}

    @property
    def cluster(self) -> str:
        return self.site.cluster

    def submit(self, job: Job) -> JobId:
        tagged = replace(job, tag=job.tag or f"{sbatch.job_name(job)}-{secrets.token_hex(6)}")
        _refuse_absent(job)
        script = self.script_for(self._after_known(tagged))
        make_log_dir(job)
        job_id = self._submit(tagged, script, look_first=bool(job.tag))
        self._jobs[job_id] = Followed(job_id, job, sbatch.offset_of(script) or 0, time.time())
        self._names[job_id] = sbatch.job_name(tagged)
        return job_id

    def script_for(self, job: Job) -> str:
        """Return the script that would be submitted, or raise SubmissionRefused."""
        job = self.site.placed(job)
        limits = self.site.refuse(job)
        text = sbatch.template(job.name, ranks=job.request.ranks)
        return sbatch.render(text, job, self.site.profile, highest_task=limits.highest_task)

    def starts(self, job: Job) -> float | None:
        """Ask sbatch when a job would start, without submitting it; raise SubmissionRefused if never."""
        _refuse_absent(job)
        script = self.script_for(job)
        words = [*slurm_commands.without_our_variables(script), "sbatch", "--test-only"]
        reply = self._patiently(job, lambda: run_command(words, stdin=script), TRIES_S[:TESTS_AGAIN])
        start = STARTS_AT.search(reply)
        return epoch_of(start[1]) if start else None

    def reschedule(self, job_id: JobId, job: Job) -> None:
        begin = f"now+{job.begin_s}" if job.begin_s else "now"
        after = sbatch.dependency(self._after_known(job))
        change = [f"Dependency={after}", f"StartTime={begin}", f"ExcNodeList={','.join(job.exclude)}"]
        try:
            self._patiently(job, lambda: run_command(["scontrol", "update", f"JobId={job_id}", *change]))
        except SubmissionRefused as error:
            if not any(sign in error.what for sign in HAS_BEGUN):
                raise

    def limits_of(self, request: Request = LEAST) -> Limits:
        return self.site.limits(request)

    def room(self) -> int | None:
        most, profile = self.site.limits(LEAST).queued_tasks, self.site.profile
        with suppress(CommandFailed):
            return None if most is None else most - slurm_commands.in_queue(profile.account, profile.qos)
        return most

    def check(self, job: Job) -> None:
        self.starts(job)

    def adopt(self, job_id: JobId, job: Job) -> None:
        if job_id in self._jobs:
            return
        kept, offset, since = script_path(job, job_id), None, time.time() - FORGOTTEN_S
        with suppress(OSError):
            offset, since = sbatch.offset_of(kept.read_text(errors="surrogateescape")), kept.stat().st_mtime
        if offset is None:
            offset = sbatch.array_offset(job, self.site.limits(job.request).highest_task)
        self._jobs[job_id], self._names[job_id] = Followed(job_id, job, offset, since), sbatch.job_name(job)

    def recognize(self, names: Mapping[JobId, str]) -> None:
        self._names.update(names)

    def status(self, jobs: Iterable[JobId]) -> list[TaskStatus]:
        known = (self._jobs[job] for job in jobs if job in self._jobs)
        return [task for job in known for task in job.tasks.values()]

    def step(self, timeout_s: float) -> list[TaskStatus]:
        until = time.monotonic() + timeout_s
        self._look_in_time()
        while not self._changed and self._is_open() and (left_s := until - time.monotonic()) > 0:
            time.sleep(min(max(0.0, self._look_at - time.monotonic()), left_s))
            self._look_in_time()
        changed, self._changed = self._changed, {}
        return list(changed.values())

    def _look_in_time(self) -> None:
        """Query the cluster, at most once in the polling interval."""
        if time.monotonic() >= self._look_at:
            self._look()
            self._look_at = time.monotonic() + self._poll_s

    def cancel(self, jobs: Iterable[JobId], tasks: Collection[int] | None = None) -> None:
        """Cancel jobs by their numbers, after the queue has shown that they are ours.

        scancel --name would not need that look. But for one pending task it ends the whole array, and it sends the
        controller a request for each running task.
        """
        try:
            names = [name for name, task in self._queue(jobs).items() if not task.state.ended]
            if tasks is None:
                wanted = list(dict.fromkeys(name.partition("_")[0] for name in names))
            else:
                known = {name: task.task for job in self._jobs.values() for name, task in job.tasks.items()}
                wanted = [name for name in names if known.get(name) in tasks]
            if wanted:
                run_command(["scancel", "--quiet", *wanted])
        except CommandFailed as error:
            if slurm_commands.SAYS_NOTHING not in error.what and error.what != ALREADY_ENDS:
                remedy = "squeue --me   (lists your jobs; then run the same command again)"
                raise SubmissionRefused(error.what, where="scancel", remedy=remedy) from error

    def queued(self, jobs: Iterable[JobId]) -> set[JobId]:
        wanted = set(jobs)
        try:
            tasks = self._queue(wanted)
        except CommandFailed as error:
            self.trouble = error.what
            return wanted
        return {name.partition("_")[0] for name, task in tasks.items() if not task.state.ended}

    def _queue(self, jobs: Iterable[JobId]) -> dict[str, Queued]:
        """Return the queue's entries of jobs with known names."""
        return slurm_commands.queue({job: self._names[job] for job in jobs if job in self._names})

    def close(self) -> None:
        """Do nothing: the jobs continue."""

    def __enter__(self) -> SlurmExecutor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _submit(self, job: Job, script: str, *, look_first: bool) -> JobId:
        """Submit a script exactly once; retry while the cluster is too busy.

        Another process may submit the same at the same time, if both find no job in the queue. So both look again, and
        the one whose job has the higher number cancels it.
        """
        name, is_shared = sbatch.job_name(job), look_first

        def submit_once() -> JobId:
            nonlocal look_first
            if look_first and (existing := slurm_commands.named(name)):
                return min(existing, key=int)
            look_first = True
            return submit_text(job, script)

        try:
            job_id = self._patiently(job, submit_once)
        except ClusterSilent:
            if (lost := _first_named(name)) is None:
                raise
            return lost
        first = _first_named(name) if is_shared else job_id
        if first is None or first == job_id:
            return job_id
        with suppress(SubmissionRefused):  # if this fails, both jobs run and publish the same records
            self._patiently(job, lambda: run_command(["scancel", "--quiet", job_id]))
        return first

    def _patiently(self, job: Job, act: Callable[[], T], waits_s: Sequence[float] = TRIES_S) -> T:
        """Call a function; retry while the cluster is too busy, then raise SubmissionRefused."""
        for wait_s in (*waits_s, None):
            try:
                return act()
            except CommandFailed as error:
                if wait_s is None or not transient(error.what):
                    raise refusal_of(job, error.what, [kind.partition for kind in self.site.nodes]) from error
                time.sleep(wait_s)
        raise AssertionError

    def _is_open(self) -> bool:
        """Tell whether a task of any job has not ended."""
        return any(job.is_open for job in self._jobs.values())

    def _look(self) -> None:
        """Query the queue, and the accounting for tasks that the queue leaves open; note the changed tasks."""
        jobs = [job for job in self._jobs.values() if job.is_open]
        if not jobs:
            return
        self.trouble = ""
        try:
            queue: Mapping[str, Queued] | None = self._queue(job.id for job in jobs)
        except CommandFailed as error:
            queue, self.trouble = None, error.what
        look = self._accounted([job for job in jobs if job.leaves_open(queue)])
        views = Views(queue, look.rows, time.monotonic(), self.trouble, look.never_began)
        for job in jobs:
            self._changed.update({(task.job, task.task): task for task in job.take_in(views, self._patience_s)})

    def _accounted(self, jobs: list[Followed]) -> AccountingLook:
        """Return the accounting of some jobs; nothing for a while after it failed to answer."""
        if not jobs or time.monotonic() < self._ask_again_at:
            return AccountingLook({})
        look = self._accounting.look({job.id: self._names[job.id] for job in jobs}, min(job.since for job in jobs))
        if look.trouble:
            self.trouble = look.trouble
            self._ask_again_at = time.monotonic() + (0.0 if look.rows else SACCT_AGAIN_S)
        return look

    def _after_known(self, job: Job) -> Job:
        """Return a job without dependencies on jobs that have left the queue."""
        with suppress(CommandFailed):
            known = {name.partition("_")[0] for name in self._queue(job.after_any)}
            return replace(job, after_any=tuple(other for other in job.after_any if other in known))
        return job


def _first_named(name: str) -> JobId | None:
    """Return the first job with a name, if any."""
    with suppress(CommandFailed):
        return min(slurm_commands.named(name), key=int, default=None)
    return None


def _refuse_absent(job: Job) -> None:
    """Refuse a job if Slurm's commands are not installed."""
    if not slurm_commands.is_there():
        raise refusal_of(job, "sbatch: No such file or directory", ())
