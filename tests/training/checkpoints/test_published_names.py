"""Weights under the names that a field publishes: told, read, refused by name, and written again to the bit."""

from __future__ import annotations

import os
import pickle
import sys
import types
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeline.config.schema_train import TrainSection
from pipeline.encoder.published_weights import read_pt
from pipeline.errors import ConfigError, DataError, WeightsUnusable
from pipeline.training.checkpoints.trained_weights import (
    NameTable,
    load_pretrained,
    published_forms,
    renamed,
    stored_weights,
)
from tests.reference import checkpoint

NAMES = {"layers.*.mix": "att.*.in", "layers.*.mix.out.weight": "att.*.w_o", "enter": "embed.proj"}
TABLE = NameTable(NAMES, signs=("embed.proj.weight",), left=("lm_head.*",), fresh=("head.*",))


class Known(nn.Module):
    """A model of a published system, with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.ModuleDict({"mix": Mix()}) for _ in range(12))
        self.head = nn.Linear(4, 1)

    def published_forms(self) -> dict[str, NameTable]:
        return {"known": TABLE}


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)


def theirs() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    state = {name: torch.randn_like(one) for name, one in Known().state_dict().items() if not name.startswith("head")}
    return TABLE.write(state) | {"lm_head.weight": torch.zeros(9, 4)}


def test_a_file_is_told_by_its_names_and_what_is_left_and_fresh_is_listed(tmp_path: Path) -> None:
    torch.save({"state_dict": theirs()}, path := tmp_path / "w.ckpt")
    report = load_pretrained(model := Known(), path)
    assert torch.equal(model.layers[11]["mix"].out.weight, theirs()["att.11.w_o"])
    assert torch.equal(model.layers[1]["mix"].up.bias, theirs()["att.1.in.up.bias"])
    assert (report.form, report.left, report.fresh) == ("known", ("lm_head.weight",), ("head.weight", "head.bias"))
    assert report.is_whole
    assert report.lines() == ["not used (1): lm_head.weight", "initialized randomly (2): head.weight, head.bias"]


@pytest.mark.parametrize("wrapped", ["model.", "module.net.", "_orig_mod."])
def test_what_wraps_the_whole_published_model_is_taken_off(tmp_path: Path, wrapped: str) -> None:
    torch.save({wrapped + name: one for name, one in theirs().items()}, path := tmp_path / "w.pt")
    assert load_pretrained(Known(), path).form == "known"


def test_weights_go_out_to_the_bit_as_they_came_in(tmp_path: Path) -> None:
    torch.save(theirs(), path := tmp_path / "w.pt")
    load_pretrained(model := Known(), path)
    own = {name: one for name, one in model.state_dict().items() if "head" not in name}
    back = published_forms(model)["known"].write(own)
    assert back.keys() == theirs().keys() - {"lm_head.weight"}
    assert all(torch.equal(one, theirs()[name]) for name, one in back.items())


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ("other", r"the model does not support weights of 'other'; it supports known"),
        ("known", r"these are not weights of known: their names begin with a, b"),
    ],
)
def test_a_form_that_is_not_there_is_refused_by_its_name(tmp_path: Path, form: str, says: str) -> None:
    torch.save({"a": torch.zeros(1), "b": torch.zeros(1)}, path := tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=says) as caught:
        load_pretrained(Known(), path, train=TrainSection(pretrained_as=form))
    assert caught.value.where.startswith("train.pretrained_as")


def test_a_table_of_ones_own_brings_weights_that_no_recipe_knows(tmp_path: Path) -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "end": nn.Linear(2, 1)})
    known = {"blocks.0.fc": "body.0", "blocks.1.fc": "body.1", "out": "end"}
    back = {ours: theirs for theirs, ours in known.items()}
    torch.save(
        {renamed(name, back): torch.ones_like(one) for name, one in model.state_dict().items()}, tmp_path / "w.pt"
    )
    train = TrainSection(pretrained_map={"blocks.*.fc": "body.*", "out": "end"})
    assert load_pretrained(model, tmp_path / "w.pt", train=train).is_whole
    assert all((one == 1).all() for one in model.state_dict().values())


def test_another_entry_of_a_checkpoint_is_read_where_it_is_named(tmp_path: Path) -> None:
    averages = {name: one + 1 for name, one in theirs().items()}
    torch.save({"model_state_dict": theirs(), "ema_state_dict": averages}, path := tmp_path / "w.pt")
    load_pretrained(model := Known(), path, train=TrainSection(pretrained_entry="ema_state_dict"))
    assert torch.equal(model.enter.bias, averages["embed.proj.bias"])
    with pytest.raises(DataError, match=r"a dict of model_state_dict, ema_state_dict; .* under swa"):
        stored_weights(path, "swa")


names_of_parts = st.lists(st.sampled_from(["a", "bb", "0", "12", "weight"]), min_size=1, max_size=5).map(".".join)


@given(names_of_parts)
def test_a_name_is_the_same_after_it_went_out_and_in(name: str) -> None:
    table = {"a": "x", "a.*.bb": "y.*.z", "bb": "a1", "bb.weight": "w1", "weight.0": "v0", "a.*.weight": "u.*.f.0"}
    back = {theirs: ours for ours, theirs in table.items()}
    assert renamed(renamed(name, table), back) == name


# Objects of other people's classes


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package that whoever wrote a checkpoint had."""
    package = types.ModuleType("elsewhere")
    exec("class Format:\n def __init__(self, limit): self.limit = limit\ndef run(x): return x", package.__dict__)
    package.Format.__module__ = package.run.__module__ = "elsewhere"
    monkeypatch.setitem(sys.modules, "elsewhere", package)
    return package


def test_objects_of_unknown_classes_do_nothing_and_their_package_is_not_needed(
    tmp_path: Path, elsewhere: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = {"args": Namespace(path=tmp_path, form=elsewhere.Format(5)), "kind": elsewhere.Format}
    torch.save({"state_dict": theirs(), "hyper_parameters": held}, path := tmp_path / "w.ckpt")
    monkeypatch.delitem(sys.modules, "elsewhere")
    assert load_pretrained(Known(), path).form == "known"
    assert "elsewhere" not in sys.modules
    with pytest.raises(WeightsUnusable, match=r"imports (elsewhere\.Format|pathlib\.PosixPath)"):
        read_pt(path)  # as an encoder's weights it stays refused


class Calls:
    def __init__(self, called: object, *given: object) -> None:
        self.called, self.given = called, given

    def __reduce__(self) -> tuple[object, ...]:
        return self.called, self.given


@pytest.mark.parametrize("asked", ["posix.system", "elsewhere.run", "builtins.eval", "torch.hub.load"])
def test_what_would_run_is_refused_by_its_name(tmp_path: Path, elsewhere: types.ModuleType, asked: str) -> None:
    called = {"posix.system": os.system, "elsewhere.run": elsewhere.run, "builtins.eval": eval}.get(
        asked, torch.hub.load
    )
    content = {"state_dict": theirs(), "x": Calls(called, f"touch {tmp_path / 'made'}"), "y": elsewhere.Format}
    torch.save(content, path := tmp_path / "w.ckpt")
    with pytest.raises(ConfigError, match=asked.removeprefix("builtins.")):
        load_pretrained(Known(), path)
    assert not (tmp_path / "made").exists()


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(3, 4).half(), nn.LayerNorm(4))
        self.scale, self.sizes = nn.Parameter(torch.randn(3, 2).T), [4, 5]
        self.register_buffer("limit", torch.arange(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[1](x).sum() * self.scale * len(self.sizes)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # such archives are what was published
def test_a_torchscript_archive_is_read_without_its_code(tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.jit.script(model := Scripted()).save(str(path := tmp_path / "w.pt"))
    stored = stored_weights(path)
    assert stored.keys() == model.state_dict().keys()
    for name, one in model.state_dict().items():
        assert torch.equal(stored[name], one)
        assert stored[name].dtype == one.dtype
    load_pretrained(again := Scripted(), path)
    assert torch.equal(again.scale, model.scale)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w/data.pkl", pickle.dumps(Calls(os.system, f"touch {tmp_path / 'made'}"), protocol=2))
        archive.writestr("w/constants.pkl", pickle.dumps((), protocol=2))
    with pytest.raises(ConfigError, match=r"posix\.system"):
        stored_weights(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("dreams/ssl_model.ckpt", "fourier_enc.b"),
        ("dreams/embedding_model.ckpt", "head.weight"),
        ("peptrm/of_a_compiled_model.pt", "encoder.layers.0.norm1.weight"),
        ("rna3effi/best_model.pt", "input_embedding.feature_mlp.0.weight"),
        ("clip/openai_half.pt", "visual.proj"),
    ],
)
def test_checkpoints_of_the_field_are_read(file: str, name: str) -> None:
    stored = stored_weights(checkpoint(file))
    assert name in stored, sorted(stored)[:20]


def test_a_number_that_is_no_layers_is_itself() -> None:
    table = {"layers.*.hidden": "convs.*.fc.0", "layers.*.weights": "convs.*.fc.3"}
    back = {theirs: ours for ours, theirs in table.items()}
    assert renamed("convs.7.fc.3.bias", back) == "layers.7.weights.bias"
    assert renamed("convs.7.fc.1.bias", back) == "convs.7.fc.1.bias"
