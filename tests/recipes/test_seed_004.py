"""Seed 004, contrastive pairs: each knob and promise of its guide, through the recipe."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.memory.footprint import MemoryChoice
from pipeline.memory.lint.lint_facts import RunFacts
from pipeline.memory.lint.lint_rules import lint
from pipeline.project.run_code import load_task
from pipeline.protocol import Contrastive
from pipeline.tasks.contrastive_pair import ContrastivePair
from pipeline.training.step.contrastive import make_step
from pipeline.training.step.optimizers import StepSettings
from tests.recipes.conftest import Scanned
from tests.recipes.projects import PAIR, config_of, epochs_of, peak, planned, ran, settings_of
from tests.tasks.reader_items import batch_of
from tests.testkit.command import Command

pytestmark = [pytest.mark.timeout(900), pytest.mark.nightly]  # they plan and train for real
SIDES = ("left.token", "right.token")
TASK = ContrastivePair(left="tokens", right="tokens", width=32, layers=2, heads=2, out=16)


def test_16_times_8_really_is_128_negatives() -> None:
    train = config_of(PAIR, "train.micro_batch=16").train
    assert (train.effective_batch, train.micro_batch) == (128, 16)
    assert isinstance(load_task(train.task or "", train.options), Contrastive)  # which is embedded in two passes
    rng = np.random.default_rng(0)
    pairs = [{side: rng.integers(97, 122, rng.integers(4, 12), np.uint8) for side in SIDES} for _ in range(128)]
    parts, whole = (gradients([pairs[at : at + size] for at in range(0, 128, size)]) for size in (16, 128))
    assert max(float((one - whole[name]).abs().max()) for name, one in parts.items()) < 1e-10


def gradients(cuts: list[list[dict[str, NDArray[np.uint8]]]]) -> dict[str, Tensor]:
    """Return what a step of micro-batches takes off each parameter at a learning rate of 1."""
    torch.manual_seed(0)
    settings = StepSettings(optimizer="sgd", learning_rate=1.0, weight_decay=0.0, momentum=0.0)
    step = make_step(TASK, settings, model=TASK.model().double())
    before = {name: one.detach().clone() for name, one in step.model.named_parameters()}
    step.run([TASK.collate(list(batch_of(one).items), rng=np.random.default_rng(0)) for one in cuts])
    return {name: before[name] - one.detach() for name, one in step.model.named_parameters()}


def test_plain_accumulation_of_in_batch_negatives_is_warned_of() -> None:
    facts = RunFacts(batch=128, micro_batch=16, accumulation=8, gpus=1, in_batch_contrastive=True)
    (found,) = lint(facts)
    assert "15 negatives, not 127" in found.what


@pytest.mark.parametrize("items", [32, 16, 8])
def test_a_smaller_micro_batch_keeps_128_effective(pipeline: Command, scanned: Scanned, items: int) -> None:
    scanned(PAIR)
    words = PAIR.sets("train.effective_batch=128", f"train.micro_batch={items}")
    (made,) = planned(pipeline, *words)["plans"].values()
    assert made["batch"] == 128
    assert made["items_most"] <= items


def test_predictions_are_the_nearest_captions_of_each_image_and_back(pipeline: Command, scanned: Scanned) -> None:
    folder = scanned(PAIR)
    assert ran(pipeline, PAIR.sets("train.seed=3", "train.epochs=1"), "train").code == 0
    done = ran(pipeline, PAIR.sets("train.seed=3", "train.epochs=1"), "predict")
    assert done.code == 0, done.err
    for way in ("right", "left"):
        (file,) = folder.glob(f"predictions/*/nearest_{way}.csv")
        header, *rows = file.read_text().splitlines()
        assert header.startswith("id,own_cosine,nearest_1,cosine_1")
        assert len(rows) > 1
        assert all(row.startswith("made-") for row in rows)


def test_the_norm_of_gradients_is_clipped_to_1() -> None:
    assert config_of(PAIR).train.clip == 1.0


def test_cache_clearing_is_a_setting_with_a_warning() -> None:
    assert config_of(PAIR, "train.empty_cache_every=10").train.empty_cache_every == 10
    assert not settings_of(PAIR)
    (found,) = settings_of(PAIR, "train.empty_cache_every=10")
    assert "10" in found


def test_prefetch_2_is_two_slots() -> None:
    assert config_of(PAIR).train.slots == 2


def test_a_fraction_of_95_percent_is_a_setting_with_a_warning() -> None:
    assert config_of(PAIR, "train.memory_fraction=0.95").train.memory_fraction == 0.95
    (found,) = settings_of(PAIR, "train.memory_fraction=0.95")
    assert "95" in found


def test_mixed_precision_saves_memory() -> None:
    sizes = {"items": 16, "left": 64, "right": 64}
    assert peak(TASK, sizes, MemoryChoice(precision="bf16")) < peak(TASK, sizes)


def test_allocated_and_peak_and_the_batch_are_in_the_figures_of_every_epoch(
    pipeline: Command, scanned: Scanned
) -> None:
    folder = scanned(PAIR)
    done = ran(pipeline, PAIR.sets("train.seed=2", "train.effective_batch=4"), "train")
    assert done.code == 0, done.err
    assert "allocated" in done.out
    assert "at the peak" in done.out
    for epoch in epochs_of(folder):
        assert epoch["batch"]["most"] == 4
        assert 0 < epoch["allocated_bytes"] <= epoch["peak_bytes"]
        assert epoch["validation"]["loss"] > 0
