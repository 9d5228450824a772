"""A stretch of epochs as it runs: its items come from a loader, and cost so much."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.training.sampler import Micro
from pipeline.training.share import Share

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.training.batch import Batch, Origin
    from pipeline.training.loader import Loader
    from pipeline.training.prepared import Stretch


@dataclass(frozen=True, eq=False)
class Course:
    """A stretch of epochs, its loader, and what each of its items costs."""

    stretch: Stretch
    loader: Loader
    cost_N: NDArray[Any]
    first_epoch: int

    @property
    def epochs(self) -> range:
        """Return the numbers of its epochs."""
        return range(self.first_epoch, self.first_epoch + self.stretch.epochs)

    @property
    def steps(self) -> int:
        """Return how many steps an epoch has."""
        return self.loader.sampler.steps

    def at(self, epoch: int, step: int) -> dict[str, Any]:
        """Return the sampler's state at a step of an epoch."""
        return {**self.loader.sampler.state_dict(), "epoch": epoch, "step": step}

    def go_to(self, state: Mapping[str, Any]) -> None:
        """Let the loader begin where a sampler's state says."""
        self.loader.load_state_dict(state)

    def cut_by(self, budget: int) -> None:
        """Let the sampler cut by a budget, where it has one."""
        sampler = self.loader.sampler
        if sampler.settings.budget:
            sampler.adjust(budget={**sampler.settings.budget, "cost": budget}, micro_batch=sampler.settings.micro_batch)

    def shares(self, *, hold: int, leave_out: Collection[str]) -> Iterator[Share]:
        """Yield this rank's share of each step from where the loader stands, to the end of the epoch."""
        batches = iter(self.loader)
        while True:
            share = Share(batches, self._fetch, hold=hold, leave_out=leave_out)
            if share.is_over:
                return
            yield share

    def _fetch(self, numbers: Sequence[int], origin: Origin) -> Batch:
        """Read items again that were a micro-batch."""
        items = np.array(numbers, dtype=np.int64)
        return self.loader.fetch(numbers, Micro(origin.epoch, origin.step, origin.index, origin.of, items))
