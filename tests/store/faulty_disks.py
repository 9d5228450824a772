"""Disks that misbehave, each in one way."""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

from pipeline.store.format.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Callable
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

    def wait(self, seconds: float) -> None:
        self.time += seconds


# What only looks; every other method of a disk changes it, those that are yet to be written included.
LOOKS = ("open_read", "read_at", "read_start", "fill", "list_folder", "links_in", "exists",
         "is_plain_file", "is_link", "in_memory", "size_of", "size_of_open", "times_of", "same_file",
         "is_called", "keeper", "free_bytes", "alone_in")  # fmt: skip
CHANGES = tuple(name for name in vars(Disk) if not name.startswith("_") and name not in {*LOOKS, "close", "wait"})


class FailingDisk(Disk):
    """A disk on which one step fails from its n-th time on, or only that `once`."""

    def __init__(self, step: str, number: int, after: int = 0, *, once: bool = False) -> None:
        self.step, self.number, self.after, self.once = step, number, after, once
        self.taken: Counter[str] = Counter()

    def _take(self, step: str) -> None:
        self.taken[step] += 1
        due = self.taken[step] == self.after + 1 if self.once else self.taken[step] > self.after
        if step == self.step and due:
            raise os_error(self.number)

    def close(self, fd: int) -> None:
        super().close(fd)  # an error of close comes after the fact
        self._take("close")


def _taken_first(step: str) -> Callable[..., Any]:
    method = getattr(Disk, step)

    def taken(self: FailingDisk, *arguments: Any, **named: Any) -> Any:
        self._take(step)
        return method(self, *arguments, **named)

    return taken


for _step in (*LOOKS, *CHANGES):
    setattr(FailingDisk, _step, _taken_first(_step))


class KillingDisk(FailingDisk):
    """Counts the steps that change the disk, and kills this process before, halfway through or after one of them."""

    def __init__(self, kill_at: int | None = None, moment: str = "before") -> None:
        super().__init__(step="", number=0)
        self.kill_at, self.moment, self.steps = kill_at, moment, 0

    def _take(self, step: str) -> None:
        if step not in CHANGES:
            return
        if self.moment == "after" and self.steps == self.kill_at:
            self.strike()
        self.steps += 1
        at_once = self.moment == "before" or (self.moment == "halfway" and step != "write_at")  # no other has a middle
        if at_once and self.steps == self.kill_at:
            self.strike()

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_at(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        self._take("write_at")
        if self.moment == "halfway" and self.steps == self.kill_at:
            os.pwrite(fd, memoryview(data)[: len(data) // 2], offset)
            self.strike()
        Disk.write_at(self, fd, data, offset)


class InterruptingDisk(KillingDisk):
    """Presses Ctrl-C at one step."""

    def strike(self) -> None:
        self.kill_at = None
        raise KeyboardInterrupt
