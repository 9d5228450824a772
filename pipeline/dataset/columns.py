"""Columns of numbers about items: those of a block are in memory, those of all items in a file without a name.

So no process holds what grows with the data set. A column is read back piece by piece, or by parts.
"""

from __future__ import annotations

import os
from array import array
from contextlib import suppress
from dataclasses import fields, is_dataclass
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipeline.journal.run_folder import writing_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import DTypeLike, NDArray

ROWS = 1 << 16  # that are in memory at once, about
T = TypeVar("T")


class ColumnFile:
    """A column in a file, to which blocks are added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with writing_run(folder):
            self._file = TemporaryFile(dir=folder)  # noqa: SIM115 - it is open as long as the column is used

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):  # of a full disk
            self._file.close()

    def extend(self, column: array[Any] | bytes | bytearray) -> None:
        """Add the rows of a block."""
        with writing_run(self._folder):
            self._file.write(column)

    def pieces(self, kind: DTypeLike) -> Iterator[NDArray[Any]]:
        """Yield all rows in order, some at a time."""
        with writing_run(self._folder):
            self._file.flush()
        at, size = 0, np.dtype(kind).itemsize
        while piece := os.pread(self._file.fileno(), ROWS * size, at):
            yield np.frombuffer(piece, kind)
            at += len(piece)


def in_files(total: T, folder: Path) -> T:
    """Move the columns of a total, which are still empty, to files; return the total."""
    for name, have in [(known.name, getattr(total, known.name)) for known in fields(total)]:  # type: ignore[arg-type]
        if isinstance(have, array | bytearray):
            setattr(total, name, ColumnFile(folder))
        elif isinstance(have, dict):
            have |= {key: ColumnFile(folder) for key, value in have.items() if isinstance(value, array | bytearray)}
            for value in filter(is_dataclass, have.values()):
                in_files(value, folder)
        elif is_dataclass(have):
            in_files(have, folder)
    return total


def rows_of(column: Any, kind: DTypeLike) -> NDArray[Any]:
    """Return the rows of a column."""
    whole = column.pieces(kind) if isinstance(column, ColumnFile) else [np.frombuffer(column, kind)]
    return np.concatenate([np.empty(0, kind), *whole])


def parts_of(column: Any, kind: DTypeLike) -> Iterator[NDArray[Any]]:
    """Yield the rows in parts of about ROWS, by the first number of each row: all rows of one number are in one part.

    These numbers are digests, of any of 64 bits; those of a part are larger than those of the part before.
    """
    if not isinstance(column, ColumnFile):
        yield rows_of(column, kind)
        return
    bits = (sum(map(len, column.pieces(kind))) // ROWS).bit_length()
    for part in range(1 << bits):
        found = (piece[_first(piece) >> (64 - bits) == part] for piece in column.pieces(kind))
        yield np.concatenate([np.empty(0, kind), *found])


def distinct_parts(column: Any, kind: DTypeLike) -> Iterator[NDArray[Any]]:
    """Yield of all rows that begin with the same number the first, in the order of these numbers."""
    for rows in parts_of(column, kind):
        yield rows[np.unique(_first(rows), return_index=True)[1]]


def count_distinct(column: Any) -> int:
    """Count different digests."""
    return sum(map(len, distinct_parts(column, np.uint64)))


def _first(rows: NDArray[Any]) -> NDArray[np.uint64]:
    return rows[rows.dtype.names[0]] if rows.dtype.names else rows
