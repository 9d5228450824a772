"""Stage graph in a run: which items have no graph yet, cut into tasks of equal cost; and one task's work."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import ConfigError
from pipeline.journal.attempts import left_out_items
from pipeline.journal.ledger import write_rejections
from pipeline.journal.run_folder import writing_run
from pipeline.records import Kind, Reason, Rejection
from pipeline.runs.dataset import outcome, worklist
from pipeline.runs.dataset.outcome import Judged, patiently
from pipeline.runs.dataset.worklist import Found, Lines
from pipeline.runs.workflow import scan_stage
from pipeline.runs.workflow.scan_stage import Known
from pipeline.stages.graph import graph
from pipeline.store.key_lists import in_chunks
from pipeline.structures.sources.item_ids import label_values
from pipeline.training.items.item_table import TableBuilder

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from pipeline.config.schema_data import GraphSection
    from pipeline.journal.run_folder import RunFolder
    from pipeline.project.project import Project
    from pipeline.records import Inventory, Tell
    from pipeline.runs.dataset.worklist import Shard
    from pipeline.stages.graph import Verifier

NAME = "graph"
WORTHWHILE_S = 10  # from when on another task pays
ATOMS_PER_S = 500_000  # read and turned into a graph; cautious, and only for cutting work into tasks
BYTES_PER_ATOM = 32  # of a stored graph, about
BYTES_PER_EDGE = 2


def inspect(project: Project) -> None:
    """Refuse what has no structures."""
    if project.config.data.source == "fasta":
        what = "sequences have no structures to make graphs of"
        raise ConfigError(what, where="data.source is fasta", remedy="pipeline submit --stage embed")


def survey(project: Project, folder: RunFolder | None, at_once: int) -> Found:
    """Compare the items of a data set with the store; write down those that have no graph."""
    kept, graphs = project.config.graph.cache, project.graphs
    verifier = graphs.verifier(limited=True)
    counts = {"items": 0, "refused": 0, "unusable": 0, "cached": 0, "missing": 0, "waiting": 0, "unkept": 0}
    counts["unnamed"] = 0
    offsets, atoms = array("Q"), array("Q")  # where each missing item begins in the list; what it costs
    entries = worklist.frozen_items(project, folder)
    with Lines(folder.todo(NAME) if folder else None) as lines:
        for chunk in in_chunks(scan_stage.known(project, folder, entries), worklist.LOOKED_UP_AT_ONCE):
            usable = [one for one in chunk if isinstance(one, Known)]
            known = [(one.item, one.inventory, one.key) for one in usable if one.inventory and one.key]
            counts["items"] += len(chunk)
            counts["refused"] += len(chunk) - len(usable)
            counts["waiting"] += len(usable) - len(known)
            if not kept:
                counts["unkept"] += len(known)
                continue
            keys = [graphs.recipe.key(key) for _, _, key in known]
            for (item, inventory, _), key, said in zip(known, keys, verifier.look_up(keys), strict=True):
                if said is not None or not project.only.names("graph", key):
                    counts["cached" if said is not None else "unnamed"] += 1
                    continue
                counts["missing"] += 1
                offsets.append(lines.position)
                atoms.append(_atoms(inventory))
                lines.write_record(item)
        offsets.append(lines.position)
    atoms_N = np.frombuffer(atoms, np.uint64).astype(np.int64)
    atoms_bytes = BYTES_PER_ATOM
    if project.config.graph.nodes == "atom":
        atoms_bytes += BYTES_PER_EDGE * scan_stage.edges_of_atom(project.config.graph)
    return Found(counts, _cut(project, offsets, atoms_N, at_once), bytes=int(atoms_N.sum()) * atoms_bytes)


def _atoms(inventory: Inventory) -> int:
    """Return what an item costs: the atoms that are read for it, and something for the file itself."""
    return 500 + sum(partner.atoms for partner in (*inventory.partners, *inventory.bound))


def _cut(project: Project, offsets: array[int], atoms_N: NDArray[np.int64], at_once: int) -> tuple[Shard, ...]:
    """Cut what is to do, in order, into tasks of about equal cost."""
    tasks = _tasks(project, int(atoms_N.sum()), at_once)
    return worklist.cut(offsets, atoms_N, project.config.cluster.graph.items_per_task, tasks)


def _tasks(project: Project, atoms: int, at_once: int) -> int:
    """Return how many tasks there are: of some minutes, and enough for all that can run at once."""
    worthwhile = min(at_once, math.ceil(atoms / (ATOMS_PER_S * WORTHWHILE_S)))
    task_s = 60 * project.config.cluster.graph.minutes_per_task
    return max(1, math.ceil(atoms / (ATOMS_PER_S * task_s)), worthwhile)


def mem_bytes(project: Project) -> int:
    """Return the memory of a task: that of scanning, during which graphs are built as well."""
    return scan_stage.mem_bytes(project)


def work(
    project: Project, folder: RunFolder, task: int, tell: Tell, _part: tuple[int, int] = (0, 1)
) -> Generator[Reason | None, None, None]:
    """Build the graphs of one task."""
    items, graphs = scan_stage.noted(folder, NAME, task, tell), project.graphs
    return graph(items, project.recipe, graphs.recipe, graphs.store, project.config.cache.shard_bytes)


SUMMED = ("nodes", "edges", "bond", "angle", "dihedral", "near", "cross", "contacts")


@dataclass(slots=True)
class Graphed(Judged):
    """The numbers of a data set of graphs."""

    totals: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SUMMED, 0))
    largest: int = 0  # nodes
    table: str = ""  # the key of the table of what can be trained on
    kept: bool = True  # whether graphs are on disk

    def accept(self, sizes: Mapping[str, int]) -> None:
        """Count an item that has a graph."""
        self.items += 1
        self.largest = max(self.largest, sizes["nodes"])
        for name in SUMMED:
            self.totals[name] += sizes.get(name, 0)


def judge(project: Project, folder: RunFolder, patience_s: float) -> Graphed:
    """Count what the store has of every item, list what was left out, and write the table of the rest."""

    def look() -> Graphed:
        graphed, table = Graphed(kept=project.config.graph.cache), TableBuilder()
        write_rejections(folder.rejected, _tally(project, folder, graphed, table))
        if graphed.accepted and not graphed.undone + graphed.unnamed:
            graphed.table = table.write(project.cache.kind("sets")).hex()
            if graphed.kept:
                outcome.keep(project, NAME, table.keys)
        return graphed

    return patiently((*project.shelves.stores(), project.graphs.store), look, patience_s)


def check(_project: Project, folder: RunFolder, graphed: Graphed) -> list[str]:
    """Let the table of a run that went well be found; say where nothing is known of graphs yet."""
    with writing_run(folder.table):
        folder.table.write_text(graphed.table)
    return [] if graphed.kept else ["graphs are not kept (graph.cache: false): what cannot be built shows in training"]


def _tally(project: Project, folder: RunFolder, graphed: Graphed, table: TableBuilder) -> Iterator[dict[str, Any]]:
    """Count every item and yield the rejected ones."""
    verifier, barred, asked = (
        project.graphs.verifier(limited=False),
        left_out_items(folder, NAME),
        worklist.asked(folder, NAME),
    )
    for chunk in in_chunks(
        scan_stage.known(project, folder, worklist.read_items(folder.items)), worklist.LOOKED_UP_AT_ONCE
    ):
        for one, said in zip(chunk, _said(project, chunk, verifier), strict=True):
            if isinstance(one, Known) and said is not None and "reason" in said:
                one = scan_stage.rejection(one.item, Reason(said["reason"]), said["detail"])
            elif isinstance(one, Known) and said is None and one.item.id in barred:
                one = scan_stage.rejection(one.item, *barred[one.item.id])
            if isinstance(one, Rejection):
                graphed.reject(one)
                yield one.to_json()
            elif said is None or one.key is None:
                graphed.miss(one.item.id, asked=asked(worklist.line_of(one.item)))
            else:
                graphed.accept(said["sizes"])
                item = None if graphed.kept else one.item
                key, labels = project.graphs.recipe.key(one.key), label_values(one.item, project.source.labels)
                table.add(one.item.id, key, one.item.split, said["sizes"], item, labels=labels)


def _said(
    project: Project, chunk: Sequence[Known | Rejection], verifier: Verifier
) -> Iterator[Mapping[str, Any] | None]:
    """Yield what is known of the graph of each item; where none is kept, what its inventory promises."""
    if not project.config.graph.cache:
        for one in chunk:
            inventory = one.inventory if isinstance(one, Known) else None
            yield {"sizes": promised(inventory, project.config.graph)} if inventory else None
        return
    keys = [one.key if isinstance(one, Known) and one.inventory else None for one in chunk]
    found = iter(verifier.look_up([project.graphs.recipe.key(key) for key in keys if key]))
    for key in keys:
        yield next(found) if key else None


def promised(inventory: Inventory, graph: GraphSection) -> dict[str, int]:
    """Return those sizes of a graph that are known before it is built; nodes of atom graphs are at most so many."""
    if graph.nodes == "atom":
        nodes = [partner.atoms for partner in inventory.partners]
    else:
        nodes = [
            sum(chain.nodes for chain in partner.chains if chain.kind is Kind.PROTEIN) for partner in inventory.partners
        ]
    ligand = nodes[1] if len(nodes) > 1 else 0
    sizes = {"nodes": sum(nodes), "receptor": nodes[0], "ligand": ligand, "pairs": nodes[0] * ligand}
    by_residue = graph.nodes == "residue"
    sizes["residues"] = sum(nodes) if by_residue else sum(partner.residues for partner in inventory.partners)
    if by_residue and graph.radius is None:
        sizes["edges"] = sum(count * min(graph.neighbours, max(0, count - 1)) for count in nodes)
    return sizes
