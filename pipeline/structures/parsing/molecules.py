"""Small molecules in files of their own (SDF, MOL, MOL2), read by RDKit: one molecule a file.

Hydrogens are those of the file; bond orders are ignored. A molecule whose valences or aromatic rings RDKit rejects is
read all the same, and counted as `unsanitised`.
An SDF has no names: its atoms are C1, C2, N1, … by element. Shapes: A atoms, B bonds.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.records import Reason
from pipeline.structures.atoms import AtomTable, Links, UnusableInput, name_word
from pipeline.structures.policy import HETATM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

REVISION = 1  # raise it when the same file gives other atoms
RESIDUE = "LIG"
NON_POLYMER = 2
MOL2 = "@<TRIPOS>"
BOND_TYPES = ("1", "2", "3", "am", "ar", "du", "un", "nc")  # the last: not connected
NO_ELEMENTS = ("LP", "DU", "ANY", "HAL", "HET", "HEV", "*")  # types of MOL2; RDKit leaves lone pairs out in silence
CLOCK = re.compile(r"^\[\d\d:\d\d:\d\d\] ?")
NOISE = re.compile(r"\**|-*|.*-condition Violation|(Violation occurred|Failed Expression).*")
RDKIT_LOG = threading.Lock()  # there is one, and threads of a loader read molecules at once


def read_molecule(data: bytes, form: str) -> AtomTable:
    """Return the atoms of the one molecule in a file."""
    from rdkit import Chem

    # A byte is a column: RDKit would cut a longer letter in two, and fail to put the half into a message.
    text = data.decode("ascii", "replace").replace("\ufffd", "?").replace("\r\n", "\n")
    with _logged() as messages:
        if form == "mol2":  # None where it cannot be read
            block = _only_mol2(text)
            molecule = Chem.MolFromMol2Block(block, sanitize=False, removeHs=False, cleanupSubstructures=False)
        else:
            records = [record for record in re.split(r"^\$\$\$\$.*\n?", text, flags=re.MULTILINE) if record.strip()]
            _check_one(len(records))
            molecule = Chem.MolFromMolBlock(records[0], sanitize=False, removeHs=False, strictParsing=True)
        if molecule is None:
            raise UnusableInput(Reason.PARSE_ERROR, _gist(messages, form))
        if not molecule.GetNumAtoms():
            raise UnusableInput(Reason.NO_ATOMS, "the molecule has no atoms")
        return _table(molecule, is_sane=not Chem.DetectChemistryProblems(molecule))


def _only_mol2(text: str) -> str:
    """Return the text of a MOL2 file with one molecule; refuse what RDKit would silently leave out."""
    text = re.sub(rf"^({MOL2}\w+)[ \t]+$", r"\1", text, flags=re.MULTILINE)
    _check_one(len(re.findall(f"^{MOL2}MOLECULE", text, flags=re.MULTILINE)))
    atoms, bonds = _rows(text, "ATOM"), _rows(text, "BOND")
    for number, name, *_, kind in (cells[:6] for cells in atoms if len(cells) > 5):
        if kind.partition(".")[0].upper() in NO_ELEMENTS:
            raise UnusableInput(Reason.PARSE_ERROR, f"atom {number} ({name}) has the type {kind}, not an element")
    for number, left, right, kind in (cells[:4] for cells in bonds if len(cells) > 3):
        if kind.lower() not in BOND_TYPES:
            what = f"bond {number} (atoms {left} and {right}) has the type {kind}, which is unknown"
            raise UnusableInput(Reason.PARSE_ERROR, what)
    header = (text.partition(f"{MOL2}MOLECULE")[2].splitlines() + [""] * 3)[2].split()
    for what, rows, count in zip(("atoms", "bonds"), (atoms, bonds), header, strict=False):
        if not count.isdecimal() or count.lstrip("0") != str(len(rows) or ""):
            raise UnusableInput(Reason.PARSE_ERROR, f"the molecule declares {count[:20]} {what} but has {len(rows)}")
    return text


def _rows(text: str, section: str) -> list[list[str]]:
    """Return the rows of a section of a MOL2 file, cell by cell."""
    body = text.partition(f"{MOL2}{section}\n")[2].partition(MOL2)[0]
    return [line.split() for line in body.splitlines() if line.strip() and not line.startswith("#")]


def _check_one(molecules: int) -> None:
    """Refuse a file with no molecule, or with several."""
    if molecules > 1:
        what = f"the file holds {molecules} molecules; write each to its own file"
        raise UnusableInput(Reason.AMBIGUOUS_PARTNERS, what)
    if not molecules:
        raise UnusableInput(Reason.NO_ATOMS, "the file holds no molecule")


@contextmanager
def _logged() -> Iterator[list[str]]:
    """Collect RDKit's log messages, which go to the terminal otherwise."""
    from rdkit import rdBase

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("rdkit")
    with RDKIT_LOG:
        before, logger.handlers = logger.handlers, [handler]
        streams = re.findall(r"(rdApp\.\w+):(\w+)", rdBase.LogStatus())
        rdBase.LogToPythonLogger()
        try:
            yield messages
        finally:
            rdBase.LogToCppStreams()  # which turns each stream on or off as it is by default
            for name, state in streams:
                (rdBase.EnableLog if state == "enabled" else rdBase.DisableLog)(name)
            logger.handlers = before


def _gist(messages: list[str], form: str) -> str:
    """Return RDKit's messages for users: without clock, stack trace and source files."""
    lines = (CLOCK.sub("", line).strip() for line in "\n".join(messages).partition("Stacktrace:")[0].splitlines())
    text = "; ".join(line for line in lines if not NOISE.fullmatch(line))
    hint = "; a MOL2 file has SYBYL's atom types" if form == "mol2" and "not found" in text else ""
    return (text or "RDKit finds no complete molecule in the file")[:200] + hint


def _table(molecule: Any, *, is_sane: bool) -> AtomTable:
    """Return a molecule as one residue of a chain without a name."""
    atoms = list(molecule.GetAtoms())
    size = len(atoms)
    zeros_A = np.zeros(size, np.int8)
    bonds_B2 = _bonds(molecule)
    return AtomTable(
        pos_A3=_positions(molecule),
        name_A=np.array([name_word(name) for name in _names(atoms)], np.uint64),
        resname_A=np.full(size, name_word(RESIDUE), np.uint64),
        chain_A=np.zeros(size, np.uint64),
        number_A=np.ones(size, np.int32),
        icode_A=zeros_A + np.int8(ord(" ")),
        altloc_A=zeros_A,
        occupancy_A=np.ones(size, np.float32),
        element_A=np.array([_element(atom) for atom in atoms], np.uint8),
        entity_A=np.full(size, NON_POLYMER, np.uint8),
        hetero_A=np.full(size, HETATM, np.int8),
        links=lambda: Links(bonds_B2, np.ones(len(bonds_B2), np.bool_), is_complete=True),
        notes={} if is_sane else {"unsanitised": 1},
    )


def _bonds(molecule: Any) -> NDArray[np.int64]:
    """Return the pairs of atoms that are bonded; V3000 also lists hydrogen bonds, which are left out."""
    from rdkit import Chem

    pairs = [
        (bond.GetBeginAtomIdx(), bond.GetEndAtomIdx())
        for bond in molecule.GetBonds()
        if bond.GetBondType() != Chem.BondType.HYDROGEN
    ]
    return np.sort(np.array(pairs, np.int64).reshape(-1, 2), axis=1)


def _element(atom: Any) -> int:
    """Return an atom's element; deuterium is hydrogen."""
    number: int = atom.GetAtomicNum()
    if not number or atom.HasQuery():
        what = "a list" if number else repr(atom.GetSymbol())
        raise UnusableInput(Reason.PARSE_ERROR, f"atom {atom.GetIdx() + 1} is {what}, not an element")
    return number


def _names(atoms: list[Any]) -> list[str]:
    """Return the atoms' names: those of MOL2, or element and ordinal."""
    if all(atom.HasProp("_TriposAtomName") for atom in atoms):
        return [atom.GetProp("_TriposAtomName") for atom in atoms]
    counts: Counter[str] = Counter()
    names = []
    for symbol in (atom.GetSymbol() for atom in atoms):
        counts[symbol] += 1
        names.append(f"{symbol}{counts[symbol]}")
    return names


def _positions(molecule: Any) -> NDArray[np.float64]:
    """Return the atoms' positions; refuse a file with a drawing or without coordinates."""
    if not molecule.GetNumConformers():
        raise UnusableInput(Reason.PARSE_ERROR, "the molecule has no coordinates")
    conformer = molecule.GetConformer()
    pos_A3 = np.array(conformer.GetPositions(), np.float64)
    is_drawing = not conformer.Is3D() or (len(pos_A3) > 1 and not pos_A3[:, 2].any())
    if not pos_A3.any() or is_drawing:
        what = "all coordinates are 0" if not pos_A3.any() else "every z is 0, as in a drawing"
        raise UnusableInput(Reason.PARSE_ERROR, f"the molecule has no 3D coordinates: {what}")
    return pos_A3
