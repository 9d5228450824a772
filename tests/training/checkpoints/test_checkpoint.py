"""Checkpoints: whole or not there, whatever happens to the process or the disk."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from pipeline.errors import ConfigError, JobFailed
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints import tensor_file
from pipeline.training.checkpoints.checkpoint_folder import NotSaved, State, new_token
from pipeline.training.checkpoints.checkpoint_reader import open_checkpoint
from pipeline.training.checkpoints.tensor_file import DTYPES, CheckpointDamaged, TensorFile
from tests.store.faulty_disks import FailingDisk, KillingDisk
from tests.training.checkpoints.saved import IDENTITY, checkpoints, forked, is_state_at, same_bits, spoil, state_at

MB = 1 << 20
ALONE = "TEST_ALONE"  # in a process that has run nothing else


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def save(folder, *steps, **more):
    made = checkpoints(folder, **more)
    for step in steps:
        made.save(state_at(step), step)
    return made


# What is saved comes back


@st.composite
def tensors(draw):
    """Return a tensor of any type, shape and layout, with any bits."""
    dtype = getattr(torch, draw(st.sampled_from([name for name, _ in DTYPES.values()])))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    flat = (data % 2).bool() if dtype == torch.bool else data.view(dtype)
    tensor = flat.reshape(shape)
    if draw(st.booleans()):
        tensor = tensor.transpose(0, -1) if tensor.dim() > 1 else tensor
    if draw(st.booleans()) and tensor.dim():
        tensor = tensor[::2]
    return tensor


@given(named=st.dictionaries(st.text(max_size=8), tensors(), max_size=8), tie=st.booleans())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tensors_come_back_bit_for_bit(tmp_path, named, tie):
    named = {f"t.{name}": one for name, one in named.items()}
    if tie and named:
        named["tied"] = next(iter(named.values()))
    path = tmp_path / "file.safetensors"
    path.unlink(missing_ok=True)
    written = tensor_file.write_tensors(Disk(), path, named)
    got = TensorFile(Disk(), path, written).load()
    assert got.keys() == named.keys()
    assert all(same_bits(one, named[name]) for name, one in got.items())


def test_the_files_are_plain_safetensors_that_others_read(tmp_path):
    save(tmp_path, 3)
    got = load_file(tmp_path / "step-00000003/state.safetensors")
    assert all(same_bits(got[name], one) for name, one in state_at(3).tensors.items())
    assert json.loads((tmp_path / "step-00000003/manifest.json").read_text())["checkpoint"]["data"]["step"] == 3


def test_a_checkpoint_comes_back_with_everything(tmp_path):
    made = save(tmp_path, 1, 2)
    assert is_state_at(made.newest(), 2)
    assert is_state_at(made.open("step-00000001"), 1)
    assert is_state_at(made.open("step-00000001", verified=True), 1)
    assert is_state_at(open_checkpoint(tmp_path / "step-00000001"), 1)


def test_nothing_is_found_where_nothing_was_saved(tmp_path):
    assert checkpoints(tmp_path / "none").newest() is None
    assert checkpoints(tmp_path / "none").best() is None


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


def test_targets_of_any_layout_are_filled_in_place(tmp_path):
    made = save(tmp_path, 7)
    target = torch.nn.Parameter(torch.zeros(3, 40).T)
    made.newest().load_into({"model.weight": target})
    assert target.eq(7).all()
    assert not target.is_contiguous()


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ({"model.weight": torch.zeros(4)}, r"model.weight is float32\[40, 3\], not float32\[4\]"),
        ({"model.weight": torch.zeros(40, 3, dtype=torch.float64)}, r"not float64\[40, 3\]"),
        ({"model.other": torch.zeros(4)}, "model.other is not in it"),
    ],
)
def test_a_target_that_does_not_fit_is_named_and_nothing_is_written(tmp_path, target, words):
    fitting = torch.zeros(5, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=words):
        save(tmp_path, 7).newest().load_into({"model.half": fitting} | target)
    assert not fitting.any()


@pytest.mark.parametrize("bad", [{1: 2}, {"a": {3}}, {"a": torch.zeros(1)}, {"a": [b""]}])
def test_data_that_json_would_change_is_refused(tmp_path, bad):
    with pytest.raises(TypeError, match="data"):
        checkpoints(tmp_path).save(State({}, bad), 1)
    assert names(tmp_path) == []


def test_what_is_no_plain_tensor_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"model.x is of a kind .* torch.sparse_coo"):
        checkpoints(tmp_path).save(State({"model.x": torch.eye(3).to_sparse()}), 1)
    assert names(tmp_path) == []


# Several ranks


def shares(folder, world, step=5, disks=None):
    token = new_token("run")
    ranks = [checkpoints(folder, token=token, disk=(disks or {}).get(rank)) for rank in range(world)]
    states = [State(state_at(step).tensors, {}, state_at(10 * rank).own, {"rank": rank}) for rank in range(world)]
    return ranks, [one.write(states[rank], step, rank=rank) for rank, one in enumerate(ranks)]


def test_each_rank_writes_its_own_and_the_first_publishes(tmp_path):
    ranks, receipts = shares(tmp_path, 3)
    assert ranks[0].newest() is None
    ranks[0].publish(json.loads(json.dumps(receipts)), {"step": 5}, 5)
    loaded = ranks[2].newest()
    assert loaded.world == 3
    assert [loaded.own(rank).data for rank in range(3)] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert loaded.own(2).tensors["rng"].eq(20).all()
    assert names(loaded.path) == ["manifest.json", *(f"rank-000{n}.safetensors" for n in range(3)), "state.safetensors"]


def test_another_number_of_ranks_gets_what_there_is(tmp_path):
    ranks, receipts = shares(tmp_path, 2)
    ranks[0].publish(receipts, {}, 5)
    loaded = ranks[0].newest()
    assert loaded.own(1).data == {"rank": 1}
    assert loaded.own(2) is None


def test_one_rank_that_cannot_write_leaves_no_checkpoint(tmp_path):
    save(tmp_path, 4)
    ranks, receipts = shares(tmp_path, 3, disks={1: FailingDisk("write_at", errno.ENOSPC)})
    with pytest.raises(NotSaved, match=r"step 5 could not be saved: rank 1: No space left.*step-00000004"):
        ranks[0].publish(receipts, {}, 5)
    assert names(tmp_path) == ["step-00000004"]


def test_a_rank_file_that_is_gone_is_passed_over(tmp_path):
    said = []
    save(tmp_path, 4)
    ranks, receipts = shares(tmp_path, 3)
    path = ranks[0].publish(receipts, {}, 5)
    (path / "rank-0001.safetensors").unlink()
    assert checkpoints(tmp_path, said=said).newest().step == 4
    assert said[0] == "checkpoint step-00000005 is passed over: rank-0001.safetensors is missing"


# Damage


@pytest.mark.parametrize("file", ["manifest.json", "state.safetensors", "rank-0000.safetensors"])
@pytest.mark.parametrize("left", ["nothing", "a length", "half the header", "half", "all but one", "one more"])
def test_a_truncated_checkpoint_is_passed_over_and_said_so(tmp_path, file, left):
    save(tmp_path, 1, 2)
    path = tmp_path / "step-00000002" / file
    size = path.stat().st_size
    lengths = {"nothing": 0, "a length": 8, "half the header": 60, "half": size // 2, "all but one": size - 1}
    spoil(
        path,
        lambda content: content.append(0) if left == "one more" else content.__delitem__(slice(lengths[left], None)),
    )
    said = []
    assert is_state_at(checkpoints(tmp_path, said=said).newest(), 1)
    assert len(said) == 2
    assert f"step-00000002 is passed over: {file} is " in said[0]
    assert said[1] == "checkpoint step-00000001 is used instead: step 1"


@pytest.mark.nightly
@pytest.mark.parametrize("file", ["manifest.json", "state.safetensors", "rank-0000.safetensors"])
def test_a_flipped_bit_anywhere_is_found(tmp_path, file):
    made = checkpoints(tmp_path)
    for step in (1, 2):
        made.save(state_at(step, size=4), step)
    path, rng = tmp_path / "step-00000002" / file, random.Random(0)
    whole = path.read_bytes()
    for place in range(len(whole)):
        bit = 1 << rng.randrange(8)
        spoil(path, lambda content, place=place, bit=bit: content.__setitem__(place, whole[place] ^ bit))
        said = []
        assert checkpoints(tmp_path, said=said).newest().step == 1, place
        assert f"step-00000002 is passed over: {file}" in said[0]
        path.write_bytes(whole)
    assert checkpoints(tmp_path).newest().step == 2


def test_damage_that_comes_after_the_first_look_is_found_when_it_is_loaded(tmp_path):
    save(tmp_path, 1)
    loaded = checkpoints(tmp_path).newest()
    spoil(loaded.path / "state.safetensors", lambda content: content.__setitem__(-1, content[-1] ^ 1))
    with pytest.raises(CheckpointDamaged, match="has other bytes than were written"):
        is_state_at(loaded, 1)
    with pytest.raises(CheckpointDamaged):
        is_state_at(checkpoints(tmp_path).open("step-00000001", verified=True), 1)


def test_where_no_checkpoint_is_whole_nobody_begins_anew_by_accident(tmp_path):
    save(tmp_path, 1, 2)
    for name in names(tmp_path):
        spoil(tmp_path / name / "state.safetensors", bytearray.clear)
    with pytest.raises(JobFailed, match="none of the 2 checkpoints is whole") as caught:
        checkpoints(tmp_path).newest()
    assert caught.value.remedy == f"to begin anew: mv {tmp_path} {tmp_path}.damaged"


def test_a_checkpoint_of_another_training_is_an_error_that_tells_the_difference(tmp_path):
    save(tmp_path, 1)
    other = checkpoints(tmp_path, identity=IDENTITY | {"model": "xyz", "task": "new"})
    with pytest.raises(ConfigError, match='model is "abc" there, "xyz" here; task is nothing there, "new" here'):
        other.newest()
    with pytest.raises(ConfigError, match="another training"):
        other.open("step-00000001")


def test_a_later_format_is_told_from_damage(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.training.checkpoints.checkpoint_reader.FORMAT", 2)
    save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"is of format 2; this version of pipeline reads up to 1"):
        checkpoints(tmp_path).newest()


def test_a_checkpoint_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path):
    with pytest.raises(ConfigError, match="no such checkpoint; there is: step-00000001, step-00000002"):
        save(tmp_path, 1, 2).open("step-00000007")


def test_a_disk_that_cannot_be_read_is_told(tmp_path):
    save(tmp_path, 1)
    said = []
    with pytest.raises(JobFailed, match="Input/output error"):
        checkpoints(tmp_path, said=said, disk=FailingDisk("read_at", errno.EIO)).newest()
    assert "cannot be read: Input/output error" in said[0]


# What is kept


def test_the_last_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, last=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


@pytest.mark.parametrize(("lower", "kept"), [(True, [4, 5, 7]), (False, [2, 6, 7])])
def test_the_best_are_kept_too_and_of_equal_ones_the_newer(tmp_path, lower, kept):
    made = checkpoints(tmp_path, last=1, best=2)
    for step, figure in enumerate([0.5, 0.9, 0.2, 0.2, 0.1, 0.9, None], 1):
        made.save(state_at(step), step, figure=figure, lower_is_better=lower)
    assert [int(name[5:]) for name in names(tmp_path)] == kept
    assert made.best().step == (5 if lower else 6)


def test_a_figure_that_is_no_number_is_never_the_best(tmp_path):
    made = checkpoints(tmp_path, last=1, best=1)
    for step, figure in [(1, 0.5), (2, float("nan")), (3, None)]:
        made.save(state_at(step), step, figure=figure)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    assert made.best().step == 1


def test_the_next_best_stands_in_for_a_damaged_one(tmp_path):
    said = []
    made = checkpoints(tmp_path, last=3, said=said)
    for step, figure in [(1, 0.5), (2, 0.3), (3, 0.9)]:
        made.save(state_at(step), step, figure=figure)
    (tmp_path / "step-00000002/state.safetensors").unlink()
    assert made.best().step == 1
    assert "step-00000002 is passed over" in said[0]


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


def test_only_what_checkpoints_are_made_of_is_removed(tmp_path):
    said = []
    made = save(tmp_path, 1, last=1, said=said)
    (tmp_path / "step-00000001/notes.txt").write_text("mine")
    (tmp_path / "step-by-step").mkdir()
    made.save(state_at(2), 2)
    aside, *rest = names(tmp_path)
    assert rest == ["step-00000002", "step-by-step"]
    assert names(tmp_path / aside) == ["notes.txt"]
    assert "left behind" in said[0]


def test_dead_runs_leftovers_are_swept_and_nobody_elses(tmp_path):
    mine, other = new_token("run.7"), new_token("run.8")
    folders = {
        kind: tmp_path / f".step-00000001.partial-{token}"
        for kind, token in {
            "former": new_token("run.7"),
            "current": mine,
            "other": other,
            "old": new_token("run.9"),
        }.items()
    }
    for folder in [*folders.values(), tmp_path / f".step-00000001.removed-{other}"]:
        folder.mkdir()
        (folder / "state.safetensors").write_bytes(b"half")
    for path in (folders["old"], folders["old"] / "state.safetensors"):
        os.utime(path, (time.time() - 90_000,) * 2)
    checkpoints(tmp_path, token=mine).sweep()
    assert names(tmp_path) == sorted([folders["current"].name, folders["other"].name])


# Disks that will not write


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("step", ["open_new", "write_at", "fsync", "rename", "make_folder"])
def test_a_failing_disk_is_said_and_the_last_good_one_stays(tmp_path, step, number):
    save(tmp_path, 1)
    disk = FailingDisk(step, number)
    made = checkpoints(tmp_path, disk=disk)
    with pytest.raises(NotSaved) as caught:
        made.save(state_at(2), 2)
    assert disk.taken[step] == 1  # an fsync that failed must never be tried again
    assert "the checkpoint of step 2 could not be saved" in str(caught.value)
    assert "the last one that is there: step-00000001" in str(caught.value)
    assert ("next: make room" in str(caught.value)) == (number in (errno.ENOSPC, errno.EDQUOT))
    assert names(tmp_path) == ["step-00000001"]
    disk.step = ""
    made.save(state_at(3), 3)
    assert is_state_at(made.newest(), 3)


@pytest.mark.parametrize("step", ["open_new", "write_at", "fsync"])
@pytest.mark.parametrize("after", [1, 2])
def test_what_fails_late_leaves_nothing_half_done(tmp_path, step, after):
    save(tmp_path, 1)
    disk = FailingDisk(step, errno.EIO, after)
    with pytest.raises(NotSaved, match="Input/output error"):
        checkpoints(tmp_path, disk=disk).save(state_at(2), 2)
    assert disk.taken[step] == after + 1
    assert names(tmp_path) == ["step-00000001"]


@pytest.fixture
def small_disk(tmp_path):
    """Return a real file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here: that takes root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_keeps_the_last_good_one_and_takes_the_next_when_there_is_room(small_disk):
    made = checkpoints(small_disk / "c", last=2)
    made.save(state_at(1, size=20_000), 1)  # 240 kB each
    made.save(state_at(2, size=20_000), 2)
    (small_disk / "others").write_bytes(bytes(400_000))
    with pytest.raises(
        NotSaved, match=r"No space left on device, 0\.\d MB free \(0\.2 MB are to be written\)"
    ) as caught:
        made.save(state_at(3, size=20_000), 3)
    assert str(small_disk) in caught.value.where
    assert names(small_disk / "c") == ["step-00000001", "step-00000002"]
    assert is_state_at(made.newest(), 2)
    (small_disk / "others").unlink()
    made.save(state_at(4, size=20_000), 4)
    assert is_state_at(made.newest(), 4)


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
        killing = checkpoints(folder, last=1, disk=KillingDisk(kill_at, moment), token=new_token("run"))
        _, status = os.waitpid(forked(lambda made=killing: made.save(state_at(2), 2)), 0)
        assert os.WIFSIGNALED(status) or moment != "before"
        said = []
        again = checkpoints(folder, said=said, token=new_token("run"))
        loaded = again.newest()
        assert said == []  # what is visible is whole
        assert is_state_at(loaded, loaded.step)
        again.sweep()
        assert all(name.startswith("step-") for name in names(folder))


@pytest.mark.nightly
@pytest.mark.fault
def test_killed_at_random_moments_the_newest_is_whole_and_none_that_was_told_of_is_lost(tmp_path):
    rng, kills, last = random.Random(1), 0, 0
    while kills < 40:
        reading, writing = os.pipe()

        def train(first=last, writing=writing):
            made = checkpoints(tmp_path / "c", last=2, token=new_token("run"))
            made.sweep()
            for step in range(first + 1, first + 100_000):
                made.save(state_at(step, size=3_000), step)
                os.write(writing, step.to_bytes(4, "little"))

        child = forked(train)
        os.close(writing)
        told = os.read(reading, 4)  # it is at work
        select.select([], [], [], rng.random() * 0.03)  # the random moment
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reading, 4096):
            told = more[-4:]
        os.close(reading)
        said = []
        loaded = checkpoints(tmp_path / "c", said=said).newest()
        assert said == []
        assert loaded.step >= int.from_bytes(told, "little")
        assert is_state_at(loaded, loaded.step)
        kills, last = kills + 1, loaded.step
    assert last > 40


# Memory


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def extra_bytes(work, warm):
    """Return how far a process's resident memory rises: the least of three, as what else is mapped only adds."""
    return min(risen_bytes(work, warm) for _ in range(3))


def risen_bytes(work, warm):
    """Return how far the resident memory of a process of its own rises above what it begins with."""
    reading, writing = os.pipe()

    def measured():
        libc = ctypes.CDLL(None)
        libc.prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a page of what is touched, and not 2 MiB around it
        libc.mallopt(-3, MB)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
        warm()  # a new process first finds its way to what is mapped
        libc.malloc_trim(0)  # what was free before counts when it is taken
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
        before = resident_bytes()
        work()
        status = Path("/proc/self/status").read_text()
        peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
        os.write(writing, str(peak - before).encode())

    child = forked(measured)
    os.close(writing)
    said = os.read(reading, 64)
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0
    return int(said)


@pytest.mark.nightly
def test_saving_and_loading_take_no_second_copy(tmp_path, request):
    if ALONE not in os.environ:  # what other tests have freed has holes that are filled before new memory is taken
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'alone'}"]
        command.append(f"{__file__}::{request.node.name}")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {ALONE: "1"}
        of_it = f"{__file__}::{request.node.name}"
        done = subprocess.run(
            [*command, of_it], env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        assert "1 passed" in done.stdout
        return
    tensors = {f"model.{n}": torch.full((32 * MB,), n, dtype=torch.uint8).view(torch.float32) for n in range(3)}
    turned = {name: one.reshape(-1, 2).T for name, one in tensors.items()}
    small = {name: one[:10] for name, one in tensors.items()}
    small_turned = {name: one[:10].reshape(-1, 2).T for name, one in tensors.items()}
    made = checkpoints(tmp_path, last=9)

    def warm_up():  # whatever will be done: a new process maps the code for it by whole huge pages
        warm = checkpoints(tmp_path / uuid4().hex, last=9)
        for step, tensors in enumerate((small, small_turned), 1):
            warm.save(State(tensors), step)
            warm.newest().load_into(tensors)

    assert extra_bytes(lambda: made.save(State(tensors), 4), warm_up) < 16 * MB
    loaded = made.newest()
    assert extra_bytes(lambda: loaded.load_into(tensors), warm_up) < 16 * MB
    assert 28 * MB < extra_bytes(lambda: made.save(State(turned), 5), warm_up) < 48 * MB  # one tensor at a time
    wide = torch.zeros(8 * MB, 3).unbind(1)
    targets = dict(zip(tensors, wide, strict=True))  # not laid out as in the file
    assert 28 * MB < extra_bytes(lambda: loaded.load_into(targets), warm_up) < 48 * MB
