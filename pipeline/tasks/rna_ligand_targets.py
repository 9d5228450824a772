"""What each item's vector is to be like: an HDF5 file of embeddings, read item by item.

It has a dataset for each item, by its id, or two: `id` [N] and `embedding` [N, D].
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

WHERE = "train.options.targets"
ID, EMBEDDING = "id", "embedding"
OPEN = 4  # files at a time
NAMED = 3  # ids in a message


class Targets:
    """An open file; several threads may ask at once, h5py sees to that."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            import h5py
        except ImportError:
            what = "targets are read with h5py, which is not installed"
            raise ConfigError(what, where=WHERE, remedy="pip install 'pipeline[hdf5]'") from None
        try:
            self._file = h5py.File(path, "r")
        except OSError as error:
            reason = "there is no such file" if isinstance(error, FileNotFoundError) else str(error).partition("\n")[0]
            raise DataError(f"{path} cannot be read: {reason}", where=WHERE, remedy=f"h5ls {path}") from error
        self._rows = self._by_id() if {ID, EMBEDDING} <= set(self._file) else None

    def _by_id(self) -> Mapping[str, int]:
        """Return the row of each id."""
        ids = self._file[ID][()]
        if len(ids) != len(self._file[EMBEDDING]):
            what = f"{self.path} has {len(ids)} ids and {len(self._file[EMBEDDING])} embeddings"
            raise DataError(what, where=WHERE, remedy="write a row of `embedding` for each `id`")
        return {one.decode() if isinstance(one, bytes) else str(one): row for row, one in enumerate(ids)}

    def __len__(self) -> int:
        return len(self._file if self._rows is None else self._rows)

    def get(self, name: str, width: int) -> NDArray[np.float32] | None:
        """Return the target of an item, None where the file has none."""
        found = self._found(name)
        if found is None:
            return None
        if found.size != width:
            what = f"the target of {name} in {self.path} has {found.size} numbers, the model gives {width}"
            raise ConfigError(
                what, where="train.options.output_dim", remedy=f"--set train.options.output_dim={found.size}"
            )
        target_D = found.reshape(width).astype(np.float32)
        if not np.isfinite(target_D).all():
            what = f"the target of {name} in {self.path} has numbers that are not finite"
            raise DataError(what, where=WHERE, remedy="make it anew, or leave it out with targets_missing: skip")
        return target_D

    def _found(self, name: str) -> NDArray[Any] | None:
        if self._rows is not None:
            row = self._rows.get(name)
            return None if row is None else np.asarray(self._file[EMBEDDING][row])
        one = self._file.get(name)
        return np.asarray(one[()]) if hasattr(one, "shape") else None

    def missing(self, name: str) -> DataError:
        """Return the error that an item's target is not there."""
        some = ", ".join(list(self._file if self._rows is None else self._rows)[:NAMED])
        what = f"{name} has no target in {self.path}, which has {len(self):,} ids: {some} …"
        return DataError(what, where=WHERE, remedy="--set train.options.targets_missing=skip, or add it to the file")


def targets_of(path: str) -> Targets:
    """Return a file, opened once in each process."""
    return _opened(path, os.getpid())


@lru_cache(maxsize=OPEN)
def _opened(path: str, process: int) -> Targets:  # noqa: ARG001 - what is opened before a fork must not be read after it
    return Targets(path)
