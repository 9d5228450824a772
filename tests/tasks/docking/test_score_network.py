"""The networks against the original's numbers."""

from __future__ import annotations

import pytest
import torch

from pipeline.tasks.docking.docking_trunk import TrunkSizes
from pipeline.tasks.docking.rigid_diffusion import NoiseSchedule
from pipeline.tasks.docking.score_network import ConfidenceModel, ScoreModel, from_published, is_published, to_published
from pipeline.training.checkpoints.trained_weights import stored_weights
from tests.tasks.docking.original import (
    COMPLEXES,
    CONFIDENCE_SIZES,
    FOLDER,
    PRECISIONS,
    confidence_model,
    needs_original,
    off,
    posed,
    score_model,
    stored,
)

pytestmark = [needs_original, pytest.mark.shared]
SCORES, LOGITS = {"f32": 1e-4, "f64": 1e-10}, {"f32": 1e-5, "f64": 1e-10}
NODES = 1e-5


def flat(blocks):
    """Features in the original's order: channels first."""
    return torch.cat([block.transpose(2, 3).flatten(2) for block in blocks], -1)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", COMPLEXES)
@torch.no_grad()
def test_scores_at_three_noise_levels_are_the_originals(name, precision):
    inputs, outputs = stored(f"inputs_{name}"), stored(f"outputs_{name}")
    scores = score_model(precision)([posed(name, inputs["ligand.pos_noised"], inputs["t"], PRECISIONS[precision])])
    for score, kind in zip(scores, ("tr", "rot"), strict=True):
        assert off(score[0], outputs[f"score.{precision}.{kind}"]) < SCORES[precision]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", COMPLEXES)
@torch.no_grad()
def test_features_after_each_layer_are_the_originals(name, precision):
    inputs, outputs = stored(f"inputs_{name}"), stored(f"outputs_{name}")
    trunk = score_model(precision).trunk
    pose = posed(name, inputs["ligand.pos_noised"][1:2], inputs["t"][1:2], PRECISIONS[precision])
    seen = 0
    for layer, features in enumerate(trunk.steps(pose, trunk.shared(pose))):
        for role, blocks in zip(("receptor", "ligand"), features, strict=True):
            key = f"score.f32.t0.5.{role}.layer{layer}"
            if key in outputs:
                seen += 1
                assert (flat(blocks) - outputs[key]).abs().max() < NODES
    assert seen == 9  # of the receptor's last there are none


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", COMPLEXES)
@torch.no_grad()
def test_confidence_in_every_pose_is_the_originals(name, precision):
    outputs = stored(f"outputs_{name}")
    for key, time in (("t0", 0.0), ("t1over40", 1 / 40)):
        pose = posed(name, outputs["confidence.poses"], time, PRECISIONS[precision])
        logits = confidence_model(precision)([pose])[0]
        expected = outputs[f"confidence.{precision}.{key}.logit"]
        # relative: far outside of what it was trained on, the original's single precision is off as far
        assert ((logits - expected).abs() <= LOGITS[precision] * expected.abs().clamp(min=10)).all() or (
            off(logits, expected) < 2 * LOGITS[precision] and expected.abs().max() > 1e4
        )


@pytest.mark.nightly
@pytest.mark.parametrize("precision", PRECISIONS)
@torch.no_grad()
def test_five_complexes_in_one_batch_and_alone_are_the_originals(precision):
    expected = stored("outputs_batch")
    batch = [
        posed(name, stored(f"inputs_{name}")["ligand.pos_noised"][1:2], time, PRECISIONS[precision])
        for name, time in zip(COMPLEXES, expected["t"].tolist(), strict=True)
    ]
    model = score_model(precision)
    alone = [torch.cat(parts)[:, 0] for parts in zip(*(model([pose]) for pose in batch), strict=True)]
    together = [score[:, 0] for score in model(batch)]
    for kind, joined, single in zip(("tr", "rot"), together, alone, strict=True):
        assert off(joined, expected[f"batch.{precision}.{kind}"]) < SCORES[precision]
        assert off(single, expected[f"alone.{precision}.{kind}"]) < SCORES[precision]


@pytest.mark.nightly
@torch.no_grad()
def test_poses_computed_at_once_are_those_computed_one_by_one():
    pose = posed("1Z0K", stored("outputs_1Z0K")["confidence.poses"], 0.0, torch.float32)
    for model in (confidence_model("f32"), lambda batch, at_once=1: score_model("f32")(batch, at_once)[1]):
        one_by_one = model([pose])
        assert off(model([pose], 3), one_by_one) < SCORES["f32"]
        some = model([pose._replace(pos_PL3=pose.pos_PL3[2:5])])
        assert torch.equal(some, one_by_one[:, 2:5])  # to the last bit: resumed, a sampling goes on as it would have


@pytest.mark.nightly
@torch.no_grad()
def test_residues_without_an_edge_are_left_out_without_a_difference():
    outputs = stored("outputs_1Z0K")
    pose = posed("1Z0K", outputs["confidence.poses"] + 25, 0.0, torch.float64)  # partly out of reach
    far = pose._replace(pos_PL3=pose.pos_PL3 + 1000)  # no pair is in reach
    model = confidence_model("f64")
    for poses in (pose, far):
        less = model([poses])
        with torch.enable_grad():
            everything = model([poses]).detach()
        assert off(less, everything) < 1e-12


def test_published_weights_go_in_and_out_without_a_change():
    published = stored_weights(FOLDER / "confidence.pth").tensors
    assert is_published(published)
    model = ConfidenceModel(CONFIDENCE_SIZES)
    model.load_state_dict(from_published(published))
    back = to_published(model)
    assert set(back) == set(published)
    assert all(torch.equal(back[name], tensor) for name, tensor in published.items())


def test_a_model_of_another_size_refuses_published_weights():
    model = ConfidenceModel(TrunkSizes(scalars=8, vectors=4, as_published=True))
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(from_published(stored("confidence_state")))


@pytest.mark.parametrize("as_published", [True, False])
@torch.no_grad()
def test_scores_turn_with_the_complex(as_published):
    torch.manual_seed(0)
    sizes = TrunkSizes(scalars=8, vectors=4, as_published=as_published)
    model = ScoreModel(sizes, NoiseSchedule(), torch.ones(1000)).double()
    for parameter in model.parameters():
        parameter.normal_(std=0.2)
    pose = posed("1Z0K", stored("inputs_1Z0K")["ligand.pos_noised"][1:2], 0.5, torch.float64)
    turn, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    turn = turn * torch.linalg.det(turn)
    moved = pose._replace(
        receptor=pose.receptor._replace(pos_N3=pose.receptor.pos_N3 @ turn.T + 5), pos_PL3=pose.pos_PL3 @ turn.T + 5
    )
    for here, there in zip(model([pose]), model([moved]), strict=True):
        assert here.abs().max() > 0
        assert off(there, here @ turn.T) < 1e-10


@torch.no_grad()
def test_a_mended_model_says_the_same_in_any_batch():
    torch.manual_seed(0)
    model = ScoreModel(TrunkSizes(scalars=8, vectors=4), NoiseSchedule(), torch.ones(1000))
    batch = [
        posed(name, stored(f"inputs_{name}")["ligand.pos_noised"][1:2], 0.5, torch.float32) for name in COMPLEXES[:2]
    ]
    for together, alone in zip(model(batch), model(batch[1:]), strict=True):
        assert torch.equal(together[1], alone[0])
