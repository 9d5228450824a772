"""A trace is what a real step allocates, and it says what for."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

from pipeline.memory.footprint import Category, MemoryChoice, StepTapes, live_peak_bytes, parts_at_peak
from pipeline.memory.hardware.caching_allocator import DEFAULT, Allocator
from pipeline.memory.tracing.tracer import CannotTrace
from pipeline.training.step.optimizers import StepSettings
from pipeline.training.step.step import Step as TrainingStep
from tests.memory.tracing.traced import LARGE, SIZES, WIDTH, Small, layers, of, play, tracer, true_peak
from tests.testkit.limited import device
from tests.zoo import ZOO

pytestmark = pytest.mark.usefixtures("one_thread")
FLOAT = 4
STATES = 2  # of AdamW, for each parameter
PLAIN = MemoryChoice()
NAMES = sorted(set(ZOO) - {"data_dependent"})
LONG = {"docking", "rna"}  # their own tests hold them to real steps, too


@pytest.fixture
def _limited():
    device.need()


def answers(task, sizes=SIZES, choice=PLAIN, **settings):
    traced = tracer(task, **settings)
    return traced.standing(choice), traced.micro(choice, sizes)


@pytest.mark.usefixtures("_limited")
@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.nightly if one in LONG else ()) for one in NAMES])
def test_a_trace_is_what_real_steps_take(name):
    member = ZOO[name]
    task, sizes, settings = member.build(), member.sizes[0], dict(member.settings)
    settings["way"] = "foreach" if settings.pop("foreach") else "loop"
    standing, micro = answers(task, sizes, least=sizes, **settings)
    for times in (1, 2):
        predicted = StepTapes.of(standing, [micro] * times).peak_bytes(standing.bytes)
        assert predicted == pytest.approx(true_peak(task, sizes, times, **settings), rel=0.002)
    parts = parts_at_peak(standing, micro)
    assert sum(part.bytes for part in parts) == live_peak_bytes(standing, micro, accumulate=True)
    assert all(part.bytes > 0 for part in parts)
    check_tapes(standing, micro, first=true_peak(task, sizes, turns=1, **settings))


def check_tapes(standing, micro, first):
    """Check that tapes can be played in turn, reach the peak of a real first step, and leave what stands."""
    live: dict[int, int] = {}
    allocator = Allocator(DEFAULT)
    play(live, standing.setup)
    allocator.play(standing.setup)
    steps = [StepTapes.of(standing, [micro] * times, first=not place) for place, times in enumerate((1, 1, 3, 2))]
    levels = []
    for step in steps:
        highest = max(play(live, tape) for tape in step.tapes)
        assert highest == (pytest.approx(first, rel=0.002) if not levels else step.peak_bytes(standing.bytes))
        assert sum(live.values()) == standing.bytes
        for tape in step.tapes:
            allocator.play(tape)
        levels.append(allocator.allocated_bytes)
    assert len(set(levels)) == 1


@pytest.mark.nightly
def test_fair_esm_itself_is_traced_with_its_branches_guessed():
    found = ZOO["esm2_finetune"]
    sizes = {"length": 200, "items": 3}
    stock, ours = (answers(found.task(stock=stock), sizes, least=found.sizes[0]) for stock in (True, False))
    assert any("esm2.py" in note and "guessed" in note for note in stock[1].notes)
    peaks = [live_peak_bytes(*one, accumulate=False) for one in (stock, ours)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.05)


def test_state_is_what_the_model_and_its_optimizer_really_have():
    task = Small(layers)
    standing, _ = answers(task, ema=0.9)
    real = TrainingStep(task, StepSettings(ema=0.9))
    real.run([task.example(SIZES)])
    sums: dict[str, int] = {}
    for what, _, tensor in real.owned():
        sums[what] = sums.get(what, 0) + tensor.nbytes
    assert {part.category.value: part.bytes for part in standing.parts} == sums
    assert standing.parameters == standing.trained == sum(one.numel() for one in real.model.parameters())


def test_activations_are_known_by_their_module():
    _, micro = answers(Small(layers), LARGE)
    one = LARGE["items"] * WIDTH * FLOAT
    # linear keeps its result for GELU, whose own is kept by the next layer, or the loss
    assert of(micro.parts, Category.ACTIVATIONS) == {"*.*": 6 * one}
    assert of(micro.parts, Category.INPUTS) == {"": one}


def test_each_term_of_the_loss_is_known_by_its_name_also_what_two_of_them_share():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.layer(x)

    def terms(model, batch):
        y = model(batch)
        shared = y.exp()
        return {
            "wide": ((torch.cat([y, y, y], 1).sin() + 1).exp().sum(), 1.0),
            "one": ((shared * 2).sin().sum(), 1.0),
            "other": ((shared * 3).exp().sum(), 1.0),
        }

    _, micro = answers(Small(Twice, terms=terms), LARGE)
    found = of(micro.parts, Category.LOSS)
    one = LARGE["items"] * WIDTH * FLOAT
    assert set(found) >= {"wide", "one and other", "one", "other"}
    assert found["wide"] == pytest.approx(3 * one, abs=64)  # exp's result; the rest is gone by then
    assert found["one and other"] == one


def test_what_is_soon_gone_is_told_by_the_part_of_the_step():
    task = Small(lambda: nn.Linear(2048, 2048, bias=False), width=2048)
    standing, _ = answers(task)
    size = 2048 * 2048 * FLOAT
    assert of(standing.update_parts, Category.GRADIENTS) == {"": size}
    assert of(standing.update_parts, Category.TEMPORARIES)["optimizer"] == pytest.approx(size, rel=0.01)


def test_frozen_parameters_have_no_gradients_and_no_state():
    standing, micro = answers(Small(layers), frozen=("0.", "1."))
    third = (WIDTH + 1) * WIDTH * FLOAT
    assert of(standing.parts, Category.PARAMETERS) == {"": 3 * third}
    assert of(standing.parts, Category.OPTIMIZER)[""] == pytest.approx(STATES * third, abs=16)
    assert micro.first.left_bytes == third
    assert standing.trained * 3 == standing.parameters


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.leave.weight = self.enter.weight

    def forward(self, x):
        return self.leave(self.enter(x).relu())


@pytest.mark.parametrize("make", [Tied, lambda: copy.deepcopy(Tied().to("cpu").float())])
def test_tied_weights_count_once(make):
    standing, micro = answers(Small(make))
    assert of(standing.parts, Category.PARAMETERS) == {"": WIDTH * WIDTH * FLOAT}
    assert micro.first.left_bytes == WIDTH * WIDTH * FLOAT
    assert standing.parameters == WIDTH * WIDTH


@pytest.mark.usefixtures("_limited")
def test_checkpointing_keeps_less_and_computes_more():
    task, choice = Small(lambda: nn.Sequential(layers(depth=6))), MemoryChoice(checkpointing=6)
    plain, half, again = (answers(task, LARGE, one) for one in (PLAIN, MemoryChoice(checkpointing=3), choice))
    some, *ends = (live_peak_bytes(*one, accumulate=False) for one in (half, plain, again))
    assert some == pytest.approx(true_peak(task, LARGE, choice=MemoryChoice(checkpointing=3)), rel=0.01)
    assert min(ends) < some < max(ends)
    kept = [sum(of(micro.parts, Category.ACTIVATIONS).values()) for _, micro in (plain, again)]
    assert kept[1] < 0.6 * kept[0]
    assert plain[1].flops < again[1].flops < 1.5 * plain[1].flops
    peak = live_peak_bytes(*again, accumulate=False)
    assert peak == pytest.approx(true_peak(task, LARGE, choice=choice), rel=0.01)


@pytest.mark.usefixtures("_limited")
def test_several_types_under_autocast_are_followed():
    task, choice = Small(lambda: layers(depth=4)), MemoryChoice(precision="bf16")
    predicted = live_peak_bytes(*answers(task, LARGE, choice), accumulate=True)
    assert predicted == pytest.approx(true_peak(task, LARGE, 2, choice), rel=0.05)  # oneDNN packs: not charged
    assert predicted < 0.8 * live_peak_bytes(*answers(task, LARGE), accumulate=True)


def test_evaluation_takes_less_and_is_answered_at_once_when_asked_again():
    traced = tracer(Small(lambda: layers(depth=6)))
    evaluated = traced.evaluation(PLAIN, LARGE)
    assert evaluated.again.peak_bytes < 0.5 * traced.micro(PLAIN, LARGE).again.peak_bytes
    assert evaluated.again.left_bytes == 0
    assert 2.5 * evaluated.flops < traced.micro(PLAIN, LARGE).flops <= 3 * evaluated.flops
    assert traced.evaluation(PLAIN, LARGE) is evaluated
    assert traced.micro(PLAIN, LARGE) is traced.micro(PLAIN, dict(LARGE))


@pytest.mark.usefixtures("_limited")
def test_offloaded_activations_are_counted_as_the_hosts():
    task, choice = Small(lambda: layers(depth=6)), MemoryChoice(offload=True)
    plain, away = answers(task, LARGE), answers(task, LARGE, choice)
    kept = [sum(of(micro.parts, Category.ACTIVATIONS).values()) for _, micro in (plain, away)]
    assert kept[1] < 0.2 * kept[0]
    assert away[1].host_bytes >= 0.8 * kept[0]
    assert plain[1].host_bytes == 0
    peak = live_peak_bytes(*away, accumulate=False)
    assert peak == pytest.approx(true_peak(task, LARGE, choice=choice), rel=0.01)


class Refusing(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(WIDTH, WIDTH), how

    def forward(self, x):
        return self.how(self.layer(x))


def test_an_error_of_model_itself_is_told_as_it_is():
    def make():
        raise KeyError("no such weights")

    with pytest.raises(KeyError, match="no such weights"):
        tracer(Small(make)).standing(PLAIN)


def test_a_model_that_refuses_a_single_item_begins_with_more():
    task = Small(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    assert tracer(task, least={"items": 1}).micro(PLAIN, SIZES).is_like(tracer(task).micro(PLAIN, SIZES))


def test_building_a_model_takes_what_is_planned_for_it():
    class Bulky(nn.Linear):
        def reset_parameters(self):
            self.weight.data.copy_(torch.eye(100 * WIDTH)[:WIDTH, :WIDTH])

    standing, micro = answers(Small(lambda: Bulky(WIDTH, WIDTH)))
    assert live_peak_bytes(standing, micro, accumulate=True) >= FLOAT * (100 * WIDTH) ** 2


def test_after_an_error_the_tracer_still_answers():
    def fussy(y):
        if len(y) == 7:
            raise ValueError("seven")
        return y

    task = Small(lambda: Refusing(fussy))
    traced = tracer(task)
    before = traced.micro(PLAIN, LARGE)
    with pytest.raises(CannotTrace, match="seven"):
        traced.micro(PLAIN, {"items": 7})
    again = tracer(task).micro(PLAIN, {"items": 100})
    after = traced.micro(PLAIN, {"items": 100})
    assert before.again.left_bytes == after.again.left_bytes == 0
    assert after.again.peak_bytes == pytest.approx(again.again.peak_bytes, abs=64)  # the loss so far


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # torch's compiler uses what torch gave up
def test_what_is_compiled_is_traced_as_it_is_written():
    class Compiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.run = torch.compile(self.layer)

        def forward(self, x):
            return self.run(x).relu()

    standing, micro = answers(Small(Compiled))
    assert of(standing.parts, Category.PARAMETERS) == {"": (WIDTH + 1) * WIDTH * FLOAT}
    assert micro.flops > 0


def test_nothing_stays_changed_after_a_trace():
    def state():
        return (
            nn.Module._apply,
            torch.UntypedStorage.resize_,
            len(hooks._global_forward_hooks),
            len(hooks._global_forward_pre_hooks),
            torch.is_autocast_enabled("cpu"),
            torch.overrides._get_current_function_mode_stack(),
            torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
            torch.is_grad_enabled(),
        )

    before = state()
    traced = tracer(Small(layers))
    traced.micro(MemoryChoice(precision="bf16", checkpointing=6, offload=True), SIZES)
    with pytest.raises(CannotTrace):
        tracer(Small(lambda: Refusing(lambda y: y[y > 0]))).standing(PLAIN)
    assert state() == before


def test_two_threads_may_trace_at_once():
    expected = tracer(Small(layers)).micro(PLAIN, LARGE)
    found: dict[int, Any] = {}

    def run(number):
        found[number] = tracer(Small(layers)).micro(PLAIN, LARGE)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number].parts for number in range(3)] == [expected.parts] * 3
    assert not hooks._global_forward_hooks
