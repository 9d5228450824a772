"""The executor for Slurm: a job is an array, submitted through submitit as the text that `sbatch.py` renders.

The state of tasks comes from squeue first, for all jobs at once, and from sacct for those that squeue no longer has or
calls ended. A task that neither knows is UNKNOWN, after some patience.
"""

from __future__ import annotations

import re
import secrets
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.cluster import sbatch, slurm_commands
from pipeline.cluster.accounting import Accounting, AccountingLook, CommandFailed
from pipeline.cluster.following import Followed, Views
from pipeline.cluster.job_spec import refuse_impossible
from pipeline.cluster.local import make_log_dir
from pipeline.cluster.slurm_commands import script_path, submit_text
from pipeline.cluster.slurm_facts import (
    Facts,
    refusal_of,
    refuse_above_caps,
    refuse_above_nodes,
    refuse_narrow_queue,
    transient,
)
from pipeline.cluster.slurm_words import epoch_of
from pipeline.errors import SubmissionRefused

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pipeline.cluster.job_spec import JobId, JobSpec, Limits, TaskStatus
    from pipeline.cluster.slurm_words import Queued
    from pipeline.config.schema_cluster import SlurmSection

TRIES_S = (2.0, 5.0, 10.0, 20.0, 30.0, 60.0)  # waits between tries at a submission that the cluster was too busy for
TESTS_AGAIN = 3  # times, with the first of these waits: somebody may look on
PATIENCE_S = 15.0  # how long the queue and the accounting may disagree before a task is called UNKNOWN
SACCT_S = 20.0
ALREADY_ENDS = "scancel exited with 229"  # the last byte of ESLURM_ALREADY_DONE, all that a quiet scancel says of it
FORGOTTEN_S = 30 * 86_400.0  # how far back the accounting is asked about jobs of others' time
SACCT_AGAIN_S = 30.0  # an accounting that gave trouble is left alone for so long
STARTS_AT = re.compile(r"to start at (\S+)")  # in what sbatch --test-only prints


class SlurmExecutor:
    """Submits to a cluster and asks it; jobs live on without it."""

    outlives: bool = True
    caveats: tuple[str, ...] = ()

    def __init__(self, site: SlurmSection, *, poll_s: float | None = None, patience_s: float = PATIENCE_S) -> None:
        """Look at jobs every `poll_s`, by default as the site says."""
        self.site = site
        self.facts = Facts(site)
        self.trouble = ""  # why squeue or sacct did not answer the last time
        self._poll_s = float(site.poll) if poll_s is None else poll_s
        self._patience_s = patience_s
        self._accounting = Accounting(slurm_commands.run_command, timeout_s=SACCT_S)
        self._ask_again_at = self._look_at = 0.0
        self._jobs: dict[JobId, Followed] = {}
        self._names: dict[JobId, str] = {}  # of jobs in the queue: by its number alone a job may be a stranger's
        self._changed: dict[tuple[JobId, int], TaskStatus] = {}

    @property
    def cluster(self) -> str:
        return self.facts.told.setting("ClusterName")

    def submit(self, spec: JobSpec) -> JobId:
        tagged = replace(spec, tag=spec.tag or f"{sbatch.job_name(spec)}-{secrets.token_hex(6)}")
        _refuse_absent(spec)
        script = self.script_for(self._after_known(tagged))
        make_log_dir(spec)
        job = self._submit(tagged, script, look_first=bool(spec.tag))
        self._jobs[job] = Followed(job, spec, sbatch.offset_of(script) or 0, time.time())
        self._names[job] = sbatch.job_name(tagged)
        return job

    def script_for(self, spec: JobSpec) -> str:
        """Return the script that would be submitted, or raise SubmissionRefused."""
        refuse_impossible(spec)
        spec = self.facts.placed(spec)
        caps = self.facts.caps(spec.partition, spec.qos)
        refuse_above_caps(spec, caps)
        limits = self.facts.limits(spec.partition, cpus=spec.cpus_on_node, gpus=spec.gpus)
        refuse_narrow_queue(spec, limits, caps)
        refuse_above_nodes(spec, self.facts.nodes(spec.partition), limits)
        text = sbatch.template(spec.name, ranks=spec.ranks)
        return sbatch.render(text, spec, self.site, highest_task=limits.highest_task)

    def starts(self, spec: JobSpec) -> float | None:
        """Ask sbatch when a job would start, without submitting it; raise SubmissionRefused if it never would."""
        _refuse_absent(spec)
        script = self.script_for(spec)
        unset = [f"--unset={name}" for name in slurm_commands.unset_for_jobs(script)]
        for wait_s in (*TRIES_S[:TESTS_AGAIN], None):
            try:
                reply = slurm_commands.run_command(["env", *unset, "sbatch", "--test-only"], stdin=script).strip()
            except CommandFailed as error:
                if wait_s is None or not transient(error.what):
                    raise refusal_of(spec, error.what, self._partitions()) from error
                time.sleep(wait_s)
            else:
                start = STARTS_AT.search(reply)
                return epoch_of(start[1]) if start else None
        raise AssertionError

    def limits_of(self, partition: str = "", cpus: int = 1, gpus: int = 0) -> Limits:
        return self.facts.limits(partition, cpus=cpus, gpus=gpus)

    def room(self) -> int | None:
        most = self.facts.limits().queued_tasks
        with suppress(CommandFailed):
            return None if most is None else most - slurm_commands.in_queue(self.site.account, self.site.qos)
        return most

    def check(self, spec: JobSpec) -> None:
        self.starts(spec)

    def adopt(self, job: JobId, spec: JobSpec) -> None:
        if job in self._jobs:
            return
        kept, offset, since = script_path(spec, job), None, time.time() - FORGOTTEN_S
        with suppress(OSError):
            offset, since = sbatch.offset_of(kept.read_text(errors="surrogateescape")), kept.stat().st_mtime
        if offset is None:
            offset = sbatch.array_offset(spec, self.facts.limits(spec.partition).highest_task)
        self._jobs[job], self._names[job] = Followed(job, spec, offset, since), sbatch.job_name(spec)

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
        """Cancel jobs by their numbers, once the queue has shown that they are ours.

        With --name in place of the look, scancel of one waiting task ends its whole array, and it sends one request to
        the controller for each running task.
        """
        try:
            names = [name for name, task in self._queue(jobs).items() if not task.state.ended]
            if tasks is None:
                wanted = list(dict.fromkeys(name.partition("_")[0] for name in names))
            else:
                known = {name: task.task for job in self._jobs.values() for name, task in job.tasks.items()}
                wanted = [name for name in names if known.get(name) in tasks]
            if wanted:
                slurm_commands.run_command(["scancel", "--quiet", *wanted])
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
        """Return the queue's entries of those jobs whose names are known."""
        return slurm_commands.queue({job: self._names[job] for job in jobs if job in self._names})

    def close(self) -> None:
        """Let go; the jobs live on."""

    def __enter__(self) -> SlurmExecutor:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _submit(self, spec: JobSpec, script: str, *, look_first: bool) -> JobId:
        """Submit a script exactly once, retrying while the cluster is too busy."""
        for wait_s in (*TRIES_S, None):
            try:
                if look_first and (existing := slurm_commands.named(sbatch.job_name(spec))):
                    return min(existing, key=int)
                look_first = True
                return submit_text(spec, script)
            except CommandFailed as error:
                if wait_s is None and (lost := self._named(spec)):
                    return lost
                if wait_s is None or not transient(error.what):
                    raise refusal_of(spec, error.what, self._partitions()) from error
                time.sleep(wait_s)
        raise AssertionError

    def _named(self, spec: JobSpec) -> JobId | None:
        """Return the job of a tag if the cluster has it and answers."""
        with suppress(CommandFailed):
            return min(slurm_commands.named(sbatch.job_name(spec)), key=int, default=None)
        return None

    def _is_open(self) -> bool:
        """Tell whether a task of any job has not ended."""
        return any(job.is_open for job in self._jobs.values())

    def _look(self) -> None:
        """Query the queue, and the accounting about tasks that the queue leaves open; note which tasks changed."""
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
        """Return what the accounting has on some jobs; nothing for a while after it failed to answer."""
        if not jobs or time.monotonic() < self._ask_again_at:
            return AccountingLook({})
        look = self._accounting.look({job.id: self._names[job.id] for job in jobs}, min(job.since for job in jobs))
        if look.trouble:
            self.trouble = look.trouble
            self._ask_again_at = time.monotonic() + (0.0 if look.rows else SACCT_AGAIN_S)
        return look

    def _after_known(self, spec: JobSpec) -> JobSpec:
        """Return a job without the dependencies that the queue has forgotten: those jobs have ended."""
        with suppress(CommandFailed):
            known = {name.partition("_")[0] for name in self._queue(spec.after_any)}
            return replace(spec, after_any=tuple(job for job in spec.after_any if job in known))
        return spec

    def _partitions(self) -> list[str]:
        """Return the names that `partition` can have."""
        return [kind.partition for kind in self.facts.partitions]


def _refuse_absent(spec: JobSpec) -> None:
    """Refuse a job where Slurm's commands are not installed."""
    if not slurm_commands.is_there():
        raise refusal_of(spec, "sbatch: No such file or directory", ())
