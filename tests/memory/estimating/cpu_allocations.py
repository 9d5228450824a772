"""What a callable really allocates on the CPU: torch's profiler reports every block that the CPU's allocator gives."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.memory.footprint import Tape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MARK = "recorded part"


def measure(run: Callable[[], object]) -> Tape:
    """Call a function once and return its allocations and releases; what it leaves stays allocated."""
    events: list[tuple[int, int]] = []
    live: dict[int, tuple[int, int]] = {}  # block and bytes, by address
    made = 0
    for address, size in _blocks(run):
        # An address may be given out while it is live: then a thread that nobody watches has released it.
        if address in live:
            block, size_bytes = live.pop(address)
            events.append((block, -size_bytes))
        if size > 0:
            live[address] = made, size
            events.append((made, size))
            made += 1
    block_E, bytes_E = np.array(events, np.int64).reshape(-1, 2).T.copy()
    return Tape(block_E, bytes_E)


def _blocks(run: Callable[[], object]) -> list[tuple[int, int]]:
    """Call a function under the profiler; return addresses and bytes in order, below 0 where they were released."""
    # kineto writes "profiler_start" to stderr at each start unless told before the first one (pytorch/kineto#1325)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.autograd.profiler import record_function
    from torch.profiler import ProfilerActivity, profile

    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function(MARK):
            run()
            gc.collect()
    finally:
        if was_on:
            gc.enable()
    nodes = list(_nodes(profiler.profiler.kineto_results.experimental_event_tree()))
    begun = next(node.start_time_ns for node in nodes if node.name == MARK)
    blocks = [node for node in nodes if node.name == "[memory]" and node.start_time_ns >= begun]
    blocks = sorted(blocks, key=lambda node: node.start_time_ns)
    return [(node.extra_fields.ptr, node.extra_fields.alloc_size) for node in blocks]


def _nodes(roots: Any) -> Iterator[Any]:
    waiting = list(roots)[::-1]
    while waiting:
        node = waiting.pop()
        waiting += node.children[::-1]
        yield node
