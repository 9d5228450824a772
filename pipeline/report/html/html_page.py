"""The whole page: one file that needs nothing else, and that a browser lets do nothing else."""

from __future__ import annotations

import base64
import hashlib
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.journal.active_runs import GOING_ON
from pipeline.report.compared import hours, spread
from pipeline.report.html import run_plots
from pipeline.report.html.plots import figure, moment, stage_drawing, tag
from pipeline.report.stage_lines import CENSUS, DAMAGED, found_damage, speed_lines, state_of_stage, unit_of
from pipeline.report.tables import TEXT_MOST, clip, plural
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipeline.report.compared import Comparison
    from pipeline.report.facts import StageUse, Suggested
    from pipeline.report.html.run_facts import PageFacts, StageFacts, TrainingFacts

HERE = Path(__file__).parent
UNKNOWN = "–"
SHORT = 24  # characters: a cell with more of them is kept wide enough to be read
ERROR_MOST = 10 * TEXT_MOST
NEXT = "\n  next: "
JUDGING = ("scan", "embed", "graph")  # stages that judge the items of a data set


def page(facts: PageFacts) -> str:
    """Return the page of a run."""
    return _environment().get_template("page.html").render(facts=facts, run=facts.run.status)


def compared_page(shown: Comparison) -> str:
    """Return the page of trainings beside each other."""
    return _environment().get_template("compared.html").render(shown=shown)


@cache
def _environment() -> Environment:
    """Return the jinja2 environment of the pages: text is escaped, and cut where it is long."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else clip(str(value)),
    )
    environment.filters |= {
        "bytes": lambda value: number_cell(value, format_bytes),
        "code": lambda text: _cell(tag("code", clip(text)) if text else "", text),
        "count": lambda value: number_cell(value, "{:,.0f}".format),
        "error": _error,
        "figure": lambda value: number_cell(value, figure),
        "hours": lambda value: number_cell(value, hours),
        "long": lambda text: _cell(tag("div", clip(text) or UNKNOWN, class_="long"), text),
        "long_code": lambda text: _cell(tag("div", tag("code", clip(text)), class_="long") if text else UNKNOWN, text),
        "moment": moment,
        "moment_cell": lambda at: number_cell(at or None, moment),
        "percent": lambda share: number_cell(share, "{:.0%}".format),
        "plural": plural,
        "size": format_bytes,
        "span": lambda seconds: number_cell(seconds, format_seconds),
        "state": lambda word: _cell(badge(word), word),
        "text": lambda text: _cell(clip(str(text)), None),
        "badge": badge,
        "badged": lambda word, kind: _cell(badge(word, kind), word),
    }
    environment.globals |= {
        "spread": spread,
        "css": _file("page.css"),
        "js": _file("page.js"),
        "css_digest": _digest("page.css"),
        "js_digest": _digest("page.js"),
        "goes_on": lambda run: run.state in GOING_ON,
        "judging": JUDGING,
        "numeric": lambda names: [f"#{name}" for name in names],
        "overview": overview,
        "plots": run_plots,
        "ratio": lambda measured, asked: measured / asked if measured and asked else None,
        "setting": typed_setting,
        "speed_over_all": speed_over_all,
        "stage_drawing": stage_drawing,
        "state_of_run": state_of_run,
        "state_of_stage": state_of_stage,
        "story": story_lines,
        "unit_of": unit_of,
    }
    return environment


@cache
def _file(name: str) -> Markup:
    """Return our style sheet or script unescaped: neither contains a closing tag."""
    return Markup((HERE / name).read_text(encoding="utf-8"))  # noqa: S704


def _digest(name: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(_file(name).encode()).digest()).decode()}"


def _cell(shown: str, by: str | None) -> Markup:
    """Return a table cell of text; `by` is the value it is sorted by, where that differs from its text."""
    css = "words" if len(by or shown) > SHORT else ""
    attributes = {} if by is None else {"data_v": clip(by)}
    return tag("td", shown, class_=css, **attributes)


def number_cell(value: float | None, form: Any) -> Markup:
    """Return a table cell with a number; an unknown one is sorted last."""
    if value is None or not math.isfinite(value):
        return tag("td", UNKNOWN, class_="n", data_v="")
    return tag("td", form(value), class_="n", data_v=value)


def badge(word: str, kind: str = "") -> Markup:
    """Return a word in a box of its colour."""
    return tag("span", word, class_=f"badge {kind or word.split()[0]}")


def _error(error: str) -> Markup:
    """Show an error, with what to do next set apart."""
    error = clip(error, ERROR_MOST)
    problem, _, command = error.rpartition(NEXT) if NEXT in error else (error, "", "")  # a task's own comes before
    next_step = tag("p", tag("b", "Next: "), tag("code", command)) if command else ""
    return tag("div", tag("pre", problem), next_step, class_="note bad", role="alert")


def state_of_run(facts: PageFacts) -> str:
    """Return the state of the run, or that a validation found damage."""
    status = facts.run.status
    return DAMAGED if any(map(found_damage, status.stages.values())) else status.state.value


def story_lines(stage: StageFacts) -> Iterator[str]:
    """Yield sentences about a stage: its tasks while it goes on, its speed, its results."""
    status = stage.status
    if not status.ended_at:
        if states := ", ".join(f"{times:,} {name}" for name, times in status.task_states().items()):
            yield f"tasks: {states}"
        if stage.waits_for:
            yield f"waiting for: {', '.join(stage.waits_for)}"
        if stage.left_s:
            yield f"about {format_seconds(stage.left_s)} left, if it goes on like this"
    yield from stage.waits
    yield from stage.so_far
    yield from speed_lines(status)
    if stage.census:
        yield from (line.strip() for line in CENSUS[status.name](stage.census) if isinstance(line, str) and line)


def speed_over_all(stage: StageFacts, now: float) -> float | None:
    """Return items per second from a stage's first task to its end."""
    first, until, done = stage.first_task_at, stage.status.ended_at or now, stage.status.items_done
    return done / (until - first) if first and until > first and done else None


def typed_setting(suggested: Suggested) -> str:
    """Return a suggestion as KEY=VALUE for `--set`."""
    name, value = suggested.key.rpartition(".")[2], suggested.value
    shown = f"{value >> 20}MiB" if name == "mem" else f"{value // 60}m" if name == "time" else f"{value}"
    return f"{suggested.key}={shown}"


# The figures that matter most


class Tile(NamedTuple):
    """A figure of the overview."""

    name: str
    value: str
    more: str = ""  # the small print below it
    kind: str = ""  # CSS class: `bad`, `warn` or none


def overview(facts: PageFacts) -> Iterator[Tile]:
    """Yield the figures that matter most."""
    status, span = facts.run.status, facts.time
    begun = moment(span.begun, "began %Y-%m-%d %H:%M UTC")
    yield Tile("Took" if status.ended_at else "So far", format_seconds(span.end - span.begun), begun)
    planned = list(dict.fromkeys([*status.planned, *status.stages]))
    done = sum(stage.state.value == "done" for stage in status.stages.values())
    later = [name for name in planned if name not in status.stages]
    more = f"not begun: {', '.join(later)}" if later else ", ".join(planned)
    yield Tile("Stages done", f"{done} of {len(planned)}", more, "bad" if status.state.value == "failed" else "")
    yield from _items(facts)
    yield _attempts(facts)
    yield from _used(facts.uses)
    yield from _budget(facts)
    if facts.training and facts.training.newest:
        yield from _best(facts.training)


def _items(facts: PageFacts) -> Iterator[Tile]:
    """Yield how many items the newest stage that judged the data set accepted."""
    judged = [stage.census for stage in facts.stages if stage.status.name in JUDGING and stage.census]
    for census in judged[-1:]:
        rejected = census["items"] - census["accepted"]
        more = f"{rejected:,} rejected ({census['rejected_fraction']:.1%})"
        more += f", {census['undone']:,} not done" if census["undone"] else ""
        yield Tile("Items accepted", f"{census['accepted']:,}", more, "warn" if rejected else "")


def _attempts(facts: PageFacts) -> Tile:
    troubles = facts.troubles
    total = sum(stage.attempts for stage in facts.stages)
    more = "all of them ended well" if total else "none has ended"
    if troubles.total:
        memory = sum(times for (_, cause), times in troubles.causes.items() if cause in ("host_oom", "gpu_oom"))
        more = f"{troubles.total:,} did not end well" + (f", {memory:,} for memory" if memory else "")
    return Tile("Attempts at tasks", f"{total:,}", more, "bad" if troubles.open else "warn" if troubles.total else "")


def _used(uses: Sequence[StageUse]) -> Iterator[Tile]:
    """Yield the core hours of the run, and its highest use of host and GPU memory."""
    if not uses:
        return
    yield Tile("Core hours", hours(sum(use.core_hours for use in uses)), _busiest(uses))
    peak = max(uses, key=lambda use: use.peak_bytes or 0)
    if peak.peak_bytes:
        more = f"{peak.stage}, of {format_bytes(peak.asked_bytes)} asked for" if peak.asked_bytes else peak.stage
        yield Tile("Highest memory of a task", format_bytes(peak.peak_bytes), more)
    gpu = max(uses, key=lambda use: use.gpu_peak_bytes or 0)
    if gpu.gpu_peak_bytes:
        yield Tile("Highest memory of a GPU", format_bytes(gpu.gpu_peak_bytes), gpu.stage)


def _budget(facts: PageFacts) -> Iterator[Tile]:
    """Yield what is left of the project's budget, where it has one."""
    if account := facts.account:
        unit, more = f"{account.budget.unit} hours", f"of {account.budget.hours:,g}, in all runs"
        more += f"; {hours(account.taken.held)} held by tasks in flight" if account.taken.held else ""
        yield Tile(f"Budget: {unit} left", hours(account.left), more, "warn" if account.is_low else "")


def _busiest(uses: Sequence[StageUse]) -> str:
    """Name the stage with the most core hours, and what its tasks finished, if any has ended well."""
    busiest = max(uses, key=lambda use: use.core_hours)
    done = f": {plural(busiest.items, unit_of(busiest.stage))}" if busiest.items else ""
    return f"most for {busiest.stage}{done}"


def _best(training: TrainingFacts) -> Iterator[Tile]:
    """Yield how many epochs are trained, and the watched figure of the best one."""
    name, trained = training.monitor, training.newest[-1].epoch
    yield Tile("Epochs", f"{trained:,} of {training.prepared.epochs:,}", "trained so far")
    known = {epoch.epoch: value for epoch in training.epochs if (value := epoch.validation.get(name)) is not None}
    if known:
        best = (min if training.lower_is_better else max)(known, key=known.__getitem__)
        yield Tile(f"Best {name}", figure(known[best]), f"epoch {best:,}")
