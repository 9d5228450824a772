"""The HTML reports: each is one file that loads nothing and that a browser allows nothing else."""

from __future__ import annotations

import base64
import hashlib
import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from pipeline.cluster.verdict import Cause
from pipeline.journal.run_status import GOING_ON, State
from pipeline.report.compared import hours, spread
from pipeline.report.html import run_plots
from pipeline.report.html.plots import figure, moment, tag
from pipeline.report.html.run_facts import STEP_OOM
from pipeline.report.run_summary import metrics, words_of
from pipeline.report.stage_lines import CENSUS, DAMAGED, found_damage, speed_lines, state_of_stage, unit_of
from pipeline.report.tables import TEXT_MOST, clip, plural
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.report.compared import Comparison
    from pipeline.report.html.run_facts import PageFacts, StageFacts

HERE = Path(__file__).parent
UNKNOWN = "–"
SHORT = 24  # characters: a cell with more of them is kept wide enough to be read
ERROR_MOST = 10 * TEXT_MOST
NEXT = "\n  next: "
OUT_OF_MEMORY = (Cause.HOST_OOM.value, Cause.GPU_OOM.value, STEP_OOM)
JUDGING = ("scan", "embed", "graph")  # stages that judge the items of a data set


def page(facts: PageFacts) -> str:
    """Return the HTML report of a run."""
    return _environment().get_template("page.html").render(facts=facts, run=facts.run.status)


def compared_page(shown: Comparison) -> str:
    """Return the HTML report that compares trainings."""
    return _environment().get_template("compared.html").render(shown=shown)


@cache
def _environment() -> Environment:
    """Return the jinja2 environment of the reports: text is escaped, and cut where it is long."""
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
        "numeric": lambda names: [f"#{name}" for name in names],
        "plots": run_plots,
        "ratio": lambda measured, asked: measured / asked if measured and asked else None,
        "state_of_run": state_of_run,
        "state_of_stage": state_of_stage,
        "story": story_lines,
        "unit_of": unit_of,
        "verdict": verdict,
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
    return DAMAGED if any(map(found_damage, status.stages.values())) else words_of(status.state)


def story_lines(stage: StageFacts) -> Iterator[str]:
    """Yield sentences about a stage: its tasks while it goes on, its speed, its results."""
    status = stage.status
    if not status.ended_at:
        if states := ", ".join(f"{times:,} {name}" for name, times in status.task_states().items()):
            yield f"tasks: {states}"
        if stage.waits_for:
            yield f"waiting for: {', '.join(stage.waits_for)}"
        if stage.left_s:
            yield f"about {format_seconds(stage.left_s)} left"
    yield from stage.waits
    yield from stage.so_far
    yield from speed_lines(status)
    if stage.census:
        yield from (line.strip() for line in CENSUS[status.name](stage.census) if isinstance(line, str) and line)


# The verdict


def verdict(facts: PageFacts) -> str:
    """Return the outcome of a run in one sentence."""
    status = facts.run.status
    took = format_seconds(facts.time.end - facts.time.begun)
    failed = "".join(f" in {stage.name}" for stage in status.stages.values() if stage.state is State.FAILED)
    heads = {
        State.DONE: f"Done in {took}",
        State.FAILED: f"Failed{failed} after {took}",
        State.STOPPED: f"Stopped after {took}",
        State.ABANDONED: f"Orphaned after {took}",
        State.RUNNING: f"Running for {took}",
        State.WAITING: "Not started yet",
    }
    parts = (_problem, _progress, _metrics, _memory, _survived, _items)
    clauses = [clause for part in parts for clause in part(facts)]
    return f"{heads[status.state]}{': ' if clauses else ''}{'; '.join(clauses)}."


def _problem(facts: PageFacts) -> Iterator[str]:
    """Yield the first line of the run's error, without the place that it names first."""
    if error := facts.run.status.error:
        first = error.splitlines()[0]
        yield first.partition(": ")[2] or first
    if state_of_run(facts) == DAMAGED:
        yield DAMAGED


def _progress(facts: PageFacts) -> Iterator[str]:
    """Yield how far the running stages are; of a finished run, whether all of it was cached."""
    status = facts.run.status
    if status.state is State.RUNNING:
        for stage in (stage for stage in facts.stages if not stage.status.ended_at):
            name, row = stage.status.name, stage.status
            left = f", about {format_seconds(stage.left_s)} left" if stage.left_s else ""
            yield f"{name} {row.items_done:,} of {plural(row.missing, unit_of(name, row.counts()))}{left}"
        yield from (f"planning {name}" for name in facts.time.planning if name not in status.stages)
    elif facts.stages and not any(stage.status.tasks for stage in facts.stages):
        yield "everything was cached"


def _metrics(facts: PageFacts) -> Iterator[str]:
    """Yield the monitored metric of the best epoch and of the evaluation, or of the best point of a sweep."""
    yield from metrics(facts.run.status)
    if (shown := facts.compared) and (best := shown.best.get(shown.models[0].folder)):
        yield f"best {shown.metric} {figure(best[1])} ({shown.called(shown.models[0])}, of {len(shown.models)} points)"


def _memory(facts: PageFacts) -> Iterator[str]:
    """Yield the peak memory of the training, or of the largest stage, and the highest peak of a GPU."""
    measured = [use for use in facts.uses if use.peak_bytes]
    for use in sorted(measured, key=lambda use: (use.stage == "train", use.peak_bytes))[-1:]:
        yield f"peak memory {format_bytes(use.peak_bytes or 0)} of {format_bytes(use.asked_bytes or 0)} requested"
    for use in sorted((use for use in facts.uses if use.gpu_peak_bytes), key=lambda use: use.gpu_peak_bytes or 0)[-1:]:
        yield f"GPU peak {format_bytes(use.gpu_peak_bytes or 0)}"


def _survived(facts: PageFacts) -> Iterator[str]:
    """Yield how many out-of-memory errors and other failures the run survived."""
    failures = [failure for failure in facts.time.failures if failure.survived]
    memory = sum(failure.times for failure in failures if failure.cause in OUT_OF_MEMORY)
    other = sum(failure.times for failure in failures) - memory
    yield from [f"survived {memory:,} out-of-memory"] if memory else []
    yield from [f"survived {plural(other, 'other failure' if memory else 'failure')}"] if other else []


def _items(facts: PageFacts) -> Iterator[str]:
    """Yield how many records were rebuilt, and how many items the last stage that judged the data set rejected."""
    rebuilt = [sum(s.census["whole"].values()) for s in facts.stages if s.status.name == "regenerate" and s.census]
    yield from (f"{plural(count, 'record')} rebuilt" for count in rebuilt if count)
    judged = [stage.census for stage in facts.stages if stage.status.name in JUDGING and stage.census]
    for census in judged[-1:]:
        rejected = census["items"] - census["accepted"]
        yield from [] if facts.training else [f"{plural(census['accepted'], 'item')} usable"]
        yield from [f"{plural(rejected, 'item')} rejected"] if rejected else []
