"""Packs batches of any structure into one block of memory, and moves them to a device, on request or ahead of time.

A copy from pinned memory is asynchronous. torch's pinned allocator reuses a block, or a view of one, only after the
copies from it have ended.
"""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from pipeline.device.accelerator import Card, is_card, unless_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ALIGNMENT = 64


def bytes_on_host(size_bytes: int, *, pin: bool = True) -> torch.Tensor:
    """Allocate host memory as bytes."""
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pin)


def moved(batch: Any, device: torch.device | str, *, waits: bool = False) -> Any:
    """Return a batch on a device: by its own `to` where it has one, else with all its tensors there, however nested.

    With `waits`, all copies have ended on return; copies to the host always have.
    """
    non_blocking = is_card(device) and not waits
    return map_tensors(
        lambda tensor: tensor.to(device, non_blocking=non_blocking), batch, own=lambda value: value.to(device)
    )


def map_tensors(change: Callable[[torch.Tensor], Any], value: Any, *, own: Callable[[Any], Any] | None = None) -> Any:
    """Return a value with its tensors changed: within dicts, lists, tuples, named tuples and dataclasses.

    `own` is called for objects that have a `to` method. Other values stay as they are.
    """

    def by_itself(leaf: Any) -> bool:
        return own is not None and hasattr(leaf, "to") and not isinstance(leaf, type)

    def changed(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return change(leaf)
        if own is not None and by_itself(leaf):
            return own(leaf)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            return _changed_fields(leaf, lambda part: map_tensors(change, part, own=own))
        return leaf

    return tree_map(changed, value, is_leaf=by_itself)


def _changed_fields(value: Any, change: Callable[[Any], Any]) -> Any:
    """Copy a dataclass with all its values changed, without calling `__init__`, which may take other arguments."""
    made = copy.copy(value)
    for name in dict.fromkeys([field.name for field in fields(value)] + list(getattr(made, "__dict__", ()))):
        if isinstance(getattr(type(value), name, None), cached_property):
            object.__delattr__(made, name)  # it was computed from the old tensors
        elif hasattr(value, name):
            object.__setattr__(made, name, change(getattr(value, name)))  # also where the dataclass is frozen
    return made


def tensors_of(batch: Any) -> list[torch.Tensor]:
    """Return the tensors of a batch, each once."""
    found: dict[int, torch.Tensor] = {}
    map_tensors(lambda tensor: found.setdefault(id(tensor), tensor), batch)
    return list(found.values())


def packed(batch: Any, room: Callable[[int], torch.Tensor]) -> Any:
    """Return a batch whose tensors are copied side by side into memory from `room`; sparse ones are not copied."""
    tensors = [tensor for tensor in tensors_of(batch) if tensor.layout == torch.strided and tensor.device.type == "cpu"]
    copies = _views(tensors, room)
    for tensor in tensors:
        copies[id(tensor)].copy_(tensor)
    return map_tensors(lambda tensor: copies.get(id(tensor), tensor), batch)


def outlined(batch: Any, memory: torch.Tensor) -> Any:
    """Replace a packed batch's tensors by meta tensors, to send it to another process."""
    packed_here = [tensor for tensor in tensors_of(batch) if tensor.untyped_storage().data_ptr() == memory.data_ptr()]
    outlines = {id(tensor): tensor.to("meta") for tensor in packed_here}
    return map_tensors(lambda tensor: outlines.get(id(tensor), tensor), batch)


def filled(outline: Any, memory: torch.Tensor) -> Any:
    """Restore a packed batch from its outline and its memory."""
    views = _views([tensor for tensor in tensors_of(outline) if tensor.is_meta], lambda size: memory[:size])
    return map_tensors(lambda tensor: views.get(id(tensor), tensor), outline)


def _views(tensors: Sequence[torch.Tensor], room: Callable[[int], torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return uninitialized copies of tensors, adjacent in memory from `room`, by the id of the original."""
    sizes = [size for tensor in tensors for size in (tensor.nbytes, -tensor.nbytes % ALIGNMENT)]
    parts = room(sum(sizes)).split_with_sizes(sizes)[::2]
    pairs = zip(tensors, parts, strict=True)
    return {id(tensor): part.view(tensor.dtype).view(tensor.shape) for tensor, part in pairs}


class CopyAhead:
    """Moves batches to a card, and copies the next one ahead on a side stream; at most one is ahead.

    The batch's memory belongs to the compute stream, which waits for the copy before it uses or frees it, even if the
    batch is dropped. Tensors outside pinned memory, and objects with a `to` method, are moved when their turn comes.
    """

    def __init__(self, device: str) -> None:
        self._card = Card(device)
        self._side = self._card.new_stream()
        self.following: Callable[[], Any] | None = None  # returns the next batch, None if not read yet; called once
        self.bytes = 0  # on the card, of the batch that is ahead
        self._source: Any = None  # the batch on the host that is copied ahead
        self._copy: Any = None
        self._copied: Any = None
        self._is_refused = False  # after one failed allocation no more are tried: each frees the cache

    def moved(self, batch: Any) -> Any:
        """Return a batch on the card, and begin to copy the next one."""
        there = moved(self.drop() if batch is self._source else batch, self._card.on)
        if self.following is not None:
            following, self.following = self.following, None
            self.drop()
            self._begin(following())
        return there

    def drop(self) -> Any:
        """Forget the batch that was copied ahead, and return it."""
        copy_, copied = self._copy, self._copied
        if copied is not None:
            self._card.current_stream().wait_event(copied)
        self._source = self._copy = self._copied = None
        self.bytes = 0
        return copy_

    def _begin(self, batch: Any) -> None:
        """Allocate memory for a batch, and begin to copy it."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

        def room(tensor: torch.Tensor) -> torch.Tensor:
            plain = tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.requires_grad
            if not (plain and tensor.is_pinned()):
                return tensor
            pairs.append((torch.empty_like(tensor, device=self._card.on), tensor))
            return pairs[-1][0]

        if batch is None or self._is_refused:
            return
        there = unless_out_of_memory(lambda: map_tensors(room, batch, own=lambda value: value))
        self._is_refused = there is None
        if there is None or not pairs:
            return
        is_free = self._card.event()  # reached once the compute stream no longer uses the memory
        with self._side:
            self._side.wait_event(is_free)
            for target, tensor in pairs:
                target.copy_(tensor, non_blocking=True)
            self._source, self._copy, self._copied = batch, there, self._card.event()
        self.bytes = sum(target.nbytes for target, _ in pairs)
