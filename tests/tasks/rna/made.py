"""Made pockets as a loader hands them out, the task in small, and files of targets for them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.protocol import ITEMS
from pipeline.tasks.rna.made_pockets import BASES, coordinates, made_pocket, topology
from pipeline.tasks.rna.pocket_reader import read_pocket
from pipeline.tasks.rna_ligand import RnaLigand
from tests.tasks.reader_items import batch_of

RNG = np.random.default_rng(0)
DIM = 8
SMALL = RnaLigand(hidden_irreps="8x0e+4x1o+2x2e", layers=2, output_dim=DIM, feature_width=16)
SIZES = (
    {"atoms": 30, "bonds": 60, "angles": 40, "dihedrals": 60, "near": 200, ITEMS: 1},
    {"atoms": 60, "bonds": 130, "angles": 90, "dihedrals": 130, "near": 700, ITEMS: 3},
    {"atoms": 120, "bonds": 260, "angles": 180, "dihedrals": 260, "near": 1500, ITEMS: 5},
)
IDS = ("1aaa_ARG_model0", "1aaa_ARG_model3", "2bbb_FMN_model0")


@cache
def files(seed: int, pairs: int = 1) -> tuple[bytes, bytes]:
    """Return topology and coordinates of a made pocket."""
    rng = np.random.default_rng(seed)
    pocket = made_pocket(rng, "".join(rng.choice(list(BASES), size=pairs)))
    return topology(pocket), coordinates(pocket)


@cache
def pocket(seed: int, pairs: int = 1) -> Mapping[str, NDArray[np.float32]]:
    return read_pocket(*files(seed, pairs))


def three():
    return batch_of([pocket(0), pocket(1, 2), pocket(2)], IDS).items[:]


def collated(*pockets, task=SMALL, ids=()):
    return task.collate(batch_of(pockets, ids).items[:], RNG)


def model_of(task=SMALL, dtype=torch.float64):
    """Build a model, its constants in the precision that is asked for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        return task.model()
    finally:
        torch.set_default_dtype(before)


def by_key(path: Path, vectors: Mapping[str, NDArray[np.float32]]) -> str:
    """Write a dataset for each key."""
    with h5py.File(path, "w") as file:
        for name, vector_D in vectors.items():
            file[name] = vector_D
    return str(path)


def by_row(path: Path, vectors: Mapping[str, NDArray[np.float32]]) -> str:
    """Write the ids and, in the same order, the embeddings."""
    with h5py.File(path, "w") as file:
        file["id"] = list(vectors)
        file["embedding"] = np.stack(list(vectors.values()))
    return str(path)
