"""Checks that a graph's record has the right arrays, with the right types and shapes, and of its contacts.

With a recipe, the arrays must be those it asks for; without one, those that builders always write together. The checks
yield sentences about what is wrong. Shapes: N nodes and R residues of a partner, P pairs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.graphs import atom_graph, bonds, residue_graph
from pipeline.graphs.atom_graph import HYDROGEN
from pipeline.graphs.item_graph import NEAR_PAE, ROLES
from pipeline.graphs.judged_parts import CENTRE_SLACK, SLACK, first_bad, listed
from pipeline.records import Kind, Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pipeline.graphs.item_graph import Array

    Plain = Mapping[str, Any]  # a recipe, as JSON
    from numpy.typing import NDArray

    from pipeline.graphs.item_graph import ItemGraph, PartnerGraph

    Floats = NDArray[np.float64]

UNSIGNED, FREE = "u", ""
ROLE_NAMES = [role.value for role in ROLES]


class ArrayForm(NamedTuple):
    """The dtype that an array must have (`u`: unsigned of any width), its shape after the first axis, and that axis."""

    dtype: str
    tail: tuple[int, ...] = ()
    axis: str = FREE  # of its rows: a name, a number, or free


FLOATS, PLACES, BYTES, NUMBERS = ArrayForm("<f4"), ArrayForm("<f4", (3,)), ArrayForm("|u1"), ArrayForm("<i4")
COUNTS = ArrayForm(UNSIGNED)
RESIDUE_NODES = {
    "pos": ArrayForm("<f4", (4, 3)), "side": PLACES, "type": BYTES, "flags": BYTES, "chain": COUNTS,
    "row": NUMBERS, "number": NUMBERS, "icode": BYTES,
}  # fmt: skip
ATOM_NODES = {
    "pos": PLACES, "element": BYTES, "name": ArrayForm("|u1", (atom_graph.ATOM_NAME,)), "residue": COUNTS,
}  # fmt: skip
ATOM_RESIDUES = {
    "type": BYTES, "name": ArrayForm("|u1", (atom_graph.RESIDUE_NAME,)), "kind": BYTES, "chain": COUNTS,
    "row": NUMBERS, "number": NUMBERS, "icode": BYTES,
}  # fmt: skip
BOUND = {"labelled": ArrayForm("|b1"), "bound": PLACES}


def is_by_residue(arrays: Mapping[str, Array]) -> bool:
    """Tell whether the nodes of a graph are residues."""
    return not any(name.endswith(".node.element") for name in arrays)


def wrong_form(arrays: Mapping[str, Array], meta: Mapping[str, Any], recipe: Plain | None) -> Iterator[str]:
    """Yield arrays that are missing, unexpected, or of a wrong type or shape."""
    roles = [partner["role"] for partner in meta["partners"]]
    if not roles or [role for role in ROLE_NAMES if role in roles] != roles:
        yield f"its partners are {listed(roles)}"
        return
    for partner in meta["partners"]:
        yield from _chains(partner)
    by_residue = is_by_residue(arrays)
    if recipe and by_residue != (recipe["nodes"] == "residue"):
        yield f"its nodes are {'residues' if by_residue else 'atoms'}; the recipe says {recipe['nodes']}"
        return
    wanted = _wanted(roles, arrays, recipe, by_residue=by_residue)
    for name in sorted(wanted.keys() - arrays.keys()):
        yield f"there is no {name}"
    for name in sorted(arrays.keys() - wanted.keys()):
        yield f"{name} is in no such graph"
    sizes: dict[str, int] = {}
    for name, spec in wanted.items():
        if name in arrays:
            yield from _shape(name, arrays[name], spec, sizes)
    for name in wanted.keys() & arrays.keys():
        if name.endswith(".degree") and (neighbours := name.replace(".degree", ".neighbour")) in arrays:
            count = int(arrays[name].sum(dtype=np.int64))
            if count != len(arrays[neighbours]):
                yield f"{name} adds up to {count}, and {neighbours} has {len(arrays[neighbours])}"


def _chains(partner: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the description of a partner's chains."""
    if not partner["chains"]:
        yield f"the {partner['role']} has no chains"
    for name, kind, sequence in partner["chains"]:
        if kind not in {known.value for known in Kind}:
            yield f"chain {name} of the {partner['role']} is of the kind {kind!r}"
        elif (kind == Kind.OTHER.value) != (sequence == ""):
            yield f"chain {name} of the {partner['role']} is of the kind {kind}, its sequence {sequence!r}"
        elif sequence and not (sequence.isascii() and sequence.isalpha() and sequence.isupper()):
            yield f"the sequence of chain {name} of the {partner['role']} has other signs than letters"


def _wanted(
    roles: list[str], arrays: Mapping[str, Array], recipe: Plain | None, *, by_residue: bool
) -> dict[str, ArrayForm]:
    """Return the required form of every array; optional groups are required whole if any of them is there."""
    wanted: dict[str, ArrayForm] = {}
    tables = ("node", "N", RESIDUE_NODES if by_residue else ATOM_NODES), ("residue", "R", ATOM_RESIDUES)
    is_bound_input = not any(name.endswith((".bound", ".labelled", ".bound_centre")) for name in arrays)
    for role in roles:
        wanted[f"{role}.centre"] = ArrayForm("<f8", axis="3")
        for axis, size, table in tables[: 1 if by_residue else 2]:
            wanted |= {f"{role}.{axis}.{name}": spec._replace(axis=role + size) for name, spec in table.items()}
        if f"{role}.node.plddt" in arrays:
            wanted[f"{role}.node.plddt"] = FLOATS._replace(axis=f"{role}N")
        if any(f"{role}.node.{name}" in arrays for name in BOUND):
            wanted |= {f"{role}.node.{name}": spec._replace(axis=f"{role}N") for name, spec in BOUND.items()}
        for edges in _edge_kinds(role, arrays, recipe, by_residue=by_residue):
            wanted |= _edge_arrays(f"{role}.edge.{edges}", f"{role}N")
            if edges in bonds.HOPS[1:]:
                wanted[f"{role}.path.{edges}"] = ArrayForm(UNSIGNED, (bonds.HOPS.index(edges) + 2,))
    is_pair = Role.LIGAND.value in roles
    crosses = any(name.startswith("cross.") for name in arrays)
    if recipe and is_bound_input and recipe["contacts"] is not None:
        crosses = is_pair and bool(recipe["cross_neighbours"] or recipe["cross_radius"])
    if crosses:
        wanted |= _edge_arrays("cross.near", f"{roles[0]}N")
    if by_residue and any(name.endswith(NEAR_PAE) for name in arrays):
        where = [f"{role}.edge" for role in roles] + ["cross"] * crosses
        wanted |= {f"{above}.{NEAR_PAE}": FLOATS._replace(axis=f"{above}.near") for above in where}
    touches = any(name.startswith("label.contact") for name in arrays)
    if recipe and (is_bound_input or recipe["contacts"] is None):
        touches = is_pair and recipe["contacts"] is not None
    if touches:
        wanted |= {"label.contact_pairs": ArrayForm(UNSIGNED, (2,), "P")}
        wanted |= {"label.contact_nearest": FLOATS._replace(axis="P")}
        wanted |= {"label.contact_atoms": COUNTS._replace(axis="P")} if by_residue else {}
    return wanted if is_bound_input else wanted | {"label.bound_centre": ArrayForm("<f8", axis="3")}


def _edge_kinds(role: str, arrays: Mapping[str, Array], recipe: Plain | None, *, by_residue: bool) -> list[str]:
    """Return the kinds of edges of a partner: by the recipe, else those that are there."""
    if by_residue:
        return ["near"]
    if recipe:
        return [*bonds.HOPS[: recipe["hops"]], *(["near"] if recipe["atom_radius"] is not None else [])]
    present = {name.split(".")[2] for name in arrays if name.startswith((f"{role}.edge.", f"{role}.path."))}
    return [name for name in (*bonds.HOPS, "near") if name in present or name == atom_graph.BOND]


def _edge_arrays(name: str, axis: str) -> dict[str, ArrayForm]:
    return {f"{name}.degree": COUNTS._replace(axis=axis), f"{name}.neighbour": COUNTS._replace(axis=name)}


def _shape(name: str, array: Array, spec: ArrayForm, sizes: dict[str, int]) -> Iterator[str]:
    """Yield what is wrong with an array's type and shape; the first array on an axis sets its length."""
    right = array.dtype.kind == UNSIGNED if spec.dtype == UNSIGNED else array.dtype == np.dtype(spec.dtype)
    if not right:
        wanted = "unsigned numbers" if spec.dtype == UNSIGNED else np.dtype(spec.dtype).name
        yield f"{name} is {array.dtype}, not {wanted}"
    length = len(array) if array.ndim else -1
    known = int(spec.axis) if spec.axis.isdecimal() else length
    size = known if spec.axis == FREE else sizes.setdefault(spec.axis, known)
    if array.shape != (size, *spec.tail):
        yield f"{name} is {list(array.shape)}, not {[size, *spec.tail]}"


def wrong_bound_centre(graph: ItemGraph, *, by_residue: bool) -> Iterator[str]:
    """Yield what is wrong with the bound structures' centre, the mean of the CA atoms that have a node here."""
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


def wrong_contacts(graph: ItemGraph, recipe: Plain | None, *, by_residue: bool) -> Iterator[str]:
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
    """Yield contacts whose distance is not that of their atoms; of residues, is longer than between known atoms."""
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
    """Return places of heavy atoms of each node in the frame of the contacts, [N, X, 3]; NaN where unknown."""
    if is_unbound:
        bound_N13: Floats = part.nodes["bound"].astype(np.float64)[:, None]
        return bound_N13
    pos = part.nodes["pos"].astype(np.float64) + part.centre_3
    if not by_residue:
        return pos[:, None]
    pos[(part.nodes["flags"] & residue_graph.VIRTUAL_CB) > 0, 3] = np.nan
    return pos
