"""Each recipe through the commands that a user types: checked, planned, trained a little, evaluated."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from pipeline.errors import ConfigError
from pipeline.planning.offers import Question, offers_of
from tests.recipes.conftest import Scanned
from tests.recipes.projects import (
    ALL,
    PAIR,
    SPECTRA,
    Recipe,
    config_of,
    epochs_of,
    left_to_do,
    planned,
    ran,
    written,
)
from tests.testkit.command import Command

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_a_recipe_is_checked_trained_and_evaluated_and_again_there_is_nothing_to_do(
    pipeline: Command, scanned: Scanned, recipe: Recipe
) -> None:
    folder = scanned(recipe)
    checked = pipeline("config", "check", *recipe.sets())
    assert checked.code == 0, checked.err
    done = ran(pipeline, recipe.sets())
    assert done.code == 0, done.err
    epochs = epochs_of(folder)
    assert [one["epoch"] for one in epochs] == [1, 2]
    assert all(math.isfinite(term) for one in epochs for term in one["loss"].values())
    assert all(one["ooms"] == 0 and one["allocated_bytes"] > 0 and one["reserved_bytes"] > 0 for one in epochs)
    (kept,) = folder.glob("models/*/evaluations/test-*.json")
    assert math.isfinite(json.loads(kept.read_text())["evaluation"]["figures"]["loss"])
    again = ran(pipeline, recipe.sets())
    assert again.code == 0, again.err
    left = left_to_do()
    assert {"scan", "train", "evaluate"} <= left.keys()
    assert not any(left.values())


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
def test_a_small_recipe_is_traced_and_fits(pipeline: Command, scanned: Scanned, recipe: Recipe) -> None:
    scanned(recipe)
    found = planned(pipeline, *recipe.sets())
    for plan in found["plans"].values():
        assert plan["live"]["origin"] == "traced"
        assert 0 < plan["reserved"]["value"] < plan["limit_bytes"]


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", [SPECTRA], ids=["spectra_finetune"])
def test_a_recipe_as_it_stands_fits_the_card_of_its_guide(pipeline: Command, scanned: Scanned, recipe: Recipe) -> None:
    scanned(recipe)
    found = planned(pipeline, "--gpu", recipe.card)
    for plan in found["plans"].values():
        assert plan["live"]["origin"] == "traced"
        assert plan["request"]["batch"] == written(recipe)["train"]["effective_batch"]
        assert plan["reserved"]["value"] < plan["limit_bytes"]


def test_a_recipe_names_no_setting_that_is_not_there(tmp_path: Path) -> None:
    from pipeline.config.load import read_config

    for recipe in ALL.values():
        path = tmp_path / "pipeline.yaml"
        path.write_text((Path(__file__).parents[2] / "configs" / "recipes" / f"{recipe.name}.yaml").read_text())
        config = read_config(path).config
        assert config.train.task is not None, recipe.name
    assert read_config(path).config.train.effective_batch == written(PAIR)["train"]["effective_batch"]


@pytest.mark.parametrize("by_plan", [False, True])
def test_a_recipe_on_a_cluster_that_names_no_cards_is_told_a_remedy_that_its_command_has(by_plan: bool) -> None:
    config, nobody = config_of(ALL["spectra_finetune"]), cast("Any", None)
    question = Question(config=config, project=nobody, executor=nobody, by_plan=by_plan)
    with pytest.raises(ConfigError) as refused:
        offers_of(question, on_cpu=False)
    assert ("--gpu" in str(refused.value)) is by_plan  # `submit` has no such option
    assert "cluster.train.gpus=0" in str(refused.value)
    setting = re.search(r"--set '([^']*)'", str(refused.value))
    if not by_plan:
        assert setting is not None
        (offer,) = offers_of(replace(question, config=config_of(ALL["spectra_finetune"], setting[1])), on_cpu=False)
        assert [card.name for card in offer.cards] == ["a100-40gb"]
