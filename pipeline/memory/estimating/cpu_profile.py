"""Records what callables really allocate on the CPU, as tapes.

Torch's profiler reports every block that the CPU's allocator allocates while it runs, and its release. Releases of
earlier blocks are in no tape. Memory that no tensor owns (numpy's, mapped files) is not seen either.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

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
class RecordedPart:
    """The allocations of a part of a step, and its number of kernels."""

    tape: Tape
    kernels: int


class ProfiledEvent(NamedTuple):
    """An event of the profiler: the start of a part, a kernel, a block allocated or released."""

    at_ns: int
    is_mark: bool = False
    pointer: int = 0
    bytes: int = 0  # 0: no block


class LiveBlock(NamedTuple):
    """A block that was allocated and not yet released."""

    number: int
    bytes: int
    part: int


def measure(run: Callable[[], object]) -> Tape:
    """Call a function once and return its allocations and releases; what it leaves stays allocated."""
    return record([run], close=False)[0].tape


def record(
    runs: Sequence[Callable[[], object]], shared: Callable[[], Numbers] = dict, *, close: bool = True
) -> list[RecordedPart]:
    """Call functions one after another and return what each allocates and releases.

    `shared` is called after each run; it returns the addresses of blocks that have the same number, below 0, in every
    tape. With `close`, other blocks that a run leaves are released at the end of its own tape. Garbage is collected
    after each run and never within, so that tapes are reproducible.
    """
    roots, shared_after = profiled(runs, shared)
    tapes: list[list[tuple[int, int]]] = [[] for _ in runs]  # blocks with their bytes, below 0 where they are released
    kernels = [0] * len(runs)
    live: dict[int, LiveBlock] = {}  # by address
    known: dict[int, int] = {}  # the number that a block has in every tape
    part, allocated = -1, 0

    def learn() -> None:
        known.update({live[at].number: number for at, number in shared_after[part].items() if at in live})

    for event in profiled_events(roots):
        if event.is_mark:
            if part >= 0:
                learn()
            part += 1
            continue
        tape = tapes[part]
        kernels[part] += not event.bytes
        # An address may be given out while it is live: then a thread that nobody watches has released it.
        if event.bytes and event.pointer in live:
            block = live.pop(event.pointer)
            if block.part == part or block.number in known:  # else an earlier tape has closed it
                tape.append((block.number, -block.bytes))
        if event.bytes > 0:
            live[event.pointer] = LiveBlock(allocated, event.bytes, part)
            tape.append((allocated, event.bytes))
            allocated += 1
    learn()
    return [
        RecordedPart(finished(events, known, close=close), count) for events, count in zip(tapes, kernels, strict=True)
    ]


def finished(events: list[tuple[int, int]], known: Numbers, *, close: bool) -> Tape:
    """Return a tape with its own blocks numbered from 0; with `close`, those left over are released at the end."""
    balance: Counter[int] = Counter()
    for block, size_bytes in events:
        balance[block] += size_bytes
    closing = [(block, -size) for block, size in balance.items() if close and size and block not in known]
    own = dict.fromkeys(block for block, _ in events if block not in known)
    numbers = {**{block: place for place, block in enumerate(own)}, **known}
    blocks = [(numbers[block], size) for block, size in (*events, *closing)]
    block_E, bytes_E = np.array(blocks, np.int64).reshape(-1, 2).T.copy()
    return Tape(block_E, bytes_E)


def profiled(runs: Sequence[Callable[[], object]], shared: Callable[[], Numbers]) -> tuple[Any, list[Numbers]]:
    """Call functions under the profiler; return the roots of its event tree, and the shared blocks after each run."""
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
    """Turn off automatic garbage collection, and freeze existing objects so that explicit collections are quick."""
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


def profiled_events(roots: Iterable[Any]) -> list[ProfiledEvent]:
    """Return the relevant events of a tree in order of time, from the first part on."""
    waiting, events = list(roots)[::-1], []
    while waiting:
        node = waiting.pop()
        waiting += node.children[::-1]
        event = _event_of(node)
        if event:
            events.append(event)
    events.sort(key=lambda event: event.at_ns)
    first = next(place for place, event in enumerate(events) if event.is_mark)
    return events[first:]


def _event_of(node: Any) -> ProfiledEvent | None:
    """Return the event of a node of the profiler's tree; None if it is irrelevant."""
    name = node.name
    if name == "[memory]":
        block = node.extra_fields
        here = block.device.type == "cpu"
        return ProfiledEvent(node.start_time_ns, pointer=block.ptr, bytes=block.alloc_size) if here else None
    if name == MARK:
        return ProfiledEvent(node.start_time_ns, is_mark=True)
    inner = any(child.name != "[memory]" for child in node.children)
    counts = name.startswith("aten::") and name not in NO_KERNEL and not inner
    return ProfiledEvent(node.start_time_ns) if counts else None


def counted_flops(run: Callable[[], object]) -> int:
    """Call a function and return its floating-point operations, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())
