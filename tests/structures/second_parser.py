"""Compares what the package reads from a file with a second parser: biotite.

Only what both define is compared. In each protein chain: biotite has every residue that we read, under the same name;
we have every standard amino acid of an ATOM record with a CA, with the right letter; and the CA atoms have the same
position. Not compared are: letters of modified residues and CA atoms of residues with alternatives, which depend on the
policy; residues that share number and insertion code within a chain; assemblies and label names; atoms behind the last
model; AMBER topologies and small molecules; and BinaryCIF, which we read by biotite ourselves.
"""

from __future__ import annotations

import io
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.records import Kind
from pipeline.structures.atoms import BLANK_CHAIN, name_text
from pipeline.structures.policy import BACKBONE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from pipeline.structures.policy import Chain, Structure

    Place = tuple[int, str]  # a residue's number and insertion code

APART = 2e-3  # Å; biotite keeps float32, and files have three decimals
LETTERS = {
    "ALA": "A", "ARG": "R", "ASN": "N", "ASP": "D", "CYS": "C", "GLN": "Q", "GLU": "E", "GLY": "G", "HIS": "H",
    "ILE": "I", "LEU": "L", "LYS": "K", "MET": "M", "PHE": "F", "PRO": "P", "SER": "S", "THR": "T", "TRP": "W",
    "TYR": "Y", "VAL": "V",
}  # fmt: skip
CA = BACKBONE.index("CA")


@dataclass(slots=True)
class _Residue:
    """A residue as the second parser has it."""

    names: set[str] = field(default_factory=set)
    ca: list[Any] = field(default_factory=list)
    is_atom: bool = False
    has_alternatives: bool = False

    @property
    def letter(self) -> str | None:
        """Its letter, if it is certainly a standard amino acid of a chain."""
        return LETTERS.get(next(iter(self.names))) if len(self.names) == 1 and self.is_atom and self.ca else None


def read_second(data: bytes, form: str) -> Any:
    """Return the atoms of a file as the second parser reads them."""
    from biotite.structure.io import pdb, pdbx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form == "pdb":
            file = pdb.PDBFile.read(io.StringIO(data.decode("latin-1")))
            return file.get_structure(model=1, altloc="all", extra_fields=["occupancy"])
        return pdbx.get_structure(pdbx.CIFFile.read(io.StringIO(data.decode())), model=1, altloc="all")


def disagreements(atoms: Any, structure: Structure, chain: Chain) -> Iterator[str]:
    """Describe each difference between the second parser and us in a protein chain."""
    if chain.kind is not Kind.PROTEIN:
        return
    theirs, ours = _theirs(atoms, chain.name), _ours(structure, chain)
    twice = {place for place, count in Counter(place for place, _ in ours).items() if count > 1}
    for place, residue in ours:
        if place not in twice:
            yield from _residue(chain, structure, residue, theirs.get(place), place)
    known = {place for place, _ in ours}
    for place, other in theirs.items():
        if other.letter and place not in known:
            yield f"chain {chain.name}: {_name(other, place)} is there to biotite, and not to us"


def _residue(chain: Chain, structure: Structure, residue: int, other: _Residue | None, place: Place) -> Iterator[str]:
    """Describe each difference between the two parsers in a residue."""
    name, letter = name_text(structure.name_R[residue]), chain.sequence[residue - chain.first]
    if other is None or name not in other.names:
        theirs = "none" if other is None else _name(other, place)
        yield f"chain {chain.name}: residue {place[0]}{place[1]} is {name} to us, {theirs} to biotite"
        return
    if other.letter and letter != other.letter:
        yield f"chain {chain.name}: {_name(other, place)} has the letter {letter}"
    if other.has_alternatives:
        return
    atom = int(structure.backbone_R5[residue, CA])
    if (atom >= 0) != bool(other.ca):
        has, lacks = ("us", "biotite") if atom >= 0 else ("biotite", "us")
        yield f"chain {chain.name}: {_name(other, place)} has a CA to {has}, and none to {lacks}"
    elif atom >= 0 and len(other.ca) == 1:
        apart = float(np.abs(structure.pos_A3[atom] - other.ca[0]).max())
        if apart > APART + float(np.spacing(np.float32(np.abs(other.ca[0]).max()))):
            yield f"chain {chain.name}: the CA of {_name(other, place)} is {apart:.3f} Å from where biotite has it"


def _ours(structure: Structure, chain: Chain) -> list[tuple[Place, int]]:
    """Return the residues of a chain as we have them, by number and insertion code."""
    icodes = [chr(code).strip("\0 ") for code in structure.icode_R[chain.first : chain.last].tolist()]
    numbers = structure.number_R[chain.first : chain.last].tolist()
    return list(zip(zip(numbers, icodes, strict=True), range(chain.first, chain.last), strict=True))


def _theirs(atoms: Any, name: str) -> Mapping[Place, _Residue]:
    """Return the residues of a chain as the second parser has them."""
    mine: NDArray[np.bool_] = atoms.chain_id == name
    if name == BLANK_CHAIN:
        mine |= np.isin(atoms.chain_id, ["", " "])
    chain_atoms = atoms[mine]
    residues: dict[Place, _Residue] = {}
    # In old files other things stand where elements do now; calcium has its own in any.
    is_ca = (chain_atoms.atom_name == "CA") & (chain_atoms.element != "CA")
    columns = (
        chain_atoms.res_id,
        chain_atoms.ins_code,
        chain_atoms.res_name,
        chain_atoms.hetero,
        chain_atoms.altloc_id,
        is_ca,
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for at, (number, icode, residue, is_het, altloc, ca) in enumerate(rows):
        other = residues.setdefault((number, icode.strip()), _Residue())
        other.names.add(residue)
        other.is_atom |= not is_het
        other.has_alternatives |= altloc.strip() not in ("", ".", "?")
        if ca:
            other.ca.append(chain_atoms.coord[at].astype(np.float64))
    return residues


def _name(residue: _Residue, place: Place) -> str:
    return f"{'/'.join(sorted(residue.names))} {place[0]}{place[1]}"
