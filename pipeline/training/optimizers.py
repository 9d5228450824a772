"""Which parameters of a model are trained, and the optimizer that they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import ConfigError
from pipeline.protocol import ParameterGroups
from pipeline.training.terms import SEE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from pipeline.protocol import Task
    from pipeline.training.step import Settings


def only_trained(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer has; others need no gradients, which nobody would ever drop."""
    trained = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    known = {id(one) for one in trained}
    for one in model.parameters():
        if id(one) not in known:
            one.requires_grad = False
    return trained


def freeze(model: nn.Module, frozen: Sequence[str]) -> None:
    """Train no parameter whose name begins with one of some texts, each of which must be the beginning of a name."""
    names = [name for name, _ in model.named_parameters()]
    for beginning in frozen:
        if not any(name.startswith(beginning) for name in names):
            firsts = dict.fromkeys(f"{name.partition('.')[0]}." if "." in name else name for name in names)
            what = f"no parameter's name begins with {beginning!r}; they begin with {', '.join(firsts) or 'nothing'}"
            raise ConfigError(what, where="train.frozen", remedy="name beginnings of parameters, such as [layers.0.]")
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(frozen)):
            parameter.requires_grad = False


def optimizer_of(task: Task, model: nn.Module, settings: Settings) -> Optimizer:
    """Return the optimizer of the parameters that are trained."""
    groups: Any = [one for one in model.parameters() if one.requires_grad]
    if isinstance(task, ParameterGroups):
        try:
            groups = list(task.parameter_groups(model))
        except TypeError as error:
            raise ConfigError("parameter_groups() must return a list", where="train.task", remedy=SEE) from error
        if not groups:
            raise ConfigError("parameter_groups() returned no parameter", where="train.task", remedy=SEE)
    way = {"foreach": settings.way == "foreach", "fused": settings.way == "fused"}
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, rate, settings.momentum, weight_decay=decay, **way)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, rate, weight_decay=decay, foreach=way["foreach"], fused=way["fused"])


def step_in_place(optimizer: Optimizer) -> None:
    """Let an optimizer make its state by a step that moves nothing and is not counted."""
    kept = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    optimizer.step()
    for group, (rate, decay) in zip(optimizer.param_groups, kept, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()
