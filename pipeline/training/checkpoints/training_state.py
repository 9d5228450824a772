"""A training's state between two steps as tensors by name and JSON data, and its restoration, bit for bit.

    model.NAME                 parameters and persistent buffers
    optimizer.NAME.KEY         its state of a parameter, by the parameter's name; frozen ones have none
    optimizer.group.N.KEY      hyperparameters that are tensors
    ema.NAME                   moving averages

Names leave out wrappers of a model or a part of it (torch.compile, activation checkpoints).
"""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.keys import recipe_key
from pipeline.training.checkpoints.checkpoint_reader import Packed
from pipeline.training.checkpoints.tensor_file import NAMES, OTHER_MODEL
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from pipeline.training.checkpoints.checkpoint_reader import LoadedCheckpoint
    from pipeline.training.checkpoints.tensor_file import TensorSpec

_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")
_MOST_NAMED = 6
# How an optimizer runs is this attempt's choice, by its plan; all other hyperparameters are the checkpoint's.
_NOT_KEPT = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


def pack(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    averages: Mapping[str, Tensor] | None = None,
    scaler: GradScaler | None = None,
) -> Packed:
    """Return the whole state of a training between two steps; averages are by the parameters' names."""
    tensors = {f"model.{name}": tensor for name, tensor in model_state(model).items()}
    data: dict[str, Any] = {}
    if optimizer is not None:
        packed = optimizer_state(model, optimizer)
        tensors |= {f"optimizer.{name}": tensor for name, tensor in packed.tensors.items()}
        data["optimizer"] = packed.data
    tensors |= {f"ema.{name}": average.detach() for name, average in (averages or {}).items()}
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
    """Restore what `pack` returned, in place; saved tensors and targets must match one to one.

    Tensors that do not exist yet, such as the state of an optimizer that has made no step, are created.
    """
    targets = {f"model.{name}": tensor for name, tensor in model_state(model).items()}
    targets |= {f"ema.{name}": average.detach() for name, average in (averages or {}).items()}
    if optimizer is not None:
        places = OptimizerPlaces(model, optimizer, data["optimizer"], _under("optimizer.", loaded.specs))
        targets |= {f"optimizer.{name}": tensor for name, tensor in places.targets.items()}
    _refuse_rest(loaded, targets, optimizer=optimizer is not None)
    loaded.load_into(targets)
    if optimizer is not None:
        places.fill()
    if scaler is not None and data.get("scaler"):
        scaler.load_state_dict(dict(data["scaler"]))


def plain_name(name: str) -> str:
    """Return a parameter's name without wrappers."""
    return _WRAPPERS.sub("", name)


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, not copied; tied ones under each of their names."""
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            problem = f"the model's {name} is a {type(value).__name__}; only tensors can be saved (get_extra_state)"
            raise ConfigError(problem, where="train.task", remedy="keep it in a buffer: register_buffer")
        state[plain_name(name)] = value.detach()
    return state


def model_targets(model: nn.Module, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Return a model's tensors by the checkpoint's names for them: of moving averages where it has them."""
    state = model_state(model)
    averaged = {name for name in state if f"ema.{name}" in specs}
    return {f"ema.{name}" if name in averaged else f"model.{name}": tensor for name, tensor in state.items()}


def model_key(model: nn.Module) -> str:
    """Return a digest of the names, dtypes and shapes of a model's state, for a checkpoint's `identity`."""
    shapes = {name: [NAMES.get(str(tensor.dtype), ""), *tensor.shape] for name, tensor in model_state(model).items()}
    return recipe_key("model", shapes).hex()


def by_name(model: nn.Module, parameters: Iterable[Tensor], values: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return one value per parameter, such as its average, by the parameter's name."""
    names = _names(model)
    return {names[id(parameter)]: value for parameter, value in zip(parameters, values, strict=True)}


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> Packed:
    """Return an optimizer's state by parameter names, and its hyperparameters."""
    tensors: dict[str, Tensor] = {}
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for place, group, names in _groups(model, optimizer):
        hyper = {key: value for key, value in group.items() if key not in _NOT_KEPT}
        tensors |= {f"group.{place}.{key}": value.detach() for key, value in _tensors(hyper).items()}
        groups.append({"parameters": names, "hyper": _rest(hyper)})
        for name, parameter in zip(names, group["params"], strict=True):
            values = optimizer.state.get(parameter)
            if not values:
                continue  # it has had no gradient so far
            tensors |= {f"{name}.{key}": value.detach() for key, value in _tensors(values).items()}
            state[name] = {"tensors": list(_tensors(values)), "rest": _rest(values)}
    return Packed(tensors, {"kind": type(optimizer).__name__, "groups": groups, "state": state})


class OptimizerPlaces:
    """Restores an optimizer: the caller fills `targets` by name, then `fill` puts them into the optimizer."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, data: Mapping[str, Any], specs: Mapping[str, TensorSpec]
    ) -> None:
        """Find or create every target tensor, without changing the optimizer."""
        self.optimizer, self._data = optimizer, data
        _refuse_other_optimizer(model, optimizer, data)
        self.targets: dict[str, Tensor] = {}
        self._states: list[tuple[Tensor, dict[str, Any]]] = []
        self._hyper: list[dict[str, Any]] = []
        for place, group, names in _groups(model, optimizer):
            saved = data["groups"][place]["hyper"]
            hyper = {key: _as_before(group.get(key), value) for key, value in saved.items()}
            for key in group:
                target = self._held(f"group.{place}.{key}", group, key, specs)
                hyper |= {} if target is None else {key: target}
            self._hyper.append(hyper)
            for name, parameter in zip(names, group["params"], strict=True):
                self._find(name, parameter, group | saved, specs)

    def fill(self) -> None:
        """Put the restored state and hyperparameters into the optimizer."""
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
        for key in saved["tensors"]:
            spec = specs[f"{name}.{key}"]
            # As torch does: the count of steps stays on the CPU, where nothing must wait for it.
            is_on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
            target = self.optimizer.state.get(parameter, {}).get(key)
            if not _fits(target, spec):
                target = _like(parameter, spec, on_cpu=is_on_cpu)
            self.targets[f"{name}.{key}"] = state[key] = target
        self._states.append((parameter, state))

    def _held(self, name: str, group: Mapping[str, Any], key: str, specs: Mapping[str, TensorSpec]) -> Tensor | None:
        """Return the target of a hyperparameter that was saved as a tensor, else None."""
        if key == "params" or name not in specs:
            return None
        spec = specs[name]
        target: Tensor = group[key] if _fits(group[key], spec) else torch.empty(spec.shape, dtype=spec.dtype)
        self.targets[name] = target
        return target


def _fits(value: Any, spec: TensorSpec) -> bool:
    return isinstance(value, Tensor) and (value.dtype, tuple(value.shape)) == (spec.dtype, spec.shape)


def _names(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter by its id(); of tied ones the first."""
    return {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}


def _groups(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[int, dict[str, Any], list[str]]]:
    """Yield each of an optimizer's groups: its number, itself, and the names of its parameters."""
    known = _names(model)
    for place, group in enumerate(optimizer.param_groups):
        strange = [parameter for parameter in group["params"] if id(parameter) not in known]
        if strange:
            shape = list(strange[0].shape)
            problem = f"the optimizer trains a parameter of shape {shape} that is not in the model"
            raise ConfigError(
                problem, where="train.task", remedy="register it in the model so that checkpoints include it"
            )
        yield place, group, [known[id(parameter)] for parameter in group["params"]]


def _tensors(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in values.items() if isinstance(value, Tensor)}


def _rest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not tensors; raise unless they are JSON data."""
    rest = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
    for key, value in rest.items():
        if not _is_plain(value):
            problem = f"the optimizer keeps a {type(value).__name__} as {key!r}, which checkpoints cannot store"
            raise ConfigError(problem, where="train.optimizer", remedy="choose adamw, adam or sgd")
    return rest


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return type(value) in (str, bool, int, float, type(None))


def _as_before(now: Any, saved: Any) -> Any:
    """Return a saved hyperparameter as the optimizer has it: JSON has no tuples."""
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
        problem = f"the checkpoint's optimizer is {data['kind']}, this one is {kind}"
        raise ConfigError(problem, where="train.optimizer", remedy=OTHER_MODEL)
    here = [names for _, _, names in _groups(model, optimizer)]
    there = [group["parameters"] for group in data["groups"]]
    if here != there:
        differing = sorted(set(chain(*here)) ^ set(chain(*there)))
        trained = first_few(differing, _MOST_NAMED)
        shown = f"only one of them trains {trained}" if trained else "their parameter groups differ"
        problem = f"the checkpoint's optimizer trains different parameters: {shown}"
        raise ConfigError(problem, where="train.frozen", remedy=OTHER_MODEL)


def _refuse_rest(loaded: LoadedCheckpoint, targets: Mapping[str, Tensor], *, optimizer: bool) -> None:
    """Raise where a checkpoint has tensors without a target: it is of another model, or with averages."""
    kinds = ("model.", "ema.", "optimizer.") if optimizer else ("model.",)
    left = [name for name in loaded.specs if name.startswith(kinds) and name not in targets]
    if left:
        problem = f"the checkpoint has unused entries: {first_few(left, _MOST_NAMED)}"
        raise ConfigError(problem, where=str(loaded.path), remedy=OTHER_MODEL)


def _under(prefix: str, specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {name.removeprefix(prefix): spec for name, spec in specs.items() if name.startswith(prefix)}
