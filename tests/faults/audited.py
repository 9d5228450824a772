"""Says which changes of files under a folder are made by anything but a disk's own steps, in a program of its own.

    python -m tests.faults.audited FOLDER      a JSON line for each work: its name, the changes that bypass the disk,
                                               and how many were made by the disk

The interpreter tells of every file that is opened, renamed, linked, cut or removed, whoever does it; it cannot be told
to stop, hence the program.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.store.cache_folder import CacheFolder
from pipeline.store.format.disk import Disk
from tests.faults.works import WORKS, Work
from tests.store.faulty_disks import CHANGES

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {"os.rename", "os.link", "os.symlink", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod",
           "os.chown", "os.utime"}  # fmt: skip


class Watch:
    """Tells changes made within a step of a disk from all others."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.depth, self.on, self.seen = str(folder), 0, False, 0
        self.bypassing: list[str] = []
        sys.addaudithook(self._hear)

    def disk(self) -> Disk:
        disk = Disk()
        for step in CHANGES:
            setattr(disk, step, self._within(getattr(disk, step)))
        return disk

    def _within(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def taken(*arguments: Any) -> Any:
            self.depth += 1
            try:
                return step(*arguments)
            finally:
                self.depth -= 1

        return taken

    def _hear(self, event: str, told: tuple[Any, ...]) -> None:
        writing = event in _EVENTS or (event == "open" and isinstance(told[2], int) and told[2] & _WRITING)
        if self.on and writing and any(self._is_here(one) for one in told[:2]):
            self.seen += 1
            if not self.depth:
                self.bypassing.append(f"{event} {told}")

    def _is_here(self, one: Any) -> bool:
        """Say whether a path is below the folder; of a number, which is an open file, nobody knows."""
        return isinstance(one, int) or (
            isinstance(one, str | bytes | Path) and os.fsdecode(one).startswith(self.folder)
        )


def _cheat(folder: Path, cache: CacheFolder, say: Any) -> None:
    (cache.root / "notes").write_text("")


def main(folder: Path) -> None:
    watch = Watch(folder)
    for work in (*WORKS, Work("cheat", _cheat, lambda folder: (folder / "cache").mkdir())):
        place = folder / work.name
        cache = CacheFolder(work.begin(place), watch.disk())
        watch.on, watch.seen, watch.bypassing = True, 0, []
        work.run(place, cache)
        watch.on = False
        told = {"work": work.name, "bypassing": watch.bypassing, "by_the_disk": watch.seen - len(watch.bypassing)}
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
