"""Sealed folders: whole or not there, whatever happens to the process or the disk, and no damaged byte is believed."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from pipeline.errors import ConfigError
from pipeline.training.checkpoints.sealed_folder import (
    DTYPES,
    MANIFEST,
    FolderDamaged,
    read_sealed,
    seal,
    unseal,
)
from tests.store.faulty_disks import KillingDisk
from tests.training.checkpoints.saved import forked, same_bits, spoil

IDENTITY = {"model": "abc", "rate": 0.1}


def sealed_at(folder, step=1, disk=None):
    """Seal a small folder every file of which depends on a step."""
    tensors = {"a": {"x": torch.full((3,), float(step)), "n": torch.tensor(step)}, "b": {"y": torch.zeros(2)}}
    seal(path := folder / f"step-{step}", tensors, {"step": step}, IDENTITY, disk=disk)
    return path


@st.composite
def tensors(draw):
    """Return a tensor of any dtype, shape and layout, with any bits."""
    dtype = getattr(torch, draw(st.sampled_from(list(DTYPES.values()))))
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
    named = {f"t.{name}": tensor for name, tensor in named.items()}
    if tie and named:
        named["tied"] = next(iter(named.values()))
    shutil.rmtree(tmp_path / "sealed", ignore_errors=True)
    seal(tmp_path / "sealed", {"weights": named}, {})
    got = unseal(tmp_path / "sealed").tensors("weights")
    assert got.keys() == named.keys()
    assert all(same_bits(tensor, named[name]) for name, tensor in got.items())


def test_data_identity_and_plain_safetensors_are_there(tmp_path):
    path = sealed_at(tmp_path, 7)
    sealed = unseal(path)
    assert (sealed.data, sealed.identity, set(sealed.files)) == (
        {"step": 7},
        IDENTITY,
        {f"{n}.safetensors" for n in "ab"},
    )
    assert load_file(path / "a.safetensors")["x"].eq(7).all()
    assert {file.stat().st_mode & 0o222 for file in path.iterdir()} == {0}
    assert sealed.digest == read_sealed(path).digest != read_sealed(sealed_at(tmp_path, 8)).digest


def test_a_later_format_is_not_mistaken_for_damage(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.training.checkpoints.sealed_folder.FORMAT", 2)
    path = sealed_at(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="format 2"):
        unseal(path)


@pytest.mark.parametrize("file", [MANIFEST, "a.safetensors", "b.safetensors"])
def test_a_change_of_any_byte_and_a_cut_at_any_byte_are_detected(tmp_path, file):
    path = sealed_at(tmp_path)
    whole = (path / file).read_bytes()
    for place in range(len(whole)):
        flipped = whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :]
        for content in (flipped, whole[:place]):
            spoil(path / file, lambda there, content=content: there.__setitem__(slice(None), content))
            with pytest.raises(FolderDamaged) as caught:
                unseal(path)
            assert caught.value.where == str(path / file)
    (path / file).write_bytes(whole + b"\0")
    with pytest.raises(FolderDamaged):
        unseal(path)
    (path / file).unlink()
    with pytest.raises(FolderDamaged, match="is missing"):
        unseal(path)


def test_an_opened_folder_verifies_a_file_before_it_maps_its_tensors(tmp_path):
    sealed = read_sealed(sealed_at(tmp_path))
    spoil(sealed.path / "a.safetensors", lambda content: content.__setitem__(-1, content[-1] ^ 1))
    with pytest.raises(FolderDamaged, match="checksum"):
        sealed.tensors("a")
    assert sealed.tensors("b")["y"].eq(0).all()


@pytest.mark.fault
@pytest.mark.parametrize("moment", ["before", "halfway", "after"])
def test_killed_at_any_step_of_the_disk_the_folder_is_whole_or_not_there(tmp_path, moment):
    sealed_at(tmp_path / "count", 1, disk := KillingDisk())
    assert disk.steps > 10
    for kill_at in range(1, disk.steps + 1):
        folder = tmp_path / str(kill_at)
        _, status = os.waitpid(forked(lambda at=kill_at, to=folder: sealed_at(to, 1, KillingDisk(at, moment))), 0)
        assert os.WIFSIGNALED(status) or moment != "before"
        if (folder / "step-1").exists():
            assert unseal(folder / "step-1").data == {"step": 1}
        else:
            assert unseal(sealed_at(folder)).data == {"step": 1}
        assert [path.name for path in folder.iterdir()] == ["step-1"]
