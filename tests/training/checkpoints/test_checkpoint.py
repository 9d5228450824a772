"""Checkpoints: whole or not there, whatever happens to the process or the disk."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError, JobFailed
from pipeline.training.checkpoints.checkpoint import (
    NotSaved,
    Part,
    State,
    StoredTensor,
    by_metric,
    checkpoints_in,
    open_checkpoint,
)
from tests.store.faulty_disks import FailingDisk, KillingDisk
from tests.testkit.limited import device as limited
from tests.testkit.limited.device import LimitedDevice
from tests.training.checkpoints.saved import IDENTITY, checkpoints, forked, is_state_at, same_bits, spoil, state_at

MB = 1 << 20


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def save(folder, *steps, **more):
    made = checkpoints(folder, **more)
    for step in steps:
        made.save(state_at(step), step)
    return made


# What is saved comes back


def test_a_checkpoint_comes_back_with_everything(tmp_path):
    made = save(tmp_path, 1, 2)
    assert is_state_at(made.newest(), 2)
    assert is_state_at(made.open("step-00000001"), 1)
    assert is_state_at(open_checkpoint(tmp_path / "step-00000001"), 1)


def test_tied_tensors_are_written_once_and_fill_both_targets(tmp_path):
    weight = torch.randn(1000)
    made = checkpoints(tmp_path)
    made.save(State({"model.a": weight, "model.b": weight, "model.c": weight[:500]}), 1)
    loaded = made.newest()
    assert 6_000 < (loaded.path / "state.safetensors").stat().st_size < 7_000
    a, b = torch.zeros(1000), torch.zeros(1000)
    loaded.load_into({"model.a": a, "model.b": b})
    assert torch.equal(a, weight)
    assert torch.equal(b, weight)
    loaded.load_into({"model.b": (only := torch.zeros(1000))})
    assert torch.equal(only, weight)


def test_a_target_that_does_not_fit_is_named_and_nothing_is_written(tmp_path):
    loaded, fitting = save(tmp_path, 7).newest(), torch.zeros(5, dtype=torch.bfloat16)
    for name, target in (
        ("model.weight", torch.zeros(4)),
        ("model.weight", torch.zeros(40, 3, dtype=torch.float64)),
        ("model.other", torch.zeros(4)),
    ):
        with pytest.raises(ConfigError, match=name):
            loaded.load_into({"model.half": fitting, name: target})
        assert not fitting.any()


# Several ranks


def shares(folder, world, step=5, disks=None):
    token = "abc"
    ranks = [checkpoints(folder, token=token, disk=(disks or {}).get(rank)) for rank in range(world)]
    states = [State(state_at(step).tensors, {}, state_at(10 * rank).own, {"rank": rank}) for rank in range(world)]
    return ranks, [one.write(states[rank], step, rank=rank) for rank, one in enumerate(ranks)]


def test_each_rank_writes_its_own_and_the_first_publishes(tmp_path):
    ranks, receipts = shares(tmp_path, 3)
    assert ranks[0].newest() is None
    ranks[0].publish(json.loads(json.dumps(receipts)), {"step": 5}, 5)
    loaded = ranks[2].newest()
    assert len(loaded.ranks) == 3
    assert [loaded.own(rank).own_data for rank in range(3)] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert loaded.own(2).own["rng"].eq(20).all()
    assert names(loaded.path) == ["manifest.json", *(f"rank-000{n}.safetensors" for n in range(3)), "state.safetensors"]


def test_one_rank_that_cannot_write_leaves_no_checkpoint(tmp_path):
    save(tmp_path, 4)
    ranks, receipts = shares(tmp_path, 3, disks={1: FailingDisk("write_at", errno.ENOSPC)})
    with pytest.raises(NotSaved, match=r"rank 1.*step-00000004"):
        ranks[0].publish(receipts, {}, 5)
    assert names(tmp_path) == ["step-00000004"]


# Shards


def cut(tensor, data):
    """Cut a tensor into boxes at drawn places of each dimension; return their offsets and copies."""
    parts = [([0] * tensor.dim(), tensor)]
    for dim, length in enumerate(tensor.shape):
        at = data.draw(st.integers(0, length))
        halves = []
        for offset, part in parts:
            behind = [start + at * (place == dim) for place, start in enumerate(offset)]
            halves += [(offset, part.narrow(dim, 0, at)), (behind, part.narrow(dim, at, length - at))]
        parts = halves
    return [Part(offset, part.shape, part.clone) for offset, part in parts]


@given(shape=st.lists(st.integers(0, 5), max_size=3), data=st.data())
@settings(deadline=None)
def test_shards_of_any_cut_make_the_whole_tensor(shape, data):
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    stored = StoredTensor(tuple(shape), tensor.dtype, cut(tensor, data))
    assert same_bits(stored.whole(), tensor)
    start, size = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    for dim in range(len(shape)):
        first, length = min(start, shape[dim]), min(size, shape[dim] - min(start, shape[dim]))
        offset = [first if place == dim else 0 for place in range(len(shape))]
        shard = torch.full_like(tensor.narrow(dim, first, length), -1)
        stored.copy_to(Sharded(shard, offset))
        assert same_bits(shard, tensor.narrow(dim, first, length))


class Sharded:
    """Stands for a distributed tensor, of which this rank has one shard."""

    def __init__(self, shard, offset):
        self._local_tensor, self.offsets = shard, offset

    def __create_chunk_list__(self):
        return [self]

    def detach(self):
        return self

    def to_local(self):
        return self._local_tensor


# Damage


@pytest.mark.parametrize("file", ["manifest.json", "state.safetensors", "rank-0000.safetensors"])
def test_a_damaged_checkpoint_is_passed_over_and_reported(tmp_path, file):
    save(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / file
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-1], whole + b"\0"):
        spoil(path, lambda there, content=content: there.__setitem__(slice(None), content))
        said = []
        assert is_state_at(checkpoints(tmp_path, said=said).newest(), 1), len(content)
        passed_over, used = said
        assert "step-00000002" in passed_over
        assert file in passed_over
        assert "step-00000001" in used


def test_where_no_checkpoint_is_whole_nobody_begins_anew_by_accident(tmp_path):
    save(tmp_path, 1, 2)
    for name in names(tmp_path):
        spoil(tmp_path / name / "state.safetensors", bytearray.clear)
    with pytest.raises(JobFailed) as caught:
        checkpoints(tmp_path).newest()
    assert f"mv {tmp_path} {tmp_path}.damaged" in caught.value.remedy


def test_a_checkpoint_of_another_training_is_an_error_that_tells_the_difference(tmp_path):
    save(tmp_path, 1)
    other = checkpoints(tmp_path, identity=IDENTITY | {"model": "xyz", "task": "new"})
    with pytest.raises(ConfigError, match=r"model.*abc.*xyz.*task.*new"):
        other.newest()
    with pytest.raises(ConfigError):
        other.open("step-00000001")


def test_a_disk_that_cannot_be_read_is_told(tmp_path):
    save(tmp_path, 1)
    said = []
    with pytest.raises(JobFailed, match="Input/output error"):
        checkpoints(tmp_path, said=said, disk=FailingDisk("fill", errno.EIO)).newest()
    assert "Input/output error" in said[0]


# What is kept


def test_the_last_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, last=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize(("lower", "kept"), [(True, [4, 5, 8]), (False, [2, 6, 8])])
def test_the_best_are_kept_too_and_of_equal_ones_the_newer(tmp_path, lower, kept):
    made = checkpoints(tmp_path, last=1, best=2)
    for step, figure in enumerate([0.5, 0.9, 0.2, 0.2, 0.1, 0.9, None, None], 1):
        made.save(state_at(step), step, metric=figure, lower_is_better=lower)
    assert [int(name[5:]) for name in names(tmp_path)] == kept
    assert by_metric(checkpoints_in(tmp_path))[0].step == (5 if lower else 6)


def test_after_a_step_back_the_newest_is_the_one_saved_last(tmp_path):
    made = save(tmp_path, 10, 20, last=5)
    made.save(state_at(15), 15)
    assert made.newest().step == 15
    made.save(state_at(20), 20)
    assert made.newest().name == "step-00000020-2"
    assert is_state_at(made.newest(), 20)


def test_a_damaged_one_does_not_count_among_those_that_are_kept(tmp_path):
    save(tmp_path, 1, 2)
    spoil(tmp_path / "step-00000002/state.safetensors", bytearray.clear)
    again = checkpoints(tmp_path)
    assert again.newest().step == 1
    again.save(state_at(3), 3)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_what_dead_processes_have_left_is_swept(tmp_path):
    save(tmp_path, 1)
    for name in (".step-00000002.partial-1f", ".step-00000001.removed-1f"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.safetensors").write_bytes(b"half")
    (tmp_path / ".notes").touch()
    checkpoints(tmp_path).sweep()
    assert names(tmp_path) == [".notes", "step-00000001"]


# Disks that will not write


@pytest.mark.parametrize("step", ["open_new", "write_at", "fsync", "rename", "make_folder"])
def test_a_failing_disk_is_said_and_the_last_good_one_stays(tmp_path, step):
    save(tmp_path, 1)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES):
        for after in range(3 if step in ("open_new", "write_at", "fsync") else 1):
            disk = FailingDisk(step, number, after)
            with pytest.raises(NotSaved) as caught:
                checkpoints(tmp_path, disk=disk).save(state_at(2), 2)
            assert disk.taken[step] == after + 1  # an fsync that failed must never be tried again
            assert "step-00000001" in str(caught.value)
            assert ("make room" in caught.value.remedy) == (number in (errno.ENOSPC, errno.EDQUOT))
            assert names(tmp_path) == ["step-00000001"]
    disk.step = ""
    made = checkpoints(tmp_path, disk=disk)
    made.save(state_at(3), 3)
    assert is_state_at(made.newest(), 3)


# Kills


def steps_of_a_save(tmp_path):
    disk = KillingDisk()
    made = checkpoints(tmp_path / "count", last=1, disk=disk)
    made.save(state_at(1), 1)
    disk.steps = 0
    made.save(state_at(2), 2)
    return disk.steps


@pytest.mark.nightly
@pytest.mark.fault
@pytest.mark.parametrize("moment", ["before", "halfway"])
def test_killed_at_any_step_of_the_disk_one_whole_checkpoint_is_there(tmp_path, moment):
    steps = steps_of_a_save(tmp_path)
    assert steps > 20
    for kill_at in range(1, steps + 1):
        folder = tmp_path / str(kill_at)
        save(folder, 1)
        killing = checkpoints(folder, last=1, disk=KillingDisk(kill_at, moment))
        _, status = os.waitpid(forked(lambda made=killing: made.save(state_at(2), 2)), 0)
        assert os.WIFSIGNALED(status) or moment != "before"
        said = []
        again = checkpoints(folder, said=said)
        loaded = again.newest()
        assert said == []  # what is visible is whole
        assert is_state_at(loaded, loaded.step)
        again.sweep()
        assert all(name.startswith("step-") for name in names(folder))


# Memory


def extra_bytes(work):
    """Return the most that some work allocates at a time, by torch and by Python."""
    tracemalloc.start()
    try:
        with LimitedDevice() as device:
            work()
        return device.peak_bytes + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_saving_and_loading_take_no_second_copy(tmp_path):
    limited.need()
    tensors = {f"model.{n}": torch.full((32 * MB,), n, dtype=torch.uint8).view(torch.float32) for n in range(3)}
    turned = {name: one.reshape(-1, 2).T for name, one in tensors.items()}
    made = checkpoints(tmp_path, last=9)
    assert extra_bytes(lambda: made.save(State(tensors), 4)) < 16 * MB
    loaded = made.newest()
    assert extra_bytes(lambda: loaded.load_into(tensors)) < 16 * MB
    assert 28 * MB < extra_bytes(lambda: made.save(State(turned), 5)) < 48 * MB  # one tensor at a time
    wide = torch.zeros(8 * MB, 3).unbind(1)
    targets = dict(zip(tensors, wide, strict=True))  # not laid out as in the file
    assert extra_bytes(lambda: loaded.load_into(targets)) < 16 * MB
