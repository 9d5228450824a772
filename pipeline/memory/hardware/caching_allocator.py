"""Torch's caching allocator: its settings in the environment, and a simulator of the memory it reserves for tapes.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (torch 2.13), whose functions are named where they are
followed. It covers one stream and no private pools, as in training without CUDA graphs. No limit is simulated: plans
compare the reserved memory with it. An expandable segment never runs out of addresses here; in torch they end at 9/8 of
the card, and another segment begins.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from pipeline.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pipeline.memory.footprint import StepTapes, Tape

# As torch 2.13 looks for them [measured; a test looks]; versions before and after have looked in another order.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")

DEFAULT, EXPANDABLE = "", "expandable_segments:True"  # the settings that plans choose from

_LEAST = 512  # kMinBlockSize: what sizes are rounded up to
_SMALL = MIB  # kSmallSize: the largest that the small pool serves
_SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
_LARGE_SEGMENT = 20 * MIB  # kLargeBuffer; large_segment_size() in newer ones
_OWN_SEGMENT = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own size
_LARGE_ROUND = 2 * MIB  # kRoundLarge
_ADDRESS_BITS = 56  # of a key, below the size


def allocator_options(text: str) -> dict[str, str]:
    """Return the allocator's options in a text, by name."""
    return dict(re.findall(r"([^,:\[\]]+):(\[[^\]]*\]|[^,:\[\]]+)", re.sub(r"\s+", "", text)))


def allocator_settings(planned: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives torch a plan's settings and the user's own, which win; none if none is planned."""
    name = next((name for name in VARIABLES if name in environment), VARIABLES[0])
    own = environment.get(name, "")
    set_already, wanted = allocator_options(own), allocator_options(planned).items()
    new = (f"{option}:{value}" for option, value in wanted if option not in set_already)
    return {name: ",".join(filter(None, (own, *new)))} if planned else {}


def overruled_note(planned: str, environment: Mapping[str, str]) -> str:
    """Return a note on options of a plan that the environment sets otherwise; empty: none."""
    settings = allocator_options(next(iter(allocator_settings(planned, environment).values()), ""))
    others = [option for option, value in allocator_options(planned).items() if settings[option] != value]
    return f"the environment overrules the plan's allocator settings: {', '.join(others)}" if others else ""


@dataclass(slots=True, eq=False)
class SegmentBlock:
    """A range of addresses that is in use, or cached."""

    pool: BlockPool
    address: int
    bytes: int
    is_live: bool = False
    before: SegmentBlock | None = None  # neighbours in the segment
    after: SegmentBlock | None = None

    def cut(self, size: int) -> SegmentBlock:
        """Shorten the block to `size`; return a new block of the rest."""
        rest = SegmentBlock(self.pool, self.address + size, self.bytes - size)
        self.bytes = size
        rest.link(self.after)
        self.link(rest)
        if self.pool.end is self:
            self.pool.end = rest
        return rest

    def link(self, after: SegmentBlock | None) -> None:
        self.after = after
        if after is not None:
            after.before = self

    def absorb_next(self) -> None:
        other = self.after
        assert other is not None
        self.bytes += other.bytes
        self.link(other.after)
        if self.pool.end is other:
            self.pool.end = self


@dataclass(slots=True, eq=False)
class BlockPool:
    """The cached blocks of small or of large requests, by size, then by address."""

    page_bytes: int
    least_rest: int  # a rest as large as this is split off
    keys: list[int] = field(default_factory=list)
    blocks: list[SegmentBlock] = field(default_factory=list)
    end: SegmentBlock | None = None  # the last block of an expandable segment, which can grow
    next_address: int = 0

    def add(self, block: SegmentBlock) -> None:
        key = block.bytes << _ADDRESS_BITS | block.address
        place = bisect_left(self.keys, key)
        self.keys.insert(place, key)
        self.blocks.insert(place, block)

    def remove(self, block: SegmentBlock) -> None:
        self._pop(bisect_left(self.keys, block.bytes << _ADDRESS_BITS | block.address))

    def find(self, size: int) -> SegmentBlock | None:
        """Remove and return the cached block that fits best; None if there is none (`get_free_block`)."""
        place = bisect_left(self.keys, size << _ADDRESS_BITS)
        if place + 1 < len(self.blocks) and self.blocks[place] is self.end:
            place += 1  # a block counts as the size to which it can grow
        return self._pop(place) if place < len(self.blocks) else None

    def _pop(self, place: int) -> SegmentBlock:
        del self.keys[place]
        return self.blocks.pop(place)


class Allocator:
    """The allocator of one GPU."""

    def __init__(self, settings: str = DEFAULT) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = self.reserved_bytes = 0
        self._expandable = settings == EXPANDABLE
        self._small = BlockPool(_SMALL_SEGMENT, _LEAST)
        self._large = BlockPool(_LARGE_SEGMENT, _LEAST if self._expandable else _SMALL + 1, next_address=1 << 54)
        self._shared: dict[int, SegmentBlock] = {}  # by number
        self._left: list[SegmentBlock] = []  # live blocks of tapes that ended

    def play(self, tape: Tape) -> None:
        """Play a tape; its own blocks that it does not release stay in use."""
        shared, own = self._shared, dict[int, SegmentBlock]()
        take, give = self._take, self._give
        rounded_E = np.where(tape.bytes_E > 0, -(-tape.bytes_E // _LEAST) * _LEAST, tape.bytes_E)  # round_size
        for number, size in zip(tape.block_E.tolist(), rounded_E.tolist(), strict=True):
            blocks = own if number >= 0 else shared
            if size and (number in blocks) is (size > 0):
                raise ValueError(f"block {number} is in use and allocated again, or released and not in use")
            if size > 0:
                blocks[number] = take(size)
            elif size < 0:
                give(blocks.pop(number))
        self._left.extend(own.values())

    def live(self) -> Iterator[tuple[int, int]]:
        return ((block.address, block.bytes) for block in (*self._shared.values(), *self._left))

    def _take(self, size: int) -> SegmentBlock:
        pool = self._small if size <= _SMALL else self._large
        block = pool.find(size) or self._make(pool, size)
        if block.bytes - size >= pool.least_rest:  # should_split
            pool.add(block.cut(size))
        block.is_live = True
        self.allocated_bytes = allocated = self.allocated_bytes + block.bytes
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def _give(self, block: SegmentBlock) -> None:
        """Cache a block, joined with free neighbours (`try_merge_blocks`)."""
        self.allocated_bytes -= block.bytes
        block.is_live = False
        pool, before, after = block.pool, block.before, block.after
        if after is not None and not after.is_live:
            pool.remove(after)
            block.absorb_next()
        if before is not None and not before.is_live:
            pool.remove(before)
            before.absorb_next()
            block = before
        pool.add(block)

    def _make(self, pool: BlockPool, size: int) -> SegmentBlock:
        """Return a new segment, or the end of an expandable one, grown by whole pages (`alloc_block`)."""
        end = pool.end
        free = end.bytes if end is not None and not end.is_live else 0
        segment = -(-(size - free) // pool.page_bytes) * pool.page_bytes if self._expandable else _segment_bytes(size)
        self.reserved_bytes += segment
        address, pool.next_address = pool.next_address, pool.next_address + segment
        if end is not None and free:
            pool.remove(end)
            end.bytes += segment
            return end
        block = SegmentBlock(pool, address, segment)
        if self._expandable:
            block.before, pool.end = end, block
            if end is not None:
                end.link(block)
        return block


def _segment_bytes(size: int) -> int:
    """Return how much torch requests from the driver for a block (`get_allocation_size`)."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _LARGE_ROUND) * _LARGE_ROUND


@dataclass(frozen=True, slots=True)
class Replay:
    """The peaks of simulated steps with some settings."""

    allocated_bytes: int  # both at their peaks
    reserved_bytes: int

    @property
    def fragmentation(self) -> float:
        """Return reserved over allocated bytes."""
        return self.reserved_bytes / max(1, self.allocated_bytes)


def replay_steps(steps: Iterable[StepTapes], settings: str, setup: Tape) -> Replay:
    """Play steps after a model's setup."""
    allocator = Allocator(settings)
    allocator.play(setup)
    for step in steps:
        for tape in step.tapes:
            allocator.play(tape)
    return Replay(allocator.peak_allocated_bytes, allocator.reserved_bytes)
