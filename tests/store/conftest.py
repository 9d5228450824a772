from __future__ import annotations

import pytest

from pipeline.store.cache import Cache
from tests.store.content import put


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


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
