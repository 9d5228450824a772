"""Who keeps objects alive, in the words of the code: "list `history` of mylab.docking.Model".

Best effort, within a bound on time: from the objects up through what refers to them, to the container that has most of
them, and from there to a name.
"""

from __future__ import annotations

import gc
import inspect
import sys
import time
import warnings
from collections import deque
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.memory import code_sites
from pipeline.memory.code_sites import is_users, place

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import CodeType

    from torch import Tensor

CONTAINERS: tuple[type, ...] = (list, dict, set, deque)
SAMPLE = 8  # of the objects that grow
_DEPTH, _WIDTH = 6, 24
_IN_NO_CYCLE = (type, ModuleType, BuiltinFunctionType, MethodType)


# Asked is the type of an object, not `isinstance`, which asks the object itself: some raise, or warn.


class ReferrerSearch:
    """A search through all objects, which takes no longer than so many seconds."""

    def __init__(self, time_s: float = 1.0) -> None:
        self._end = time.monotonic() + time_s
        self._own: set[int] = {id(self.__dict__)}  # containers of the search itself

    def ignore(self, *containers: object) -> None:
        """Take no notice of some containers: the caller's own."""
        self._own.update(map(id, containers))

    def container_of(self, objects: Sequence[object]) -> Any:
        """Return what has most of some objects, itself or through others; none: nothing found has."""
        level = list(objects[:SAMPLE])
        wanted = max(2, (len(level) + 1) // 2)
        seen = set(map(id, level))
        for _ in range(_DEPTH):
            if not level or time.monotonic() > self._end:
                return None
            found = self._referrers(level)
            counts = [_has(holder, level) for holder in found]
            if counts and max(counts) >= wanted:
                return found[counts.index(max(counts))]
            level = [holder for holder in found if id(holder) not in seen][:_WIDTH]
            seen.update(map(id, level))
            self.ignore(found, level)
        return None

    def name_of(self, thing: object) -> str:
        """Return by which name of the code one comes to an object; empty: by none that was found."""
        level: list[tuple[object, str]] = [(thing, type(thing).__name__)]
        seen = {id(thing)}
        for _ in range(_DEPTH):
            following: list[tuple[object, str]] = []
            self.ignore(level, following, *level)
            for held, text in level:
                if time.monotonic() > self._end:
                    return ""
                found = self._referrers([held])
                if name := self._best_name(found, held) or _local(held):
                    return f"{text} {name}"
                fresh = [holder for holder in found if id(holder) not in seen]
                seen.update(map(id, fresh))
                for holder in fresh[: _WIDTH - len(following)]:
                    entry = holder, f"{text} in a {type(holder).__name__}" if type(holder) in CONTAINERS else text
                    self.ignore(entry)
                    following.append(entry)
                self.ignore(found, fresh)
            level = following
        return ""

    def cycle_of(self, thing: object) -> str:
        """Return the kinds of objects through which one refers to itself; empty: it does not, as far as was found."""
        paths: list[tuple[object, tuple[str, ...]]] = [(thing, (type(thing).__name__,))]
        seen: set[int] = set()
        for _ in range(2 * _DEPTH):
            following: list[tuple[object, tuple[str, ...]]] = []
            self.ignore(paths, following, *paths)
            for holder, path in paths:
                for held in () if time.monotonic() > self._end else gc.get_referents(holder):
                    if held is thing:
                        return " → ".join((*path, path[0]))
                    if id(held) not in seen and gc.is_tracked(held) and not issubclass(type(held), _IN_NO_CYCLE):
                        seen.add(id(held))
                        following.append((held, (*path, type(held).__name__)))
            paths = following[: 8 * _WIDTH]
        return ""

    def _referrers(self, objects: list[Any]) -> list[Any]:
        self.ignore(objects)
        found: list[Any] = gc.get_referrers(*objects)
        found = [holder for holder in found if id(holder) not in self._own and not _is_a_frame_of_ours(holder)]
        self.ignore(found)
        return found

    def _best_name(self, holders: list[Any], held: object) -> str:
        names = []  # no generator: what it captures would be one more that holds the object
        for holder in holders:
            if name := self._named(holder, held):
                names.append(name)  # noqa: PERF401
        return min(names)[1] if names else ""

    def _named(self, holder: Any, held: object) -> tuple[int, str] | None:
        """Return the name by which a holder knows what it holds; smaller numbers are better names."""
        if type(holder) is dict:
            return self._named_in(holder, held)
        if type(holder) is CellType:
            name = next(self._closures(holder), "")
            return (2, name) if name else None
        if issubclass(type(holder), type):
            return _attribute(vars(holder), held, f"of class {_type_name(holder)}")
        if type(holder) is FrameType:
            return None
        return _attribute(_variables(holder), held, f"of {_type_name(type(holder))}")

    def _named_in(self, names: dict[Any, Any], held: object) -> tuple[int, str] | None:
        if names.get("__name__") in sys.modules and vars(sys.modules[names["__name__"]]) is names:
            known = _attribute(names, held, f"of module {names['__name__']}")
            return (0, known[1]) if known else None
        for owner in self._referrers([names]):
            if not issubclass(type(owner), ModuleType) and _variables(owner) is names:
                return _attribute(names, held, f"of {_type_name(type(owner))}")
        return None

    def _closures(self, cell: CellType) -> Iterator[str]:
        for cells in self._referrers([cell]):
            if type(cells) is not tuple:
                continue
            for function in self._referrers([cells]):
                if type(function) is FunctionType and function.__closure__ is cells:
                    name = function.__code__.co_freevars[list(map(id, cells)).index(id(cell))]
                    yield f"`{name}` in a closure of {function.__module__}.{function.__qualname__}"


def container_lengths(objects: Iterable[object]) -> dict[int, int]:
    """Return how many elements each container has, by its id."""
    return {id(container): len(container) for container in objects if type(container) in CONTAINERS}  # type: ignore[arg-type]


def all_containers() -> list[Any]:
    """Return all lists, sets and dictionaries, those too that the garbage collector does not follow."""
    objects = gc.get_objects()
    found = [thing for thing in objects if type(thing) in CONTAINERS]
    # A dictionary of numbers or arrays is tracked by nobody but its owner.
    held = gc.get_referents(*objects)
    found.extend({id(thing): thing for thing in held if type(thing) is dict and not gc.is_tracked(thing)}.values())
    return found


def _has(holder: object, objects: Iterable[object]) -> int:
    """Count of how many objects a container has; what is no container has none."""
    if type(holder) not in CONTAINERS:
        return 0
    among = set(map(id, objects))
    return len(among.intersection(map(id, gc.get_referents(holder))))


def _variables(owner: Any) -> dict[str, Any] | None:
    """Return an object's own attributes, as they are."""
    try:
        found = object.__getattribute__(owner, "__dict__")
    except (AttributeError, TypeError):
        return None
    return found if type(found) is dict else None


def _attribute(names: Any, held: object, of: str) -> tuple[int, str] | None:
    for name, value in list((names or {}).items()):
        if value is held and isinstance(name, str):
            return 1, f"`{name}` {of}"
    return None


def _local(held: object) -> str:
    """Return the name by which a running function knows an object; empty: by none."""
    for running in sys._current_frames().values():  # noqa: SLF001 - the only way to see what other threads hold
        frame: FrameType | None = running
        while frame is not None:
            code = frame.f_code
            if is_users(code.co_filename) and (name := _name_in(frame, held)):
                return f"`{name}` in {place(code.co_filename, frame.f_lineno, code.co_name)}"
            frame = frame.f_back
    return ""


def _name_in(frame: FrameType, held: object) -> str:
    names = frame.f_locals
    found = ""
    for name, value in names.items():
        if value is held:
            found = name
            break
    if type(names) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # A copy that the frame would keep, with all that is in it, until it is asked again (before Python 3.13).
        names.clear()
    return found


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_a_frame_of_ours(holder: Any) -> bool:
    return type(holder) is FrameType and not is_users(holder.f_code.co_filename)


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
        """Return what tells storages apart, while it lives."""
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
        """Leave compiled code alone: run without, it would round differently."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what it made."""
        returned = func(*args, **(kwargs or {}))
        fresh = list(_tensors(returned))
        if fresh:
            given = () if func.overloadpacket.__name__ in _BEGUN else _tensors(args)
            known = {_number(tensor) for tensor in (*given, *_tensors(tuple((kwargs or {}).values())))}
            site = self._site()
            for tensor in fresh:
                number = _number(tensor)
                if number and number not in known and tensor.untyped_storage().nbytes():
                    self.made[number] = MadeStorage.of(tensor, site)
        return returned

    def prune(self) -> None:
        self.made = {number: storage for number, storage in self.made.items() if not storage.is_gone}
        self._lines = {}

    def _site(self) -> str:
        """Return the line that called, or the one whose backward this is."""
        node = torch._C._current_autograd_node()  # noqa: SLF001 - torch.profiler's own way
        site = code_sites.calling_site()
        if node is None:
            if site is not None and len(self._lines) < _MOST_LINES:
                # Below autograd: the operator's node has been made, and has taken the number before this one.
                self._lines[torch.autograd._get_sequence_nr() - 1] = site  # noqa: SLF001
            return code_sites.site_text(site)
        made = self._lines.get(node._sequence_nr())  # noqa: SLF001
        if site is None and made is not None:
            return f"{code_sites.site_text(made)}, in its backward"
        return code_sites.site_text(site) or "in backward"


def tensor_text(tensor: Tensor) -> str:
    """Write what a tensor is."""
    return f"{type(tensor).__name__} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def visible_tensors() -> Iterator[tuple[int, Tensor]]:
    """Yield all tensors that Python has an object for, and the number of what each stores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in gc.get_objects():
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
