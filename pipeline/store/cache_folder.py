"""A folder of stores, one for each kind of record; it can be laid over other caches, which are only read."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.command_line import UPGRADE, Command, quoted
from pipeline.errors import CacheDamaged, CacheFull, CacheUnusable, JobFailed, RecordMissing
from pipeline.files import whose
from pipeline.keys import recipe_key, recipe_tag
from pipeline.store.format.cache_layout import (
    EXPORT,
    MANIFEST,
    MARKER,
    PARTIAL_SUFFIX,
    REPORTS,
    STAGED,
    USERS,
    KindLayout,
)
from pipeline.store.format.disk import Disk, lay_over, publish_file
from pipeline.store.store import Layer, Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

log = logging.getLogger(__name__)

CACHE_FORMAT = 1
RECIPES = "recipes"  # the kind of the records that describe recipes
_MAY_BE_THERE = {"README.md", ".gitignore", "lost+found", REPORTS, USERS, MANIFEST, EXPORT, STAGED}
_KIND = re.compile(r"[a-z][a-z0-9_-]*")
_MARKER_BYTES = 4096
_MARKED = {"format": CACHE_FORMAT, "made_by": "pipeline"}
ELSEWHERE = lay_over([])
WITHOUT = Command.of("config show", then="   (cache.under: list existing caches, or --set cache.under=[])")


@dataclass(frozen=True, slots=True)
class RecipeStat:
    """A recipe, and how many records were made by it."""

    recipe: Mapping[str, Any]
    records: int
    bytes: int


class CacheFolder:
    """A folder that holds stores, one per kind of record.

    Opening it changes nothing; the first write makes the folder and its marker. It can be laid over other caches:
    records are looked up in those `ahead` of it, in it, then in those `under` it; all else concerns this folder alone.
    """

    def __init__(
        self,
        root: Path,
        disk: Disk | None = None,
        *,
        ahead: Sequence[CacheFolder] = (),
        under: Sequence[CacheFolder] = (),
    ) -> None:
        self.root = root
        self.disk = disk or Disk()
        self.ahead, self.under = tuple(ahead), tuple(under)
        self.left_out: tuple[CacheUnusable, ...] = ()  # why caches that were to be under this one are not
        self._marked = self._is_cache()

    @classmethod
    def over(cls, root: Path, under: Iterable[Path], disk: Disk | None = None) -> CacheFolder:
        """Open a cache laid over others, which are only read; those that cannot be used are `left_out`."""
        layers, left_out = list[CacheFolder](), list[CacheUnusable]()
        for path in under:
            try:
                layers.append(cls._beneath(path, root, disk))
            except CacheUnusable as error:
                left_out.append(error)
        cache = cls(root, disk, under=layers)
        cache.left_out = tuple(left_out)
        return cache

    def behind(self, first: CacheFolder) -> CacheFolder:
        """Return this cache with another one ahead of it, in which records are looked up first."""
        return CacheFolder(self.root, self.disk, ahead=(first, *self.ahead), under=self.under)

    def kind(self, kind: str) -> Store:
        """Return the store of this kind's records."""
        layers = [folder.layer(kind) for folder in (*self.ahead, self, *self.under)]
        return Store(layers, len(self.ahead), self.prepare)

    def own(self, kind: str) -> Store:
        """Return the store of this kind's records in this very folder, whatever it is laid over."""
        return Store([self.layer(kind)], 0, self.prepare)

    def layer(self, kind: str) -> Layer:
        """Return what looks up records of this kind in this very folder."""
        if not _KIND.fullmatch(kind):
            raise ValueError(f"{kind!r} is not a valid kind of record")
        return Layer(self.disk, KindLayout(self.root / kind))

    def describe(self, kind: str, recipe: Mapping[str, Any]) -> None:
        """Store the recipe by which records of a kind are made, for reports."""
        key, store = recipe_key("recipe", {"kind": kind, "recipe": recipe}), self.own(RECIPES)
        if not store.has_whole(key):
            with store.writer() as writer:
                writer.put(key, {}, {"kind": kind, "recipe": dict(recipe)})

    def described(self) -> Iterator[tuple[bytes, str, Mapping[str, Any]]]:
        """Yield each stored recipe: the key of its record, the kind of records it makes, and the recipe."""
        store = self.own(RECIPES)
        for key in store.keys():  # noqa: SIM118 - a store is no mapping
            try:
                meta = store.get(key).meta
            except (CacheDamaged, RecordMissing):  # the next run describes it again
                continue
            kind, recipe = meta.get("kind"), meta.get("recipe")
            if isinstance(kind, str) and isinstance(recipe, dict):  # else a validation of what records say names it
                yield key, kind, recipe

    def recipes(self, kind: str) -> list[RecipeStat]:
        """Return how much there is of each stored recipe of a kind, most records first."""
        described = [recipe for _, of_kind, recipe in self.described() if of_kind == kind]
        tags = [recipe_tag(kind, recipe) for recipe in described]
        tagged = self.own(kind).tally(tags).tagged
        stats = (RecipeStat(recipe, *tagged[tag]) for recipe, tag in zip(described, tags, strict=True))
        return sorted((recipe for recipe in stats if recipe.records), key=lambda recipe: -recipe.records)

    @property
    def is_there(self) -> bool:
        """Whether a cache is in the folder already, be it an empty one."""
        return self._marked or bool(self.kinds())

    def kinds(self) -> list[str]:
        """Return the kinds that have a folder."""
        try:
            names = self.disk.list_folder(self.root)
            return sorted(name for name in names if _KIND.fullmatch(name) and (self.root / name).is_dir())
        except OSError as error:
            raise self._unreadable(error) from error

    @classmethod
    def _beneath(cls, path: Path, root: Path, disk: Disk | None) -> CacheFolder:
        """Open a cache that is only read; raise CacheUnusable where there is none."""
        try:
            if path.resolve() == root.resolve():
                raise CacheUnusable("cache.under must not contain the cache itself", where=str(path), remedy=WITHOUT)
            cache = cls(path, disk)
            if not (cache._marked or cache.kinds()):
                raise cache._unusable("cache not found")
        except CacheUnusable as error:
            remedy = WITHOUT if error.next == ELSEWHERE else error.next
            raise CacheUnusable(error.what, where=error.where, remedy=remedy) from error
        return cache

    def _is_cache(self) -> bool:
        """Return whether the folder is marked as a cache; raise CacheUnusable if it can never become one."""
        try:
            for _ in range(2):  # another process may write the marker between two looks
                with suppress(FileNotFoundError):
                    self._check_format(self.disk.read_start(self.root / MARKER, _MARKER_BYTES))
                    return True
                names = self.disk.list_folder(self.root)
                if all(name in _MAY_BE_THERE or name.endswith(PARTIAL_SUFFIX) or self._is_kind(name) for name in names):
                    return False  # it is empty, or a purge has taken only the marker of a cache
        except OSError as error:
            raise self._unreadable(error) from error
        raise self._unusable("the folder is neither a cache nor empty")

    def _is_kind(self, name: str) -> bool:
        layout = KindLayout(self.root / name)
        return bool(_KIND.fullmatch(name)) and (layout.shards.is_dir() or layout.index.is_file())

    def _check_format(self, text: bytes) -> None:
        try:
            version = json.loads(text)["format"]
        except (ValueError, TypeError, KeyError, RecursionError):
            version = None
        if type(version) is not int:
            raise self._unmarked()
        if version > CACHE_FORMAT:
            raise self._unusable(f"the cache was written by a newer pipeline (format {version})", UPGRADE)

    def _unmarked(self) -> CacheUnusable:
        """Return the error for an unreadable marker; where records are, its remedy keeps them."""
        names = [name for name in self.disk.list_folder(self.root) if name != MARKER]
        if not any(self._is_kind(name) for name in names):
            return self._unusable(f"{MARKER} cannot be read, so this may not be a cache")
        marker = quoted(self.root / MARKER)
        remedy = f"rm -f {marker} && echo '{json.dumps(_MARKED)}' > {marker}   (no record is rebuilt)"
        return self._unusable(f"{MARKER} is damaged; otherwise the folder looks like a cache", remedy)

    def prepare(self) -> None:
        """Make the folder a cache, unless it is one; several processes may do so at once."""
        if self._marked:
            return
        publish_file(self.disk, self.root / MARKER, json.dumps(_MARKED).encode())  # all write the same
        self._marked = True

    def _unreadable(self, error: OSError) -> CacheUnusable:
        known = whose(Path(error.filename)) if isinstance(error, PermissionError) and error.filename else ""
        what = f"the cache cannot be read: {error.strerror or error}" + (f"; {known}" if known else "")
        return self._unusable(what, f"ls -ld {quoted(self.root)}")

    def _unusable(self, what: str, remedy: str | Command = ELSEWHERE) -> CacheUnusable:
        return CacheUnusable(what, where=str(self.root), remedy=remedy)


def update_indexes(cache: CacheFolder, kinds: Iterable[str], *, far_behind: bool = False) -> None:
    """Write the indexes that are not up to date, or only those that are `far_behind`."""
    for kind in sorted(kinds):
        if (cache.root / kind).is_dir():
            update_index(cache.own(kind), far_behind=far_behind)


def update_index(store: Store, *, far_behind: bool = False) -> None:
    """Write a store's index if it is not up to date, or only if it is `far_behind`; log where it cannot be written.

    A late task would else read the tables of all tasks before it.
    """
    try:
        if far_behind or not store.is_indexed():
            store.write_index(far_behind=far_behind)
    except (CacheUnusable, CacheFull, JobFailed) as error:  # the last: whatever else a disk does not do
        log.warning("the index of %s could not be written: %s", store.kind, error.what)
