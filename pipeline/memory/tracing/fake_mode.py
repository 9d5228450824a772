"""Fake models: their tensors have shapes and no values, and take no memory.

Branches that depend on values are guessed; where a trace needs a value, the reason names the user's line.
"""

from __future__ import annotations

import linecache
import logging
import random
import sys
import threading
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    _BypassDispatchCache,
    _DispatchCacheValidEntry,
)
from torch.overrides import TorchFunctionMode

from pipeline.device.accelerator import RngState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from types import CodeType, FrameType

_SCOPED_LIBRARY: Any = torch.library._scoped_library  # torch gives it no types
_STATE: Any = fake_tensor._CacheKeyState(None)  # type: ignore[attr-defined]  # no size is a symbol
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


class MadeBefore(NamedTuple):
    """How the outputs of a call are made once more: torch's entry of it, and the attributes of each new tensor."""

    entry: _DispatchCacheValidEntry
    attributes: tuple[dict[str, object], ...]


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode that deepcopy shares, so that copied modules keep it.

    Repeated calls are answered from torch's own cache entries by shorter keys, because torch's look-up takes most of
    the time of a trace.
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
        """Remember how a call's outputs are made, if torch's cache has an entry of it."""
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


# ---- guesses ----

MOST_FLIPS = 16  # branches of a model that are tried the other way
FAILS, LESS = "ends in an error", "takes no more"  # the other way of a branch
# Pairs of seeds, of Python and of NumPy. A model whose path depends on random numbers keeps the dearest pair. The last
# six were chosen among 150,000 so that their first 6, 16 and 48 numbers are all high, and all low.
SEEDS = (
    *((0, 0), (1, 1)),
    *((139169, 9927), (112983, 88644), (137601, 11638), (146363, 123713), (52228, 1453), (114668, 114240)),
)
MOST_ANSWERS = 2048  # at one line in one run; a loop that asks more often ends only when values say so


class EndlessGuess(Exception):
    """A loop's number of repetitions depends on values."""


class CodeLine(NamedTuple):
    """A line of code that asks for a value."""

    file: str
    line: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        return f"{Path(self.file).name}:{self.line}" + (f" `{code}`" if code else "")


class Guesses(TorchFunctionMode):
    """Guesses the truth value of fake tensors, always the same at the same line of code."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: dict[CodeLine, bool] = {}  # in the order of their first questions
        self._before: dict[CodeLine, bool] | None = None  # while another way is tried
        self._found: dict[CodeLine, str] = {}  # how the other answer ended
        self._asked: Counter[CodeLine] = Counter()
        self._flips = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer `bool()` of a fake tensor; pass on everything else."""
        if func is torch.Tensor.__bool__ and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return self._answer(_asking_line())
        return func(*args, **(kwargs or {}))

    def _answer(self, line: CodeLine) -> bool:
        self._asked[line] += 1
        if self._asked[line] > MOST_ANSWERS:
            raise EndlessGuess(f"{line}: the number of repetitions depends on values")
        return self._taken.setdefault(line, True)

    def begin(self) -> None:
        """Note that a run begins."""
        self._asked.clear()

    def reconsider(self) -> bool:
        """After an error, flip the last guess that was True; return False if none is left to flip."""
        taken = [line for line, answer in self._taken.items() if answer and line not in (self._before or ())]
        if not taken or self._flips >= MOST_FLIPS:
            return False
        self._flips += 1
        self._taken[taken[-1]] = False
        self._found[taken[-1]] = FAILS
        return True

    def open_lines(self, *, again: bool) -> list[CodeLine]:
        """Return the lines of the last run whose other answer is still to be tried; with `again`, tried ones too."""
        found = {None, *([LESS] if again else [])}
        return [line for line in self._asked if self._found.get(line) in found][:MOST_FLIPS]

    def flip(self, line: CodeLine) -> None:
        """Give the other answer at a line, until `decide`."""
        self._before = dict(self._taken)
        self._taken[line] = not self._taken[line]

    def decide(self, line: CodeLine, found: str, *, keep: bool) -> None:
        """Keep the other answer at a line, or go back, and note how the answer that is not kept ended."""
        assert self._before is not None
        self._taken, self._before = self._taken if keep else self._before, None
        self._found[line] = found

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the guesses of the last run in words."""
        return tuple(
            f"guessed that the condition at {line} is {str(self._taken[line]).lower()}: it needs data, "
            f"and the other way {self._found.get(line, 'was not tried')}"
            for line in self._asked
        )


class Draws:
    """Python's and NumPy's random numbers in a run: always those of one seed, and whether the model drew any."""

    def __init__(self) -> None:
        self.seed, self.any = 0, False  # index of SEEDS
        self._begun = RngState.capture_without_torch()

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Draw from the seed, and restore the generators afterwards."""
        before = RngState.capture_without_torch()
        self.begin()
        try:
            yield
        finally:
            self.any = self.any or RngState.capture_without_torch() != self._begun
            before.restore()

    def begin(self) -> None:
        """Start from the seed; numbers drawn for the batch do not count."""
        of_python, of_numpy = SEEDS[self.seed]
        random.seed(of_python)
        np.random.seed(of_numpy)  # noqa: NPY002 - models draw from it
        self._begun = RngState.capture_without_torch()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return a note if the model draws numbers itself."""
        note = f"assumed the most expensive of {len(SEEDS)} seeds: it depends on random numbers from outside torch"
        return (note,) if self.any else ()


def _asking_line() -> CodeLine:
    """Return the line of code that asks for a value, outside torch and its modes."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back is not None and _is_between(frame):
        frame = frame.f_back
    return CodeLine(frame.f_code.co_filename, frame.f_lineno)


def _is_between(frame: FrameType) -> bool:
    in_torch = str(frame.f_globals.get("__name__", "")).startswith("torch.")
    return in_torch or frame.f_code.co_name == "__torch_function__"


def failure_reason(error: BaseException) -> str:
    """Return why a trace ended, at the user's own line where there is one."""
    problem = str(error).strip().split("\n")[0] or type(error).__name__
    if isinstance(error, EndlessGuess):
        return problem
    if isinstance(error, DynamicOutputShapeException):
        remedy = "keep the shape: multiply by the mask, torch.where, ignore_index"
        problem = f"its shape depends on values ({problem}); {remedy}"
    elif isinstance(error, DataDependentOutputException):
        remedy = "keep it a tensor, without item() or tolist()"
        problem = f"it needs a value, which a trace does not have ({problem}); {remedy}"
    where = users_expression(error)
    return f"{where}: {problem}" if where else problem


def users_expression(error: BaseException) -> str:
    """Return the innermost place of an error in the user's own code, with its expression; empty: none."""
    frames = zip(traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__), strict=True)
    theirs = [summary for (frame, _), summary in frames if _is_users(frame.f_code, frame.f_globals)]
    own = [summary for summary in theirs if "site-packages" not in summary.filename] or theirs
    if not own:
        return ""
    return str(CodeLine(own[-1].filename, own[-1].lineno or 0))


def _is_users(code: CodeType, names: dict[str, Any]) -> bool:
    package = f"{names.get('__name__', '')}."
    ours = package.startswith("pipeline.") and not package.startswith("pipeline.tasks.")
    return not (ours or package.startswith("torch.") or code.co_filename.startswith("<"))
