"""The blocks of an allocator's segments, and the pools of unused ones."""

from __future__ import annotations

from bisect import bisect_left

_ADDRESS_BITS = 56  # of a key, below the size
LIVE, CACHED, UNMAPPED = 0, 1, 2


class SegmentBlock:
    """A range of addresses that is used, cached, or not backed by memory."""

    __slots__ = ("address", "after", "before", "bytes", "pool", "state")

    def __init__(self, pool: BlockPool, address: int, size: int, state: int) -> None:
        self.pool = pool
        self.address = address
        self.bytes = size
        self.state = state
        self.before: SegmentBlock | None = None  # neighbours in the segment
        self.after: SegmentBlock | None = None

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


class BlockPool:
    """The cached blocks of small or of large requests, by size, then by address."""

    __slots__ = ("blocks", "keys", "least_rest", "page_bytes", "start", "unmapped")

    def __init__(self, page_bytes: int, start: int, least_rest: int) -> None:
        self.page_bytes = page_bytes
        self.start = start  # where its expandable segment begins
        self.least_rest = least_rest  # a rest as large as this is split off
        self.keys: list[int] = []
        self.blocks: list[SegmentBlock] = []
        self.unmapped: list[SegmentBlock] = []  # by address

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
