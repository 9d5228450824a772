"""Fake models: their tensors have shapes and no values, and take no memory."""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

_SCOPED_LIBRARY: Any = torch.library._scoped_library  # torch gives it no types


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that deepcopy shares, so that copied modules keep it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that would see to it is slow

    def __deepcopy__(self, _: object) -> FakeMode:
        return self


@contextmanager
def conversions() -> Iterator[None]:
    """Let `Module.to` and the like replace parameters: fake ones cannot be converted in place as real ones are."""
    apply, made = nn.Module._apply, dict[int, tuple[Tensor, Tensor]]()
    here = threading.get_ident()

    def converted(old: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        if id(old) not in made:
            with torch.no_grad():
                new = function(old)
            is_parameter = isinstance(old, nn.Parameter) and new is not old
            made[id(old)] = old, nn.Parameter(new, old.requires_grad) if is_parameter else new
        return made[id(old)][1]

    def replace(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002
        if threading.get_ident() != here:
            return apply(module, function, recurse)  # type: ignore[no-any-return, no-untyped-call]
        for part in module.modules() if recurse else (module,):
            for tensors in _registered(part):
                for name, old in tensors.items():
                    if old is not None:
                        tensors[name] = converted(old, function)
        made.clear()
        return module

    with patch.object(nn.Module, "_apply", replace):
        yield


def _registered(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled code eagerly."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings("ignore", "Using `torch.compile")  # the recorder's hooks are meant to run once more
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # as torch's own deepcopy does
        yield


def faked(model: nn.Module, mode: FakeTensorMode, see: Callable[[Tensor], object]) -> nn.Module:
    """Make the tensors of a real model fake; shared tensors stay shared."""
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            fresh = _off_meta(tensor, mode) if tensor.is_meta else mode.from_tensor(tensor, static_shapes=True)
            made[id(tensor)] = tensor, fresh
            see(fresh)
        return made[id(tensor)][1]

    for module in model.modules():
        for tensors in _registered(module):
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                object.__setattr__(module, name, fake(value))
    return model


def _off_meta(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """Return a fake tensor on the CPU for one on the meta device, where a model may have been built to save memory."""
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def unlogged() -> AbstractContextManager[Any]:
    """Keep torch from logging tracebacks of failures with fake tensors: the plan notes their reason."""
    return patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", new=True)


@contextmanager
def replaced(kernels: Mapping[str, Callable[..., Any]], key: str) -> Iterator[None]:
    """Replace kernels of `aten` operators under a dispatch key, in the whole process."""
    with _SCOPED_LIBRARY("aten", "IMPL") as library:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # of replacing a kernel
            for name, kernel in kernels.items():
                library.impl(name, kernel, key)
        yield
