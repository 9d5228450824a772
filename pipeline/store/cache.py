"""The cache folder: what makes it one, and the stores in it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import CacheDamaged, CacheUnusable, RecordMissing
from pipeline.keys import recipe_key, recipe_tag
from pipeline.store.disk import Disk
from pipeline.store.draft import Draft
from pipeline.store.layout import MARKER, PARTIAL_SUFFIX, KindLayout
from pipeline.store.store import Store

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

CACHE_FORMAT = 1
RECIPES = "recipes"  # the kind of the records that describe recipes
_MAY_BE_THERE = {"README.md", ".gitignore", "lost+found"}
_KIND = re.compile(r"[a-z][a-z0-9_-]*")
_MARKER_BYTES = 4096
ELSEWHERE = "pipeline submit --stage all --set cache.root=FOLDER"


@dataclass(frozen=True, slots=True)
class RecipeStat:
    """A recipe, and what was made by it."""

    recipe: Mapping[str, Any]
    records: int
    bytes: int


class Cache:
    """A folder that holds stores, one per kind of record.

    Opening it changes nothing; the first write makes the folder and its marker.
    """

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root = root
        self._disk = disk or Disk()
        self._marked = self._is_cache()

    def kind(self, kind: str) -> Store:
        """Return the store of this kind's records."""
        if not _KIND.fullmatch(kind):
            raise ValueError(f"{kind!r} cannot name a kind of records")
        return Store(self._disk, KindLayout(self.root / kind), self._prepare)

    def describe(self, kind: str, recipe: Mapping[str, Any]) -> None:
        """Remember by what recipe records of a kind are made, so that people can be told."""
        key, store = recipe_key("recipe", {"kind": kind, "recipe": recipe}), self.kind(RECIPES)
        if not store.has_whole(key):
            with store.writer() as writer:
                writer.put(key, {}, {"kind": kind, "recipe": dict(recipe)})

    def recipes(self, kind: str) -> list[RecipeStat]:
        """Return what there is of each recipe of a kind that was described, most records first."""
        described = self.kind(RECIPES)
        found = []
        for key in described.keys():  # noqa: SIM118 - a store is no mapping
            try:
                meta = described.get(key).meta
            except (CacheDamaged, RecordMissing):  # it is described anew by the next run
                continue
            if meta["kind"] == kind:
                recipe = meta["recipe"]
                found.append(RecipeStat(recipe, *self.kind(kind).tagged(recipe_tag(kind, recipe))))
        return sorted((one for one in found if one.records), key=lambda one: -one.records)

    def kinds(self) -> list[str]:
        """Return the kinds that have a folder."""
        names = self._disk.list_folder(self.root)
        return sorted(name for name in names if _KIND.fullmatch(name) and (self.root / name).is_dir())

    def _is_cache(self) -> bool:
        """Say whether the folder is marked as a cache; if not, it must be one that can become one."""
        try:
            if self._read_marker():
                return True
            if self._is_free():
                return False
            return self._read_marker(required=True)
        except OSError as error:
            remedy = f"ls -ld {self.root}"
            raise self._unusable(f"the cache cannot be read: {error.strerror or error}", remedy) from error

    def _is_free(self) -> bool:
        """Say whether nothing else is here: the folder is empty, or a purge has taken only the marker of a cache."""
        names = self._disk.list_folder(self.root)
        return all(name in _MAY_BE_THERE or name.endswith(PARTIAL_SUFFIX) or self._is_kind(name) for name in names)

    def _is_kind(self, name: str) -> bool:
        """Say whether an entry looks like the folder of a kind."""
        layout = KindLayout(self.root / name)
        return bool(_KIND.fullmatch(name)) and (layout.shards.is_dir() or layout.index.is_file())

    def _read_marker(self, *, required: bool = False) -> bool:
        try:
            fd = self._disk.open_read(self.root / MARKER)
        except FileNotFoundError:
            if required:
                raise self._unusable("the folder is not a cache, and not empty") from None
            return False
        try:
            self._check_format(self._disk.read_at(fd, _MARKER_BYTES, 0))
        finally:
            self._disk.close(fd)
        return True

    def _check_format(self, text: bytes) -> None:
        try:
            version = json.loads(text)["format"]
        except (ValueError, TypeError, KeyError, RecursionError):
            version = None
        if type(version) is not int:
            raise self._unusable(f"{MARKER} cannot be read, so the folder may be no cache")
        if version > CACHE_FORMAT:
            what = f"the cache was written by a newer pipeline (format {version})"
            raise self._unusable(what, "pip install --upgrade pipeline")

    def _prepare(self) -> None:
        """Make the folder a cache, unless it is one; several processes may do so at once."""
        if self._marked:
            return
        draft = Draft(self._disk, self.root)
        draft.write(json.dumps({"format": CACHE_FORMAT, "made_by": "pipeline"}).encode(), 0)
        draft.publish(self.root / MARKER, replace=True)  # all write the same
        self._marked = True

    def _unusable(self, what: str, remedy: str = ELSEWHERE) -> CacheUnusable:
        return CacheUnusable(what, where=str(self.root), remedy=remedy)
