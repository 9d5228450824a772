"""Data sources: a stream of items and rejections from the user's tables or folders; no structure file is read yet.

`items` is the entry point. To add a source, write its generator and name it in `ADAPTERS`.
"""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import TYPE_CHECKING

from pipeline.command_line import Command
from pipeline.errors import ConfigError, DataError
from pipeline.records import Item, Reason, Rejection
from pipeline.structures.atoms import UnusableInput
from pipeline.structures.sources.item_ids import SeenIds, SourceSpec, id_problem, label_problem
from pipeline.structures.sources.source_rows import Columns, SourceRow, one_file_parts, read_rows, text_lines
from pipeline.structures.sources.table_sources import (
    listing,
    manifest_items,
    pair_items,
    pinder_items,
    sabdab_items,
    sorted_names,
    split_suffix,
    walk,
)
from pipeline.units import printable_text

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LETTERS = 100_000
NOT_A_LETTER = re.compile(r"[^A-Z]")  # every ASCII letter is an IUPAC code


def glob_items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield the matching files in the order of their paths."""
    for pattern in spec.pattern:
        if pattern.startswith("/") or ".." in PurePosixPath(pattern).parts:
            what = f"the pattern {pattern!r} leaves the folder"
            remedy = Command.of("config show", then="   (then set data.path to it instead)")
            raise ConfigError(what, where=str(spec.path), remedy=remedy)
    root = spec.path.absolute()
    for name in sorted_names(walk(root, spec.pattern)):
        yield _item(spec, root, name)


def _item(spec: SourceSpec, root: Path, name: str) -> Item | Rejection:
    item_id = split_suffix(name)[0].replace("/", ".")
    path = root / name
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        detail = "a link that points outside the folder; list the file in a manifest instead"
        return Rejection(printable_text(item_id), Reason.UNREADABLE_FILE, detail, printable_text(name))
    parts = one_file_parts(spec, str(path), spec.receptor_chains, spec.ligand_chains)
    return Item(id=item_id, parts=parts, origin=printable_text(name))


def fasta_items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield the sequences of a FASTA file."""
    for number, label, letters, sequence in _records(spec.path):
        name = next(iter(label.split()), "")
        origin = f"{spec.path.name}:{number}"
        try:
            yield Item(id=name, sequence=_checked_sequence(letters, sequence), origin=origin)
        except UnusableInput as error:
            yield Rejection(printable_text(name), error.reason, error.detail, origin)


def _records(path: Path) -> Iterator[tuple[int, str, int, str]]:
    """Yield the line, label, number of letters and sequence of each record; letters beyond the most are not kept."""
    label, start, letters, pieces = "", 0, 0, list[str]()
    for number, line in enumerate(text_lines(path), 1):
        if line.startswith(">"):
            if start:
                yield start, label, letters, "".join(pieces)
            label, start, letters, pieces = line[1:], number, 0, []
        elif start:
            piece = "".join(line.split())
            letters += len(piece)
            if piece and letters <= MAX_LETTERS:
                pieces.append(piece)
        elif line.strip():
            remedy = f"head -n {number} {quote(str(path))}"
            raise DataError("text before the first '>': not FASTA", where=f"{path}:{number}", remedy=remedy)
    if start:
        yield start, label, letters, "".join(pieces)


def _checked_sequence(letters: int, sequence: str) -> str:
    """Return a sequence without a final stop, or refuse it."""
    if letters > MAX_LETTERS:
        what = f"{letters:,} letters, at most {MAX_LETTERS:,} are allowed"
        raise UnusableInput(Reason.TOO_MANY_RESIDUES, what)
    sequence = sequence.removesuffix("*")
    if not sequence:
        raise UnusableInput(Reason.BAD_SEQUENCE, "the sequence is empty")
    if wrong := NOT_A_LETTER.search(sequence):
        what = f"{printable_text(wrong[0])!r} at position {wrong.start() + 1} is not a residue letter"
        hint = "; write residues in upper case" if wrong[0].islower() else ""
        raise UnusableInput(Reason.BAD_SEQUENCE, what + hint)
    return sequence


SPLIT_COLUMNS = Columns(required=("id", "split"), optional=("cluster",))


class GivenSplits:
    """The split and cluster of each id in the table that `data.splits` names; an id takes some 25 bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found = 0  # items of the source that the table names
        self.example = ""
        self._rows = SeenIds()
        self._splits: dict[str, int] = {}
        self._split, self._clusters, self._end = array("I"), bytearray(), array("Q", [0])
        lines = array("I")
        for number, row in enumerate(read_rows(path, SPLIT_COLUMNS)):
            line = _line(row.origin)
            problem = row.detail if isinstance(row, Rejection) else ""
            if isinstance(row, SourceRow) and (first := self._rows.first_line(row["id"], number)) is not None:
                problem = f"line {lines[first]} has the same id"
            if isinstance(row, Rejection) or problem:
                raise DataError(problem, where=f"{path}:{line}", remedy=f"sed -n {line}p {quote(str(path))}")
            lines.append(line)
            self._split.append(self._splits.setdefault(row["split"], len(self._splits)))
            self._clusters += row["cluster"].encode()
            self._end.append(len(self._clusters))
            self.example = self.example or printable_text(row["id"])
        self._names = list(self._splits)

    def of(self, item: Item) -> Item:
        """Return an item with its split and cluster; one that the table does not name is in no split."""
        row = self._rows.line_of(item.id)
        if row is None:
            return replace(item, split="", cluster="")
        self.found += 1
        cluster = self._clusters[self._end[row] : self._end[row + 1]].decode()
        return replace(item, split=self._names[self._split[row]], cluster=cluster)

    def refuse_strangers(self, item: str) -> None:
        """Raise where the table names none of the items; `item` is the id of one."""
        if not self.found:
            what = f"it names none of the items: its ids look like {self.example!r}, those of the data like {item!r}"
            raise DataError(what, where=str(self.path), remedy=Command.of("data items"))


Adapter = Callable[[SourceSpec], Generator[Item | Rejection, None, None]]
ADAPTERS: dict[str, Adapter] = {
    "manifest": manifest_items,
    "pairs": pair_items,
    "sabdab": sabdab_items,
    "pinder": pinder_items,
    "glob": glob_items,
    "fasta": fasta_items,
}
# Settings that only some sources use: whether one is given, and which sources use it. Others refuse it.
HEEDED_BY: dict[str, tuple[Callable[[SourceSpec], bool], tuple[str, ...]]] = {
    "state: unbound": (lambda spec: spec.state == "unbound", ("pairs", "pinder")),
    "structures_dir": (lambda spec: spec.structures_dir is not None, ("manifest", "sabdab", "pinder")),
    "receptor_chains and ligand_chains": (
        lambda spec: bool(spec.receptor_chains or spec.ligand_chains),
        ("manifest", "glob"),
    ),
    "labels": (lambda spec: bool(spec.labels) and not spec.unlabelled, ("manifest", "sabdab", "pinder")),
}


def items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield each item of a source once, and a rejection for each unusable entry; `limit` counts items."""
    _refuse_unheeded(spec)
    if spec.structures_dir is not None:
        next(listing(spec.structures_dir), None)  # raises once, not for every item, if the folder is missing
    listed = spec.source == "pairs" and spec.splits  # the table lists the pairs themselves
    given = GivenSplits(spec.splits) if spec.splits and not listed else None
    seen, example = SeenIds(), ""
    taken = entries = 0
    with closing(ADAPTERS[spec.source](spec)) as source:
        while taken != spec.limit and (entry := next(source, None)) is not None:
            entries += 1
            checked = _checked(entry, seen, spec)
            if isinstance(checked, Item):
                taken, example = taken + 1, checked.id
                checked = given.of(checked) if given else checked
            yield checked
    if given and taken:
        given.refuse_strangers(example)
    if not entries and spec.limit != 0:
        where = str(listed or spec.path)
        own, look = "   (a script that reads its own data)", f"ls -l {quote(where)}   or   "
        remedy = Command.of("submit train --only", before=look, then=own)
        raise DataError(f"the source {spec.source!r} finds no items here", where=where, remedy=remedy)


def _checked(entry: Item | Rejection, seen: SeenIds, spec: SourceSpec) -> Item | Rejection:
    """Return an item whose id is allowed and new, and whose labels are numbers; else a rejection."""
    if isinstance(entry, Rejection):
        return entry
    name, line = printable_text(entry.id), _line(entry.origin)
    if problem := id_problem(entry.id, names_files=spec.source != "fasta"):
        return Rejection(name, Reason.BAD_ID, f"the id {problem}", entry.origin)
    first = seen.first_line(entry.id, line)
    if first is not None:
        table = spec.splits.name if spec.splits and spec.source == "pairs" else spec.path.name
        where = f"{table}:{first}" if first else seen.origins.get(entry.id, "an earlier file")
        detail = f"{where} already has this id"
        if entry.split:
            detail += f" (this one is in split {printable_text(entry.split)!r})"
        if spec.source == "glob":
            detail += "; the suffix is not part of an id: rename the file, or select one format with data.pattern"
        return Rejection(name, Reason.DUPLICATE_ID, detail, entry.origin, entry.split)
    if not line:
        seen.remember_origin(entry.id, entry.origin)
    if problem := label_problem(entry, spec.labels):
        return Rejection(name, Reason.BAD_ROW, problem, entry.origin, entry.split)
    return entry


def _line(origin: str) -> int:
    """Return the line of an origin like `manifest.csv:12`, or 0 for a file of a folder."""
    line = origin.rpartition(":")[2]
    return int(line) if line.isascii() and line.isdecimal() else 0


def _refuse_unheeded(spec: SourceSpec) -> None:
    """Refuse settings that this source does not use."""
    for setting, (is_given, sources) in HEEDED_BY.items():
        if is_given(spec) and spec.source not in sources:
            what = f"data.{setting} does not apply to the source {spec.source!r}, only to {' and '.join(sources)}"
            raise ConfigError(what, where="data", remedy=Command.of("config show", then="   (then remove it)"))
