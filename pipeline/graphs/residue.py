"""Residue graphs: a node at each CA of a protein.

Nodes     pos float32 [N, 4, 3], N, CA, C and CB from the centre, not a number where one is missing and cannot be had;
          side float32 [N, 3], from CA to the centroid of the side chain's heavy atoms, or to CB where there are none;
          type uint8, an index into `backbone.LETTERS`; flags uint8, see `backbone`; chain, an index into the chains;
          row int32; number int32 and icode uint8, as in the file.
Edges     near: from each node's nearest ones, and from all within the radius.
Cross     near: pairs of a ligand node (row 0) and a receptor node (row 1), found in the same way. On unbound input
          there are none: its partners are not in one frame.
Labels    contact_pairs [P, 2] (receptor node, ligand node), contact_atoms uint16, how many pairs of heavy atoms are
          within the cut-off, and contact_nearest float32, the smallest distance. On unbound input they are those of
          the bound structures; then each node has labelled bool and bound float32 [N, 3], its CA there from the
          float64 bound_centre, not a number where it has none.

RNA, DNA and ligands of a partner are left out.

Shapes: N nodes of a partner, L of them in the bound structure, R residues of a side, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from pipeline.graphs import backbone, contacts, neighbours
from pipeline.graphs.backbone import Bodies, Residues
from pipeline.graphs.graph import ChainText, Graph, Part
from pipeline.records import Reason, Role
from pipeline.structures.atoms import Unusable
from pipeline.structures.policy import BACKBONE
from pipeline.structures.sequences import joined_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from pipeline.graphs.graph import Array, Edges
    from pipeline.graphs.recipe import Recipe
    from pipeline.structures.inventory import Complex, Side

    Sides: TypeAlias = Mapping[Role, Residues]

PAIR = (Role.RECEPTOR, Role.LIGAND)
ROLES = (*PAIR, Role.WHOLE)
NEAR = "near"


@dataclass(frozen=True, slots=True)
class Twins:
    """The nodes of a side that are in the bound structure, L of so many, and the residues that they are there."""

    size: int
    node_L: NDArray[np.int64]
    there: Residues

    def arrays(self, centre_3: NDArray[np.float64]) -> dict[str, Array]:
        """Return which nodes have a CA in the bound structure, and where it is."""
        labelled_N = np.zeros(self.size, np.bool_)
        labelled_N[self.node_L] = True
        bound_N3 = np.full((self.size, 3), np.nan, np.float32)
        bound_N3[self.node_L] = self.there.ca_N3 - centre_3
        return {"labelled": labelled_N, "bound": bound_N3}


def build(read: Complex, recipe: Recipe) -> Graph:
    """Return the residue graph of an item; raise Unusable where it cannot have one."""
    sides = {role: backbone.select(role, read.sides[role]) for role in ROLES if role in read.sides}
    _check_apart(sides, in_one_frame=not read.bound)
    edges = {role: _edges(role, chosen, recipe) for role, chosen in sides.items()}
    twins = {role: _twins(sides[role], there, read.maps[f"bound.{role.value}"]) for role, there in read.bound.items()}
    bodies = _bodies(sides)
    labels, extra = _labels(sides, bodies, twins, recipe.contacts)
    parts = []
    for role, chosen in sides.items():
        partner, centre_3 = read.partners[role], backbone.centre(chosen.ca_N3)
        nodes = backbone.describe(chosen, bodies[role], centre_3)
        nodes["row"] = joined_rows(partner, read.maps.get(f"rows.{role.value}"))[chosen.place_N]
        chains = tuple(ChainText(chain.name, chain.kind, chain.sequence) for chain in partner.chains)
        parts.append(Part(role, chains, centre_3, nodes | extra.get(role, {}), {NEAR: edges[role]}))
    return Graph(tuple(parts), {} if read.bound else _cross(sides, recipe), labels)


def _bodies(sides: Sides) -> dict[Role, Bodies]:
    """Return what is known of the residues of each side's structure; one with both partners is gone through once."""
    made: dict[int, Bodies] = {}
    for chosen in sides.values():
        structure = chosen.side.structure
        if id(structure) not in made:
            made[id(structure)] = backbone.rigid_bodies(structure)
    return {role: made[id(chosen.side.structure)] for role, chosen in sides.items()}


def _check_apart(sides: Sides, *, in_one_frame: bool) -> None:
    """Refuse two CA atoms at one place, also of two partners where both are in one frame."""
    for group in [list(sides.values())] if in_one_frame else [[chosen] for chosen in sides.values()]:
        pos_N3 = np.concatenate([chosen.ca_N3 for chosen in group])
        pairs_P2 = neighbours.coincident(pos_N3)
        if len(pairs_P2):
            one, other = (_name(group, node) for node in pairs_P2[0].tolist())
            apart = float(np.linalg.norm(np.subtract(*pos_N3[pairs_P2[0]])))
            more = f"; so are {len(pairs_P2) - 1} other pairs" if len(pairs_P2) > 1 else ""
            what = f"the CA atoms of {one} and of {other} are {apart:.3f} Å apart, at one place{more}"
            raise Unusable(Reason.COINCIDENT_ATOMS, what)


def _name(group: list[Residues], node: int) -> str:
    """Name a node of several sides, counted through."""
    for chosen in group:
        if node < len(chosen.place_N):
            return chosen.name(node)
        node -= len(chosen.place_N)
    raise ValueError("there is no such node")


def _edges(role: Role, chosen: Residues, recipe: Recipe) -> Edges:
    """Return the edges within a partner."""
    if len(chosen.ca_N3) == 1:
        what = f"the {role.value} is one residue, {chosen.name(0)}: there is nothing that it could have an edge to"
        raise Unusable(Reason.NO_EDGES, what)
    edges_2E = neighbours.within(chosen.ca_N3, recipe.neighbours, recipe.radius)
    if not edges_2E.size:
        what = f"no two CA atoms of the {role.value} are nearer than {neighbours.closest(chosen.ca_N3):.2f} Å"
        raise Unusable(Reason.NO_EDGES, f"{what}; graph.radius is {recipe.radius}, graph.neighbours is 0")
    return edges_2E


def _cross(sides: Sides, recipe: Recipe) -> dict[str, Edges]:
    """Return the edges between the partners, where any are wanted."""
    if Role.LIGAND not in sides or not (recipe.cross_neighbours or recipe.cross_radius):
        return {}
    ligand, receptor = sides[Role.LIGAND], sides[Role.RECEPTOR]
    return {NEAR: neighbours.between(ligand.ca_N3, receptor.ca_N3, recipe.cross_neighbours, recipe.cross_radius)}


def _twins(here: Residues, side: Side, row_R: NDArray[np.int32]) -> Twins:
    """Return the nodes that have a CA in the bound structure, and the residues that they are there."""
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
    """Return the native contacts, and what each node has of the bound structures."""
    if cutoff is None:
        return {}, {}
    if not twins:
        return _native(sides, bodies, cutoff, {}) if Role.LIGAND in sides else {}, {}
    bound = {role: twin.there for role, twin in twins.items()}
    _check_apart(bound, in_one_frame=True)
    centre_3 = backbone.centre(np.concatenate([there.ca_N3 for there in bound.values()]))
    contacts_of_both = _native(bound, _bodies(bound), cutoff, twins) if len(bound) == len(sides) == 2 else {}
    return {"bound_centre": centre_3, **contacts_of_both}, {role: twin.arrays(centre_3) for role, twin in twins.items()}


def _native(
    sides: Sides, bodies: Mapping[Role, Bodies], cutoff: float, twins: Mapping[Role, Twins]
) -> dict[str, Array]:
    """Return the native contacts of two sides, between their nodes or between the nodes whose twins they are."""
    receptor, ligand = (contacts.side(bodies[role], sides[role].residue_N) for role in PAIR)
    found = contacts.find(receptor, ligand, cutoff)
    if found is None:
        where = " in the bound structure" if twins else ""
        what = f"the nearest heavy atoms of the partners are {contacts.nearest(receptor, ligand):.2f} Å apart{where}"
        raise Unusable(Reason.NO_CONTACTS, f"{what}; graph.contacts is {cutoff:g}")
    pairs_P2 = np.stack([found.receptor_P, found.ligand_P], axis=1)
    if twins:
        pairs_P2 = np.stack([twins[role].node_L[of_P] for role, of_P in zip(PAIR, pairs_P2.T, strict=True)], axis=1)
    size = max(twins[role].size if twins else len(sides[role].place_N) for role in PAIR)
    return {
        "contact_pairs": pairs_P2.astype(np.min_scalar_type(max(size - 1, 256))),
        "contact_atoms": found.atoms_P.astype(np.min_scalar_type(max(int(found.atoms_P.max()), 256))),
        "contact_nearest": found.nearest_P.astype(np.float32),
    }
