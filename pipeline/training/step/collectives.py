"""The collectives of a sharded model, which all ranks begin or none does: so memory may end on any of them in any pass.

Within a forward and a backward FSDP gathers the parameters of a block and reduces its gradients. A rank whose memory
ends in between would leave the others waiting. So all ranks agree before every collective: each reports which one it
is about to begin, or that it has given up; where any has, all leave the pass.

Why no rank waits for ever, as long as all ranks begin the same passes (`joint_turns`):

1. In a pass a rank calls `agree` before each of its collectives and once at the end, also of a failed pass, and
   makes no other call that involves all ranks. So the first agreement of one rank meets the first of every other, the
   second the second, and so on, as long as none stops.
2. The outcome of an agreement is the same on all ranks: all are about to begin the same collective, all have come to
   the end, a rank has given up, or the model does not do the same on all ranks.
3. In the first case all begin that collective: its memory was allocated before, and nothing stands in between. In each
   of the others no rank agrees or begins anything further in this pass: they raise, and `Passes.run` returns.
4. So every rank leaves a pass after the same number of agreements and collectives, all of which are complete.

An agreement itself takes no memory of the device: it is two numbers in the host's memory, over gloo, and on a GPU only
the processes meet, not their streams. A collective that fails as it begins (NCCL may allocate there) ends the job, and
so does every error that is not out of memory: the rank monitor tells the other ranks.
"""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

from pipeline.device.accelerator import is_card
from pipeline.device.out_of_memory import out_of_memory_error
from pipeline.errors import ConfigError
from pipeline.memory.footprint import Unmeasurable
from pipeline.training.ranks import Ranks
from pipeline.training.step.micro_batches import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from pipeline.training.items.batch import TaskBatch
    from pipeline.training.ranks import Said

Result = TypeVar("Result")

WHERE = "train.sharding"
NOT_SHARDED = "--set train.sharding=false"
END, GAVE_UP = 0, 1 << 62  # any other number is a collective by its kind and size


class ImaginedRanks(Ranks):
    """The first of ranks that do not exist, for a step that is only traced: it makes no call, and never waits."""

    def __init__(self, world: int) -> None:
        self.world = world

    def exchange(self, message: Said) -> list[Said]:
        return super().exchange(message) * self.world


@contextmanager
def imagined(world: int) -> Iterator[ImaginedRanks]:
    """Enter a process group of ranks that do not exist, in which a model can be sharded; it is gone afterwards."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if torch.distributed.is_initialized():
        raise Unmeasurable("a sharded step cannot be traced within a process group")
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield ImaginedRanks(world)
    finally:
        torch.distributed.destroy_process_group()


class PassGivenUp(Exception):
    """Another rank could not finish the pass, so this one leaves it; `Passes.run` catches it."""


@dataclass(frozen=True, slots=True)
class PassOutcome(Generic[Result]):
    """The result of a pass of all ranks."""

    result: Result | None = None
    error: str = ""  # why memory ended on this very rank; empty: it did not
    is_given_up: bool = False  # memory ended on this rank or on another


class Passes:
    """Passes through a sharded model, which all ranks make together: to the end, or none does."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._numbers = np.zeros(2, np.int64)
        self._word = torch.from_numpy(self._numbers)  # made once: an agreement must not fail for want of memory
        self._is_given_up = False

    def run(self, make: Callable[[], Result]) -> PassOutcome[Result]:
        """Make a pass; where memory ends on any rank, all leave it, and its partial results are to be dropped."""
        results: list[Result] = []
        error = out_of_memory_error(self._make, make, results)
        if not self._is_given_up:
            self._agreed(END if error is None else GAVE_UP)
        is_given_up, self._is_given_up = self._is_given_up, False
        if is_given_up:
            return PassOutcome(error=error or "", is_given_up=True)
        return PassOutcome(results[0])

    def _make(self, make: Callable[[], Result], results: list[Result]) -> None:
        with suppress(PassGivenUp):  # where a model has swallowed it, the pass is given up none the less
            results.append(make())

    def agree(self, collective: int) -> None:
        """Return where all ranks are about to begin the same collective; leave the pass where any has given up."""
        if self._is_given_up or not self._agreed(collective):
            raise PassGivenUp

    def _agreed(self, what: int) -> bool:
        """Say what this rank is about to do; return whether all do the same, false where any has given up."""
        self._numbers[:] = what, -what
        largest = torch.distributed.ReduceOp.MAX
        self._ranks.collective(lambda: torch.distributed.all_reduce(self._word, op=largest, async_op=True))
        most, least = int(self._numbers[0]), -int(self._numbers[1])
        self._is_given_up = most == GAVE_UP
        if most != least and not self._is_given_up:
            problem = "parameters cannot be gathered because ranks run different blocks"
            raise ConfigError(problem, where=WHERE, remedy=f"run every block for every batch   or {NOT_SHARDED}")
        return not self._is_given_up


@dataclass(slots=True)
class Turn:
    """A pass that all ranks make at the same time."""

    piece: Piece
    counts: bool  # else it is another rank's item, run along
    items: int  # of the first turn, over all ranks
    instead: list[Piece] | None = None  # once all gave up the pass: what this rank runs in place of its piece


def joint_turns(
    pieces: Iterable[Piece], ranks: Ranks, fetch: Callable[[int], TaskBatch], cost: Callable[[Piece], int] = len
) -> Iterator[Turn]:
    """Yield this rank's pieces, then the cheapest item of any rank for as long as another rank has pieces.

    `fetch` returns a batch of one item by its number. After a pass that was given up, set `instead` on every rank, or
    take no further turn on any.
    """
    own, waiting = iter(pieces), deque[Piece]()
    cheapest: tuple[int, int] | None = None
    items = 0
    while True:
        piece = waiting.popleft() if waiting else next(own, None)
        replies = ranks.exchange({"items": len(piece) if piece else 0, "cheapest": _cheapest(piece, cost)})
        if not any(reply["items"] for reply in replies):
            return
        items = items or sum(reply["items"] for reply in replies)
        offers = [(int(reply["cheapest"][0]), int(reply["cheapest"][1])) for reply in replies if reply["cheapest"]]
        cheapest = min([*offers, *([cheapest] if cheapest else [])])
        turn = Turn(piece or Piece(fetch(cheapest[1]), 0, 1), piece is not None, items)
        yield turn
        waiting.extend(turn.instead or [])


def _cheapest(piece: Piece | None, cost: Callable[[Piece], int]) -> tuple[int, int] | None:
    """Return the cost and the number of the cheapest item of a piece."""
    return min((cost(single), single.numbers[0]) for single in piece.singles()) if piece else None


class _Comm:
    """A collective of FSDP, which all ranks begin or none."""

    def __init__(self, passes: Passes, ranks: Ranks) -> None:
        self._passes, self._ranks = passes, ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class Gather(_Comm):
    """Gathers the parameters of a block from all ranks."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 - it is torch's
        gather = torch.distributed.all_gather_single
        self._passes.agree(2 * output_tensor.nbytes)
        self._ranks.collective(
            lambda: gather(output_tensor, input_tensor, group=group, async_op=True),
            in_stream=is_card(output_tensor.device),
        )


class ReduceScatter(_Comm):
    """Adds up the gradients of a block over all ranks, each of which keeps its own part."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,  # noqa: ARG002, FBT001, FBT002 - it is torch's
    ) -> None:
        self._passes.agree(2 * input_tensor.nbytes + 1)
        if not is_card(output_tensor.device):  # gloo's own does the same, and cannot be watched while waiting
            self._ranks.collective(
                lambda: torch.distributed.all_reduce(input_tensor, op=op, group=group, async_op=True)
            )
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])
            return
        reduce = torch.distributed.reduce_scatter_single
        self._ranks.collective(
            lambda: reduce(output_tensor, input_tensor, op=op, group=group, async_op=True), in_stream=True
        )
