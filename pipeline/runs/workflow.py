"""The stages as a table: what each needs, what is missing of it, how it is done, how it is judged."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pipeline.errors import SUBMIT_AGAIN, ConfigError, DataError, JobFailed
from pipeline.records import Item, Reason, Rejection
from pipeline.runs import todo
from pipeline.runs.ledger import write_rejections
from pipeline.stages.scan import look_again, look_up, scan
from pipeline.structures.census import Census, Tally

if TYPE_CHECKING:
    from typing import Any

    from pipeline.config.schema import StageResources
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.project import Project

LOOK_AGAIN_S = 0.5

Work: TypeAlias = Callable[["Project", "RunFolder", int], "Iterator[Reason | None]"]
Judge: TypeAlias = Callable[["Project", "RunFolder", float], Census]


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the workflow."""

    name: str
    needs: tuple[str, ...]
    does: str
    default_mem_bytes: int  # what `mem: auto` asks for
    work: Work  # do one task, yielding what became of each item
    judge: Judge  # look at the content of the store, and say what the stage has made

    def resources(self, project: Project) -> StageResources:
        """Return what the configuration gives a task of this stage."""
        resources: StageResources = getattr(project.config.cluster, self.name)
        return resources


def work_scan(project: Project, folder: RunFolder, task: int) -> Iterator[Reason | None]:
    """Scan the items of one task."""
    shard = todo.Shard(**json.loads(folder.shards.read_text())[task])
    return scan(todo.read_shard(folder.todo, shard), project.recipe, project.shelves)


def judge_scan(project: Project, folder: RunFolder, patience_s: float) -> Census:
    """Count what the store knows of every item, and list what was left out.

    Patience is for file systems that show fresh files late.
    """
    deadline = time.monotonic() + patience_s
    while True:
        for store in project.shelves.stores():
            store.refresh()
        tally = Tally()
        write_rejections(folder.rejected, _tally(project, folder, tally))
        if not tally.undone or time.monotonic() > deadline:
            break
        time.sleep(LOOK_AGAIN_S)
    for store in project.shelves.stores():
        store.write_index()
    return tally.census()


def _tally(project: Project, folder: RunFolder, tally: Tally) -> Iterator[dict[str, Any]]:
    """Count every item and yield the rejected ones."""
    recipe, shelves = project.recipe, project.shelves
    for chunk in todo.chunks(todo.read_items(folder.items), todo.LOOKED_UP_AT_ONCE):
        items = [entry for entry in chunk if isinstance(entry, Item)]
        known = iter(look_up(items, recipe, shelves))
        for entry in chunk:
            if isinstance(entry, Rejection):
                tally.reject(entry)
                yield entry.to_json()
                continue
            inventory = next(known) or look_again(entry, recipe, shelves)
            if inventory is None:
                tally.miss(entry)
            elif inventory.reason is None:
                tally.accept(entry, inventory)
            else:
                rejection = Rejection(entry.id, inventory.reason, inventory.detail, entry.origin)
                tally.reject(rejection)
                yield rejection.to_json()


def check_census(project: Project, folder: RunFolder, census: Census, failures: Sequence[str]) -> list[str]:
    """Raise when a census forbids going on; return what deserves a warning."""
    data = project.config.data
    total, rejected = census.items + census.undone, census.items - census.accepted
    if rejected > data.max_rejected_fraction * total:
        rest = f"; {census.undone:,} were not looked at any more" if census.undone else ""
        what = (
            f"{rejected:,} of {total:,} items cannot be used, more than data.max_rejected_fraction"
            f" ({data.max_rejected_fraction:.1%}) allows{rest}"
        )
        enough = math.ceil(100 * rejected / total) / 100
        remedy = f"less {folder.rejected}   or   pipeline submit --stage scan --set data.max_rejected_fraction={enough}"
        raise DataError(what, where=str(data.path), remedy=remedy)
    if census.undone:
        what = f"{census.undone:,} of {total:,} items are not done, such as {census.first_undone}"
        raise JobFailed("\n".join([what, *failures]), where=folder.name, remedy=SUBMIT_AGAIN)
    if census.accepted == 0:
        remedy = f"pipeline status {folder.name}   (every reason: {folder.rejected})"
        raise DataError(f"none of {total} items can be used", where=str(data.path), remedy=remedy)
    if not census.leaks or data.on_leak == "ignore":
        return []
    what = describe_leaks(census, folder)
    if data.on_leak == "warn":
        return [what]
    remedy = "mend the splits   or   pipeline submit --stage scan --set data.on_leak=warn"
    raise DataError(what, where=str(data.path), remedy=remedy)


def describe_leaks(census: Census, folder: RunFolder) -> str:
    """Say what stands in two splits, with the first few items by name."""
    leak = census.leaks[0]
    names = {}
    for ordinal, entry in enumerate(todo.read_items(folder.items)):
        if ordinal in leak.items:
            names[ordinal] = entry.id
        if ordinal >= max(leak.items):
            break
    others = f" (and {len(census.leaks) - 1} more)" if len(census.leaks) > 1 else ""
    return f"the same {leak.what} is in the splits {' and '.join(leak.splits)}: {', '.join(names.values())}{others}"


WORKFLOW = (
    Stage(
        name="scan",
        needs=(),
        does="read structures into an inventory",
        default_mem_bytes=1 << 30,
        work=work_scan,
        judge=judge_scan,
    ),
)


def stage(name: str) -> Stage:
    """Return the row of that name."""
    for row in WORKFLOW:
        if row.name == name:
            return row
    known = ", ".join(row.name for row in WORKFLOW)
    raise ConfigError(f"no stage {name!r} (there are: {known})", where="--stage", remedy="pipeline submit --help")
