"""The stages as a table: what each needs, what is missing of it, how it is done, how it is judged."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pipeline.errors import SUBMIT_AGAIN, CacheUnusable, ConfigError, DataError, JobFailed
from pipeline.records import Item, Reason, Rejection
from pipeline.runs import todo
from pipeline.runs.ledger import write_rejections
from pipeline.stages.scan import look_again, look_up, scan
from pipeline.store.snapshot import IndexState
from pipeline.structures.census import Census, Tally

if TYPE_CHECKING:
    from typing import Any

    from pipeline.config.schema import StageResources
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.project import Project
    from pipeline.store.store import Store

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 0.5
SCAN_BASE_BYTES = 512 << 20
SCAN_BYTES_PER_FILE_BYTE = 16  # an mmCIF file of 38 MB was seen to take 587 MB

Work: TypeAlias = Callable[["Project", "RunFolder", int], "Generator[Reason | None, None, None]"]
Judge: TypeAlias = Callable[["Project", "RunFolder", float], Census]


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the workflow."""

    name: str
    auto_mem_bytes: Callable[[Project], int]  # what `mem: auto` asks for
    work: Work  # do one task, yielding what became of each item
    judge: Judge  # look at the content of the store, and say what the stage has made

    def resources(self, project: Project) -> StageResources:
        """Return what the configuration gives a task of this stage."""
        resources: StageResources = getattr(project.config.cluster, self.name)
        return resources


def work_scan(project: Project, folder: RunFolder, task: int) -> Generator[Reason | None, None, None]:
    """Scan the items of one task."""
    shard = todo.Shard(**json.loads(folder.shards.read_text())[task])
    return scan(todo.read_shard(folder.todo, shard), project.recipe, project.shelves)


def scan_mem_bytes(project: Project) -> int:
    """Return the memory of a scanning task: the interpreter, and the largest file with what is made of it."""
    return SCAN_BASE_BYTES + SCAN_BYTES_PER_FILE_BYTE * project.config.structures.max_file_bytes


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
        if store.stat().index is not IndexState.CURRENT:
            _index(store)
    return tally.census()


def _index(store: Store) -> None:
    """Bring an index up to date; without one the cache is only slower, so one that cannot be written is no failure."""
    try:
        store.write_index()
    except CacheUnusable as error:
        log.warning("the index of %s stays behind: %s", store.kind, error.what)


def _tally(project: Project, folder: RunFolder, tally: Tally) -> Iterator[dict[str, Any]]:
    """Count every item and yield the rejected ones."""
    recipe, shelves = project.recipe, project.shelves
    since_ns = folder.stages.stat().st_mtime_ns
    for chunk in todo.chunks(todo.read_items(folder.items), todo.LOOKED_UP_AT_ONCE):
        items = [entry for entry in chunk if isinstance(entry, Item)]
        known = iter(look_up(items, recipe, shelves))
        for entry in chunk:
            if isinstance(entry, Rejection):
                tally.reject(entry)
                yield entry.to_json()
                continue
            inventory = next(known) or look_again(entry, recipe, shelves, since_ns)
            if inventory is None:
                tally.miss(entry)
            elif inventory.reason is None:
                tally.accept(entry, inventory)
            else:
                rejection = Rejection(entry.id, inventory.reason, inventory.detail, entry.origin, entry.split)
                tally.reject(rejection)
                yield rejection.to_json()


def too_many(rejected: int, total: int, fraction: float) -> bool:
    """Say whether more items are rejected than a fraction allows; 29 of 100 is not more than 0.29."""
    return rejected > math.floor(fraction * total + 1e-6)


@dataclass(frozen=True, slots=True)
class Trouble:
    """How tasks of a stage failed, and what helps."""

    lines: list[str]
    remedy: str = SUBMIT_AGAIN


def check_census(project: Project, folder: RunFolder, census: Census, trouble: Trouble) -> list[str]:
    """Raise when a census forbids going on; return what deserves a warning."""
    data = project.config.data
    total, rejected = census.items + census.undone, census.items - census.accepted
    if too_many(rejected, total, data.max_rejected_fraction):
        rest = f"; {census.undone:,} were not looked at any more" if census.undone else ""
        what = (
            f"{rejected:,} of {total:,} items cannot be used, more than data.max_rejected_fraction"
            f" ({data.max_rejected_fraction:.1%}) allows{rest}"
        )
        enough = math.ceil(100 * rejected / total) / 100  # too_many() forgives what rounding does to it
        remedy = f"less {folder.rejected}   or   pipeline submit --stage scan --set data.max_rejected_fraction={enough}"
        raise DataError(what, where=str(data.path), remedy=remedy)
    if census.undone:
        what = f"{census.undone:,} of {total:,} items are not done, such as {census.first_undone}"
        raise JobFailed("\n".join([what, *trouble.lines]), where=folder.name, remedy=trouble.remedy)
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
    """Say what stands in several splits, with a few items of each kind by name."""
    wanted = {ordinal for leak in census.leaks for ordinal in leak.items}
    names = {number: entry.id for number, entry in enumerate(todo.read_items(folder.items)) if number in wanted}
    lines = []
    for leak in {leak.what: leak for leak in reversed(census.leaks)}.values():
        items = ", ".join(names[ordinal] for ordinal in leak.items)
        more = f" (and {leak.total - 1:,} more)" if leak.total > 1 else ""
        lines.append(f"the same {leak.what} is in the splits {' and '.join(leak.splits)}: {items}{more}")
    return "\n  ".join(lines)


WORKFLOW = (
    Stage(
        name="scan",
        auto_mem_bytes=scan_mem_bytes,
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
