"""Any step of the disk fails, at any time: one clear error or success, nothing lost, and trying again finishes."""

from __future__ import annotations

import errno
from contextlib import suppress

import pytest

from pipeline.errors import CacheFull
from tests.faults.failing import Failure, complaints_about, failures, steps_of
from tests.faults.judged import KIND
from tests.faults.works import WORKS, Work
from tests.store.content import key_of, put

pytestmark = pytest.mark.fault


@pytest.mark.nightly
@pytest.mark.parametrize("work", WORKS, ids=lambda work: work.name)
def test_a_step_that_fails_is_one_clear_error_and_loses_nothing(work, tmp_path):
    tried = list(failures(steps_of(work, tmp_path / "counted"), every=False))
    found = [complaints_about(work, failure, tmp_path / f"{number}") for number, failure in enumerate(tried)]
    assert [one for said in found for one in said] == []
    assert len(tried) > 10


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
