"""Gradients are added up over ranks in buckets: after a step's last backward, or while it runs.

What is in which bucket follows from shapes and types alone. So a sum has the same bits whenever its bucket went, and
after a resumption, too. Buckets that are complete go while backward still computes the others.

The memory for that is had before anything is exchanged: buffers to pack in, and zeros where a rank has no gradient. A
rank that cannot have buffers of the planned size says how large they can be, and all ranks pack in pieces of the least.

Once a bucket has gone, the gradients of all ranks are no longer their own. A rank whose memory ends then takes part in
the other buckets with whatever is in its buffers, and all ranks make the step again, without overlap.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from pipeline.device.out_of_memory import after_freeing_caches, out_of_memory_error, unless_out_of_memory
from pipeline.errors import ConfigError, PlanInfeasible
from pipeline.memory.planning.memory_plan import REDUCED_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from pipeline.training.ranks.rank_protocol import Ranks

Place: TypeAlias = tuple[int, int]  # which tensor, and which part of it

PIECE_BYTES = REDUCED_BYTES // 2  # tensors are added up in pieces of it; the plan has room for two
LEAST_PIECE_BYTES = 64 << 10  # smaller ones would take longer than any step
BUCKETS = 8  # of all gradients, where that makes none too small or too large: one goes while the next is computed
LEAST_BUCKET_BYTES = 1 << 20


class SumsBroken(Exception):
    """Memory ended in a backward after some of its gradients had been added up."""


@dataclass(frozen=True)
class _Going:
    """A bucket on its way: how to wait for it, and from where to take the sums."""

    wait: Callable[[], None]
    parts: list[Tensor] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)  # of these in the buffer; none: summed where they are
    buffer: Tensor | None = None


class GradientSums:
    """Adds up the gradients of a model's parameters over ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter], ranks: Ranks, device: str, *, overlaps: bool) -> None:
        """Take the parameters that are trained; `overlaps`: buckets go while the last backward runs."""
        self.overlaps = overlaps
        self.is_done = False  # the gradients are sums now
        self.is_broken = False  # memory ended when some of them were
        self.is_late = False  # a gradient changed after its bucket had gone
        self.parameters, self._ranks, self._device = parameters, ranks, device
        self._expected: frozenset[int] | None = None  # parameters with a gradient on any rank, in the step before
        self._buffers: deque[Tensor] = deque()
        self._going: deque[_Going] = deque()
        self._is_open = self._is_armed = self._has_hooks = False
        self._gone: set[int] = set()  # parameters of which a part has gone
        self._come: set[int] = set()  # parameters whose gradient is whole
        whole_bytes = sum(parameter.nbytes for parameter in parameters)
        self._cut(min(max(whole_bytes // BUCKETS, LEAST_BUCKET_BYTES), PIECE_BYTES))

    def _cut(self, piece_bytes: int) -> None:
        """Lay out the buckets: the last parameters first, as backward comes to them."""
        self.piece_bytes = piece_bytes
        numbers = range(len(self.parameters))[::-1]
        layout = pieces_of([self.parameters[number] for number in numbers], piece_bytes)
        self._buckets = [[(numbers[place], part) for place, part in bucket] for bucket in layout]
        self._split: dict[int, list[Tensor]] = {}  # parts of gradients that are in several buckets
        views = [self._parts(bucket, self.parameters) for bucket in self._buckets]
        self._split.clear()
        self._sizes = [sum(part.nbytes for part in parts) for parts in views]
        self._types = [parts[0].dtype for parts in views]
        self._users: dict[int, list[int]] = {}  # of a parameter: the buckets that it is in
        for place, bucket in enumerate(self._buckets):
            for number in self._numbers(bucket):
                self._users.setdefault(number, []).append(place)
        self._rest = deque(range(len(self._buckets)))  # that have not gone

    # Memory

    def reserve(self) -> int:
        """Make the gradients that are missing and the buffers; return the piece's size for which there is room."""
        self._fill()
        size = min(self.piece_bytes, max(self._sizes, default=0))
        while not self._has_buffers(size):
            size //= 2
            if size < LEAST_PIECE_BYTES:
                problem = "the gradients of all ranks cannot be added up: no memory is left to pack them"
                raise PlanInfeasible(
                    problem, where="training", remedy="pipeline plan --stage train   (or a larger card)"
                )
        return self.piece_bytes if size == max(self._sizes, default=0) else size

    def _fill(self) -> None:
        """Make zeros where this rank has no gradient."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = after_freeing_caches(partial(torch.zeros_like, parameter), self._device)
            elif parameter.grad.is_sparse:
                problem = f"a gradient of shape {list(parameter.shape)} is sparse: ranks add up dense ones"
                raise ConfigError(problem, where="training", remedy="nn.Embedding(…, sparse=False)")

    def _has_buffers(self, size: int) -> bool:
        """Have buffers of a size, or none; return whether that was possible."""
        wanted = 2 if self.overlaps else 1
        if len(self._buffers) == wanted and all(len(buffer) >= size for buffer in self._buffers):
            return True
        self._buffers.clear()
        empty = partial(torch.empty, max(1, size), dtype=torch.uint8, device=self._device)
        for _ in range(wanted):
            buffer = unless_out_of_memory(partial(after_freeing_caches, empty, self._device))
            if buffer is None:
                self._buffers.clear()
                return False
            self._buffers.append(buffer)
        return True

    def agree(self, piece_bytes: int) -> None:
        """Pack in pieces of the size for which all ranks have room."""
        if piece_bytes != self.piece_bytes:
            self._cut(piece_bytes)

    # A step

    def begin_step(self, *, overlaps: bool) -> bool:
        """Begin a step; return whether buckets go while its last backward runs: all ranks must decide the same."""
        self.is_done = self.is_broken = self.is_late = False
        self._is_open = overlaps and self.overlaps and self._expected is not None
        self._rest = deque(self._order() if self._is_open else range(len(self._buckets)))
        self._gone.clear()
        self._split.clear()
        if self._is_open:
            self._listen()
        return self._is_open

    def expect(self, numbers: Collection[int]) -> None:
        """Note which parameters had a gradient on any rank: only these may be waited for in the next step."""
        self._expected = frozenset(numbers)

    def _order(self) -> list[int]:
        """Return the buckets in the order in which they go: those that may never be complete come last."""
        assert self._expected is not None
        whole = [self._numbers(bucket) <= self._expected for bucket in self._buckets]
        return sorted(range(len(self._buckets)), key=lambda place: not whole[place])

    @staticmethod
    def _numbers(bucket: Iterable[Place]) -> set[int]:
        return {number for number, _ in bucket}

    @contextmanager
    def within(self) -> Iterator[None]:
        """Surround the last forward and backward of a step: buckets go as soon as they are complete."""
        self._come.clear()
        self._missing = [len(self._numbers(bucket)) for bucket in self._buckets]
        self._is_armed = self._is_open and not self._gone
        try:
            yield
        except BaseException:
            self.is_broken = bool(self._gone)
            raise
        finally:
            self._is_armed = False

    def _listen(self) -> None:
        """Register, once, a hook on each parameter that hears of its gradient."""
        if self._has_hooks:
            return
        self._has_hooks = True
        for number, parameter in enumerate(self.parameters):
            cast("Any", parameter).register_post_accumulate_grad_hook(partial(self._came, number))

    def _came(self, number: int, _: Tensor) -> None:
        """Send the buckets that a gradient completes; they go in the same order on every rank."""
        if self._is_open and number in self._gone:
            self.is_late = True  # such as of a block that is computed again by a backward of its own
        if not self._is_armed or number in self._come:
            return
        self._come.add(number)
        for place in self._users.get(number, ()):
            self._missing[place] -= 1
        while self._rest and not self._missing[self._rest[0]]:
            self._gone |= self._numbers(self._buckets[self._rest[0]])
            self._go(self._rest[0])
            self._rest.popleft()

    def add_up(self) -> None:
        """Add up the gradients of all ranks, or what is left of them; `is_broken` tells that they are no sums."""
        self.is_broken = self.is_broken or out_of_memory_error(self._fill) is not None
        while self._rest:
            self._go(self._rest[0])
            self._rest.popleft()
        self._split.clear()  # of a parameter whose last part went before others
        while self._going:
            self._land()
        self._is_open, self.is_done = False, not self.is_broken

    def abandon(self) -> None:
        """Take part in the sums of the others with nothing of this rank's own; the step is made again, or left out."""
        self.is_broken = True
        self.add_up()

    def _go(self, place: int) -> None:
        """Send a bucket: from where it is, if that is one contiguous part, else packed."""
        parts = [] if self.is_broken else self._parts(self._buckets[place], self._gradients)
        if len(parts) == 1 and parts[0].is_contiguous():
            self._going.append(_Going(self._ranks.begin_sum(parts[0].view(-1))))
            return
        while not self._buffers:  # all are on their way
            self._land()
        flat = self._buffers[0][: self._sizes[place]].view(self._types[place])
        places = packed(parts, flat) if parts else []
        self._going.append(_Going(self._ranks.begin_sum(flat), parts, places, self._buffers.popleft()))

    def _land(self) -> None:
        """Wait for the bucket that went first, and take its sums."""
        first = self._going.popleft()
        first.wait()
        if first.places and not self.is_broken:
            torch._foreach_copy_(first.parts, first.places)
        if first.buffer is not None:
            self._buffers.append(first.buffer)

    @property
    def _gradients(self) -> list[Tensor]:
        return [cast("Tensor", parameter.grad) for parameter in self.parameters]

    def _parts(self, bucket: Sequence[Place], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the parts of tensors that are in a bucket."""
        found = []
        for number, part in bucket:
            if number not in self._split:
                self._split[number] = parts_of(tensors[number], self.piece_bytes)
            found.append(self._split[number][part])
            if part + 1 == len(self._split[number]):
                del self._split[number]
        return found


# Pieces


def reduce_in_pieces(
    tensors: Iterable[Tensor], reduce: Callable[[Tensor], Any], piece_bytes: int = PIECE_BYTES
) -> None:
    """Reduce tensors in place, packed into flat tensors of one type and at most `piece_bytes`.

    The packing depends on shapes and types alone: it must be the same on every rank.
    """
    for parts in tensor_pieces(list(tensors), piece_bytes):
        if len(parts) == 1 and parts[0].is_contiguous():
            reduce(parts[0].view(-1))
            continue
        flat = parts[0].new_empty(sum(part.numel() for part in parts))
        places = packed(parts, flat)
        reduce(flat)
        torch._foreach_copy_(parts, places)
        del flat, places  # one piece at a time


def packed(parts: list[Tensor], flat: Tensor) -> list[Tensor]:
    """Copy tensors into a flat one; return their places in it."""
    split = torch.split(flat, [part.numel() for part in parts])
    places = [place.view(part.shape) for place, part in zip(split, parts, strict=True)]
    torch._foreach_copy_(places, parts)  # one call for all, as in torch's own FSDP
    return places


def tensor_pieces(tensors: Sequence[Tensor], piece_bytes: int) -> Iterator[list[Tensor]]:
    """Yield groups of tensors of one type, or of parts of them, of at most `piece_bytes` together."""
    for piece in pieces_of(tensors, piece_bytes):
        yield [parts_of(tensors[number], piece_bytes)[part] for number, part in piece]


def pieces_of(tensors: Sequence[Tensor], piece_bytes: int) -> list[list[Place]]:
    """Group tensors of one type, or parts of them, into pieces of at most `piece_bytes`; by shapes and types alone."""
    pieces: list[list[Place]] = []
    for numbers in _by_type(tensors).values():
        piece: list[Place] = []
        room = piece_bytes
        for number in numbers:
            for place, part in enumerate(parts_of(tensors[number], piece_bytes)):
                if part.nbytes > room and piece:
                    pieces.append(piece)
                    piece, room = [], piece_bytes
                piece.append((number, place))
                room -= part.nbytes
        if piece:
            pieces.append(piece)
    return pieces


def parts_of(tensor: Tensor, piece_bytes: int) -> list[Tensor]:
    """Return views of a tensor of at most `piece_bytes` each; none of an empty one."""
    real = _real(tensor)
    return list(_parts(real, max(1, piece_bytes // real.element_size()))) if real.numel() else []


def _by_type(tensors: Sequence[Tensor]) -> Mapping[tuple[torch.device, torch.dtype], list[int]]:
    """Group the numbers of tensors by device and type, in order of first appearance."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, _real(tensor).dtype), []).append(number)
    return groups


def _real(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    return torch.view_as_real(plain) if plain.is_complex() else plain


def _parts(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Yield views of a tensor with at most `most` values each."""
    if tensor.numel() <= most:
        yield tensor
        return
    rows = most // (tensor.numel() // tensor.shape[0])
    if rows:
        yield from torch.split(tensor, rows)
    else:
        for row in tensor:
            yield from _parts(row, most)
