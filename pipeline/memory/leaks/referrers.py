"""Names the holder that keeps objects alive, as in the code: "list `history` of mylab.docking.Model".

Best effort within a time limit. The search goes from the objects through their referrers to the container that has most
of them, and from there to a name.

A tuple that another thread is building is known to the garbage collector. One more reference to it would end that
thread with a SystemError. So tuples are filtered out within a single call that runs no Python code, during which no
other thread can continue. Also, the type of an object is asked, not `isinstance`, which runs code of the object.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
import time
from collections import deque
from importlib.util import find_spec
from itertools import chain, filterfalse, groupby, starmap
from operator import itemgetter, methodcaller
from pathlib import Path
from types import CellType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CONTAINERS: tuple[type, ...] = (list, dict, set, deque)
SAMPLE = 8  # of the objects that grow
_DEPTH, _WIDTH = 6, 24  # of the search
_NESTED = 2  # tuples in tuples that are looked through


def _folder(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None
    return f"{Path(str(spec.origin)).parent}{os.sep}"


_LIBRARIES = ("<", *map(_folder, ("torch", "numpy", "pipeline.memory", "pipeline.training")))
_STANDARD = f"{Path(os.__file__).parent}{os.sep}"


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Tell whether a file is the user's: not of torch, numpy, Python, or this package's memory and training."""
    if file.startswith(_LIBRARIES):
        return False
    return not file.startswith(_STANDARD) or "-packages" in file  # site-packages or dist-packages


@functools.lru_cache(maxsize=4096)
def code_line(file: str, line: int, function: str = "") -> str:
    """Return a line of code as text, its file relative to the working directory."""
    return f"{file.removeprefix(f'{Path.cwd()}{os.sep}')}:{line}" + (f" in {function}" if function else "")


_IS_OF_TUPLES = methodcaller("__contains__", tuple)  # of a pair: a type, and objects of it
_OBJECTS = itemgetter(1)


def _without_tuples(lists: Iterable[list[Any]]) -> Iterator[Any]:
    """Yield the objects in some lists that are not tuples; only for `_taken`."""
    pairs = groupby(chain(chain.from_iterable(lists), ((),)), type)  # which keeps a reference to the last object
    return chain.from_iterable(map(_OBJECTS, filterfalse(_IS_OF_TUPLES, pairs)))


def _tuples(lists: Iterable[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the tuples in some lists; only for callers that run no Python code."""
    pairs = groupby(chain(chain.from_iterable(lists), (None,)), type)
    return chain.from_iterable(map(_OBJECTS, filter(_IS_OF_TUPLES, pairs)))


def _taken(objects: Iterator[Any]) -> list[Any]:
    """Return all objects, taken in one call; no garbage collection runs code meanwhile."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        return list(objects)
    finally:
        if was_collecting:
            gc.enable()


def tracked_objects() -> list[Any]:
    """Return all objects that the garbage collector tracks, except tuples."""
    taken = _taken(_without_tuples(starmap(gc.get_objects, [()])))
    objects = [thing for thing in taken if thing is not taken]
    taken.clear()  # it contained itself
    return objects


def all_containers() -> list[Any]:
    """Return all lists, sets, deques and dictionaries, also those that the garbage collector does not track."""
    objects = tracked_objects()
    containers = [thing for thing in objects if type(thing) in CONTAINERS]
    # A dictionary of numbers or arrays is not tracked: only its owner refers to it.
    referents = gc.get_referents(*objects)
    referents += _taken(_without_tuples(map(gc.get_referents, _tuples(starmap(gc.get_objects, [()])))))
    untracked = {id(thing): thing for thing in referents if type(thing) is dict and not gc.is_tracked(thing)}
    return [*containers, *untracked.values()]


class ReferrerSearch:
    """A search through all objects, limited in processor time."""

    def __init__(self, time_s: float = 1.0) -> None:
        self._end = time.thread_time() + time_s
        self._own: set[int] = {id(self.__dict__)}  # containers of the search itself

    @property
    def is_over(self) -> bool:
        """Whether the time has passed, so that the search may have missed something."""
        return time.thread_time() > self._end

    def ignore(self, *containers: object) -> None:
        """Ignore these containers of the caller."""
        self._own.update(map(id, containers))

    def container_of(self, objects: Sequence[object]) -> Any:
        """Return the container that has most of some objects, directly or through others; None if not found."""
        level = list(objects[:SAMPLE])
        wanted = max(2, (len(level) + 1) // 2)
        seen = set(map(id, level))
        for _ in range(_DEPTH):
            if not level or self.is_over:
                return None
            holders, among = self._referrers(level)
            counts = [
                len(among.intersection(map(id, gc.get_referents(holder)))) if type(holder) in CONTAINERS else 0
                for holder in holders
            ]
            if counts and max(counts) >= wanted:
                return holders[counts.index(max(counts))]
            level = [holder for holder in holders if id(holder) not in seen][:_WIDTH]
            seen.update(map(id, level))
            self.ignore(holders, level)
        return None

    def name_of(self, thing: object) -> str:
        """Return the name in the code that leads to an object; empty if not found."""
        level: list[tuple[object, str]] = [(thing, type(thing).__name__)]
        seen = {id(thing)}
        for _ in range(_DEPTH):
            following: list[tuple[object, str]] = []
            self.ignore(level, following, *level)
            for held, text in level:
                if self.is_over:
                    return ""
                holders, among = self._referrers([held])
                if name := self._best_name(holders, among) or _local_name(among):
                    return f"{text} {name}"
                fresh = [holder for holder in holders if id(holder) not in seen]
                seen.update(map(id, fresh))
                for holder in fresh[: _WIDTH - len(following)]:
                    entry = holder, f"{text} in a {type(holder).__name__}" if type(holder) in CONTAINERS else text
                    self.ignore(entry)
                    following.append(entry)
                self.ignore(holders, fresh)
            level = following
        return ""

    def _referrers(self, objects: list[Any]) -> tuple[list[Any], set[int]]:
        """Return the referrers of some objects, also through tuples, and the ids of the objects and the tuples."""
        once = [tuple(objects)]
        self.ignore(objects, once)
        holders, among = _taken(_without_tuples(_referrer_lists(once, 0))), set(map(id, objects))
        for nested in range(_NESTED):
            tuples = _taken(map(id, _tuples(_referrer_lists(once, nested))))
            among.update(tuples)
            if len(tuples) < 2 or self.is_over:  # one is that of the call itself
                break
            holders += _taken(_without_tuples(_referrer_lists(once, nested + 1)))
        holders = list({id(holder): holder for holder in holders if id(holder) not in self._own}.values())
        holders = [holder for holder in holders if type(holder) is not FrameType or is_users(holder.f_code.co_filename)]
        self.ignore(holders)
        return holders, among

    def _best_name(self, holders: list[Any], among: set[int]) -> str:
        names = []  # a generator would be one more referrer of the object
        for holder in holders:
            if name := self._named(holder, among):
                names.append(name)  # noqa: PERF401
        return min(names)[1] if names else ""

    def _named(self, holder: Any, among: set[int]) -> tuple[int, str] | None:
        """Return the name under which a holder has an object, with a rank: lower ones are better names."""
        if type(holder) is dict:
            name = holder.get("__name__")
            if type(name) is str and name in sys.modules and vars(sys.modules[name]) is holder:
                return _attribute(0, holder, among, f"of module {name}")
            owners = [owner for owner in self._referrers([holder])[0] if _variables(owner) is holder]
            return _attribute(1, holder, among, f"of {_type_name(type(owners[0]))}") if owners else None
        if type(holder) is CellType:
            return next(self._closure_names(holder), None)
        if issubclass(type(holder), type):
            return _attribute(1, vars(holder), among, f"of class {_type_name(holder)}")
        return _attribute(1, _variables(holder), among, f"of {_type_name(type(holder))}")

    def _closure_names(self, cell: CellType) -> Iterator[tuple[int, str]]:
        for function in self._referrers([cell])[0]:
            cells = list(map(id, (type(function) is FunctionType and function.__closure__) or ()))
            if id(cell) in cells:
                name = function.__code__.co_freevars[cells.index(id(cell))]
                yield 2, f"`{name}` in a closure of {function.__module__}.{function.__qualname__}"


def _referrer_lists(once: list[tuple[Any, ...]], nested: int) -> Iterator[list[Any]]:
    """Yield the referrers of the objects in the only tuple of a list, or of tuples that have them so deep."""
    lists = starmap(gc.get_referrers, once)
    for _ in range(nested):
        lists = starmap(gc.get_referrers, map(tuple, [_tuples(lists)]))
    return lists


def _variables(owner: Any) -> dict[str, Any] | None:
    """Return an object's attribute dictionary without running its code; None if it has none."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return None
    return attributes if type(attributes) is dict and not issubclass(type(owner), ModuleType) else None


def _attribute(rank: int, names: Any, among: set[int], of: str) -> tuple[int, str] | None:
    for name, value in list((names or {}).items()):
        if id(value) in among and isinstance(name, str):
            return rank, f"`{name}` {of}"
    return None


def _local_name(among: set[int]) -> str:
    """Return the local variable of a running function that is one of some objects; empty if there is none."""
    for running in sys._current_frames().values():  # noqa: SLF001 - the only way to see the frames of other threads
        frame: FrameType | None = running
        while frame is not None:
            code = frame.f_code
            if is_users(code.co_filename):
                names = frame.f_locals
                name = next((name for name, value in names.items() if id(value) in among), None)
                if type(names) is dict and code.co_flags & inspect.CO_OPTIMIZED:
                    names.clear()  # before Python 3.13 the frame keeps this copy, with all that is in it
                if name:
                    return f"`{name}` in {code_line(code.co_filename, frame.f_lineno, code.co_name)}"
            frame = frame.f_back
    return ""


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
