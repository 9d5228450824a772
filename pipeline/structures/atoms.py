"""The table of atoms that every parser returns; its division into residues; and the choice of one conformer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from pipeline.records import Reason

NAME_BYTES = 8
CB_WEIGHTS = (0.56802827, -0.58273431, -0.54067466)  # CB from CA: of N→CA, its cross product with CA→C, and CA→C
BLANK_CHAIN = "_"  # what users type for a chain without a name


class UnusableInput(Exception):
    """An input cannot be used; this becomes a `Rejection` where the item is known."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason
        self.detail = detail


def name_word(name: str) -> int:
    """Return a name of at most 8 bytes as the integer that name columns hold."""
    return int.from_bytes(name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0"), "little")


def name_text(word: int | np.uint64) -> str:
    """Return the name that a word stands for."""
    return int(word).to_bytes(NAME_BYTES, "little").rstrip(b"\0").decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Links:
    """The pairs of atoms that a file itself says are bonded, L of them."""

    atoms_L2: NDArray[np.int64]
    covalent_L: NDArray[np.bool_]  # whether it says of what kind the bond is; CONECT does not
    is_complete: bool = False  # whether these are all the bonds there are

    def take(self, chosen: NDArray[np.bool_]) -> Links:
        return Links(self.atoms_L2[chosen], self.covalent_L[chosen], self.is_complete)


def no_links() -> Links:
    """Return the links of a file that lists no bonds."""
    return Links(np.empty((0, 2), np.int64), np.empty(0, np.bool_))


@dataclass(frozen=True, slots=True)
class AtomTable:
    """Every atom of one model in file order; A is the number of atoms."""

    pos_A3: NDArray[np.float64]
    name_A: NDArray[np.uint64]
    resname_A: NDArray[np.uint64]
    chain_A: NDArray[np.uint64]
    number_A: NDArray[np.int32]
    icode_A: NDArray[np.int8]
    altloc_A: NDArray[np.int8]
    occupancy_A: NDArray[np.float32]
    element_A: NDArray[np.uint8]
    entity_A: NDArray[np.uint8]  # gemmi's EntityType: 1 polymer, 2 non-polymer, 3 branched, 4 water
    hetero_A: NDArray[np.int8]  # ord("H") for HETATM, ord("A") for ATOM
    label_seq_A: NDArray[np.int32] | None = None  # 1-based position in SEQRES, 0 where unknown
    seqres: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # chain → residue names, "SER,PRO" where mixed
    parents: Mapping[str, str] = field(default_factory=dict)  # modified residue → standard one, as the file says
    aliases: Mapping[str, str] = field(default_factory=dict)  # short stand-ins → chain names of more than 7 bytes
    links: Callable[[], Links] = no_links  # between its rows; looked up when asked for, which no scan does
    notes: Mapping[str, int] = field(default_factory=dict)  # the parser's notes about the whole file
    first_S: NDArray[np.int64] | None = None  # of each site, if its parser knows that
    b_iso_A: NDArray[np.float32] | None = None  # B-factors, where they are asked for and the format has them
    is_predicted: bool = False  # whether the file says so; known where B-factors are asked for

    def chain_name(self, code: int | np.uint64) -> str:
        """Return a chain's name as users type it."""
        name = name_text(code)
        return self.aliases.get(name, name) or BLANK_CHAIN


CELLS, CELL_FACTOR = 256, np.uint32(124_729_223)
EVERY = slice(None)
Rows: TypeAlias = "NDArray[np.int64] | slice[None, None, None]"  # of a table; most files are kept as they are


@dataclass(frozen=True, slots=True)
class Sites:
    """Runs of atoms with one chain, number, insertion code and residue name, in file order; S of them."""

    first_S: NDArray[np.int64]
    length_S: NDArray[np.int64]

    def take(self, chosen: NDArray[np.int64]) -> Sites:
        """Return the chosen sites, in the order given."""
        return Sites(self.first_S[chosen], self.length_S[chosen])

    def then(self, others: Sites) -> Sites:
        return Sites(np.concatenate([self.first_S, others.first_S]), np.concatenate([self.length_S, others.length_S]))

    def rows(self) -> NDArray[np.int64]:
        """Return the atoms of all sites, site by site."""
        shift_S = self.first_S - np.cumsum(self.length_S) + self.length_S
        rows: NDArray[np.int64] = np.repeat(shift_S, self.length_S)
        rows += np.arange(len(rows))
        return rows


def sites_of(table: AtomTable) -> Sites:
    """Return every site of a file."""
    first_S = table.first_S
    if first_S is None:
        first_S = np.flatnonzero(changes(table.number_A, table.resname_A, table.chain_A, table.icode_A))
    length_S = np.empty_like(first_S)
    np.subtract(first_S[1:], first_S[:-1], out=length_S[:-1])
    length_S[-1] = len(table.number_A) - first_S[-1]
    return Sites(first_S, length_S)


def changes(*columns: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark each row that differs from the row before it; the first row always."""
    changed = np.zeros(len(columns[0]), dtype=np.bool_)
    changed[:1] = True
    for column in columns:
        changed[1:] |= column[1:] != column[:-1]
    return changed


def one_conformer(
    table: AtomTable, sites: Sites, rows_A: Rows, altlocs: str, molecule_A: NDArray[np.bool_] | None
) -> tuple[Rows, NDArray[np.int64], int]:
    """Return the atoms kept, the residue of each, and how many residues had alternatives.

    A name that occurs twice in a residue is one atom, except in small molecules, where every carbon may be called C.
    """
    name_A, altloc_A = table.name_A[rows_A], table.altloc_A[rows_A]
    has_alternatives = altloc_A.any()
    residue_S = _residue_of_site(table, sites) if has_alternatives else np.arange(len(sites.first_S))
    residue_A = np.repeat(residue_S, sites.length_S)
    if not has_alternatives and _all_distinct(name_A, residue_A):
        return rows_A, residue_A, 0
    order_A, alternatives = np.arange(len(residue_A)), 0
    if has_alternatives:
        chosen_R, alternatives = _choose_labels(altloc_A, table.occupancy_A[rows_A], residue_A, altlocs)
        order_A = _by_preference(altloc_A, table.resname_A[rows_A], residue_A, chosen_R)
    names, code_A = np.unique(name_A, return_inverse=True)
    atom_A = residue_A * len(names) + code_A
    if molecule_A is not None:
        single = np.flatnonzero(molecule_A & (altloc_A == 0))
        atom_A[single] = -1 - single
    _, first = np.unique(atom_A[order_A], return_index=True)
    kept = np.sort(order_A[first])
    return kept if isinstance(rows_A, slice) else rows_A[kept], residue_A[kept], alternatives


def _residue_of_site(table: AtomTable, sites: Sites) -> NDArray[np.int64]:
    """Return the residue of each site; two names at one place are one residue when both are labelled alternatives."""
    first_S, last_S = sites.first_S, sites.first_S + sites.length_S - 1
    new_S = changes(table.number_A[first_S], table.icode_A[first_S], table.chain_A[first_S])
    unlabelled_S = table.altloc_A[first_S] == 0
    unlabelled_S[1:] |= table.altloc_A[last_S[:-1]] == 0
    return np.cumsum(new_S | unlabelled_S) - 1


def _all_distinct(name_A: NDArray[np.uint64], residue_A: NDArray[np.int64]) -> bool:
    """Say whether surely no residue holds an atom name twice, by hashing names into 256 cells a residue.

    Different names may collide, too, which only costs the slow path; with this factor those of the standard residues,
    hydrogens included, never do.
    """
    cell_A = (name_A.astype(np.uint32) * CELL_FACTOR) >> np.uint32(24)
    taken = np.zeros((int(residue_A[-1]) + 1) * CELLS, dtype=np.bool_)
    taken[residue_A * CELLS + cell_A] = True
    return int(np.count_nonzero(taken)) == len(name_A)


def _choose_labels(
    altloc_A: NDArray[np.int8], occupancy_A: NDArray[np.float32], residue_A: NDArray[np.int64], altlocs: str
) -> tuple[NDArray[np.int64], int]:
    """Choose one label per residue, so that no residue is a patchwork, and count the residues that had several.

    It is the label of highest mean occupancy (ties: the lowest letter), or the first in the file.
    """
    labelled = np.flatnonzero(altloc_A)
    site = residue_A[labelled] * 256 + altloc_A[labelled].view(np.uint8)
    options, first_seen, inverse = np.unique(site, return_index=True, return_inverse=True)
    if altlocs == "highest":
        cost = -(np.bincount(inverse, weights=occupancy_A[labelled]) / np.bincount(inverse)).round(3)
    else:
        cost = first_seen.astype(np.float64)
    ranked = options[np.lexsort((options, cost, options // 256))]
    residues, winner = np.unique(ranked // 256, return_index=True)
    chosen_R = np.zeros(int(residue_A[-1]) + 1, dtype=np.int64)
    chosen_R[residues] = ranked[winner] % 256
    return chosen_R, len(residues)


def _by_preference(
    altloc_A: NDArray[np.int8], resname_A: NDArray[np.uint64], residue_A: NDArray[np.int64], chosen_R: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Order atoms so that the chosen conformer comes first; leave out atoms of other residue names than the chosen.

    Atoms that only another label has follow, so that a choice never leaves a residue incomplete.
    """
    label_A = altloc_A.view(np.uint8)
    preferred_A = (label_A == 0) | (label_A == chosen_R[residue_A])
    name_R = np.zeros(len(chosen_R), dtype=np.uint64)
    chosen = np.flatnonzero(label_A == chosen_R[residue_A])[::-1]
    name_R[residue_A[chosen]] = resname_A[chosen]
    candidates = np.flatnonzero(resname_A == name_R[residue_A])
    return candidates[np.argsort(~preferred_A[candidates], kind="stable")]
