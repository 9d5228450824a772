"""What stands between two steps, as tensors by name and JSON data, and back, bit for bit.

    model.NAME                 parameters and persistent buffers
    optimizer.NAME.WHAT        its state of a parameter, by the parameter's name; frozen ones have none
    optimizer.group.N.WHAT     hyperparameters that are tensors
    ema.NAME                   moving averages

What wraps a model or a part of it (torch.compile, activation checkpoints) is no part of a name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.keys import recipe_key
from pipeline.training.checkpoints.tensor_file import NAMES, OTHER_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from pipeline.training.checkpoints.checkpoint_reader import LoadedCheckpoint
    from pipeline.training.checkpoints.tensor_file import TensorSpec

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")
_MOST_NAMED = 6
# How an optimizer goes about it is this attempt's choice, as its plan has it; what it computes is the checkpoint's.
_NOT_KEPT = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True)
class Packed:
    """Tensors by name, not copied, and JSON data."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


def pack(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    averages: Mapping[str, Tensor] | None = None,
    scaler: GradScaler | None = None,
) -> Packed:
    """Return everything that a training has between two steps; averages are by the parameters' names."""
    tensors = {f"model.{name}": one for name, one in model_state(model).items()}
    data: dict[str, Any] = {}
    if optimizer is not None:
        packed = optimizer_state(model, optimizer)
        tensors |= {f"optimizer.{name}": one for name, one in packed.tensors.items()}
        data["optimizer"] = packed.data
    tensors |= {f"ema.{name}": one.detach() for name, one in (averages or {}).items()}
    if scaler is not None:
        data["scaler"] = scaler.state_dict()
    return Packed(tensors, data)


def unpack(
    loaded: LoadedCheckpoint,
    data: Mapping[str, Any],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    averages: Mapping[str, Tensor] | None = None,
    scaler: GradScaler | None = None,
) -> None:
    """Restore what `pack` returned, in place; all of it must find its place, and every place something.

    Tensors that are not there yet, such as the state of an optimizer that has made no step, are made.
    """
    targets = {f"model.{name}": one for name, one in model_state(model).items()}
    targets |= {f"ema.{name}": one.detach() for name, one in (averages or {}).items()}
    if optimizer is not None:
        places = OptimizerPlaces(model, optimizer, data["optimizer"], _under("optimizer.", loaded.specs))
        targets |= {f"optimizer.{name}": one for name, one in places.targets.items()}
    _refuse_rest(loaded, targets, optimizer=optimizer is not None)
    loaded.load_into(targets)
    if optimizer is not None:
        places.fill()
    if scaler is not None and data.get("scaler"):
        scaler.load_state_dict(dict(data["scaler"]))


def plain_name(name: str) -> str:
    """Return a parameter's name without what wraps it."""
    return _WRAPPERS.sub("", name)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, not copied; tied ones under each of their names."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            what = f"the model's {name} is a {type(value).__name__}; only tensors can be saved (get_extra_state)"
            raise ConfigError(what, where="train.task", remedy="keep it in a buffer: register_buffer")
        state[plain_name(name)] = value.detach()
    return state


def model_targets(model: nn.Module, specs: Mapping[str, TensorSpec], *, averages: bool = True) -> dict[str, Tensor]:
    """Return where a model takes its tensors from: moving averages, where they are wanted and there are any."""
    state = model_state(model)
    averaged = {name for name in state if averages and f"ema.{name}" in specs}
    return {f"ema.{name}" if name in averaged else f"model.{name}": one for name, one in state.items()}


def model_key(model: nn.Module) -> str:
    """Return a digest of the names, types and shapes of a model's state: what `identity` should have."""
    shapes = {name: [NAMES.get(one.dtype, ""), *one.shape] for name, one in model_state(model).items()}
    return recipe_key("model", shapes).hex()


def by_name(model: nn.Module, parameters: Iterable[Tensor], values: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return what belongs to parameters, such as their averages, by the parameters' names."""
    names = _names(model)
    return {names[id(parameter)]: value for parameter, value in zip(parameters, values, strict=True)}


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> Packed:
    """Return an optimizer's state by parameter names, and its hyperparameters."""
    tensors: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for place, group, names in _groups(model, optimizer):
        hyper = {what: value for what, value in group.items() if what not in _NOT_KEPT}
        tensors |= {f"group.{place}.{what}": one.detach() for what, one in _tensors(hyper).items()}
        groups.append({"parameters": names, "hyper": _rest(hyper)})
        for name, parameter in zip(names, group["params"], strict=True):
            values = optimizer.state.get(parameter)
            if not values:
                continue  # it has had no gradient so far
            tensors |= {f"{name}.{what}": one.detach() for what, one in _tensors(values).items()}
            state[name] = {"tensors": list(_tensors(values)), "rest": _rest(values)}
    return Packed(tensors, {"kind": type(optimizer).__name__, "groups": groups, "state": state})


class OptimizerPlaces:
    """Where an optimizer's saved state belongs: `targets` are to be filled by name, then `fill` puts all in place."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, data: Mapping[str, Any], specs: Mapping[str, TensorSpec]
    ) -> None:
        """Find or make every tensor; change nothing yet."""
        self.optimizer, self._data = optimizer, data
        _refuse_other_optimizer(model, optimizer, data)
        self.targets: dict[str, Tensor] = {}
        self._states: list[tuple[Tensor, dict[str, Any]]] = []
        self._hyper: list[dict[str, Any]] = []
        for place, group, names in _groups(model, optimizer):
            saved = data["groups"][place]["hyper"]
            held = {
                what: one
                for what in group
                if (one := self._held(f"group.{place}.{what}", group, what, specs)) is not None
            }
            self._hyper.append({what: _as_before(group.get(what), value) for what, value in saved.items()} | held)
            for name, parameter in zip(names, group["params"], strict=True):
                self._find(name, parameter, group | saved, specs)

    def fill(self) -> None:
        """Let the optimizer have its state and its hyperparameters."""
        self.optimizer.state.clear()
        for parameter, state in self._states:
            self.optimizer.state[parameter] = state
        for group, hyper in zip(self.optimizer.param_groups, self._hyper, strict=True):
            group.update(hyper)

    def _find(self, name: str, parameter: Tensor, group: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
        saved = self._data["state"].get(name)
        if saved is None:
            return
        state = dict(saved["rest"])
        for what in saved["tensors"]:
            spec = specs[f"{name}.{what}"]
            # As torch does: the count of steps stays on the CPU, where nothing must wait for it.
            is_on_cpu = what == "step" and not (group.get("capturable") or group.get("fused"))
            there = self.optimizer.state.get(parameter, {}).get(what)
            if not isinstance(there, Tensor) or (there.dtype, tuple(there.shape)) != (spec.dtype, spec.shape):
                there = _like(parameter, spec, on_cpu=is_on_cpu)
            self.targets[f"{name}.{what}"] = state[what] = there
        self._states.append((parameter, state))

    def _held(self, name: str, group: Mapping[str, Any], what: str, specs: Mapping[str, TensorSpec]) -> Tensor | None:
        """Return where a hyperparameter that was a tensor goes."""
        if what == "params" or name not in specs:
            return None
        there, spec = group[what], specs[name]
        if not isinstance(there, Tensor) or (there.dtype, tuple(there.shape)) != (spec.dtype, spec.shape):
            there = torch.empty(spec.shape, dtype=spec.dtype)
        self.targets[name] = there
        return there


def _names(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter, by its identity; of tied ones the first."""
    return {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}


def _groups(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[int, dict[str, Any], list[str]]]:
    """Yield an optimizer's groups: their places, themselves, and the names of their parameters."""
    known = _names(model)
    for place, group in enumerate(optimizer.param_groups):
        strange = [parameter for parameter in group["params"] if id(parameter) not in known]
        if strange:
            what = f"the optimizer trains a parameter of shape {list(strange[0].shape)} that the model does not have"
            raise ConfigError(what, where="train.task", remedy="register it in the model, so that it is saved, too")
        yield place, group, [known[id(parameter)] for parameter in group["params"]]


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {what: value for what, value in values.items() if isinstance(value, Tensor)}


def _rest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is no tensor, which must be JSON data."""
    rest = {what: value for what, value in values.items() if not isinstance(value, Tensor)}
    for what, value in rest.items():
        if not _is_plain(value):
            text = f"the optimizer keeps a {type(value).__name__} as {what!r}, which no checkpoint can hold"
            raise ConfigError(text, where="train.optimizer", remedy="choose adamw, adam or sgd")
    return rest


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in (str, bool, int, float, type(None))


def _as_before(now: Any, saved: Any) -> Any:
    """Return a saved hyperparameter as the optimizer has it: JSON knows no tuples."""
    return tuple(saved) if isinstance(now, tuple) and isinstance(saved, list) else saved


def _like(parameter: Tensor, spec: TensorSpec, *, on_cpu: bool) -> Tensor:
    """Return an unfilled tensor on a parameter's device, laid out as the parameter where it has its shape."""
    if on_cpu:
        return torch.empty(spec.shape, dtype=spec.dtype)
    if tuple(parameter.shape) == spec.shape:
        return torch.empty_like(parameter, dtype=spec.dtype, requires_grad=False)
    return torch.empty(spec.shape, dtype=spec.dtype, device=parameter.device)


def _refuse_other_optimizer(model: nn.Module, optimizer: Optimizer, data: Mapping[str, Any]) -> None:
    """Raise unless a saved state is of the same kind of optimizer with the same groups of parameters."""
    kind = type(optimizer).__name__
    if data["kind"] != kind:
        what = f"the checkpoint's optimizer is {data['kind']}, this one is {kind}"
        raise ConfigError(what, where="train.optimizer", remedy=OTHER_MODEL)
    here = [names for _, _, names in _groups(model, optimizer)]
    there = [group["parameters"] for group in data["groups"]]
    if here != there:
        differing = sorted(set(chain(*here)) ^ set(chain(*there)))
        shown = f"only one of them trains {_listed(differing)}" if differing else "they are grouped otherwise"
        what = f"the checkpoint's optimizer trains other parameters: {shown}"
        raise ConfigError(what, where="train.frozen", remedy=OTHER_MODEL)


def _refuse_rest(loaded: LoadedCheckpoint, targets: Mapping[str, Tensor], *, optimizer: bool) -> None:
    """Raise where a checkpoint has tensors that nothing here takes: it is of another model, or with averages."""
    kinds = ("model.", "ema.", "optimizer.") if optimizer else ("model.",)
    left = [name for name in loaded.specs if name.startswith(kinds) and name not in targets]
    if left:
        what = f"the checkpoint has what nothing here takes: {_listed(left)}"
        raise ConfigError(what, where=str(loaded.path), remedy=OTHER_MODEL)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _under(prefix: str, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name.removeprefix(prefix): spec for name, spec in specs.items() if name.startswith(prefix)}
