"""Indexes follow what is published: a late task and a judgement do not read the tables of all tasks before them."""

from __future__ import annotations

import errno
import logging

import numpy as np
import pytest

from pipeline.engine import worker
from pipeline.graphs import make_graphs as graph
from pipeline.graphs.item_graph import GraphRecipe
from pipeline.journal.run_folder import runs_in
from pipeline.keys import content_digest
from pipeline.records import Item, Part, Reason, Role
from pipeline.store import store
from pipeline.store.cache_folder import CacheFolder, update_indexes
from pipeline.structures import scan_items as scan
from pipeline.structures.inventory import ScanRecipe
from pipeline.structures.scan_items import ScanShelves
from pipeline.structures.synthetic import complex_pdb
from tests.store.faulty_disks import FailingDisk
from tests.testkit.project import make_project, settle


def put(cache: CacheFolder, kind: str, first: int, count: int) -> None:
    """Publish a shard."""
    with cache.kind(kind).writer() as writer:
        for number in range(first, first + count):
            writer.put(content_digest(number.to_bytes(16, "big")), {"a": np.zeros(2, np.float32)}, {})


def counts(cache: CacheFolder, kind: str) -> tuple[int, int]:
    """Return how many records an index has, and how many it lacks."""
    return cache.kind(kind).ask(lambda snapshot: snapshot.counts)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_UNINDEXED_RECORDS", 10)
    monkeypatch.setattr(store, "_UNINDEXED_SHARE", 0.5)


@pytest.mark.usefixtures("few")
def test_an_index_is_written_when_it_lacks_much_and_ever_more_rarely_as_it_grows(tmp_path):
    cache, seen = CacheFolder(tmp_path / "cache"), []
    for turn in range(8):
        put(cache, "scan", 10 * turn, 10)
        update_indexes(cache, ["scan", "graph"], far_behind=True)
        seen.append(counts(cache, "scan"))
    assert seen == [(0, 10), (20, 0), (20, 10), (40, 0), (40, 10), (40, 20), (70, 0), (70, 10)]
    assert not (tmp_path / "cache/graph").exists(), "of what nobody has made nothing is made"
    update_indexes(cache, ["scan"])
    assert counts(cache, "scan") == (80, 0)


def test_an_index_that_lacks_nothing_is_not_written_again(tmp_path):
    cache = CacheFolder(tmp_path / "cache")
    put(cache, "scan", 0, 5)
    update_indexes(cache, ["scan"])
    before = cache.kind("scan").layout.index.stat()
    update_indexes(cache, ["scan"])
    update_indexes(cache, ["scan"], far_behind=True)
    after = cache.kind("scan").layout.index.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO, errno.ESTALE])
def test_that_an_index_cannot_be_written_is_no_failure(tmp_path, number, caplog):
    put(CacheFolder(tmp_path / "cache"), "scan", 0, 5)
    put(CacheFolder(tmp_path / "cache"), "graph", 0, 5)
    cache = CacheFolder(tmp_path / "cache", FailingDisk("write_at", number))
    with caplog.at_level(logging.WARNING):
        update_indexes(cache, ["graph", "scan"])
    assert [record.args[0] for record in caplog.records if record.args] == ["graph", "scan"]
    assert counts(cache, "scan") == (0, 5)


def test_a_worker_brings_an_index_up_to_date_that_lacks_much(pipeline, tmp_path, monkeypatch):
    make_project(tmp_path, 1)
    assert pipeline("submit", "--stage", "scan", "--executor", "local", "--follow").code == 0
    index = tmp_path / "cache/scan/index.bin"
    index.unlink()
    words = [str(runs_in(tmp_path / "runs")[-1].path), "scan", "0"]
    monkeypatch.setattr("pipeline.engine.worker.FORWARDED", ())
    assert worker.main(words) == 0
    assert not index.exists(), "it lacks little"
    monkeypatch.setattr(store, "_UNINDEXED_RECORDS", 0)
    assert worker.main(words) == 0
    assert counts(CacheFolder(tmp_path / "cache"), "scan") == (1, 0)


def test_a_copy_of_a_refused_file_is_refused_after_the_first_was_published(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FLUSH_EVERY_RECORDS", 1)
    cache, paths = CacheFolder(tmp_path / "cache"), [tmp_path / f"{number}.pdb" for number in range(3)]
    for path in paths:
        path.write_text("HEADER    without atoms\nEND\n")
    settle(tmp_path)
    items = [Item(path.stem, parts=(Part(Role.COMPLEX, str(path)),)) for path in paths]
    shelves = ScanShelves(cache.kind("scan"), cache.kind("files"), 1 << 20)
    assert list(scan.scan_items(items, ScanRecipe(), shelves)) == [Reason.NO_ATOMS] * 3


@pytest.mark.usefixtures("few")
def test_a_task_brings_indexes_up_to_date_while_it_works(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "FLUSH_EVERY_S", 0.0)
    cache, paths = CacheFolder(tmp_path / "cache"), [tmp_path / f"{number}.pdb" for number in range(14)]
    for number, path in enumerate(paths):
        path.write_bytes(complex_pdb(number, 20, 20))
    settle(tmp_path)
    items = [Item(path.stem, parts=(Part(Role.COMPLEX, str(path)),)) for path in [*paths, *paths]]
    shelves = ScanShelves(cache.kind("scan"), cache.kind("files"), 1 << 20)
    assert list(scan.scan_items(items, ScanRecipe(), shelves)) == [None] * 28
    assert list(graph.graph(items, ScanRecipe(), GraphRecipe(), cache.kind("graph"), 1 << 20)) == [None] * 28
    for kind in ("scan", "files", "graph"):
        assert counts(cache, kind) == (11, 3), "each record was made once, though it is remembered only until published"
