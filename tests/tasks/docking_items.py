"""The docking task in small, and complexes for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from pipeline.protocol import ITEMS
from pipeline.tasks.complex_docking import ComplexDocking
from tests.tasks.items import DIM, batch_of, made

RNG = np.random.default_rng(0)
SMALL = ComplexDocking(embedding_dim=DIM, width=16, layers=2, cross_layers=2, pair_width=8)
IN_PIECES = replace(SMALL, pairs_at_once=700)
CA = 1
DRAWS = 4000
SIZES = (
    {"nodes": 100, "edges": 2000, "pairs": 2400, ITEMS: 1},
    {"nodes": 260, "edges": 5200, "pairs": 9000, ITEMS: 3},
    {"nodes": 500, "edges": 10000, "pairs": 32000, ITEMS: 5},
)
THREE, IDS = (made(0), made(1, 50, 70), made(2, 30, 30)), ("a", "b", "c")


def collated(*graphs, task=SMALL, dim=DIM, ids=()):
    return task.collate(batch_of(graphs, dim, ids).items[:], RNG)


def double(batch, dtype=torch.float64):
    return tree_map_only(torch.Tensor, lambda one: one.to(dtype) if one.is_floating_point() else one, batch)


def model_of(task=SMALL, dtype=torch.float64):
    torch.manual_seed(0)
    return task.model().to(dtype).eval()


def outputs_of(task, model, batch):
    with torch.no_grad():
        return {name: [one.numpy() for one in values] for name, values in task.outputs(model, batch).items()}


def changed(graph, place, **nodes):
    """Return a graph with other arrays of one partner's nodes."""
    parts = list(graph.parts)
    parts[place] = replace(parts[place], nodes=parts[place].nodes | nodes)
    return replace(graph, parts=tuple(parts))
