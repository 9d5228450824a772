"""One task as it was measured, and the line of JSON that keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from operator import itemgetter
from typing import Any, TypeAlias

Row: TypeAlias = tuple[Any, ...]

_SURROGATE = "\\ud"  # as JSON writes the halves of a character beyond 16 bits
_LARGEST = float(1 << 62)  # what an SQLite integer holds, and more than any byte count


@dataclass(frozen=True, slots=True)
class Measured:
    """One attempt at a task that ended well, or died of host memory; None is what nobody measured."""

    stage: str
    recipe: str  # hex
    cluster: str
    attempt: int
    task: int
    items: int  # what this attempt finished; 0 says nothing of its pace
    size: int  # its largest item, in the stage's unit of cost; 0 is unknown
    cpus: int
    asked_bytes: int | None
    peak_bytes: int | None
    gpu_peak_bytes: int | None
    killed: bool  # died of host memory: it needed more than the larger of what it asked for and its peak
    elapsed_s: float
    cpu_s: float
    node: str
    at: float  # when it ended: by run, task, attempt and this a task told twice counts once


COLUMNS = ("run", *(field.name for field in fields(Measured)))
_TYPES: dict[str, set[type]] = {
    "str": {str},
    "int": {int},
    "bool": {bool},
    "float": {int, float},
    "int | None": {int, type(None)},
}
_WANTED: tuple[set[type], ...] = ({str}, *(_TYPES[str(field.type)] for field in fields(Measured)))
_pick = itemgetter(*COLUMNS)
_counts = itemgetter(*(place for place, wanted in enumerate(_WANTED) if int in wanted and type(None) not in wanted))
_sizes = itemgetter(*(place for place, wanted in enumerate(_WANTED) if type(None) in wanted))


def line_of(run: str, measured: Measured) -> bytes:
    """Write a measurement of a run as a line."""
    return json.dumps({"run": run, **asdict(measured)}, separators=(",", ":")).encode() + b"\n"


def row_of(line: str) -> Row | None:
    """Read a line into COLUMNS; one that is torn, foreign or out of bounds is none."""
    try:
        row: Row = _pick(_read(line))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not _fits(tuple(map(type, row))) or not _bounded(row):
        return None
    return row if _SURROGATE not in line or _is_text(row) else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no measurement")


_read = json.JSONDecoder(parse_constant=_refuse).decode


@lru_cache(maxsize=256)
def _fits(types: tuple[type, ...]) -> bool:
    return all(found in wanted for found, wanted in zip(types, _WANTED, strict=True))


def _bounded(row: Row) -> bool:
    """Tell whether every number is one that a count, a size or a time can be."""
    numbers = (*_counts(row), *filter(None, _sizes(row)))
    return bool(min(numbers) >= 0 and max(numbers) <= _LARGEST)


def _is_text(row: Row) -> bool:
    """Tell whether every text can be written down: half a surrogate pair cannot."""
    try:
        "".join(value for value in row if isinstance(value, str)).encode()
    except UnicodeEncodeError:
        return False
    return True
