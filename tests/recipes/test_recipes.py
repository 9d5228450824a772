"""What recipes are: their settings, their sizes and their plans."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from pipeline.errors import ConfigError
from pipeline.planning.offers import Question, offers_of
from pipeline.planning.prepare import taken_of
from pipeline.project.run_code import load_task
from pipeline.protocol import Contrastive
from pipeline.tasks.denovo_recursive import DenovoRecursive
from pipeline.tasks.rna_ligand import RnaLigand
from tests.recipes.conftest import Scanned
from tests.recipes.projects import (
    ALL,
    COMPLEX,
    DENOVO,
    PAIR,
    RNA,
    SPECTRA,
    Recipe,
    config_of,
    epochs_of,
    planned,
    ran,
    written,
)
from tests.testkit.command import Command

pytestmark = pytest.mark.timeout(900)  # it trains for real, on machines that are shared


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


def test_recipes_have_the_published_sizes() -> None:
    rna = RnaLigand(**config_of(RNA).train.options)
    assert (rna.hidden_irreps, rna.layers, rna.output_dim) == ("32x0e+16x1o+8x2e", 6, 1536)
    assert all((rna.use_multi_hop, rna.use_nonbonded, rna.use_gate, rna.use_layer_norm))
    denovo = DenovoRecursive(**config_of(DENOVO).train.options)
    assert (denovo.supervision_steps, denovo.latent_steps) == (8, 6)
    assert round(denovo.max_mz / denovo.bin_size) == 20_000
    train = config_of(PAIR).train
    assert isinstance(load_task(train.task or "", train.options), Contrastive)  # which is embedded in two passes


def test_a_part_of_the_items_is_a_limit_too_and_what_is_none_is_refused() -> None:
    for limit, items in ((0.1, 3), (0.999, 24), (5, 5), (100, 100), (None, None)):
        assert taken_of(limit, 24) == items
    for limit in ("0", "0.0", "1.5", "-3", "true", "many"):
        with pytest.raises(ConfigError, match="validation"):
            config_of(SPECTRA, f"train.validation.limit={limit}")
    with pytest.raises(ConfigError, match="compile_mode"):
        config_of(DENOVO, "train.compile_mode=fast")


@pytest.mark.nightly
def test_8_on_each_of_3_gpus_are_24_effective_and_memory_of_the_host_is_planned(
    pipeline: Command, scanned: Scanned
) -> None:
    scanned(COMPLEX)
    words = COMPLEX.sets("train.effective_batch=24", "train.micro_batch=8", gpus=3)
    found = planned(pipeline, "--gpu", COMPLEX.card, *words)
    (made,) = found["plans"].values()
    assert (made["request"]["ranks"], made["request"]["batch"], made["cuts"]["items_most"] <= 8) == (3, 24, True)
    host = planned(pipeline, *COMPLEX.sets())["host"]
    assert 0 < host["mem_bytes"] < 2 * sum(part["bytes"] for part in host["parts"]) + (1 << 30)


@pytest.mark.nightly
def test_an_ema_costs_a_copy_of_the_parameters_and_each_stage_has_its_own_plan(
    pipeline: Command, scanned: Scanned
) -> None:
    scanned(DENOVO)
    plans = [planned(pipeline, *DENOVO.sets(f"train.ema={decay}")) for decay in ("0.999", "null")]
    (kept, none) = (sum(part["bytes"] for part in plan["standing"]) for plan in plans)
    parameters = sum(one["bytes"] for one in plans[0]["standing"] if one["category"] == "parameters")
    assert kept - none == pytest.approx(parameters, rel=0.05)
    stages = planned(pipeline, *DENOVO.sets("train.precision=bf16", "train.effective_batch=16"))["plans"]
    assert list(stages) == ["stage 1", "all items"]
    assert stages["stage 1"]["live"]["value"] <= stages["all items"]["live"]["value"]  # all places are always there
    assert stages["stage 1"]["cuts"]["items_most"] <= stages["all items"]["cuts"]["items_most"]  # it has fewer
    assert {plan["choice"]["precision"] for plan in stages.values()} == {"bf16"}


@pytest.mark.nightly
def test_graphs_that_are_not_kept_on_disk_are_built_when_they_are_read(pipeline: Command, scanned: Scanned) -> None:
    folder = scanned(COMPLEX)
    done = ran(pipeline, COMPLEX.sets("graph.cache=false", "train.epochs=1"), "train")
    assert done.code == 0, done.err
    assert epochs_of(folder)[-1]["items"] == 4
    assert epochs_of(folder)[-1]["items_per_s"] > 0
