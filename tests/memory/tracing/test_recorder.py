"""Storages are seen when they come and when they go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from pipeline.memory.tracing.recorder import SCRATCH, OnHost, Recorder
from tests.testkit.limited import device
from tests.testkit.limited.device import LimitedDevice

KIB = 1024


@pytest.fixture
def recorder():
    made = Recorder()
    with FakeTensorMode(), made:
        yield made


def sizes(recorder):
    return list(recorder.recording.bytes_E)


def test_a_block_is_allocated_and_released(recorder):
    one = torch.empty(KIB, dtype=torch.uint8)
    del one
    assert sizes(recorder) == [KIB, -KIB]
    assert recorder.recording.blocks[0].died == 1


def test_a_model_that_was_traced_is_gone_with_its_trace(recorder):
    model = nn.Linear(2, 2)
    with recorder.inside(model):
        model(torch.ones(1, 2))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_view_is_no_new_block_and_keeps_the_old_one(recorder):
    part = torch.empty(KIB, dtype=torch.uint8).view(2, -1)[0]
    assert sizes(recorder) == [KIB]
    del part
    assert sizes(recorder) == [KIB, -KIB]


def test_a_new_recording_knows_what_was_live_and_forgets_the_rest(recorder):
    kept, gone = torch.empty(KIB, dtype=torch.uint8), torch.empty(7, dtype=torch.uint8)
    del gone
    recording = recorder.begin()
    assert [block.bytes for block in recording.before] == [KIB]
    assert recording.blocks == []
    del kept
    assert sizes(recorder) == [-KIB]
    assert recording.before[0].died == 0
    assert recorder.begin().before == ()


def test_a_storage_that_is_emptied_and_filled_is_another_block_each_time(recorder):
    with recorder.resizes():
        one = torch.empty(KIB, dtype=torch.uint8)
        one.untyped_storage().resize_(0)
        one.untyped_storage().resize_(2 * KIB)
        del one
    assert sizes(recorder) == [KIB, -KIB, 0, 0, 2 * KIB, -2 * KIB]
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


def test_what_is_on_the_host_is_counted_there_alone(recorder):
    one = torch.empty(KIB, dtype=torch.uint8)
    carrier = OnHost(recorder)
    away = carrier.away(one)
    del one
    assert sizes(recorder) == [KIB, -KIB]
    assert recorder.recording.host_bytes == KIB
    back = carrier.back(away, torch.device("cpu"))
    del away
    assert sizes(recorder) == [KIB, -KIB, KIB]
    assert recorder.begin().host_bytes == 0
    assert back.nbytes == KIB


def test_what_a_kernel_takes_within_itself_comes_and_goes_at_once():
    recorder = Recorder(scratch=lambda func, *_: 100 if func is torch.ops.aten.mul.Tensor else 0)
    with FakeTensorMode(), recorder:
        one = torch.empty(KIB, dtype=torch.uint8)
        kept = one * one
    assert sizes(recorder) == [KIB, KIB, 100, -100]
    assert recorder.recording.blocks[-1].phase == SCRATCH
    assert kept.shape == one.shape


def test_blocks_are_known_by_the_innermost_module_also_after_an_error():
    class Failing(nn.Module):
        def forward(self, x):
            raise ValueError("no")

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), Failing())
    recorder = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        with pytest.raises(ValueError, match="no"), recorder.inside(model):
            model(torch.ones(2, 4))
        assert [block.module for block in recorder.recording.blocks if block.bytes == 32][1:] == ["0.0"]
        assert recorder.modules == []
        with recorder.inside(model):
            kept = torch.ones(3)
        assert recorder.recording.blocks[-1].module == ""
    assert kept.shape == (3,)


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
        live = sum(recorder.recording.bytes_E)
        recorder.begin()
        most = 0
        loss.backward()
        for size in recorder.recording.bytes_E:
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


def test_work_is_counted():
    recorder = Recorder()
    with FakeTensorMode(), recorder:
        one, other = torch.ones(8, 16), torch.ones(16, 32)
        before = recorder.recording.kernels
        made = one @ other
    assert recorder.recording.flops == 2 * 8 * 16 * 32
    assert recorder.recording.kernels == before + 1
    assert recorder.recording.moved_bytes >= one.nbytes + other.nbytes + made.nbytes
