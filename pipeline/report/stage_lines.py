"""A stage as text: its state, its measurements and its results."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.journal.run_status import State
from pipeline.records import LOWEST_COSINE
from pipeline.report.tables import counts_text, plural, table_of
from pipeline.training.step_clock import latest_shares, shown_shares
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from rich.console import RenderableType
    from rich.table import Table

    from pipeline.journal.run_status import StageStatus, Wait
    from pipeline.journal.run_view import RunView
    from pipeline.report.tables import Column

UNIT = {  # other stages: item
    "embed": "sequence",
    "graph": "graph",
    "train": "step",
    "validate": "file",
    "regenerate": "record",
}
NO_COUNTS: dict[str, int] = {}
EDGE_KINDS = ("bond", "angle", "dihedral", "near")
# The outcomes of a record on a damage list.
REGENERATED = {
    "whole": "there now",
    "foreign": "of no item here",
    "unmade": "could not be made",
    "later": "made when needed",
}
DAMAGED = "damage was found"
TASK_STATES = (
    State.DONE, State.RUNNING, State.WAITING, State.STALLED, State.FAILED, State.CANCELLED, State.STOPPED,
)  # fmt: skip
SCRIPT = "script."  # prefix of figures that a user's script reports
FIGURES_SHOWN = 8
POINTS_SHOWN = 40  # of a sweep
SO_FAR = {"findings": "thing{} wrong", "items_read": "item{} read"}  # figures of a validation and of a reader's scan


def unit_of(name: str, counts: Mapping[str, int] = NO_COUNTS) -> str:
    """Return the noun for the units of a stage; a reader's data set is a single unit."""
    if counts.get("encoders"):
        return "embedding"
    return "data set" if counts.get("sets") else UNIT.get(name.split()[0], "item")


def _of(name: str, row: tuple[str, Mapping[str, Any]]) -> Any:
    return row[1].get(name, 0)


def _counted_by(first: str, columns: Iterable[str]) -> list[Column]:
    """Return the columns of a table of a dictionary's items: the key, then counts of its values."""
    return [(first, 0), *((name, partial(_of, name), "count") for name in columns)]


def _spaced(columns: list[Column], rows: Iterable[Any]) -> list[RenderableType]:
    return ["", table_of(columns, rows), ""]


def scanned_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Show the numbers of a scanned data set."""
    distinct = f"{census['sequences']:,} distinct sequences, longest {census['longest']:,}"
    incomplete, without_pae, read_on = (
        plural(census.get(name, 0), "item") for name in ("items_incomplete", "items_without_pae", "items_read_on")
    )
    notes = {
        "splits": "splits: " + ", ".join(f"{name} {count:,}" for name, count in census["splits"].items()),
        "chains": f"chains: {counts_text(census['chains'])}; {distinct}",
        "residues_left_out": f"residues left out: {census.get('residues_left_out', 0):,} in {incomplete}, by name in "
        f"{census.get('lists')}/residues_left_out.csv",
        "residues_unsure": f"residues below structures.min_plddt: {census.get('residues_unsure', 0):,}",
        "items_without_pae": f"without predicted aligned errors: {without_pae}, whose edges have NaN in their place",
        "items_read_on": f"read on behind END: {read_on}, where chains of new names follow it",
    }
    shown: list[RenderableType] = [_accepted(census), *(line for name, line in notes.items() if census.get(name))]
    sizes = [(name, spread) for name, spread in census["sizes"].items() if spread["max"]]
    return [*shown, *(_spaced(_counted_by("size", ("median", "p95", "max")), sizes)[:-1] if sizes else [])]


def embedded_lines(embedded: Mapping[str, Any]) -> list[RenderableType]:
    """Show the numbers of an embedded data set."""
    parts = counts_text({f"by {name}": part["cached"] for name, part in embedded.get("parts", {}).items()})
    what = f"embeddings of distinct sequences ({parts})" if parts else "distinct sequences embedded"
    sizes = f"{embedded['residues']:,} residues, longest {embedded['longest']:,}"
    return [f"{_accepted(embedded)}; {embedded['sequences']:,} {what}, {sizes}"]


def graphed_lines(graphed: Mapping[str, Any]) -> list[RenderableType]:
    """Show the numbers of a data set of graphs."""
    totals = {name: f"{count:,} {name}" for name, count in graphed["totals"].items() if count}
    typed = ", ".join(totals.pop(name) for name in EDGE_KINDS if name in totals)
    totals |= {"edges": f"{totals['edges']} ({typed})"} if typed else {}
    return [f"{_accepted(graphed)}; {', '.join([*totals.values(), ''])}largest {graphed['largest']:,} nodes"]


def _accepted(counted: Mapping[str, Any]) -> str:
    """Describe the accepted, rejected and missing items; an item may have several predictions."""
    total, each = counted["items"] + counted["undone"], counted.get("each", 1)
    rest = {"not done": counted["undone"], "missing that the list does not name": counted.get("unnamed", 0)}
    return (
        (plural(total, "item") if each == 1 else f"{plural(total, 'prediction')} ({each} an item)")
        + f": {counted['accepted']:,} usable, "
        f"{counted['items'] - counted['accepted']:,} rejected ({counted['rejected_fraction']:.1%})"
        + "".join(f", {count:,} {words}" for words, count in rest.items() if count)
    )


def rejection_table(rejected: Mapping[str, int], examples: Mapping[str, str]) -> Table:
    """Show the reasons of rejections, the most frequent first."""
    columns: list[Column] = [
        ("rejected", 0),
        ("items", 1, "count"),
        ("for example", lambda row: examples.get(row[0], "")),
    ]
    return table_of(columns, rejected.items())


def swept_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Return the outcome of each point of a sweep, and the number of points in each state."""
    points = census["points"]
    columns: list[Column] = [
        ("point", "name"), ("state", "state"), ("epochs", lambda point: point.get("epochs", 0), "count"),
        (f"best {census['monitor']}", "best", "figure"), ("model", "model"),
    ]  # fmt: skip
    states = counts_text(Counter(point["state"] for point in points))
    shown: list[RenderableType] = [f"{plural(len(points), 'point')}: {states}"]
    shown += _spaced(columns, points[:POINTS_SHOWN])
    more = len(points) - POINTS_SHOWN
    shown += [f"and {plural(more, 'point')} more: pipeline compare RUN"] if more > 0 else []
    return [*shown, *(f"{point['name']}: pruned: {point['why']}" for point in points if point["state"] == "pruned")]


def point_lines(stage: StageStatus) -> list[str]:
    """Return the progress of each point of a running sweep."""
    done = Counter[int]()
    for process, figures in stage.figures.items():
        done[int(figures["task"])] += stage.done.get(process, 0)
    states = [stage.state_of(stage.task(number)) for number in range(len(stage.names))]
    lines = [
        f"  {name}: {stage.cancelled[name] if state is State.CANCELLED else state}"
        f"{f', {done[number]:,} steps' if done[number] else ''}"
        for number, (name, state) in enumerate(zip(stage.names, states, strict=True))
    ]
    more = [f"  and {plural(len(lines) - POINTS_SHOWN, 'point')} more"] if len(lines) > POINTS_SHOWN else []
    return lines[:POINTS_SHOWN] + more


def trained_lines(census: Mapping[str, Any]) -> list[Any]:
    """Return the result of a training."""
    if census.get("command"):
        return script_lines(census)
    if census.get("points"):
        return swept_lines(census)
    last, best, monitor = census["last"], census["best"], census["monitor"]
    lines = [f"{plural(census['epochs'], 'epoch')}, {plural(census['steps'], 'step')}"]
    if last:
        pace = ", ".join([f"{last['items_per_s']:,.3g} items/s", *shown_shares(last["seconds"])])
        lines.append(f"last epoch: {_figures(last['loss'])}; {pace}")
        memory = [format_bytes(last[name]) for name in ("allocated_bytes", "reserved_bytes", "peak_bytes")]
        lines.append(f"memory: {memory[0]} allocated, {memory[1]} reserved, {memory[2]} at the peak")
    if best:
        figures = _figures(best["validation"])
        lines.append(f"best epoch, by {monitor}, is {best['epoch']} of {census['epochs']}: {figures}")
    if len(course := census.get("course", ())) > 1:
        lines.append(f"{monitor} from the first epoch to the last: {' → '.join(map(_figure, course))}")
    remedied = ", ".join(f"{plural(items, 'item')} by {rung}" for rung, items in census.get("remedied", {}).items())
    lines += [f"{plural(census['ooms'], 'out-of-memory')} survived"] if census["ooms"] else []
    lines += [f"remedies: {remedied}"] if remedied else []
    lines += [f"{plural(census['cropped'], 'item')} cropped"] if census["cropped"] else []
    return [*lines, f"model: {census['folder']}"]


def script_lines(census: Mapping[str, Any]) -> list[str]:
    """Return the result of a user's own training script."""
    micro = f", the last with micro-batches of {census['micro_batch']}" if census["ooms"] else ""
    attempts = [f"{plural(census['attempts'], 'attempt')}{micro}"] if census["attempts"] > 1 else []
    command = f"a script, which runs whenever it is asked for: {census['command']}"
    return [command, *attempts, f"output: {census['folder']}"]


def evaluated_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Show the metrics of a model on a split."""
    if census["nothing"]:
        return []
    shown: list[RenderableType] = [_accepted(census), _applied(census)]
    if census["figures"]:
        shown += _spaced([(census["split"] or "all items", 0), ("figure", 1, "figure")], census["figures"].items())
    return [*shown, f"kept: {census['file']}"] if census["file"] else shown


def predicted_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Show where predictions are, and their first lines."""
    shown: list[RenderableType] = [_accepted(census)]
    if census["folder"]:
        files = ", ".join(f"{name} {format_bytes(count)}" for name, count in census["files"].items())
        shown += [_applied(census), f"predictions: {census['folder']}", f"  {files}", *census["lines"]]
    return shown


def _applied(census: Mapping[str, Any]) -> str:
    """Describe the applied model and its items."""
    return f"split {census['split'] or 'null: every item'}; {census['checkpoint']} of {census['model']}"


def _figures(named: Mapping[str, float | None]) -> str:
    return ", ".join(f"{name} {_figure(value)}" for name, value in named.items())


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def found_damage(stage: StageStatus) -> bool:
    """Say whether a stage is a validation that ended and found damage."""
    return stage.name == "validate" and bool(stage.census and stage.census["summary"]["findings"])


def state_of_stage(stage: StageStatus) -> str:
    """Return the state of a stage, or that it found damage."""
    return DAMAGED if found_damage(stage) else stage.state.value


def validated_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Show the result of a validation of a cache."""
    summary = census["summary"]
    if not census["report"]:
        return [f"{plural(census['undone'], 'file')} not judged"]
    read = f"{format_bytes(summary['bytes'])} read ({summary['how']})"
    totals = f"{plural(summary['records'], 'record')}: {summary['whole']:,} whole, {summary['lost']:,} lost; {read}"
    shown = [totals, *_spaced(_counted_by("kind", ("records", "whole", "lost")), summary["kinds"].items())]
    if summary["findings"]:
        faults = counts_text(dict(sorted(summary["faults"].items())))
        shown.append(f"{plural(summary['findings'], 'thing')} wrong: {faults}")
    return [*shown, f"{'damage list' if summary['findings'] else 'nothing is wrong'}: {census['report']}"]


def regenerated_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Show the outcomes of the records of a damage list."""
    if not census["source"]:
        return ["everything that this data set needs is there"]
    named = census["named"]
    counts = {"named": named} | {words: census[name] for name, words in REGENERATED.items() if census[name]}
    rows = [(kind, {name: of_kind.get(kind, 0) for name, of_kind in counts.items()}) for kind in named]
    shown: list[RenderableType] = [f"named by {census['source']}"]
    shown += _spaced(_counted_by("kind", counts), rows) if rows else []
    if census["untold"]:
        kinds = ", ".join(census["untold"])
        shown.append(f"a damaged file does not say what it held: whatever was missing was made of {kinds}")
    return shown


CENSUS: Mapping[str, Callable[[Mapping[str, Any]], list[Any]]] = {
    "scan": scanned_lines,
    "embed": embedded_lines,
    "graph": graphed_lines,
    "train": trained_lines,
    "evaluate": evaluated_lines,
    "predict": predicted_lines,
    "validate": validated_lines,
    "regenerate": regenerated_lines,
}


def result_lines(stage: StageStatus) -> list[Any]:
    """Return lines on the result of an ended stage; stages unknown here provide their own."""
    if not stage.census:
        return []
    return CENSUS[stage.name](stage.census) if stage.name in CENSUS else stage.census.get("said", [])


def progress_lines(stage: StageStatus, run: RunView) -> Iterator[str]:
    """Yield the tasks of a stage, the figures of a script, the progress and the speed."""
    states = stage.task_states()
    is_done = (stage.state is State.DONE or found_damage(stage)) and set(states) <= {State.DONE}
    if where := "" if is_done else counts_text({name: states[name] for name in TASK_STATES if name in states}):
        waits = [f"waiting for: {', '.join(reasons)}"] if (reasons := run.waits_for(stage)) else []
        if waits and (delayed := run.delayed(stage)):
            waits[0] += f" ({delayed})"
        left_s = run.left_s(stage)
        left = [f"about {format_seconds(left_s)} left"] if left_s and not stage.measured() else []
        shared = list(dict.fromkeys(filter(None, (job.shared for job in stage.jobs.values()))))
        yield "; ".join([f"tasks: {where}", *shared, *waits, *left])
    if best := stage.best_trial:
        yield f"best trial: {best.number}, {best.name}"
    # With several processes, the figures of the first.
    latest = {name: value for process in reversed(list(stage.figures.values())) for name, value in process.items()}
    shown = [f"{name.removeprefix(SCRIPT)} {value:,.6g}" for name, value in latest.items() if name.startswith(SCRIPT)]
    if shown:
        yield f"the script says: {', '.join(shown[:FIGURES_SHOWN])}"
    if not stage.census:
        yield from point_lines(stage) if stage.is_swept else counted_so_far(stage.figures)
    for part in stage.by_part():
        if measured := speed(part.measured()):
            yield ", ".join([*([f"{part.of}: {counted(part)}"] if part.of else []), *measured])


def counted_so_far(figures: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield counts of a running stage: findings of a validation, a reader's items, extra memory of an epoch."""
    for name, words in SO_FAR.items():
        if count := sum(int(process.get(name, 0)) for process in figures.values()):
            yield f"{count:,} {words.format('' if count == 1 else 's')} so far"
    yield from (waits for process in figures.values() for waits in latest_shares(process))


def wait_lines(waits: Iterable[Wait], now: float = math.inf) -> list[str]:
    """Describe present waits that need a person, with the command that helps; then past ones."""
    lines = []
    for wait in sorted(waits, key=lambda wait: (wait.is_over, wait.since)):
        lasted = f" for {format_seconds(wait.lasted_s(now))}" if wait.since and math.isfinite(wait.until or now) else ""
        tasks = f"{plural(wait.tasks, 'task')} " if wait.tasks else ""
        sign, how, then = ("", "waited", "") if wait.is_over else ("! ", "held", f"\n  next: {wait.remedy}")
        lines.append(f"{sign}{wait.of}: {tasks}{how}{lasted}: {wait.words} ({wait.reason}){then}")
    return lines


def memory_line(stage: StageStatus) -> list[str]:
    """Describe the requested and used memory of a task."""
    asked, peak, gpu = stage.use().values()
    reported_peak = stage.highest("host_peak_bytes")
    # Until a task has ended, only its processes report their use.
    so_far = f"{format_bytes(reported_peak)} used by a process so far" if reported_peak else "use unknown"
    used = f"{format_bytes(peak)} used" if peak else so_far
    parts = [f"memory per task: {format_bytes(asked)} requested, {used}"] if asked else []
    parts += [f"GPU memory {format_bytes(gpu)}"] if gpu else []
    return [", ".join(parts)] if parts else []


def counted(stage: StageStatus) -> str:
    """Describe the cached and finished part of a stage."""
    return f"{stage.cached:,} cached, {stage.items_done:,} of {stage.missing:,} done"


def speed(measured: Mapping[str, float]) -> list[str]:
    """Return a stage's speed, time left, peak memory, and the embeddings' similarity to the reference."""
    if not measured:
        return []
    parts = {
        "residues_per_s": f"{measured['residues_per_s']:,.0f} residues/s a process",
        "pad_factor": f"pad factor {measured['pad_factor']:.2f}",
        "left_s": f"{format_seconds(measured['left_s'])} left",
        "peak_rss_bytes": f"peak {format_bytes(measured['peak_rss_bytes'])}",
        "peak_gpu_bytes": f"GPU {format_bytes(measured['peak_gpu_bytes'])}",
        "splits": f"{plural(int(measured['splits']), 'split')} for memory",
    }
    shown = [text for name, text in parts.items() if measured[name]]
    return [*shown, *(f"{name} {value:.7f}" for name, value in measured.items() if name.startswith(LOWEST_COSINE))]
