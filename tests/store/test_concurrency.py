"""Many processes and objects on one store, without locks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from tests.store.content import is_right, key_of, put

ROOT = Path(__file__).parents[2]
WRITER = """
import sys; from pathlib import Path; from tests.store.content import put
from pipeline.store.cache_folder import CacheFolder
store = CacheFolder(Path(sys.argv[1])).kind("scan"); first = int(sys.argv[2])
for number in range(first, first + 60, 10):
    with store.writer() as writer:
        put(writer, *range(number, number + 10))
    store.write_index()
"""


def test_many_processes_write_and_swap_the_index_at_once(tmp_path):
    root = tmp_path / "cache"
    children = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(root), str(first)], cwd=ROOT) for first in (0, 30, 60, 60)
    ]
    assert [child.wait() for child in children] == [0] * 4
    store = CacheFolder(root).kind("scan")
    keys = [key_of(number) for number in range(120)]
    assert store.missing(keys) == []
    assert all(is_right(record, key) for record, key in zip(store.read(keys), keys, strict=True))
    assert store.stat().records == 120
    assert list((root / "scan/tmp").iterdir()) == []


def test_an_index_swapped_between_read_and_swap_loses_nothing(tmp_path):
    def meanwhile():
        other = CacheFolder(tmp_path / "cache").kind("scan")
        with other.writer() as writer:
            put(writer, 2)
        other.write_index()

    class InterruptedDisk(Disk):
        def rename(self, source, target):
            if target.name == "index.bin":
                meanwhile()
            super().rename(source, target)

    store = CacheFolder(tmp_path / "cache", InterruptedDisk()).kind("scan")
    with store.writer() as writer:
        put(writer, 1)
    store.write_index()
    assert CacheFolder(tmp_path / "cache").kind("scan").missing([key_of(1), key_of(2)]) == []


def test_more_shards_than_stay_open_are_read_by_several_threads(tmp_path):
    store = CacheFolder(tmp_path / "cache").kind("scan")
    with store.writer(shard_bytes=1) as writer:
        keys = put(writer, *range(100))
    assert store.stat().shards == 100
    for _ in range(2):
        assert all(is_right(record, key) for record, key in zip(store.read(keys), keys, strict=True))
