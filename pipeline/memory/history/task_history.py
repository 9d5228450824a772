"""What the next task should ask for, from what tasks like it needed: pure, and the same whatever order records come in.

- Whose tasks count: of this recipe on this cluster; else of this recipe elsewhere (what a task holds is the
  recipe's doing, how it is counted the cluster's, so never less than planned); else of other recipes of the stage
  (another encoder may need ten times as much: never less than planned, never more than twice that); else the plan.
- Of which sizes: tasks whose largest item is within a factor of 2, where ENOUGH were measured; else all. Of
  smaller ones the need is scaled to the size asked for, less BASE_BYTES, which a process takes before its first item;
  never by more than LARGEST_SCALE, because beyond that nothing was measured: the plan, which knows the size, holds too.
- Of which age: the NEWEST tasks count, because inputs, versions and nodes change.
- How much: the 99th percentile, so that one freak in hundreds of tasks costs one retry and not everybody's memory
  (up to 99 tasks it is the largest), and a MARGIN, because peaks are sampled: the truth lies above them.
- Going below the plan takes ENOUGH tasks that ran for SAMPLED_S: of shorter ones a sampler with Slurm's usual
  interval of 30 s may have seen nothing but the start.
- A task that died of memory needed more than the larger of its limit and its sampled peak (a job killed at 200 MiB
  showed 119 MiB). It is settled by a later attempt at it, or a later task at least as large, that lived with a
  higher limit and whose peak is known; then what it died at counts as one need among others. Until then at least
  GROWTH times as much is asked for. A death of a task more than twice as large is no reason where ENOUGH alike lived.
- Never less than FLOOR_BYTES, in whole STEP_BYTES, so that equal tasks make equal requests.

What the largest node has is not known here: whoever asks cuts the answer to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest
from math import ceil
from statistics import median
from typing import TYPE_CHECKING

from pipeline.memory.history.record_index import Source, newest, tasks_index
from pipeline.memory.history.task_records import Journal, Measured, Past

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_MIB = 1 << 20
ENOUGH = 5
NEWEST = 200
PERCENTILE = 99
MARGIN_PERCENT = 20
GROWTH = 1.5
SAMPLED_S = 30.0
LARGEST_SCALE = 4.0
FLOOR_BYTES = 256 * _MIB
BASE_BYTES = 256 * _MIB
STEP_BYTES = 64 * _MIB


@dataclass(frozen=True, slots=True)
class SuggestionBounds:
    """How far the past may move what was planned, and how its tasks are called."""

    whose: str = ""
    trusted: bool = True  # enough of it may ask for less than was planned
    at_most: float = float("inf")  # times what was planned


@dataclass(frozen=True, slots=True)
class Suggestion:
    """What to ask for, and why in words."""

    mem_bytes: int
    why: str
    tasks: int  # how many it rests on


@dataclass(frozen=True, slots=True)
class _Need:
    """What a pool of tasks says, before plan and floor."""

    mem_bytes: int
    why: str


def planned(planned_bytes: int) -> Suggestion:
    """Return the plan, as a request."""
    return Suggestion(_request(planned_bytes), "no task of this recipe was measured here: planned", 0)


def suggest(past: Iterable[Past], bounds: SuggestionBounds, *, size: int, planned_bytes: int) -> Suggestion | None:
    """Return what to ask for, or None where the past says nothing."""
    telling = [task for task in past if task.told_bytes]
    if not telling:
        return None
    pool = _comparable(telling, size)
    need = _need(pool, bounds, size)
    mem_bytes, why = need.mem_bytes, need.why
    if mem_bytes > bounds.at_most * planned_bytes:
        mem_bytes, why = int(bounds.at_most * planned_bytes), f"{why}; no more than {bounds.at_most:g} times the plan"
    if mem_bytes < planned_bytes and not (bounds.trusted and _enough(pool, size)):
        mem_bytes, why = planned_bytes, f"{why}; too little is known to go below the plan"
    if mem_bytes < FLOOR_BYTES:
        why = f"{why}; never below {_words(FLOOR_BYTES)}"
    return Suggestion(_request(mem_bytes), why, _tasks(pool))


def pace(past: Iterable[Past]) -> float | None:
    """Return the median of items per second, of the newest tasks that ended well."""
    done = [task for task in past if not task.killed and task.items > 0 and task.elapsed_s > 0]
    return median(task.items / task.elapsed_s for task in _newest(done)) if done else None


def _comparable(past: Sequence[Past], size: int) -> list[Past]:
    """Return the newest tasks of about this size, or of every size where those are few."""
    near = _newest(task for task in past if _near(task, size))
    return near if size and _enough(near, size) else _newest(past)


def _near(task: Past, size: int) -> bool:
    """Tell whether a task was about as large; a smaller one that died says something of larger ones, too."""
    return task.size <= 2 * size and (task.killed or not task.size or 2 * task.size >= size)


def _newest(past: Iterable[Past]) -> list[Past]:
    return nlargest(NEWEST, past, key=_order)


def _order(task: Past) -> tuple[float | str, ...]:
    own = (task.killed, task.told_bytes, task.asked_bytes or 0, task.size, task.elapsed_s)
    return task.at, task.run, task.task, task.attempt, *own  # the rest only for one that was told twice


def _enough(pool: Iterable[Past], size: int) -> bool:
    """Tell whether the pool may overrule the plan."""
    sound = [task for task in pool if task.lived and task.elapsed_s >= SAMPLED_S]
    return sum(not task.size or 2 * task.size >= size for task in sound) >= ENOUGH


def _need(pool: Sequence[Past], bounds: SuggestionBounds, size: int) -> _Need:
    """Return the larger of what the living needed and what the dead must get."""
    living = [task for task in pool if task.lived]
    open_deaths = [task for task in pool if task.killed and not _settled(task, living)]
    unsettled = set(open_deaths)
    known = living + [task for task in pool if task.killed and task not in unsettled]
    needs = [_from_peaks(known, bounds, size)] if known else []
    needs += [_from_deaths(open_deaths, bounds)] if open_deaths else []
    return max(needs, key=lambda need: need.mem_bytes)


def _settled(death: Past, living: Iterable[Past]) -> bool:
    return any(_outlives(task, death) for task in living)


def _outlives(task: Past, death: Past) -> bool:
    """Tell whether a task that lived shows what the dead one would have needed."""
    if (task.run, task.task) == (death.run, death.task):  # with as much, it lived without what did not fit
        return task.attempt > death.attempt and (task.asked_bytes is None or task.asked_bytes >= death.told_bytes)
    if task.asked_bytes is not None and task.asked_bytes <= death.told_bytes:
        return False
    return task.at > death.at and task.size >= death.size > 0


def _from_peaks(known: Sequence[Past], bounds: SuggestionBounds, size: int) -> _Need:
    needs = sorted(_scaled(task, size) for task in known)
    at_percentile = needs[ceil(len(needs) * PERCENTILE / 100) - 1]
    tasks = f"{_counted(_tasks(known))}{bounds.whose}"
    why = f"from {tasks}: {PERCENTILE}th percentile {_words(at_percentile)} + {MARGIN_PERCENT}%"
    return _Need(at_percentile * (100 + MARGIN_PERCENT) // 100, why)


def _from_deaths(deaths: Sequence[Past], bounds: SuggestionBounds) -> _Need:
    limit = max(death.told_bytes for death in deaths)
    upto = "" if all(death.told_bytes == limit for death in deaths) else "up to "
    why = f"{_counted(_tasks(deaths))}{bounds.whose} died at {upto}{_words(limit)}: at least {GROWTH:g} times that"
    return _Need(ceil(limit * GROWTH), why)


def _scaled(task: Past, size: int) -> int:
    """Return what the task would have needed with a largest item of this size."""
    scale = min(size / task.size, LARGEST_SCALE) if 0 < task.size < size else 1.0
    return task.told_bytes + max(0, ceil((task.told_bytes - BASE_BYTES) * (scale - 1)))


def _request(mem_bytes: int) -> int:
    return ceil(max(mem_bytes, FLOOR_BYTES) / STEP_BYTES) * STEP_BYTES


def _tasks(pool: Iterable[Past]) -> int:
    return len({(task.run, task.task) for task in pool})


def _counted(tasks: int) -> str:
    return "1 task" if tasks == 1 else f"{tasks} tasks"


def _words(size_bytes: int) -> str:
    """Write a size for people."""
    if size_bytes < 1000 * _MIB:
        return f"{size_bytes / _MIB:.0f} MiB"
    return f"{size_bytes / (_MIB << 10):.1f} GiB"


__all__ = ["Measured", "Profiles", "Suggestion"]

_LOOKED_AT = 5 * NEWEST  # among which those of about the right size are picked
_BOUNDS = {
    Source.RECIPE_HERE: SuggestionBounds(),
    Source.RECIPE_ELSEWHERE: SuggestionBounds(" on other clusters", trusted=False),
    Source.STAGE_HERE: SuggestionBounds(" of other recipes", trusted=False, at_most=2),
    Source.STAGE_ELSEWHERE: SuggestionBounds(" of other recipes on other clusters", trusted=False, at_most=2),
}


class Profiles:
    """The memory of one folder."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder / "records")
        self._index = tasks_index(folder, self._journal)

    def record(self, run: str, writer: str, many: Iterable[Measured]) -> bool:
        """Remember tasks that ended well or died of memory; False where the folder does not let us."""
        try:
            self._journal.append(run, writer, many)
        except OSError:
            return False
        return True

    def suggest(self, stage: str, recipe: str, cluster: str, *, size: int = 0, planned_bytes: int) -> Suggestion:
        """Return how much memory to ask for; `size` is the largest item, 0 where it is not known."""
        self._index.refresh()
        for source, bounds in _BOUNDS.items():
            limit = _LOOKED_AT if bounds.trusted else NEWEST
            past = newest(self._index, source, stage, recipe, cluster, limit)
            found = suggest(past, bounds, size=size, planned_bytes=planned_bytes)
            if found is not None:
                return found
        return planned(planned_bytes)

    def pace(self, stage: str, recipe: str, cluster: str) -> float | None:
        """Return the items per second of a task of this recipe here; None where none was measured."""
        self._index.refresh()
        return pace(newest(self._index, Source.RECIPE_HERE, stage, recipe, cluster, NEWEST))
