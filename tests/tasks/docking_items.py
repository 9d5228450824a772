"""The docking task in small, and complexes for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pipeline.device.batch_transfer import map_tensors
from pipeline.protocol import ITEMS
from pipeline.tasks.complex_docking import ComplexDocking
from pipeline.tasks.docking.pose_confidence import PoseConfidence
from tests.tasks.items import DIM, batch_of, made

RNG = np.random.default_rng(0)
SMALL = ComplexDocking(embedding_dim=DIM, scalars=6, vectors=2, layers=3, steps=3)
CONFIDENCE = PoseConfidence(embedding_dim=DIM, scalars=6, vectors=2, layers=3)
CA = 1
SIZES = (
    {"nodes": 100, "pairs": 2400, ITEMS: 1},
    {"nodes": 270, "pairs": 6000, ITEMS: 3},
    {"nodes": 500, "pairs": 12_500, ITEMS: 5},
)
THREE, IDS = (made(0), made(1, 50, 70), made(2, 30, 30)), ("a", "b", "c")


def collated(*graphs, task=SMALL, dim=DIM, ids=()):
    return task.collate(batch_of(graphs, dim, ids).items[:], RNG)


def rows(graph, name, numbers):
    """Return rows of one item, each of a pose with random numbers of its own."""
    batch = batch_of([graph], ids=[name])
    names = [f"{name} {number}" for number in numbers]
    return [replace(batch.items[0], id=one) for one in names]


def rows_of(graph, name, numbers, task=SMALL):
    """Return a batch of some poses of one item."""
    return task.collate(rows(graph, name, numbers), RNG)


def double(batch, dtype=torch.float64):
    return map_tensors(lambda one: one.to(dtype) if one.is_floating_point() else one, batch)


def tensors_of(batch):
    found = []
    map_tensors(lambda one: found.append(one) or one, batch)
    return found


def model_of(task=SMALL, dtype=torch.float64):
    torch.manual_seed(0)
    model = task.model()
    with torch.no_grad():  # biases are 0 at first, which hides what is forgotten
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(std=0.1)
    return model.to(dtype).eval()


def outputs_of(task, model, batch):
    with torch.no_grad():
        found = task.outputs(model, batch)
    return {name: [None if one is None else one.numpy() for one in values] for name, values in found.items()}


def changed(graph, place, **nodes):
    """Return a graph with other arrays of one partner's nodes."""
    parts = list(graph.parts)
    parts[place] = replace(parts[place], nodes=parts[place].nodes | nodes)
    return replace(graph, parts=tuple(parts))
