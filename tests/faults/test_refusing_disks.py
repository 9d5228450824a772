"""A disk that is only read, and permissions that change under a process: refused with the reason, and served on."""

from __future__ import annotations

import errno
from contextlib import suppress

import pytest

from pipeline.errors import CacheUnusable
from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from tests.faults.judged import KIND, served
from tests.faults.recorded import tree_of
from tests.faults.works import NAME, WORKS
from tests.store.content import key_of, put
from tests.store.faulty_disks import CHANGES, os_error

pytestmark = pytest.mark.fault


class ReadOnlyDisk(Disk):
    """A file system that is mounted to be read."""


def _refuse(*arguments):
    raise os_error(errno.EROFS)


for _step in {*CHANGES} - {"make_folder"}:
    setattr(ReadOnlyDisk, _step, _refuse)


def refused_and_served(work, folder, disk):
    """Do a work where nothing can be written: it ends with the reason, or had nothing to write; all is served on."""
    before = tree_of(folder)
    with suppress(CacheUnusable):  # any other error is a bug
        work.run(folder, CacheFolder(folder / NAME, disk))
    assert tree_of(folder) == before
    store = CacheFolder(folder / NAME, disk).kind(KIND)
    assert all(served(store, key) for key in work.live)


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_a_disk_that_is_only_read_is_served_from_and_named(work, tmp_path):
    work.begin(tmp_path)
    refused_and_served(work, tmp_path, ReadOnlyDisk())


@pytest.mark.parametrize("lost", ["shards", "tmp"])
@pytest.mark.parametrize("mode", [0o555, 0], ids=["read only", "closed"])
def test_permissions_lost_half_way_cost_nothing_that_was_acknowledged(unprivileged, lost, mode):
    store = CacheFolder(unprivileged / NAME).kind(KIND)
    folder = store.layout.folder / lost
    with store.writer() as writer:
        put(writer, 0, 1)
        safe = writer.flush()
        folder.chmod(mode)
        with pytest.raises(CacheUnusable, match="Permission denied"):  # noqa: PT012 - any of them may fail
            put(writer, 2, 3)
            writer.flush()
        if lost == "tmp" or mode:
            assert all(served(CacheFolder(unprivileged / NAME).kind(KIND), key) for key in safe)
        folder.chmod(0o755)
        put(writer, 2, 3)
        safe += writer.flush()
    after = CacheFolder(unprivileged / NAME).kind(KIND)
    assert all(served(after, key) for key in safe)
    assert set(safe) == {key_of(number) for number in range(4)}
