"""A recording has every storage as it comes and goes, and what it is for."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from pipeline.memory.tracing.recorder import Recorder
from tests.testkit.limited import device
from tests.testkit.limited.device import LimitedDevice

KIB = 1024


@pytest.fixture
def recorder():
    made = Recorder()
    with FakeTensorMode(), made:
        yield made


def sizes(recorder):
    return [size for _, size in recorder.recording.events]


def test_a_model_that_was_traced_is_gone_with_its_trace(recorder):
    model = nn.Linear(2, 2)
    with recorder.inside(model):
        model(torch.ones(1, 2))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_storage_that_is_emptied_and_filled_is_another_block_each_time(recorder):
    with recorder.resizes():
        one = torch.empty(KIB, dtype=torch.uint8)
        one.untyped_storage().resize_(0)
        one.untyped_storage().resize_(2 * KIB)
        del one
    assert [size for size in sizes(recorder) if size] == [KIB, -KIB, 2 * KIB, -2 * KIB]


def grown(step):
    """Return the most that is live while a backward runs, really and as recorded."""
    with LimitedDevice() as real:
        loss = step()
        real.reset_peak()
        loss.backward()
        truth = real.peak_bytes
    recorder = Recorder()
    with FakeTensorMode(), recorder:
        loss = step()
        live = sum(sizes(recorder))
        recorder.begin()
        most = 0
        loss.backward()
        for size in sizes(recorder):
            most, live = max(most, live), live + size
    return truth, max(most, live)


def weight():
    return torch.ones(KIB, 64, requires_grad=True)


def alone():
    w = weight()
    return ((w * 2).exp() + (w * 3).exp() + (w * 4).exp()).sum()


def held():
    w = weight()
    y = w * 2
    return ((y + y) * w.detach()).sum() + y.exp().sum()


def transposed():
    w = torch.ones(256, 256, requires_grad=True)
    return functional.linear(functional.linear(functional.linear(torch.ones(8, 256), w), w), w).sum()


def expanded():
    y = weight() * 2
    return y.sum() + y.sum() + y.exp().sum()


@pytest.mark.parametrize("step", [alone, held, transposed, expanded])
def test_gradients_are_added_in_place_only_where_the_engine_may(step):
    device.need()
    truth, recorded = grown(step)
    assert recorded == pytest.approx(truth, abs=64)
