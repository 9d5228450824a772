"""Residue graphs: a node at each residue of the protein chains.

Shapes: R residues and C chains of a side, N nodes, A atoms, H heavy atoms and S residues of a structure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import numpy as np

from pipeline.graphs import contacts, neighbours
from pipeline.graphs.item_graph import NEAR_PAE, ROLES, ItemGraph, PartnerGraph
from pipeline.graphs.partner_nodes import (
    NEAR,
    centre,
    chain_texts,
    cross_edges,
    interface_labels,
    no_contacts,
    refuse_coincident,
)
from pipeline.records import Kind, Reason, Role
from pipeline.structures.atoms import CB_WEIGHTS, UnusableInput, name_text
from pipeline.structures.partners import joined_embedding_rows
from pipeline.structures.policy import BACKBONE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.graphs.contacts import Bodies
    from pipeline.graphs.item_graph import Array, Edges, GraphRecipe
    from pipeline.graphs.partner_nodes import Pairs
    from pipeline.structures.inventory import Complex, ComplexSide

    Floats = NDArray[np.float64]
    Sides: TypeAlias = "Mapping[Role, Residues]"

LETTERS = "ACDEFGHIKLMNPQRSTVWYX"  # the last: any other
SIDE_ATOMS = np.array([1, 2, 4, 5, 7, 0, 6, 4, 5, 4, 4, 4, 3, 5, 7, 2, 3, 3, 10, 8, 0])  # heavy ones, CB among them
TYPE_OF_LETTER = np.full(256, len(LETTERS) - 1, np.uint8)
TYPE_OF_LETTER[np.frombuffer(LETTERS.encode(), np.uint8)] = np.arange(len(LETTERS))
N, CA, C, _, CB = range(len(BACKBONE))
KEPT = [N, CA, C, CB]
# Bits of `flags`. Without N or C, where `pos` is NaN, a residue has no frame; it is incomplete, too.
VIRTUAL_CB, INCOMPLETE, MODIFIED, NO_BACKBONE, UNSURE = map(np.uint8, (1, 2, 4, 8, 16))  # the last: of a low pLDDT


@dataclass(frozen=True, slots=True)
class Residues:
    """The residues of a side that are nodes."""

    two: ClassVar[str] = "the CA atoms of {} and of {}"
    side: ComplexSide
    place_N: NDArray[np.int64]  # among the residues of the side
    residue_N: NDArray[np.int64]  # of the structure
    chain_N: NDArray[np.int64]  # of the side
    pos_N3: Floats  # of its CA, in the file

    def types(self) -> NDArray[np.uint8]:
        """Return which of `LETTERS` each node is."""
        letters = b"".join(chain.sequence.encode().ljust(chain.last - chain.first) for chain in self.side.chains)
        return TYPE_OF_LETTER[np.frombuffer(letters, np.uint8)[self.place_N]]

    def label(self, node: int) -> str:
        """Return a residue's name for messages."""
        structure, residue = self.side.structure, self.residue_N[node]
        icode = chr(structure.icode_R[residue]).strip("\0 ")
        number = f"{structure.number_R[residue]}{icode}"
        return f"{name_text(structure.name_R[residue])} {number} of chain {self.side.chains[self.chain_N[node]].name}"


def select(role: Role, side: ComplexSide) -> Residues:
    """Return the residues of a side's protein chains that can be nodes; raise if a chain has none."""
    proteins = [chain.kind is Kind.PROTEIN for chain in side.chains]
    if not any(proteins):
        kinds = ", ".join(sorted({chain.kind.value for chain in side.chains}))
        problem = (
            f"the {role.value} has no protein chain (it has: {kinds}); graph.nodes: atom takes RNA, DNA and ligands"
        )
        raise UnusableInput(Reason.NO_NODES, problem)
    residue_R = side.residues()
    chain_R = np.repeat(np.arange(len(proteins)), [chain.last - chain.first for chain in side.chains])
    structure = side.structure
    has_ca_R = structure.backbone_R5[:, CA] >= 0  # a nucleotide has what the policy requires by an atom that is no CA
    is_node_R = (structure.node_R & has_ca_R)[residue_R]
    if not all(proteins):
        is_node_R &= np.array(proteins)[chain_R]
    place_N = np.flatnonzero(is_node_R)
    residue_N, chain_N = residue_R[place_N], chain_R[place_N]
    nodes_C = np.bincount(chain_N, minlength=len(proteins))
    for chain, is_protein, nodes in zip(side.chains, proteins, nodes_C.tolist(), strict=True):
        if is_protein and not nodes:
            problem = f"no residue of chain {chain.name} ({role.value}) has the atoms of a node; see structures.require"
            problem += ", structures.min_plddt" if structure.hidden_R.any() else ""
            raise UnusableInput(Reason.NO_NODES, problem)
    return Residues(side, place_N, residue_N, chain_N, structure.pos_A3[structure.backbone_R5[residue_N, CA]])


def node_arrays(sides: Sequence[Residues], bodies: Bodies, centres: Sequence[Floats]) -> list[dict[str, Array]]:
    """Return the arrays of the nodes of each side of one structure, except the embedding rows."""
    structure, residue_N = sides[0].side.structure, np.concatenate([residues.residue_N for residues in sides])
    sizes = [len(residues.residue_N) for residues in sides]
    centre_3N = np.stack(centres, axis=1).repeat(sizes, axis=1)
    atom_5N = structure.backbone_R5[residue_N].T
    absent_5N = atom_5N < 0
    pos_35N = bodies.pos_3A.take(atom_5N, axis=1)
    pos_35N -= centre_3N[:, None]
    pos_35N[:, absent_5N] = 0
    side_3N, atoms_N = _side_chains(bodies, residue_N, centre_3N, pos_35N, absent_5N)
    pos_35N[:, absent_5N] = np.nan
    virtual = absent_5N[CB].nonzero()[0]
    pos_35N[:, CB, virtual] = virtual_cb(*pos_35N[:, : C + 1, virtual].swapaxes(0, 1))
    bare = virtual[atoms_N[virtual] == 0]
    side_3N[:, bare] = pos_35N[:, CB, bare]
    side_3N -= pos_35N[:, CA]
    type_N = np.concatenate([residues.types() for residues in sides])
    lacks_backbone_N = absent_5N[N] | absent_5N[C]
    flags_N = absent_5N[CB] * VIRTUAL_CB
    flags_N |= lacks_backbone_N * NO_BACKBONE
    flags_N |= (lacks_backbone_N | (atoms_N < SIDE_ATOMS.take(type_N))) * INCOMPLETE
    flags_N |= structure.modified_R[residue_N] * MODIFIED
    if structure.low_R is not None:
        flags_N |= structure.low_R[residue_N] * UNSURE
    arrays = {
        "pos": pos_35N[:, KEPT].T.astype(np.float32, order="C"),
        "side": side_3N.T.astype(np.float32, order="C"),
        "type": type_N,
        "flags": flags_N,
        "chain": np.concatenate([residues.chain_N for residues in sides]),
        "number": structure.number_R[residue_N],
        "icode": structure.icode_R[residue_N].view(np.uint8),
    }
    if structure.plddt_R is not None:
        arrays["plddt"] = structure.plddt_R[residue_N]
    ends = np.cumsum(sizes).tolist()
    parts = [
        {name: array[end - size : end] for name, array in arrays.items()} for size, end in zip(sizes, ends, strict=True)
    ]
    for residues, part in zip(sides, parts, strict=True):
        part["chain"] = part["chain"].astype(np.min_scalar_type(len(residues.side.chains) - 1))
    return parts


def _side_chains(
    bodies: Bodies, residue_N: NDArray[np.int64], centre_3N: Floats, pos_35N: Floats, absent_5N: NDArray[np.bool_]
) -> tuple[Floats, NDArray[np.int64]]:
    """Return the centroid and number of each side chain's heavy atoms: of all, minus the main chain."""
    all_N, oxygens_N = bodies.atoms_S[residue_N], bodies.oxygens_S[residue_N]
    atoms_N = all_N + absent_5N[:CB].sum(axis=0) - (CB + oxygens_N)
    sum_3N = (bodies.middle_3S.take(residue_N, axis=1) - centre_3N) * all_N - pos_35N[:, :CB].sum(axis=1)
    sum_3N -= bodies.oxygen_3S.take(residue_N, axis=1) - centre_3N * oxygens_N
    sum_3N /= np.maximum(atoms_N, 1)
    return sum_3N, atoms_N


def virtual_cb(n_3N: Floats, ca_3N: Floats, c_3N: Floats) -> Floats:
    """Return the place of CB by ideal geometry; NaN if an atom is missing."""
    (x, y, z), (u, v, w) = forth_3N, onwards_3N = ca_3N - n_3N, c_3N - ca_3N
    across_3N = np.array([y * w - z * v, z * u - x * w, x * v - y * u])
    return ca_3N + CB_WEIGHTS[0] * forth_3N + CB_WEIGHTS[1] * across_3N + CB_WEIGHTS[2] * onwards_3N


def build_residue_graph(read: Complex, recipe: GraphRecipe) -> ItemGraph:
    """Return the residue graph of an item; raise UnusableInput if it cannot have one."""
    sides = {role: select(role, read.sides[role]) for role in ROLES if role in read.sides}
    refuse_coincident(sides, in_one_frame=not read.bound)
    edges = {role: _edges(role, chosen, recipe) for role, chosen in sides.items()}
    bodies = _bodies(sides)
    native = partial(_native, bodies=None if read.bound else bodies)
    labels, extra = interface_labels(read, sides, recipe.contacts, _twins, native)
    parts, centres = [], {role: centre(chosen.pos_N3) for role, chosen in sides.items()}
    arrays: dict[Role, dict[str, Array]] = {}
    for own in {id(own): own for own in bodies.values()}.values():
        group = [role for role in sides if bodies[role] is own]
        made = node_arrays([sides[role] for role in group], own, [centres[role] for role in group])
        arrays |= zip(group, made, strict=True)
    for role, chosen in sides.items():
        partner, nodes, centre_3 = read.partners[role], arrays[role], centres[role]
        nodes["row"] = joined_embedding_rows(partner, read.maps.get(f"rows.{role.value}"))[chosen.place_N]
        nodes |= extra.get(role, {})
        fields = edge_errors(chosen, chosen, edges[role])
        parts.append(PartnerGraph(role, chain_texts(partner), centre_3, nodes, {NEAR: edges[role]}, edge_fields=fields))
    cross = cross_edges(read, recipe, sides)
    errors = edge_errors(sides[Role.LIGAND], sides[Role.RECEPTOR], cross[NEAR]) if cross else {}
    return ItemGraph(tuple(parts), cross, labels, errors)


def edge_errors(source: Residues, target: Residues, edges_2E: Edges) -> dict[str, Array]:
    """Return how far off the place of each edge's source may be, seen from its target; NaN where no file says."""
    pae_RR = target.side.structure.pae_RR
    if pae_RR is None:
        return {}
    if source.side.structure is not target.side.structure or not pae_RR.size:
        return {NEAR_PAE: np.full(edges_2E.shape[1], np.nan, np.float32)}
    return {NEAR_PAE: pae_RR[target.residue_N[edges_2E[1]], source.residue_N[edges_2E[0]]]}


def _bodies(sides: Sides) -> dict[Role, Bodies]:
    """Return the bodies of each side's structure, computed once where both sides share it."""
    bodies_of: dict[int, Bodies] = {}
    for chosen in sides.values():
        structure = chosen.side.structure
        if id(structure) not in bodies_of:
            bodies_of[id(structure)] = contacts.rigid_bodies(structure)
    return {role: bodies_of[id(chosen.side.structure)] for role, chosen in sides.items()}


def _edges(role: Role, chosen: Residues, recipe: GraphRecipe) -> Edges:
    """Return the edges within a partner."""
    if len(chosen.pos_N3) == 1:
        problem = f"the {role.value} is one residue, {chosen.label(0)}: it has no possible edges"
        raise UnusableInput(Reason.NO_EDGES, problem)
    edges_2E = neighbours.within(chosen.pos_N3, recipe.neighbours, recipe.radius)
    if not edges_2E.size:
        problem = f"no two CA atoms of the {role.value} are nearer than {neighbours.closest(chosen.pos_N3):.2f} Å"
        raise UnusableInput(Reason.NO_EDGES, f"{problem}; graph.radius is {recipe.radius}, graph.neighbours is 0")
    return edges_2E


def _twins(
    _role: Role, here: Residues, side: ComplexSide, row_R: NDArray[np.int32]
) -> tuple[Residues, NDArray[np.int64]]:
    """Return the residues of the bound structure that correspond to nodes and have a CA, and that of each node."""
    structure = side.structure
    row_N = row_R[here.place_N]
    residue_N = side.residues()[row_N]
    ca_N = structure.backbone_R5[residue_N, CA]
    node_L = np.flatnonzero((row_N >= 0) & (ca_N >= 0))
    chain_R = np.repeat(np.arange(len(side.chains)), [chain.last - chain.first for chain in side.chains])
    place_L = row_N[node_L].astype(np.int64)
    twin_N = np.full(len(row_N), -1)
    twin_N[node_L] = np.arange(len(node_L))
    return Residues(side, place_L, residue_N[node_L], chain_R[place_L], structure.pos_A3[ca_N[node_L]]), twin_N


def _native(sides: Sides, cutoff: float, bodies: Mapping[Role, Bodies] | None) -> Pairs:
    """Return the native contacts of two sides, whose bodies may be known; else they are of bound structures."""
    known = bodies or _bodies(sides)
    receptor, ligand = (
        contacts.InterfaceSide.of(known[role], sides[role].residue_N) for role in (Role.RECEPTOR, Role.LIGAND)
    )
    native = contacts.find_contacts(receptor, ligand, cutoff)
    if native is None:
        raise no_contacts(contacts.closest_approach(receptor, ligand), cutoff, is_bound=bodies is None)
    return native
