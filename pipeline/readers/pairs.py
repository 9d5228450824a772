"""`Pairs`: two matching sides for two-tower models: texts from a table, or texts and vectors from HDF5.

A table is UTF-8 with a header. In `.csv` commas separate columns, and quoted fields may contain commas and line ends;
in `.tsv` tabs separate them, and quotes are ordinary characters. Shapes: N pairs, T bytes of a text, R rows such as
patches of an image, D numbers a row.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.readers import hdf5
from pipeline.readers.captions import IMAGES
from pipeline.readers.entry import Column, Count, Opened, UnusableEntry, entry_id, entry_or_rejection
from pipeline.readers.table_rows import TableReader, TextTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.records import Entry, Rejection

    Arrays = Mapping[str, NDArray[Any]]

SIDES = ("left", "right")
LOOKED_AT = 20  # rows, for paths of images
CAPTIONS = "pipeline.readers.captions:Captions"
NOTHING: dict[str, int] = {}


@dataclass(eq=False)
class Pairs(TableReader):
    """The pairs of one file.

    Arrays: `left.token` and `right.token` uint8 [T], the UTF-8 bytes of texts; `left.vector` and `right.vector` float32
    [R, D] where a dataset of an HDF5 file is numbers [N, R, D]. A place is [offset, length] in a table, or [row].
    """

    left: str = "left"  # column of the header, or dataset
    right: str = "right"
    most: Count = 4096  # bytes of a text, or rows; a longer side is refused

    what: ClassVar = "pairs"
    others: ClassVar = hdf5.SUFFIXES

    def __post_init__(self) -> None:
        super().__post_init__()
        self._open = partial(_hdf5_table, columns=self._columns())
        self._tables = Opened(self._open)
        if self._table is not None:
            self._refuse_images(self._table)

    def _columns(self) -> list[Column]:
        return [*super()._columns(), *(self._column(side, side, needed=True) for side in SIDES)]

    def entries(self) -> Iterator[Entry | Rejection]:
        """Yield every pair as an entry, or its rejection."""
        return self._of_hdf5() if self._table is None else super().entries()

    def _at(self, place: list[int]) -> Arrays:
        if self._table is None:
            return self._arrays(self._tables(self.path).rows(place[0], place[0] + 1)[0])
        return super()._at(place)

    def _of_hdf5(self) -> Iterator[Entry | Rejection]:
        with self._open(self.path) as table:
            long = self._too_long(table)
            for number, row in table.all_rows(without=long):
                name, split = (hdf5.cell_text(row, meaning) for meaning in ("id", "split"))
                arrays = partial(self._arrays, row, long)
                name = entry_id(name, self.path, number)
                yield entry_or_rejection(name, [number], arrays, split.strip(), self.path, number)

    def _too_long(self, table: hdf5.Hdf5Table) -> dict[str, int]:
        """Return the sides of fixed length that is too long, with the length: they need not be read."""
        shapes = {side: table.columns[side].shape for side in SIDES}
        return {side: shape[1] for side, shape in shapes.items() if len(shape) == 3 and shape[1] > self.most}

    def _refuse_images(self, table: TextTable) -> None:
        """Refuse a column of paths of images, whose letters would be read as a text."""
        rows = []
        for row in islice(table.rows(), LOOKED_AT):
            with suppress(UnusableEntry):
                rows.append(table.cells(row.text))
        for side in SIDES:
            texts = [cells[side].strip() for cells in rows if cells[side].strip()]
            if texts and all(text.lower().endswith(IMAGES) for text in texts):
                column = table.header[table.places[side]]
                problem = f"the column {column!r} has image paths, which would be read as text: {texts[0]}"
                remedy = f"--set data.reader={CAPTIONS}   (and left: images, right: text in train.options)"
                raise ConfigError(problem, where=f"data.options.{side}", remedy=remedy)

    def _arrays(self, row: Mapping[str, Any], long: Mapping[str, int] = NOTHING) -> Arrays:
        for side, length in long.items():
            self._check_length(side, length)
        arrays = {}
        for side in SIDES:
            value = row[side]
            kind = "vector" if isinstance(value, np.ndarray) else "token"
            array = _vector(value, side) if kind == "vector" else _token(value)
            self._check_length(side, len(array))
            arrays[f"{side}.{kind}"] = array
        return arrays

    def _check_length(self, side: str, length: int) -> None:
        if not 0 < length <= self.most:
            much = f"is longer than most: {length:,} > {self.most:,}" if length else "is empty"
            raise UnusableEntry(f"the {side} side {much}")


def _hdf5_table(path: Path, columns: Sequence[Column]) -> hdf5.Hdf5Table:
    """Open an HDF5 file of pairs."""
    table = hdf5.Hdf5Table(path, columns)
    for side in SIDES:
        dataset = table.columns[side]
        texts = len(dataset.shape) == 1 and hdf5.is_text(dataset)
        if not texts and (len(dataset.shape) != 3 or dataset.dtype.kind not in "fiu"):
            problem = f"{dataset.name} is {dataset.dtype} {dataset.shape}, expected texts [N] or numbers [N, R, D]"
            raise DataError(problem, where=str(path), remedy=f"data.options.{side} must name such a dataset")
    table.check_lengths()
    return table


def _token(value: Any) -> NDArray[np.uint8]:
    text = value.encode() if isinstance(value, str) else bytes(value)
    return np.array(memoryview(text), np.uint8)


def _vector(value_RD: NDArray[Any], side: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        vector_RD = value_RD.astype(np.float32)
    if not np.isfinite(vector_RD).all():
        raise UnusableEntry(f"the {side} side has numbers that are not finite")
    return vector_RD
