"""The pictures of a run: its time line, its pace, memory predicted and measured, and the curves of a training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup

from pipeline.report.html.plots import (
    COLOURS,
    Axis,
    Line,
    byte_axis,
    figure,
    figure_of,
    legend,
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
from pipeline.training.step_clock import MODEL_PHASES, READ, TOLD
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.report.compared import Comparison
    from pipeline.report.facts import StageUse
    from pipeline.report.html.run_facts import PageFacts, StageFacts, TimeFacts, TrainingFacts
    from pipeline.training.loop.metrics_log import Epoch

FEWEST = 3  # points of a plot
WIDE, NARROW, HIGH = 920, 380, 360
STAGE_ROW, STAGE_BAR = 46, 20
TOP, BOTTOM = 6, 42
MOST_MARKS = 240  # of what went wrong in a stage: pixels
TIMELINE_KEY = (
    ("waits for its first task", "wait"), ("runs", "run"), ("tasks at once", "busy"), ("an attempt fails", "fail"),
)  # fmt: skip


def timeline(facts: PageFacts) -> Markup:
    """Return the time line in two widths; the style sheet shows the one that fits."""
    drawn = Markup("").join([_timeline(facts, WIDE, "wide"), _timeline(facts, NARROW, "narrow")])
    return figure_of("Stages over time", drawn, legend(TIMELINE_KEY), css="plot timeline")


def _timeline(facts: PageFacts, width: int, css: str) -> Markup:
    ends = (84 if width == WIDE else 70, width - 8)
    x = time_axis(facts.time.begun, facts.time.end, since=facts.time.begun, most=9 if width == WIDE else 4)
    height = TOP + STAGE_ROW * len(facts.stages) + BOTTOM
    bottom = height - BOTTOM
    parts = [*_grid(x, ends, bottom), *x_ticks(x, *ends, bottom)]
    parts.append(tag("line", x1=ends[0], x2=ends[1], y1=bottom, y2=bottom, class_="axis"))
    parts.append(svg_text(ends[1], bottom + 35, x.unit, "end", "unit"))
    for row, stage in enumerate(facts.stages):
        parts += _stage_row(facts.time, stage, x, ends, TOP + row * STAGE_ROW)
    return svg("when each stage ran", parts, width, height, css)


def _grid(x: Axis, ends: tuple[float, float], bottom: float) -> list[Markup]:
    places = [f"{x.place(value, *ends):.1f}" for value, _ in x.ticks]
    return [tag("line", x1=at, x2=at, y1=TOP, y2=bottom, class_="grid") for at in places]


def _stage_row(time: TimeFacts, stage: StageFacts, x: Axis, ends: tuple[float, float], top: float) -> list[Markup]:
    """Return a stage's bar, the number of its running tasks beneath, and marks where attempts failed."""
    status = stage.status
    until = status.ended_at or time.end
    begun, first = status.started_at, min(stage.first_task_at or until, until)
    hint = f"{status.name}: {status.state.value}, {format_seconds(max(0.0, until - begun))}"
    parts = [svg_text(ends[0] - 8, top + 19, status.name, "end", "name")]
    if status.tasks and first > begun:
        waiting_hint = f"{status.name}: waits for its first task"
        parts.append(_stage_bar(x, ends, (begun, first), top + 4, "bar wait", waiting_hint))
    span = (first if status.tasks else begun, until)
    parts.append(_stage_bar(x, ends, span, top + 4, f"bar run {status.state.value}", hint))
    parts.append(_busy(time.running.get(status.name, ()), x, ends, top + 4 + STAGE_BAR + 14))
    for failure in [failure for failure in time.failures if failure.stage == status.name][:MOST_MARKS]:
        at = x.place(failure.at, *ends)
        outline = f"M{at - 4:.1f} {top}H{at + 4:.1f}L{at:.1f} {top + 8}Z"
        parts.append(tag("path", tag("title", f"{failure.times:,} × {failure.cause}"), d=outline, class_="fail"))
    return parts


def _stage_bar(
    x: Axis, ends: tuple[float, float], span: tuple[float, float], top: float, css: str, hint: str
) -> Markup:
    start, stop = (x.place(at, *ends) for at in span)
    return tag(
        "rect", tag("title", hint), x=f"{start:.1f}", y=f"{top:.1f}", width=f"{max(2.0, stop - start):.1f}",
        height=STAGE_BAR, rx=3, class_=css,
    )  # fmt: skip


def _busy(counts: Sequence[tuple[float, int]], x: Axis, ends: tuple[float, float], base: float) -> Markup:
    """Return how many tasks ran at once as a filled step curve, scaled to its maximum."""
    most = max((count for _, count in counts), default=0)
    if most == 0:
        return Markup("")
    words, before = [f"M{ends[0]:.1f} {base}"], 0
    for at, running in [*counts, (x.high, 0)]:
        if running != before:
            words.append(f"H{x.place(at, *ends):.1f}V{base - 12 * running / most:.1f}")
            before = running
    return tag("path", tag("title", f"at most {most:,} at once"), d="".join([*words, "Z"]), class_="busy")


def pace_plots(facts: PageFacts) -> list[Markup]:
    """Return plots of each stage's speed over time, and of what a training did beside its model's work."""
    plots = []
    for name, points in facts.time.paces.items():
        if len(points) >= FEWEST:
            x = time_axis(points[0][0], points[-1][0], since=facts.time.begun)
            y = number_axis(0, max(value for _, value in points), f"{UNIT[name]}s/s")
            plots.append(plot(f"{name}: {UNIT[name]}s a second", x, y, [Line("", points, 0, "area steps")]))
    epochs = facts.training.epochs if facts.training else ()
    if len(epochs) < FEWEST - 1:
        return plots
    x = whole_axis(epochs[0].epoch, epochs[-1].epoch, "epoch")
    pace = [(epoch.epoch, epoch.items_per_s) for epoch in epochs]
    hints = [f"epoch {epoch.epoch}: {figure(epoch.items_per_s)} items/s" for epoch in epochs]
    y = number_axis(0, max(value for _, value in pace) or 1, "items/s")
    plots.append(plot("train: items a second", x, y, [Line("", pace, 0, "", hints)]))
    waits = [Line(TOLD.get(name, name), points, colour) for colour, (name, points) in enumerate(_shares(epochs))]
    idle = number_axis(0, max([5.0, *(value for line in waits for _, value in line.points)]), "% of an epoch")
    return [*plots, plot("train: beside the model's work", x, idle, waits)]


def _shares(epochs: Sequence[Epoch]) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Yield each phase that is not the model's work with its percentage of every epoch, if at least 1% of one."""
    wholes = [sum(epoch.seconds.values()) or epoch.wall_s or 1.0 for epoch in epochs]
    spent = [epoch.seconds or {READ: epoch.wait_share * epoch.wall_s} for epoch in epochs]
    for name in sorted({name for seconds in spent for name in seconds} - set(MODEL_PHASES)):
        parts = [100 * seconds.get(name, 0.0) / whole for seconds, whole in zip(spent, wholes, strict=True)]
        if max(parts) >= 1:
            yield name, [(epoch.epoch, part) for epoch, part in zip(epochs, parts, strict=True)]


# Models beside each other

CURVES, LINES, NAMED = 8, 60, 8  # plots; the best models of each; those in its legend
STYLES = ("", "dashed", "thin")


def curve_plots(shown: Comparison) -> Iterator[Markup]:
    """Yield a plot for each figure, the compared one first, with a line for each model."""
    names = dict.fromkeys((shown.metric, *(name for model in shown.models for name in model.curves)))
    for name in list(names)[:CURVES]:
        lines = []
        for number, model in enumerate(model for model in shown.models[:LINES] if model.curves.get(name)):
            points, called = list(model.curves[name]), shown.called(model)
            hints = [f"{called}: epoch {epoch}: {figure(value)}" for epoch, value in points]
            style = STYLES[min(number // COLOURS, len(STYLES) - 1)]
            lines.append(Line(called if number < NAMED else "", points, number % COLOURS, style, hints))
        if lines:
            values = [value for line in lines for _, value in line.points]
            epochs = [epoch for line in lines for epoch, _ in line.points]
            x = whole_axis(min(epochs), max(epochs), "epoch")
            yield plot(name, x, number_axis(min(values), max(values)), lines, width=WIDE, height=HIGH)


# Memory, predicted and measured

MEMORY_WIDTH, LEFT, RIGHT = 440, 70, 12
MEMORY_ROW, MEMORY_BAR = 34, 16
MEMORY_KEY = (("given", "asked"), ("measured peak", "used"), ("predicted", "mark"))


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory that a stage was given, was predicted to use, and used; None: not known."""

    name: str
    asked_bytes: float | None
    predicted_bytes: float | None
    used_bytes: float | None


def gpu_use(use: StageUse, training: TrainingFacts | None) -> MemoryUse:
    """Return a stage's use of GPU memory; it is planned for training alone: other stages take what there is."""
    if training is None or use.stage != "train":
        return MemoryUse(use.stage, None, None, use.gpu_peak_bytes)
    return MemoryUse(use.stage, training.prepared.limit_bytes, training.most_reserved_bytes, use.gpu_peak_bytes)


def memory_plots(uses: Sequence[StageUse], training: TrainingFacts | None) -> list[Markup]:
    """Return bars of hosts and of GPUs, and memory over the epochs of a training."""
    hosts = [MemoryUse(use.stage, use.asked_bytes, use.planned_bytes, use.peak_bytes) for use in uses]
    gpus = [gpu_use(use, training) for use in uses if use.gpus or use.gpu_peak_bytes]
    plots = [memory_bars("Host memory of a task, by stage", hosts), memory_bars("GPU memory, by stage", gpus)]
    return [*plots, memory_over_epochs(training)] if training and len(training.epochs) > 1 else plots


def memory_bars(title: str, uses: Sequence[MemoryUse]) -> Markup:
    """Return a bar chart of memory, or nothing where no figure is known."""
    known = [value or 0 for use in uses for value in (use.asked_bytes, use.predicted_bytes, use.used_bytes)]
    if not any(known):
        return Markup("")
    x, height = byte_axis(max(known), most=4), TOP + MEMORY_ROW * len(uses) + BOTTOM
    bottom, ends = height - BOTTOM, (LEFT, MEMORY_WIDTH - RIGHT)
    parts = [*_grid(x, ends, bottom), *x_ticks(x, *ends, bottom), svg_text(ends[1], bottom + 35, x.unit, "end", "unit")]
    for row, use in enumerate(uses):
        top = TOP + row * MEMORY_ROW + (MEMORY_ROW - MEMORY_BAR) / 2
        parts.append(svg_text(LEFT - 8, top + 12.5, use.name, "end", "name"))
        bars = (("asked", "given", 0, use.asked_bytes), ("used", "measured peak", 3, use.used_bytes))
        for css, label, inset, value in bars:
            if value:
                width = max(1.0, x.place(value, *ends) - LEFT)
                hint = tag("title", f"{label} {format_bytes(value)}")
                parts.append(tag(
                    "rect", hint, x=LEFT, y=f"{top + inset:.1f}", width=f"{width:.1f}",
                    height=MEMORY_BAR - 2 * inset, rx=2, class_=f"mem {css}",
                ))  # fmt: skip
        if use.predicted_bytes:
            outline = f"M{x.place(use.predicted_bytes, *ends):.1f} {top - 4:.1f}V{top + MEMORY_BAR + 4:.1f}"
            parts.append(
                tag("path", tag("title", f"predicted {format_bytes(use.predicted_bytes)}"), d=outline, class_="mark")
            )
        if not use.used_bytes:
            parts.append(svg_text(LEFT + 6, top + 12.5, "not measured", "start", "tick"))
    return figure_of(title, svg(title, parts, MEMORY_WIDTH, height), legend(MEMORY_KEY))


def memory_over_epochs(training: TrainingFacts) -> Markup:
    """Return a plot of memory by epoch: measured, planned, and the limit."""
    epochs = training.epochs
    x = whole_axis(epochs[0].epoch, epochs[-1].epoch, "epoch")
    peaks = [(epoch.epoch, epoch.peak_bytes) for epoch in epochs]
    live = [(epoch.epoch, epoch.allocated_bytes) for epoch in epochs]
    predicted = [(epoch.epoch, taken) for epoch in epochs if (taken := training.predicted_bytes(epoch.epoch))]
    lines = [Line("peak", peaks, 0, "", [format_bytes(value) for _, value in peaks])]
    lines.append(Line("live at its end", live, 1, "", [format_bytes(value) for _, value in live]))
    lines += [Line("predicted", predicted, 3, "dashed")] if predicted else []
    if training.on_gpu:
        lines.append(Line("limit", [(epoch.epoch, training.prepared.limit_bytes) for epoch in epochs], 5, "dashed"))
    most = max(value for line in lines for _, value in line.points)
    of = "GPU" if training.on_gpu else "resident"
    return plot(f"train: {of} memory by epoch", x, byte_axis(most), lines)


# Curves of a training

METRICS_DRAWN = 12
OTHERS = ("learning_rate", "gradient_norm")
LOSS = "loss"


def training_plots(training: TrainingFacts) -> list[Markup]:
    """Return plots of each loss term, the validation metrics, the learning rate and the gradient norm."""
    plots = [_loss(training, term) for term in training.losses]
    for name in own_metrics(training)[:METRICS_DRAWN]:
        watched = " (decides which epoch is best)" if name == training.monitor else ""
        plots.append(_curves(f"validation: {name}{watched}", [_by_epoch("", training, "validation", name, 2)]))
    others = {name: training.curves.get(name, ()) for name in OTHERS}
    return plots + [
        _curves(name.replace("_", " "), [Line("", curve, 4, "plain")])
        for name, curve in others.items()
        if len(curve) > 1
    ]


def predicted_plots(stage: StageFacts) -> list[Markup]:
    """Return the pictures that a task draws of its predictions: curves, of bounded size."""
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


def _loss(training: TrainingFacts, term: str) -> Markup:
    """Return the plot of a loss term: by step, by epoch, and on the validation split."""
    name = f"{LOSS}.{term}"
    steps = training.curves.get(name, ())
    checked = name if name in training.metrics else LOSS if len(training.losses) == 1 else ""
    lines = [
        Line("a step", steps if len(steps) > 1 else (), 0, "thin"),
        _by_epoch("an epoch's mean", training, "loss", term, 0),
        _by_epoch("validation", training, "validation", checked, 1),
    ]
    return _curves(f"loss: {term}", [line for line in lines if line.points])


def _by_epoch(title: str, training: TrainingFacts, of: str, name: str, colour: int) -> Line:
    """Return a curve of one figure by epoch, each placed at the last step of its epoch."""
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


def _curves(title: str, lines: Sequence[Line]) -> Markup:
    """Return a plot over steps, or a warning where no value is finite."""
    values = [value for line in lines for _, value in line.points if math.isfinite(value)]
    if not values:
        return tag("p", f"{title}: never a finite number", class_="note bad")
    steps = [step for line in lines for step, _ in line.points]
    return plot(title, whole_axis(min(steps), max(steps), "step"), number_axis(min(values), max(values)), lines)
