"""Saving while training continues: the same bytes, one checkpoint at a time, and no failure is lost."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.checkpoint import open_checkpoint
from pipeline.training.checkpoints.keeper import Keeper
from pipeline.training.ranks import Ranks
from pipeline.training.state import TrainingState
from tests.store.faulty_disks import FailingDisk
from tests.training.checkpoints.saved import checkpoints, same_bits


class GatedDisk(Disk):
    """A disk that writes nothing before its gate is open."""

    def __init__(self):
        self.gate = threading.Event()

    def write_at(self, fd, data, offset):
        assert self.gate.wait(60)
        super().write_at(fd, data, offset)


class Saving:
    """A keeper of one rank and the small step that it saves."""

    def __init__(self, folder, disk=None, behind=True):
        model = nn.Linear(20, 30)
        optimizer = torch.optim.SGD(model.parameters())
        self.step = SimpleNamespace(
            model=model,
            optimizer=optimizer,
            averages=[],
            scaler=torch.amp.GradScaler("cpu", enabled=False),
            device="cpu",
            trained=[],
        )
        self.said, self.warned = [], []
        made = checkpoints(folder, last=9, disk=disk)
        self.keeper = Keeper(
            made,
            Ranks(),
            fresh=lambda step: None,
            say=self.said.append,
            warn=self.warned.append,
            behind=behind,
        )

    def save(self, number, *, wait=False, own=None):
        self.step.model.weight.data.fill_(float(number))
        return self.keeper.save(TrainingState(done=number), self.step, own=own or {}, metric=0.25, wait=wait)


@pytest.fixture
def gated(tmp_path):
    saving = Saving(tmp_path, disk := GatedDisk())
    yield saving, disk.gate
    disk.gate.set()
    saving.keeper.close()


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.*"))}


def test_a_checkpoint_written_behind_is_that_written_at_once(tmp_path):
    for kind in ("behind", "at once"):
        torch.manual_seed(3)
        saving = Saving(tmp_path / kind)
        assert saving.save(3, wait=kind == "at once")
        saving.keeper.finish()
        saving.keeper.close()
    assert content(tmp_path / "behind") == content(tmp_path / "at once")
    assert len(content(tmp_path / "behind")) == 3


def test_what_changes_while_a_checkpoint_is_written_is_not_in_it(tmp_path, gated):
    saving, gate = gated
    weight, own = saving.step.model.weight, {"seed": 1}
    saving.save(1, own=own)
    weight.data.fill_(77)
    own["seed"] = 77
    assert not saving.keeper.is_written
    gate.set()
    saving.keeper.finish()
    loaded = open_checkpoint(tmp_path / "step-00000001")
    assert same_bits(loaded.sealed.tensors("state")["model.weight"], torch.ones_like(weight))
    assert loaded.own(0).own_data == {"seed": 1}


def test_the_next_save_waits_for_the_one_before_and_reuses_its_buffers(tmp_path, gated):
    saving, gate = gated
    saving.save(1)
    held = saving.keeper._staging.held_bytes
    second = threading.Thread(target=saving.save, args=(2,))
    second.start()
    gate.set()
    second.join(60)
    saving.keeper.finish()
    content = sum(tensor.nbytes for tensor in saving.step.model.state_dict().values())
    assert saving.keeper._staging.held_bytes == held >= content
    for number in (1, 2):
        loaded = open_checkpoint(tmp_path / f"step-0000000{number}")
        assert loaded.sealed.tensors("state")["model.weight"].eq(number).all()


def test_a_save_that_fails_behind_is_reported_and_the_next_one_is_saved(tmp_path):
    disk = FailingDisk("fsync", errno.ENOSPC, once=True)
    saving = Saving(tmp_path, disk)
    assert saving.save(1)
    saving.keeper.finish()
    (error,) = saving.keeper.unsaved
    assert "step 1 could not be saved" in error.what
    assert "training continues" in saving.said[-1]
    assert "make room" in saving.warned[-1]
    assert saving.save(2, wait=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_save_that_is_waited_for_says_whether_it_was_saved(tmp_path):
    saving = Saving(tmp_path, FailingDisk("rename", errno.EROFS), behind=False)
    assert not saving.save(1)
    assert len(saving.warned) == 1
