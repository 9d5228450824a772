"""Can these be the edges of a graph? Where the recipe is known, they are found again from the coordinates.

Every function yields what is wrong as a sentence. Shapes: N nodes of a partner, S sources of edges, E edges, B bonds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.graphs import atom, hops, neighbours
from pipeline.graphs.bonds import LONGEST
from pipeline.graphs.graph import lengths
from pipeline.graphs.judged_nodes import SLACK, in_file, places
from pipeline.graphs.wrongs import first

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from pipeline.graphs.graph import Edges, Graph, Part

    Floats = NDArray[np.float64]
    Plain = Mapping[str, Any]  # a recipe, as JSON


def residue_edges(part: Part, recipe: Plain | None) -> Iterator[str]:
    """Yield what is wrong with the edges of a residue graph."""
    name, edges_2E = f"{part.role.value}.edge.near", part.edges["near"]
    form = list(_edge_form(name, edges_2E, part.size, own=True))
    yield from form
    if form:
        return
    if not edges_2E.size:
        yield f"{name}: there are none"
        return
    pos_N3 = places(part)
    apart_E = lengths(pos_N3, pos_N3, edges_2E)
    if apart_E.min() < neighbours.COINCIDENT - SLACK:
        yield f"{name}: two nodes are at one place, {apart_E.min():.3f} Å apart"
    if recipe:
        yield from _found_again(name, part, part, edges_2E, recipe["neighbours"], recipe["radius"])


def _edge_form(name: str, edges_2E: Edges, sources: int, *, own: bool) -> Iterator[str]:
    """Yield edges that end nowhere, stand twice, are out of order, or lead back to where they began."""
    if not edges_2E.size:
        return
    beyond_E = edges_2E[0] >= sources
    yield from first(f"{name}.neighbour", beyond_E, edges_2E[0], f"of {sources} nodes")
    if own:
        yield from first(f"{name}.neighbour", edges_2E[0] == edges_2E[1], edges_2E[0], "is the node itself")
    key_E = edges_2E[1] * max(sources, 1) + edges_2E[0]
    if not beyond_E.any():
        back_E = np.append(False, np.diff(key_E) <= 0)
        yield from first(f"{name}.neighbour", back_E, edges_2E[0], "stands twice or is out of order")


def _found_again(
    name: str, source: Part, target: Part, edges_2E: Edges, nearest: int, radius: float | None
) -> Iterator[str]:
    """Yield edges that the coordinates do not give, and those that they give and that are not there."""
    same = source is target
    source_S3, target_N3 = in_file(source), in_file(target)
    if same:
        found_2E = neighbours.within(target_N3, nearest, radius)
    else:
        found_2E = neighbours.between(source_S3, target_N3, nearest, radius)
    if np.array_equal(edges_2E, found_2E):
        return
    if nearest:
        degree_N = np.bincount(edges_2E[1], minlength=target.size)
        least = min(nearest, source.size - same)
        few_N = degree_N < least if radius is not None else degree_N != least
        yield from first(f"{name}.degree", few_N, degree_N, f"and {least} is wanted")
    last_N = np.full(target.size, -np.inf)  # how far the farthest of the nearest is
    if nearest:
        near_2E = found_2E if radius is None else _nearest(source_S3, target_N3, nearest, same=same)
        np.maximum.at(last_N, near_2E[1], lengths(source_S3, target_N3, near_2E))
    reach = -np.inf if radius is None else radius
    for some_2E, what in _difference(edges_2E, found_2E, source.size):
        apart_E = lengths(source_S3, target_N3, some_2E)
        clear_E = (np.abs(apart_E - last_N[some_2E[1]]) > SLACK) & (np.abs(apart_E - reach) > SLACK)
        for at in np.flatnonzero(clear_E)[:1].tolist():
            more = f" and {int(clear_E.sum()) - 1} more" if clear_E.sum() > 1 else ""
            yield f"{name}: from {some_2E[0, at]} to {some_2E[1, at]}, {apart_E[at]:.3f} Å apart, {what}{more}"


def _nearest(source_S3: Floats, target_N3: Floats, nearest: int, *, same: bool) -> Edges:
    if same:
        return neighbours.within(target_N3, nearest)
    return neighbours.between(source_S3, target_N3, nearest)


def _difference(mine_2E: Edges, theirs_2E: Edges, sources: int) -> Iterator[tuple[Edges, str]]:
    """Yield the edges of one set that the other lacks, and what is wrong with them."""
    mine, theirs = (edges_2E[1] * sources + edges_2E[0] for edges_2E in (mine_2E, theirs_2E))
    for keys, others, what in ((mine, theirs, "should not be there"), (theirs, mine, "is missing")):
        lone = hops.without(keys, others)
        yield np.stack(np.divmod(lone, max(sources, 1))[::-1]), what


def atom_edges(part: Part, recipe: Plain | None) -> Iterator[str]:
    """Yield what is wrong with the edges and paths of an atom graph."""
    form = [
        what
        for name, edges_2E in part.edges.items()
        for what in (
            *_edge_form(f"{part.role.value}.edge.{name}", edges_2E, part.size, own=True),
            *_one_way(f"{part.role.value}.edge.{name}", edges_2E, part.size),
        )
    ]
    yield from form
    if form:
        return
    pos_N3, bond_2E = places(part), part.edges[atom.BOND]
    too_long_E = lengths(pos_N3, pos_N3, bond_2E) > LONGEST + SLACK
    yield from first(f"{part.role.value}.edge.bond.neighbour", too_long_E, bond_2E[0], f"is more than {LONGEST} Å away")
    yield from _paths(part)
    if recipe and recipe["atom_radius"] is not None:
        yield from _near_again(part, recipe["atom_radius"])


def _one_way(name: str, edges_2E: Edges, nodes: int) -> Iterator[str]:
    """Yield an edge that has no other direction."""
    key_E, back_E = edges_2E[1] * nodes + edges_2E[0], edges_2E[0] * nodes + edges_2E[1]
    lone_E = np.sort(back_E) != key_E
    yield from first(f"{name}.neighbour", lone_E, edges_2E[0], "has no edge the other way")


def _paths(part: Part) -> Iterator[str]:
    """Yield the paths of two and three bonds, and pairs so far apart, that do not follow from the bonds."""
    role, size = part.role.value, part.size
    bond_2E = part.edges[atom.BOND]
    bonds_B2 = bond_2E[:, bond_2E[0] < bond_2E[1]].T
    known = np.empty(0, np.int64)
    kinds = [name for name in hops.NAMES if name in part.edges]
    for name, path in zip(kinds, hops.paths(bonds_B2, size, len(kinds)), strict=True):
        keys = hops.without(hops.pair_keys(path, size), known)
        known = np.sort(np.concatenate([known, keys]))
        if name != atom.BOND and not np.array_equal(part.paths[name], path):
            yield f"{role}.path.{name} does not follow from the bonds: {len(part.paths[name])} paths, not {len(path)}"
        if not np.array_equal(part.edges[name], hops.both_ways(keys, size)):
            yield f"{role}.edge.{name} does not follow from the bonds: {part.edges[name].shape[1]}, not {2 * len(keys)}"


def _near_again(part: Part, radius: float) -> Iterator[str]:
    """Yield pairs within the radius that are not there, and those that are and should not be."""
    name, pos_N3, size = f"{part.role.value}.edge.near", in_file(part), part.size
    bonded = [edges_2E for kind, edges_2E in part.edges.items() if kind != "near"]
    bonded_E = np.sort(np.concatenate([edges_2E[1] * size + edges_2E[0] for edges_2E in bonded]))
    found_2E = neighbours.within(pos_N3, radius=radius)
    keys = hops.without(found_2E[1] * size + found_2E[0], bonded_E)
    found_2E = np.stack(np.divmod(keys, size)[::-1])
    if np.array_equal(part.edges["near"], found_2E):
        return
    for some_2E, what in _difference(part.edges["near"], found_2E, size):
        apart_E = lengths(pos_N3, pos_N3, some_2E)
        is_bonded_E = np.isin(some_2E[1] * size + some_2E[0], bonded_E)
        for at in np.flatnonzero(is_bonded_E | (np.abs(apart_E - radius) > SLACK))[:1].tolist():
            yield f"{name}: from {some_2E[0, at]} to {some_2E[1, at]}, {apart_E[at]:.3f} Å apart, {what}"


def cross(graph: Graph, recipe: Plain | None) -> Iterator[str]:
    """Yield what is wrong with the edges between partners."""
    if "near" not in graph.cross:
        return
    if len(graph.parts) < 2:
        yield "cross.near: there is no other partner"
        return
    receptor, ligand = graph.parts[:2]
    form = list(_edge_form("cross.near", graph.cross["near"], ligand.size, own=False))
    yield from form
    if recipe and not form:
        nearest, radius = recipe["cross_neighbours"], recipe["cross_radius"]
        yield from _found_again("cross.near", ligand, receptor, graph.cross["near"], nearest, radius)
