"""The recipes with two different encoders: each alone, and both side by side; those that read no embeddings say so."""

from __future__ import annotations

import pytest

from pipeline.encoder.checkpoints.synth import write_random_checkpoint
from pipeline.errors import ConfigError
from pipeline.project.project import Project
from pipeline.runs.model.prepare import embeddings_used
from tests.command import Command
from tests.recipes.conftest import Scanned
from tests.recipes.projects import ALL, Recipe, config_of, done_again, epochs_of, options, ran

EMBEDDED = [recipe for recipe in ALL.values() if recipe.structures]
READ = [recipe for recipe in ALL.values() if not recipe.structures]
WIDTH = 8  # of the second encoder


@pytest.mark.slow
@pytest.mark.timeout(900)  # they plan and train for real
@pytest.mark.parametrize("recipe", EMBEDDED, ids=lambda recipe: recipe.name)
def test_a_recipe_trains_on_either_encoder_and_on_both_side_by_side(
    recipe: Recipe, pipeline: Command, scanned: Scanned
) -> None:
    folder = scanned(recipe)
    other = folder / "weights" / "esm2_other.pt"
    if not other.exists():
        write_random_checkpoint(other, layers=2, dim=WIDTH, heads=2, seed=7)
    first = config_of(recipe, *recipe.small).train.options["embedding_dim"]
    also = ("embed.also.other.weights=weights/esm2_other.pt", "train.epochs=1")
    for names, width in (("main", first), ("other", WIDTH), ("other, main", first + WIDTH)):
        words = recipe.sets(*also, f"train.embeddings=[{names}]", *options(embedding_dim=width))
        done = ran(pipeline, words, "evaluate")
        assert done.code == 0, done.err
        assert done_again(done.err)["graph"] == 0
        assert epochs_of(folder)[0]["items"] == 4
        again = ran(pipeline, words, "evaluate")
        assert not any(done_again(again.err).values())
    told = ran(pipeline, recipe.sets(*also, "train.embeddings=[other]", *options(embedding_dim=first)), "train")
    assert told.code != 0
    assert f"--set train.options.embedding_dim={WIDTH}" in told.err


@pytest.mark.parametrize("recipe", READ, ids=lambda recipe: recipe.name)
def test_a_recipe_whose_items_have_no_embeddings_trains_on_none_and_refuses_to_name_some(recipe: Recipe) -> None:
    with_others = config_of(recipe, "embed.also.other.layer=1")
    assert embeddings_used(Project.open(with_others)) == {}
    with pytest.raises(ConfigError, match="items of a reader have none: leave them auto"):
        config_of(recipe, "train.embeddings=[main]")
