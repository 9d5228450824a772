"""HDF5 files as tables: datasets whose first axis is the entries, read in pieces of rows."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pipeline.command_line import install_extra
from pipeline.errors import ConfigError, DataError
from pipeline.readers.entry import Column

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping
    from pathlib import Path

PIECE_BYTES = 4 << 20
MOST_ROWS = 4096  # at a time, however small
TEXT_ROWS = 64  # at a time, where texts are of any length: their bytes are not known before
MOST_ROW_BYTES = 64 << 20  # of a dataset
MOST_CHUNK_BYTES = 256 << 20  # of a compressed one: for any row, HDF5 unpacks all of its chunk
SUFFIXES = (".hdf5", ".h5")


def library(path: Path) -> Any:
    """Return h5py; raise with how to install it."""
    try:
        import h5py
    except ImportError as error:
        raise ConfigError("HDF5 needs the extra h5py", where=str(path), remedy=install_extra("hdf5")) from error
    return h5py


def open_hdf5(path: Path) -> Any:
    """Open a file without locking it: some cluster file systems cannot."""
    h5py = library(path)
    try:
        return h5py.File(path, "r", locking=False)
    except (OSError, RuntimeError) as error:
        raise DataError(f"not a readable HDF5 file: {error}", where=str(path), remedy=f"h5ls {path}") from error


class Hdf5Table:
    """The datasets of a file by their meaning, all of the same length.

    Only bytes of this file are read: links are not followed, and datasets stored in other files are refused.
    """

    def __init__(self, path: Path, columns: Iterable[Column] = ()) -> None:
        self.path = path
        self.columns: dict[str, Any] = {}
        self._file = open_hdf5(path)
        self._names = _names(self._file, path)
        for column in columns:
            self._add(column)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add_all(self) -> None:
        """Add every dataset by its name."""
        for name in self._names.values():
            self._add(Column(name, (name,)))

    def _add(self, column: Column) -> None:
        """Add a dataset; raise if it is missing and not optional."""
        for name in column.names:
            if name.lower() in self._names and (dataset := self._dataset(self._names[name.lower()])) is not None:
                self.columns[column.meaning] = dataset
                return
        if column.remedy:
            there = ", ".join(sorted(self._names)) or "none"
            raise self._refused(f"no dataset {column.names[0]!r}; there are: {there}", column.remedy)

    def _dataset(self, name: str) -> Any:
        """Return a dataset stored in this file; None if the name is of something else."""
        import h5py

        try:
            if not isinstance(self._file.get(name, getlink=True), h5py.HardLink):
                problem = f"{name!r} is a link, and links are not followed"
                raise self._refused(problem, f"h5copy the data into {self.path}")
            dataset = self._file[name]
            if not isinstance(dataset, h5py.Dataset):
                return None
            elsewhere = "is virtual" if dataset.is_virtual else "is stored in other files" * bool(dataset.external)
            row_bytes = dataset.dtype.itemsize * math.prod((dataset.shape or ())[1:])
            chunk_bytes = dataset.dtype.itemsize * math.prod(dataset.chunks or ())
        except (KeyError, OSError, RuntimeError, TypeError, ValueError, MemoryError) as error:
            raise self._refused(f"{name!r} is damaged: {error}", f"h5ls -v {self.path}") from error
        if elsewhere:
            remedy = f"h5ls -v {self.path}, and write its bytes into the file"
            raise self._refused(f"{name!r} {elsewhere}, which are not read", remedy)
        for what, shape, size_bytes, most_bytes, remedy in (
            ("row", dataset.shape, row_bytes, MOST_ROW_BYTES, "write it in more and smaller rows"),
            ("chunk", dataset.chunks, chunk_bytes, MOST_CHUNK_BYTES, "h5repack -l CHUNK=… it into smaller chunks"),
        ):
            if size_bytes > most_bytes:
                problem = f"a {what} of {name!r} {shape} is {size_bytes >> 20:,} MiB, more than {most_bytes >> 20}"
                raise self._refused(problem, remedy)
        return dataset

    def _refused(self, problem: str, remedy: str) -> DataError:
        return DataError(problem, where=str(self.path), remedy=remedy)

    def check_lengths(self) -> int:
        """Return the number of rows; raise if datasets differ in it."""
        rows = {dataset.shape[0] if dataset.shape else -1 for dataset in self.columns.values()}
        if len(rows) != 1 or -1 in rows:
            shapes = ", ".join(f"{dataset.name} {dataset.shape}" for dataset in self.columns.values())
            raise self._refused(f"datasets of different lengths: {shapes}", "write one row of each for every item")
        length, size = int(rows.pop()), self.path.stat().st_size
        if length > size:  # else a damaged header could yield endless entries
            raise self._refused(f"damaged: {length:,} rows in a file of {size:,} bytes", f"h5ls -v {self.path}")
        return length

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Return rows as mappings from meaning to value."""
        return _by_row(self._pieces(self.columns, start, stop), range(stop - start))

    def all_rows(self, without: Container[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield all rows and their numbers, a few MB at a time, and texts a few rows at a time."""
        length = self.check_lengths()
        columns = {meaning: column for meaning, column in self.columns.items() if meaning not in without}
        texts = {meaning: column for meaning, column in columns.items() if column.dtype.hasobject}
        fixed = {meaning: column for meaning, column in columns.items() if meaning not in texts}
        row_bytes = sum(column.nbytes for column in fixed.values()) // max(length, 1)
        step = min(max(PIECE_BYTES // max(row_bytes, 1), 1), MOST_ROWS)
        for start in range(0, length, step):
            stop = min(start + step, length)
            piece = self._pieces(fixed, start, stop)
            for first in range(start, stop, TEXT_ROWS):
                last = min(first + TEXT_ROWS, stop)
                rows = _by_row(piece, range(first - start, last - start))
                text_rows = _by_row(self._pieces(texts, first, last), range(last - first))
                yield from enumerate(map(operator.or_, rows, text_rows), first)

    def _pieces(self, columns: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        try:
            return {meaning: column[start:stop] for meaning, column in columns.items()}
        except (OSError, RuntimeError, TypeError, ValueError, MemoryError) as error:
            problem = f"rows {start} to {stop} cannot be read: {str(error) or 'not enough memory'}"
            raise self._refused(problem, f"h5ls -v {self.path}") from error


def _by_row(pieces: Mapping[str, Any], rows: Iterable[int]) -> list[dict[str, Any]]:
    return [{meaning: piece[row] for meaning, piece in pieces.items()} for row in rows]


def _names(file: Any, path: Path) -> dict[str, str]:
    """Return the names in a file, by their lower-case forms."""
    try:
        return {str(name).lower(): str(name) for name in file}
    except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"damaged: {error}", where=str(path), remedy=f"h5ls {path}") from error


def cell_text(row: Mapping[str, Any], meaning: str) -> str:
    """Return a cell as text, whole numbers without a point; empty if there is no such column."""
    value = row.get(meaning, "")
    if isinstance(value, (float, np.floating)):
        number = float(value)
        if number.is_integer():
            return str(int(number))
        return repr(number) if isinstance(value, float) else str(value)  # of a double, numpy's takes five times as long
    return text_of(value)


def text_of(value: Any) -> str:
    """Return a value as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def is_text(column: Any) -> bool:
    """Tell whether the cells of a dataset are texts."""
    import h5py

    return h5py.check_string_dtype(column.dtype) is not None
