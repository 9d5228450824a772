"""Submits the tasks of a stage that are due as jobs, and records how each attempt at a task ended."""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

from pipeline.cluster.job_spec import TaskState, format_ranges, log_beside, parse_ranges
from pipeline.cluster.verdict import Cause, judge_attempt
from pipeline.codec import plain
from pipeline.dataset import worklist
from pipeline.engine.repair import GiveUp, LeaveOut, Situation, Split, avoid_bad_nodes, decide
from pipeline.errors import BudgetReached, ClusterSilent, SubmissionRefused
from pipeline.journal.attempts import Attempt, leave_out
from pipeline.journal.budget import Budget, Spending
from pipeline.journal.ledger import read_notes
from pipeline.journal.run_logs import end_of
from pipeline.memory.history import Measured
from pipeline.project.container_image import with_digest
from pipeline.project.project import cluster_name, profiles_of
from pipeline.records import EventKind
from pipeline.stage_names import StageName
from pipeline.stages.jobs import candidates, first_job, job_of, limits_of, on_cards
from pipeline.stages.script import script_of
from pipeline.store.store import in_chunks
from pipeline.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pipeline.cluster.candidates import Candidate
    from pipeline.cluster.job_spec import Executor, Job, JobId, Limits, TaskStatus
    from pipeline.cluster.verdict import Word
    from pipeline.command_line import Command
    from pipeline.config.schema import Config
    from pipeline.journal.attempts import Ask, TaskRecord
    from pipeline.journal.budget import Account
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus, StageJob, StageStatus
    from pipeline.project.project import Project
    from pipeline.stages.stage import Stage

    Emit: TypeAlias = Callable[..., None]

GPU_PEAKS = ("gpu_used_bytes", "device_peak_bytes")  # memory of all processes on a GPU, and of one
PEAKS, BUSY = ("host_peak_bytes", "gpu_total_bytes", *GPU_PEAKS), "gpu_busy"
MANY = 1 << 30
GROUP_FAILED = (TaskState.COMPLETED, TaskState.FAILED, TaskState.OUT_OF_MEMORY)


@dataclass(frozen=True, slots=True)
class Next:
    """The next attempt at a task; tasks whose next attempts are equal share a job."""

    attempt: int
    ask: Ask
    why: str


class Dispatch:
    """Submits tasks and records how they ended. The ledger holds all of its state."""

    def __init__(self, folder: RunFolder, config: Config, executor: Executor, run: RunStatus, emit: Emit) -> None:
        self._folder, self._config, self._executor, self._run, self._emit = folder, config, executor, run, emit
        self._profiles = profiles_of(config)
        self._spending = Spending(folder.path.parent, Budget.of(config.cluster.budget))

    def adopt(self, stage: StageStatus) -> None:
        """Take over the jobs of an earlier supervisor, and submit those that it announced without noting a job id.

        Of those that ended with it, tasks that had not started were no attempts.
        """
        for task in stage.work.values():
            if not (self._executor.outlives or task.word.started):
                task.job = None
        for live in stage.live:
            self._executor.adopt(live, job_of(self._folder, self._config, stage.jobs[live]))
        for job in list(stage.intents.values()):
            self._submit(job)

    @staticmethod
    def of_tasks(status: StageStatus, reports: Iterable[TaskStatus]) -> list[TaskStatus]:
        """Return a report for each task; tasks that share a job get copies of its report, with their own logs."""
        found = []
        for report in reports:
            job = status.jobs.get(report.job)
            group = next((group for group in job.groups if group[0] == report.task), None) if job else None
            found += [_for_member(report, number) for number in group] if group else [report]
        return found

    def collect(self, project: Project, stage: Stage, status: StageStatus, changed: Sequence[TaskStatus]) -> int:
        """Record the attempts that have ended; return their number."""
        over = [report for report in changed if is_over(report) and status.task(report.task).job == report.job]
        highest = highest_figures(status, {report.task for report in over}) if over else {}
        on_node = stage.processes(project) // stage.resources(project.config).nodes
        attempts = [judged(self._folder, status, report, highest.get(report.task, {}), on_node) for report in over]
        for attempt in attempts:
            self._emit(EventKind.TASK_ENDED, stage=stage.name, **attempt.to_event())
        if attempts:
            self._remember(project, stage, status, attempts)
        return len(attempts)

    @staticmethod
    def lacks_reports(status: StageStatus, changed: Sequence[TaskStatus]) -> bool:
        """Tell whether the worker's report on any task is missing: some file systems show it late."""
        return any(
            not (task.word.finished if report.state is TaskState.COMPLETED else task.word.started)
            for report in changed
            if report.state in (TaskState.COMPLETED, TaskState.FAILED)
            and (task := status.task(report.task)).job == report.job
        )

    def _remember(self, project: Project, stage: Stage, status: StageStatus, attempts: Sequence[Attempt]) -> None:
        """Remember the memory and time of these attempts for the plans of later runs."""
        cluster = cluster_name(self._config)
        names = {status.name_of(attempt.task) for attempt in attempts}
        shared = self._planned(project, stage, status)
        recipes = {name: status.own.get(name, shared).recipe for name in names}
        shards = worklist.read_shards(self._folder, stage.name)
        measured = [
            Measured(
                stage=stage.name,
                recipe=recipes[status.name_of(attempt.task)],
                cluster=cluster,
                attempt=attempt.number,
                task=attempt.task,
                items=attempt.done if attempt.cause is Cause.DONE else 0,
                size=shards[attempt.task].largest,
                cpus=stage.resources(project.config).cpus,
                asked_bytes=attempt.ask.mem_bytes,
                peak_bytes=attempt.peak_rss_bytes,
                gpu_peak_bytes=attempt.gpu_peak_bytes,
                killed=attempt.cause is Cause.HOST_OOM,
                elapsed_s=attempt.elapsed_s,
                cpu_s=attempt.cpu_s or 0.0,
                node=attempt.node,
                at=attempt.ended_at,
            )
            for attempt in attempts
            if attempt.cause in (Cause.DONE, Cause.HOST_OOM)
        ]
        self._profiles.record(self._folder.name, measured)

    def send(self, project: Project, stage: Stage, status: StageStatus) -> None:
        """Choose the next attempt of every due task; submit as many as the queue takes."""
        asks: dict[int, Next] = {}
        for number, ask in self._repaired(project, stage, status):
            if ask is not None:
                asks[number] = ask
            elif not stage.are_apart(project.config):  # the stage will fail: submit no more tasks
                return
        first = self._planned(project, stage, status)
        for task in status.work.values():
            if task.open and not task.ended and task.job is None:
                plan = status.plan_of(task.number, first)
                asks[task.number] = Next(1, task.first or plan.ask, plan.why)
        room = self._room(status)
        for job in self._jobs(project, stage, status, asks):
            room -= len(job.groups)
            if room < 0:
                return
            affordable = self._affordable(job)
            self._emit(EventKind.JOB_SUBMITTING, **affordable.to_json())
            self._recount(affordable)
            self._submit(affordable)
            if affordable is not job:  # the rest waits until a task ends before its time limit
                return

    def account(self) -> Account | None:
        """Return the project's budget and its use; None without a budget."""
        return self._spending.account()

    def _affordable(self, job: StageJob) -> StageJob:
        """Return the job with as many of its tasks as the budget allows; raise if it allows none."""
        if (account := self.account()) is None:
            return job
        wanted = parse_ranges(job.tasks)
        fitting = account.budget.fitting(job, account.taken)
        if not fitting:
            raise _beyond(account, job, job_of(self._folder, self._config, job).again)
        return job if fitting == len(wanted) else replace(job, tasks=format_ranges(wanted[:fitting]))

    def _recount(self, job: StageJob) -> None:
        """Withdraw an announced job if a job of another run, announced at the same time, exhausts the budget."""
        account = self.account()
        if account is None or account.taken.total <= account.budget.hours + 1e-9:
            return
        self._emit(EventKind.JOB_REFUSED, **job.to_json())
        raise _beyond(account, job, job_of(self._folder, self._config, job).again)

    def _repaired(self, project: Project, stage: Stage, status: StageStatus) -> Iterator[tuple[int, Next | None]]:
        """Yield the next attempt of each failed task (None: give up); replace tasks that are split."""
        shards, splits = worklist.read_shards(self._folder, stage.name), dict[int, Split]()
        limits = self._limits(project, stage, status)
        for task in [task for task in status.work.values() if task.open and task.ended]:
            tries = self._config.cluster.supervisor.tries
            shard, is_whole = shards[task.number], stage.name == StageName.TRAIN
            items = shard.end - shard.start if stage.together else shard.items  # they are listed as one item
            situation = Situation(
                limits,
                items,
                tries,
                status.sets > 0,
                is_whole,
                is_shared=stage.together and not is_whole,
                places=self._places(project, stage, task),
                nodes=stage.resources(project.config).nodes,
                has_batches=stage.is_script and "micro_batch" in script_of(project.config).names,
            )
            decision = decide(task.history, situation)
            if isinstance(decision, Split):
                splits[task.number] = decision
                continue
            if isinstance(decision, LeaveOut):
                self._leave_out(stage, status, task, decision)
            if isinstance(decision, GiveUp) and task.attempt not in task.then:
                given_up = {"stage": stage.name, "task": task.number, "attempt": task.attempt, "why": decision.why}
                self._emit(EventKind.TASK_GIVEN_UP, **given_up)
            following = None if isinstance(decision, GiveUp) else Next(task.attempt + 1, decision.ask, decision.why)
            yield task.number, following
        yield from self._split(stage, status, splits)

    def _split(self, stage: Stage, status: StageStatus, splits: Mapping[int, Split]) -> Iterator[tuple[int, Next]]:
        """Replace each of these tasks by two, and yield their first attempts."""
        made = worklist.split_shards(self._folder, stage.name, list(splits), stage.halve) if splits else {}
        for number, into in made.items():
            ask, why = splits[number].ask, splits[number].why
            self._emit(EventKind.TASK_SPLIT, stage=stage.name, task=number, into=into, ask=plain(ask), why=why)
            status.split(number, into, ask, why)
            yield from ((part, Next(1, ask, why)) for part in into)

    def _leave_out(self, stage: Stage, status: StageStatus, task: TaskRecord, decision: LeaveOut) -> None:
        """Record the items that killed a task; the stage skips them from now on."""
        assert task.last is not None
        known = {name for entry in status.left_out for name in entry["names"]}
        names = [name for name in decision.names if name not in known]
        if not names:  # already recorded; the next attempt was not submitted yet
            return
        detail = f"task {task.number} died: {task.last.reason}"
        leave_out(self._folder, stage.name, names, decision.reason, detail)
        self._emit(EventKind.LEFT_OUT, stage=stage.name, names=names, reason=decision.reason.value, why=detail)

    def _planned(self, project: Project, stage: Stage, status: StageStatus) -> StageJob:
        """Return the planned job of first attempts."""
        if status.planned is None:
            first = first_job(project, stage, self._executor, self._folder)
            status.planned = on_cards(project, stage, self._executor, self._folder, first)
        return status.planned

    def _limits(self, project: Project, stage: Stage, status: StageStatus) -> Limits:
        """Return the limits of the partition that this stage's jobs go to."""
        if status.limits is None:
            partition = self._planned(project, stage, status).partition
            status.limits = limits_of(self._config, stage, self._executor, partition)
        return status.limits

    def _places(self, project: Project, stage: Stage, task: TaskRecord) -> tuple[Candidate, ...]:
        """Return the partitions that a task may use; empty if only one is configured."""
        is_placed = task.last is not None and task.last.ask.partition
        return candidates(project, stage, self._executor) if is_placed else ()

    def _room(self, status: StageStatus) -> int:
        """Return how many tasks the queue still takes; at least one if none of this stage is in it."""
        room = self._executor.room()
        if room is None:
            return len(status.work)
        return max(0 if status.live else 1, room)

    def _jobs(
        self, project: Project, stage: Stage, status: StageStatus, asks: Mapping[int, Next]
    ) -> Iterator[StageJob]:
        """Yield jobs of tasks with equal requests, each small enough for an array and for the queue."""
        planned, limits = self._planned(project, stage, status), self._limits(project, stage, status)
        sequence = status.sent + len(status.intents)
        alike: dict[tuple[Next, StageJob], list[int]] = {}
        for number in sorted(asks):
            alike.setdefault((asks[number], status.plan_of(number, planned)), []).append(number)
        room, parallel = self._room(status), stage.parallel(project.config)
        cut = [
            (following, plan, piece)
            for (following, plan), due in alike.items()
            for piece in pieces(due, limits, room, plan.sharing)
        ]
        for following, plan, piece in cut:
            yield replace(
                plan,
                id="",
                at=0.0,
                parallel=max(1, parallel // len(cut)),
                where=plan.where if following.ask.partition == plan.ask.partition else "",
                tag=f"{self._folder.unique}-{stage.name}-{sequence}",
                tasks=format_ranges(piece),
                attempt=following.attempt,
                sharing=min(plan.sharing, len(piece)),
                ask=following.ask,
                why=following.why,
            )
            sequence += 1

    def _submit(self, job: StageJob) -> None:
        """Submit a job; if this process dies before its id is recorded, the next supervisor finds it by its tag."""
        try:
            with_digest(self._config)
            job_id = self._submit_off_bad_nodes(job_of(self._folder, self._config, job))
        except SubmissionRefused:
            self._emit(EventKind.JOB_REFUSED, **job.to_json())
            raise
        self._emit(EventKind.JOB_SUBMITTED, **replace(job, id=job_id).to_json())

    def _submit_off_bad_nodes(self, job: Job) -> JobId:
        """Submit a job that excludes failed nodes; if that is refused, submit it without exclusions."""
        avoiding = avoid_bad_nodes(self._run, self._executor, job)
        try:
            return self._executor.submit(avoiding)
        except SubmissionRefused as error:
            if isinstance(error, ClusterSilent) or not avoiding.exclude:
                raise
            return self._executor.submit(job)


def judged(
    folder: RunFolder, stage: StageStatus, report: TaskStatus, highest: Mapping[str, float], on_node: int
) -> Attempt:
    """Return how an attempt ended.

    `highest` has the highest figures of its processes, of which `on_node` share the memory of a node. What they
    measured of GPUs comes before what the accounting says.
    """
    task = stage.task(report.task)
    assert task.ask is not None
    done, on = read_notes(folder, stage.name, report.task, task.attempt)
    word = replace(task.word, done=done)
    log, sharing = end_of(report.stderr) or "", stage.jobs[report.job].sharing
    if sharing > 1:
        report = by_itself(report, word, sharing)
        log = "" if report.exit_code == word.exit_code else log
    verdict = judge_attempt(report, word, log, asked_bytes=task.ask.mem_bytes)
    cause = verdict.cause
    never_began = cause is Cause.CANCELLED and report.started is None and not report.node
    if cause in (Cause.ACTIVE, Cause.HELD) or (never_began and word.started):  # no record says how it ended
        cause = Cause.LOST
    return Attempt(
        task=report.task,
        number=task.attempt,
        ask=task.ask,
        cause=cause,
        reason=verdict.reason,
        state=report.state.value,
        job=report.job,
        node=verdict.node or report.node,
        log=report.stderr,
        exit_code=report.exit_code,
        peak_rss_bytes=max(verdict.peak_bytes or 0, on_node * int(highest.get("host_peak_bytes", 0))) or None,
        gpu_peak_bytes=int(max(highest.get(name, 0) for name in GPU_PEAKS[sharing > 1 :])) or report.gpu_bytes,
        gpu_total_bytes=int(highest.get("gpu_total_bytes", 0)) or None,
        gpu_busy=highest.get(BUSY, report.gpu_busy),
        ended_at=report.ended or time.time(),
        elapsed_s=(report.ended or 0.0) - (report.started or report.ended or 0.0),
        earlier_s=report.earlier_s,
        cpu_s=report.cpu_s,
        done=done,
        on=() if cause is Cause.DONE else on,
        said=task.word.what,
    )


def _beyond(account: Account, job: StageJob, again: Command) -> BudgetReached:
    """Return the error for a job whose budget is too small for a single task."""
    budget, tasks = account.budget, len(parse_ranges(job.tasks))
    each, count = budget.task_hours(job), f"{tasks:,} task{'s' * (tasks != 1)}"
    enough = math.ceil(account.taken.total + tasks * each)
    what = (
        f"a task may take {each:,.2f} {budget.unit}-hours ({format_seconds(job.ask.time_s)} and a minute to end), "
        f"and {count} could pass the budget; {account.figures()}"
    )
    remedy = again.with_settings(
        ("cluster.budget", f"{enough} {budget.unit}-hours"),
        then=f"   (or request less time a task: cluster.{job.stage}.time; finished work is kept)",
    )
    return BudgetReached(what, where=f"job {job.stage}", remedy=remedy)


def is_over(task: TaskStatus) -> bool:
    """Tell whether a task has ended or the scheduler has forgotten it."""
    return task.state.ended or task.state is TaskState.UNKNOWN


def pieces(due: Sequence[int], limits: Limits, room: int, sharing: int = 1) -> Iterator[list[int]]:
    """Cut ascending task numbers into arrays, within the limits on indexes and size and the room in the queue.

    `sharing` tasks take one place in the queue; a remainder becomes a job of its own.
    """
    span = (MANY if limits.highest_task is None else limits.highest_task) + 1
    most = max(1, min(limits.job_tasks or MANY, room)) * sharing
    for _, group in groupby(due, key=lambda number: number // span):
        for piece in in_chunks(group, most):
            whole = len(piece) // sharing * sharing
            yield from filter(None, (piece[:whole], piece[whole:]))


def _for_member(report: TaskStatus, number: int) -> TaskStatus:
    """Return the report of a shared job as that of one of its tasks."""
    out, err = (log_beside(path, number - report.task) for path in (report.stdout, report.stderr))
    return replace(report, task=number, stdout=out, stderr=err)


def by_itself(report: TaskStatus, word: Word, sharing: int) -> TaskStatus:
    """Return the report of one task of a shared job; if the job failed, with the task's own exit code."""
    report = replace(report, peak_rss_bytes=None, gpu_bytes=None, cpu_s=report.cpu_s and report.cpu_s / sharing)
    if report.state not in GROUP_FAILED or word.exit_code is None:
        return report
    return replace(report, state=TaskState.FAILED, exit_code=word.exit_code, signal=None)


def highest_figures(stage: StageStatus, tasks: set[int]) -> dict[int, dict[str, float]]:
    """Return each task's highest memory over its processes and the mean use of its GPUs.

    The use is missing if no process could measure it.
    """
    found: dict[int, dict[str, float]] = {}
    looks = Counter[int]()
    for figures in stage.figures.values():
        if (task := int(figures["task"])) not in tasks:
            continue
        highest = found.setdefault(task, {})
        for name in PEAKS:
            highest[name] = max(highest.get(name, 0), figures.get(name, 0))
        if more := int(figures.get("gpu_looks", 0)):
            busy = highest.get(BUSY, 0.0) * looks[task] + figures[BUSY] * more
            looks[task] += more
            highest[BUSY] = busy / looks[task]
    return found
