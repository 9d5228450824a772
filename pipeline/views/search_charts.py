"""The charts of a search: the value of each trial with the best one so far, and the values by each setting."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pipeline.journal.run_status import State
from pipeline.planning.points import short_names, value_as_written
from pipeline.report.charts import Axis, Chart, Line, figure, line_chart, log_axis, number_axis, whole_axis
from pipeline.views.compared_models import LARGE
from pipeline.views.page_charts import loss_axis

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipeline.config.schema_train import SweepSection
    from pipeline.journal.run_status import StageStatus, Trial


def search_charts(stage: StageStatus | None, sweep: SweepSection) -> list[Chart]:
    """Return the charts of a search, that of all trials first; none before a trial has a value."""
    valued = [trial for trial in stage.asked.values() if trial.value is not None] if stage else []
    if stage is None or not valued:
        return []
    monitor, better = stage.search["monitor"], min if stage.search["lower"] else max
    values = [trial.value or 0.0 for trial in valued]
    best = [(float(trial.number), better(values[:n])) for n, trial in enumerate(valued, 1)]
    stairs = [step for before, then in pairwise([best[0], *best]) for step in ((then[0], before[1]), then)]
    x = whole_axis(0, max(stage.search["trials"] - 1, 1), "trial")
    lines = [*_dots(valued, lambda trial: float(trial.number)), Line("best so far", stairs, 3, "dashed")]
    charts = [line_chart(f"{monitor} of each trial", x, lines, loss_axis, LARGE)]
    names = short_names(sweep.space)
    for key, chosen_from in sweep.space.items():
        axis, place = _axis(chosen_from)
        lines = _dots(valued, lambda trial, key=key, place=place: place(trial.settings[key]))  # type: ignore[misc]
        unnamed = [replace(line, name="") for line in lines]
        charts.append(line_chart(f"{monitor} by {names[key]}", axis, unnamed, loss_axis))
    return charts


def _dots(trials: Sequence[Trial], place: Callable[[Trial], float]) -> list[Line]:
    """Return the dots of trials that were trained to their end, and of pruned ones."""
    lines = []
    for name, colour, is_pruned in (("trained", 0, False), ("pruned", 5, True)):
        shown = [trial for trial in trials if (trial.state is State.PRUNED) is is_pruned]
        hints = [f"trial {trial.number}: {trial.name}: {figure(trial.value or 0.0)}" for trial in shown]
        points = [(place(trial), trial.value or 0.0) for trial in shown]
        lines += [Line(name, points, colour, "points", hints)] if shown else []
    return lines


def _axis(values: Any) -> tuple[Axis, Callable[[Any], float]]:
    """Return the axis of a setting and a function that places its values: numbers by value, choices side by side."""
    if not isinstance(values, tuple):
        ends: Mapping[str, Any] = values
        return (log_axis if ends.get("log") else number_axis)(ends["low"], ends["high"]), float
    words = [json.dumps(value) for value in values]
    ticks = tuple((float(place), value_as_written(value)) for place, value in enumerate(values))
    return Axis(-0.5, len(values) - 0.5, ticks), lambda value: float(words.index(json.dumps(value)))
