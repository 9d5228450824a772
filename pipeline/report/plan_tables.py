"""Plans as text: the answer first; then memory by component, batches, the job, and the sources of numbers."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.memory.footprint import Provenance
from pipeline.memory.hardware.caching_allocator import VARIABLES
from pipeline.memory.planning.memory_plan import PlannedOffer, RemedyVerdict
from pipeline.report.stage_lines import unit_of
from pipeline.report.tables import Column, plural, table_of
from pipeline.units import first_few, format_bytes, format_seconds, hours_text, short_bytes, short_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import RenderableType

    from pipeline.memory.planning.memory_plan import Configuration, MemoryPlan
from pipeline.memory.outlook import TrainOutlook

MOST_ROWS = 12  # most modules of activations
LEAST_SHARE = 0.002  # parts below this share of the peak are summed
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
    "scratch": "kernel workspace",
}
REFUSED = {
    "scan": "rejected by the source",
    "embed": "that cannot be encoded",
    "graph": "rejected earlier",
    "train": "points that fit no machine",
}
LATER = {"train": "waits for its graphs"}
NOTHING: dict[str, str] = {}
ESTIMATES: tuple[Column, ...] = (
    ("STAGE", 0), ("WORK", 1), ("CACHED", 2, "count"), ("TO DO", 3, "count"), ("TASKS", 4, "count"),
    ("EACH TASK REQUESTS", 5), ("TIME", 6),
)  # fmt: skip


def training_answer(plan: TrainOutlook, partition: str = "", *, verbose: bool = False) -> list[str]:
    """Describe a plan: whether training fits, the job's request, the micro-batches, and warnings."""
    chosen = plan.plan
    offers = [_offer_cells(planned, plan) for planned in plan.alternatives or [PlannedOffer(plan.offer, chosen)]]
    width = max(len(verdict) for verdict, _ in offers)
    shown = [f"{verdict.ljust(width)}   {facts}" for verdict, facts in offers]
    gpus = [plan.offer.name if plan.alternatives else plural(plan.gpus, "GPU")] if plan.gpus else []
    limit = f"{short_seconds(plan.time_s)} limit"
    request = [*gpus, plural(plan.cpus, "CPU"), f"--mem {short_bytes(plan.mem.mem_bytes)}", limit]
    request += [f"partition {partition}"] if partition else []
    nodes = f"{plan.nodes} nodes, each " if plan.nodes > 1 else ""
    shown.append(f"  Request  {nodes}{' · '.join(request)}")
    times = f"epoch {_about(plan.epoch_s)}, training {_about(plan.train_s)}"
    shown.append(f"  Batch    {_cut(plan)} · {times} ({'estimated' if plan.pace is None else 'measured'})")
    shown += [f"  Sizes    {plan.sizes_from.removeprefix('sizes ')}"] if plan.sizes_from else []
    shown += [f"  Uses     {' and '.join(chosen.remedies)}"] if chosen.remedies else []
    shown += [f"  ! {line}" for line in _attention(plan)]
    is_simulated = plan.gpus and chosen.margin.origin is not Provenance.MEASURED
    shown += ["  GPU plans are simulated: not yet validated on GPU hardware."] if is_simulated else []
    hints = [*["Breakdown: -v"] * (not verbose), *["Correct on hardware: --probe"] * bool(is_simulated)]
    return [*shown, f"  {' · '.join(hints)}"] if hints else shown


def _offer_cells(planned: PlannedOffer, outlook: TrainOutlook) -> tuple[str, str]:
    """Return the cells of an offer: whether training fits, its memory and, with several offers, the cost."""
    plan, name = planned.plan, planned.offer.name
    if plan is None or planned.gpu_hours is None or planned.hours is None:
        return f"✗ Does not fit {name}", planned.why
    where = "in memory"
    if planned.offer.cards[0].caching:
        where = " or ".join(card if card.endswith("iB") else card.upper().replace("-", " ") for card in plan.cards)
    several, each = (f"{plan.request.ranks} × ", " each") if plan.request.ranks > 1 else ("", "")
    size = f"{format_bytes(plan.total.value)} of {format_bytes(plan.limit_bytes)}{each}"
    time = f"training {_about(3600 * planned.hours.value)}"
    facts = [size, f"micro-batch {plan.cuts.items_most}", time, f"{hours_text(planned.gpu_hours.value)} GPU-hours"]
    if not outlook.alternatives:
        facts = [f"{size} ({plan.reserved.origin.value}, {plan.margin.factor - 1:.0%} margin)"]
    elif plan.remedies:
        facts.append(f"with {' and '.join(plan.remedies)}")
    if name in outlook.waits_s:
        facts.append(f"starts in about {short_seconds(outlook.waits_s[name])}")
    return f"✓ Fits {several}{where}", " · ".join(facts)


def _cut(plan: TrainOutlook) -> str:
    """Describe the micro-batches of a step."""
    request, cuts = plan.plan.request, plan.plan.cuts
    step = min(request.batch, plan.items)
    holders = f"{request.ranks} {'GPU' if plan.gpus else 'processe'}s × " if request.ranks > 1 else ""
    items = plural(cuts.items_most, "item")
    if request.ranks * cuts.steps_most * cuts.items_most == step:
        return f"{step} = {holders}{plural(cuts.steps_most, 'micro-batch')} × {items}"
    return f"{step} = {holders}up to {cuts.steps_most} micro-batches of up to {items}"


def _about(seconds: float) -> str:
    return "<1s" if seconds < 1 else short_seconds(seconds)


def _attention(plan: TrainOutlook) -> Iterator[str]:
    """Yield warnings, each with its fix."""
    chosen, batch = plan.plan, plan.plan.request.batch
    if batch > plan.items:
        yield f"only {plural(plan.items, 'item')}: a step uses all of them, not {batch} (train.effective_batch)"
    if items := chosen.oversize:
        named = first_few((item.id for item in items), NAMED)
        yield f"{plural(len(items), 'item')} too large for any plan: {named} (train.oversize)"
    if chosen.crop:
        yield f"larger items are cropped to {', '.join(f'{most:,} {name}' for name, most in chosen.crop.items())}"
    if plan.ignores_sizes:
        yield "memory does not grow with the sizes: does example() of your task use the sizes it receives?"
    for probe in plan.probed:
        measured = (
            f", {format_bytes(probe.measured_bytes)}, {probe.ratio:.2f} × the plan" if probe.measured_bytes else ""
        )
        yield f"probe on {probe.card}: {probe.outcome.value}{measured}{f': {probe.why}' if probe.why else ''}"
    yield from (f"{finding.what}: {finding.why} → {finding.remedy}" for finding in plan.findings)


def training_report(plan: TrainOutlook) -> list[RenderableType]:
    """Show every detail of the plan of a training."""
    parts = (_verdict, _stages, _components, _configurations, _tried, _job, _probes, _words)
    shown: list[RenderableType] = []
    for part in parts:
        lines = list(part(plan))
        shown += ["", *lines] if lines else []
    return shown


def _verdict(plan: TrainOutlook) -> Iterator[str]:
    """Yield the trained task, the certainty of the plan, and the micro-batches."""
    chosen = plan.plan
    yield f"{plan.task}: {plural(plan.items, 'item')}, {plan.parameters:,} parameters"
    yield f"  fits with a probability of {chosen.probability.value:.0%} ({chosen.probability.origin.value})"
    holder = "GPU" if plan.gpus else "process"
    padded = "" if chosen.padding is None else f", at most {chosen.padding - 1:.0%} padding"
    yield (
        f"  micro-batches per step and {holder}: {chosen.cuts.steps_mean:.1f} on average, "
        f"{chosen.cuts.steps_most} at most; items in each: {chosen.cuts.items_median:g} (median), "
        f"{chosen.cuts.items_most} at most{padded}"
    )
    yield f"  micro-batches are not larger because {chosen.cuts.limit.value}"
    if chosen.allocator.settings:
        yield f"  {VARIABLES[0]}={chosen.allocator.settings}"


def _stages(plan: TrainOutlook) -> Iterator[RenderableType]:
    """Show the batch plan of each stage of a curriculum."""
    columns: tuple[Column, ...] = (
        ("CURRICULUM", 0), ("ITEMS", lambda row: f"{row[1].cuts.items_median:g}", "words"),
        ("AT MOST", lambda row: row[1].cuts.items_most, "count"),
        ("MICRO-BATCHES", lambda row: f"{row[1].cuts.steps_mean:.1f}", "words"),
        ("TENSORS", lambda row: row[1].live.value, "long bytes"),
        ("TOTAL", lambda row: row[1].total.value, "long bytes"),
        ("EPOCH", lambda row: row[1].epoch_s.value, "long span"),
    )  # fmt: skip
    if len(plan.plans) > 1:
        yield table_of(columns, plan.plans.items())


def _components(plan: TrainOutlook) -> Iterator[RenderableType]:
    """Show the memory at the peak of a step by component."""
    chosen = plan.plan
    live = sum(part.bytes for part in chosen.parts)
    origin, reserved, margin = chosen.live.origin.value, chosen.reserved, chosen.margin
    rows: list[tuple[str, float, str, str]] = [
        (label, size, f"{size / live:.1%}", origin) for label, size in _parts(chosen, live)
    ]
    rows.append(("tensors at the peak of a step", live, "100.0%", origin))
    if plan.evaluation_bytes is not None:
        rows.append(("  (evaluating this micro-batch)", plan.evaluation_bytes, "", origin))
    rows.append(("reserved by torch's allocator", reserved.value, "", reserved.origin.value))
    rows.append((f"with a margin of {margin.factor - 1:.1%}", chosen.total.value, "", margin.origin.value))
    yield table_of((("COMPONENT", 0), ("MEMORY", 1, "long bytes"), ("SHARE", 2, "words"), ("FROM", 3)), rows)


def _parts(chosen: MemoryPlan, live: int) -> Iterator[tuple[str, int]]:
    """Yield components with their bytes: the largest activations by module, small ones summed."""
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
            yield f"{WORDS[category]}{', other' if kept else ''}", others_bytes


def _configurations(plan: TrainOutlook) -> Iterator[RenderableType]:
    """Show the batch configurations that fit each GPU."""
    if not plan.configurations:
        return
    item = ", ".join(f"{count:,} {name}" for name, count in plan.item.items())
    yield f"micro-batches of large items ({item}; 95% of items are smaller):"
    columns: list[Column] = [("ITEMS × MICRO-BATCHES", lambda cut: f"{cut.items} × {cut.accumulation}")]
    columns += [("TENSORS", "live.value", "long bytes"), ("RESERVED", "reserved.value", "long bytes")]
    columns += [("TOTAL", "total.value", "long bytes")]
    columns += [(card, partial(_fits, card)) for card in plan.configurations[0].fits]
    yield table_of(columns, plan.configurations)


def _fits(card: str, cut: Configuration) -> str:
    return "fits" if cut.fits[card] else "-"


def _tried(plan: TrainOutlook) -> Iterator[RenderableType]:
    """Show the tried remedies with the verdict on each."""
    columns: tuple[Column, ...] = (
        ("REMEDY", "remedy"), ("VERDICT", "verdict.value"),
        ("TOTAL", lambda trial: trial.total and trial.total.value, "long bytes"),
        ("EPOCH", lambda trial: trial.epoch_s and trial.epoch_s.value, "long span"), ("", "why"),
    )  # fmt: skip
    tried = [trial for trial in plan.plan.trials if trial.verdict is not RemedyVerdict.NOT_NEEDED]
    yield table_of(columns, tried)
    if others := len(plan.plan.trials) - len(tried):
        yield f"{plural(others, 'other combination')} of remedies would not be faster"


def _job(plan: TrainOutlook) -> Iterator[RenderableType]:
    """Show a job's request and the use of its memory."""
    chosen = plan.plan
    columns: tuple[Column, ...] = (
        ("HOST MEMORY", "name"), ("PER NODE", "bytes", "long bytes"), ("FROM", "origin.value"), ("", "why"),
    )  # fmt: skip
    gpus = f"{plural(plan.gpus, 'GPU')}, " if plan.gpus else ""
    each = f"{gpus}{plural(plan.cpus, 'CPU')}, --mem {format_bytes(plan.mem.mem_bytes)}"
    core_hours = plan.train_s / 3600 * plan.nodes * plan.cpus
    takes = f"{hours_text(chosen.gpu_hours.value)} GPU-hours" if plan.gpus else f"{hours_text(core_hours)} core-hours"
    yield f"job: {plural(plan.nodes, 'node')}, each {each}"
    yield f"  --mem: {plan.mem.why}"
    yield (
        f"  epoch {format_seconds(plan.epoch_s)}, training {format_seconds(plan.train_s)} "
        f"({chosen.epoch_s.origin.value}), {takes}; time limit {format_seconds(plan.time_s)}"
    )
    yield table_of(columns, plan.host.parts)


def _probes(plan: TrainOutlook) -> Iterator[RenderableType]:
    """Show the measurements of probes."""
    columns: tuple[Column, ...] = (
        ("PROBE", "card"), ("OUTCOME", "outcome.value"), ("PREDICTED", "predicted_bytes", "long bytes"),
        ("MEASURED", lambda probe: probe.measured_bytes or None, "long bytes"),
        ("RATIO", lambda probe: f"{probe.ratio:.3f}" if probe.measured_bytes else "", "words"),
        ("STEP", lambda probe: f"{probe.step_s:.3g} s" if probe.step_s else "", "words"),
        ("", lambda probe: probe.why or probe.log),
    )  # fmt: skip
    if plan.probed:
        yield table_of(columns, plan.probed)


def _words(plan: TrainOutlook) -> Iterator[str]:
    """Yield notes on the plan, and the findings of the linter."""
    chosen = plan.plan
    notes = dict.fromkeys((chosen.margin.why, *chosen.notes, *chosen.allocator.notes))
    yield from (f"note: {note}" for note in notes)
    for finding in plan.findings:
        yield f"{finding.severity.value}: {finding.what}: {finding.why}"
        yield f"    {finding.remedy}   ({finding.source})"


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected use of a stage; None: unknown."""

    stage: str
    counts: Mapping[str, int]
    tasks: int
    at_once: int
    cpus: int
    gpus: int
    shared: str  # how many tasks run side by side, as `4 a GPU`
    mem_bytes: int
    time_s: int
    disk_bytes: int
    task_s: float | None
    all_s: float | None
    sources: Mapping[str, str]  # name of a number → its source

    @property
    def is_due(self) -> bool:
        """Whether it has work, or will have after the scan."""
        return bool(self.tasks or self.counts.get("waiting"))


def stages_report(
    stages: Sequence[Estimate], later: Mapping[str, str] = NOTHING, *, verbose: bool = False
) -> list[RenderableType]:
    """Show the stages with work and their requests; with `detailed`, also the sources of the numbers.

    `later` has lines on stages that are not planned yet.
    """
    due = [stage for stage in stages if stage.is_due]
    known = [stage.all_s for stage in due if stage.all_s is not None]
    disk = sum(stage.disk_bytes for stage in due)
    facts = [f"about {short_seconds(sum(known))}"] if known and len(known) == len(due) else []
    facts += [f"{short_bytes(disk)} of disk"] if disk else []
    answer = f"{len(due)} of {plural(len(stages), 'stage')} {'has' if len(due) == 1 else 'have'} work"
    shown: list[RenderableType] = [" · ".join((answer, *facts))]
    if not due:
        shown = [f"✓ Nothing to do: {first_few(stage.stage for stage in stages)} complete"]
    shown += ["", table_of(ESTIMATES, map(_estimate_row, stages), unknown="?")]
    waiting = {stage.stage: stage.counts["waiting"] for stage in stages if stage.counts.get("waiting")}
    if waiting:
        shown.append(f"{' and '.join(waiting)}: counted after the scan of {plural(max(waiting.values()), 'item')}")
    waits = [stage.stage for stage in stages if stage.counts.get("unplanned")]
    shown += [f"{name}: {(LATER | dict(later)).get(name, 'waits for a trained model')}" for name in waits]
    for stage in stages:
        left_out = {REFUSED.get(stage.stage.split()[0], "rejected"): "refused", "missing or unreadable": "unusable"}
        lines = [f"{stage.counts[name]:,} {words}" for words, name in left_out.items() if stage.counts.get(name)]
        shown += [f"{stage.stage}: {', '.join(lines)}"] if lines else []
    for stage in due if verbose else ():
        shown += ["", f"{stage.stage}: where the numbers come from"]
        shown += [f"  {name}: {source}" for name, source in stage.sources.items()]
    return shown


def _estimate_row(stage: Estimate) -> tuple[Any, ...]:
    counts = stage.counts
    is_known = not counts.get("unplanned") and (stage.tasks or not stage.is_due)
    unit = unit_of(stage.stage, counts)
    work = plural(counts["items"], unit) if is_known else f"{unit}s"
    row = (stage.stage, work, counts["cached"], *((counts["missing"], stage.tasks) if is_known else (None, None)))
    if not stage.is_due or counts.get("unplanned"):
        return (*row, "", "")
    gpus = [stage.shared or plural(stage.gpus, "GPU")] if stage.shared or stage.gpus else []
    asked = [*gpus, plural(stage.cpus, "CPU"), short_bytes(stage.mem_bytes), short_seconds(stage.time_s)]
    return (*row, " · ".join(asked), None if stage.all_s is None else short_seconds(stage.all_s))
