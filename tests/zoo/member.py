"""What a member of the zoo is: a task, its sizes, its settings, and a made data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pipeline.protocol import ITEMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pipeline.protocol import Batch, Sizes, Task

    Items = Mapping[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Member:
    """A model family, as small as a CPU trains it in a second."""

    name: str
    task: Callable[..., Task]
    small: Mapping[str, Any]  # arguments of the task
    sizes: tuple[Sizes, Sizes, Sizes]  # of the micro-batches at which a prediction is compared
    settings: Mapping[str, Any]  # of the step: optimizer, foreach, clip, ema, checkpointing
    padded: bool
    items: Callable[[int, np.random.Generator], Items]  # the sizes of so many items of a data set

    def build(self) -> Any:
        """Return the task at its small size."""
        return self.task(**self.small)


class Synthetic:
    """What all tasks of the zoo do alike: an item is told by its sizes, and a batch of items is made up."""

    padded: ClassVar[bool] = False

    def cost(self, item: Sizes) -> Sizes:
        """Return the sizes themselves."""
        return dict(item)

    def collate(self, items: Sequence[Sizes], rng: np.random.Generator) -> Batch:
        """Return a batch as large as these items make it."""
        return self.example(batch_sizes(items, padded=self.padded))

    def example(self, sizes: Sizes) -> Batch:
        """Return a batch of these sizes."""
        raise NotImplementedError


def batch_sizes(items: Sequence[Sizes], *, padded: bool) -> dict[str, int]:
    """Return the sizes of a batch: of the largest item where it is padded, else sums."""
    fold = max if padded else sum
    return {name: int(fold(item[name] for item in items)) for name in items[0]} | {ITEMS: len(items)}
