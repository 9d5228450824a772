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
    from contextlib import AbstractContextManager
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
            with suppress(OSError):  # of bytes that are on the disk already, or that nobody will read
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


def remove(disk: Disk, path: Path) -> None:
    """Remove a file of the cache; one that is gone already is as good as removed."""
    try:
        disk.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        what = f"a file of the cache cannot be removed: {error.strerror or error}"
        remedy = f"ls -ld {path.parent}   (whoever may write there can clean it)"
        raise CacheUnusable(what, where=str(path), remedy=remedy) from error


def write_refused(disk: Disk, path: Path, error: OSError) -> PipelineError:
    """Say for people why the disk would not write."""
    where, reason = str(path), error.strerror or str(error)
    if error.errno in _FULL:
        what = f"{_FULL[error.errno]}{_free(disk, path)}"
        remedy = "pipeline submit --stage all   (once there is room; what is finished is kept)"
        return CacheFull(what, where=where, remedy=remedy)
    if error.errno in _READ_ONLY:
        remedy = f"ls -ld {_there(disk, path.parent)}   or   pipeline submit --stage all --set cache.root=FOLDER"
        return CacheUnusable(f"the cache cannot be written here: {reason}", where=where, remedy=remedy)
    if isinstance(error, NotADirectoryError | FileExistsError):
        return CacheUnusable(f"a file stands in the way: {reason}", where=where, remedy=f"ls -ld {path}")
    return JobFailed(f"the disk failed while writing: {reason}", where=where, remedy=f"ls -ld {path}")


@contextmanager
def refused_as(what: str, remedy: str) -> Iterator[None]:
    """Say of a place where one may not write what it is for whoever works on it, and how to go on."""
    try:
        yield
    except CacheUnusable as error:
        cause = error.__cause__
        if not (isinstance(cause, OSError) and cause.errno in _READ_ONLY):
            raise
        raise CacheUnusable(f"{what}: {cause.strerror or cause}", where=error.where, remedy=remedy) from cause


def ask_owner(folder: Path) -> AbstractContextManager[None]:
    """Say of a cache in which one may not write whom to ask: another one would not do what was asked for."""
    remedy = f"ls -ld {folder}   (ask its owner, if you may not write there)"
    return refused_as("the cache cannot be written here", remedy)


def _there(disk: Disk, folder: Path) -> Path:
    """Return a folder, or the next above that is there."""
    return folder if disk.exists(folder) or folder == folder.parent else _there(disk, folder.parent)


def _free(disk: Disk, path: Path) -> str:
    """Say how much is free, if the disk that just failed can tell."""
    with suppress(OSError):
        return f": {disk.free_bytes(path) / 1e6:,.1f} MB free on this file system"
    return ""
