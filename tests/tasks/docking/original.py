"""What the original made, read from beside the project: complexes, weights, models with them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.tasks.docking.docking_trunk import DockingPartner, PosedComplex, TrunkSizes
from pipeline.tasks.docking.equivariant import listed_pairs
from pipeline.tasks.docking.rigid_diffusion import NoiseSchedule, rotation_tables
from pipeline.tasks.docking.score_network import ConfidenceModel, ScoreModel, from_published

FOLDER = Path(__file__).resolve().parents[4] / "shared" / "originals" / "diffdock_pp"
COMPLEXES = ("1Z0K", "1HIA", "1R8S", "3H2V", "3BX7")
PRECISIONS = {"f32": torch.float32, "f64": torch.float64}
CONFIDENCE_SIZES = TrunkSizes(scalars=16, vectors=4, as_published=True)

needs_original = pytest.mark.skipif(
    not FOLDER.is_dir(), reason="what the original made (../shared/originals/diffdock_pp) is not beside this checkout"
)


@cache
def stored(name):
    return load_file(FOLDER / f"{name}.safetensors")


@cache
def tables():
    return rotation_tables()


def partner_of(name, role, dtype):
    """A protein and its neighbours, which are grouped by centre."""
    data = stored(f"inputs_{name}")
    nodes = len(data[f"{role}.pos"])
    neighbours = data[f"{role}.edge_index"][0].view(nodes, -1)
    pairs = listed_pairs(neighbours, torch.zeros((), dtype=dtype))
    return DockingPartner(data[f"{role}.pos"].to(dtype), data[f"{role}.token"], data[f"{role}.esm"].to(dtype), pairs)


def posed(name, pos_PL3, time, dtype):
    partners = (partner_of(name, role, dtype) for role in ("receptor", "ligand"))
    return PosedComplex(*partners, pos_PL3.to(dtype), torch.as_tensor(time, dtype=dtype).reshape(-1))


@cache
def score_model(precision):
    model = ScoreModel(TrunkSizes(as_published=True), NoiseSchedule(), torch.from_numpy(tables().norms_W))
    model.load_state_dict(from_published(stored("score_state")))
    return model.to(PRECISIONS[precision])


@cache
def confidence_model(precision):
    model = ConfidenceModel(CONFIDENCE_SIZES)
    model.load_state_dict(from_published(stored("confidence_state")))
    return model.to(PRECISIONS[precision])


def off(found, expected):
    """The largest difference over the largest magnitude."""
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())
