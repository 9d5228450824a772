"""A stage in words: what it works through, how it stands, what it measured, and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.journal.active_runs import use
from pipeline.report.tables import plural, text_table
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import RenderableType
    from rich.table import Table

    from pipeline.journal.active_runs import SeenRun
    from pipeline.journal.run_status import StageStatus

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
EDGE_KINDS = ("bond", "angle", "dihedral", "near")
VALIDATED = ("records", "whole", "lost")
# What may become of a record that a damage list names.
REGENERATED = {
    "whole": "there now",
    "foreign": "of no item here",
    "unmade": "could not be made",
    "later": "made when needed",
}
DAMAGED = "damage was found"
TASK_STATES = ("done", "running", "waiting", "failed")
SCRIPT = "script."  # what a script of the user's own tells of itself
FIGURES_SHOWN = 8
FINDINGS = "findings"  # a figure of validation
ITEMS_READ = "items_read"  # a figure of a scan by a reader


def unit_of(name: str, counts: Mapping[str, int]) -> str:
    """Return what a stage works through: a reader's data set is read as one."""
    return "data set" if counts.get("sets") else UNIT[name]


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
        shown += ["", text_table(("size", "median", "p95", "max"), rows, right="median p95 max")]
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
    return text_table(("rejected", "items", "for example"), rows, right="items")


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
        memory = [format_bytes(last[name]) for name in ("allocated_bytes", "reserved_bytes", "peak_bytes")]
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


def evaluated_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Say what a model comes to on a split."""
    if census["nothing"]:
        return []
    shown: list[RenderableType] = [_accepted(census), _applied(census)]
    if census["figures"]:
        rows = [(name, _figure(value)) for name, value in census["figures"].items()]
        shown += ["", text_table((census["split"] or "all items", "figure"), rows, right="figure"), ""]
    return [*shown, f"kept: {census['file']}"] if census["file"] else shown


def predicted_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Say where predictions are, and how they begin."""
    shown: list[RenderableType] = [_accepted(census)]
    if census["folder"]:
        files = ", ".join(f"{name} {format_bytes(count)}" for name, count in census["files"].items())
        shown += [_applied(census), f"predictions: {census['folder']}", f"  {files}", *census["lines"]]
    return shown


def _applied(census: Mapping[str, Any]) -> str:
    """Say which model was applied to what."""
    return f"split {census['split'] or 'null: every item'}; {census['checkpoint']} of {census['model']}"


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def found_damage(stage: StageStatus) -> bool:
    """Say whether a stage came to its end and found that something is wrong."""
    return stage.name == "validate" and bool(stage.census and stage.census["summary"]["findings"])


def state_of_stage(stage: StageStatus) -> str:
    """Return how a stage stands, in a word or three."""
    return DAMAGED if found_damage(stage) else stage.state.value


def validated_files(stage: StageStatus) -> str:
    """Say how many files of which sort were looked at, where that is known; empty: it is not."""
    shards = (stage.census or {}).get("shards", 0)
    if stage.name != "validate" or not shards:
        return ""
    indexes = stage.items - shards
    return f"{plural(shards, 'shard')} and {indexes:,} {'index' if indexes == 1 else 'indexes'}"


def validated_lines(census: Mapping[str, Any]) -> list[RenderableType]:
    """Say what is wrong with a cache."""
    found = census["summary"]
    if not census["report"]:
        return [f"{plural(census['undone'], 'file')} not judged"]
    read = f"{format_bytes(found['bytes'])} read ({found['how']})"
    told = f"{plural(found['records'], 'record')}: {found['whole']:,} whole, {found['lost']:,} lost; {read}"
    rows = [(kind, *(f"{counts[name]:,}" for name in VALIDATED)) for kind, counts in found["kinds"].items()]
    shown: list[RenderableType] = [told, "", text_table(("kind", *VALIDATED), rows, right=" ".join(VALIDATED)), ""]
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
    shown += ["", text_table(("kind", *columns), rows, right=tuple(columns)), ""] if rows else []
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


def tasks_line(stage: StageStatus, run: SeenRun) -> list[str]:
    """Say where the tasks of a stage stand, while they do not all stand in one place."""
    states = stage.task_states()
    if (stage.state.value == "done" or found_damage(stage)) and set(states) <= {"done"}:
        return []
    where = ", ".join(f"{states[name]:,} {name}" for name in TASK_STATES if name in states)
    waits = [f"waiting for: {', '.join(reasons)}"] if (reasons := run.waits_for.get(stage.name)) else []
    left_s = run.left_s(stage)
    left = [f"about {format_seconds(left_s)} left"] if left_s and not stage.measured() else []
    return ["; ".join([f"tasks: {where}", *waits, *left])] if where else []


def memory_line(stage: StageStatus) -> list[str]:
    """Say what tasks have of memory, and what they used of it."""
    asked, peak, gpu = use(stage).values()
    by_own_word = max((int(one.get("host_peak_bytes", 0)) for one in stage.figures.values()), default=0)
    so_far = (
        f"{format_bytes(by_own_word)} by a process so far" if by_own_word else "use unknown"
    )  # before a task has ended
    parts = (
        [f"memory of a task: {format_bytes(asked)} asked for, {f'{format_bytes(peak)} used' if peak else so_far}"]
        if asked
        else []
    )
    parts += [f"GPU memory {format_bytes(gpu)}"] if gpu else []
    return [", ".join(parts)] if parts else []


def speed(measured: Mapping[str, float]) -> list[str]:
    """Say how fast a stage is, how long it will take, how close to the reference, and how much memory it took."""
    if not measured:
        return []
    parts = [f"{measured['residues_per_s']:,.0f} residues/s a process", f"pad factor {measured['pad_factor']:.2f}"]
    if measured["left_s"]:
        parts.append(f"{format_seconds(measured['left_s'])} left")
    parts.append(f"peak {format_bytes(measured['peak_rss_bytes'])}")
    if measured["peak_gpu_bytes"]:
        parts.append(f"GPU {format_bytes(measured['peak_gpu_bytes'])}")
    if measured["splits"]:
        parts.append(f"{plural(int(measured['splits']), 'split')} for memory")
    return [*parts, f"lowest cosine to fair-esm {measured['lowest_cosine']:.7f}"]


def script_figures(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Say what the first process of a script told last."""
    told = {name: value for one in reversed(list(figures.values())) for name, value in one.items()}
    said = [f"{name.removeprefix(SCRIPT)} {value:,.6g}" for name, value in told.items() if name.startswith(SCRIPT)]
    return [f"the script says: {', '.join(said[:FIGURES_SHOWN])}"] if said else []


def counted_so_far(figures: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Say how much a validation that goes on has found, and how many items a reader has given."""
    found, read = (sum(int(told.get(name, 0)) for told in figures.values()) for name in (FINDINGS, ITEMS_READ))
    return [f"{plural(found, 'thing')} wrong so far"] * bool(found) + [f"{plural(read, 'item')} read so far"] * bool(
        read
    )
