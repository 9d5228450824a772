"""Keeping indexes up to date: none is needed, so that not being able to write one is no failure.

But what an index lacks is read from tables, into the memory of every process that looks something up.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pipeline.errors import CacheFull, CacheUnusable, JobFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pipeline.store.cache_folder import Cache
    from pipeline.store.store import Store

log = logging.getLogger(__name__)


def bring_up(cache: Cache, kinds: Iterable[str]) -> None:
    """Write the indexes that lack anything."""
    _for_each(cache, kinds, lambda store: None if store.is_indexed() else store.write_index())


def relieve(cache: Cache, kinds: Iterable[str]) -> None:
    """Write the indexes that lack much: who begins a late task must not read the tables of all tasks before it."""
    _for_each(cache, kinds, lambda store: store.index_if_behind())


def _for_each(cache: Cache, kinds: Iterable[str], work: Callable[[Store], None]) -> None:
    for kind in sorted(kinds):
        try:
            if (cache.root / kind).is_dir():
                work(cache.own(kind))
        except (CacheUnusable, CacheFull, JobFailed) as error:  # the last: whatever else a disk does not do
            log.warning("the index of %s stays behind: %s", kind, error.what)
