"""What stands between two steps, taken apart by name and put together again, bit for bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.device.accelerator import RngState
from pipeline.errors import ConfigError
from pipeline.training.checkpoints.checkpoint import State
from pipeline.training.checkpoints.keeper import model_state, pack, unpack
from tests.training.checkpoints.saved import checkpoints, same_bits

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, 0.01, betas=(0.8, 0.99), foreach=False),
    "adamw amsgrad": lambda groups: torch.optim.AdamW(groups, 0.01, amsgrad=True),
    "adam fused": lambda groups: torch.optim.Adam(groups, 0.01, fused=True),
    "sgd": lambda groups: torch.optim.SGD(groups, 0.01),
    "sgd momentum": lambda groups: torch.optim.SGD(groups, 0.01, 0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, 0.01),
}


class Net(nn.Module):
    """A net with everything that is awkward: tied, frozen, unused, 0-dim, statistics, several precisions."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.frozen, self.unused = nn.Linear(6, 6), nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(6, 4).T)
        self.low = nn.Parameter(torch.randn(6, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 3))

    def forward(self, x):
        x = self.drop(self.norm(self.first(x))) * self.scale.float() + self.low.float()
        return self.last(self.frozen(x)) @ self.turned.T


class Training:
    """A loop in miniature, with averages; all that happens in it comes from its state."""

    def __init__(self, kind="adamw", seed=0):
        torch.manual_seed(seed)
        self.model = Net()
        self.trained = trained = [one for one in self.model.parameters() if one.requires_grad]
        groups = [{"params": trained[:2], "weight_decay": 0.1}, {"params": trained[2:]}]
        self.optimizer = OPTIMIZERS[kind](groups)
        self.averages = [one.detach().clone() for one in trained]
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def steps(self, count):
        for _ in range(count):
            x = torch.randn(8, 6) * random.random() + float(np.random.rand())  # noqa: NPY002
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            for average, parameter in zip(self.averages, self.trained, strict=True):
                average.lerp_(parameter.detach(), 0.1)
        return self

    def packed(self):
        return pack(self)

    def save(self, made, step):
        packed = self.packed()
        made.save(State(packed.tensors, packed.data, RngState.capture().tensors()), step)

    def load(self, loaded):
        unpack(loaded, self)
        RngState(loaded.own(0).own).restore()
        return self


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_resumed_training_is_bitwise_the_uninterrupted_one(tmp_path, kind, steps_before):
    made = checkpoints(tmp_path)
    training = Training(kind).steps(3)
    training.save(made, 3)
    stored = made.newest().sealed.tensors("state")
    assert stored["model.last.weight"] is stored["model.first.weight"], "tied: stored once"
    wanted = training.steps(3).packed()
    resumed = Training(kind, seed=5).steps(steps_before).load(made.newest()).steps(3).packed()
    assert resumed.data == wanted.data
    assert resumed.tensors.keys() == wanted.tensors.keys()
    assert all(same_bits(one, wanted.tensors[name]) for name, one in resumed.tensors.items())


def test_how_the_optimizer_goes_about_it_is_not_in_a_checkpoint(tmp_path):
    Training("adamw").steps(2).save(made := checkpoints(tmp_path), 2)
    training = Training("adamw")
    for group in training.optimizer.param_groups:
        group |= {"foreach": True, "lr": 7.0, "betas": (0.1, 0.2)}
    training.load(made.newest())
    assert [group["foreach"] for group in training.optimizer.param_groups] == [True, True]
    assert [group["weight_decay"] for group in training.optimizer.param_groups] == [0.1, 0.01]
    assert [(group["lr"], group["betas"]) for group in training.optimizer.param_groups] == [(0.01, (0.8, 0.99))] * 2


def test_what_wraps_a_model_is_no_part_of_a_name():
    class Wrapped(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self._orig_mod = inner

    model = Net()
    names = list(model_state(model))
    model.first, model.unused = Wrapped(model.first), Wrapped(Wrapped(model.unused))
    assert sorted(model_state(Wrapped(model))) == sorted(names)


def trains_only(training, *parts):
    named = training.model.named_parameters()
    training.optimizer = torch.optim.AdamW([one for name, one in named if any(part in name for part in parts)])


def test_a_checkpoint_of_another_training_is_refused_by_what_differs(tmp_path):
    Training("adamw").steps(1).save(made := checkpoints(tmp_path), 1)
    cases = {
        "AdamW, this one is SGD": lambda one: setattr(one, "optimizer", OPTIMIZERS["sgd"](one.model.parameters())),
        r"first\.bias": lambda one: trains_only(one, "unused"),
        r"unused entries: ema\.": lambda one: one.averages.clear(),
        r"ema\.scale is float64\[\], not float64\[3\]": lambda one: one.averages.__setitem__(
            0, torch.zeros(3).double()
        ),
    }
    for words, change in cases.items():
        change(other := Training("adamw"))
        with pytest.raises(ConfigError, match=words):
            other.load(made.newest())


def test_a_model_whose_state_cannot_be_stored_is_refused_by_name():
    model = nn.Linear(2, 2)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(ConfigError, match=r"sparse cannot be saved .*sparse_coo"):
        model_state(model)


def test_a_refusal_leaves_everything_as_it_was(tmp_path):
    Training("adamw").steps(1).save(made := checkpoints(tmp_path), 1)
    training = Training("adamw").steps(2)
    before = {name: one.clone() for name, one in training.packed().tensors.items()}
    average, training.averages[0] = training.averages[0], torch.zeros(3).double()
    with pytest.raises(ConfigError, match=r"ema\.scale"):
        training.load(made.newest())
    training.averages[0] = average
    assert all(same_bits(one, before[name]) for name, one in training.packed().tensors.items())
