"""What a file itself says of bonds: SSBOND, LINK and CONECT of PDB, struct_conn of mmCIF; as pairs of its atoms.

Nothing of this is needed to scan, so it is looked up only when a graph of atoms asks. Shapes: A atoms, L links.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import gemmi
import numpy as np

from pipeline.structures.atoms import Links, text, word

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

COVALENT = (gemmi.ConnectionType.Covale, gemmi.ConnectionType.Disulf)
COPY_MARK = "-"
End: TypeAlias = "tuple[int, int, int, int, int]"  # chain, number, insertion code, residue name, atom name
Pair: TypeAlias = "tuple[int, int]"


def links_of(
    structure: gemmi.Structure, flat: gemmi.FlatStructure, aliases: Mapping[str, str], *, is_assembly: bool
) -> Links:
    """Return the pairs of atoms that a file says are bonded; contacts of metals and of hydrogen bonds are not."""
    ends = _ends(structure, flat, aliases, is_assembly=is_assembly)
    named = list(dict.fromkeys(_in_order(_pairs(flat, ends))))
    bare = list(dict.fromkeys(_in_order(_conect(structure, flat))).keys() - set(named))
    atoms_L2 = np.array([*named, *sorted(bare)], dtype=np.int64).reshape(-1, 2)
    return Links(atoms_L2, np.arange(len(atoms_L2)) < len(named))


def _in_order(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Yield each pair with its lower atom first, leaving out an atom with itself."""
    return ((min(pair), max(pair)) for pair in pairs if pair[0] != pair[1])


def _ends(
    structure: gemmi.Structure, flat: gemmi.FlatStructure, aliases: Mapping[str, str], *, is_assembly: bool
) -> list[tuple[End, End]]:
    """Return the two atoms of each covalent connection within the file, for every copy of its chains."""
    wanted = [one for one in structure.connections if one.type in COVALENT and one.asu != gemmi.Asu.Different]
    if not wanted:
        return []
    present = {text(code) for code in np.unique(_column(flat.chain_ids))}
    short = {full: stand_in for stand_in, full in aliases.items()}
    return [
        (_end(one.partner1, short, copy), _end(one.partner2, short, copy))
        for one in wanted
        for copy in ["", *(_copies(present, one.partner1.chain_name) if is_assembly else ())]
    ]


def _copies(present: set[str], name: str) -> list[str]:
    """Return what is appended to a chain's name in the copies of an assembly."""
    return sorted(other[len(name) :] for other in present if other.startswith(name + COPY_MARK))


def _end(address: gemmi.AtomAddress, short: Mapping[str, str], copy: str) -> End:
    """Return an atom's address in the terms of the columns."""
    chain = address.chain_name + copy
    seqid = address.res_id.seqid
    return (
        word(short.get(chain, chain)),
        0 if seqid.num is None else int(seqid.num),
        ord(seqid.icode),
        word(address.res_id.name),
        word(address.atom_name),
    )


def _pairs(flat: gemmi.FlatStructure, ends: list[tuple[End, End]]) -> Iterator[Pair]:
    """Yield the rows of each pair of addresses; alternatives share an address, and a policy keeps one of them."""
    if not ends:
        return
    addresses = np.array([end for pair in ends for end in pair], dtype=object)
    name_A, number_A = _column(flat.atom_names), np.asarray(flat.resnums)
    maybe = np.flatnonzero(
        np.isin(number_A, addresses[:, 1].astype(np.int32)) & np.isin(name_A, addresses[:, 4].astype(np.uint64))
    )
    columns = (_column(flat.chain_ids), number_A, np.asarray(flat.icodes), _column(flat.residue_names), name_A)
    rows: defaultdict[End, list[int]] = defaultdict(list)
    for row, *address in zip(maybe.tolist(), *(column[maybe].tolist() for column in columns), strict=True):
        rows[tuple(address)].append(row)
    for left, right in ends:
        yield from product(rows.get(left, ()), rows.get(right, ()))


def _conect(structure: gemmi.Structure, flat: gemmi.FlatStructure) -> Iterator[Pair]:
    """Yield the rows of each CONECT pair; copies in an assembly share a serial number and are paired in order."""
    bonded = structure.conect_map
    if not bonded:
        return
    serial_A = np.asarray(flat.serials)
    rows: defaultdict[int, list[int]] = defaultdict(list)
    known = np.fromiter(bonded, np.int64, len(bonded))
    for row in np.flatnonzero(np.isin(serial_A, np.append(known, [one for some in bonded.values() for one in some]))):
        rows[int(serial_A[row])].append(int(row))
    for serial, others in bonded.items():
        for other in others:
            yield from zip(rows.get(serial, ()), rows.get(other, ()), strict=False)


def _column(names: Any) -> NDArray[np.uint64]:
    """View an 8-character column as integers."""
    column: NDArray[np.uint64] = np.ascontiguousarray(names).view("<u8")[:, 0]
    return column
