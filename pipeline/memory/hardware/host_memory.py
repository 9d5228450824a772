"""The host memory that training needs on its node (`--mem`), predicted from plain numbers.

It is a constant part, and the larger of two phases: while a run starts (the model is built on the CPU, a checkpoint is
read) and while it trains. The memory of the first is released before the second: 1 GiB of parameters of 4 MiB and a
copy of them left 3 MiB behind with glibc 2.36 [measured].

The kernel's file cache counts in a job's cgroup, but shrinks under pressure, so that an allowance is enough for it.

Measured needs of past runs (`history.Profiles`) correct `HostNeed.total_bytes`, as they do every stage's plan.

torch rounds every allocation of pinned memory up to a power of two, and keeps freed memory for others of exactly that
size (ATen/core/CachingHostAllocator.h, torch 2.13). Therefore many tensors share a few runs whose sizes are powers of
two that they fill: a state of 5 GiB takes runs of 4 and 1 GiB, not one of 8. Tensors that come and go in changing sizes
are cut into chunks of one size, each of which fits wherever one is free.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

from pipeline.memory.footprint import LIVE_ONLY, Provenance
from pipeline.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ALIGNMENT = 64  # bytes: enough for tensors of any type
CHUNK_BYTES = 32 * MIB  # a power of two, and large enough that one copy takes longer than it takes to begin it
SMALL_BYTES = 1 << 16
RANDOM_BYTES = 8 << 10  # the states of two generators: torch's is 5,056 bytes, a card's 16


@dataclass(frozen=True, slots=True)
class PinnedPlace:
    """The place of a tensor in a run."""

    run: int
    start: int


@dataclass(frozen=True, slots=True)
class PinnedLayout:
    """Runs of memory, and the place of each tensor in them, in the given order."""

    runs: tuple[int, ...]
    places: tuple[PinnedPlace, ...]

    @property
    def bytes(self) -> int:
        return sum(self.runs)


def pinned_bytes(size: int) -> int:
    """Return the bytes that torch allocates for pinned memory of a size."""
    return 1 << (size - 1).bit_length() if size > 0 else 0


def pinned_layout(sizes: Sequence[int], *, pinned: bool) -> PinnedLayout:
    """Return the runs for tensors of some sizes: never more than each would take by itself, except for small ones.

    The largest come first, each into the first run with room; a new run is as large as the rest fills, or as the next
    tensor needs. Small tensors share a run of their own, so that their number moves no other.
    """
    needed = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    least = SMALL_BYTES if pinned else 1
    large = sorted((number for number, size in enumerate(needed) if size >= least), key=lambda number: -needed[number])
    left, runs, used = sum(needed[number] for number in large), list[int](), list[int]()
    places = [PinnedPlace(0, 0)] * len(sizes)  # of empty tensors
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
    """Return the memory of copies of a training's state while it is saved, from the sizes of its tensors.

    At most, the optimizer has a counter for each; the states of random generators come on top.
    """
    return pinned_layout([*blocks, *(ALIGNMENT for _ in blocks), RANDOM_BYTES], pinned=pinned).bytes


def chunked_bytes(size: int) -> int:
    """Return the bytes of the chunks for at most `size` bytes; the last tensor may begin anywhere in a chunk."""
    return (-(-size // CHUNK_BYTES) + 1) * CHUNK_BYTES if size > 0 else 0


# Of a process that has a tensor on a card, on top of importing torch: 2 056 600 kB with the driver asked for its
# devices before, 438 632 kB without, and 322 040 kB for the import alone (https://github.com/pytorch/pytorch/issues/113326).
CUDA_CONTEXT_BYTES = (2_056_600 - 322_040) << 10
# Buffers of 4 MiB (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-buffsize) to send and to
# receive, for 16 channels: they are in the host's memory where cards do not reach each other.
COMMUNICATOR_BYTES = 2 * 16 * 4 * MIB
# What the largest of Inductor's processes took while it compiled a chain of linear layers for the CPU, torch 2.13.0:
# 495 MiB, and the training process grew by 150 MiB [measured]. How many there are: `torch._inductor.config`.
COMPILE_WORKER_BYTES, COMPILER_BYTES = 512 * MIB, 160 * MIB
ARENA_BYTES = 32 * MIB  # that glibc's malloc may keep for a thread: larger blocks are given back (man 3 mallopt)
# And of a step on the CPU: 571 MiB for 40 layers of 1 MiB with activations of 8 MiB each, 458 MiB where every block is
# given back at once (MALLOC_MMAP_THRESHOLD_=65536) [measured, glibc 2.36].
STEP_SLACK = 0.25
KEPT_MOST_BYTES = 1 << 30  # of what a step on the CPU frees: more makes it hardly faster [measured]
KEPT_LEAST_BYTES = 64 * MIB  # glibc keeps up to this much by itself
READER_BYTES = 128 * MIB  # of a process that reads: its own, and changed pages of the memory it was forked with
PAGE_CACHE_BYTES = 256 * MIB  # to read ahead, and for pages of a checkpoint that are not on the disk yet
LEAST_MARGIN = 0.05  # peaks of a process lie between the samples
RING_GROWTH, RING_UNIT = 9 / 8, MIB  # batches of one budget differ a little: room for larger ones
DRAWN_BYTES = 12  # of an item, while an epoch is shuffled: random numbers, and the order of an earlier epoch
KEY_BYTES, ID_BYTES, OFFSET_BYTES, STORED_SIZE_BYTES = 16, 16, 8, 4  # in the table of a data set
BASELINE, CONTEXT, KEPT = "interpreter and torch", "CUDA context", "kept by malloc"


class Period(StrEnum):
    """When host memory is needed."""

    ALWAYS = "always"
    START = "start"  # until the first step
    TRAIN = "train"


@dataclass(frozen=True, slots=True)
class HostPart:
    """An item of the host memory needed."""

    name: str
    bytes: int
    origin: Provenance
    why: str
    period: Period = Period.ALWAYS


@dataclass(frozen=True, slots=True)
class HostNeed:
    """The host memory of all processes of a job on a node."""

    parts: tuple[HostPart, ...]
    ranks: int = 1

    @property
    def bytes(self) -> int:
        peak = max((self.during(period) for period in (Period.START, Period.TRAIN)), key=_with_margin)
        return sum(part.bytes for part in peak)

    @property
    def kept_bytes(self) -> int:
        """Return what malloc may keep in each process; 0: what it keeps by default."""
        return sum(part.bytes for part in self.parts if part.name == KEPT) // self.ranks

    @property
    def total_bytes(self) -> int:
        return max(_with_margin(self.during(period)) for period in (Period.START, Period.TRAIN))

    def during(self, period: Period) -> tuple[HostPart, ...]:
        return tuple(part for part in self.parts if part.period in (Period.ALWAYS, period))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """The facts that determine a training job's host memory; bytes are per rank unless noted."""

    ranks: int = 1  # on the node
    gpu: bool = True
    several: bool = False  # ranks in all, here or on other nodes
    model_bytes: int = 0  # parameters and buffers, as they are built on the CPU
    step_bytes: int = 0  # without a card: the peak of a training step, the model included
    kept_bytes: int = 0  # of that, what malloc keeps from step to step
    resumed_bytes: int = 0  # of a checkpoint, while it is read
    staged_bytes: int = 0  # copies of model, optimizer and averages while they are saved, as they lie in memory
    batch_bytes: int = 0  # the largest
    slots: int = 4
    threads: int = 2  # that read, or as many processes
    forks: bool = False  # processes read
    offloaded_bytes: int = 0  # activations that wait in the host's memory, at most
    items: int = 0
    sizes: int = 0  # of an item in the table, how many
    compile_workers: int = 0


def train_need(run: TrainingJob, baseline: HostPart) -> HostNeed:
    """Return the host memory that a training job needs on a node."""
    of_all = (replace(part, bytes=run.ranks * part.bytes) for part in _parts(run, baseline))
    files = HostPart("page cache", PAGE_CACHE_BYTES, Provenance.ASSUMED, "the rest is released under pressure")
    return HostNeed(tuple(part for part in (*of_all, files) if part.bytes), run.ranks)


def kept_bytes(step_bytes: int, spare_bytes: int) -> int:
    """Return how many freed bytes malloc may keep, by the room below the limit; 0: no room."""
    kept = min(step_bytes, KEPT_MOST_BYTES, spare_bytes)
    return kept if kept >= min(step_bytes, KEPT_LEAST_BYTES) else 0


def ring_bytes(slots: int, batch_bytes: int, *, pin: bool) -> int:
    """Return the memory of the batch slots, once each has held the largest batch."""
    return slots * slot_bytes(batch_bytes, pin=pin) if batch_bytes else 0


def slot_bytes(batch_bytes: int, *, pin: bool) -> int:
    """Return the size of a slot that a batch made grow: with room for others a little larger."""
    if pin:
        return pinned_bytes(max(batch_bytes, RING_UNIT))
    return max(-(-int(batch_bytes * RING_GROWTH) // RING_UNIT) * RING_UNIT, RING_UNIT)


def table_bytes(items: int, sizes: int) -> int:
    """Return the memory of a data set's table: the record as read, and the arrays of one split."""
    arrays = KEY_BYTES + 1 + STORED_SIZE_BYTES * sizes
    record = ID_BYTES + OFFSET_BYTES + arrays
    split = arrays + 2 * OFFSET_BYTES
    return items * (record + ID_BYTES + OFFSET_BYTES + split + DRAWN_BYTES)


def _parts(run: TrainingJob, baseline: HostPart) -> Iterator[HostPart]:
    """Yield the memory of a process: its own, until the first step, and from then on."""
    start, train, traced, assumed = Period.START, Period.TRAIN, Provenance.TRACED, Provenance.ASSUMED
    each_process = f"of each of {run.ranks} processes"
    yield replace(baseline, why=f"{baseline.why}, {each_process}")
    if run.gpu:
        yield HostPart(CONTEXT, CUDA_CONTEXT_BYTES, assumed, f"pytorch#113326, {each_process}")
    if run.several and run.gpu:
        yield HostPart("communicator", COMMUNICATOR_BYTES, assumed, f"NCCL's buffers, {each_process}")
    threads = run.threads + 1
    arenas = threads * ARENA_BYTES + (0 if run.gpu else int(STEP_SLACK * run.step_bytes))
    yield HostPart("malloc", arenas, assumed, f"what glibc may keep for {threads} threads, {each_process}")
    table = table_bytes(run.items, run.sizes)
    yield HostPart("table of the data set", table, traced, f"{run.items} items with {run.sizes} sizes each")
    yield HostPart("model", run.model_bytes, traced, "parameters are built on the CPU", start)
    yield HostPart("resumed state", run.resumed_bytes, traced, "a checkpoint being read", start)
    if not run.gpu:
        yield HostPart("training step", run.step_bytes, traced, "it runs on the CPU", train)
        yield HostPart(KEPT, run.kept_bytes, traced, "what steps free, for the next: fewer page faults", train)
    ring = ring_bytes(run.slots, run.batch_bytes, pin=run.gpu)
    kind = "pinned: powers of two" if run.gpu else "not pinned"
    yield HostPart("ring", ring, traced, f"{run.slots} slots of the largest batch, {kind}", train)
    own = run.threads * READER_BYTES if run.forks else 0
    yield HostPart("reading processes", own, assumed, f"of each of {run.threads} processes, besides its batch", train)
    made = run.threads * run.batch_bytes * (2 if run.gpu else 1)  # before it is copied to pinned memory
    yield HostPart("batches being built", made, assumed, f"as large as their items, by {run.threads} threads", train)
    offloaded = chunked_bytes(run.offloaded_bytes) if run.gpu else run.offloaded_bytes
    yield HostPart("offloaded", offloaded, traced, f"activations{', in pinned chunks' if run.gpu else ''}", train)
    copied = f"a copy of the state while it is saved{', in pinned runs' if run.gpu else ''}"
    yield HostPart("checkpoint", run.staged_bytes, traced, copied, train)
    workers = run.compile_workers * COMPILE_WORKER_BYTES + COMPILER_BYTES if run.compile_workers else 0
    yield HostPart("compiler", workers, assumed, f"{run.compile_workers} processes of Inductor", train)


def _with_margin(parts: Iterable[HostPart]) -> int:
    return sum(part.bytes + int(part.bytes * max(LEAST_MARGIN, LIVE_ONLY[part.origin])) for part in parts)


IMPORT_BYTES = 322_040 << 10  # of torch 2.2 for CUDA 11.8 (https://github.com/pytorch/pytorch/issues/113326)
TRAINING = ("torch", "torch._dynamo")  # the first optimizer imports the second: 68 MiB [measured, torch 2.13.0]
IMPORT_S = 120.0  # from a cold network file system
_IMPORT = """
import os, sys
for name in sys.argv[1:]:
    __import__(name)
import psutil
print(psutil.Process().memory_info().rss, flush=True)
os._exit(0)  # taking torch down again would take another half a second
"""


STATED = HostPart(BASELINE, IMPORT_BYTES, Provenance.ASSUMED, "as measured in pytorch#113326")


@cache  # seconds
def measured_baseline(*modules: str) -> HostPart:
    """Return the memory of a process that imports some modules, measured in a new one; STATED if that fails."""
    modules = modules or TRAINING
    try:
        ran = subprocess.run(
            [sys.executable, "-c", _IMPORT, *modules], capture_output=True, text=True, timeout=IMPORT_S, check=True
        )
        size = int(ran.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return STATED
    return measured_in(size, modules)


def measured_in(size: int, modules: Sequence[str]) -> HostPart:
    """Return the memory that a process was measured to have once it had imported these modules."""
    return HostPart(BASELINE, size, Provenance.MEASURED, f"a process that imported {', '.join(modules)}")
