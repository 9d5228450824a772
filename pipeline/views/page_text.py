"""What a run's HTML report says in words: the verdict, a story of each stage, and the rows of its tables."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.cluster.verdict import Cause
from pipeline.journal.run_status import State
from pipeline.report.html.charts import figure
from pipeline.report.run_summary import metrics
from pipeline.report.stage_lines import (
    DAMAGED,
    found_damage,
    result_lines,
    script_figures,
    so_far,
    speed_lines,
    state_of_stage,
    unit_of,
    wait_lines,
)
from pipeline.report.tables import plural
from pipeline.units import format_bytes, format_seconds
from pipeline.views.run_times import STEP_OOM

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.journal.attempts import Attempt
    from pipeline.journal.run_status import RunStatus, StageStatus
    from pipeline.journal.run_view import RunView
    from pipeline.report.facts import StageUse
    from pipeline.report.tables import Column
    from pipeline.training.loop.metrics_log import Epoch
    from pipeline.views.compared_models import Comparison
    from pipeline.views.run_times import RunTimes
    from pipeline.views.training_curves import Training

JUDGING = ("scan", "embed", "graph")  # stages that judge the items of a data set
OUT_OF_MEMORY = (Cause.HOST_OOM.value, Cause.GPU_OOM.value, STEP_OOM)
ITEMS_NAMED = 5
FIGURES = 8  # losses, and metrics, of the table of epochs


def stage_rows(stages: Sequence[StageStatus], planned: Sequence[str], times: RunTimes) -> Iterator[tuple[Any, ...]]:
    """Yield the row of each stage: its state, its counts, and how long it was queued and took."""
    for stage in stages:
        begun, first = stage.started_at, times.first.get(stage.name)
        yield (
            stage.name, state_of_stage(stage), f"{unit_of(stage.name, stage.counts())}s", stage.items, stage.cached,
            stage.missing, stage.items_done, stage.tasks, sum(len(task.ended) for task in stage.work.values()),
            len(stage.failures), max(0.0, first - begun) if first else None,
            max(0.0, (stage.ended_at or times.end) - begun) if begun else None,
        )  # fmt: skip
    known = {stage.name for stage in stages}
    yield from ((name, "not started", f"{unit_of(name)}s", *[None] * 9) for name in planned if name not in known)


def attempt_rows(failures: Sequence[tuple[StageStatus, Attempt]]) -> Iterator[tuple[Any, ...]]:
    """Yield the row of each failed attempt: what happened, the reaction, and the present state of its task."""
    for stage, attempt in failures:
        task = stage.task(attempt.task)
        now = "done" if task.good else "running again" if task.job is not None else "not done"
        said = f"\nmessage: {attempt.said}" if attempt.said not in attempt.reason else ""
        items = f"\nitems: {', '.join(attempt.on[:ITEMS_NAMED])}" if attempt.on else ""
        peak = attempt.gpu_peak_bytes if attempt.cause is Cause.GPU_OOM else attempt.peak_rss_bytes
        yield (
            f"{stage.name} {stage.name_of(attempt.task)}".rstrip(), attempt.task, attempt.number, attempt.cause.value,
            f"{attempt.reason}{said}{items}", task.then.get(attempt.number, ""), now, attempt.log,
            attempt.ask.mem_bytes or None, peak, attempt.elapsed_s or None, attempt.node, attempt.ended_at or None,
        )  # fmt: skip


def suggested_rows(uses: Sequence[StageUse]) -> Iterator[tuple[Any, ...]]:
    """Yield the row of each better request: the setting, what was requested and what is suggested, and why."""
    for setting in (setting for use in uses for setting in use.suggested):
        was, value = ((setting.shown(size), size) for size in (setting.was, setting.value))
        yield setting.key, was, value, setting.why


def size_rows(sizes: Mapping[str, Mapping[str, float]]) -> Iterator[tuple[str, float, float, float]]:
    """Yield the row of each size that items have."""
    yield from (
        (name, spread["median"], spread["p95"], spread["max"]) for name, spread in sizes.items() if spread["max"]
    )


def epoch_columns(training: Training) -> list[Column]:
    """Return the columns of a table of epochs."""

    def figures(of: str, names: Sequence[str]) -> list[Column]:
        return [(name, partial(_figure_of, of, name), "figure") for name in names[:FIGURES]]

    return [
        ("epoch", "epoch", "count"), ("step", "step", "count"), *figures("loss", training.losses),
        *figures("validation", training.own_metrics), ("items", "items", "count"), ("items/s", "items_per_s", "figure"),
        ("waited", "wait_share", "percent"),
        ("estimated memory", lambda epoch: training.predicted_bytes(epoch.epoch), "bytes"),
        ("peak memory", "peak_bytes", "bytes"), ("live at its end", "allocated_bytes", "bytes"),
        ("out of memory", "ooms", "count"), ("took", "wall_s", "span"),
    ]  # fmt: skip


def _figure_of(of: str, name: str, epoch: Epoch) -> float | None:
    figures: Mapping[str, float | None] = getattr(epoch, of)
    return figures.get(name)


def state_of_run(status: RunStatus) -> str:
    """Return the state of a run, or that a validation found damage."""
    return DAMAGED if any(map(found_damage, status.stages.values())) else status.state.word


def story_lines(stage: StageStatus, run: RunView) -> Iterator[str]:
    """Yield sentences about a stage: its tasks while it is active, its speed, its results."""
    if not stage.ended_at:
        if states := ", ".join(f"{count:,} {name}" for name, count in stage.task_states().items()):
            yield f"tasks: {states}"
        if reasons := run.waits_for(stage):
            yield f"waiting for: {', '.join(reasons)}"
        if left_s := run.left_s(stage):
            yield f"about {format_seconds(left_s)} left"
    yield from wait_lines((wait for wait in run.waits if wait.of == stage.name), run.at)
    yield from (*script_figures(stage.figures), *so_far(stage), *speed_lines(stage))
    yield from (line.strip() for line in result_lines(stage) if isinstance(line, str) and line)


def verdict(run: RunView, times: RunTimes, uses: Sequence[StageUse], shown: Comparison | None) -> str:
    """Return the outcome of a run in one sentence."""
    status, stages, took = run.status, run.status.in_order(), format_seconds(times.end - times.begun)
    failed = "".join(f" in {stage.name}" for stage in stages if stage.state is State.FAILED)
    heads = {
        State.DONE: f"Done in {took}",
        State.FAILED: f"Failed{failed} after {took}",
        State.STOPPED: f"Stopped after {took}",
        State.ABANDONED: f"Orphaned after {took}",
        State.RUNNING: f"Running for {took}",
        State.WAITING: "Not started yet",
    }
    clauses = [DAMAGED] if state_of_run(status) == DAMAGED else []
    if status.error:  # its first line, without the place that it names first
        first = status.error.splitlines()[0]
        clauses.insert(0, first.partition(": ")[2] or first)
    if status.state is State.RUNNING:
        clauses += _progress(run, times)
    elif stages and not any(stage.tasks for stage in stages):
        clauses.append("everything was cached")
    clauses += metrics(status)
    if shown and (best := shown.models[0]).best is not None:
        named = f"{shown.called(best)}, of {len(shown.models)} points"
        clauses.append(f"best {shown.metric} {figure(best.best or 0.0)} ({named})")
    clauses += _memory(uses)
    clauses += _survived(times)
    clauses += _items(stages, is_trained="train" in status.stages)
    return f"{heads[status.state]}{': ' if clauses else ''}{'; '.join(clauses)}."


def _progress(run: RunView, times: RunTimes) -> Iterator[str]:
    """Yield how far the running stages are."""
    for stage in run.status.in_order():
        if not stage.ended_at:
            left = f", about {format_seconds(left_s)} left" if (left_s := run.left_s(stage)) else ""
            of = plural(stage.missing, unit_of(stage.name, stage.counts()))
            yield f"{stage.name} {stage.items_done:,} of {of}{left}"
    yield from (f"planning {name}" for name in times.planning if name not in run.status.stages)


def _memory(uses: Sequence[StageUse]) -> Iterator[str]:
    """Yield the peak memory of the training, or of the largest stage, and the highest peak of a GPU."""
    measured = [use for use in uses if use.peak_bytes]
    for use in sorted(measured, key=lambda use: (use.stage == "train", use.peak_bytes))[-1:]:
        yield f"peak memory {format_bytes(use.peak_bytes or 0)} of {format_bytes(use.asked_bytes or 0)} requested"
    if peak := max((use.gpu_peak_bytes or 0 for use in uses), default=0):
        yield f"GPU peak {format_bytes(peak)}"


def _survived(times: RunTimes) -> Iterator[str]:
    """Yield how many out-of-memory errors and other failures the run survived."""
    survived = [failure for failure in times.failures if failure.survived]
    memory = sum(failure.times for failure in survived if failure.cause in OUT_OF_MEMORY)
    other = sum(failure.times for failure in survived) - memory
    yield from [f"survived {memory:,} out-of-memory"] if memory else []
    yield from [f"survived {plural(other, 'other failure' if memory else 'failure')}"] if other else []


def _items(stages: Sequence[StageStatus], *, is_trained: bool) -> Iterator[str]:
    """Yield how many records were rebuilt, and how many items the last stage that judged the data set rejected."""
    censuses = {stage.name: stage.census for stage in stages if stage.census}
    if rebuilt := sum(censuses.get("regenerate", {"whole": {}})["whole"].values()):
        yield f"{plural(rebuilt, 'record')} rebuilt"
    for census in [census for name, census in censuses.items() if name in JUDGING][-1:]:
        yield from [] if is_trained else [f"{plural(census['accepted'], 'item')} usable"]
        rejected = census["items"] - census["accepted"]
        yield from [f"{plural(rejected, 'item')} rejected"] if rejected else []
