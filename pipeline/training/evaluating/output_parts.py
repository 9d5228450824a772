"""The file format of model outputs: a part holds the outputs of some items, in two files.

    part-00001-000003.safetensors    the values: one run of numbers for each name and type
    part-00001-000003.json           whose they are: items, names, shapes, and the digest of the values

The JSON comes last: without it there is no part. Its first line is the digest of the second.

Shapes: N items, K entries of a column, D dimensions of all their shapes.
"""

from __future__ import annotations

import json
import math
import os
import re
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.command_line import quoted
from pipeline.errors import ConfigError, DataError, JobFailed
from pipeline.keys import content_digest
from pipeline.training.checkpoints import tensor_file
from pipeline.training.checkpoints.tensor_file import TensorFile, WrittenFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from pipeline.store.format.disk import Disk

    Array = NDArray[Any]
    Integers = NDArray[np.int64]

FORMAT = 1
OPEN_FILES = 128
VALUES, INDEX = ".safetensors", ".json"
_NAME = re.compile(r"part-(\d{5,})-(\d{6,})\.json")


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """The values of one name and type in a part."""

    name: str
    dtype: np.dtype[Any]
    item_K: Integers  # by their place in the part
    length_D: Integers
    first_K: Integers  # [K + 1]: where each shape begins
    start_K: Integers  # [K + 1]: in bytes, from the beginning of the file

    @classmethod
    def of(cls, data: Mapping[str, Any], begin: int) -> StoredColumn:
        """Parse a column of an index; its values begin at byte `begin`."""
        shapes, dtype = data["shapes"], np.dtype(data["dtype"])
        counts_K = np.array([math.prod(shape) for shape in shapes], np.int64)
        return cls(
            name=data["name"],
            dtype=dtype,
            item_K=np.array(data["items"], np.int64),
            length_D=np.array([length for shape in shapes for length in shape], np.int64),
            first_K=np.cumsum([0, *map(len, shapes)]),
            start_K=begin + dtype.itemsize * np.concatenate([[0], np.cumsum(counts_K)]),
        )


@dataclass(frozen=True, slots=True)
class OutputPart:
    """A part whose bytes were verified."""

    path: Path  # of the values
    ids: list[str]
    numbers_N: Integers
    columns: list[StoredColumn]

    @classmethod
    def read(cls, disk: Disk, path: Path, of: str) -> OutputPart:
        """Read a part's index, and verify its values."""
        index = read_index(path, of)
        values, written = path.with_suffix(VALUES), WrittenFile(**index["values"])
        try:
            tensor_file.verify_file(disk, values, written)
            specs = TensorFile(disk, values, written).specs
        except JobFailed as error:  # it speaks of checkpoints
            raise DataError(error.what, where=error.where, remedy=redo_remedy(path)) from error
        columns = [StoredColumn.of(column, specs[str(place)].begin) for place, column in enumerate(index["columns"])]
        return cls(values, index["ids"], np.array(index["numbers"], np.int64), columns)

    def entry(self, files: OpenFiles, column: int, entry: int) -> Array:
        """Read one item's array."""
        mine = self.columns[column]
        begin, end = mine.start_K[entry : entry + 2].tolist()
        shape = mine.length_D[mine.first_K[entry] : mine.first_K[entry + 1]]
        array = np.empty(shape, mine.dtype)
        if array.nbytes:
            files.read(self.path, array.reshape(-1).view(np.uint8).data, begin)
        assert array.nbytes == end - begin
        return array


class OpenFiles:
    """A cache of files open for reading, least recently used closed first."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        weakref.finalize(self, _close_all, self._open)

    def read(self, path: Path, into: memoryview, offset: int) -> None:
        """Fill memory from a file, from `offset` on."""
        came = 0
        while came < len(into):
            more = os.preadv(self._file(path), [into[came:]], offset + came)
            if not more:
                raise DataError("was truncated while being read", where=str(path), remedy=redo_remedy(path))
            came += more

    def _file(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) >= OPEN_FILES:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._open[path] = file = self._open.pop(path)  # now the last to be closed
        return file


def _close_all(files: dict[Path, int]) -> None:
    for file in files.values():
        os.close(file)
    files.clear()


def publish_tensors(disk: Disk, path: Path, tensors: Mapping[str, Tensor]) -> WrittenFile:
    """Write a file of tensors atomically, replacing an earlier one."""
    with publishing(disk, path) as (partial,):
        return tensor_file.write_tensors(disk, partial, tensors)


def publish_text(disk: Disk, path: Path, text: str) -> None:
    """Write a text file atomically, replacing an earlier one."""
    with publishing(disk, path) as (partial,), partial.open("x", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        disk.fsync(file.fileno())


@contextmanager
def publishing(disk: Disk, *paths: Path) -> Iterator[list[Path]]:
    """Yield partial paths to write to, renamed to `paths` on success.

    Leftovers of a kill are removed first. If the disk is full, what was begun is removed, so that there is room again,
    and the error says why.
    """
    partials = [path.with_name(f".{path.name}.partial") for path in paths]
    try:
        for partial in partials:
            if disk.exists(partial):
                disk.unlink(partial)
        yield partials
        for partial, path in zip(partials, paths, strict=True):
            disk.rename(partial, path)
        disk.fsync_folder(paths[0].parent)
    except BaseException as error:
        for partial in partials:
            partial.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        remedy = f"df -h {quoted(paths[0].parent)}   then the same command   (continues where it stopped)"
        raise JobFailed(f"cannot be written: {error.strerror}", where=str(paths[0]), remedy=remedy) from error


def parts_in(disk: Disk, folder: Path) -> list[tuple[int, int]]:
    """Return the rank and the number of each part in a folder."""
    matches = map(_NAME.fullmatch, disk.list_folder(folder))
    return sorted((int(match[1]), int(match[2])) for match in matches if match)


def paths_in(disk: Disk, folder: Path) -> list[Path]:
    """Return the path of each part's index."""
    return [folder / f"part-{rank:05d}-{part:06d}{INDEX}" for rank, part in parts_in(disk, folder)]


def redo_remedy(path: Path) -> str:
    """Return the command to have a part made again, by the path of either of its files."""
    return f"rm {quoted(path.with_suffix(INDEX))}   then the same command   (continues where it stopped)"


def signed(text: str) -> str:
    """Prefix a text with a line of its digest."""
    return f"{content_digest(text.encode()).hex()}\n{text}"


def read_index(path: Path, of: str) -> dict[str, Any]:
    """Read and verify the index of a part."""
    where, remedy = str(path), redo_remedy(path)
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=where, remedy=remedy) from error
    if digest != content_digest(body).hex().encode():
        raise DataError("checksum mismatch", where=where, remedy=remedy)
    index: dict[str, Any] = json.loads(body)
    if index["format"] != FORMAT:
        raise DataError(f"outputs of format {index['format']}, not {FORMAT}", where=where, remedy=remedy)
    if index["of"] != of:
        what = f"these outputs belong to {index['of'] or 'an unnamed model'}, not to {of or 'an unnamed model'}"
        raise ConfigError(what, where=where, remedy=f"use another folder, or   rm -r {path.parent}")
    return index
