"""Fake models: their tensors have shapes and no values, and take no memory."""

from __future__ import annotations

import logging
import threading
import warnings
from contextlib import contextmanager, suppress
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    _BypassDispatchCache,
    _DispatchCacheValidEntry,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

_SCOPED_LIBRARY: Any = torch.library._scoped_library  # torch gives it no types
_STATE: Any = fake_tensor._CacheKeyState(None)  # type: ignore[attr-defined]  # no size is a symbol
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


class MadeBefore(NamedTuple):
    """How the outputs of a call are made once more: torch's entry of it, and the attributes of each new tensor."""

    entry: _DispatchCacheValidEntry
    attributes: tuple[dict[str, object], ...]


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that deepcopy shares, so that copied modules keep it.

    Calls that were made before are answered from torch's own entries, by shorter keys and on a shorter way: torch's
    take most of the time of a trace.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._before: dict[tuple[object, ...], MadeBefore] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that would see to it is slow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        key = self._short_key(func, args, kwargs)
        before = self._before.get(key) if key is not None else None
        if before is not None:
            made = tuple(map(self._made_again, before.entry.output_infos, before.attributes, repeat(args)))
            return made if before.entry.is_output_tuple else made[0]
        out = self.dispatch(func, types, args, kwargs)
        if key is not None:
            self._remember(key, (func, args, kwargs), out)
        return out

    def _short_key(self, func: Any, args: Any, kwargs: Any) -> tuple[object, ...] | None:
        """Return a key that tells calls apart as torch's does; None for calls with other than plain arguments."""
        words: list[object] = [func, torch.get_default_dtype(), torch._C._get_default_device()]
        words.append(torch.is_inference_mode_enabled())
        is_plain = all(map(self._add_words, repeat(words), args))
        for name in kwargs if is_plain else ():
            words.append(name)
            is_plain = is_plain and self._add_words(words, kwargs[name])
        return tuple(words) if is_plain else None

    def _add_words(self, words: list[object], arg: Any) -> bool:
        """Add what tells an argument apart to a key; return False if it is not a plain one."""
        kind = type(arg)
        if kind is FakeTensor:
            if arg.constant is not None or arg.fake_mode is not self or arg.layout != torch.strided:
                return False
            words += (torch._C._dispatch_keys(arg).raw_repr(), arg.dtype, arg.shape, arg.stride())
            words += (arg.storage_offset(), arg.untyped_storage().nbytes(), arg.requires_grad, arg.fake_device)
            return True
        if kind is list or kind is tuple:
            words += (kind, len(arg))
            return all(map(self._add_words, repeat(words), arg))
        words += (kind, arg)
        return kind in _PLAIN

    def _remember(self, key: tuple[object, ...], call: tuple[Any, Any, Any], out: Any) -> None:
        """Keep how a call's outputs are made, if torch has kept an entry of it."""
        with suppress(_BypassDispatchCache):
            entry = FakeTensorMode.cache.get(self._cache_key(_STATE, *call))
            outputs = out if isinstance(out, tuple) else (out,)
            if isinstance(entry, _DispatchCacheValidEntry) and not any(map(_is_seen_otherwise, entry.output_infos)):
                attributes = tuple(dict(vars(made)) if type(made) is FakeTensor else {} for made in outputs)
                self._before[key] = MadeBefore(entry, attributes)

    def _made_again(self, output: Any, attributes: dict[str, object], args: Any) -> Any:
        """Return an output of a call that was made before: an argument, a value, or a new tensor."""
        if output.inplace_idx is not None:
            return args[output.inplace_idx]
        like = output.metadata
        if like is None:
            return output.constant_value
        empty = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device="meta")
        if output.view_idx is not None:
            empty.set_(args[output.view_idx].untyped_storage(), like.storage_offset, like.shape, like.stride)
        make: Any = torch.Tensor._make_subclass
        made = make(FakeTensor, empty, like.requires_grad, dispatch_device=True, device_for_backend_keys=like.device)
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(attributes)
        return made

    def __deepcopy__(self, _: object) -> FakeMode:
        return self


def _is_seen_otherwise(output: Any) -> bool:
    """Tell whether an output is a conjugate or negative view, which is more than its sizes tell."""
    return output.metadata is not None and (output.metadata.is_conj or output.metadata.is_neg)


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
