"""Disks that misbehave, each in one way."""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from typing import TYPE_CHECKING

from pipeline.store.disk import Disk

if TYPE_CHECKING:
    from pathlib import Path


def os_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class NoLinkDisk(Disk):
    """A file system without hard links, as some network mounts are."""

    def __init__(self, number: int = errno.EPERM) -> None:
        self.number = number

    def link(self, source: Path, target: Path) -> None:
        raise os_error(self.number)


class HidingDisk(Disk):
    """Attribute caching: what a folder shows lags behind by `lag_s`; a name that one knows opens at once."""

    def __init__(self, lag_s: float = 3.0) -> None:
        self.lag_s = lag_s
        self.time = 0.0
        self.seen: dict[str, float] = {}

    def list_folder(self, path: Path) -> list[str]:
        names = super().list_folder(path)
        return [name for name in names if self.seen.setdefault(f"{path}/{name}", self.time) + self.lag_s <= self.time]

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        self.time += seconds


class FailingDisk(Disk):
    """A disk on which one step fails from its n-th time on."""

    def __init__(self, step: str, number: int, after: int = 0) -> None:
        self.step, self.number, self.after = step, number, after
        self.taken: Counter[str] = Counter()

    def _take(self, step: str) -> None:
        self.taken[step] += 1
        if step == self.step and self.taken[step] > self.after:
            raise os_error(self.number)

    def open_new(self, path: Path) -> int:
        self._take("open_new")
        return super().open_new(path)

    def write_at(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        self._take("write_at")
        super().write_at(fd, data, offset)

    def truncate(self, fd: int, length: int) -> None:
        self._take("truncate")
        super().truncate(fd, length)

    def fsync(self, fd: int) -> None:
        self._take("fsync")
        super().fsync(fd)

    def link(self, source: Path, target: Path) -> None:
        self._take("link")
        super().link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        self._take("rename")
        super().rename(source, target)

    def fsync_folder(self, path: Path) -> None:
        self._take("fsync_folder")
        super().fsync_folder(path)

    def make_folder(self, path: Path) -> None:
        self._take("make_folder")
        super().make_folder(path)

    def open_read(self, path: Path) -> int:
        self._take("open_read")
        return super().open_read(path)

    def read_at(self, fd: int, length: int, offset: int) -> bytes:
        self._take("read_at")
        return super().read_at(fd, length, offset)


class KillingDisk(FailingDisk):
    """Counts the steps that change the disk, and kills this process before, halfway through or after one of them."""

    STEPS = ("open_new", "write_at", "truncate", "fsync", "link", "rename", "fsync_folder", "make_folder")

    def __init__(self, kill_at: int | None = None, moment: str = "before") -> None:
        super().__init__(step="", number=0)
        self.kill_at, self.moment, self.steps = kill_at, moment, 0

    def _take(self, step: str) -> None:
        if step not in self.STEPS:
            return
        if self.moment == "after" and self.steps == self.kill_at:
            self.strike()
        self.steps += 1
        if self.moment == "before" and self.steps == self.kill_at:
            self.strike()

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_at(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        self._take("write_at")
        if self.moment == "halfway" and self.steps == self.kill_at:
            os.pwrite(fd, memoryview(data)[: len(data) // 2], offset)
            self.strike()
        Disk.write_at(self, fd, data, offset)

    def unlink(self, path: Path) -> None:
        self._take("open_new")
        super().unlink(path)


class InterruptingDisk(KillingDisk):
    """Presses Ctrl-C at one step."""

    def strike(self) -> None:
        self.kill_at = None
        raise KeyboardInterrupt
