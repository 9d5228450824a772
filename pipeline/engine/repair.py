"""Decides what to do about a failed task: a pure function of its attempts and of the cluster's limits.

Memory that the kernel ended  → more of it, up to the largest node; then halves, or one thing at a time where ranks
                                share what has no halves; then the item is left out. A script gets smaller batches
                                at the largest node, and where it was far below its limit.
A GPU's memory                → smaller batches, which change no result; then halves; then the item is left out.
A time limit                  → finished work is kept: continue if it made progress, with more time if there is more.
A node, preemption, no word   → again, on another node (avoid_bad_nodes); after two preemptions without progress, in
                                a partition without preemption, if one is listed.
A signal of unknown origin    → retry one item at a time; twice on the same thing: that is left out.
Anything else                 → the stage ends with the cause.

A training is one task: it is never split, and one thing at a time makes other numbers of it. So it is begun again as it
was, until it has died twice without coming further.

Where a task may go to several partitions, what there is to get is what any of them gives: with more memory or time than
its own has it moves to the first that holds it, never to one that is not listed.

Attempts are bounded only while nothing progresses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from pipeline.cluster.candidates import choose, reach
from pipeline.cluster.job_spec import mebibytes
from pipeline.cluster.verdict import Cause
from pipeline.records import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.cluster.candidates import Candidate
    from pipeline.cluster.job_spec import Executor, Job, Limits
    from pipeline.journal.attempts import Ask, Attempt, TaskRecord
    from pipeline.journal.run_status import RunStatus


GROWTH = 2  # of memory and time: few attempts matter more than a tight fit, which the next run has from the peaks
ROUND_BYTES = 64 << 20
MOST_SHRINKS = 6
ASSUMED_NODES = 5  # where the number of nodes is unknown
FEW_NODES = 3  # that a job keeps off, even where they are more than half of all
RECOVERS_S = 60


@dataclass(frozen=True, slots=True)
class Again:
    """Try the task again."""

    ask: Ask
    why: str


@dataclass(frozen=True, slots=True)
class Split:
    """Replace the task by two of half the size."""

    ask: Ask
    why: str


@dataclass(frozen=True, slots=True)
class LeaveOut:
    """Try again without the items that killed the task."""

    names: tuple[str, ...]
    reason: Reason
    ask: Ask
    why: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Fail the stage once its other tasks have ended."""

    why: str


Decision: TypeAlias = Again | Split | LeaveOut | GiveUp


@dataclass(frozen=True, slots=True)
class Means:
    """The limits of the cluster, and what matters of the task."""

    limits: Limits
    items: int  # of the task
    tries: int  # attempts that may come no further
    is_read_once: bool = False  # by a reader from beginning to end: nothing can be left out, nor is anything kept
    is_whole: bool = False  # a training: it has no halves, and its numbers are of all items, put together as they were
    is_shared: bool = False  # by ranks, each on items of its own: it has no halves, but items may be left out
    places: tuple[Candidate, ...] = ()  # the partitions that it may go to, the first choice first
    nodes: int = 1  # of the task
    has_batches: bool = False  # of a script: with smaller ones it takes less of the host's memory


def decide(history: Sequence[Attempt], means: Means) -> Decision:
    """Return what to do after the last of the attempts at a task."""
    if not means.places:
        return _decide(history, means)
    ask = history[-1].ask
    limits = reach(means.places, ask.mem_bytes, ask.time_s, means.limits)
    decision = _decide(history, replace(means, limits=limits))
    return decision if isinstance(decision, GiveUp) else _placed(decision, history, means)


def _placed(decision: Again | Split | LeaveOut, history: Sequence[Attempt], means: Means) -> Decision:
    """Return a decision with the partition for what it asks for: the present one while that holds it."""
    ask, now, places = decision.ask, history[-1].ask.partition, means.places
    if _keeps_making_room(history):
        holding = [place for place in places if not place.refuses(ask.mem_bytes, ask.time_s, means.nodes)]
        places = tuple(place for place in holding if not place.limits.preempts) or places
    where = choose(places, ask.mem_bytes, ask.time_s, nodes=means.nodes, stay=now)
    if where == now:
        return decision
    return replace(decision, ask=replace(ask, partition=where), why=f"{decision.why}, in {where}, not {now}")


def _keeps_making_room(history: Sequence[Attempt]) -> bool:
    """Tell whether the last attempts were preempted, twice without coming further."""
    return len(history) > 1 and not progressed(history) and all(end.cause is Cause.PREEMPTED for end in history[-2:])


def _decide(history: Sequence[Attempt], means: Means) -> Decision:
    """Return what to do within some limits."""
    last = history[-1]
    if last.cause is Cause.HOST_OOM:
        return _after_host_oom(history, means)
    if last.cause is Cause.GPU_OOM:
        return _after_gpu_oom(history, means)
    if last.cause is Cause.TIMEOUT:
        return _after_timeout(history, means)
    if last.cause is Cause.INTERRUPTED and not progressed(history):  # it was interrupted without progress
        return _after_timeout(history, means)
    if last.cause is Cause.CRASHED:
        return _after_crash(history, means)
    if last.cause in AGAIN:
        return _bounded(history, means, Again(last.ask, AGAIN[last.cause]))
    return GiveUp("not retried")


def restarts_in_job(history: Sequence[Attempt]) -> bool:
    """Tell whether a training goes on in its job: the last start was ended by no fault of a node, and came further."""
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


def _after_host_oom(history: Sequence[Attempt], means: Means) -> Decision:
    last = history[-1]
    grown = more_memory(last.ask, last.peak_rss_bytes, means.limits)
    is_far = GROWTH * (last.peak_rss_bytes or last.ask.mem_bytes) < last.ask.mem_bytes  # what it wanted was huge
    if means.has_batches and (is_far or grown <= last.ask.mem_bytes):
        return _after_gpu_oom(history, means)
    if grown > last.ask.mem_bytes:
        return Again(replace(last.ask, mem_bytes=grown), f"retry with {mebibytes(grown)} of memory")
    return _smaller(history, means, f"it does not fit into {mebibytes(last.ask.mem_bytes)}, the maximum")


def _after_gpu_oom(history: Sequence[Attempt], means: Means) -> Decision:
    last = history[-1]
    if last.ask.shrink < MOST_SHRINKS:
        return Again(replace(last.ask, shrink=last.ask.shrink + 1), "retry with half the batch size")
    return _smaller(history, means, "its smallest batch does not fit")


def _after_timeout(history: Sequence[Attempt], means: Means) -> Decision:
    last, longest_s = history[-1], means.limits.time_s
    grown_s = min(GROWTH * last.ask.time_s, longest_s) if longest_s else GROWTH * last.ask.time_s
    if grown_s > last.ask.time_s and stuck(history) < means.tries:
        return Again(replace(last.ask, time_s=grown_s), f"continues with {grown_s // 60} min")
    if progressed(history):
        return Again(last.ask, "continues where it stopped")
    if means.is_whole and last.cause is Cause.INTERRUPTED:  # it may have been preempted while it began
        return _bounded(history, means, Again(last.ask, "retry: it was stopped before it made progress"))
    tried = f"after {stuck(history)} attempts (cluster.supervisor.tries)"
    most = f"{last.ask.time_s // 60} min, {tried if grown_s > last.ask.time_s else 'the maximum'}"
    if means.is_whole or means.is_shared:
        return GiveUp(f"no progress in {most}")
    if means.items > 1:
        return Split(last.ask, f"split in halves: no progress in {most}")
    return GiveUp(f"one item takes longer than {most}")


def _after_crash(history: Sequence[Attempt], means: Means) -> Decision:
    last = history[-1]
    if means.is_read_once:
        again = _bounded(history, means, Again(last.ask, "retry from the start"))
        return replace(again, why=f"{again.why}; it was processing {last.on[0]}") if last.on else again
    if means.is_whole and (len(history) < 2 or progressed(history)):
        return Again(replace(last.ask, careful=False), "retry from its last checkpoint")
    culprit = _culprit(history)
    if len(culprit) == 1:
        before = _after_crash(history[:-1], means) if len(history) > 2 else None
        if isinstance(before, LeaveOut) and before.names == culprit:
            return GiveUp(f"it died on {culprit[0]} again although that item was skipped")
        what = f"without {culprit[0]}: it died on that item twice"
        return LeaveOut(culprit, Reason.KILLED_ITS_TASK, replace(last.ask, careful=False), what)
    why = "retry one item at a time" if last.on else "again"
    return _bounded(history, means, Again(replace(last.ask, careful=bool(last.on)), why))


def _smaller(history: Sequence[Attempt], means: Means, why: str) -> Decision:
    """Return what to do when no more memory can be given: split the task, leave out an item, or give up."""
    last, culprit = history[-1], _culprit(history)
    if means.is_whole or means.is_read_once:
        return GiveUp(why)
    if not last.on:
        return GiveUp(f"{why}, and it fails to start")
    if len(culprit) == 1 or means.items == 1:
        names, ask = culprit or last.on, replace(last.ask, careful=False)
        return LeaveOut(names, Reason.DOES_NOT_FIT, ask, f"without {', '.join(names)}: {why}")
    if means.is_shared:
        return _bounded(history, means, Again(replace(last.ask, careful=True), f"retry one item at a time: {why}"))
    return Split(last.ask, f"split in halves: {why}")


def _culprit(history: Sequence[Attempt]) -> tuple[str, ...]:
    """Return the items that all of the last attempts, at least two, were on when they died in the same way."""
    last, names = history[-1], tuple[str, ...]()
    for attempt in history[-2::-1]:
        both = tuple(name for name in names or last.on if name in attempt.on)
        if attempt.cause is not last.cause or not both:
            break
        names = both
    return names


def _bounded(history: Sequence[Attempt], means: Means, decision: Decision) -> Decision:
    """Return the decision, or GiveUp after too many attempts without progress."""
    count = stuck(history)
    if count >= means.tries:
        return GiveUp(f"{count} attempts made no progress; the last: {history[-1].reason}")
    return decision


def progressed(history: Sequence[Attempt]) -> bool:
    """Tell whether the last attempt came further than all before it."""
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

    Where more than half of the nodes failed (and more than a few), or too few are left, something else may be wrong:
    then it excludes none and begins a minute later.
    """
    if not (bad := bad_nodes(task for stage in run.stages.values() for task in stage.work.values())):
        return job
    there = executor.limits_of(job.request).nodes or ASSUMED_NODES
    if len(bad) <= min(there - job.request.nodes, max(there // 2, FEW_NODES)):
        return replace(job, exclude=bad)
    return replace(job, begin_s=max(job.begin_s, RECOVERS_S))
