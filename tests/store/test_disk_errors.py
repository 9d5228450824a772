"""A disk that will not write: what is said of it, and who goes on (tests/faults/ has every step and every error)."""

from __future__ import annotations

import errno
import shutil

import pytest

from pipeline.errors import CacheFull, CacheUnusable, JobFailed
from pipeline.store.cache_folder import CacheFolder
from tests.store.content import is_right, is_undamaged, key_of, put
from tests.store.faulty_disks import FailingDisk, InterruptingDisk, os_error
from tests.store.maintenance.damage import BadSectorDisk


def open_with(cache, disk):
    return CacheFolder(cache.root, disk).kind("scan")


def partials(cache):
    return list((cache.root / "scan/tmp").iterdir())


class UnsureDisk(FailingDisk):
    """A full disk that cannot say what is free."""

    def free_bytes(self, path):
        raise os_error(errno.ESTALE)


@pytest.mark.parametrize("disk", [FailingDisk, UnsureDisk])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_what_to_type(cache, filled, disk, number):
    with pytest.raises(CacheFull) as caught, open_with(cache, disk("write_at", number)).writer() as writer:
        put(writer, 5)
    assert "pipeline submit" in caught.value.remedy
    assert str(cache.root) in caught.value.where


@pytest.mark.parametrize(
    ("header_bytes", "numbers"), [(64, [5]), (1500, [5, 6]), (10_000, [5, 6])], ids=["exact", "close", "roomy"]
)
def test_ctrl_c_at_any_step_keeps_each_record_that_was_put(cache, filled, tmp_path, header_bytes, numbers):
    for step in range(1, 12):
        for moment in ("before", "halfway"):
            there = CacheFolder(shutil.copytree(cache.root, tmp_path / f"{step}-{moment}"))
            keys = []
            writer = open_with(there, InterruptingDisk(step, moment)).writer(header_bytes=header_bytes)
            with pytest.raises(KeyboardInterrupt), writer:  # noqa: PT012 - the block is what is tested
                for number in numbers:
                    keys += put(writer, number)
                writer.flush()
                raise KeyboardInterrupt
            store = open_with(there, None)
            assert store.missing(keys) == [], (step, moment)
            assert all(is_right(store.get(key), key) for key in keys)
            assert is_undamaged(store)
            assert partials(there) == []


def test_no_published_file_is_overwritten_where_links_are_refused(cache, filled, monkeypatch):
    monkeypatch.setattr("pipeline.store.format.disk.unique_stem", lambda: "same")
    for _ in range(2):
        store = open_with(cache, FailingDisk("link", errno.EPERM))
        writer = store.writer()
        put(writer, 5)
        if (cache.root / "scan/shards/same.safetensors").exists():
            with pytest.raises(CacheUnusable):
                writer.flush()
        else:
            writer.flush()
    assert open_with(cache, None).missing([key_of(5)]) == []


class ForgetfulDisk(FailingDisk):
    """A network file system that sends a request twice whose answer was lost."""

    def link(self, source, target):
        super().link(source, target)
        super().link(source, target)

    def rename(self, source, target):
        super().rename(source, target)
        super().rename(source, target)


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_was_published_although_an_error_came_back_counts(cache, filled, has_links):
    with open_with(cache, ForgetfulDisk("" if has_links else "link", errno.EPERM)).writer() as writer:
        keys = put(writer, 5)
        assert writer.flush() == keys
    store = open_with(cache, ForgetfulDisk("", 0))
    store.write_index()
    assert store.is_indexed()
    assert partials(cache) == []


def test_a_rename_that_was_not_made_is_an_error(cache, filled):
    class LosingDisk(FailingDisk):
        def rename(self, source, target):
            source.unlink()
            super().rename(source, target)

    with pytest.raises(JobFailed):
        open_with(cache, LosingDisk("", 0)).write_index()
    with pytest.raises(JobFailed), open_with(cache, LosingDisk("link", errno.EPERM)).writer() as writer:
        put(writer, 5)


def test_an_index_that_cannot_be_read_is_done_without(cache, filled):
    filled.write_index()
    disk = BadSectorDisk("index.bin", 1, 1 << 20)
    assert open_with(cache, disk).missing([key_of(0), key_of(9)]) == [key_of(9)]


def test_an_index_that_another_host_replaced_is_opened_again(cache, filled):
    filled.write_index()

    class StaleOnce(FailingDisk):
        def read_at(self, fd, length, offset):
            try:
                return super().read_at(fd, length, offset)
            except OSError:
                self.step = ""
                raise

    disk = StaleOnce("", errno.ESTALE)
    store = open_with(cache, disk)
    store.refresh()
    disk.step = "read_at"
    assert store.missing([key_of(0), key_of(9)]) == [key_of(9)]
    assert disk.step == ""
