"""Stage scan: from structure files to an inventory of each item in the store.

There are two kinds of records. `files` remembers the content of a file by its path, inode, size and times, so that an
unchanged file is not read again. `scan` holds the inventory, under a key of that content and of every choice that can
change it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.files import state_of
from pipeline.keys import COARSE_TICK_NS, content_digest, is_settled, recipe_key
from pipeline.records import Inventory, Item, Reason
from pipeline.store.cache_folder import update_index
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.inventory import ScanRecipe, examine_item, item_key
from pipeline.structures.parsing.structure_files import (
    File,
    StructureFiles,
    read_file,
    read_structure_file,
    stat_file,
    total_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from typing import TypeAlias

    from pipeline.store.store import Store, StoreWriter
    from pipeline.structures.inventory import Complex

    Refuse: TypeAlias = Callable[[str, Reason, str], object]  # of an item whose files cannot be read

log = logging.getLogger(__name__)

# Faults in a file's bytes stay until the file changes, so they are remembered with it.
LASTING = frozenset({Reason.EMPTY_FILE, Reason.TRUNCATED_FILE, Reason.UNKNOWN_FORMAT})
LARGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ScanShelves:
    """The two stores this stage works on."""

    inventories: Store
    files: Store
    shard_bytes: int

    def stores(self) -> tuple[Store, Store]:
        return self.inventories, self.files


@dataclass(frozen=True, slots=True)
class Seen:
    """What the store knows of an item: its key if its files are known, its inventory if it was scanned."""

    key: bytes | None = None
    inventory: Inventory | None = None


def _ignore(_item: str, _reason: Reason, _detail: str) -> None:
    """Do nothing about a file that cannot be read."""


class Also(Protocol):
    """Makes something from a structure while it is in memory, such as its graph."""

    def make(self, key: bytes, read: Complex) -> Reason | None:
        """Make it for an item, given the key of its inventory."""

    def publish(self) -> None:
        """Write the results to disk."""


class FileStates(NamedTuple):
    """The files of some items, and their present states."""

    paths: list[list[str]]  # of each item; a companion file may appear at any time
    marks: dict[str, bytes | Inventory | None]  # as `file_mark` says of each file


def file_states(items: Iterable[Item], recipe: ScanRecipe) -> FileStates:
    """Return the files of some items, and their present states."""
    paths = [recipe.paths(item) for item in items]
    return FileStates(paths, {path: file_mark(path, recipe) for path in dict.fromkeys(chain.from_iterable(paths))})


def look_up_items(
    items: Sequence[Item], recipe: ScanRecipe, shelves: ScanShelves, states: FileStates | None = None
) -> list[Seen]:
    """Look each item up in the store, without reading structure files."""
    paths, marks = states or file_states(items, recipe)
    files = _read_meta(shelves.files, {mark for mark in marks.values() if isinstance(mark, bytes)})
    known = {path: _content(files, mark, recipe) for path, mark in marks.items()}
    keys = [_key(item, recipe, {path: known[path] for path in own}) for item, own in zip(items, paths, strict=True)]
    inventories = _read_meta(shelves.inventories, {key for key in keys if isinstance(key, bytes)})
    return [_seen(key, inventories.get(key)) if isinstance(key, bytes) else Seen(None, key) for key in keys]


def look_again(item: Item, recipe: ScanRecipe, shelves: ScanShelves, since_ns: int) -> Seen:
    """Look an item up by reading its files, if one of them was too recent at that time to be remembered."""
    try:
        paths = recipe.paths(item)
        states = [stat_file(Path(path), recipe.max_file_bytes) for path in paths]
        if all(state.st_ctime_ns < since_ns - COARSE_TICK_NS for state in states):
            return Seen()
        digests = {path: read_structure_file(path, recipe.max_file_bytes).digest for path in paths}
    except UnusableInput as problem:
        return Seen(None, Inventory(reason=problem.reason, detail=problem.detail))
    key = item_key(item, recipe, digests)
    return _seen(key, _read_meta(shelves.inventories, {key}).get(key))


def file_mark(path: str, recipe: ScanRecipe) -> bytes | Inventory | None:
    """Return the key of a file's state, why it cannot be used, or None while it is too recent for its times to tell."""
    try:
        state = stat_file(path, recipe.max_file_bytes)
    except UnusableInput as problem:
        return Inventory(reason=problem.reason, detail=problem.detail)
    if not is_settled(state.st_mtime_ns, state.st_ctime_ns):
        return None
    return recipe_key("file", {"state": state_of(path, state)})


def _content(
    files: Mapping[bytes, Mapping[str, Any]], mark: bytes | Inventory | None, recipe: ScanRecipe
) -> str | Inventory | None:
    """Return the digest of a file's content as the store remembers it, or why the file cannot be used."""
    if not isinstance(mark, bytes):
        return mark
    meta = files.get(mark)
    if meta is None:
        return None
    if "content" not in meta:
        return Inventory.from_json(meta)
    if meta["bytes"] > recipe.max_file_bytes:  # the limit was larger when it was unpacked
        what = f"unfolds to {meta['bytes']:,} bytes; structures.max_file_bytes is {recipe.max_file_bytes:,}"
        return Inventory(reason=Reason.FILE_TOO_LARGE, detail=what)
    content: str = meta["content"]
    return content


def _key(item: Item, recipe: ScanRecipe, contents: Mapping[str, str | Inventory | None]) -> bytes | Inventory | None:
    """Return the key of an item whose files are all known, else why one of them cannot be used, or None."""
    for content in contents.values():
        if not isinstance(content, str):
            return content
    return item_key(item, recipe, contents)  # type: ignore[arg-type]  # every content is a digest here


def _seen(key: bytes, meta: Mapping[str, Any] | None) -> Seen:
    """Return an item with the inventory in its record, if there is one."""
    return Seen(key, None if meta is None else Inventory.from_json(meta))


def _read_meta(store: Store, keys: set[bytes]) -> dict[bytes, Mapping[str, Any]]:
    """Return the metadata of the records that the store has; a damaged one counts as missing, and is rebuilt."""
    while True:
        missing = set(store.missing(list(keys)))
        if len(missing) == len(keys):
            return {}
        try:
            return {record.key: record.meta for record in store.read(keys - missing)}
        except (CacheDamaged, RecordMissing) as error:  # the store now skips that copy
            log.warning("%s: %s: rebuilt", error.where, error.what)


@dataclass(slots=True)
class Scanner:
    """Scans items one at a time; it holds a few files, and what it has not published."""

    recipe: ScanRecipe
    shelves: ScanShelves
    inventories: StoreWriter
    files: StoreWriter
    also: Also | None = None
    refuse: Refuse = _ignore
    refused: dict[bytes, Reason] = field(default_factory=dict)  # of inventories that are not published yet
    kept: StructureFiles = field(init=False)

    def __post_init__(self) -> None:
        self.kept = StructureFiles(lambda path: self._read(path, file_mark(path, self.recipe)), self.recipe.paths)

    def scan(self, item: Item) -> Reason | None:
        """Store the inventory of an item; return the reason if it is left out."""
        try:
            files = self.kept.of(item)
        except UnusableInput as problem:
            if problem.reason not in LASTING:  # the store does not remember these
                self.refuse(item.id, problem.reason, problem.detail)
            return problem.reason
        key = item_key(item, self.recipe, {path: file.digest for path, file in files.items()})
        return self.refused.get(key) if key in self.inventories else self._take(item, key, files)

    def _take(self, item: Item, key: bytes, files: Mapping[str, File]) -> Reason | None:
        """Make an inventory, unless the store has it because the file was only touched or copied."""
        if stored := _read_meta(self.shelves.inventories, {key}):
            return Inventory.from_json(stored[key]).reason
        if total_bytes(files) > LARGE_BYTES:
            self.publish()  # keeps earlier results if this item exhausts the memory
        try:
            inventory, read = examine_item(item, files, self.recipe)
        except MemoryError as error:
            raise MemoryError(f"out of memory while reading {item.id}") from error
        except (ImportError, OSError) as error:  # perhaps a fault of this machine: the next scan tries again
            log.exception("%s could not be scanned here", item.id)
            self.refuse(item.id, Reason.SCAN_FAILED, _of_error(error))
            return Reason.SCAN_FAILED
        except Exception as error:  # a bug here or in a parser costs this item, not the run
            log.exception("%s could not be scanned", item.id)
            inventory = Inventory(reason=Reason.SCAN_FAILED, detail=_of_error(error))
            read = None
        self.inventories.put(key, read.maps if read else {}, inventory.to_json())
        if self.also and read:
            self.also.make(key, read)  # it records its own refusals
        if inventory.reason:
            self.refused[key] = inventory.reason
        return inventory.reason

    def publish(self) -> None:
        """Write the new records to disk; from now on they are looked up there."""
        self.inventories.flush()
        self.files.flush()
        self.refused.clear()
        for store in self.shelves.stores():
            update_index(store, far_behind=True)
        if self.also:
            self.also.publish()

    def _read(self, path: str, mark: bytes | Inventory | None) -> File:
        """Read a file, and remember its content."""
        try:
            data = read_file(Path(path), self.recipe.max_file_bytes)
        except UnusableInput as problem:
            if problem.reason in LASTING:
                self._remember(path, mark, {"reason": problem.reason.value, "detail": problem.detail})
            raise
        file = File(data, content_digest(data).hex())
        self._remember(path, mark, {"content": file.digest, "bytes": len(data)})
        return file

    def _remember(self, path: str, mark: bytes | Inventory | None, meta: Mapping[str, Any]) -> None:
        """Record the content of a file, unless it may have changed since its mark was taken."""
        if not isinstance(mark, bytes) or mark in self.files or file_mark(path, self.recipe) != mark:
            return
        if not _read_meta(self.shelves.files, {mark}):  # it exists if only the inventory was lost
            self.files.put(mark, {}, meta)


def _of_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def scan_items(
    items: Iterable[Item],
    recipe: ScanRecipe,
    shelves: ScanShelves,
    also: Also | None = None,
    *,
    refuse: Refuse = _ignore,
) -> Generator[Reason | None, None, None]:
    """Scan items, and publish the records whenever many wait or a minute has gone by."""
    limit = shelves.shard_bytes
    with shelves.inventories.writer(shard_bytes=limit) as inventories, shelves.files.writer(shard_bytes=limit) as files:
        scanner = Scanner(recipe, shelves, inventories, files, also, refuse)
        for item in items:
            yield scanner.scan(item)
            if inventories.is_due or files.is_due:
                scanner.publish()
