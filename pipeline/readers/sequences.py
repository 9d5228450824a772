"""`Sequences`: protein sequences with what is known of each, or of each of its residues, from a table.

    data: {source: reader, reader: "pipeline.readers.sequences:Sequences", path: data/sequences.csv,
           options: {target: [stability]}}

The table is CSV or TSV with a header, a row for each sequence: `sequence`, and if there `id` and `split`. `target`
names columns of numbers, of which an empty cell is not known; `sites` a column of as many characters as the sequence:
1 yes, 0 no, anything else not known. Shapes: L residues, K targets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.readers.entry import (
    SCAN_AGAIN,
    Bytes,
    Opened,
    UnusableEntry,
    check_count,
    check_names,
    check_option,
    checked_file,
)
from pipeline.readers.table_rows import PARTED_BY, TextTable, label_number
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from pipeline.records import Entry, Rejection

    Arrays = Mapping[str, NDArray[Any]]

LETTER, SITE, TARGET = "sequence.letter", "sequence.site", "target"
NOT_KNOWN = -1
WRONG_LETTER = re.compile(r"[^A-IK-Z]")  # J is none that an encoder knows


@dataclass(frozen=True)
class Sequences:
    """The sequences of a table.

    Arrays: `sequence.letter` uint8 [L], the letters' ASCII; `target` float32 [K], NaN where not known;
    `sequence.site` int8 [L], -1 where not known. A place is [offset, length].
    """

    path: Path
    sequence: str = "sequence"  # its column
    target: tuple[str, ...] = ()  # columns of numbers
    sites: str = ""  # column of a character for each residue
    id: str = ""  # `id` if it is there; else the file's name and the number of the row
    split: str = ""  # `split` if it is there
    most: int = 10_000  # residues; a longer sequence is refused
    _table: TextTable = field(init=False, repr=False, compare=False)
    _columns: dict[str, str] = field(init=False, repr=False, compare=False, default_factory=dict)  # by meaning
    _bytes: Opened[Bytes] = field(init=False, repr=False, compare=False, default_factory=lambda: Opened(Bytes))

    def __post_init__(self) -> None:
        check_count("most", self.most)
        check_names({name: getattr(self, name) for name in ("sequence", "sites", "id", "split")})
        is_list = not isinstance(self.target, str) and all(isinstance(name, str) for name in self.target)
        check_option("target", self.target, "a list of columns", fits=is_list)
        object.__setattr__(self, "target", tuple(self.target))
        object.__setattr__(self, "path", checked_file(Path(self.path)))
        if self.path.suffix.lower() not in PARTED_BY:
            problem = f"sequences are read from {' and '.join(PARTED_BY)}"
            raise ConfigError(problem, where=str(self.path), remedy="convert them to one of these, and set data.path")
        object.__setattr__(self, "_table", TextTable.read(self.path))
        self._columns["sequence"] = self._table.column("sequence", self.sequence)
        for name in self.target:
            self._columns[f"{TARGET} {name}"] = self._table.column("target", name)
        if self.sites:
            self._columns["sites"] = self._table.column("sites", self.sites)
        for name in ("id", "split"):
            if (column := getattr(self, name)) or name in self._table.header:
                self._columns[name] = self._table.column(name, column or name)

    def files(self) -> tuple[Path, ...]:
        """Return the one file that is read."""
        return (self.path,)

    def entries(self) -> Iterator[Entry | Rejection]:
        """Yield every sequence as an entry, or its rejection."""
        return self._table.entries(self._cells, self._arrays)

    def read(self, place: list[int]) -> Arrays:
        """Return the arrays of the sequence at a place."""
        try:
            return self._arrays(self._cells(self._bytes(self.path).at(*place)))
        except UnusableEntry as error:
            raise DataError(f"no sequence at {place}: {error}", where=str(self.path), remedy=SCAN_AGAIN) from error

    def _cells(self, line: bytes) -> dict[str, str]:
        return self._table.cells(line, self._columns)

    def _arrays(self, cells: Mapping[str, str]) -> Arrays:
        text = cells["sequence"].strip()
        if not 0 < len(text) <= self.most:
            raise UnusableEntry(f"{len(text):,} residues; most allows {self.most:,}" if text else "no sequence")
        if wrong := WRONG_LETTER.search(text):
            raise UnusableEntry(f"{printable_text(wrong[0])!r} at position {wrong.start() + 1} is not a residue letter")
        arrays: dict[str, NDArray[Any]] = {LETTER: np.frombuffer(text.encode("ascii"), np.uint8)}
        if self.target:
            numbers = [label_number(cells[f"{TARGET} {name}"], name) for name in self.target]
            arrays[TARGET] = np.array(numbers, np.float32)
        if self.sites:
            arrays[SITE] = _sites(cells["sites"].strip(), len(text))
        return arrays


def _sites(text: str, residues: int) -> NDArray[np.int8]:
    if len(text) != residues:
        raise UnusableEntry(f"{len(text):,} sites of {residues:,} residues")
    letter_L = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
    return np.select([letter_L == ord("0"), letter_L == ord("1")], [0, 1], NOT_KNOWN).astype(np.int8)
