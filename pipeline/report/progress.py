"""How far a stage is, while its tasks run: where they stand, how fast they are, what they tell of themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.report.census import found_damage
from pipeline.report.tables import duration, plural, size

if TYPE_CHECKING:
    from collections.abc import Mapping

TASK_STATES = ("done", "running", "waiting", "failed")
SCRIPT, FIGURES_SHOWN = "script.", 8  # what a script of the user's own tells of itself
FINDINGS = "findings"  # a figure of validation
ITEMS_READ = "items_read"  # a figure of a scan by a reader


def tasks_line(stage: Mapping[str, Any]) -> list[str]:
    """Say where the tasks of a stage stand, while they do not all stand in one place."""
    states = {name: count for name, count in stage["task_states"].items() if count}
    if (stage["state"] == "done" or found_damage(stage)) and set(states) <= {"done"}:
        return []
    where = ", ".join(f"{states[name]:,} {name}" for name in TASK_STATES if name in states)
    waits = [f"waiting for: {', '.join(stage['waits_for'])}"] if stage.get("waits_for") else []
    left = [f"about {duration(stage['left_s'])} left"] if stage.get("left_s") and not stage["measured"] else []
    return ["; ".join([f"tasks: {where}", *waits, *left])] if where else []


def memory_line(stage: Mapping[str, Any]) -> list[str]:
    """Say what tasks have of memory, and what they used of it."""
    asked, peak, gpu = (stage.get("use", {}).get(name) for name in ("asked_bytes", "peak_bytes", "gpu_peak_bytes"))
    by_own_word = max((int(one.get("host_peak_bytes", 0)) for one in stage["figures"].values()), default=0)
    so_far = f"{size(by_own_word)} by a process so far" if by_own_word else "use unknown"  # before a task has ended
    parts = [f"memory of a task: {size(asked)} asked for, {f'{size(peak)} used' if peak else so_far}"] if asked else []
    parts += [f"GPU memory {size(gpu)}"] if gpu else []
    return [", ".join(parts)] if parts else []


def speed(measured: Mapping[str, float]) -> list[str]:
    """Say how fast a stage is, how long it will take, how close to the reference, and how much memory it took."""
    if not measured:
        return []
    parts = [f"{measured['residues_per_s']:,.0f} residues/s a process", f"pad factor {measured['pad_factor']:.2f}"]
    if measured["left_s"]:
        parts.append(f"{duration(measured['left_s'])} left")
    parts.append(f"peak {size(measured['peak_rss_bytes'])}")
    if measured["peak_gpu_bytes"]:
        parts.append(f"GPU {size(measured['peak_gpu_bytes'])}")
    if measured["splits"]:
        parts.append(f"{plural(int(measured['splits']), 'split')} for memory")
    return [*parts, f"lowest cosine to fair-esm {measured['lowest_cosine']:.7f}"]


def script_figures(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Say what the first process of a script told last."""
    told = {name: value for one in reversed(list(figures.values())) for name, value in one.items()}
    said = [f"{name.removeprefix(SCRIPT)} {value:,.6g}" for name, value in told.items() if name.startswith(SCRIPT)]
    return [f"the script says: {', '.join(said[:FIGURES_SHOWN])}"] if said else []


def found_so_far(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Say how much a validation that goes on has found."""
    found = sum(int(one.get(FINDINGS, 0)) for one in figures.values())
    return [f"{plural(found, 'thing')} wrong so far"] if found else []


def read_so_far(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Say how many items a reader has given so far."""
    read = sum(int(one.get(ITEMS_READ, 0)) for one in figures.values())
    return [f"{plural(read, 'item')} read so far"] if read else []
