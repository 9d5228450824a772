"""Folders of structure files: looking files up by name, without listing the folder each time, and by pattern."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import numpy as np

from pipeline.command_line import Command
from pipeline.errors import ConfigError
from pipeline.records import Reason
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.parsing.structure_files import FORMATS
from pipeline.structures.sources.item_ids import SLASHES
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


NAMES_AT_ONCE = 1 << 16


class StructureFolder:
    """A folder with optional subfolders, in which files are found by their name without suffix."""

    def __init__(self, path: Path, subfolders: Sequence[str] = ()) -> None:
        self.path = path.absolute()
        self._root = str(self.path)
        self._subfolders = subfolders

    @cached_property
    def _endings(self) -> list[tuple[str, str]]:
        """Pairs of folder and suffix that occur, so that a look-up rarely tries more than one path."""
        inside = {entry.name for entry in listing(self.path) if entry.name in self._subfolders and entry.is_dir()}
        folders = [self.path, *(self.path / name for name in self._subfolders if name in inside)]
        return [(str(folder), suffix) for folder in folders for suffix in _suffixes(folder)]

    def join(self, path: str) -> str:
        return os.path.join(self._root, path)  # noqa: PTH118  # a Path costs ten times more, once per item

    def find(self, *stems: str) -> str | None:
        """Return the path of the first existing file with one of these stems; None if there is none."""
        if any(SLASHES.search(stem) or stem.startswith(".") for stem in stems):
            raise ValueError(f"{stems} were not checked before use as file names")
        for folder, suffix in self._endings:
            for stem in stems:
                path = os.path.join(folder, stem + suffix)  # noqa: PTH118  # a Path per try would cost more than the try
                if os.path.isfile(path):  # noqa: PTH113
                    return path
        return None

    def required(self, *stems: str) -> str:
        """Return what `find` finds; refuse the item where there is none."""
        if path := self.find(*stems):
            return path
        beneath = f" or its {', '.join(self._subfolders)}" if self._subfolders else ""
        raise UnusableInput(Reason.MISSING_FILE, f"no {printable_text(stems[0])}.pdb, .cif, … in {self.path}{beneath}")


def split_suffix(name: str) -> tuple[str, str]:
    """Divide a file name into its stem and its structure suffix, which is empty for other files."""
    plain = name.removesuffix(".gz")
    stem, _dot, ending = plain.rpartition(".")
    if f".{ending.lower()}" not in FORMATS or not stem:
        return name, ""
    return stem, name[len(stem) :]


def _suffixes(folder: Path) -> list[str]:
    """Return the structure suffixes that occur in a folder, in the order of preference."""
    suffixes = {split_suffix(entry.name)[1] for entry in listing(folder)} - {""}
    order = list(FORMATS)
    return sorted(suffixes, key=lambda suffix: (order.index(suffix.removesuffix(".gz").lower()), suffix))


def listing(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries of a folder; raise a ConfigError that says what to name instead."""
    remedy: str | Command
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except FileNotFoundError:
        what, remedy = "folder not found", Command.of("config show", then="   (shows where this path comes from)")
    except NotADirectoryError:
        what, remedy = "is a file, expected a directory", f"ls {quote(str(folder.parent))}"
    except OSError as error:
        what, remedy = f"cannot be listed: {error.strerror or error}", f"ls -ld {quote(str(folder))}"
    else:
        return
    raise ConfigError(what, where=str(folder), remedy=remedy)


def walk(folder: Path, patterns: Sequence[str], above: str = "") -> Iterator[str]:
    """Yield files that match a pattern, relative to the folder; skip hidden ones and linked folders."""
    for entry in listing(folder / above):
        name = above + entry.name
        if entry.name.startswith("."):
            continue
        if entry.is_dir(follow_symlinks=False):
            if any(_may_hold(name, pattern) for pattern in patterns):
                yield from walk(folder, patterns, f"{name}/")
        elif any(_matches(name.split("/"), pattern.split("/")) for pattern in patterns):
            yield name


def _may_hold(folder: str, pattern: str) -> bool:
    return "**" in pattern or folder.count("/") < pattern.count("/")


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Match a path with a pattern, part by part; `**` stands for any number of folders."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return _matches(parts, pattern[1:]) or (bool(parts) and _matches(parts[1:], pattern))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def sorted_names(names: Iterable[str]) -> Iterator[str]:
    """Yield the different names in order; they wait as bytes in one array, where strings would take five times more."""
    encoded = (os.fsencode(name) for name in names)
    chunks = []
    while chunk := list(islice(encoded, NAMES_AT_ONCE)):
        chunks.append(np.array(chunk))
    if chunks:
        yield from (os.fsdecode(bytes(name)) for name in np.unique(np.concatenate(chunks)))
