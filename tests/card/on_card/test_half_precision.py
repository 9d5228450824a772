"""Half precision on a card: losses near those of single precision, and other ones."""

from __future__ import annotations

import numpy as np
import pytest

from tests.card.on_card.typed_on_cards import INTERFACE, Typist, losses, predicted
from tests.card.on_card.typed_on_cards import projects_root as projects_root
from tests.card.on_card.typed_on_cards import typist as typist
from tests.recipes.projects import COMPLEX, Recipe

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared


@pytest.mark.parametrize("recipe", [COMPLEX, INTERFACE], ids=lambda recipe: recipe.name)
def test_a_recipe_in_half_precision_trains_and_predicts_near_single_precision(typist: Typist, recipe: Recipe) -> None:
    folder = typist.go(recipe)
    typist.submit("predict", recipe, "train.models=halved", "train.predict.folder=of_half", "train.precision=bf16")
    typist.submit("train", recipe, "train.models=carded")
    halved, whole = losses(folder / "halved"), losses(folder / "carded")
    assert halved == pytest.approx(whole, rel=0.1)
    assert halved != whole
    assert all(np.isfinite(one).all() for one in predicted(folder / "of_half").values() if not isinstance(one, str))
