"""Seed 003, peptides de novo: each knob and promise of its guide, through the recipe."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from pipeline.config.load import read_config
from pipeline.errors import ConfigError
from pipeline.memory.footprint import MemoryChoice
from pipeline.tasks.denovo_recursive import DenovoRecursive
from tests.recipes.conftest import Scanned
from tests.recipes.projects import DENOVO, RECIPES, config_of, peak, planned
from tests.testkit.command import Command

pytestmark = [pytest.mark.timeout(900), pytest.mark.nightly]  # they plan and train for real
TASK = DenovoRecursive(
    width=36,
    heads=2,
    encoder_layers=1,
    decoder_layers=1,
    latent_steps=1,
    supervision_steps=2,
    spectrum_loss="drawn",
    render_reach=0,
)
SIZES = {"items": 2, "peaks": 50, "residues": 10}


@cache
def drawn(bin_size: float = 0.1, max_mz: float = 2000.0) -> int:
    """Return what a step takes where every peak is drawn at every bin."""
    return peak(replace(TASK, bin_size=bin_size, max_mz=max_mz), SIZES)


def test_the_recipe_has_8_supervision_and_6_latent_steps_and_20000_bins() -> None:
    task = DenovoRecursive(**config_of(DENOVO).train.options)
    assert (task.supervision_steps, task.latent_steps) == (8, 6)
    assert round(task.max_mz / task.bin_size) == 20_000


def test_loss_resolution_is_a_knob_and_memory_goes_by_bins() -> None:
    assert drawn(0.2, 1500.0) < 0.5 * drawn()


def test_drawing_peaks_where_they_are_takes_a_fraction() -> None:
    assert peak(replace(TASK, render_reach=8.0), SIZES) < 0.2 * drawn()


def test_a_loss_that_is_added_has_its_headroom_planned() -> None:
    without, with_it = (peak(replace(TASK, precursor_weight=weight), SIZES) for weight in (0.0, 0.1))
    assert 0 <= with_it - without < 0.01 * without


def test_an_ema_costs_a_copy_of_the_parameters(pipeline: Command, scanned: Scanned) -> None:
    scanned(DENOVO)
    plans = [planned(pipeline, *DENOVO.sets(f"train.ema={decay}")) for decay in ("0.999", "null")]
    (kept, none) = (sum(part["bytes"] for part in plan["standing"]) for plan in plans)
    parameters = sum(one["bytes"] for one in plans[0]["standing"] if one["category"] == "parameters")
    assert kept - none == pytest.approx(parameters, rel=0.05)


def test_each_stage_of_the_curriculum_has_its_own_batch_plan_for_the_items_that_it_has(
    pipeline: Command, scanned: Scanned
) -> None:
    scanned(DENOVO)
    plans = planned(pipeline, *DENOVO.sets())["plans"]
    assert list(plans) == ["stage 1", "all items"]
    assert plans["stage 1"]["live"]["value"] <= plans["all items"]["live"]["value"]  # all places are always there
    assert plans["stage 1"]["micros"] < plans["all items"]["micros"]  # it has fewer items


@pytest.mark.parametrize(("items", "times", "batch"), [(96, 1, 96), (48, 2, 96), (32, 3, 96), (64, 2, 128)])
def test_each_row_of_the_table_of_batch_configurations_can_be_set(items: int, times: int, batch: int) -> None:
    train = config_of(DENOVO, f"train.micro_batch={items}", f"train.effective_batch={batch}").train
    assert train.micro_batch == items
    assert -(-train.effective_batch // items) == times


def test_smaller_micro_batches_take_less() -> None:
    taken = [peak(TASK, {**SIZES, "items": items}) for items in (1, 2, 4)]
    assert taken == sorted(taken)
    assert taken[0] < 0.6 * taken[2]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_compile_modes_are_settings(mode: str) -> None:
    train = config_of(DENOVO, "train.compile=true", f"train.compile_mode={mode}").train
    assert (train.compile, train.compile_mode) == (True, mode)


def test_a_compile_mode_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="compile_mode"):
        read_config(RECIPES / "denovo_recursive.yaml", ["train.compile_mode=fast"])


def test_amp_is_on_in_the_recipe_and_its_plan_says_so(pipeline: Command, scanned: Scanned) -> None:
    scanned(DENOVO)
    plans = planned(pipeline, *DENOVO.sets("train.precision=bf16"))["plans"]
    assert {plan["choice"]["precision"] for plan in plans.values()} == {"bf16"}
    assert config_of(DENOVO).train.precision == "bf16"


def test_checkpointing_saves_memory() -> None:
    task = replace(TASK, render_reach=8.0, latent_steps=6, encoder_layers=2, decoder_layers=2)
    sizes = {**SIZES, "items": 16}
    assert peak(task, sizes, MemoryChoice(checkpointing=True)) < peak(task, sizes)
