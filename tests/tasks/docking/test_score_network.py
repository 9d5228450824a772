"""The networks against the original's numbers."""

from __future__ import annotations

import pytest
import torch

from pipeline.tasks.docking.docking_items import example_partner
from pipeline.tasks.docking.rigid_diffusion import NoiseSchedule
from pipeline.tasks.docking.score_network import (
    FORM,
    ConfidenceModel,
    PosedComplex,
    ScoreModel,
    TrunkSizes,
)
from pipeline.training.checkpoints.trained_weights import stored_weights
from tests.reference import checkpoint, docking_complex, recorded
from tests.tasks.originals import (
    COMPLEXES,
    CONFIDENCE_SIZES,
    PRECISIONS,
    as_original,
    confidence_model,
    docked,
    noised,
    posed,
    relative_off,
    score_model,
)

SCORES, LOGITS = {"f32": 1e-4, "f64": 1e-10}, {"f32": 1e-5, "f64": 1e-10}
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly if name != "1Z0K" else ()) for name in COMPLEXES]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", NIGHTLY)
@torch.no_grad()
def test_scores_at_three_noise_levels_are_the_originals(name, precision):
    inputs, outputs = docking_complex(name), docked(name)
    scores = score_model(precision)([posed(name, inputs["ligand.pos_noised"], inputs["t"], PRECISIONS[precision])])
    for score, kind in zip(scores, ("tr", "rot"), strict=True):
        assert relative_off(score[0], outputs[f"score.{precision}.{kind}"]) < SCORES[precision]


@torch.no_grad()
def test_confidence_in_the_true_pose_is_the_originals():
    outputs = docked("1Z0K")
    logits = confidence_model("f64")([posed("1Z0K", outputs["confidence.poses"][:1], 0.0, torch.float64)])[0]
    assert relative_off(logits, outputs["confidence.f64.t0.logit"][:1]) < LOGITS["f64"]


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", COMPLEXES)
@torch.no_grad()
def test_confidence_in_every_pose_is_the_originals(name, precision):
    outputs = docked(name)
    for key, time in (("t0", 0.0), ("t1over40", 1 / 40)):
        pose = posed(name, outputs["confidence.poses"], time, PRECISIONS[precision])
        logits = confidence_model(precision)([pose])[0]
        expected = outputs[f"confidence.{precision}.{key}.logit"]
        # relative: far outside of what it was trained on, the original's single precision is off as far
        assert ((logits - expected).abs() <= LOGITS[precision] * expected.abs().clamp(min=10)).all() or (
            relative_off(logits, expected) < 2 * LOGITS[precision] and expected.abs().max() > 1e4
        )


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_five_complexes_in_one_batch_and_alone_are_the_originals(precision):
    expected, model = recorded("diffdock_pp/outputs"), score_model(precision)
    batch = [
        posed(name, docking_complex(name)["ligand.pos_noised"][1:2], time, PRECISIONS[precision])
        for name, time in zip(COMPLEXES, expected["t"].tolist(), strict=True)
    ]
    alone = [torch.cat(parts)[:, 0] for parts in zip(*(model([pose]) for pose in batch), strict=True)]
    together = [score[:, 0] for score in model(batch)]
    for kind, joined, single in zip(("tr", "rot"), together, alone, strict=True):
        assert relative_off(joined, expected[f"batch.{precision}.{kind}"]) < SCORES[precision]
        assert relative_off(single, expected[f"alone.{precision}.{kind}"]) < SCORES[precision]


@pytest.mark.nightly
@torch.no_grad()
def test_poses_computed_at_once_are_those_computed_one_by_one():
    pose = posed("1Z0K", docked("1Z0K")["confidence.poses"], 0.0)
    for model in (confidence_model(), lambda batch, at_once=1: score_model()(batch, at_once)[1]):
        one_by_one = model([pose])
        assert relative_off(model([pose], 3), one_by_one) < SCORES["f32"]
        some = model([pose._replace(pos_PL3=pose.pos_PL3[2:5])])
        assert torch.equal(some, one_by_one[:, 2:5])  # to the last bit: resumed, a sampling goes on as it would have


@pytest.mark.nightly
@torch.no_grad()
def test_residues_without_an_edge_are_left_out_without_a_difference():
    partly_out_of_reach = posed("1Z0K", docked("1Z0K")["confidence.poses"] + 25, 0.0, torch.float64)
    model = confidence_model("f64")
    for shift in (0, 1000):
        poses = partly_out_of_reach._replace(pos_PL3=partly_out_of_reach.pos_PL3 + shift)
        less = model([poses])
        with torch.enable_grad():
            everything = model([poses])
        assert relative_off(less, everything.detach()) < 1e-12


def test_published_weights_go_in_and_out_without_a_change():
    published = stored_weights(checkpoint("diffdock_pp/confidence.pth"))
    assert FORM.knows(published)
    model = ConfidenceModel(CONFIDENCE_SIZES)
    model.load_state_dict(FORM.read(published))
    back = as_original(model)
    assert set(back) == set(published)
    assert all(torch.equal(back[name], tensor) for name, tensor in published.items())


@pytest.mark.parametrize("as_published", [True, False])
@torch.no_grad()
def test_scores_turn_with_the_complex(as_published):
    torch.manual_seed(0)
    sizes = TrunkSizes(scalars=8, vectors=4, as_published=as_published)
    model = ScoreModel(sizes, NoiseSchedule(), torch.ones(1000)).double()
    for parameter in model.parameters():
        parameter.normal_(std=0.2)
    pose = noised("1Z0K", torch.float64)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    turn = turn * torch.linalg.det(turn)
    moved = pose._replace(
        receptor=pose.receptor._replace(pos_N3=pose.receptor.pos_N3 @ turn.T + 5), pos_PL3=pose.pos_PL3 @ turn.T + 5
    )
    for here, there in zip(model([pose]), model([moved]), strict=True):
        assert here.abs().max() > 0
        assert relative_off(there, here @ turn.T) < 1e-10


@torch.no_grad()
def test_a_mended_model_gives_the_same_scores_in_any_batch():
    torch.manual_seed(0)
    model = ScoreModel(TrunkSizes(scalars=8, vectors=4), NoiseSchedule(), torch.ones(1000))
    batch = [noised(name) for name in COMPLEXES[:2]]
    for together, alone in zip(model(batch), model(batch[1:]), strict=True):
        assert torch.equal(together[1], alone[0])


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
