"""Stage graph in a run: which items have no graph yet, cut into tasks of equal cost; and one task's work."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import ConfigError
from pipeline.runs import scanning, todo
from pipeline.runs.scanning import Known
from pipeline.runs.todo import Found, Lines
from pipeline.stages.graph import graph

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from pipeline.records import Inventory, Reason, Tell
    from pipeline.runs.folder import RunFolder
    from pipeline.runs.project import Project
    from pipeline.runs.todo import Shard

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
    entries = todo.frozen_items(project, folder)
    with Lines(folder.todo(NAME) if folder else None) as lines:
        for chunk in todo.chunks(scanning.known(project, folder, entries), todo.LOOKED_UP_AT_ONCE):
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
        atoms_bytes += BYTES_PER_EDGE * scanning.edges_of_atom(project.config.graph)
    return Found(counts, _cut(project, offsets, atoms_N, at_once), bytes=int(atoms_N.sum()) * atoms_bytes)


def _atoms(inventory: Inventory) -> int:
    """Return what an item costs: the atoms that are read for it, and something for the file itself."""
    return 500 + sum(partner.atoms for partner in (*inventory.partners, *inventory.bound))


def _cut(project: Project, offsets: array[int], atoms_N: NDArray[np.int64], at_once: int) -> tuple[Shard, ...]:
    """Cut what is to do, in order, into tasks of about equal cost."""
    tasks = _tasks(project, int(atoms_N.sum()), at_once)
    return todo.cut(offsets, atoms_N, project.config.cluster.graph.items_per_task, tasks)


def _tasks(project: Project, atoms: int, at_once: int) -> int:
    """Return how many tasks there are: of some minutes, and enough for all that can run at once."""
    worthwhile = min(at_once, math.ceil(atoms / (ATOMS_PER_S * WORTHWHILE_S)))
    task_s = 60 * project.config.cluster.graph.minutes_per_task
    return max(1, math.ceil(atoms / (ATOMS_PER_S * task_s)), worthwhile)


def mem_bytes(project: Project) -> int:
    """Return the memory of a task: that of scanning, during which graphs are built as well."""
    return scanning.mem_bytes(project)


def work(
    project: Project, folder: RunFolder, task: int, tell: Tell, _part: tuple[int, int] = (0, 1)
) -> Generator[Reason | None, None, None]:
    """Build the graphs of one task."""
    items, graphs = scanning.noted(folder, NAME, task, tell), project.graphs
    return graph(items, project.recipe, graphs.recipe, graphs.store, project.config.cache.shard_bytes)
