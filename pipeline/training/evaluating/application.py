"""What a model is applied to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

# By which a run's plan is read again
from pipeline.training.checkpoints.checkpoint import ChosenCheckpoint
from pipeline.training.prepared import ModelFolder, Prepared

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Application:
    """A checkpoint and the items to apply it to, as decided when the stage began."""

    prepared: Prepared
    chosen: ChosenCheckpoint
    split: str | None  # None: all items
    made: str  # the digest of the items, and of the user's code that tells of them
    items: int
    data: str  # the path of the data set
    done: list[tuple[int, int]] = field(default_factory=list)  # items that were done before, as first and stop
    model: str = ""  # the model's folder
    each: int = 1  # rows of an item, such as poses

    @property
    def folder(self) -> ModelFolder:
        return ModelFolder(Path(self.model))

    @property
    def done_N(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(0, np.int64), *(np.arange(first, stop) for first, stop in self.done)])
