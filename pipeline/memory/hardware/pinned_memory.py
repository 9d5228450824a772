"""What pinned memory of the host takes, and how things are laid into few allocations of it.

torch rounds every allocation of pinned memory up to a power of two, and keeps what is freed for others of that very
size (ATen/core/CachingHostAllocator.h, torch 2.13). Many things of any sizes are therefore laid into a few runs whose
sizes are powers of two that they fill: a state of 5 GiB takes runs of 4 and 1 GiB, not one of 8. What comes and goes
in changing sizes is cut into chunks of one size, each of which fits wherever one is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT = 64  # bytes: of whatever type a tensor is, it may begin there
CHUNK_BYTES = 32 * MIB  # a power of two, and large enough that one copy takes longer than it takes to begin it
SMALL_BYTES = 1 << 16
RANDOM_BYTES = 8 << 10  # the states of two generators: torch's is 5,056 bytes, a card's 16


@dataclass(frozen=True, slots=True)
class PinnedPlace:
    """Where in a run something lies."""

    run: int
    start: int


@dataclass(frozen=True, slots=True)
class PinnedLayout:
    """Runs of memory, and the place of each thing in them, in the order in which they were named."""

    runs: tuple[int, ...]
    places: tuple[PinnedPlace, ...]

    @property
    def bytes(self) -> int:
        return sum(self.runs)


def pinned_bytes(size: int) -> int:
    """Return what an allocation of pinned memory takes."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def pinned_layout(sizes: Sequence[int], *, pinned: bool) -> PinnedLayout:
    """Return the runs for things of some sizes: never more than each would take by itself, but for small ones.

    The largest come first, each into the first run with room; a new run is as large as what is left fills, or as the
    next thing needs. Small things have a run of their own: how many there are is known last, and moves no other.
    """
    needed = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    least = SMALL_BYTES if pinned else 1
    large = sorted((number for number, size in enumerate(needed) if size >= least), key=lambda number: -needed[number])
    left, runs, used = sum(needed[number] for number in large), list[int](), list[int]()
    places = [PinnedPlace(0, 0)] * len(sizes)  # where what is empty stays
    for number in large:
        size = needed[number]
        run = next((run for run, whole in enumerate(runs) if used[run] + size <= whole), len(runs))
        if run == len(runs):
            runs.append(max(pinned_bytes(size), 1 << (left.bit_length() - 1)) if pinned else left)
            used.append(0)
        places[number] = PinnedPlace(run, used[run])
        used[run] += size
        left -= size
    start = 0
    for number, size in enumerate(needed):
        if 0 < size < least:
            places[number] = PinnedPlace(len(runs), start)
            start += size
    return PinnedLayout((*runs, pinned_bytes(start)) if start else tuple(runs), tuple(places))


def staged_bytes(blocks: Sequence[int], *, pinned: bool) -> int:
    """Return what copies of a training's state take while it is saved, from the sizes of its tensors.

    With each goes a counter of the optimizer's, at most; then there are the states of random generators.
    """
    return pinned_layout([*blocks, *(ALIGNMENT for _ in blocks), RANDOM_BYTES], pinned=pinned).bytes


def chunked_bytes(size: int) -> int:
    """Return what the chunks take in which so many bytes lie at most; the last to come may begin anywhere in one."""
    return (-(-size // CHUNK_BYTES) + 1) * CHUNK_BYTES if size > 0 else 0
