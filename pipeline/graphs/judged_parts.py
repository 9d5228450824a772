"""Checks of the parts of a graph; each yields sentences: the first wrong place, its value, and how many more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.graphs import atom_graph, bonds, neighbours, residue_graph
from pipeline.graphs.bonds import LONGEST
from pipeline.graphs.item_graph import NEAR_PAE, edge_lengths
from pipeline.records import Kind
from pipeline.structures.parsing.aligned_errors import LARGEST_ERROR
from pipeline.structures.partners import NO_ROW
from pipeline.structures.policy import FARTHEST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from pipeline.graphs.item_graph import Array, PartnerGraph

    Floats = NDArray[np.float64]
    from collections.abc import Mapping

    from pipeline.graphs.item_graph import Edges, ItemGraph

    Plain = Mapping[str, Any]  # a recipe, as JSON


def first_bad(name: str, bad: Any, values: Any, problem: str, instead: Any = None) -> Iterator[str]:
    """Yield a sentence on the first bad place: its value, the problem, and how many more there are."""
    if not bad.any():
        return
    at = np.unravel_index(int(bad.argmax()), bad.shape)
    count = int(np.count_nonzero(bad))
    more = f" (and {count - 1} more)" if count > 1 else ""
    place = ", ".join(str(int(index)) for index in at)
    wanted = "" if instead is None else f", {np.round(instead[at], 4)}"
    yield f"{name}[{place}] is {shown_value(values[at])}: {problem}{wanted}{more}"


def falls(values: Array) -> NDArray[np.bool_]:
    """Return a mask of the values that are less than the one before."""
    falls = np.zeros(len(values), np.bool_)
    falls[1:] = values[1:] < values[:-1]
    return falls


def listed(values: Any) -> str:
    """Return values as text, separated by commas."""
    return ", ".join(str(getattr(value, "value", value)) for value in values) or "none"


def shown_value(value: Any) -> str:
    """Return a value as text with few digits."""
    array = np.asarray(value)
    if array.ndim == 0:
        return f"{array.item():.4f}" if array.dtype.kind == "f" else str(array.item())
    return " ".join(str(np.round(array.astype(np.float64), 3).tolist()).split())


# float32 keeps 1e-5 Å of a coordinate, and files of more than three decimals are rounded here to find neighbours again.
SLACK = 2e-3  # Å
CENTRE_SLACK = 1e-3  # Å; a centre is rounded to three decimals
FLAGS = int(residue_graph.VIRTUAL_CB | residue_graph.INCOMPLETE | residue_graph.MODIFIED)
FLAGS |= int(residue_graph.NO_BACKBONE | residue_graph.UNSURE)
ELEMENTS = 119  # gemmi counts deuterium behind the elements


def places(part: PartnerGraph) -> Floats:
    """Return the nodes' places relative to the centre: CA atoms of residues, or atoms."""
    pos = part.nodes["pos"]
    places_N3: Floats = (pos if pos.ndim == 2 else pos[:, 1]).astype(np.float64)
    return places_N3


def in_file(part: PartnerGraph) -> Floats:
    """Return the nodes' places in the file, rounded to three decimals."""
    in_file_N3: Floats = (places(part) + part.centre_3).round(3)
    return in_file_N3


def centred(part: PartnerGraph) -> Iterator[str]:
    """Yield what is wrong with the places of nodes, of residues and atoms alike."""
    role, ca_N3 = part.role.value, places(part)
    finite_N = np.isfinite(ca_N3).all(axis=1)
    if not finite_N.all() or not np.isfinite(part.centre_3).all():
        yield from first_bad(f"{role}.node.pos", ~finite_N, ca_N3, "is no place")
        if not np.isfinite(part.centre_3).all():
            yield f"{role}.centre is {part.centre_3.tolist()}"
        return
    if not (np.abs(ca_N3 + part.centre_3) < FARTHEST + 1).all():
        yield f"a node of the {role} is beyond {FARTHEST:,.0f} Å"
    off_3 = ca_N3.mean(axis=0)
    if (np.abs(off_3) > CENTRE_SLACK + np.spacing(np.float32(np.abs(ca_N3).max()))).any():
        yield f"{role}.node.pos: the mean of all places is {off_3.round(4).tolist()}, not the centre"


def residue_nodes(part: PartnerGraph) -> Iterator[str]:
    """Yield what is wrong with the nodes of a residue graph."""
    role, nodes = part.role.value, part.nodes
    finite_N4 = np.logical_and.reduce(np.isfinite(nodes["pos"]), axis=2)
    if not finite_N4.all():
        yield from first_bad(
            f"{role}.node.pos", np.isnan(nodes["pos"]).all(axis=2) == finite_N4, nodes["pos"], "is half a place"
        )
        lone_N = ~finite_N4[:, 3] & finite_N4[:, 0] & finite_N4[:, 2]
        yield from first_bad(f"{role}.node.pos", lone_N, nodes["pos"], "has no CB, which could be had from N, CA and C")
    finite_N = np.isfinite(nodes["side"]).all(axis=1)
    yield from first_bad(f"{role}.node.side", ~finite_N & finite_N4[:, 3], nodes["side"], "is not finite")
    yield from first_bad(
        f"{role}.node.type", nodes["type"] >= len(residue_graph.LETTERS), nodes["type"], "is no letter"
    )
    yield from first_bad(f"{role}.node.flags", nodes["flags"] > FLAGS, nodes["flags"], "is no set of flags")
    whole_N = (nodes["flags"] & residue_graph.NO_BACKBONE > 0) & finite_N4[:, 0] & finite_N4[:, 2]
    yield from first_bad(f"{role}.node.flags", whole_N, nodes["flags"], "says that N or C is missing")
    yield from _virtual(part)
    yield from _in_chains(part, nodes["chain"], f"{role}.node")
    is_protein_C = np.array([chain.kind is Kind.PROTEIN for chain in part.chains])
    if nodes["chain"].max() < len(is_protein_C):
        yield from first_bad(f"{role}.node.chain", ~is_protein_C[nodes["chain"]], nodes["chain"], "is no protein")
        yield from _rows(part, nodes["chain"], nodes["type"], f"{role}.node")
        absent = np.setdiff1d(np.flatnonzero(is_protein_C), nodes["chain"])
        for chain in absent.tolist():
            yield f"chain {part.chains[chain].name} of the {role} has no nodes"


def _virtual(part: PartnerGraph) -> Iterator[str]:
    """Yield virtual CB atoms that do not follow from the main chain."""
    pos_N43 = part.nodes["pos"]
    made = np.flatnonzero(part.nodes["flags"] & residue_graph.VIRTUAL_CB)
    n_3M, ca_3M, c_3M, cb_3M = pos_N43[made].astype(np.float64).transpose(1, 2, 0)
    off_M = np.abs(residue_graph.virtual_cb(n_3M, ca_3M, c_3M) - cb_3M).max(axis=0, initial=0)
    bad = np.zeros(part.size, np.bool_)
    bad[made[off_M > SLACK]] = True
    yield from first_bad(
        f"{part.role.value}.node.pos", bad, pos_N43, "has a made CB that does not follow from N, CA and C"
    )


def atom_nodes(part: PartnerGraph) -> Iterator[str]:
    """Yield what is wrong with the nodes and the residues of an atom graph."""
    role, nodes, residues = part.role.value, part.nodes, part.residues
    count = len(residues["type"])
    yield from first_bad(f"{role}.node.element", nodes["element"] > ELEMENTS, nodes["element"], "is no element")
    yield from _names(f"{role}.node.name", nodes["name"])
    yield from _names(f"{role}.residue.name", residues["name"])
    yield from first_bad(f"{role}.node.residue", nodes["residue"] >= count, nodes["residue"], f"of {count} residues")
    yield from first_bad(f"{role}.node.residue", falls(nodes["residue"]), nodes["residue"], "is out of order")
    yield from first_bad(
        f"{role}.residue.type", residues["type"] > atom_graph.OTHER_TYPE, residues["type"], "is no type"
    )
    yield from _in_chains(part, residues["chain"], f"{role}.residue")
    if count and residues["chain"].max() < len(part.chains):
        kind_C = np.array([atom_graph.KINDS.index(chain.kind) for chain in part.chains])
        unlike_R = residues["kind"] != kind_C[residues["chain"]]
        yield from first_bad(f"{role}.residue.kind", unlike_R, residues["kind"], "is not that of its chain")
        yield from _rows(part, residues["chain"], residues["type"], f"{role}.residue")


def _names(name: str, text_NX: Array) -> Iterator[str]:
    """Yield the first invalid name: valid ones are letters, then zeros."""
    ends_NX = text_NX == 0
    bad_N = ends_NX[:, 0] | (ends_NX[:, :-1] & ~ends_NX[:, 1:]).any(axis=1)
    yield from first_bad(name, bad_N, text_NX, "is no name")


def _in_chains(part: PartnerGraph, chain_R: Array, name: str) -> Iterator[str]:
    """Yield what is wrong with the chain of each residue."""
    count = len(part.chains)
    yield from first_bad(f"{name}.chain", chain_R >= count, chain_R, f"of {count} chains")
    yield from first_bad(f"{name}.chain", falls(chain_R), chain_R, "is out of order")


def _rows(part: PartnerGraph, chain_R: Array, type_R: Array, name: str) -> Iterator[str]:
    """Yield residues whose row in the joined embeddings is of another chain or letter."""
    is_protein_C = np.array([chain.kind is Kind.PROTEIN for chain in part.chains])
    length_C = np.array([len(chain.sequence) * (chain.kind is Kind.PROTEIN) for chain in part.chains])
    end_C, row_R, own_R = np.cumsum(length_C), part.row_R.astype(np.int64), is_protein_C[chain_R]
    astray_R = (row_R < (end_C - length_C)[chain_R]) | (row_R >= end_C[chain_R])
    astray_R = np.where(own_R, astray_R, row_R != NO_ROW)
    yield from first_bad(f"{name}.row", astray_R, row_R, "is not within the sequence of its chain")
    own = np.flatnonzero(own_R & ~astray_R)
    back = np.zeros(len(row_R), np.bool_)
    back[own[1:]] = np.diff(row_R[own]) <= 0
    yield from first_bad(f"{name}.row", back, row_R, "does not rise")
    letters = np.frombuffer("".join(part.texts).encode("latin-1", "replace"), np.uint8)
    unlike = np.zeros(len(row_R), np.bool_)
    unlike[own] = residue_graph.TYPE_OF_LETTER[letters[row_R[own]]] != type_R[own]
    yield from first_bad(f"{name}.type", unlike, type_R, "is not the letter of the sequence at its row")
    other_R = np.array([chain.kind is Kind.OTHER for chain in part.chains])[chain_R]
    if part.residues:
        yield from first_bad(
            f"{name}.type", other_R & (type_R != atom_graph.OTHER_TYPE), type_R, "is that of no small molecule"
        )


def bound(part: PartnerGraph) -> Iterator[str]:
    """Yield nodes whose place in the bound structure contradicts `labelled`."""
    if "bound" not in part.nodes:
        return
    bound_N3, labelled_N = part.nodes["bound"], part.nodes["labelled"]
    has_N = np.isfinite(bound_N3).all(axis=1)
    odd_N = np.where(labelled_N, ~has_N, ~np.isnan(bound_N3).all(axis=1))
    yield from first_bad(f"{part.role.value}.node.bound", odd_N, bound_N3, "is not what `labelled` says")


def residue_edges(part: PartnerGraph, recipe: Plain | None) -> Iterator[str]:
    """Yield what is wrong with the edges of a residue graph."""
    name, edges_2E = f"{part.role.value}.edge.near", part.edges["near"]
    form = list(_edge_form(name, edges_2E, part.size, own=True))
    yield from form
    if form:
        return
    if not edges_2E.size:
        yield f"{name}: there are none"
        return
    yield from wrong_errors(f"{part.role.value}.edge.{NEAR_PAE}", part.edge_fields)
    pos_N3 = places(part)
    apart_E = edge_lengths(pos_N3, pos_N3, edges_2E)
    if apart_E.min() < neighbours.COINCIDENT - SLACK:
        yield f"{name}: two nodes are at one place, {apart_E.min():.3f} Å apart"
    if recipe:
        yield from _found_again(name, part, part, edges_2E, recipe["neighbours"], recipe["radius"])


def wrong_errors(name: str, fields: Mapping[str, Array]) -> Iterator[str]:
    """Yield predicted aligned errors that are none; where no file says them they are NaN."""
    if NEAR_PAE in fields:
        pae_E = fields[NEAR_PAE]
        wrong_E = ~(np.isnan(pae_E) | ((pae_E >= 0) & (pae_E <= LARGEST_ERROR)))
        yield from first_bad(name, wrong_E, pae_E, "is no error in Å")


def _edge_form(name: str, edges_2E: Edges, sources: int, *, own: bool) -> Iterator[str]:
    """Yield edges that end nowhere, occur twice, are out of order, or join a node to itself."""
    if not edges_2E.size:
        return
    beyond_E = edges_2E[0] >= sources
    yield from first_bad(f"{name}.neighbour", beyond_E, edges_2E[0], f"of {sources} nodes")
    if own:
        yield from first_bad(f"{name}.neighbour", edges_2E[0] == edges_2E[1], edges_2E[0], "is the node itself")
    key_E = edges_2E[1] * max(sources, 1) + edges_2E[0]
    if not beyond_E.any():
        back_E = np.append(False, np.diff(key_E) <= 0)
        yield from first_bad(f"{name}.neighbour", back_E, edges_2E[0], "stands twice or is out of order")


def _found_again(
    name: str, source: PartnerGraph, target: PartnerGraph, edges_2E: Edges, nearest: int, radius: float | None
) -> Iterator[str]:
    """Yield edges that do not follow from the coordinates, and those that are missing."""
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
        yield from first_bad(f"{name}.degree", few_N, degree_N, f"and {least} is wanted")
    last_N = np.full(target.size, -np.inf)  # how far the farthest of the nearest is
    if nearest:
        near_2E = found_2E if radius is None else _nearest(source_S3, target_N3, nearest, same=same)
        np.maximum.at(last_N, near_2E[1], edge_lengths(source_S3, target_N3, near_2E))
    reach = -np.inf if radius is None else radius
    for differing_2E, problem in _difference(edges_2E, found_2E, source.size):
        apart_E = edge_lengths(source_S3, target_N3, differing_2E)
        clear_E = (np.abs(apart_E - last_N[differing_2E[1]]) > SLACK) & (np.abs(apart_E - reach) > SLACK)
        for at in np.flatnonzero(clear_E)[:1].tolist():
            more = f" and {int(clear_E.sum()) - 1} more" if clear_E.sum() > 1 else ""
            source_node, node = differing_2E[:, at]
            yield f"{name}: from {source_node} to {node}, {apart_E[at]:.3f} Å apart, {problem}{more}"


def _nearest(source_S3: Floats, target_N3: Floats, nearest: int, *, same: bool) -> Edges:
    if same:
        return neighbours.within(target_N3, nearest)
    return neighbours.between(source_S3, target_N3, nearest)


def _difference(mine_2E: Edges, theirs_2E: Edges, sources: int) -> Iterator[tuple[Edges, str]]:
    """Yield the edges that are only in one set, each group with the problem as text."""
    mine, theirs = (edges_2E[1] * sources + edges_2E[0] for edges_2E in (mine_2E, theirs_2E))
    for keys, counterparts, problem in ((mine, theirs, "should not be there"), (theirs, mine, "is missing")):
        lone = bonds.without(keys, counterparts)
        yield np.stack(np.divmod(lone, max(sources, 1))[::-1]), problem


def atom_edges(part: PartnerGraph, recipe: Plain | None) -> Iterator[str]:
    """Yield what is wrong with the edges and paths of an atom graph."""
    form = [
        problem
        for name, edges_2E in part.edges.items()
        for problem in (
            *_edge_form(f"{part.role.value}.edge.{name}", edges_2E, part.size, own=True),
            *_one_way(f"{part.role.value}.edge.{name}", edges_2E, part.size),
        )
    ]
    yield from form
    if form:
        return
    pos_N3, bond_2E = places(part), part.edges[atom_graph.BOND]
    too_long_E = edge_lengths(pos_N3, pos_N3, bond_2E) > LONGEST + SLACK
    yield from first_bad(
        f"{part.role.value}.edge.bond.neighbour", too_long_E, bond_2E[0], f"is more than {LONGEST} Å away"
    )
    yield from _paths(part)
    if recipe and recipe["atom_radius"] is not None:
        yield from _near_again(part, recipe["atom_radius"])


def _one_way(name: str, edges_2E: Edges, nodes: int) -> Iterator[str]:
    """Yield edges without the one in the other direction."""
    key_E, back_E = edges_2E[1] * nodes + edges_2E[0], edges_2E[0] * nodes + edges_2E[1]
    lone_E = np.sort(back_E) != key_E
    yield from first_bad(f"{name}.neighbour", lone_E, edges_2E[0], "has no edge the other way")


def _paths(part: PartnerGraph) -> Iterator[str]:
    """Yield kinds of paths and edges, two and three bonds long, that do not follow from the bonds."""
    role, size = part.role.value, part.size
    bond_2E = part.edges[atom_graph.BOND]
    bonds_B2 = bond_2E[:, bond_2E[0] < bond_2E[1]].T
    known = np.empty(0, np.int64)
    kinds = [name for name in bonds.HOPS if name in part.edges]
    for name, path in zip(kinds, bonds.bond_paths(bonds_B2, size, len(kinds)), strict=True):
        keys = bonds.without(bonds.pair_keys(path, size), known)
        known = np.sort(np.concatenate([known, keys]))
        if name != atom_graph.BOND and not np.array_equal(part.paths[name], path):
            yield f"{role}.path.{name} does not follow from the bonds: {len(part.paths[name])} paths, not {len(path)}"
        if not np.array_equal(part.edges[name], bonds.both_ways(keys, size)):
            yield f"{role}.edge.{name} does not follow from the bonds: {part.edges[name].shape[1]}, not {2 * len(keys)}"


def _near_again(part: PartnerGraph, radius: float) -> Iterator[str]:
    """Yield pairs within the radius that are missing, and those that should not be there."""
    name, pos_N3, size = f"{part.role.value}.edge.near", in_file(part), part.size
    bonded = [edges_2E for kind, edges_2E in part.edges.items() if kind != "near"]
    bonded_E = np.sort(np.concatenate([edges_2E[1] * size + edges_2E[0] for edges_2E in bonded]))
    found_2E = neighbours.within(pos_N3, radius=radius)
    keys = bonds.without(found_2E[1] * size + found_2E[0], bonded_E)
    found_2E = np.stack(np.divmod(keys, size)[::-1])
    if np.array_equal(part.edges["near"], found_2E):
        return
    for differing_2E, problem in _difference(part.edges["near"], found_2E, size):
        apart_E = edge_lengths(pos_N3, pos_N3, differing_2E)
        is_bonded_E = np.isin(differing_2E[1] * size + differing_2E[0], bonded_E)
        for at in np.flatnonzero(is_bonded_E | (np.abs(apart_E - radius) > SLACK))[:1].tolist():
            source_node, node = differing_2E[:, at]
            yield f"{name}: from {source_node} to {node}, {apart_E[at]:.3f} Å apart, {problem}"


def cross(graph: ItemGraph, recipe: Plain | None) -> Iterator[str]:
    """Yield what is wrong with the edges between partners."""
    if "near" not in graph.cross:
        return
    if len(graph.parts) < 2:
        yield "cross.near: there is no other partner"
        return
    receptor, ligand = graph.parts[:2]
    form = list(_edge_form("cross.near", graph.cross["near"], ligand.size, own=False))
    yield from form
    yield from wrong_errors(f"cross.{NEAR_PAE}", graph.cross_fields)
    if recipe and not form:
        nearest, radius = recipe["cross_neighbours"], recipe["cross_radius"]
        yield from _found_again("cross.near", ligand, receptor, graph.cross["near"], nearest, radius)
