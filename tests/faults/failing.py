"""A disk step that fails in the middle of a work: what comes of it, and whether trying again finishes."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import CacheFull, CacheUnusable, JobFailed, PipelineError
from pipeline.store.cache_folder import CacheFolder
from tests.faults.judged import KIND, finished, served
from tests.faults.works import NAME
from tests.store.faulty_disks import LOOKS, FailingDisk

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.works import Work

NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS, errno.EACCES)
READING = (errno.EIO, errno.ESTALE, errno.EACCES)
PUBLISHING = ("open_new", "write_at", "truncate", "fsync", "link", "rename")
SAID_AS = {
    errno.ENOSPC: CacheFull,
    errno.EDQUOT: CacheFull,
    errno.EIO: JobFailed,
    errno.ESTALE: JobFailed,
    errno.EROFS: CacheUnusable,
    errno.EACCES: CacheUnusable,
}


class SuspiciousDisk(FailingDisk):
    """Fails as told, waits for nothing, and notes if a file is trusted after its fsync has failed."""

    def __init__(self, step: str = "", number: int = 0, after: int = 0, *, once: bool = False) -> None:
        super().__init__(step, number, after, once=once)
        self.trusted_again: list[str] = []
        self._doubtful: set[int] = set()
        self._made: set[int] = set()

    def open_new(self, path: Path) -> int:
        fd = super().open_new(path)
        self._made.add(fd)
        self._doubtful.discard(os.fstat(fd).st_ino)  # the number was given away again
        return fd

    def close(self, fd: int) -> None:
        if fd in self._made:  # of what was only read, closing cannot fail
            self._made.remove(fd)
            super().close(fd)
        else:
            os.close(fd)

    def fsync(self, fd: int) -> None:
        node = os.fstat(fd).st_ino
        self._suspect(node, "fsync")
        self._doubtful.add(node)
        self._take("fsync")
        self._doubtful.remove(node)

    def fsync_folder(self, path: Path) -> None:
        self._take("fsync_folder")

    def link(self, source: Path, target: Path) -> None:
        self._suspect(source.stat().st_ino, "link")
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._suspect(source.stat().st_ino, "rename")
        super().rename(source, target)

    def wait(self, seconds: float) -> None:
        pass

    def _suspect(self, node: int, step: str) -> None:
        if node in self._doubtful:
            self.trusted_again.append(f"trusted: {step} of a file whose fsync failed")


@dataclass(frozen=True, slots=True)
class Failure:
    """One step of the disk that fails, the n-th time it is taken, or from then on."""

    step: str
    number: int
    after: int
    once: bool

    def __str__(self) -> str:
        last = "once" if self.once else "on"
        return f"{errno.errorcode[self.number]} at {self.step} number {self.after + 1} ({last})"


def steps_of(work: Work, folder: Path) -> Counter[str]:
    """Return how often a work takes each step of the disk."""
    disk = SuspiciousDisk()
    work.run(folder, CacheFolder(work.begin(folder), disk))
    return disk.taken


def failures(taken: Counter[str], *, every: bool) -> Iterator[Failure]:
    """Yield the failures to try: all that can be told apart, or a part in which each step and each number occurs."""
    turn = 0
    for step, times in sorted((taken - Counter(exists=taken["exists"])).items()):  # it asks in a way that cannot fail
        for after in range(times) if every else sorted({0, times // 2, times - 1}):
            turn += 1
            for at, number in enumerate(READING if step in LOOKS else NUMBERS):
                if every or (at + turn) % 3 == 0:
                    yield Failure(step, number, after, once=bool((turn + at) % 2))


def complaints_about(work: Work, failure: Failure, folder: Path) -> list[str]:
    """Do a work on a disk that fails, look what there is, and do it again on one that does not."""
    root, said = work.begin(folder), set(work.live)
    disk = SuspiciousDisk(failure.step, failure.number, failure.after, once=failure.once)
    found = [*_said(work, folder, disk, failure, said), *disk.trusted_again]
    left = [path.name for path in root.rglob("*.partial")]
    if left and failure.step != "unlink":
        found.append(f"left: {left}")
    store = CacheFolder(root).kind(KIND)
    found += [f"lost: {key.hex()}, before it was tried again" for key in said if not served(store, key)]
    if failure.step not in LOOKS:
        found += work.judge(folder, False)
    # A known fault: where a look fails in a repair, that may leave a lost record unlisted, and the next cannot know it.
    known = "unlisted: " if failure.step in LOOKS else "\0"
    found += [one for one in finished(work, folder, said) if not one.startswith(known)]
    return [f"{work.name}, {failure}: {one}" for one in found]


def _said(work: Work, folder: Path, disk: SuspiciousDisk, failure: Failure, said: set[bytes]) -> Iterator[str]:
    """Do the work, and complain of an error that people cannot use."""
    try:
        work.run(folder, CacheFolder(folder / NAME, disk), said.update)
    except PipelineError as error:
        if not (error.remedy and error.where and error.exit_code > 1):
            yield f"unhelpful: {error!r}"
        if failure.step in PUBLISHING and not isinstance(error, SAID_AS[failure.number]):
            yield f"misnamed: {error!r}"
    except OSError as error:
        yield f"bare: {error!r}"
