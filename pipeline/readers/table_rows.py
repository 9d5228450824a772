"""Tables that readers read: named columns, rows that are found again alone by their place in the file, and labels.

In `.csv` commas separate columns, and quoted fields may contain commas and line ends; in `.tsv` tabs separate them, and
quotes are ordinary characters of a row. A table of labels has a column of ids and columns of numbers.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.readers.entry import (
    NOT_KNOWN,
    SCAN_AGAIN,
    Bytes,
    Column,
    Opened,
    UnusableEntry,
    bounded_number,
    cannot_read,
    check_types,
    checked_file,
    checked_path,
    column_of,
    decoded,
    entry_id,
    entry_or_rejection,
)
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import BinaryIO

    from numpy.typing import NDArray

    from pipeline.records import Entry, Rejection

MOST_ROW_BYTES = 1 << 20
ID = "id"
PARTED_BY = {".csv": ",", ".tsv": "\t"}
FOLDER = "a folder"
LIKELY, ALIKE = 0.6, 0.8  # how near the name of another column is to that of one that must be, or may be, there
LEAST_LETTERS = 4  # of an optional column whose name may be misspelt: `idx` is not `id`


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
    text = decoded(line).rstrip("\r\n")
    if by == "\t":
        return text.split(by)
    try:
        return next(csv.reader([text], strict=True), [])
    except csv.Error as error:
        raise UnusableEntry(f"not a row of CSV: {error}") from error


class TextTable:
    """A table with a header, and the columns of it that are wanted, by what they mean to a reader."""

    def __init__(self, path: Path, columns: Iterable[Column]) -> None:
        self._path = path
        line = next(rows_in_table(path), TableRow(0, 1, b"")).text.removeprefix(b"\xef\xbb\xbf")
        suffix = ".tsv" if b"\t" in line and b"," not in line else path.suffix.lower()  # as open_clip writes a .csv
        self._by = PARTED_BY.get(suffix, ",")
        try:
            self.header = [cell.strip() for cell in parted_cells(line, self._by)]
        except UnusableEntry as error:
            remedy = "write the column names as the first line, in UTF-8"
            raise DataError(f"the header is {error}", where=f"{path}:1", remedy=remedy) from error
        columns = list(columns)
        wanted = {name.lower() for column in columns for name in column.names}
        self._spare = [name for name in self.header if name and name.lower() not in wanted]
        self.places = {column.meaning: place for column in columns if (place := self._place(column)) is not None}

    def _place(self, column: Column) -> int | None:
        """Return the place of a column; raise if it is duplicated, misspelt, or missing and not optional."""
        for name in column.names:
            places = [at for at, there in enumerate(self.header) if there == name]
            places = places or [at for at, there in enumerate(self.header) if there.lower() == name.lower()]
            if len(places) == 1:
                return places[0]
            if places:
                raise self._refused(f"{len(places)} columns {name!r}", column.remedy or "rename the others")
        if not (meant := self._meant(column)) and not column.remedy:
            return None
        wanted = " or ".join(map(repr, column.names)) or f"for data.options.{column.meaning}"
        there = ", ".join(map(printable_text, self.header)) or "none"
        hint = f"; did you mean {printable_text(meant)!r}?" if meant else ""
        rename = "rename that column; to keep it, add one with the right name, which may be empty"
        raise self._refused(f"no column {wanted}; found: {there}{hint}", column.remedy or rename)

    def _meant(self, column: Column) -> str:
        """Return the column that no option names and that must be meant by a missing one; empty if none is."""
        spare = {name.lower(): name for name in self._spare}
        cutoff = LIKELY if column.remedy else ALIKE
        for name in column.names:
            near = get_close_matches(name.lower(), spare, n=1, cutoff=cutoff)
            if near and (column.remedy or len(name) >= LEAST_LETTERS):
                return spare[near[0]]
        return ""

    def _refused(self, what: str, remedy: str) -> DataError:
        return DataError(what, where=f"{self._path}:1", remedy=remedy)

    def cells(self, line: bytes) -> dict[str, str]:
        """Return the cells of a line by the meaning of their columns."""
        cells = parted_cells(line, self._by)
        if len(cells) != len(self.header):
            raise UnusableEntry(f"{len(cells)} columns, but the header has {len(self.header)}")
        return {meaning: cells[place] for meaning, place in self.places.items()}

    def rows(self) -> Iterator[TableRow]:
        """Yield the rows that are not empty."""
        return (row for row in islice(rows_in_table(self._path), 1, None) if row.text.strip(b"\r\n"))


@dataclass(eq=False)
class TableReader:
    """A reader of one table; a subclass says which columns it wants, and makes arrays of the cells of a row.

    A place is [offset, length].
    """

    path: Path
    id: str = ""  # column; `id` if it is there; else ids are the file's name and the number of the row
    split: str = ""  # column; `split` if it is there
    what: ClassVar[str]  # items of this reader, for messages
    others: ClassVar[tuple[str, ...]] = ()  # suffixes, or FOLDER, of what the subclass reads itself

    def __post_init__(self) -> None:
        check_types(self)
        self.path = checked_path(path) if (path := Path(self.path)).is_dir() else checked_file(path)
        self._bytes = Opened(Bytes)
        self._table: TextTable | None = None
        kind = FOLDER if self.path.is_dir() else self.path.suffix.lower()
        if kind in PARTED_BY:
            self._table = TextTable(self.path, self._columns())
        elif kind not in self.others:
            problem = f"{self.what} are read from {', '.join((*PARTED_BY, *self.others))}"
            raise ConfigError(problem, where=str(self.path), remedy="convert them to one of these, and set data.path")

    def _columns(self) -> list[Column]:
        """Return the columns or datasets that the reader looks for."""
        return [self._column("id", "id"), self._column("split", "split")]

    def _column(self, option: str, *usual: str, needed: bool = False) -> Column:
        """Return the column of an option: the one that it names, else one with a usual name."""
        return column_of(option, getattr(self, option), *usual, needed=needed)

    def _arrays(self, row: Mapping[str, Any]) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of a row, whose cells are given by meaning."""
        raise NotImplementedError

    def _name(self, row: Mapping[str, Any], number: int) -> str:  # noqa: ARG002 - a subclass may need it
        """Return the id that a row has; empty where the file's name and the row's number stand for it."""
        return str(row.get("id", ""))

    def files(self) -> tuple[Path, ...]:
        """Return the one file that is read."""
        return (self.path,)

    def entries(self) -> Iterator[Entry | Rejection]:
        """Yield every row as an entry, or its rejection."""
        return self._of_table(self._arrays)

    def _of_table(self, arrays_of: Callable[[Mapping[str, str]], Mapping[str, Any]]) -> Iterator[Entry | Rejection]:
        """Yield the rows of a table; a row that cannot be split into cells has neither id nor split."""
        assert self._table is not None
        for number, row in enumerate(self._table.rows()):
            cells: dict[str, str] = {}
            problem: UnusableEntry | None = None
            try:
                cells = self._table.cells(row.text)
            except UnusableEntry as error:
                problem = error
            name = entry_id(self._name(cells, number), self.path, number)
            place, split = [row.offset, len(row.text)], cells.get("split", "").strip()
            yield entry_or_rejection(name, place, problem or partial(arrays_of, cells), split, self.path, row.line)

    def read(self, place: list[int]) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of the row at a place."""
        try:
            return self._at(place)
        except (UnusableEntry, IndexError) as error:
            raise DataError(f"no entry at {place}: {error}", where=str(self.path), remedy=SCAN_AGAIN) from error

    def _at(self, place: list[int]) -> Mapping[str, NDArray[Any]]:
        assert self._table is not None
        return self._arrays(self._table.cells(self._bytes(self.path).at(*place)))


class LabelTable:
    """Numbers of items by their ids, in memory: a few bytes an item. What is not there is not known."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        remedy = f"name its columns {', '.join((ID, *names))}"
        table = TextTable(checked_file(path), [Column(name, (name,), remedy) for name in (ID, *names)])
        self._names, self._numbers = names, dict[str, int]()
        numbers: list[float] = []
        for row in table.rows():
            try:
                cells = table.cells(row.text)
                if (key := "_".join(cells[ID].split())) in self._numbers:
                    raise UnusableEntry(f"{printable_text(key)} is duplicated")
                numbers += [label_number(cells[name], name) for name in names]
            except UnusableEntry as error:
                remedy = "write one row for each id, with numbers or empty cells in the target columns"
                raise DataError(error.detail, where=f"{path}:{row.line}", remedy=remedy) from error
            self._numbers[key] = len(self._numbers)
        self._value_NK: NDArray[np.float32] = np.array(numbers, np.float32).reshape(len(self._numbers), len(names))

    def of(self, key: str) -> tuple[float, ...]:
        """Return the numbers of an item, NaN where they are not known."""
        number = self._numbers.get(key)
        return (math.nan,) * len(self._names) if number is None else tuple(self._value_NK[number].tolist())


def label_number(text: str, name: str) -> float:
    """Return a number that is a label; NaN where it says that it is not known."""
    bare = text.strip()
    return math.nan if bare.lower() in NOT_KNOWN else bounded_number(bare, name)
