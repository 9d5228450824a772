"""Records what callables really allocate on the CPU, as tapes.

Torch's profiler tells of every block of the CPU's allocator that is allocated while it runs, and of its release. It
does not know blocks from before: their releases are in no tape. Memory that is no tensor's of its own (numpy's, mapped
files) is not seen either.

Shapes: E events.
"""

from __future__ import annotations

import gc
import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.memory.footprint import Tape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Numbers = Mapping[int, int]

MARK = "recorded part"
NO_KERNEL = frozenset(  # operators that only describe memory anew, or get it
    {
        *("aten::alias", "aten::as_strided", "aten::detach", "aten::detach_", "aten::diagonal", "aten::empty"),
        *("aten::empty_like", "aten::empty_strided", "aten::expand", "aten::is_nonzero", "aten::item"),
        *("aten::lift_fresh", "aten::narrow", "aten::permute", "aten::resize_", "aten::resolve_conj"),
        *("aten::resolve_neg", "aten::result_type", "aten::select", "aten::slice", "aten::split", "aten::squeeze"),
        *("aten::t", "aten::transpose", "aten::unbind", "aten::unsqueeze", "aten::view", "aten::view_as"),
        *("aten::_local_scalar_dense", "aten::_reshape_alias", "aten::_unsafe_view", "aten::set_"),
    }
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a part of a step did."""

    tape: Tape
    kernels: int


@dataclass(slots=True)
class Roll:
    """A tape in the making."""

    block: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    kernels: int = 0
    own: dict[int, int] = field(default_factory=dict)  # live blocks that were allocated here, and their bytes

    def came(self, block: int, size_bytes: int) -> None:
        """Write down an allocation."""
        self.block.append(block)
        self.bytes.append(size_bytes)
        self.own[block] = size_bytes

    def went(self, block: int, size_bytes: int, *, shared: bool) -> None:
        """Write down a release, unless it is of what an earlier tape has left over."""
        if self.own.pop(block, None) is not None or shared:
            self.block.append(block)
            self.bytes.append(-size_bytes)

    def done(self, shared: Mapping[int, int], *, close: bool) -> Recorded:
        """Return the tape, its own blocks numbered from 0; what is left over and not shared is released at the end."""
        left = [(block, size) for block, size in self.own.items() if close and block not in shared]
        for block, size_bytes in left:
            self.went(block, size_bytes, shared=False)
        own = dict.fromkeys(block for block in self.block if block not in shared)
        names = {block: place for place, block in enumerate(own)} | dict(shared)
        blocks = np.array([names[block] for block in self.block], np.int64)
        return Recorded(Tape(blocks, np.array(self.bytes, np.int64)), self.kernels)


@dataclass(slots=True)
class Rolls:
    """The tapes of parts that follow each other."""

    parts: list[Roll]
    shared_at: Sequence[Numbers]  # after each part: the number that a block has in every tape, by its address
    part: int = -1
    blocks: int = 0
    live: dict[int, tuple[int, int]] = field(default_factory=dict)  # by address: block, bytes
    shared: dict[int, int] = field(default_factory=dict)  # by block: its number in every tape

    def see(self, event: Event) -> None:
        """Write down an event."""
        if event.mark:
            self.share()
            self.part += 1
            return
        roll = self.parts[max(self.part, 0)]
        roll.kernels += not event.bytes
        # An address may be given out while it is live: then a thread that nobody watches has released it.
        if event.bytes and event.pointer in self.live:
            block, size_bytes = self.live.pop(event.pointer)
            roll.went(block, size_bytes, shared=block in self.shared)
        if event.bytes > 0:
            self.live[event.pointer] = (self.blocks, event.bytes)
            roll.came(self.blocks, event.bytes)
            self.blocks += 1

    def share(self) -> None:
        """Learn which of the live blocks other tapes know."""
        if 0 <= self.part < len(self.shared_at):
            for pointer, number in self.shared_at[self.part].items():
                if pointer in self.live:
                    self.shared[self.live[pointer][0]] = number

    def done(self, *, close: bool) -> list[Recorded]:
        """Return all tapes."""
        self.share()
        return [roll.done(self.shared, close=close) for roll in self.parts]


def measure(run: Callable[[], object]) -> Tape:
    """Run something once, for real, and return its allocations and releases; what it leaves stays allocated."""
    return record([run], close=False)[0].tape


def record(
    runs: Sequence[Callable[[], object]], shared: Callable[[], Numbers] = dict, *, close: bool = True
) -> list[Recorded]:
    """Run one after another and return what each allocates and releases.

    `shared` is asked after each run for the addresses of blocks that have a number, below 0, in every tape. What else a
    run leaves is closed: released at the end of its own tape, and not where it really was. Garbage is collected after
    each run and never within, so that one run gives one tape.
    """
    roots, shared_at = profiled(runs, shared)
    rolls = Rolls([Roll() for _ in runs], shared_at)
    for event in events_of(roots):
        rolls.see(event)
    return rolls.done(close=close)


def profiled(runs: Sequence[Callable[[], object]], shared: Callable[[], Numbers]) -> tuple[Any, list[Numbers]]:
    """Run under the profiler; return the roots of its tree of events, and what was shared after each run."""
    # kineto writes "profiler_start" to stderr at each start unless told before the first one (pytorch/kineto#1325)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.autograd.profiler import record_function
    from torch.profiler import ProfilerActivity, profile

    shared_at = []
    with no_collection(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for run in runs:
            with record_function(MARK):
                run()
                gc.collect()
                shared_at.append(shared())
    return profiler.profiler.kineto_results.experimental_event_tree(), shared_at


@contextmanager
def no_collection() -> Iterator[None]:
    """Let no garbage be collected unasked, and none from before when asked: looking through it all takes long."""
    was_on, thaw = gc.isenabled(), not gc.get_freeze_count()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if thaw:
            gc.unfreeze()
        if was_on:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the profiler saw: the start of a part, a kernel, a block that came or went."""

    at_ns: int
    mark: bool = False
    pointer: int = 0
    bytes: int = 0  # 0: no block


def events_of(roots: Iterable[Any]) -> list[Event]:
    """Return what matters of a tree of events, in order of time."""
    waiting, events = list(roots)[::-1], []
    while waiting:
        node = waiting.pop()
        waiting += node.children[::-1]
        event = event_of(node)
        if event:
            events.append(event)
    return sorted(events, key=lambda event: event.at_ns)


def event_of(node: Any) -> Event | None:
    """Return what a node of the profiler's tree tells; nothing if it does not matter."""
    name = node.name
    if name == "[memory]":
        block = node.extra_fields
        here = block.device.type == "cpu"
        return Event(node.start_time_ns, pointer=block.ptr, bytes=block.alloc_size) if here else None
    if name == MARK:
        return Event(node.start_time_ns, mark=True)
    inner = any(child.name != "[memory]" for child in node.children)
    counts = name.startswith("aten::") and name not in NO_KERNEL and not inner
    return Event(node.start_time_ns) if counts else None


def counted_flops(run: Callable[[], object]) -> int:
    """Run something and return its floating-point operations, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())
