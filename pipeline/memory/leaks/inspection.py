"""Inspection of a few steps: what they left in memory, how much, where it was made, and what holds it."""

from __future__ import annotations

import gc
import sys
import time
import tracemalloc
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.memory.leaks.referrers import (
    ReferrerSearch,
    all_containers,
    calling_site,
    code_line,
    container_lengths,
    site_text,
    traced_site,
    tracked_objects,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType

    from torch import Tensor

Site: TypeAlias = tuple[str, int]

SETTLED = 3  # steps that what is left must outlive: the next batch, or a copy that is being saved, does not
_SEARCH_S = 1.0
_TOO_LONG = "not found within a second"
_FRAMES = 8  # of a traceback, the innermost: more make tracing slower still
_MOST_KINDS, _MOST_SITES = 3, 3
_MOST_GROUPS = 12
_WEIGH_S, _SAMPLE = 1.0, 512
_LEAST_SHARE = 0.05  # of the largest, to be named
_HIDDEN = (
    "no Python reference found: perhaps a cycle through autograd (an output kept on ctx, a hook on its own tensor)"
)


@dataclass(frozen=True, slots=True)
class Leftover:
    """What the inspected steps left in memory with one holder."""

    bytes_per_step: float
    kinds: tuple[str, ...]
    sites: tuple[str, ...]
    holder: str


class InspectionWindow:
    """Inspects so many steps, then waits a few more to see what outlives them."""

    def __init__(self, steps: int, *, with_objects: bool, own: Callable[[], Sequence[Tensor]] = tuple) -> None:
        """Begin; `with_objects` includes Python and numpy objects, which slows Python down meanwhile."""
        self.steps, self.with_objects, self._own = steps, with_objects, own
        self._look = StorageWatch()
        self._later: list[MadeStorage] = []  # seen at a boundary, while nobody saw where they were made
        self._snapshot: tracemalloc.Snapshot | None = None
        self._starts_tracing = with_objects and not tracemalloc.is_tracing()
        self._lengths = container_lengths(all_containers())
        self._known = {number for number, _ in visible_tensors()}
        if self._starts_tracing:
            tracemalloc.start(_FRAMES)

    def watching(self) -> AbstractContextManager[Any]:
        """Return the context to run a step in, so that the tensors made in it are seen."""
        return self._look if self._look.step < self.steps else nullcontext()

    def boundary(self) -> bool:
        """Note the end of a step; return whether the inspection is complete."""
        look = self._look
        look.prune()
        look.step += 1
        if look.step == 1 and self.with_objects:
            self._snapshot = tracemalloc.take_snapshot()
        if look.step == self.steps:
            unseen = ((number, tensor) for number, tensor in visible_tensors() if number not in self._known)
            self._later = [MadeStorage.of(tensor, "") for number, tensor in unseen if number not in look.made]
        return look.step >= self.steps + SETTLED

    def close(self) -> None:
        if self._starts_tracing:
            tracemalloc.stop()
        self._starts_tracing = False

    def found(self, expected_rate: float = 0.0) -> list[Leftover]:
        """Return what the steps left in memory, the largest first."""
        groups, containers = self._tensors()
        leftovers = []
        for holder, made in groups.items():
            if self._recurs(made):
                weighed = _Weighed()
                for storage in made:
                    weighed.count(storage.kind, storage.bytes, storage.site)
                leftovers.append(weighed.found(holder, self.steps))
        if self.with_objects:
            leftovers += self._objects(
                containers, expected_rate - sum(leftover.bytes_per_step for leftover in leftovers)
            )
        return sorted(leftovers, key=lambda leftover: -leftover.bytes_per_step)

    def _tensors(self) -> tuple[dict[str, list[MadeStorage]], set[int]]:
        """Return the surviving storages by the name of their holder, and the ids of the containers that hold them."""
        storages = (*self._later, *self._look.made.values())
        own = set(map(_number, self._own()))
        made = {storage.number: storage for storage in storages if not storage.is_gone and storage.number not in own}
        containers: set[int] = set()
        groups: dict[str, list[MadeStorage]] = defaultdict(list)
        if not made:
            return groups, containers
        shown: dict[int, Any] = {}
        roots: list[Any] = []  # of graphs: a step that has ended leaves hardly any
        for number, tensor in visible_tensors():
            if number in made:
                shown[number] = tensor
            if number not in self._known and tensor.grad_fn is not None:
                roots.append(tensor)
        by_site: dict[str, list[int]] = defaultdict(list)
        for number in shown:
            by_site[made[number].site].append(number)
        largest = sorted(by_site.values(), key=lambda numbers: -sum(made[number].bytes for number in numbers))
        hidden = [storage for number, storage in made.items() if number not in shown]
        for numbers in largest[:_MOST_GROUPS]:
            holder = self._holder([shown[number] for number in numbers], containers, (shown, roots))
            if holder is not None:  # empty: only a graph refers to them
                (groups[holder] if holder else hidden).extend(made[number] for number in numbers)
        if hidden:
            graph_holder = self._holder(roots, containers, (shown,)) if roots else None
            groups[graph_holder or _HIDDEN] += hidden
        shown.clear()
        roots.clear()
        return self._without_garbage(groups), containers

    def _holder(self, tensors: list[Any], containers: set[int], ours: Sequence[object]) -> str | None:
        """Return the name of what holds some tensors, "" if not found; None if it is a container that does not grow."""
        search = ReferrerSearch(_SEARCH_S)
        search.ignore(tensors, *ours)
        container = search.container_of(tensors)
        if container is None:
            cycle = search.cycle_of(tensors[0])
            name = f"a cycle of references: {cycle}" if cycle else search.name_of(tensors[0])
            return name or (_TOO_LONG if search.is_over else "")
        before = self._lengths.get(id(container))
        if before is not None and len(container) <= before:
            return None
        containers.add(id(container))
        return search.name_of(container)

    def _recurs(self, made: Sequence[MadeStorage]) -> bool:
        """Tell whether storages were left more than once; those whose making was not seen, in most steps."""
        with_site = sum(bool(storage.site) for storage in made)
        return with_site > 1 or len(made) - with_site >= max(3, self.steps // 2)

    def _without_garbage(self, groups: dict[str, list[MadeStorage]]) -> dict[str, list[MadeStorage]]:
        """Collect garbage, and say so in the holder's name of what that frees."""
        gc.collect()
        regrouped: dict[str, list[MadeStorage]] = defaultdict(list)
        for holder, made in groups.items():
            in_garbage = f"{holder or 'a cycle of references'}; only garbage collection frees it"
            for storage in made:
                regrouped[in_garbage if storage.is_gone else holder].append(storage)
        return regrouped

    def _objects(self, containers: set[int], missing: float) -> list[Leftover]:
        """Return Python containers that grew, with what was allocated for their new elements."""
        counted = set(containers)
        weighed: list[tuple[_Weighed, Any]] = []
        everything = all_containers()
        for container in everything:
            grown = len(container) - self._lengths.get(id(container), len(container))
            if grown >= max(2, self.steps // 2) and id(container) not in containers:
                weighed.append((_Weighed(), container))
                weighed[-1][0].weigh(_newest(container, grown), counted)
        weighed.sort(key=lambda pair: -pair[0].bytes)
        del weighed[_MOST_SITES:]
        leftovers = []
        for sizes, container in weighed:
            if sizes.bytes > _LEAST_SHARE * weighed[0][0].bytes:
                search = ReferrerSearch(_SEARCH_S)
                search.ignore(everything, *weighed)
                leftovers.append(sizes.found(search.name_of(container), self._look.step))
        enough = sum(leftover.bytes_per_step for leftover in leftovers) >= missing / 2
        return leftovers if enough else [*leftovers, *self._by_site()]

    def _by_site(self) -> list[Leftover]:
        """Return the lines that have allocated more since the first step, whatever holds it."""
        if self._snapshot is None:
            return []
        gained: Counter[Site] = Counter()
        for difference in tracemalloc.take_snapshot().compare_to(self._snapshot, "traceback"):
            site = traced_site(difference.traceback)
            if difference.size_diff > 0 and site:
                gained[site] += difference.size_diff
        steps, most = self._look.step - 1, gained.most_common(_MOST_SITES)
        return [Leftover(size / steps, ("Python objects",), (code_line(*site),), "") for site, size in most]


def _newest(container: Any, count: int) -> list[Any]:
    """Return the last elements, or all where there is no order."""
    if isinstance(container, set):
        return list(container)
    newest = list(islice(reversed(container), count))
    return [*newest, *(container[key] for key in newest)] if isinstance(container, dict) else newest


class _Weighed:
    """Bytes of objects, by type and by the line that made them."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.kinds: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.sites: Counter[str] = Counter()

    @property
    def bytes(self) -> int:
        return round(self.scale * sum(self.kinds.values()))

    def count(self, kind: str, size: int, site: str) -> None:
        self.kinds[kind] += size
        self.counts[kind] += 1
        if site:
            self.sites[site] += size

    def weigh(self, objects: Sequence[object], seen: set[int]) -> None:
        """Add objects with all that was made for them since tracing began; of many, a sample is scaled up."""
        sample = objects[:: max(1, len(objects) // _SAMPLE)]
        end, weighed = time.thread_time() + _WEIGH_S, 0  # of the processor: a busy machine weighs as much
        for thing in sample:
            if weighed and time.thread_time() > end:
                break
            self._weigh_one(thing, seen)
            weighed += 1
        self.scale = len(objects) / max(weighed, 1)

    def _weigh_one(self, thing: Any, seen: set[int]) -> None:
        """Add an object with all that it refers to and that was made since tracing began."""
        waiting = [thing]
        while waiting:
            thing = waiting.pop()
            traced = tracemalloc.get_object_traceback(thing)
            if traced is None or id(thing) in seen:
                continue
            seen.add(id(thing))
            site = traced_site(traced)
            if site and not issubclass(type(thing), torch.Tensor):  # what it stores is counted elsewhere
                self.count(_kind(thing), sys.getsizeof(thing), code_line(*site))
            waiting.extend(gc.get_referents(thing))
            if issubclass(type(thing), np.ndarray) and thing.base is not None:
                waiting.append(thing.base)

    def found(self, holder: str, steps: int) -> Leftover:
        kinds = tuple(
            f"{round(self.scale * self.counts[kind])} x {kind}" for kind, _ in self.kinds.most_common(_MOST_KINDS)
        )
        return Leftover(
            self.bytes / steps, kinds, tuple(site for site, _ in self.sites.most_common(_MOST_SITES)), holder
        )


def _kind(thing: Any) -> str:
    kind = type(thing)
    if issubclass(kind, np.ndarray):
        return f"ndarray {thing.dtype} {list(thing.shape)}"
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


_REFERENCE: Any = StorageWeakRef  # torch gives it no types


_MOST_LINES = 100_000  # of one look: nodes of a step, of which each may be asked for


_BEGUN = frozenset(("lift_fresh", "lift_fresh_copy"))  # torch.tensor([...]): what goes in is new itself


@dataclass(frozen=True, slots=True)
class MadeStorage:
    """A storage, and where it was made."""

    reference: Any
    bytes: int
    kind: str
    site: str

    @classmethod
    def of(cls, tensor: Tensor, site: str) -> MadeStorage:
        storage = tensor.untyped_storage()
        return cls(_REFERENCE(storage), storage.nbytes(), tensor_text(tensor), site)

    @property
    def number(self) -> int:
        """Return a number that is unique among living storages."""
        return int(self.reference.cdata)

    @property
    def is_gone(self) -> bool:
        return bool(self.reference.expired())


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every new storage, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, MadeStorage] = {}
        self.step = 0
        self._lines: dict[int, tuple[CodeType, int]] = {}  # of forward, by the node that goes back from there

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code alone: run eagerly it would round differently."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what it made."""
        returned = func(*args, **(kwargs or {}))
        outputs = list(_tensors(returned))
        if outputs:
            inputs = () if func.overloadpacket.__name__ in _BEGUN else _tensors(args)
            known = {_number(tensor) for tensor in (*inputs, *_tensors(tuple((kwargs or {}).values())))}
            site = self._site()
            for tensor in outputs:
                number = _number(tensor)
                if number and number not in known and tensor.untyped_storage().nbytes():
                    self.made[number] = MadeStorage.of(tensor, site)
        return returned

    def prune(self) -> None:
        self.made = {number: storage for number, storage in self.made.items() if not storage.is_gone}
        self._lines = {}

    def _site(self) -> str:
        """Return the user's line that called the operator; in backward, the line of the forward."""
        node = torch._C._current_autograd_node()  # noqa: SLF001 - torch.profiler's own way
        site = calling_site()
        if node is None:
            if site is not None and len(self._lines) < _MOST_LINES:
                # Below autograd: the operator's node has been made, and has taken the number before this one.
                self._lines[torch.autograd._get_sequence_nr() - 1] = site  # noqa: SLF001
            return site_text(site)
        made = self._lines.get(node._sequence_nr())  # noqa: SLF001
        if site is None and made is not None:
            return f"{site_text(made)}, in its backward"
        return site_text(site) or "in backward"


def tensor_text(tensor: Tensor) -> str:
    """Return a tensor's type, dtype and shape as text."""
    return f"{type(tensor).__name__} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


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
    except (NotImplementedError, RuntimeError):  # sparse ones, wrappers: what they store is seen by itself
        return 0
