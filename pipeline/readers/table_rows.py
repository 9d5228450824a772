"""Rows of tables that readers read: UTF-8, each with its place in the file, so that it is found again alone.

In `.csv` commas separate columns, and quoted fields may contain commas and line ends; in `.tsv` tabs separate them, and
quotes are ordinary characters.
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, NamedTuple

from pipeline.readers.entry import UnusableEntry, cannot_read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

MOST_ROW_BYTES = 1 << 20
PARTED_BY = {".csv": ",", ".tsv": "\t"}


class TableRow(NamedTuple):
    """A row of a table with its line end; a quoted field may make it several lines."""

    offset: int
    line: int
    text: bytes


def suffix_of(path: Path) -> str:
    """Return the suffix in small letters."""
    return path.suffix.lower()


def rows_in_table(path: Path) -> Iterator[TableRow]:
    """Yield the rows of a table; rows that are too long are cut."""
    quote = b'"' if suffix_of(path) == ".csv" else b"\0\0"
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
        raise UnusableEntry(f"a row of more than {MOST_ROW_BYTES:,} bytes: a quote that is not closed?")
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
