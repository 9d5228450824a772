"""Checks of what users write in tables: ids, duplicate ids and labels; and the specification of a source."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import xxhash

from pipeline.records import Reason
from pipeline.structures.atoms import UnusableInput
from pipeline.units import first_few, printable_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from pipeline.records import Item

MAX_ID_LENGTH = 200
ORIGINS = 1 << 14  # that are remembered
MERGE_AT, MERGE_SHARE = 1 << 12, 1 / 32  # of the latest ids, in a table of 150 bytes an id
SLASHES = re.compile(r"[/\\]")


def id_problem(name: str, *, names_files: bool = True) -> str:
    """Describe why `name` cannot be an id, or return an empty text; slashes are allowed if ids name no files."""
    if not name:
        return "is empty"
    if len(name) > MAX_ID_LENGTH:
        return f"has {len(name)} characters, at most {MAX_ID_LENGTH} are allowed"
    if " " in name or not name.isprintable():
        odd = next(letter for letter in name if letter == " " or not letter.isprintable())
        return "contains white space" if odd.isspace() else f"contains the unprintable character U+{ord(odd):04X}"
    if names_files and SLASHES.search(name):
        return "contains a slash, which would make it a path"
    if name[0] in ".-":
        return f"starts with {name[0]!r}"
    return ""


def checked_id(name: str) -> str:
    """Return `name` if it is safe as part of a file name; else refuse it."""
    if problem := id_problem(name):
        raise UnusableInput(Reason.BAD_ID, f"the id {problem}")
    return name


class SeenIds:
    """The first line of each id, in 12 bytes an id: sorted arrays, and a small table of the latest.

    Ids are compared by 64-bit digests: in a million ids, the chance that any two collide is 3e-8.
    """

    def __init__(self) -> None:
        self.origins: dict[str, str] = {}  # of the newest ids, where they are from
        self._latest: dict[int, int] = {}
        self._digests = np.empty(0, dtype=np.uint64)
        self._lines = np.empty(0, dtype=np.uint32)

    def remember_origin(self, name: str, origin: str) -> None:
        """Remember where an id is from; files of one name stand close together, so older ones are forgotten."""
        self.origins[name] = origin
        if len(self.origins) > ORIGINS:
            del self.origins[next(iter(self.origins))]

    def first_line(self, name: str, line: int) -> int | None:
        """Return the line where this id occurred first; if it is new, remember `line` and return None."""
        first = self.line_of(name)
        if first is None:
            self._latest[xxhash.xxh3_64_intdigest(name.encode())] = line
            if len(self._latest) >= max(MERGE_AT, MERGE_SHARE * len(self._digests)):
                self._merge()
        return first

    def line_of(self, name: str) -> int | None:
        """Return the line where an id occurred first."""
        digest = xxhash.xxh3_64_intdigest(name.encode())
        if digest in self._latest:
            return self._latest[digest]
        spot = int(np.searchsorted(self._digests, np.uint64(digest)))
        is_there = spot < len(self._digests) and int(self._digests[spot]) == digest
        return int(self._lines[spot]) if is_there else None

    def _merge(self) -> None:
        """Move the latest ids into the sorted arrays."""
        digests, lines = zip(*sorted(self._latest.items()), strict=True)
        places = self._digests.searchsorted(np.array(digests, np.uint64))
        self._digests = np.insert(self._digests, places, np.array(digests, np.uint64))
        self._lines = np.insert(self._lines, places, lines)
        self._latest.clear()


UNKNOWN = frozenset({"", "na", "n/a", "nan", "none", "null"})  # what tables write for a missing measurement
WORDS = {"true": 1.0, "false": 0.0}
LARGEST = 3.4e38  # of the single precision in which tasks have it


def value_of(text: str) -> float:
    """Return a label as a number, NaN where it is unknown; raise ValueError for any other text."""
    word = text.strip().lower()
    if word in UNKNOWN:
        return math.nan
    if word in WORDS:
        return WORDS[word]
    value = float(word) if word.isascii() and "_" not in word else math.nan
    if not abs(value) <= LARGEST:  # NaN, too
        raise ValueError(text)
    return value


def label_problem(item: Item, names: Iterable[str]) -> str:
    """Describe the first label of an item that is no number; return an empty text if all are."""
    for name in names:
        try:
            value_of(item.labels.get(name, ""))
        except ValueError:
            return f"the label {name} is {printable_text(item.labels[name])!r}, not a number"
    return ""


KIND = "kind"  # a label such as antibody-antigen, by which the evaluation of docking groups items


def unread_columns(item: Item, names: Sequence[str]) -> str:
    """List the columns of an item's row that neither pipeline nor the task reads; `names` are those of data.labels."""
    unread = [printable_text(name) for name in item.labels if name not in (*names, KIND)]
    return f"unused columns: {first_few(unread)} (list them in data.labels to use them as labels)" * bool(unread)


def label_values(item: Item, names: Iterable[str]) -> dict[str, float]:
    """Return labels of an accepted item as numbers."""
    return {name: value_of(item.labels.get(name, "")) for name in names}


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One data source, as the `data` section of the configuration describes it."""

    source: str
    path: Path
    pattern: tuple[str, ...] = ()
    structures_dir: Path | None = None
    splits: Path | None = None
    state: Literal["bound", "unbound"] = "bound"
    receptor_chains: tuple[str, ...] = ()
    ligand_chains: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()  # columns of numbers
    unlabelled: bool = field(default=False, compare=False)  # those that a table lacks are unknown, and no error
    partners: Literal["auto", "none"] = "auto"
    limit: int | None = None
