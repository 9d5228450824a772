"""What a loss returns: a sum and a weight for each term; what is no such thing is refused with what to change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import ConfigError
from pipeline.memory.runtime.recovery import quotient
from pipeline.protocol import ParameterGroups

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    Terms = Mapping[str, tuple[Tensor, Tensor | float]]
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from pipeline.config.schema_train import ScheduleSection
    from pipeline.protocol import Task
    from pipeline.training.step.step import StepSettings

SEE = "what a task must have: pipeline/protocol.py"


def checked_terms(terms: Terms) -> Terms:
    """Return the terms of a loss; others than sums and weights are refused."""
    for name, term in _items_of(terms):
        _check_term(name, term)
    return terms


def _items_of(terms: Any) -> list[tuple[Any, Any]]:
    if not isinstance(terms, Mapping) or not terms:
        got = "a tensor" if isinstance(terms, torch.Tensor) else type(terms).__name__ if terms else "nothing"
        what = f"loss() must return {{term: (sum, weight)}} with at least one term, got {got}"
        raise ConfigError(what, where="train.task", remedy=SEE)
    return list(terms.items())


def _check_term(name: Any, term: Any) -> None:
    """Refuse what is no sum and weight: said at once, it spares a riddle later."""
    if not isinstance(term, tuple | list) or len(term) != 2:
        wrong = f"{type(term).__name__}" + (f" of {len(term)}" if isinstance(term, tuple | list) else "")
        raise ConfigError(f"loss(): {name!r} must be (sum, weight), got {wrong}", where="train.task", remedy=SEE)
    total, weight = term
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        got = f"shape {list(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
        what = f"loss(): the sum of {name!r} must be a tensor with one number, got {got}"
        raise ConfigError(what, where="train.task", remedy=SEE)
    if torch.is_grad_enabled() and not total.requires_grad:
        what = f"loss(): the sum of {name!r} does not depend on any parameter: nothing would be learned from it"
        raise ConfigError(what, where="train.task", remedy="leave the term out, or do not detach it")
    if not isinstance(weight, torch.Tensor | float | int) or (isinstance(weight, torch.Tensor) and weight.numel() != 1):
        what = f"loss(): the weight of {name!r} must be one number, got {type(weight).__name__}"
        raise ConfigError(what, where="train.task", remedy=SEE)


def sums_by_name(many: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums by name."""
    sums: dict[str, Any] = {}
    for one in many:
        for name, value in one.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def sum_of(values: Iterable[Tensor]) -> Tensor:
    """Return the sum of at least one tensor."""
    first, *others = values
    for one in others:
        first = first + one
    return first


def whole_loss(terms: Terms) -> Tensor:
    """Return what to go back from where terms are of all items of a step."""
    return sum_of(quotient(total, weight) for total, weight in terms.values())


def only_trained(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that an optimizer has; others need no gradients, which nobody would ever drop."""
    trained = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    known = {id(one) for one in trained}
    for one in model.parameters():
        if id(one) not in known:
            one.requires_grad = False
    return trained


def freeze_parameters(model: nn.Module, frozen: Sequence[str]) -> None:
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


def optimizer_of(task: Task, model: nn.Module, settings: StepSettings) -> Optimizer:
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


def factor(schedule: ScheduleSection, step: int, steps: int) -> float:
    """Return the share of the learning rate at a step, counted from 0, of so many in all."""
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    if schedule.kind == "constant":
        return 1.0
    done = min(1.0, (step - schedule.warmup) / max(1, steps - 1 - schedule.warmup))
    falling = 1 - done if schedule.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.least + (1 - schedule.least) * falling


def set_rate(optimizer: Optimizer, share: float) -> float:
    """Give every group its share of the rate that it began with; return that of the first."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * share
    return float(optimizer.param_groups[0]["lr"])
