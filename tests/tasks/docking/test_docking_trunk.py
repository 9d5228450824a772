"""The trunk's poses, each with a time of its own, beside each other."""

from __future__ import annotations

import torch

from pipeline.tasks.docking.docking_items import example_partner
from pipeline.tasks.docking.rigid_diffusion import NoiseSchedule
from pipeline.tasks.docking.score_network import PosedComplex, ScoreModel, TrunkSizes

CLOSE = 1e-4  # of the largest number, in single precision
DIM = 16


def gradients(model, pose, at_once):
    """Return the scores of poses, so many computed at once, and the gradients of the sum of their squares."""
    model.zero_grad()
    scores = model([pose], at_once)
    sum(score.square().sum() for score in scores).backward()
    return [*(score.detach() for score in scores), *(parameter.grad.clone() for parameter in model.parameters())]


def test_noises_of_a_complex_at_times_of_their_own_are_the_same_at_once_and_one_by_one():
    torch.manual_seed(0)
    model = ScoreModel(TrunkSizes(8, 2, 2, DIM), NoiseSchedule(), torch.ones(1000))
    receptor, ligand = (example_partner(count, DIM) for count in (40, 30))
    pos_PL3 = ligand.pos_N3 + 10 * torch.randn(3, 1, 3)
    pose = PosedComplex(receptor, ligand, pos_PL3, torch.tensor([0.2, 0.5, 0.9]))
    for together, alone in zip(gradients(model, pose, 3), gradients(model, pose, 1), strict=True):
        assert (together - alone).abs().max() <= CLOSE * alone.abs().max()
