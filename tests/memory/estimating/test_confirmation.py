"""A trace is held to small real steps: what it misses is added, or it is not believed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipeline.memory.estimating import traced
from pipeline.memory.estimating.oracle import BestOracle
from pipeline.memory.estimating.traced import verdict
from pipeline.memory.footprint import MemoryChoice, Provenance, live_peak_bytes
from pipeline.memory.tracing.tracer import TraceSession
from tests.memory.tracing.traced import LARGE, WIDTH, Small, confirmed, layers, tracer, true_peak
from tests.testkit.limited import device
from tests.zoo import ZOO

pytestmark = pytest.mark.usefixtures("one_thread")
PLAIN = MemoryChoice()
KILOBYTE, MEGABYTE = 1 << 10, 1 << 20


class Layers(nn.Module):
    """Eight layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh().sigmoid()
        return x


class TakesMore(Layers):
    """Takes more with real tensors than with fake ones: numbers for each item, or for all."""

    def __init__(self, for_each: int, for_all: int) -> None:
        super().__init__()
        self.for_each, self.for_all = for_each, for_all

    def forward(self, x: Tensor) -> Tensor:
        more = 0 if isinstance(x, FakeTensor) else self.for_each * len(x) + self.for_all
        return super().forward(x) + torch.zeros(more).sum()


class DrawsWidth(Layers):
    """Takes as much as it draws."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        times = 1 if isinstance(x, FakeTensor) else 1 + 8 * int(torch.randint(0, 5, ()))
        return y + y.repeat(1, times).exp().sum()


@pytest.mark.parametrize(
    ("pairs", "factor", "added", "is_refused"),
    [
        ([(100, 100), (300, 300)], 1.0, 0, False),
        ([(101, 100), (60, 300)], 1.0, 0, False),
        ([(120, 100), (361, 300)], 1.229, 0, False),  # in proportion
        ([(120, 100), (330, 300)], 1.224, 0, False),  # two say nothing of a line: in proportion to the dearer one
        ([(120, 100), (400, 300)], 1.0, 0, True),  # more than in proportion
        ([(120, 100), (320, 300), (920, 900)], 1.0, 20, False),  # at any size
        ([(120, 100), (300, 300), (900, 900)], 1.0, 20, False),  # a kernel of small sizes
        ([(120, 100), (340, 300), (1000, 900)], 1.122, 10, False),  # a line
        ([(120, 100), (340, 300), (1100, 900)], 1.0, 0, True),  # a curve
        ([(120, 100)], 1.0, 0, True),
    ],
)
def test_small_differences_pass_lawful_ones_are_added_and_others_refute(pairs, factor, added, is_refused) -> None:
    found = verdict([(real * MEGABYTE, traced * MEGABYTE) for real, traced in pairs])
    assert found.factor == pytest.approx(factor, abs=0.001)
    assert found.added_bytes == pytest.approx(added * MEGABYTE, abs=0.1 * MEGABYTE)
    assert bool(found.refused) is is_refused
    assert bool(found.note) is (factor > 1 or added > 0)


def test_a_trace_that_real_steps_bear_out_is_passed_on_as_it_is() -> None:
    micro, unconfirmed = confirmed(Small(layers)).micro(PLAIN, LARGE), tracer(Small(layers)).micro(PLAIN, LARGE)
    assert (micro.again.peak_bytes, micro.parts, micro.notes) == (unconfirmed.again.peak_bytes, unconfirmed.parts, ())
    assert micro.origin is Provenance.TRACED


@pytest.mark.parametrize("name", ["mlp", "tied", "gnn", "interface"])
def test_the_zoos_traces_are_borne_out(name) -> None:
    member = ZOO[name]
    settings = {**member.settings, "way": "foreach"}
    settings.pop("foreach", None)
    standing = confirmed(member.build(), member.sizes[0], **settings).standing(PLAIN)
    assert (standing.origin, standing.notes) == (Provenance.TRACED, ())


def test_what_each_item_takes_beyond_its_trace_is_planned_too() -> None:
    device.need()
    task = Small(lambda: TakesMore(4 * WIDTH * 8, 0))
    oracle = confirmed(task)
    standing, micro = oracle.standing(PLAIN), oracle.micro(PLAIN, LARGE)
    real = true_peak(task, LARGE)
    assert live_peak_bytes(standing, tracer(task).micro(PLAIN, LARGE), accumulate=False) < 0.8 * real
    assert real <= live_peak_bytes(standing, micro, accumulate=False) <= 1.3 * real
    assert micro.origin is Provenance.GUESSED
    assert any("real steps" in note for note in micro.notes)
    assert sum(part.bytes for part in micro.parts) == pytest.approx(
        live_peak_bytes(standing, micro, accumulate=True), rel=0.001
    )


def test_what_a_step_takes_beyond_its_trace_at_any_size_is_planned_too() -> None:
    device.need()
    task = Small(lambda: TakesMore(0, MEGABYTE))
    oracle = confirmed(task)
    standing, micro = oracle.standing(PLAIN), oracle.micro(PLAIN, LARGE)
    assert 1 <= live_peak_bytes(standing, micro, accumulate=True) / true_peak(task, LARGE, 2) <= 1.3
    assert micro.origin is Provenance.TRACED


def test_a_trace_that_real_steps_refute_is_left_to_the_next_rung() -> None:
    class Lower:
        def standing(self, choice):
            return confirmed(Small(layers)).standing(choice)

    ladder = BestOracle([lambda: confirmed(Small(DrawsWidth)), Lower])
    (note, *_) = ladder.standing(PLAIN).notes
    assert "real steps" in note


def test_a_confirmation_is_made_once_and_kept(tmp_path) -> None:
    task = Small(lambda: TakesMore(4 * WIDTH * 8, 0))
    before = confirmed(task, kept=tmp_path / "model").micro(PLAIN, LARGE)

    def never() -> TraceSession:
        pytest.fail("it was confirmed before")

    after = confirmed(task, kept=tmp_path / "model", real=never).micro(PLAIN, LARGE)
    assert (after.again.peak_bytes, after.notes) == (before.again.peak_bytes, before.notes)
    (tmp_path / "model" / "confirmed.json").write_text("{torn")
    again = confirmed(task, kept=tmp_path / "model").micro(PLAIN, LARGE)
    assert again.again.peak_bytes == before.again.peak_bytes


@pytest.mark.parametrize(("limit", "value"), [("MOST_BYTES", KILOBYTE), ("MOST_S", 0.0)])
def test_a_model_that_is_too_large_for_this_machine_is_not_built_and_told(monkeypatch, limit, value) -> None:
    monkeypatch.setattr(traced, limit, value)

    def never() -> TraceSession:
        pytest.fail("it is too large")

    micro = confirmed(Small(layers), real=never).micro(PLAIN, LARGE)
    assert micro.origin is Provenance.GUESSED, "what the CPU's kernels take is measured"
    assert any(note.startswith("not confirmed by a real step") for note in micro.notes)


def test_a_model_that_only_a_card_runs_stays_traced_and_told() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            if not isinstance(x, FakeTensor):
                raise RuntimeError("no kernel for the CPU")
            return self.layer(x)

    (note,) = confirmed(Small(Fused)).micro(PLAIN, LARGE).notes
    assert "no kernel for the CPU" in note
