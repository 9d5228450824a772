"""Stage scan: structure files in, an inventory of every item in the store.

Two kinds of record. `files` remembers which content a file (path, size, times) had, so that an unchanged file is never
read again; `scan` holds the inventory under the key of that content and of every choice that can change it.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import CacheDamaged, RecordMissing
from pipeline.keys import COARSE_TICK_NS, content_digest, is_settled, recipe_key
from pipeline.records import Inventory, Item, Reason
from pipeline.structures.atoms import Unusable
from pipeline.structures.inventory import File, Recipe, item_key, take
from pipeline.structures.read import read_file, stat_file

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping, Sequence

    from pipeline.store.store import Store
    from pipeline.store.writer import StoreWriter

log = logging.getLogger(__name__)

# What is wrong with the bytes of a file stays wrong until the file changes, so it is remembered with it.
LASTING = frozenset({Reason.EMPTY_FILE, Reason.TRUNCATED_FILE})
PUBLISH_EVERY_S = 60.0
KEPT_FILES, KEPT_BYTES = 4, 16 << 20  # a structure that items share is read once while they follow each other
LARGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Shelves:
    """The two stores this stage works on."""

    inventories: Store
    files: Store
    shard_bytes: int

    def stores(self) -> tuple[Store, Store]:
        """Return both."""
        return self.inventories, self.files


def look_up(items: Sequence[Item], recipe: Recipe, shelves: Shelves) -> list[Inventory | None]:
    """Return what is known of each item, None where it must be scanned; no structure file is read."""
    glances = {path: glance(path, recipe) for path in dict.fromkeys(path for item in items for path in paths(item))}
    seen = _read_meta(shelves.files, {mark for mark in glances.values() if isinstance(mark, bytes)})
    known = {path: _content(seen, mark, recipe) for path, mark in glances.items()}
    keys = [_key(item, recipe, known) for item in items]
    inventories = _read_meta(shelves.inventories, {key for key in keys if isinstance(key, bytes)})
    return [_inventory(inventories.get(key)) if isinstance(key, bytes) else key for key in keys]


def look_again(item: Item, recipe: Recipe, shelves: Shelves, since_ns: int) -> Inventory | None:
    """Return what is known of an item by reading its files, if one was too young to be remembered at that time."""
    try:
        states = [stat_file(Path(path), recipe.max_file_bytes) for path in paths(item)]
        if all(state.st_ctime_ns < since_ns - COARSE_TICK_NS for state in states):
            return None
        digests = {path: content_digest(read_file(Path(path), recipe.max_file_bytes)).hex() for path in paths(item)}
    except Unusable as problem:
        return Inventory(reason=problem.reason, detail=problem.detail)
    key = item_key(item, recipe, digests)
    return _inventory(_read_meta(shelves.inventories, {key}).get(key))


def paths(item: Item) -> list[str]:
    """Return the files of an item, each once."""
    return list(dict.fromkeys(part.path for part in (*item.parts, *item.bound)))


def glance(path: str, recipe: Recipe) -> bytes | Inventory | None:
    """Return the key of a file as it stands, or why it cannot be used, or None while its times prove nothing."""
    try:
        state = stat_file(Path(path), recipe.max_file_bytes)
    except Unusable as problem:
        return Inventory(reason=problem.reason, detail=problem.detail)
    if not is_settled(state.st_mtime_ns, state.st_ctime_ns):
        return None
    return recipe_key("file", {"path": path, "size": state.st_size, "times": [state.st_mtime_ns, state.st_ctime_ns]})


def _content(
    seen: Mapping[bytes, Mapping[str, Any]], mark: bytes | Inventory | None, recipe: Recipe
) -> str | Inventory | None:
    """Return the digest that a glance at a file led to, or why the file cannot be used."""
    if not isinstance(mark, bytes):
        return mark
    meta = seen.get(mark)
    if meta is None:
        return None
    if "content" not in meta:
        return Inventory.from_json(meta)
    if meta["bytes"] > recipe.max_file_bytes:  # the limit was larger when it was unfolded
        what = f"unfolds to {meta['bytes']:,} bytes; structures.max_file_bytes is {recipe.max_file_bytes:,}"
        return Inventory(reason=Reason.FILE_TOO_LARGE, detail=what)
    content: str = meta["content"]
    return content


def _key(item: Item, recipe: Recipe, known: Mapping[str, str | Inventory | None]) -> bytes | Inventory | None:
    """Return the key of an item whose files are all known, or the rejection that one of them brings."""
    contents = {path: known[path] for path in paths(item)}
    for content in contents.values():
        if not isinstance(content, str):
            return content
    return item_key(item, recipe, contents)  # type: ignore[arg-type]  # every content is a digest here


def _inventory(meta: Mapping[str, Any] | None) -> Inventory | None:
    """Return the inventory in a record, if there is one."""
    return None if meta is None else Inventory.from_json(meta)


def _read_meta(store: Store, keys: set[bytes]) -> dict[bytes, Mapping[str, Any]]:
    """Return the meta of those records that the store has; a damaged one counts as missing, and is made anew."""
    while True:
        missing = set(store.missing(list(keys)))
        if len(missing) == len(keys):
            return {}
        try:
            return {record.key: record.meta for record in store.read(keys - missing)}
        except (CacheDamaged, RecordMissing) as error:  # the store has struck that copy out, and will not name it again
            log.warning("%s: %s: made anew", error.where, error.what)


@dataclass(slots=True)
class Scanner:
    """Scans items one at a time; its memory is a few files and the keys of what it wrote."""

    recipe: Recipe
    shelves: Shelves
    inventories: StoreWriter
    files: StoreWriter
    known: dict[bytes, Reason | None] = field(default_factory=dict)  # the inventories of this task
    seen: set[bytes] = field(default_factory=set)  # the files of this task
    kept: dict[str, File] = field(default_factory=dict)
    published_s: float = field(default_factory=time.monotonic)

    def scan(self, item: Item) -> Reason | None:
        """Store the inventory of an item; return why it was left out, if it was."""
        try:
            files = {path: self._file(path) for path in paths(item)}
        except Unusable as problem:
            return problem.reason
        key = item_key(item, self.recipe, {path: file.digest for path, file in files.items()})
        if key not in self.known:
            self.known[key] = self._take(item, key, files)
        return self.known[key]

    def _take(self, item: Item, key: bytes, files: Mapping[str, File]) -> Reason | None:
        """Make an inventory, unless the store has it because the file was only touched or copied."""
        stored = _read_meta(self.shelves.inventories, {key})
        if stored:
            return Inventory.from_json(stored[key]).reason
        if _size(files) > LARGE_BYTES:
            self.publish()  # should this one exhaust the memory, what came before it is safe
        try:
            inventory, maps = take(item, files, self.recipe)
        except MemoryError:
            raise
        except Exception as error:  # a bug of ours or of a parser must cost this item, not the run
            log.exception("%s could not be scanned", item.id)
            inventory, maps = Inventory(reason=Reason.SCAN_FAILED, detail=f"{type(error).__name__}: {error}"[:200]), {}
        self.inventories.put(key, maps, inventory.to_json())
        return inventory.reason

    def publish(self) -> None:
        """Make safe what was found."""
        self.inventories.flush()
        self.files.flush()
        self.published_s = time.monotonic()

    def _file(self, path: str) -> File:
        """Return a file's bytes, and remember what they were."""
        if path not in self.kept:
            self.kept[path] = self._read(path, glance(path, self.recipe))
            while len(self.kept) > KEPT_FILES or (len(self.kept) > 1 and _size(self.kept) > KEPT_BYTES):
                del self.kept[next(iter(self.kept))]
        return self.kept[path]

    def _read(self, path: str, mark: bytes | Inventory | None) -> File:
        """Read a file; what is remembered of it holds only if it did not change meanwhile."""
        try:
            data = read_file(Path(path), self.recipe.max_file_bytes)
        except Unusable as problem:
            if problem.reason in LASTING:
                self._remember(path, mark, {"reason": problem.reason.value, "detail": problem.detail})
            raise
        file = File(data, content_digest(data).hex())
        self._remember(path, mark, {"content": file.digest, "bytes": len(data)})
        return file

    def _remember(self, path: str, mark: bytes | Inventory | None, meta: Mapping[str, Any]) -> None:
        """Write down what a file held, unless it may have changed since its mark was taken."""
        if isinstance(mark, bytes) and mark not in self.seen and glance(path, self.recipe) == mark:
            self.seen.add(mark)
            self.files.put(mark, {}, meta)


def _size(files: Mapping[str, File]) -> int:
    """Return the bytes of some files."""
    return sum(len(file.data) for file in files.values())


def scan(items: Iterable[Item], recipe: Recipe, shelves: Shelves) -> Generator[Reason | None, None, None]:
    """Scan items and publish what was found, at the latest every minute."""
    size = shelves.shard_bytes
    with shelves.inventories.writer(shard_bytes=size) as inventories, shelves.files.writer(shard_bytes=size) as files:
        scanner = Scanner(recipe, shelves, inventories, files)
        for item in items:
            yield scanner.scan(item)
            if time.monotonic() - scanner.published_s > PUBLISH_EVERY_S:
                scanner.publish()
