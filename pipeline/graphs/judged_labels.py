"""Can this be what is known of an interface? Contacts within both partners, as far apart as their atoms.

Every function yields what is wrong as a sentence. Shapes: N nodes of a partner, X atoms of each, P pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.graphs import residue_graph
from pipeline.graphs.atom_graph import HYDROGEN
from pipeline.graphs.judged_parts import CENTRE_SLACK, SLACK, first_bad

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from pipeline.graphs.item_graph import ItemGraph, PartnerGraph

    Floats = NDArray[np.float64]
    Plain = Mapping[str, Any]  # a recipe, as JSON


def bound_centre(graph: ItemGraph, *, by_residue: bool) -> Iterator[str]:
    """Yield what is wrong with the centre of the bound structures: that of the CA atoms that have a node here."""
    if "bound_centre" not in graph.labels:
        return
    if not np.isfinite(graph.labels["bound_centre"]).all():
        yield f"label.bound_centre is {graph.labels['bound_centre'].tolist()}"
    there = [part.nodes["bound"][part.nodes["labelled"]] for part in graph.parts if "bound" in part.nodes]
    if not by_residue or not sum(map(len, there)):
        return
    off_3 = np.concatenate(there).astype(np.float64).mean(axis=0)
    if not (np.abs(off_3) <= CENTRE_SLACK).all():
        yield f"node.bound: the mean of all places is {off_3.round(4).tolist()}, not label.bound_centre"


def contacts(graph: ItemGraph, recipe: Plain | None, *, by_residue: bool) -> Iterator[str]:
    """Yield what is wrong with the native contacts."""
    if "contact_pairs" not in graph.labels:
        return
    pairs_P2, nearest_P = graph.labels["contact_pairs"].astype(np.int64), graph.labels["contact_nearest"]
    if len(graph.parts) < 2 or not len(pairs_P2):
        yield f"label.contact_pairs: {len(pairs_P2)} contacts of {len(graph.parts)} partners"
        return
    beyond_P = np.zeros(len(pairs_P2), np.bool_)
    for part, node_P in zip(graph.parts, pairs_P2.T, strict=False):
        beyond_P |= node_P >= part.size
        yield from first_bad(
            "label.contact_pairs", node_P >= part.size, pairs_P2, f"of {part.size} {part.role.value} nodes"
        )
    if beyond_P.any():
        return
    key_P = pairs_P2[:, 0] * graph.parts[1].size + pairs_P2[:, 1]
    back_P = np.append(False, np.diff(key_P) <= 0)
    yield from first_bad("label.contact_pairs", back_P, pairs_P2, "stands twice or is out of order")
    if by_residue:
        atoms_P = graph.labels["contact_atoms"]
        yield from first_bad("label.contact_atoms", atoms_P < 1, atoms_P, "pairs of atoms are no contact")
    else:
        elements = (part.nodes["element"][node_P] for part, node_P in zip(graph.parts, pairs_P2.T, strict=True))
        light_P = np.logical_or.reduce([element_P == HYDROGEN for element_P in elements])
        yield from first_bad("label.contact_pairs", light_P, pairs_P2, "has a hydrogen")
    most = np.inf if recipe is None else recipe["contacts"] + SLACK
    is_near_P = (nearest_P >= 0) & (nearest_P <= most) & np.isfinite(nearest_P)
    yield from first_bad("label.contact_nearest", ~is_near_P, nearest_P, "is no distance of a contact")
    yield from _contact_lengths(graph, pairs_P2, nearest_P, by_residue=by_residue)


def _contact_lengths(graph: ItemGraph, pairs_P2: Any, nearest_P: Any, *, by_residue: bool) -> Iterator[str]:
    """Yield contacts whose distance is not that of their atoms; of residues, one beyond what the main chain allows."""
    is_unbound = "bound_centre" in graph.labels
    sides = [_contact_places(part, is_unbound=is_unbound, by_residue=by_residue) for part in graph.parts[:2]]
    left_PX3, right_PX3 = (pos_NX3[node_P] for pos_NX3, node_P in zip(sides, pairs_P2.T, strict=True))
    between = left_PX3[:, :, None] - right_PX3[:, None]
    apart_P = np.sqrt(np.einsum("pxyc,pxyc->pxy", between, between)).reshape(len(pairs_P2), -1)
    apart_P = np.where(np.isfinite(apart_P), apart_P, np.inf).min(axis=1)
    off_P = nearest_P > apart_P + SLACK
    if not by_residue:
        off_P |= nearest_P < apart_P - SLACK
    yield from first_bad("label.contact_nearest", off_P, nearest_P, "is not the distance of its nodes", apart_P)


def _contact_places(part: PartnerGraph, *, is_unbound: bool, by_residue: bool) -> Floats:
    """Return some heavy atoms of each node, where contacts were found, [N, X, 3]; not a number where none is known."""
    if is_unbound:
        bound_N13: Floats = part.nodes["bound"].astype(np.float64)[:, None]
        return bound_N13
    pos = part.nodes["pos"].astype(np.float64) + part.centre_3
    if not by_residue:
        return pos[:, None]
    pos[(part.nodes["flags"] & residue_graph.VIRTUAL_CB) > 0, 3] = np.nan
    return pos
