"""What a file system may show after a power loss: every state that POSIX allows of the recorded steps.

Bytes of a file are sure once the file was fsynced, a name once its folder was; each of the others may be there or not,
whatever came first. A file's size may be there without its bytes (zeros), or any part of its sectors. Changes of one
name happen in their order, and a rename never loses the file: its old name does not go before its new one is there.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from tests.faults.recorded import Step, Tree

SECTOR = 512
ROOT = 0


@dataclass(frozen=True, slots=True)
class Loss:
    """What a power loss left, and which keys had been acknowledged by then."""

    after: int  # steps
    tree: Tree
    safe: frozenset[bytes]


@dataclass(slots=True)
class _File:
    sure: bytes = b""  # as of the last fsync
    now: bytes = b""
    versions: list[bytes] = field(default_factory=list)  # after each change since

    def change(self, now: bytes) -> None:
        self.now = now
        self.versions.append(now)

    def fsync(self) -> None:
        self.sure, self.versions = self.now, []

    def contents(self) -> list[bytes]:
        """Return what may be on the disk: nothing of the changes first, all of them last."""
        if not self.versions:
            return [self.sure]
        return list(dict.fromkeys([self.sure, *self.versions[:-1], *_torn(self.sure, self.now), self.now]))


@dataclass(slots=True)
class _Folder:
    sure: dict[str, int] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    changes: dict[str, list[int | None]] = field(default_factory=dict)  # name → what it became, since the last fsync

    def change(self, name: str, node: int | None) -> None:
        self.changes.setdefault(name, []).append(node)
        if node is None:
            del self.now[name]
        else:
            self.now[name] = node

    def fsync(self) -> None:
        self.sure, self.changes = dict(self.now), {}

    def fsync_name(self, name: str) -> None:
        """Make sure of one name that was given: another folder's fsync wrote down both ends of a rename."""
        if self.changes.pop(name, None) and name in self.now:
            self.sure[name] = self.now[name]


class FileSystem:
    """A file system in memory that knows which of its changes are sure."""

    def __init__(self, before: Tree) -> None:
        self._files: dict[int, _File] = {}
        self._folders = {ROOT: _Folder()}
        self._numbers: dict[int, int] = {}  # of recorded files → nodes
        self._nodes = itertools.count(1)
        self._moves: list[tuple[tuple[int, str], tuple[int, str]]] = []  # (folder, name): from, to
        for path in sorted(before):
            content = before[path]
            self._name(path, self._new(_Folder() if content is None else _File(content, content)))
        for folder in self._folders.values():
            folder.fsync()

    def take(self, step: Step) -> None:
        """Do one step."""
        match step.what:
            case "open_new":
                self._numbers[step.file] = self._new(_File())
                self._name(step.path, self._numbers[step.file])
            case "write_at":
                file, end = self._file(step), step.offset + len(step.data)
                padded = file.now.ljust(step.offset, b"\0")
                file.change(padded[: step.offset] + step.data + padded[end:])
            case "truncate":
                file = self._file(step)
                file.change(file.now[: step.offset].ljust(step.offset, b"\0"))
            case "fsync":
                self._file(step).fsync()
            case "link":
                self._name(step.target, self._node(step.path))
            case "rename":
                self._name(step.target, self._node(step.path))
                self._name(step.path, None)
                self._moves.append((self._place(step.path), self._place(step.target)))
            case "unlink":
                self._name(step.path, None)
            case "new_folder":
                if self._find(step.path) is None:
                    self._name(step.path, self._new(_Folder()))
            case "fsync_folder":
                if step.path != "..":  # the folder that all this is in was there before
                    self._fsync_folder(self._node(step.path))
            case "acknowledge":
                pass
            case other:
                raise NotImplementedError(other)

    def losses(self, at_most: int, chance: random.Random) -> Iterator[Tree]:
        """Yield what a power loss now may leave.

        All of it, if that is not too much; else nothing or all of what is not sure, each part alone, all but each part,
        and for the rest what chance picks.
        """
        parts = self._parts()
        for chosen in _choices([len(options) for _, options in parts], at_most, chance):
            picked = {place: options[at] for (place, options), at in zip(parts, chosen, strict=True)}
            yield self._tree(picked)

    def _parts(self) -> list[tuple[tuple[int, str], Sequence[object]]]:
        """Return all that is not sure: contents of files, and how many of a name's changes are on the disk."""
        contents = [((node, ""), file.contents()) for node, file in self._files.items() if file.versions]
        names = [
            ((node, name), range(len(changes) + 1))
            for node, folder in self._folders.items()
            for name, changes in folder.changes.items()
        ]
        return [*contents, *names]

    def _tree(self, picked: dict[tuple[int, str], object]) -> Tree:
        for source, target in self._moves:  # no rename loses a file
            if picked.get(source) and picked.get(target) == 0:
                picked[source] = 0
        tree: Tree = {}
        waiting = [(ROOT, "")]
        while waiting:
            node, prefix = waiting.pop()
            for name, child in self._names_of(node, picked).items():
                path = f"{prefix}{name}"
                if child in self._folders:
                    tree[path] = None
                    waiting.append((child, f"{path}/"))
                else:
                    tree[path] = picked.get((child, ""), self._files[child].sure)  # type: ignore[assignment]
        return tree

    def _names_of(self, node: int, picked: dict[tuple[int, str], object]) -> dict[str, int]:
        folder = self._folders[node]
        names: dict[str, int | None] = dict(folder.sure)
        for name, changes in folder.changes.items():
            happened = int(picked[node, name])  # type: ignore[call-overload]
            if happened:
                names[name] = changes[happened - 1]
        return {name: child for name, child in names.items() if child is not None}

    def _new(self, node: _File | _Folder) -> int:
        number = next(self._nodes)
        (self._files if isinstance(node, _File) else self._folders)[number] = node  # type: ignore[index]
        return number

    def _fsync_folder(self, node: int) -> None:
        self._folders[node].fsync()
        for (source, _), (target, name) in self._moves:
            if source == node:
                self._folders[target].fsync_name(name)

    def _file(self, step: Step) -> _File:
        return self._files[self._numbers[step.file]]

    def _place(self, path: str) -> tuple[int, str]:
        folder, _, name = path.rpartition("/")
        return self._node(folder), name

    def _name(self, path: str, node: int | None) -> None:
        if path:
            folder, name = self._place(path)
            self._folders[folder].change(name, node)

    def _node(self, path: str) -> int:
        found = self._find(path)
        assert found is not None, path
        return found

    def _find(self, path: str) -> int | None:
        node: int | None = ROOT
        for name in path.split("/") if path not in {"", "."} else []:
            node = None if node is None else self._folders[node].now.get(name)
        return node


def losses(
    before: Tree, steps: Iterable[Step], *, safe: Iterable[bytes] = (), at_most: int = 64, seed: int = 0
) -> Iterator[Loss]:
    """Yield, each once, what a power loss before, between and after some steps may leave.

    `safe` are the keys that had been acknowledged before the first of them.
    """
    system, acknowledged, chance = FileSystem(before), frozenset(safe), random.Random(seed)
    seen: set[int] = set()
    for after, step in enumerate([None, *steps]):
        if step is not None:
            system.take(step)
            acknowledged |= frozenset(step.keys)
        for tree in system.losses(at_most, chance):
            known = hash((frozenset(tree.items()), acknowledged))
            if known not in seen:
                seen.add(known)
                yield Loss(after, tree, acknowledged)


def _torn(old: bytes, new: bytes) -> Iterator[bytes]:
    """Yield what may be there of a file whose bytes are on their way to the disk, besides nothing and all."""
    size = len(new)
    half = size // 2 // SECTOR * SECTOR
    base = old[:size].ljust(size, b"\0")  # the size is there, the bytes are not
    yield base
    yield new[:half]
    yield new[: size // 2 + 1]
    yield new[:half] + base[half:]
    yield base[:half] + new[half:]
    for first in (0, 1):  # every other sector
        sectors = range(0, size, SECTOR)
        yield b"".join((base, new)[at % 2 == first][start : start + SECTOR] for at, start in enumerate(sectors))


def _choices(sizes: list[int], at_most: int, chance: random.Random) -> Iterator[list[int]]:
    """Yield one of the options of each part, as their numbers."""
    total = 1
    for size in sizes:
        total = min(total * size, at_most + 1)
    if total <= at_most:
        yield from map(list, itertools.product(*map(range, sizes)))
        return
    none, every = [0] * len(sizes), [size - 1 for size in sizes]
    yield from (none, every)
    for base in (none, every):
        for part, size in enumerate(sizes):
            for option in range(size):
                if option != base[part]:
                    yield [*base[:part], option, *base[part + 1 :]]
    for _ in range(at_most):
        yield [chance.randrange(size) for size in sizes]
