"""Memory predicted against measured, of hosts and GPUs, by stage and by epoch; and what was used of what was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.report.html.html_text import (  # fmt: skip
    Cell,
    Html,
    bytes_cell,
    code_cell,
    count,
    hours,
    left_out,
    note,
    number,
    percent_cell,
    section,
    table,
    tag,
    time_cell,
)
from pipeline.report.html.plots import Axis, Line, figure_of, legend, plot, sizes, text, wholes, x_ticks
from pipeline.report.tables import duration, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

USED = (
    "stage",
    "tasks",
    "attempts",
    "memory",
    "peak",
    "used",
    "cores",
    "used",
    "GPUs",
    "limit",
    "longest",
    "core hours",
)
BY_STAGE = (
    "stage", "predicted", "given first", "given at most", "peak", "median peak", "peak/predicted",
    "GPU predicted", "GPU peak", "where the first is from",
)  # fmt: skip
NO_GPU = "There was no GPU: what was measured of an epoch is the resident memory of a process."


def memory(facts: Mapping[str, Any]) -> Html:
    """Return the part of the page on memory."""
    used, training = facts["efficiency"], facts["training"]
    if not used and not (training and training["rows"]):
        return section("memory", "Memory", note("nothing was measured yet: no task has ended"))
    hosts = [Use(one["stage"], one["asked_bytes"], one["planned_bytes"], one["peak_bytes"]) for one in used]
    gpus = [_gpu(one, training) for one in used if one["gpus"] or one["gpu_peak_bytes"]]
    plots = [memory_bars("Host memory of a task, by stage", hosts), memory_bars("GPU memory, by stage", gpus)]
    plots += _over_epochs(training)
    lead = "Predicted before anything ran, or as the first attempts asked for; measured is the highest of all attempts."
    return section(
        "memory", "Memory: predicted and measured", tag("div", *plots, class_="plots"), *_notes(used, training),
        _by_stage(used, training), *_by_epoch(training), lead=lead,
    )  # fmt: skip


def _gpu(one: Mapping[str, Any], training: Mapping[str, Any] | None) -> Use:
    """Return a stage's use of GPUs: only of training somebody predicts it, others fill what there is."""
    planned = training["planned"] if training and one["stage"] == "train" else None
    limit = planned["limit_bytes"] if planned else None
    return Use(one["stage"], limit, _reserved(planned) if planned else None, one["gpu_peak_bytes"])


def _reserved(planned: Mapping[str, Any]) -> int | None:
    return max((one["reserved_bytes"] for one in planned["stretches"]), default=None)


def _notes(used: Sequence[Mapping[str, Any]], training: Mapping[str, Any] | None) -> list[Html]:
    """Say what the figures do not compare."""
    said = [f"{one['stage']}: {one['note']}" for one in used if one["note"]]
    if training and training["rows"] and not training["on_gpu"]:
        said.append(NO_GPU)
    if any(one["gpus"] and one["stage"] == "embed" for one in used):
        said.append("embed: batches fill what a GPU has; nothing is predicted.")
    return [note(one) for one in said]


def _by_stage(used: Sequence[Mapping[str, Any]], training: Mapping[str, Any] | None) -> Html:
    rows = []
    for one in used:
        gpu = _gpu(one, training)
        on_gpu = bool(one["gpus"] or one["gpu_peak_bytes"])
        rows.append([
            tag("b", one["stage"]),
            *(bytes_cell(one[name]) for name in
              ("planned_bytes", "first_bytes", "asked_bytes", "peak_bytes", "median_peak_bytes")),
            _ratio(one["peak_bytes"], one["planned_bytes"]),
            bytes_cell(gpu.predicted_bytes if on_gpu else None), bytes_cell(one["gpu_peak_bytes"]), one["why"],
        ])  # fmt: skip
    return table(BY_STAGE, rows, caption="memory of the tasks of each stage") if rows else Html("")


def _ratio(measured: float | None, predicted: float | None) -> Cell:
    return percent_cell(measured / predicted if measured and predicted else None)


def predicted_of(training: Mapping[str, Any], epoch: int) -> int | None:
    """Return what an epoch was predicted to take: of a GPU, or without one of a node with a single process."""
    planned = training["planned"]
    if not training["on_gpu"]:
        return int(planned["mem_bytes"]) if planned["ranks"] == 1 else None
    within = [one["reserved_bytes"] for one in planned["stretches"] if epoch <= one["until"]]
    return within[0] if within else _reserved(planned)


def _over_epochs(training: Mapping[str, Any] | None) -> list[Html]:
    """Return memory over the epochs of a training."""
    rows = training["epochs"] if training else []
    if training is None or len(rows) < 2:
        return []
    x = wholes(rows[0]["epoch"], rows[-1]["epoch"], "epoch")
    lines = [
        Line(said, [(one["epoch"], one[name]) for one in rows], colour, "", [f"{size(one[name])}" for one in rows])
        for said, name, colour in (("peak", "peak_bytes", 0), ("live at its end", "allocated_bytes", 1))
    ]
    predicted = [(one["epoch"], predicted_of(training, one["epoch"])) for one in rows]
    limit = training["planned"]["limit_bytes"]
    lines += (
        [Line("predicted", [(a, b) for a, b in predicted if b], 3, "dashed")] if any(b for _, b in predicted) else []
    )
    if training["on_gpu"]:
        lines.append(Line("limit", [(one["epoch"], limit) for one in rows], 5, "dashed"))
    most = max(value for line in lines for _, value in line.points)
    of = "GPU" if training["on_gpu"] else "resident"
    return [plot(f"train: {of} memory by epoch", x, sizes(most), lines)]


def _by_epoch(training: Mapping[str, Any] | None) -> list[Html]:
    """Return a row for each epoch."""
    if not training or not training["rows"]:
        return []
    columns = ("epoch", "predicted", "live at its end", "held at its end", "peak", "peak/predicted", "out of memory")
    rows = []
    for one in training["rows"]:
        predicted = predicted_of(training, one["epoch"])
        held = (bytes_cell(one[name]) for name in ("allocated_bytes", "reserved_bytes", "peak_bytes"))
        rows.append(
            [
                count(one["epoch"]),
                bytes_cell(predicted),
                *held,
                _ratio(one["peak_bytes"], predicted),
                count(one["ooms"]),
            ]
        )
    more = left_out(training["known_epochs"] - len(rows), "epochs before these", f"{training['folder']}/epochs.jsonl")
    kind = "GPU" if training["on_gpu"] else "process"
    return [table(columns, rows, caption=f"memory of a {kind} by epoch"), more]


def efficiency(facts: Mapping[str, Any]) -> Html:
    """Return what was used of what was asked for, and what to ask for next time."""
    used = facts["efficiency"]
    if not used:
        return section("efficiency", "Efficiency", note("nothing was measured yet: no task has ended"))
    suggested = [one for stage in used for one in stage["suggested"]]
    rows = [[code_cell(_setting(one)), _value(one, "was"), one["why"]] for one in suggested]
    lead = "For the next run; mem: auto asks for its part by itself."
    asks = (
        table(("setting", "was", "why"), rows, caption="suggested requests")
        if rows
        else note("no other requests are suggested")
    )
    return section(
        "efficiency", "Efficiency", table(USED, map(_use, used), caption="used of what was asked for"), asks, lead=lead
    )


def _use(one: Mapping[str, Any]) -> list[Any]:
    return [
        tag("b", one["stage"]), count(one["tasks"]), count(one["attempts"]), bytes_cell(one["asked_bytes"]),
        bytes_cell(one["peak_bytes"]), percent_cell(one["mem_used"]), count(one["cpus"]), percent_cell(one["cpu_used"]),
        count(one["gpus"]), time_cell(one["limit_s"]), time_cell(one["longest_s"]),
        number(one["core_hours"], hours(one["core_hours"])),
    ]  # fmt: skip


def _setting(one: Mapping[str, Any]) -> str:
    """Return a suggestion as it is typed behind `--set`."""
    name, value = one["key"].rpartition(".")[2], one["value"]
    said = f"{value >> 20}MiB" if name == "mem" else f"{value // 60}m" if name == "time" else f"{value}"
    return f"{one['key']}={said}"


def _value(one: Mapping[str, Any], which: str) -> Cell:
    name, value = one["key"].rpartition(".")[2], one[which]
    return number(value, size(value) if name == "mem" else duration(value) if name == "time" else f"{value:,}")


WIDTH, LEFT, RIGHT = 440, 70, 12
ROW, BAR, TOP, BOTTOM = 34, 16, 6, 42
KEY = (("given", "asked"), ("measured peak", "used"), ("predicted", "mark"))


@dataclass(frozen=True, slots=True)
class Use:
    """What something was given, was predicted to take, and took; None is what nobody knows."""

    name: str
    asked_bytes: float | None
    predicted_bytes: float | None
    used_bytes: float | None


def memory_bars(title: str, uses: Sequence[Use]) -> Html:
    """Return the bars of all that have a figure."""
    most = max((one or 0 for use in uses for one in (use.asked_bytes, use.predicted_bytes, use.used_bytes)), default=0)
    if not most:
        return Html("")
    x, height = sizes(most, most=4), TOP + ROW * len(uses) + BOTTOM
    bottom, right = height - BOTTOM, WIDTH - RIGHT
    parts = [tag("line", x1=f"{at:.1f}", x2=f"{at:.1f}", y1=TOP, y2=bottom, class_="grid") for at in _grid(x, right)]
    parts += [*x_ticks(x, LEFT, right, bottom), text(right, bottom + 35, x.unit, "end", "unit")]
    for row, use in enumerate(uses):
        top = TOP + row * ROW + (ROW - BAR) / 2
        parts.append(text(LEFT - 8, top + 12.5, use.name, "end", "name"))
        parts += [_bar(x, one, top, css) for css, one in (("asked", use.asked_bytes), ("used", use.used_bytes)) if one]
        if use.predicted_bytes:
            at = x.place(use.predicted_bytes, LEFT, right)
            said = f"predicted {size(use.predicted_bytes)}"
            way = f"M{at:.1f} {top - 4:.1f}V{top + BAR + 4:.1f}"
            parts.append(tag("path", tag("title", said), d=way, class_="mark"))
        if not use.used_bytes:
            parts.append(text(LEFT + 6, top + 12.5, "not measured", "start", "tick"))
    drawn = tag("svg", tag("title", title), *parts, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title)
    return figure_of(title, drawn, legend(KEY))


def _grid(x: Axis, right: float) -> list[float]:
    return [x.place(value, LEFT, right) for value, _ in x.ticks]


def _bar(x: Axis, value: float, top: float, css: str) -> Html:
    end = x.place(value, LEFT, WIDTH - RIGHT)
    inset = 0 if css == "asked" else 3
    said = f"{'given' if css == 'asked' else 'measured peak'} {size(value)}"
    return tag(
        "rect", tag("title", said), x=LEFT, y=f"{top + inset:.1f}", width=f"{max(1.0, end - LEFT):.1f}",
        height=BAR - 2 * inset, rx=2, class_=f"mem {css}",
    )  # fmt: skip
