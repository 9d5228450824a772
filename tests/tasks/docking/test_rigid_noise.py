"""Noise, its tables and the loss against the original's numbers."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from pipeline.tasks.docking.rigid_diffusion import (
    NoiseSchedule,
    rigid_noise,
    score_errors,
    table_rows,
)
from pipeline.tasks.docking.score_network import time_features
from tests.reference import docking_complex, recorded
from tests.tasks.originals import COMPLEXES, as_original, fresh_score_model, posed, relative_off, tables

CLOSE = 1e-5
BATCH = ("1Z0K", "3H2V", "3BX7")


def test_tables_are_the_originals_where_those_are_to_be_trusted():
    ours, theirs = tables(), recorded("diffdock_pp/tables")
    rows, trusted = theirs["so3.rows"].numpy(), theirs["so3.trust_rows"].numpy()
    for name, found in (("density", ours.density_WA), ("cdf", ours.cumulative_WA), ("score", ours.score_WA)):
        expected = theirs[f"so3.{name}_rows"].numpy()
        assert np.abs(found[rows] - expected)[trusted].max() <= 1e-7 * np.abs(expected[trusted]).max()
        np.testing.assert_allclose(found[rows][trusted], expected[trusted], rtol=CLOSE)
    np.testing.assert_allclose(ours.norms_W, theirs["so3.exp_score_norms"], rtol=1e-7)


def test_angles_scores_and_rows_are_the_originals():
    ours, at = (
        tables(),
        {name[7:]: value for name, value in recorded("diffdock_pp/tables").items() if name.startswith("so3.at.")},
    )
    rows = table_rows(at["eps"], as_published=True)
    assert torch.equal(rows, at["row"])
    for place, row in enumerate(rows.tolist()):
        angles = [ours.angle(row, share) for share in at["uniform"].tolist()]
        np.testing.assert_allclose(angles, at["sampled_angle"][place], rtol=CLOSE)
        trusted = at["trust"][place].numpy()
        expected = at["score_along_axis"][place].numpy()
        scores = np.array([ours.score(row, angle) for angle in at["angle"].tolist()])
        np.testing.assert_allclose(scores[trusted], expected[trusted], rtol=CLOSE)


def test_a_mended_row_is_the_nearest_width():
    sigma = torch.tensor(tables().widths_W)
    assert torch.equal(table_rows(sigma, as_published=False), torch.arange(1000))


def test_schedules_and_the_embedding_of_time_are_the_originals():
    theirs, schedule = recorded("diffdock_pp/tables"), NoiseSchedule()
    time = theirs["schedule.t"]
    for kind, spread in (("tr", schedule.translation), ("rot", schedule.rotation)):
        assert torch.allclose(spread.sigma(time), theirs[f"schedule.{kind}_sigma"], rtol=1e-12)
        assert torch.allclose(spread.rate(time).float(), theirs[f"schedule.{kind}_g"], rtol=1e-6)
    assert (time_features(time) - theirs["embedding.time_f32"]).abs().max() < 1e-6
    rows = table_rows(schedule.rotation.sigma(time), as_published=True)
    assert torch.allclose(
        torch.from_numpy(tables().norms_W)[rows].float(), theirs["schedule.rot_score_norm"], rtol=CLOSE
    )


def test_noise_of_the_originals_draws_is_the_originals():
    for name, place in product(COMPLEXES, range(3)):
        inputs = docking_complex(name)
        time = float(inputs["t"][place])
        axis = inputs["draw.axis"][place].numpy()
        normal = inputs["tr_update"][place].double().numpy() / NoiseSchedule().translation.sigma(time)
        draw = normal, axis / np.linalg.norm(axis), float(inputs["draw.uniform"][place])
        noise = rigid_noise(time, draw, NoiseSchedule(), as_published=True)
        for found, key in ((noise.rotation_3, "rot_update"), (noise.translation_score_3, "tr_score")):
            np.testing.assert_allclose(found, inputs[key][place], rtol=CLOSE)
        np.testing.assert_allclose(noise.rotation_score_3, inputs["rot_score"][place], rtol=CLOSE)


@pytest.mark.nightly
def test_loss_all_gradients_and_four_steps_of_adam_are_the_originals():
    theirs, dtype = recorded("diffdock_pp/loss"), torch.float64
    model = fresh_score_model(dtype)
    batch = [
        posed(name, theirs[f"{name}.ligand.pos_noised"][None], time, dtype)
        for name, time in zip(BATCH, theirs["t"].tolist(), strict=True)
    ]
    true = [torch.stack([theirs[f"{name}.{kind}_score"] for name in BATCH]).to(dtype) for kind in ("tr", "rot")]
    units = 1 / model.schedule.translation.sigma(theirs["t"]), model.norm(theirs["t"]).float().add(1e-5).to(dtype)
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(4):
        errors = [
            score_errors(*each).mean()
            for each in zip((score[:, 0] for score in model(batch)), true, units, strict=True)
        ]
        loss = sum(errors) / 2
        assert relative_off(loss.detach(), theirs["f64.loss_before_each_adam_step"][step]) < 1e-10
        adam.zero_grad()
        loss.backward()
        if step == 0:
            for error, kind in zip(errors, ("tr", "rot"), strict=True):
                assert relative_off(error.detach(), theirs[f"f64.{kind}_loss"]) < 1e-10
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            found = as_original(model, gradients)
            names = [name for name in theirs if name.startswith("grad.")]
            assert len(names) == 61
            for name in names:  # of large ones, some rows are kept
                own, _, every = name.removeprefix("grad.").partition(" every ")
                assert relative_off(found[own][:: int(every or 1)], theirs[name]) < 1e-6, name
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
