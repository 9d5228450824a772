"""The ways in which people keep such records, each behind the same two calls.

Every way is used as its own documentation says and as groups in this field do: nobody is made slower than need be, and
nobody is given checks that it does not have.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from pipeline.store.cache_folder import CacheFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

Arrays = dict[str, np.ndarray[Any, Any]]
TOGETHER = 50  # records that are made safe at once, where a way allows that
LMDB_BYTES = 1 << 36


class Peer(Protocol):
    """A way to keep records."""

    name: str
    modules: tuple[str, ...]  # that it needs

    def write(self, folder: Path, records: Iterable[tuple[int, Arrays]], safe: Callable[[Sequence[int]], None]) -> None:
        """Write records, naming those that are safe as soon as the way says that they are."""

    def read(self, folder: Path, numbers: Sequence[int]) -> Iterator[tuple[int, Arrays]]:
        """Yield records in the order asked."""


def in_groups(records: Iterable[tuple[int, Arrays]]) -> Iterator[list[tuple[int, Arrays]]]:
    """Yield so many records as are made safe at once."""
    group = []
    for one in records:
        group.append(one)
        if len(group) == TOGETHER:
            yield group
            group = []
    if group:
        yield group


class Ours:
    """The store of the project."""

    name = "pipeline"
    modules = ()

    def write(self, folder: Path, records: Iterable[tuple[int, Arrays]], safe: Callable[[Sequence[int]], None]) -> None:
        store = CacheFolder(folder).kind("embed")
        with store.writer() as writer:
            for group in in_groups(records):
                for number, arrays in group:
                    writer.put(number.to_bytes(16, "big"), arrays)
                safe([int.from_bytes(key, "big") for key in writer.flush()])
        store.write_index()

    def read(self, folder: Path, numbers: Sequence[int]) -> Iterator[tuple[int, Arrays]]:
        for record in CacheFolder(folder).kind("embed").read([number.to_bytes(16, "big") for number in numbers]):
            yield int.from_bytes(record.key, "big"), dict(record.arrays)


class OnePickle:
    """All records in one pickle, as the originals keep their graphs."""

    name = "one pickle"
    modules = ()

    def write(self, folder: Path, records: Iterable[tuple[int, Arrays]], safe: Callable[[Sequence[int]], None]) -> None:
        folder.mkdir(parents=True)
        everything = dict(records)
        with (folder / "all.pkl").open("wb") as file:
            pickle.dump(everything, file)
        safe(list(everything))

    def read(self, folder: Path, numbers: Sequence[int]) -> Iterator[tuple[int, Arrays]]:
        with (folder / "all.pkl").open("rb") as file:
            everything = pickle.load(file)
        for number in numbers:
            yield number, everything[number]


class TorchFiles:
    """A .pt file of each record, as the originals keep their embeddings."""

    name = "one .pt each"
    modules = ("torch",)

    def write(self, folder: Path, records: Iterable[tuple[int, Arrays]], safe: Callable[[Sequence[int]], None]) -> None:
        import torch

        folder.mkdir(parents=True)
        for number, arrays in records:
            torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, folder / f"{number}.pt")
            safe([number])

    def read(self, folder: Path, numbers: Sequence[int]) -> Iterator[tuple[int, Arrays]]:
        import torch

        for number in numbers:
            found = torch.load(folder / f"{number}.pt", weights_only=True)
            yield number, {name: tensor.numpy() for name, tensor in found.items()}


class Lmdb:
    """LMDB, a transaction for each group; arrays as raw bytes behind a small header."""

    name = "LMDB"
    modules = ("lmdb",)

    def write(self, folder: Path, records: Iterable[tuple[int, Arrays]], safe: Callable[[Sequence[int]], None]) -> None:
        import lmdb

        with lmdb.open(str(folder), map_size=LMDB_BYTES) as base:
            for group in in_groups(records):
                with base.begin(write=True) as transaction:
                    for number, arrays in group:
                        transaction.put(number.to_bytes(16, "big"), packed(arrays))
                safe([number for number, _ in group])

    def read(self, folder: Path, numbers: Sequence[int]) -> Iterator[tuple[int, Arrays]]:
        import lmdb

        with lmdb.open(str(folder), readonly=True, lock=False, readahead=False) as base, base.begin(buffers=True) as of:
            for number in numbers:
                yield number, unpacked(of.get(number.to_bytes(16, "big")))


class Hdf5:
    """HDF5, a group for each record, flushed for each group of records."""

    name = "HDF5"
    modules = ("h5py",)

    def write(self, folder: Path, records: Iterable[tuple[int, Arrays]], safe: Callable[[Sequence[int]], None]) -> None:
        import h5py

        folder.mkdir(parents=True)
        with h5py.File(folder / "all.h5", "w") as file:
            for group in in_groups(records):
                for number, arrays in group:
                    for name, array in arrays.items():
                        file.create_dataset(f"{number}/{name}", data=array)
                file.flush()
                safe([number for number, _ in group])

    def read(self, folder: Path, numbers: Sequence[int]) -> Iterator[tuple[int, Arrays]]:
        import h5py

        with h5py.File(folder / "all.h5", "r") as file:
            for number in numbers:
                yield number, {name: dataset[()] for name, dataset in file[str(number)].items()}


PEERS: dict[str, Peer] = {one.name: one for one in (Ours(), OnePickle(), TorchFiles(), Lmdb(), Hdf5())}


def packed(arrays: Arrays) -> bytes:
    """Return arrays as bytes: names, dtypes and shapes in a line, then the numbers."""
    head = repr([(name, array.dtype.str, array.shape) for name, array in arrays.items()]).encode()
    return b"".join([len(head).to_bytes(4, "little"), head, *(array.tobytes() for array in arrays.values())])


def unpacked(data: memoryview) -> Arrays:
    """Return the arrays that `packed` made bytes of."""
    import ast

    begin = 4 + int.from_bytes(data[:4], "little")
    arrays = {}
    for name, dtype, shape in ast.literal_eval(bytes(data[4:begin]).decode()):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[name] = np.frombuffer(data[begin : begin + size], dtype).reshape(shape).copy()
        begin += size
    return arrays
