"""Any step of the disk fails, at any time: one clear error or success, nothing lost, and trying again finishes."""

from __future__ import annotations

import errno
from contextlib import suppress

import pytest

from pipeline.errors import CacheFull
from pipeline.store.cache_folder import CacheFolder
from tests.faults.failing import Failure, complaints_about, failures, steps_of
from tests.faults.judged import KIND, aftermath
from tests.faults.works import WORKS, Work
from tests.store.content import key_of, put
from tests.store.faulty_disks import InterruptingDisk, KillingDisk

pytestmark = pytest.mark.fault


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_a_step_that_fails_is_one_clear_error_and_loses_nothing(work, tmp_path, record_property):
    tried = list(failures(steps_of(work, tmp_path / "counted"), every=False))
    found = [complaints_about(work, failure, tmp_path / f"{number}") for number, failure in enumerate(tried)]
    assert [one for said in found for one in said] == []
    record_property("faults", len(tried))
    assert len(tried) > 10


class HastyInterruptingDisk(InterruptingDisk):
    def fsync(self, fd):
        self._take("fsync")

    def fsync_folder(self, path):
        self._take("fsync_folder")


@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_ctrl_c_at_any_step_of_a_work_loses_and_tears_nothing(work, tmp_path, record_property):
    disk = KillingDisk()
    work.run(tmp_path / "counted", CacheFolder(work.begin(tmp_path / "counted"), disk))
    found, tried = [], 0
    for step in range(1, disk.steps + 1, 1 if disk.steps < 30 else 3):
        for moment in ("before", "halfway"):  # after a step is before the next
            folder, safe = tmp_path / f"{step}-{moment}", set(work.live)
            cache = CacheFolder(work.begin(folder), HastyInterruptingDisk(step, moment))
            with suppress(KeyboardInterrupt):  # a writer that ends writes on, and some steps have no half
                work.run(folder, cache, safe.update)
            found += [f"{one}, {moment} step {step}" for one in aftermath(work, folder, safe)]
            tried += 1
    record_property("faults", tried)
    assert found == []


def _swallow(folder, cache, say):
    try:
        with cache.kind(KIND).writer() as writer:
            put(writer, 0)
    except CacheFull:
        pass
    say([key_of(0)])


def test_who_acknowledges_what_the_disk_refused_is_convicted(tmp_path):
    work = Work("swallow", _swallow, new=range(1))
    found = complaints_about(work, Failure("fsync", errno.ENOSPC, 1, once=True), tmp_path / "cache")
    assert any("lost: " in one for one in found)


def test_who_publishes_after_a_failed_fsync_is_convicted(tmp_path):
    def trust(folder, cache, say):
        fd = cache.disk.open_new(folder / "file")
        with suppress(OSError):
            cache.disk.fsync(fd)
        cache.disk.link(folder / "file", folder / "published")
        cache.disk.close(fd)
        (folder / "file").unlink()
        (folder / "published").unlink()

    found = complaints_about(Work("trust", trust), Failure("fsync", errno.EIO, 0, once=True), tmp_path / "cache")
    assert any("trusted: " in one for one in found)
