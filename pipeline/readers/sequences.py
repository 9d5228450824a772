"""`Sequences`: protein sequences with labels of each, or of each residue, from a table.

    data: {source: reader, reader: "pipeline.readers.sequences:Sequences", path: data/sequences.csv,
           options: {target: [stability]}}

The table is CSV or TSV with a header, a row for each sequence: `sequence`, and if there `id` and `split`. `target`
names columns of numbers, of which an empty cell is not known; `sites` a column of as many characters as the sequence:
1 yes, 0 no, anything else not known. Shapes: L residues, K targets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipeline.readers.entry import Column, Count, UnusableEntry, check_option, column_of
from pipeline.readers.table_rows import TableReader, label_number
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Arrays = Mapping[str, NDArray[Any]]

LETTER, SITE, TARGET = "sequence.letter", "sequence.site", "target"
NOT_KNOWN = -1
WRONG_LETTER = re.compile(r"[^A-IK-Z]")  # J is none that an encoder knows


@dataclass(eq=False)
class Sequences(TableReader):
    """The sequences of a table.

    Arrays: `sequence.letter` uint8 [L], the letters' ASCII; `target` float32 [K], NaN where not known;
    `sequence.site` int8 [L], -1 where not known.
    """

    sequence: str = "sequence"  # its column
    target: tuple[str, ...] = ()  # columns of numbers
    sites: str = ""  # column of a character for each residue
    most: Count = 10_000  # residues; a longer sequence is refused

    what: ClassVar = "sequences"

    def __post_init__(self) -> None:
        is_list = not isinstance(self.target, str) and all(isinstance(name, str) for name in self.target)
        check_option("target", self.target, "a list of columns", fits=is_list)
        self.target = tuple(self.target)
        super().__post_init__()

    def _columns(self) -> list[Column]:
        targets = [column_of("target", name, needed=True, meaning=f"{TARGET} {name}") for name in self.target]
        needed = [self._column("sequence", needed=True), *targets, self._column("sites")]
        return [*super()._columns(), *needed]

    def _arrays(self, row: Mapping[str, Any]) -> Arrays:
        text = row["sequence"].strip()
        if not 0 < len(text) <= self.most:
            raise UnusableEntry(f"{len(text):,} residues; most allows {self.most:,}" if text else "no sequence")
        if wrong := WRONG_LETTER.search(text):
            raise UnusableEntry(f"{printable_text(wrong[0])!r} at position {wrong.start() + 1} is not a residue letter")
        arrays: dict[str, NDArray[Any]] = {LETTER: np.frombuffer(text.encode("ascii"), np.uint8)}
        if self.target:
            numbers = [label_number(row[f"{TARGET} {name}"], name) for name in self.target]
            arrays[TARGET] = np.array(numbers, np.float32)
        if self.sites:
            arrays[SITE] = _sites(row["sites"].strip(), len(text))
        return arrays


def _sites(text: str, residues: int) -> NDArray[np.int8]:
    if len(text) != residues:
        raise UnusableEntry(f"{len(text):,} sites of {residues:,} residues")
    letter_L = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
    return np.select([letter_L == ord("0"), letter_L == ord("1")], [0, 1], NOT_KNOWN).astype(np.int8)
