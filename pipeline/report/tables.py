"""Records as text for a terminal."""

from __future__ import annotations

import sys
from datetime import datetime
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rich.console import RenderableType


class Asked(Protocol):
    """What a task gets."""

    @property
    def mem_bytes(self) -> int:
        """Memory."""

    @property
    def time_s(self) -> int:
        """The time limit."""


NO_TERMINAL, MESSAGE = 200, 100  # columns of tables where there is no terminal, and of what is pasted into a message
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
KILO = 1024
EDGE_KINDS = ("bond", "angle", "dihedral", "near")
MINUTE, HOUR = 60, 3600
# What a stage works through.
UNIT = {
    "scan": "item",
    "embed": "sequence",
    "graph": "graph",
    "train": "step",
    "evaluate": "item",
    "predict": "item",
    "validate": "file",
    "regenerate": "record",
}
REFUSED = {"scan": "refused by the source", "embed": "that cannot be encoded", "graph": "left out before"}
TASK_STATES = ("done", "running", "waiting", "failed")
STORIES_SHOWN = 5
SCRIPT, FIGURES_SHOWN = "script.", 8  # what a script of the user's own tells of itself
TASKS_NAMED = 5
FINDINGS = "findings"  # a figure of validation
ITEMS_READ = "items_read"  # a figure of a scan by a reader
VALIDATED = ("records", "whole", "lost")
# What may become of a record that a damage list names.
REGENERATED = {
    "whole": "there now",
    "foreign": "of no item here",
    "unmade": "could not be made",
    "later": "made when needed",
}
DAMAGED = "damage was found"
PLANNED = ("items", "refused", "unusable", "cached", "missing", "tasks")


def show(*parts: RenderableType, to_stderr: bool = False, columns: int = 0) -> None:
    """Print for a person; without a terminal there is no colour, and a line as long as it needs to be, or `columns`."""
    stream = sys.stderr if to_stderr else sys.stdout
    console = Console(file=stream, highlight=False, soft_wrap=not stream.isatty())
    if stream.isatty():
        for part in parts:
            console.print(part, markup=False)
        return
    console.width = columns or NO_TERMINAL
    with console.capture() as printed:
        for part in parts:
            console.print(_wrapped(part, columns) if columns and isinstance(part, str) else part, markup=False)
    stream.write("".join(f"{line.rstrip()}\n" for line in printed.get().splitlines()))


def _wrapped(text: str, columns: int) -> str:
    """Return text whose lines are not longer than that, for a message; what goes on is indented below."""
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 4)
        lines += wrap(line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "", right: str | Sequence[str] = ""
) -> Table:
    """Return a plain table; the columns named in `right` (a text: space-separated) hold numbers."""
    numbers = right.split() if isinstance(right, str) else right
    shown = Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        shown.add_column(Text(column, style="bold"), justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return shown


def size(count: float) -> str:
    """Return bytes as people read them."""
    for unit in UNITS:
        if count < KILO or unit == UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= KILO
    raise AssertionError


def duration(seconds: float) -> str:
    """Return a duration as people read it."""
    if seconds < MINUTE:
        return f"{seconds:.1f} s"
    if seconds < HOUR:
        return f"{seconds // MINUTE:.0f} min {seconds % MINUTE:02.0f} s"
    return f"{seconds // HOUR:.0f} h {seconds % HOUR // MINUTE:02.0f} min"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def speed(measured: Mapping[str, float]) -> list[str]:
    """Say how fast a stage is, how long it will take, how close to the reference, and how much memory it took."""
    if not measured:
        return []
    parts = [f"{measured['residues_per_s']:,.0f} residues/s a process", f"pad factor {measured['pad_factor']:.2f}"]
    if measured["left_s"]:
        parts.append(f"{duration(measured['left_s'])} left")
    parts.append(f"peak {size(measured['peak_rss_bytes'])}")
    if measured["peak_gpu_bytes"]:
        parts.append(f"GPU {size(measured['peak_gpu_bytes'])}")
    if measured["splits"]:
        parts.append(f"{plural(int(measured['splits']), 'split')} for memory")
    return [*parts, f"lowest cosine to fair-esm {measured['lowest_cosine']:.7f}"]


def census_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Show the numbers of a scanned data set."""
    shown: list[RenderableType] = [_accepted(census)]
    if census["splits"]:
        shown.append("splits: " + ", ".join(f"{name} {count:,}" for name, count in census["splits"].items()))
    if census["chains"]:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in census["chains"].items())
        shown.append(f"chains: {kinds}; {census['sequences']:,} distinct sequences, longest {census['longest']:,}")
    if census["sizes"]:
        rows = [
            (name, f"{spread['median']:,.0f}", f"{spread['p95']:,.0f}", f"{spread['max']:,.0f}")
            for name, spread in census["sizes"].items()
            if spread["max"]
        ]
        shown += ["", table(("size", "median", "p95", "max"), rows, right="median p95 max")]
    return shown


def embedded_lines(embedded: Mapping[str, Any]) -> list[RenderableType]:
    """Show the numbers of an embedded data set."""
    return [
        f"{_accepted(embedded)}; {embedded['sequences']:,} distinct sequences embedded, "
        f"{embedded['residues']:,} residues, longest {embedded['longest']:,}"
    ]


def graphed_lines(graphed: Mapping[str, Any]) -> list[RenderableType]:
    """Show the numbers of a data set of graphs."""
    totals = {name: f"{count:,} {name}" for name, count in graphed["totals"].items() if count}
    typed = ", ".join(totals.pop(name) for name in EDGE_KINDS if name in totals)
    if typed:
        totals["edges"] += f" ({typed})"
    return [f"{_accepted(graphed)}; {', '.join([*totals.values(), ''])}largest {graphed['largest']:,} nodes"]


def _accepted(counted: Mapping[str, Any]) -> str:
    """Say how many items were accepted and how many were not."""
    return (
        f"{plural(counted['items'] + counted['undone'], 'item')}: {counted['accepted']:,} accepted, "
        f"{counted['items'] - counted['accepted']:,} rejected ({counted['rejected_fraction']:.1%})"
        + (f", {counted['undone']:,} not done" if counted["undone"] else "")
        + (f", {counted['unnamed']:,} missing that the list does not name" if counted.get("unnamed") else "")
    )


def rejection_table(rejected: Mapping[str, int], examples: Mapping[str, str]) -> Table:
    """Show why items were left out, most frequent reason first."""
    rows = [(reason, f"{count:,}", examples.get(reason, "")) for reason, count in rejected.items()]
    return table(("rejected", "items", "for example"), rows, right="items")


def age(now: datetime, moment: datetime) -> str:
    """Return how long ago a moment was, as people say it."""
    seconds = max(0.0, (now - moment).total_seconds())
    for unit, length in (("d", 86400), ("h", HOUR), ("min", MINUTE)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def stage_line(name: str, counts: Mapping[str, int]) -> str:
    """Say what a stage found when it was submitted: what is done already, and what is not."""
    parts = [f"{counts['cached']:,} cached", f"{counts['missing']:,} to do"]
    if name == "validate":
        parts = parts[1:]
    if name == "regenerate":
        return f"regenerate: {named_records(counts['items'])}"
    if counts.get("unplanned"):
        return f"{name}: {LATER.get(name, 'counted when the model is trained')}"
    if counts["refused"]:
        parts.append(f"{counts['refused']:,} {REFUSED[name]}")
    if counts["unusable"]:
        parts.append(f"{counts['unusable']:,} missing or unreadable")
    tasks = f" in {plural(counts['tasks'], 'task')}" if counts["tasks"] else ""
    residues = f" ({counts['residues']:,} residues)" if counts.get("residues") else ""
    if counts.get("unnamed"):
        parts.append(f"{counts['unnamed']:,} missing that the list does not name")
    waiting = f"; {plural(counts['waiting'], 'item')} still to scan" if counts.get("waiting") else ""
    if counts.get("unkept"):
        parts = ["built when they are read (graph.cache: false)"]
    return f"{name}: {plural(counts['items'], _unit(name, counts))}: {', '.join(parts)}{tasks}{residues}{waiting}"


def _unit(name: str, counts: Mapping[str, Any]) -> str:
    """Return what a stage works through: a reader's data set is read as one."""
    return "data set" if counts.get("sets") else UNIT[name]


def plan_table(plans: Iterable[tuple[str, Mapping[str, int], int, int, Asked | None]]) -> Table:
    """Show what would be submitted."""
    rows = []
    for name, counts, made_bytes, cpus, ask in plans:
        asks = ("", "", "") if ask is None else (cpus, size(ask.mem_bytes), duration(ask.time_s))
        disk = size(made_bytes) if made_bytes else ""
        rows.append((name, f"{_unit(name, counts)}s", *(f"{counts[column]:,}" for column in PLANNED), *asks, disk))
    columns = ("stage", "of", *PLANNED, "cpus", "mem", "time limit", "disk")
    return table(columns, rows, right=" ".join((*PLANNED, "cpus", "mem", "disk")))


def trained_lines(census: Mapping[str, Any]) -> list[str]:
    """Say what came of a training."""
    if census.get("command"):
        return script_lines(census)
    last, best, monitor = census["last"], census["best"], census["monitor"]
    said = [f"{plural(census['epochs'], 'epoch')}, {plural(census['steps'], 'step')}"]
    if last:
        losses = ", ".join(f"{name} {_figure(value)}" for name, value in last["loss"].items())
        pace = f"{last['items_per_s']:,.3g} items/s, waited for data {last['wait_share']:.1%}"
        said.append(f"last epoch: {losses}; {pace}")
        memory = [size(last[name]) for name in ("allocated_bytes", "reserved_bytes", "peak_bytes")]
        said.append(f"memory: {memory[0]} allocated, {memory[1]} reserved, {memory[2]} at the peak")
    if best:
        figures = ", ".join(f"{name} {_figure(value)}" for name, value in best["validation"].items())
        said.append(f"best epoch, by {monitor}, is {best['epoch']} of {census['epochs']}: {figures}")
    said += [f"{plural(census['ooms'], 'out-of-memory')} survived"] if census["ooms"] else []
    climbed = [f"{plural(items, 'item')} by {rung}" for rung, items in census.get("remedied", {}).items()]
    said += [f"remedies: {', '.join(climbed)}"] if climbed else []
    said += [f"{plural(census['cropped'], 'item')} cropped"] if census["cropped"] else []
    return [*said, f"model: {census['folder']}"]


def script_lines(census: Mapping[str, Any]) -> list[str]:
    """Say what came of a script."""
    micro = f", the last with micro-batches of {census['micro_batch']}" if census["ooms"] else ""
    attempts = [f"{plural(census['attempts'], 'attempt')}{micro}"] if census["attempts"] > 1 else []
    command = f"a script, which runs whenever it is asked for: {census['command']}"
    return [command, *attempts, f"output: {census['folder']}"]


def script_figures(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Say what the first process of a script told last."""
    told = {name: value for one in reversed(list(figures.values())) for name, value in one.items()}
    said = [f"{name.removeprefix(SCRIPT)} {value:,.6g}" for name, value in told.items() if name.startswith(SCRIPT)]
    return [f"the script says: {', '.join(said[:FIGURES_SHOWN])}"] if said else []


def found_so_far(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Say how much a validation that goes on has found."""
    found = sum(int(one.get(FINDINGS, 0)) for one in figures.values())
    return [f"{plural(found, 'thing')} wrong so far"] if found else []


def read_so_far(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Say how many items a reader has given so far."""
    read = sum(int(one.get(ITEMS_READ, 0)) for one in figures.values())
    return [f"{plural(read, 'item')} read so far"] if read else []


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def evaluated_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Say what a model comes to on a split."""
    if census["nothing"]:
        return []
    shown: list[RenderableType] = [_accepted(census), _applied(census)]
    if census["figures"]:
        rows = [(name, _figure(value)) for name, value in census["figures"].items()]
        shown += ["", table((census["split"] or "all items", "figure"), rows, right="figure"), ""]
    return [*shown, f"kept: {census['file']}"] if census["file"] else shown


def predicted_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Say where predictions are, and how they begin."""
    shown: list[RenderableType] = [_accepted(census)]
    if census["folder"]:
        files = ", ".join(f"{name} {size(count)}" for name, count in census["files"].items())
        shown += [_applied(census), f"predictions: {census['folder']}", f"  {files}", *census["lines"]]
    return shown


def _applied(census: Mapping[str, Any]) -> str:
    """Say which model was applied to what."""
    return f"split {census['split'] or 'null: every item'}; {census['checkpoint']} of {census['model']}"


def found_damage(stage: Mapping[str, Any]) -> bool:
    """Say whether a stage came to its end and found that something is wrong."""
    return stage["name"] == "validate" and bool(stage["census"] and stage["census"]["summary"]["findings"])


def validated_files(stage: Mapping[str, Any]) -> str:
    """Say how many files of which sort were looked at, where that is known; empty: it is not."""
    if stage["name"] != "validate" or not (stage["census"] or {}).get("shards"):
        return ""
    indexes = stage["items"] - stage["census"]["shards"]
    return f"{plural(stage['census']['shards'], 'shard')} and {indexes:,} {'index' if indexes == 1 else 'indexes'}"


def validated_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Say what is wrong with a cache."""
    found = census["summary"]
    if not census["report"]:
        return [f"{plural(census['undone'], 'file')} not judged"]
    read = f"{size(found['bytes'])} read ({found['how']})"
    told = f"{plural(found['records'], 'record')}: {found['whole']:,} whole, {found['lost']:,} lost; {read}"
    rows = [(kind, *(f"{counts[name]:,}" for name in VALIDATED)) for kind, counts in found["kinds"].items()]
    shown: list[RenderableType] = [told, "", table(("kind", *VALIDATED), rows, right=" ".join(VALIDATED)), ""]
    if found["findings"]:
        faults = ", ".join(f"{count:,} {fault}" for fault, count in sorted(found["faults"].items()))
        shown.append(f"{plural(found['findings'], 'thing')} wrong: {faults}")
    return [*shown, f"{'damage list' if found['findings'] else 'nothing is wrong'}: {census['report']}"]


def regenerated_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Say what became of the records that a damage list names."""
    if not census["source"]:
        return ["everything that this data set needs is there"]
    named = census["named"]
    columns = {"named": named} | {words: census[name] for name, words in REGENERATED.items() if census[name]}
    rows = [(kind, *(f"{counts.get(kind, 0):,}" for counts in columns.values())) for kind in named]
    shown: list[RenderableType] = [f"named by {census['source']}"]
    shown += ["", table(("kind", *columns), rows, right=tuple(columns)), ""] if rows else []
    if census["untold"]:
        kinds = ", ".join(census["untold"])
        shown.append(f"a damaged file does not say what it held: whatever was missing was made of {kinds}")
    return shown


def named_records(count: int) -> str:
    """Say what is to be made anew."""
    return f"{plural(count, 'record')} named by the list" if count else "whatever is missing"


CENSUS: Mapping[str, Callable[[Mapping[str, Any]], list[Any]]] = {
    "scan": census_lines,
    "embed": embedded_lines,
    "graph": graphed_lines,
    "train": trained_lines,
    "evaluate": evaluated_lines,
    "predict": predicted_lines,
    "validate": validated_lines,
    "regenerate": regenerated_lines,
}
LATER = {"train": "planned when its graphs are there"}


def run_report(run: Mapping[str, Any]) -> list[RenderableType]:
    """Show a run: its stages, what they made, and what went wrong."""
    state = f"{DAMAGED} ({run['state']})" if any(map(found_damage, run["stages"])) else run["state"]
    shown: list[RenderableType] = [f"run {run['name']}: {state}"]
    if run["state"] == "abandoned":
        shown.append(f"nobody looks after it any more; finished work is kept: pipeline resume {run['name']}")
    shown += [f"supervisor: {run['supervisor']}"] if run.get("supervisor") else []
    shown += [f"the queue could not be asked: {run['trouble']}"] if run.get("trouble") else []
    rejected: Mapping[str, int] = {}
    for stage in run["stages"]:
        took = f" in {duration(stage['ended_at'] - stage['started_at'])}" if stage["ended_at"] else ""
        name = stage["name"]
        counts = f"{stage['cached']:,} cached, {stage['items_done']:,} of {stage['missing']:,} done"
        if name == "validate":
            counts = f"{stage['items_done']:,} read"
        counts = f"{validated_files(stage) or plural(stage['items'], _unit(name, stage))}, {counts}"
        if name == "regenerate":
            counts = named_records(stage["items"])
        state = DAMAGED if found_damage(stage) else stage["state"]
        shown += ["", f"{name}: {state}{took}: {counts}"]
        shown += tasks_line(stage)
        shown += memory_line(stage)
        shown += script_figures(stage["figures"])
        shown += [] if stage["census"] else [*found_so_far(stage["figures"]), *read_so_far(stage["figures"])]
        shown += [", ".join(speed(stage["measured"]))] if stage["measured"] else []
        if stage["census"]:
            shown += CENSUS[name](stage["census"])
            if stage["census"]["rejected"] not in ({}, rejected):  # what an earlier stage has left out stays left out
                rejected = stage["census"]["rejected"]
                shown += ["", rejection_table(rejected, stage["census"]["examples"])]
        elif stage["reasons"]:
            shown.append(rejection_table(stage["reasons"], {}))
        shown += [f"warning: {warning}" for warning in stage["warnings"]]
        failed = [one for one in stage["failures"] if one["cause"] != "cancelled" or run["state"] != "stopped"]
        shown += [f"{plural(len(failed), 'attempt')} did not end well", *story(failed)] if failed else []
    if run["error"]:
        shown += ["", f"error: {run['error']}"]
    return shown


def tasks_line(stage: Mapping[str, Any]) -> list[str]:
    """Say where the tasks of a stage stand, while they do not all stand in one place."""
    states = {name: count for name, count in stage["task_states"].items() if count}
    if (stage["state"] == "done" or found_damage(stage)) and set(states) <= {"done"}:
        return []
    where = ", ".join(f"{states[name]:,} {name}" for name in TASK_STATES if name in states)
    waits = [f"waiting for: {', '.join(stage['waits_for'])}"] if stage.get("waits_for") else []
    left = [f"about {duration(stage['left_s'])} left"] if stage.get("left_s") and not stage["measured"] else []
    return ["; ".join([f"tasks: {where}", *waits, *left])] if where else []


def memory_line(stage: Mapping[str, Any]) -> list[str]:
    """Say what tasks have of memory, and what they used of it."""
    asked, peak, gpu = (stage.get("use", {}).get(name) for name in ("asked_bytes", "peak_bytes", "gpu_peak_bytes"))
    parts = (
        [f"memory of a task: {size(asked)} asked for, {f'{size(peak)} used' if peak else 'use unknown'}"]
        if asked
        else []
    )
    parts += [f"GPU memory {size(gpu)}"] if gpu else []
    return [", ".join(parts)] if parts else []


def story(failed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Tell what failed in the same way, and what was done about it, in one go; the most frequent first."""
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for one in failed:
        alike.setdefault((one["cause"], one["number"], one["then"], one["ask"]["mem_bytes"]), []).append(one)
    groups = sorted(alike.values(), key=len, reverse=True)
    more = sum(map(len, groups[STORIES_SHOWN:]))
    rest = [f"  and {plural(more, 'attempt')} more: pipeline logs --failed"] if more else []
    return [*map(_told, groups[:STORIES_SHOWN]), *rest]


def _told(group: Sequence[Mapping[str, Any]]) -> str:
    """Say how some attempts failed, by the first of them."""
    first = group[0]
    tasks = ", ".join(str(one["task"]) for one in group[:TASKS_NAMED]) + (", …" if len(group) > TASKS_NAMED else "")
    asked = f" with {size(first['ask']['mem_bytes'])}" if first["cause"] == "host_oom" else ""
    then = f"\n    then: {first['then']}" if first["then"] else ""
    said = f"\n    it said: {first['said']}" if first["said"] and first["said"] not in first["reason"] else ""
    noun = "task" if len(group) == 1 else "tasks"
    what = f"  {noun} {tasks}, attempt {first['number']}: {first['cause']}{asked}: {first['reason']}"
    return f"{what}{said}{then}\n    log: {first['log']}"


def estimate_report(stages: Sequence[Mapping[str, Any]]) -> list[RenderableType]:
    """Show what each stage would take, and where the numbers are from."""
    columns = ("stage", "to do", "cached", "tasks", "cpus", "gpus", "mem", "limit", "disk", "about")
    shown: list[RenderableType] = [table(columns, map(_estimate_row, stages), right=" ".join(columns[1:]))]
    waiting = {stage["stage"]: stage["counts"].get("waiting", 0) for stage in stages}
    unknown = "not scanned yet, and what they hold is not counted"
    shown += [f"{name}: {plural(count, 'item')} {unknown}" for name, count in waiting.items() if count]
    for stage in stages:
        if stage["tasks"]:
            shown += ["", f"{stage['stage']}: where the numbers are from"]
            shown += [f"  {name}: {source}" for name, source in stage["sources"].items()]
    return shown


def _estimate_row(stage: Mapping[str, Any]) -> tuple[str, ...]:
    counts = stage["counts"]
    if not stage["tasks"]:
        return (stage["stage"], f"{counts['missing']:,}", f"{counts['cached']:,}", "0", *[""] * 6)
    return (
        stage["stage"],
        f"{counts['missing']:,}",
        f"{counts['cached']:,}",
        f"{stage['tasks']:,}",
        str(stage["cpus"]),
        str(stage["gpus"]),
        size(stage["mem_bytes"]),
        duration(stage["time_s"]),
        size(stage["disk_bytes"]) if stage["disk_bytes"] else "",
        "unknown" if stage["all_s"] is None else duration(stage["all_s"]),
    )
