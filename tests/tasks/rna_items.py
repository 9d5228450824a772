"""RNA pockets with their ligands as a loader hands them out, and files of targets for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray

from pipeline.graphs.build_graph import build_graph
from pipeline.graphs.item_graph import GraphRecipe, ItemGraph
from pipeline.records import Role
from pipeline.training.items import batch
from tests.graphs.complexes import examined, side
from tests.tasks import items
from tests.tasks.rna_pockets import pocket_pdb

RECIPE = GraphRecipe(nodes="atom", cross_radius=5.0)


@cache
def made(seed: int, nucleotides: int = 3, ligand_atoms: int = 6, *, recipe: GraphRecipe = RECIPE) -> ItemGraph:
    """Return the graph of a made pocket: two strands and a ligand."""
    parts = side(Role.RECEPTOR, "A", "B"), side(Role.LIGAND, "L")
    inventory, read = examined(pocket_pdb(seed, nucleotides, ligand_atoms), *parts)
    assert read is not None, inventory
    return build_graph(read, recipe)


def items_of(graphs: Sequence[ItemGraph], ids: Sequence[str] = ()) -> list[batch.ItemTensors]:
    """Lay graphs out as the loader does."""
    return items.batch_of(graphs, None, ids).items[:]


def by_item(path: Path, targets: Mapping[str, NDArray[np.float32]]) -> str:
    """Write a dataset for each item."""
    with h5py.File(path, "w") as file:
        for name, target in targets.items():
            file[name] = target
    return str(path)


def by_row(path: Path, targets: Mapping[str, NDArray[np.float32]]) -> str:
    """Write the ids and, in the same order, the embeddings."""
    with h5py.File(path, "w") as file:
        file["id"] = list(targets)
        file["embedding"] = np.stack(list(targets.values()))
    return str(path)
