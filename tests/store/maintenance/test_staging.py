"""A cache on a node's own disk: what is copied to it, from where it is read then, and what is refused."""

from __future__ import annotations

import errno
import os
import shutil
import stat

import numpy as np
import pytest

from pipeline.errors import CacheFull
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.cache_layout import MARKER, STAGED
from pipeline.store.format.disk import Disk
from pipeline.store.maintenance.staging import CacheStaging, Unfit, open_scratch
from pipeline.store.snapshot import IndexState
from tests.store.content import is_right, key_of, put
from tests.store.faulty_disks import FailingDisk

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


def spoil(root, number):
    store = CacheFolder(root).kind("graph")
    place = store.locate([key_of(number)])[0][0]
    path = store.layout.shard(place.shard)
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[place.offset + 1] ^= 4
    path.write_bytes(content)


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


def test_a_copied_record_is_the_same_bytes(shared, node):
    scratch, _ = stage(shared, node)
    for number in NUMBERS:
        copies = [cache.own("graph").locate([key_of(number)])[0][0] for cache in (shared, scratch)]
        assert copies[0].digest == copies[1].digest


def test_the_next_job_copies_nothing(shared, node):
    scratch, _ = stage(shared, node)
    before = sorted(path.name for path in (scratch.root / "graph/shards").iterdir())
    _, again = stage(shared, node)
    assert again.is_done()
    assert again.bytes == 0
    assert sorted(path.name for path in (scratch.root / "graph/shards").iterdir()) == before


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


def test_what_a_purge_took_of_it_is_copied_again(shared, node):
    scratch, _ = stage(shared, node)
    for path in (scratch.root / "graph/shards").iterdir():
        path.unlink()
    _, again = stage(shared, node)
    assert again.records == {"graph": 30}
    assert again.bytes > 0


def test_a_purge_that_took_its_marker_alone_does_no_harm(shared, node):
    scratch, _ = stage(shared, node)
    (scratch.root / MARKER).unlink()
    _, again = stage(shared, node)
    assert again.is_done()


def test_what_is_damaged_on_the_node_is_read_from_the_cache(shared, node):
    scratch, _ = stage(shared, node)
    spoil(scratch.root, 3)
    store = shared.behind(scratch).kind("graph")
    assert is_right(store.get(key_of(3)), key_of(3))
    shutil.rmtree(scratch.root)
    assert is_right(shared.behind(CacheFolder(scratch.root)).kind("graph").get(key_of(4)), key_of(4))


def test_what_the_cache_has_not_or_has_damaged_is_passed_over(shared, node):
    for number in (0, 7, 29):
        spoil(shared.root, number)
    scratch, staging = stage(shared, node, [*NUMBERS, 500])
    assert staging.records == {"graph": 27}
    assert not staging.is_whole
    assert len(list(scratch.own("graph").keys())) == 27


def test_it_is_copied_from_every_layer(shared, node, tmp_path):
    with CacheFolder(tmp_path / "mine").kind("graph").writer() as writer:
        put(writer, 100)
    scratch, staging = stage(CacheFolder.over(tmp_path / "mine", [shared.root]), node, [100, 1])
    assert staging.is_whole
    assert sorted(scratch.own("graph").keys()) == sorted([key_of(100), key_of(1)])


def test_what_does_not_fit_is_not_begun(shared, node):
    class Small(NodeDisk):
        def free_bytes(self, path):
            return 500

    with pytest.raises(Unfit, match=r"0\.0 MB do not fit in .*pipeline-name"):
        stage(shared, node, disk=Small())
    assert not (node / "pipeline-name/graph").exists()


def test_a_disk_that_fills_up_meanwhile_is_an_error_and_what_is_there_is_right(shared, node):
    class Full(FailingDisk, NodeDisk):
        pass

    with pytest.raises(CacheFull):
        stage(shared, node, disk=Full("write_at", errno.ENOSPC, 12))
    store = shared.behind(CacheFolder(node / "pipeline-name")).kind("graph")
    assert all(is_right(record, record.key) for record in store.read(map(key_of, NUMBERS)))


def test_memory_is_no_place_for_it(node):
    class Memory(Disk):
        def in_memory(self, path):
            return True

    with pytest.raises(Unfit, match="is memory"):
        open_scratch(node, "name", Memory())


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no file system here is known to be memory")
def test_a_file_system_that_is_memory_is_known(tmp_path):
    from pathlib import Path

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


def test_the_folder_is_made_for_this_user_alone(node):
    scratch = open_scratch(node / "deep/er", "name", NodeDisk())
    assert stat.S_IMODE(scratch.root.stat().st_mode) == 0o700


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"graph": [30, 1]}', "[" * 9999])
def test_a_marker_that_does_not_say_what_is_there_is_no_marker(shared, node, text):
    scratch, staging = stage(shared, node)
    marker = scratch.root / STAGED
    marker.unlink()
    marker.write_text(text)
    assert not staging.is_done()
