"""The last stage of a run that regenerates records: reports which records of the damage list are intact again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.command_line import Command
from pipeline.dataset import worklist
from pipeline.dataset.worklist import KnownItem, StageSurvey
from pipeline.encoder.embedding_recipe import texts
from pipeline.errors import CacheDamaged
from pipeline.report.tables import plural
from pipeline.stage_names import StageName
from pipeline.stages.scan import scan_bytes
from pipeline.stages.stage import Judged, Stage
from pipeline.store.maintenance.leftovers import refuse_unusable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pipeline.config.schema import Config
    from pipeline.config.schema_cluster import StageResources, TrainResources
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import TaskContext
    from pipeline.stages.stage import Outcomes

MADE = (StageName.SCAN, StageName.EMBED, StageName.GRAPH)  # records of other kinds are made when they are needed


@dataclass(slots=True)
class Regenerated(Judged):
    """The state of the records of a damage list; its items are these records."""

    source: str = ""  # the damage list; empty: all missing records
    named: dict[str, int] = field(default_factory=dict)  # kind → records
    whole: dict[str, int] = field(default_factory=dict)
    replaced: int = 0  # embeddings that another suitable one replaces
    unmade: dict[str, int] = field(default_factory=dict)  # of items of this data set that were rejected
    foreign: dict[str, int] = field(default_factory=dict)  # records that no item of this data set needs
    later: dict[str, int] = field(default_factory=dict)  # records that are made when they are needed
    unscanned: int = 0  # items of this data set whose records are unknown
    untold: list[str] = field(default_factory=list)  # kinds whose missing records were all to be made


class RegenerateStage(Stage):
    """Reports which named records are intact again, after the stages that make them."""

    name = StageName.REGENERATE
    needs = MADE
    counts_items = False
    unit = "record"
    may_be_empty = True
    only_looks = True
    has_tasks = False

    def wanted(self, config: Config) -> bool:  # noqa: ARG002
        return False

    def resources(self, config: Config) -> StageResources | TrainResources:
        return config.cluster.scan

    def inspect(self, project: Project) -> None:
        refuse_unusable(project.cache)

    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:  # noqa: ARG002
        """Count the named records; there are no tasks, as earlier stages make them."""
        return StageSurvey({"items": project.only.records, "refused": 0, "unusable": 0, "cached": 0, "missing": 0}, ())

    def mem_bytes(self, project: Project) -> int:
        return scan_bytes(project.config)

    def work(self, project: Project, folder: RunFolder, task: int, context: TaskContext) -> Outcomes:  # noqa: ARG002
        yield from ()  # it has no tasks

    def recipe(self, project: Project) -> Mapping[str, Any]:  # noqa: ARG002
        return {}

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Regenerated:  # noqa: ARG002
        """Find which of the named records are intact, and why the others are not."""
        only = project.only
        judged = Regenerated(source=only.source, untold=sorted(only.whole_kinds))
        absent = dict[str, set[bytes]]()
        for kind, keys in only.keys.items():
            store = project.cache.kind(kind)
            lost = {key for key in keys if not store.has_whole(key)}
            judged.named[kind], judged.whole[kind] = len(keys), len(keys) - len(lost)
            if lost and kind in MADE:
                absent[kind] = lost
            elif lost:
                judged.later[kind] = len(lost)
        if absent:
            _explain(project, folder, absent, judged)
        judged.items = only.records
        return judged

    def check(self, project: Project, folder: RunFolder, judged: Regenerated) -> list[str]:  # noqa: ARG002
        """Raise if a named record could not be made; return remarks on the others."""
        lines = []
        if unmade := sum(judged.unmade.values()):
            lines.append(f"{unmade:,} of rejected items ({_by_kind(judged.unmade)}): less {folder.rejected}")
        if foreign := sum(judged.foreign.values()):
            far = f", {plural(judged.unscanned, 'item')} not scanned yet" if judged.unscanned else ""
            lines.append(
                f"{foreign:,} of no item of this data set with these settings{far} ({_by_kind(judged.foreign)})"
            )
        if not lines:
            return _remarks(judged)
        what = f"{unmade + foreign:,} of {plural(judged.items, 'named record')} cannot be made here"
        made = "   (with their original configuration)"
        remedy = Command.of("submit regenerate --list", judged.source, then=made)
        if judged.unscanned:
            remedy = Command.submit("scan", then="   (then the same command again)")
        raise CacheDamaged("\n  ".join([f"{what}:", *lines]), where=judged.source, remedy=remedy)


def _explain(project: Project, folder: RunFolder, absent: dict[str, set[bytes]], judged: Regenerated) -> None:
    """Count absent records by whether an item of this data set makes them or none does."""
    entries = worklist.known_items(project, folder, worklist.read_items(folder.items))
    for known in (entry for entry in entries if isinstance(entry, KnownItem)):
        judged.unscanned += known.inventory is None
        if StageName.EMBED in absent:
            for view in project.encoders.values():
                _explain_texts(view, known, absent[StageName.EMBED], judged)
        if known.key is None:
            continue
        for kind, key in ((StageName.SCAN, known.key), (StageName.GRAPH, project.graphs.recipe.key(known.key))):
            if key in absent.get(kind, ()):
                absent[kind].discard(key)
                judged.unmade[kind] = judged.unmade.get(kind, 0) + 1
    judged.foreign = {kind: len(keys) for kind, keys in absent.items() if keys}


def _explain_texts(project: Project, known: KnownItem, absent: set[bytes], judged: Regenerated) -> None:
    """Remove an item's embeddings from the absent ones, and count those with a suitable replacement."""
    recipe = project.encoding.recipe
    for text in texts(known.inventory, recipe.context) if known.inventory else ():
        mine = absent.intersection(recipe.key(text, variant) for variant in recipe.accepted(len(text)))
        absent -= mine
        if mine and project.encoding.verifier().look_up([text])[text] is not None:
            judged.replaced += len(mine)
        elif mine:
            judged.unmade[StageName.EMBED] = judged.unmade.get(StageName.EMBED, 0) + len(mine)


def _remarks(judged: Regenerated) -> list[str]:
    """Return remarks on records that are absent and not needed."""
    remarks = []
    if judged.later:
        later = plural(sum(judged.later.values()), "note")
        remarks.append(f"{later} to be made again when needed ({_by_kind(judged.later)})")
    if judged.replaced:
        remarks.append(f"{plural(judged.replaced, 'embedding')} not made: the cache has an equivalent of each")
    return remarks


def _by_kind(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
