"""The memory cgroups that this process is in: above their limits the kernel ends it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # version 1 writes a number of about 2^63 where there is no limit


def memory_cgroups(proc: Path = PROC, cgroups: Path = CGROUPS) -> Iterator[Path]:
    """Yield the folders of this process's memory cgroup and those above it, in both versions; some may be absent."""
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(",") or not controllers:
                root = cgroups / controllers
                own = root / path.lstrip("/")
                yield from (own, *(folder for folder in own.parents if folder.is_relative_to(root)))
