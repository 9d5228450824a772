"""Stage scan: finds the items of a data set without an inventory, and scans them.

Structures are scanned file by file. A reader's items are read in one task, from beginning to end.
"""

from __future__ import annotations

import json
import math
import shutil
from array import array
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from pipeline.command_line import Command
from pipeline.dataset import worklist
from pipeline.dataset.blocks import KnownBlock, tallies
from pipeline.dataset.early_items import edges_of_atom
from pipeline.dataset.reader_items import (
    FORMAT,
    ITEMS_READ,
    TRIED,
    EntriesTaken,
    blaming_reader,
    look_at_files,
    read_by_run,
    read_first,
    reader_of,
    reader_state,
    reader_tables,
    refuse_unreadable,
    take_entries,
)
from pipeline.dataset.worklist import KnownItem, Lines, Shard, StageSurvey
from pipeline.errors import CacheDamaged, DataError, RecordMissing
from pipeline.files import write_whole
from pipeline.graphs.make_graphs import Maker, open_writer
from pipeline.journal.ledger import write_rejections
from pipeline.journal.run_folder import writing_run
from pipeline.records import Entry, Item, Reason, Rejection
from pipeline.stage_names import StageName
from pipeline.stages.census import Census, CensusTally, list_table, write_leaks
from pipeline.stages.stage import Judged, Stage, add_blocks, wait_until_complete
from pipeline.structures.inventory import plain_recipe
from pipeline.structures.scan_items import file_mark, scan_items
from pipeline.structures.sources.item_ids import unread_columns
from pipeline.training.items.item_table import KIND, ItemTable
from pipeline.units import printable_text
from pipeline.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    from pipeline.config.schema import Config
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.protocol import Reader
    from pipeline.records import TaskContext
    from pipeline.stages.stage import Outcomes

BASE_BYTES = 512 << 20
BYTES_PER_FILE_BYTE = 16  # an mmCIF file of 38 MB was seen to take 587 MB
BYTES_PER_PAE_BYTE = 8  # and predicted aligned errors in another file
ATOMS_PER_RESIDUE = 10  # heavy ones, on the average
BYTES_PER_EDGE = 100  # of an atom graph while it is built
TASKS_PER_SLOT = 4  # enough tasks that the last one to finish is short
FEWEST_PER_TASK, MOST_PER_TASK = 256, 2048  # a task costs a second of CPU, like 200 PDB files, and a shard
FEWEST_PER_JOB = 512  # and on a cluster a place in the queue
ITEMS_PER_S = 20  # mmCIF files; a cautious value, used only to size tasks
AT_A_GLANCE = frozenset({Reason.MISSING_FILE, Reason.UNREADABLE_FILE, Reason.FILE_TOO_LARGE, Reason.NEEDS_EXTRA})


class ScanStage(Stage):
    """Stores an inventory of every item."""

    name = StageName.SCAN
    kinds = ("scan", "files", "sets")
    lists_lines = True

    def inspect(self, project: Project) -> object:
        return next(worklist.list_items(project), None)

    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:
        """Find the items without an inventory; with a run folder, list all items and the missing ones there."""
        counts = Counter(dict.fromkeys(("items", "refused", "unusable", "cached", "missing", "unnamed"), 0))
        offsets = array("Q")  # offsets of the missing items in the list, and its end
        with Lines(folder.todo(self.name) if folder else None) as todo:
            for tally in _tallies(project, folder, again=False):
                counts.update(tally.counts)
                for known in tally.absent:
                    if not _is_named(known, project):
                        counts["unnamed"] += 1
                        continue
                    offsets.append(todo.position)
                    counts["missing"] += 1
                    todo.write(worklist.item_line(known.item))
            offsets.append(todo.position)
        missing, items_per_task = counts["missing"], _items_per_task(project, counts["missing"], at_once)
        bounds = pairwise([*range(0, missing, items_per_task), missing])
        return StageSurvey(counts, tuple(Shard(offsets[first], offsets[last], last - first) for first, last in bounds))

    def mem_bytes(self, project: Project) -> int:
        return scan_bytes(project.config)

    def work(self, project: Project, folder: RunFolder, task: int, context: TaskContext) -> Outcomes:
        """Scan the items of one task; if the run includes graphs, build them from the structures in memory."""
        items = worklist.task_items(folder, self.name, task, context)
        if StageName.GRAPH not in json.loads(folder.stages.read_text()) or not project.config.graph.cache:
            yield from scan_items(items, project.recipe, project.shelves, refuse=context.refuse)
            return
        with open_writer(project.graphs.store, project.config.cache.shard_bytes) as writer:
            maker = Maker(project.graphs.recipe, project.graphs.store, writer, partial(project.only.names, "graph"))
            yield from scan_items(items, project.recipe, project.shelves, maker, refuse=context.refuse)

    def recipe(self, project: Project) -> Mapping[str, Any]:
        return plain_recipe(project.recipe)

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Census:
        """Take the census of all items; list the rejected ones."""
        required = worklist.required_items(folder, self.name)

        def count() -> CensusTally:
            tally = add_blocks(CensusTally(keys={"scan": bytearray()}), folder, _tallies(project, folder), required)
            if not tally.undone:
                worklist.remember_needed(project, self.name, tally.keys["scan"])
            return tally

        tally = wait_until_complete(project.shelves.stores(), count, patience_s)
        write_leaks(folder, tally.marks)
        return tally.census(str(folder.path))

    def check(self, project: Project, folder: RunFolder, judged: Census) -> list[str]:
        is_checked = judged.leaks and project.config.data.on_leak != "ignore"
        first = next((item for item in worklist.read_items(folder.items) if isinstance(item, Item)), None)
        unread = unread_columns(first, project.config.data.labels) if first else ""
        return [*_checked_leaks(project, describe_leaks(judged, folder) if is_checked else ""), *filter(None, [unread])]


def scan_bytes(config: Config) -> int:
    """Return the memory of a task: for the interpreter, the largest file and the largest graph."""
    structures, graph_bytes = config.structures, 0
    if config.graph.nodes == "atom":
        graph_bytes = ATOMS_PER_RESIDUE * structures.max_residues * edges_of_atom(config.graph) * BYTES_PER_EDGE
    pae_bytes = BYTES_PER_PAE_BYTE if structures.pae != "none" else 0
    return BASE_BYTES + structures.max_file_bytes * (BYTES_PER_FILE_BYTE + pae_bytes) + graph_bytes


def _is_named(known: KnownItem, project: Project) -> bool:
    """Tell whether a run confined to a damage list may scan an item."""
    only = project.only
    if known.key is not None:
        return only.names(StageName.SCAN, known.key)
    marks = (file_mark(path, project.recipe) for path in project.recipe.paths(known.item))
    return (
        only.is_all
        or StageName.SCAN in only.whole_kinds
        or any(only.names("files", m) for m in marks if isinstance(m, bytes))
    )


def _tallies(project: Project, folder: RunFolder | None, *, again: bool = True) -> Iterator[CensusTally]:
    """Yield the census of each block of the data set."""
    graphs = project.graphs.recipe

    def count(block: KnownBlock) -> CensusTally:
        tally, usable = CensusTally(keys=block.keys), list[tuple[KnownItem, list[str]]]()
        for entry in block.entries:
            if isinstance(entry, Rejection):
                tally.reject(entry)
            elif entry.inventory is None:
                tally.absent.append(entry)
                tally.marks.seen += 1
            else:
                key = entry.key or b""
                tally.accept(entry.item, entry.inventory)
                usable.append((entry, [key.hex(), graphs.key(key).hex()]))
        tally.list_items(usable)
        items, refused = len(block.entries), block.refused.total()
        unusable = sum(tally.rejected.get(reason, 0) - block.refused[reason] for reason in AT_A_GLANCE)
        cached = items - refused - unusable - len(tally.absent)
        tally.counts.update(items=items, refused=refused, unusable=unusable, cached=cached)
        return tally

    recipe = {"scan": plain_recipe(project.recipe), "graph": graphs.plain()}
    return tallies(project, folder, StageName.SCAN, recipe, CensusTally, count, again=again)


def _items_per_task(project: Project, missing: int, at_once: int) -> int:
    """Return the items per task: as configured, else for a few tasks in each slot, within limits."""
    configured = project.config.cluster.scan.items_per_task
    if configured != "auto":
        return int(configured)
    if project.config.cluster.executor != "slurm":
        return max(FEWEST_PER_TASK, min(MOST_PER_TASK, math.ceil(missing / (TASKS_PER_SLOT * at_once))))
    most = 60 * project.config.cluster.scan.minutes_per_task * ITEMS_PER_S
    return min(most, max(FEWEST_PER_JOB, math.ceil(missing / at_once)))


def _checked_leaks(project: Project, what: str) -> list[str]:
    """Raise, warn or ignore leaks between splits, as configured."""
    data = project.config.data
    if what and data.on_leak == "error":
        remedy = Command.submit("scan", before="correct the splits   or   ").with_settings(("data.on_leak", "warn"))
        raise DataError(what, where=str(data.path), remedy=remedy)
    return [what] if what and data.on_leak == "warn" else []


def describe_leaks(census: Census, folder: RunFolder) -> str:
    """Describe what several splits share, with the names of a few items."""
    wanted = {ordinal for leak in census.leaks for ordinal in leak.items}
    names = {ordinal: entry.id for ordinal, entry in worklist.items_at(folder.items, sorted(wanted))}
    lines = []
    for leak in {leak.what: leak for leak in reversed(census.leaks)}.values():
        items = ", ".join(names[ordinal] for ordinal in leak.items)
        more = f" (and {leak.total - 1:,} more)" if leak.total > 1 else ""
        lines.append(f"the same {leak.what} is in the splits {' and '.join(leak.splits)}: {items}{more}")
    return "\n  ".join([*lines, f"all of them: {folder.leaks}"] if lines else lines)


READER_BYTES = 1 << 30  # an interpreter, and what a reader holds of a file
NOTE_EVERY = 100  # items
SETTLING_S = 3.0  # after this, equal times prove an unchanged file on any file system


@dataclass(slots=True)
class EntriesRead(Judged):
    """The result of reading a data set with a reader."""

    splits: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, dict[str, float]] = field(default_factory=dict)  # rows along each axis
    chains: dict[str, int] = field(default_factory=dict)  # empty: these items have no chains
    leaks: int = 0
    leak: str = ""
    table: str = ""  # its key


class ReaderScanStage(Stage):
    """Makes the table of a reader's usable items; the data set is read once, from beginning to end."""

    name = StageName.SCAN
    kinds = ScanStage.kinds

    def inspect(self, project: Project) -> object:
        return refuse_unreadable(project)

    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:  # noqa: ARG002 - one task
        """Find out whether the data set was read before in its present state."""
        known = None
        with suppress(CacheDamaged, RecordMissing):
            known = next((earlier for earlier, _, _ in reader_tables(project)), None)
        if folder is not None:
            with writing_run(folder.items):
                folder.items.touch()  # there are no structures
            if known is not None and known.path != folder.path:
                _take_over(known, folder)
        cached = int(known is not None)
        counts = {"items": 1, "refused": 0, "unusable": 0, "cached": cached, "missing": 1 - cached, "sets": 1}
        return StageSurvey(counts, () if known else (Shard(0, 1, 1),))  # one unit of work: cannot be split

    def mem_bytes(self, project: Project) -> int:  # noqa: ARG002
        return READER_BYTES

    def recipe(self, project: Project) -> Mapping[str, Any]:
        """Return the choices under which measurements of its tasks are kept."""
        data = project.config.data
        return {"reader": data.reader, "options": dict(data.options)}

    def work(self, project: Project, folder: RunFolder, task: int, context: TaskContext) -> Outcomes:  # noqa: ARG002
        """Read the data set, once from beginning to end."""
        reader = reader_of(project)
        made = reader_state(project, _settled_digest(reader))
        read_first(reader, TRIED)
        taken, judged = EntriesTaken(), EntriesRead()
        items = _noted(reader, context)
        write_rejections(folder.rejected, _rejections(items, taken, judged, project.config.data.limit))
        if reader_state(project) != made:
            what = "its files changed while being read"
            raise DataError(what, where=str(project.config.data.path), remedy=Command.submit("scan"))
        judged.items += len(taken.table)
        judged.splits = {name: count for name, count in taken.splits.items() if name}
        judged.sizes, judged.leaks, judged.leak = taken.spreads(), taken.leaks, taken.leak
        judged.table = taken.table.write(project.cache.kind(KIND)).hex()
        _write(folder, {"format": FORMAT, "made": made, "table": judged.table, "judged": asdict(judged)})
        yield None

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> EntriesRead:
        """Return the counts of the table, if the store has it."""
        store = project.cache.kind(KIND)

        def look() -> EntriesRead:
            written = read_by_run(folder)
            with suppress(CacheDamaged, RecordMissing):
                if written:
                    list_table(folder, ItemTable.read(store, bytes.fromhex(written["table"])))
                    return EntriesRead(**written["judged"])
            return EntriesRead(undone=1, first_undone=str(project.config.data.path))

        return wait_until_complete([store], look, patience_s)

    def check(self, project: Project, folder: RunFolder, judged: EntriesRead) -> list[str]:
        """Raise or warn about leaks, as configured; record the table of items."""
        more = f" (and {judged.leaks - 1:,} more: duplicate_id in {folder.rejected})" if judged.leaks > 1 else ""
        warnings = _checked_leaks(project, judged.leak and judged.leak + more)
        with writing_run(folder.table):
            folder.table.write_text(judged.table)
        return warnings


def _take_over(known: RunFolder, folder: RunFolder) -> None:
    """Copy the result of an earlier run that read the same data."""
    with writing_run(folder.entered):
        if known.rejected.exists():
            shutil.copyfile(known.rejected, folder.rejected)
    _write(folder, read_by_run(known))


def _write(folder: RunFolder, result: Mapping[str, Any]) -> None:
    with writing_run(folder.entered):
        write_whole(folder.entered, json.dumps(result))


def _settled_digest(reader: Reader) -> str:
    """Return the digest of the reader's files, once their times prove that they are settled, or after a while."""
    digests = [""]

    def is_still() -> bool:
        digests[0], still = look_at_files(reader)
        return still

    wait_for(is_still, SETTLING_S, SETTLING_S / 30)
    return digests[0]


def _noted(reader: Reader, context: TaskContext) -> Iterator[Entry | Rejection]:
    """Yield the items; note now and then which one is being read, in case the process dies."""
    for number, entry in enumerate(reader.entries()):
        if number % NOTE_EVERY == 0 and isinstance(entry, Entry | Rejection):
            context.report.figures[ITEMS_READ] = number
            context.on([f"item {number + 1:,} ({printable_text(entry.origin or str(entry.id))}) or one soon after it"])
        yield entry


def _rejections(
    entries: Iterable[Entry | Rejection], taken: EntriesTaken, judged: EntriesRead, limit: int | None
) -> Iterator[dict[str, Any]]:
    with blaming_reader():
        for rejected in take_entries(entries, taken, limit):
            judged.reject(rejected)
            yield rejected.to_json()
