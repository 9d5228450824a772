"""The page of a comparison: a table of the models, means over seeds, and their curves laid over each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.report.compared import brief, spread
from pipeline.report.html.html_page import environment
from pipeline.report.html.plots import COLOURS, Line, figure, number_axis, plot, whole_axis

if TYPE_CHECKING:
    from collections.abc import Iterator

    from markupsafe import Markup

    from pipeline.report.compared import Comparison

CURVES = 8  # plots
LINES = 60  # of one plot: the best
NAMED = 8  # of them, in its legend
WIDE, HIGH = 920, 360
STYLES = ("", "dashed", "thin")


def compared_page(shown: Comparison) -> str:
    """Return the page."""
    plots = list(curve_plots(shown))
    template = environment().get_template("compared.html")
    return template.render(shown=shown, plots=plots, brief=brief, spread=spread)


def curve_plots(shown: Comparison) -> Iterator[Markup]:
    """Yield a plot for each figure, the compared one first, with a line for each model."""
    names = dict.fromkeys((shown.metric, *(name for model in shown.models for name in model.curves)))
    for name in list(names)[:CURVES]:
        models = [model for model in shown.models[:LINES] if model.curves.get(name)]
        if not models:
            continue
        lines = []
        for number, model in enumerate(models):
            points = list(model.curves[name])
            called = shown.called(model)
            hints = [f"{called}: epoch {epoch}: {figure(value)}" for epoch, value in points]
            style = STYLES[min(number // COLOURS, len(STYLES) - 1)]
            lines.append(Line(called if number < NAMED else "", points, number % COLOURS, style, hints))
        values = [value for line in lines for _, value in line.points]
        epochs = [epoch for line in lines for epoch, _ in line.points]
        x = whole_axis(min(epochs), max(epochs), "epoch")
        yield plot(name, x, number_axis(min(values), max(values)), lines, width=WIDE, height=HIGH)
