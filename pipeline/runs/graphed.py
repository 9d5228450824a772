"""What a data set has in graphs, by what the store can serve; and the table that training goes by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.records import Kind, Reason, Rejection
from pipeline.runs import remembered, scanning, todo
from pipeline.runs.folder import writing
from pipeline.runs.graphing import NAME
from pipeline.runs.judged import Judged
from pipeline.runs.ledger import write_rejections
from pipeline.runs.left_out import left_out
from pipeline.runs.patience import patiently
from pipeline.runs.scanning import Known
from pipeline.structures.sources.labels import values_of
from pipeline.training.dataset import TableBuilder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any

    from pipeline.config.schema_data import Graph
    from pipeline.records import Inventory
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.project import Project
    from pipeline.stages.graph import Verifier

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
                remembered.keep(project, NAME, table.keys)
        return graphed

    return patiently((*project.shelves.stores(), project.graphs.store), look, patience_s)


def check(_project: Project, folder: RunFolder, graphed: Graphed) -> list[str]:
    """Let the table of a run that went well be found; say where nothing is known of graphs yet."""
    with writing(folder.table):
        folder.table.write_text(graphed.table)
    return [] if graphed.kept else ["graphs are not kept (graph.cache: false): what cannot be built shows in training"]


def _tally(project: Project, folder: RunFolder, graphed: Graphed, table: TableBuilder) -> Iterator[dict[str, Any]]:
    """Count every item and yield the rejected ones."""
    verifier, barred, asked = project.graphs.verifier(limited=False), left_out(folder, NAME), todo.asked(folder, NAME)
    for chunk in todo.chunks(scanning.known(project, folder, todo.read_items(folder.items)), todo.LOOKED_UP_AT_ONCE):
        for one, said in zip(chunk, _said(project, chunk, verifier), strict=True):
            if isinstance(one, Known) and said is not None and "reason" in said:
                one = scanning.rejection(one.item, Reason(said["reason"]), said["detail"])
            elif isinstance(one, Known) and said is None and one.item.id in barred:
                one = scanning.rejection(one.item, *barred[one.item.id])
            if isinstance(one, Rejection):
                graphed.reject(one)
                yield one.to_json()
            elif said is None or one.key is None:
                graphed.miss(one.item.id, asked=asked(todo.line_of(one.item)))
            else:
                graphed.accept(said["sizes"])
                item = None if graphed.kept else one.item
                key, labels = project.graphs.recipe.key(one.key), values_of(one.item, project.source.labels)
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


def promised(inventory: Inventory, graph: Graph) -> dict[str, int]:
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
