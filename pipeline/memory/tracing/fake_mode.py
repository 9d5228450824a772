"""Makes models fake: their tensors have shapes and no values, and take no memory."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

    from torch import Tensor


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that deepcopy shares, so that copied modules keep it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that would see to it is slow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.dispatch(func, types, args, kwargs or {})

    def __deepcopy__(self, _: object) -> FakeMode:
        return self


@contextmanager
def conversions() -> Iterator[None]:
    """Let `Module.to` and the like replace parameters: fake ones cannot be converted in place as real ones are."""
    apply, made = nn.Module._apply, dict[int, tuple[torch.Tensor, torch.Tensor]]()
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
            for tensors in (part._parameters, part._buffers):
                for name, old in tensors.items():
                    if old is not None:
                        tensors[name] = converted(old, function)  # type: ignore[assignment]
        made.clear()
        return module

    nn.Module._apply = replace  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled code eagerly."""
    stance = getattr(torch.compiler, "set_stance", None)  # since torch 2.6
    with warnings.catch_warnings(), stance("force_eager") if stance else nullcontext():
        warnings.filterwarnings("ignore", "Using `torch.compile")  # that hooks, which we have, run once more
        yield


def faked(model: nn.Module, mode: FakeTensorMode, see: Callable[[Tensor], object]) -> nn.Module:
    """Make the tensors of a real model fake; shared tensors stay shared."""
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor, mode.from_tensor(tensor, static_shapes=True)
            see(made[id(tensor)][1])
        return made[id(tensor)][1]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fake(tensor)  # type: ignore[assignment]
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                object.__setattr__(module, name, fake(value))
    return model


@contextmanager
def unlogged() -> Iterator[None]:
    """Keep torch from logging tracebacks of what fake tensors cannot do: the plan has a note of it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


MOST = 16  # branches that are tried the other way, for one model


class Guesses(TorchFunctionMode):
    """Guesses the truth value of fake tensors, always the same at the same line of code."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: dict[tuple[str, int], bool] = {}  # by the line of code, in the order in which they were met
        self._flips = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer `bool()` of a fake tensor; pass on everything else."""
        if func is torch.Tensor.__bool__ and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return self._taken.setdefault(_line(), True)
        return func(*args, **(kwargs or {}))

    def reconsider(self) -> bool:
        """After an error, flip the last guess that was True; return False if none is left to flip."""
        taken = [line for line, answer in self._taken.items() if answer]
        if not taken or self._flips >= MOST:
            return False
        self._flips += 1
        self._taken[taken[-1]] = False
        return True

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the guesses in words."""
        return tuple(
            f"guessed that the condition at {Path(file).name}:{line} is {str(answer).lower()}: it needs data"
            for (file, line), answer in self._taken.items()
        )


def _line() -> tuple[str, int]:
    """Return the line of code that calls, outside torch and its modes."""
    frame: FrameType = sys._getframe(2)
    while frame.f_back is not None and _is_between(frame):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _is_between(frame: FrameType) -> bool:
    in_torch = str(frame.f_globals.get("__name__", "")).startswith("torch.")
    return in_torch or frame.f_code.co_name == "__torch_function__"


_LIBRARY: Any = torch.library.Library  # torch gives it no types


@contextmanager
def replaced(kernels: Mapping[str, Callable[..., Any]], key: str) -> Iterator[None]:
    """Replace kernels of `aten` operators under a dispatch key, in the whole process."""
    library = _LIBRARY("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")  # that it replaces one: meant so
            for name, kernel in kernels.items():
                library.impl(name, kernel, key)
        yield
    finally:
        library._destroy()
