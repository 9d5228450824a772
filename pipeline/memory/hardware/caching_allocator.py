"""A simulator of torch's caching allocator: the memory it reserves while tapes of allocations are played.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` (torch 2.13), whose functions are named where they are
followed. It covers one stream and no private pools, as in training without CUDA graphs. An expandable
segment never runs out of addresses here; in torch they end at 9/8 of the card, and another segment begins.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.units import MIB, format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pipeline.memory.footprint import StepTapes, Tape

_LEAST = 512  # kMinBlockSize: what sizes are rounded up to
_SMALL = MIB  # kSmallSize: the largest that the small pool serves
_SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
_LARGE_SEGMENT = 20 * MIB  # kLargeBuffer; large_segment_size() in newer ones
_OWN_SEGMENT = 10 * MIB  # kMinLargeAlloc: from here on a request gets a segment of its own size
_LARGE_ROUND = 2 * MIB  # kRoundLarge

_ENDLESS = 1 << 54  # addresses of an expandable segment: more than any run needs
_ADDRESS_BITS = 56  # of a key, below the size
LIVE, CACHED, UNMAPPED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The settings in PYTORCH_CUDA_ALLOC_CONF that plans choose from; the defaults are torch's."""

    expandable: bool = False

    @property
    def text(self) -> str:
        """Return the variable's value; empty if it is to be left unset."""
        return "expandable_segments:True" if self.expandable else ""

    @property
    def name(self) -> str:
        return self.text or "default"


class SimulatedOutOfMemory(RuntimeError):
    """The GPU would have had no memory left for a block, even after the cache was emptied."""

    def __init__(self, wanted_bytes: int, allocated_bytes: int, reserved_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"out of memory: {format_bytes(wanted_bytes)} wanted, {format_bytes(limit_bytes)} may be reserved, "
            f"{format_bytes(reserved_bytes)} are, {format_bytes(allocated_bytes)} of them in use"
        )
        self.allocated_bytes, self.limit_bytes = allocated_bytes, limit_bytes


@dataclass(slots=True, eq=False)
class SegmentBlock:
    """A range of addresses that is used, cached, or not backed by memory."""

    pool: BlockPool
    address: int
    bytes: int
    state: int
    before: SegmentBlock | None = None  # neighbours in the segment
    after: SegmentBlock | None = None

    def cut(self, size: int) -> SegmentBlock:
        """Shorten the block to `size`; return a new block of the rest."""
        rest = SegmentBlock(self.pool, self.address + size, self.bytes - size, self.state)
        rest.before, rest.after = self, self.after
        if self.after is not None:
            self.after.before = rest
        self.after = rest
        self.bytes = size
        return rest

    def absorb(self, other: SegmentBlock) -> None:
        if other is self.before:
            self.address = other.address
            self.before = other.before
            if other.before is not None:
                other.before.after = self
        else:
            self.after = other.after
            if other.after is not None:
                other.after.before = self
        self.bytes += other.bytes


@dataclass(slots=True, eq=False)
class BlockPool:
    """The cached blocks of small or of large requests, by size, then by address."""

    page_bytes: int
    start: int  # of its expandable segment
    least_rest: int  # a rest as large as this is split off
    keys: list[int] = field(default_factory=list)
    blocks: list[SegmentBlock] = field(default_factory=list)
    unmapped: list[SegmentBlock] = field(default_factory=list)  # by address

    def add(self, block: SegmentBlock) -> None:
        """Add a cached block."""
        key = block.bytes << _ADDRESS_BITS | block.address
        place = bisect_left(self.keys, key)
        self.keys.insert(place, key)
        self.blocks.insert(place, block)

    def remove(self, block: SegmentBlock) -> None:
        """Remove a cached block."""
        place = bisect_left(self.keys, block.bytes << _ADDRESS_BITS | block.address)
        del self.keys[place]
        del self.blocks[place]

    def first(self, size: int) -> int:
        """Return the place of the smallest block that is large enough."""
        return bisect_left(self.keys, size << _ADDRESS_BITS)

    def add_unmapped(self, block: SegmentBlock) -> None:
        """Add a block that is not backed by memory."""
        self.unmapped.append(block)
        self.unmapped.sort(key=lambda free: free.address)


def merge(block: SegmentBlock) -> None:
    """Merge a block with neighbours of the same state (`try_merge_blocks`)."""
    for neighbour in (block.before, block.after):
        if neighbour is not None and neighbour.state == block.state:
            if block.state == CACHED:
                block.pool.remove(neighbour)
            else:
                block.pool.unmapped.remove(neighbour)
            block.absorb(neighbour)


def growable(block: SegmentBlock) -> int:
    """Return how large a block is, or can become."""
    after = block.after
    return block.bytes + (after.bytes if after is not None and after.state == UNMAPPED else 0)


def free_from(block: SegmentBlock | None, enough: int) -> int:
    """Return the free bytes of addresses from a block on, counting no further than `enough`."""
    free = 0
    while block is not None and block.state != LIVE and free < enough:
        free += block.bytes
        block = block.after
    return free


class Allocator:
    """The allocator of one GPU, with a limit on the bytes it may reserve.

    `is_fraction`: the limit is from `torch.cuda.set_per_process_memory_fraction`. Torch then refuses by the size of a
    whole segment, before it asks the driver; the driver refuses by pages.
    """

    def __init__(
        self, settings: AllocatorSettings, limit_bytes: int | None = None, *, is_fraction: bool = False
    ) -> None:
        self.settings = settings
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.segments_made = self.segments_freed = 0  # slow calls of the driver
        self.retries = 0  # how often the cache was emptied for a block
        self._fraction_bytes = limit_bytes if is_fraction else None
        self._most_bytes = _ENDLESS if limit_bytes is None else limit_bytes
        self._small = BlockPool(_SMALL_SEGMENT, 0, _LEAST)
        self._large = BlockPool(_LARGE_SEGMENT, _ENDLESS, _LEAST if settings.expandable else _SMALL + 1)
        self._next_address = 0
        self._blocks: dict[int, SegmentBlock] = {}  # by number
        self._left: list[SegmentBlock] = []  # live blocks of tapes that ended

    def play(self, tape: Tape) -> None:
        """Play a tape; its own blocks that it does not release stay in use."""
        shared, own = self._blocks, dict[int, SegmentBlock]()
        take, give = self._take, self._give
        try:
            rounded_E = np.where(tape.bytes_E > 0, _rounded(tape.bytes_E), tape.bytes_E)
            for number, size in zip(tape.block_E.tolist(), rounded_E.tolist(), strict=True):
                blocks = own if number >= 0 else shared
                if size > 0:
                    if number in blocks:
                        raise ValueError(f"block {number} is in use and allocated again")
                    blocks[number] = take(size)
                elif size < 0:
                    give(_known(blocks.pop(number, None), number))
        finally:
            self._left.extend(own.values())

    def allocate(self, number: int, size: int) -> None:
        """Allocate a block; a size of 0 allocates nothing, as in torch."""
        if number in self._blocks:
            raise ValueError(f"block {number} is in use and allocated again")
        if size > 0:
            self._blocks[number] = self._take(_rounded(size))

    def release(self, number: int) -> None:
        """Release a block into the cache."""
        self._give(_known(self._blocks.pop(number, None), number))

    def empty_cache(self) -> None:
        """Return cached memory to the driver where possible (`release_cached_blocks`)."""
        for pool in (self._large, self._small):
            for block in tuple(pool.blocks):
                if self.settings.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    self._free(block)

    def live(self) -> Iterator[tuple[int, int]]:
        return ((block.address, block.bytes) for block in (*self._blocks.values(), *self._left))

    def _take(self, size: int) -> SegmentBlock:
        pool = self._small if size <= _SMALL else self._large
        block = self._find(pool, size) or self._make(pool, size)
        rest_bytes = block.bytes - size
        if rest_bytes >= pool.least_rest:  # should_split
            pool.add(block.cut(size))
        block.state = LIVE
        self.allocated_bytes = allocated = self.allocated_bytes + block.bytes
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        return block

    def _give(self, block: SegmentBlock) -> None:
        self.allocated_bytes -= block.bytes
        block.state = CACHED
        merge(block)
        block.pool.add(block)

    def _find(self, pool: BlockPool, size: int) -> SegmentBlock | None:
        """Take the cached block that fits best; None if there is none (`get_free_block`)."""
        place = pool.first(size)
        blocks = pool.blocks
        if place == len(blocks):
            return None
        if self.settings.expandable:  # a block counts as the size to which it can grow
            while place + 1 < len(blocks) and growable(blocks[place + 1]) < growable(blocks[place]):
                place += 1
        block = blocks[place]
        del blocks[place], pool.keys[place]
        return block

    def _make(self, pool: BlockPool, size: int) -> SegmentBlock:
        """Get memory from the driver; where that fails, empty the cache and try again (`malloc`)."""
        block = self._extend(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._extend(pool, size)
        if block is None:
            raise SimulatedOutOfMemory(size, self.allocated_bytes, self.reserved_bytes, self._most_bytes)
        return block

    def _extend(self, pool: BlockPool, size: int) -> SegmentBlock | None:
        """Return a new or grown block; None if the driver refused (`alloc_block`)."""
        segment = _segment_bytes(size)
        if self._fraction_bytes is not None and self.reserved_bytes + segment > self._fraction_bytes:
            return None
        if self.settings.expandable:
            return self._grow(pool, size)
        if not self._reserve(segment):
            return None
        block = SegmentBlock(pool, self._next_address, segment, CACHED)
        self._next_address += segment
        return block

    def _reserve(self, size: int) -> bool:
        if self.reserved_bytes + size > self._most_bytes:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.segments_made += 1
        return True

    def _grow(self, pool: BlockPool, size: int) -> SegmentBlock | None:
        """Back addresses with memory, from the lowest on where it fits (`try_allocate_expandable_block`)."""
        block = self._room(pool, size)
        if block.state == UNMAPPED and not self._map(block, min(block.bytes, size)):
            return None
        while block.bytes < size:
            beyond = block.after
            assert beyond is not None
            if not self._map(beyond, min(size - block.bytes, beyond.bytes)):
                return None
            block = beyond
        pool.remove(block)
        return block

    def _room(self, pool: BlockPool, size: int) -> SegmentBlock:
        """Return where enough free addresses begin (`find_expandable_block`)."""
        if not pool.unmapped:
            pool.unmapped.append(SegmentBlock(pool, pool.start, _ENDLESS, UNMAPPED))
        starts = (
            block.before if block.before is not None and block.before.state == CACHED else block
            for block in pool.unmapped
        )
        return next(first for first in starts if free_from(first, size) >= size)  # the last has no end

    def _map(self, block: SegmentBlock, size: int) -> bool:
        """Back the beginning of a block with whole pages (`map_block`)."""
        pool = block.pool
        mapped = -(-size // pool.page_bytes) * pool.page_bytes
        if not self._reserve(mapped):
            return False
        pool.unmapped.remove(block)
        if mapped < block.bytes:
            pool.add_unmapped(block.cut(mapped))
        block.state = CACHED
        merge(block)
        pool.add(block)
        return True

    def _unmap(self, block: SegmentBlock) -> None:
        """Return to the driver the pages that lie wholly in a cached block (`unmap_block`)."""
        pool, page = block.pool, block.pool.page_bytes
        offset = block.address - pool.start
        skipped = -offset % page
        size = (offset + block.bytes) // page * page - offset - skipped
        if size <= 0:
            return
        pool.remove(block)
        if skipped:
            head, block = block, block.cut(skipped)
            pool.add(head)
        if size < block.bytes:
            pool.add(block.cut(size))
        block.state = UNMAPPED
        merge(block)
        pool.add_unmapped(block)
        self.reserved_bytes -= size
        self.segments_freed += 1

    def _free(self, block: SegmentBlock) -> None:
        """Return a whole segment to the driver (`release_block`)."""
        block.pool.remove(block)
        self.reserved_bytes -= block.bytes
        self.segments_freed += 1


def _rounded(size: Any) -> Any:
    """Return a size, or sizes, as torch rounds it (`round_size`)."""
    return -(-size // _LEAST) * _LEAST


def _segment_bytes(size: int) -> int:
    """Return how much torch requests from the driver for a block (`get_allocation_size`)."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _LARGE_ROUND) * _LARGE_ROUND


def _known(block: SegmentBlock | None, number: int) -> SegmentBlock:
    if block is None:
        raise ValueError(f"block {number} is released and not in use")
    return block


@dataclass(frozen=True, slots=True)
class Replay:
    """The peaks of simulated steps with some settings."""

    allocated_bytes: int  # both at their peaks
    reserved_bytes: int

    @property
    def fragmentation(self) -> float:
        """Return reserved over allocated bytes."""
        return self.reserved_bytes / max(1, self.allocated_bytes)


def replay_steps(steps: Iterable[StepTapes], settings: AllocatorSettings, setup: Tape) -> Replay:
    """Play steps after a model's setup."""
    allocator = Allocator(settings)
    allocator.play(setup)
    for step in steps:
        for tape in step.tapes:
            allocator.play(tape)
    return Replay(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes)
