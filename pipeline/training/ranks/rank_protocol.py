"""The processes that train one model together, as the loop sees them: what they tell each other, and when.

A rank may run out of memory in any micro-batch and begin its share of a step again. So nothing here is called between
the first forward of a step and its last backward: `exchange` comes before and after, `add_up` after.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.errors import JobFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    Said = Mapping[str, Any]  # JSON data

LOST = 76  # exit code: another rank is gone, so this one cannot go on; the cause is the other's
HUNG = 77  # exit code: this rank did nothing for too long and ended itself


class RankLost(JobFailed):
    """Another rank died, hangs or gave up; its name is in the message."""

    exit_code = LOST


class Ranks(Protocol):
    """All ranks call the same in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...

    def exchange(self, said: Said) -> list[Said]:
        """Return what every rank says, by rank; returns when all have spoken."""

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors, of the same shapes on every rank, by their sums over all ranks."""

    def progress(self, what: str) -> None:
        """Say what this rank does now, such as `step 12`: who says nothing for too long counts as hung."""

    def patient(self, what: str) -> AbstractContextManager[None]:
        """Say that what comes may take long without being a hang, such as `compiling`."""

    def close(self, why: str = "") -> None:
        """Leave; with a reason where this rank cannot go on, which ends the others."""


class SingleRank:
    """A training in one process, which needs no agreement."""

    rank, world = 0, 1

    def exchange(self, said: Said) -> list[Said]:
        return [json.loads(json.dumps(said))]  # as it would come from another

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        pass

    def progress(self, what: str) -> None:
        pass

    def patient(self, what: str) -> AbstractContextManager[None]:  # noqa: ARG002 - it is `Ranks`
        return nullcontext()

    def close(self, why: str = "") -> None:
        pass
