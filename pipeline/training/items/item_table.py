"""The table of a data set: every item's id, the key of its graph, its split and its sizes, in a few arrays.

Shapes: N items. An item takes a few numbers and a few bytes of text, so that a million items are read in a second. If
graphs are not cached, the table also has the items themselves, to build graphs from; for a reader, their places.

A table is one record, or a record that lists others, its pages: so none holds all items while it is written or read.
"""

from __future__ import annotations

import json
from array import array
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.errors import ConfigError
from pipeline.keys import KEY_BYTES, content_digest, recipe_key
from pipeline.records import Item
from pipeline.training.sampling import narrow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from pipeline.store.format.record import Record
    from pipeline.store.store import Store
    from pipeline.training.sampling import Draws

    Array = NDArray[Any]
    Integers = NDArray[np.int64]

KIND = "sets"
FORMAT = 1
PAGED_FORMAT = 2  # of a record that lists the pages of a table
PAGE = 1 << 15  # items
MOST_SPLITS = 256
_SIZE = "size."
LABEL = "label."


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Many short texts in one array of bytes, such as ids."""

    bytes_T: NDArray[np.uint8]
    start_N: Integers
    end_N: Integers

    @classmethod
    def of(cls, bytes_T: NDArray[np.uint8], end_N: Integers) -> PackedTexts:
        """Return consecutive texts, given their ends."""
        bounds = np.concatenate([np.zeros(1, end_N.dtype), end_N])
        return cls(bytes_T, bounds[:-1], bounds[1:])

    def __len__(self) -> int:
        return len(self.end_N)

    def __getitem__(self, number: int) -> str:
        return self.bytes_T[self.start_N[number] : self.end_N[number]].tobytes().decode()

    def take(self, numbers: Integers) -> PackedTexts:
        """Return some of the texts, over the same bytes."""
        return PackedTexts(self.bytes_T, self.start_N[numbers], self.end_N[numbers])

    def packed(self) -> PackedTexts:
        """Return the texts over bytes of their own."""
        length_N = self.end_N - self.start_N
        end_N = np.cumsum(length_N)
        byte_T = np.arange(int(length_N.sum())) + np.repeat(self.start_N - end_N + length_N, length_N)
        return PackedTexts.of(self.bytes_T[byte_T], end_N)


@dataclass(frozen=True, slots=True)
class ItemTable:
    """The items of a data set, or of one split; an item is identified by its number here."""

    ids: PackedTexts
    key_N16: NDArray[np.uint8]  # of graphs, or the digests of what a reader gives
    split_N: NDArray[np.uint8]
    splits: tuple[str, ...]
    sizes: Mapping[str, Integers]  # each [N], mostly of 32 bits: products of them may overflow
    items: PackedTexts | None = None  # or places, as JSON
    labels: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)  # each [N]; NaN where it is unknown
    draws: Draws | None = None  # how an epoch samples the items; None: each once

    def __len__(self) -> int:
        return len(self.ids)

    def key(self, number: int) -> bytes:
        """Return the key of an item's graph."""
        key: bytes = self.key_N16[number].tobytes()
        return key

    def item(self, number: int) -> Item:
        """Return the item, to build its graph from."""
        return Item.from_json(self.place(number))

    def place(self, number: int) -> Any:
        """Return where the reader finds an item."""
        assert self.items is not None
        return json.loads(self.items[number])

    def values(self, number: int) -> dict[str, NDArray[np.float32]]:
        """Return an item's labels, as arrays of one number."""
        return {name: label_N[number : number + 1].copy().reshape(()) for name, label_N in self.labels.items()}

    def of_split(self, name: str, key: str = "") -> ItemTable:
        """Return the items of one split, in order and renumbered; `key` is the setting that names it."""
        if name not in self.splits:
            remedy = self.other_splits(key) if key else "pipeline status"
            raise ConfigError(f"no item is in split {name!r}; {self.named_splits()}", where=key, remedy=remedy)
        return self.in_split(name)

    def in_split(self, name: str) -> ItemTable:
        """Return the items of a split, of which there may be none."""
        return self.take(np.flatnonzero(np.array([known == name for known in self.splits], bool)[self.split_N]))

    def named_splits(self) -> str:
        """Return a phrase that lists the splits."""
        named = ", ".join(repr(split) for split in self.splits if split)
        return f"there are: {named}" if named else "this data set has no splits"

    def other_splits(self, key: str) -> str:
        """Return command-line settings for the splits that exist."""
        named = (*filter(None, self.splits), "null")
        return " or ".join(f"--set {key}={name}" for name in named) + "   (null: every item)"

    def take(self, numbers: Integers) -> ItemTable:
        """Return some items, in the order given and renumbered."""
        return ItemTable(
            ids=self.ids.take(numbers),
            key_N16=self.key_N16[numbers],
            split_N=self.split_N[numbers],
            splits=self.splits,
            sizes={name: size_N[numbers] for name, size_N in self.sizes.items()},
            items=self.items.take(numbers) if self.items else None,
            labels={name: label_N[numbers] for name, label_N in self.labels.items()},
            draws=self.draws and self.draws.take(numbers),
        )

    @property
    def in_epoch(self) -> int:
        """The number of items in an epoch of training."""
        return len(self) if self.draws is None else self.draws.items

    @property
    def distinct(self) -> int:
        """The number of items, where those that an epoch draws several times have several rows."""
        return len(self) if self.draws is None else int((self.draws.copy_N == 0).sum())

    def sampled(self, samples: int) -> ItemTable:
        """Return a table with a row for each sample of each item, named as `protocol.item_of` expects."""
        if samples == 1:
            return self
        rows = self.take(np.repeat(np.arange(len(self)), samples))
        names = _Joined()
        for number in range(len(self)):
            for sample in range(samples):
                names.add(f"{self.ids[number]} {sample}")
        return replace(rows, ids=names.texts())

    @classmethod
    def read(cls, store: Store, key: bytes, keep: Callable[[ItemTable], ItemTable] = lambda page: page) -> ItemTable:
        """Read a table that was written; `keep` returns what is wanted of a page."""
        record = store.get(key)
        arrays, meta = record.arrays, record.meta
        if pages := pages_of(record):
            builder = TableBuilder()
            for page in pages:
                builder.add_page(cls.read(store, page, keep))
            table = builder.views()
            return replace(table, ids=PackedTexts.of(table.ids.bytes_T, narrow(table.ids.end_N)))
        if meta["format"] != FORMAT:
            raise ValueError(f"a table of format {meta['format']}, not {FORMAT}")
        table = cls(
            ids=PackedTexts.of(arrays["id.bytes"].copy(), arrays["id.end"]),  # a view would keep the whole record
            key_N16=arrays["key"],
            split_N=arrays["split"],
            splits=tuple(meta["splits"]),
            sizes={name: arrays[_SIZE + name] for name in meta["sizes"]},
            items=PackedTexts.of(arrays["item.bytes"], arrays["item.end"]) if "item.end" in arrays else None,
            labels={name: arrays[LABEL + name] for name in meta.get("labels", ())},
        )
        return keep(table)


@dataclass(slots=True)
class TableBuilder:
    """Collects items one at a time, in the memory that their table takes."""

    ids: _Joined = field(default_factory=lambda: _Joined())
    items: _Joined = field(default_factory=lambda: _Joined())
    keys: bytearray = field(default_factory=bytearray)
    split_N: bytearray = field(default_factory=bytearray)
    splits: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, array[int]] = field(default_factory=dict)
    labels: dict[str, array[float]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.split_N)

    def add(
        self,
        id: str,  # noqa: A002
        key: bytes,
        split: str,
        sizes: Mapping[str, int],
        place: Any = None,
        *,
        labels: Mapping[str, float] | None = None,
    ) -> None:
        """Add an item: the key and sizes of its graph, and the item itself if graphs are built when they are read.

        For a reader's item, `key` is the digest of its arrays and `place` is JSON data.
        """
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key is {KEY_BYTES} bytes, not {key!r}")
        if len(self) and (sizes.keys() != self.sizes.keys() or (place is None) != (len(self.items) == 0)):
            raise ValueError(f"{id}: every item needs the same sizes, and either all items or none must be included")
        self.split_N.append(self._split(split, id))
        self.ids.add(id)
        self.keys += key
        for name, size in sizes.items():
            self.sizes.setdefault(name, array("q")).append(size)
        for name, label in (labels or {}).items():
            self.labels.setdefault(name, array("f")).append(label)
        if place is not None:
            self.items.add(json.dumps(place.to_json() if isinstance(place, Item) else place, separators=(",", ":")))

    def add_page(self, page: ItemTable) -> None:
        if len(self) and len(page) and page.sizes.keys() != self.sizes.keys():
            raise ValueError("every item needs the same sizes")
        number_of = bytes(self._split(name, page.ids[0] if len(page) else "") for name in page.splits)
        self.split_N += page.split_N.tobytes().translate(number_of.ljust(256, b"\0"))
        self.keys += page.key_N16.tobytes()
        for mine, texts in ((self.ids, page.ids), (self.items, page.items)):
            if texts is not None:
                packed = texts.packed()
                mine.bounds.frombytes((packed.end_N + len(mine.bytes_T)).tobytes())
                mine.bytes_T += packed.bytes_T.tobytes()
        for name, size_N in page.sizes.items():
            sizes = self.sizes.setdefault(name, array("i" if size_N.itemsize == array("i").itemsize else "q"))
            if sizes.itemsize < size_N.itemsize:
                sizes = self.sizes[name] = array("q", sizes)
            sizes.frombytes(size_N.astype(sizes.typecode).tobytes())
        for name, label_N in page.labels.items():
            self.labels.setdefault(name, array("f")).frombytes(label_N.tobytes())

    def _split(self, name: str, item: str) -> int:
        """Return the number of an item's split."""
        if (number := self.splits.setdefault(name, len(self.splits))) >= MOST_SPLITS:
            raise ConfigError(f"more than {MOST_SPLITS} splits; one of them is {name!r}", where=item)
        return number

    def also(self, sizes: Iterable[str]) -> None:
        """Add sizes, by name, that later items will have; earlier items have 0."""
        for name in sizes:
            self.sizes.setdefault(name, array("q", bytes(8 * len(self))))

    def table(self) -> ItemTable:
        """Return a copy of the table so far."""
        return deepcopy(self).views()

    def write(self, store: Store) -> bytes:
        """Write the table to the store, unless the store has it, and return its key."""
        table = self.views()
        arrays: dict[str, Array] = {"key": table.key_N16, "split": table.split_N}
        for name, texts in (("id", table.ids), ("item", table.items)):
            if texts is not None:
                arrays |= {f"{name}.bytes": texts.bytes_T, f"{name}.end": texts.end_N}
        arrays |= {_SIZE + name: narrow(size_N) for name, size_N in table.sizes.items()}
        arrays |= {LABEL + name: label_N for name, label_N in table.labels.items()}
        meta = {"format": FORMAT, "splits": list(table.splits), "sizes": list(table.sizes), "items": len(table)}
        meta |= {"labels": list(table.labels)} if table.labels else {}
        return _written(store, arrays, meta)

    def views(self) -> ItemTable:
        """Return the table so far without copying; nothing can be added while it is in use."""
        return ItemTable(
            ids=self.ids.texts(),
            key_N16=np.frombuffer(self.keys, np.uint8).reshape(-1, KEY_BYTES),
            split_N=np.frombuffer(self.split_N, np.uint8),
            splits=tuple(self.splits),
            sizes={name: np.frombuffer(size_N, f"i{size_N.itemsize}") for name, size_N in self.sizes.items()},
            items=self.items.texts() if len(self.items) else None,
            labels={name: np.frombuffer(label_N, np.float32) for name, label_N in self.labels.items()},
        )


@dataclass(slots=True)
class _Joined:
    """Texts being collected."""

    bytes_T: bytearray = field(default_factory=bytearray)
    bounds: array[int] = field(default_factory=lambda: array("q", [0]))

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def add(self, text: str) -> None:
        self.bytes_T += text.encode()
        self.bounds.append(len(self.bytes_T))

    def texts(self) -> PackedTexts:
        """Return the texts without copying."""
        bound_N = np.frombuffer(self.bounds, np.int64)
        return PackedTexts(np.frombuffer(self.bytes_T, np.uint8), bound_N[:-1], bound_N[1:])


@dataclass(slots=True)
class TablePages:
    """Writes the table of a data set while its items are counted."""

    store: Store
    page: TableBuilder = field(default_factory=TableBuilder)
    written: list[str] = field(default_factory=list)

    def add(self, items: TableBuilder) -> None:
        """Add the items of a block."""
        self.page.add_page(items.views())
        if len(self.page) >= PAGE:
            self._turn()

    def write(self) -> bytes:
        """Return the key of the table, all of which is written then."""
        if not self.written:
            return self.page.write(self.store)
        self._turn()
        none_N16 = np.empty((0, KEY_BYTES), np.uint8)
        return _written(self.store, {"key": none_N16}, {"format": PAGED_FORMAT, "pages": self.written, "sizes": []})

    def _turn(self) -> None:
        self.written.append(self.page.write(self.store).hex())
        self.page = TableBuilder()


def pages_of(record: Record) -> list[bytes]:
    """Return the keys of the records that a table consists of; none where it is a single one."""
    return [bytes.fromhex(page) for page in record.meta.get("pages", ())]


def _written(store: Store, arrays: Mapping[str, Array], meta: Mapping[str, Any]) -> bytes:
    """Write a record of a table, unless the store has it; return its key."""
    bytes_of = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in arrays.items()}
    digests = {name: content_digest(values.data).hex() for name, values in bytes_of.items()}
    key = recipe_key(KIND, {"meta": meta, "content": digests})
    if not store.has_whole(key):
        with store.writer() as writer:
            writer.put(key, arrays, meta)
    return key


def table_digest(table: ItemTable) -> str:
    """Return a digest of the items, their order and their graphs."""
    names = "\n".join(table.ids[number] for number in range(len(table)))
    return content_digest(table.key_N16.tobytes() + names.encode()).hex()
