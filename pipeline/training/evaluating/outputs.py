"""What a model says of each item, gathered over ranks through files: nobody holds the outputs of a whole split.

Every rank writes parts of bounded size, each of which appears whole or not at all. So an evaluation that was
ended goes on with the items that no part has, on any number of ranks. `prediction_tables` writes them for people.

Shapes: N items of all parts, M of them that have a name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.errors import ConfigError, DataError, JobFailed
from pipeline.store.format.disk import Disk
from pipeline.training.checkpoints.tensor_file import TensorFile, WrittenFile
from pipeline.training.evaluating.output_parts import (
    FORMAT,
    INDEX,
    VALUES,
    OpenFiles,
    OutputPart,
    parts_in,
    paths_in,
    publish_tensors,
    publish_text,
    read_index,
    redo_remedy,
    signed,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    Array = NDArray[Any]
    Integers = NDArray[np.int64]

log = logging.getLogger(__name__)

PART_BYTES = 64 << 20
INDEX_BYTES = 64  # about what an entry takes in the index


class OutputWriter:
    """Writes the outputs of one rank's items to files."""

    def __init__(self, folder: Path, rank: int, *, of: str = "", part_bytes: int = PART_BYTES) -> None:
        """Go on in a folder; `of` names what made the outputs, such as a checkpoint's digest: others are refused.

        Memory is twice the bytes of a part, or of an item that is larger alone.
        """
        self._folder, self._rank, self._of, self._part_bytes = folder, rank, of, part_bytes
        self._disk = Disk()
        self._disk.make_folder(folder)
        self._part = 1 + max((part for owner, part in parts_in(self._disk, folder) if owner == rank), default=-1)
        self._pending = _Pending()

    def done_numbers(self) -> Integers:
        """Return the items, of all ranks, that are done; a damaged part is renamed and its items done again.

        While others write, two ranks may get different answers: each skips only items of its own share.
        """
        done: list[int] = []
        for path in paths_in(self._disk, self._folder):
            try:
                index = read_index(path, self._of)
                TensorFile(self._disk, path.with_suffix(VALUES), WrittenFile(**index["values"]))
                done += index["numbers"]
            except (DataError, JobFailed) as error:
                log.warning("%s: %s; its items are computed again", error.where, error.what)
                path.replace(path.with_suffix(".damaged"))
        return np.unique(np.array(done, np.int64))

    def add(self, ids: Sequence[str], numbers: Sequence[int], outputs: Mapping[str, Any]) -> None:
        """Add the outputs of some items: for each name a value for each item, None where it has none."""
        if len(numbers) != len(ids):
            raise ValueError(f"{len(ids)} ids and {len(numbers)} numbers of items")
        entries = {_checked_name(name): _entries(name, values, len(ids)) for name, values in outputs.items()}
        for place, (id_, number) in enumerate(zip(ids, numbers, strict=True)):
            self._pending.add(id_, int(number), {name: values[place] for name, values in entries.items()})
            if self._pending.bytes >= self._part_bytes:
                self.flush()

    def flush(self) -> None:
        """Write what was added so far as a part."""
        if not self._pending.ids:
            return
        pending, self._pending = self._pending, _Pending()
        stem = f"part-{self._rank:05d}-{self._part:06d}"
        head = {"format": FORMAT, "of": self._of, "ids": pending.ids, "numbers": pending.numbers}
        columns: list[dict[str, Any]] = []
        values: dict[str, torch.Tensor] = {}
        for place, ((name, dtype), (items, arrays)) in enumerate(pending.columns.items()):
            shapes = [list(array.shape) for array in arrays]
            columns.append({"name": name, "dtype": dtype, "items": items, "shapes": shapes})
            values[str(place)] = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays]))
            arrays.clear()  # the values are held once
        written = publish_tensors(self._disk, self._folder / f"{stem}{VALUES}", values)
        head |= {"values": {"bytes": written.bytes, "digest": written.digest}, "columns": columns}
        publish_text(self._disk, self._folder / f"{stem}{INDEX}", signed(json.dumps(head)))
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
    columns: dict[tuple[str, str], tuple[list[int], list[Array]]] = field(default_factory=dict)  # by name and type
    bytes: int = 0

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


class GatheredOutputs(Mapping[str, "OutputColumn"]):
    """The outputs of all ranks by name, ordered by item number; values are read from disk on access."""

    def __init__(self, folder: Path, *, of: str = "") -> None:
        """Read the indices, and verify every byte of the values."""
        disk = Disk()
        self._files = OpenFiles()
        self._parts = [OutputPart.read(disk, path, of) for path in paths_in(disk, folder)]
        sizes = [len(part.numbers_N) for part in self._parts]
        part_N = np.repeat(np.arange(len(sizes)), sizes)
        place_N = np.concatenate([np.zeros(0, np.int64), *(np.arange(size) for size in sizes)])
        number_N = np.concatenate([np.zeros(0, np.int64), *(part.numbers_N for part in self._parts)])
        order_N = np.argsort(number_N, kind="stable")
        self.numbers, self._part_N, self._place_N = number_N[order_N], part_N[order_N], place_N[order_N]
        if (twice := np.flatnonzero(np.diff(self.numbers) == 0)).size:
            at = int(twice[0])
            first, second = (self._parts[int(self._part_N[place])].path for place in (at, at + 1))
            number = f"{self.numbers[at]:,}"
            what = f"{self.id(at)} (item {number}) is in it, and in {first.name}; so are {len(twice)} in all"
            raise DataError(what, where=str(second), remedy=redo_remedy(second))
        names = sorted({column.name for part in self._parts for column in part.columns})
        self._columns = {name: OutputColumn(name, self._parts, self._files) for name in names}

    def id(self, place: int) -> str:
        """Return an item's id, by its index among all items."""
        return self._parts[int(self._part_N[place])].ids[int(self._place_N[place])]

    def __getitem__(self, name: str) -> OutputColumn:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


class OutputColumn(Sequence[Any]):
    """The values of one output, ordered by item number; each array is read from disk on access."""

    def __init__(self, name: str, parts: Sequence[OutputPart], files: OpenFiles) -> None:
        """Index the parts, at least one of which has `name`."""
        self.name, self._files, self._parts = name, files, parts
        there = [
            (part, place, column)
            for part, read in enumerate(parts)
            for place, column in enumerate(read.columns)
            if column.name == name
        ]
        sizes = [len(column.item_K) for _, _, column in there]
        numbers_M = np.concatenate([parts[part].numbers_N[column.item_K] for part, _, column in there])
        order_M = np.argsort(numbers_M, kind="stable")
        self.numbers: Integers = numbers_M[order_M]
        self._part_M = np.repeat([part for part, _, _ in there], sizes)[order_M]
        self._column_M = np.repeat([place for _, place, _ in there], sizes)[order_M]
        self._entry_M = np.concatenate([np.arange(size) for size in sizes])[order_M]
        self._kinds = {column.dtype.kind for _, _, column in there}
        size_M = np.concatenate([np.diff(column.start_K) // column.dtype.itemsize for _, _, column in there])
        self._size_M = size_M[order_M]
        self._ndim_M = np.concatenate([np.diff(column.first_K) for _, _, column in there])[order_M]

    @property
    def width(self) -> int | None:
        """How many numbers each item has, apart from those that have none; None: not one row of equally many."""
        widths = set(self._size_M.tolist()) - {0}
        is_row = widths <= {1} or (len(widths) == 1 and int(self._ndim_M.max()) == 1)
        return max(widths, default=0) if is_row else None

    @property
    def number(self) -> type:
        """What each value is: a bool, an int or a float."""
        return bool if self._kinds == {"b"} else int if self._kinds <= set("biu") else float

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int | slice) -> Any:
        """Read the array of one item, or a list of several."""
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(self)))]
        if not -len(self) <= place < len(self):
            raise IndexError(f"entry {place} of {len(self)}")
        part = self._parts[int(self._part_M[place])]
        return part.entry(self._files, int(self._column_M[place]), int(self._entry_M[place]))

    def id(self, place: int) -> str:
        part = self._parts[int(self._part_M[place])]
        column = part.columns[int(self._column_M[place])]
        return part.ids[int(column.item_K[self._entry_M[place]])]


def returned_values(method: str, returned: Any) -> dict[str, Any]:
    """Return what a method of a task has returned, if it has names; else raise an error that says what is wrong."""
    if not isinstance(returned, Mapping):
        got = "nothing" if returned is None else type(returned).__name__
        raise _refusal(f"{method}() must return values by their names, got {got}", method)
    return dict(returned)


def numbers_of(metrics: Any) -> dict[str, float]:
    """Return the figures of a task if each is a number; else raise an error that says what is wrong."""
    figures: dict[str, float] = {}
    for name, value in returned_values("metrics", metrics).items():
        try:
            figures[name] = float(value)
        except (TypeError, ValueError, RuntimeError):  # the last is torch's, of a tensor with several
            got = f"{value!r:.40}" if isinstance(value, str) else type(value).__name__
            raise _refusal(f"metrics(): {name!r} must be a number, got {got}", "metrics") from None
    return figures


def _refusal(what: str, method: str = "outputs") -> ConfigError:
    return ConfigError(what, where="train.task", remedy=f"{method}() is described in pipeline/protocol.py")


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
