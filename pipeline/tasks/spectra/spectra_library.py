"""Embeddings of spectra as a library, and an exact search of it.

Predicting with an embedding writes

    embeddings.npy   a row for each spectrum, float32, which readers can memory-map
    embeddings.csv    the same rows: `id`, then what the file says of each spectrum
    matches.tsv       where a library is named: of each spectrum the most similar ones in it, by cosine

A library is such an embeddings.npy, or an HDF5 file as DreaMS writes it, with a dataset `DreaMS_embedding`.

Shapes: N vectors, M of a library, D numbers of one, T the nearest.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.errors import ConfigError, DataError
from pipeline.files import cell_text, replacing
from pipeline.readers import hdf5
from pipeline.tasks.spectra.peak_transformer import EMBEDDING
from pipeline.tasks.task_parts import WHERE, first_of, nearest_vectors, task_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

VECTORS, ROWS, MATCHES = "embeddings.npy", "embeddings.csv", "matches.tsv"
COLUMN = "DreaMS_embedding"  # of a library in HDF5
ID = "id"


class Library(NamedTuple):
    """Embeddings, and the headers of each by the names of columns."""

    vector_MD: Any  # an array, or one on disk that is read by slices
    names: tuple[str, ...]
    rows: Sequence[Mapping[str, str]]


def publish_library(folder: Path, outputs: Mapping[str, Any], described: Any, library: str, most: int) -> list[Path]:
    """Write the embeddings, their headers, and their matches in a library where one is named.

    `described` is the reader, whose `headers()` yield the headers of each spectrum by its id, or anything else.
    """
    embedded = outputs[EMBEDDING]
    names, rows = _rows(embedded, described)
    written = [_write_vectors(folder / VECTORS, embedded), _write_rows(folder / ROWS, names, rows)]
    if library:
        found = read_library(Path(library), len(embedded[0]))
        written.insert(0, _write_matches(folder / MATCHES, Library(embedded, names, rows), found, most))
    return written


def _rows(embedded: Any, described: Any) -> tuple[tuple[str, ...], list[dict[str, str]]]:
    """Return the columns and rows with the headers of each embedded spectrum."""
    rows = [{ID: embedded.id(place)} for place in range(len(embedded))]
    places = {row[ID]: row for row in rows}
    names: dict[str, None] = {ID: None}
    for name, headers in first_of(described.headers() if hasattr(described, "headers") else (), embedded).items():
        places[name].update({key: value for key, value in headers.items() if key != ID})
        names.update(dict.fromkeys(headers))
    return tuple(names), rows


def _write_vectors(path: Path, embedded: Any) -> Path:
    """Write all embeddings, a few at a time."""
    with replacing(path) as draft:
        array_ND = np.lib.format.open_memmap(
            draft, "w+", np.dtype(np.float32), (len(embedded), len(embedded[0]) if len(embedded) else 0)
        )
        for place in range(len(embedded)):
            array_ND[place] = embedded[place]
        array_ND.flush()
    return path


def _write_rows(path: Path, names: Sequence[str], rows: Iterable[Mapping[str, str]]) -> Path:
    with task_table(path, names) as add:
        for row in rows:
            add(row.get(name) for name in names)
    return path


def _write_matches(path: Path, queries: Library, library: Library, most: int) -> Path:
    """Write a line for each match: the headers of both sides, their places and their similarity."""
    theirs = [f"ref_{name}" for name in library.names]
    columns = [*queries.names, *theirs, "index", "ref_index", "topk", "DreaMS_similarity"]
    nearest = nearest_vectors(queries.vector_MD, library.vector_MD, most)
    with task_table(path, columns, by="\t") as add:
        for query, (places_T, cosines_T) in enumerate(nearest):
            for rank, (place, cosine) in enumerate(zip(places_T.tolist(), cosines_T.tolist(), strict=True), 1):
                own, other = queries.rows[query], library.rows[place]
                known = [*map(own.get, queries.names), *map(other.get, library.names)]
                add([*known, query, place, rank, f"{cosine:.6f}"])
    return path


def read_library(path: Path, width: int = 0) -> Library:
    """Return a library; raise where it is none, or its vectors are not of this width."""
    if not path.is_file():
        remedy = "use an embeddings.npy written by `pipeline submit predict`, or an HDF5 file of DreaMS"
        raise ConfigError("library not found", where=f"{WHERE}.library is {path}", remedy=remedy)
    library = _from_hdf5(path) if path.suffix.lower() in hdf5.SUFFIXES else _from_npy(path)
    shape = library.vector_MD.shape
    if len(shape) != 2 or (width and shape[1] != width):
        problem = f"its vectors are {list(shape)}, and those of this model [spectra, {width or 'numbers'}]"
        raise DataError(problem, where=str(path), remedy="predict the library with the same model")
    if len(library.rows) != shape[0]:
        problem = f"{shape[0]:,} vectors, but {len(library.rows):,} rows that describe them"
        raise DataError(problem, where=str(path), remedy="predict the library again")
    return library


def _from_npy(path: Path) -> Library:
    try:
        vector_MD = np.load(path, mmap_mode="r", allow_pickle=False)
        with path.with_suffix(".csv").open(encoding="utf-8", newline="") as file:
            table = csv.DictReader(file)
            rows = [{name: cell_text(cell or "") for name, cell in row.items()} for row in table]
            return Library(vector_MD, tuple(table.fieldnames or ()), rows)
    except (OSError, ValueError) as error:
        raise DataError(f"not a library: {error}", where=str(path), remedy="predict the library again") from error


def _from_hdf5(path: Path) -> Library:
    """Read a library in DreaMS' layout: its embeddings, and every column of one value a spectrum."""
    with hdf5.open_hdf5(path) as file:
        if COLUMN not in file:
            remedy = "predict it, and use the resulting embeddings.npy"
            raise DataError(f"no dataset {COLUMN!r}", where=str(path), remedy=remedy)
        names = tuple(name for name in file if getattr(file[name], "ndim", 0) == 1)
        columns = [[hdf5.text_of(value) for value in file[name][:]] for name in names]
        rows = [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]
        return Library(file[COLUMN][:], names, rows)
