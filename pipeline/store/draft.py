"""A file in the making: written aside, made durable, then published under its final name in one step."""

from __future__ import annotations

import errno
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pipeline.errors import CacheFull, CacheUnusable, JobFailed, PipelineError
from pipeline.store.disk import link_or_rename
from pipeline.store.layout import PARTIAL_SUFFIX, unique_stem

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pipeline.store.disk import Disk

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


class Draft:
    """A temporary file that ends as a published file, or as nothing.

    After any error of the disk it is discarded: what an fsync failed to write must never be trusted to a second one.
    """

    def __init__(self, disk: Disk, folder: Path) -> None:
        self.stem = unique_stem()
        self.path = folder / f"{self.stem}{PARTIAL_SUFFIX}"
        self.open = False
        self._disk = disk
        with self._discarded_on_error():
            disk.make_folder(folder)
            self._fd = disk.open_new(self.path)
            self.open = True

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data` at `offset`."""
        with self._discarded_on_error():
            self._disk.write_at(self._fd, data, offset)

    def read(self, length: int, offset: int) -> bytes:
        """Read back what was written."""
        with self._discarded_on_error():
            return self._disk.read_at(self._fd, length, offset)

    def truncate(self, length: int) -> None:
        """Cut off what lies behind `length`."""
        with self._discarded_on_error():
            self._disk.truncate(self._fd, length)

    def publish(self, target: Path, *, replace: bool = False) -> None:
        """Make the bytes durable, then the name; a new name never overwrites unless `replace` says so."""
        with self._discarded_on_error():
            self._disk.make_folder(target.parent)
            self._disk.fsync(self._fd)
            self._disk.make_published(self._fd)
            (self._disk.rename if replace else self._link)(self.path, target)
            self._disk.fsync_folder(target.parent)
        self.discard()

    def discard(self) -> None:
        """Close the file and remove its temporary name; harmless when it is gone already."""
        if self.open:
            self.open = False
            self._disk.close(self._fd)
        with suppress(OSError):
            self._disk.unlink(self.path)

    def _link(self, source: Path, target: Path) -> None:
        link_or_rename(self._disk, source, target)

    @contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.discard()
            raise write_refused(self._disk, self.path, error) from error


def write_refused(disk: Disk, path: Path, error: OSError) -> PipelineError:
    """Say for people why the disk would not write."""
    where, reason = str(path), error.strerror or str(error)
    if error.errno in _FULL:
        what = f"{_FULL[error.errno]}: {disk.free_bytes(path) / 1e6:,.1f} MB free on this file system"
        remedy = "pipeline submit --stage all   (once there is room; what is finished is kept)"
        return CacheFull(what, where=where, remedy=remedy)
    if error.errno in _READ_ONLY:
        remedy = f"ls -ld {path.parent.parent}   or   pipeline submit --stage all --set cache.root=FOLDER"
        return CacheUnusable(f"the cache cannot be written here: {reason}", where=where, remedy=remedy)
    if isinstance(error, NotADirectoryError | FileExistsError):
        return CacheUnusable(f"a file stands in the way: {reason}", where=where, remedy=f"ls -ld {path}")
    return JobFailed(f"the disk failed while writing: {reason}", where=where, remedy=f"ls -ld {path}")
