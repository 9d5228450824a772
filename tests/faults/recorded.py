"""A disk that writes down each step that changes it, so that what a power loss would leave can be played back."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from pipeline.store.format.disk import Disk
from tests.store.faulty_disks import CHANGES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Tree = dict[str, bytes | None]  # names in a folder and below → content; None: a folder


@dataclass(frozen=True, slots=True)
class Step:
    """One step that changed the disk, or an acknowledgement: the word to the caller that keys are safe."""

    what: str
    path: str = ""
    target: str = ""
    file: int = 0
    data: bytes = b""
    offset: int = 0
    keys: tuple[bytes, ...] = ()


class RecordingDisk(Disk):
    """Does what it is told, and keeps the steps; paths are told from `root`, files are numbered as they are made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.before = tree_of(root)
        self.steps: list[Step] = []
        self._number = count(1)
        self._open: dict[int, int] = {}

    def acknowledge(self, keys: Iterable[bytes]) -> None:
        self.steps.append(Step("acknowledge", keys=tuple(keys)))

    def open_new(self, path: Path) -> int:
        fd = super().open_new(path)
        self._open[fd] = next(self._number)
        self._note("open_new", path, file=self._open[fd])
        return fd

    def write_at(self, fd: int, data: bytes | memoryview, offset: int) -> None:
        super().write_at(fd, data, offset)
        self._note("write_at", file=self._open[fd], data=bytes(data), offset=offset)

    def truncate(self, fd: int, length: int) -> None:
        super().truncate(fd, length)
        self._note("truncate", file=self._open[fd], offset=length)

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self._note("fsync", file=self._open[fd])

    def make_published(self, fd: int) -> None:
        super().make_published(fd)  # a file that stays writable after a power loss does no harm

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)  # by `new_folder` and `fsync_folder`

    def make_private_folder(self, path: Path) -> bool:
        raise NotImplementedError("it is for scratch, which need not outlive anything")

    def time_in(self, folder: Path) -> float:
        return super().time_in(folder)  # by a file that never has a name

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self._note("link", source, target)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._note("rename", source, target)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._note("unlink", path)

    def new_folder(self, path: Path) -> None:
        super().new_folder(path)
        self._note("new_folder", path)

    def fsync_folder(self, path: Path) -> None:
        super().fsync_folder(path)
        self._note("fsync_folder", path)

    def _note(self, what: str, path: Path | None = None, target: Path | None = None, **told: Any) -> None:
        names = ["" if one is None else self._told(one) for one in (path, target)]
        self.steps.append(Step(what, *names, **told))

    def _told(self, path: Path) -> str:
        return ".." if path == self.root.parent else path.relative_to(self.root).as_posix()


def unknown_changes() -> set[str]:
    """Return the steps of a disk that change it, and that nobody has taught the recording."""
    return {name for name in CHANGES if name not in vars(RecordingDisk)}


def tree_of(root: Path) -> Tree:
    """Return what is in a folder."""
    found = sorted(root.rglob("*")) if root.exists() else []
    return {path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes() for path in found}


def put_tree(root: Path, tree: Tree) -> None:
    """Make a folder of what `tree_of` returned."""
    root.mkdir(parents=True)
    for name in sorted(tree):
        content = tree[name]
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)
