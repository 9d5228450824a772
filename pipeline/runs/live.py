"""Which records the data set of a project needs, as it stands now: no structure file is read, only looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.encoder.residues import texts
from pipeline.errors import ConfigError, DataError
from pipeline.records import Item, Reason
from pipeline.runs import todo
from pipeline.runs.entering import is_reader
from pipeline.stages.scan import glance, look_up
from pipeline.structures.files import paths

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipeline.encoder.recipe import Recipe
    from pipeline.records import Rejection
    from pipeline.runs.project import Project
    from pipeline.stages.scan import Seen

SCAN_FIRST = "pipeline submit --stage scan"
AWAY = (Reason.MISSING_FILE, Reason.UNREADABLE_FILE)  # today; its disk may be mounted again tomorrow


@dataclass(slots=True)
class Needed:
    """The keys of the records that a data set needs, of each kind 16 bytes each."""

    scan: bytearray = field(default_factory=bytearray)
    files: bytearray = field(default_factory=bytearray)
    embed: bytearray = field(default_factory=bytearray)
    graph: bytearray = field(default_factory=bytearray)
    items: int = 0
    unknown: str = ""  # why it cannot be told what is needed
    remedy: str = ""

    def doubt(self, what: str, remedy: str) -> None:
        """Take down why it cannot be told; the first reason is as good as any."""
        if not self.unknown:
            self.unknown, self.remedy = what, remedy


def needed(project: Project, *, embeddings: bool = True, on: Callable[[int], None] = lambda _items: None) -> Needed:
    """Return what a data set needs; where anything of it is not there or not known today, say so.

    A data set of which some seems to be missing, because a disk is not mounted or a manifest is half written, must
    never make records seem useless that took days.
    """
    found = Needed()
    if is_reader(project.config):
        return found  # the tables of what a reader gives stay for the runs that name them
    recipe = project.encoding.recipe if embeddings else None
    if project.config.data.limit is not None:
        what = f"data.limit takes {project.config.data.limit:,} items of the data set only"
        found.doubt(what, "take data.limit out of the configuration, or --set data.limit=null")
        return found
    try:
        for chunk in todo.chunks(todo.list_items(project), todo.LOOKED_UP_AT_ONCE):
            _take(project, chunk, recipe, found)
            on(found.items)
    except (ConfigError, DataError) as error:
        found.doubt(f"{error.where}: {error.what}", error.remedy)
    if not found.items:
        found.doubt("the data set is empty", f"ls -l {project.config.data.path}")
    return found


def _take(project: Project, chunk: Sequence[Item | Rejection], recipe: Recipe | None, found: Needed) -> None:
    """Add what some entries of a data set need."""
    for entry in chunk:
        if not isinstance(entry, Item) and entry.reason in AWAY:
            found.doubt(f"{entry.id}: {entry.detail}", _see_to_it(project))
    items = [entry for entry in chunk if isinstance(entry, Item)]
    found.items += len(items)
    for path in dict.fromkeys(path for item in items for path in paths(item)):
        mark = glance(path, project.recipe)
        found.files += mark if isinstance(mark, bytes) else b""
    wanted: dict[str, None] = {}
    for item, seen in zip(items, look_up(items, project.recipe, project.shelves), strict=True):
        _add(project, item, seen, found)
        if recipe is not None and seen.inventory is not None and seen.inventory.reason is None:
            wanted |= dict.fromkeys(texts(seen.inventory, recipe.context))
    for text in wanted:
        for variant in recipe.accepted(len(text)) if recipe else ():
            found.embed += recipe.key(text, variant) if recipe else b""


def _add(project: Project, item: Item, seen: Seen, found: Needed) -> None:
    """Add what one item needs, besides embeddings."""
    if seen.key is not None:
        found.scan += seen.key
        found.graph += project.graphs.recipe.key(seen.key)
    if seen.inventory is None:
        found.doubt(f"{item.id} is not scanned yet, or has just been changed", SCAN_FIRST)
    elif seen.key is None and seen.inventory.reason in AWAY:
        found.doubt(f"{item.id}: {seen.inventory.detail}", _see_to_it(project))


def _see_to_it(project: Project) -> str:
    return f"ls -l {project.config.data.path}   (mount the data, or take what is gone out of the data set)"
