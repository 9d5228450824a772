"""A PDB file with its ligand moved: the lines that were read, with other coordinates in the columns that have them.

Shapes: N atoms of the ligand, P poses.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from itertools import chain as joined
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from pipeline.errors import DataError
from pipeline.records import Role
from pipeline.structures.atoms import BLANK_CHAIN
from pipeline.structures.parsing.pdb_lines import read_on
from pipeline.tasks.docking.docked_partners import free_names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from pipeline.tasks.docking.docked_partners import SourceFile
    from pipeline.tasks.docking.pose_quality import RigidMoves

ATOMS, BESIDE = (b"ATOM", b"HETATM"), (b"ANISOU", b"SIGATM", b"SIGUIJ", b"TER")
DROPPED = (b"MODEL", b"ENDMDL", b"END", b"MASTER")  # what no longer holds of a file with other atoms
CHAIN, RESIDUE_NAME, NUMBER, SERIAL, XYZ = slice(20, 22), slice(17, 20), slice(22, 27), slice(6, 11), slice(30, 54)
# Where records of two files have chain names when they are put into one; of the ligand's, no other headers are kept.
CHAIN_COLUMNS = {
    b"SEQRES": (11,),
    b"MODRES": (16,),
    b"HELIX": (19, 31),
    b"SHEET": (21, 32, 49, 64),
    b"SSBOND": (15, 29),
    b"LINK": (21, 51),
    b"CISPEP": (15, 29),
}
LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
MOST_MODELS, LARGEST_SERIAL = 9999, 99_999
FREE_TEXT = "REMARK  99 "
LINE_LENGTH = 80
Lines: TypeAlias = "list[tuple[bytes, Role | None]]"  # with whose atoms they are


@dataclass(frozen=True, slots=True)
class PosedPdb:
    """The lines of a complex, and which of them are atoms that move."""

    lines: tuple[bytes, ...]
    moved: tuple[int, ...]
    pos_N3: NDArray[np.float64]
    notes: tuple[str, ...] = ()  # what is not as in the files
    suffix: str = ".pdb"

    def pose(self, moves: RigidMoves, remarks: Sequence[str]) -> bytes:
        """Return the file in which the ligand has made the first of some moves."""
        lines = [*self.lines]
        for at, line in zip(self.moved, self._atoms(moves.of(self.pos_N3)[0]), strict=True):
            lines[at] = line
        first = next((at for at, line in enumerate(lines) if _record(line) in ATOMS), 0)
        return b"\n".join([*lines[:first], *_remarks([*remarks, *self.notes]), *lines[first:], b"END", b""])

    def frames(self, moves: RigidMoves, remarks: Sequence[str]) -> Iterator[bytes]:
        """Yield a file of several models, the ligand after each move."""
        if len(moves.turn_P33) > MOST_MODELS:
            raise DataError(
                f"a PDB file holds at most {MOST_MODELS:,} models, not {len(moves.turn_P33):,}",
                remedy="write fewer of them",
            )
        yield b"\n".join([*_remarks([*remarks, *self.notes]), b""])
        for model, pos_N3 in enumerate(moves.of(self.pos_N3), start=1):
            yield b"\n".join([b"MODEL     %4d" % model, *self._atoms(pos_N3), b"ENDMDL", b""])
        yield b"END\n"

    def _atoms(self, pos_N3: NDArray[np.float64]) -> Iterator[bytes]:
        for at, place in zip(self.moved, pos_N3.tolist(), strict=True):
            line = self.lines[at]
            yield line[: XYZ.start] + _columns(place) + line[XYZ.stop :]


def _columns(place: list[float]) -> bytes:
    """Return a position in three columns of eight; far from the origin with fewer decimals."""
    usual = b"%8.3f%8.3f%8.3f" % tuple(place)
    return usual if len(usual) == XYZ.stop - XYZ.start else b"".join(map(_column, place))


def _column(number: float) -> bytes:
    for decimals in (3, 2, 1, 0):
        text = b"%8.*f" % (decimals, number)
        if len(text) == 8:
            return text
    raise DataError(f"a coordinate of {number:,.0f} Å does not fit into a PDB file", remedy="skip that pose")


def _record(line: bytes) -> bytes:
    return line[:6].rstrip()


def _remarks(texts: Iterable[str]) -> list[bytes]:
    """Return remarks in as many lines as they take."""
    room = LINE_LENGTH - len(FREE_TEXT)
    plain = (text.encode("ascii", "replace").decode() for text in texts)
    pieces = (text[at : at + room] for text in plain for at in range(0, len(text), room))
    return [f"{FREE_TEXT}{piece}".encode() for piece in pieces]


def posed_pdb(sources: Sequence[SourceFile]) -> PosedPdb:
    """Return the lines of one file, or of two as one, in which the ligand's chains are renamed if need be."""
    files = [_kept(source) for source in sources]
    notes: tuple[str, ...] = ()
    if len(files) == 2:
        receptor, ligand = files
        names = _new_names(receptor, ligand)
        notes = tuple(f"LIGAND CHAIN {old or BLANK_CHAIN} IS RENAMED {new}" for old, new in names.items())
        files = [_together(receptor, [(_renamed(line, names), role) for line, role in ligand])]
    (lines,) = files
    moved = tuple(at for at, (line, role) in enumerate(lines) if role is Role.LIGAND and _record(line) in ATOMS)
    pos = [[float(lines[at][0][first : first + 8]) for first in (30, 38, 46)] for at in moved]
    return PosedPdb(tuple(line for line, _ in lines), moved, np.array(pos, np.float64).reshape(-1, 3), notes)


def _kept(source: SourceFile) -> Lines:
    """Return the lines of a file that are written, with whose atoms they are; the ligand's without anisotropy."""
    kept = []
    for line in _of_model(read_on(source.data)[0].splitlines(), source.model):
        record = _record(line)
        if record in ATOMS or record in BESIDE:
            role = source.role_of(*_place(line))
            is_turned = role is Role.LIGAND and record not in (*ATOMS, b"TER")
            if source.keeps(role) and not is_turned:
                kept.append((line, role))
        elif record not in DROPPED and line.strip():
            kept.append((line, None))
    return kept


def _of_model(lines: Iterable[bytes], model: int) -> Iterator[bytes]:
    """Yield the lines of one model, counted from 1, and those outside of models."""
    number, is_inside = 0, False
    for line in lines:
        record = _record(line)
        if record == b"MODEL":
            number, is_inside = number + 1, True
        elif record == b"ENDMDL":
            is_inside = False
        elif not is_inside or number == model:
            yield line


def _place(line: bytes) -> tuple[str, str]:
    """Return the chain and the molecule, CHAIN:RESIDUE:NUMBER, of an atom's line."""
    chain = line[CHAIN].decode("latin-1").strip() or BLANK_CHAIN
    name, number = (line[columns].decode("latin-1").replace(" ", "") for columns in (RESIDUE_NAME, NUMBER))
    return chain, f"{chain}:{name}:{number}"


def _new_names(receptor: Lines, ligand: Lines) -> dict[str, str]:
    """Return new names for those of the ligand's chains that the receptor has, too."""
    taken, own = (
        dict.fromkeys(line[CHAIN].decode("latin-1").strip() for line, _ in lines if _record(line) in ATOMS)
        for lines in (receptor, ligand)
    )
    return free_names({*taken, *own}, [name for name in own if name in taken], LETTERS)


def _renamed(line: bytes, names: dict[str, str]) -> bytes:
    """Return a line of the ligand's file with the new names of its chains."""
    if _record(line) in (*ATOMS, *BESIDE):
        new = names.get(line[CHAIN].decode("latin-1").strip())
        return line if new is None else line[: CHAIN.start] + new.encode().rjust(2) + line[CHAIN.stop :]
    for column in CHAIN_COLUMNS.get(_record(line), ()):
        old = line[column : column + 1].decode("latin-1").strip()
        if old in names and column < len(line):
            line = line[:column] + names[old].encode() + line[column + 1 :]
    return line


def _together(receptor: Lines, ligand: Lines) -> Lines:
    """Return two files as one: headers, the receptor's atoms, the ligand's, and bonds if all serial numbers fit."""
    first, last = (_sections(lines) for lines in (receptor, ligand))
    serials = [_serial(line) for line, _ in joined(first[1], last[1])]
    bonds: Lines = []
    atoms = last[1]
    if first[2] or last[2]:
        offset = max((_serial(line) for line, _ in first[1]), default=0)
        if 0 not in serials and offset + max(serials[len(first[1]) :], default=0) <= LARGEST_SERIAL:
            atoms = [(_shifted(line, offset, 1), role) for line, role in atoms]
            bonds = [*first[2], *((_shifted(line, offset, 5), role) for line, role in last[2])]
    headers = [(line, role) for line, role in last[0] if _record(line) in CHAIN_COLUMNS]
    end = [] if _record(first[1][-1][0]) == b"TER" else [(b"TER", None)]
    return [*first[0], *headers, *first[1], *end, *atoms, *bonds]


def _sections(lines: Lines) -> tuple[Lines, ...]:
    """Return headers, atoms with what stands beside them, and bonds."""
    found: tuple[Lines, ...] = ([], [], [])
    for line, role in lines:
        record = _record(line)
        found[1 if record in ATOMS or record in BESIDE else 2 if record == b"CONECT" else 0].append((line, role))
    return found


def _serial(line: bytes) -> int:
    """Return the serial number of an atom, 0 where it is none."""
    text = line[SERIAL].strip()
    return int(text) if text.isdigit() else 1 if _record(line) == b"TER" else 0


def _shifted(line: bytes, offset: int, fields: int) -> bytes:
    """Return a line with its serial numbers, one or several in a row, counted from elsewhere."""
    for first in range(SERIAL.start, SERIAL.start + 5 * fields, 5):
        text = line[first : first + 5]
        if text.strip().isdigit():
            line = line[:first] + b"%5d" % (int(text) + offset) + line[first + 5 :]
    return line
