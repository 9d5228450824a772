"""A data set that every test of this folder may read."""

from __future__ import annotations

import pytest

from pipeline.store.cache_folder import CacheFolder
from tests.training.items.content import Made, graph_of, made


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(CacheFolder(tmp_path_factory.mktemp("items") / "cache"), [graph_of(seed) for seed in range(24)])
