"""The contrastive task: what a tower sees, what its loss is of, and how a step in parts is one of all its items."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from pipeline.errors import ConfigError
from pipeline.planning.task_contract import breaches
from pipeline.protocol import ITEMS
from pipeline.tasks.contrastive_pair import ContrastivePair
from pipeline.tasks.pairs import retrieval
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.optimizers import StepSettings
from tests.tasks.cases import MIXED_PAIRS as MIXED
from tests.tasks.cases import PAIRS as SMALL
from tests.tasks.cases import RNG, model_of, pair
from tests.tasks.items import double
from tests.tasks.reader_items import batch_of


def collated(*pairs, task=SMALL):
    return task.collate(batch_of(pairs).items[:], RNG)


# ---- what it is ----


def test_a_task_whose_embeddings_see_other_items_breaks_the_contract():
    class Centred(ContrastivePair):
        def embed(self, model, batch):
            return {name: rows - rows.mean(0) for name, rows in super().embed(model, batch).items()}

    options = {name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__}
    task = Centred(**options | {"layers": 1, "left_most": 64})
    found = list(breaches(task, {"left": 12, "right": 7, ITEMS: 3}, batch_of(MIXED).items[:]))
    assert [one.partition(" of an item")[0] for one in found] == ["embed(): 'left'", "embed(): 'right'"]


# ---- what a tower sees ----


def test_vectors_have_length_1_also_those_of_a_side_that_is_empty():
    for rows in SMALL.embed(model_of(SMALL), double(collated(*MIXED))).values():
        assert torch.allclose(rows.norm(dim=-1), torch.ones(4, dtype=torch.float64))


def test_of_a_long_side_the_first_rows_are_read():
    item = pair(0, 50, 30)
    cut = {"left.token": item["left.token"][:20], "right.vector": item["right.vector"][:12]}
    for long, short in zip(tree_leaves(collated(item)), tree_leaves(collated(cut)), strict=True):
        assert long is short or torch.equal(long, short)


def test_the_order_of_tokens_is_seen():
    item = pair(0, 9, 3)
    turned = item | {"left.token": item["left.token"][::-1]}
    found = SMALL.embed(model_of(SMALL), double(collated(item, turned)))
    assert (found["left"][0] - found["left"][1]).norm() > 1e-3
    assert torch.equal(found["right"][0], found["right"][1])


# ---- the loss ----


def test_the_loss_is_the_symmetric_cross_entropy_of_cosines_over_the_temperature():
    model, batch = model_of(SMALL), double(collated(*MIXED))
    rows = SMALL.embed(model, batch)
    logits = rows["left"] @ rows["right"].T / SMALL.temperature
    own = torch.arange(4)
    wanted = (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)) / 2
    total, weight = SMALL.contrast(model, rows)["pairs"]
    assert float((total / weight - wanted).detach()) == pytest.approx(0, abs=1e-6)  # the temperature is kept in single


def test_the_temperature_is_learned_stays_above_a_hundredth_and_can_come_back():
    model, rows = model_of(SMALL), SMALL.embed(model_of(SMALL), double(collated(*MIXED)))
    with torch.no_grad():
        model.log_scale.fill_(9.0)
    assert float(model.scale().detach()) == pytest.approx(100)
    same = {"left": rows["left"], "right": rows["left"].roll(1, 0)}  # all wrong: less sharp would be better
    SMALL.contrast(model, {name: one.detach() for name, one in same.items()})["pairs"][0].backward()
    assert float(model.log_scale.grad) > 1


# ---- figures ----


def outputs_of(left, right):
    return {"left": list(left), "right": list(right)}


def unit(rows):
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("block", [7, 1000])
def test_figures_are_those_of_all_cosines_sorted(monkeypatch, block):
    monkeypatch.setattr(retrieval, "BLOCK", block)
    left = unit(RNG.normal(size=(50, 8)))
    right = unit(left + 0.5 * RNG.normal(size=(50, 8)))
    cosines = left @ right.T
    figures = SMALL.metrics(outputs_of(left, right))
    for way, table in (("left_to_right", cosines), ("right_to_left", cosines.T)):
        places = (table > np.diag(table)[:, None]).sum(1)
        assert figures[f"{way}_at_1"] == pytest.approx((places < 1).mean())
        assert figures[f"{way}_at_5"] == pytest.approx((places < 5).mean())
        assert figures[f"{way}_mean_rank"] == pytest.approx(1 + places.mean())
    assert 0 < figures["left_to_right_at_1"] < figures["left_to_right_at_5"] < 1


def test_towers_that_tell_nothing_apart_find_nothing():
    alike = np.tile(unit(RNG.normal(size=(1, 8))), (40, 1))
    figures = SMALL.metrics(outputs_of(alike, alike))
    assert figures["left_to_right_at_1"] == pytest.approx(1 / 40)
    assert figures["right_to_left_at_5"] == pytest.approx(5 / 40)
    assert figures["left_to_right_mean_rank"] == pytest.approx(20.5)


def test_vectors_that_are_not_numbers_are_found_by_nobody():
    rows = unit(RNG.normal(size=(10, 8)))
    broken = rows.copy()
    broken[:] = np.nan
    figures = SMALL.metrics(outputs_of(rows, broken))
    assert figures["left_to_right_at_5"] == 0
    assert figures["left_to_right_mean_rank"] == 10  # of ten
    assert SMALL.metrics(outputs_of(rows, rows))["left_to_right_at_1"] == 1


# ---- decay ----


def test_all_is_trained_and_the_temperature_alone_does_not_decay():
    step = make_step(SMALL, StepSettings(weight_decay=0.5))
    decays = {id(one): group["weight_decay"] for group in step.optimizer.param_groups for one in group["params"]}
    assert decays == {id(one): 0.5 for one in step.model.parameters()} | {id(step.model.log_scale): 0.0}


# ---- bad input ----


@pytest.mark.parametrize(
    ("options", "said", "remedy"),
    [
        (
            {"right_dim": 5},
            r"vectors of 5 numbers, right.vector of item0 is of \[6\]",
            "--set train.options.right_dim=6",
        ),
        (
            {"left": "vectors", "left_dim": 6},
            "reads left.vector; item0 has left.token, right.vector",
            "--set train.options.left=tokens (or vectors, images, text)",
        ),
    ],
)
def test_items_that_do_not_fit_the_options_are_refused_with_what_to_set(options, said, remedy):
    with pytest.raises(ConfigError, match=said) as caught:
        collated(pair(0), task=replace(SMALL, **options))
    assert caught.value.remedy == remedy


def test_a_frozen_temperature_is_not_given_to_the_optimizer():
    step = make_step(SMALL, StepSettings(frozen=("log_scale",)))
    assert [len(group["params"]) for group in step.optimizer.param_groups] == [len(step.trained)]
