"""Every file system call that the store makes, in one place so that tests can make any of them fail."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.command_line import Command, quoted
from pipeline.errors import CacheFull, CacheUnusable, ConfigError, JobFailed, PipelineError
from pipeline.files import SHARED, file_system, user_name, whose
from pipeline.store.format.cache_layout import MARKER, PARTIAL_SUFFIX, unique_stem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

_GROUP_READ = stat.S_IRUSR | stat.S_IRGRP
_GROUP_ENTER = _GROUP_READ | stat.S_IXUSR | stat.S_IXGRP
_MEMORY = {"tmpfs", "ramfs"}
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_NO_LINKS_HERE = {errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


class Disk:
    """The real file system; a test overrides the call that is to fail."""

    def open_new(self, path: Path) -> int:
        """Create a file that did not exist, for writing and reading back."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open_read(self, path: Path) -> int:
        """Open a regular file; anything else is refused, at once: a FIFO would keep its reader waiting."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(errno.ENXIO, "not a regular file", str(path))
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        """Return `length` bytes from `offset` on, fewer only where the file ends."""
        data = os.pread(fd, length, offset)
        if len(data) in (0, length):
            return data
        return data + self.read_at(fd, length - len(data), offset + len(data))

    def read_start(self, path: Path, length: int) -> bytes:
        """Return the first bytes of a file; all of a small one."""
        with reading(self, path) as fd:
            return self.read_at(fd, length, 0)

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
        os.ftruncate(fd, length)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def make_published(self, fd: int) -> None:
        """Make the file read-only: for its owner and group, and for others where the umask let them."""
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        try:
            os.fchmod(fd, _GROUP_READ | (mode & stat.S_IROTH))
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED | {errno.EPERM}:  # a mount with fixed modes is no reason to fail
                raise

    def keeper(self, path: Path) -> str:
        """Return the owner of a file that this user may not remove from a sticky folder; empty if this user may."""
        folder, me = path.parent.stat(), os.geteuid()
        if not folder.st_mode & stat.S_ISVTX or me in (0, folder.st_uid):
            return ""
        owner = path.lstat().st_uid
        return "" if owner == me else user_name(owner)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        """Move the file over `target`, atomically."""
        source.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def fsync_folder(self, path: Path) -> None:
        """Wait until the folder's names are on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:  # some network file systems do not support fsync of a folder
                raise
        finally:
            os.close(fd)

    def list_folder(self, path: Path) -> list[str]:
        """Return the names in a folder, in any order; a folder that is not there is empty."""
        try:
            return os.listdir(path)  # noqa: PTH208 - five times as fast, and thousands of shards are common
        except FileNotFoundError:
            return []

    def links_in(self, path: Path) -> list[str]:
        """Return the names of the symbolic links in a folder; one that is not there has none."""
        try:
            with os.scandir(path) as entries:
                return [entry.name for entry in entries if entry.is_symlink()]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make_folder(self, path: Path) -> None:
        """Make a folder that the group may enter, and its parents, unless they are there."""
        if path.is_dir():
            return
        self.make_folder(path.parent)
        self.new_folder(path)
        with suppress(PermissionError):  # a folder may be writable and not readable
            self.fsync_folder(path.parent)  # else a power loss could remove the folder with all synced files in it

    def new_folder(self, path: Path) -> None:
        """Make one folder that the group may enter, unless another process was quicker; in a group's, the group's."""
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                raise
            return
        shared = path.parent.stat().st_mode & SHARED
        path.chmod(stat.S_IMODE(path.stat().st_mode) | _GROUP_ENTER | (shared if shared == SHARED else 0))

    def make_private_folder(self, path: Path) -> bool:
        """Make a folder that only this user may enter, unless it exists; return whether it is one, and no link."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=stat.S_IRWXU, exist_ok=True)
        status = path.lstat()
        mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
        return mine and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)

    def in_memory(self, path: Path) -> bool:
        """Return whether a folder is on a file system in memory, such as tmpfs; False if unknown."""
        return file_system(path.stat().st_dev) in _MEMORY

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def size_of(self, path: Path) -> int:
        return path.stat().st_size

    def is_plain_file(self, path: Path) -> bool:
        """Return whether a path is a regular file, and not a link or a folder."""
        return stat.S_ISREG(path.lstat().st_mode)

    def is_link(self, path: Path) -> bool:
        return path.is_symlink()

    def times_of(self, path: Path) -> tuple[float, float]:
        """Return a file's mtime and ctime, in seconds since 1970."""
        status = path.lstat()
        return status.st_mtime, status.st_ctime

    def time_in(self, folder: Path) -> float:
        """Return the time by the clock of a writable folder's file system, which may be a server's."""
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime

    def size_of_open(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def same_file(self, path: Path, other: Path) -> bool:
        return path.samefile(other)

    def is_called(self, fd: int, path: Path) -> bool:
        """Return whether an open file has that name."""
        return os.path.samestat(os.fstat(fd), path.stat())

    @contextmanager
    def alone_in(self, folder: Path) -> Iterator[bool]:
        """Lock a folder in the block; yield False where another process holds the lock, True where there are none."""
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            is_alone = True
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                is_alone = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
            yield is_alone
        finally:
            os.close(fd)

    def free_bytes(self, path: Path) -> int:
        """Return what the file system under `path` has free (a quota may allow less)."""
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


@contextmanager
def reading(disk: Disk, path: Path) -> Iterator[int]:
    """Open a file for reading in the block."""
    fd = disk.open_read(path)
    try:
        yield fd
    finally:
        disk.close(fd)


def _last(buffers: Sequence[memoryview], length: int) -> list[memoryview]:
    """Return views of the last `length` bytes of the buffers."""
    tail: list[memoryview] = []
    for buffer in reversed(buffers):
        tail.insert(0, buffer[max(0, len(buffer) - length) :])
        length -= len(tail[0])
    return tail


def link_or_rename(disk: Disk, source: Path, target: Path) -> None:
    """Publish `source` as `target`, which must not exist; by a rename where the file system has no hard links."""
    try:
        disk.link(source, target)
    except FileExistsError:
        if not disk.same_file(source, target):  # the same file: an earlier attempt, or a network retry, succeeded
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS_HERE:
            raise
        if disk.exists(target):  # names are unique, so the check before the rename needs no lock
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        disk.rename(source, target)


FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up"}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


class Draft:
    """A temporary file that is either published or removed.

    After any disk error it is discarded: after a failed fsync, a second one may report success for lost data.
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
        """Read written bytes back."""
        with self._discarded_on_error():
            return self._disk.read_at(self._fd, length, offset)

    def truncate(self, length: int) -> None:
        """Truncate the file to `length` bytes."""
        with self._discarded_on_error():
            self._disk.truncate(self._fd, length)

    def publish(self, target: Path, *, replace: bool = False) -> None:
        """Make the bytes durable, then the name; a new name never overwrites unless `replace` says so."""
        with self._discarded_on_error():
            self._disk.make_folder(target.parent)
            self._disk.fsync(self._fd)
            self._disk.make_published(self._fd)
            try:
                if replace:
                    self._disk.rename(self.path, target)
                else:
                    link_or_rename(self._disk, self.path, target)
            except FileNotFoundError:  # the network sent the request twice, and the second one found the file renamed
                if not self._disk.is_called(self._fd, target):
                    raise
            self._disk.fsync_folder(target.parent)
        self.discard()

    def discard(self) -> None:
        """Close the file and remove its temporary name; harmless when it is gone already."""
        if self.open:
            self.open = False
            with suppress(OSError):  # the bytes are on the disk already, or no longer needed
                self._disk.close(self._fd)
        with suppress(OSError):
            self._disk.unlink(self.path)

    @contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.discard()
            raise write_refused(self._disk, self.path, error) from error


def publish_file(disk: Disk, path: Path, data: bytes) -> None:
    """Write a small file whole, in place of one that is there."""
    draft = Draft(disk, path.parent)
    draft.write(data, 0)
    draft.publish(path, replace=True)


def remove(disk: Disk, path: Path) -> None:
    """Remove a file of the cache; one that is gone already is as good as removed."""
    try:
        disk.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        what = f"a file of the cache cannot be removed: {error.strerror or error}; {whose(path)}"
        remedy = f"ls -ld {quoted(path.parent)}   (someone with write access can clean it)"
        raise CacheUnusable(what, where=str(path), remedy=remedy) from error


def lay_over(caches: Sequence[Path], before: str = "") -> Command:
    """Return the command that makes records in another folder, and reads those that are in these caches."""
    elsewhere = Command.submit("all", before=before).with_settings(("cache.root", "FOLDER"))
    under = ("cache.under", f"[{', '.join(map(str, caches))}]")
    return elsewhere.with_settings(under, then="   (FOLDER receives new records)") if caches else elsewhere


def write_refused(disk: Disk, path: Path, error: OSError) -> PipelineError:
    """Return the error to show for a failed write: disk full, no permission, name taken or disk failure."""
    where, reason = str(path), error.strerror or str(error)
    if error.errno in FULL:
        what = f"{FULL[error.errno]}{room_left(disk, path)}"
        remedy = Command.submit("all", then="   (after freeing space; finished work is kept)")
        return CacheFull(what, where=where, remedy=remedy)
    if error.errno in _READ_ONLY:
        cache = next((folder for folder in path.parents if disk.exists(folder / MARKER)), None)
        remedy = lay_over([cache] if cache else [], before=f"ls -ld {quoted(_there(disk, path.parent))}   or   ")
        what = f"the cache cannot be written here: {reason}; {whose(path.parent)}"
        return CacheUnusable(what, where=where, remedy=remedy)
    if isinstance(error, NotADirectoryError | FileExistsError):
        return CacheUnusable(f"a file is in the way: {reason}", where=where, remedy=f"ls -ld {quoted(path)}")
    return JobFailed(f"the disk failed while writing: {reason}", where=where, remedy=f"ls -ld {quoted(path)}")


def unwritable(out: Path, error: OSError, remedy: str) -> ConfigError:
    """Return the error to show for a file that was asked for, where it cannot be written."""
    return ConfigError(f"cannot write: {error.strerror or error}", where=str(out), remedy=remedy)


@contextmanager
def written_to(out: Path, remedy: str = "choose a writable file on a disk with free space") -> Iterator[None]:
    """Refuse a file that was asked for, where the disk is full or may not be written, or a file is in the way."""
    try:
        yield
    except OSError as error:
        if error.errno in (*FULL, *_READ_ONLY, errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
            raise unwritable(out, error, remedy) from error
        raise


@contextmanager
def refused_as(what: str, remedy: str | Command) -> Iterator[None]:
    """Replace message and remedy of an error that says that a place cannot be written; the remedy where it is full.

    A submission, which takes room itself, is no remedy for a command that only moves or repairs records.
    """
    try:
        yield
    except CacheFull as error:
        again = "free space there, then run the same command again   (finished work is kept)"
        raise CacheFull(error.what, where=error.where, remedy=again) from error
    except CacheUnusable as error:
        cause = error.__cause__
        if not (isinstance(cause, OSError) and cause.errno in _READ_ONLY):
            raise
        reason = f"{cause.strerror or cause}; {whose(Path(error.where).parent)}"
        raise CacheUnusable(f"{what}: {reason}", where=error.where, remedy=remedy) from cause


def ask_owner(folder: Path) -> AbstractContextManager[None]:
    """Point to the owner of a cache that cannot be written, for commands that must change this very cache."""
    remedy = f"ls -ld {quoted(folder)}   (ask its owner for write access)"
    return refused_as("the cache cannot be written here", remedy)


def _there(disk: Disk, folder: Path) -> Path:
    """Return a folder, or its nearest parent that exists."""
    return folder if disk.exists(folder) or folder == folder.parent else _there(disk, folder.parent)


def room_left(disk: Disk, path: Path) -> str:
    """Describe the free space or the missing inodes, if the disk that just failed can still report them."""
    with suppress(OSError):
        facts = os.statvfs(path.parent)
        if facts.f_files and not facts.f_favail:
            return f": this file system has no free inode (df -i {quoted(path.parent)})"
        return f": {disk.free_bytes(path) / 1e6:,.1f} MB free on this file system"
    return ""
