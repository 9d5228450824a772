"""HDF5 files as tables: datasets whose first axis is the entries, read in pieces of rows."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping
    from pathlib import Path

    from typing_extensions import Self

PIECE_BYTES = 4 << 20
MOST_ROWS = 4096  # at a time, however small
TEXT_ROWS = 64  # at a time, where texts are of any length: their bytes are not known before
MOST_ROW_BYTES = 64 << 20  # of a dataset
MOST_CHUNK_BYTES = 256 << 20  # of a compressed one: for any row, HDF5 unpacks all of its chunk
SUFFIXES = (".hdf5", ".h5")


def library(path: Path) -> Any:
    """Return h5py, or say how to get it."""
    try:
        import h5py
    except ImportError as error:
        raise ConfigError(
            "HDF5 needs h5py, an extra", where=str(path), remedy="pip install 'pipeline[hdf5]'"
        ) from error
    return h5py


def open_hdf5(path: Path) -> Any:
    """Open a file without locking it, which some cluster file systems do not know."""
    h5py = library(path)
    try:
        return h5py.File(path, "r", locking=False)
    except (OSError, RuntimeError) as error:
        raise DataError(f"not a readable HDF5 file: {error}", where=str(path), remedy=f"h5ls {path}") from error


class Hdf5Table:
    """The datasets of a file by what they mean, all of the same length.

    All bytes are those of the file: no link is followed, and no dataset read that is made of other files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: dict[str, Any] = {}
        self._file = open_hdf5(path)
        self._names = _names(self._file, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, meaning: str, *names: str, needed: str) -> None:
        """Take the first of these datasets that is there; `needed` is what to do where none is, if one must be."""
        for name in names:
            if name.lower() in self._names and (found := self._dataset(self._names[name.lower()])) is not None:
                self.columns[meaning] = found
                return
        if needed:
            there = ", ".join(sorted(self._names)) or "none"
            raise DataError(f"no dataset {names[0]!r}; there are: {there}", where=str(self.path), remedy=needed)

    def _dataset(self, name: str) -> Any:
        """Return a dataset whose bytes are in this file; None for what is no dataset."""
        import h5py

        try:
            if not isinstance(self._file.get(name, getlink=True), h5py.HardLink):
                raise self._refused(
                    f"{name!r} is a link, and links are not followed", f"h5copy the data into {self.path}"
                )
            found = self._file[name]
            if not isinstance(found, h5py.Dataset):
                return None
            other = "is virtual" if found.is_virtual else "has its bytes in other files" if found.external else ""
            row_bytes = found.dtype.itemsize * math.prod((found.shape or ())[1:])
            chunk_bytes = found.dtype.itemsize * math.prod(found.chunks or ())
        except (KeyError, OSError, RuntimeError, TypeError, ValueError, MemoryError) as error:
            raise self._refused(f"{name!r} is damaged: {error}", f"h5ls -v {self.path}") from error
        if other:
            raise self._refused(
                f"{name!r} {other}, which are not read", f"h5ls -v {self.path}, and write its bytes into the file"
            )
        if row_bytes > MOST_ROW_BYTES:
            what = f"a row of {name!r} {found.shape} is {row_bytes >> 20:,} MiB, more than {MOST_ROW_BYTES >> 20}"
            raise self._refused(what, "write it in more and smaller rows")
        if chunk_bytes > MOST_CHUNK_BYTES:
            what = (
                f"a chunk of {name!r} {found.chunks} is {chunk_bytes >> 20:,} MiB, more than {MOST_CHUNK_BYTES >> 20}"
            )
            raise self._refused(what, "h5repack -l CHUNK=… it into smaller chunks")
        return found

    def _refused(self, what: str, remedy: str) -> DataError:
        return DataError(what, where=str(self.path), remedy=remedy)

    def check_lengths(self) -> int:
        """Return how many rows there are."""
        rows = {found.shape[0] if found.shape else -1 for found in self.columns.values()}
        if len(rows) != 1 or -1 in rows:
            shapes = ", ".join(f"{found.name} {found.shape}" for found in self.columns.values())
            raise self._refused(f"datasets of different lengths: {shapes}", "write a row of each for every item")
        length, size = int(rows.pop()), self.path.stat().st_size
        if length > size:  # else a damaged header makes entries for years
            raise self._refused(f"damaged: {length:,} rows in a file of {size:,} bytes", f"h5ls -v {self.path}")
        return length

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return rows, each the values by meaning."""
        return _by_row(self._pieces(self.columns, start, stop), range(stop - start))

    def all_rows(self, without: Container[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield all rows and their numbers, a few MB at a time, and texts a few rows at a time."""
        length = self.check_lengths()
        columns = {meaning: column for meaning, column in self.columns.items() if meaning not in without}
        texts = {meaning: column for meaning, column in columns.items() if column.dtype.hasobject}
        others = {meaning: column for meaning, column in columns.items() if meaning not in texts}
        row_bytes = sum(column.nbytes for column in others.values()) // max(length, 1)
        step = min(max(PIECE_BYTES // max(row_bytes, 1), 1), MOST_ROWS)
        for start in range(0, length, step):
            stop = min(start + step, length)
            piece = self._pieces(others, start, stop)
            for first in range(start, stop, TEXT_ROWS):
                last = min(first + TEXT_ROWS, stop)
                rows = _by_row(piece, range(first - start, last - start))
                said = _by_row(self._pieces(texts, first, last), range(last - first))
                yield from enumerate(map(operator.or_, rows, said), first)

    def _pieces(self, columns: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        try:
            return {meaning: column[start:stop] for meaning, column in columns.items()}
        except (OSError, RuntimeError, TypeError, ValueError, MemoryError) as error:
            what = f"rows {start} to {stop} cannot be read: {str(error) or 'not enough memory'}"
            raise self._refused(what, f"h5ls -v {self.path}") from error


def _by_row(pieces: Mapping[str, Any], rows: Iterable[int]) -> list[dict[str, Any]]:
    return [{meaning: piece[row] for meaning, piece in pieces.items()} for row in rows]


def _names(file: Any, path: Path) -> dict[str, str]:
    """Return the names in a file by themselves in lower case."""
    try:
        return {str(name).lower(): str(name) for name in file}
    except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"damaged: {error}", where=str(path), remedy=f"h5ls {path}") from error


def cell_text(row: Mapping[str, Any], meaning: str) -> str:
    """Return a cell as text, a whole number without a point, empty where there is no such column."""
    value = row.get(meaning, "")
    if isinstance(value, np.floating) and value.is_integer():
        return str(int(value))
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def is_text(column: Any) -> bool:
    """Tell whether the cells of a dataset are texts."""
    import h5py

    return h5py.check_string_dtype(column.dtype) is not None
