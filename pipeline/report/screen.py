"""A run as the lines of a terminal screen, which never exceed its height and width; a pure function of the state."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from rich.text import Text

from pipeline.cluster.verdict import Cause
from pipeline.journal.active_runs import GOING_ON, use
from pipeline.journal.run_status import RunState
from pipeline.report.stage_lines import DAMAGED, SCRIPT, TASK_STATES, found_damage, state_of_stage, unit_of, wait_lines
from pipeline.report.tables import plural
from pipeline.training.step_clock import shares_so_far
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.journal.active_runs import SeenRun
    from pipeline.journal.run_status import RunStatus, StageStatus

NAME_COLUMNS = 11
LEAST_BAR, MOST_BAR, BESIDE_BAR = 8, 40, 52  # columns
SPARKS = "▁▂▃▄▅▆▇█"
MOST_SPARKS = 24
HAS_ROOM = 10  # lines
LEAST_EVENTS = 3  # lines that are left for what happened lately before details of stages go
STYLES = {
    "done": "green",
    "running": "cyan",
    "waiting": "yellow",
    "failed": "bold red",
    "abandoned": "bold red",
    "stopped": "yellow",
}
BAD = (RunState.FAILED, RunState.ABANDONED)


@dataclass(frozen=True, slots=True)
class Screen:
    """The size of the terminal, the time, and the speed of each stage."""

    width: int
    height: int
    now: float  # seconds since 1970
    pace: Mapping[str, float] = field(default_factory=dict)  # stage → items per second


def screen(run: SeenRun, on: Screen) -> list[Text]:
    """Return the lines that fit on a screen; where there is little room, running stages and errors stay."""
    head, foot, stages = list(_head(run, on)), list(_foot(run.status, on)), run.status.in_order()
    bars = [(_bar(stage, on), list(_details(stage, run, on))) for stage in stages]
    bars += [(Text(f"{name:<{NAME_COLUMNS}}{when}", style="dim"), []) for name, when in _to_come(run.status)]
    lately = [_happened(at, event) for at, event in reversed(run.lately)]
    room = on.height - len(head) - len(foot) - len(bars)
    details = _fitting([lines for _, lines in bars], room - min(LEAST_EVENTS, len(lately)))
    room -= sum(map(len, details))
    body = [line for (bar, _), own in zip(bars, details, strict=True) for line in (bar, *own)]
    events = lately[: max(0, room - 2)]  # below a blank line and a title
    titled = [Text(), Text("lately", style="bold"), *events] if events else []
    room -= len(titled)
    gap = [Text()] if room > 0 else []
    lines = [*head, *gap, *body, *titled]
    lines += [Text()] * (room - len(gap)) if foot else []
    return [_cut(line, on.width) for line in [*lines[: on.height - len(foot)], *foot][: on.height]]


def _head(run: SeenRun, on: Screen) -> Iterator[Text]:
    """Yield the name and state of the run, and its supervisor."""
    status = run.status
    state = DAMAGED if any(map(found_damage, status.stages.values())) else status.state.value
    took = f"  {format_seconds((status.ended_at or on.now) - status.started_at)}" if status.started_at else ""
    clock = f"{datetime.fromtimestamp(on.now):%H:%M:%S}"  # noqa: DTZ006 - the clock of who looks
    left = Text.assemble((f"run {status.name}", "bold"), "  ", (state, STYLES.get(state, "bold")), took)
    gap = on.width - left.cell_len - len(clock)
    yield left.append(" " * gap + clock, style="dim") if gap > 0 else left
    if run.supervisor:
        yield Text(f"supervisor: {run.supervisor.splitlines()[0]}", style="dim")
    if run.trouble:
        yield Text(f"the queue could not be asked: {run.trouble}", style="yellow")


def _foot(status: RunStatus, on: Screen) -> Iterator[Text]:
    """Yield the error of the run, the command to type next, and how to leave."""
    if status.error:
        yield Text(f"error: {status.error.splitlines()[0]}", style="bold red")
    if status.state in (RunState.ABANDONED, RunState.STOPPED):
        yield Text(f"next: pipeline resume {status.name}", style="bold")
    elif status.state in BAD or any(stage.task_states().get("failed") for stage in status.stages.values()):
        yield Text(f"next: pipeline logs {status.name} --failed", style="bold")
    if status.state in GOING_ON and on.height >= HAS_ROOM:
        yield Text("Ctrl-C leaves; the run goes on", style="dim")


def _to_come(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield the stages that have not begun; while none runs, the next is being planned, which can take minutes."""
    all_done = all(stage.state is RunState.DONE for stage in status.stages.values())
    when = "being planned" if status.state is RunState.RUNNING and all_done else "to come"
    for name in status.planned:
        if name not in status.stages:
            yield name, when
            when = "to come"


def _bar(stage: StageStatus, on: Screen) -> Text:
    """Return a stage's line: its bar, its counts, and its speed or how long it took."""
    done, missing = stage.items_done, stage.missing
    share = min(1.0, done / missing) if missing else float(stage.state is RunState.DONE)
    counts = f"{done:,}/{missing:,}" if missing else f"{stage.cached:,} cached"
    pace = _speed(stage, on) if stage.state is RunState.RUNNING else _ended(stage)
    width = min(MOST_BAR, on.width - NAME_COLUMNS - BESIDE_BAR)
    width = 0 if width < LEAST_BAR else width  # what it says in numbers matters more
    full = int(share * width)
    return Text.assemble(
        (f"{stage.name:<{NAME_COLUMNS}}", "bold"),
        ("━" * full, STYLES.get(stage.state.value, "")),
        ("─" * (width - full), "dim"),
        f"{' ' * bool(width)}{int(100 * share):>3}% {counts:>13}",  # 100% is said of no stage that has something left
        f"  {pace}",
    )


def _speed(stage: StageStatus, on: Screen) -> str:
    """Return a stage's speed, and how long it will take at that pace."""
    pace, left = on.pace.get(stage.name, 0.0), stage.missing - stage.items_done
    if pace <= 0:
        return "no pace yet" if stage.missing else ""
    left_s = stage.measured().get("left_s") or left / pace
    shown = f"{pace:,.0f}" if pace >= 100 else f"{pace:.2g}" if pace < 10 else f"{pace:.0f}"
    unit = unit_of(stage.name, stage.counts())
    return f"{shown} {unit}s/s" + (f", {format_seconds(left_s)} left" if left > 0 else "")


def _ended(stage: StageStatus) -> str:
    """Return the state of a stage that does not run, and how long it took."""
    took = f" in {format_seconds(stage.ended_at - stage.started_at)}" if stage.ended_at else ""
    return f"{state_of_stage(stage)}{took}"


def _details(stage: StageStatus, run: SeenRun, on: Screen) -> Iterator[Text]:
    """Yield details of a stage, the most important first: tasks, losses, memory, rejections, its error."""
    indent = " " * NAME_COLUMNS
    if stage.state is not RunState.DONE:
        for parts in (_tasks(stage, run), _training(stage, run.losses.get(stage.name, ()), on), _memory(stage)):
            if parts:
                yield Text(f"{indent}{'; '.join(parts)}")
    for line in wait_lines((wait for wait in run.waits if wait.of == stage.name and not wait.is_over), on.now):
        yield from (Text(f"{indent}{part}", style="red") for part in line.splitlines())
    if reasons := stage.reasons.most_common():
        yield Text(f"{indent}rejected: " + ", ".join(f"{count:,} {why}" for why, count in reasons), style="yellow")
    for warning in stage.warnings:
        yield Text(f"{indent}warning: {warning.splitlines()[0]}", style="yellow")
    if stage.error:
        yield Text(f"{indent}{stage.error.splitlines()[0]}", style="red")


def _tasks(stage: StageStatus, run: SeenRun) -> list[str]:
    """Return how many tasks are in which state, and what waiting ones wait for."""
    states, waits = stage.task_states(), run.waits_for.get(stage.name)
    counts = ", ".join(f"{states[name]:,} {name}" for name in TASK_STATES if states.get(name))
    tried = sum(attempt.cause is not Cause.CANCELLED for attempt in stage.failures)
    parts = [f"tasks: {counts}"] if counts else []
    parts += [f"waiting for: {', '.join(waits)}"] if waits else []
    return parts + ([f"{plural(tried, 'attempt')} failed"] if tried else [])


def _memory(stage: StageStatus) -> list[str]:
    """Return how much of the memory they were given tasks use, and how much of the planned GPU memory."""
    asked, peak, gpu_peak = use(stage).values()

    def most(figure: str, ended: int | None = 0) -> int:
        return max([ended or 0, *(int(figures.get(figure, 0)) for figures in stage.figures.values())])

    used, gpu, planned = most("host_peak_bytes", peak), most("device_peak_bytes", gpu_peak), most("planned_bytes")
    parts = [f"memory: {format_bytes(used)} of {format_bytes(asked)} ({used / asked:.0%})"] if used and asked else []
    if gpu:
        of = f" of {format_bytes(planned)} ({gpu / planned:.0%})" if planned else ""
        parts.append(f"GPU: {format_bytes(gpu)}{of}")
    return parts


def _training(stage: StageStatus, losses: Sequence[float], on: Screen) -> list[str]:
    """Return the epoch and step of a training, its recent losses, its learning rate, and what it waited for."""
    latest = {name: value for figures in stage.figures.values() for name, value in figures.items()}
    parts = []
    if stage.name == "train" and not any(name.startswith(SCRIPT) for name in latest):
        step = stage.cached + stage.items_done
        of = f" of {int(latest['epochs']):,}" if "epochs" in latest else ""
        epoch = min(int(latest.get("epoch", 0)) + 1, int(latest.get("epochs", sys.maxsize)))
        parts.append(f"epoch {epoch:,}{of}, step {step:,} of {stage.items:,}")
    if losses:
        parts.append(f"loss {losses[-1]:.4g} {sparkline(losses[-min(MOST_SPARKS, max(1, on.width - 72)) :])}")
    if "learning_rate" in latest:
        parts.append(f"rate {latest['learning_rate']:.3g}")
    return [*parts, ", ".join(waits)] if (waits := shares_so_far(latest)) else parts


def sparkline(values: Sequence[float]) -> str:
    """Return a curve of block characters, one for each value; a blank where a value is not finite."""
    known = [value for value in values if value - value == 0]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    steps = len(SPARKS) - 1
    return "".join(
        " " if value - value != 0 else SPARKS[round((value - low) / span * steps)] if span else SPARKS[0]
        for value in values
    )


def _happened(at: float, event: str) -> Text:
    """Show something that happened, and when."""
    clock = f"{datetime.fromtimestamp(at):%H:%M:%S}"  # noqa: DTZ006 - the clock of who looks
    return Text.assemble((f"{clock}  ", "dim"), " ".join(event.split()))


def _fitting(details: Sequence[list[Text]], room: int) -> list[list[Text]]:
    """Return the details that fit into so many lines: the newest stages' first, of each the first ones."""
    kept: list[list[Text]] = [[] for _ in details]
    for place in reversed(range(len(details))):
        kept[place] = details[place][: max(0, room)]
        room -= len(kept[place])
    return kept


def _cut(line: Text, width: int) -> Text:
    """Return a line that is no longer than the screen is wide."""
    if line.cell_len <= width:
        line.rstrip()
        return line
    line = line.copy()
    line.truncate(width, overflow="ellipsis")
    return line
