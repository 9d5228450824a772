"""The outputs of a model for each item, gathered over ranks through files, and written as tables for people.

    part-00001-000003/    a sealed folder: outputs of some items, written by one rank
        values.safetensors    of each name, type and number of dimensions: the values, and whose they are in which shape
        manifest.json         ids and numbers of the items, and the model that made them

Every rank writes parts of bounded size, each of which appears whole or not at all. So an evaluation that was ended
continues with the items that are in no part, on any number of ranks. No process holds the outputs of a whole split.

A folder of predictions holds

    predictions.csv               a line an item: its id; a number for each output of one number, `name.0`, `name.1` …
                                  for a short vector; for anything larger its shape, and the file that holds it
    predictions.jsonl             the same as JSON: vectors as lists; null where an item has nothing or no finite number
    predictions.parquet           the same columns as the CSV's with their types, on request
    contacts-00000.safetensors    the arrays of the output `contacts`, each under its item's id

Shapes: N items, M of them that have an output of some name, K of these in one part, D dimensions.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

import numpy as np
import torch

from pipeline.command_line import quoted
from pipeline.errors import ConfigError, DataError, JobFailed
from pipeline.files import csv_rows, replacing
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.sealed_folder import FolderDamaged, SealedFolder, read_sealed, seal, write_tensors
from pipeline.training.evaluating.embedding_files import import_arrow, publishing, write_parquet

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[Any]
    Integers = NDArray[np.int64]

log = logging.getLogger(__name__)

Terms: TypeAlias = "dict[str, tuple[float, float]]"  # the sum and the weight of each term of a loss

PART_BYTES = 64 << 20
INDEX_BYTES = 64  # of an entry in a part's tables, about
HIDDEN = "\n"  # prefix of outputs that are hidden from tasks, whose own names are printable
_VALUES, _ITEMS, _SHAPES = "values", "items", "shapes"


class OutputWriter:
    """Writes the outputs of one rank's items to files."""

    def __init__(
        self, folder: Path, rank: int, *, of: str = "", part_bytes: int = PART_BYTES, part_s: float = math.inf
    ) -> None:
        """Continue in a folder; `of` names the maker of the outputs, such as a checkpoint's digest.

        A part ends between two calls of `add`, after so many bytes or seconds; memory is twice the bytes of a part.
        """
        self._folder, self._rank, self._of = folder, rank, of
        self._part_bytes, self._part_s = part_bytes, part_s
        Disk().make_folder(folder)
        own = [path for path in _parts_in(folder) if path.name.startswith(f"part-{rank:05d}-")]
        self._part = 1 + int(own[-1].name.rpartition("-")[2]) if own else 0
        self._pending = _Pending()

    def add(
        self,
        ids: Sequence[str],
        numbers: Sequence[int],
        outputs: Mapping[str, Any],
        terms: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Add the outputs of some items: for each name a value for each item, None where it has none.

        `terms` are sums and weights of the items' loss.
        """
        pending = self._pending
        pending.add(ids, numbers, {_checked_name(name): _entries(name, outputs[name], len(ids)) for name in outputs})
        pending.terms.append(terms or {})
        if pending.bytes >= self._part_bytes or time.monotonic() - pending.since_s >= self._part_s:
            self.flush()

    def flush(self) -> None:
        """Write the outputs added so far as a part."""
        pending, self._pending = self._pending, _Pending()
        if not pending.ids:
            return
        tensors: dict[str, torch.Tensor] = {}
        for place, (items, arrays) in enumerate(pending.columns.values()):
            tensors[f"{_ITEMS}.{place}"] = torch.tensor(items)
            tensors[f"{_SHAPES}.{place}"] = torch.tensor([array.shape for array in arrays], dtype=torch.int64)
            tensors[f"{_VALUES}.{place}"] = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
            arrays.clear()  # frees the list: values are held once
        data = {
            "ids": pending.ids,
            "numbers": pending.numbers,
            "terms": summed_by_name(pending.terms),
            "columns": [name for name, _, _ in pending.columns],
        }
        path = self._folder / f"part-{self._rank:05d}-{self._part:06d}"
        with disk_errors(path):
            seal(path, {_VALUES: tensors}, data, {"of": self._of})
        self._part += 1

    def __enter__(self) -> OutputWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()


@dataclass(slots=True)
class _Pending:
    """A part that is being filled; a column has the places of its items in the part, and their arrays."""

    ids: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    terms: list[Mapping[str, tuple[float, float]]] = field(default_factory=list)
    columns: dict[tuple[str, np.dtype[Any], int], tuple[list[int], list[Array]]] = field(default_factory=dict)
    bytes: int = 0
    since_s: float = field(default_factory=time.monotonic)

    def add(self, ids: Sequence[str], numbers: Sequence[int], columns: Mapping[str, Sequence[Array | None]]) -> None:
        for name, entries in columns.items():
            for place, array in enumerate(entries, len(self.ids)):
                if array is not None:
                    items, arrays = self.columns.setdefault((name, array.dtype, array.ndim), ([], []))
                    items.append(place)
                    arrays.append(array)
                    self.bytes += array.nbytes + INDEX_BYTES
        self.ids += ids
        self.numbers += map(int, numbers)
        self.bytes += sum(map(len, ids)) + INDEX_BYTES * len(ids)


def done_numbers(folder: Path, of: str = "") -> Integers:
    """Return the items, of all ranks, that are done; a damaged part is renamed, so that its items are done again.

    While others write, two ranks may get different answers: each skips only items of its own share.
    """
    done: list[int] = []
    for path in _parts_in(folder):
        try:
            sealed = _opened(path, of)
            sizes = {path / name: written.bytes for name, written in sealed.files.items()}
            if not all(file.is_file() and file.stat().st_size == size for file, size in sizes.items()):
                raise FolderDamaged("is truncated, or has extra bytes", where=str(path))
            done += sealed.data["numbers"]
        except FolderDamaged as error:
            log.warning("%s: %s; its items are computed again", error.where, error.what)
            path.replace(path.with_suffix(".damaged"))
    return np.unique(np.array(done, np.int64))


class _Part:
    """A part whose bytes were verified; its values are mapped."""

    def __init__(self, path: Path, of: str) -> None:
        sealed = _opened(path, of)
        sealed.verify()
        tensors = {name: tensor.numpy() for name, tensor in sealed.tensors(_VALUES).items()}
        self.path, self.ids, self.terms = path, sealed.data["ids"], sealed.data["terms"]
        self.numbers_N = np.array(sealed.data["numbers"], np.int64)
        self.columns = [
            _Column(name, self, *(tensors[f"{kind}.{place}"] for kind in (_ITEMS, _SHAPES, _VALUES)))
            for place, name in enumerate(sealed.data["columns"])
        ]


class _Column:
    """The values of one name, type and number of dimensions in a part."""

    def __init__(self, name: str, part: _Part, item_K: Integers, shape_KD: Integers, values: Array) -> None:
        self.name, self.part, self.item_K, self.shape_KD, self.values = name, part, item_K, shape_KD, values
        self.size_K = shape_KD.prod(1)
        self.end_K = np.cumsum(self.size_K)

    def entry(self, entry: int) -> Array:
        """Read one item's array."""
        end = self.end_K[entry]
        return self.values[end - self.size_K[entry] : end].reshape(self.shape_KD[entry]).copy()


class GatheredOutputs(dict[str, "OutputColumn"]):
    """The outputs of all ranks by name, ordered by item number; values are read from disk on access."""

    def __init__(self, folder: Path, *, of: str = "") -> None:
        """Read the manifests, and verify every byte of the values."""
        self._parts = [_Part(path, of) for path in _parts_in(folder)]
        self.numbers, self._part_N, self._place_N = _in_order([part.numbers_N for part in self._parts])
        if (twice := np.flatnonzero(np.diff(self.numbers) == 0)).size:
            at = int(twice[0])
            first, second = (self._parts[self._part_N[place]].path for place in (at, at + 1))
            number = f"{self.numbers[at]:,}"
            what = f"{self.id(at)} (item {number}) is in it, and in {first.name}; so are {len(twice)} in all"
            raise DataError(what, where=str(second), remedy=_redo(second))
        columns: dict[str, list[_Column]] = {}
        for column in (column for part in self._parts for column in part.columns):
            columns.setdefault(column.name, []).append(column)
        super().__init__({name: OutputColumn(columns[name]) for name in sorted(columns) if name[0] != HIDDEN})
        self.hidden = {name[1:]: OutputColumn(columns[name]) for name in columns if name[0] == HIDDEN}

    def terms(self) -> Terms:
        """Return the sum and the weight of each loss term over all items."""
        return summed_by_name([part.terms for part in self._parts])

    def id(self, place: int) -> str:
        """Return an item's id, by its index among all items."""
        return str(self._parts[self._part_N[place]].ids[self._place_N[place]])


class OutputColumn(Sequence[Any]):
    """The values of one output, ordered by item number; each array is read from disk on access."""

    def __init__(self, columns: Sequence[_Column]) -> None:
        """Index the columns of one name, from all parts."""
        self._columns = columns
        of_items = [column.part.numbers_N[column.item_K] for column in columns]
        self.numbers, self._column_M, self._entry_M = _in_order(of_items)

    @property
    def width(self) -> int | None:
        """How many numbers each item has, apart from those that have none; None: not one row of equally many."""
        widths = set(np.concatenate([column.size_K for column in self._columns]).tolist()) - {0}
        dimensions = max(column.shape_KD.shape[1] for column in self._columns)
        is_row = widths <= {1} or (len(widths) == 1 and dimensions == 1)
        return max(widths, default=0) if is_row else None

    @property
    def number(self) -> type:
        """The type of each value: bool, int or float."""
        kinds = {column.values.dtype.kind for column in self._columns}
        return bool if kinds == {"b"} else int if kinds <= set("biu") else float

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int | slice) -> Any:
        """Read the array of one item, or a list of several."""
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(self)))]
        return self._columns[self._column_M[place]].entry(self._entry_M[place])

    def place_of(self, number: int) -> int | None:
        """Return the place of the item with a number; None where it has no such output."""
        place = int(np.searchsorted(self.numbers, number))
        return place if place < len(self) and self.numbers[place] == number else None

    def shape(self, place: int) -> list[int]:
        shape: list[int] = self._columns[self._column_M[place]].shape_KD[self._entry_M[place]].tolist()
        return shape

    def id(self, place: int) -> str:
        column = self._columns[self._column_M[place]]
        return str(column.part.ids[column.item_K[self._entry_M[place]]])


def _in_order(numbers: Sequence[Integers]) -> tuple[Integers, Integers, Integers]:
    """Merge lists of numbers in their order; return also from which list each is, and its place there."""
    empty_N, sizes = np.zeros(0, np.int64), list(map(len, numbers))
    number_N, place_N = np.concatenate([empty_N, *numbers]), np.concatenate([empty_N, *map(np.arange, sizes)])
    order_N = np.argsort(number_N, kind="stable")
    return number_N[order_N], np.repeat(np.arange(len(sizes)), sizes)[order_N], place_N[order_N]


def summed_by_name(terms: Sequence[Mapping[str, tuple[float, float]]]) -> Terms:
    """Return the exact sum of the sums and weights of each name."""
    of_name: dict[str, list[tuple[float, float]]] = {}
    for by_name in terms:
        for name, term in by_name.items():
            of_name.setdefault(name, []).append(term)
    return {name: (math.fsum(t for t, _ in pairs), math.fsum(w for _, w in pairs)) for name, pairs in of_name.items()}


def _parts_in(folder: Path) -> list[Path]:
    """Return the parts in a folder, in the order of ranks."""
    return sorted(folder.glob("part-*[0-9]"))


def _opened(path: Path, of: str) -> SealedFolder:
    """Open a part; refuse one that another model made."""
    sealed = read_sealed(path, remedy=_redo(path))
    if (maker := sealed.identity["of"]) != of:
        what = f"these outputs belong to {maker or 'an unnamed model'}, not to {of or 'an unnamed model'}"
        raise ConfigError(what, where=str(path), remedy=f"use another folder, or   rm -r {quoted(path.parent)}")
    return sealed


def _redo(path: Path) -> str:
    return f"rm -r {quoted(path)}   then the same command   (continues where it stopped)"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn disk errors, such as a full disk, into one that says how to continue."""
    try:
        yield
    except OSError as error:
        remedy = f"df -h {quoted(path.parent)}   then the same command   (continues where it stopped)"
        raise JobFailed(f"cannot be written: {error.strerror}", where=str(path), remedy=remedy) from error


@contextmanager
def _publishing_text(path: Path) -> Iterator[TextIO]:
    with publishing(path) as aside, aside.open("x", encoding="utf-8", newline="") as file:
        yield file


def publish_text(path: Path, text: str) -> None:
    """Write a text file atomically, replacing an earlier one."""
    with disk_errors(path), _publishing_text(path) as file:
        file.write(text)


# What tasks return


def returned_values(method: str, returned: Any) -> dict[str, Any]:
    """Return the values that a task's method returned, by name; raise ConfigError if they have no names."""
    if not isinstance(returned, Mapping):
        got = "nothing" if returned is None else type(returned).__name__
        raise _refusal(f"{method}() must return values by their names, got {got}", method)
    return dict(returned)


def numbers_of(metrics: Any) -> dict[str, float]:
    """Return the metrics of a task; raise ConfigError if one is not a number."""
    given = returned_values("metrics", metrics)
    try:
        return {name: float(value) for name, value in given.items()}
    except (TypeError, ValueError, RuntimeError) as error:  # the last is torch's, of a tensor with several
        problem = f"metrics() must return a number for each of {', '.join(map(str, given))}: {error}"
        raise _refusal(problem, "metrics") from None


def _refusal(problem: str, method: str = "outputs") -> ConfigError:
    return ConfigError(problem, where="train.task", remedy=f"{method}(): python -m pydoc pipeline.protocol")


def _checked_name(name: Any) -> str:
    plain = name.removeprefix(HIDDEN) if isinstance(name, str) else ""
    if plain.isprintable() and re.fullmatch("[^./]+", plain) and plain != "id":
        return str(name)
    raise _refusal(f"outputs() returned {name!r}: names are strings without dots or slashes, and not id")


def _entries(name: str, values: Any, items: int) -> list[Array | None]:
    """Return one array per item, in its own CPU memory, or None."""
    if isinstance(values, torch.Tensor) and values.ndim:
        values = _array(name, values)  # of all items: one transfer
    try:
        entries = list(values)
    except TypeError:
        got = type(values).__name__
        raise _refusal(f"outputs(): {name!r} must have an entry for each item, got {got}") from None
    if len(entries) != items:
        raise _refusal(f"outputs(): {name!r} has {len(entries)} entries where the batch has {items} items")
    return [None if value is None else _array(name, value) for value in entries]


def _array(name: str, value: Any) -> Array:
    """Return a copy of a value as a numpy array, bfloat16 as float32."""
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu")
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    array = np.array(value, order="C")
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise _refusal(f"outputs(): {name!r} must be numbers, got {array.dtype}")
    return array


# Tables

CSV, LINES, PARQUET = "predictions.csv", "predictions.jsonl", "predictions.parquet"
WIDEST = 16  # numbers of a vector that stand in columns of their own


def write_tables(
    gathered: GatheredOutputs, folder: Path, *, parquet: bool = False, part_bytes: int = PART_BYTES
) -> list[Path]:
    """Write tables of all items, and files of their arrays, into a folder, replacing earlier ones; return them all."""
    Disk().make_folder(folder)
    for left in folder.glob(".*.partial"):  # by a process that was killed
        left.unlink()
    columns = _columns(gathered)
    types = {"id": str} | {column: kind for of_output in columns.values() for column, kind in of_output.items()}
    with disk_errors(folder / CSV):
        names = [name for name, of_output in columns.items() if f"{name}.file" in of_output]
        files = {name: _write_arrays(name, gathered[name], folder, part_bytes) for name in names}
        rows = partial(_rows, gathered, columns, files)
        with _publishing_text(folder / CSV) as table, _publishing_text(folder / LINES) as lines:
            add = csv_rows(table, types)
            for row, line in rows():
                add("" if value is None else value for value in row.values())
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")
        if parquet:
            with publishing(folder / PARQUET) as typed:
                write_parquet(typed, _schema(types), ((row, 0) for row, _ in rows()))
        arrays = sorted({file for of_output in files.values() for file in of_output})
        for path in folder.glob(f"*-{5 * '[0-9]'}.safetensors"):
            if path not in arrays:
                path.unlink()
    return [folder / CSV, folder / LINES, *([folder / PARQUET] if parquet else []), *arrays]


def _write_arrays(name: str, column: OutputColumn, folder: Path, most_bytes: int) -> list[Path]:
    """Write an output's arrays, by their items' ids, to files of bounded size; return the file of each."""
    files: list[Path] = []
    tensors: dict[str, torch.Tensor] = {}
    size = number = 0
    for place in range(len(column)):
        files.append(path := folder / f"{name}-{number:05d}.safetensors")
        tensors[column.id(place)] = tensor = torch.from_numpy(column[place])
        size += tensor.nbytes + INDEX_BYTES
        if size >= most_bytes or place + 1 == len(column):
            with replacing(path) as aside:
                write_tensors(aside, tensors, Disk())
            tensors, size, number = {}, 0, number + 1
    return files


def _columns(gathered: GatheredOutputs) -> dict[str, dict[str, type]]:
    """Return the columns of each output with their types; one that no item has, such as unknown labels, has none."""
    columns: dict[str, dict[str, type]] = {}
    for name, output in gathered.items():
        if (width := output.width) is not None and width <= WIDEST:
            names = [name] if width == 1 else [f"{name}.{at}" for at in range(width)]
            columns[name] = dict.fromkeys(names, output.number)
    of_arrays = [name for name in gathered if name not in columns]  # last, since people read them least
    return columns | {name: {f"{name}.shape": str, f"{name}.file": str} for name in of_arrays}


def _rows(
    gathered: GatheredOutputs, columns: Mapping[str, Mapping[str, type]], files: Mapping[str, Sequence[Path]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each item's row, and the same as JSON data."""
    for at, number in enumerate(gathered.numbers.tolist()):
        row: dict[str, Any] = {"id": gathered.id(at)}
        line: dict[str, Any] = {"id": gathered.id(at)}
        for name, types in columns.items():
            column = gathered[name]
            place = column.place_of(number)
            if name in files:
                shape, file = (None, None) if place is None else (column.shape(place), files[name][place].name)
                row |= {f"{name}.shape": shape and "x".join(map(str, shape)), f"{name}.file": file}
                line |= {f"{name}.shape": shape, f"{name}.file": file}
            elif types:
                values = [] if place is None else _numbers(column[place], column.number)
                row |= zip_longest(types, values)
                finite = [_finite(value) for value in values] or None
                line[name] = finite[0] if finite and len(types) == 1 else finite
        yield row, line


def _numbers(array: Array, number: type) -> list[Any]:
    """Return an array's values as a column has them, floats in their fewest digits: 0.1 of float32 is 0.1."""
    values = array.reshape(-1)
    return [number(str(value)) for value in values] if array.dtype.kind == "f" else list(map(number, values.tolist()))


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _schema(types: Mapping[str, type]) -> Any:
    arrow = import_arrow()
    kinds = {str: arrow.string(), bool: arrow.bool_(), int: arrow.int64(), float: arrow.float64()}
    return arrow.schema([(name, kinds[kind]) for name, kind in types.items()])
