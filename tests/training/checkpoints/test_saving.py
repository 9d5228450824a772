"""Saving while training goes on: the same bytes, one at a time, and nothing that goes wrong is lost."""

from __future__ import annotations

import errno
import threading

import pytest
import torch

from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.checkpoint_folder import NotSaved, State, new_token
from pipeline.training.checkpoints.keeper import Saver, StagingBuffers, staging_bytes
from tests.store.faulty_disks import FailingDisk
from tests.training.checkpoints.saved import checkpoints, is_state_at, same_bits, state_at


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


def test_memory_is_used_again_until_the_tensors_are_of_other_sizes():
    staging = StagingBuffers()
    (first,) = staging.copied({"a": torch.ones(3), "b": torch.ones(2)})
    (again,) = staging.copied({"a": torch.zeros(3), "b": torch.full((2,), 5.0)})
    assert {copy.data_ptr() for copy in first.values()} == {copy.data_ptr() for copy in again.values()}
    assert same_bits(again["b"], torch.full((2,), 5.0))
    tied = torch.ones(1)
    other, own = staging.copied({"a": torch.zeros(3), "b": torch.zeros(50), "c": tied, "d": tied}, {"a": tied})
    assert other["c"] is other["d"]
    assert other["c"].data_ptr() != own["a"].data_ptr()
    assert same_bits(other["b"], torch.zeros(50))
    assert staging.held_bytes == 64 + 256 + 64 + 64


def test_a_full_disk_is_told_and_the_next_checkpoint_is_a_new_one(tmp_path):
    disk = FailingDisk("write_at", errno.ENOSPC)
    saver = Saver(checkpoints(tmp_path, disk=disk))
    save(saver, state_at(1), 1)
    saver.wait()
    disk.step = ""
    save(saver, state_at(2), 2)
    failed, path = saver.outcomes(wait=True)
    assert isinstance(failed, NotSaved)
    assert "step 1 could not be saved: rank 0: No space left" in str(failed)
    assert path.name == "step-00000002"
    saver.close()


def test_a_mistake_in_a_share_is_told_once(tmp_path):
    saver = Saver(checkpoints(tmp_path))
    saver.begin(State({"x": torch.eye(2, dtype=torch.complex128)}), 1)
    with pytest.raises(Exception, match="complex128"):
        saver.begin(state_at(2), 2)
    save(saver, state_at(3), 3)
    assert len(saver.outcomes(wait=True)) == 1
    saver.close()


def test_ranks_write_at_the_same_time_and_the_first_publishes_when_all_have(tmp_path):
    token = new_token("run")
    ranks = [Saver(checkpoints(tmp_path, token=token), rank=n) for n in range(3)]
    for step in (1, 2):
        for saver in ranks:
            saver.begin(state_at(step), step)
        receipts = [saver.receipt(wait=True) for saver in ranks]
        ranks[0].publish(receipts)
        for saver in ranks[1:]:
            assert saver.receipt() is not None
        assert [path.name for path in ranks[0].outcomes(wait=True)] == [f"step-0000000{step}"]
    loaded = ranks[1].checkpoints.newest()
    assert loaded.world == 3
    assert is_state_at(loaded, 2)
    assert ranks[1].staged_bytes == 64  # the others copy only what is their own
    for saver in ranks:
        saver.close()
