"""Each recipe, and the task of the demo, trains, evaluates and predicts on a card as on the CPU."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.card.on_card.typed_on_cards import EVERY, Typist, epochs, losses, predicted
from tests.card.on_card.typed_on_cards import projects_root as projects_root
from tests.card.on_card.typed_on_cards import typist as typist
from tests.card.test_on_card import NAMES
from tests.recipes.projects import Recipe

assert set(NAMES) == set(EVERY), "the gate runs each recipe by its name"
pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared


@pytest.mark.parametrize("recipe", EVERY.values(), ids=EVERY)
def test_a_recipe_trains_evaluates_and_predicts_on_a_card_as_on_the_cpu(typist: Typist, recipe: Recipe) -> None:
    folder = typist.go(recipe)
    typist.submit("evaluate", recipe, "train.models=carded")
    assert typist.gpu_peak_bytes() > 0
    (kept,) = folder.glob("carded/*/evaluations/*.json")
    assert np.isfinite(json.loads(kept.read_text())["evaluation"]["figures"]["loss"])
    typist.submit("predict", recipe, "train.models=carded", "train.predict.folder=of_card")
    typist.submit("predict", recipe, "train.models=hosted", "train.predict.folder=of_cpu", gpus=0)
    assert typist.gpu_peak_bytes() == 0
    assert losses(folder / "carded") == pytest.approx(losses(folder / "hosted"), rel=1e-4)
    assert all(one["ooms"] == 0 and one["reserved_bytes"] > 0 for one in epochs(folder / "carded"))
    of_card, of_cpu = predicted(folder / "of_card"), predicted(folder / "of_cpu")
    assert of_card.keys() == of_cpu.keys()
    for name, one in of_card.items():
        if isinstance(one, str):
            assert one == of_cpu[name], name
        else:
            np.testing.assert_allclose(one, of_cpu[name], rtol=1e-3, atol=1e-4, err_msg=name)
