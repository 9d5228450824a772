"""Residue graphs: a node at each residue of the protein chains.

Shapes: R residues and C chains of a side, N nodes, A atoms, H heavy atoms and S residues of a structure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from pipeline.graphs import contacts, neighbours
from pipeline.graphs.item_graph import NEAR_PAE, ROLES, ChainText, ItemGraph, PartnerGraph
from pipeline.records import Kind, Reason, Role
from pipeline.structures.atoms import UnusableInput, name_text
from pipeline.structures.partners import joined_embedding_rows
from pipeline.structures.policy import BACKBONE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from pipeline.graphs.contacts import Bodies
    from pipeline.graphs.item_graph import Array, Edges, GraphRecipe
    from pipeline.structures.inventory import Complex, ComplexSide

    Floats = NDArray[np.float64]
    Named: TypeAlias = tuple[Floats, Callable[[int], str]]  # where nodes are, and who can name them for a message
    Sides: TypeAlias = "Mapping[Role, Residues]"

LETTERS = "ACDEFGHIKLMNPQRSTVWYX"  # the last: any other
SIDE_ATOMS = np.array([1, 2, 4, 5, 7, 0, 6, 4, 5, 4, 4, 4, 3, 5, 7, 2, 3, 3, 10, 8, 0])  # heavy ones, CB among them
TYPE_OF_LETTER = np.full(256, len(LETTERS) - 1, np.uint8)
TYPE_OF_LETTER[np.frombuffer(LETTERS.encode(), np.uint8)] = np.arange(len(LETTERS))
CB_WEIGHTS = (0.56802827, -0.58273431, -0.54067466)  # of CA-N, its cross product with C-CA, and C-CA
N, CA, C, _, CB = range(len(BACKBONE))
KEPT = [N, CA, C, CB]
# Bits of `flags`. Without N or C, where `pos` is NaN, a residue has no frame; it is incomplete, too.
VIRTUAL_CB, INCOMPLETE, MODIFIED, NO_BACKBONE, UNSURE = map(np.uint8, (1, 2, 4, 8, 16))  # the last: of a low pLDDT
CENTRE_DECIMALS = 3  # so that it does not depend on the order in which a processor adds


@dataclass(frozen=True, slots=True)
class Residues:
    """The residues of a side that are nodes."""

    side: ComplexSide
    place_N: NDArray[np.int64]  # among the residues of the side
    residue_N: NDArray[np.int64]  # of the structure
    chain_N: NDArray[np.int64]  # of the side
    ca_N3: Floats  # in the file

    def types(self) -> NDArray[np.uint8]:
        """Return which of `LETTERS` each node is."""
        letters = b"".join(chain.sequence.encode().ljust(chain.last - chain.first) for chain in self.side.chains)
        return TYPE_OF_LETTER[np.frombuffer(letters, np.uint8)[self.place_N]]

    def name(self, node: int) -> str:
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


def centre(pos_N3: Floats) -> Floats:
    """Return the mean of points, rounded."""
    centre_3: Floats = (pos_N3.sum(axis=0) / len(pos_N3)).round(CENTRE_DECIMALS)
    return centre_3


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
    cb_3N: Floats = ca_3N + CB_WEIGHTS[0] * forth_3N + CB_WEIGHTS[1] * across_3N + CB_WEIGHTS[2] * onwards_3N
    return cb_3N


PAIR = (Role.RECEPTOR, Role.LIGAND)
NEAR = "near"


@dataclass(frozen=True, slots=True)
class Twins:
    """The L nodes of a side that are in the bound structure, with their residues there."""

    size: int
    node_L: NDArray[np.int64]
    there: Residues

    def arrays(self, centre_3: NDArray[np.float64]) -> dict[str, Array]:
        """Return the arrays `labelled` and `bound`: which nodes have a CA in the bound structure, and its place."""
        labelled_N = np.zeros(self.size, np.bool_)
        labelled_N[self.node_L] = True
        bound_N3 = np.full((self.size, 3), np.nan, np.float32)
        bound_N3[self.node_L] = self.there.ca_N3 - centre_3
        return {"labelled": labelled_N, "bound": bound_N3}


def build_residue_graph(read: Complex, recipe: GraphRecipe) -> ItemGraph:
    """Return the residue graph of an item; raise UnusableInput if it cannot have one."""
    sides = {role: select(role, read.sides[role]) for role in ROLES if role in read.sides}
    _refuse_coincident(sides, in_one_frame=not read.bound)
    edges = {role: _edges(role, chosen, recipe) for role, chosen in sides.items()}
    twins = {role: _twins(sides[role], there, read.maps[f"bound.{role.value}"]) for role, there in read.bound.items()}
    bodies = _bodies(sides)
    labels, extra = _labels(sides, bodies, twins, recipe.contacts)
    parts, centres = [], {role: centre(chosen.ca_N3) for role, chosen in sides.items()}
    arrays: dict[Role, dict[str, Array]] = {}
    for own in {id(own): own for own in bodies.values()}.values():
        group = [role for role in sides if bodies[role] is own]
        made = node_arrays([sides[role] for role in group], own, [centres[role] for role in group])
        arrays |= zip(group, made, strict=True)
    for role, chosen in sides.items():
        partner, nodes, centre_3 = read.partners[role], arrays[role], centres[role]
        nodes["row"] = joined_embedding_rows(partner, read.maps.get(f"rows.{role.value}"))[chosen.place_N]
        chains = tuple(ChainText(chain.name, chain.kind, chain.sequence) for chain in partner.chains)
        nodes |= extra.get(role, {})
        fields = edge_errors(chosen, chosen, edges[role])
        parts.append(PartnerGraph(role, chains, centre_3, nodes, {NEAR: edges[role]}, edge_fields=fields))
    cross = cross_edges(read, recipe, {role: chosen.ca_N3 for role, chosen in sides.items()})
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


def _refuse_coincident(sides: Sides, *, in_one_frame: bool) -> None:
    partners = [(chosen.ca_N3, chosen.name) for chosen in sides.values()]
    refuse_coincident(partners, "the CA atoms of {} and of {}", in_one_frame=in_one_frame)


def refuse_coincident(partners: Sequence[Named], words: str, *, in_one_frame: bool) -> None:
    """Raise if two nodes are at one place; nodes of different partners count only if both are in one frame."""
    for group in [partners] if in_one_frame else [[partner] for partner in partners]:
        pos_N3 = np.concatenate([places_N3 for places_N3, _ in group])
        pairs_P2 = neighbours.coincident(pos_N3)
        if len(pairs_P2):
            labels = words.format(*(_label(group, node) for node in pairs_P2[0].tolist()))
            apart = float(np.linalg.norm(np.subtract(*pos_N3[pairs_P2[0]])))
            more = f"; so are {len(pairs_P2) - 1} other pairs" if len(pairs_P2) > 1 else ""
            raise UnusableInput(Reason.COINCIDENT_ATOMS, f"{labels} are {apart:.3f} Å apart, at one place{more}")


def _label(group: Sequence[Named], node: int) -> str:
    """Return the name of a node, numbered through all partners of a group."""
    for places_N3, label in group:
        if node < len(places_N3):
            return label(node)
        node -= len(places_N3)
    raise ValueError("node not found")


def cross_edges(read: Complex, recipe: GraphRecipe, places: Mapping[Role, Floats]) -> dict[str, Edges]:
    """Return the edges between partners that are in one frame, if the recipe wants any."""
    if read.bound or Role.LIGAND not in places or not (recipe.cross_neighbours or recipe.cross_radius):
        return {}
    nearest, radius = recipe.cross_neighbours, recipe.cross_radius
    return {NEAR: neighbours.between(places[Role.LIGAND], places[Role.RECEPTOR], nearest, radius)}


def no_contacts(apart: float, cutoff: float, *, is_bound: bool) -> UnusableInput:
    """Return the error for partners that do not touch."""
    where = " in the bound structure" if is_bound else ""
    problem = f"the nearest heavy atoms of the partners are {apart:.2f} Å apart{where}; graph.contacts is {cutoff:g}"
    return UnusableInput(Reason.NO_CONTACTS, problem)


def _edges(role: Role, chosen: Residues, recipe: GraphRecipe) -> Edges:
    """Return the edges within a partner."""
    if len(chosen.ca_N3) == 1:
        problem = f"the {role.value} is one residue, {chosen.name(0)}: it has no possible edges"
        raise UnusableInput(Reason.NO_EDGES, problem)
    edges_2E = neighbours.within(chosen.ca_N3, recipe.neighbours, recipe.radius)
    if not edges_2E.size:
        problem = f"no two CA atoms of the {role.value} are nearer than {neighbours.closest(chosen.ca_N3):.2f} Å"
        raise UnusableInput(Reason.NO_EDGES, f"{problem}; graph.radius is {recipe.radius}, graph.neighbours is 0")
    return edges_2E


def _twins(here: Residues, side: ComplexSide, row_R: NDArray[np.int32]) -> Twins:
    """Return the nodes of a side that have a CA in the bound structure, with their residues there."""
    structure = side.structure
    row_N = row_R[here.place_N]
    residue_N = side.residues()[row_N]
    ca_N = structure.backbone_R5[residue_N, BACKBONE.index("CA")]
    node_L = np.flatnonzero((row_N >= 0) & (ca_N >= 0))
    chain_R = np.repeat(np.arange(len(side.chains)), [chain.last - chain.first for chain in side.chains])
    place_L = row_N[node_L].astype(np.int64)
    there = Residues(side, place_L, residue_N[node_L], chain_R[place_L], structure.pos_A3[ca_N[node_L]])
    return Twins(len(row_N), node_L, there)


def _labels(
    sides: Sides, bodies: Mapping[Role, Bodies], twins: Mapping[Role, Twins], cutoff: float | None
) -> tuple[dict[str, Array], dict[Role, dict[str, Array]]]:
    """Return the native contacts, and the nodes' arrays from the bound structures."""
    if cutoff is None:
        return {}, {}
    if not twins:
        return _native(sides, bodies, cutoff, {}) if Role.LIGAND in sides else {}, {}
    bound = {role: twin.there for role, twin in twins.items()}
    _refuse_coincident(bound, in_one_frame=True)
    centre_3 = centre(np.concatenate([there.ca_N3 for there in bound.values()]))
    contacts_of_both = _native(bound, _bodies(bound), cutoff, twins) if len(bound) == len(sides) == 2 else {}
    return {"bound_centre": centre_3, **contacts_of_both}, {role: twin.arrays(centre_3) for role, twin in twins.items()}


def _native(
    sides: Sides, bodies: Mapping[Role, Bodies], cutoff: float, twins: Mapping[Role, Twins]
) -> dict[str, Array]:
    """Return the native contacts of two sides; of bound structures, as pairs of corresponding nodes."""
    receptor, ligand = (contacts.InterfaceSide.of(bodies[role], sides[role].residue_N) for role in PAIR)
    native = contacts.find_contacts(receptor, ligand, cutoff)
    if native is None:
        raise no_contacts(contacts.closest_approach(receptor, ligand), cutoff, is_bound=bool(twins))
    pairs_P2 = np.stack([native.receptor_P, native.ligand_P], axis=1)
    if twins:
        pairs_P2 = np.stack([twins[role].node_L[of_P] for role, of_P in zip(PAIR, pairs_P2.T, strict=True)], axis=1)
    size = max(twins[role].size if twins else len(sides[role].place_N) for role in PAIR)
    return {
        "contact_pairs": pairs_P2.astype(np.min_scalar_type(max(size - 1, 256))),
        "contact_atoms": native.atoms_P.astype(np.min_scalar_type(max(int(native.atoms_P.max()), 256))),
        "contact_nearest": native.nearest_P.astype(np.float32),
    }
