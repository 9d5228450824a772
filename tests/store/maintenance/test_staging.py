"""A cache on a node's own disk: what is copied to it, from where it is read then, and what is refused."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import CacheFull
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import MARKER, STAGED
from pipeline.store.format.disk import Disk
from pipeline.store.maintenance.transfer import CacheStaging, Unfit, open_scratch
from pipeline.store.shard_index import IndexState
from tests.store.content import is_right, key_of, put
from tests.store.faulty_disks import FailingDisk
from tests.store.maintenance.damage import overwrite, spoil

NUMBERS = range(30)
HEADER_BYTES = 1 << 16


class NodeDisk(Disk):
    """A disk, whatever the tests' folder is on."""

    def in_memory(self, path):
        return False


@pytest.fixture
def shared(tmp_path):
    cache = CacheFolder(tmp_path / "shared")
    with cache.kind("graph").writer(shard_bytes=2000) as writer:
        put(writer, *NUMBERS, *range(1000, 1010))
    return cache


@pytest.fixture
def node(tmp_path):
    """The folder for scratch files of a node."""
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


def keys_of(numbers):
    return np.unique(np.frombuffer(b"".join(map(key_of, numbers)), "V16"))


def stage(shared, node, numbers=NUMBERS, *, most=10**9, disk=None):
    """Stage records, so many at most; return the scratch and what was done."""
    scratch = open_scratch(node, "name", disk or NodeDisk())
    left = iter(range(most))
    staging = CacheStaging(shared, scratch, shard_bytes=1 << 20, goes_on=lambda: next(left, None) is not None)
    if not staging.is_done():
        for record in staging.take("graph", keys_of(numbers), HEADER_BYTES):
            assert is_right(record, record.key)
        staging.finish()
    return scratch, staging


def test_what_a_job_reads_is_copied_and_read_from_there(shared, node):
    scratch, staging = stage(shared, node)
    assert (staging.records, staging.is_whole) == ({"graph": 30}, True)
    assert staging.bytes == sum(places[0].length for places in shared.kind("graph").locate(list(map(key_of, NUMBERS))))
    own = CacheFolder(scratch.root).kind("graph")
    assert sorted(own.keys()) == sorted(map(key_of, NUMBERS))
    assert (own.stat().shards, own.stat().index) == (1, IndexState.CURRENT)
    store = shared.behind(scratch).kind("graph")
    assert {places[0].layer for places in store.locate(list(map(key_of, NUMBERS)))} == {0}
    assert all(is_right(record, record.key) for record in store.read(map(key_of, [*NUMBERS, 1003])))
    for number in NUMBERS:
        copies = [cache.own("graph").locate([key_of(number)])[0][0] for cache in (shared, scratch)]
        assert copies[0].digest == copies[1].digest
    assert stat.S_IMODE(scratch.root.stat().st_mode) == 0o700


def test_the_next_job_copies_nothing_but_what_a_purge_took(shared, node):
    scratch, _ = stage(shared, node)
    before = sorted(path.name for path in (scratch.root / "graph/shards").iterdir())
    for _ in range(2):
        _, again = stage(shared, node)
        assert again.is_done()
        assert again.bytes == 0
        assert sorted(path.name for path in (scratch.root / "graph/shards").iterdir()) == before
        (scratch.root / MARKER).unlink(missing_ok=True)  # which does no harm
    for path in (scratch.root / "graph/shards").iterdir():
        path.unlink()
    _, again = stage(shared, node)
    assert again.records == {"graph": 30}
    assert again.bytes > 0
    marker = scratch.root / STAGED
    for text in ("", "[]", "{}", "null", '{"graph": [30, 1]}', "[" * 9999):
        overwrite(marker, text.encode())
        assert not again.is_done()


@pytest.mark.parametrize("most", [0, 1, 17])
def test_what_a_job_had_no_time_for_is_copied_by_the_next(shared, node, most):
    scratch, staging = stage(shared, node, most=most)
    assert not staging.is_whole
    assert not (scratch.root / STAGED).exists()
    store = shared.behind(scratch).kind("graph")
    assert all(is_right(record, record.key) for record in store.read(map(key_of, NUMBERS)))
    first_bytes = staging.bytes
    _, again = stage(shared, node)
    assert again.is_whole
    _, at_once = stage(shared, node.parent / "other")
    assert first_bytes + again.bytes == at_once.bytes


def test_what_is_damaged_on_the_node_is_read_from_the_cache(shared, node):
    scratch, _ = stage(shared, node)
    spoil(scratch.root, 3, "graph")
    store = shared.behind(scratch).kind("graph")
    assert is_right(store.get(key_of(3)), key_of(3))
    shutil.rmtree(scratch.root)
    assert is_right(shared.behind(CacheFolder(scratch.root)).kind("graph").get(key_of(4)), key_of(4))


def test_what_the_cache_has_not_or_has_damaged_is_passed_over(shared, node, tmp_path):
    with CacheFolder(tmp_path / "mine").kind("graph").writer() as writer:
        put(writer, 100)
    _, staging = stage(CacheFolder.over(tmp_path / "mine", [shared.root]), tmp_path / "another", [100, 1])
    assert staging.records == {"graph": 2}  # of every layer
    for number in (0, 7, 29):
        spoil(shared.root, number, "graph")
    scratch, staging = stage(shared, node, [*NUMBERS, 500])
    assert staging.records == {"graph": 27}
    assert not staging.is_whole
    assert len(list(scratch.own("graph").keys())) == 27


class SmallDisk(NodeDisk):
    def free_bytes(self, path):
        return 500


class FullDisk(FailingDisk, NodeDisk):
    pass


class MemoryDisk(Disk):
    def in_memory(self, path):
        return True


def test_a_place_without_room_or_of_memory_is_refused(shared, node):
    with pytest.raises(Unfit, match="pipeline-name"):
        stage(shared, node, disk=SmallDisk())
    assert not (node / "pipeline-name/graph").exists()
    with pytest.raises(CacheFull):
        stage(shared, node, disk=FullDisk("write_at", errno.ENOSPC, 12))
    store = shared.behind(CacheFolder(node / "pipeline-name")).kind("graph")
    assert all(is_right(record, record.key) for record in store.read(map(key_of, NUMBERS)))
    with pytest.raises(Unfit):
        open_scratch(node, "other", MemoryDisk())


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system here is known to be memory")
def test_a_file_system_that_is_memory_is_known():
    assert Disk().in_memory(Path("/dev/shm"))
    assert not Disk().in_memory(Path("/proc"))


@pytest.mark.parametrize("lay", ["a link", "others may write", "another's", "a file"])
def test_a_folder_that_others_could_write_is_not_read(node, lay):
    folder = node / "pipeline-name"
    disk = NodeDisk()
    if lay == "a link":
        (node / "elsewhere").mkdir()
        folder.symlink_to(node / "elsewhere")
    elif lay == "others may write":
        folder.mkdir()
        folder.chmod(0o777)
    elif lay == "a file":
        folder.write_text("x")
    elif os.geteuid() == 0:
        folder.mkdir(mode=0o700)
        os.chown(folder, 12345, -1)
    else:
        pytest.skip("only root can give a folder away")
    with pytest.raises(Unfit, match="pipeline-name"):
        open_scratch(node, "name", disk)
