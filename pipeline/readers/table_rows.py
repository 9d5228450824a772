"""Tables that readers read: rows that are found again alone by their place in the file, and targets by their ids.

In `.csv` commas separate columns, and quoted fields may contain commas and line ends; in `.tsv` tabs separate them, and
quotes are ordinary characters of a row. A table of targets has a column of ids and columns of numbers.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.readers.entry import (
    SCAN_AGAIN,
    Bytes,
    Opened,
    UnusableEntry,
    cannot_read,
    check_types,
    checked_file,
    entry_id,
    entry_rejection,
    parse_number,
)
from pipeline.readers.spectrum_files.spectrum_headers import NOT_KNOWN
from pipeline.records import Entry
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import BinaryIO

    from numpy.typing import NDArray

    from pipeline.records import Rejection

MOST_ROW_BYTES = 1 << 20
ID = "id"
PARTED_BY = {".csv": ",", ".tsv": "\t"}


class TableRow(NamedTuple):
    """A row of a table with its line end; a quoted field may make it several lines."""

    offset: int
    line: int
    text: bytes


def rows_in_table(path: Path) -> Iterator[TableRow]:
    """Yield the rows of a table; rows that are too long are cut."""
    quote = b'"' if path.suffix.lower() == ".csv" else b"\0\0"
    try:
        with path.open("rb") as file:
            offset, line = 0, 1
            while lines := _row(file, quote):
                yield TableRow(offset, line, b"".join(lines))
                while not lines[-1].endswith(b"\n") and (rest := file.readline(MOST_ROW_BYTES)):
                    lines[-1] = rest
                offset, line = file.tell(), line + len(lines)
    except OSError as error:
        raise cannot_read(path, error) from error


def _row(file: BinaryIO, quote: bytes) -> list[bytes]:
    """Return the lines of a row: one, and more while a quote is open."""
    lines: list[bytes] = []
    size, is_open = 0, False
    while (is_open or not lines) and size <= MOST_ROW_BYTES and (line := file.readline(MOST_ROW_BYTES + 1)):
        lines.append(line)
        size += len(line)
        is_open ^= line.count(quote) % 2 == 1
    return lines


def parted_cells(line: bytes, by: str) -> list[str]:
    """Split a line into cells."""
    if len(line) > MOST_ROW_BYTES:
        raise UnusableEntry(f"a row of more than {MOST_ROW_BYTES:,} bytes: an unclosed quote?")
    try:
        text = line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise UnusableEntry(f"not UTF-8 text: byte {error.start} is 0x{line[error.start]:02x}") from error
    if by == "\t":
        return text.split(by)
    try:
        return next(csv.reader([text], strict=True), [])
    except csv.Error as error:
        raise UnusableEntry(f"not a row of CSV: {error}") from error


@dataclass(frozen=True)
class TextTable:
    """A table with a header: its columns are found once, and the cells of each row by what they mean to a reader."""

    path: Path
    by: str
    header: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> TextTable:
        """Read the header; a `.csv` that is parted by tabs is read so."""
        line = next(rows_in_table(path), TableRow(0, 1, b"")).text.removeprefix(b"\xef\xbb\xbf")
        by = "\t" if b"\t" in line and b"," not in line else PARTED_BY.get(path.suffix.lower(), ",")
        try:
            return cls(path, by, tuple(cell.strip() for cell in parted_cells(line, by)))
        except UnusableEntry as error:
            remedy = "write the column names as the first line, in UTF-8"
            raise DataError(f"the header is {error}", where=f"{path}:1", remedy=remedy) from error

    def column(self, option: str, name: str) -> str:
        """Return the column that an option names; it must be there exactly once."""
        if name and self.header.count(name) == 1:
            return name
        there = ", ".join(map(printable_text, self.header)) or "empty"
        wanted = f"one column {name!r}" if name else f"a column of the {option}"
        remedy = f"--set data.options.{option}=COLUMN (a column that occurs once)"
        raise DataError(f"the header needs {wanted}; it is: {there}", where=f"{self.path}:1", remedy=remedy)

    def find(self, option: str, given: str, usual: Sequence[str] = (), *, required: bool = True) -> str:
        """Return the column that an option names, else one with a usual name; "" if there is none and it may lack."""
        there = {name.lower(): name for name in self.header}
        name = given.strip() or next((there[name] for name in usual if name in there), "")
        return self.column(option, name) if name or required else ""

    def cells(self, line: bytes, columns: Mapping[str, str]) -> dict[str, str]:
        """Return the cells of a line by the meaning of their columns."""
        cells = parted_cells(line, self.by)
        if len(cells) != len(self.header):
            raise UnusableEntry(f"{len(cells)} columns, but the header has {len(self.header)}")
        by_name = dict(zip(self.header, cells, strict=True))
        return {meaning: by_name[name] for meaning, name in columns.items()}

    def entries(
        self,
        cells_of: Callable[[bytes], dict[str, str]],
        arrays_of: Callable[[Mapping[str, str]], Mapping[str, Any]],
        name_of: Callable[[Mapping[str, str], int], str] = lambda cells, _number: cells.get(ID, ""),
    ) -> Iterator[Entry | Rejection]:
        """Yield every row as an entry, whose place is [offset, length], or its rejection."""
        rows = rows_in_table(self.path)
        next(rows, None)
        for number, row in enumerate(row for row in rows if row.text.strip(b"\r\n")):
            cells: dict[str, str] = {}
            found: Mapping[str, Any] | UnusableEntry
            try:
                found = arrays_of(cells := cells_of(row.text))
            except UnusableEntry as error:
                found = error
            name, split = entry_id(name_of(cells, number), self.path, number), cells.get("split", "").strip()
            if isinstance(found, UnusableEntry):
                yield entry_rejection(name, found, split, self.path, row.line)
            else:
                yield Entry(name, [row.offset, len(row.text)], found, split, f"{self.path.name}:{row.line}")


@dataclass(eq=False)
class TableReader:
    """A reader of one CSV or TSV table; a subclass finds its columns, and makes arrays of the cells of a row.

    A place is [offset, length].
    """

    path: Path
    id: str = ""  # column; `id` if it is there; else ids are the file's name and the number of the row
    split: str = ""  # column; `split` if it is there

    def __post_init__(self) -> None:
        check_types(self)
        self.path = checked_file(Path(self.path))
        self._columns: dict[str, str] = {}  # by meaning
        self._bytes = Opened(Bytes)
        if self.path.suffix.lower() in PARTED_BY:
            self._table = TextTable.read(self.path)
            found = {**self._find_columns(), **self._found("id", "split", required=False)}
            self._columns = {meaning: name for meaning, name in found.items() if name}

    def _find_columns(self) -> dict[str, str]:
        """Return the columns that the reader needs, by meaning."""
        raise NotImplementedError

    def _found(self, *options: str, required: bool = True) -> dict[str, str]:
        """Return the columns of options; one that is not given has the option's name."""
        return {name: self._table.find(name, getattr(self, name), [name], required=required) for name in options}

    def _arrays(self, row: Mapping[str, Any]) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of a row, whose cells are given by meaning."""
        raise NotImplementedError

    def _cells(self, line: bytes) -> dict[str, str]:
        return self._table.cells(line, self._columns)

    def _only_tables(self, what: str, suffixes: Sequence[str]) -> None:
        """Raise for a file that is none of these."""
        if self.path.suffix.lower() not in suffixes:
            problem = f"{what} are read from {', '.join(suffixes)}"
            raise ConfigError(problem, where=str(self.path), remedy="convert them to one of these, and set data.path")

    def files(self) -> tuple[Path, ...]:
        """Return the one file that is read."""
        return (self.path,)

    def entries(self) -> Iterator[Entry | Rejection]:
        """Yield every row as an entry, or its rejection."""
        return self._table.entries(self._cells, self._arrays)

    def read(self, place: list[int]) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of the row at a place."""
        try:
            return self._row_arrays(place)
        except (UnusableEntry, IndexError) as error:
            raise DataError(f"no row at {place}: {error}", where=str(self.path), remedy=SCAN_AGAIN) from error

    def _row_arrays(self, place: list[int]) -> Mapping[str, NDArray[Any]]:
        return self._arrays(self._cells(self._bytes(self.path).at(*place)))


LARGEST = float(np.finfo(np.float32).max)


class LabelTable:
    """Numbers of items by their ids, in memory: a few bytes an item. What is not there is not known."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        table = TextTable.read(checked_file(path))
        columns = {name: name for name in (ID, *names)}
        if missing := [name for name in columns if table.header.count(name) != 1]:
            what = f"the header needs one column {missing[0]!r}; it is: {', '.join(map(printable_text, table.header))}"
            raise DataError(what, where=f"{path}:1", remedy=f"name its columns {', '.join(columns)}")
        places: dict[str, int] = {}
        rows: list[tuple[float, ...]] = []
        for row in islice(rows_in_table(path), 1, None):
            if not row.text.strip(b"\r\n"):
                continue
            try:
                cells = table.cells(row.text, columns)
                if (key := "_".join(cells[ID].split())) in places:
                    raise UnusableEntry(f"{printable_text(key)} is duplicated")
                rows.append(tuple(label_number(cells[name], name) for name in names))
            except UnusableEntry as error:
                remedy = "write one row for each id, with numbers or empty cells in the target columns"
                raise DataError(error.detail, where=f"{path}:{row.line}", remedy=remedy) from error
            places[key] = len(places)
        self._names, self._places = names, places
        self._value_NK: NDArray[np.float32] = np.array(rows, np.float32).reshape(len(rows), len(names))

    def __len__(self) -> int:
        return len(self._places)

    def of(self, key: str) -> tuple[float, ...]:
        """Return the numbers of an item, NaN where they are not known."""
        place = self._places.get(key)
        return (math.nan,) * len(self._names) if place is None else tuple(self._value_NK[place].tolist())


def label_number(text: str, name: str) -> float:
    """Return a number that is a label; NaN where it says that it is not known."""
    bare = text.strip()
    if bare.lower() in NOT_KNOWN:
        return math.nan
    try:
        value = parse_number(bare)
    except ValueError:
        raise UnusableEntry(f"{name} is not a number: {printable_text(bare)!r}") from None
    if math.isinf(value) or abs(value) > LARGEST:
        raise UnusableEntry(f"{name} is {value:g}")
    return value
