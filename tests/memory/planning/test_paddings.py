"""How much items are padded: as much as makes an epoch fast, within the memory of the card and as training will cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.schema_train import TrainSection
from pipeline.memory.hardware.gpus import device
from pipeline.memory.planning.memory_plan import CardSpec, DataSizes, MemoryPlan, PlanRequest
from pipeline.memory.planning.planner import SLACK, plan_memory
from pipeline.planning.training_work import Work, data_of, least_of, step_settings, target_of
from pipeline.tasks.spectra_finetune import SpectraFinetune
from pipeline.training.loop.metrics_log import read_epochs
from pipeline.training.prepared import PADDING, phase_plan
from tests.memory.planning.oracles import GIB, MIB, Integers, Model, card
from tests.memory.planning.planned import sampler_under
from tests.training.loop.loops import Plot, Run, phases_of

BATCH = 16
SIZES = {"length": np.random.default_rng(1).integers(20, 400, 400)}
MANY, FEW = 50_000, 5  # kernels of a micro-batch: launching them takes longer than computing, or next to nothing


def activations(sizes: Mapping[str, int]) -> float:
    return sizes["items"] * (2_000 * sizes["length"] + 400 * sizes["length"] ** 2)


def planned(kernels: int, budget: int, items: DataSizes | None = None, **about: Any) -> MemoryPlan:
    request = PlanRequest(batch=BATCH, **about)
    items = items or data_of(SIZES, request, padded=True)
    return plan_memory(Model(activations, kernels=kernels), items, request, [card(budget)])


def test_spectra_on_a_large_card_are_not_cut_into_a_micro_batch_for_each_length() -> None:
    """Of 48 spectra, 10 micro-batches of 5 were made although all fitted at once."""
    task = SpectraFinetune(layers=2, d_fourier=120, d_peak=8, fourier_width=32, finest=0.01)
    train = TrainSection(effective_batch=48, batching="padded", epochs=1)
    sizes: dict[str, Integers] = {"peaks": np.random.default_rng(0).integers(10, 101, 480)}
    work = Work(task, step_settings(train, "cuda", task))
    cards = [CardSpec.of(device("rtx-a5000"), 1)]
    request, oracle = work.request(train, 1), work.oracle(least_of(sizes), target_of((8, 6)), padded=True)
    made = plan_memory(oracle, data_of(sizes, request, padded=True), request, cards)
    assert made.total.value < 0.5 * made.limit_bytes
    assert made.cuts.steps_mean <= 2


def test_launching_is_weighed_against_padding_by_the_time_of_an_epoch() -> None:
    many, few = planned(MANY, GIB), planned(FEW, GIB)
    assert many.padding is not None
    assert many.padding > 1.3
    assert many.cuts.steps_mean < 1.2
    assert few.padding is not None
    assert few.padding < many.padding
    only = replace(data_of(SIZES, PlanRequest(batch=BATCH), padded=True), looser={})
    assert many.epoch_s.value < 0.5 * planned(MANY, GIB, only).epoch_s.value
    assert few.epoch_s.value <= 1.01 * SLACK * planned(FEW, GIB, only).epoch_s.value


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("budget", [150, 300, 700])
def test_looser_micro_batches_fit_in_every_epoch_as_training_cuts_them(budget: int, ranks: int) -> None:
    made = planned(MANY, budget * MIB, ranks=ranks)
    assert made.padding is not None
    assert made.padding > PADDING
    model = Model(activations)
    sampler = sampler_under(made, SIZES, ranks=ranks)
    for epoch in range(3):
        cuts = [cut for step in range(sampler.steps) for share in sampler.shares(epoch, step) for cut in share]
        peaks = [model.peak(made.choice, {"items": len(cut), "length": SIZES["length"][cut].max()}) for cut in cuts]
        assert max(peaks) <= budget * MIB
        planned_cuts = round(made.cuts.steps_mean * sampler.steps * ranks)
        assert epoch or len(cuts) == planned_cuts, "it is cut as it was planned"


def test_padding_is_for_padded_items_whose_number_is_free() -> None:
    made = planned(MANY, GIB, micro_batch=4)
    assert (made.padding, made.cuts.items_most) == (PADDING, 4)
    concatenated = planned(MANY, GIB, data_of(SIZES, PlanRequest(batch=BATCH), padded=False))
    assert concatenated.padding is None
    free = planned(MANY, GIB)
    assert phase_plan("all", 1, free).padding == free.padding


def begun(folder: Path, padding: float) -> Run:
    """Return a training of padded items that a phase pads so much at most."""
    plot = Plot(
        train={"batching": "padded", "epochs": 3, "optimizer": "adamw", "checkpoints": {"every": 1}}, budget=500
    )
    phases = [(replace(phase, padding=padding), items) for phase, items in phases_of(plot)]
    return Run(plot, folder, phases=phases)


def test_a_training_pads_as_its_plan_says_and_resumes_under_another_padding(tmp_path: Path) -> None:
    tight, loose = begun(tmp_path / "tight", PADDING).to_end(), begun(tmp_path / "loose", 8.0).to_end()
    counts = [sum(epoch.micro_batches for epoch in read_epochs(run.made.folder.path)) for run in (tight, loose)]
    assert counts[0] > counts[1] == loose.trainer.done
    begun(tmp_path / "other", PADDING).to_end(stop=2)
    other = begun(tmp_path / "other", 8.0).to_end()
    for name, numbers in tight.state().items():
        assert loose.state()[name] == pytest.approx(numbers, abs=1e-10), "steps are of the same items"
        assert other.state()[name] == pytest.approx(numbers, abs=1e-10)
