"""Items as a loader hands them out of what a reader gave: arrays by name, no structures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.training.items import batch
from pipeline.training.items.batch import BatchBuilder
from pipeline.training.items.item_source import ItemArrays
from pipeline.training.sampling import BatchOrigin

META: dict[str, Any] = {"partners": [], "sizes": {}}


def batch_of(values: Sequence[Mapping[str, NDArray[Any]]], ids: Sequence[str] = ()) -> batch.ItemBatch:
    """Lay the arrays of some items out as the loader does; what an item lacks is filled in as it does."""
    names = tuple(ids) or tuple(f"item{place}" for place in range(len(values)))
    found = [
        ItemArrays(place, name, dict(arrays), META)
        for place, (name, arrays) in enumerate(zip(names, values, strict=True))
    ]
    sheet = BatchBuilder(found)
    memory = np.zeros(sheet.layout.used, np.uint8)
    sheet.write(memory)
    numbers = tuple(range(len(found)))
    return batch.ItemBatch(torch.from_numpy(memory), sheet.layout, numbers, names, BatchOrigin(0, 0, 0, 1))
