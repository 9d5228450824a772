"""A disk that will not write: what is said of it, and who goes on (tests/faults/ has every step and every error)."""

from __future__ import annotations

import errno

import pytest

from pipeline.errors import CacheFull, CacheUnusable, JobFailed
from pipeline.store.cache_folder import CacheFolder
from tests.store.content import is_right, is_undamaged, key_of, put
from tests.store.faulty_disks import FailingDisk, InterruptingDisk, os_error


def open_with(cache, disk):
    return CacheFolder(cache.root, disk).kind("scan")


def partials(cache):
    return list((cache.root / "scan/tmp").iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_what_is_free_and_what_to_type(cache, filled, number):
    with pytest.raises(CacheFull) as caught, open_with(cache, FailingDisk("write_at", number)).writer() as writer:
        put(writer, 5)
    assert "MB free" in str(caught.value)
    assert "pipeline submit --stage all" in str(caught.value)


def test_a_full_disk_that_cannot_tell_what_is_free_is_full_all_the_same(cache, filled):
    class SilentDisk(FailingDisk):
        def free_bytes(self, path):
            raise os_error(errno.ESTALE)

    with pytest.raises(CacheFull, match="the quota is used up"):
        open_with(cache, SilentDisk("write_at", errno.EDQUOT)).write_index()


@pytest.mark.parametrize("after", range(12))
def test_a_disk_that_fills_up_loses_nothing_acknowledged(cache, after):
    store = open_with(cache, FailingDisk("write_at", errno.ENOSPC, after))
    safe = []
    with pytest.raises(CacheFull), store.writer() as writer:  # noqa: PT012 - any of them may fail
        for number in range(12):
            put(writer, number)
            if number % 3 == 2:
                safe += writer.flush()
    again = open_with(cache, None)
    assert again.missing(safe) == []
    assert set(again.keys()) == set(safe)
    assert all(is_right(again.get(key), key) for key in safe)


@pytest.mark.parametrize("step", range(1, 12))
@pytest.mark.parametrize("moment", ["before", "halfway"])
@pytest.mark.parametrize(
    ("header_bytes", "numbers"), [(64, [5]), (1500, [5, 6]), (10_000, [5, 6])], ids=["exact", "close", "roomy"]
)
def test_ctrl_c_at_any_step_keeps_each_record_that_was_put(cache, filled, step, moment, header_bytes, numbers):
    put_keys = []
    writer = open_with(cache, InterruptingDisk(step, moment)).writer(header_bytes=header_bytes)
    with pytest.raises(KeyboardInterrupt), writer:  # noqa: PT012 - the block is what is tested
        for number in numbers:
            put_keys += put(writer, number)
        writer.flush()
        raise KeyboardInterrupt
    store = open_with(cache, None)
    assert store.missing(put_keys) == []
    assert all(is_right(store.get(key), key) for key in put_keys)
    assert is_undamaged(store)
    assert partials(cache) == []


def test_a_writer_can_go_on_once_there_is_room_again(cache, filled):
    disk = FailingDisk("write_at", errno.ENOSPC)
    with open_with(cache, disk).writer() as writer:
        with pytest.raises(CacheFull):
            put(writer, 5)
        disk.step = ""
        keys = put(writer, 5, 6)
        assert writer.flush() == keys


@pytest.mark.parametrize("step", ["rename", "fsync", "write_at"])
def test_a_failed_index_swap_leaves_the_old_index(cache, filled, step):
    filled.write_index()
    before = (cache.root / "scan/index.bin").read_bytes()
    with pytest.raises(CacheFull):
        open_with(cache, FailingDisk(step, errno.ENOSPC)).write_index()
    assert (cache.root / "scan/index.bin").read_bytes() == before
    assert partials(cache) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_read_only_cache_is_read_and_refuses_the_first_write(cache, filled, number):
    store = open_with(cache, FailingDisk("open_new", number))
    assert is_right(store.get(key_of(0)), key_of(0))
    with pytest.raises(CacheUnusable, match="cannot be written"), store.writer() as writer:
        put(writer, 5)
    with pytest.raises(CacheUnusable, match="cannot be written"):
        store.write_index()


def test_no_published_file_is_overwritten_where_links_are_refused(cache, filled, monkeypatch):
    monkeypatch.setattr("pipeline.store.format.disk.unique_stem", lambda: "same")
    for _ in range(2):
        store = open_with(cache, FailingDisk("link", errno.EPERM))
        writer = store.writer()
        put(writer, 5)
        if (cache.root / "scan/shards/same.safetensors").exists():
            with pytest.raises(CacheUnusable, match="stands in the way"):
                writer.flush()
        else:
            writer.flush()
    assert open_with(cache, None).missing([key_of(5)]) == []


def test_a_link_that_was_made_although_an_error_came_back_counts(cache, filled):
    class ForgetfulDisk(FailingDisk):
        def link(self, source, target):
            super().link(source, target)
            super().link(source, target)  # as a network file system does that sends a lost request twice

    with open_with(cache, ForgetfulDisk("", 0)).writer() as writer:
        keys = put(writer, 5)
        assert writer.flush() == keys


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_was_renamed_although_an_error_came_back_counts(cache, filled, has_links):
    class ForgetfulDisk(FailingDisk):
        def rename(self, source, target):
            super().rename(source, target)
            super().rename(source, target)  # as a network file system does that sends a lost request twice

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

    with pytest.raises(JobFailed, match="the disk failed while writing"):
        open_with(cache, LosingDisk("", 0)).write_index()
    with pytest.raises(JobFailed), open_with(cache, LosingDisk("link", errno.EPERM)).writer() as writer:
        put(writer, 5)


def test_a_folder_that_cannot_be_listed_is_one_clear_error(cache, filled):
    class ClosedDisk(FailingDisk):
        def list_folder(self, path):
            raise os_error(errno.EACCES)

    with pytest.raises(CacheUnusable, match="Permission denied"):
        open_with(cache, ClosedDisk("", 0)).missing([key_of(0)])


def test_an_index_that_cannot_be_read_is_done_without(cache, filled):
    filled.write_index()
    index_bytes = (cache.root / "scan/index.bin").stat().st_size

    class BadSectorDisk(FailingDisk):
        def read_at(self, fd, length, offset):
            if self.size_of_open(fd) == index_bytes and offset:
                raise os_error(errno.EIO)
            return super().read_at(fd, length, offset)

    assert open_with(cache, BadSectorDisk("", 0)).missing([key_of(0), key_of(9)]) == [key_of(9)]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_shard_that_cannot_be_opened_is_absent_or_an_error(cache, filled, number):
    store = open_with(cache, FailingDisk("open_read", number, after=2))
    with pytest.raises(Exception, match=key_of(0).hex()):
        store.get(key_of(0))


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
