"""Batches of any structure are moved to a device here, and host memory that is filled anew waits for their copies.

A copy from pinned memory goes on while the host does: memory that is used again must not be written to before. Who
moves batches need not know whose memory they are of: every memory that is lent at that moment is told of an event after
the copies, also where a collate has made views of it that nobody can follow.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_map

from pipeline.device.accelerator import Card, is_card

if TYPE_CHECKING:
    from collections.abc import Callable


def moved(batch: Any, device: torch.device | str, *, waits: bool = False) -> Any:
    """Return a batch on a device: by its own `to` where it has one, else with all its tensors there, however nested.

    `waits`: the copies are done when this returns, as they are to the host.
    """
    to_card = is_card(device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=to_card and not waits)

    found = map_tensors(move, batch, own=lambda value: value.to(device))
    if to_card:
        _note_copies(Card(device))
    return found


def map_tensors(
    change: Callable[[Any], Any], value: Any, *, own: Callable[[Any], Any] | None = None, kind: type = torch.Tensor
) -> Any:
    """Return a value with its tensors changed: within dicts, lists, tuples, named tuples and dataclasses.

    `own` is called instead for what has a `to` of its own. All else stays what it is. `kind`: what is changed, if not
    tensors.
    """

    def by_itself(leaf: Any) -> bool:
        return own is not None and hasattr(leaf, "to") and not isinstance(leaf, type)

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            return change(leaf)
        if own is not None and by_itself(leaf):
            return own(leaf)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return _changed_fields(leaf, lambda part: map_tensors(change, part, own=own, kind=kind))
        return leaf

    return tree_map(changed, value, is_leaf=by_itself)


def _changed_fields(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a dataclass with everything changed that it holds; not by its `__init__`, which may want other things."""
    made = copy.copy(value)
    cached = set(vars(made)) if hasattr(made, "__dict__") else set()
    for name in cached | {field.name for field in fields(value)}:
        if isinstance(getattr(type(value), name, None), cached_property):
            object.__delattr__(made, name)  # it was of the tensors as they were
        elif hasattr(value, name):
            object.__setattr__(made, name, change(getattr(value, name)))  # frozen ones, too
    return made


# Memory that is filled anew


class CopiesUnderWay:
    """The copies to cards that may still read some memory of the host: an event after the last of each stream."""

    def __init__(self) -> None:
        self.is_lent = False  # somebody holds the memory, and may copy it
        self._events: dict[tuple[int, int], Any] = {}
        with _adding:
            _known.add(self)

    def note(self, stream: tuple[int, int], event: Any) -> None:
        """Take an event after a copy, in place of an earlier one of that stream."""
        self._events[stream] = event

    def wait(self) -> None:
        """Wait until no copy reads the memory any more."""
        while self._events:
            self._events.popitem()[1].synchronize()


_known: WeakSet[CopiesUnderWay] = WeakSet()
_adding = threading.Lock()  # readers make memory while another thread goes through all


def _note_copies(card: Card) -> None:
    """Record an event after all copies of the current stream, for all memory that is lent."""
    with _adding:
        lent = [copies for copies in _known if copies.is_lent]
    if lent:
        stream, event = card.current_stream(), card.event()
        for copies in lent:
            copies.note((card.index, int(stream.stream_id)), event)
