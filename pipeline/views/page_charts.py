"""The charts of a run's HTML report: the times of its stages, memory, and the curves of a training."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.cluster.verdict import Cause
from pipeline.codec import read_if_whole
from pipeline.journal.run_status import State
from pipeline.planning.trainings import Training as Planned
from pipeline.report.charts import (
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
from pipeline.training.loop.metrics_log import STEP, read_epochs, read_figures
from pipeline.training.prepared import ModelFolder, Prepared
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.journal.run_status import RunStatus, StageStatus
    from pipeline.training.loop.metrics_log import Epoch
    from pipeline.views.efficiency import StageUse

STEP_OOM = "step out of memory"  # cause of a step that was repeated in smaller parts
SPANS = 240  # slots of a run's timeline
TRAIN = "train"
EPOCH_ROWS = 100
SERIES = 16  # most curves of loss terms, of metrics
# The name in `training/forensics/step_bundle.py`, which imports torch.
_BUNDLE = re.compile(r"step-(\d{8,})-([a-z]+)-rank-(\d+)(?:-\d+)?")
LEAST_SHARE = 0.004  # shorter parts of the run are not drawn
MOST_MARKS = 240  # most marks of failures of a stage
POINTS = 500  # of a curve
TIMELINE = (Size(920, css="wide", left=76, right=78), Size(380, css="narrow", left=76, right=78, every=3))
TIMELINE_KEY = (
    ("planning", "plan"), ("queued or starting", "wait"), ("running", "run"), ("failed", "fail"),
    ("survived failure", "fail survived"),
)  # fmt: skip
MEMORY = (Size(440, left=76, right=140),)
MEMORY_KEY = (("requested", "asked"), ("used (peak)", "used"), ("estimated", "mark"))
METRICS_DRAWN = 12
FIRST = 2  # loss terms drawn on top
OTHERS = ("learning_rate", "gradient_norm")
LOSS = "loss"
WIDE_RANGE = 30  # a loss with a wider range gets a logarithmic axis


class FailuresAt(NamedTuple):
    """The failures of a stage by one cause within a time slot: attempts, or steps of a training."""

    stage: str
    cause: str
    survived: bool  # the task is done now, or the step was repeated
    at: float
    times: int


class RunTimes(NamedTuple):
    """The times of a run's events, in seconds since 1970; of bounded size for any length of the run."""

    begun: float
    end: float  # now for an active run
    planning: Mapping[str, tuple[float, float]]  # stage → from the end of the stage before to its beginning
    first: Mapping[str, float]  # stage → when its first task began
    failures: Sequence[FailuresAt]


def times_of(status: RunStatus, now: float) -> RunTimes:
    """Return the times of a run's events, from its deep view."""
    begun, end = span_of(status, now)
    width, first = (end - begun) / SPANS, dict[str, float]()
    failed = Counter[tuple[str, str, bool, int]]()
    for stage in status.in_order():
        if begins := list(_beginnings(stage)):
            first[stage.name] = min(begins)
        for task in stage.work.values():
            for attempt in task.ended:
                if attempt.cause is not Cause.DONE and attempt.ended_at:
                    failed[stage.name, attempt.cause.value, task.good, int((attempt.ended_at - begun) / width)] += 1
        for slot, times in stage.ooms.counts.items():
            place = int(((slot + 0.5) * stage.ooms.width_s - begun) / width)
            failed[stage.name, STEP_OOM, True, place] += times
    failures = [
        FailuresAt(stage, cause, is_survived, begun + (place + 0.5) * width, times)
        for (stage, cause, is_survived, place), times in sorted(failed.items())
    ]
    return RunTimes(begun, end, planning_times(status, begun, end), first, failures)


def span_of(status: RunStatus, now: float) -> tuple[float, float]:
    """Return when a run began, and when it ended or, while it runs, the present time."""
    stages = status.stages.values()
    begun = status.started_at or min((stage.started_at for stage in stages), default=now)
    ends = [attempt.ended_at for stage in stages for task in stage.work.values() for attempt in task.ended]
    last = max([begun, status.ended_at, *(stage.ended_at for stage in stages), *ends])
    return begun, max(last if status.ended_at else now, begun + 1e-3)


def planning_times(status: RunStatus, begun: float, end: float) -> dict[str, tuple[float, float]]:
    """Return when each stage was planned: from the end of the previous stage, or the start of its visit."""
    before, planning = begun, {}
    starts = {stage.name: stage.started_at for stage in status.in_order()}
    is_between = status.state is State.RUNNING and all(stage.ended_at for stage in status.stages.values())
    later = [name for name in status.planned if name not in starts]
    for name, at in [*starts.items(), *((name, end) for name in later[:1] if is_between)]:
        planning[name] = (max(before, status.seen) if status.seen < at else before, at)
        before = max(before, status.stages[name].ended_at or at) if name in starts else at
    return planning


def _beginnings(stage: StageStatus) -> Iterator[float]:
    """Yield the known start times of the attempts at a stage's tasks."""
    for task in stage.work.values():
        for attempt in task.ended:
            if attempt.ended_at and attempt.elapsed_s > 0:
                yield attempt.ended_at - attempt.elapsed_s
        if task.job is not None and task.word.began:  # not judged yet, or the run was stopped
            yield task.word.began


@dataclass(frozen=True, slots=True)
class Training:
    """The training of a run: its plan, records and curves."""

    prepared: Prepared
    folder: Path
    monitor: str
    on_gpu: bool
    newest: Sequence[Epoch]  # all epochs
    curves: Mapping[str, Sequence[tuple[float, float]]]  # name → (step, value)
    bundles: Sequence[Mapping[str, Any]]  # recorded steps: `step`, `kind`, `rank`, and how to run one `again`

    @property
    def epochs(self) -> list[Epoch]:
        """Epochs with records."""
        return thinned(self.newest, POINTS)

    @property
    def losses(self) -> list[str]:
        return _names(epoch.loss for epoch in self.epochs)[:SERIES]

    @property
    def metrics(self) -> list[str]:
        return _names(epoch.validation for epoch in self.epochs)

    @property
    def own_metrics(self) -> list[str]:
        """The validation metrics that are not terms of the loss."""
        return [name for name in self.metrics if not name.startswith("loss")]

    @property
    def survived(self) -> list[Epoch]:
        """The last epochs with steps that ran out of memory and went on."""
        return [epoch for epoch in self.newest[-EPOCH_ROWS:] if epoch.ooms or epoch.remedied]

    def predicted_bytes(self, epoch: int) -> int | None:
        """Return the planned memory of an epoch: of a GPU, else of a node with a single process."""
        if not self.on_gpu:
            return self.prepared.mem_bytes if self.prepared.ranks == 1 else None
        return self.prepared.phases[self.prepared.phase_of(epoch - 1)].reserved_bytes


def training_of(folder: RunFolder, config: Config, stage: StageStatus | None) -> Training | None:
    """Return the training of a run; None without a plan that this version can read."""
    trainings = read_if_whole(folder.plan(TRAIN), tuple[Planned, ...]) or ()
    prepared = trainings[0].prepared if len(trainings) == 1 else None
    if prepared is None:
        return None
    made = ModelFolder(config.train.models / prepared.name)
    every, census = read_epochs(made.path), stage.census or {} if stage else {}
    last = min(prepared.epochs, census.get("epochs", prepared.epochs))  # a later run may have continued it
    epochs = [epoch for epoch in every if epoch.epoch <= last]
    steps = epochs[-1].step if epochs and len(epochs) < len(every) else sys.maxsize
    names = sorted(path.name for path in made.bundles.iterdir()) if made.bundles.is_dir() else []
    recorded = [(int(match[1]), match[2], int(match[3])) for match in map(_BUNDLE.fullmatch, names) if match]
    return Training(
        prepared=prepared,
        folder=made.path,
        monitor=config.train.validation.monitor,
        on_gpu=bool(stage and any(job.gpus for job in stage.jobs.values())) or bool(config.cluster.train.gpus),
        newest=epochs,
        curves=_curves([figures for figures in read_figures(made.path) if figures[STEP] <= steps]),
        bundles=[
            {"step": step, "kind": kind, "rank": rank, "again": f"pipeline replay {folder.name} --step {step}"}
            for step, kind, rank in recorded
            if step <= steps
        ],
    )


def _names(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the names that occur in records, in order of first appearance."""
    return list(dict.fromkeys(chain.from_iterable(records)))


def _curves(figures: Sequence[Mapping[str, Any]]) -> dict[str, Sequence[tuple[float, float]]]:
    """Return a curve of each figure that was recorded every few steps."""
    names = [name for name in _names(figures) if name != STEP][: 2 * SERIES]
    curves = {
        name: [(record[STEP], record[name]) for record in figures if record.get(name) is not None] for name in names
    }
    return {name: thinned(curve, POINTS) for name, curve in curves.items() if curve}


def timeline(stages: Sequence[StageStatus], times: RunTimes) -> Chart:
    """Return when each stage was planned, queued and running, and where attempts failed."""
    by_name = {stage.name: stage for stage in stages}
    rows = [_stage_row(name, by_name.get(name), times) for name in dict.fromkeys([*by_name, *times.planning])]
    drawn = {css for row in rows for bar in row.bars for css in (bar.css, bar.css.split()[0])}
    drawn |= {css for row in rows for _, css, _ in row.marks}
    key = [(name, css) for name, css in TIMELINE_KEY if css in drawn]
    return Chart("Timeline", time_axis(times.begun, times.end, most=9), rows=rows, sizes=TIMELINE, key=key)


def _stage_row(name: str, stage: StageStatus | None, times: RunTimes) -> Row:
    """Return a stage's bars, its duration, and marks where attempts failed."""
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
    return Row(name, took, _bars(name, spans, times), marks)


def _bars(name: str, spans: Mapping[str, tuple[float, float, str]], times: RunTimes) -> list[Bar]:
    least_s = LEAST_SHARE * (times.end - times.begun)
    return [
        Bar(start, end, css, f"{name}: {words}, {format_seconds(max(0.0, end - start))}")
        for css, (start, end, words) in spans.items()
        if end - start >= least_s or css.startswith("run")
    ]


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
    """Return the limit and the estimate of a stage's GPU memory; only training has them."""
    if training is None or use.stage != "train":
        return None, None
    return training.prepared.limit_bytes, max(
        (phase.reserved_bytes for phase in training.prepared.phases), default=None
    )


def memory_rows(uses: Sequence[StageUse], training: Training | None) -> Iterator[tuple[Any, ...]]:
    """Yield a row of each stage's planned, requested and used memory."""
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
        ("at epoch end", 1, "", [epoch.allocated_bytes for epoch in epochs]),
        ("estimated", 3, "dashed", [training.predicted_bytes(epoch.epoch) for epoch in epochs]),
        ("limit", 5, "dashed", [limit for _ in epochs]),
    ):
        known = [(epoch.step, size) for epoch, size in zip(epochs, sizes, strict=True) if size is not None]
        lines += [Line(name, known, colour, style, [format_bytes(size) for _, size in known])] if known else []
    of = "GPU" if training.on_gpu else "process"
    return line_chart(f"train: memory of a {of}", _steps(training), lines, lambda _, high: byte_axis(high))


def first_charts(training: Training) -> list[Chart]:
    """Return the most important charts: the loss and the monitored metric."""
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
    """Return the validation name of a loss term; empty if it is not validated."""
    name = f"{LOSS}.{term}"
    return name if name in training.metrics else LOSS if len(training.losses) == 1 else ""


def _loss(training: Training, term: str) -> Chart:
    """Return a loss term by step, by epoch, and on the validation split."""
    steps = training.curves.get(f"{LOSS}.{term}", ())
    trained = _by_epoch("epoch mean", training, "loss", term, 0)
    validated = _by_epoch("validation", training, "validation", _checked(training, term), 1)
    every = [Line("step", steps if len(steps) > 1 else (), 0, "thin"), trained, validated]
    lines = [line for line in every if line.points]
    return line_chart(f"loss: {term}", _steps(training, *(line.points for line in lines)), lines, loss_axis)


def loss_axis(low: float, high: float) -> Axis:
    """Return an axis, logarithmic if positive values are far apart."""
    return log_axis(low, high) if high > WIDE_RANGE * low > 0 else number_axis(low, high)


def _metric(training: Training, name: str) -> Chart:
    line = _by_epoch("", training, "validation", name, 2)
    return line_chart(f"validation: {name}", _steps(training, line.points), [line])


def _by_epoch(title: str, training: Training, of: str, name: str, colour: int) -> Line:
    """Return a metric at the last step of each epoch, with validations within epochs."""
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
