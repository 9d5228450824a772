"""A run as the lines of a terminal screen, which never exceed its height and width; a pure function of the state."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from rich.text import Text

from pipeline.journal.active_runs import GOING_ON, use
from pipeline.journal.run_status import RunState
from pipeline.report.run_summary import NAME, STYLES, held_lines, notes, rows_of, words_of
from pipeline.report.stage_lines import DAMAGED, TASK_STATES, found_damage
from pipeline.report.tables import fitted
from pipeline.training.step_clock import latest_shares
from pipeline.units import short_bytes, short_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.journal.active_runs import SeenRun
    from pipeline.journal.run_status import RunStatus, StageStatus
    from pipeline.report.run_summary import Row

INDENT = " " * (NAME + 2)
SPARKS = "▁▂▃▄▅▆▇█"
MOST_SPARKS = 24
HAS_ROOM = 10  # lines
LEAST_EVENTS = 3  # lines that are left for what happened lately before details of stages go
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
    head, foot = list(_head(run, on)), list(_foot(run.status, on))
    rows = rows_of(run, on.pace)
    bars = [(row.line(on.width, on.now), _details_of(row, run, on)) for row in rows]
    lately = [_happened(at, event) for at, event in reversed(run.lately)]
    room = on.height - len(head) - len(foot) - len(bars)
    details = _fitting([lines for _, lines in bars], room - min(LEAST_EVENTS, len(lately)))
    room -= sum(map(len, details))
    body = [line for (bar, _), own in zip(bars, details, strict=True) for line in (bar, *own)]
    events = lately[: max(0, room - 2)]  # below a blank line and a title
    titled = [Text(), Text("Recent", style="bold"), *events] if events else []
    room -= len(titled)
    gap = [Text()] if room > 0 else []
    lines = [*head, *gap, *body, *titled]
    lines += [Text()] * (room - len(gap)) if foot else []
    return [fitted(line, on.width) for line in [*lines[: on.height - len(foot)], *foot][: on.height]]


def _head(run: SeenRun, on: Screen) -> Iterator[Text]:
    """Yield the name and state of the run, and its supervisor."""
    status = run.status
    state = DAMAGED if any(map(found_damage, status.stages.values())) else words_of(status.state)
    took = f" · {short_seconds((status.ended_at or on.now) - status.started_at)}" if status.started_at else ""
    clock = f"{datetime.fromtimestamp(on.now):%H:%M:%S}"  # noqa: DTZ006 - the clock of who looks
    left = Text.assemble((f"Run {status.name}", "bold"), " · ", (state, STYLES.get(status.state.value, "bold")), took)
    gap = on.width - left.cell_len - len(clock)
    yield left.append(" " * gap + clock, style="dim") if gap > 0 else left
    if run.supervisor:
        yield Text(f"Supervisor: {run.supervisor.splitlines()[0]}", style="dim")
    if run.trouble:
        yield Text(f"! the queue does not answer: {run.trouble}", style="yellow")


def _foot(status: RunStatus, on: Screen) -> Iterator[Text]:
    """Yield the error of the run, the command to type next, and how to leave."""
    if status.error:
        yield Text(f"error: {status.error.splitlines()[0]}", style="bold red")
    if status.state in (RunState.ABANDONED, RunState.STOPPED):
        yield Text(f"next: pipeline resume {status.name}", style="bold")
    elif status.state in BAD or any(stage.task_states().get("failed") for stage in status.stages.values()):
        yield Text(f"next: pipeline logs {status.name} --failed", style="bold")
    if status.state in GOING_ON and on.height >= HAS_ROOM:
        yield Text("Ctrl-C leaves; the run continues", style="dim")


def _details_of(row: Row, run: SeenRun, on: Screen) -> list[Text]:
    """Return details of a stage, the most important first: tasks, training, memory, what needs attention, its error."""
    stage = run.status.stages.get(row.name)
    if stage is None:
        return []
    lines = [Text(line, style="red") for line in held_lines(wait for wait in run.stuck if wait.of == stage.name)]
    if stage.state is not RunState.DONE:
        for parts in (_tasks(stage), _training(stage, run.losses.get(stage.name, ()), on), _memory(stage)):
            lines += [Text(f"{INDENT}{' · '.join(parts)}")] if parts else []
    if reasons := stage.reasons.most_common():
        rejected = ", ".join(f"{count:,} {why}" for why, count in reasons)
        lines.append(Text(f"! {stage.name}: rejected: {rejected}", style="yellow"))
    lines += [Text(f"! {note.splitlines()[0]}", style="yellow") for note in notes(stage)]
    return lines + ([Text(f"{INDENT}{stage.error.splitlines()[0]}", style="red")] if stage.error else [])


def _tasks(stage: StageStatus) -> list[str]:
    """Return how many tasks are in which state, where there are several."""
    states = stage.task_states()
    counts = ", ".join(f"{states[name]:,} {name}" for name in TASK_STATES if states.get(name))
    return [f"tasks: {counts}"] if states.keys() - {"running"} or sum(states.values()) > 1 else []


def _memory(stage: StageStatus) -> list[str]:
    """Return how much of the memory they were given tasks use, and how much of the planned GPU memory."""
    asked, peak, gpu_peak = use(stage).values()

    def most(figure: str, ended: int | None = 0) -> int:
        return max([ended or 0, *(int(figures.get(figure, 0)) for figures in stage.figures.values())])

    used, gpu, planned = most("host_peak_bytes", peak), most("device_peak_bytes", gpu_peak), most("planned_bytes")
    parts = [f"memory {short_bytes(used)}/{short_bytes(asked)}"] if used and asked else []
    return parts + ([f"GPU memory {short_bytes(gpu)}{f'/{short_bytes(planned)}' if planned else ''}"] if gpu else [])


def _training(stage: StageStatus, losses: Sequence[float], on: Screen) -> list[str]:
    """Return the epoch and step of a training, its recent losses, its learning rate, and what it waited for."""
    latest = {name: value for figures in stage.figures.values() for name, value in figures.items()}
    parts = []
    if "epochs" in latest:
        epochs = int(latest["epochs"])
        parts.append(f"epoch {min(int(latest.get('epoch', 0)) + 1, epochs):,}/{epochs:,}")
    if losses:
        parts.append(f"loss {sparkline(losses[-min(MOST_SPARKS, max(1, on.width - 72)) :])}")
    if "learning_rate" in latest:
        parts.append(f"learning rate {latest['learning_rate']:.3g}")
    return [*parts, ", ".join(waits)] if (waits := latest_shares(latest)) else parts


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
