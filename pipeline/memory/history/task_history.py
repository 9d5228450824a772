"""How much memory to request for the next task, from what similar tasks needed, in whatever order records come.

- Which tasks count: of this recipe on this cluster; else of this recipe elsewhere (how memory is counted depends on
  the cluster, so never less than planned); else of other recipes of the stage
  (another encoder may need ten times as much: never less than planned, never more than twice that); else the plan.
- Of which age: the NEWEST tasks count, because inputs, versions and nodes change.
- How much: the 99th percentile, so that one freak in hundreds of tasks costs one retry and not everybody's memory
  (up to 99 tasks it is the largest), and a MARGIN, because peaks are sampled: the truth lies above them.
- Going below the plan takes ENOUGH tasks that ran for SAMPLED_S: of shorter ones a sampler with Slurm's usual
  interval of 30 s may have seen nothing but the start.
- A task that died of memory needed more than the larger of its limit and its sampled peak (a job killed at 200 MiB
  showed 119 MiB). It is settled by a later attempt at it, or a later task at least as large, that lived with a
  higher limit and whose peak is known; then what it died at counts as one need among others. Until then at least
  GROWTH times as much is asked for.
- Never less than FLOOR_BYTES, in whole STEP_BYTES, so that equal tasks make equal requests.

The caller limits the answer to the largest node.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from math import ceil
from operator import itemgetter
from statistics import median
from typing import TYPE_CHECKING

from pipeline.memory.history.record_files import RecordFiles
from pipeline.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

ENOUGH = 5
NEWEST = 200
PERCENTILE = 99
MARGIN_PERCENT = 20
GROWTH = 1.5
SAMPLED_S = 30.0
FLOOR_BYTES = 256 * MIB
STEP_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class Measured:
    """An attempt at a task that succeeded or ran out of host memory; None is what was not measured."""

    stage: str
    recipe: str  # hex
    cluster: str
    attempt: int
    task: int
    items: int  # what this attempt finished; 0 says nothing of its pace
    size: int  # its largest item, in the stage's unit of cost; 0 is unknown
    cpus: int
    asked_bytes: int | None
    peak_bytes: int | None
    gpu_peak_bytes: int | None
    killed: bool  # died of host memory: it needed more than the larger of what it asked for and its peak
    elapsed_s: float
    cpu_s: float
    node: str
    at: float  # when it ended: by run, task, attempt and this a task told twice counts once


@dataclass(frozen=True, slots=True)
class Past:
    """A past attempt at a task, as far as a request depends on it."""

    at: float
    run: str
    task: int
    attempt: int
    killed: bool
    peak_bytes: int | None
    asked_bytes: int | None
    size: int
    items: int
    elapsed_s: float

    @classmethod
    def of(cls, run: str, measured: Measured) -> Past:
        """Return the relevant fields of a measurement."""
        return cls(run=run, **{name: getattr(measured, name) for name in cls.__slots__ if name != "run"})

    @property
    def told_bytes(self) -> int:
        """Return the least that it needed; 0 if not measured."""
        return max(self.peak_bytes or 0, (self.asked_bytes or 0) if self.killed else 0)

    @property
    def lived(self) -> bool:
        """Tell whether it succeeded and its peak is known."""
        return not self.killed and bool(self.peak_bytes)


@dataclass(frozen=True, slots=True)
class SuggestionBounds:
    """How far past tasks of a kind may change the plan, and how messages call them."""

    whose: str = ""
    trusted: bool = True  # enough of it may ask for less than was planned
    at_most: float = float("inf")  # times what was planned


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The memory to request, and why."""

    mem_bytes: int
    why: str
    tasks: int  # how many it rests on


def planned(planned_bytes: int) -> Suggestion:
    """Return the plan, as a request."""
    return Suggestion(_request(planned_bytes), "estimated (no earlier runs)", 0)


def suggest(past: Iterable[Past], bounds: SuggestionBounds, *, planned_bytes: int) -> Suggestion | None:
    """Return the request that past tasks suggest; None where none was measured."""
    telling = [task for task in past if task.told_bytes]
    if not telling:
        return None
    pool = _newest(telling)
    mem_bytes, why = _need(pool, bounds)
    if mem_bytes > bounds.at_most * planned_bytes:
        mem_bytes, why = int(bounds.at_most * planned_bytes), f"{why}; at most {bounds.at_most:g} times the estimate"
    if mem_bytes < planned_bytes and not (bounds.trusted and _enough(pool)):
        mem_bytes, why = planned_bytes, f"{why}; too few measurements to go below the estimate"
    if mem_bytes < FLOOR_BYTES:
        why = f"{why}; never below {format_bytes(FLOOR_BYTES)}"
    return Suggestion(_request(mem_bytes), why, _tasks(pool))


def pace(past: Iterable[Past]) -> float | None:
    """Return the median of items per second, of the newest tasks that ended well."""
    done = [task for task in past if not task.killed and task.items > 0 and task.elapsed_s > 0]
    return median(task.items / task.elapsed_s for task in _newest(done)) if done else None


def _newest(past: Iterable[Past]) -> list[Past]:
    return nlargest(NEWEST, past, key=_order)


def _order(task: Past) -> tuple[float | str, ...]:
    own = (task.killed, task.told_bytes, task.asked_bytes or 0, task.size, task.elapsed_s)
    return task.at, task.run, task.task, task.attempt, *own  # the rest only for one that was told twice


def _enough(pool: Iterable[Past]) -> bool:
    """Tell whether the pool may overrule the plan."""
    return sum(task.lived and task.elapsed_s >= SAMPLED_S for task in pool) >= ENOUGH


def _need(pool: Sequence[Past], bounds: SuggestionBounds) -> tuple[int, str]:
    """Return the need and its reason: the larger of what surviving tasks used and what killed ones must get."""
    living = [task for task in pool if task.lived]
    open_deaths = [task for task in pool if task.killed and not _settled(task, living)]
    unsettled = set(open_deaths)
    known = living + [task for task in pool if task.killed and task not in unsettled]
    needs = [_from_peaks(known, bounds)] if known else []
    needs += [_from_deaths(open_deaths, bounds)] if open_deaths else []
    return max(needs, key=itemgetter(0))


def _settled(death: Past, living: Iterable[Past]) -> bool:
    return any(_outlives(task, death) for task in living)


def _outlives(task: Past, death: Past) -> bool:
    """Tell whether a task that lived settles what a killed one needed."""
    if (task.run, task.task) == (death.run, death.task):  # with as much, it lived without what did not fit
        return task.attempt > death.attempt and (task.asked_bytes is None or task.asked_bytes >= death.told_bytes)
    if task.asked_bytes is not None and task.asked_bytes <= death.told_bytes:
        return False
    return task.at > death.at and task.size >= death.size > 0


def _from_peaks(known: Sequence[Past], bounds: SuggestionBounds) -> tuple[int, str]:
    needs = sorted(task.told_bytes for task in known)
    at_percentile = needs[ceil(len(needs) * PERCENTILE / 100) - 1]
    tasks = f"{_counted(_tasks(known))}{bounds.whose}"
    why = f"from {tasks}: {PERCENTILE}th percentile {format_bytes(at_percentile)} + {MARGIN_PERCENT}%"
    return at_percentile * (100 + MARGIN_PERCENT) // 100, why


def _from_deaths(deaths: Sequence[Past], bounds: SuggestionBounds) -> tuple[int, str]:
    limit = max(death.told_bytes for death in deaths)
    upto = "" if all(death.told_bytes == limit for death in deaths) else "up to "
    why = (
        f"{_counted(_tasks(deaths))}{bounds.whose} died at {upto}{format_bytes(limit)}: at least {GROWTH:g} times that"
    )
    return ceil(limit * GROWTH), why


def _request(mem_bytes: int) -> int:
    return ceil(max(mem_bytes, FLOOR_BYTES) / STEP_BYTES) * STEP_BYTES


def _tasks(pool: Iterable[Past]) -> int:
    return len({(task.run, task.task) for task in pool})


def _counted(tasks: int) -> str:
    return "1 task" if tasks == 1 else f"{tasks} tasks"


_LOOKED_AT = 5 * NEWEST  # of which some are told twice, and some tell nothing
_BOUNDS = {  # by whether tasks are of the same recipe and on the same cluster, the most telling first
    (True, True): SuggestionBounds(),
    (True, False): SuggestionBounds(" on other clusters", trusted=False),
    (False, True): SuggestionBounds(" of other recipes", trusted=False, at_most=2),
    (False, False): SuggestionBounds(" of other recipes on other clusters", trusted=False, at_most=2),
}


class Profiles:
    """The measured needs of tasks in one folder."""

    def __init__(self, folder: Path) -> None:
        self._files = RecordFiles(folder / "records", Measured)

    def record(self, run: str, writer: str, measured: Iterable[Measured]) -> bool:
        """Store attempts that succeeded or ran out of memory; return False where the folder cannot be written."""
        return self._files.append(run, writer, measured)

    def suggest(self, stage: str, recipe: str, cluster: str, *, planned_bytes: int) -> Suggestion:
        """Return how much memory to request."""
        for (same_recipe, same_cluster), bounds in _BOUNDS.items():
            having, lacking = {"stage": stage}, dict[str, str]()
            (having if same_recipe else lacking)["recipe"] = recipe
            (having if same_cluster else lacking)["cluster"] = cluster
            past = self._past(having, lacking, _LOOKED_AT if bounds.trusted else NEWEST)
            suggestion = suggest(past, bounds, planned_bytes=planned_bytes)
            if suggestion is not None:
                return suggestion
        return planned(planned_bytes)

    def pace(self, stage: str, recipe: str, cluster: str) -> float | None:
        """Return the items per second of a task of this recipe here; None where none was measured."""
        return pace(self._past({"stage": stage, "recipe": recipe, "cluster": cluster}, {}, NEWEST))

    def _past(self, having: Mapping[str, str], lacking: Mapping[str, str], limit: int) -> list[Past]:
        """Return the newest attempts; of duplicates the larger."""
        newest = [Past.of(*record) for record in islice(self._files.newest(having, lacking), limit)]
        return list({_order(task)[:4]: task for task in sorted(newest, key=_order)}.values())
