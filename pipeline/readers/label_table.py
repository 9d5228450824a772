"""Targets of items from a table beside them: CSV or TSV with a column of ids and columns of numbers."""

from __future__ import annotations

import csv
import math
from typing import TYPE_CHECKING

import numpy as np

from pipeline.errors import DataError
from pipeline.readers.entry import UnusableEntry, cannot_read, checked_file, parse_number
from pipeline.readers.spectrum_files.spectrum_headers import NOT_KNOWN
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

ID = "id"
LARGEST = float(np.finfo(np.float32).max)


class LabelTable:
    """Numbers of items by their ids, in memory: a few bytes an item. What is not there is not known."""

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self._names = names
        places: dict[str, int] = {}
        rows: list[tuple[float, ...]] = []
        for line, row in self._rows(path):
            key = "_".join((row[ID] or "").split())
            if key in places:
                raise DataError(
                    f"{printable_text(key)} stands twice", where=f"{path}:{line}", remedy="keep one of them"
                )
            try:
                rows.append(tuple(label_number(row[name] or "", name) for name in names))
            except UnusableEntry as error:
                raise DataError(error.detail, where=f"{path}:{line}", remedy="write a number, or nothing") from error
            places[key] = len(places)
        self._places = places
        self._value_NK: NDArray[np.float32] = np.array(rows, np.float32).reshape(len(rows), len(names))

    def __len__(self) -> int:
        return len(self._places)

    def of(self, key: str) -> tuple[float, ...]:
        """Return the numbers of an item, NaN where they are not known."""
        place = self._places.get(key)
        return (math.nan,) * len(self._names) if place is None else tuple(self._value_NK[place].tolist())

    def _rows(self, path: Path) -> list[tuple[int, Mapping[str, str | None]]]:
        try:
            with checked_file(path).open(encoding="utf-8-sig", newline="") as file:
                table = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
                there = table.fieldnames or ()
                if missing := [name for name in (ID, *self._names) if name not in there]:
                    what = f"no column {missing[0]!r}; there are: {', '.join(map(printable_text, there)) or 'none'}"
                    raise DataError(what, where=str(path), remedy=f"name its columns {ID}, {', '.join(self._names)}")
                return [(table.line_num, row) for row in table]
        except OSError as error:
            raise cannot_read(path, error) from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"no table: {error}", where=str(path), remedy="write it as CSV in UTF-8") from error


def label_number(text: str, name: str) -> float:
    """Return a number that is a label; NaN where it says that it is not known."""
    bare = text.strip()
    if bare.lower() in NOT_KNOWN:
        return math.nan
    try:
        value = parse_number(bare)
    except ValueError:
        raise UnusableEntry(f"{name} is no number: {printable_text(bare)!r}") from None
    if math.isinf(value) or abs(value) > LARGEST:
        raise UnusableEntry(f"{name} is {value:g}")
    return value
