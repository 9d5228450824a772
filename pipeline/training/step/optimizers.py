"""The parts of a step: its settings, its optimizer, and its loss terms {name: (sum, weight)}."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipeline.errors import ConfigError
from pipeline.protocol import ParameterGroups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from pipeline.config.schema_train import ScheduleSection
    from pipeline.protocol import Batch, Task

    Terms = Mapping[str, tuple[Tensor, Tensor | float]]

SEE = "a task's methods: python -m pydoc pipeline.protocol"


@dataclass(frozen=True)
class StepSettings:
    """The settings of an optimizer step."""

    optimizer: str = "adamw"  # adamw, adam or sgd
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    momentum: float = 0.9  # of sgd
    way: str = "foreach"  # of the optimizer: foreach, fused or loop
    clip: float | None = None  # norm of all gradients at most
    ema: float | None = None  # decay of the moving averages of the parameters
    frozen: tuple[str, ...] = ()  # parameters whose names begin so are not trained
    precision: str = "fp32"  # or autocast to bf16 or fp16
    checkpointing: int = 0  # the number of repeated blocks that are recomputed in backward
    offload: bool = False  # saved activations are moved to host memory
    batch: int | None = None  # items of a step, over all ranks, where its loss compares them; None: those of a batch


def refused(problem: str, remedy: str = SEE) -> ConfigError:
    """Return the error for a task that breaks its contract."""
    return ConfigError(problem, where="train.task", remedy=remedy)


def checked_terms(terms: Any) -> Terms:
    """Return the terms of a loss if each is a sum and a weight; else raise an error with the problem."""
    if not isinstance(terms, Mapping) or not terms:
        raise refused(f"loss() must return {{term: (sum, weight)}} with at least one term, got {shown(terms)}")
    for name, term in terms.items():
        total, weight = term if isinstance(term, tuple | list) and len(term) == 2 else (None, None)
        is_number = isinstance(weight, float | int) or (isinstance(weight, torch.Tensor) and weight.numel() == 1)
        if not (isinstance(total, torch.Tensor) and total.numel() == 1 and is_number):
            raise refused(
                f"loss(): {name!r} must be (sum, weight), a tensor with one number and a number; got {shown(term)}"
            )
        if torch.is_grad_enabled() and not total.requires_grad:
            problem = f"loss(): the sum of {name!r} does not depend on any parameter: nothing would be learned from it"
            raise refused(problem, "leave the term out, or do not detach it")
    return terms


def evaluated_terms(task: Task, model: nn.Module, batch: Batch) -> Terms:
    """Return the terms of a loss without gradients, also of a loss through a derivative, such as forces."""
    try:
        with torch.no_grad():
            return task.loss(model, batch)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        terms = task.loss(model, batch)
    return {name: (total.detach(), weight) for name, (total, weight) in terms.items()}


def shown(value: Any) -> str:
    """Describe what a task returned: types, and shapes of tensors."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {shown(part)}" for name, part in value.items()) or "nothing"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(shown, value))})"
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def whole_loss(terms: Terms, weights: Mapping[str, Any] | None = None) -> Tensor:
    """Return the scalar for backward: each term's sum over the step's weight for it, or over its own weight."""
    weights = weights or {name: weight for name, (_, weight) in terms.items()}
    first, *others = [quotient(total, weights[name]) for name, (total, _) in terms.items()]
    loss: Tensor = sum(others, first)
    return loss


def quotient(total: Any, weight: Tensor | float) -> Any:
    """Return total / weight, and 0 where the weight is 0."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight == 0, torch.zeros_like(weight), total / weight.where(weight != 0, 1))
    return total / weight if weight else total * 0.0


def only_trained(model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the optimizer's parameters; switch off the others' gradients, which nothing would ever clear."""
    trained = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad
    ]
    known = set(map(id, trained))
    for parameter in model.parameters():
        if id(parameter) not in known:
            parameter.requires_grad = False
    return trained


def freeze_parameters(model: nn.Module, frozen: Sequence[str]) -> None:
    """Freeze the parameters whose names start with a prefix in `frozen`; refuse a prefix that no name has."""
    names = [name for name, _ in model.named_parameters()]
    for beginning in frozen:
        if not any(name.startswith(beginning) for name in names):
            firsts = dict.fromkeys(f"{name.partition('.')[0]}." if "." in name else name for name in names)
            problem = f"no parameter name starts with {beginning!r}; they start with {', '.join(firsts) or 'nothing'}"
            raise ConfigError(
                problem, where="train.frozen", remedy="use prefixes of parameter names, such as [layers.0.]"
            )
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(frozen)):
            parameter.requires_grad = False


def optimizer_of(task: Task, model: nn.Module, settings: StepSettings) -> Optimizer:
    """Build the optimizer of the trained parameters, in the task's groups where it has some."""
    groups: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if isinstance(task, ParameterGroups):
        try:
            groups = list(task.parameter_groups(model))
        except TypeError as error:
            raise refused("parameter_groups() must return a list") from error
        if not groups:
            raise refused("parameter_groups() returned no parameter")
    way = {"foreach": settings.way == "foreach", "fused": settings.way == "fused"}
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "sgd":
        return torch.optim.SGD(groups, rate, settings.momentum, weight_decay=decay, **way)
    kind = torch.optim.AdamW if settings.optimizer == "adamw" else torch.optim.Adam
    return kind(groups, rate, weight_decay=decay, foreach=way["foreach"], fused=way["fused"])


def factor(schedule: ScheduleSection, step: int, steps: int) -> float:
    """Return the schedule's factor on the learning rate at a step, counted from 0, of `steps` in all."""
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "inverse_sqrt":
        return math.sqrt((schedule.warmup + 1) / (step + 1))
    done = min(1.0, (step - schedule.warmup) / max(1, steps - 1 - schedule.warmup))
    falling = 1 - done if schedule.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.least + (1 - schedule.least) * falling


def set_rate(optimizer: Optimizer, share: float) -> float:
    """Set every group's learning rate to `share` of its initial one; return the first group's."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * share
    return float(optimizer.param_groups[0]["lr"])
