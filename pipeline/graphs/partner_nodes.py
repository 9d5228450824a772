"""What residue and atom graphs share: checks of nodes, edges between partners, and labels of their interface.

Shapes: N nodes of a partner, M of its bound structure, E edges, P pairs of a ligand node and a receptor node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from pipeline.graphs import neighbours
from pipeline.graphs.item_graph import ChainText
from pipeline.records import Reason, Role
from pipeline.structures.atoms import UnusableInput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias, TypeVar

    from numpy.typing import NDArray

    from pipeline.graphs.item_graph import Array, Edges, GraphRecipe
    from pipeline.records import Partner
    from pipeline.structures.inventory import Complex, ComplexSide

    Floats = NDArray[np.float64]

CENTRE_DECIMALS = 3  # so that it does not depend on the order in which a processor adds
NEAR = "near"


class Nodes(Protocol):
    """The nodes of a partner."""

    two: ClassVar[str]  # how a message names two nodes

    @property
    def pos_N3(self) -> Floats:
        """Return their positions in the file."""

    def label(self, node: int) -> str:
        """Return a node's name for messages."""


if TYPE_CHECKING:
    Kind = TypeVar("Kind", bound=Nodes)
    Pairs: TypeAlias = tuple[Edges, dict[str, Array]]  # ligand nodes (row 0) and receptor nodes, and [P] of each
    # From the nodes of a partner, its bound structure and the map of residues: the bound nodes, and the one of each
    # node, -1 where it has none.
    FindTwins: TypeAlias = Callable[[Role, Kind, ComplexSide, NDArray[np.int32]], tuple[Kind, NDArray[np.int64]]]


def chain_texts(partner: Partner) -> tuple[ChainText, ...]:
    """Return the chains of a partner with their sequences."""
    return tuple(ChainText(chain.name, chain.kind, chain.sequence) for chain in partner.chains)


def centre(pos_N3: Floats) -> Floats:
    """Return the mean of points, rounded."""
    centre_3: Floats = (pos_N3.sum(axis=0) / len(pos_N3)).round(CENTRE_DECIMALS)
    return centre_3


def refuse_coincident(sides: Mapping[Role, Nodes], *, in_one_frame: bool) -> None:
    """Raise if two nodes are at one place; nodes of different partners count only if both are in one frame."""
    for group in [[*sides.values()]] if in_one_frame else [[side] for side in sides.values()]:
        pos_N3 = np.concatenate([side.pos_N3 for side in group])
        pairs_P2 = neighbours.coincident(pos_N3)
        if len(pairs_P2):
            own = [(side, node) for side in group for node in range(len(side.pos_N3))]
            labels = group[0].two.format(*(own[node][0].label(own[node][1]) for node in pairs_P2[0].tolist()))
            apart = float(np.linalg.norm(np.subtract(*pos_N3[pairs_P2[0]])))
            more = f"; so are {len(pairs_P2) - 1} other pairs" if len(pairs_P2) > 1 else ""
            raise UnusableInput(Reason.COINCIDENT_ATOMS, f"{labels} are {apart:.3f} Å apart, at one place{more}")


def cross_edges(read: Complex, recipe: GraphRecipe, sides: Mapping[Role, Nodes]) -> dict[str, Edges]:
    """Return the edges between partners that are in one frame, if the recipe wants any."""
    if read.bound or Role.LIGAND not in sides or not (recipe.cross_neighbours or recipe.cross_radius):
        return {}
    ligand_N3, receptor_N3 = sides[Role.LIGAND].pos_N3, sides[Role.RECEPTOR].pos_N3
    return {NEAR: neighbours.between(ligand_N3, receptor_N3, recipe.cross_neighbours, recipe.cross_radius)}


def interface_labels(
    read: Complex,
    sides: Mapping[Role, Kind],
    cutoff: float | None,
    find_twins: FindTwins[Kind],
    native: Callable[[Mapping[Role, Kind], float], Pairs],
) -> tuple[dict[str, Array], dict[Role, dict[str, Array]]]:
    """Return the native contacts, and the nodes' arrays from the bound structures."""
    if cutoff is None:
        return {}, {}
    if not read.bound:
        return _stored(native(sides, cutoff)) if Role.LIGAND in sides else {}, {}
    bound: dict[Role, Kind] = {}
    twins: dict[Role, NDArray[np.int64]] = {}
    for role, here in sides.items():
        if role in read.bound:
            bound[role], twins[role] = find_twins(role, here, read.bound[role], read.maps[f"bound.{role.value}"])
    refuse_coincident(bound, in_one_frame=True)
    centre_3 = centre(np.concatenate([there.pos_N3 for there in bound.values()]))
    labels: dict[str, Array] = {"bound_centre": centre_3}
    if len(bound) == len(sides) == 2:
        labels |= _stored(_by_twins(native(bound, cutoff), bound, twins))
    return labels, {role: _in_bound(twins[role], there.pos_N3 - centre_3) for role, there in bound.items()}


def no_contacts(apart: float, cutoff: float, *, is_bound: bool) -> UnusableInput:
    """Return the error for partners that do not touch."""
    where = " in the bound structure" if is_bound else ""
    problem = f"the nearest heavy atoms of the partners are {apart:.2f} Å apart{where}; graph.contacts is {cutoff:g}"
    return UnusableInput(Reason.NO_CONTACTS, problem)


def _stored(pairs: Pairs) -> dict[str, Array]:
    pairs_2P, fields = pairs
    narrow = np.min_scalar_type(max(int(pairs_2P.max()), 256))
    return {"contact_pairs": pairs_2P[::-1].T.astype(narrow, order="C"), **fields}


def _by_twins(pairs: Pairs, bound: Mapping[Role, Nodes], twins: Mapping[Role, NDArray[np.int64]]) -> Pairs:
    """Return pairs of bound nodes as pairs of corresponding nodes, sorted, without those that have none."""
    here = []
    for role, bound_P in zip((Role.LIGAND, Role.RECEPTOR), pairs[0], strict=True):
        node_M = np.full(len(bound[role].pos_N3), -1)
        node_M[twins[role][twins[role] >= 0]] = np.flatnonzero(twins[role] >= 0)
        here.append(node_M[bound_P])
    here_2P = np.stack(here)
    order = np.lexsort(here_2P)
    order = order[(here_2P[:, order] >= 0).all(axis=0)]
    if not len(order):
        contacts = here_2P.shape[1]
        problem = f"none of the {contacts} contacts of the bound structure has both atoms in the unbound structures"
        raise UnusableInput(Reason.NO_CONTACTS, problem)
    return here_2P[:, order], {name: values[order] for name, values in pairs[1].items()}


def _in_bound(twin_N: NDArray[np.int64], pos_M3: Floats) -> dict[str, Array]:
    """Return the arrays `labelled` and `bound`: which nodes are in the bound structure, and their places."""
    labelled = twin_N >= 0
    bound_N3 = np.full((len(twin_N), 3), np.nan, np.float32)
    bound_N3[labelled] = pos_M3[twin_N[labelled]]
    return {"labelled": labelled, "bound": bound_N3}
