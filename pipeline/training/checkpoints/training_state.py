"""A training's state between two steps as tensors by name and JSON data, and its restoration, bit for bit.

    model.NAME                 parameters and persistent buffers
    optimizer.NAME.KEY         its state of a parameter, by the parameter's name; without a gradient so far, none
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
from pipeline.training.checkpoints.checkpoint import State
from pipeline.training.checkpoints.sealed_folder import DTYPE_NAMES, OTHER_MODEL
from pipeline.units import first_few

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from pipeline.training.checkpoints.checkpoint import Checkpoint, StoredTensor

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
) -> State:
    """Return the whole state of a training between two steps; averages are by the parameters' names."""
    tensors = {f"model.{name}": tensor for name, tensor in model_state(model).items()}
    tensors |= {f"ema.{name}": average.detach() for name, average in (averages or {}).items()}
    data: dict[str, Any] = {}
    if optimizer is not None:
        trained, others = trained_names(model, optimizer), dict[str, Any]()
        for name, (parameter, _) in _parameters(trained, optimizer).items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"optimizer.{name}.{key}"] = value.detach()
                else:
                    others[f"optimizer.{name}.{key}"] = value
        groups = [
            {key: _number(value) for key, value in group.items() if key not in _NOT_KEPT}
            for group in optimizer.param_groups
        ]
        data["optimizer"] = {"kind": type(optimizer).__name__, "trained": trained, "groups": groups, "others": others}
    if scaler is not None:
        data["scaler"] = scaler.state_dict()
    return State(tensors, data)


def unpack(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    averages: Mapping[str, Tensor] | None = None,
    scaler: GradScaler | None = None,
) -> None:
    """Restore what `pack` returned, in place; saved tensors and targets must match one to one.

    State that the optimizer does not have yet is created. Nothing is changed where anything is refused.
    """
    targets = {f"model.{name}": tensor for name, tensor in model_state(model).items()}
    targets |= {f"ema.{name}": average.detach() for name, average in (averages or {}).items()}
    kinds: tuple[str, ...] = ("model.", "ema.")
    state: dict[str, dict[str, Any]] = {}
    if optimizer is not None:
        kinds += ("optimizer.",)
        _refuse_other_optimizer(trained_names(model, optimizer), optimizer, checkpoint.data["optimizer"])
        state = _optimizer_state(checkpoint, optimizer)
        of_optimizer = ((f"optimizer.{name}.{key}", state[name][key]) for name in state for key in state[name])
        targets |= {name: value for name, value in of_optimizer if isinstance(value, Tensor)}
    if left := [name for name in checkpoint.tensors if name.startswith(kinds) and name not in targets]:
        problem = f"the checkpoint has unused entries: {first_few(left, _MOST_NAMED)}"
        raise ConfigError(problem, where=str(checkpoint.path), remedy=OTHER_MODEL)
    checkpoint.load_into(targets)
    if optimizer is not None:
        saved = checkpoint.data["optimizer"]
        parameters = _parameters(saved["trained"], optimizer)
        optimizer.state.clear()
        optimizer.state.update({parameters[name][0]: values for name, values in state.items()})
        for group, hyper in zip(optimizer.param_groups, saved["groups"], strict=True):
            group |= {key: _as_before(group.get(key), value) for key, value in hyper.items()}
    if scaler is not None and checkpoint.data.get("scaler"):
        scaler.load_state_dict(dict(checkpoint.data["scaler"]))


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


def model_targets(model: nn.Module, stored: Iterable[str]) -> dict[str, Tensor]:
    """Return a model's tensors by a checkpoint's names for them: of moving averages where it has them."""
    stored = set(stored)
    prefixes = ("model.", "ema.")
    return {f"{prefixes[f'ema.{name}' in stored]}{name}": tensor for name, tensor in model_state(model).items()}


def model_key(model: nn.Module) -> str:
    """Return a digest of the names, dtypes and shapes of a model's state, for a checkpoint's `identity`."""
    state = model_state(model).items()
    shapes = {name: [DTYPE_NAMES.get(str(tensor.dtype), ""), *tensor.shape] for name, tensor in state}
    return recipe_key("model", shapes).hex()


def by_name(model: nn.Module, parameters: Iterable[Tensor], values: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return one value per parameter, such as its average, by the parameter's name."""
    names = _names(model)
    return {names[id(parameter)]: value for parameter, value in zip(parameters, values, strict=True)}


def trained_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each of an optimizer's groups."""
    names = _names(model)
    for parameter in chain(*(group["params"] for group in optimizer.param_groups)):
        if id(parameter) not in names:
            problem = f"the optimizer trains a parameter of shape {list(parameter.shape)} that is not in the model"
            remedy = "register it in the model so that checkpoints include it"
            raise ConfigError(problem, where="train.task", remedy=remedy)
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _names(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter by its id(); of tied ones the first."""
    return {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}


def _parameters(trained: list[list[str]], optimizer: Optimizer) -> dict[str, tuple[Tensor, Mapping[str, Any]]]:
    """Return each trained parameter and its group by the parameter's name."""
    pairs = ((parameter, group) for group in optimizer.param_groups for parameter in group["params"])
    return dict(zip(chain(*trained), pairs, strict=True))


def _optimizer_state(checkpoint: Checkpoint, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return a saved state by parameter name, its tensors still to be filled: the optimizer's own where they fit."""
    saved, state = checkpoint.data["optimizer"], dict[str, dict[str, Any]]()
    parameters = _parameters(saved["trained"], optimizer)
    for name, value in {**checkpoint.tensors, **saved["others"]}.items():
        owner, _, key = name.removeprefix("optimizer.").rpartition(".")
        if name.startswith("optimizer.") and owner in parameters:
            parameter, group = parameters[owner]
            if name in checkpoint.tensors:
                now = optimizer.state.get(parameter, {}).get(key)
                # As torch does: steps are counted on the CPU, where nothing must wait for it
                on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
                value = now if value.like(now) else _like(parameter, value, on_cpu=on_cpu)
            state.setdefault(owner, {})[key] = value
    return state


def _number(value: Any) -> Any:
    """Return a hyperparameter as JSON data: a rate may be a tensor."""
    return value.item() if isinstance(value, Tensor) else value


def _as_before(now: Any, saved: Any) -> Any:
    """Return a saved hyperparameter as the optimizer has it: JSON has neither tensors nor tuples."""
    if isinstance(now, Tensor):
        return now.fill_(saved)
    return tuple(saved) if isinstance(saved, list) else saved


def _like(parameter: Tensor, stored: StoredTensor, *, on_cpu: bool) -> Tensor:
    """Return an unfilled tensor on a parameter's device, laid out as the parameter where it has its shape."""
    if not on_cpu and tuple(parameter.shape) == stored.shape:
        return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
    return torch.empty(stored.shape, dtype=stored.dtype, device="cpu" if on_cpu else parameter.device)


def _refuse_other_optimizer(here: list[list[str]], optimizer: Optimizer, data: Mapping[str, Any]) -> None:
    """Raise unless a saved state is of the same kind of optimizer with the same groups of parameters."""
    kind, there = type(optimizer).__name__, data["trained"]
    if data["kind"] != kind:
        problem = f"the checkpoint's optimizer is {data['kind']}, this one is {kind}"
        raise ConfigError(problem, where="train.optimizer", remedy=OTHER_MODEL)
    if here != there:
        differing = sorted(set(chain(*here)) ^ set(chain(*there)))
        trained = first_few(differing, _MOST_NAMED)
        shown = f"only one of them trains {trained}" if trained else "their parameter groups differ"
        problem = f"the checkpoint's optimizer trains different parameters: {shown}"
        raise ConfigError(problem, where="train.frozen", remedy=OTHER_MODEL)
