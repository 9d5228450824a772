"""Atom graphs: a node at each atom of proteins, RNA, DNA and the molecules that are kept.

Nodes       pos float32 [A, 3] from the centre; element uint8, the atomic number; name uint8 [A, 4], ASCII; residue.
Residues    type uint8, an index into RESIDUE_TYPES; name uint8 [R, 5], ASCII; kind uint8, an index into KINDS; chain;
            row, number, icode as in residue graphs.
Edges       bond; angle and dihedral, pairs two and three bonds apart by the shortest way; near, pairs within the radius
            that are none of these. All in both directions. `hops` says how many of the first three there are.
Paths       angle [·, 3] and dihedral [·, 4]: every path of so many bonds once, from its lower end; in a ring of three
            or four, the ends of one may be nearer by another way.
Cross       near: pairs of a ligand atom (row 0) and a receptor atom (row 1); none on unbound input, whose partners are
            not in one frame.
Labels      contact_pairs [P, 2] (receptor atom, ligand atom) of heavy atoms, contact_nearest float32, their distance.
            On unbound input they are those of the bound structures whose atoms both exist here: the atom of a name in
            the residue that corresponds. Then each node has labelled bool and bound float32 [A, 3], its place there
            from the float64 bound_centre, not a number where it has none.

A partner of single atoms only (an ion) need not have edges; any other without is refused.

Shapes: A atoms and R residues of a partner, B bonds, E edges, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from pipeline.graphs import bonds, neighbours
from pipeline.graphs.item_graph import ROLES, ItemGraph, PartnerGraph, edge_lengths
from pipeline.graphs.partner_nodes import (
    centre,
    chain_texts,
    cross_edges,
    interface_labels,
    no_contacts,
    refuse_coincident,
)
from pipeline.records import Kind, Reason, Role
from pipeline.structures.atoms import UnusableInput, name_text
from pipeline.structures.partners import joined_embedding_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from pipeline.graphs.item_graph import Array, Edges, GraphRecipe
    from pipeline.graphs.partner_nodes import Pairs
    from pipeline.structures.inventory import Complex, ComplexSide

    Sides: TypeAlias = Mapping[Role, "ChosenAtoms"]

PROTEIN_LETTERS, RNA_LETTERS, DNA_LETTERS = "ACDEFGHIKLMNPQRSTVWYX", "ACGUN", "ACGTN"  # the last: any other
RESIDUE_TYPES = (
    *PROTEIN_LETTERS,
    *(f"R{letter}" for letter in RNA_LETTERS),
    *(f"D{letter}" for letter in DNA_LETTERS),
    "other",
)
LETTERS = {Kind.PROTEIN: (0, PROTEIN_LETTERS), Kind.RNA: (21, RNA_LETTERS), Kind.DNA: (26, DNA_LETTERS)}
OTHER_TYPE = len(RESIDUE_TYPES) - 1
KINDS = tuple(Kind)
ATOM_NAME, RESIDUE_NAME = 4, 5  # bytes; the dictionary of components has names of five letters
HYDROGEN = 1
BOND = bonds.HOPS[0]


@dataclass(frozen=True, slots=True)
class ChosenAtoms:
    """The atoms of a side that become nodes."""

    two: ClassVar[str] = "{} and {}"
    side: ComplexSide
    residue_R: NDArray[np.int64]  # of the structure
    atom_A: NDArray[np.int64]  # of the structure
    residue_A: NDArray[np.int64]  # of the side

    @property
    def pos_N3(self) -> NDArray[np.float64]:
        return self.side.structure.pos_A3[self.atom_A]

    @property
    def element_A(self) -> NDArray[np.uint8]:
        return self.side.structure.element_A[self.atom_A]

    def heavy(self) -> NDArray[np.int64]:
        """Return the places of the atoms that are not hydrogens."""
        return np.flatnonzero(~bonds.is_hydrogen(self.element_A))

    def label(self, atom: int) -> str:
        """Return an atom's name for messages."""
        structure, residue = self.side.structure, self.residue_R[self.residue_A[atom]]
        chain = next(chain.name for chain in self.side.chains if chain.first <= residue < chain.last)
        where = f"{name_text(structure.name_R[residue])} {structure.number_R[residue]}"
        return f"{name_text(structure.name_A[self.atom_A[atom]])} of {where} in chain {chain}"


def build_atom_graph(read: Complex, recipe: GraphRecipe) -> ItemGraph:
    """Return the atom graph of an item; raise UnusableInput if it cannot have one."""
    sides = {role: _choose(role, read.sides[role], recipe) for role in ROLES if role in read.sides}
    refuse_coincident(sides, in_one_frame=not read.bound)
    native = partial(_native, is_bound=bool(read.bound))
    labels, extra = interface_labels(read, sides, recipe.contacts, partial(_twins, recipe), native)
    parts = tuple(_part(role, chosen, read, recipe, extra.get(role, {})) for role, chosen in sides.items())
    return ItemGraph(parts, cross_edges(read, recipe, sides), labels)


def _choose(role: Role, side: ComplexSide, recipe: GraphRecipe) -> ChosenAtoms:
    """Return the atoms of a side, residue by residue."""
    structure, residue_R = side.structure, side.residues()
    end_R = np.cumsum(structure.atoms_R)[residue_R]
    count_R = structure.atoms_R[residue_R]
    residue_A = np.repeat(np.arange(len(residue_R)), count_R)
    atom_A = np.repeat(end_R - np.cumsum(count_R), count_R) + np.arange(len(residue_A))
    if not recipe.hydrogens:
        kept = np.flatnonzero(~bonds.is_hydrogen(structure.element_A[atom_A]))
        residue_A, atom_A = residue_A[kept], atom_A[kept]
    if structure.drops_low:
        kept = np.flatnonzero(~structure.hidden_R[residue_R[residue_A]])
        residue_A, atom_A = residue_A[kept], atom_A[kept]
    if not len(atom_A):
        problem = f"the {role.value} has no atoms" if recipe.hydrogens else f"the {role.value} has only hydrogen atoms"
        raise UnusableInput(Reason.NO_NODES, problem)
    return ChosenAtoms(side, residue_R, atom_A, residue_A)


def _part(
    role: Role, chosen: ChosenAtoms, read: Complex, recipe: GraphRecipe, extra: Mapping[str, Array]
) -> PartnerGraph:
    structure, partner = chosen.side.structure, read.partners[role]
    centre_3 = centre(chosen.pos_N3)
    edges, paths = _edges(chosen, recipe)
    has_edges = any(edges_2E.size for edges_2E in edges.values())
    if not has_edges and (role is Role.WHOLE or np.bincount(chosen.residue_A).max() > 1):
        problem = f"no two of the {len(chosen.atom_A)} atoms of the {role.value} are bonded or near each other"
        raise UnusableInput(Reason.NO_EDGES, f"{problem}; graph.atom.radius is {recipe.atom_radius}")
    element_A = chosen.element_A
    nodes: dict[str, Array] = {
        "pos": (chosen.pos_N3 - centre_3).astype(np.float32),
        "element": np.where(bonds.is_hydrogen(element_A), HYDROGEN, element_A).astype(np.uint8),
        "name": _ascii(structure.name_A[chosen.atom_A], ATOM_NAME),
        "residue": chosen.residue_A.astype(np.min_scalar_type(len(chosen.residue_R))),
        **extra,
    }
    if structure.plddt_R is not None:
        nodes["plddt"] = structure.plddt_R[chosen.residue_R[chosen.residue_A]]
    row_R = joined_embedding_rows(partner, read.maps.get(f"rows.{role.value}"))
    return PartnerGraph(role, chain_texts(partner), centre_3, nodes, edges, _residues(chosen, row_R), paths)


def _ascii(words: NDArray[np.uint64], width: int) -> NDArray[np.uint8]:
    """Return the first bytes of names, zero where a name is shorter."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, 8)[:, :width])


def _residues(chosen: ChosenAtoms, row_R: NDArray[np.int32]) -> dict[str, Array]:
    structure, chains = chosen.side.structure, chosen.side.chains
    lengths_C = [chain.last - chain.first for chain in chains]
    return {
        "type": np.concatenate([_types(chain.kind, chain.sequence, chain.last - chain.first) for chain in chains]),
        "name": _ascii(structure.name_R[chosen.residue_R], RESIDUE_NAME),
        "kind": np.repeat(np.array([KINDS.index(chain.kind) for chain in chains], np.uint8), lengths_C),
        "chain": np.repeat(np.arange(len(chains), dtype=np.min_scalar_type(len(chains))), lengths_C),
        "row": row_R,
        "number": structure.number_R[chosen.residue_R],
        "icode": structure.icode_R[chosen.residue_R].view(np.uint8),
    }


def _types(kind: Kind, letters: str, residues: int) -> NDArray[np.uint8]:
    """Return the type of each residue of a chain; unknown letters count as the last of the alphabet."""
    if kind is Kind.OTHER:
        return np.full(residues, OTHER_TYPE, np.uint8)
    first, alphabet = LETTERS[kind]
    table = np.full(256, first + len(alphabet) - 1, np.uint8)
    table[np.frombuffer(alphabet.encode(), np.uint8)] = np.arange(first, first + len(alphabet))
    return table[np.frombuffer(letters.encode(), np.uint8)]


def _edges(chosen: ChosenAtoms, recipe: GraphRecipe) -> tuple[dict[str, Edges], dict[str, Array]]:
    """Return the edges within a partner, each pair in one kind only, and the paths of bonds."""
    size = len(chosen.atom_A)
    edges: dict[str, Edges] = {}
    paths: dict[str, Array] = {}
    nearer = np.empty(0, np.int64)
    for name, path in zip(bonds.HOPS, bonds.bond_paths(_bonds(chosen), size, recipe.hops), strict=False):
        keys = bonds.without(bonds.pair_keys(path, size), nearer)
        nearer = np.sort(np.concatenate([nearer, keys]))
        edges[name] = bonds.both_ways(keys, size)
        if name != BOND:
            paths[name] = path.astype(np.min_scalar_type(size))
    if recipe.atom_radius is not None:
        near_2E = neighbours.within(chosen.pos_N3, radius=recipe.atom_radius)
        bonded = bonds.both_ways(nearer, size)
        keys = bonds.without(near_2E[1] * size + near_2E[0], bonded[1] * size + bonded[0])
        edges["near"] = np.stack(np.divmod(keys, size)[::-1])
    return edges, paths


def _bonds(chosen: ChosenAtoms) -> NDArray[np.int64]:
    """Return the bonds between the atoms of a side."""
    structure, side = chosen.side.structure, chosen.side
    links = structure.links()
    place_A = np.full(len(structure.name_A), -1)
    place_A[chosen.atom_A] = np.arange(len(chosen.atom_A))
    here = replace(links, atoms_L2=place_A[links.atoms_L2])
    strands = [-1 if chain.kind is Kind.OTHER else number for number, chain in enumerate(side.chains)]
    bonds_B2 = bonds.all_bonds(
        bonds.Atoms(
            pos_A3=chosen.pos_N3,
            name_A=structure.name_A[chosen.atom_A],
            element_A=chosen.element_A,
            residue_A=chosen.residue_A,
            resname_R=structure.name_R[chosen.residue_R],
            strand_R=np.repeat(strands, [chain.last - chain.first for chain in side.chains]),
            links=here.take(here.atoms_L2.min(axis=1) >= 0),
            file_has_bonds=len(links.atoms_L2) > 0,
        )
    )
    if links.is_complete:
        _check_lengths(chosen, bonds_B2)
    return bonds_B2


def _check_lengths(chosen: ChosenAtoms, bonds_B2: NDArray[np.int64]) -> None:
    """Raise for a bond in the file that is impossibly long: other coordinates, or a molecule cut by a periodic box."""
    length_B = edge_lengths(chosen.pos_N3, chosen.pos_N3, bonds_B2.T)
    if (length_B > bonds.LONGEST).any():
        worst = int(length_B.argmax())
        left, right = (chosen.label(atom) for atom in bonds_B2[worst].tolist())
        problem = f"the file lists a bond between {left} and {right}, which are {length_B[worst]:.2f} Å apart"
        raise UnusableInput(Reason.PARSE_ERROR, problem)


def _native(sides: Sides, cutoff: float, *, is_bound: bool) -> Pairs:
    """Return the pairs of heavy atoms within a distance."""
    receptor, ligand = (sides[role].pos_N3 for role in (Role.RECEPTOR, Role.LIGAND))
    heavy, heavy_ligand = (sides[role].heavy() for role in (Role.RECEPTOR, Role.LIGAND))
    found_2P = neighbours.between(ligand[heavy_ligand], receptor[heavy], radius=cutoff)
    pairs_2P = np.stack([heavy_ligand[found_2P[0]], heavy[found_2P[1]]])
    if not pairs_2P.size:
        raise no_contacts(neighbours.closest(receptor[heavy], ligand[heavy_ligand]), cutoff, is_bound=is_bound)
    return pairs_2P, {"contact_nearest": edge_lengths(ligand, receptor, pairs_2P).astype(np.float32)}


def _twins(
    recipe: GraphRecipe, role: Role, here: ChosenAtoms, side: ComplexSide, row_R: NDArray[np.int32]
) -> tuple[ChosenAtoms, NDArray[np.int64]]:
    """Return the bound atoms, and that of each node: of the same name in the corresponding residue; -1 if none.

    Names that occur twice in a residue correspond to nothing.
    """
    there = _choose(role, side, recipe)
    residue_A = row_R[here.residue_A]
    here_names, there_names = (chosen.side.structure.name_A[chosen.atom_A] for chosen in (here, there))
    names, code = np.unique(np.concatenate([here_names, there_names]), return_inverse=True)
    mine = residue_A * np.int64(len(names)) + code[: len(here_names)]
    theirs = there.residue_A * np.int64(len(names)) + code[len(here_names) :]
    keys, first, count = np.unique(theirs, return_index=True, return_counts=True)
    place = np.minimum(np.searchsorted(keys, mine), len(keys) - 1)
    _, back, mine_count = np.unique(mine, return_inverse=True, return_counts=True)
    is_one = (keys[place] == mine) & (count[place] == 1) & (mine_count[back] == 1) & (residue_A >= 0)
    twin_A = np.where(is_one, first[place], -1)
    _check_twins(here, there, twin_A)
    return there, twin_A


def _check_twins(here: ChosenAtoms, there: ChosenAtoms, twin_A: NDArray[np.int64]) -> None:
    """Raise if atom names of a molecule mean other atoms in the bound file: nameless files get names by atom order."""
    if not any(chosen.side.structure.links().is_complete for chosen in (here, there)):
        return
    mine_B2, theirs_B2 = _bonds(here), _bonds(there)
    chains = here.side.chains
    lengths_C = [chain.last - chain.first for chain in chains]
    molecule_R = np.repeat([chain.kind is Kind.OTHER for chain in chains], lengths_C)
    mine_B2 = mine_B2[molecule_R[here.residue_A[mine_B2]].all(axis=1)]
    twins_B2 = np.sort(twin_A[mine_B2], axis=1)
    keys_B, their_keys = twins_B2 @ [len(there.atom_A), 1], theirs_B2 @ [len(there.atom_A), 1]
    unlike = np.flatnonzero((twins_B2[:, 0] >= 0) & ~np.isin(keys_B, their_keys))
    if len(unlike):
        left, right = (here.label(atom) for atom in mine_B2[unlike[0]].tolist())
        problem = f"{left} and {right} are bonded, but the atoms with these names in the bound structure are not"
        raise UnusableInput(Reason.SEQUENCE_MISMATCH, f"{problem}: use the same atom order in both files")
