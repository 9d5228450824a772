"""Weights to begin with: from any form, held against the model, and nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickle
import zipfile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from pipeline.errors import ConfigError, DataError
from pipeline.training.checkpoints.checkpoint import State
from pipeline.training.checkpoints.keeper import model_state
from pipeline.training.checkpoints.sealed_folder import FolderDamaged
from pipeline.training.checkpoints.trained_weights import load_pretrained
from tests.testkit.evil import Evil
from tests.training.checkpoints.saved import checkpoints, spoil


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, 2)


def weights(width=4):
    torch.manual_seed(7)
    return {name: torch.rand_like(one.float()).to(one.dtype) for name, one in Net(width).state_dict().items()}


def is_filled(model, wanted):
    return all(torch.equal(one, wanted[name].to(one.dtype)) for name, one in model.state_dict().items())


def copies(model):
    return {name: one.clone() for name, one in model.state_dict().items()}


def write_hugging_face(folder, parts):
    folder.mkdir()
    names, where = sorted(weights()), {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors" if parts > 1 else "model.safetensors"
        where |= dict.fromkeys(names[part::parts], file)
        save_file({name: weights()[name] for name in names[part::parts]}, folder / file)
    if parts > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def write_checkpoint(folder, model, averages=None):
    named = {f"model.{name}": one for name, one in model_state(model).items()}
    named |= {f"ema.{name}": one for name, one in (averages or {}).items()}
    checkpoints(folder).save(State(named), 5)
    return folder / "step-00000005"


def loads(path, wanted=None, model=None):
    """Load a file into a fresh model, which then holds what is wanted; return the report."""
    report = load_pretrained(model := model or Net(), path)
    assert is_filled(model, wanted or weights()), path
    return report


def test_weights_are_loaded_from_any_form_wherever_they_are_in_it(tmp_path):
    for number, nested in enumerate((None, "state_dict", "model", "model_state_dict")):
        content = weights() if nested is None else {"epoch": 3, nested: weights(), "optimizer": {"state": {}}}
        torch.save(content, path := tmp_path / f"w{number}.{('pt', 'pth', 'ckpt', 'bin')[number]}")
        report = loads(path)
        assert report.is_whole
        assert report.loaded == 9
    torch.save(weights(), path := tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    loads(path)
    save_file(weights(), path := tmp_path / "w.safetensors")
    loads(path)
    for parts in (1, 3):
        loads(write_hugging_face(tmp_path / str(parts), parts))


def test_what_wraps_a_whole_model_or_a_part_is_taken_off(tmp_path):
    path = tmp_path / "w.pt"
    for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model.", "net."):
        torch.save({f"{prefix}{name}": one for name, one in weights().items()}, path)
        loads(path)
    torch.save({name.replace("encoder.", "encoder._orig_mod."): one for name, one in weights().items()}, path)
    loads(path)
    outer = nn.ModuleDict({"module": Net()})  # a name like a wrapper's
    torch.save(named := {f"module.{name}": one for name, one in weights().items()}, path)
    loads(path, named, outer)


@pytest.mark.parametrize("is_averaged", [False, True])
def test_of_our_own_checkpoints_the_averages_are_taken_and_the_rest_from_the_model(tmp_path, is_averaged):
    source = Net()
    source.load_state_dict(weights())
    averages = {name: one.detach() + 1 for name, one in source.named_parameters()} if is_averaged else {}
    path = write_checkpoint(tmp_path, source, averages)
    loads(path, weights() | averages)
    spoil(path / "state.safetensors", lambda content: content.__setitem__(-1, content[-1] ^ 1))
    with pytest.raises(FolderDamaged):
        load_pretrained(Net(), path)


@pytest.mark.parametrize("problem", ["model-00002-of-00003", "folder"])
def test_a_folder_with_a_part_missing_or_an_index_that_leads_out_of_it_is_refused(tmp_path, problem):
    folder = write_hugging_face(tmp_path / "f", 3)
    if problem == "folder":
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    else:
        (folder / f"{problem}.safetensors").unlink()
    with pytest.raises(DataError, match=problem):
        load_pretrained(Net(), folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_precision_is_converted(tmp_path, dtype):
    other = {name: one.to(dtype) if one.is_floating_point() else one for name, one in weights().items()}
    torch.save(other, tmp_path / "w.pt")
    loads(tmp_path / "w.pt", other)


def other_weights():
    """Return weights with something missing, something unknown, something of another shape and of another type."""
    changed = weights()
    changed["head.wieght"] = changed.pop("head.weight")
    changed["encoder.0.weight"] = torch.zeros(5, 3)
    changed["encoder.1.num_batches_tracked"] = torch.tensor(1.0)
    return changed


def test_what_does_not_fit_is_refused_with_the_difference_and_changes_nothing(tmp_path):
    torch.save(other_weights(), path := tmp_path / "w.pt")
    before = copies(model := Net())
    with pytest.raises(ConfigError) as caught:
        load_pretrained(model, path)
    assert is_filled(model, before)
    assert str(path) in caught.value.where
    assert "train.pretrained_partial" in caught.value.remedy
    for name in ("head.weight", "head.wieght", "encoder.0.weight", "encoder.1.num_batches_tracked"):
        assert name in str(caught.value)


def test_partial_loads_what_fits_and_tells_the_rest(tmp_path):
    torch.save(other_weights(), path := tmp_path / "w.pt")
    before = copies(model := Net())
    report = load_pretrained(model, path, partial=True)
    assert (report.loaded, report.missing, report.unexpected) == (6, ("head.weight",), ("head.wieght",))
    assert set(report.reshaped) == {"encoder.0.weight", "encoder.1.num_batches_tracked"}
    kept = {name: before[name] for name in (*report.missing, *report.reshaped)}
    assert is_filled(model, weights() | kept)


def test_weights_of_which_nothing_fits_are_refused_even_partially(tmp_path):
    torch.save({"x": torch.zeros(1), "y": torch.zeros(2)}, path := tmp_path / "w.pt")
    with pytest.raises(ConfigError, match="0 of its 9 tensors fit"):
        load_pretrained(Net(), path, partial=True)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight


def test_of_tied_parameters_one_is_enough_and_two_must_agree(tmp_path):
    values, path = torch.rand(3, 3), tmp_path / "w.pt"
    for name in ("first.weight", "last.weight"):
        torch.save({name: values}, path)
        assert load_pretrained(model := Tied(), path).is_whole
        assert torch.equal(model.first.weight, values)
    torch.save({"first.weight": values, "last.weight": values + 1}, path)
    with pytest.raises(ConfigError, match=r"last\.weight.*first\.weight"):
        load_pretrained(Tied(), path)
    free = nn.ModuleDict({"first": nn.Linear(3, 3, bias=False), "last": nn.Linear(3, 3, bias=False)})
    load_pretrained(free, write_checkpoint(tmp_path, source := Tied()))
    assert torch.equal(free["first"].weight, source.first.weight)
    assert torch.equal(free["last"].weight, source.first.weight)


@pytest.mark.parametrize(("form", "partial"), [("zip", True), ("old", False), ("bare pickle", True)])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, form, partial):
    content, path = {"state_dict": weights(), "x": Evil(tmp_path / "owned")}, tmp_path / "w.ckpt"
    if form == "bare pickle":
        path.write_bytes(pickle.dumps(content["x"]))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    before = copies(model := Net())
    with pytest.raises((ConfigError, DataError)) as caught:
        load_pretrained(model, path, partial=partial)
    assert not (tmp_path / "owned").exists()
    assert is_filled(model, before)
    assert str(path) in caught.value.where
    assert "ESM" not in str(caught.value)
    assert (caught.type is DataError) is (form == "bare pickle")
    if form != "bare pickle":
        assert "posix.system" in caught.value.what
        assert "torch.save(model.state_dict(), FILE)" in caught.value.remedy
        os.system("true")  # the same call would have worked


def test_a_file_that_is_no_weights_says_so(tmp_path):
    torch.save(weights(), path := tmp_path / "w.pt")
    whole = path.read_bytes()
    torch.save({"epoch": 3, "lr": 0.1}, path)
    without_weights = path.read_bytes()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "hello")
    contents = {"truncated": whole[:-100], "empty": b"", "epoch, lr": without_weights, "torch": path.read_bytes()}
    for words, content in contents.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=words):
            load_pretrained(Net(), path)


def test_paths_that_lead_nowhere_say_what_to_name(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.pt"):
        load_pretrained(Net(), tmp_path / "none.pt")
    (tmp_path / "f/step-00000001").mkdir(parents=True)
    with pytest.raises(ConfigError, match="step-00000001"):
        load_pretrained(Net(), tmp_path / "f")
