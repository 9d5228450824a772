"""The equivariant task in small, and its model, which is built once."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from pipeline.protocol import ITEMS
from pipeline.tasks.rna_ligand import RnaLigand
from tests.tasks.rna_items import items_of, made

RNG = np.random.default_rng(0)
DIM = 8
SMALL = RnaLigand(hidden_irreps="8x0e+4x1o+2x2e", layers=2, output_dim=DIM, radial_width=8, head_width=16)
TINY = RnaLigand(hidden_irreps="8x0e+4x1o", layers=1, output_dim=DIM, radial_width=8, head_width=16)
SIZES = (
    {"nodes": 30, "edges": 300, ITEMS: 1},
    {"nodes": 60, "edges": 1000, ITEMS: 3},
    {"nodes": 120, "edges": 2400, ITEMS: 5},
)
SWITCHES = ("use_multi_hop", "use_nonbonded", "use_gate", "use_layer_norm")
NOTHING = dict.fromkeys(SWITCHES, False)
IDS = ["a", "b", "c"]


def three():
    return items_of([made(0), made(1, 4), made(2, 2, 9)], IDS)


def collated(*graphs, task=SMALL, ids=()):
    return task.collate(items_of(graphs, ids), RNG)


def new_model(task, dtype=torch.float32):
    """Build a model; e3nn has its constants in the precision that torch is set to."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        return task.model()
    finally:
        torch.set_default_dtype(before)


@cache
def _built(task, dtype):
    model = new_model(task, dtype)
    return model, {name: one.clone() for name, one in model.state_dict().items()}


def model_of(task=SMALL, dtype=torch.float32):
    """Return the same model each time, as it was when it was built: that takes e3nn most of a second."""
    model, state = _built(RnaLigand(**vars(task) | {"targets": None, "targets_missing": "error", "cosine": 0.0}), dtype)
    model.load_state_dict(state)
    model.zero_grad()
    return model.train()
