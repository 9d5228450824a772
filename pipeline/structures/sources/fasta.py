"""`fasta`: sequences without structures, for embeddings only.

An id is the first word of a label; it may hold slashes and bars, because it never names a file. A letter in lower case
may be soft-masked, or an insertion that an alignment does not count, so such a sequence is refused. What B, J, O, U, X
and Z mean to a model is for later stages to decide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from shlex import quote
from typing import TYPE_CHECKING

from pipeline.errors import DataError
from pipeline.records import Item, Reason, Rejection
from pipeline.structures.atoms import Unusable
from pipeline.structures.sources.ids import shown
from pipeline.structures.sources.lines import text_lines

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from pipeline.structures.sources.spec import SourceSpec

MAX_LETTERS = 100_000
NOT_A_LETTER = re.compile(r"[^A-Z]")  # every ASCII letter is an IUPAC code


@dataclass(slots=True)
class _Record:
    """A record while its lines come in; letters beyond `MAX_LETTERS` are counted, not kept."""

    label: str
    line: int
    pieces: list[str] = field(default_factory=list)
    letters: int = 0

    def add(self, line: str) -> None:
        piece = "".join(line.split())
        self.letters += len(piece)
        if piece and self.letters <= MAX_LETTERS:
            self.pieces.append(piece)


def fasta_items(spec: SourceSpec) -> Generator[Item | Rejection, None, None]:
    """Yield the sequences of a FASTA file."""
    for record in _records(spec.path):
        name = next(iter(record.label.split()), "")
        origin = f"{spec.path.name}:{record.line}"
        try:
            yield Item(id=name, sequence=_sequence(record), origin=origin)
        except Unusable as error:
            yield Rejection(shown(name), error.reason, error.detail, origin)


def _records(path: Path) -> Iterator[_Record]:
    record = None
    for number, line in enumerate(text_lines(path), 1):
        if line.startswith(">"):
            if record is not None:
                yield record
            record = _Record(line[1:], number)
        elif record is not None:
            record.add(line)
        elif line.strip():
            remedy = f"head -n {number} {quote(str(path))}"
            raise DataError("text before the first '>': not FASTA", where=f"{path}:{number}", remedy=remedy)
    if record is not None:
        yield record


def _sequence(record: _Record) -> str:
    """Return the letters of a record without a final stop, or refuse it."""
    if record.letters > MAX_LETTERS:
        raise Unusable(Reason.TOO_MANY_RESIDUES, f"{record.letters:,} letters, {MAX_LETTERS:,} are allowed")
    sequence = "".join(record.pieces).removesuffix("*")
    if not sequence:
        raise Unusable(Reason.BAD_SEQUENCE, "the sequence is empty")
    if wrong := NOT_A_LETTER.search(sequence):
        what = f"{shown(wrong[0])!r} at position {wrong.start() + 1} is no residue letter"
        hint = "; write it in upper case if it is meant as a residue" if wrong[0].islower() else ""
        raise Unusable(Reason.BAD_SEQUENCE, what + hint)
    return sequence
