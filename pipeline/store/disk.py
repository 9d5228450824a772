"""The few file system steps that the store takes, in one place so that tests can make any of them go wrong."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_GROUP_READ = stat.S_IRUSR | stat.S_IRGRP
_GROUP_ENTER = _GROUP_READ | stat.S_IXUSR | stat.S_IXGRP
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_NO_LINKS_HERE = {errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class Disk:
    """A real disk; a test's disk overrides the step that it wants to see fail."""

    def open_new(self, path: Path) -> int:
        """Create a file that did not exist, for writing and reading back."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open_read(self, path: Path) -> int:
        """Open a file for reading."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        """Close an open file."""
        os.close(fd)

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        """Return `length` bytes from `offset` on, fewer only where the file ends."""
        data = os.pread(fd, length, offset)
        if len(data) in (0, length):
            return data
        return data + self.read_at(fd, length - len(data), offset + len(data))

    def read_into(self, fd: int, buffer: bytearray, offset: int) -> int:
        """Read once into `buffer` and return how many bytes came; 0 is the end of the file."""
        return os.preadv(fd, [buffer], offset)

    def fill(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read into the buffers, one after the other; return how many bytes came, fewer only where the file ends."""
        came = os.preadv(fd, buffers, offset)
        left = sum(map(len, buffers)) - came
        if came == 0 or left == 0:
            return came
        return came + self.fill(fd, _last(buffers, left), offset + came)

    def write_at(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data)
        while view:
            written = os.pwrite(fd, view, offset)
            view, offset = view[written:], offset + written

    def truncate(self, fd: int, length: int) -> None:
        """Cut the file to `length` bytes."""
        os.ftruncate(fd, length)

    def fsync(self, fd: int) -> None:
        """Wait until the file's bytes are on the disk."""
        os.fsync(fd)

    def make_published(self, fd: int) -> None:
        """Make the file read-only: for its owner and group, and for others where the umask let them."""
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        try:
            os.fchmod(fd, _GROUP_READ | (mode & stat.S_IROTH))
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED | {errno.EPERM}:  # a mount with fixed modes is no reason to fail
                raise

    def link(self, source: Path, target: Path) -> None:
        """Give the file a second name that must not exist."""
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        """Move the file over `target`, atomically."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        path.unlink()

    def fsync_folder(self, path: Path) -> None:
        """Wait until the folder's names are on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:  # some network file systems have no such call and need none
                raise
        finally:
            os.close(fd)

    def list_folder(self, path: Path) -> list[str]:
        """Return the names in a folder, in any order; a folder that is not there is empty."""
        try:
            return os.listdir(path)  # noqa: PTH208 - five times as fast, and thousands of shards are common
        except FileNotFoundError:
            return []

    def make_folder(self, path: Path) -> None:
        """Make a folder that the group may enter, and its parents, unless they are there."""
        if path.is_dir():
            return
        self.make_folder(path.parent)
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                raise
            return
        path.chmod(stat.S_IMODE(path.stat().st_mode) | _GROUP_ENTER)

    def exists(self, path: Path) -> bool:
        """Say whether the name is taken."""
        return os.path.lexists(path)

    def size_of(self, path: Path) -> int:
        """Return a file's size by its name."""
        return path.stat().st_size

    def size_of_open(self, fd: int) -> int:
        """Return an open file's size."""
        return os.fstat(fd).st_size

    def same_file(self, one: Path, other: Path) -> bool:
        """Say whether two names are of one file."""
        return one.samefile(other)

    def free_bytes(self, path: Path) -> int:
        """Return what the file system under `path` has free (a quota may allow less)."""
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    def now(self) -> float:
        """Return the seconds of a clock that only goes forward."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)


def _last(buffers: Sequence[memoryview], length: int) -> list[memoryview]:
    """Return the last so many bytes of some buffers."""
    kept: list[memoryview] = []
    for buffer in reversed(buffers):
        kept.insert(0, buffer[max(0, len(buffer) - length) :])
        length -= len(kept[0])
    return kept


def link_or_rename(disk: Disk, source: Path, target: Path) -> None:
    """Publish `source` as `target`, which must not exist, also where the file system refuses links."""
    try:
        disk.link(source, target)
    except FileExistsError:
        if not disk.same_file(source, target):  # the same file: an earlier attempt, or a network retry, was heard
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS_HERE:
            raise
        _rename_new(disk, source, target)


def _rename_new(disk: Disk, source: Path, target: Path) -> None:
    """Rename without overwriting; names are unique, so looking first leaves no race worth a lock."""
    if disk.exists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    disk.rename(source, target)
