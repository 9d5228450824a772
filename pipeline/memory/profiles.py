"""What tasks were measured to need, from run to run, and what that says of the next: `policy` says how and why.

The truth is a folder of append-only records (`journal`), a file for each run and writer; look-ups go through an index
made from them (`index`). Remembering helps and is never needed: where the folder cannot be written, runs go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.memory import policy
from pipeline.memory.filed import Source, newest, tasks_index
from pipeline.memory.journal import Journal
from pipeline.memory.measured import Measured
from pipeline.memory.policy import Bounds, Suggestion

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Measured", "Profiles", "Suggestion"]

_LOOKED_AT = 5 * policy.NEWEST  # among which those of about the right size are picked
_BOUNDS = {
    Source.RECIPE_HERE: Bounds(),
    Source.RECIPE_ELSEWHERE: Bounds(" on other clusters", trusted=False),
    Source.STAGE_HERE: Bounds(" of other recipes", trusted=False, at_most=2),
    Source.STAGE_ELSEWHERE: Bounds(" of other recipes on other clusters", trusted=False, at_most=2),
}


class Profiles:
    """The memory of one folder."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder / "records")
        self._index = tasks_index(folder, self._journal)

    def record(self, run: str, writer: str, many: Iterable[Measured]) -> bool:
        """Remember tasks that ended well or died of memory; False where the folder does not let us."""
        try:
            self._journal.append(run, writer, many)
        except OSError:
            return False
        return True

    def suggest(self, stage: str, recipe: str, cluster: str, *, size: int = 0, planned_bytes: int) -> Suggestion:
        """Return how much memory to ask for; `size` is the largest item, 0 where it is not known."""
        self._index.refresh()
        for source, bounds in _BOUNDS.items():
            limit = _LOOKED_AT if bounds.trusted else policy.NEWEST
            past = newest(self._index, source, stage, recipe, cluster, limit)
            found = policy.suggest(past, bounds, size=size, planned_bytes=planned_bytes)
            if found is not None:
                return found
        return policy.planned(planned_bytes)

    def pace(self, stage: str, recipe: str, cluster: str) -> float | None:
        """Return the items per second of a task of this recipe here; None where none was measured."""
        self._index.refresh()
        return policy.pace(newest(self._index, Source.RECIPE_HERE, stage, recipe, cluster, policy.NEWEST))
