"""Stage scan in a run: which items are not known yet, one task's work, and what the store says afterwards."""

from __future__ import annotations

import json
import math
from array import array
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from pipeline.errors import DataError
from pipeline.journal.attempts import left_out_items
from pipeline.journal.ledger import write_rejections
from pipeline.journal.run_folder import writing_run
from pipeline.records import Item, Reason, Rejection
from pipeline.runs.dataset import outcome, worklist
from pipeline.runs.dataset.outcome import patiently
from pipeline.runs.dataset.worklist import Found, Lines, Shard
from pipeline.stages.graph import Maker, open_writer
from pipeline.stages.scan import glance, look_again, look_up, scan
from pipeline.store.key_lists import in_chunks
from pipeline.structures.census import Census, CensusTally
from pipeline.structures.parsing.structure_files import item_paths

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from typing import Any

    from pipeline.config.schema_data import GraphSection
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import Inventory, Tell

NAME = "scan"
BASE_BYTES = 512 << 20
BYTES_PER_FILE_BYTE = 16  # an mmCIF file of 38 MB was seen to take 587 MB
ATOMS_PER_RESIDUE = 10  # heavy ones, on the average
BYTES_PER_EDGE = 100  # of an atom graph while it is built
TASKS_PER_SLOT = 4  # enough that the last task to finish is short
FEWEST_PER_TASK, MOST_PER_TASK = 64, 2048  # a task costs an interpreter and a published file
FEWEST_PER_JOB = 512  # and on a cluster a place in the queue
ITEMS_PER_S = 20  # mmCIF files; cautious, and only for cutting work into tasks
AT_A_GLANCE = frozenset({Reason.MISSING_FILE, Reason.UNREADABLE_FILE, Reason.FILE_TOO_LARGE, Reason.NEEDS_EXTRA})


def survey(project: Project, folder: RunFolder | None, at_once: int) -> Found:
    """Compare the data set with the store; write both lists when there is a run folder to hold them."""
    recipe, shelves = project.recipe, project.shelves
    counts = {"items": 0, "refused": 0, "unusable": 0, "cached": 0, "missing": 0, "unnamed": 0}
    offsets = array("Q")  # where each missing item begins in the todo file, and the end: 8 bytes an item
    listed = folder.items.with_suffix(".partial") if folder else None
    with Lines(listed) as everything, Lines(folder.todo(NAME) if folder else None) as rest:
        for chunk in in_chunks(worklist.list_items(project), worklist.LOOKED_UP_AT_ONCE):
            texts = [worklist.line_of(entry) for entry in chunk]
            for text in texts:
                everything.write(text)
            items = [entry for entry in chunk if isinstance(entry, Item)]
            written = ((entry, text) for entry, text in zip(chunk, texts, strict=True) if isinstance(entry, Item))
            counts["items"] += len(chunk)
            counts["refused"] += len(chunk) - len(items)
            for (item, text), seen in zip(written, look_up(items, recipe, shelves), strict=True):
                if seen.inventory is not None:
                    counts["unusable" if seen.inventory.reason in AT_A_GLANCE else "cached"] += 1
                    continue
                if not _is_named(item, seen.key, project):
                    counts["unnamed"] += 1
                    continue
                offsets.append(rest.position)
                counts["missing"] += 1
                rest.write(text)
        offsets.append(rest.position)
    if folder and listed:
        with writing_run(folder.items):
            listed.replace(folder.items)
    return Found(counts, _cut(offsets, _items_per_task(project, counts["missing"], at_once)))


def _is_named(item: Item, key: bytes | None, project: Project) -> bool:
    """Say whether a run may scan an item: the record of it, or one by which its files are known, is to be made."""
    only = project.only
    if key is not None:
        return only.names(NAME, key)
    marks = (glance(path, project.recipe) for path in item_paths(item))
    return only.is_all or NAME in only.untold or any(only.names("files", m) for m in marks if isinstance(m, bytes))


def _cut(offsets: array[int], items_per_task: int) -> tuple[Shard, ...]:
    """Cut what is to do into tasks of so many items."""
    missing = len(offsets) - 1
    bounds = [*range(0, missing, items_per_task), missing]
    return tuple(Shard(offsets[first], offsets[last], last - first) for first, last in pairwise(bounds))


def _items_per_task(project: Project, missing: int, at_once: int) -> int:
    """Return how many items a task takes: as configured, else a few tasks for each that can run at once."""
    asked = project.config.cluster.scan.items_per_task
    if asked != "auto":
        return int(asked)
    if project.config.cluster.executor == "local":
        return max(FEWEST_PER_TASK, min(MOST_PER_TASK, math.ceil(missing / (TASKS_PER_SLOT * at_once))))
    most = 60 * project.config.cluster.scan.minutes_per_task * ITEMS_PER_S
    return min(most, max(FEWEST_PER_JOB, math.ceil(missing / at_once)))


def mem_bytes(project: Project) -> int:
    """Return the memory of a scanning task: the interpreter, the largest file, the largest graph."""
    structures, graph = project.config.structures, project.config.graph
    graph_bytes = 0
    if graph.nodes == "atom":
        graph_bytes = ATOMS_PER_RESIDUE * structures.max_residues * edges_of_atom(graph) * BYTES_PER_EDGE
    return BASE_BYTES + BYTES_PER_FILE_BYTE * structures.max_file_bytes + graph_bytes


def edges_of_atom(graph: GraphSection) -> int:
    """Return about how many edges an atom has in an atom graph: of proteins, 6 heavy atoms are in 100 cubic Å."""
    return 20 + int(0.06 * 4.2 * (graph.atom.radius or 0) ** 3)


def work(
    project: Project, folder: RunFolder, task: int, tell: Tell, _part: tuple[int, int] = (0, 1)
) -> Generator[Reason | None, None, None]:
    """Scan the items of one task; if the run wants graphs too, build them while the structure is in hand."""
    items = noted(folder, NAME, task, tell)
    if "graph" not in json.loads(folder.stages.read_text()) or not project.config.graph.cache:
        yield from scan(items, project.recipe, project.shelves)
        return
    with open_writer(project.graphs.store, project.config.cache.shard_bytes) as writer:
        maker = Maker(project.graphs.recipe, project.graphs.store, writer, partial(project.only.names, "graph"))
        yield from scan(items, project.recipe, project.shelves, maker)


def noted(folder: RunFolder, stage: str, task: int, tell: Tell) -> Iterator[Item]:
    """Yield the items of a task without those that killed it, telling each before it is worked on."""
    barred = left_out_items(folder, stage)
    for item in worklist.read_task(folder, stage, task):
        if item.id not in barred:
            tell.on((item.id,))
            yield item


def judge(project: Project, folder: RunFolder, patience_s: float) -> Census:
    """Count what the store knows of every item, and list what was left out."""

    def look() -> CensusTally:
        tally, keys = CensusTally(), bytearray()
        write_rejections(folder.rejected, _tally(project, folder, tally, keys))
        if not tally.undone:
            outcome.keep(project, NAME, keys)
        return tally

    return patiently(project.shelves.stores(), look, patience_s).census()


def _tally(project: Project, folder: RunFolder, tally: CensusTally, keys: bytearray) -> Iterator[dict[str, Any]]:
    """Count every item and yield the rejected ones."""
    asked = worklist.asked(folder, NAME)
    for one in known(project, folder, worklist.read_items(folder.items)):
        if isinstance(one, Rejection):
            tally.reject(one)
            yield one.to_json()
        elif one.inventory is None:
            tally.miss(one.item, asked=asked(worklist.line_of(one.item)))
        else:
            tally.accept(one.item, one.inventory)
            keys += one.key or b""


@dataclass(frozen=True, slots=True)
class Known:
    """An item that can be used, as far as is known: None stands for an inventory that has still to be made."""

    item: Item
    inventory: Inventory | None
    key: bytes | None  # of the inventory; None where a file has changed too lately to be known


def known(
    project: Project, folder: RunFolder | None, entries: Iterable[Item | Rejection]
) -> Iterator[Known | Rejection]:
    """Yield what is known of each entry of a data set, in order."""
    recipe, shelves = project.recipe, project.shelves
    since_ns = folder.stages.stat().st_mtime_ns if folder else None
    barred = left_out_items(folder, NAME)
    for chunk in in_chunks(entries, worklist.LOOKED_UP_AT_ONCE):
        looked_up = iter(look_up([entry for entry in chunk if isinstance(entry, Item)], recipe, shelves))
        for entry in chunk:
            if isinstance(entry, Rejection):
                yield entry
                continue
            seen = next(looked_up)
            if seen.inventory is None and since_ns is not None:
                seen = look_again(entry, recipe, shelves, since_ns)
            if seen.inventory is not None and seen.inventory.reason is not None:
                yield rejection(entry, seen.inventory.reason, seen.inventory.detail)
            elif seen.inventory is None and entry.id in barred:
                yield rejection(entry, *barred[entry.id])
            else:
                yield Known(entry, seen.inventory, seen.key)


def rejection(item: Item, reason: Reason, detail: str) -> Rejection:
    """Return an item as one that was left out."""
    return Rejection(item.id, reason, detail, item.origin, item.split)


def check(project: Project, folder: RunFolder, census: Census) -> list[str]:
    """Do with leaks what is configured: refuse to go on, warn, or nothing."""
    data = project.config.data
    if not census.leaks or data.on_leak == "ignore":
        return []
    what = describe(census, folder)
    if data.on_leak == "warn":
        return [what]
    remedy = "mend the splits   or   pipeline submit --stage scan --set data.on_leak=warn"
    raise DataError(what, where=str(data.path), remedy=remedy)


def describe(census: Census, folder: RunFolder) -> str:
    """Say what stands in several splits, with a few items of each kind by name."""
    wanted = {ordinal for leak in census.leaks for ordinal in leak.items}
    names = {number: entry.id for number, entry in enumerate(worklist.read_items(folder.items)) if number in wanted}
    lines = []
    for leak in {leak.what: leak for leak in reversed(census.leaks)}.values():
        items = ", ".join(names[ordinal] for ordinal in leak.items)
        more = f" (and {leak.total - 1:,} more)" if leak.total > 1 else ""
        lines.append(f"the same {leak.what} is in the splits {' and '.join(leak.splits)}: {items}{more}")
    return "\n  ".join(lines)
