"""The state of each stage of a configuration, why it has work, and the graph of stages as text, Mermaid or Graphviz."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

from pipeline.command_line import Command
from pipeline.dataset.loading import made_table
from pipeline.errors import ConfigError, PipelineError
from pipeline.journal.run_status import State
from pipeline.planning.prepare import folder_of, known_plan, recipe_of
from pipeline.planning.trainings import unplanned
from pipeline.report.stage_lines import unit_of
from pipeline.report.tables import plural
from pipeline.stage_names import StageName
from pipeline.stages import table
from pipeline.stages.trained import progress_of
from pipeline.views.why import Because, SettingChange, changes_between, why_stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.project.project import Project
    from pipeline.stages.stage import Stage
    from pipeline.store.cache_folder import RecipeStat

DATA = "data"
COUNTED = {
    "cached": "cached",
    "done": "done",
    "missing": "to do",
    "waiting": "not scanned",
    "refused": "rejected",
    "unusable": "unusable",
    "unkept": "not stored",
}
UNDECIDED = ("table", "precision", "crop", "skipped")  # parts of a recipe that a plan decides


@dataclass(frozen=True, slots=True)
class StageExplained:
    """The state of a stage and the reason: a box in the graph of stages. For a training also the nearest model."""

    name: str
    because: Because
    needs: tuple[str, ...] = ()  # names of other stages
    counts: str = ""
    model: str = ""

    @property
    def next(self) -> Command | None:
        return Command.submit(self.name) if self.because.state in (State.TO_DO, State.WAITING) else None

    def as_box(self) -> dict[str, Any]:
        """Return its data in the graph, as JSON data."""
        document = {"name": self.name, "needs": self.needs, "state": self.because.state.value}
        return document | {"counts": self.counts, "why": str(self.because)}

    def to_json(self) -> dict[str, Any]:
        document = {"stage": self.name, **self.as_box()}
        document |= {"changes": list(map(asdict, self.because.changes)), "next": str(self.next or "")}
        del document["name"]
        return document | ({"model": self.model} if self.model else {})


def arrows(boxes: Sequence[StageExplained]) -> list[tuple[str, str]]:
    """Return the arrows between boxes as pairs of names: direct needs only, among the shown boxes."""
    names = {box.name for box in boxes}
    needs = {box.name: [name for name in box.needs if name in names] for box in boxes}
    above: dict[str, set[str]] = {}  # everything that a box needs, directly or indirectly
    for name in TopologicalSorter(needs).static_order():
        above[name] = {*needs[name]}.union(*(above[need] for need in needs[name]))
    return [
        (need, name)
        for name, direct in needs.items()
        for need in direct
        if not any(need in above[other] for other in direct)
    ]


def columns_of(boxes: Sequence[StageExplained]) -> list[list[StageExplained]]:
    """Return the boxes in columns; each box is to the right of everything it needs."""
    order = TopologicalSorter({box.name: [name for name, then in arrows(boxes) if then == box.name] for box in boxes})
    order.prepare()
    columns = []
    while ready := order.get_ready():
        columns.append([box for box in boxes if box.name in ready])
        order.done(*ready)
    return columns


def graph_lines(boxes: Sequence[StageExplained]) -> list[str]:
    """Return the graph as lines of text: names and arrows."""
    columns, parts = columns_of(boxes), list[list[str]]()
    for at, column in enumerate(columns, 1):
        after = columns[at] if at < len(columns) else []
        width = max(len(box.name) for box in column) + 1
        parts.append([f"{box.name} ".ljust(width, "─" if after else " ") for box in column])
        if after:
            parts.append(list(_joints(len(column), len(after))))
    rows = range(max(map(len, columns), default=0))
    cells = ([part[row] if row < len(part) else " " * len(part[0]) for part in parts] for row in rows)
    return ["".join(line).rstrip() for line in cells]


def _joints(before: int, after: int) -> Iterator[str]:
    """Yield the lines between two columns, row by row: each box of the first leads to each of the second."""
    if before == after == 1:
        yield "──> "
        return
    last = max(before, after) - 1
    for row in range(last + 1):
        left, right = row < before, row < after
        joint = {(True, True): "┼┴", (True, False): "┤┘", (False, True): "├└"}[left, right][row == last]
        yield ("─" if left else " ") + ("┬" if row == 0 else joint) + ("─> " if right else "   ")


def as_mermaid(boxes: Sequence[StageExplained]) -> str:
    """Return the graph in the language of Mermaid."""
    lines = ["flowchart LR"]  # `graph` is a keyword of Mermaid
    for box in boxes:
        text = "<br/>".join(_label(box)).replace('"', "#quot;")
        lines.append(f'  s_{box.name}["{text}"]')
    return "\n".join([*lines, *(f"  s_{first} --> s_{then}" for first, then in arrows(boxes))])


def as_dot(boxes: Sequence[StageExplained]) -> str:
    """Return the graph in the language of Graphviz."""
    lines = ["digraph pipeline {", "  rankdir=LR;", '  node [shape=box, style=rounded, fontname="sans-serif"];']
    for box in boxes:
        text = "\\n".join(part.replace("\\", "\\\\").replace('"', '\\"') for part in _label(box))
        lines.append(f'  "{box.name}" [label="{text}"];')
    return "\n".join([*lines, *(f'  "{first}" -> "{then}";' for first, then in arrows(boxes)), "}"])


def _label(box: StageExplained) -> list[str]:
    """Return the lines of a box, without symbols that a drawing language reads as its own."""
    parts = filter(None, (f"{box.name}: {box.because.state.value}", box.counts, str(box.because)))
    return [" ".join(part.split()).replace("<", "‹").replace(">", "›") for part in parts]


def stage_boxes(project: Project, names: Sequence[str]) -> list[StageExplained]:
    """Return the box of the data set and of each stage, with its needs."""
    data = project.config.data
    boxes = [StageExplained(DATA, Because(State.DONE), counts=f"{data.source} {data.path.name}")]
    for name in names:
        needed = [need.value for need in table.stage(name, project.config).needed(project.config)]
        boxes.append(explain_stage(project, name, tuple(need for need in needed if need in names) or (DATA,)))
    return boxes


def explain_stage(project: Project, name: str, needs: tuple[str, ...] = ()) -> StageExplained:
    """Return the state of a stage, and why it has work."""
    stage = table.stage(name, project.config)
    if name == StageName.TRAIN and not stage.is_script:
        return explain_training(project, needs)
    try:
        counts = _counts(project, stage)
        recorded = _recorded(project, stage)
        reasons = [why_stage(name, counts, recipe, recorded) for recipe in _recipes(project, stage)]
        because = min(reasons, key=lambda reason: len(reason.changes))  # of several encoders, the most similar
    except ConfigError as error:  # such as for missing weights
        counts, because = {}, Because(State.WAITING, f"{error.where}: {error.what}".splitlines()[0])
    return StageExplained(name, because, needs, _counted(name, counts))


def _counts(project: Project, stage: Stage) -> Mapping[str, int]:
    """Return the counts of a stage, without planning a training for them."""
    if stage.together and not stage.is_script and unplanned(project):
        return {"unplanned": 1}
    return stage.survey(project, None, 1).counts


def _recipes(project: Project, stage: Stage) -> Sequence[Mapping[str, Any] | None]:
    """Return the recipes of the records that a stage makes; only None if its results are not in the cache."""
    if stage.name not in stage.kinds or project.config.data.source == "reader":
        return [None]
    return stage.recipes(project)


def _recorded(project: Project, stage: Stage) -> list[RecipeStat]:
    """Return the recipes of a stage's records in the cache."""
    if stage.name not in stage.kinds:
        return []
    return [stat for layer in (project.cache, *project.cache.under) for stat in layer.recipes(stage.name)]


def _counted(name: str, counts: Mapping[str, int]) -> str:
    parts = [f"{counts[key]:,} {word}" for key, word in COUNTED.items() if counts.get(key)]
    return f"{unit_of(name, counts)}s: {', '.join(parts)}" if parts else ""


def explain_training(project: Project, needs: tuple[str, ...] = ()) -> StageExplained:
    """Return the progress of the configured training, or its differences from the most similar earlier one."""
    if project.config.train.task is None:
        what = "no task is set, so nothing is trained"
        raise ConfigError(what, where="train.task", remedy="--set train.task=package.module:Name")
    whole = made_table(project)
    prepared = known_plan(project) if whole is not None else None
    if prepared is not None and (folder := folder_of(project, prepared)).path.exists():
        progress = progress_of(folder)
        counts = f"{plural(progress.done, 'step')}, epoch {progress.epoch:,} of {prepared.epochs:,}"
        is_over = progress.is_over(prepared.epochs, project.config.train.validation)
        going = Because(State.TO_DO, f"{prepared.name} continues from its newest checkpoint")
        return StageExplained(StageName.TRAIN, Because(State.DONE) if is_over else going, needs, counts, prepared.name)
    recipe = prepared.recipe if prepared else recipe_of(project, whole or "", "")
    left_out = () if prepared else UNDECIDED
    model, changes = nearest_model(project, _without(recipe, left_out), left_out)
    if model and not changes:
        first = "its plan" if whole else "its graphs"
        because = Because(State.WAITING, f"waits for {first}; otherwise identical to {model}")
    elif model:
        because = Because(State.TO_DO, f"it differs from {model}, the most similar model", changes)
    else:
        because = Because(State.TO_DO if whole else State.WAITING, "no earlier model")
    return StageExplained(StageName.TRAIN, because, needs, model=model)


def nearest_model(
    project: Project, recipe: Mapping[str, Any], left_out: Sequence[str] = ()
) -> tuple[str, tuple[SettingChange, ...]]:
    """Return the most similar (and newest) model to a training, and the differences."""
    plain = json.loads(json.dumps(recipe))
    found = list[tuple[int, float, str, tuple[SettingChange, ...]]]()
    for path in project.config.train.models.glob("*/prepared.json"):
        with suppress(OSError, ValueError, KeyError, PipelineError):  # incomplete, or of another version
            theirs = _without(json.loads(path.read_text())["recipe"], left_out)
            changes = changes_between("train", theirs, plain)
            found.append((len(changes), -path.stat().st_mtime, path.parent.name, changes))
    return min(found, key=lambda one: one[:3])[2:] if found else ("", ())


def _without(recipe: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in recipe.items() if name not in names}
