"""A pocket from a PDB or mmCIF file, which tells nothing of a force field: elements, bonds by name, no parameters.

Charges and every parameter of a force field are 0; lengths, angles and what is near are as the file has them. A network
that learned from topologies does not fit such pockets: it is trained with them, or they are given a topology (tleap).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gemmi
import numpy as np

from pipeline.graphs.bonds import Atoms, all_bonds, bond_paths, is_hydrogen
from pipeline.readers.entry import UnusableEntry
from pipeline.structures.atoms import UnusableInput, changes, name_word, no_links, one_conformer, sites_of
from pipeline.structures.parsing.read_structure import PLAIN, parse_structure
from pipeline.tasks.rna.force_field import RNA, PocketArrays, near_pairs

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

FORMS = {".pdb": "pdb", ".ent": "pdb", ".cif": "mmcif", ".mmcif": "mmcif"}
CONSTANTS = (2, 2, 3)  # of bonds, angles and dihedrals


def read_plain_pocket(data: bytes, form: str, more_residues: Collection[str] = ()) -> PocketArrays:
    """Return the RNA of a structure file; `more_residues` are names that are RNA, too."""
    atoms = _rna_atoms(data, form, more_residues)
    bonds_B2 = all_bonds(atoms)
    heavy_A = ~is_hydrogen(atoms.element_A)
    pos_N3 = atoms.pos_A3.astype(np.float32)
    entries = {}
    for kind, width, paths_PX in zip(
        ("bonds", "angles", "dihedrals"), CONSTANTS, bond_paths(bonds_B2, len(pos_N3), len(CONSTANTS)), strict=True
    ):
        own_PX = paths_PX[heavy_A[paths_PX].all(1)].astype(np.int32)
        entries[kind] = own_PX, np.zeros((len(own_PX), width), np.float32)
    near_E2, distance_E = near_pairs(pos_N3, bonds_B2.astype(np.int32))
    constants = np.zeros((len(near_E2), 3), np.float32)
    constants[:, 2] = distance_E
    return PocketArrays(_features(atoms), pos_N3, {**entries, "near": (near_E2, constants)})


def _rna_atoms(data: bytes, form: str, more_residues: Collection[str]) -> Atoms:
    """Return the atoms of RNA, one conformer of each residue."""
    try:
        table = parse_structure(data, form, PLAIN)
    except UnusableInput as error:
        raise UnusableEntry(error.detail) from error
    names = np.array([name_word(name) for name in sorted(RNA | set(more_residues))], np.uint64)
    sites = sites_of(table)
    chosen = sites.take(np.flatnonzero(np.isin(table.resname_A[sites.first_S], names)))
    if not len(chosen.first_S):
        raise UnusableEntry("no residue is RNA; data.options.residues names further ones")
    rows_A, residue_A, _ = one_conformer(table, chosen, chosen.rows(), "highest", None)
    first_R = np.flatnonzero(changes(residue_A))
    chain_A = table.chain_A[rows_A]
    pos_A3 = table.pos_A3[rows_A]
    if not np.isfinite(pos_A3).all():
        raise UnusableEntry("a coordinate is not finite")
    return Atoms(
        pos_A3=pos_A3,
        name_A=table.name_A[rows_A],
        element_A=table.element_A[rows_A],
        residue_A=np.cumsum(changes(residue_A)) - 1,
        resname_R=table.resname_A[rows_A][first_R],
        strand_R=np.unique(chain_A, return_inverse=True)[1][first_R],
        links=no_links(),
        is_told=False,
    )


def _features(atoms: Atoms) -> NDArray[np.float32]:
    """Return charge (0: unknown), atomic number and mass of each atom."""
    if (atoms.element_A == 0).any():
        raise UnusableEntry(f"atom {int(np.argmin(atoms.element_A)) + 1} of the RNA is of no element")
    number_A = np.where(is_hydrogen(atoms.element_A), 1, atoms.element_A).astype(np.float64)
    weights = {int(number): gemmi.Element(int(number)).weight for number in np.unique(number_A)}
    mass_A = [weights[int(number)] for number in number_A]
    return np.stack([np.zeros(len(number_A)), number_A, mass_A], axis=1).astype(np.float32)
