"""The plots of a run: its timeline and pace, memory requested and used, and the curves of a training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from markupsafe import Markup

from pipeline.report.html.plots import (
    COLOURS,
    SMALL,
    Axis,
    Line,
    byte_axis,
    cut,
    figure,
    figure_of,
    legend,
    log_axis,
    number_axis,
    plot,
    svg,
    svg_text,
    tag,
    time_axis,
    whole_axis,
    x_ticks,
)
from pipeline.report.stage_lines import UNIT
from pipeline.training.step_clock import LABELS, MODEL_WORK
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.report.compared import Comparison
    from pipeline.report.facts import StageUse
    from pipeline.report.html.run_facts import PageFacts, StageFacts, TimeFacts, TrainingFacts
    from pipeline.training.loop.metrics_log import Epoch

FEWEST = 3  # points of a plot
WIDE, NARROW, HIGH = 920, 380, 360
ROW, BAR, STRIP = 30, 14, 7  # pixels of a stage: all, its bar, and the strip of its running tasks
TOP, BOTTOM = 6, 24
NAMES, TAKEN = 76, 78  # pixels left and right of the bars
LETTERS = 11  # of a stage's name
LEAST_SHARE = 0.004  # of the run: what took less is not drawn
MOST_MARKS = 240  # of failures of a stage: pixels
TIMELINE_KEY = (
    ("planning", "plan"), ("queued or starting", "wait"), ("running", "run"), ("tasks at once", "busy"),
    ("failed", "fail"), ("survived failure", "fail survived"),
)  # fmt: skip


def timeline(facts: PageFacts) -> Markup:
    """Return the timeline in two widths; the style sheet shows the one that fits."""
    drawn = Markup("").join([_timeline(facts, WIDE, "wide"), _timeline(facts, NARROW, "narrow")])
    key = [(name, css) for name, css in TIMELINE_KEY if f'"{css}"' in drawn or f'"bar {css}' in drawn]
    return figure_of("Timeline", drawn, legend(key), css="plot timeline")


def _timeline(facts: PageFacts, width: int, css: str) -> Markup:
    time, ends = facts.time, (NAMES, width - TAKEN)
    x = time_axis(time.begun, time.end, since=time.begun, most=9 if width == WIDE else 3)
    stages = {stage.status.name: stage for stage in facts.stages}
    rows = list(dict.fromkeys([*stages, *time.planning]))
    bottom = TOP + ROW * len(rows)
    parts = [*_grid(x, ends, bottom), *x_ticks(x, *ends, bottom)]
    parts.append(tag("line", x1=ends[0], x2=ends[1], y1=bottom, y2=bottom, class_="axis"))
    parts.append(svg_text(ends[1] + 16, bottom + 17, x.unit, css="unit"))
    for row, name in enumerate(rows):
        top = TOP + row * ROW
        parts.append(svg_text(NAMES - 8, top + 15, cut(name, LETTERS), "end", "name"))
        if name in time.planning:
            parts += _bar(x, ends, time.planning[name], top, "plan", f"{name}: planning")
        parts += _stage_row(time, stages[name], x, ends, top) if name in stages else []
    return svg("when each stage ran", parts, width, bottom + BOTTOM, css)


def _grid(x: Axis, ends: tuple[float, float], bottom: float) -> list[Markup]:
    places = [f"{x.place(value, *ends):.1f}" for value, _ in x.ticks]
    return [tag("line", x1=at, x2=at, y1=TOP, y2=bottom, class_="grid") for at in places]


def _stage_row(time: TimeFacts, stage: StageFacts, x: Axis, ends: tuple[float, float], top: float) -> list[Markup]:
    """Return a stage's bars, the number of its running tasks below, its duration, and marks where attempts failed."""
    status = stage.status
    begun, until = status.started_at, status.ended_at or time.end
    first = min(stage.first_task_at or until, until) if status.tasks else begun
    took = format_seconds(max(0.0, until - begun)) if status.tasks or not status.ended_at else "cached"
    state = status.state.value
    parts = _bar(x, ends, (begun, first), top, "wait", f"{status.name}: queued or starting")
    if until > first or not status.tasks:
        parts += _bar(x, ends, (first, until), top, f"run {state}", f"{status.name}: {state}", least=0)
    parts.append(_busy(time.running.get(status.name, ()), x, ends, top + 4 + BAR + STRIP))
    parts.append(svg_text(ends[1] + 10, top + 15, took))
    for failure in [failure for failure in time.failures if failure.stage == status.name][:MOST_MARKS]:
        at = x.place(failure.at, *ends)
        css = "fail survived" if failure.survived else "fail"
        outline = f"M{at - 4:.1f} {top}H{at + 4:.1f}L{at:.1f} {top + 8}Z"
        parts.append(tag("path", tag("title", f"{failure.times:,} × {failure.cause}"), d=outline, class_=css))
    return parts


def _bar(
    x: Axis, ends: tuple[float, float], span: tuple[float, float], top: float, css: str, hint: str,
    least: float = LEAST_SHARE,
) -> list[Markup]:  # fmt: skip
    """Return a bar over a span of time, if it is at least a share of the run."""
    start, stop = (x.place(at, *ends) for at in span)
    if stop - start < least * (ends[1] - ends[0]):
        return []
    hint = tag("title", f"{hint}, {format_seconds(max(0.0, span[1] - span[0]))}")
    place = {"x": f"{start:.1f}", "y": top + 4, "width": f"{max(2.0, stop - start):.1f}", "height": BAR}
    return [tag("rect", hint, **place, rx=3, class_=f"bar {css}")]


def _busy(counts: Sequence[tuple[float, int]], x: Axis, ends: tuple[float, float], base: float) -> Markup:
    """Return how many tasks ran at once as a filled step curve, scaled to its maximum; one needs no curve."""
    most = max((count for _, count in counts), default=0)
    if most < 2:
        return Markup("")
    words, before = [f"M{ends[0]:.1f} {base}"], 0
    for at, running in [*counts, (x.high, 0)]:
        if running != before:
            words.append(f"H{x.place(at, *ends):.1f}V{base - STRIP * running / most:.1f}")
            before = running
    return tag("path", tag("title", f"at most {most:,} at once"), d="".join([*words, "Z"]), class_="busy")


def pace_plots(facts: PageFacts) -> list[Markup]:
    """Return plots of each stage's speed over the time of the run, and of the shares of a training's time."""
    plots, time = [], facts.time
    for name, points in time.paces.items():
        if len(points) >= FEWEST:
            x = time_axis(time.begun, time.end, since=time.begun)
            y = number_axis(0, max(value for _, value in points), f"{UNIT[name]}s/s")
            plots.append(plot(f"{name}: {UNIT[name]}s per second", x, y, [Line("", points, 0, "plain steps")]))
    epochs = facts.training.epochs if facts.training else ()
    if len(epochs) < FEWEST - 1:
        return plots
    waits = [Line(LABELS.get(name, name), points, colour) for colour, (name, points) in enumerate(_shares(epochs))]
    idle = number_axis(0, max([5.0, *(value for line in waits for _, value in line.points)]), "% of an epoch")
    return [*plots, plot("train: time outside the model", _steps(epochs), idle, waits)]


def _steps(epochs: Sequence[Epoch]) -> Axis:
    """Return the axis that all curves of a training share."""
    return whole_axis(0, epochs[-1].step, "step")


def _shares(epochs: Sequence[Epoch]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield each phase that is not the model's work with its percentage of every epoch, if at least 1% of one."""
    wholes = [sum(epoch.seconds.values()) or epoch.wall_s or 1.0 for epoch in epochs]
    spent = [epoch.seconds for epoch in epochs]
    for name in sorted({name for seconds in spent for name in seconds} - set(MODEL_WORK)):
        parts = [100 * seconds.get(name, 0.0) / whole for seconds, whole in zip(spent, wholes, strict=True)]
        if max(parts) >= 1:
            yield name, [(epoch.step, part) for epoch, part in zip(epochs, parts, strict=True)]


# Compared models

CURVES, LINES, NAMED = 8, 60, 8  # plots; the best models of each; those in its legend
STYLES = ("", "dashed", "thin")


def curve_plots(shown: Comparison) -> Iterator[Markup]:
    """Yield a plot for each metric, the compared one first, with a line for each model."""
    names = dict.fromkeys((shown.metric, *(name for model in shown.models for name in model.curves)))
    for name in list(names)[:CURVES]:
        lines = []
        for number, model in enumerate(model for model in shown.models[:LINES] if model.curves.get(name)):
            points, called = list(model.curves[name]), shown.called(model)
            hints = [f"{called}: epoch {epoch}: {figure(value)}" for epoch, value in points]
            style = STYLES[min(number // COLOURS, len(STYLES) - 1)]
            title = called if number < NAMED and name == shown.metric else ""
            lines.append(Line(title, points, number % COLOURS, style, hints))
        if lines:
            values = [value for line in lines for _, value in line.points]
            epochs = [epoch for line in lines for epoch, _ in line.points]
            x = whole_axis(min(epochs), max(epochs), "epoch")
            sizes = [(WIDE, HIGH, "wide"), (*SMALL[:2], "narrow")] if name == shown.metric else [SMALL]
            yield plot(name, x, number_axis(min(values), max(values)), lines, sizes)


# Memory, requested and used

MEMORY_WIDTH, MEMORY_ROW, MEMORY_BAR, VALUES = 440, 30, 14, 140  # pixels
MEMORY_KEY = (("requested", "asked"), ("used (peak)", "used"), ("estimated", "mark"))


MemoryUse = tuple[str, float | None, float | None, float | None]  # stage, requested, estimated and used bytes


def gpu_use(use: StageUse, training: TrainingFacts | None) -> MemoryUse:
    """Return a stage's use of GPU memory; only training plans it, other stages take all of a GPU."""
    is_planned = training is not None and use.stage == "train"
    planned = (training.prepared.limit_bytes, training.most_reserved_bytes) if training and is_planned else (None, None)
    return use.stage, *planned, use.gpu_peak_bytes


def memory_plots(uses: Sequence[StageUse], training: TrainingFacts | None) -> list[Markup]:
    """Return bars of hosts and of GPUs, and memory over the epochs of a training, where known."""
    hosts = [(use.stage, use.asked_bytes, use.planned_bytes, use.peak_bytes) for use in uses]
    gpus = [gpu_use(use, training) for use in uses if use.gpus or use.gpu_peak_bytes]
    plots = [memory_bars("Memory of a task", hosts), memory_bars("Memory of a GPU", gpus)]
    plots += [memory_over_epochs(training)] if training and len(training.epochs) > 1 else []
    return [plot for plot in plots if plot]


def memory_bars(title: str, uses: Sequence[MemoryUse]) -> Markup:
    """Return a bar chart of memory, or nothing where no value is known."""
    most = max((value or 0 for _, *values in uses for value in values), default=0)
    if not most:
        return Markup("")
    x, bottom, ends = byte_axis(most, most=4), TOP + MEMORY_ROW * len(uses), (NAMES, MEMORY_WIDTH - VALUES)
    parts = [*_grid(x, ends, bottom), *x_ticks(x, *ends, bottom)]
    parts.append(svg_text(ends[1] + 16, bottom + 17, x.unit, css="unit"))
    for row, (name, requested, estimated, used) in enumerate(uses):
        top = TOP + row * MEMORY_ROW + (MEMORY_ROW - MEMORY_BAR) / 2
        parts.append(svg_text(NAMES - 8, top + 11.5, cut(name, LETTERS), "end", "name"))
        for kind, inset, value in (("asked", 0, requested), ("used", 3, used)):
            length = x.place(value or 0, *ends) - NAMES
            place = {"x": NAMES, "y": top + inset, "width": f"{length:.1f}", "height": MEMORY_BAR - 2 * inset}
            parts.append(tag("rect", **place, rx=2, class_=f"mem {kind}"))
        if estimated:
            outline = f"M{x.place(estimated, *ends):.1f} {top - 4:.1f}V{top + MEMORY_BAR + 4:.1f}"
            parts.append(tag("path", tag("title", f"estimated {format_bytes(estimated)}"), d=outline, class_="mark"))
        of = f" of {format_bytes(requested)}" if used and requested else ""
        parts.append(svg_text(ends[1] + 10, top + 11.5, f"{format_bytes(used)}{of}" if used else "not measured"))
    return figure_of(title, svg(title, parts, MEMORY_WIDTH, bottom + BOTTOM), legend(MEMORY_KEY))


def memory_over_epochs(training: TrainingFacts) -> Markup:
    """Return a plot of memory by epoch: measured, estimated, and the limit."""
    epochs = training.epochs
    peaks = [(epoch.step, epoch.peak_bytes) for epoch in epochs]
    live = [(epoch.step, epoch.allocated_bytes) for epoch in epochs]
    estimated = [(epoch.step, taken) for epoch in epochs if (taken := training.predicted_bytes(epoch.epoch))]
    lines = [Line("peak", peaks, 0, "", [format_bytes(value) for _, value in peaks])]
    lines.append(Line("live at its end", live, 1, "", [format_bytes(value) for _, value in live]))
    lines += [Line("estimated", estimated, 3, "dashed")] if estimated else []
    if training.on_gpu:
        lines.append(Line("limit", [(epoch.step, training.prepared.limit_bytes) for epoch in epochs], 5, "dashed"))
    most = max(value for line in lines for _, value in line.points)
    of = "GPU" if training.on_gpu else "process"
    return plot(f"train: memory of a {of}", _steps(epochs), byte_axis(most), lines)


# Curves of a training

METRICS_DRAWN = 12
FIRST = 2  # terms of a loss that are drawn on top
OTHERS = ("learning_rate", "gradient_norm")
LOSS = "loss"
WIDE_RANGE = 30  # of a loss: beyond, its axis is logarithmic


def first_plots(training: TrainingFacts) -> list[Markup]:
    """Return the plots that a reader looks for first: the loss and the monitored metric."""
    losses, monitor = training.losses[:FIRST], training.monitor
    shown = [_loss(training, term) for term in losses]
    if monitor in training.metrics and monitor not in (_checked(training, term) for term in losses):
        shown.append(_metric(training, monitor))
    return shown


def other_plots(training: TrainingFacts) -> list[Markup]:
    """Return the other curves of a training: terms of its loss, metrics, learning rate, speed, memory."""
    plots = [_loss(training, term) for term in training.losses[FIRST:]]
    plots += [_metric(training, name) for name in own_metrics(training)[:METRICS_DRAWN] if name != training.monitor]
    others = {name: training.curves.get(name, ()) for name in OTHERS}
    plots += [
        _curves(name.replace("_", " "), training, [Line("", curve, 4, "plain")])
        for name, curve in others.items()
        if len(curve) > 1
    ]
    if len(training.epochs) > 1:
        pace = [(epoch.step, epoch.items_per_s) for epoch in training.epochs]
        hints = [f"epoch {epoch.epoch}: {figure(epoch.items_per_s)} items/s" for epoch in training.epochs]
        y = number_axis(0, max(value for _, value in pace) or 1, "items/s")
        plots.append(plot("items per second", _steps(training.epochs), y, [Line("", pace, 0, "", hints)]))
    return plots


def predicted_plots(stage: StageFacts) -> list[Markup]:
    """Return the plots that a task draws of its predictions: curves, of bounded size."""
    drawn = []
    for picture in stage.census.get("pictures", ()):
        lines = [
            Line(line["name"], [(point[0], point[1]) for point in line["points"] if len(point) == 2], at)
            for at, line in enumerate(picture["lines"])
        ]
        xs, ys = zip(*(point for line in lines for point in line.points), strict=True)
        x = number_axis(min(xs), max(xs), picture["x"])
        drawn.append(plot(picture["title"], x, number_axis(0, max(ys), picture["y"]), lines))
    return drawn


def own_metrics(training: TrainingFacts) -> list[str]:
    """Return the validation metrics that are not terms of the loss."""
    return [name for name in training.metrics if not name.startswith(LOSS)]


def _checked(training: TrainingFacts, term: str) -> str:
    """Return the name under which a loss term is validated; empty where it is not."""
    name = f"{LOSS}.{term}"
    return name if name in training.metrics else LOSS if len(training.losses) == 1 else ""


def _loss(training: TrainingFacts, term: str) -> Markup:
    """Return the plot of a loss term: by step, by epoch, and on the validation split."""
    steps = training.curves.get(f"{LOSS}.{term}", ())
    lines = [
        Line("step", steps if len(steps) > 1 else (), 0, "thin"),
        _by_epoch("epoch mean", training, "loss", term, 0),
        _by_epoch("validation", training, "validation", _checked(training, term), 1),
    ]
    return _curves(f"loss: {term}", training, [line for line in lines if line.points])


def _metric(training: TrainingFacts, name: str) -> Markup:
    return _curves(f"validation: {name}", training, [_by_epoch("", training, "validation", name, 2)])


def _by_epoch(title: str, training: TrainingFacts, of: str, name: str, colour: int) -> Line:
    """Return a curve of one metric by epoch, each placed at the last step of its epoch."""
    points, hints = list[tuple[float, float]](), list[str]()
    for epoch in training.epochs:
        figures: Mapping[str, float | None] = epoch.loss if of == "loss" else epoch.validation
        if name in figures:
            value = figures[name]
            points.append((epoch.step, math.nan if value is None else value))
            shown = "not finite" if value is None else figure(value)
            hints.append(f"epoch {epoch.epoch}, step {epoch.step}: {shown}")
    if within := training.curves.get(f"{of}/{name}"):  # of validations between two steps of an epoch
        points += within
        hints += [f"step {step:.0f}: {figure(value)}" for step, value in within]
        points, hints = (list(column) for column in zip(*sorted(zip(points, hints, strict=True)), strict=True))
    return Line(title, points, colour, "", hints)


def _curves(title: str, training: TrainingFacts, lines: Sequence[Line]) -> Markup:
    """Return a plot over all steps of a training, or a warning where no value is finite."""
    values = [value for line in lines for _, value in line.points if math.isfinite(value)]
    if not values:
        return tag("p", f"{title}: never a finite number", class_="note bad")
    last = max(training.epochs[-1].step if training.epochs else 0, *(step for line in lines for step, _ in line.points))
    low, high = min(values), max(values)
    y = log_axis(low, high) if title.startswith(LOSS) and high > WIDE_RANGE * low > 0 else number_axis(low, high)
    return plot(title, whole_axis(0, last, "step"), y, lines)
