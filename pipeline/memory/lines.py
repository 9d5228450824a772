"""Values as lines of JSON: how records are written, and read back only where they are whole and within bounds."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeAlias

Row: TypeAlias = tuple[Any, ...]

_SURROGATE = "\\ud"  # as JSON writes the halves of a character beyond 16 bits
_LARGEST = float(1 << 62)  # what an SQLite integer holds, and more than any byte count
_TYPES: dict[str, set[type]] = {
    "str": {str},
    "int": {int},
    "bool": {bool},
    "float": {int, float},
    "int | None": {int, type(None)},
}


class Lines:
    """The lines of one kind of value, a flat dataclass; each is of a run."""

    def __init__(self, kind: type) -> None:
        """Take the dataclass; it has numbers that must be there, and texts."""
        found = fields(kind)
        self.columns: tuple[str, ...] = ("run", *(field.name for field in found))
        wanted: tuple[set[type], ...] = ({str}, *(_TYPES[str(field.type)] for field in found))
        self._pick = itemgetter(*self.columns)
        self._numbers = [place for place, one in enumerate(wanted) if int in one]
        self._fits = lru_cache(maxsize=256)(
            lambda types: all(told in one for told, one in zip(types, wanted, strict=True))
        )

    def line_of(self, run: str, value: Any) -> bytes:
        """Write a value of a run as a line."""
        return json.dumps({"run": run, **asdict(value)}, separators=(",", ":")).encode() + b"\n"

    def row_of(self, line: str) -> Row | None:
        """Read a line into `columns`; one that is torn, foreign or out of bounds is none."""
        try:
            row: Row = self._pick(_read(line))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if not self._fits(tuple(map(type, row))) or not self._bounded(row):
            return None
        return row if _SURROGATE not in line or _is_text(row) else None

    def _bounded(self, row: Row) -> bool:
        """Tell whether every number is one that a count, a size or a time can be."""
        numbers = [row[place] or 0 for place in self._numbers]
        return bool(min(numbers) >= 0 and max(numbers) <= _LARGEST)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no measurement")


_read = json.JSONDecoder(parse_constant=_refuse).decode


def _is_text(row: Row) -> bool:
    """Tell whether every text can be written down: half a surrogate pair cannot."""
    try:
        "".join(value for value in row if isinstance(value, str)).encode()
    except UnicodeEncodeError:
        return False
    return True
