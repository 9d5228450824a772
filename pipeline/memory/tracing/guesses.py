"""Fake tensors lack values: branches on them are guessed, and what cannot go on without them is told by its line."""

from __future__ import annotations

import linecache
import random
import sys
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType, FrameType

MOST_FLIPS = 16  # branches that are tried the other way, for one model
FAILS, LESS = "ends in an error", "takes no more"  # the other way of a branch
# Of Python and of NumPy, of which a model that draws its way keeps one pair. After two of any kind those follow whose
# first 6, 16 and 48 numbers are all high, and all low: of 150,000 seeds the ones with the highest least, and so on.
SEEDS = (
    *((0, 0), (1, 1)),
    *((139169, 9927), (112983, 88644), (137601, 11638), (146363, 123713), (52228, 1453), (114668, 114240)),
)
MOST_ANSWERS = 2048  # at one line in one run: what asks more often is a loop that ends when values say so


class EndlessGuess(Exception):
    """A loop goes on for as long as values say so, which are guessed."""


class CodeLine(NamedTuple):
    """A line of code at which values were asked for."""

    file: str
    line: int

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        return f"{Path(self.file).name}:{self.line}" + (f" `{code}`" if code else "")


class Guesses(TorchFunctionMode):
    """Guesses the truth value of fake tensors, always the same at the same line of code."""

    def __init__(self) -> None:
        super().__init__()
        self._taken: dict[CodeLine, bool] = {}  # in the order in which they were met
        self._before: dict[CodeLine, bool] | None = None  # while others are tried
        self._found: dict[CodeLine, str] = {}  # what became of the other answer
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
        """Return the lines of the last run whose other answer is to be tried, those that were tried before `again`."""
        found = {None, *([LESS] if again else [])}
        return [line for line in self._asked if self._found.get(line) in found][:MOST_FLIPS]

    def other_way(self, line: CodeLine) -> None:
        """Answer otherwise at a line, until that is kept or not."""
        self._before = dict(self._taken)
        self._taken[line] = not self._taken[line]

    def decide(self, line: CodeLine, found: str, *, keep: bool) -> None:
        """Keep the other answer at a line, or go back to the one before, and note what became of the one not kept."""
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
    """Python's and NumPy's random numbers in a run: always the same, and whether there were any."""

    def __init__(self) -> None:
        self.seed, self.any = 0, False  # which of the seeds
        self._begun = self._state()

    @contextmanager
    def seeded(self) -> Iterator[None]:
        """Draw from the seed within, and leave others' numbers alone."""
        before = random.getstate(), np.random.get_state()  # noqa: NPY002 - models draw from it
        self.begin()
        try:
            yield
        finally:
            self.any = self.any or self._state() != self._begun
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002

    def begin(self) -> None:
        """Begin with the seed: what was drawn for a batch does not count."""
        of_python, of_numpy = SEEDS[self.seed]
        random.seed(of_python)
        np.random.seed(of_numpy)  # noqa: NPY002
        self._begun = self._state()

    @staticmethod
    def _state() -> tuple[object, ...]:
        name, keys, *others = np.random.get_state(legacy=True)  # noqa: NPY002
        return random.getstate(), name, np.asarray(keys).tobytes(), *others

    @property
    def notes(self) -> tuple[str, ...]:
        """Return in words that the model draws numbers itself."""
        told = f"assumed the most expensive of {len(SEEDS)} seeds"
        return (f"{told}: it depends on random numbers from outside torch",) if self.any else ()


def _asking_line() -> CodeLine:
    """Return the line of code that asks for a value, outside torch and its modes."""
    frame: FrameType = sys._getframe(3)
    while frame.f_back is not None and _is_between(frame):
        frame = frame.f_back
    return CodeLine(frame.f_code.co_filename, frame.f_lineno)


def _is_between(frame: FrameType) -> bool:
    in_torch = str(frame.f_globals.get("__name__", "")).startswith("torch.")
    return in_torch or frame.f_code.co_name == "__torch_function__"


def told_cause(error: BaseException) -> str:
    """Return why a trace ended, at the user's own line where there is one."""
    what = str(error).strip().split("\n")[0] or type(error).__name__
    if isinstance(error, EndlessGuess):
        return what
    if isinstance(error, DynamicOutputShapeException):
        what = f"its shape depends on values ({what}); keep the shape: multiply by the mask, torch.where, ignore_index"
    elif isinstance(error, DataDependentOutputException):
        what = f"it needs a value, which a trace does not have ({what}); keep it a tensor, without item() or tolist()"
    where = users_expression(error)
    return f"{where}: {what}" if where else what


def users_expression(error: BaseException) -> str:
    """Return the innermost place of an error in the user's own code, and what stands there; empty: nowhere."""
    frames = zip(traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__), strict=True)
    theirs = [summary for (frame, _), summary in frames if _is_users(frame.f_code, frame.f_globals)]
    own = [summary for summary in theirs if "site-packages" not in summary.filename] or theirs
    if not own:
        return ""
    place = own[-1]
    code = place.line or ""
    if place.lineno is not None and place.colno is not None and place.lineno == place.end_lineno:
        whole = linecache.getline(place.filename, place.lineno).encode()
        code = whole[place.colno : place.end_colno].decode(errors="replace").strip() or code
    return f"{Path(place.filename).name}:{place.lineno}" + (f" `{code}`" if code else "")


def _is_users(code: CodeType, names: dict[str, Any]) -> bool:
    package = f"{names.get('__name__', '')}."
    ours = package.startswith("pipeline.") and not package.startswith("pipeline.tasks.")
    return not (ours or package.startswith("torch.") or code.co_filename.startswith("<"))
