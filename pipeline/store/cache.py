"""The cache folder: what makes it one, and the stores in it."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import CacheDamaged, CacheUnusable, RecordMissing
from pipeline.keys import recipe_key, recipe_tag
from pipeline.store.disk import Disk
from pipeline.store.draft import Draft
from pipeline.store.layers import Layered
from pipeline.store.layout import EXPORT, MANIFEST, MARKER, PARTIAL_SUFFIX, REPORTS, STAGED, USERS, KindLayout
from pipeline.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

CACHE_FORMAT = 1
RECIPES = "recipes"  # the kind of the records that describe recipes
_MAY_BE_THERE = {"README.md", ".gitignore", "lost+found", REPORTS, USERS, MANIFEST, EXPORT, STAGED}
_KIND = re.compile(r"[a-z][a-z0-9_-]*")
_MARKER_BYTES = 4096
_MARKED = {"format": CACHE_FORMAT, "made_by": "pipeline"}
ELSEWHERE = "pipeline submit --stage all --set cache.root=FOLDER"
WITHOUT = "pipeline config show   (cache.under: name caches that are there, or --set cache.under=[])"


@dataclass(frozen=True, slots=True)
class RecipeStat:
    """A recipe, and what was made by it."""

    recipe: Mapping[str, Any]
    records: int
    bytes: int


class Cache:
    """A folder that holds stores, one per kind of record.

    Opening it changes nothing; the first write makes the folder and its marker. It can be laid over other caches: what
    is looked up is looked for `ahead` of it, in it, and `under` it; what is written, counted and removed is its own.
    """

    def __init__(
        self, root: Path, disk: Disk | None = None, *, ahead: Sequence[Cache] = (), under: Sequence[Cache] = ()
    ) -> None:
        self.root = root
        self.disk = disk or Disk()
        self.ahead, self.under = tuple(ahead), tuple(under)
        self.left_out: tuple[CacheUnusable, ...] = ()  # why caches that were to be under this one are not
        self._marked = self._is_cache()

    @classmethod
    def over(cls, root: Path, under: Iterable[Path], disk: Disk | None = None) -> Cache:
        """Open a cache laid over others, which are only read; those that cannot be used are `left_out`."""
        found, left_out = list[Cache](), list[CacheUnusable]()
        for path in under:
            try:
                found.append(cls._beneath(path, root, disk))
            except CacheUnusable as error:
                left_out.append(error)
        cache = cls(root, disk, under=found)
        cache.left_out = tuple(left_out)
        return cache

    def behind(self, first: Cache) -> Cache:
        """Return this cache with another one ahead of it: what that one has is read from there."""
        return Cache(self.root, self.disk, ahead=(first, *self.ahead), under=self.under)

    def kind(self, kind: str) -> Store:
        """Return the store of this kind's records."""
        if not (self.ahead or self.under):
            return self.own(kind)
        self._check_kind(kind)
        ahead, under = ([layer.own(kind) for layer in layers] for layers in (self.ahead, self.under))
        return Layered(self.disk, KindLayout(self.root / kind), self.prepare, ahead=ahead, under=under)

    def own(self, kind: str) -> Store:
        """Return the store of this kind's records in this very folder, whatever it is laid over."""
        self._check_kind(kind)
        return Store(self.disk, KindLayout(self.root / kind), self.prepare)

    def describe(self, kind: str, recipe: Mapping[str, Any]) -> None:
        """Remember by what recipe records of a kind are made, so that people can be told."""
        key, store = recipe_key("recipe", {"kind": kind, "recipe": recipe}), self.own(RECIPES)
        if not store.has_whole(key):
            with store.writer() as writer:
                writer.put(key, {}, {"kind": kind, "recipe": dict(recipe)})

    def described(self) -> Iterator[tuple[bytes, str, Mapping[str, Any]]]:
        """Yield each recipe that was described: the key of its description, of which kind it is, and what it says."""
        store = self.own(RECIPES)
        for key in store.keys():  # noqa: SIM118 - a store is no mapping
            try:
                meta = store.get(key).meta
            except (CacheDamaged, RecordMissing):  # it is described anew by the next run
                continue
            kind, recipe = meta.get("kind"), meta.get("recipe")
            if isinstance(kind, str) and isinstance(recipe, dict):  # else a validation of what records say names it
                yield key, kind, recipe

    def recipes(self, kind: str) -> list[RecipeStat]:
        """Return what there is of each recipe of a kind that was described, most records first."""
        found = [
            RecipeStat(recipe, *self.own(kind).tagged(recipe_tag(kind, recipe)))
            for _, of_kind, recipe in self.described()
            if of_kind == kind
        ]
        return sorted((one for one in found if one.records), key=lambda one: -one.records)

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
    def _beneath(cls, path: Path, root: Path, disk: Disk | None) -> Cache:
        """Open a cache that is only read; refuse what is none."""
        try:
            if path.resolve() == root.resolve():
                raise CacheUnusable("a cache cannot be under itself", where=str(path), remedy=WITHOUT)
            cache = cls(path, disk)
            if not (cache._marked or cache.kinds()):
                raise cache._unusable("there is no cache")
        except CacheUnusable as error:
            remedy = WITHOUT if error.remedy == ELSEWHERE else error.remedy
            raise CacheUnusable(error.what, where=error.where, remedy=remedy) from error
        return cache

    def _check_kind(self, kind: str) -> None:
        if not _KIND.fullmatch(kind):
            raise ValueError(f"{kind!r} cannot name a kind of records")

    def _is_cache(self) -> bool:
        """Say whether the folder is marked as a cache; if not, it must be one that can become one."""
        try:
            if self._read_marker():
                return True
            if self._is_free(self.disk.list_folder(self.root)):
                return False
            return self._read_marker(required=True)
        except OSError as error:
            raise self._unreadable(error) from error

    def _is_free(self, names: Iterable[str]) -> bool:
        """Say whether nothing else is here: the folder is empty, or a purge has taken only the marker of a cache."""
        return all(name in _MAY_BE_THERE or name.endswith(PARTIAL_SUFFIX) or self._is_kind(name) for name in names)

    def _is_kind(self, name: str) -> bool:
        """Say whether an entry looks like the folder of a kind."""
        layout = KindLayout(self.root / name)
        return bool(_KIND.fullmatch(name)) and (layout.shards.is_dir() or layout.index.is_file())

    def _read_marker(self, *, required: bool = False) -> bool:
        try:
            fd = self.disk.open_read(self.root / MARKER)
        except FileNotFoundError:
            if required:
                raise self._unusable("the folder is not a cache, and not empty") from None
            return False
        try:
            self._check_format(self.disk.read_at(fd, _MARKER_BYTES, 0))
        finally:
            self.disk.close(fd)
        return True

    def _check_format(self, text: bytes) -> None:
        try:
            version = json.loads(text)["format"]
        except (ValueError, TypeError, KeyError, RecursionError):
            version = None
        if type(version) is not int:
            raise self._unmarked()
        if version > CACHE_FORMAT:
            what = f"the cache was written by a newer pipeline (format {version})"
            raise self._unusable(what, "pip install --upgrade pipeline")

    def _unmarked(self) -> CacheUnusable:
        """Return what is to be done about a marker that says nothing: where records are, none needs to be made anew."""
        names = [name for name in self.disk.list_folder(self.root) if name != MARKER]
        if not any(self._is_kind(name) for name in names):
            return self._unusable(f"{MARKER} cannot be read, so the folder may be no cache")
        marker = shlex.quote(str(self.root / MARKER))
        remedy = f"rm {marker}   (the next run writes it again; nothing is computed anew)"
        if not self._is_free(names):  # beside files that are not of a cache, only its marker makes the folder one
            remedy = f"rm -f {marker} && echo '{json.dumps(_MARKED)}' > {marker}   (nothing is computed anew)"
        return self._unusable(f"{MARKER} is damaged; else the folder looks like a cache", remedy)

    def prepare(self) -> None:
        """Make the folder a cache, unless it is one; several processes may do so at once."""
        if self._marked:
            return
        draft = Draft(self.disk, self.root)
        draft.write(json.dumps(_MARKED).encode(), 0)
        draft.publish(self.root / MARKER, replace=True)  # all write the same
        self._marked = True

    def _unreadable(self, error: OSError) -> CacheUnusable:
        return self._unusable(f"the cache cannot be read: {error.strerror or error}", f"ls -ld {self.root}")

    def _unusable(self, what: str, remedy: str = ELSEWHERE) -> CacheUnusable:
        return CacheUnusable(what, where=str(self.root), remedy=remedy)
