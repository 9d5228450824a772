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
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from pipeline.config.schema_train import ScheduleSection
    from pipeline.protocol import Batch, Task

    Terms = Mapping[str, tuple[Tensor, Tensor | float]]

SEE = "a task's methods: pipeline/protocol.py"


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
    checkpointing: bool = False  # repeated blocks run again in backward
    offload: bool = False  # what backward needs waits in the host's memory
    batch: int | None = None  # items of a step, over all ranks, where its loss compares them; None: those of a batch


def refused(problem: str, remedy: str = SEE) -> ConfigError:
    """Return the error for a task that breaks its contract."""
    return ConfigError(problem, where="train.task", remedy=remedy)


def checked_terms(terms: Any) -> Terms:
    """Return the terms of a loss if each is a sum and a weight; else raise an error with the problem."""
    if not isinstance(terms, Mapping) or not terms:
        got = "a tensor" if isinstance(terms, torch.Tensor) else type(terms).__name__ if terms else "nothing"
        raise refused(f"loss() must return {{term: (sum, weight)}} with at least one term, got {got}")
    for name, term in terms.items():
        _check_term(name, term)
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


def _check_term(name: Any, term: Any) -> None:
    if not isinstance(term, tuple | list) or len(term) != 2:
        got = f"{type(term).__name__}" + (f" of {len(term)}" if isinstance(term, tuple | list) else "")
        raise refused(f"loss(): {name!r} must be (sum, weight), got {got}")
    total, weight = term
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        got = f"shape {list(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
        raise refused(f"loss(): the sum of {name!r} must be a tensor with one number, got {got}")
    if torch.is_grad_enabled() and not total.requires_grad:
        problem = f"loss(): the sum of {name!r} does not depend on any parameter: nothing would be learned from it"
        raise refused(problem, "leave the term out, or do not detach it")
    if not isinstance(weight, torch.Tensor | float | int) or (isinstance(weight, torch.Tensor) and weight.numel() != 1):
        raise refused(f"loss(): the weight of {name!r} must be one number, got {type(weight).__name__}")


def sums_by_name(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the values of several mappings, name by name."""
    sums: dict[str, Any] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def whole_loss(terms: Terms, weights: Mapping[str, Any] | None = None) -> Tensor:
    """Return the scalar for backward: each term's sum over the step's weight for it, or over its own weight."""
    weights = weights or {name: weight for name, (_, weight) in terms.items()}
    first, *others = [quotient(total, weights[name]) for name, (total, _) in terms.items()]
    loss: Tensor = sum(others, first)
    return loss


class WeightedMean:
    """A mean loss over several parts whose total weight is known only after the last of them.

    The sum of each part is divided by a guess, the weight of the first part; `settle` then corrects the gradients,
    which are those of the whole whatever the sizes of its parts.
    """

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.weight: Tensor | float = 0.0
        self._guess: Tensor | float | None = None

    @property
    def is_empty(self) -> bool:
        return self._guess is None

    def loss(self, total: Tensor, weight: Tensor | float) -> Tensor:
        """Return the loss to run backward for a part."""
        if self._guess is None:
            self._guess = guessed_weight(weight)
        return total / self._guess

    def add(self, total: Tensor, weight: Tensor | float) -> None:
        """Add a part whose backward has run."""
        self.total = self.total + total.detach()
        self.weight = self.weight + (weight.detach() if isinstance(weight, torch.Tensor) else weight)

    def settle(self, parameters: Iterable[Tensor], whole: float | None = None) -> Tensor:
        """Scale the gradients to those of the mean, or to their part in one of a larger weight; return the mean."""
        if self._guess is not None:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            scale_in_place(gradients, quotient(self._guess, self.weight if whole is None else whole))
        return torch.as_tensor(quotient(self.total, self.weight))


def guessed_weight(weight: Tensor | float) -> Tensor | float:
    """Return the divisor to use until the weight of the whole step is known: the weight of its first part."""
    return weight.detach().clamp(min=1.0) if isinstance(weight, torch.Tensor) else max(weight, 1.0)


def quotient(total: Any, weight: Tensor | float) -> Any:
    """Return total / weight, and 0 where the weight is 0."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight == 0, torch.zeros_like(weight), total / weight.where(weight != 0, 1))
    return total / weight if weight else total * 0.0


def scale_in_place(gradients: list[Tensor], factor: Tensor | float) -> None:
    """Multiply gradients by a factor."""
    if gradients and not (isinstance(factor, float) and factor == 1.0):
        torch._foreach_mul_(gradients, factor)


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


def step_in_place(optimizer: Optimizer) -> None:
    """Make an optimizer create its state by a step that moves no parameter and is not counted."""
    kept = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    optimizer.step()
    for group, (rate, decay) in zip(optimizer.param_groups, kept, strict=True):
        group["lr"], group["weight_decay"] = rate, decay
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()


def forget_scaling(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Forget a scaler's state of gradients that are gone, also where memory ended within the optimizer.

    A fused optimizer receives the scale in two attributes, which would stay and scale the next step's gradients.
    """
    if scaler.is_enabled():
        scaler._per_optimizer_states.pop(id(optimizer), None)  # noqa: SLF001 - else a second unscale_() is refused
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)


def factor(schedule: ScheduleSection, step: int, steps: int) -> float:
    """Return the schedule's factor on the learning rate at a step, counted from 0, of `steps` in all."""
    if step < schedule.warmup:
        return (step + 1) / (schedule.warmup + 1)
    if schedule.kind == "constant":
        return 1.0
    done = min(1.0, (step - schedule.warmup) / max(1, steps - 1 - schedule.warmup))
    falling = 1 - done if schedule.kind == "linear" else (1 + math.cos(math.pi * done)) / 2
    return schedule.least + (1 - schedule.least) * falling


def set_rate(optimizer: Optimizer, share: float) -> float:
    """Set every group's learning rate to `share` of its initial one; return the first group's."""
    for group in optimizer.param_groups:
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * share
    return float(optimizer.param_groups[0]["lr"])
