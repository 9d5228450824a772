"""Inspects a few steps: the memory that they leave behind, its size, the lines that allocated it, and its holder.

Tensors are watched as operators make them, Python objects by tracemalloc. Holders are found from above: among all that
modules and running functions refer to, containers that grew, and the way to them. No attribute or method of an object
is called, since that may run code. Only reachable objects are touched: a new reference to a tuple that another thread
is still building would raise SystemError there.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
import tracemalloc
from collections import Counter, deque
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import chain, islice
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

WATCHED = 8  # steps: a leak at every fourth is seen twice
INSPECTED = WATCHED + 3  # the next batch, or a copy that is being saved, does not outlive the last ones
_FRAMES = 8  # of a traceback, the innermost: more make tracing slower still
_MOST_NAMED = 3  # kinds and sites of a leftover, and holders
_SAMPLE = 512  # objects that are weighed of many
_OWN = tuple(str(Path(__file__).with_name(f"leak_{part}.py")) for part in ("inspection", "detector"))
_BACKWARD = "_engine_run_backward"  # in torch/autograd/graph.py: frames below it run within backward
_HIDDEN = (
    "nothing that Python shows: perhaps a cycle through autograd (an output kept on ctx, a hook on its own tensor)"
)
_CYCLE = "a cycle that only garbage collection frees"
_REFERENCE: Any = StorageWeakRef  # torch gives it no types
_FROM_DATA = frozenset(("lift_fresh", "lift_fresh_copy"))  # torch.tensor([...]): their input is new itself
_CONTAINERS: tuple[type, ...] = (list, dict, set, deque)
_BETWEEN = (*_CONTAINERS, tuple, CellType)  # an object's holder is named by what is behind them
_ATOMS = frozenset((str, int, float, bool, bytes, type(None), CodeType, BuiltinFunctionType))


_MEMORY = Path(__file__).parent
_FOLDERS = (Path(torch.__file__).parent, Path(np.__file__).parent, _MEMORY, _MEMORY.with_name("training"))
_LIBRARIES = ("<", *(f"{folder}{os.sep}" for folder in _FOLDERS))
_STANDARD = f"{Path(os.__file__).parent}{os.sep}"


@functools.lru_cache(maxsize=4096)
def _is_users(file: str) -> bool:
    """Tell whether a file is the user's: not of torch, numpy, Python, or this package's memory and training."""
    if file.startswith(_LIBRARIES):
        return False
    return not file.startswith(_STANDARD) or "-packages" in file  # site-packages or dist-packages


@functools.lru_cache(maxsize=4096)
def _code_line(file: str, line: int, function: str = "") -> str:
    """Return a line of code as text, its file relative to the working directory."""
    return f"{file.removeprefix(f'{Path.cwd()}{os.sep}')}:{line}" + (f" in {function}" if function else "")


@dataclass(slots=True)
class Made:
    """Memory that a step allocated, and the line that made it."""

    kind: str
    bytes: int
    site: str
    reference: Any = None  # to a storage
    step: int = 0

    @classmethod
    def of(cls, tensor: Tensor, site: str, step: int = 0) -> Made:
        storage = tensor.untyped_storage()
        kind = f"{type(tensor).__name__} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        return cls(kind, storage.nbytes(), site, _REFERENCE(storage), step)

    @property
    def is_gone(self) -> bool:
        return bool(self.reference.expired())


@dataclass(frozen=True, slots=True)
class Leftover:
    """Memory that the inspected steps left with one holder."""

    bytes_per_step: float
    kinds: tuple[str, ...]
    sites: tuple[str, ...]
    holder: str

    @classmethod
    def of(cls, made: Sequence[Made], holder: str, steps: int, scale: float = 1.0) -> Leftover:
        """Add up what some steps made; `scale` is for a sample."""
        sizes, sites, counts = Counter[str](), Counter[str](), Counter(memory.kind for memory in made)
        for memory in made:
            sizes[memory.kind] += memory.bytes
            sites[memory.site] += memory.bytes
        del sites[""]
        kinds = tuple(f"{round(scale * counts[kind])} x {kind}" for kind, _ in sizes.most_common(_MOST_NAMED))
        best_sites = tuple(site for site, _ in sites.most_common(_MOST_NAMED))
        return cls(scale * sizes.total() / steps, kinds, best_sites, holder)


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every new storage while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, Made] = {}
        self.step = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Do not enter compiled code: run eagerly, it would round differently."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record its new storages."""
        returned = func(*args, **(kwargs or {}))
        inputs = () if func.overloadpacket.__name__ in _FROM_DATA else tensors_in(args)
        known = {0, *map(_number, inputs), *map(_number, tensors_in(tuple((kwargs or {}).values())))}
        for tensor in tensors_in(returned):
            if (number := _number(tensor)) not in known and tensor.untyped_storage().nbytes():
                self.made[number] = Made.of(tensor, _calling_site(), self.step)
        return returned


class Inspection:
    """Inspects some steps, then waits a few more to see what outlives them."""

    def __init__(self, *, with_objects: bool) -> None:
        """Start; `with_objects` includes Python and numpy objects, which slows Python down meanwhile."""
        self.watch = StorageWatch()
        self._sequence = range(_next_sequence_number(), 0)  # of the nodes of graphs that were made
        self._starts_tracing = with_objects and not tracemalloc.is_tracing()
        before = Reachable()
        self._lengths = {id(container): len(container) for container in before.containers()}
        self._known = set(map(_number, before.tensors()))
        self._old = before.distance
        if self._starts_tracing:
            tracemalloc.start(_FRAMES)

    def end_step(self) -> bool:
        """Note the end of a step; return whether the inspection is complete."""
        self.watch.made = {number: made for number, made in self.watch.made.items() if not made.is_gone}
        self.watch.step += 1
        if self.watch.step == WATCHED:
            self._sequence = range(self._sequence.start, _next_sequence_number())
        return self.watch.step >= INSPECTED

    def close(self) -> None:
        if self._starts_tracing:
            tracemalloc.stop()
        self._starts_tracing = False

    def found(self) -> list[Leftover]:
        """Return the memory that the steps left behind, the largest first."""
        made = {number: made for number, made in self.watch.made.items() if made.step < WATCHED}
        gc.collect()
        kept = {number: memory for number, memory in made.items() if not memory.is_gone}
        garbage = [memory for memory in made.values() if memory.is_gone]
        reachable = Reachable()
        leftovers = self._in_containers(reachable, kept)
        leftovers += self._elsewhere(reachable, kept)
        leftovers += [Leftover.of(garbage, _CYCLE, WATCHED)] if len(garbage) > 1 else []
        return sorted(leftovers, key=lambda leftover: -leftover.bytes_per_step)

    def _in_containers(self, reachable: Reachable, kept: dict[int, Made]) -> list[Leftover]:
        """Return what containers that grew got in these steps; remove its storages from those that were kept."""
        seen: set[int] = set()
        found: list[tuple[Leftover, Any]] = []
        for container in reachable.containers():
            added = len(container) - self._lengths.get(id(container), len(container))
            if added > 1:  # it recurs
                newest = _newest(container, added)
                sample = newest[:: 1 + len(newest) // _SAMPLE]
                made = self._weighed(sample, seen, kept)
                found.append((Leftover.of(made, "", INSPECTED, len(newest) / len(sample)), container))
        largest = nlargest(_MOST_NAMED, found, key=lambda pair: pair[0].bytes_per_step)
        return [replace(leftover, holder=reachable.holder_of(container)) for leftover, container in largest]

    def _weighed(self, objects: Sequence[object], seen: set[int], kept: dict[int, Made]) -> list[Made]:
        """Return objects with all that they refer to, as far as it is new."""
        made: list[Made] = []
        waiting: list[Any] = list(objects)
        while waiting:
            thing = waiting.pop()
            if id(thing) in seen or id(thing) in self._old:
                continue
            seen.add(id(thing))
            site, kind = _traced_site(tracemalloc.get_object_traceback(thing)), type(thing)
            is_array = issubclass(kind, np.ndarray)
            if issubclass(kind, torch.Tensor):
                number = _number(thing)
                if number in self.watch.made or number not in self._known:
                    made.append(self.watch.made.get(number) or Made.of(thing, site))
                    self._known.add(number)
                    for storages in (kept, self.watch.made):
                        storages.pop(number, None)
            elif site:
                name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
                name = f"ndarray {thing.dtype} {list(thing.shape)}" if is_array else name
                made.append(Made(name, sys.getsizeof(thing), site))
            waiting.extend(gc.get_referents(thing))
            if is_array and thing.base is not None:
                waiting.append(thing.base)
        return made

    def _elsewhere(self, reachable: Reachable, kept: dict[int, Made]) -> list[Leftover]:
        """Return storages that no container got: those of tensors in attributes, and of graphs."""
        roots: list[Tensor] = []
        shown: list[Tensor] = []
        for tensor in reachable.tensors():
            if any(number in self._sequence for number in sequence_numbers(tensor.grad_fn)):
                roots.append(tensor)
            if _number(tensor) in kept:
                shown.append(tensor)
        tensors = roots or shown
        holder = reachable.holder_of(tensors[0]) if tensors else _HIDDEN
        return [Leftover.of(list(kept.values()), holder, WATCHED)] if len(kept) > 1 else []


class Reachable:
    """All that modules and the variables of running functions refer to, by its distance from them."""

    def __init__(self) -> None:
        self._locals: dict[int, str] = {}
        level = [*sys.modules.values(), *self._local_values()]
        self._levels: list[list[Any]] = []
        self.distance: dict[int, int] = {}
        while level:
            self.distance.update(dict.fromkeys(map(id, level), len(self._levels)))
            self._levels.append(level)
            referents = {id(thing): thing for thing in gc.get_referents(*level) if type(thing) not in _ATOMS}
            level = [thing for number, thing in referents.items() if number not in self.distance]

    def _local_values(self) -> list[Any]:
        """Return what the variables of running functions are, and note their names."""
        values: list[Any] = []
        for running in sys._current_frames().values():  # noqa: SLF001 - the only way to see other threads
            for frame in _outwards(running):
                code, names = frame.f_code, frame.f_locals
                if not code.co_filename.startswith(_OWN):
                    place = _code_line(code.co_filename, frame.f_lineno, code.co_name)
                    self._locals.update((id(value), f"`{name}` in {place}") for name, value in names.items())
                    values += names.values()
                if type(names) is dict and code.co_flags & inspect.CO_OPTIMIZED:
                    names.clear()  # before Python 3.13 the frame keeps this copy, with all that is in it
        del running, frame  # else this function's own frame would keep itself
        return values

    def containers(self) -> Iterator[Any]:
        return (thing for thing in chain.from_iterable(self._levels) if type(thing) in _CONTAINERS)

    def tensors(self) -> list[Tensor]:
        things = (thing for thing in chain.from_iterable(self._levels) if issubclass(type(thing), torch.Tensor))
        return [tensor for tensor in things if _number(tensor)]

    def holder_of(self, thing: object) -> str:
        """Return what an object is called in the code: list `history` of mylab.docking.Model."""
        way = [thing]  # from the object to what refers to it
        for level in reversed(self._levels[: self.distance[id(thing)]]):
            parent = next(one for one in level if self._has(one, way[-1]))
            if type(parent) not in _BETWEEN:
                return _named(way, parent)
            way.append(parent)
        return f"{_kinds(way)} {self._locals[id(way[-1])]}"

    def _has(self, owner: object, thing: object) -> bool:
        """Tell whether an object refers to another, directly or by a dictionary that was made to name it."""
        held = gc.get_referents(owner)
        new = (one for one in held if type(one) is dict and id(one) not in self.distance)
        return any(one is thing for one in chain(held, *(list(names.values()) for names in new)))


def _kinds(way: Sequence[object]) -> str:
    return " in a ".join(type(thing).__name__ for thing in way)


def _named(way: list[object], owner: Any) -> str:
    """Return the name under which an owner has an object, or one on the way from it."""
    variables = _variables(owner)
    for skipped in (0, 1):  # the last is the owner's own dictionary, or its closure
        inner = way[: len(way) - skipped]
        name = next((name for name, value in list(variables.items()) if inner and value is inner[-1]), None)
        if name is not None:
            return f"{_kinds(inner)} `{name}` of {_title(owner)}"
    return f"{_kinds(way)} of {_title(owner)}"


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _variables(owner: Any) -> Any:
    """Return an object's names without running its code; of a function, those it has from around it."""
    if type(owner) is FunctionType:
        return dict(zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True))
    try:
        return object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return {}


def _title(owner: Any) -> str:
    if issubclass(type(owner), ModuleType):
        return f"module {owner.__name__}"
    code = owner if type(owner) is FunctionType or issubclass(type(owner), type) else type(owner)
    return f"{code.__module__}.{code.__qualname__}"


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors among an operator's arguments or results."""
    if isinstance(value, torch.Tensor):
        yield from (value._values(), value._indices()) if value.is_sparse else (value,)  # noqa: SLF001
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)


def _number(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001
    except (NotImplementedError, RuntimeError):  # sparse ones, wrappers: their parts are seen by themselves
        return 0


def _next_sequence_number() -> int:
    return int(torch._C._autograd._get_sequence_nr())  # noqa: SLF001 - torch counts the nodes of its graphs


def sequence_numbers(node: Any, lowest: int = 0) -> Iterator[int]:
    """Yield the numbers, not below `lowest`, of a node of a graph and of those it depends on."""
    waiting, seen = [node], {None}
    while waiting:
        if (node := waiting.pop()) not in seen and (number := node._sequence_nr()) >= lowest:  # noqa: SLF001
            seen.add(node)
            yield number
            waiting += [below for below, _ in node.next_functions]


def _calling_site() -> str:
    """Return the innermost calling line in the user's files; within backward, only of hooks and the like."""
    for frame in _outwards(sys._getframe(1)):  # noqa: SLF001 - `inspect` would make a list of all frames, for each tensor
        if _is_users(frame.f_code.co_filename):
            return _code_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        if frame.f_code.co_name == _BACKWARD:
            return "in backward"
    return ""


def _traced_site(traceback: tracemalloc.Traceback | None) -> str:
    """Return the innermost line in the user's files; empty if there is none, or this search allocated it."""
    for frame in reversed(traceback or ()):
        if frame.filename.startswith(_OWN):
            return ""
        if _is_users(frame.filename):
            return _code_line(frame.filename, frame.lineno)
    return ""


def _newest(container: Any, count: int) -> list[Any]:
    """Return the last elements, or all where there is no order."""
    if isinstance(container, set):
        return list(container)
    newest = list(islice(reversed(container), count))
    return [*newest, *(container[key] for key in newest)] if isinstance(container, dict) else newest
