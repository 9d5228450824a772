"""The last stage of a run that regenerates: which of the records that a damage list names are whole again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.encoder.embedding_recipe import texts
from pipeline.errors import CacheDamaged
from pipeline.report.tables import plural
from pipeline.runs.dataset import worklist
from pipeline.runs.dataset.outcome import Judged
from pipeline.runs.dataset.worklist import Found
from pipeline.runs.workflow import embed_stage, graph_stage, scan_stage
from pipeline.runs.workflow.scan_stage import Known

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import Reason, Tell

NAME = "regenerate"
WORK = (
    scan_stage.NAME,
    embed_stage.NAME,
    graph_stage.NAME,
)  # records of other kinds are notes, which come when they are due
AT_ONCE = 1024


@dataclass(slots=True)
class Regenerated(Judged):
    """What became of the records of a damage list; its items are those records."""

    source: str = ""  # the list; empty: whatever was missing
    named: dict[str, int] = field(default_factory=dict)  # kind → records
    whole: dict[str, int] = field(default_factory=dict)
    replaced: int = 0  # embeddings of which another that will do is there
    unmade: dict[str, int] = field(default_factory=dict)  # of items of this data set, which have been left out
    foreign: dict[str, int] = field(default_factory=dict)  # that no item of this data set makes
    later: dict[str, int] = field(default_factory=dict)  # notes that come when they are due
    unscanned: int = 0  # items of this data set of which nobody knows what they make
    untold: list[str] = field(default_factory=list)  # kinds of which all that was missing was meant


def survey(project: Project, _folder: RunFolder | None, _at_once: int) -> Found:
    """Say how many records are named; the stages before this one make them."""
    return Found({"items": project.only.records, "refused": 0, "unusable": 0, "cached": 0, "missing": 0}, ())


def work(
    _project: Project, _folder: RunFolder, _task: int, _tell: Tell, _part: tuple[int, int] = (0, 1)
) -> Generator[Reason | None, None, None]:
    """Do nothing: this stage has no tasks."""
    yield from ()


def judge(project: Project, folder: RunFolder, _patience_s: float) -> Regenerated:
    """Look which of the named records are whole, and why the others are not."""
    only = project.only
    found = Regenerated(source=only.source, untold=sorted(only.untold))
    absent = dict[str, set[bytes]]()
    for kind, keys in only.keys.items():
        store = project.cache.kind(kind)
        lost = {key for key in keys if not store.has_whole(key)}
        found.named[kind], found.whole[kind] = len(keys), len(keys) - len(lost)
        if lost and kind in WORK:
            absent[kind] = lost
        elif lost:
            found.later[kind] = len(lost)
    if absent:
        _explain(project, folder, absent, found)
    found.items = only.records
    return found


def _explain(project: Project, folder: RunFolder, absent: dict[str, set[bytes]], found: Regenerated) -> None:
    """Tell what an item of this data set would make from what none does."""
    entries = scan_stage.known(project, folder, worklist.read_items(folder.items))
    for one in (one for one in entries if isinstance(one, Known)):
        found.unscanned += one.inventory is None
        if embed_stage.NAME in absent:
            _explain_texts(project, one, absent[embed_stage.NAME], found)
        made = (
            {} if one.key is None else {scan_stage.NAME: one.key, graph_stage.NAME: project.graphs.recipe.key(one.key)}
        )
        for kind, key in made.items():
            if key in absent.get(kind, ()):
                absent[kind].discard(key)
                found.unmade[kind] = found.unmade.get(kind, 0) + 1
    found.foreign = {kind: len(keys) for kind, keys in absent.items() if keys}


def _explain_texts(project: Project, one: Known, absent: set[bytes], found: Regenerated) -> None:
    """Tell which embeddings are of an item, and of which of them another is there that will do."""
    recipe = project.encoding.recipe
    for text in texts(one.inventory, recipe.context) if one.inventory else ():
        mine = absent.intersection(recipe.key(text, variant) for variant in recipe.accepted(len(text)))
        absent -= mine
        if mine and project.encoding.verifier().look_up([text])[0] is not None:
            found.replaced += len(mine)
        elif mine:
            found.unmade[embed_stage.NAME] = found.unmade.get(embed_stage.NAME, 0) + len(mine)


def check(_project: Project, folder: RunFolder, found: Regenerated) -> list[str]:
    """Raise where a record that is named could not be made; say what else is worth knowing."""
    lines = []
    if unmade := sum(found.unmade.values()):
        lines.append(f"{unmade:,} of items that were left out ({_by_kind(found.unmade)}): less {folder.rejected}")
    if foreign := sum(found.foreign.values()):
        not_yet = f"{plural(found.unscanned, 'item')} {_be(found.unscanned)} not"
        far = f", as far as it is scanned ({not_yet})" if found.unscanned else ""
        lines.append(f"{foreign:,} of no item of this data set with these settings{far} ({_by_kind(found.foreign)})")
    if not lines:
        return _remarks(found)
    what = f"{unmade + foreign:,} of {plural(found.items, 'named record')} cannot be made here"
    remedy = f"pipeline submit --stage regenerate --list {found.source}   (with the configuration that made them)"
    if found.unscanned:
        remedy = "pipeline submit --stage scan   (then the same command again)"
    raise CacheDamaged("\n  ".join([f"{what}:", *lines]), where=found.source, remedy=remedy)


def _remarks(found: Regenerated) -> list[str]:
    """Say what is not there, and need not be."""
    said = []
    if found.later:
        later = sum(found.later.values())
        comes = "comes back when it is" if later == 1 else "come back when they are"
        said.append(f"{plural(later, 'note')} {comes} needed ({_by_kind(found.later)})")
    if found.replaced:
        others = "another that will do is" if found.replaced == 1 else "others that will do are"
        was = "was" if found.replaced == 1 else "were"
        said.append(f"{plural(found.replaced, 'embedding')} {was} not made: {others} there")
    return said


def _be(count: int) -> str:
    return "is" if count == 1 else "are"


def _by_kind(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
