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
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[Any]
    Embedded: TypeAlias = Iterable[tuple["EmbeddedId", Array]]

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


def write_embeddings(format_: str, out: Path, form: ExportForm, embedded: Embedded) -> None:
    """Write embeddings; the file appears when all are in it, or not at all."""
    with publishing(out) as aside:
        if format_ == "npy":
            with publishing(table_beside(out)) as table:
                _write_npy(aside, table, form, embedded)
                out.unlink(missing_ok=True)  # otherwise old rows would stand next to the new table for a moment
        else:
            _WRITERS[format_](aside, out, form, embedded)


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


def _write_hdf5(aside: Path, out: Path, form: ExportForm, embedded: Embedded) -> None:
    h5py = library(out)
    try:
        with h5py.File(aside, "x", locking=False) as file:
            file.attrs.update(form.facts)
            for whose, array in embedded:
                file.create_dataset(hdf5_name(whose.id), data=array).attrs["original_id"] = whose.id
    except RuntimeError as error:  # so h5py says that a disk takes no more
        raise OSError(None, str(error)) from error


def _write_safetensors(aside: Path, out: Path, form: ExportForm, embedded: Embedded) -> None:
    """Collect header and numbers in files without a name: the header comes first, and is known last."""
    with TemporaryFile(dir=out.parent) as header, TemporaryFile(dir=out.parent) as numbers:
        header.write(f'{{"__metadata__":{json.dumps(dict(form.facts))}'.encode())
        for whose, array in embedded:
            if whose.id == "__metadata__":
                raise DataError("safetensors reserves the name __metadata__", where=str(out), remedy="--format h5")
            first = numbers.tell()
            numbers.write(np.ascontiguousarray(array).data)
            place = {"shape": array.shape, "data_offsets": [first, numbers.tell()]}
            entry = {"dtype": _SAFE_TYPES[form.dtype.name], **place}
            header.write(f",{json.dumps(whose.id)}:{json.dumps(entry)}".encode())
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


def _write_parquet(aside: Path, out: Path, form: ExportForm, embedded: Embedded) -> None:
    arrow = import_arrow(str(out), "--format h5")
    vector = arrow.list_(arrow.from_numpy_dtype(form.dtype), form.width)
    names = [(name, arrow.string()) for name in ("id", "item", "chain", "split")]
    column = ("embedding", arrow.list_(vector) if form.by_residue else vector)
    schema = arrow.schema([*names, ("residues", arrow.int32()), column], metadata=dict(form.facts))
    rows = (
        ({**whose._asdict(), "embedding": list(array) if form.by_residue else array}, array.nbytes)
        for whose, array in embedded
    )
    write_parquet(aside, schema, rows)


def write_parquet(path: Path, schema: Any, rows: Iterable[tuple[Mapping[str, Any], int]]) -> None:
    """Write rows, each with its bytes, to a Parquet file, many at a time."""
    from pyarrow import Table
    from pyarrow.parquet import ParquetWriter

    with ParquetWriter(path, schema) as writer:
        pending: list[Mapping[str, Any]] = []
        pending_bytes = 0
        for row, size in rows:
            pending.append(row)
            pending_bytes += size
            if len(pending) >= PENDING_ROWS or pending_bytes >= PENDING_BYTES:
                writer.write_table(Table.from_pylist(pending, schema=schema))
                pending, pending_bytes = [], 0
        writer.write_table(Table.from_pylist(pending, schema=schema))


def _write_npy(aside: Path, beside: Path, form: ExportForm, embedded: Embedded) -> None:
    """Write the array's length last: numpy leaves room for it in the header."""
    columns = [*EmbeddedId._fields, *([ROWS] if form.by_residue else [])]
    with aside.open("xb") as file, beside.open("x", encoding="utf-8", newline="") as table:
        rows, add_line = 0, csv_rows(table, columns)
        begin = _write_header(file, 0, form)
        for whose, array in embedded:
            add_line([*whose, *([rows] if form.by_residue else [])])
            file.write(np.ascontiguousarray(array).data)
            rows += math.prod(array.shape[:-1])
        file.seek(0)
        assert _write_header(file, rows, form) == begin, "a longer header would have overwritten numbers"


def _write_header(file: Any, rows: int, form: ExportForm) -> int:
    header = {"descr": form.dtype.str, "fortran_order": False, "shape": (rows, form.width)}
    np.lib.format.write_array_header_1_0(file, header)
    return int(file.tell())


_WRITERS = {"h5": _write_hdf5, "safetensors": _write_safetensors, "parquet": _write_parquet}


def import_arrow(where: str = "train.predict.parquet", otherwise: str = "--set train.predict.parquet=false") -> Any:
    """Return the module that writes Parquet; the error says how to install it, and the option to use `otherwise`."""
    try:
        import pyarrow
    except ImportError as error:
        remedy = f"{install_extra('parquet')}   (or {otherwise})"
        raise ConfigError("Parquet needs pyarrow, which is not installed", where=where, remedy=remedy) from error
    return pyarrow
