"""What each stage did and when, how fast, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.report.html.html_text import (  # fmt: skip
    Cell,
    Html,
    badge,
    count,
    error_box,
    figure,
    joined,
    note,
    number,
    section,
    table,
    tag,
    time_cell,
)
from pipeline.report.html.plots import Axis, Line, figure_of, legend, numbers, plot, text, times, wholes, x_ticks
from pipeline.report.stage_lines import CENSUS, DAMAGED, UNIT, found_damage, speed
from pipeline.report.tables import duration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COLUMNS = ("stage", "state", "of", "items", "cached", "to do", "done", "tasks", "attempts", "failed", "waited", "took")
FEWEST = 3  # points of a plot


def stages(facts: Mapping[str, Any]) -> Html:
    """Return the time line, and a row for each stage."""
    told = facts["stages"]
    begun = {stage["name"] for stage in told}
    rows = [_row(stage, facts["time"]["to"]) for stage in told]
    rows += [_later(name) for name in facts["run"]["planned"] if name not in begun]
    drawn = timeline(facts) if told else note("no stage has begun")
    shown = table(COLUMNS, rows)
    return section("stages", "Stages", drawn, shown, tag("div", *map(_story, told), class_="stories"))


def _later(name: str) -> list[Any]:
    """Return the row of a stage that has not begun."""
    state = Cell(badge("not begun"), "not begun", is_number=False)
    return [tag("b", name), state, f"{UNIT[name]}s", *(number(None) for _ in COLUMNS[3:])]


def _row(stage: Mapping[str, Any], now: float) -> list[Any]:
    until = stage["ended_at"] or now
    first = stage["first_task_at"]
    state = DAMAGED if found_damage(stage) else stage["state"]
    return [
        tag("b", stage["name"]),
        Cell(badge(state), state, is_number=False),
        f"{UNIT[stage['name']]}s",
        *(count(stage[name]) for name in ("items", "cached", "missing", "items_done", "tasks", "attempts", "failed")),
        time_cell(max(0.0, first - stage["started_at"]) if first else None),
        time_cell(max(0.0, until - stage["started_at"]) if stage["started_at"] else None),
    ]


def _story(stage: Mapping[str, Any]) -> Html:
    """Return what came of a stage, in words."""
    lines = [*_so_far(stage), *stage["told"], *speed_of(stage)]
    if stage["census"]:
        lines += [line for line in CENSUS[stage["name"]](stage["census"]) if isinstance(line, str) and line]
    said = tag("ul", *(tag("li", line.strip()) for line in lines)) if lines else ""
    warned = [note("warning: ", one, kind="warn") for one in stage["warnings"]]
    failed = [error_box(stage["error"])] if stage["error"] else []
    figures = _figures(stage)
    if not (said or warned or failed or figures):
        return Html("")
    return tag("div", tag("h3", stage["name"]), *failed, *warned, said, figures, class_="story")


def _so_far(stage: Mapping[str, Any]) -> list[str]:
    """Say what is known of a stage that has not ended."""
    if stage["ended_at"]:
        return []
    states = ", ".join(f"{times:,} {name}" for name, times in stage["task_states"].items())
    left = [f"about {duration(stage['left_s'])} left, if it goes on like this"] if stage["left_s"] else []
    waits = [f"waiting for: {', '.join(stage['waits_for'])}"] if stage["waits_for"] else []
    return [*([f"tasks: {states}"] if states else []), *waits, *left]


def speed_of(stage: Mapping[str, Any]) -> list[str]:
    """Say how fast an encoder was."""
    return [", ".join(speed(stage["measured"]))] if stage["measured"] else []


def _figures(stage: Mapping[str, Any]) -> Html:
    """Return the figures of an evaluation, and the sizes of a data set."""
    census = stage["census"] or {}
    if stage["name"] == "evaluate" and census.get("figures"):
        rows = [[name, number(value)] for name, value in census["figures"].items()]
        return table(("figure", f"split {census.get('split') or 'null'}"), rows, caption="what the model comes to")
    if stage["name"] == "scan" and census.get("sizes"):
        rows = [
            [name, *(number(spread[part]) for part in ("median", "p95", "max"))]
            for name, spread in census["sizes"].items()
            if spread["max"]
        ]
        return table(("of an item", "median", "95th percentile", "largest"), rows, caption="sizes of the data set")
    return Html("")


def throughput(facts: Mapping[str, Any]) -> Html:
    """Return how much each stage has worked through in a second, over time."""
    by_name = {one["stage"]: one for one in facts["efficiency"]}
    rows = [
        [
            stage["name"], f"{UNIT[stage['name']]}s", count(stage["items_done"]), number(_over_all(stage, facts)),
            number(by_name.get(stage["name"], {}).get("items_per_s")),
        ]
        for stage in facts["stages"]
        if stage["tasks"]
    ]  # fmt: skip
    if not rows:
        return section("throughput", "Throughput", note("no task has run: everything was there already"))
    shown = table(("stage", "of", "done", "a second, all tasks", "a second, one task"), rows)
    begun, pace = facts["time"]["from"], facts["time"]["pace"]
    plots = [_pace(name, points, begun) for name, points in pace.items() if len(points) >= FEWEST]
    epochs = _epochs(facts["training"])
    return section(
        "throughput", "Throughput", shown, tag("div", *plots, *epochs, class_="plots"),
        lead="What tasks worked through; what an attempt did again counts again in the plots.",
    )  # fmt: skip


def _over_all(stage: Mapping[str, Any], facts: Mapping[str, Any]) -> float | None:
    """Return items a second from a stage's first task to its end."""
    first, until = stage["first_task_at"], stage["ended_at"] or facts["time"]["to"]
    return stage["items_done"] / (until - first) if first and until > first and stage["items_done"] else None


def _pace(name: str, points: Sequence[tuple[float, float]], begun: float) -> Html:
    x, y = (
        times(points[0][0], points[-1][0], since=begun),
        numbers(0, max(value for _, value in points), f"{UNIT[name]}s/s"),
    )
    return plot(f"{name}: {UNIT[name]}s a second", x, y, [Line("", points, 0, "area steps")])


def _epochs(training: Mapping[str, Any] | None) -> list[Html]:
    """Return the speed of a training, epoch by epoch, and how much of the time it waited for data."""
    rows = training["epochs"] if training else []
    if len(rows) < FEWEST - 1:
        return []
    x = wholes(rows[0]["epoch"], rows[-1]["epoch"], "epoch")
    pace = [(one["epoch"], one["items_per_s"]) for one in rows]
    waits = [(one["epoch"], 100 * one["wait_share"]) for one in rows]
    told = [f"epoch {one['epoch']}: {figure(one['items_per_s'])} items/s" for one in rows]
    fast = plot(
        "train: items a second", x, numbers(0, max(b for _, b in pace) or 1, "items/s"), [Line("", pace, 0, "", told)]
    )
    idle = numbers(0, max(5.0, *(b for _, b in waits)), "% of the time")
    return [fast, plot("train: waited for data", x, idle, [Line("", waits, 3)])]


WIDE, NARROW = 920, 380
ROW, BAR = 46, 20
TOP, BOTTOM = 6, 42
MOST_MARKS = 240  # of what went wrong in a stage: pixels
KEY = (("waits for its first task", "wait"), ("runs", "run"), ("tasks at once", "busy"), ("an attempt fails", "fail"))


def timeline(facts: Mapping[str, Any]) -> Html:
    """Return the time line in two widths, of which the style sheet shows the one that fits."""
    drawn = [_drawn(facts, WIDE, "wide"), _drawn(facts, NARROW, "narrow")]
    return figure_of("Stages over time", joined(drawn), legend(KEY), css="plot timeline")


def _drawn(facts: Mapping[str, Any], width: int, css: str) -> Html:
    stages: Sequence[Mapping[str, Any]] = facts["stages"]
    left = 84 if width == WIDE else 70
    begun, end = facts["time"]["from"], facts["time"]["to"]
    x = times(begun, end, since=begun, most=9 if width == WIDE else 4)
    height = TOP + ROW * len(stages) + BOTTOM
    bottom = height - BOTTOM
    parts = [*_grid(x, left, width - 8, bottom), *x_ticks(x, left, width - 8, bottom)]
    parts.append(tag("line", x1=left, x2=width - 8, y1=bottom, y2=bottom, class_="axis"))
    parts.append(text(width - 8, bottom + 35, x.unit, "end", "unit"))
    for row, stage in enumerate(stages):
        parts += _timeline_row(facts, stage, x, (left, width - 8), TOP + row * ROW)
    label = "when each stage ran"
    return tag(
        "svg", tag("title", label), *parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=label, class_=css
    )


def _grid(x: Axis, left: float, right: float, bottom: float) -> list[Html]:
    places = [f"{x.place(value, left, right):.1f}" for value, _ in x.ticks]
    return [tag("line", x1=at, x2=at, y1=TOP, y2=bottom, class_="grid") for at in places]


def _timeline_row(
    facts: Mapping[str, Any], stage: Mapping[str, Any], x: Axis, ends: tuple[float, float], top: float
) -> list[Html]:
    """Return a stage's bar, its tasks at once beneath, and marks where attempts failed."""
    until = stage["ended_at"] or facts["time"]["to"]
    begun, first = stage["started_at"], min(stage["first_task_at"] or until, until)
    said = f"{stage['name']}: {stage['state']}, {duration(max(0.0, until - begun))}"
    parts = [text(ends[0] - 8, top + 19, stage["name"], "end", "name")]
    if stage["tasks"]:
        parts.append(_bar(x, ends, (begun, first), top + 4, "bar wait", f"{stage['name']}: waits for its first task"))
    else:
        first = begun
    parts.append(_bar(x, ends, (first, until), top + 4, f"bar run {stage['state']}", said))
    parts.append(_busy(facts["time"]["at_once"].get(stage["name"], ()), x, ends, top + 4 + BAR + 14))
    failed = [one for one in facts["time"]["failures"] if one["stage"] == stage["name"]]
    return [*parts, *(_mark(one, x, ends, top) for one in failed[:MOST_MARKS])]


def _bar(x: Axis, ends: tuple[float, float], span: tuple[float, float], top: float, css: str, said: str) -> Html:
    start, stop = (x.place(at, *ends) for at in span)
    if stop - start <= 0 and "wait" in css:
        return Html("")
    return tag(
        "rect", tag("title", said), x=f"{start:.1f}", y=f"{top:.1f}", width=f"{max(2.0, stop - start):.1f}",
        height=BAR, rx=3, class_=css,
    )  # fmt: skip


def _busy(counts: Sequence[tuple[float, int]], x: Axis, ends: tuple[float, float], base: float) -> Html:
    """Return how many tasks ran at once, as a silhouette as high as the most there were."""
    most = max((count for _, count in counts), default=0)
    if most == 0:
        return Html("")
    words, before = [f"M{ends[0]:.1f} {base}"], 0
    for at, running in [*counts, (x.high, 0)]:
        if running != before:
            words.append(f"H{x.place(at, *ends):.1f}V{base - 12 * running / most:.1f}")
            before = running
    said = f"at most {most:,} at once"
    return tag("path", tag("title", said), d="".join([*words, "Z"]), class_="busy")


def _mark(one: Mapping[str, Any], x: Axis, ends: tuple[float, float], top: float) -> Html:
    at = x.place(one["at"], *ends)
    said = f"{one['times']:,} × {one['cause']}"
    way = f"M{at - 4:.1f} {top}H{at + 4:.1f}L{at:.1f} {top + 8}Z"
    return tag("path", tag("title", said), d=way, class_="fail")
