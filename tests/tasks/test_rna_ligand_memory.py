"""The equivariant task: what each switch saves, and that what a step takes is planned."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from pipeline.memory.footprint import MemoryChoice, live_peak_bytes
from pipeline.protocol import ITEMS
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step
from tests.limited import device
from tests.limited.device import LimitedDevice
from tests.memory.tracing.traced import tracer, true_peak
from tests.tasks.rna_items import made
from tests.tasks.rna_models import (
    IDS,
    NOTHING,
    SIZES,
    SMALL,
    TINY,
    collated,
)

pytest.importorskip("e3nn")
pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = MemoryChoice()


# ---- what each switch saves ----


@cache
def traced(task):
    return tracer(task, least=SIZES[0], clip=1.0)


def planned(task, sizes, choice=PLAIN, *, times=1):
    oracle = traced(task)
    return live_peak_bytes(oracle.standing(choice), oracle.micro(choice, sizes), accumulate=times > 1)


@pytest.mark.parametrize(("name", "kinds"), [("use_multi_hop", {1, 2}), ("use_nonbonded", {3})])
def test_edges_that_are_switched_off_are_not_there_and_cost_nothing(name, kinds):
    off = replace(SMALL, **{name: False})
    every, left = (set(collated(made(0), task=task).kind_E.tolist()) for task in (SMALL, off))
    assert every - left == kinds
    cost, less = (task.cost(made(0).sizes()) for task in (SMALL, off))
    assert less["edges"] == len(collated(made(0), task=off).kind_E) < cost["edges"]
    assert planned(TINY, less | {ITEMS: 1}) < planned(TINY, cost | {ITEMS: 1})


@pytest.mark.parametrize("name", ["use_gate", "use_layer_norm"])
def test_what_is_switched_off_in_a_layer_is_not_planned(name):
    off = replace(TINY, **{name: False})
    assert parameters(off) < parameters(TINY)
    assert planned(off, SIZES[1]) < planned(TINY, SIZES[1])


def parameters(task):
    return sum(one.numel() for one in task.model().parameters())


@pytest.mark.slow
def test_products_of_each_field_alone_take_a_fraction_of_full_ones():
    alone, full = (replace(TINY, hidden_irreps="32x0e+16x1o", product=product) for product in ("depthwise", "full"))
    assert planned(alone, SIZES[1]) < 0.5 * planned(full, SIZES[1])


# ---- what it takes ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "size"),
    [
        (SMALL, 0),
        (SMALL, 2),
        (replace(TINY, **NOTHING), 1),
        (replace(TINY, product="full", cosine=1.0), 1),
    ],
)
def test_the_planner_traces_it_to_two_thousandths_of_what_it_takes(task, size):
    device.need()
    for times in (1, 2):
        predicted = planned(task, SIZES[size], times=times)
        assert predicted == pytest.approx(true_peak(task, SIZES[size], times, clip=1.0), rel=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("choice", [MemoryChoice(checkpointing=True), MemoryChoice(precision="bf16")])
def test_remedies_are_planned_as_well(choice):
    device.need()
    truth = true_peak(SMALL, SIZES[1], choice=choice, clip=1.0)
    assert planned(SMALL, SIZES[1], choice) == pytest.approx(truth, rel=0.01)


def test_memory_between_steps_is_the_same_after_three_epochs_of_batches_of_many_sizes(learned):
    device.need()
    graphs = [made(0), made(1, 4), made(2, 2, 9), made(3, 6, 4)]
    task = replace(TINY, targets=learned.targets, targets_missing="skip")
    gc.disable()  # nothing waits for the collector either
    try:
        with LimitedDevice() as limited:
            step = Step(task, StepSettings(clip=1.0))
            levels = []
            for epoch in range(3):
                for count in (1 + np.random.default_rng(epoch).permutation(len(graphs))).tolist():
                    step.run([collated(*graphs[:count], task=task, ids=[*IDS, "d"][:count])])
                    levels.append(limited.live_bytes)
    finally:
        gc.enable()
    assert levels == [levels[0]] * len(levels)
    assert levels[0] > 0
