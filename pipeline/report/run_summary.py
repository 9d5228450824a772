"""A run at a glance: a line per stage, what needs attention, and how it ended; the same words on every screen."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from pipeline.cluster.verdict import Cause
from pipeline.command_line import Command
from pipeline.journal.run_status import State
from pipeline.journal.run_view import NO_SUPERVISOR
from pipeline.report.stage_lines import found_damage, named_records, unit_of, validated_files, wait_lines
from pipeline.report.tables import plural
from pipeline.units import short_bytes, short_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
PLANNED = ("train", "evaluate", "predict")  # the stages whose memory is planned
NAME, BAR, RESULT, TOOK = 10, 12, 40, 7  # columns
WITH_BAR = 76  # columns of a line that has room for a bar
RESULTS = {"Model": ("train", "folder"), "Predictions": ("predict", "folder"), "Report": ("validate", "report")}
CAUSES = {
    Cause.HOST_OOM: "out of memory",
    Cause.GPU_OOM: "out of GPU memory",
    Cause.TIMEOUT: "at the time limit",
    Cause.NODE: "on a node that failed",
    Cause.CRASHED: "crashed",
    Cause.LOST: "with unknown final state",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A stage in a line."""

    state: State
    name: str
    parts: tuple[str, ...] = ()
    took: str = ""
    share: float | None = None  # that is done of a running one
    since: float = 0.0  # when it began what it does now, which a clock shows; 0: no clock

    def line(self, width: int, now: float, mark: str = "") -> Text:
        """Return the line, at most so wide: parts that do not fit are left out."""
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
    """Join as many parts as fit: the first and the last stay longest."""
    kept = list(parts)
    while len(kept) > 1 and len(mark.join(kept)) > room:
        kept.pop(max(1, len(kept) - 2))
    return mark.join(kept)


def rows_of(run: RunView, pace: Mapping[str, float]) -> list[Row]:
    """Return a row for each stage of a run; while none runs, the next is being planned."""
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
    """Yield what an ended stage has made."""
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
        yield validated_files(stage) or plural(stage.items, unit)
        yield f"{census['summary']['findings']:,} damaged" if found_damage(stage) else "nothing damaged"
    elif stage.name == "regenerate":
        yield named_records(stage.items)
    else:
        yield plural(stage.items - stage.refused, unit)
    if epochs := census.get("epochs"):
        yield plural(epochs, "epoch")
    if stage.cached:
        yield f"{stage.cached:,} cached" if stage.missing else "cached"


def doing(stage: StageStatus, run: RunView, pace: float) -> Iterator[str]:
    """Yield what a running stage does, or what it waits for."""
    states, unit, done = stage.task_states(), unit_of(stage.name, stage.counts()), stage.items_done
    reasons = run.waits_for(stage)
    if reasons and not states.get(State.RUNNING):
        yield f"waiting in the queue: {', '.join(reasons)}"
        if delayed := run.delayed(stage):
            yield delayed
        return
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
    """Return what needs attention: survived failures, then warnings."""
    survived = _out_of_memory(stage)
    warnings = [text for text in stage.warnings if not (survived and text.startswith(OUT_OF_MEMORY))]
    return [f"{stage.name}: {text}" for text in (*survived, *_retries(stage), *warnings)]


OUT_OF_MEMORY = "out of memory"  # how the warning of a training begins that says the same in the end


def _out_of_memory(stage: StageStatus) -> list[str]:
    """Say at which step a training ran out of memory, and how it survived."""
    said = [figures for figures in stage.figures.values() if figures.get("oom_step")]
    if not said:
        return []
    last, times = max(said, key=lambda figures: figures["oom_step"]), int(max(figures["ooms"] for figures in said))
    items = int(last["oom_items"])
    cut = f"micro-batch {items} → {-(-items // 2)}" if items > 1 else "one item did not fit"
    count = f" ({times:,} times so far)" if times > 1 else ""
    return [f"out of memory at step {int(last['oom_step']):,}{count}; {cut}, step repeated"]


def _retries(stage: StageStatus) -> list[str]:
    """Say how attempts failed, and what was done about it; those that failed in the same way together."""
    alike: dict[tuple[str, str], list[Attempt]] = {}
    for attempt in stage.failures:
        if attempt.cause is not Cause.CANCELLED:
            alike.setdefault((_ended(attempt), _followed(stage, attempt)), []).append(attempt)
    return [
        f"{stage.called(group[0].task) if len(group) == 1 else plural(len(group), 'task')}{how}{then}"
        for (how, then), group in alike.items()
    ]


def _ended(attempt: Attempt) -> str:
    """Say how an attempt failed; where it crashed, by what, without the figures that follow."""
    reason = attempt.reason.splitlines()[0].partition(";")[0] if attempt.reason else ""
    if attempt.cause is Cause.CRASHED and reason:
        return f": {reason}"
    return f" {CAUSES.get(attempt.cause, attempt.cause.value.replace('_', ' '))}"


def _followed(stage: StageStatus, attempt: Attempt) -> str:
    """Say what followed a failed attempt."""
    task, now = stage.task(attempt.task), attempt.ask
    later = {ended.number: ended.ask for ended in task.ended} | ({task.attempt: task.ask} if task.ask else {})
    following = later.get(attempt.number + 1)
    if following is None:
        return f"; {task.then.get(attempt.number) or attempt.reason.partition(chr(10))[0]}"
    if following.mem_bytes > now.mem_bytes:
        return f"; retried with {short_bytes(following.mem_bytes)}"
    return "; retried with half the batch" if following.shrink > now.shrink else "; retried"


def held_lines(run: RunView) -> list[str]:
    """Say what waits for something that does not pass by itself, and what helps; an orphaned run says so itself."""
    return wait_lines(wait for wait in run.stuck if wait.reason != NO_SUPERVISOR)


def ending(status: RunStatus, typed: Command, named: Sequence[str] = ()) -> list[str]:
    """Return how a run ended: the result, what was rejected, where the results are, and what to type next.

    `named`: the run as it was typed, where it may not be the newest.
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
    """Return what a typed command says of where runs are."""
    return replace(typed, settings=tuple(pair for pair in typed.settings if pair[0] == "cluster.runs"))


def rejected_note(status: RunStatus) -> list[str]:
    """Say how many items were rejected, why, and give an example."""
    censuses = [stage.census for stage in status.in_order() if stage.census and stage.census.get("rejected")]
    if not censuses:
        return []
    rejected, examples = censuses[0]["rejected"], censuses[0]["examples"]
    total, known = sum(rejected.values()), [examples[reason] for reason in rejected if reason in examples]
    item, _, detail = (known or [""])[0].partition(": ")
    example = f"{item} ({detail})" if detail else item
    if total > 1:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in rejected.items())
        example = f"{counts}; for example {example}" if example else counts
    return [f"! {total:,} rejected: {example}"]


def metrics(status: RunStatus) -> list[str]:
    """Return the metric that chose the best epoch, in validation and in evaluation."""
    trained, evaluated = (_census(status, name) for name in ("train", "evaluate"))
    measured = evaluated.get("figures") or {}
    monitor = trained.get("monitor") or next((name for name in measured if not name.startswith("loss")), "loss")
    best = ((trained.get("best") or {}).get("validation") or {}).get(monitor)
    values = [f"{best:.3g} (val)"] if best is not None else []
    if measured.get(monitor) is not None:
        values.append(f"{measured[monitor]:.3g} ({evaluated['split'] or 'all items'})")
    return [f"{monitor} {' / '.join(values)}"] if values else []


def _places(status: RunStatus) -> Iterator[tuple[str, str]]:
    """Yield where the results are."""
    for name, (stage, key) in RESULTS.items():
        if place := _census(status, stage).get(key):
            yield name, min(os.path.relpath(place), str(place), key=len)


def _next(status: RunStatus, typed: Command, named: Sequence[str]) -> Command | None:
    """Return the command that most people type next."""
    if any(map(found_damage, status.stages.values())):
        return Command.of("cache regenerate --list", _census(status, "validate")["report"]).in_project(typed)
    if _census(status, "train").get("folder"):
        return Command.of("report", *named, "--html", "report.html").in_project(_project(typed))
    return Command.submit("all").in_project(typed) if set(status.stages) <= {"scan", "embed", "graph"} else None


def _census(status: RunStatus, name: str) -> Mapping[str, Any]:
    return (status.stages[name].census or {}) if name in status.stages else {}
