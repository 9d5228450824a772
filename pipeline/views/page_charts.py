"""The charts of a run's HTML report: its timeline and pace, memory requested and used, and the curves of a training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pipeline.report.html.charts import (
    Axis,
    Bar,
    Chart,
    Line,
    Row,
    Size,
    byte_axis,
    figure,
    from_zero,
    line_chart,
    log_axis,
    number_axis,
    thinned,
    time_axis,
    whole_axis,
)
from pipeline.report.stage_lines import unit_of
from pipeline.training.step_clock import LABELS, MODEL_WORK
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.journal.run_status import StageStatus
    from pipeline.report.facts import StageUse
    from pipeline.training.loop.metrics_log import Epoch
    from pipeline.views.run_times import RunTimes
    from pipeline.views.training_curves import Training

FEWEST = 3  # points of a pace
LEAST_SHARE = 0.004  # of the run: what took less is not drawn
MOST_MARKS = 240  # of failures of a stage
POINTS = 500  # of a curve
TIMELINE = (Size(920, css="wide", left=76, right=78), Size(380, css="narrow", left=76, right=78, every=3))
TIMELINE_KEY = (
    ("planning", "plan"), ("queued or starting", "wait"), ("running", "run"), ("tasks at once", "busy"),
    ("failed", "fail"), ("survived failure", "fail survived"),
)  # fmt: skip
MEMORY = (Size(440, left=76, right=140),)
MEMORY_KEY = (("requested", "asked"), ("used (peak)", "used"), ("estimated", "mark"))


def timeline(stages: Sequence[StageStatus], times: RunTimes) -> Chart:
    """Return when each stage was planned, queued and running, and where attempts failed."""
    by_name = {stage.name: stage for stage in stages}
    rows = [_stage_row(name, by_name.get(name), times) for name in dict.fromkeys([*by_name, *times.planning])]
    drawn = {css for row in rows for bar in row.bars for css in (bar.css, bar.css.split()[0])}
    drawn |= {css for row in rows for _, css, _ in row.marks} | {"busy" for row in rows if row.most > 1}
    key = [(name, css) for name, css in TIMELINE_KEY if css in drawn]
    return Chart("Timeline", time_axis(times.begun, times.end, most=9), rows=rows, sizes=TIMELINE, key=key)


def _stage_row(name: str, stage: StageStatus | None, times: RunTimes) -> Row:
    """Return a stage's bars, the number of its running tasks below, its duration, and marks where attempts failed."""
    spans = {"plan": (*times.planning[name], "planning")} if name in times.planning else {}
    if stage is None:
        return Row(name, "", _bars(name, spans, times))
    until, state = stage.ended_at or times.end, stage.state.value
    begun, first = stage.started_at, min(times.first.get(name, until), until) if stage.tasks else stage.started_at
    spans["wait"] = (begun, first, "queued or starting")
    if until > first or not stage.tasks:
        spans[f"run {state}"] = (first, until, state)
    took = format_seconds(max(0.0, until - begun)) if stage.tasks or not stage.ended_at else "cached"
    failures = [failure for failure in times.failures if failure.stage == name][:MOST_MARKS]
    marks = [
        (failure.at, "fail survived" if failure.survived else "fail", f"{failure.times:,} × {failure.cause}")
        for failure in failures
    ]
    return Row(name, took, _bars(name, spans, times), marks, times.running.get(name, ()))


def _bars(name: str, spans: Mapping[str, tuple[float, float, str]], times: RunTimes) -> list[Bar]:
    least_s = LEAST_SHARE * (times.end - times.begun)
    return [
        Bar(start, end, css, f"{name}: {words}, {format_seconds(max(0.0, end - start))}")
        for css, (start, end, words) in spans.items()
        if end - start >= least_s or css.startswith("run")
    ]


def pace_charts(times: RunTimes, training: Training | None) -> Iterator[Chart]:
    """Yield each stage's speed over the time of the run, and the shares of a training's time outside its model."""
    for name, points in times.paces.items():
        if len(points) >= FEWEST:
            title, pace = f"{name}: {unit_of(name)}s per second", Line("", points, 0, "plain steps")
            yield line_chart(title, time_axis(times.begun, times.end), [pace], from_zero(f"{unit_of(name)}s/s"))
    if training and len(training.epochs) >= FEWEST - 1:
        lines = [Line(LABELS.get(name, name), points, at) for at, (name, points) in enumerate(_shares(training.epochs))]
        title, unit = "train: time outside the model", "% of an epoch"
        yield line_chart(title, _steps(training), lines, lambda _, high: number_axis(0, max(5.0, high), unit))


def _shares(epochs: Sequence[Epoch]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield each phase that is not the model's work with its percentage of every epoch, if at least 1% of one."""
    for name in sorted({name for epoch in epochs for name in epoch.seconds} - set(MODEL_WORK)):
        wholes = [sum(epoch.seconds.values()) or epoch.wall_s or 1.0 for epoch in epochs]
        parts = [100 * epoch.seconds.get(name, 0.0) / whole for epoch, whole in zip(epochs, wholes, strict=True)]
        if max(parts) >= 1:
            yield name, [(epoch.step, part) for epoch, part in zip(epochs, parts, strict=True)]


def memory_charts(uses: Sequence[StageUse], training: Training | None) -> Iterator[Chart]:
    """Yield the memory of hosts and of GPUs by stage, and over the epochs of a training, where known."""
    hosts = [(use.stage, use.asked_bytes, use.planned_bytes, use.peak_bytes) for use in uses]
    gpus = [(use.stage, *gpu_plan(use, training), use.gpu_peak_bytes) for use in uses if use.gpus or use.gpu_peak_bytes]
    for title, rows in (("Memory of a task", hosts), ("Memory of a GPU", gpus)):
        if most := max((size or 0 for _, *sizes in rows for size in sizes), default=0):
            drawn = [_memory_row(*row) for row in rows]
            yield Chart(title, byte_axis(most, most=4), rows=drawn, sizes=MEMORY, key=MEMORY_KEY)
    if training and len(training.epochs) > 1:
        yield _memory_over_epochs(training)


def gpu_plan(use: StageUse, training: Training | None) -> tuple[int | None, int | None]:
    """Return the limit and the estimate of a stage's GPU memory; only training plans it, others take all of a GPU."""
    if training is None or use.stage != "train":
        return None, None
    return training.prepared.limit_bytes, max(
        (phase.reserved_bytes for phase in training.prepared.phases), default=None
    )


def memory_rows(uses: Sequence[StageUse], training: Training | None) -> Iterator[tuple[Any, ...]]:
    """Yield the row of each stage's memory: as planned, requested and used."""
    for use in uses:
        ratio = use.peak_bytes / use.planned_bytes if use.peak_bytes and use.planned_bytes else None
        estimated = gpu_plan(use, training)[1] if use.gpus or use.gpu_peak_bytes else None
        host = use.planned_bytes, use.first_bytes, use.asked_bytes, use.peak_bytes, use.median_peak_bytes, ratio
        yield use.stage, *host, estimated, use.gpu_peak_bytes, use.why


def _memory_row(stage: str, requested: int | None, estimated: int | None, used: int | None) -> Row:
    bars = [Bar(0, requested or 0, "asked"), Bar(0, used or 0, "used", inset=3)]
    marks = [(float(estimated), "mark", f"estimated {format_bytes(estimated)}")] if estimated else []
    of = f" of {format_bytes(requested)}" if used and requested else ""
    return Row(stage, f"{format_bytes(used)}{of}" if used else "not measured", bars, marks)


def _memory_over_epochs(training: Training) -> Chart:
    """Return memory by epoch: measured, estimated, and the limit."""
    epochs, limit = training.epochs, training.prepared.limit_bytes if training.on_gpu else None
    lines = []
    for name, colour, style, sizes in (
        ("peak", 0, "", [epoch.peak_bytes for epoch in epochs]),
        ("live at its end", 1, "", [epoch.allocated_bytes for epoch in epochs]),
        ("estimated", 3, "dashed", [training.predicted_bytes(epoch.epoch) for epoch in epochs]),
        ("limit", 5, "dashed", [limit for _ in epochs]),
    ):
        known = [(epoch.step, size) for epoch, size in zip(epochs, sizes, strict=True) if size is not None]
        lines += [Line(name, known, colour, style, [format_bytes(size) for _, size in known])] if known else []
    of = "GPU" if training.on_gpu else "process"
    return line_chart(f"train: memory of a {of}", _steps(training), lines, lambda _, high: byte_axis(high))


METRICS_DRAWN = 12
FIRST = 2  # terms of a loss that are drawn on top
OTHERS = ("learning_rate", "gradient_norm")
LOSS = "loss"
WIDE_RANGE = 30  # of a loss: beyond, its axis is logarithmic


def first_charts(training: Training) -> list[Chart]:
    """Return what a reader looks for first: the loss and the monitored metric."""
    losses, monitor = training.losses[:FIRST], training.monitor
    shown = [_loss(training, term) for term in losses]
    if monitor in training.metrics and monitor not in (_checked(training, term) for term in losses):
        shown.append(_metric(training, monitor))
    return shown


def other_charts(training: Training) -> Iterator[Chart]:
    """Yield the other curves of a training: terms of its loss, metrics, learning rate, speed."""
    yield from (_loss(training, term) for term in training.losses[FIRST:])
    yield from (_metric(training, name) for name in training.own_metrics[:METRICS_DRAWN] if name != training.monitor)
    for name in OTHERS:
        if len(curve := training.curves.get(name, ())) > 1:
            yield line_chart(name.replace("_", " "), _steps(training, curve), [Line("", curve, 4, "plain")])
    if len(epochs := training.epochs) > 1:
        pace = [(epoch.step, epoch.items_per_s) for epoch in epochs]
        hints = [f"epoch {epoch.epoch}: {figure(epoch.items_per_s)} items/s" for epoch in epochs]
        yield line_chart("items per second", _steps(training), [Line("", pace, 0, "", hints)], from_zero("items/s"))


def _checked(training: Training, term: str) -> str:
    """Return the name under which a loss term is validated; empty where it is not."""
    name = f"{LOSS}.{term}"
    return name if name in training.metrics else LOSS if len(training.losses) == 1 else ""


def _loss(training: Training, term: str) -> Chart:
    """Return a loss term by step, by epoch, and on the validation split."""
    steps = training.curves.get(f"{LOSS}.{term}", ())
    trained = _by_epoch("epoch mean", training, "loss", term, 0)
    validated = _by_epoch("validation", training, "validation", _checked(training, term), 1)
    every = [Line("step", steps if len(steps) > 1 else (), 0, "thin"), trained, validated]
    lines = [line for line in every if line.points]
    return line_chart(f"loss: {term}", _steps(training, *(line.points for line in lines)), lines, _loss_axis)


def _loss_axis(low: float, high: float) -> Axis:
    return log_axis(low, high) if high > WIDE_RANGE * low > 0 else number_axis(low, high)


def _metric(training: Training, name: str) -> Chart:
    line = _by_epoch("", training, "validation", name, 2)
    return line_chart(f"validation: {name}", _steps(training, line.points), [line])


def _by_epoch(title: str, training: Training, of: str, name: str, colour: int) -> Line:
    """Return a metric by epoch, each at the last step of its epoch, with validations between two steps of one."""
    points = [(step, value, f"step {step:.0f}") for step, value in training.curves.get(f"{of}/{name}", ())]
    for epoch in training.epochs:
        figures: Mapping[str, float | None] = epoch.loss if of == "loss" else epoch.validation
        if name in figures:
            value = figures[name]
            points.append((epoch.step, math.nan if value is None else value, f"epoch {epoch.epoch}, step {epoch.step}"))
    points.sort(key=lambda point: point[0])
    hints = [f"{where}: {figure(value) if math.isfinite(value) else 'not finite'}" for _, value, where in points]
    return Line(title, [(step, value) for step, value, _ in points], colour, "", hints)


def _steps(training: Training, *curves: Sequence[tuple[float, float]]) -> Axis:
    """Return the axis that all curves of a training share."""
    ends = [training.epochs[-1].step if training.epochs else 0, *(curve[-1][0] for curve in curves)]
    return whole_axis(0, max(ends), "step")


def predicted_charts(stage: StageStatus) -> Iterator[Chart]:
    """Yield the curves that a task draws of its predictions."""
    for picture in (stage.census or {}).get("pictures", ()):
        lines = [
            Line(line["name"], [(x, y) for x, y in thinned(line["points"], POINTS)], colour)
            for colour, line in enumerate(picture["lines"])
        ]
        xs = [x for line in lines for x, _ in line.points]
        x = number_axis(min(xs), max(xs), picture["x"])
        yield line_chart(picture["title"], x, lines, from_zero(picture["y"]))
