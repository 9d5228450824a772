"""A close look at a few steps: the memory that they left behind, its size, the lines that made it, and its holder."""

from __future__ import annotations

import gc
import sys
import tracemalloc
import warnings
from collections import Counter, defaultdict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.memory.leaks.referrers import (
    ReferrerSearch,
    all_containers,
    code_line,
    is_users,
    tracked_objects,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from torch import Tensor

WINDOW = 8  # steps that are inspected: a leak at every fourth is seen twice
SETTLED = 3  # steps that leftovers must outlive: the next batch, or a copy that is being saved, does not
_SEARCH_S = 1.0
_FRAMES = 8  # of a traceback, the innermost: more make tracing slower still
_MOST_NAMED = 3  # kinds and sites of a leftover, and containers
_MOST_GROUPS = 12
_SAMPLE = 512  # objects that are weighed of many
_LEAST_SHARE = 0.05  # of the largest container, to be named
_OWN = str(Path(__file__).parent)
_BACKWARD = "_engine_run_backward"  # in torch/autograd/graph.py: frames below it run within backward
_HIDDEN = (
    "no Python reference found: perhaps a cycle through autograd (an output kept on ctx, a hook on its own tensor)"
)
_REFERENCE: Any = StorageWeakRef  # torch gives it no types
_FROM_DATA = frozenset(("lift_fresh", "lift_fresh_copy"))  # torch.tensor([...]): their input is new itself


@dataclass(frozen=True, slots=True)
class Made:
    """Allocated memory, and the line that made it."""

    kind: str
    bytes: int
    site: str = ""


@dataclass(frozen=True, slots=True)
class MadeStorage(Made):
    """A storage that may be gone by now."""

    reference: Any = None

    @classmethod
    def of(cls, tensor: Tensor, site: str) -> MadeStorage:
        storage = tensor.untyped_storage()
        kind = f"{type(tensor).__name__} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        return cls(kind, storage.nbytes(), site, _REFERENCE(storage))

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
        """Add up what was made; `scale` is for a sample."""
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
        self.made: dict[int, MadeStorage] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code alone: run eagerly it would round differently."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and record its new storages."""
        returned = func(*args, **(kwargs or {}))
        inputs = () if func.overloadpacket.__name__ in _FROM_DATA else _tensors(args)
        known = {0, *map(_number, inputs), *map(_number, _tensors(tuple((kwargs or {}).values())))}
        for tensor in _tensors(returned):
            if (number := _number(tensor)) not in known and tensor.untyped_storage().nbytes():
                self.made[number] = MadeStorage.of(tensor, _calling_site())
        return returned


class Inspection:
    """Inspects some steps, then waits a few more to see what outlives them."""

    def __init__(self, *, with_objects: bool, own: Callable[[], Sequence[Tensor]] = tuple) -> None:
        """Start; `with_objects` includes Python and numpy objects, which slows Python down meanwhile."""
        self._with_objects, self._own = with_objects, own
        self._watch, self._step = StorageWatch(), 0
        self._unwatched: dict[int, MadeStorage] = {}  # made outside of `watching`
        self._snapshot: tracemalloc.Snapshot | None = None
        self._starts_tracing = with_objects and not tracemalloc.is_tracing()
        self._lengths = {id(container): len(container) for container in all_containers()}
        self._known = {number for number, _ in visible_tensors()}
        if self._starts_tracing:
            tracemalloc.start(_FRAMES)

    def watching(self) -> AbstractContextManager[Any]:
        """Return the context to run a step in, so that new tensors are recorded."""
        return self._watch if self._step < WINDOW else nullcontext()

    def end_step(self) -> bool:
        """Note the end of a step; return whether the inspection is complete."""
        made = self._watch.made = {number: made for number, made in self._watch.made.items() if not made.is_gone}
        self._step += 1
        if self._step == 1 and self._with_objects:
            self._snapshot = tracemalloc.take_snapshot()
        if self._step == WINDOW:
            fresh = ((number, tensor) for number, tensor in visible_tensors() if number not in self._known)
            self._unwatched = {number: MadeStorage.of(tensor, "") for number, tensor in fresh if number not in made}
        return self._step >= WINDOW + SETTLED

    def close(self) -> None:
        if self._starts_tracing:
            tracemalloc.stop()
        self._starts_tracing = False

    def found(self, expected_rate: float = 0.0) -> list[Leftover]:
        """Return the memory that the steps left behind, the largest first."""
        groups, containers = self._tensors()
        leftovers = []
        for holder, storages in groups.items():
            with_site = sum(bool(storage.site) for storage in storages)
            if with_site > 1 or len(storages) - with_site >= WINDOW // 2:  # they recur
                leftovers.append(Leftover.of(storages, holder, WINDOW))
        if self._with_objects:
            leftovers += self._objects(containers)
            if sum(leftover.bytes_per_step for leftover in leftovers) < expected_rate / 2:
                leftovers += self._by_line()
        return sorted(leftovers, key=lambda leftover: -leftover.bytes_per_step)

    def _tensors(self) -> tuple[dict[str, list[MadeStorage]], set[int]]:
        """Return the surviving storages by the name of their holder, and the ids of the containers that hold them."""
        own = set(map(_number, self._own()))
        made = {
            number: storage
            for number, storage in (self._unwatched | self._watch.made).items()
            if number not in own and not storage.is_gone
        }
        containers: set[int] = set()
        groups: dict[str, list[MadeStorage]] = defaultdict(list)
        shown: dict[int, Any] = {}
        roots: list[Any] = []  # of graphs: a step that has ended leaves hardly any
        for number, tensor in visible_tensors() if made else ():
            if number in made:
                shown[number] = tensor
            if number not in self._known and tensor.grad_fn is not None:
                roots.append(tensor)
        by_site: dict[str, list[int]] = defaultdict(list)
        for number in shown:
            by_site[made[number].site].append(number)
        hidden = [storage for number, storage in made.items() if number not in shown]
        for numbers in nlargest(
            _MOST_GROUPS, by_site.values(), key=lambda group: sum(made[number].bytes for number in group)
        ):
            holder = self._holder([shown[number] for number in numbers], containers, (shown, roots))
            if holder is not None:  # empty: only a graph refers to them
                (groups[holder] if holder else hidden).extend(made[number] for number in numbers)
        if hidden:
            graph_holder = self._holder(roots, containers, (shown,)) if roots else None
            groups[graph_holder or _HIDDEN] += hidden
        shown.clear()
        roots.clear()
        gc.collect()
        regrouped: dict[str, list[MadeStorage]] = defaultdict(list)
        for holder, storages in groups.items():
            for storage in storages:
                regrouped[
                    f"{holder}, in a cycle that only garbage collection frees" if storage.is_gone else holder
                ].append(storage)
        return regrouped, containers

    def _holder(self, tensors: list[Any], containers: set[int], ours: Sequence[object]) -> str | None:
        """Name the holder of some tensors: "" if not found, None if it is a container that does not grow."""
        search = ReferrerSearch(_SEARCH_S)
        search.ignore(tensors, *ours)
        container = search.container_of(tensors)
        if container is not None:
            if len(container) <= self._lengths.get(id(container), -1):
                return None
            containers.add(id(container))
            return search.name_of(container)
        return search.name_of(tensors[0]) or ("not found within a second" if search.is_over else "")

    def _objects(self, named: set[int]) -> list[Leftover]:
        """Return Python containers that grew, with the memory of their new elements."""
        seen = set(named)
        leftovers: list[tuple[Leftover, Any]] = []
        everything = all_containers()
        for container in everything:
            added = len(container) - self._lengths.get(id(container), len(container))
            if added >= WINDOW // 2 and id(container) not in named:
                newest = _newest(container, added)
                sample = newest[:: 1 + len(newest) // _SAMPLE]
                leftover = Leftover.of(_traced(sample, seen), "", self._step, len(newest) / len(sample))
                leftovers.append((leftover, container))
        largest = nlargest(_MOST_NAMED, leftovers, key=lambda pair: pair[0].bytes_per_step)
        named_leftovers = []
        for leftover, container in largest:
            if leftover.bytes_per_step > _LEAST_SHARE * largest[0][0].bytes_per_step:
                search = ReferrerSearch(_SEARCH_S)
                search.ignore(everything, *largest, *leftovers)
                named_leftovers.append(replace(leftover, holder=search.name_of(container)))
        return named_leftovers

    def _by_line(self) -> list[Leftover]:
        """Return the lines that have allocated more since the first step, whatever holds it."""
        gained = tracemalloc.take_snapshot().compare_to(self._snapshot, "traceback") if self._snapshot else []
        made = [Made("Python objects", gain.size_diff, _traced_site(gain.traceback)) for gain in gained]
        grown = [line for line in made if line.site and line.bytes > 0]
        return [Leftover.of(grown, "", self._step - 1)] if grown else []


def visible_tensors() -> Iterator[tuple[int, Tensor]]:
    """Yield all tensors that have a Python object, each after the number of its storage."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in tracked_objects():
            if issubclass(type(thing), torch.Tensor) and (number := _number(thing)):
                yield number, thing


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operator takes or returns."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _number(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)  # noqa: SLF001
    except (NotImplementedError, RuntimeError):  # sparse ones, wrappers: their parts are seen by themselves
        return 0


def _calling_site() -> str:
    """Return the innermost calling line in the user's files; within backward, only of hooks and the like."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - `inspect` would make a list of all frames, for each tensor
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_name == _BACKWARD:
            return "in backward"
        frame = frame.f_back
    return code_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) if frame is not None else ""


def _traced_site(traceback: tracemalloc.Traceback | None) -> str:
    """Return the innermost line in the user's files; empty if there is none, or this folder allocated it."""
    for frame in reversed(traceback or ()):
        if frame.filename.startswith(_OWN):
            return ""
        if is_users(frame.filename):
            return code_line(frame.filename, frame.lineno)
    return ""


def _newest(container: Any, count: int) -> list[Any]:
    """Return the last elements, or all where there is no order."""
    if isinstance(container, set):
        return list(container)
    newest = list(islice(reversed(container), count))
    return [*newest, *(container[key] for key in newest)] if isinstance(container, dict) else newest


def _traced(objects: Sequence[object], seen: set[int]) -> list[Made]:
    """Return objects with all that they refer to, as far as it was allocated since tracing began."""
    made: list[Made] = []
    waiting: list[Any] = list(objects)
    while waiting:
        thing = waiting.pop()
        traced, kind = tracemalloc.get_object_traceback(thing), type(thing)
        if traced is None or id(thing) in seen:
            continue
        seen.add(id(thing))
        site, is_array = _traced_site(traced), issubclass(kind, np.ndarray)
        if site and not issubclass(kind, torch.Tensor):  # whose storage is counted elsewhere
            name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            name = f"ndarray {thing.dtype} {list(thing.shape)}" if is_array else name
            made.append(Made(name, sys.getsizeof(thing), site))
        waiting.extend(gc.get_referents(thing))
        if is_array and thing.base is not None:
            waiting.append(thing.base)
    return made
