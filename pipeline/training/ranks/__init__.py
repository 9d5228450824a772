"""The ranks of a training: how the training loop talks to the other processes that train the same model.

A rank may run out of memory in any micro-batch and begin its share of a step again. So nothing here is called between
the first forward of a step and its last backward: `exchange` comes before and after, `add_up` after.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from pipeline.cluster.verdict import PEER_LOST
from pipeline.errors import JobFailed
from pipeline.memory.planning.memory_plan import REDUCED_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.distributed import Work

    Message = Mapping[str, Any]  # JSON data

PIECE_BYTES = REDUCED_BYTES  # tensors are added up in pieces of it; the plan has room for one
LOST = PEER_LOST  # exit code: another rank is gone, so this one cannot go on


class RankLost(JobFailed):
    """Another rank died, hangs or gave up; its name is in the message."""

    exit_code = LOST


class Ranks:
    """The ranks of a training, which make the same calls in the same order; this class: a training in one process."""

    rank, world = 0, 1

    def exchange(self, message: Message) -> list[Message]:
        """Gather a JSON object from every rank, in the order of ranks."""
        return [json.loads(json.dumps(message))]  # as it would come from another

    def add_up(self, tensors: Sequence[Tensor], buffer: Tensor | None = None) -> None:
        """All-reduce tensors in place, packed into `buffer`; their shapes are the same on every rank."""

    def collective(self, begin: Callable[[], Work], *, in_stream: bool = False) -> None:
        """Begin a collective call and wait for it, or only enqueue it; raise if a rank is lost."""

    def progress(self, activity: str) -> None:
        """Note what this rank does now, such as `step 12`; a rank that notes nothing for too long counts as hung."""

    def patient(self, activity: str) -> AbstractContextManager[None]:  # noqa: ARG002 - only others count it
        """Surround what may take long without being a hang, such as `compiling`."""
        return nullcontext()

    def close(self, why: str = "") -> None:
        """Leave the group; with a reason if this rank cannot go on, which ends the others."""
