"""Saving while training goes on: the same bytes, one at a time, and nothing that goes wrong is lost."""

from __future__ import annotations

import threading

import pytest
import torch

from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.checkpoint_folder import State
from pipeline.training.checkpoints.keeper import Saver, staging_bytes
from tests.training.checkpoints.saved import checkpoints, is_state_at, state_at


class GatedDisk(Disk):
    """A disk so slow that it writes nothing before it is let."""

    def __init__(self):
        self.gate = threading.Event()

    def write_at(self, fd, data, offset):
        assert self.gate.wait(60)
        super().write_at(fd, data, offset)


def save(saver, state, step, **more):
    """Begin to save a checkpoint of one rank, whose part is published when it is written."""
    saver.begin(state, step, **more)
    saver.publish([saver.receipt(wait=True)])


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.*"))}


@pytest.fixture
def gated(tmp_path):
    disk = GatedDisk()
    saver = Saver(checkpoints(tmp_path, disk=disk))
    yield saver, disk.gate
    disk.gate.set()
    saver.close()


def test_a_thread_writes_the_same_bytes(tmp_path):
    weight = torch.randn(30, 20)
    state = State({"a": weight, "b": weight, "t": weight.T, "z": torch.tensor(1), "e": torch.empty(0, 3)}, {"x": 1.5})
    saver = Saver(checkpoints(tmp_path / "thread"))
    save(saver, state, 3, figure=0.25)
    assert [path.name for path in saver.outcomes(wait=True)] == ["step-00000003"]
    saver.close()
    checkpoints(tmp_path / "at once").save(state, 3, figure=0.25)
    assert content(tmp_path / "thread") == content(tmp_path / "at once")
    assert len(content(tmp_path / "thread")) == 3


def test_what_changes_while_it_is_written_is_not_in_it(tmp_path, gated):
    saver, gate = gated
    state = state_at(1)
    data = dict(state.data)
    saver.begin(State(state.tensors, data, state.own, state.own_data), 1)
    for tensor in (*state.tensors.values(), *state.own.values()):
        tensor.fill_(77)
    data["step"] = 77
    assert saver.receipt() is None
    assert saver.outcomes() == []
    gate.set()
    saver.publish([saver.receipt(wait=True)])
    assert len(saver.outcomes(wait=True)) == 1
    assert is_state_at(saver.checkpoints.newest(), 1)


def test_the_next_waits_for_the_one_before_and_uses_its_buffers_again(tmp_path, gated):
    saver, gate = gated
    saver.begin(state_at(1), 1)

    def go_on():
        saver.publish([saver.receipt(wait=True)])
        save(saver, state_at(2), 2)

    second = threading.Thread(target=go_on)
    second.start()
    held = saver.staged_bytes
    assert held == staging_bytes(state_at(1).tensors, state_at(1).own) == 512 + 64 + 64 + 64
    gate.set()
    second.join(60)
    assert saver.staged_bytes == held
    assert [path.name for path in saver.outcomes(wait=True)] == ["step-00000001", "step-00000002"]
    assert is_state_at(saver.checkpoints.open("step-00000001"), 1)
    assert is_state_at(saver.checkpoints.newest(), 2)
