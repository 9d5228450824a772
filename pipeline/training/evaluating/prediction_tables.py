"""A model's outputs as tables for people, and files of arrays that are too large for a cell.

A folder of predictions holds

    predictions.csv               a line an item: its id; a number for each output of one number, `name.0`, `name.1` …
                                  for a short vector; for anything larger its shape, and the file that holds it
    predictions.jsonl             the same as JSON: vectors as lists; null where an item has nothing or no finite number
    predictions.parquet           the same columns as the CSV's with their types, on request
    contacts-00000.safetensors    the arrays of the output `contacts`, each under its item's id
"""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from pipeline.files import csv_rows
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.sealed_folder import write_tensors
from pipeline.training.evaluating.embedding_files import import_arrow
from pipeline.training.evaluating.outputs import INDEX_BYTES, PART_BYTES, publishing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from pipeline.training.evaluating.outputs import GatheredOutputs

    Array = NDArray[Any]
    Row: TypeAlias = dict[str, Any]

CSV, LINES, PARQUET = "predictions.csv", "predictions.jsonl", "predictions.parquet"
WIDEST = 16  # numbers of a vector that stand in columns of their own
ROWS_AT_ONCE = 4096  # of Parquet, in memory
_ARRAYS = re.compile(r".+-\d{5,}\.safetensors")


@dataclass(slots=True)
class _ArrayFiles:
    """Writes arrays to files of bounded size, a series for each output."""

    folder: Path
    most_bytes: int
    paths: list[Path] = field(default_factory=list)
    pending: dict[str, dict[str, Array]] = field(default_factory=dict)  # by output and item
    written: dict[str, int] = field(default_factory=dict)  # files of each output
    bytes: int = 0

    def add(self, name: str, id_: str, array: Array) -> str:
        """Add an item's array; return the name of the file that it will be in."""
        file = f"{name}-{self.written.get(name, 0):05d}.safetensors"
        self.pending.setdefault(name, {})[id_] = array
        self.bytes += array.nbytes + len(id_) + INDEX_BYTES
        if self.bytes >= self.most_bytes:
            self.flush()
        return file

    def flush(self) -> None:
        """Write the pending arrays."""
        for name, arrays in self.pending.items():
            path = self.folder / f"{name}-{self.written.get(name, 0):05d}.safetensors"
            with publishing(path) as (partial,):
                write_tensors(partial, {id_: torch.from_numpy(array) for id_, array in arrays.items()}, Disk())
            self.paths.append(path)
            self.written[name] = self.written.get(name, 0) + 1
        self.pending, self.bytes = {}, 0


def write_tables(
    gathered: GatheredOutputs, folder: Path, *, parquet: bool = False, part_bytes: int = PART_BYTES
) -> list[Path]:
    """Write tables of all items, and files of their arrays, into a folder, replacing earlier ones; return them all."""
    disk = Disk()
    disk.make_folder(folder)
    arrays, layout = _ArrayFiles(folder, part_bytes), _Layout(gathered)
    tables = [folder / CSV, folder / LINES, *([folder / PARQUET] if parquet else [])]
    with publishing(*tables) as partials:
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("x", encoding="utf-8", newline="")) for path in partials[:2]]
            add_typed = stack.enter_context(_parquet_rows(partials[2], layout.types)) if parquet else lambda _: None
            add = csv_rows(files[0], layout.types)
            for row, line in layout.rows(gathered, arrays):
                add("" if value is None else value for value in row.values())
                files[1].write(json.dumps(line, ensure_ascii=False) + "\n")
                add_typed(row)
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        arrays.flush()
        for name in disk.list_folder(folder):
            if _ARRAYS.fullmatch(name) and folder / name not in arrays.paths:
                disk.unlink(folder / name)
    return [*tables, *arrays.paths]


class _Layout:
    """Which columns each output has; an output that no item has, such as labels of unlabelled items, has none."""

    def __init__(self, gathered: GatheredOutputs) -> None:
        self.numbers = {name: column.number for name, column in gathered.items()}
        self.columns: dict[str, list[str]] = {}  # of numbers, by output
        self.arrays: list[str] = []  # outputs that are kept as arrays
        for name, column in gathered.items():
            if column.width is None or column.width > WIDEST:
                self.arrays.append(name)
            elif column.width:
                self.columns[name] = [name] if column.width == 1 else [f"{name}.{at}" for at in range(column.width)]
        self.types: dict[str, type] = {"id": str}
        for name, columns in self.columns.items():
            self.types |= dict.fromkeys(columns, self.numbers[name])
        for name in self.arrays:  # last, since people read them least
            self.types |= {f"{name}.shape": str, f"{name}.file": str}

    def rows(self, gathered: GatheredOutputs, files: _ArrayFiles) -> Iterator[tuple[Row, Row]]:
        """Yield each item's row, and the same as JSON data."""
        for id_, outputs in _items(gathered):
            row: Row = dict.fromkeys(self.types) | {"id": id_}
            line: Row = {"id": id_}
            for name, columns in self.columns.items():
                values = _numbers(outputs[name], self.numbers[name]) if name in outputs else []
                row |= zip(columns, values, strict=False)  # of those that are there
                finite = [_finite(value) for value in values] or None
                line[name] = finite[0] if finite and len(columns) == 1 else finite
            for name in self.arrays:
                array = outputs.get(name)
                shape, file = (list(array.shape), files.add(name, id_, array)) if array is not None else (None, None)
                row |= {f"{name}.shape": shape and "x".join(map(str, shape)), f"{name}.file": file}
                line |= {f"{name}.shape": shape, f"{name}.file": file}
            yield row, line


def _items(gathered: GatheredOutputs) -> Iterator[tuple[str, Mapping[str, Array]]]:
    """Yield each item's id and outputs."""
    at = dict.fromkeys(gathered, 0)
    for place, number in enumerate(gathered.numbers.tolist()):
        outputs: dict[str, Array] = {}
        for name, column in gathered.items():
            if at[name] < len(column) and column.numbers[at[name]] == number:
                outputs[name] = column[at[name]]
                at[name] += 1
        yield gathered.id(place), outputs


def _numbers(array: Array, number: type) -> list[Any]:
    """Return an array's values as a column has them, floats in their fewest digits: 0.1 of float32 is 0.1."""
    values = array.reshape(-1)
    return [number(str(value)) for value in values] if array.dtype.kind == "f" else list(map(number, values.tolist()))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _parquet_rows(path: Path, types: Mapping[str, type]) -> Iterator[Callable[[Row], None]]:
    """Yield a function that adds a row to a Parquet file; some thousand are written at a time."""
    arrow = import_arrow()
    from pyarrow.parquet import ParquetWriter

    kinds = {str: arrow.string(), bool: arrow.bool_(), int: arrow.int64(), float: arrow.float64()}
    schema = arrow.schema([(name, kinds[kind]) for name, kind in types.items()])
    rows: list[Row] = []

    def flush() -> None:
        if rows:
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
            rows.clear()

    def add(row: Row) -> None:
        rows.append(row)
        if len(rows) >= ROWS_AT_ONCE:
            flush()

    with ParquetWriter(path, schema) as writer:
        yield add
        flush()
