from __future__ import annotations

import pytest

from pipeline.store.cache_folder import CacheFolder
from tests.store.content import put
from tests.store.maintenance.damage import fill


@pytest.fixture
def cache(tmp_path):
    return CacheFolder(tmp_path / "cache")


@pytest.fixture
def filled(cache):
    """A store with three records in one shard."""
    store = cache.kind("scan")
    with store.writer() as writer:
        put(writer, 0, 1, 2)
    return store


@pytest.fixture
def shard(filled, tmp_path):
    (path,) = (tmp_path / "cache/scan/shards").iterdir()
    return path


@pytest.fixture
def store(cache):
    return cache.kind("scan")


@pytest.fixture
def shards(store):
    """Return the names of three shards, one record of which is in two of them."""
    names = fill(store, range(6), range(6, 12), [0, *range(12, 16)])
    store.write_index()
    return names
