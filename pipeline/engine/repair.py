"""Decides what to do about a failed task: a pure function of its attempts and of the cluster's limits.

out of host memory   retry with more memory, up to the largest node; then split the task (tasks that ranks share cannot
                     be split: retry one item at a time); then skip the item. A script gets smaller batches on the
                     largest node, or if it was far below its limit.
out of GPU memory    retry with smaller batches, which change no result; then split; then skip the item.
time limit           continue from finished work; with more time, if the partition allows more.
node, preemption,    retry on another node (avoid_bad_nodes); after two preemptions without progress, in a listed
unknown end          partition without preemption.
unexplained signal   retry one item at a time; skip an item that is in work at two deaths.
anything else        fail the stage with the cause.

A training is a single task. It is never split, and one item at a time would change its numbers. So it is retried
unchanged until it has died twice without progress.

A task with several partitions to choose from may get what any of them offers: for more memory or time than its present
partition has, it moves to the first that has enough, never to an unlisted one.

The number of attempts is limited only while the task makes no progress.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from pipeline.cluster.candidates import choose, reach
from pipeline.cluster.job_spec import mebibytes
from pipeline.cluster.verdict import Cause
from pipeline.records import Reason
from pipeline.units import short_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.cluster.candidates import Candidate
    from pipeline.cluster.job_spec import Executor, Job, Limits
    from pipeline.journal.attempts import Ask, Attempt, TaskRecord
    from pipeline.journal.run_status import RunStatus


GROWTH = 2  # of memory and time: large, for few attempts; the next run plans from the measured peaks
ROUND_BYTES = 64 << 20
MOST_SHRINKS = 6
ASSUMED_NODES = 5  # if the number of nodes is unknown
FEW_NODES = 3  # may be excluded even if they are more than half of all
RECOVERS_S = 60


@dataclass(frozen=True, slots=True)
class Retry:
    """Try the task again."""

    ask: Ask
    why: str


@dataclass(frozen=True, slots=True)
class Split:
    """Replace the task by its two halves."""

    ask: Ask
    why: str


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Retry without the items that killed the task."""

    names: tuple[str, ...]
    reason: Reason
    ask: Ask
    why: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Fail the stage once its other tasks have ended."""

    why: str


Decision: TypeAlias = Retry | Split | LeaveOut | GiveUp


@dataclass(frozen=True, slots=True)
class Situation:
    """What `decide` needs besides the attempts: limits of the cluster and facts about the task."""

    limits: Limits
    items: int  # of the task
    tries: int  # attempts without progress before it gives up
    is_read_once: bool = False  # a reader's scan: cannot skip items or keep partial work
    is_whole: bool = False  # a training: cannot be split, and must keep its items and batches
    is_shared: bool = False  # among ranks with items of their own: cannot be split, but may skip items
    places: tuple[Candidate, ...] = ()  # the partitions that it may use, the best first
    nodes: int = 1  # of the task
    has_batches: bool = False  # a script whose batches can shrink, which also saves host memory


def decide(history: Sequence[Attempt], situation: Situation) -> Decision:
    """Return what to do after the last of the attempts at a task."""
    if not situation.places:
        return _decide(history, situation)
    ask = history[-1].ask
    limits = reach(situation.places, ask.mem_bytes, ask.time_s, situation.limits)
    decision = _decide(history, replace(situation, limits=limits))
    return decision if isinstance(decision, GiveUp) else _placed(decision, history, situation)


def _placed(decision: Retry | Split | LeaveOut, history: Sequence[Attempt], situation: Situation) -> Decision:
    """Add the partition to a decision: the present one if it has enough, else the first that has."""
    ask, now, places = decision.ask, history[-1].ask.partition, situation.places
    if _keeps_making_room(history):
        holding = [place for place in places if not place.refuses(ask.mem_bytes, ask.time_s, situation.nodes)]
        places = tuple(place for place in holding if not place.limits.preempts) or places
    where = choose(places, ask.mem_bytes, ask.time_s, nodes=situation.nodes, stay=now)
    if where == now:
        return decision
    return replace(decision, ask=replace(ask, partition=where), why=f"{decision.why}, in {where}, not {now}")


def _keeps_making_room(history: Sequence[Attempt]) -> bool:
    """Tell whether the task was preempted twice without progress."""
    return len(history) > 1 and not progressed(history) and all(end.cause is Cause.PREEMPTED for end in history[-2:])


def _decide(history: Sequence[Attempt], situation: Situation) -> Decision:
    last = history[-1]
    if last.cause is Cause.HOST_OOM:
        return _after_host_oom(history, situation)
    if last.cause is Cause.GPU_OOM:
        return _after_gpu_oom(history, situation)
    if last.cause is Cause.TIMEOUT:
        return _after_timeout(history, situation)
    if last.cause is Cause.INTERRUPTED and not progressed(history):
        return _after_timeout(history, situation)
    if last.cause is Cause.CRASHED:
        return _after_crash(history, situation)
    if last.cause in AGAIN:
        return _bounded(history, situation, Retry(last.ask, AGAIN[last.cause]))
    return GiveUp("not retried")


def restarts_in_job(history: Sequence[Attempt]) -> bool:
    """Tell whether a training restarts within its job: its processes crashed after progress, on a healthy node."""
    return history[-1].cause is Cause.CRASHED and progressed(history)


AGAIN = {
    Cause.NODE: "retry: its node failed",
    Cause.PREEMPTED: "retry: it was preempted",
    Cause.INTERRUPTED: "continues where it stopped",
    Cause.LOST: "retry: final state unknown",
}


def more_memory(ask: Ask, peak_bytes: int | None, limits: Limits) -> int:
    """Return the memory to ask for next: twice the larger of the old limit and the peak, at most a node's."""
    wanted = GROWTH * max(ask.mem_bytes, peak_bytes or 0)
    rounded = -(-wanted // ROUND_BYTES) * ROUND_BYTES
    return min(rounded, limits.mem_bytes) if limits.mem_bytes else rounded


def _after_host_oom(history: Sequence[Attempt], situation: Situation) -> Decision:
    last = history[-1]
    grown = more_memory(last.ask, last.peak_rss_bytes, situation.limits)
    is_far = GROWTH * (last.peak_rss_bytes or last.ask.mem_bytes) < last.ask.mem_bytes  # one huge request
    if situation.has_batches and (is_far or grown <= last.ask.mem_bytes):
        return _after_gpu_oom(history, situation)
    if grown > last.ask.mem_bytes:
        return Retry(replace(last.ask, mem_bytes=grown), f"retry with {mebibytes(grown)} of memory")
    return _smaller(history, situation, f"it does not fit into {mebibytes(last.ask.mem_bytes)}, the maximum")


def _after_gpu_oom(history: Sequence[Attempt], situation: Situation) -> Decision:
    last = history[-1]
    if last.ask.shrink < MOST_SHRINKS:
        return Retry(replace(last.ask, shrink=last.ask.shrink + 1), "retry with half the batch size")
    return _smaller(history, situation, "its smallest batch does not fit")


def _after_timeout(history: Sequence[Attempt], situation: Situation) -> Decision:
    last, longest_s = history[-1], situation.limits.time_s
    grown_s = min(GROWTH * last.ask.time_s, longest_s) if longest_s else GROWTH * last.ask.time_s
    if grown_s > last.ask.time_s and stuck(history) < situation.tries:
        return Retry(replace(last.ask, time_s=grown_s), f"continues with {short_seconds(grown_s)}")
    if progressed(history):
        return Retry(last.ask, "continues where it stopped")
    if situation.is_whole and last.cause is Cause.INTERRUPTED:  # perhaps preempted while it started
        return _bounded(history, situation, Retry(last.ask, "retry: it was stopped before it made progress"))
    tried = f"after {stuck(history)} attempts (cluster.supervisor.tries)"
    most = f"{short_seconds(last.ask.time_s)}, {tried if grown_s > last.ask.time_s else 'the maximum'}"
    if situation.is_whole or situation.is_shared:
        return GiveUp(f"no progress in {most}")
    if situation.items > 1:
        return Split(last.ask, f"split in halves: no progress in {most}")
    return GiveUp(f"one item takes longer than {most}")


def _after_crash(history: Sequence[Attempt], situation: Situation) -> Decision:
    last = history[-1]
    if situation.is_read_once:
        again = _bounded(history, situation, Retry(last.ask, "retry from the start"))
        return replace(again, why=f"{again.why}; it was processing {last.on[0]}") if last.on else again
    if situation.is_whole and (len(history) < 2 or progressed(history)):
        return Retry(replace(last.ask, careful=False), "retry from its last checkpoint")
    culprit = _culprit(history)
    if len(culprit) == 1:
        before = _after_crash(history[:-1], situation) if len(history) > 2 else None
        if isinstance(before, LeaveOut) and before.names == culprit:
            return GiveUp(f"it died on {culprit[0]} again although that item was skipped")
        what = f"without {culprit[0]}: it died on that item twice"
        return LeaveOut(culprit, Reason.KILLED_ITS_TASK, replace(last.ask, careful=False), what)
    why = "retry one item at a time" if last.on else "again"
    return _bounded(history, situation, Retry(replace(last.ask, careful=bool(last.on)), why))


def _smaller(history: Sequence[Attempt], situation: Situation, why: str) -> Decision:
    """Decide when no more memory is available: split the task, skip an item, or give up."""
    last, culprit = history[-1], _culprit(history)
    if situation.is_whole or situation.is_read_once:
        return GiveUp(why)
    if not last.on:
        return GiveUp(f"{why}, and it fails to start")
    if len(culprit) == 1 or situation.items == 1:
        names, ask = culprit or last.on, replace(last.ask, careful=False)
        return LeaveOut(names, Reason.DOES_NOT_FIT, ask, f"without {', '.join(names)}: {why}")
    if situation.is_shared:
        return _bounded(history, situation, Retry(replace(last.ask, careful=True), f"retry one item at a time: {why}"))
    return Split(last.ask, f"split in halves: {why}")


def _culprit(history: Sequence[Attempt]) -> tuple[str, ...]:
    """Return the items in work at the latest deaths, two or more, with the same cause."""
    last, names = history[-1], tuple[str, ...]()
    for attempt in history[-2::-1]:
        both = tuple(name for name in names or last.on if name in attempt.on)
        if attempt.cause is not last.cause or not both:
            break
        names = both
    return names


def _bounded(history: Sequence[Attempt], situation: Situation, decision: Decision) -> Decision:
    """Return the decision, or GiveUp after too many attempts without progress."""
    count = stuck(history)
    if count >= situation.tries:
        return GiveUp(f"{count} attempts made no progress; the last: {history[-1].reason}")
    return decision


def progressed(history: Sequence[Attempt]) -> bool:
    """Tell whether the last attempt finished more than all before it."""
    return history[-1].done > max((attempt.done for attempt in history[:-1]), default=0)


def stuck(history: Sequence[Attempt]) -> int:
    """Count the attempts since the last one that made progress."""
    count = 0
    for end in range(len(history), 0, -1):
        if progressed(history[:end]):
            break
        count += 1
    return count


def bad_nodes(tasks: Iterable[TaskRecord]) -> tuple[str, ...]:
    """Return the nodes whose last attempt failed because of them, in alphabetical order."""
    attempts = (attempt for task in tasks for attempt in task.ended if attempt.cause in (Cause.NODE, Cause.DONE))
    last = {attempt.node: attempt.cause for attempt in sorted(attempts, key=lambda attempt: attempt.ended_at)}
    return tuple(sorted(node for node, cause in last.items() if node and cause is Cause.NODE))


def avoid_bad_nodes(run: RunStatus, executor: Executor, job: Job) -> Job:
    """Return a job that excludes the nodes that failed in this run.

    If more than half of the nodes (and more than a few) have failed, or too few are left, something else may be
    wrong: then the job excludes no node and starts a minute later.
    """
    if not (bad := bad_nodes(task for stage in run.stages.values() for task in stage.work.values())):
        return job
    there = executor.limits_of(job.request).nodes or ASSUMED_NODES
    if len(bad) <= min(there - job.request.nodes, max(there // 2, FEW_NODES)):
        return replace(job, exclude=bad)
    return replace(job, begin_s=max(job.begin_s, RECOVERS_S))
