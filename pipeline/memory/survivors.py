"""Which tensors outlive the steps that made them, and where they were made.

For a few steps every new storage is noted by a weak reference with the line of the user's code; what still lives some
steps later is what grows. Seen is what operators return, forward and backward, on any device; what compiled code
allocates within is not. While this looks, autograd adds up gradients out of place (an active dispatch mode has it do
so): the same numbers, up to a quarter more memory. So a look is short.
"""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.memory import sites

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import CodeType

    from torch import Tensor

_REFERENCE: Any = StorageWeakRef  # torch gives it no types
_MOST_LINES = 100_000  # of one look: nodes of a step, of which each may be asked for
_BEGUN = frozenset(("lift_fresh", "lift_fresh_copy"))  # torch.tensor([...]): what goes in is new itself


@dataclass(frozen=True, slots=True)
class Made:
    """A storage, and where it was made."""

    reference: Any
    bytes: int
    kind: str
    site: str

    @classmethod
    def of(cls, tensor: Tensor, site: str) -> Made:
        """Note what a tensor stores."""
        storage = tensor.untyped_storage()
        return cls(_REFERENCE(storage), storage.nbytes(), kind_of(tensor), site)

    @property
    def number(self) -> int:
        """Return what tells storages apart, while it lives."""
        return int(self.reference.cdata)

    @property
    def is_gone(self) -> bool:
        """Tell whether it has been released."""
        return bool(self.reference.expired())


class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every new storage, while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, Made] = {}
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
            known = set() if func.overloadpacket.__name__ in _BEGUN else {_number(one) for one in _tensors(args)}
            known.update(_number(one) for one in _tensors(tuple((kwargs or {}).values())))
            new = [one for one in fresh if _number(one) not in known]
            site = self._site()
            for one in new:
                self._note(one, site)
        return returned

    def prune(self) -> None:
        """Forget what is gone."""
        self.made = {number: one for number, one in self.made.items() if not one.is_gone}
        self._lines = {}

    def _note(self, tensor: Tensor, site: str) -> None:
        storage = _storage(tensor)
        if storage is not None and storage.nbytes():
            made = Made.of(tensor, site)
            self.made[made.number] = made

    def _site(self) -> str:
        """Return the line that called, or the one whose backward this is."""
        node = torch._C._current_autograd_node()  # noqa: SLF001 - torch.profiler's own way
        site = sites.calling_site()
        if node is None:
            if site is not None and len(self._lines) < _MOST_LINES:
                # Below autograd: the operator's node has been made, and has taken the number before this one.
                self._lines[torch.autograd._get_sequence_nr() - 1] = site  # noqa: SLF001
            return sites.said(site)
        made = self._lines.get(node._sequence_nr())  # noqa: SLF001
        if site is None and made is not None:
            return f"{sites.said(made)}, in its backward"
        return sites.said(site) or "in backward"


def kind_of(tensor: Tensor) -> str:
    """Write what a tensor is."""
    return f"{type(tensor).__name__} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def visible() -> Iterator[tuple[int, Tensor]]:
    """Yield all tensors that Python has an object for, and the number of what each stores."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for one in gc.get_objects():
            if issubclass(type(one), torch.Tensor) and (number := _number(one)):
                yield number, one


def _tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operator takes or returns."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _number(tensor: Tensor) -> int:
    storage = _storage(tensor)
    return int(storage._cdata) if storage is not None else 0  # noqa: SLF001


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse ones, wrappers: what they store is seen by itself
        return None
