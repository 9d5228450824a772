"""What keeps objects alive, named as in the code ("list `history` of mylab.docking.Model"), and which line made them.

Best effort within a time limit: the search goes from the objects through their referrers to the container that has most
of them, and from there to a name. A line is the innermost one outside torch and the training loop.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
import sysconfig
import time
from collections import deque
from importlib.util import find_spec
from itertools import chain, filterfalse, groupby, starmap
from operator import itemgetter, methodcaller
from pathlib import Path
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tracemalloc
    from collections.abc import Iterable, Iterator, Sequence
    from types import CodeType


_BACKWARD = "_engine_run_backward"  # in torch/autograd/graph.py: what is below it runs within backward
_PACKAGES = ("site-packages", "dist-packages")
_MEMORY = Path(__file__).parents[1]  # the room whose own objects are nobody's leak


@functools.cache
def _skipped() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders of torch, numpy and our own code, and those of the standard library."""
    specs = [find_spec(name) for name in ("torch", "numpy")]
    folders = [path for spec in specs if spec for path in spec.submodule_search_locations or ()]
    own = [_MEMORY, _MEMORY.with_name("training")]
    standard = {Path(sysconfig.get_path(kind)) for kind in ("stdlib", "platstdlib")}
    return _beginnings(*map(Path, folders), *own), _beginnings(*standard)


def _beginnings(*folders: Path) -> tuple[str, ...]:
    return tuple({f"{path}{os.sep}" for folder in folders for path in (folder, folder.resolve())})


@functools.lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Tell whether a file is the user's: not of torch, numpy, Python or our training."""
    skipped, standard = _skipped()
    if file.startswith(("<", *skipped)):
        return False
    return not file.startswith(standard) or any(f"{os.sep}{packages}{os.sep}" in file for packages in _PACKAGES)


@functools.lru_cache(maxsize=4096)
def code_line(file: str, line: int, function: str = "") -> str:
    """Return a line of code as text, its file relative to the working directory."""
    here = f"{Path.cwd()}{os.sep}"
    return f"{file.removeprefix(here)}:{line}" + (f" in {function}" if function else "")


def calling_site() -> tuple[CodeType, int] | None:
    """Return code and line of the innermost caller in the user's files; within backward, only of hooks and the like."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - `inspect` would make a list of all frames, for each tensor
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_name == _BACKWARD:
            return None
        frame = frame.f_back
    return (frame.f_code, frame.f_lineno) if frame is not None else None


def site_text(site: tuple[CodeType, int] | None) -> str:
    """Return a site as text; empty if unknown."""
    return code_line(site[0].co_filename, site[1], site[0].co_name) if site else ""


def traced_site(traceback: tracemalloc.Traceback | None) -> tuple[str, int] | None:
    """Return file and line of the innermost frame in the user's files; None if there is none, or we allocated it."""
    for frame in reversed(traceback or ()):
        if is_memorys(frame.filename):
            return None
        if is_users(frame.filename):
            return frame.filename, frame.lineno
    return None


@functools.lru_cache(maxsize=4096)
def is_memorys(file: str) -> bool:
    """Tell whether a file belongs to `pipeline.memory`, whose allocations are never reported."""
    return _MEMORY in Path(file).parents


# A tuple that another thread is making from an iterator is known to the garbage collector, and nobody may refer to it:
# with one reference more that thread ends with a SystemError. So tuples are passed over, in calls that run no line of
# Python, during which no other thread can go on.
_IS_OF_TUPLES = methodcaller("__contains__", tuple)  # a pair: a type, and objects of it
_LATTER = itemgetter(1)


def _but_tuples(lists: Iterable[list[Any]]) -> Iterator[Any]:
    """Yield the objects of some lists that are no tuples; to be taken by `_taken`, like what is made of it."""
    pairs = groupby(chain(chain.from_iterable(lists), ((),)), type)  # which goes on to refer to the last object
    return chain.from_iterable(map(_LATTER, filterfalse(_IS_OF_TUPLES, pairs)))


def _tuples(lists: Iterable[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Yield the tuples of some lists, only for what runs no line of Python."""
    pairs = groupby(chain(chain.from_iterable(lists), (None,)), type)
    return chain.from_iterable(map(_LATTER, filter(_IS_OF_TUPLES, pairs)))


def _taken(objects: Iterator[Any]) -> list[Any]:
    """Return them all, taken in one call; no collection of garbage runs code meanwhile."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return list(objects)
    finally:
        if collects:
            gc.enable()


def tracked_objects() -> list[Any]:
    """Return all objects that the garbage collector tracks, but for tuples."""
    taken = _taken(_but_tuples(starmap(gc.get_objects, [()])))
    objects = [thing for thing in taken if thing is not taken]
    taken.clear()  # it had itself
    return objects


CONTAINERS: tuple[type, ...] = (list, dict, set, deque)
SAMPLE = 8  # of the objects that grow
_DEPTH, _WIDTH = 6, 24
_NESTED = 2  # tuples in tuples that are looked through
_IN_NO_CYCLE = (type, ModuleType, BuiltinFunctionType, MethodType)


# Asked is the type of an object, not `isinstance`, which asks the object itself: some raise, or warn.


class ReferrerSearch:
    """A search through all objects, limited in the processor's time."""

    def __init__(self, time_s: float = 1.0) -> None:
        self._end = time.thread_time() + time_s
        self._own: set[int] = {id(self.__dict__)}  # containers of the search itself

    @property
    def is_over(self) -> bool:
        """Whether its time has passed: what was not found may be there."""
        return time.thread_time() > self._end

    def ignore(self, *containers: object) -> None:
        """Ignore these containers, the caller's own."""
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
            counts = [_has(holder, among) for holder in holders]
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
                if name := self._best_name(holders, among) or _local(among):
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

    def cycle_of(self, thing: object) -> str:
        """Return the types along a cycle of references through an object; empty if none was found."""
        paths: list[tuple[object, tuple[str, ...]]] = [(thing, (type(thing).__name__,))]
        seen: set[int] = set()
        for _ in range(2 * _DEPTH):
            following: list[tuple[object, tuple[str, ...]]] = []
            self.ignore(paths, following, *paths)
            for holder, path in paths:
                for held in () if self.is_over else gc.get_referents(holder):
                    if held is thing:
                        return " → ".join((*path, path[0]))
                    if id(held) not in seen and gc.is_tracked(held) and not issubclass(type(held), _IN_NO_CYCLE):
                        seen.add(id(held))
                        following.append((held, (*path, type(held).__name__)))
            paths = following[: 8 * _WIDTH]
        return ""

    def _referrers(self, objects: list[Any]) -> tuple[list[Any], set[int]]:
        """Return what refers to some objects, itself or through tuples, and the ids of the objects and the tuples."""
        once = [tuple(objects)]
        self.ignore(objects, once)
        holders, among = _taken(_but_tuples(_lists(once, 0))), set(map(id, objects))
        for nested in range(_NESTED):
            tuples = _taken(map(id, _tuples(_lists(once, nested))))
            among.update(tuples)
            if len(tuples) < 2 or self.is_over:  # one is that of the call itself
                break
            holders += _taken(_but_tuples(_lists(once, nested + 1)))
        holders = list({id(holder): holder for holder in holders if id(holder) not in self._own}.values())
        holders = [holder for holder in holders if type(holder) is not FrameType or is_users(holder.f_code.co_filename)]
        self.ignore(holders)
        return holders, among

    def _best_name(self, holders: list[Any], among: set[int]) -> str:
        names = []  # no generator: what it captures would be one more that holds the object
        for holder in holders:
            if name := self._named(holder, among):
                names.append(name)  # noqa: PERF401
        return min(names)[1] if names else ""

    def _named(self, holder: Any, among: set[int]) -> tuple[int, str] | None:
        """Return the name under which a holder has an object, with a rank: lower ones are better names."""
        if type(holder) is dict:
            return self._named_in(holder, among)
        if type(holder) is CellType:
            name = next(self._closures(holder), "")
            return (2, name) if name else None
        if issubclass(type(holder), type):
            return _attribute(vars(holder), among, f"of class {_type_name(holder)}")
        if type(holder) is FrameType:
            return None
        return _attribute(_variables(holder), among, f"of {_type_name(type(holder))}")

    def _named_in(self, names: dict[Any, Any], among: set[int]) -> tuple[int, str] | None:
        if names.get("__name__") in sys.modules and vars(sys.modules[names["__name__"]]) is names:
            known = _attribute(names, among, f"of module {names['__name__']}")
            return (0, known[1]) if known else None
        for owner in self._referrers([names])[0]:
            if not issubclass(type(owner), ModuleType) and _variables(owner) is names:
                return _attribute(names, among, f"of {_type_name(type(owner))}")
        return None

    def _closures(self, cell: CellType) -> Iterator[str]:
        for function in self._referrers([cell])[0]:
            cells = list(map(id, (type(function) is FunctionType and function.__closure__) or ()))
            if id(cell) in cells:
                name = function.__code__.co_freevars[cells.index(id(cell))]
                yield f"`{name}` in a closure of {function.__module__}.{function.__qualname__}"


def _lists(once: list[tuple[Any, ...]], nested: int) -> Iterator[list[Any]]:
    """Yield the list of what refers to the objects in the only tuple of a list, or to tuples that have them so deep."""
    lists = starmap(gc.get_referrers, once)
    for _ in range(nested):
        lists = starmap(gc.get_referrers, map(tuple, [_tuples(lists)]))
    return lists


def container_lengths(objects: Iterable[object]) -> dict[int, int]:
    """Return the lengths of the containers among some objects, by id."""
    return {id(container): len(container) for container in objects if type(container) in CONTAINERS}  # type: ignore[arg-type]


def all_containers() -> list[Any]:
    """Return all lists, sets, deques and dictionaries, also those that the garbage collector does not track."""
    objects = tracked_objects()
    containers = [thing for thing in objects if type(thing) in CONTAINERS]
    # A dictionary of numbers or arrays is tracked by nobody but its owner.
    referents = gc.get_referents(*objects)
    tuples = _tuples(starmap(gc.get_objects, [()]))
    referents += _taken(_but_tuples(map(gc.get_referents, tuples)))
    containers.extend(
        {id(thing): thing for thing in referents if type(thing) is dict and not gc.is_tracked(thing)}.values()
    )
    return containers


def _has(holder: object, among: set[int]) -> int:
    """Return how many of some objects, known by their ids, a container has; 0 for anything else."""
    if type(holder) not in CONTAINERS:
        return 0
    return len(among.intersection(map(id, gc.get_referents(holder))))


def _variables(owner: Any) -> dict[str, Any] | None:
    """Return an object's attribute dictionary without running its code; None if it has none."""
    try:
        attributes = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return None
    return attributes if type(attributes) is dict else None


def _attribute(names: Any, among: set[int], of: str) -> tuple[int, str] | None:
    for name, value in list((names or {}).items()):
        if id(value) in among and isinstance(name, str):
            return 1, f"`{name}` {of}"
    return None


def _local(among: set[int]) -> str:
    """Return the local variable of a running function that is one of some objects; empty if there is none."""
    for running in sys._current_frames().values():  # noqa: SLF001 - the only way to see what other threads hold
        frame: FrameType | None = running
        while frame is not None:
            code = frame.f_code
            if is_users(code.co_filename) and (name := _name_in(frame, among)):
                return f"`{name}` in {code_line(code.co_filename, frame.f_lineno, code.co_name)}"
            frame = frame.f_back
    return ""


def _name_in(frame: FrameType, among: set[int]) -> str:
    names = frame.f_locals
    match = ""
    for name, value in names.items():
        if id(value) in among:
            match = name
            break
    if type(names) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # A copy that the frame would keep, with all that is in it, until it is asked again (before Python 3.13).
        names.clear()
    return match


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
