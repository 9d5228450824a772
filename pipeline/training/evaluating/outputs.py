"""The outputs of a model for each item, gathered over ranks through files: no process holds those of a whole split.

    part-00001-000003/    a sealed folder: outputs of some items, written by one rank
        values.safetensors    one run of numbers for each name and type
        manifest.json         ids, numbers and shapes, and the model that made them

Every rank writes parts of bounded size, each of which appears whole or not at all. So an evaluation that was ended
continues with the items that are in no part, on any number of ranks. `prediction_tables` writes them for people.

Shapes: N items of all parts, M of them that have a name, K entries of a column.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.command_line import quoted
from pipeline.errors import ConfigError, DataError, JobFailed
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.sealed_folder import FolderDamaged, SealedFolder, read_sealed, seal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[Any]
    Integers = NDArray[np.int64]

log = logging.getLogger(__name__)

PART_BYTES = 64 << 20
INDEX_BYTES = 64  # of an entry in a manifest, about
_NAME = re.compile(r"part-(\d{5,})-(\d{6,})")
_VALUES = "values"
HIDDEN = "."  # before the names of outputs that tasks do not see; those of a task have no dots


class OutputWriter:
    """Writes the outputs of one rank's items to files."""

    def __init__(
        self, folder: Path, rank: int, *, of: str = "", part_bytes: int = PART_BYTES, part_s: float = math.inf
    ) -> None:
        """Continue in a folder; `of` names the maker of the outputs, such as a checkpoint's digest: others are refused.

        A part ends between two calls of `add`, after so many bytes or seconds; memory is twice the bytes of a part.
        """
        self._folder, self._rank, self._of = folder, rank, of
        self._part_bytes, self._part_s = part_bytes, part_s
        Disk().make_folder(folder)
        self._part = 1 + max((part for owner, part in _parts_in(folder) if owner == rank), default=-1)
        self._pending = _Pending()

    def done_numbers(self) -> Integers:
        """Return the items, of all ranks, that are done; a damaged part is renamed, so that its items are done again.

        While others write, two ranks may get different answers: each skips only items of its own share.
        """
        done: list[int] = []
        for path in _paths_in(self._folder):
            try:
                sealed = _opened(path, self._of)
                if not _sizes_fit(sealed):
                    raise FolderDamaged("is truncated, or has extra bytes", where=str(path))
                done += sealed.data["numbers"]
            except FolderDamaged as error:
                log.warning("%s: %s; its items are computed again", error.where, error.what)
                path.replace(path.with_suffix(".damaged"))
        return np.unique(np.array(done, np.int64))

    def add(
        self,
        ids: Sequence[str],
        numbers: Sequence[int],
        outputs: Mapping[str, Any],
        *,
        hidden: Mapping[str, Any] | None = None,
        terms: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Add the outputs of some items: for each name a value for each item, None where it has none.

        `hidden` are outputs that tasks do not see; `terms` are sums and weights of the items' loss.
        """
        columns = {_checked_name(name): _entries(name, values, len(ids)) for name, values in outputs.items()}
        columns |= {HIDDEN + name: _entries(name, values, len(ids)) for name, values in (hidden or {}).items()}
        for place, (id_, number) in enumerate(zip(ids, numbers, strict=True)):
            self._pending.add(id_, int(number), {name: values[place] for name, values in columns.items()})
        for name, term in (terms or {}).items():
            self._pending.terms.setdefault(name, []).append(term)
        if self._pending.bytes >= self._part_bytes or time.monotonic() - self._pending.since_s >= self._part_s:
            self.flush()

    def flush(self) -> None:
        """Write the outputs added so far as a part."""
        if not self._pending.ids:
            return
        pending, self._pending = self._pending, _Pending()
        columns: list[dict[str, Any]] = []
        values: dict[str, torch.Tensor] = {}
        for place, ((name, dtype), (items, arrays)) in enumerate(pending.columns.items()):
            shapes = [list(array.shape) for array in arrays]
            columns.append({"name": name, "dtype": dtype, "items": items, "shapes": shapes})
            values[str(place)] = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
            arrays.clear()  # the values are held once
        terms = {name: summed(values) for name, values in pending.terms.items()}
        data = {"ids": pending.ids, "numbers": pending.numbers, "terms": terms, "columns": columns}
        path = self._folder / f"part-{self._rank:05d}-{self._part:06d}"
        with disk_errors(path):
            seal(path, {_VALUES: values}, data, {"of": self._of})
        self._part += 1

    close = flush

    def __enter__(self) -> OutputWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()


@dataclass(slots=True)
class _Pending:
    """A part that is being filled; a column has its items, by their index in the part, and their arrays."""

    ids: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    terms: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    columns: dict[tuple[str, str], tuple[list[int], list[Array]]] = field(default_factory=dict)  # by name and type
    bytes: int = 0
    since_s: float = field(default_factory=time.monotonic)

    def add(self, id_: str, number: int, outputs: Mapping[str, Array | None]) -> None:
        for name, array in outputs.items():
            if array is not None:
                items, arrays = self.columns.setdefault((name, str(array.dtype)), ([], []))
                items.append(len(self.ids))
                arrays.append(array)
                self.bytes += array.nbytes + INDEX_BYTES
        self.ids.append(id_)
        self.numbers.append(number)
        self.bytes += len(id_) + INDEX_BYTES


class _Part:
    """A part whose bytes were verified."""

    def __init__(self, path: Path, of: str) -> None:
        self._sealed = _opened(path, of)
        self._sealed.verify()
        self.path, self.ids = path, self._sealed.data["ids"]
        self.numbers_N = np.array(self._sealed.data["numbers"], np.int64)
        self.terms: dict[str, tuple[float, float]] = self._sealed.data["terms"]
        columns = self._sealed.data["columns"]
        self.columns = [_Column(self, str(place), column) for place, column in enumerate(columns)]

    @cached_property
    def values(self) -> dict[str, torch.Tensor]:
        """The values by column, mapped."""
        return self._sealed.tensors(_VALUES)


class _Column:
    """The values of one name and type in a part."""

    def __init__(self, part: _Part, key: str, column: Mapping[str, Any]) -> None:
        self.part, self._key = part, key
        self.name, self.kind = column["name"], np.dtype(column["dtype"]).kind
        self.item_K, self._shapes = np.array(column["items"], np.int64), column["shapes"]
        self.ndim_K = np.array(list(map(len, self._shapes)), np.int64)
        self.size_K = np.array(list(map(math.prod, self._shapes)), np.int64)
        self._end_K = np.cumsum(self.size_K)

    def entry(self, entry: int) -> Array:
        """Read one item's array."""
        end = int(self._end_K[entry])
        values = self.part.values[self._key][end - int(self.size_K[entry]) : end].numpy()
        return values.reshape(self._shapes[entry]).copy()


class GatheredOutputs(Mapping[str, "OutputColumn"]):
    """The outputs of all ranks by name, ordered by item number; values are read from disk on access."""

    def __init__(self, folder: Path, *, of: str = "") -> None:
        """Read the manifests, and verify every byte of the values."""
        self._parts = [_Part(path, of) for path in _paths_in(folder)]
        sizes = [len(part.numbers_N) for part in self._parts]
        number_N = _joined(part.numbers_N for part in self._parts)
        order_N = np.argsort(number_N, kind="stable")
        self.numbers = number_N[order_N]
        self._part_N = np.repeat(np.arange(len(sizes)), sizes)[order_N]
        self._place_N = _joined(map(np.arange, sizes))[order_N]
        if (twice := np.flatnonzero(np.diff(self.numbers) == 0)).size:
            at = int(twice[0])
            first, second = (self._parts[int(self._part_N[place])].path for place in (at, at + 1))
            number = f"{self.numbers[at]:,}"
            what = f"{self.id(at)} (item {number}) is in it, and in {first.name}; so are {len(twice)} in all"
            raise DataError(what, where=str(second), remedy=_redo(second))
        columns: dict[str, list[_Column]] = {}
        for column in (column for part in self._parts for column in part.columns):
            columns.setdefault(column.name, []).append(column)
        all_columns = {name: OutputColumn(columns[name]) for name in sorted(columns)}
        self._columns = {name: column for name, column in all_columns.items() if not name.startswith(HIDDEN)}
        self.hidden = {name[1:]: column for name, column in all_columns.items() if name.startswith(HIDDEN)}

    def terms(self) -> dict[str, tuple[float, float]]:
        """Return the sum and the weight of each loss term over all items."""
        names = dict.fromkeys(name for part in self._parts for name in part.terms)
        return {name: summed([part.terms[name] for part in self._parts if name in part.terms]) for name in names}

    def id(self, place: int) -> str:
        """Return an item's id, by its index among all items."""
        return str(self._parts[int(self._part_N[place])].ids[int(self._place_N[place])])

    def __getitem__(self, name: str) -> OutputColumn:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class OutputColumn(Sequence[Any]):
    """The values of one output, ordered by item number; each array is read from disk on access."""

    def __init__(self, columns: Sequence[_Column]) -> None:
        """Index the columns of one name, from all parts."""
        self._columns, sizes = columns, [len(column.item_K) for column in columns]
        numbers_M = _joined(column.part.numbers_N[column.item_K] for column in columns)
        order_M = np.argsort(numbers_M, kind="stable")
        self.numbers: Integers = numbers_M[order_M]
        self._column_M = np.repeat(np.arange(len(sizes)), sizes)[order_M]
        self._entry_M = _joined(map(np.arange, sizes))[order_M]

    @property
    def width(self) -> int | None:
        """How many numbers each item has, apart from those that have none; None: not one row of equally many."""
        widths = set(_joined(column.size_K for column in self._columns).tolist()) - {0}
        dimensions = max(int(column.ndim_K.max()) for column in self._columns)
        is_row = widths <= {1} or (len(widths) == 1 and dimensions == 1)
        return max(widths, default=0) if is_row else None

    @property
    def number(self) -> type:
        """The type of each value: bool, int or float."""
        kinds = {column.kind for column in self._columns}
        return bool if kinds == {"b"} else int if kinds <= set("biu") else float

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int | slice) -> Any:
        """Read the array of one item, or a list of several."""
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(f"entry {place} of {len(self)}")
        return self._columns[int(self._column_M[place])].entry(int(self._entry_M[place]))

    def id(self, place: int) -> str:
        column = self._columns[int(self._column_M[place])]
        return str(column.part.ids[int(column.item_K[self._entry_M[place]])])


def summed(terms: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the exact sum of sums and weights."""
    total, weight = map(math.fsum, zip(*terms, strict=True))
    return total, weight


def _joined(arrays: Any) -> Integers:
    return np.concatenate([np.zeros(0, np.int64), *arrays])


def _parts_in(folder: Path) -> list[tuple[int, int]]:
    """Return the rank and the number of each part in a folder."""
    matches = [_NAME.fullmatch(path.name) for path in (folder.iterdir() if folder.is_dir() else ())]
    return sorted((int(match[1]), int(match[2])) for match in matches if match)


def _paths_in(folder: Path) -> list[Path]:
    return [folder / f"part-{rank:05d}-{part:06d}" for rank, part in _parts_in(folder)]


def _opened(path: Path, of: str) -> SealedFolder:
    """Open a part; refuse one that another model made."""
    sealed = read_sealed(path, remedy=_redo(path))
    if (maker := sealed.identity["of"]) != of:
        what = f"these outputs belong to {maker or 'an unnamed model'}, not to {of or 'an unnamed model'}"
        raise ConfigError(what, where=str(path), remedy=f"use another folder, or   rm -r {quoted(path.parent)}")
    return sealed


def _sizes_fit(sealed: SealedFolder) -> bool:
    files = {sealed.path / name: written.bytes for name, written in sealed.files.items()}
    return all(file.is_file() and file.stat().st_size == size for file, size in files.items())


def _redo(path: Path) -> str:
    return f"rm -r {quoted(path)}   then the same command   (continues where it stopped)"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the disk, such as no space, into one that says how to continue."""
    try:
        yield
    except OSError as error:
        remedy = f"df -h {quoted(path.parent)}   then the same command   (continues where it stopped)"
        raise JobFailed(f"cannot be written: {error.strerror}", where=str(path), remedy=remedy) from error


@contextmanager
def publishing(*paths: Path) -> Iterator[list[Path]]:
    """Yield partial paths to write to, renamed to `paths` on success; leftovers of a kill are removed first."""
    disk, partials = Disk(), [path.with_name(f".{path.name}.partial") for path in paths]
    with disk_errors(paths[0]):
        try:
            for partial in partials:
                partial.unlink(missing_ok=True)
            yield partials
            for partial, path in zip(partials, paths, strict=True):
                disk.rename(partial, path)
            disk.fsync_folder(paths[0].parent)
        finally:
            for partial in partials:
                partial.unlink(missing_ok=True)


def publish_text(path: Path, text: str) -> None:
    """Write a text file atomically, replacing an earlier one."""
    with publishing(path) as (partial,), partial.open("x", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def returned_values(method: str, returned: Any) -> dict[str, Any]:
    """Return the values that a task's method has returned by their names; raise ConfigError if they have none."""
    if not isinstance(returned, Mapping):
        got = "nothing" if returned is None else type(returned).__name__
        raise _refusal(f"{method}() must return values by their names, got {got}", method)
    return dict(returned)


def numbers_of(metrics: Any) -> dict[str, float]:
    """Return the metrics of a task; raise ConfigError if one is not a number."""
    figures: dict[str, float] = {}
    for name, value in returned_values("metrics", metrics).items():
        try:
            figures[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # the last is torch's, of a tensor with several
            got = f"{value!r:.40}" if isinstance(value, str) else type(value).__name__
            raise _refusal(f"metrics(): {name!r} must be a number, got {got}", "metrics") from None
    return figures


def _refusal(problem: str, method: str = "outputs") -> ConfigError:
    return ConfigError(problem, where="train.task", remedy=f"{method}() is described in pipeline/protocol.py")


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not name or set("./") & set(name) or not name.isprintable() or name == "id":
        raise _refusal(f"outputs() returned {name!r}: names are strings without dots or slashes, and not id")
    return name


def _entries(name: str, values: Any, items: int) -> list[Array | None]:
    """Return one array per item, in its own CPU memory, or None."""
    if isinstance(values, torch.Tensor):  # of all items: one transfer
        values = _array(name, values) if values.ndim else values
    is_single = isinstance(values, str | bytes) or (isinstance(values, np.ndarray) and values.ndim == 0)
    if is_single or not isinstance(values, np.ndarray | Sequence):
        raise _refusal(f"outputs(): {name!r} must have an entry for each item, got {type(values).__name__}")
    if len(values) != items:
        raise _refusal(f"outputs(): {name!r} has {len(values)} entries where the batch has {items} items")
    return [None if value is None else _array(name, value) for value in values]


def _array(name: str, value: Any) -> Array:
    """Return a value as a numpy array, bfloat16 as float32."""
    if isinstance(value, torch.Tensor):
        value = value.detach().to("cpu")
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    array = np.array(value)
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise _refusal(f"outputs(): {name!r} must be numbers, got {array.dtype}")
    return np.ascontiguousarray(array).reshape(array.shape)
