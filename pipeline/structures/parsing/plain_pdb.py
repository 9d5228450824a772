"""A fast parser of plain PDB files: ATOM lines of one length, of standard residues in standard columns.

Files prepared for machine learning are mostly plain. A file with even one unusual character is left to gemmi. For plain
files every column equals gemmi's bit for bit, except that waters are left out (test_plain_pdb.py compares them). The
rules are a subset of gemmi's. Shapes: A atoms, R residues, N numbers, B bytes.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from pipeline.structures.atoms import AtomTable, changes, name_word

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

REVISION = 0  # part of the keys; raise it when this parser was found to differ from gemmi

# Records that change no column, whatever they say. CRYST1 is none of them: gemmi refuses a file for an impossible cell.
IDLE = frozenset(b"HEADER TITLE COMPND SOURCE KEYWDS EXPDTA AUTHOR REVDAT JRNL REMARK SEQRES".split()) | {b""}
ATOM, HETATM = (int.from_bytes(record, "little") for record in (b"ATOM", b"HETA"))
# Where a residue's number and the whole parts of x, y and z begin, and the other parts of these.
WHOLE, FRACTION = np.array([[22], [30], [38], [46]]), np.array([[34], [42], [50]])
SHORTEST = 79  # bytes of a line that reaches the element, line feed included
LINE_FEED, CARRIAGE_RETURN, SPACE = 10, 13, 32

# The plain residues: columns 18-21 as a number (the last one blank), sorted, and the name of each.
AMINO_ACIDS = b"ALA ARG ASN ASP CYS GLN GLU GLY HIS ILE LEU LYS MET PHE PRO SER THR TRP TYR VAL".split()
NUCLEOTIDES = b"A C G U DA DC DG DT".split()
RESIDUES = sorted((int.from_bytes(name.rjust(3) + b" ", "little"), name) for name in AMINO_ACIDS + NUCLEOTIDES)
RESIDUE_CODES = np.array([code for code, _ in RESIDUES], np.uint32)
RESIDUE_WORDS = np.array([name_word(name.decode()) for _, name in RESIDUES], np.uint64)
POLYMER = 1  # gemmi's EntityType; it may differ by TER records, which mean nothing to a policy for these residues

# Columns 77-78 as a number → gemmi's number of the element, 0 if it is not plain.
ELEMENTS = np.zeros(1 << 16, np.uint8)
for _symbol, _number in ((b" H", 1), (b" C", 6), (b" N", 7), (b" O", 8), (b" P", 15), (b" S", 16), (b"SE", 34)):
    ELEMENTS[int.from_bytes(_symbol, "little")] = _number

# Occupancies: columns 54-57 and 58-61 as numbers, of which one character each is no part of them.
WHOLE_PART, BLANK_BEFORE, FRACTION_PART, NOUGHT_AFTER = np.array([0xFFFFFF00, 0x20, 0x00FFFFFF, 0x30000000], np.uint32)
ONE = int.from_bytes(b"  1.00", "little")  # the most frequent occupancy, and which of 8 bytes it takes
OCCUPANCY_BYTES = 0xFFFF_FFFF_FFFF

# The line of a water: its chain, number and insertion code, and coordinates, each a number in its own columns.
WATER = re.compile(
    rb"HETATM[ -~]{11}HOH ([ -~](?: {3}\d| {2}[\d-]\d| [\d-]\d\d|[\d-]\d{3})[ A-Z])   "
    rb"(?:(?= *-?\d+\.)[ \d-]{4}\.\d{3}){3}[ -~]*\r?\n"
)
WINDOW_LINES = 1 << 14  # lines that are checked at once
TOGETHER = 16  # lines that are compared as one row: numpy is fast on long rows

# Atom names, 4 bytes as one integer.
SPREAD, SIGN = np.uint32(0x101001), np.uint32(1 << 31)
FIRST_BYTE, LAST_BLANK, BLANKS, LOW_BITS, HIGH_BITS = 0xFF, 0x20000000, 0x20202020, 0x7F7F7F7F, 0x80808080


Water: TypeAlias = "tuple[bytes, int]"  # chain, number and insertion code; how many ATOM lines stand before it


class _NotPlain(Exception):
    """The file is not plain: gemmi has to read it."""


class _AtomLines(NamedTuple):
    """ATOM lines of one length."""

    text: bytes
    length: int

    @property
    def atoms(self) -> int:
        return len(self.text) // self.length

    def column(self, first: int, dtype: str) -> NDArray[Any]:
        """Return the bytes of every line from `first` on, as numbers of a type."""
        return self.view(first, dtype).copy()

    def view(self, first: int, dtype: str) -> NDArray[Any]:
        """View the bytes of every line from `first` on, as numbers of a type."""
        return np.ndarray(self.atoms, dtype, self.text, first, (self.length,))


def read_plain_pdb(data: bytes, *, to_end: bool = False) -> AtomTable | None:
    """Return the atoms of a plain PDB file under the default `FileReading`; None where gemmi has to read it.

    Waters, which no policy keeps, are only counted. `to_end` also leaves to others a file with atoms behind its END,
    for which there is `read_structure.read_on`.
    """
    try:
        return _table(*_split(data, to_end=to_end))
    except _NotPlain:
        return None


def _require(condition: bool | np.bool_) -> None:  # noqa: FBT001 - it reads as a sentence
    if not condition:
        raise _NotPlain


def unusual_atoms(data: bytes) -> list[int]:
    """Return where each atom's line begins whose numbers are not written as in nearly every file."""
    start_L = np.flatnonzero(np.frombuffer(b"\n" + data, np.uint8) == LINE_FEED)
    code_B = np.ndarray(len(data) + SHORTEST, "<u4", data + b" " * (SHORTEST + 3), 0, (1,))
    start_L = start_L[(code_B[start_L] == ATOM) | (code_B[start_L] == HETATM)]
    whole_4L, fraction_3L = (code_B[columns + start_L] for columns in (WHOLE, FRACTION))
    is_usual_L = _whole_numbers().has(whole_4L).all(axis=0) & _fractions().has(fraction_3L).all(axis=0)
    unusual: list[int] = start_L[~is_usual_L].tolist()
    return unusual


def _split(data: bytes, *, to_end: bool) -> tuple[_AtomLines, list[Water]]:
    """Return the ATOM lines and the waters."""
    view, parts, waters = memoryview(data), [], []
    at = size = length = 0
    stops: Iterator[int] = iter(())
    while at < len(data):
        if data.startswith(b"ATOM", at):
            length = length or data.find(b"\n", at) + 1 - at
            _require(length >= SHORTEST)
            stop = next((stop for stop in stops if stop > at), -1)
            if stop < 0 or (stop - at) % length:  # the last window ended, or was out of step with the lines
                stops = _other_lines(data, at, length)
                stop = next(stops)
            _require(stop > at)
            parts.append(view[at:stop])
            size += stop - at
        elif water := WATER.match(data, at):
            _require(size > 0)
            waters.append((water[1], size // length))
            stop = water.end()
        else:
            stop = data.find(b"\n", at) + 1 or len(data)
            if _record(data[at:stop]) == b"END":
                _require(not to_end or all(data.find(b"\n" + more, at) < 0 for more in (b"ATOM", b"HETATM")))
                break
        at = stop
    _require(size > 0)
    return _AtomLines(b"".join(parts), length), waters


def _other_lines(data: bytes, at: int, length: int) -> Iterator[int]:
    """Yield where the next lines, if all have that length, are no ATOM lines, and at last where they end."""
    lines = min((len(data) - at) // length, WINDOW_LINES)
    others = np.flatnonzero(np.ndarray(lines, "<u4", data, at, (length,)) != ATOM)
    return (at + length * int(line) for line in np.append(others, lines))


def _record(line: bytes) -> bytes:
    """Return the name of a record other than ATOM; require one that is allowed in a plain file."""
    name = line[:6].rstrip(b" \r\n")
    _require((name in IDLE or name in (b"TER", b"END")) and line.isascii() and b"\0" not in line)
    return name


def _table(lines: _AtomLines, waters: Sequence[Water]) -> AtomTable:
    """Return the columns; those that the atoms of a residue share are read once for each residue."""
    _check_text(lines)
    # A residue begins where name, chain, number, insertion code or segment changes.
    first_R = np.flatnonzero(changes(*(lines.column(*place) for place in ((17, "<u8"), (25, "<u2"), (72, "<u4")))))
    code_R = lines.view(17, "<u4")[first_R]
    residue_R = np.searchsorted(RESIDUE_CODES[:-1], code_R)
    _require((RESIDUE_CODES[residue_R] == code_R).all())
    chain_R = lines.view(21, "u1")[first_R]
    number_R = _whole_numbers().read(lines.view(22, "<u4")[first_R]).astype(np.int32) // 1000
    icode_R = lines.view(26, "i1")[first_R]
    _check_residues(changes(chain_R), number_R, icode_R)
    _check_waters(waters, first_R, chain_R, lines.atoms)
    length_R = np.append(first_R[1:], lines.atoms) - first_R
    return AtomTable(
        pos_A3=_positions(lines),
        name_A=_names(lines),
        resname_A=RESIDUE_WORDS[residue_R].repeat(length_R),
        chain_A=np.where(chain_R == SPACE, 0, chain_R).astype(np.uint64).repeat(length_R),
        number_A=number_R.repeat(length_R),
        icode_A=icode_R.repeat(length_R),
        altloc_A=_altlocs(lines),
        occupancy_A=_occupancies(lines),
        element_A=_elements(lines),
        entity_A=np.full(lines.atoms, POLYMER, np.uint8),
        hetero_A=np.full(lines.atoms, ord("A"), np.int8),
        first_S=first_R,
        notes={"waters": len({place for place, _ in waters})} if waters else {},
    )


def _check_text(lines: _AtomLines) -> None:
    """Require ATOM lines of printable ASCII, all with LF or all with CR LF at their ends."""
    end_A = lines.column(lines.length - 2, "<u2")
    end = int(end_A[0])
    _require(end >> 8 == LINE_FEED and (end_A >> 8 == LINE_FEED).all())
    has_return = end & 0xFF == CARRIAGE_RETURN
    _require(not has_return or (end_A == end).all())
    text_B = np.frombuffer(lines.text, np.int8)  # below 0 where it is not ASCII
    text = lines.length - 1 - has_return
    whole = len(text_B) - len(text_B) % (TOGETHER * lines.length)
    lowest_TL = np.minimum.reduce(text_B[:whole].reshape(-1, TOGETHER * lines.length), axis=0, initial=SPACE)
    for lowest_L in (lowest_TL, text_B[whole:]):
        _require((lowest_L.reshape(-1, lines.length)[:, :text] >= SPACE).all())


def _check_residues(starts_R: NDArray[np.bool_], number_R: NDArray[np.int32], icode_R: NDArray[np.int8]) -> None:
    """Require residues in one piece: gemmi brings pieces together, out of the order of the file."""
    _require(((icode_R == SPACE) | ((icode_R >= ord("A")) & (icode_R <= ord("Z")))).all())
    place_R = (starts_R.cumsum() * 100_000 + number_R) * 128 + icode_R
    _require((place_R[1:] > place_R[:-1]).all() or len(np.unique(place_R)) == len(place_R))


def _check_waters(waters: Sequence[Water], first_R: NDArray[np.int64], chain_R: NDArray[np.uint8], atoms: int) -> None:
    """Require waters in one piece, between residues and after the first of their chain.

    Then gemmi has as many waters, and the same chains and residues besides.
    """
    if not waters:
        return
    runs = sum(water != before for before, water in pairwise([None, *waters]))
    _require(len({place for place, _ in waters}) == runs)
    _require({before for _, before in waters} <= {*first_R.tolist(), atoms})
    starts = dict(zip(chain_R[::-1].tolist(), first_R[::-1].tolist(), strict=True))
    _require(all(starts.get(place[0], atoms) < before for place, before in waters))


def _names(lines: _AtomLines) -> NDArray[np.uint64]:
    """Return the atom names, each with at most one blank before it and none inside."""
    name_A = lines.column(12, "<u4")
    name_A = np.where(name_A & FIRST_BYTE == SPACE, name_A >> 8 | LAST_BLANK, name_A)
    # A byte that is not blank comes out of the sum with its high bit set; of ASCII, nothing is carried to the next.
    filled_A = (((name_A ^ BLANKS) + LOW_BITS & HIGH_BITS) >> 7) * 0xFF
    _require(not (filled_A & filled_A + 1).any() and (filled_A & 1).all())
    word_A: NDArray[np.uint64] = (name_A & filled_A).astype(np.uint64)
    return word_A


def _altlocs(lines: _AtomLines) -> NDArray[np.int8]:
    """Return the alternative that each atom is of, 0 for none."""
    altloc_A = lines.column(16, "i1")
    altloc_A[altloc_A == SPACE] = 0
    return altloc_A


def _elements(lines: _AtomLines) -> NDArray[np.uint8]:
    element_A: NDArray[np.uint8] = ELEMENTS.take(lines.view(76, "<u2"), mode="wrap")
    _require(element_A.all())
    return element_A


def _positions(lines: _AtomLines) -> NDArray[np.float64]:
    """Return the positions; x, y and z lie in memory one after the other."""
    code_23A = np.empty((2, 3, lines.atoms), np.uint32)
    for half, first in ((0, 30), (1, 34)):
        for axis in range(3):
            code_23A[half, axis] = lines.view(first + 8 * axis, "<u4")
    whole_N, fraction_N = code_23A.reshape(2, -1)
    return _decimals(whole_N, fraction_N).reshape(3, -1).T


def _occupancies(lines: _AtomLines) -> NDArray[np.float32]:
    if (lines.column(54, "<u8") & OCCUPANCY_BYTES == ONE).all():
        return np.ones(lines.atoms, np.float32)
    whole_A: NDArray[np.uint32] = lines.column(53, "<u4") & WHOLE_PART | BLANK_BEFORE
    fraction_A: NDArray[np.uint32] = lines.column(57, "<u4") & FRACTION_PART | NOUGHT_AFTER
    return _decimals(whole_A, fraction_A).astype(np.float32)


def _decimals(whole_codes_N: NDArray[np.uint32], fraction_codes_N: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return numbers written as %8.3f, of their first and their last four characters.

    A whole number divided by 1000 is the float nearest to the decimal, and that is what gemmi makes of the text.
    """
    whole_N, thousandths_N = _whole_numbers().read(whole_codes_N), _fractions().read(fraction_codes_N)
    thousandths_N.view(np.uint32)[:] |= whole_N.view(np.uint32) & SIGN  # "-0" is a negative number, too
    thousandths_N += whole_N
    return np.divide(thousandths_N, 1000, dtype=np.float64)


class _Table(NamedTuple):
    """The values of texts of four characters, indexed by what `_places` makes of these."""

    codes: NDArray[np.uint32]
    values: NDArray[np.float32]

    def has(self, code_N: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return which texts are in the table."""
        known_N: NDArray[np.bool_] = self.codes.take(_places(code_N), mode="wrap") == code_N  # none is beyond
        return known_N

    def read(self, code_N: NDArray[np.uint32]) -> NDArray[np.float32]:
        """Return the value of each text; require texts that are in the table."""
        _require(self.has(code_N).all())
        return self.values.take(_places(code_N), mode="wrap")


def _places(code_N: NDArray[np.uint32]) -> NDArray[np.intp]:
    """Return four bytes as 16 bits: of no two of the texts in a table the same."""
    spread_N: NDArray[np.uint32] = code_N * SPREAD
    spread_N >>= 16
    return spread_N.astype(np.intp)


@cache
def _whole_numbers() -> _Table:
    """Return the numbers from -999 to 9999, and -0, right-justified; their values are thousandths."""
    return _table_of([*((f"{number:4d}", 1000 * number) for number in range(-999, 10_000)), ("  -0", -0.0)])


@cache
def _fractions() -> _Table:
    return _table_of((f".{number:03d}", number) for number in range(1000))


def _table_of(pairs: Iterable[tuple[str, float]]) -> _Table:
    """Return the table of texts and their values."""
    texts, values = zip(*pairs, strict=True)
    code_N = np.frombuffer("".join(texts).encode(), "<u4")
    table = _Table(np.zeros(1 << 16, np.uint32), np.zeros(1 << 16, np.float32))
    place_N = _places(code_N)
    table.codes[place_N], table.values[place_N] = code_N, values
    return table
