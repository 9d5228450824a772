"""Embeddings in one file for other programs, by their ids, written one after the other in constant memory.

    h5            a dataset for each id, [L, D] or [D]; `original_id` is among its attributes
    safetensors   a tensor for each id
    parquet       a row for each id: `id`, `item`, `chain`, `split`, `residues`, `embedding`
    npy           one array: a row for each id, or all rows one after the other; NAME.csv next to it lists their ids

HDF5 reads `/` in a name as a folder: there, % is written as %25 and / as %2F. All other names are the ids as they are.

Shapes: N ids, L residues of one, D numbers of a residue.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from pipeline.command_line import install_extra
from pipeline.errors import ConfigError, DataError
from pipeline.files import csv_rows, replacing
from pipeline.readers.hdf5 import library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Add: TypeAlias = Callable[["EmbeddedId", NDArray[Any]], None]

SUFFIXES = {"h5": (".h5", ".hdf5"), "safetensors": (".safetensors",), "parquet": (".parquet",), "npy": (".npy",)}
FORMATS = tuple(SUFFIXES)
ROWS = "first"  # in NAME.csv: where the rows of an id begin
MOST_HEADER_BYTES = 100_000_000  # of safetensors: its readers refuse more
PENDING_BYTES, PENDING_ROWS = 16 << 20, 4096  # of Parquet, in memory
_ALIGNED = 8
_SAFE_TYPES = {"float32": "F32", "float16": "F16"}


class EmbeddedId(NamedTuple):
    """The id of an embedding, and the item and chain that it belongs to."""

    id: str
    item: str
    chain: str
    split: str
    residues: int


@dataclass(frozen=True, slots=True)
class ExportForm:
    """The properties that all embeddings of a file share."""

    width: int
    dtype: np.dtype[Any]
    by_residue: bool  # [L, D] of each id; otherwise [D]
    facts: Mapping[str, str]  # how they were made


@contextmanager
def writing_embeddings(format_: str, out: Path, form: ExportForm) -> Iterator[Add]:
    """Yield a function that adds an embedding; the file appears when all are in it, or not at all."""
    with publishing(out) as aside:
        if format_ == "npy":
            with publishing(table_beside(out)) as table:
                with _npy(aside, table, form) as add:
                    yield add
                out.unlink(missing_ok=True)  # otherwise old rows would stand next to the new table for a moment
        else:
            with _WRITERS[format_](aside, out, form) as add:
                yield add


@contextmanager
def publishing(path: Path) -> Iterator[Path]:
    """Yield a path to write to; it takes that name once all of it is on the disk, and goes if writing fails."""
    with replacing(path) as aside:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())


def table_beside(path: Path) -> Path:
    """Return the table that belongs to an array."""
    return path.with_suffix(".csv")


def hdf5_name(id_: str) -> str:
    """Return an id as the name of a dataset."""
    return id_.replace("%", "%25").replace("/", "%2F")


@contextmanager
def _hdf5(aside: Path, out: Path, form: ExportForm) -> Iterator[Add]:
    h5py = library(out)
    try:
        with h5py.File(aside, "x", locking=False) as file:
            file.attrs.update(form.facts)

            def add(whose: EmbeddedId, array: NDArray[Any]) -> None:
                file.create_dataset(hdf5_name(whose.id), data=array).attrs["original_id"] = whose.id

            yield add
    except RuntimeError as error:  # so h5py says that a disk takes no more
        raise OSError(None, str(error)) from error


@contextmanager
def _safetensors(aside: Path, out: Path, form: ExportForm) -> Iterator[Add]:
    """Collect header and numbers in files without a name: the header comes first, and is known last."""
    with TemporaryFile(dir=out.parent) as header, TemporaryFile(dir=out.parent) as numbers:
        header.write(f'{{"__metadata__":{json.dumps(dict(form.facts))}'.encode())

        def add(whose: EmbeddedId, array: NDArray[Any]) -> None:
            if whose.id == "__metadata__":
                raise DataError("safetensors reserves the name __metadata__", where=str(out), remedy="--format h5")
            first = numbers.tell()
            numbers.write(np.ascontiguousarray(array).data)
            entry = {
                "dtype": _SAFE_TYPES[form.dtype.name],
                "shape": array.shape,
                "data_offsets": [first, numbers.tell()],
            }
            header.write(f",{json.dumps(whose.id)}:{json.dumps(entry)}".encode())

        yield add
        header.write(b"}")
        header.write(b" " * (-header.tell() % _ALIGNED))
        if header.tell() > MOST_HEADER_BYTES:
            problem = f"a header of {header.tell():,} bytes; safetensors readers accept {MOST_HEADER_BYTES:,}"
            raise DataError(problem, where=str(out), remedy="--format h5 or npy, or a file for each --split")
        with aside.open("xb") as file:
            file.write(header.tell().to_bytes(8, "little"))
            for part in (header, numbers):
                part.seek(0)
                shutil.copyfileobj(part, file)


@contextmanager
def _parquet(aside: Path, out: Path, form: ExportForm) -> Iterator[Add]:
    arrow = import_arrow(str(out), "--format h5")
    vector = arrow.list_(arrow.from_numpy_dtype(form.dtype), form.width)
    names = [(name, arrow.string()) for name in ("id", "item", "chain", "split")]
    column = ("embedding", arrow.list_(vector) if form.by_residue else vector)
    schema = arrow.schema([*names, ("residues", arrow.int32()), column], metadata=dict(form.facts))
    with parquet_rows(aside, schema) as add_row:

        def add(whose: EmbeddedId, array: NDArray[Any]) -> None:
            add_row({**whose._asdict(), "embedding": list(array) if form.by_residue else array}, array.nbytes)

        yield add


@contextmanager
def parquet_rows(path: Path, schema: Any) -> Iterator[Callable[..., None]]:
    """Yield a function that adds a row of so many bytes to a Parquet file; many rows are written at a time."""
    from pyarrow import Table
    from pyarrow.parquet import ParquetWriter

    rows: list[Mapping[str, Any]] = []
    pending_bytes = 0

    def flush() -> None:
        nonlocal pending_bytes
        if rows:
            writer.write_table(Table.from_pylist(rows, schema=schema))
        rows.clear()
        pending_bytes = 0

    def add(row: Mapping[str, Any], size: int = 0) -> None:
        nonlocal pending_bytes
        rows.append(row)
        pending_bytes += size
        if len(rows) >= PENDING_ROWS or pending_bytes >= PENDING_BYTES:
            flush()

    with ParquetWriter(path, schema) as writer:
        yield add
        flush()


@contextmanager
def _npy(aside: Path, beside: Path, form: ExportForm) -> Iterator[Add]:
    """Write the array's length last: numpy leaves room for it in the header."""
    columns = [*EmbeddedId._fields, *([ROWS] if form.by_residue else [])]
    with aside.open("xb") as file, beside.open("x", encoding="utf-8", newline="") as table:
        rows, add_line = 0, csv_rows(table, columns)
        begin = _write_header(file, 0, form)

        def add(whose: EmbeddedId, array: NDArray[Any]) -> None:
            nonlocal rows
            add_line([*whose, *([rows] if form.by_residue else [])])
            file.write(np.ascontiguousarray(array).data)
            rows += math.prod(array.shape[:-1])

        yield add
        file.seek(0)
        assert _write_header(file, rows, form) == begin, "a longer header would have overwritten numbers"


def _write_header(file: Any, rows: int, form: ExportForm) -> int:
    header = {"descr": form.dtype.str, "fortran_order": False, "shape": (rows, form.width)}
    np.lib.format.write_array_header_1_0(file, header)
    return int(file.tell())


_WRITERS = {"h5": _hdf5, "safetensors": _safetensors, "parquet": _parquet}


def import_arrow(where: str = "train.predict.parquet", otherwise: str = "--set train.predict.parquet=false") -> Any:
    """Return the module that writes Parquet; the error says how to install it, and the option to use `otherwise`."""
    try:
        import pyarrow
    except ImportError as error:
        remedy = f"{install_extra('parquet')}   (or {otherwise})"
        raise ConfigError("Parquet needs pyarrow, which is not installed", where=where, remedy=remedy) from error
    return pyarrow
