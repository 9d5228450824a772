"""Residue graphs by hand: gemmi or biotite, numpy and scipy, as an engineer writes them who cares for speed.

No loop over atoms or residues. The result is what our residue graph holds for plain files: N, CA, C and CB (made where
there is none), side-chain centroids and residue types, the k nearest CA atoms, and the native contacts of two chains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gemmi
import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

if TYPE_CHECKING:
    from pathlib import Path

BACKBONE, CB = ("N", "CA", "C"), "CB"
MAIN_CHAIN = (*BACKBONE, "O", "OXT")
HYDROGENS = ("H", "D")
CONTACT = 5.0
CB_WEIGHTS = (0.56802827, -0.58273431, -0.54067466)
THREE = (
    "ALA CYS ASP GLU PHE GLY HIS ILE LYS LEU MET ASN PRO GLN ARG SER THR VAL TRP TYR".split()  # noqa: SIM905 - it reads better
)


@dataclass(frozen=True)
class Atoms:
    """The heavy atoms of the amino acids of a file, names as the parser has them."""

    pos_A3: NDArray[Any]
    name_A: NDArray[Any]
    resname_A: NDArray[Any]
    chain_A: NDArray[Any]
    number_A: NDArray[Any]
    icode_A: NDArray[Any]

    def take(self, chosen: Any) -> Atoms:
        return Atoms(*(column[chosen] for column in vars(self).values()))


@dataclass(frozen=True)
class HandMade:
    """The graph of two chains."""

    pos_N43: list[NDArray[Any]]
    side_N3: list[NDArray[Any]]
    type_N: list[NDArray[Any]]
    edges_2E: list[NDArray[Any]]
    contact_P2: NDArray[Any]
    contact_atoms_P: NDArray[Any]
    contact_nearest_P: NDArray[Any]


def atoms_by_gemmi(path: Path) -> Atoms:
    """Read with gemmi, and view its flat columns; names become numbers, which compare fastest."""
    flat = gemmi.FlatStructure(gemmi.read_pdb(str(path)))
    atoms = Atoms(
        flat.pos, _words(flat.atom_names), _words(flat.residue_names), _words(flat.chain_ids), flat.resnums, flat.icodes
    )
    return atoms.take((flat.elements != 1) & (flat.het_flags == ord("A")))


def atoms_by_biotite(path: Path) -> Atoms:
    """Read with biotite."""
    from biotite.structure.io import pdb

    array = pdb.PDBFile.read(str(path)).get_structure(model=1)
    array = array[~np.isin(array.element, HYDROGENS) & ~array.hetero]
    return Atoms(array.coord, array.atom_name, array.res_name, array.chain_id, array.res_id, array.ins_code)


def _words(names: Any) -> NDArray[Any]:
    return np.ascontiguousarray(names).view("<u8")[:, 0]


def _like(name: str, column: NDArray[Any]) -> Any:
    """Return a name as a column has it."""
    return int.from_bytes(name.encode(), "little") if column.dtype.kind == "u" else name


def graph_of(atoms: Atoms, nearest: int) -> HandMade:
    """Return the graph of the first two chains."""
    changes_A = np.ones(len(atoms.name_A), np.bool_)
    changes_A[1:] = atoms.number_A[1:] != atoms.number_A[:-1]
    for column in (atoms.chain_A, atoms.icode_A):
        changes_A[1:] |= column[1:] != column[:-1]
    residue_A, first_R = np.cumsum(changes_A) - 1, np.flatnonzero(changes_A)
    place_4R = np.full((4, len(first_R)), -1)
    for row, name in enumerate((*BACKBONE, CB)):
        rows = np.flatnonzero(atoms.name_A == _like(name, atoms.name_A))
        place_4R[row, residue_A[rows]] = rows
    whole_R = (place_4R[:3] >= 0).all(axis=0)
    if not whole_R.all():  # which is rare
        return graph_of(atoms.take(whole_R[residue_A]), nearest)
    pos_4R3 = atoms.pos_A3[place_4R]
    made = np.flatnonzero(place_4R[3] < 0)
    forth, onwards = pos_4R3[1, made] - pos_4R3[0, made], pos_4R3[2, made] - pos_4R3[1, made]
    bend = np.cross(forth, onwards)
    pos_4R3[3, made] = pos_4R3[1, made] + CB_WEIGHTS[0] * forth + CB_WEIGHTS[1] * bend + CB_WEIGHTS[2] * onwards
    side_A = ~np.isin(atoms.name_A, [_like(name, atoms.name_A) for name in MAIN_CHAIN])
    count_R = np.bincount(residue_A[side_A], minlength=len(first_R))
    side_R3 = np.stack([np.bincount(residue_A[side_A], x, len(first_R)) for x in atoms.pos_A3[side_A].T], axis=1)
    side_R3 = np.where(count_R[:, None] > 0, side_R3 / np.maximum(count_R, 1)[:, None], pos_4R3[3]) - pos_4R3[1]
    letters = np.array([_like(name, atoms.resname_A) for name in THREE])
    order = np.argsort(letters)
    type_R = order[np.searchsorted(letters, atoms.resname_A[first_R], sorter=order).clip(max=len(order) - 1)]
    chain_R = atoms.chain_A[first_R]
    border = int(np.flatnonzero(chain_R != chain_R[0])[0])
    halves = (slice(0, border), slice(border, len(first_R)))
    edges = [_nearest(pos_4R3[1, here], nearest) for here in halves]
    contacts = _contacts(atoms.pos_A3, residue_A, int(first_R[border]), border)
    return HandMade(
        [pos_4R3[:, here] for here in halves], [side_R3[here] for here in halves], [type_R[here] for here in halves],
        edges, *contacts,
    )  # fmt: skip


def _nearest(ca_N3: NDArray[Any], nearest: int) -> NDArray[Any]:
    """Return neighbour and node of each edge."""
    nearest = min(nearest, len(ca_N3) - 1)
    _, source_NK = cKDTree(ca_N3).query(ca_N3, nearest + 1)
    node_E = np.repeat(np.arange(len(ca_N3)), nearest)
    return np.stack([np.sort(source_NK[:, 1:], axis=1).ravel(), node_E])


def _contacts(
    pos_A3: NDArray[Any], residue_A: NDArray[Any], first: int, border: int
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the pairs of residues with atoms within reach: how many, and how near."""
    trees = cKDTree(pos_A3[:first]), cKDTree(pos_A3[first:])
    pairs = trees[0].sparse_distance_matrix(trees[1], CONTACT, output_type="ndarray")
    key_E = residue_A[pairs["i"]] * len(residue_A) + residue_A[first + pairs["j"]] - border
    order = np.argsort(key_E)
    key_E = key_E[order]
    start_P = np.flatnonzero(np.append(True, key_E[1:] != key_E[:-1]))
    pair_P2 = np.stack(np.divmod(key_E[start_P], len(residue_A)), axis=1)
    return pair_P2, np.diff(start_P, append=len(key_E)), np.minimum.reduceat(pairs["v"][order], start_P)


def by_gemmi(path: Path, nearest: int) -> HandMade:
    return graph_of(atoms_by_gemmi(path), nearest)


def by_biotite(path: Path, nearest: int) -> HandMade:
    return graph_of(atoms_by_biotite(path), nearest)
