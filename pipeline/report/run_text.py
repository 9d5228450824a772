"""A run as text: a line for each stage, warnings, its end; and a report with every detail."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from pipeline.cluster.verdict import Cause
from pipeline.command_line import Command
from pipeline.journal.run_status import GOING_ON, State
from pipeline.journal.run_view import NO_SUPERVISOR
from pipeline.records import FROM_STEP
from pipeline.report.stage_lines import (
    counted,
    found_damage,
    memory_line,
    progress_lines,
    rejection_table,
    result_lines,
    unit_of,
    wait_lines,
)
from pipeline.report.tables import NO_TERMINAL, counts_text, plural, text_table
from pipeline.units import format_bytes, short_bytes, short_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.journal.attempts import Attempt
    from pipeline.journal.run_status import RunStatus, StageStatus
    from pipeline.journal.run_view import RunView

MARKS = {
    State.DONE: ("✓", "green"),
    State.RUNNING: ("⠹", "cyan"),
    State.WAITING: ("·", "dim"),
    State.FAILED: ("✗", "bold red"),
    State.ABANDONED: ("✗", "bold red"),
    State.STOPPED: ("!", "yellow"),
}
MEMORY, SOON = "planning memory…", "planning…"
PLANNED = ("train", "evaluate", "predict")  # stages with planned memory
NAME, BAR, RESULT, TOOK = 10, 12, 40, 7  # columns
WITH_BAR = 76  # least columns of a line with a bar
RESULTS = {"Model": ("train", "folder"), "Predictions": ("predict", "folder"), "Report": ("validate", "report")}
CAUSES = {
    Cause.HOST_OOM: "out of memory",
    Cause.GPU_OOM: "out of GPU memory",
    Cause.TIMEOUT: "at the time limit",
    Cause.NODE: "on a node that failed",
    Cause.CRASHED: "crashed",
    Cause.LOST: "with unknown final state",
}
OUT_OF_MEMORY = "out of memory"  # start of a warning that the final result repeats
TABLE_COLUMNS = 64  # columns that the table needs
AT_A_GLANCE = ("STAGE", "STATE", "DONE", "CACHED", "TIME", "PEAK/REQUESTED")
STORIES_SHOWN = 5
TASKS_NAMED = 5


@dataclass(frozen=True, slots=True)
class Row:
    """A stage in a line."""

    state: State
    name: str
    parts: tuple[str, ...] = ()
    took: str = ""
    share: float | None = None  # done share of a running stage
    since: float = 0.0  # start of its present activity, for a clock; 0: no clock

    def line(self, width: int, now: float, mark: str = "") -> Text:
        """Return the line, cut to a width by leaving out parts."""
        parts = list(self.parts)
        if self.since and parts:
            parts[-1] += f" {short_seconds(max(0.0, now - self.since))}"
        head = f"{self.name:<{NAME - 1}} "
        room = width - len(head) - 2
        bar = f"{_bar(self.share)}  " if self.share is not None and width >= WITH_BAR else ""
        text = bar + joined(
            parts, ", " if self.state is State.RUNNING else " · ", room - len(bar) - TOOK * bool(self.took)
        )
        if self.took:
            text = f"{text:<{max(0, min(RESULT, room - TOOK))}}{self.took:>{TOOK}}"
        symbol, style = MARKS[self.state]
        is_dim = self.state is State.WAITING
        return Text.assemble((f"{mark or symbol} ", style), (head, "bold"), (text, "dim" if is_dim else ""))


def _bar(share: float) -> str:
    full = int(share * BAR)
    return "━" * full + "─" * (BAR - full)


def joined(parts: Sequence[str], mark: str, room: int) -> str:
    """Join as many parts as fit; the first and the last have priority."""
    kept = list(parts)
    while len(kept) > 1 and len(mark.join(kept)) > room:
        kept.pop(max(1, len(kept) - 2))
    return mark.join(kept)


def rows_of(run: RunView, pace: Mapping[str, float]) -> list[Row]:
    """Return a row for each stage of a run; if none runs, the next is being planned."""
    status, rows = run.status, list[Row]()
    for stage in status.in_order():
        rows.append(_row(stage, run, pace.get(stage.name, 0.0)))
    begun = max((stage.ended_at or stage.started_at for stage in status.stages.values()), default=status.started_at)
    is_next = status.state is State.RUNNING and all(row.state is State.DONE for row in rows)
    for name in status.planned:
        if name not in status.stages:
            rows.append(planning_row(name, begun) if is_next else waiting_row(name))
            is_next = False
    return rows


def waiting_row(name: str) -> Row:
    """Return the row of a stage that has not begun."""
    return Row(State.WAITING, name, ("waiting",))


def planning_row(name: str, since: float, words: str = "") -> Row:
    """Return the row of a stage that is being planned."""
    return Row(State.RUNNING, name, (words or (MEMORY if name in PLANNED else SOON),), since=since)


def _row(stage: StageStatus, run: RunView, pace: float) -> Row:
    took = short_seconds(stage.ended_at - stage.started_at) if stage.ended_at and stage.missing else ""
    if stage.state is State.RUNNING:
        return Row(State.RUNNING, stage.name, tuple(doing(stage, run, pace)), share=_share(stage))
    if stage.state is not State.DONE:
        counted = [f"{stage.items_done:,}/{stage.missing:,} {unit_of(stage.name, stage.counts())}s"][: stage.missing]
        return Row(stage.state, stage.name, (stage.state.word, *counted), took)
    return Row(State.FAILED if found_damage(stage) else State.DONE, stage.name, tuple(made(stage, run.status)), took)


def _share(stage: StageStatus) -> float | None:
    return min(1.0, stage.items_done / stage.missing) if stage.missing and stage.items_done else None


def made(stage: StageStatus, status: RunStatus) -> Iterator[str]:
    """Yield the results of an ended stage."""
    census, unit = stage.census or {}, unit_of(stage.name, stage.counts())
    scan = status.stages.get("scan")
    if stage.name == "scan" and census:
        yield f"{census['accepted']:,} usable"
        if rejected := census["items"] - census["accepted"]:
            yield f"{rejected:,} rejected"
    elif stage.name == "graph" and stage.cached and not stage.missing and scan and scan.missing and not scan.cached:
        yield f"{stage.cached:,} built during scan"
        return
    elif stage.name == "validate":
        indexes = stage.items - (shards := census.get("shards", 0))
        files = f"{plural(shards, 'shard')} and {indexes:,} {'index' if indexes == 1 else 'indexes'}"
        yield files if shards else plural(stage.items, unit)
        yield f"{census['summary']['findings']:,} damaged" if found_damage(stage) else "nothing damaged"
    elif stage.name == "regenerate":
        yield f"{plural(stage.items, 'record')} named by the list" if stage.items else "whatever is missing"
    else:
        yield from trials(stage)
        yield plural(stage.items - stage.refused, unit)
    if epochs := census.get("epochs"):
        yield plural(epochs, "epoch")
    if stage.cached:
        yield f"{stage.cached:,} cached" if stage.missing else "cached"


def trials(stage: StageStatus) -> Iterator[str]:
    """Yield the progress of a search and its best value."""
    if stage.search:
        ended = sum(trial.state is not State.RUNNING for trial in stage.asked.values())
        yield f"{ended:,}/{stage.search['trials']:,} trials"
    if best := stage.best_trial:
        yield f"best {stage.search['monitor']} {best.value:.4g}"


def doing(stage: StageStatus, run: RunView, pace: float) -> Iterator[str]:
    """Yield the activity of a running stage, or its wait."""
    states, unit, done = stage.task_states(), unit_of(stage.name, stage.counts()), stage.items_done
    reasons = run.waits_for(stage)
    if reasons and not states.get(State.RUNNING):
        yield f"waiting in the queue: {', '.join(reasons)}"
        if delayed := run.delayed(stage):
            yield delayed
        return
    yield from trials(stage)
    yield f"{done:,}/{stage.missing:,} {unit}s" if done else f"{plural(stage.missing, unit)} to do"
    if rejected := stage.reasons.total():
        yield f"{rejected:,} rejected"
    if pace > 0 and done:
        yield f"{pace:,.0f} {unit}s/s" if pace >= 10 else f"{pace:.2g} {unit}s/s"
    if (loss := stage.loss) is not None:
        yield f"loss {loss:.3g}"
    if reasons:
        yield f"{plural(states.get(State.WAITING, 0), 'task')} queued: {', '.join(reasons)}"
    left_s = stage.measured().get("left_s") or ((stage.missing - done) / pace if pace > 0 else run.left_s(stage))
    if left_s and done:
        yield f"about {short_seconds(left_s)} left"


def notes(stage: StageStatus) -> list[str]:
    """Return survived failures, then warnings."""
    survived = _out_of_memory(stage)
    warnings = [text for text in stage.warnings if not (survived and text.startswith(OUT_OF_MEMORY))]
    return [f"{stage.name}: {text}" for text in (*survived, *_restarts(stage), *_retries(stage), *warnings)]


def _out_of_memory(stage: StageStatus) -> list[str]:
    """Describe the steps at which a training ran out of memory, and the recovery."""
    said = [figures for figures in stage.figures.values() if figures.get("oom_step")]
    if not said:
        return []
    last, times = max(said, key=lambda figures: figures["oom_step"]), int(max(figures["ooms"] for figures in said))
    items = int(last["oom_items"])
    cut = f"micro-batch {items} → {-(-items // 2)}" if items > 1 else "one item did not fit"
    count = f" ({times:,} times so far)" if times > 1 else ""
    return [f"out of memory at step {int(last['oom_step']):,}{count}; {cut}, step repeated"]


def _restarts(stage: StageStatus) -> list[str]:
    """Describe the last restart of a training's processes in their job: reason, step and lost time."""
    if not stage.restarts:
        return []
    last = stage.restarts[-1]
    began = [figures[FROM_STEP] for figures in stage.figures.values() if FROM_STEP in figures]
    where = f" from step {int(max(began)):,}" if began else ""
    cost = f"{plural(len(stage.restarts), 'restart')}, {short_seconds(stage.lost_s)} lost"
    return [f"{last.reason.partition(chr(10))[0].partition(';')[0]}; continued in the same job{where} ({cost})"]


def _retries(stage: StageStatus) -> list[str]:
    """Describe failed attempts and the reactions; equal failures share a line."""
    failed = [attempt for attempt in stage.failures if attempt.cause is not Cause.CANCELLED]
    return [
        f"{stage.called(alike[0].task) if len(alike) == 1 else plural(len(alike), 'task')}{how}{then}"
        for (_, how, then), alike in failures_alike(stage, failed).items()
    ]


def failures_alike(stage: StageStatus, failed: Sequence[Attempt]) -> dict[tuple[int, str, str], list[Attempt]]:
    """Group attempts by number, failure and reaction."""
    alike: dict[tuple[int, str, str], list[Attempt]] = {}
    for attempt in failed:
        reason = attempt.reason.partition("\n")[0]
        how = f" {CAUSES.get(attempt.cause, attempt.cause.value.replace('_', ' '))}"
        if attempt.cause is Cause.CRASHED and reason:
            how = f": {reason.partition(';')[0]}"  # without figures
        task = stage.task(attempt.task)
        later = {ended.number: ended.ask for ended in task.ended} | ({task.attempt: task.ask} if task.ask else {})
        following, then = later.get(attempt.number + 1), "retried"
        if following is None:
            then = task.then.get(attempt.number) or reason
        elif following.mem_bytes > attempt.ask.mem_bytes:
            then = f"retried with {short_bytes(following.mem_bytes)}"
        elif following.shrink > attempt.ask.shrink:
            then = "retried with half the batch"
        alike.setdefault((attempt.number, how, f"; {then}"), []).append(attempt)
    return alike


def held_lines(run: RunView) -> list[str]:
    """Describe waits that need a person, with the command that helps; an orphaned run has its own text."""
    return wait_lines(wait for wait in run.stuck if wait.reason != NO_SUPERVISOR)


def ending(status: RunStatus, typed: Command, named: Sequence[str] = ()) -> list[str]:
    """Describe the end of a run: result, rejected items, places of results, and the next command.

    `named`: the run as it was typed, if it may not be the newest.
    """
    took = short_seconds(max(0.0, status.ended_at - status.started_at)) if status.started_at else "0s"
    if status.state is State.DONE and not any(stage.missing for stage in status.stages.values()):
        return [f"✓ Up to date: {plural(len(status.stages), 'stage')}, nothing to do."]
    places, about = list(_places(status)), _project(typed)
    resume = Command.of("resume", status.name).in_project(about)
    if status.state is State.DONE:
        damage = any(map(found_damage, status.stages.values()))
        head = " · ".join([f"{'✗ Found damage' if damage else '✓ Done'} in {took}", *metrics(status)])
        places += [("Next", str(following))] if (following := _next(status, typed, named)) else []
    elif status.state is State.FAILED:
        failed = [stage.name for stage in status.in_order() if stage.state is State.FAILED]
        head = f"✗ Failed after {took}{f': stage {failed[-1]}' if failed else ''}"
    elif status.state is State.STOPPED:
        head, places = f"! Stopped after {took}; finished work is kept", [("Next", str(resume))]
    elif status.state is State.ABANDONED:
        head = "✗ Orphaned: this run has no supervisor (its process died); finished work is kept"
        places = [("Next", str(resume))]
    else:
        return []
    columns = max((len(name) for name, _ in places), default=0) + 2
    return [head, *rejected_note(status), *(f"  {name:<{columns}}{value}" for name, value in places)]


def _project(typed: Command) -> Command:
    """Return the --config and --set of a typed command that decide where runs are."""
    return replace(typed, settings=tuple(pair for pair in typed.settings if pair[0] == "cluster.runs"))


def rejected_note(status: RunStatus) -> list[str]:
    """Describe rejected items: number, reasons, an example."""
    censuses = [stage.census for stage in status.in_order() if stage.census and stage.census.get("rejected")]
    if not censuses:
        return []
    rejected, examples = censuses[0]["rejected"], censuses[0]["examples"]
    total, known = sum(rejected.values()), [examples[reason] for reason in rejected if reason in examples]
    item, _, detail = (known or [""])[0].partition(": ")
    example = f"{item} ({detail})" if detail else item
    if total > 1:
        counts = counts_text(rejected)
        example = f"{counts}; for example {example}" if example else counts
    return [f"! {total:,} rejected: {example}"]


def metrics(status: RunStatus) -> list[str]:
    """Return the monitored metric in validation and in evaluation."""
    trained, evaluated = (_census(status, name) for name in ("train", "evaluate"))
    measured = evaluated.get("figures") or {}
    monitor = trained.get("monitor") or next((name for name in measured if not name.startswith("loss")), "loss")
    best = ((trained.get("best") or {}).get("validation") or {}).get(monitor)
    values = [f"{best:.3g} (val)"] if best is not None else []
    if measured.get(monitor) is not None:
        values.append(f"{measured[monitor]:.3g} ({evaluated['split'] or 'all items'})")
    return [f"{monitor} {' / '.join(values)}"] if values else []


def _places(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield the places of results."""
    for name, (stage, key) in RESULTS.items():
        if place := _census(status, stage).get(key):
            yield name, min(os.path.relpath(place), str(place), key=len)


def _next(status: RunStatus, typed: Command, named: Sequence[str]) -> Command | None:
    """Return the most useful next command."""
    if any(map(found_damage, status.stages.values())):
        return Command.of("cache regenerate --list", _census(status, "validate")["report"]).in_project(typed)
    if "train" in status.stages and status.stages["train"].is_swept:
        return Command.of("compare", status.name).in_project(_project(typed))
    if _census(status, "train").get("folder"):
        return Command.of("report", *named, "--html", "report.html").in_project(_project(typed))
    return Command.submit("all").in_project(typed) if set(status.stages) <= {"scan", "embed", "graph"} else None


def _census(status: RunStatus, name: str) -> Mapping[str, Any]:
    return (status.stages[name].census or {}) if name in status.stages else {}


def status_report(
    run: RunView, typed: Command, width: int = NO_TERMINAL, paces: Mapping[str, float] | None = None
) -> list[RenderableType]:
    """Show a run at a glance: its stages, warnings, its end or activity, and the next command."""
    status, is_over, named = run.status, run.status.state not in GOING_ON, typed.words[1:]
    took = (status.ended_at or (run.at if math.isfinite(run.at) else 0.0)) - status.started_at
    clock = [short_seconds(took)] if status.started_at and took > 0 else []
    shown: list[RenderableType] = [" · ".join([f"Run {status.name}", status.state.word, *clock])]
    if status.state not in (*GOING_ON, State.DONE):
        head, *places = ending(status, typed, named)
        shown += [head, *_indented(status.error), *_indented(run.supervisor), *places, ""]
    rows = rows_of(run, paces or {})
    if rows and width >= TABLE_COLUMNS:
        cells = (_cells(row, status.stages.get(row.name)) for row in rows)
        shown.append(text_table(AT_A_GLANCE, cells, right=AT_A_GLANCE[2:]))
        going = [replace(row, share=None).line(width, run.at) for row in rows if row.state is State.RUNNING]
        shown += ["", *going] if going and not is_over else []
    else:
        shown += [row.line(width, run.at) for row in rows]
    if not is_over:
        shown += [f"! the queue does not answer: {run.trouble}"] if run.trouble else []
        shown += [] if rows else [run.supervisor]
    shown += [*held_lines(run), *(f"! {note}" for stage in status.in_order() for note in notes(stage))]
    shown += [run.account.line()] if run.account and run.account.is_low else []
    shown += ["", *ending(status, typed, named)] if status.state is State.DONE else []
    return [*shown, f"  Details: {Command.of('status', *named, '-v').in_project(typed)}"]


def _indented(text: str) -> list[str]:
    return [f"  {line.removesuffix('; finished work is kept')}" for line in text.splitlines()]  # the headline says it


def _cells(row: Row, stage: StageStatus | None) -> tuple[str | Text, ...]:
    """Return the cells of a stage."""
    symbol, style = MARKS[row.state]
    state = Text(f"{symbol} {row.state.word}", style)
    if stage is None:
        return (row.name, state, *[""] * 4)
    asked, peak, _ = stage.use().values()
    peak = peak or stage.highest("host_peak_bytes")
    memory = f"{short_bytes(peak) if peak else '?'}/{short_bytes(asked)}" if asked else ""
    done = f"{stage.cached + stage.items_done:,}/{stage.cached + stage.missing:,}"
    return row.name, state, done, f"{stage.cached:,}", row.took, memory


def run_report(
    run: RunView, typed: Command, width: int = NO_TERMINAL, paces: Mapping[str, float] | None = None
) -> list[RenderableType]:
    """Show a run with every detail: the results and resources of each stage, and the story of its attempts."""
    status, shown = run.status, status_report(run, typed, width, paces)[:-1]
    shown += [f"  Supervisor: {run.supervisor}"] if run.supervisor and status.state in GOING_ON else []
    shown += wait_lines((wait for wait in run.status.waits if wait.is_over), run.at)
    shown += [run.account.line()] if run.account and not run.account.is_low else []
    rejected: Mapping[str, int] = {}
    for stage in status.in_order():
        shown += ["", Text(f"{stage.name}: {counted(stage)}", "bold"), *memory_line(stage), *progress_lines(stage, run)]
        if stage.census:
            shown += result_lines(stage)
            if stage.census["rejected"] not in ({}, rejected):  # rejected by an earlier stage
                rejected = stage.census["rejected"]
                shown += ["", rejection_table(rejected, stage.census["examples"])]
        elif reasons := stage.reasons:
            shown.append(rejection_table(reasons, {}))
        is_stopped = status.state is State.STOPPED
        failed = [attempt for attempt in stage.failures if not (is_stopped and attempt.cause is Cause.CANCELLED)]
        failed = [attempt for attempt in failed if attempt.reason.partition("\n")[0] not in (status.error or "")]
        shown += [f"{plural(len(failed), 'attempt')} failed", *story(stage, failed)] if failed else []
    return shown


def story(stage: StageStatus, failed: Sequence[Attempt]) -> Iterator[str]:
    """Yield the details of each group of attempts that failed in the same way, the largest first."""
    groups = sorted(failures_alike(stage, failed).values(), key=len, reverse=True)
    for alike in groups[:STORIES_SHOWN]:
        first, noun = alike[0], "point" if stage.is_swept else "task"
        tasks = ", ".join(
            [stage.label(attempt.task) for attempt in alike[:TASKS_NAMED]] + ["…"] * (len(alike) > TASKS_NAMED)
        )
        asked = f" with {format_bytes(first.ask.mem_bytes)}" if first.cause is Cause.HOST_OOM else ""
        head = f"{noun}{'s' * (len(alike) != 1)} {tasks}, attempt {first.number}"
        yield f"  {head}: {first.cause.value}{asked}: {first.reason}"
        if first.said and first.said not in first.reason:
            yield f"    it said: {first.said}"
        if action := stage.task(first.task).then.get(first.number):
            yield f"    then: {action}"
        yield f"    log: {first.log}"
    if more := sum(map(len, groups[STORIES_SHOWN:])):
        yield f"  and {plural(more, 'attempt')} more: pipeline logs --failed"
