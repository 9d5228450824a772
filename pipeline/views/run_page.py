"""The HTML report of a run: data from its ledger and its model's folder, for one template.

A part that cannot be read becomes a note in the report.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from functools import partial, reduce
from itertools import islice
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.cluster.verdict import Cause
from pipeline.command_line import quoted
from pipeline.config.load import read_resolved
from pipeline.config.masking import without_secrets_in
from pipeline.config.schema import LEAVES, value_at
from pipeline.errors import ConfigError, PipelineError
from pipeline.files import what_is_no_file, write_whole
from pipeline.journal.budget import spending_of_run
from pipeline.journal.run_status import State
from pipeline.journal.run_view import view
from pipeline.report.charts import figure
from pipeline.report.html_page import render
from pipeline.report.run_text import metrics
from pipeline.report.stage_lines import (
    DAMAGED,
    found_damage,
    progress_lines,
    result_lines,
    state_of_stage,
    unit_of,
    wait_lines,
)
from pipeline.report.tables import plural
from pipeline.units import format_bytes, format_seconds
from pipeline.views import page_charts
from pipeline.views.compared_models import compared_data, comparison, models_of_run
from pipeline.views.efficiency import stage_uses
from pipeline.views.page_charts import STEP_OOM, TRAIN, times_of, training_of
from pipeline.views.search_charts import search_charts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.journal.attempts import Attempt
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus, StageStatus
    from pipeline.journal.run_view import RunView
    from pipeline.report.tables import Column
    from pipeline.training.loop.metrics_log import Epoch
    from pipeline.views.compared_models import Comparison
    from pipeline.views.efficiency import StageUse
    from pipeline.views.page_charts import RunTimes, Training

_T = TypeVar("_T")
REJECTIONS = 200
JUDGING = ("scan", "embed", "graph")  # stages that reject items
ITEMS_NAMED = 5
FIGURES = 8  # most losses and metrics in the table of epochs
OUT_OF_MEMORY = (Cause.HOST_OOM.value, Cause.GPU_OOM.value, STEP_OOM)


def page_now(folder: RunFolder) -> tuple[str, RunView]:
    """Return the HTML report of a run as it is now, and the state of the run."""
    run = view(folder, deep=True)
    return render("page.html", **page_data(folder, run)), run


def page_data(folder: RunFolder, run: RunView) -> dict[str, Any]:
    """Return the data of a run's HTML report, by the names in its template."""
    config, status, notes = read_resolved(folder.config), run.status, list[str]()

    def or_note(name: str, read: Callable[[], _T]) -> _T | None:
        try:
            return read()
        except (PipelineError, OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return None

    stages, now = status.in_order(), time.time()
    times = times_of(status, now)
    training = or_note("training", lambda: training_of(folder, config, status.stages.get(TRAIN)))
    compared = or_note("points", lambda: _points(folder, config))
    uses = or_note("efficiency", lambda: stage_uses(folder, status)) or []
    failures = [(stage, attempt) for stage in stages for attempt in stage.failures]
    sizes = next((stage.census or {} for stage in stages if stage.name == "scan"), {}).get("sizes", {})
    causes = Counter((stage.name, attempt.cause.value) for stage, attempt in failures)
    return {
        "run": run,
        "status": status,
        "stages": stages,
        "folder": folder.path,
        "about": f"{config.data.path.name} · {config.train.task}" if training else config.data.path.name,
        "made_at": now,
        "again": or_note("command", lambda: folder.again.read_text().strip()) or "",
        "state": DAMAGED if any(map(found_damage, stages)) else status.state.word,
        "verdict": verdict(run, times, uses, compared),
        "times": times,
        "failures": failures,
        "causes": [(*what, count) for what, count in causes.most_common()],
        "survivors": sum(stage.task(attempt.task).good for stage, attempt in failures),
        "open_tasks": sum(bool(task.ended) and task.open for stage in stages for task in stage.work.values()),
        "rejected": list(rejected_by_reason(stages)),
        "rejections": or_note("rejections", lambda: first_rejections(folder.rejected)) or ([], 0),
        "rejections_file": folder.rejected,
        "training": training,
        "epoch_columns": epoch_columns(training) if training else [],
        "searched": search_charts(status.stages.get(TRAIN), config.train.sweep),
        "uses": uses,
        "account": or_note("budget", spending_of_run(folder).account),
        "settings": changed_settings(config),
        "charts": page_charts,
        "rows": {
            "stages": list(stage_rows(status, times)),
            "failed": list(attempt_rows(failures[:200])),
            "sizes": [{"name": name, **spread} for name, spread in sizes.items() if spread["max"]],
            "suggested": [
                (better.key, *((better.shown(size), size) for size in (better.was, better.value)), better.why)
                for use in uses
                for better in use.suggested
            ],
        },
        "lines_of": story_lines,
        "notes": notes,
        **(compared_data(compared) if compared else {"compared": None}),
    }


def _points(folder: RunFolder, config: Config) -> Comparison | None:
    models = models_of_run(folder) if config.train.sweep.is_used else []
    return comparison(models) if models else None


def changed_settings(config: Config) -> dict[str, str]:
    """Return the settings that differ from their defaults, secrets masked."""
    plain = config.model_dump(mode="json")
    changed = {".".join(key): key for key, info in LEAVES.items() if value_at(config, key) != info.default}
    return {name: f"{without_secrets_in(reduce(getitem, key, plain), name)}" for name, key in changed.items()}


def rejected_by_reason(stages: Sequence[StageStatus]) -> Iterator[tuple[str, str, int, str]]:
    """Yield reason, stage, items and an example from each new census, or of the rejections so far."""
    before: Mapping[str, int] = {}
    for stage in stages:
        if not stage.census:
            yield from ((f"{reason} (so far)", stage.name, items, "") for reason, items in stage.reasons.most_common())
        elif (rejected := stage.census.get("rejected")) and rejected != before:
            examples, before = stage.census.get("examples", {}), rejected
            yield from ((reason, stage.name, items, examples.get(reason, "")) for reason, items in rejected.items())


def first_rejections(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the first items of a list of rejections, and the number of the others."""
    if not file.exists():
        return [], 0
    with file.open("rb") as lines:
        first = [json.loads(line) for line in islice(lines, REJECTIONS)]
        return first, sum(block.count(b"\n") for block in iter(lambda: lines.read(1 << 20), b""))


def write_page(path: Path, text: str) -> None:
    """Write a report to a path that the user named, with a mode by the umask."""
    try:
        if other := what_is_no_file(path):
            raise OSError(f"is {other}, expected a file")
        write_whole(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        what, there = f"cannot write the HTML report: {error.strerror or error}", path.parent.exists()
        remedy = "name a file that you may write to" if there else f"mkdir -p {quoted(path.parent)}"
        raise ConfigError(what, where=str(path), remedy=remedy) from error


def stage_rows(status: RunStatus, times: RunTimes) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each stage: its state, counts, queue time and duration."""
    for stage in status.in_order():
        begun, first = stage.started_at, times.first.get(stage.name)
        yield (
            stage.name, state_of_stage(stage), f"{unit_of(stage.name, stage.counts())}s", stage.items, stage.cached,
            stage.missing, stage.items_done, stage.tasks, sum(len(task.ended) for task in stage.work.values()),
            len(stage.failures), max(0.0, first - begun) if first else None,
            max(0.0, (stage.ended_at or times.end) - begun) if begun else None,
        )  # fmt: skip
    later = (name for name in status.planned if name not in status.stages)
    yield from ((name, "not started", f"{unit_of(name)}s", *[None] * 9) for name in later)


def attempt_rows(failures: Sequence[tuple[StageStatus, Attempt]]) -> Iterator[tuple[Any, ...]]:
    """Yield a row for each failed attempt: its failure, the reaction, and the present state of its task."""
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


def epoch_columns(training: Training) -> list[Column]:
    """Return the columns of a table of epochs."""

    def figures(of: str, names: Sequence[str]) -> list[Column]:
        return [(name, partial(_figure_of, of, name), "figure") for name in names[:FIGURES]]

    return [
        ("epoch", "epoch", "count"), ("step", "step", "count"), *figures("loss", training.losses),
        *figures("validation", training.own_metrics), ("items", "items", "count"), ("items/s", "items_per_s", "figure"),
        ("waited", "wait_share", "percent"),
        ("estimated memory", lambda epoch: training.predicted_bytes(epoch.epoch), "bytes"),
        ("peak memory", "peak_bytes", "bytes"), ("memory at epoch end", "allocated_bytes", "bytes"),
        ("out of memory", "ooms", "count"), ("took", "wall_s", "span"),
    ]  # fmt: skip


def _figure_of(of: str, name: str, epoch: Epoch) -> float | None:
    figures: Mapping[str, float | None] = getattr(epoch, of)
    return figures.get(name)


def story_lines(stage: StageStatus, run: RunView) -> Iterator[str]:
    """Yield sentences about a stage: its tasks while it is active, its waits, its speed, its results."""
    yield from wait_lines((wait for wait in run.waits if wait.of == stage.name), run.at)
    yield from progress_lines(stage, run)
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
    clauses = [DAMAGED] if any(map(found_damage, stages)) else []
    if status.error:  # its first line, without the place
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
    clauses += [*_memory(uses), *_survived(times), *_items(stages, is_trained="train" in status.stages)]
    return f"{heads[status.state]}{': ' if clauses else ''}{'; '.join(clauses)}."


def _progress(run: RunView, times: RunTimes) -> Iterator[str]:
    """Yield the progress of the running stages."""
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
    """Yield the numbers of out-of-memory errors and other failures that the run survived."""
    survived = [failure for failure in times.failures if failure.survived]
    memory = sum(failure.times for failure in survived if failure.cause in OUT_OF_MEMORY)
    other = sum(failure.times for failure in survived) - memory
    yield from [f"survived {memory:,} out-of-memory"] if memory else []
    yield from [f"survived {plural(other, 'other failure' if memory else 'failure')}"] if other else []


def _items(stages: Sequence[StageStatus], *, is_trained: bool) -> Iterator[str]:
    """Yield the numbers of rebuilt records and of rejected items."""
    censuses = {stage.name: stage.census for stage in stages if stage.census}
    if rebuilt := sum(censuses.get("regenerate", {"whole": {}})["whole"].values()):
        yield f"{plural(rebuilt, 'record')} rebuilt"
    for census in [census for name, census in censuses.items() if name in JUDGING][-1:]:
        yield from [] if is_trained else [f"{plural(census['accepted'], 'item')} usable"]
        rejected = census["items"] - census["accepted"]
        yield from [f"{plural(rejected, 'item')} rejected"] if rejected else []
