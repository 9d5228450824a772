"""An unfinished download: NAME.partial, and NAME.partial.json which remembers its origin.

The downloading process holds a lock on the partial file. The kernel drops it when the process ends in any way, so that
the next one can go on at once with what a killed one left. On a file system without locks each process uses a file name
of its own, with which no other can go on, as it may still be in use.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import secrets
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING

from pipeline.errors import ConfigError
from pipeline.store.format.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import Message
    from pathlib import Path

BLOCK_BYTES = 1 << 20
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_DISK = Disk()


@dataclass(frozen=True, slots=True)
class DownloadOrigin:
    """The remote file whose beginning a partial file holds."""

    url: str
    validator: str  # a strong ETag, else Last-Modified: what If-Range takes; empty: nobody can say whether it changed
    total: int | None

    @classmethod
    def of(cls, url: str, headers: Message, total: int | None) -> DownloadOrigin:
        """Read the validator of a remote file from the headers of a response."""
        tag = headers.get("ETag", "")
        return cls(url, tag if tag.startswith('"') else headers.get("Last-Modified", ""), total)

    def agrees(self, headers: Message, total: int | None) -> bool:
        """Say whether a response is about the same version of the file, as far as its headers tell."""
        validator = headers.get("ETag" if self.validator.startswith('"') else "Last-Modified", self.validator)
        return validator == self.validator and (None in (total, self.total) or total == self.total)


class Partial:
    """The bytes downloaded so far, in a file that no other process writes."""

    def __init__(self, out: Path, path: Path, file: IO[bytes]) -> None:
        self._out, self.path, self._file = out, path, file
        self._note = path.with_name(f"{path.name}.json")
        self._sha256, self._hashed = hashlib.sha256(), 0
        self.size = os.fstat(file.fileno()).st_size
        self.origin = self._remembered()

    def _remembered(self) -> DownloadOrigin | None:
        """Read the origin of the bytes; None where the note is missing or unreadable."""
        try:
            note = json.loads(self._note.read_text())
            total = note["total"]
            return DownloadOrigin(str(note["url"]), str(note["validator"]), None if total is None else int(total))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def can_go_on(self, url: str) -> bool:
        """Say whether the rest of exactly this file can be requested from `url`."""
        origin = self.origin
        if not self.size or origin is None or origin.url != url or not origin.validator:
            return False
        return origin.total is None or self.size <= origin.total

    def is_whole(self, url: str) -> bool:
        """Say whether the file is complete; False where its length is unknown."""
        return self.can_go_on(url) and self.origin is not None and self.size == self.origin.total

    def restart(self, origin: DownloadOrigin | None = None) -> None:
        """Discard the bytes, and remember the origin of the next ones."""
        with explaining_disk_errors(self._out):
            self._file.truncate(0)  # first: the note must never vouch for another's bytes
            self._note.unlink(missing_ok=True)
            if origin is not None:
                self._note.write_text(json.dumps(asdict(origin)))
        self._sha256, self._hashed, self.size, self.origin = hashlib.sha256(), 0, 0, origin

    def append(self, data: bytes) -> None:
        """Append downloaded bytes."""
        with explaining_disk_errors(self._out):
            self._file.write(data)
            self._file.flush()
        self.size += len(data)
        self._sha256.update(data)
        self._hashed += len(data)

    def catch_up(self) -> None:
        """Add the bytes that an earlier process left to the digest."""
        self._file.seek(self._hashed)
        while self._hashed < self.size and (data := self._file.read(BLOCK_BYTES)):
            self._sha256.update(data)
            self._hashed += len(data)

    def sha256(self) -> str:
        """Return the digest of all bytes."""
        self.catch_up()
        return self._sha256.hexdigest()

    def publish(self) -> None:
        """Give the finished file its name."""
        with explaining_disk_errors(self._out):
            os.fsync(self._file.fileno())
            _DISK.rename(self.path, self._out)
            _DISK.fsync_folder(self._out.parent)
            self._note.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the file and its note."""
        self.path.unlink(missing_ok=True)
        self._note.unlink(missing_ok=True)


@contextmanager
def claim_partial(out: Path) -> Iterator[Partial]:
    """Open the partial file of `out`, locked against other processes."""
    with explaining_disk_errors(out):
        _DISK.make_folder(out.parent)
        if out.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a directory, expected a file")
        shared = out.with_name(f"{out.name}.partial")
        file = _open_locked(shared)
    if file is not None:
        with file:
            yield Partial(out, shared, file)
        return
    own = out.with_name(f"{out.name}.{secrets.token_hex(4)}.partial")  # without locks, nobody can go on with it later
    with explaining_disk_errors(out):
        file = own.open("x+b")
    with file:
        partial = Partial(out, own, file)
        try:
            yield partial
        finally:
            partial.discard()


def _open_locked(path: Path) -> IO[bytes] | None:
    """Open and lock a file; None where the file system has no locks."""
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
                return file
            file.close()  # another process has just published it: by now it has another name
        except OSError as error:
            file.close()
            if error.errno in _NO_LOCKS_HERE:
                return None
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOENT):
                raise
            if error.errno != errno.ENOENT:
                remedy = "wait until it ends, or use --out PATH"
                raise ConfigError("another process is downloading it now", where=str(path), remedy=remedy) from None


def refuse_small_disk(folder: Path, needed: int) -> None:
    """Refuse to write so many bytes to a folder whose disk has fewer."""
    if needed > (free := _DISK.free_bytes(folder)):
        what = f"the disk has {free:,} bytes free, but {needed:,} are needed"
        raise ConfigError(what, where=str(folder), remedy="free space, or use --out PATH on another disk")


@contextmanager
def explaining_disk_errors(out: Path) -> Iterator[None]:
    """Turn an OSError of writing into a ConfigError with place and remedy."""
    try:
        yield
    except OSError as error:
        what, where = f"cannot write {out.name} there: {error.strerror}", str(out.parent)
        remedy = "use --out PATH with a writable place"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "free space and run the same command again (it continues), or use --out PATH on another disk"
        raise ConfigError(what, where=where, remedy=remedy) from error
