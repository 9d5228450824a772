"""Stage graph: finds the items without a graph, cuts them into tasks of equal cost, and builds the graphs."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from pipeline.command_line import Command
from pipeline.dataset import worklist
from pipeline.dataset.blocks import KnownBlock, tallies
from pipeline.dataset.early_items import edges_of_atom, promised_sizes
from pipeline.dataset.worklist import KnownItem, Lines, StageSurvey, list_items, read_items
from pipeline.errors import ConfigError, PipelineError
from pipeline.graphs.make_graphs import graph
from pipeline.journal.attempts import left_out_items
from pipeline.journal.run_folder import writing_run
from pipeline.planning.rank_setup import log_line
from pipeline.records import Item, Reason, Rejection
from pipeline.stage_names import StageName
from pipeline.stages.scan import scan_bytes
from pipeline.stages.stage import Judged, Stage, StageTally, add_blocks, wait_until_complete
from pipeline.structures.sources.item_ids import label_values
from pipeline.training.items.item_table import TableBuilder, TablePages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from pipeline.dataset.worklist import Shard
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import Inventory, TaskContext
    from pipeline.stages.stage import Outcomes
    from pipeline.store.store import WholeRecords

WORTHWHILE_S = 10  # below this, another task costs more than it saves
ATOMS_PER_S = 500_000  # a cautious value, used only to size tasks
BYTES_PER_ATOM = 32  # of a stored graph, about
BYTES_PER_EDGE = 2


class GraphStage(Stage):
    """Stores a graph of each item, and the table of items for training."""

    name = StageName.GRAPH
    kinds = ("graph", "sets")
    needs = (StageName.SCAN,)
    of_sequences = False
    of_entries = False
    lists_lines = True

    def inspect(self, project: Project) -> None:
        """Refuse sequences, which have no structures."""
        if project.config.data.source == "fasta":
            what = "sequences have no structures to build graphs from"
            raise ConfigError(what, where="data.source is fasta", remedy=Command.submit("embed"))

    def survey(self, project: Project, folder: RunFolder | None, at_once: int) -> StageSurvey:
        """Compare the items of a data set with the store; list those without a graph."""
        counts = Counter(dict.fromkeys(COUNTED, 0))
        offsets, atoms = array("Q"), array("Q")  # offsets of missing items in the list, and their costs
        with Lines(folder.todo(self.name) if folder else None) as lines:
            for tally in _tallies(project, folder):
                counts.update(tally.counts)
                for known in tally.absent:
                    if known.inventory is None or known.key is None:
                        counts["waiting"] += 1
                    elif not project.only.names("graph", project.graphs.recipe.key(known.key)):
                        counts["unnamed"] += 1
                    else:
                        counts["missing"] += 1
                        offsets.append(lines.position)
                        atoms.append(_atoms(known.inventory))
                        lines.write(worklist.item_line(known.item))
            offsets.append(lines.position)
        atoms_N = np.frombuffer(atoms, np.uint64).astype(np.int64)
        atom_bytes = BYTES_PER_ATOM
        if project.config.graph.nodes == "atom":
            atom_bytes += BYTES_PER_EDGE * edges_of_atom(project.config.graph)
        return StageSurvey(counts, _cut(project, offsets, atoms_N, at_once), bytes=int(atoms_N.sum()) * atom_bytes)

    def mem_bytes(self, project: Project) -> int:
        """Return the memory of a task: that of scanning, which can build graphs, too."""
        return scan_bytes(project.config)

    def work(self, project: Project, folder: RunFolder, task: int, context: TaskContext) -> Outcomes:
        """Build the graphs of one task."""
        items, graphs = worklist.task_items(folder, self.name, task, context), project.graphs
        return graph(items, project.recipe, graphs.recipe, graphs.store, project.config.cache.shard_bytes)

    def recipe(self, project: Project) -> Mapping[str, Any]:
        return project.graphs.recipe.plain()

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Graphed:
        """Count the items, list the rejected ones, and write the table of the others for training."""
        required = worklist.required_items(folder, self.name)

        def count() -> Graphed:
            pages = TablePages(project.cache.kind("sets"))
            tallies = paged(_tallies(project, folder), pages)
            tally = add_blocks(GraphTally(keys={"graph": bytearray()}), folder, tallies, required)
            graphed = tally.result(Graphed, kept=project.config.graph.cache)
            if graphed.accepted and not graphed.undone + graphed.unnamed:
                graphed.table = pages.write().hex()
                if graphed.kept:
                    worklist.remember_needed(project, self.name, tally.keys["graph"])
            return graphed

        return wait_until_complete((*project.shelves.stores(), project.graphs.store), count, patience_s)

    def check(self, project: Project, folder: RunFolder, judged: Graphed) -> list[str]:  # noqa: ARG002
        """Record the table of items for training; warn if graphs were not built yet."""
        with writing_run(folder.table):
            folder.table.write_text(judged.table)
        if judged.kept:
            return []
        return ["graphs are not cached (graph.cache: false): build errors appear during training"]


def _cut(project: Project, offsets: array[int], atoms_N: NDArray[np.int64], at_once: int) -> tuple[Shard, ...]:
    """Cut the list of items, in order, into tasks of about equal cost."""
    resources, seconds = project.config.cluster.graph, int(atoms_N.sum()) / ATOMS_PER_S
    tasks = worklist.tasks_for(seconds, resources.minutes_per_task, at_once, WORTHWHILE_S)
    return worklist.cut_lines(offsets, atoms_N, resources.items_per_task, tasks)


def _atoms(inventory: Inventory) -> int:
    """Return the cost of an item: the atoms that are read for it, and a constant for the file."""
    return 500 + sum(partner.atoms for partner in (*inventory.partners, *inventory.bound))


SUMMED = ("nodes", "edges", "bond", "angle", "dihedral", "near", "cross", "contacts")
COUNTED = ("items", "refused", "unusable", "cached", "missing", "waiting", "unkept", "unnamed")


@dataclass(slots=True)
class Graphed(Judged):
    """The result of building graphs for a data set."""

    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMMED, 0))
    largest: int = 0  # nodes
    table: str = ""  # the key of the table of items for training
    kept: bool = True  # whether graphs are on disk


@dataclass
class GraphTally(StageTally):
    """Counts the graphs of items, and collects the table of items for training."""

    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMMED, 0))
    largest: int = 0
    rows: TableBuilder = field(default_factory=TableBuilder)

    def accept(self, item: Item, key: bytes, sizes: Mapping[str, int], labels: Sequence[str], *, kept: bool) -> None:
        """Count an item that has a graph."""
        self.items += 1
        self.largest = max(self.largest, sizes["nodes"])
        for name in SUMMED:
            self.totals[name] += sizes.get(name, 0)
        self.rows.add(item.id, key, item.split, sizes, None if kept else item, labels=label_values(item, labels))


def paged(tallies: Iterable[GraphTally], pages: TablePages) -> Iterator[GraphTally]:
    """Yield the tallies, and add their items to the table as long as none is missing: else it is not written."""
    is_whole = True
    for tally in tallies:
        is_whole = is_whole and not tally.absent
        if is_whole:
            pages.add(tally.rows)
        yield tally


def _tallies(project: Project, folder: RunFolder | None) -> Iterator[GraphTally]:
    """Yield the tally of each block of the data set; for a run, which is then judged, verify every graph."""
    recipe, kept, labels = project.graphs.recipe, project.config.graph.cache, project.source.labels
    verifier, barred = project.graphs.verifier(limited=folder is None), left_out_items(folder, StageName.GRAPH)

    def count(block: KnownBlock) -> GraphTally:
        metas = _metas(project, block.entries, verifier)
        tally = GraphTally(keys={"graph": bytearray().join(metas)} if kept else block.keys)
        for entry in block.entries:
            meta = None if isinstance(entry, Rejection) or entry.key is None else metas.get(recipe.key(entry.key))
            rejected = entry if isinstance(entry, Rejection) else _rejected(entry.item, meta, barred)
            tally.counts["refused"] += isinstance(entry, Rejection)
            if rejected is not None:
                tally.reject(rejected)
                continue
            assert isinstance(entry, KnownItem)
            if meta is None or entry.key is None:
                tally.absent.append(entry)
            elif meta:  # a plan verifies only up to `cache.verify_bytes`, then trusts the index
                tally.accept(entry.item, recipe.key(entry.key), meta["sizes"], labels, kept=kept)
        there = len(block.entries) - tally.counts["refused"] - len(tally.absent)
        tally.counts.update({"items": len(block.entries), "cached" if kept else "unkept": there})
        return tally

    records = {"graph": project.graphs.verifier(limited=folder is None)}
    return tallies(project, folder, StageName.GRAPH, recipe.plain(), GraphTally, count, records)


def _rejected(item: Item, meta: Mapping[str, Any] | None, barred: Mapping[str, tuple[Reason, str]]) -> Rejection | None:
    """Return the rejection of an item that cannot have a graph, or None."""
    if meta is None:
        return worklist.rejection(item, *barred[item.id]) if item.id in barred else None
    return worklist.rejection(item, Reason(meta["reason"]), meta["detail"]) if "reason" in meta else None


def _metas(
    project: Project, entries: Iterable[KnownItem | Rejection], verifier: WholeRecords
) -> Mapping[bytes, Mapping[str, Any]]:
    """Return the metadata of stored graphs by key; if graphs are not stored, their expected sizes."""
    known = [entry for entry in entries if isinstance(entry, KnownItem)]
    scanned = {project.graphs.recipe.key(one.key): one.inventory for one in known if one.key and one.inventory}
    if project.config.graph.cache:
        return verifier.metas(list(scanned))
    return {key: {"sizes": promised_sizes(inventory, project.config.graph)} for key, inventory in scanned.items()}


def remake_graph(project: Project, folder: RunFolder, name: str, key: bytes) -> bool:
    """Rebuild the graph of an item from its files; return whether the cache has it then."""
    graphs = project.graphs
    entries = read_items(folder.items) if folder.items.exists() else list_items(project)
    items = islice((entry for entry in entries if isinstance(entry, Item) and entry.id == name), 1)
    try:
        for _ in graph(items, project.recipe, graphs.recipe, graphs.store, project.config.cache.shard_bytes):
            pass
    except (PipelineError, OSError) as error:
        log_line(f"the graph of {name} cannot be rebuilt: {error}")
    return graphs.store.has_whole(key)
