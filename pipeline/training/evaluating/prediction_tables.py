"""Gathered outputs as files for people and other programs: numbers in tables, arrays in safetensors.

    predictions.csv             a line an item: its id, each number, the shape of each array
    predictions.jsonl           the same as JSON; null where an item has nothing, or no finite number
    arrays-00000.safetensors    arrays, under `id.name`; a name has no dot, so the last one parts the two

Nothing here grows with the number of items but the files.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pipeline.store.format.disk import Disk
from pipeline.training.evaluating.output_parts import publish_tensors, refusals, start_partial
from pipeline.training.evaluating.outputs import INDEX_BYTES, PART_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.training.evaluating.outputs import GatheredOutputs

    Array = NDArray[Any]

CSV, LINES = "predictions.csv", "predictions.jsonl"
_ARRAYS = re.compile(r"arrays-\d{5,}\.safetensors")


@dataclass(frozen=True, slots=True)
class PredictionTables:
    """What was written."""

    csv: Path
    jsonl: Path
    arrays: tuple[Path, ...]
    items: int


@dataclass(slots=True)
class _Arrays:
    """Files of arrays in the making."""

    folder: Path
    most_bytes: int
    paths: list[Path] = field(default_factory=list)
    pending: dict[str, Array] = field(default_factory=dict)
    bytes: int = 0

    def add(self, name: str, array: Array) -> None:
        self.pending[name] = array
        self.bytes += array.nbytes + len(name) + INDEX_BYTES
        if self.bytes >= self.most_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what there is."""
        if self.pending:
            path = self.folder / f"arrays-{len(self.paths):05d}.safetensors"
            publish_tensors(Disk(), path, {name: torch.from_numpy(array) for name, array in self.pending.items()})
            self.paths.append(path)
            self.pending, self.bytes = {}, 0


def write_tables(gathered: GatheredOutputs, folder: Path, *, part_bytes: int = PART_BYTES) -> PredictionTables:
    """Write tables of all items, and their arrays, into a folder; what was there of an earlier time is replaced."""
    disk = Disk()
    disk.make_folder(folder)
    arrays = _Arrays(folder, part_bytes)
    partial_csv, partial_lines = (start_partial(disk, folder / name) for name in (CSV, LINES))
    with (
        refusals(folder, partial_csv, partial_lines),
        partial_csv.open("x", encoding="utf-8", newline="") as csv_file,
        partial_lines.open("x", encoding="utf-8") as lines_file,
    ):
        _write_rows(gathered, csv_file, lines_file, arrays)
        for file in (csv_file, lines_file):
            file.flush()
            os.fsync(file.fileno())
    arrays.flush()
    for name in disk.list_folder(folder):
        if _ARRAYS.fullmatch(name) and folder / name not in arrays.paths:
            disk.unlink(folder / name)
    disk.rename(partial_csv, folder / CSV)
    disk.rename(partial_lines, folder / LINES)
    disk.fsync_folder(folder)
    return PredictionTables(folder / CSV, folder / LINES, tuple(arrays.paths), len(gathered.numbers))


def _write_rows(gathered: GatheredOutputs, csv_file: io.TextIOBase, lines_file: io.TextIOBase, arrays: _Arrays) -> None:
    """Write the rows of both tables, item by item."""
    rows = csv.writer(csv_file)
    columns = _columns(gathered)
    rows.writerow(columns)
    for id_, outputs in _items(gathered):
        row: dict[str, Any] = {"id": id_}
        for name, array in outputs.items():
            if array.ndim:
                row[_shape_of(name)] = list(array.shape)
                arrays.add(f"{id_}.{name}", array)
            else:
                row[name] = _number(array)
        rows.writerow(_text(row.get(name)) for name in columns)
        lines_file.write(json.dumps({name: _json(row.get(name)) for name in columns}, ensure_ascii=False) + "\n")


def _columns(gathered: GatheredOutputs) -> list[str]:
    """Return what the tables have."""
    names = ["id"]
    for name, column in gathered.items():
        names += [name] * column.has_scalars + [_shape_of(name)] * column.has_arrays
    return names


def _items(gathered: GatheredOutputs) -> Iterator[tuple[str, dict[str, Array]]]:
    """Yield each item's id, and what it has."""
    at = dict.fromkeys(gathered, 0)
    for place, number in enumerate(gathered.numbers.tolist()):
        outputs: dict[str, Array] = {}
        for name, column in gathered.items():
            if at[name] < len(column) and column.numbers[at[name]] == number:
                outputs[name] = column[at[name]]
                at[name] += 1
        yield gathered.id(place), outputs


def _shape_of(name: str) -> str:
    return f"{name}.shape"


def _number(value: Array) -> bool | int | float:
    """Return a number in its fewest digits: 0.1 of float32 is 0.1."""
    return float(str(value[()])) if value.dtype.kind == "f" else value.item()


def _text(value: Any) -> Any:
    """Return what stands in a cell: a shape as 3x4."""
    if value is None:
        return ""
    return "x".join(map(str, value)) if isinstance(value, list) else value


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
