"""Curves of a training: each term of the loss, each metric, and its epochs as a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pipeline.report.html.html_text import (  # fmt: skip
    Html,
    bytes_cell,
    count,
    figure,
    left_out,
    note,
    number,
    percent_cell,
    section,
    table,
    tag,
    time_cell,
)
from pipeline.report.html.plots import Line, numbers, plot, wholes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PLOTS = 12  # of metrics
COLUMNS = 8  # of the table: losses, and as many metrics
OTHERS = ("learning_rate", "gradient_norm")
LOSS = "loss"


def training(told: Mapping[str, Any] | None) -> Html:
    """Return what is known of a training; nothing where a run has none."""
    if told is None:
        return Html("")
    if not told["rows"] and not told["steps"]:
        return section("training", "Loss and metrics", note("nothing was measured yet: no step has been told"))
    metrics = [name for name in told["metrics"] if not name.startswith(LOSS)]
    plots = [*(_loss(told, name) for name in told["losses"]), *(_metric(told, name) for name in metrics[:PLOTS])]
    plots += [_steps(told, name) for name in OTHERS if len(told["steps"].get(name, ())) > 1]
    lead = f"Model {told['model']}: all epochs that it was trained, by this run and those before it."
    shown = tag("div", *plots, class_="plots")
    more = left_out(len(metrics) - PLOTS, "metrics are only in the list of epochs", told["folder"])
    return section("training", "Loss and metrics", shown, more, *_epochs(told, metrics), lead=lead)


def _loss(told: Mapping[str, Any], term: str) -> Html:
    """Return a term of the loss: of steps, of epochs, of the validation split."""
    name = f"{LOSS}.{term}"
    steps = told["steps"].get(name, ())
    checked = name if name in told["metrics"] else LOSS if len(told["losses"]) == 1 else ""
    lines = [
        Line("a step", steps if len(steps) > 1 else (), 0, "thin"),
        Line("an epoch's mean", _curve(told, "loss", term), 0, "", _said(told, "loss", term)),
        Line("validation", _curve(told, "validation", checked), 1, "", _said(told, "validation", checked)),
    ]
    return _drawn(f"loss: {term}", [line for line in lines if line.points])


def _metric(told: Mapping[str, Any], name: str) -> Html:
    line = Line("", _curve(told, "validation", name), 2, "", _said(told, "validation", name))
    watched = " (decides which epoch is best)" if name == told["monitor"] else ""
    return _drawn(f"validation: {name}{watched}", [line])


def _steps(told: Mapping[str, Any], name: str) -> Html:
    return _drawn(name.replace("_", " "), [Line("", told["steps"][name], 4, "plain")])


def _curve(told: Mapping[str, Any], of: str, name: str) -> list[tuple[float, float]]:
    """Return a figure of each epoch at the step at which that ended."""
    known = [(one["step"], one[of][name]) for one in told["epochs"] if name in one[of]]
    return [(step, math.nan if value is None else value) for step, value in known]


def _said(told: Mapping[str, Any], of: str, name: str) -> list[str]:
    rows = [one for one in told["epochs"] if name in one[of]]
    return [f"epoch {one['epoch']}, step {one['step']}: {_figure(one[of][name])}" for one in rows]


def _figure(value: float | None) -> str:
    return "not finite" if value is None else figure(value)


def _drawn(title: str, lines: Sequence[Line]) -> Html:
    """Return a plot over steps; of figures that were never a number it says so."""
    values = [value for line in lines for _, value in line.points if math.isfinite(value)]
    if not values:
        return note(f"{title}: never a finite number", kind="bad")
    steps = [step for line in lines for step, _ in line.points]
    return plot(title, wholes(min(steps), max(steps), "step"), numbers(min(values), max(values)), lines)


def _epochs(told: Mapping[str, Any], metrics: Sequence[str]) -> list[Html]:
    """Return the newest epochs as a table."""
    if not told["rows"]:
        return [note("no epoch has ended yet")]
    losses, shown = told["losses"][:COLUMNS], metrics[:COLUMNS]
    columns = ("epoch", "step", *losses, *shown, "items", "items/s", "waited", "peak memory", "out of memory", "took")
    rows = [
        [
            count(one["epoch"]), count(one["step"]), *(number(one["loss"].get(name)) for name in losses),
            *(number(one["validation"].get(name)) for name in shown), count(one["items"]), number(one["items_per_s"]),
            percent_cell(one["wait_share"]), bytes_cell(one["peak_bytes"]), count(one["ooms"]),
            time_cell(one["wall_s"]),
        ]
        for one in told["rows"]
    ]  # fmt: skip
    more = left_out(told["known_epochs"] - len(rows), "epochs before these", f"{told['folder']}/epochs.jsonl")
    return [table(columns, rows, caption="epochs"), more]
