"""Seed 001, spectra fine-tune: each knob and promise of its guide, through the recipe."""

from __future__ import annotations

import gc
import json
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.runtime.meters import Habits
from pipeline.runs.model.prepare import taken_of
from pipeline.tasks.spectra_finetune import SpectraFinetune
from pipeline.training.own_loops.lightning_callback import GovernorCallback
from tests.recipes.conftest import Scanned
from tests.recipes.projects import SPECTRA, config_of, epochs_of, peak, planned, ran, settings_of
from tests.testkit.command import Command

pytestmark = [pytest.mark.timeout(900), pytest.mark.nightly]  # they plan and train for real
TASK = SpectraFinetune(layers=3, heads=2, d_fourier=60, d_peak=4, fourier_width=16, finest=0.01)
SIZES = {"items": 2, "peaks": 100}
LOWER = ("embed.", "layers.0.", "layers.1.")


def test_batch_1_accumulated_twice_keeps_the_effective_batch_of_2(pipeline: Command, scanned: Scanned) -> None:
    scanned(SPECTRA)
    one = planned(pipeline, *SPECTRA.sets("train.micro_batch=1"))["plans"]["all items"]
    assert (one["batch"], one["items_most"], one["accumulation_most"]) == (2, 1, 2)


def test_one_gpu_in_place_of_two_keeps_the_effective_batch_of_2() -> None:
    for gpus in (1, 2):
        assert config_of(SPECTRA, f"cluster.train.gpus={gpus}").train.effective_batch == 2


def test_frozen_layers_save_memory() -> None:
    assert peak(TASK, SIZES, frozen=LOWER) < 0.7 * peak(TASK, SIZES)


def test_layers_one_after_another_save_memory() -> None:
    assert peak(TASK, SIZES, MemoryChoice(checkpointing=True)) < 0.9 * peak(TASK, SIZES)


def test_fewer_peaks_and_narrower_features_save_memory() -> None:
    whole = peak(TASK, SIZES)
    assert peak(TASK, {**SIZES, "peaks": 80}) < whole
    assert peak(SpectraFinetune(**{**vars(TASK), "d_fourier": 28}), SIZES) < whole
    assert peak(SpectraFinetune(**{**vars(TASK), "layers": 2}), SIZES) < whole


def test_mixed_precision_saves_memory() -> None:
    sizes = {"items": 16, "peaks": 100}
    assert peak(TASK, sizes, MemoryChoice(precision="bf16")) < peak(TASK, sizes)


def test_validation_is_limited_and_thinned(pipeline: Command, scanned: Scanned) -> None:
    folder = scanned(SPECTRA)
    words = SPECTRA.sets("train.validation.limit=1", "train.validation.every=2", "train.seed=7")
    assert ran(pipeline, words, "train").code == 0
    assert [bool(one["validation"]) for one in epochs_of(folder)] == [False, True]


@pytest.mark.parametrize(("limit", "items"), [(0.1, 3), (0.999, 24), (5, 5), (100, 100), (None, None)])
def test_a_part_of_the_items_is_a_limit_too(limit: float | None, items: int | None) -> None:
    assert config_of(SPECTRA, f"train.validation.limit={json.dumps(limit)}").train.validation.limit == limit
    assert taken_of(limit, 24) == items


@pytest.mark.parametrize("limit", ["0", "0.0", "1.5", "-3", "true", "many"])
def test_what_is_no_limit_is_refused(limit: str) -> None:
    with pytest.raises(ConfigError, match=r"items such as 1000, a part of all such as 0\.25, or null"):
        config_of(SPECTRA, f"train.validation.limit={limit}")


def test_checkpoints_are_written_less_often_and_the_best_k_are_kept() -> None:
    kept = config_of(SPECTRA).train.checkpoints
    assert (kept.every, kept.last, kept.best) == (2000, 2, 1)
    assert config_of(SPECTRA, "train.checkpoints.best=3").train.checkpoints.best == 3


def test_experiments_are_tracked() -> None:
    assert config_of(SPECTRA, "train.trackers=[wandb, tensorboard]").train.trackers == ("wandb", "tensorboard")


def test_fewer_threads_read_and_nothing_is_pinned() -> None:
    train = config_of(SPECTRA, "train.threads=1", "train.pin=false").train
    assert (train.threads, train.pin) == (1, False)


def test_a_fraction_of_95_percent_is_a_setting_with_a_warning() -> None:
    assert not settings_of(SPECTRA)
    (found,) = settings_of(SPECTRA, "train.memory_fraction=0.95")
    assert "0.95" in found or "95" in found


def test_standard_and_extreme_presets_keep_the_effective_batch_of_2() -> None:
    for name in ("standard", "careful", "extreme"):
        assert config_of(SPECTRA, f"train.preset={name}").train.effective_batch == 2
    extreme = config_of(SPECTRA, "train.preset=extreme", "train.micro_batch=1").train
    assert (extreme.checkpointing, extreme.offload, extreme.pin) == (True, True, False)


def test_lightning_has_a_callback_that_collects_garbage_in_order() -> None:
    callback: Any = GovernorCallback(habits=Habits(collect_every=25))
    module = SimpleNamespace(device="cpu", automatic_optimization=True)
    callback.on_train_start(None, module)
    was_collecting = gc.isenabled()
    callback.teardown(None, module, "fit")
    assert not was_collecting
    assert gc.isenabled()
