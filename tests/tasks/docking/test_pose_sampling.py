"""Sampling against the original's trajectories, with its draws."""

from __future__ import annotations

import ast
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from pipeline.tasks.complex_docking import ComplexDocking
from pipeline.tasks.docking.rigid_diffusion import (
    NoiseSchedule,
    PoseDraw,
    SamplingSteps,
    pose_draw,
    pose_rmsds,
    rigidly_moved,
    sampled_poses,
    stacked_draws,
    start_poses,
    turn_matrices,
)
from tests.reference import FOLDER, docking_complex, recorded
from tests.tasks.originals import COMPLEXES, confidence_model, docked, off, partner_of, posed, score_model

KINDS = ("ligand", "complex", "interface")


def settings_of(kind):
    with safe_open(FOLDER / "diffdock_pp" / f"trajectory_{kind}.safetensors", "np") as file:
        recorded = ast.literal_eval(file.metadata()["settings"])
    spreads = recorded["temp_sigma_data_tr"], recorded["temp_sigma_data_rot"]
    tempering = recorded["temp_sampling"], recorded["temp_psi"], *spreads
    return SamplingSteps(recorded["num_steps"], recorded["ode"], not recorded["no_final_noise"], *tempering)


def draws_of(theirs):
    steps, poses = theirs["pose"].shape[:2]
    noise = [
        theirs[name].transpose(0, 1) if name in theirs else torch.zeros(poses, steps, 3)
        for name in ("tr_noise", "rot_noise")
    ]
    return PoseDraw(theirs["start.rotation"], theirs["start.translation"] / 30, *noise)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["training_time", "inference", "ode"])
@torch.no_grad()
def test_trajectories_with_the_originals_draws_are_the_originals(kind):
    theirs, how, schedule = recorded(f"diffdock_pp/trajectory_{kind}"), settings_of(kind), NoiseSchedule()
    inputs, draw, model = docking_complex("1Z0K"), draws_of(theirs), score_model()
    np.testing.assert_allclose(how.times(), theirs["t"], rtol=1e-12)
    pose = posed("1Z0K", theirs["start.pose"], 1.0)

    def score(pos_PL3, time_1):
        translation, rotation = model([pose._replace(pos_PL3=pos_PL3, time_T=time_1)])
        return translation[0], rotation[0]

    start = start_poses(inputs["ligand.pos"], draw, schedule)
    assert off(start, theirs["start.pose"]) < 1e-4
    poses = torch.stack(list(sampled_poses(score, start, draw, how, schedule)))
    assert off(poses, theirs["pose"]) < 1e-3
    rmsds = pose_rmsds(poses[-1], inputs["ligand.pos"], inputs["receptor.pos"])
    for name, found in zip(KINDS, rmsds.unbind(-1), strict=True):
        assert off(found, theirs[f"rmsd.{name}"]) < 1e-3
    logits = confidence_model()([posed("1Z0K", theirs["pose"][-1], 0.0)])[0]
    assert torch.allclose(logits, theirs["confidence.t0"], rtol=1e-4)


def test_a_step_from_each_of_the_originals_poses_by_its_scores_is_the_originals():
    for kind in ("training_time", "inference", "ode"):
        theirs, how, schedule = recorded(f"diffdock_pp/trajectory_{kind}"), settings_of(kind), NoiseSchedule()
        scores = iter(zip(theirs["tr_score"], theirs["rot_score"], strict=True))
        start = start_poses(docking_complex("1Z0K")["ligand.pos"], draws_of(theirs), schedule)
        poses = sampled_poses(lambda *_, scores=scores: next(scores), start, draws_of(theirs), how, schedule)
        assert off(torch.stack(list(poses)), theirs["pose"]) < 1e-3, kind


def test_actual_steps_end_a_trajectory_without_noise_in_the_last_one():
    start_PL3, draw = torch.randn(1, 5, 3), stacked_draws([pose_draw(np.random.default_rng(0), 6)])
    how = SamplingSteps(6, data_rotation=0.3)

    def poses(how):
        still = torch.zeros(1, 3)
        return list(sampled_poses(lambda *_: (still, still), start_PL3, draw, how, NoiseSchedule()))

    whole, cut = poses(how), poses(replace(how, actual_steps=4))
    assert (len(whole), len(cut)) == (6, 4)
    assert all(torch.equal(*pair) for pair in zip(whole[:3], cut[:3], strict=True))
    assert torch.allclose(cut[3], cut[2], atol=1e-5)


def test_published_weights_are_sampled_at_the_papers_temperature_by_default():
    for options, low in (
        ({"as_published": True}, True),
        ({"as_published": True, "low_temperature": False}, False),
        ({"low_temperature": True}, True),
        ({}, False),
    ):
        task = ComplexDocking(**options)
        found = (task.temperature, task.psi, task.data_translation, task.data_rotation)
        assert found == ((2.439, 0.216, 0.593, 0.228) if low else (1, 0, 0.5, 0.5))
    assert (ComplexDocking(as_published=True, temperature=1.654).psi) == 0


def test_rmsds_are_the_originals():
    for name in COMPLEXES:
        inputs, outputs = docking_complex(name), docked(name)
        places = (outputs["confidence.poses"], inputs["ligand.pos"], inputs["receptor.pos"])
        rmsds = pose_rmsds(*(place.double() for place in places))
        assert off(rmsds, torch.stack([outputs[f"rmsd.float64.{kind}"] for kind in KINDS], -1)) < 1e-10


def test_turns_are_the_originals_and_none_is_the_identity():
    theirs = recorded("diffdock_pp/tables")
    assert off(turn_matrices(theirs["rotation.vector"]), theirs["rotation.matrix"]) < 1e-10
    assert torch.equal(turn_matrices(torch.zeros(3)), torch.eye(3))


def test_a_move_keeps_the_shape_and_turns_about_the_centre():
    pos = torch.randn(2, 9, 3, dtype=torch.float64)
    shift, turn = torch.randn(2, 2, 3, dtype=torch.float64)
    moved = rigidly_moved(pos, turn, shift)
    assert torch.allclose(moved.mean(1), pos.mean(1) + shift)
    assert torch.allclose(torch.cdist(moved, moved), torch.cdist(pos, pos), atol=1e-6)


def test_ligands_start_centred_anywhere_around_the_receptor():
    draw = stacked_draws([pose_draw(np.random.default_rng(seed), 1) for seed in range(200)])
    ligand = partner_of("1Z0K", "ligand", torch.float64).pos_N3
    centres = start_poses(ligand, draw, NoiseSchedule()).mean(1)
    assert centres.mean(0).abs().max() < 8
    assert 25 < float(centres.std()) < 35
