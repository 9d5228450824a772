"""Stage graph: finds the items without a graph, cuts them into tasks of equal cost, and builds the graphs."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from pipeline.command_line import Command
from pipeline.dataset import worklist
from pipeline.dataset.early_items import edges_of_atom, promised_sizes
from pipeline.dataset.standing import Standing, data_state, recall_standing, remember_standing
from pipeline.dataset.worklist import KnownItem, Lines, StageSurvey, list_items, read_items
from pipeline.errors import ConfigError, PipelineError
from pipeline.graphs.make_graphs import graph
from pipeline.journal.attempts import left_out_items
from pipeline.journal.ledger import write_rejections
from pipeline.journal.run_folder import writing_run
from pipeline.planning.rank_setup import log_line
from pipeline.records import Item, Reason, Rejection
from pipeline.stage_names import StageName
from pipeline.stages.scan import ScanStage
from pipeline.stages.stage import Judged, Stage, wait_until_complete
from pipeline.structures.sources.item_ids import label_values
from pipeline.training.items.item_table import TableBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from pipeline.dataset.worklist import Shard
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import Inventory, TaskContext
    from pipeline.stages.stage import Outcomes
    from pipeline.store.store import WholeRecords

WORTHWHILE_S = 10  # from when on another task pays
ATOMS_PER_S = 500_000  # read and turned into a graph; cautious, and only for cutting work into tasks
BYTES_PER_ATOM = 32  # of a stored graph, about
BYTES_PER_EDGE = 2


class GraphStage(Stage):
    """Structures in, a graph of each item in the store, and the table of what can be trained on."""

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
        if standing := recall_standing(project, folder, self.name, self.recipe(project)):
            return StageSurvey(standing.counts, ())
        config, graphs = project.config, project.graphs
        verifier = graphs.verifier(limited=True)
        counts = dict.fromkeys(("items", "refused", "unusable", "cached", "missing", "waiting", "unkept", "unnamed"), 0)
        offsets, atoms = array("Q"), array("Q")  # where each missing item begins in the list; what it costs
        entries = worklist.frozen_items(project, folder)
        with Lines(folder.todo(self.name) if folder else None) as lines:
            for chunk in worklist.known_items(project, folder, entries):
                usable = [entry for entry in chunk if isinstance(entry, KnownItem)]
                known = [(entry.item, entry.inventory, entry.key) for entry in usable if entry.inventory and entry.key]
                counts["items"] += len(chunk)
                counts["refused"] += len(chunk) - len(usable)
                counts["waiting"] += len(usable) - len(known)
                if not config.graph.cache:
                    counts["unkept"] += len(known)
                    continue
                keys = [graphs.recipe.key(key) for _, _, key in known]
                cached = verifier.metas(keys)
                for (item, inventory, _), key in zip(known, keys, strict=True):
                    if key in cached or not project.only.names("graph", key):
                        counts["cached" if key in cached else "unnamed"] += 1
                        continue
                    counts["missing"] += 1
                    offsets.append(lines.position)
                    atoms.append(_atoms(inventory))
                    lines.write(worklist.item_line(item))
            offsets.append(lines.position)
        atoms_N = np.frombuffer(atoms, np.uint64).astype(np.int64)
        atom_bytes = BYTES_PER_ATOM
        if config.graph.nodes == "atom":
            atom_bytes += BYTES_PER_EDGE * edges_of_atom(config.graph)
        shards = _cut(project, offsets, atoms_N, at_once)
        return StageSurvey(counts, shards, bytes=int(atoms_N.sum()) * atom_bytes)

    def mem_bytes(self, project: Project) -> int:
        """Return the memory of a scanning task, in which graphs may be built as well."""
        return ScanStage().mem_bytes(project)

    def work(self, project: Project, folder: RunFolder, task: int, tell: TaskContext) -> Outcomes:
        """Build the graphs of one task."""
        items, graphs = worklist.task_items(folder, self.name, task, tell), project.graphs
        return graph(items, project.recipe, graphs.recipe, graphs.store, project.config.cache.shard_bytes)

    def recipe(self, project: Project) -> Mapping[str, Any]:
        return project.graphs.recipe.plain()

    def judge(self, project: Project, folder: RunFolder, patience_s: float) -> Graphed:
        """Count the items, list the rejected ones, and write the table of the rest for training."""
        if standing := recall_standing(project, folder, self.name, self.recipe(project)):
            return Graphed.standing(standing)
        state = data_state(project, folder)

        def count() -> Graphed:
            graphed, table, found = Graphed(kept=project.config.graph.cache), TableBuilder(), _RecordsFound()
            write_rejections(folder.rejected, _tally(project, folder, graphed, table, found))
            if graphed.accepted and not graphed.undone + graphed.unnamed:
                graphed.table = table.write(project.cache.kind("sets")).hex()
                if graphed.kept:
                    worklist.remember_needed(project, self.name, table.keys)
                keys = {"scan": found.scans, "graph": found.graphs, "sets": bytearray.fromhex(graphed.table)}
                stands = Standing(found.counts(state.items, kept=graphed.kept), graphed.to_json())
                remember_standing(
                    project, folder, self.name, self.recipe(project), state, stands, keys, [folder.rejected]
                )
            return graphed

        return wait_until_complete((*project.shelves.stores(), project.graphs.store), count, patience_s)

    def check(self, project: Project, folder: RunFolder, judged: Graphed) -> list[str]:  # noqa: ARG002
        """Record the table of items for training; warn where graphs were not built yet."""
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


@dataclass(slots=True)
class Graphed(Judged):
    """The result of building graphs for a data set."""

    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMMED, 0))
    largest: int = 0  # nodes
    table: str = ""  # the key of the table of items for training
    kept: bool = True  # whether graphs are on disk

    def accept(self, sizes: Mapping[str, int]) -> None:
        """Count an item that has a graph."""
        self.items += 1
        self.largest = max(self.largest, sizes["nodes"])
        for name in SUMMED:
            self.totals[name] += sizes.get(name, 0)


@dataclass(slots=True)
class _RecordsFound:
    """The keys of what was found, and how many items had no inventory that can be used."""

    scans: bytearray = field(default_factory=bytearray)
    graphs: bytearray = field(default_factory=bytearray)
    refused: int = 0

    def counts(self, items: int, *, kept: bool) -> dict[str, int]:
        """Return what a survey counts of a data set that lacks nothing."""
        counts = dict.fromkeys(("unusable", "cached", "missing", "waiting", "unkept", "unnamed"), 0)
        return {**counts, "items": items, "refused": self.refused, "cached" if kept else "unkept": items - self.refused}


def _tally(
    project: Project, folder: RunFolder, graphed: Graphed, table: TableBuilder, found: _RecordsFound
) -> Iterator[dict[str, Any]]:
    """Count every item and yield the rejected ones."""
    verifier, barred = project.graphs.verifier(limited=False), left_out_items(folder, StageName.GRAPH)
    is_required = worklist.required_lines(folder, StageName.GRAPH)
    for chunk in worklist.known_items(project, folder, worklist.read_items(folder.items), found.scans):
        found.refused += sum(isinstance(entry, Rejection) for entry in chunk)
        for entry, meta in zip(chunk, _metas(project, chunk, verifier, found.graphs), strict=True):
            rejected = entry if isinstance(entry, Rejection) else _rejected(entry.item, meta, barred)
            if rejected is not None:
                graphed.reject(rejected)
                yield rejected.to_json()
                continue
            assert isinstance(entry, KnownItem)
            if meta is None or entry.key is None:
                graphed.miss(entry.item.id, required=is_required(worklist.item_line(entry.item)))
            else:
                graphed.accept(meta["sizes"])
                kept_item = None if graphed.kept else entry.item
                key, labels = project.graphs.recipe.key(entry.key), label_values(entry.item, project.source.labels)
                table.add(entry.item.id, key, entry.item.split, meta["sizes"], kept_item, labels=labels)


def _rejected(item: Item, meta: Mapping[str, Any] | None, barred: Mapping[str, tuple[Reason, str]]) -> Rejection | None:
    """Return the rejection of an item that has no graph and cannot have one; None otherwise."""
    if meta is None:
        return worklist.rejection(item, *barred[item.id]) if item.id in barred else None
    return worklist.rejection(item, Reason(meta["reason"]), meta["detail"]) if "reason" in meta else None


def _metas(
    project: Project, chunk: Sequence[KnownItem | Rejection], verifier: WholeRecords, found: bytearray
) -> Iterator[Mapping[str, Any] | None]:
    """Yield the metadata of each item's graph, None where there is none; if graphs are not kept, expected sizes."""
    if not project.config.graph.cache:
        for entry in chunk:
            inventory = entry.inventory if isinstance(entry, KnownItem) else None
            yield {"sizes": promised_sizes(inventory, project.config.graph)} if inventory else None
        return
    known = [entry.key if isinstance(entry, KnownItem) and entry.inventory else None for entry in chunk]
    keys = [key and project.graphs.recipe.key(key) for key in known]
    metas = verifier.metas([key for key in keys if key])
    found += b"".join(metas)
    yield from (metas.get(key) if key else None for key in keys)


def remake_graph(project: Project, folder: RunFolder, name: str, key: bytes) -> bool:
    """Make the graph of an item anew from its files; tell whether the cache has it then."""
    graphs = project.graphs
    entries = read_items(folder.items) if folder.items.exists() else list_items(project)
    items = islice((entry for entry in entries if isinstance(entry, Item) and entry.id == name), 1)
    try:
        for _ in graph(items, project.recipe, graphs.recipe, graphs.store, project.config.cache.shard_bytes):
            pass
    except (PipelineError, OSError) as error:
        log_line(f"the graph of {name} cannot be rebuilt: {error}")
    return graphs.store.has_whole(key)
