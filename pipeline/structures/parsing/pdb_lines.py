"""What the lines of a PDB file need before a parser reads them: chains behind END, and numbers that are none."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pipeline.records import Reason
from pipeline.structures.atoms import UnusableInput, name_text, name_word
from pipeline.structures.parsing import plain_pdb
from pipeline.structures.policy import CA_WORD, is_standard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pipeline.structures.atoms import AtomTable

ATOM_RECORDS = (b"ATOM", b"HETATM")
BEHIND_END = "chains_behind_end"  # the note of a file that was read on
CHAIN_COLUMN, SERIAL = slice(21, 22), slice(6, 11)
COLUMNS = {"the residue number": slice(22, 26), "x": slice(30, 38), "y": slice(38, 46), "z": slice(46, 54)}
NUMBER = re.compile(rb" *[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)? *| *[-+]?(?:nan|inf) *", re.IGNORECASE)
RESIDUE_NUMBER = re.compile(rb" *-?\d* *|[A-Za-z][0-9A-Za-z]{3}")  # also in base 36


def read_on(data: bytes) -> tuple[bytes, int]:
    """Return a PDB file that ends with its first END, and how many chains stood behind that and now stand before it.

    Two files put together, as benchmarks of docking have them, have other chains behind the first END. A chain that was
    there before is another frame of a trajectory, and is left where it is; so are files with MODEL records.
    """
    end = next(_ends(data), len(data))
    is_more = any(data.find(b"\n" + record, end) >= 0 for record in ATOM_RECORDS)
    if not is_more or data.startswith(b"MODEL ") or b"\nMODEL " in data:
        return data, 0
    kept, more, seen = [data[:end]], set[bytes](), _chains(data[:end])
    part, is_new = set[bytes](), False
    for line in data[end:].splitlines(keepends=True):
        record, chain = line[:6].rstrip(), line[CHAIN_COLUMN]
        if record == b"END":
            seen |= part
            part = set()
        elif record in ATOM_RECORDS and len(line) > COLUMNS["z"].stop:
            part.add(chain)
            is_new = chain not in seen
            more |= {chain} if is_new else set()
        if is_new and record in (*ATOM_RECORDS, b"TER", b"ANISOU"):
            kept.append(line[: SERIAL.start] + b"     " + line[SERIAL.stop :])  # no CONECT means these serials
    return b"".join([*kept, b"END\n"]) if more else data, len(more)


def _ends(data: bytes) -> Iterator[int]:
    """Yield where each END record begins."""
    at = data.find(b"\nEND")
    while at >= 0:
        if data[at + 1 : at + 7].split(b"\n")[0].rstrip() == b"END":
            yield at + 1
        at = data.find(b"\nEND", at + 1)


def _chains(data: bytes) -> set[bytes]:
    return {line[CHAIN_COLUMN] for line in data.splitlines() if line.startswith(ATOM_RECORDS)}


def check_numbers(data: bytes) -> None:
    """Refuse a file with a coordinate or a residue number that is none, which a parser would take for 0."""
    data = data[: next(_ends(data), len(data))]
    for start in plain_pdb.unusual_atoms(data):
        line = data[start : data.find(b"\n", start) % (len(data) + 1)]  # to its end, or the file's
        for what, columns in COLUMNS.items() if line.startswith((b"ATOM  ", b"HETATM")) else ():
            field, number = line[columns], NUMBER if len(what) == 1 else RESIDUE_NUMBER
            if not number.fullmatch(field) and len(line) >= columns.stop:
                at = data.count(b"\n", 0, start) + 1
                problem = f"line {at}: {what} is {field.decode('latin-1')!r}, not a number"
                raise UnusableInput(Reason.PARSE_ERROR, problem)


ORGANIC = {"H": 1, "C": 6, "N": 7, "O": 8, "P": 15, "S": 16}
POSSIBLE = np.array([*ORGANIC.values(), 34, 119], np.uint8)  # in a standard residue; gemmi's 119 is deuterium


def with_likely_elements(table: AtomTable) -> AtomTable:
    """Return a table in which an element that no standard residue has is the one that its atom's name begins with.

    Without a column of elements, as some programs of molecular dynamics write, CA and CD are calcium and cadmium where
    names begin a column early. A residue that is not standard is known by its N and C, and only its CA is looked at.
    """
    odd = np.flatnonzero(~np.isin(table.element_A, POSSIBLE))
    if not len(odd):
        return table
    has_n, has_c = (np.unique(table.resname_A[table.name_A == name_word(name)]) for name in ("N", "C"))
    names = {name: is_standard(name_text(name)) for name in np.unique(table.resname_A[odd]).tolist()}
    chained = set(np.intersect1d(has_n, has_c).tolist())
    element_A = table.element_A.copy()
    for atom, residue, name in zip(
        odd.tolist(), table.resname_A[odd].tolist(), table.name_A[odd].tolist(), strict=True
    ):
        if names[residue] or (name == CA_WORD and residue in chained):
            element_A[atom] = ORGANIC.get(name_text(name).lstrip("0123456789")[:1], element_A[atom])
    return replace(table, element_A=element_A)
