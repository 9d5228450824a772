"""The plan of a training as text: its memory by component, its batches, its job, and where each number is from."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pipeline.memory.hardware.allocator_variables import VARIABLES
from pipeline.memory.planning.memory_plan import RemedyVerdict
from pipeline.report.stage_lines import named_records, unit_of
from pipeline.report.tables import plural, text_table
from pipeline.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from pipeline.journal.attempts import Ask
    from pipeline.journal.run_status import StageStatus
    from pipeline.memory.planning.memory_plan import MemoryPlan
    from pipeline.report.facts import Estimate
    from pipeline.report.plan_facts import TrainOutlook

MOST_ROWS = 12  # of activations by module
LEAST_SHARE = 0.002  # of the peak: smaller parts are added up
NAMED = 5
WORDS = {
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "ema": "moving averages",
    "inputs": "inputs",
    "activations": "activations",
    "loss": "loss",
    "temporaries": "temporaries",
    "scratch": "kernels' own",
}


def training_report(plan: TrainOutlook) -> list[RenderableType]:
    """Show the plan of a training."""
    parts = (_verdict, _stages, _components, _configurations, _tried, _alternatives, _job, _probes, _words)
    shown: list[RenderableType] = []
    for part in parts:
        lines = list(part(plan))
        shown += ["", *lines] if lines and shown else lines
    return shown


def _verdict(plan: TrainOutlook) -> Iterator[str]:
    """Yield the main decisions: the GPUs, whether it fits, the batches, and what saves memory."""
    chosen = plan.plan
    cards = ", ".join(chosen.cards)
    where = cards if chosen.ranks == 1 else f"{chosen.ranks} x {cards}"
    yield f"train: {plan.task}, {plural(plan.items, 'item')}, {plan.standing.parameters:,} parameters on {where}"
    if plan.sizes_from:
        yield f"  {plan.sizes_from}"
    total, limit = chosen.total.value, chosen.limit_bytes
    yield (
        f"  fits: {format_bytes(total)} of the {format_bytes(limit)} that torch may have there ({total / limit:.0%}), "
        f"with a probability of {chosen.probability.value:.0%} ({chosen.probability.origin.value})"
    )
    if chosen.batch > plan.items:
        yield f"  there are only {plan.items:,} items: a step has them all, not {chosen.batch:,}"
    step, holder = min(chosen.batch, plan.items), "GPU" if plan.gpus else "process"
    padded = "" if chosen.padding is None else f", padded by at most {chosen.padding - 1:.0%}"
    yield (
        f"  a step of {step} items is {chosen.accumulation_mean:.1f} micro-batches a {holder}, at most "
        f"{chosen.accumulation_most}; a micro-batch is {chosen.items_median:g} items, "
        f"at most {chosen.items_most}{padded}"
    )
    yield f"  micro-batches are not larger because {chosen.filled.value}"
    if chosen.remedies:
        yield f"  saves memory by {' and '.join(chosen.remedies)}"
    if chosen.allocator.settings:
        yield f"  {VARIABLES[0]}={chosen.allocator.settings}"
    yield from _oversize(chosen)


def _oversize(chosen: MemoryPlan) -> Iterator[str]:
    """Name the items that are left out or cut."""
    items = chosen.oversize
    if items:
        named = ", ".join(item.id for item in items[:NAMED])
        yield f"  {plural(len(items), 'item')} too large for any plan, such as {named}: left out or cropped"
    if chosen.crop:
        yield f"  items are cropped to {', '.join(f'{most:,} {name}' for name, most in chosen.crop.items())}"


def _stages(plan: TrainOutlook) -> Iterator[RenderableType]:
    """Show the batch plan of each stage of a curriculum."""
    if len(plan.plans) < 2:
        return
    columns = ("curriculum", "items", "at most", "micro-batches", "live", "total", "epoch")
    rows = [
        (
            name,
            f"{chosen.items_median:g}",
            str(chosen.items_most),
            f"{chosen.accumulation_mean:.1f}",
            format_bytes(chosen.live.value),
            format_bytes(chosen.total.value),
            format_seconds(chosen.epoch_s.value),
        )
        for name, chosen in plan.plans.items()
    ]
    yield text_table(columns, rows, right=" ".join(columns[1:]) + " most")


def _components(plan: TrainOutlook) -> Iterator[RenderableType]:
    """Show the memory at the peak of a step by component."""
    chosen = plan.plan
    live = sum(part.bytes for part in chosen.parts)
    origin, reserved, margin = chosen.live.origin.value, chosen.reserved, chosen.margin
    rows = [(label, format_bytes(size), f"{size / live:.1%}", origin) for label, size in _parts(chosen, live)]
    rows.append(("live at the peak of a step", format_bytes(live), "100.0%", origin))
    if plan.evaluation_bytes is not None:
        rows.append(("  (evaluating such a micro-batch)", format_bytes(plan.evaluation_bytes), "", origin))
    rows.append(("held by torch's allocator", format_bytes(reserved.value), "", reserved.origin.value))
    total = format_bytes(chosen.total.value)
    rows.append((f"with the margin x {margin.factor:.3f}", total, "", margin.origin.value))
    yield text_table(("component", "memory", "share", "from"), rows, right="memory share")


def _parts(chosen: MemoryPlan, live: int) -> Iterator[tuple[str, int]]:
    """Yield each component with its bytes; the largest activations by module, the small ones added up."""
    groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for part in chosen.parts:
        groups[part.category.value].append((part.name, part.bytes))
    for category, parts in groups.items():
        largest_first = sorted(parts, key=lambda part: -part[1])
        kept = [part for part in largest_first[:MOST_ROWS] if part[1] >= LEAST_SHARE * live]
        others_bytes = sum(size for _, size in largest_first) - sum(size for _, size in kept)
        for name, size in kept:
            yield f"{WORDS[category]}{f' of {name}' if name else ''}", size
        if others_bytes:
            yield f"{WORDS[category]}{', others' if kept else ''}", others_bytes


def _configurations(plan: TrainOutlook) -> Iterator[RenderableType]:
    """Show which batch configurations fit on which cards."""
    if not plan.configurations:
        return
    cards = list(plan.configurations[0].fits)
    item = ", ".join(f"{count:,} {name}" for name, count in plan.item.items())
    yield f"micro-batches of items with {item} (95 of 100 items have less):"
    columns = ("items x micro-batches", "live", "held", "total", *cards)
    rows = [
        (
            f"{configuration.items} x {configuration.accumulation}",
            format_bytes(configuration.live.value),
            format_bytes(configuration.reserved.value),
            format_bytes(configuration.total.value),
            *("fits" if configuration.fits[card] else "-" for card in cards),
        )
        for configuration in plan.configurations
    ]
    yield text_table(columns, rows, right="live held total")


def _tried(plan: TrainOutlook) -> Iterator[RenderableType]:
    """Show the combinations of remedies that were tried, and the verdict on each."""
    rows = [
        (
            trial.remedy,
            trial.verdict.value,
            format_bytes(trial.total.value) if trial.total else "",
            format_seconds(trial.epoch_s.value) if trial.epoch_s else "",
            trial.why,
        )
        for trial in plan.plan.trials
        if trial.verdict is not RemedyVerdict.NOT_NEEDED
    ]
    yield text_table(("remedy", "verdict", "total", "epoch", ""), rows, right="total epoch")
    others = sum(trial.verdict is RemedyVerdict.NOT_NEEDED for trial in plan.plan.trials)
    if others:
        yield f"{plural(others, 'other combination')} of remedies would not be faster"


def _alternatives(plan: TrainOutlook) -> Iterator[RenderableType]:
    """Show what other GPUs would cost."""
    if not plan.alternatives:
        return
    rows = [
        (
            planned.offer.name,
            f"{planned.gpu_hours.value:.3g}" if planned.gpu_hours else "",
            format_seconds(3600 * planned.hours.value) if planned.hours else "",
            format_seconds(plan.waits_s[planned.offer.name]) if planned.offer.name in plan.waits_s else "",
            ", ".join(planned.plan.remedies if planned.plan else ()) or planned.why or "as it is",
        )
        for planned in plan.alternatives
    ]
    yield text_table(("alternative", "GPU-hours", "takes", "waits", "how"), rows, right="GPU-hours takes waits")


def _job(plan: TrainOutlook) -> Iterator[RenderableType]:
    """Show what a job asks for, and where its memory goes."""
    chosen = plan.plan
    rows = [(part.name, format_bytes(part.bytes), part.origin.value, part.why) for part in plan.host.parts]
    gpus = f"{plural(plan.gpus, 'GPU')}, " if plan.gpus else ""
    each = f"{gpus}{plural(plan.cpus, 'cpu')}, --mem {format_bytes(plan.mem.mem_bytes)}"
    core_hours = plan.train_s / 3600 * plan.nodes * plan.cpus
    takes = f"{chosen.gpu_hours.value:.3g} GPU-hours" if plan.gpus else f"{core_hours:.3g} core-hours"
    yield f"job: {plural(plan.nodes, 'node')}, each with {each}"
    yield f"  --mem: {plan.mem.why}"
    yield (
        f"  an epoch takes about {format_seconds(chosen.epoch_s.value)}, all {format_seconds(plan.train_s)} "
        f"({chosen.epoch_s.origin.value}), {takes}; "
        f"a job may take {format_seconds(plan.time_s)}"
    )
    yield text_table(("host memory", "a node", "from", ""), rows, right="node")


def _probes(plan: TrainOutlook) -> Iterator[RenderableType]:
    """Show what probes measured."""
    if not plan.probed:
        return
    rows = [
        (
            probe.card,
            probe.outcome.value,
            format_bytes(probe.predicted_bytes),
            format_bytes(probe.measured_bytes) if probe.measured_bytes else "",
            f"{probe.ratio:.3f}" if probe.measured_bytes else "",
            f"{probe.step_s:.3g} s" if probe.step_s else "",
            probe.why or probe.log,
        )
        for probe in plan.probed
    ]
    columns = ("probe", "outcome", "predicted", "measured", "ratio", "step", "")
    yield text_table(columns, rows, right="predicted measured ratio step")


def _words(plan: TrainOutlook) -> Iterator[str]:
    """Yield notes on the plan's uncertainty, and the findings of the linter."""
    chosen = plan.plan
    if plan.ignores_sizes:
        yield "warning: memory does not grow with the sizes: does example() make batches as large as it is told to?"
    notes = dict.fromkeys((chosen.margin.why, *chosen.notes, *chosen.allocator.notes))
    yield from (f"note: {note}" for note in notes)
    for finding in plan.findings:
        yield f"{finding.severity.value}: {finding.what}: {finding.why}"
        yield f"    {finding.remedy}   ({finding.source})"


PLANNED = ("items", "refused", "unusable", "cached", "missing", "tasks")
UNPLANNED = ("items", "cached", "missing")  # what is not known of a stage that is planned later
REFUSED = {
    "scan": "refused by the source",
    "embed": "that cannot be encoded",
    "graph": "left out before",
    "train": "points that fit no machine",
}
LATER = {"train": "planned when its graphs are there"}


def stage_lines(stage: StageStatus) -> list[str]:
    """Say the same of a stage that was submitted, and of each encoder where there are several."""
    whole = stage_line(stage.name, stage.counts())
    return [whole, *(f"  {part.of}: {_sorted_out(part.name, part.counts())}" for part in stage.by_part() if part.of)]


def stage_line(name: str, counts: Mapping[str, int]) -> str:
    """Say how much of a stage's work was done already when it was submitted, and how much was not."""
    if name == "regenerate":
        return f"regenerate: {named_records(counts['items'])}"
    if counts.get("unplanned"):
        return later_line(name)
    return f"{name}: {_sorted_out(name, counts)}"


def _sorted_out(name: str, counts: Mapping[str, int]) -> str:
    """Say how many things a stage has, and how much of each kind."""
    parts = [f"{counts['cached']:,} cached", f"{counts['missing']:,} to do"]
    if name == "validate":
        parts = parts[1:]
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
    return f"{plural(counts['items'], unit_of(name, counts))}: {', '.join(parts)}{tasks}{residues}{waiting}"


def later_line(name: str) -> str:
    """Say when a stage is planned that cannot be planned yet."""
    return f"{name}: {LATER.get(name, 'counted when the model is trained')}"


def plan_table(plans: Iterable[tuple[str, Mapping[str, int], int, int, Ask | None]]) -> Table:
    """Show what would be submitted."""
    rows = []
    for name, counts, made_bytes, cpus, ask in plans:
        asks = ("", "", "") if ask is None else (cpus, format_bytes(ask.mem_bytes), format_seconds(ask.time_s))
        unknown = UNPLANNED if counts.get("unplanned") else ()
        planned = ["?" if column in unknown else f"{counts[column]:,}" for column in PLANNED]
        disk = format_bytes(made_bytes) if made_bytes else ""
        rows.append((name, f"{unit_of(name, counts)}s", *planned, *asks, disk))
    columns = ("stage", "of", *PLANNED, "cpus", "mem", "time limit", "disk")
    return text_table(columns, rows, right=" ".join((*PLANNED, "cpus", "mem", "disk")))


def estimate_report(stages: Sequence[Estimate]) -> list[RenderableType]:
    """Show what each stage would use, and where the numbers are from."""
    columns = ("stage", "to do", "cached", "tasks", "cpus", "gpus", "mem", "limit", "disk", "about")
    shown: list[RenderableType] = [text_table(columns, map(_estimate_row, stages), right=" ".join(columns[1:]))]
    unknown = "not scanned yet, and what they hold is not counted"
    waiting = {stage.stage: stage.counts.get("waiting", 0) for stage in stages}
    shown += [f"{name}: {plural(count, 'item')} {unknown}" for name, count in waiting.items() if count]
    for stage in stages:
        if stage.is_due:
            shown += ["", f"{stage.stage}: where the numbers are from"]
            shown += [f"  {name}: {source}" for name, source in stage.sources.items()]
    return shown


def _estimate_row(stage: Estimate) -> tuple[str, ...]:
    missing, tasks = f"{stage.counts['missing']:,}", f"{stage.tasks:,}"
    if stage.is_due and not stage.tasks:
        missing = tasks = "?"
    counts = (stage.stage, missing, f"{stage.counts['cached']:,}", tasks)
    if not stage.is_due:
        return (*counts, *[""] * 6)
    disk = format_bytes(stage.disk_bytes) if stage.disk_bytes else ""
    about = "unknown" if stage.all_s is None else format_seconds(stage.all_s)
    asked = (str(stage.cpus), str(stage.gpus), format_bytes(stage.mem_bytes), format_seconds(stage.time_s))
    return (*counts, *asked, disk, about)
