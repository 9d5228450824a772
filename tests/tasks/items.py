"""Items as a loader hands them out: real and made complexes, with embeddings that are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from pipeline.graphs.item_graph import GraphRecipe, ItemGraph, encode_graph
from pipeline.graphs.make_graphs import build_graph
from pipeline.keys import content_digest
from pipeline.records import Item, Part, Role
from pipeline.structures import inventory
from pipeline.structures.parsing import structure_files
from pipeline.structures.parsing.structure_files import read_file
from pipeline.structures.synthetic import complex_pdb
from pipeline.training.items import batch
from pipeline.training.items.batch import EMBEDDING, ENCODED, BatchBuilder
from pipeline.training.items.item_source import ItemArrays
from pipeline.training.sampling import BatchOrigin

DIM = 16
LIMIT = 64 << 20
Tree = TypeVar("Tree")


def double(batch: Tree) -> Tree:
    """Return a batch with double-precision numbers."""
    turned: Tree = tree_map_only(torch.Tensor, lambda one: one.double() if one.is_floating_point() else one, batch)
    return turned


def batch_of(graphs: Sequence[ItemGraph], dim: int | None = DIM, ids: Sequence[str] = ()) -> batch.ItemBatch:
    """Lay graphs out as the loader does; every residue has numbers of its own for an embedding."""
    names = list(ids) or [f"item{place}" for place in range(len(graphs))]
    found = [ItemArrays(place, names[place], *encode_graph(graph)) for place, graph in enumerate(graphs)]
    sheet = BatchBuilder(found, (torch.float32, dim) if dim else None)
    memory = np.zeros(sheet.layout.used, np.uint8)
    sheet.write(memory)
    layout = sheet.layout
    for role in layout.roles() if dim else ():
        layout.view(f"{role}.{ENCODED}", memory)[:] = True
        for place, name in enumerate(names):
            rows = layout.rows(layout.residues(role), place)
            rng = np.random.default_rng([*name.encode(), len(role)])
            drawn = layout.view(f"{role}.{EMBEDDING}", memory)[rows]
            drawn[:] = rng.normal(size=drawn.shape)
    numbers = tuple(range(len(graphs)))
    return batch.ItemBatch(torch.from_numpy(memory), layout, numbers, tuple(names), BatchOrigin(0, 0, 0, 1))


def graph_of(data: bytes, *, recipe: GraphRecipe | None = None) -> ItemGraph:
    """Return the graph of a complex in PDB text."""
    item = Item("x", parts=(Part(Role.COMPLEX, "x.pdb"),))
    file = structure_files.File(data, content_digest(data).hex())
    taken, read = inventory.examine_item(item, {"x.pdb": file}, inventory.ScanRecipe())
    assert read is not None, taken
    return build_graph(read, recipe or GraphRecipe())


@cache
def made(seed: int, receptor: int = 60, ligand: int = 40) -> ItemGraph:
    """Return the graph of a made complex."""
    return graph_of(complex_pdb(seed, receptor, ligand))


@cache
def real(path: Path) -> ItemGraph:
    """Return the graph of a complex in a file."""
    return graph_of(read_file(path, LIMIT))
